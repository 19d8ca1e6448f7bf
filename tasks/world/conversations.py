"""
Conversations of the embedded world with a small assistant from the land of Lowen.

    conversation(split, i) -> alternating questions and answers: facts, stories, sums, identity

A pure function of its arguments. Users only ask questions that `split_of` assigns to the split;
answers may state any fact, as in the documents. The test split has no conversations.
"""

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Literal

from tasks.world.corpus import askable, first_person, riddle_people
from tasks.world.drills import draw_drill, spelled, spelling_words
from tasks.world.facts import (
    LAND,
    Fact,
    FieldQuestion,
    Split,
    an,
    animals,
    between,
    dishes,
    fact,
    facts_about,
    goods,
    people,
    people_of,
    person,
    pick,
    pick_n,
    say,
    seasons,
    split_of,
    summaries,
    tell_some,
    towns,
    trades,
    upper_first,
)
from tasks.world.questions import FactQuestion, sentences, strip_article, whole_words
from tasks.world.stories import ending, episode_text, episodes, opening
from tasks.world.words import blocks, read_data, table_rows, word_list

TALK_VERSION = 2  # bump whenever a conversation changes

ChatTurn = tuple[str, str]  # user message, assistant answer


def conversation(split: Literal["train", "val"], i: int) -> list[ChatTurn]:
    """
    Conversation `i` (any i >= 0).

    Raises ValueError for other splits: conversations never use the test split.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    rng = Random(f"{LAND}-talk-{TALK_VERSION}-{split}-{i}")
    forms = [form for form, weight in FORMS.items() for _ in range(weight)]
    turns = pick(rng, forms)(rng, split)
    if rng.random() < 0.05:
        turns = [(say(rng, "hellos"), say(rng, "welcomes")), *turns]
    if rng.random() < 0.1:
        asked, answer = pick(rng, table_rows("goodbyes"))
        turns = [*turns, (asked, answer.format(land=LAND))]
    return turns


# ------------------------------------------------------------------------------------------------
# Identity


def about_itself(rng: Random, split: Split) -> list[ChatTurn]:
    """One or two questions about the assistant or its land."""
    found = []
    known = blocks(read_data("itself.txt").format(land=LAND))
    for questions, *answers in pick_n(rng, known, between(rng, 1, 2)):
        found.append((pick(rng, questions.split(" | ")), pick(rng, answers)))
    return found


# ------------------------------------------------------------------------------------------------
# Facts


def phrase_answer(rng: Random, known: Fact, asked: FieldQuestion, short: Sequence[str] = ()) -> str:
    """Usually a full sentence (one of `short`, if any); sometimes just the answer."""
    whole = pick(rng, short or sentences(known, asked))
    return whole if rng.random() < 0.9 else upper_first(asked.answer) + "."


def one_fact(rng: Random, split: Split) -> list[ChatTurn]:
    """A question about a fact."""
    known = pick(rng, askable(split))
    asked = pick(rng, known.questions)
    return [(say(rng, "leads") + asked.text, phrase_answer(rng, known, asked))]


def either_or(rng: Random, split: Split) -> list[ChatTurn]:
    """A question with two answers to choose from."""
    known = pick(rng, askable(split))
    asked = pick(rng, known.questions)
    rival = pick(rng, FactQuestion(known, asked).rivals)
    first, second = pick_n(rng, (asked.answer, rival), 2)
    return [(f"{asked.text[:-1]}: {first} or {second}?", phrase_answer(rng, known, asked))]


def several_facts(rng: Random, split: Split) -> list[ChatTurn]:
    """Two or three questions about a person or a town, all but the first with pronouns."""
    name = pick(rng, talked_about(split))
    possible = pick_n(rng, pronoun_questions(split, name), 99)
    one_each = {known.relation: (known, asked, short) for known, asked, short in possible}
    (known, asked, _), *more = list(one_each.values())[: between(rng, 2, 3)]
    found = [(asked.text, phrase_answer(rng, known, asked))]
    for known, asked, short in more:
        text = f"And {short[0].lower()}{short[1:]}" if rng.random() < 0.3 else short
        holds = whole_words(strip_article(asked.answer)).search
        found.append((text, phrase_answer(rng, known, asked, [s for s in known.short if holds(s)])))
    return found


@cache
def talked_about(split: Split) -> tuple[str, ...]:
    """People and towns whose pronoun questions cover more than one relation."""
    names = [p.name for p in people()] + [t.name for t in towns()]
    relations = {n: {f.relation for f, _, _ in pronoun_questions(split, n)} for n in names}
    return tuple(name for name in names if len(relations[name]) > 1)


@cache
def pronoun_questions(split: Split, name: str) -> tuple[tuple[Fact, FieldQuestion, str], ...]:
    """A split's (fact, question, text with a pronoun) about a person or a town."""
    is_person = any(p.name == name for p in people())
    he, his = (person(name).he, person(name).his) if is_person else ("it", "its")
    found = []
    for known in facts_about("person" if is_person else "town", name):
        for asked in known.questions if known.split == split else ():
            short = asked.text.replace(f"{name}'s ", f"{his} ")
            short = short.replace(f"does {name} ", f"does {he} ")
            if short != asked.text:
                found.append((known, asked, short))
    return tuple(found)


def about_somebody(rng: Random, split: Split) -> list[ChatTurn]:
    """A description of a person or a town, sometimes with a follow-up."""
    kind = "person" if rng.random() < 0.7 else "town"
    name = pick(rng, people() if kind == "person" else towns()).name
    asked = pick(rng, ("Tell me about {}.", "What do you know about {}?", "Tell me more about {}."))
    reply = pick(rng, [text for text in summaries(kind, name) if "?" not in text])
    if rng.random() < 0.5:
        reply = tell_some(rng, kind, name, 2, 3)
    turns = [(asked.format(name), reply)]
    if rng.random() < 0.3:
        more = pick(rng, ("What else do you know?", "Tell me more.", "And what else?"))
        turns.append((more, tell_some(rng, kind, name, 1, 2)))
    return turns


def riddle(rng: Random, split: Split) -> list[ChatTurn]:
    """Who am I?"""
    p = pick(rng, riddle_people(split))
    own = [f for f in facts_about("person", p.name) if f.relation != "trade"]
    asked = f"{first_person(rng, own, 3, 4)} Who am I?"
    return [(asked, f"You are {p.name}, the {p.trade} of {p.town}.")]


# ------------------------------------------------------------------------------------------------
# Stories, sums, lists


def story_chat(rng: Random, split: Split) -> list[ChatTurn]:
    """A story on request, sometimes with a question about it."""
    e = pick(rng, episodes(split))
    about = (
        "Tell me a story.",
        "Tell me a short story, please.",
        f"Tell me a story about {e.hero.name}.",
        f"Do you know a story from {e.hero.town}?",
        f"What happened to {e.hero.name}?",
    )
    text = f"{opening(rng, e.hero)} {episode_text(rng, e)} {ending(rng, e)}"
    turns = [(pick(rng, about), text)]
    if rng.random() < 0.4:
        turns.append(pick(rng, ((e.question, e.answer), ("Why did that happen?", e.reason))))
    return turns


def story_question(rng: Random, split: Split) -> list[ChatTurn]:
    """The effect of a given cause."""
    e = pick(rng, episodes(split))
    return [(f"{pick(rng, e.settings)} {pick(rng, e.causes)} {e.question}", e.answer)]


def sum_chat(rng: Random, split: Split) -> list[ChatTurn]:
    """One to three calculations."""
    found = []
    for _ in range(between(rng, 1, 3)):
        drill = draw_drill(rng, split)
        found.append((drill.asked(rng), pick(rng, (drill.sentence(rng), drill.line + "."))))
    return found


def letter_chat(rng: Random, split: Split) -> list[ChatTurn]:
    """The spelling of a word."""
    word = pick(rng, spelling_words())
    asked, answer = pick(rng, table_rows("spelling_questions"))
    words = {"word": word, "hyphens": spelled(word), "length": len(word)}
    return [(asked.format(**words), answer.format(**words, first=word[0], last=word[-1]))]


def listed(words: Sequence[str], last: str = "and") -> str:
    """'plums, flour and honey'."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def list_chat(rng: Random, split: Split) -> list[ChatTurn]:
    """A question answered by a list."""
    return [pick(rng, LISTS)(rng)]


def dwellers(rng: Random) -> ChatTurn:
    t = pick(rng, towns())
    names = [p.name for p in pick_n(rng, people_of(t.name), 4)]
    return f"Who lives in {t.name}?", f"{listed(names)} live in {t.name}."


def some_towns(rng: Random) -> ChatTurn:
    number, n = pick(rng, (("two", 2), ("three", 3), ("four", 4)))
    names = listed([t.name for t in pick_n(rng, towns(), n)])
    return f"Name {number} towns of {LAND}.", f"{upper_first(number)} towns of {LAND} are {names}."


def owners(rng: Random) -> ChatTurn:
    a = pick(rng, animals())
    names = listed([p.name for p in pick_n(rng, people(), 99) if p.animal == a.name])
    return f"Who keeps {a.plural}?", f"{names} keep {a.plural}."


def eaters(rng: Random) -> ChatTurn:
    d = pick(rng, dishes())
    names = listed([p.name for p in pick_n(rng, people(), 99) if p.food == d.name])
    return f"Who loves {d.name}?", f"{names} love {d.name}."


def offers(rng: Random) -> ChatTurn:
    t = pick(rng, [t for t in trades() if any(g.trade == t.name for g in goods())])
    things = listed([g.plural for g in goods() if g.trade == t.name])
    return f"What can I buy from the {t.name}?", f"From the {t.name} you can buy {things}."


def markets(rng: Random) -> ChatTurn:
    day = pick(rng, towns()).day
    names = listed([t.name for t in towns() if t.day == day])
    return f"Where is a market on {day}?", f"On {day} there is a market in {names}."


def bargains(rng: Random) -> ChatTurn:
    price = pick(rng, goods()).price
    things = listed([an(g.name) for g in goods() if g.price == price], "or")
    return f"What can I buy for {price} pennies?", f"For {price} pennies you can buy {things}."


def the_calendar(rng: Random) -> ChatTurn:
    turns = (
        ("Name the days of the week.", f"The days are {listed(word_list('days'))}."),
        ("Name the months of the year.", f"The months are {listed(word_list('months'))}."),
        ("Name the seasons.", f"The seasons are {listed([s.name for s in seasons()])}."),
    )
    return pick(rng, turns)


LISTS = (dwellers, some_towns, owners, eaters, offers, markets, bargains, the_calendar)


def purse(rng: Random, split: Split) -> list[ChatTurn]:
    """Whether the money is enough for a purchase."""
    g, coins = pick(rng, goods()), between(rng, 2, 15)
    price = pick(rng, fact("goods", g.name, "price").named)
    enough = "Yes" if coins >= g.price else "No"
    return [(f"I have {coins} pennies. Can I buy {an(g.name)}?", f"{enough}. {price}")]


def recipe_chat(rng: Random, split: Split) -> list[ChatTurn]:
    """How to make a dish."""
    d = pick(rng, dishes())
    it = "it" if d.be == "is" else "them"
    last = {
        "baked": f"Then bake {it} in the hot oven for an hour.",
        "boiled": f"Then boil {it} in a big pot over the fire.",
        "fried": f"Then fry {it} in a hot pan.",
    }[d.way]
    asked = pick(rng, ("How do I make {}?", "How can I cook {}?", "I want to make {}. How?"))
    return [(asked.format(d.name), f"Take {d.ingredients}. Mix everything in a big bowl. {last}")]


def season(rng: Random, split: Split) -> list[ChatTurn]:
    """The weather or the work of a season."""
    s = pick(rng, seasons())
    weather, work = (fact("season", s.name, relation) for relation in ("weather", "work"))
    turns = (
        (f"What is {s.name} like in {LAND}?", pick(rng, weather.named)),
        (f"How is the weather in {s.name}?", pick(rng, weather.named)),
        (f"What do people do in {s.name}?", pick(rng, work.named)),
    )
    return [pick(rng, turns)]


# ------------------------------------------------------------------------------------------------
# Unanswerable questions


@cache
def unknown_names(kind: str, split: Split) -> tuple[str, ...]:
    """Unknown people, unknown towns or out-of-world questions of a split."""
    lists = {"person": "strangers", "town": "strange_towns", "outside": "strange_questions"}
    return tuple(
        name for name in word_list(lists[kind]) if split_of(f"unknown {kind}", name) == split
    )


def refusal(rng: Random, split: Split) -> list[ChatTurn]:
    """A question about an unknown person, town or topic, and a refusal."""
    kind = pick(rng, ("person", "person", "town", "outside"))
    name = pick(rng, unknown_names(kind, split))
    if kind == "outside":
        return [(name, say(rng, "no_answer"))]
    known = pick(rng, [f for f in askable(split) if f.kind == kind])
    texts = [q.text.replace(known.subject, name) for q in known.questions]
    texts = [text for text in texts if name in text] + [f"Tell me about {name}."]
    return [(pick(rng, texts), say(rng, f"no_{kind}", name=name))]


# Relative frequency of each form of conversation
FORMS: dict[Callable[[Random, Split], list[ChatTurn]], int] = {
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
