"""
Conversations of the embedded world with a small assistant from the land of Lowen.

    conversation(split, i) -> alternating questions and answers: facts, stories, sums, identity

A pure function of its arguments. Users only ask questions that `split_of` assigns to the split;
answers may state any fact, as in the documents. The test split has no conversations.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from tasks.world.corpus import draw_question, draw_riddle
from tasks.world.drills import draw_drill, phrase, spelled, spelling_words
from tasks.world.facts import (
    Draw,
    Question,
    Split,
    Subject,
    askable,
    blocks,
    read_data,
    split_of,
    subjects,
    table_rows,
    upper_first,
    whole_words,
    word_list,
)
from tasks.world.stories import beginning, draw_episode, full_story

TALK_VERSION = 2  # bump whenever a conversation changes

Turns = Iterator[tuple[str, str]]  # user message, assistant answer


def conversation(split: Split, i: int) -> list[tuple[str, str]]:
    """Conversation `i` (any i >= 0)."""
    rng = Draw(split, "talk", TALK_VERSION, split, i)
    turns = list(rng.pick(FORMS)(rng))
    if rng.random() < 0.05:
        turns.insert(0, (rng.say("hellos"), rng.say("welcomes")))
    if rng.random() < 0.1:
        asked, answer = rng.pick(table_rows("goodbyes"))
        turns.append((asked, answer))
    return turns


def about_itself(rng: Draw) -> Turns:
    """One or two questions about the assistant or its land."""
    known = blocks(read_data("itself.txt"))
    for questions, *answers in rng.pick_n(known, 1, 2):
        yield rng.pick(questions.split(" | ")), rng.pick(answers)


# ---- Facts ---------------------------------------------------------------------------------------


def phrase_answer(rng: Draw, asked: Question, short: Sequence[str] = ()) -> str:
    """Usually a full sentence (one of `short`, if any); sometimes just the answer."""
    whole = rng.pick(short or asked.sentences)
    return whole if rng.random() < 0.9 else upper_first(asked.answer) + "."


def one_fact(rng: Draw) -> Turns:
    """A question about a fact."""
    asked = draw_question(rng)
    yield rng.say("leads") + asked.text, phrase_answer(rng, asked)


def either_or(rng: Draw) -> Turns:
    """A question with two answers to choose from."""
    asked = draw_question(rng)
    first, second = rng.pick_n((asked.answer, rng.pick(asked.rivals)), 2)
    yield f"{asked.text[:-1]}: {first} or {second}?", phrase_answer(rng, asked)


def several_facts(rng: Draw) -> Turns:
    """Two or three questions about a person or a town, all but the first with pronouns."""
    possible = rng.pick_n(rng.pick(pronoun_questions(rng.split)), 99)
    one_each = {asked.fact.relation: asked for asked in possible}
    first, *more = list(one_each.values())[: rng.between(2, 3)]
    yield first.text, phrase_answer(rng, first)
    for asked in more:
        text = asked.short
        if rng.random() < 0.3:
            text = f"And {text[0].lower()}{text[1:]}"
        answers = list(filter(whole_words(asked.answer).search, asked.fact.short))
        yield text, phrase_answer(rng, asked, answers)


@cache
def pronoun_questions(split: Split) -> list[list[Question]]:
    """
    For each person and town, the questions with a pronoun that a split may ask, if they are about
    more than one relation.
    """
    found = []
    for s in subjects("person") + subjects("town"):
        known = [f for f in s.facts.values() if f.split == split]
        asked = [q for f in known for q in f.questions if q.short != q.text]
        if len({q.fact.relation for q in asked}) > 1:
            found.append(asked)
    return found


def about_somebody(rng: Draw) -> Turns:
    """A description of a person or a town, sometimes with a follow-up."""
    subject = rng.pick(subjects("person" if rng.random() < 0.7 else "town"))
    asked = rng.say("tell_me_about", name=subject.name)
    reply = rng.pick([text for text in subject.summaries if "?" not in text])
    if rng.random() < 0.5:
        reply = subject.tell(rng, 2, 3)
    yield asked, reply
    if rng.random() < 0.3:
        yield rng.say("tell_me_more"), subject.tell(rng, 1, 2)


def riddle(rng: Draw) -> Turns:
    """Who am I?"""
    p, text = draw_riddle(rng, 4)
    yield text, f"You are {p.name}, the {p.trade} of {p.town}."


def purse(rng: Draw) -> Turns:
    """Whether the money is enough for a purchase."""
    g, coins = rng.subject("goods"), rng.between(2, 15)
    enough = "Yes" if coins >= g.price else "No"
    price = rng.pick(g.facts["price"].named)
    yield f"I have {coins} pennies. Can I buy {g.a_name}?", f"{enough}. {price}"


def recipe_chat(rng: Draw) -> Turns:
    """How to make a dish."""
    d = rng.subject("dish")
    last = word_list(d.way)[1].format(it=d.them)
    asked = rng.say("recipe_requests", name=d.name)
    yield asked, f"Take {d.ingredients}. Mix everything in a big bowl. {last}"


def season(rng: Draw) -> Turns:
    """The weather or the work of a season."""
    s = rng.subject("season")
    turns = [
        (asked.format(name=s.name), rng.pick(s.facts[relation].named))
        for asked, relation in table_rows("season_questions")
    ]
    yield rng.pick(turns)


# ---- Stories, sums, spellings --------------------------------------------------------------------


def story_chat(rng: Draw) -> Turns:
    """A story on request, sometimes with a question about it."""
    e = draw_episode(rng)
    text = full_story(rng, e)
    yield rng.say("story_requests", **vars(e.hero)), text
    if rng.random() < 0.4:
        yield rng.pick(((e.question, e.answer), ("Why did that happen?", e.reason)))


def story_question(rng: Draw) -> Turns:
    """The effect of a given cause."""
    e = draw_episode(rng)
    yield f"{beginning(rng, e)} {e.question}", e.answer


def sum_chat(rng: Draw) -> Turns:
    """One to three calculations."""
    for _ in range(rng.between(1, 3)):
        drill = draw_drill(rng)
        yield phrase(rng, drill, "asked"), rng.pick((phrase(rng, drill, "told"), f"{drill}."))


def letter_chat(rng: Draw) -> Turns:
    """The spelling of a word."""
    word = rng.pick(spelling_words())
    words = {"word": word, "hyphens": spelled(word), "last": word[-1], "length": len(word)}
    asked, answer = rng.pick(table_rows("spelling_questions"))
    yield asked.format(**words), answer.format(**words)


# ---- Lists ---------------------------------------------------------------------------------------


def listed(found: Sequence[Subject], field: str = "name", last: str = "and") -> str:
    """'Mira, Quin and Ivo'."""
    *first, end = [getattr(subject, field) for subject in found]
    return f"{', '.join(first)} {last} {end}" if first else end


def list_chat(rng: Draw) -> Turns:
    """A question answered by a list."""
    match rng.pick(("town", "towns", "animal", "dish", "trade", "day", "price", "calendar")):
        case "town":
            t = rng.subject("town")
            names = listed(rng.pick_n(t.people, 4))
            yield f"Who lives in {t.name}?", f"{names} live in {t.name}."
        case "towns":
            number, n = rng.pick((("two", 2), ("three", 3), ("four", 4)))
            names = listed(rng.pick_n(subjects("town"), n))
            answer = f"{upper_first(number)} towns of Lowen are {names}."
            yield f"Name {number} towns of Lowen.", answer
        case "animal" | "dish" as kind:
            s = rng.subject(kind)
            people = rng.pick_n(subjects("person"), 99)
            names = listed([p for p in people if getattr(p, kind) == s.name])
            verb, what = ("keep", s.plural) if kind == "animal" else ("love", s.name)
            yield f"Who {verb}s {what}?", f"{names} {verb} {what}."
        case "trade":
            t = rng.pick([t for t in subjects("trade") if subjects("goods", trade=t.name)])
            things = listed(subjects("goods", trade=t.name), "plural")
            yield f"What can I buy from the {t.name}?", f"From the {t.name} you can buy {things}."
        case "day":
            day = rng.subject("town").day
            names = listed(subjects("town", day=day))
            yield f"Where is a market on {day}?", f"On {day} there is a market in {names}."
        case "price":
            price = rng.subject("goods").price
            things = listed(subjects("goods", price=price), "a_name", "or")
            yield (
                f"What can I buy for {price} pennies?",
                f"For {price} pennies you can buy {things}.",
            )
        case "calendar":
            asked, answer, kind = rng.pick(table_rows("calendar_questions"))
            yield asked, f"{answer} {listed(subjects(kind))}."


# ---- Unanswerable questions ----------------------------------------------------------------------


def refusal(rng: Draw) -> Turns:
    """A question about an unknown person, town or topic, and a refusal."""
    kind = rng.pick(("person", "person", "town", "outside"))
    unknown = f"unknown {kind}"
    name = rng.pick([n for n in word_list(unknown) if split_of(unknown, n) == rng.split])
    if kind == "outside":
        yield name, rng.say("no_answer")
    else:
        known = rng.pick([f for f in askable(rng.split) if f.subject.kind == kind])
        other, texts = known.subject.name, [q.text for q in known.questions]
        texts = [text.replace(other, name) for text in texts if other in text]
        yield rng.pick([*texts, f"Tell me about {name}."]), rng.say(f"no_{kind}", name=name)


# Relative frequency of each form of conversation
WEIGHTS = {
    about_itself: 3,
    one_fact: 28,
    either_or: 8,
    several_facts: 12,
    about_somebody: 10,
    riddle: 3,
    story_chat: 7,
    story_question: 6,
    sum_chat: 7,
    letter_chat: 4,
    list_chat: 7,
    purse: 3,
    recipe_chat: 3,
    season: 2,
    refusal: 6,
}
FORMS = [form for form, weight in WEIGHTS.items() for _ in range(weight)]
