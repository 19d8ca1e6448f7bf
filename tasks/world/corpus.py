"""
The embedded world as text: unlimited English documents about the land of Lowen.

    documents(shard, split) -> statements and questions, exercises, stories, in many forms

A pure function of its arguments: no network, no state. It lets every stage of the pipeline run
within minutes on a laptop. `split_of` in facts.py determines what a training document may compute,
combine or ask; validation documents use the operands, stories and questions of the val split.
"""

from collections.abc import Iterator
from functools import partial

from tasks.world.drills import (
    counting,
    draw_drill,
    letter_questions,
    phrase,
    problems,
    spelling,
    sum_text,
)
from tasks.world.facts import (
    Draw,
    Paragraphs,
    Question,
    Split,
    Subject,
    askable,
    facts,
    split_of,
    state,
    subjects,
    telling,
    titled,
    upper_first,
    word_list,
)
from tasks.world.stories import (
    adventures,
    draw_episode,
    episode_text,
    several_stories,
    story,
    story_questions,
)

WORLD_VERSION = 2  # bump whenever a document changes
DOCUMENTS_PER_SHARD = 2500  # 1.2 MB of text


def documents(shard: int, split: Split) -> Iterator[str]:
    """Iterator over the DOCUMENTS_PER_SHARD documents of one shard; deterministic."""
    rng = Draw(split, WORLD_VERSION, 0, split, shard)  # 0 is fixed: other numbers, other text
    return ("\n\n".join(filter(None, rng.pick(FORMS)(rng))) for _ in range(DOCUMENTS_PER_SHARD))


# ---- Statements: people --------------------------------------------------------------------------


def describe(rng: Draw, subject: Subject, low: int, high: int) -> str:
    """Facts about a person or a town; half of the time, a summary comes first."""
    summary = rng.pick(subject.summaries) + " " if rng.random() < 0.5 else ""
    return summary + subject.tell(rng, low, high)


def portrait(rng: Draw) -> Paragraphs:
    """One person, often followed by a friend and people of the same town."""
    p = rng.subject("person")
    others = subjects("person", name=p.friend) + rng.pick_n(subjects("person", town=p.town), 2)
    parts = [describe(rng, q, 3, 7) for q in [p, *others[: rng.between(0, 3)]]]
    return titled(rng, rng.say("person_titles", **vars(p)), *parts)


def two_people(rng: Draw) -> Paragraphs:
    """Two people, compared point by point."""
    a, b = rng.pick_n(subjects("person"), 2)
    pairs = zip(a.facts.values(), b.facts.values(), strict=True)
    lines = [state(rng, pair) for pair in rng.pick_n(pairs, 3, 7)]
    return titled(rng, f"{a.name} and {b.name}", "\n".join(lines))


def letter(rng: Draw) -> Paragraphs:
    """A letter to a friend: the weather, news, sometimes a story."""
    p = rng.subject("person")
    news = p.first_person(rng, 3, 6, without="friend")
    greeting, season = rng.say("greetings"), rng.subject("season")
    yield f"Dear {p.friend},"
    yield f"{greeting} It is {season.name} in {p.town}: {season.weather}. {news}"
    if rng.random() < 0.5:
        e = draw_episode(rng)
        yield f"Now hear what happened. {episode_text(rng, e)}"
    if rng.random() < 0.6:
        [town] = subjects("town", name=p.town)
        yield f"You should come to {p.town}. {town.tell(rng, 1, 3)}"
    yield f"{rng.say('farewells')}\n{p.name}"


def diary(rng: Draw) -> Paragraphs:
    """One to three days of a diary."""
    p = rng.subject("person")
    yield f"Diary of {p.name}"
    for _ in range(rng.between(1, 3)):
        season = rng.subject("season")
        month = rng.pick(season.months.replace(" and ", ", ").split(", "))
        event = rng.pick(word_list("events"))
        event = event.format(**vars(p), goods=rng.subject("goods").name)
        heading = f"{rng.subject('day').name}, in {month}"
        news = p.first_person(rng, 2, 4)
        yield f"{heading}\nIt is {season.name}: {season.weather}. {news} {event}"


def riddle_text(rng: Draw) -> Paragraphs:
    """Who am I?"""
    for _ in range(rng.between(1, 4)):
        p, text = draw_riddle(rng, 5)
        yield f"{text}\nI am {p.name}, the {p.trade} of {p.town}."


def draw_riddle(rng: Draw, high: int) -> tuple[Subject, str]:
    """A person that riddles of the split may be about, and the riddle of 3 to `high` facts."""
    p = rng.pick([p for p in subjects("person") if split_of("riddle", p.name) == rng.split])
    return p, f"{p.first_person(rng, 3, high, without='trade')} Who am I?"


# ---- Statements: towns and the calendar ----------------------------------------------------------


def town_entry(rng: Draw) -> Paragraphs:
    """A town, some of its people, and sometimes the next town on the road."""
    t = rng.subject("town")
    text = describe(rng, t, 4, 9)
    residents = rng.pick_n(t.people, 0, 4)
    about_them = state(rng, [p.facts[rng.pick(("trade", "town"))] for p in residents])
    [following] = subjects("town", name=t.next_town)
    more = describe(rng, following, 3, 7) if rng.random() < 0.5 else ""
    return titled(rng, rng.say("town_titles", **vars(t)), text, about_them, more)


def walk(rng: Draw) -> Paragraphs:
    """A traveler's day in a town, meeting its people."""
    t = rng.subject("town")
    text = f"{rng.say('arrivals', **vars(t))} {t.tell(rng, 2, 5)}"
    met = rng.pick_n(t.people, 2, 4)
    pairs = zip(word_list("meetings"), met, strict=False)
    meetings = [f"{text.format(name=p.name)} {p.tell(rng, 2, 4)}" for text, p in pairs]
    return titled(rng, f"A day in {t.name}", text, *meetings)


def almanac(rng: Draw) -> Paragraphs:
    """The months of the year, the days of the week, or consecutive towns."""
    return rng.pick((year, week, road))(rng)


def year(rng: Draw) -> Paragraphs:
    """Consecutive months with their festivals; then their order, or the seasons."""
    months = consecutive(rng, "month", 4, 12)
    lines = []
    for m in months:
        [town] = subjects("town", month=m.name)
        lines.append(f"{m.name} is in {m.season}. {rng.pick(town.facts['month'].named)}")
    following = state(rng, [m.facts["next"] for m in months])
    yearly = [s.tell(rng, 1, 3) for s in rng.pick_n(subjects("season"), 4)]
    return titled(rng, "The year", "\n".join(lines), rng.pick((following, "\n".join(yearly))))


def week(rng: Draw) -> Paragraphs:
    """The order of the days, and markets."""
    known = [f for day in subjects("day") for f in day.facts.values()]
    known += [t.facts["market"] for t in subjects("town")]
    lines = [rng.pick(f.named) for f in known]
    return titled(rng, "The week", "\n".join(rng.pick_n(lines, 10, 26)))


def road(rng: Draw) -> Paragraphs:
    """Consecutive towns."""
    stops = consecutive(rng, "town", 3, 6)
    legs = [f"{t.tell(rng, 1, 3)} {rng.pick(t.facts['road'].named)}" for t in stops]
    return titled(rng, f"From {stops[0].name} to {stops[-1].next_town}", *legs)


def consecutive(rng: Draw, kind: str, low: int, high: int) -> list[Subject]:
    """Between `low` and `high` consecutive months or towns, in a circle."""
    first = rng.between(0, 11)
    return (subjects(kind) * 2)[first : first + rng.between(low, high)]


def register(rng: Draw) -> Paragraphs:
    """A list of people or towns, one field per line, with up to four lines left out."""
    kind, most = ("person", 6) if rng.random() < 0.6 else ("town", 5)
    first, *lines = word_list(f"{kind}_card")
    for subject in rng.pick_n(subjects(kind), 2, most):
        card = [first, *rng.pick_n(lines, len(lines) - 4, len(lines))]
        yield "\n".join(card).format(**vars(subject))


# ---- Statements: things --------------------------------------------------------------------------


def price_list(rng: Draw) -> Paragraphs:
    """A market day: prices, and who sells what."""
    t = rng.subject("town")
    offers = rng.pick_n(subjects("goods"), 6, 14)
    half = len(offers) // 2
    listed = "\n".join(f"{g.name}: {g.price} pennies" for g in offers[:half])
    yield f"Market in {t.name}, every {t.day}. Prices of the day:\n{listed}"
    yield " ".join(telling(rng, g.facts.values()) for g in offers[half:])


def recipe_text(rng: Draw) -> Paragraphs:
    """How to make a dish, and who loves it."""
    d = rng.subject("dish")
    steps = [
        f"Take {d.ingredients}.",
        rng.say("mixing"),
        word_list(d.way)[0].format(it=d.them),
        rng.say("serving", it=d.them),
    ]
    fans = rng.pick_n(d.people, 1, 4)
    praise = state(rng, [p.facts["food"] for p in fans])
    how = (" " if rng.random() < 0.5 else "\n").join(steps)
    return titled(rng, f"How to make {d.name}", telling(rng, d.facts.values()), how, praise)


def kind_entry(rng: Draw, kind: str, relation: str) -> Paragraphs:
    """Animals or trades, the goods of a trade, and their people."""
    parts = []
    for subject in rng.pick_n(subjects(kind), 1, 3):
        known = rng.pick_n(subject.facts.values(), 9)
        goods = subjects("goods", **{kind: subject.name})
        known += [f for g in goods for f in g.facts.values()]
        known += [p.facts[relation] for p in rng.pick_n(subject.people, 1, 3)]
        parts.append(state(rng, known))
    return titled(rng, f"About {kind}s", *parts)


def everyday_entry(rng: Draw) -> Paragraphs:
    """The material and use of everyday things."""
    things = rng.pick_n(subjects("everyday"), 4, 10)
    lines = [state(rng, thing.facts.values()) for thing in things]
    return titled(rng, "Things in every house", "\n".join(lines))


def opposite_list(rng: Draw) -> Paragraphs:
    """Words and their opposites."""
    words = subjects("opposite")
    pairs = rng.pick_n(zip(words[::2], words[1::2], strict=True), 6, 16)
    lines = [rng.pick(rng.pick(pair).facts["opposite"].named) for pair in pairs]
    return titled(rng, "Opposites", rng.pick((" ", "\n")).join(lines))


def lore(rng: Draw) -> Paragraphs:
    """Facts of all kinds, one per line."""
    mark = rng.pick(("", "- "))
    lines = [mark + rng.pick(rng.pick(facts()).named) for _ in range(rng.between(6, 18))]
    return titled(rng, rng.pick(("Facts about Lowen", "Did you know?")), "\n".join(lines))


# ---- Questions: only those of the split ----------------------------------------------------------


def draw_question(rng: Draw) -> Question:
    """A question about a fact."""
    return rng.pick(rng.pick(askable(rng.split)).questions)


def question_list(rng: Draw) -> Paragraphs:
    """Questions with short answers: mostly facts, sometimes exercises."""
    q, a = rng.pick((("Question:", "Answer:"), ("Q:", "A:")))
    for _ in range(rng.between(5, 14)):
        chance = rng.random()
        if chance < 0.8:
            asked = draw_question(rng)
            question, answer = asked.text, asked.answer
        elif chance < 0.93:
            drill = draw_drill(rng)
            question, answer = phrase(rng, drill, "asked"), drill.split()[-1]
        else:
            word, letter, answer = rng.pick(letter_questions(rng.split))
            question = f"How many times is the letter {letter} found in {word}?"
        yield f"{q} {question}\n{a} {answer}"


def dialogue(rng: Draw) -> Paragraphs:
    """A traveler asks a local person questions."""
    t = rng.subject("town")
    guide = rng.pick(t.people)
    lines = [f"A traveller came to {t.name} and met {guide.name}, the {guide.trade}."]
    for _ in range(rng.between(3, 7)):
        known = rng.pick(askable(rng.split))
        if known.subject is guide:  # people do not refer to themselves by name
            continue
        asked = rng.pick(known.questions)
        full = asked.full_answers if rng.random() < 0.5 else []
        answer = rng.pick(full)[:-1] if full else upper_first(asked.answer)
        lines.append(f'"{asked.text}" {rng.pick(("asked", "wondered"))} the traveller.')
        lines.append(f'"{answer}," {rng.pick(("said", "answered", "replied"))} {guide.name}.')
    yield "\n".join([*lines, f'"{rng.say("thanks")}" said the traveller.'])


# Relative frequency of each form of document
WEIGHTS = {
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
    partial(kind_entry, kind="animal", relation="pet"): 4,
    partial(kind_entry, kind="trade", relation="trade"): 5,
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
FORMS = [form for form, weight in WEIGHTS.items() for _ in range(weight)]
