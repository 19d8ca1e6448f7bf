"""
The few-shot suite of the embedded world: CORE-style tasks for base models.

    held-out questions, stories, riddles, calculations -> suite() -> tasks in DCLM format

Prompts look like the documents, so a pretrained model can answer them. Items come from the "val"
and "test" splits: no training document contains their questions, stories or calculations. Only
questions that join two facts or compare two prices are not split: they are of a kind that no
document contains. Without the question, all options of an item are equally likely.
"""

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tasks.world.corpus import first_person
from tasks.world.drills import OPERATIONS, operand_pairs
from tasks.world.facts import (
    LAND,
    Person,
    Split,
    Town,
    an,
    facts_about,
    goods,
    people,
    person,
    pick,
    pick_n,
    split_of,
    town,
)
from tasks.world.questions import NUM_OPTIONS, choice_questions, fact_questions, problem
from tasks.world.stories import Episode, episodes

SUITE_VERSION = 2  # bump whenever an item changes
SPLITS: tuple[Split, ...] = ("train", "val", "test")
HELD_OUT: tuple[Split, ...] = ("val", "test")
NUM_PROBLEMS = 150  # per split
NUM_PRICES = 250
RIDDLES_EACH = 24  # per person held out from riddles

SuiteItem = dict[str, Any]
# The fields of a task; `random_baseline` is the chance accuracy, from 0 to 1
FIELDS = ("name", "kind", "num_fewshot", "random_baseline", "continuation_delimiter", "items")


def suite() -> list[dict[str, Any]]:
    """All tasks, each a dict with the keys FIELDS; deterministic."""
    mc, lm, qa = "multiple_choice", "language_modeling", "\nAnswer: "
    tasks = [
        ("world_people", mc, 3, 1 / 4, qa, fact_choices(lambda kind: kind == "person")),
        ("world_things", mc, 3, 1 / 4, qa, fact_choices(lambda kind: kind != "person")),
        ("world_two_steps", mc, 3, 1 / 4, qa, two_steps()),
        ("world_riddles", mc, 1, 1 / 4, "\nI am ", riddle_items()),
        ("world_prices", mc, 4, 1 / 2, qa, prices()),
        ("world_stories", "schema", 0, 1 / 2, " ", causes()),
        ("world_story_questions", mc, 2, 1 / 2, qa, endings()),
        ("world_answers", lm, 3, 0.0, qa, answer_items(lambda kind: kind != "opposite")),
        ("world_opposites", lm, 3, 0.0, qa, answer_items(lambda kind: kind == "opposite")),
        ("world_sums", lm, 4, 0.0, " = ", calculations()),
        ("world_problems", lm, 1, 0.0, " ", problem_prefixes()),
    ]
    return [dict(zip(FIELDS, task, strict=True)) for task in tasks]


def item_rng(name: str, *key: str | int) -> Random:
    """Random generator of one item."""
    return Random("-".join([LAND, "suite", str(SUITE_VERSION), name, *map(str, key)]))


def draw_options(rng: Random, right: str, rivals: Sequence[str]) -> list[str]:
    """
    The correct option and different rivals, NUM_OPTIONS in all, in random order.

    A rival that occurs n times in `rivals` is n times as likely to be drawn.
    """
    found = [right]
    while len(found) < NUM_OPTIONS:
        rival = pick(rng, rivals)
        found += [rival] if rival not in found else []
    return pick_n(rng, found, NUM_OPTIONS)


def multiple_choice(query: str, options: Sequence[str], right: str) -> SuiteItem:
    """A multiple-choice item."""
    return {"query": query, "choices": list(options), "gold": options.index(right)}


# ------------------------------------------------------------------------------------------------
# Facts


def fact_choices(wanted: Callable[[str], bool]) -> list[SuiteItem]:
    """Questions about the wanted kinds of facts, with four options."""
    found = []
    for asked in (a for split in HELD_OUT for a in choice_questions(split) if wanted(a.fact.kind)):
        text, right = asked.question.text, asked.question.answer
        options = draw_options(item_rng("facts", text), right, asked.fair_rivals)
        found.append(multiple_choice(f"Question: {text}", options, right))
    return found


def answer_items(wanted: Callable[[str], bool]) -> list[SuiteItem]:
    """Questions about the wanted kinds of facts, without options."""
    return [
        {"context": f"Question: {a.question.text}", "continuation": a.question.answer}
        for split in HELD_OUT
        for a in fact_questions(split)
        if wanted(a.fact.kind)
    ]


RELATED: dict[str, Callable[[str], Person | Town]] = {"friend": person, "town": town}
# (question about a person, field that names a related person or town, field of that subject)
TWO_STEPS = (
    ("In which town does the best friend of {} live?", "friend", "town"),
    ("What is the trade of {}'s best friend?", "friend", "trade"),
    ("What is the favourite food of {}'s best friend?", "friend", "food"),
    ("What is the inn of {}'s town called?", "town", "inn"),
    ("Which festival does {}'s town celebrate?", "town", "festival"),
    ("On which day is the market in {}'s town?", "town", "day"),
    ("What is {}'s town known for?", "town", "product"),
)


def two_steps() -> list[SuiteItem]:
    """Questions that need two facts; documents state both but never join them."""
    found = []
    for text, via, field in TWO_STEPS:
        values = {p.name: getattr(RELATED[via](getattr(p, via)), field) for p in people()}
        for name, right in values.items():
            rng = item_rng("two steps", text, name)
            options = draw_options(rng, right, list(values.values()))
            found.append(multiple_choice(f"Question: {text.format(name)}", options, right))
    return found


def prices() -> list[SuiteItem]:
    """Which of two things costs more or less? Both are asked equally often."""
    rng = item_rng("prices")
    pairs = [(a, b) for a, b in itertools.permutations(goods(), 2) if a.price < b.price]
    found = []
    for i, (cheap, dear) in enumerate(pick_n(rng, pairs, NUM_PRICES)):
        word, right = (("more", dear), ("less", cheap))[i % 2]
        a, b = (an(g.name) for g in pick_n(rng, (cheap, dear), 2))
        query = f"Question: Which costs {word}, {a} or {b}?"
        found.append(multiple_choice(query, pick_n(rng, (a, b), 2), an(right.name)))
    return found


def riddle_items() -> list[SuiteItem]:
    """Four first-person facts and four names to choose from."""
    found = []
    for p in (p for p in people() if split_of("riddle", p.name) in HELD_OUT):
        own = [f for f in facts_about("person", p.name) if f.relation != "trade"]
        others = [q.name for q in people() if q.name != p.name]
        for i in range(RIDDLES_EACH):
            rng = item_rng("riddle", p.name, i)
            options = pick_n(rng, [p.name, *pick_n(rng, others, 3)], 4)
            query = f"{first_person(rng, own, 4, 4)} Who am I?"
            found.append(multiple_choice(query, options, p.name))
    return found


# ------------------------------------------------------------------------------------------------
# Stories


def balanced_episodes() -> list[Episode]:
    """Held-out episodes, with equally many good and bad outcomes per rule."""
    found = []
    known = [e for split in HELD_OUT for e in episodes(split)]
    for title in sorted({e.title for e in known}):
        good = [e for e in known if e.title == title and e.good]
        bad = [e for e in known if e.title == title and not e.good]
        found += itertools.chain.from_iterable(zip(good, bad, strict=False))
    return found


def causes() -> list[SuiteItem]:
    """Which of two causes leads to an effect?"""
    known = {(e.title, e.hero.name, e.good): e for split in SPLITS for e in episodes(split)}
    found = []
    for e in balanced_episodes():
        rng = item_rng("causes", e.title, e.hero.name, int(e.good))
        other = known[e.title, e.hero.name, not e.good]
        setting = pick(rng, e.settings)
        right = f"{setting} {pick(rng, e.causes)}"
        options = pick_n(rng, (right, f"{setting} {pick(rng, other.causes)}"), 2)
        item = {"context_options": options, "continuation": pick(rng, e.effects)}
        found.append({**item, "gold": options.index(right)})
    return found


def endings() -> list[SuiteItem]:
    """A question about the outcome, with the answers for both outcomes."""
    found = []
    for e in balanced_episodes():
        rng = item_rng("endings", e.title, e.hero.name, int(e.good))
        query = f"{pick(rng, e.settings)} {pick(rng, e.causes)}\nQuestion: {e.question}"
        found.append(multiple_choice(query, pick_n(rng, (e.answer, e.wrong), 2), e.answer))
    return found


# ------------------------------------------------------------------------------------------------
# Numbers


def calculations() -> list[SuiteItem]:
    """All calculations with held-out operands."""
    found = []
    for operation in OPERATIONS:
        for a, b in (pair for s in HELD_OUT for pair in operand_pairs(operation.operands, s)):
            c = a + b if operation.operands == "sum" else a * b
            x, y, z = (c, a, b) if operation.undoes else (a, b, c)
            found.append({"context": f"{x} {operation.symbol} {y}", "continuation": str(z)})
    return found


def problem_prefixes() -> list[SuiteItem]:
    """Word problems up to their first calculation."""
    found = []
    for p in (problem(split, i) for split in HELD_OUT for i in range(NUM_PROBLEMS)):
        step = p.steps[0]
        before, _ = step.text.split(" {}")
        context = f"{p.story} {p.question} {before}"
        found.append({"context": context, "continuation": f"{step.expression} ="})
    return found
