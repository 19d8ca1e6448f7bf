"""
The conversations of the embedded world: what a small helper of the land of Lowen is asked.

    conversation(split, i) -> questions and answers in turn, about facts, stories, sums, itself

A pure function of its arguments. A conversation asks only what `split_of` gives to its split; what
it tells may be any fact, as in the documents. There is no conversation of the test split.
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
    Question,
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
    sample,
    say,
    seasons,
    split_of,
    summaries,
    tell_some,
    towns,
    trades,
    upper_first,
)
from tasks.world.questions import Asked, bare, sentences, whole_words
from tasks.world.stories import ending, episodes, opening, retelling
from tasks.world.words import blocks, read, table, word_list

TALK_VERSION = 1  # goes up whenever any conversation changes

Turn = tuple[str, str]  # what the user says, what the helper answers


def conversation(split: Literal["train", "val"], i: int) -> list[Turn]:
    """
    Conversation number i of an endless supply.

    Raises ValueError for another split: nothing that is held out for tests is ever talked about.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split is 'train' or 'val', not {split!r}")
    rng = Random(f"{LAND}-talk-{TALK_VERSION}-{split}-{i}")
    forms = [form for form, weight in FORMS.items() for _ in range(weight)]
    turns = pick(rng, forms)(rng, split)
    if rng.random() < 0.05:
        turns = [(say(rng, "hellos"), say(rng, "welcomes")), *turns]
    if rng.random() < 0.1:
        asked, answer = pick(rng, table("goodbyes"))
        turns = [*turns, (asked, answer.format(land=LAND))]
    return turns


# ------------------------------------------------------------------------------------------------
# Itself


def about_itself(rng: Random, split: Split) -> list[Turn]:
    """One or two questions about the helper or its land."""
    found = []
    known = blocks(read("itself.txt").format(land=LAND))
    for questions, *answers in sample(rng, known, between(rng, 1, 2)):
        found.append((pick(rng, questions.split(" | ")), pick(rng, answers)))
    return found


# ------------------------------------------------------------------------------------------------
# Facts


def answer(rng: Random, known: Fact, asked: Question, short: Sequence[str] = ()) -> str:
    """Mostly a whole sentence of the fact, one of `short` where there are any; or just a word."""
    whole = pick(rng, short or sentences(known, asked))
    return whole if rng.random() < 0.9 else upper_first(asked.answer) + "."


def one_fact(rng: Random, split: Split) -> list[Turn]:
    """A question about a fact."""
    known = pick(rng, askable(split))
    asked = pick(rng, known.questions)
    return [(say(rng, "leads") + asked.text, answer(rng, known, asked))]


def either_or(rng: Random, split: Split) -> list[Turn]:
    """A question with two possible answers to choose from."""
    known = pick(rng, askable(split))
    asked = pick(rng, known.questions)
    rival = pick(rng, Asked(known, asked).rivals)
    first, second = sample(rng, (asked.answer, rival), 2)
    return [(f"{asked.text[:-1]}: {first} or {second}?", answer(rng, known, asked))]


def several_facts(rng: Random, split: Split) -> list[Turn]:
    """Two or three questions about a person or a town, all but the first with pronouns."""
    name = pick(rng, talked_about(split))
    possible = sample(rng, pronoun_questions(split, name), 99)
    one_each = {known.relation: (known, asked, short) for known, asked, short in possible}
    (known, asked, _), *more = list(one_each.values())[: between(rng, 2, 3)]
    found = [(asked.text, answer(rng, known, asked))]
    for known, asked, short in more:
        text = f"And {short[0].lower()}{short[1:]}" if rng.random() < 0.3 else short
        holds = whole_words(bare(asked.answer)).search
        found.append(
            (text, answer(rng, known, asked, [told for told in known.short if holds(told)]))
        )
    return found


@cache
def talked_about(split: Split) -> tuple[str, ...]:
    """The people and towns that can be asked about twice."""
    names = [p.name for p in people()] + [t.name for t in towns()]
    relations = {n: {f.relation for f, _, _ in pronoun_questions(split, n)} for n in names}
    return tuple(name for name in names if len(relations[name]) > 1)


@cache
def pronoun_questions(split: Split, name: str) -> tuple[tuple[Fact, Question, str], ...]:
    """What a split may ask about a person or a town with a pronoun: fact, question, its text."""
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


def about_somebody(rng: Random, split: Split) -> list[Turn]:
    """What there is to tell about a person or a town, and more of it."""
    kind = "person" if rng.random() < 0.7 else "town"
    name = pick(rng, people() if kind == "person" else towns()).name
    asked = pick(rng, ("Tell me about {}.", "What do you know about {}?", "Tell me more about {}."))
    told = pick(rng, [text for text in summaries(kind, name) if "?" not in text])
    if rng.random() < 0.5:
        told = tell_some(rng, kind, name, 2, 3)
    turns = [(asked.format(name), told)]
    if rng.random() < 0.3:
        more = pick(rng, ("What else do you know?", "Tell me more.", "And what else?"))
        turns.append((more, tell_some(rng, kind, name, 1, 2)))
    return turns


def riddle(rng: Random, split: Split) -> list[Turn]:
    """Who am I?"""
    p = pick(rng, riddle_people(split))
    own = [f for f in facts_about("person", p.name) if f.relation != "trade"]
    return [
        (
            f"{first_person(rng, own, 3, 4)} Who am I?",
            f"You are {p.name}, the {p.trade} of {p.town}.",
        )
    ]


# ------------------------------------------------------------------------------------------------
# Stories, sums, lists


def story(rng: Random, split: Split) -> list[Turn]:
    """A story on request, at times with a question about it."""
    e = pick(rng, episodes(split))
    about = (
        "Tell me a story.",
        "Tell me a short story, please.",
        f"Tell me a story about {e.hero.name}.",
        f"Do you know a story from {e.hero.town}?",
        f"What happened to {e.hero.name}?",
    )
    told = f"{opening(rng, e.hero)} {retelling(rng, e)} {ending(rng, e)}"
    turns = [(pick(rng, about), told)]
    if rng.random() < 0.4:
        turns.append(pick(rng, ((e.question, e.answer), ("Why did that happen?", e.reason))))
    return turns


def story_question(rng: Random, split: Split) -> list[Turn]:
    """What comes of a cause."""
    e = pick(rng, episodes(split))
    return [(f"{pick(rng, e.settings)} {pick(rng, e.causes)} {e.question}", e.answer)]


def sums(rng: Random, split: Split) -> list[Turn]:
    """One to three calculations."""
    found = []
    for _ in range(between(rng, 1, 3)):
        drill = draw_drill(rng, split)
        found.append((drill.asked(rng), pick(rng, (drill.told(rng), drill.line + "."))))
    return found


def letters(rng: Random, split: Split) -> list[Turn]:
    """How a word is written."""
    word = pick(rng, spelling_words())
    asked, answer = pick(rng, table("spelling_questions"))
    words = {"word": word, "hyphens": spelled(word), "length": len(word)}
    return [(asked.format(**words), answer.format(**words, first=word[0], last=word[-1]))]


def listed(words: Sequence[str], last: str = "and") -> str:
    """'plums, flour and honey'."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]


def lists(rng: Random, split: Split) -> list[Turn]:
    """Several things that have something in common."""
    return [pick(rng, LISTS)(rng)]


def dwellers(rng: Random) -> Turn:
    t = pick(rng, towns())
    names = [p.name for p in sample(rng, people_of(t.name), 4)]
    return f"Who lives in {t.name}?", f"{listed(names)} live in {t.name}."


def some_towns(rng: Random) -> Turn:
    number, n = pick(rng, (("two", 2), ("three", 3), ("four", 4)))
    names = listed([t.name for t in sample(rng, towns(), n)])
    return f"Name {number} towns of {LAND}.", f"{upper_first(number)} towns of {LAND} are {names}."


def owners(rng: Random) -> Turn:
    a = pick(rng, animals())
    names = listed([p.name for p in sample(rng, people(), 99) if p.animal == a.name])
    return f"Who keeps {a.plural}?", f"{names} keep {a.plural}."


def eaters(rng: Random) -> Turn:
    d = pick(rng, dishes())
    names = listed([p.name for p in sample(rng, people(), 99) if p.food == d.name])
    return f"Who loves {d.name}?", f"{names} love {d.name}."


def offers(rng: Random) -> Turn:
    t = pick(rng, [t for t in trades() if any(g.trade == t.name for g in goods())])
    things = listed([g.plural for g in goods() if g.trade == t.name])
    return f"What can I buy from the {t.name}?", f"From the {t.name} you can buy {things}."


def markets(rng: Random) -> Turn:
    day = pick(rng, towns()).day
    names = listed([t.name for t in towns() if t.day == day])
    return f"Where is a market on {day}?", f"On {day} there is a market in {names}."


def bargains(rng: Random) -> Turn:
    price = pick(rng, goods()).price
    things = listed([an(g.name) for g in goods() if g.price == price], "or")
    return f"What can I buy for {price} pennies?", f"For {price} pennies you can buy {things}."


def the_calendar(rng: Random) -> Turn:
    return pick(
        rng,
        (
            ("Name the days of the week.", f"The days are {listed(word_list('days'))}."),
            ("Name the months of the year.", f"The months are {listed(word_list('months'))}."),
            ("Name the seasons.", f"The seasons are {listed([s.name for s in seasons()])}."),
        ),
    )


LISTS = (dwellers, some_towns, owners, eaters, offers, markets, bargains, the_calendar)


def purse(rng: Random, split: Split) -> list[Turn]:
    """Is the money enough?"""
    g, coins = pick(rng, goods()), between(rng, 2, 15)
    told = pick(rng, fact("goods", g.name, "price").named)
    enough = "Yes" if coins >= g.price else "No"
    return [(f"I have {coins} pennies. Can I buy {an(g.name)}?", f"{enough}. {told}")]


def recipe(rng: Random, split: Split) -> list[Turn]:
    """How a dish is made, at times who loves it."""
    d = pick(rng, dishes())
    it = "it" if d.be == "is" else "them"
    last = {
        "baked": f"Then bake {it} in the hot oven for an hour.",
        "boiled": f"Then boil {it} in a big pot over the fire.",
        "fried": f"Then fry {it} in a hot pan.",
    }[d.way]
    asked = pick(rng, ("How do I make {}?", "How can I cook {}?", "I want to make {}. How?"))
    return [(asked.format(d.name), f"Take {d.ingredients}. Mix everything in a big bowl. {last}")]


def season(rng: Random, split: Split) -> list[Turn]:
    """What a season is like, or what is done in it."""
    s = pick(rng, seasons())
    weather, work = (fact("season", s.name, relation) for relation in ("weather", "work"))
    return [
        pick(
            rng,
            (
                (f"What is {s.name} like in {LAND}?", pick(rng, weather.named)),
                (f"How is the weather in {s.name}?", pick(rng, weather.named)),
                (f"What do people do in {s.name}?", pick(rng, work.named)),
            ),
        )
    ]


# ------------------------------------------------------------------------------------------------
# What nobody in Lowen can know


@cache
def unknown(kind: str, split: Split) -> tuple[str, ...]:
    """The strangers, strange towns or strange questions of a split."""
    lists = {"person": "strangers", "town": "strange_towns", "outside": "strange_questions"}
    return tuple(
        name for name in word_list(lists[kind]) if split_of(f"unknown {kind}", name) == split
    )


def refusal(rng: Random, split: Split) -> list[Turn]:
    """A question about somebody, some town or something unknown, and the honest answer."""
    kind = pick(rng, ("person", "person", "town", "outside"))
    name = pick(rng, unknown(kind, split))
    if kind == "outside":
        return [(name, say(rng, "no_answer"))]
    known = pick(rng, [f for f in askable(split) if f.kind == kind])
    texts = [q.text.replace(known.subject, name) for q in known.questions]
    texts = [text for text in texts if name in text] + [f"Tell me about {name}."]
    return [(pick(rng, texts), say(rng, f"no_{kind}", name=name))]


# How often each form of conversation comes, compared with the others
FORMS: dict[Callable[[Random, Split], list[Turn]], int] = {
    about_itself: 5,
    one_fact: 28,
    either_or: 8,
    several_facts: 12,
    about_somebody: 10,
    riddle: 3,
    story: 7,
    story_question: 6,
    sums: 7,
    letters: 4,
    lists: 7,
    purse: 3,
    recipe: 3,
    season: 2,
    refusal: 6,
}
