"""
The embedded world as text: unlimited English documents about the land of Lowen.

    documents(seed, shard, split) -> statements and questions, exercises, stories, in many forms

A pure function of its arguments: no network, no state. It lets every stage of the pipeline run
within minutes on a laptop. `split_of` in facts.py determines what a training document may compute,
combine or ask; validation documents use the operands, stories and questions of the val split.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Literal

from tasks.world.drills import counting, draw_drill, letter_question, problems, spelling, sum_text
from tasks.world.facts import (
    LAND,
    Fact,
    FieldQuestion,
    Person,
    Split,
    animals,
    between,
    dishes,
    everyday_things,
    fact,
    facts,
    facts_about,
    goods,
    opposites,
    people,
    people_of,
    person,
    pick,
    pick_n,
    say,
    seasons,
    split_of,
    subjects,
    summaries,
    tell_some,
    telling,
    titled,
    towns,
    trades,
    upper_first,
)
from tasks.world.stories import (
    adventures,
    episode_text,
    episodes,
    several_stories,
    story,
    story_questions,
)
from tasks.world.words import word_list

WORLD_VERSION = 2  # bump whenever a document changes
DOCUMENTS_PER_SHARD = 2500  # 1.2 MB of text


def documents(seed: int, shard: int, split: Literal["train", "val"]) -> Iterator[str]:
    """
    Iterator over the DOCUMENTS_PER_SHARD documents of one shard; deterministic.

    Raises ValueError for other splits: documents never use the test split.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    rng = Random(f"{LAND}-{WORLD_VERSION}-{seed}-{split}-{shard}")
    forms = [form for form, weight in FORMS.items() for _ in range(weight)]
    return (pick(rng, forms)(rng, split) for _ in range(DOCUMENTS_PER_SHARD))


# ------------------------------------------------------------------------------------------------
# Statements: people


def portrait(rng: Random, split: Split) -> str:
    """One person, often followed by a friend and people of the same town."""
    p = pick(rng, people())
    others = [person(p.friend), *pick_n(rng, people_of(p.town), 2)]
    parts = [
        f"{introduction(rng, 'person', q.name)}{tell_some(rng, 'person', q.name, 3, 7)}"
        for q in [p, *others[: between(rng, 0, 3)]]
    ]
    title = pick(rng, (p.name, f"{p.name} of {p.town}", f"About {p.name}"))
    return titled(rng, title, "\n\n".join(parts))


def introduction(rng: Random, kind: Literal["person", "town"], subject: str) -> str:
    """Half of the time a summary of the subject with a trailing space, else an empty string."""
    return pick(rng, summaries(kind, subject)) + " " if rng.random() < 0.5 else ""


def two_people(rng: Random, split: Split) -> str:
    """Two people, compared point by point."""
    a, b = pick_n(rng, people(), 2)
    mine, yours = facts_about("person", a.name), facts_about("person", b.name)
    pairs = pick_n(rng, tuple(zip(mine, yours, strict=True)), between(rng, 3, 7))
    lines = [f"{pick(rng, x.named)} {pick(rng, y.named)}" for x, y in pairs]
    return titled(rng, f"{a.name} and {b.name}", "\n".join(lines))


def letter(rng: Random, split: Split) -> str:
    """A letter to a friend: the weather, news, sometimes a story."""
    p = pick(rng, people())
    own = [f for f in facts_about("person", p.name) if f.relation != "friend"]  # the reader
    news = first_person(rng, own, 3, 6)
    parts = [f"{say(rng, 'greetings')} {weather(rng, p.town)} {news}"]
    if rng.random() < 0.5:
        parts.append("Now hear what happened. " + episode_text(rng, pick(rng, episodes(split))))
    if rng.random() < 0.6:
        parts.append(f"You should come to {p.town}. {tell_some(rng, 'town', p.town, 1, 3)}")
    body = "\n\n".join(parts)
    return f"Dear {p.friend},\n\n{body}\n\n{say(rng, 'farewells')}\n{p.name}"


def weather(rng: Random, town: str) -> str:
    """A sentence about the weather of a random season."""
    season = pick(rng, seasons())
    return f"It is {season.name} in {town}: {season.weather}."


def first_person(rng: Random, known: Sequence[Fact], low: int, high: int) -> str:
    """Between `low` and `high` facts in the first person."""
    return " ".join(pick(rng, f.own) for f in pick_n(rng, known, between(rng, low, high)))


def diary(rng: Random, split: Split) -> str:
    """One to three days of a diary."""
    p = pick(rng, people())
    parts = [f"Diary of {p.name}"]
    for _ in range(between(rng, 1, 3)):
        season = pick(rng, seasons())
        month = pick(rng, season.months.replace(" and ", ", ").split(", "))
        event = pick(rng, word_list("events")).format(**p.words, goods=pick(rng, goods()).name)
        parts.append(
            f"{say(rng, 'days')}, in {month}\nIt is {season.name}: {season.weather}. "
            f"{first_person(rng, facts_about('person', p.name), 2, 4)} {event}"
        )
    return "\n\n".join(parts)


def riddle_text(rng: Random, split: Split) -> str:
    """Who am I?"""
    parts = []
    for _ in range(between(rng, 1, 4)):
        p = pick(rng, riddle_people(split))
        own = [f for f in facts_about("person", p.name) if f.relation != "trade"]
        parts.append(
            f"{first_person(rng, own, 3, 5)} Who am I?\nI am {p.name}, the {p.trade} of {p.town}."
        )
    return "\n\n".join(parts)


@cache
def riddle_people(split: Split) -> tuple[Person, ...]:
    """The people that riddles of a split may be about."""
    return tuple(p for p in people() if split_of("riddle", p.name) == split)


# ------------------------------------------------------------------------------------------------
# Statements: towns and the calendar


def town_entry(rng: Random, split: Split) -> str:
    """A town, some of its people, and sometimes the next town on the road."""
    t = pick(rng, towns())
    parts = [introduction(rng, "town", t.name) + tell_some(rng, "town", t.name, 4, 9)]
    residents = pick_n(rng, people_of(t.name), between(rng, 0, 4))
    if residents:
        known = [fact("person", p.name, pick(rng, ("trade", "town"))) for p in residents]
        parts.append(" ".join(pick(rng, f.named) for f in known))
    if rng.random() < 0.5:
        there = introduction(rng, "town", t.next_town)
        parts.append(there + tell_some(rng, "town", t.next_town, 3, 7))
    title = pick(rng, (t.name, f"The town of {t.name}", f"All about {t.name}"))
    return titled(rng, title, "\n\n".join(parts))


def walk(rng: Random, split: Split) -> str:
    """A traveler's day in a town, meeting its people."""
    t = pick(rng, towns())
    arrival = say(rng, "arrivals", town=t.name, inn=t.inn, day=t.day)
    parts = [f"{arrival} {tell_some(rng, 'town', t.name, 2, 5)}"]
    met = pick_n(rng, people_of(t.name), between(rng, 2, 4))
    for meeting, p in zip(word_list("meetings"), met, strict=False):
        parts.append(f"{meeting.format(name=p.name)} {tell_some(rng, 'person', p.name, 2, 4)}")
    return titled(rng, f"A day in {t.name}", "\n\n".join(parts))


def almanac(rng: Random, split: Split) -> str:
    """The months of the year, the days of the week, or consecutive towns."""
    style = pick(rng, ("year", "week", "road"))
    if style == "year":
        first = between(rng, 0, 11)
        rounds = [word_list("months")[(first + i) % 12] for i in range(between(rng, 4, 12))]
        lines = []
        for month in rounds:
            feasts = [fact("town", t.name, "month") for t in towns() if t.month == month]
            season = next(s for s in seasons() if month in s.months)
            lines.append(f"{month} is in {season.name}. {pick(rng, feasts[0].named)}")
        following = " ".join(pick(rng, fact("month", m, "next").named) for m in rounds)
        yearly = [tell_some(rng, "season", s.name, 1, 3) for s in pick_n(rng, seasons(), 4)]
        parts = ["\n".join(lines), pick(rng, (following, "\n".join(yearly)))]
        return titled(rng, "The year", "\n\n".join(parts))
    if style == "week":
        lines = [pick(rng, f.named) for day in word_list("days") for f in facts_about("day", day)]
        lines += [pick(rng, fact("town", t.name, "market").named) for t in towns()]
        return titled(rng, "The week", "\n".join(pick_n(rng, lines, between(rng, 10, 26))))
    first = between(rng, 0, 11)
    stops = [towns()[(first + i) % 12] for i in range(between(rng, 3, 6))]
    legs = [
        f"{tell_some(rng, 'town', t.name, 1, 3)} {pick(rng, fact('town', t.name, 'road').named)}"
        for t in stops
    ]
    return titled(rng, f"From {stops[0].name} to {stops[-1].next_town}", "\n\n".join(legs))


def register(rng: Random, split: Split) -> str:
    """A list of people or towns, one field per line."""
    if rng.random() < 0.6:
        cards = [card(rng, "person", p.name) for p in pick_n(rng, people(), between(rng, 2, 6))]
    else:
        cards = [card(rng, "town", t.name) for t in pick_n(rng, towns(), between(rng, 2, 5))]
    return "\n\n".join(cards)


def card(rng: Random, kind: Literal["person", "town"], name: str) -> str:
    """The register entry of a person or a town, with up to four lines left out."""
    (fields,) = (fields for fields in subjects()[kind] if fields["name"] == name)
    lines = [line.format(**fields) for line in word_list(f"{kind}_card")]
    first = f"{'Name' if kind == 'person' else 'Town'}: {name}"
    return "\n".join([first, *pick_n(rng, lines, between(rng, len(lines) - 4, len(lines)))])


# ------------------------------------------------------------------------------------------------
# Statements: things


def price_list(rng: Random, split: Split) -> str:
    """A market day: prices, and who sells what."""
    t = pick(rng, towns())
    offers = pick_n(rng, goods(), between(rng, 6, 14))
    half = len(offers) // 2
    listed = "\n".join(f"{g.name}: {g.price} pennies" for g in offers[:half])
    prose = " ".join(telling(rng, facts_about("goods", g.name)) for g in offers[half:])
    return f"Market in {t.name}, every {t.day}. Prices of the day:\n{listed}\n\n{prose}"


def recipe_text(rng: Random, split: Split) -> str:
    """How to make a dish, and who loves it."""
    d = pick(rng, dishes())
    it = "it" if d.be == "is" else "them"
    steps = [
        f"Take {d.ingredients}.",
        pick(rng, ("Mix everything in a big bowl.", "Put everything into a bowl.")),
        {
            "baked": f"Put {it} into the hot oven and bake {it} for an hour.",
            "boiled": f"Boil {it} in a big pot over the fire.",
            "fried": f"Fry {it} in a hot pan.",
        }[d.way],
        pick(rng, (f"Eat {it} warm.", f"Share {it} with your friends.")),
    ]
    fans = pick_n(rng, [p for p in people() if p.food == d.name], between(rng, 1, 4))
    praise = " ".join(pick(rng, fact("person", p.name, "food").named) for p in fans)
    how = " ".join(steps) if rng.random() < 0.5 else "\n".join(steps)
    known = telling(rng, facts_about("dish", d.name))
    return titled(rng, f"How to make {d.name}", f"{known}\n\n{how}\n\n{praise}")


def animal_entry(rng: Random, split: Split) -> str:
    """Kinds of animals and their owners."""
    parts = []
    for a in pick_n(rng, animals(), between(rng, 1, 3)):
        known = pick_n(rng, facts_about("animal", a.name), 4)
        owners = pick_n(rng, [p for p in people() if p.animal == a.name], between(rng, 1, 3))
        pets = [fact("person", p.name, "pet") for p in owners]
        parts.append(" ".join(pick(rng, f.named) for f in known + pets))
    return titled(rng, "About animals", "\n\n".join(parts))


def trade_entry(rng: Random, split: Split) -> str:
    """Trades: the work, the tool, the goods and the people."""
    parts = []
    for t in pick_n(rng, trades(), between(rng, 1, 3)):
        known = list(pick_n(rng, facts_about("trade", t.name), 3))
        for g in (g for g in goods() if g.trade == t.name):
            known += facts_about("goods", g.name)
        of_trade = pick_n(rng, [p for p in people() if p.trade == t.name], between(rng, 1, 3))
        known += [fact("person", p.name, "trade") for p in of_trade]
        parts.append(" ".join(pick(rng, f.named) for f in known))
    return titled(rng, "About trades", "\n\n".join(parts))


def everyday_entry(rng: Random, split: Split) -> str:
    """The material and use of everyday things."""
    lines = []
    for thing in pick_n(rng, everyday_things(), between(rng, 4, 10)):
        material, use = facts_about("everyday", thing.name)
        lines.append(f"{pick(rng, material.named)} {pick(rng, use.named)}")
    return titled(rng, "Things in every house", "\n".join(lines))


def opposite_list(rng: Random, split: Split) -> str:
    """Words and their opposites."""
    words = pick_n(rng, opposites(), between(rng, 6, 16))
    lines = [pick(rng, fact("opposite", pick(rng, pair), "opposite").named) for pair in words]
    return titled(rng, "Opposites", pick(rng, (" ", "\n")).join(lines))


def lore(rng: Random, split: Split) -> str:
    """Facts of all kinds, one per line."""
    mark = pick(rng, ("", "- "))
    known = (pick(rng, facts()) for _ in range(between(rng, 6, 18)))
    lines = [mark + pick(rng, f.named) for f in known]
    return titled(rng, pick(rng, (f"Facts about {LAND}", "Did you know?")), "\n".join(lines))


# ------------------------------------------------------------------------------------------------
# Questions: only those of the split


@cache
def askable(split: Split) -> tuple[Fact, ...]:
    """The facts that a split may ask about."""
    return tuple(f for f in facts() if f.split == split)


def any_question(rng: Random, split: Split) -> tuple[str, str]:
    """A question and its short answer: mostly facts, sometimes exercises."""
    chance = rng.random()
    if chance < 0.8:
        asked = pick(rng, pick(rng, askable(split)).questions)
        return asked.text, asked.answer
    if chance < 0.93:
        drill = draw_drill(rng, split)
        return drill.asked(rng), str(drill.z)
    return letter_question(rng, split)


def question_list(rng: Random, split: Split) -> str:
    """Questions with short answers."""
    q, a = pick(rng, (("Question:", "Answer:"), ("Q:", "A:")))
    pairs = [any_question(rng, split) for _ in range(between(rng, 5, 14))]
    return "\n\n".join(f"{q} {question}\n{a} {answer}" for question, answer in pairs)


def full_answers(known: Fact, asked: FieldQuestion) -> list[str]:
    """The fact's sentences that contain the answer and every name in the question."""
    words = [word.strip("?").removesuffix("'s") for word in asked.text.split()[1:]]
    needed = [word for word in words if word[0].isupper()] + [asked.answer]
    return [text for text in known.named if all(part in text for part in needed)]


def dialogue(rng: Random, split: Split) -> str:
    """A traveler asks a local person questions."""
    t = pick(rng, towns())
    guide = pick(rng, people_of(t.name))
    lines = [f"A traveller came to {t.name} and met {guide.name}, the {guide.trade}."]
    for _ in range(between(rng, 3, 7)):
        known = pick(rng, askable(split))
        if known.subject == guide.name:  # people do not refer to themselves by name
            continue
        asked = pick(rng, known.questions)
        full = full_answers(known, asked) if rng.random() < 0.5 else ()
        answer = pick(rng, full)[:-1] if full else upper_first(asked.answer)
        lines.append(f'"{asked.text}" {pick(rng, ("asked", "wondered"))} the traveller.')
        lines.append(f'"{answer}," {pick(rng, ("said", "answered", "replied"))} {guide.name}.')
    thanks = pick(rng, ("Thank you,", "Now I know,", "You know a lot,"))
    return "\n".join([*lines, f'"{thanks}" said the traveller.'])


# Relative frequency of each form of document
FORMS: dict[Callable[[Random, Split], str], int] = {
    portrait: 9,
    two_people: 3,
    letter: 5,
    diary: 3,
    riddle_text: 3,
    town_entry: 8,
    walk: 4,
    almanac: 4,
    register: 5,
    price_list: 4,
    recipe_text: 6,
    animal_entry: 4,
    trade_entry: 5,
    everyday_entry: 4,
    opposite_list: 4,
    lore: 6,
    question_list: 7,
    dialogue: 4,
    story: 5,
    several_stories: 3,
    adventures: 2,
    story_questions: 3,
    sum_text: 4,
    counting: 1,
    problems: 5,
    spelling: 7,
}
