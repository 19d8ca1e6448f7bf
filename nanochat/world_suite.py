"""
The few-shot suite of the embedded world: what a base model shows of it, and its CORE.

    held-out questions, stories, riddles, calculations -> suite() -> tasks in the shapes of DCLM

Prompts look like the documents, so that a model which has only read can answer. Every item comes
from the held-out splits, "val" and "test" together: its question is never asked, its story never
told, its numbers never calculated with in a training document. The options of an item are as
likely as one another before the question is read. Knows no tokens, models or scores.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, TypedDict

from nanochat.world import first_person
from nanochat.world_drills import OPERATIONS, operand_pairs
from nanochat.world_facts import LAND, Split, facts_about, people, pick, sample, split_of
from nanochat.world_stories import Episode, episodes
from nanochat.world_tasks import choice_questions, draw_options, fact_questions, problem

SUITE_VERSION = 1  # goes up whenever any item changes
HELD_OUT: tuple[Split, ...] = ("val", "test")
NUM_PROBLEMS = 150  # of each split
RIDDLES_EACH = 24  # of each person whom no training document lets guess

Item = dict[str, Any]
Kind = Literal["multiple_choice", "schema", "language_modeling"]


class SuiteTask(TypedDict):
    """One task. `random_baseline` is the accuracy of guessing, from 0 to 1."""

    name: str
    kind: Kind
    num_fewshot: int
    random_baseline: float
    continuation_delimiter: str
    items: list[Item]


def suite() -> list[SuiteTask]:
    """All tasks, always the same."""
    mc: Kind = "multiple_choice"
    lm: Kind = "language_modeling"
    qa = "\nAnswer: "
    return [
        task("world_people", mc, 3, 1 / 4, qa, chosen(lambda kind: kind == "person")),
        task("world_things", mc, 3, 1 / 4, qa, chosen(lambda kind: kind != "person")),
        task("world_riddles", mc, 1, 1 / 4, "\nI am ", riddles()),
        task("world_stories", "schema", 0, 1 / 2, " ", causes()),
        task("world_story_questions", mc, 2, 1 / 2, qa, endings()),
        task("world_answers", lm, 3, 0.0, qa, answers()),
        task("world_sums", lm, 4, 0.0, " = ", calculations()),
        task("world_problems", lm, 1, 0.0, " ", set_ups()),
    ]


def task(
    name: str, kind: Kind, num_fewshot: int, baseline: float, delimiter: str, items: list[Item]
) -> SuiteTask:
    return {
        "name": name,
        "kind": kind,
        "num_fewshot": num_fewshot,
        "random_baseline": baseline,
        "continuation_delimiter": delimiter,
        "items": items,
    }


def generator(name: str, *key: str | int) -> Random:
    """Where the chance behind one item comes from."""
    return Random("-".join([LAND, "suite", str(SUITE_VERSION), name, *map(str, key)]))


def multiple_choice(query: str, options: Sequence[str], right: str) -> Item:
    """An item of the first kind."""
    return {"query": query, "choices": list(options), "gold": options.index(right)}


def chosen(wanted: Callable[[str], bool]) -> list[Item]:
    """Questions about facts of some kinds, with four answers to choose from."""
    found = []
    for asked in (a for split in HELD_OUT for a in choice_questions(split) if wanted(a.fact.kind)):
        text = asked.question.text
        options = draw_options(generator("facts", text), asked)
        found.append(multiple_choice(f"Question: {text}", options, asked.question.answer))
    return found


def answers() -> list[Item]:
    """The same questions, and more, without options."""
    return [
        {"context": f"Question: {a.question.text}", "continuation": a.question.answer}
        for split in HELD_OUT
        for a in fact_questions(split)
    ]


def riddles() -> list[Item]:
    """Four things that somebody says; four names. Several of each of few people."""
    found = []
    for p in (p for p in people() if split_of("riddle", p.name) in HELD_OUT):
        own = [f for f in facts_about("person", p.name) if f.relation != "trade"]
        others = [q.name for q in people() if q.name != p.name]
        for i in range(RIDDLES_EACH):
            rng = generator("riddle", p.name, i)
            options = sample(rng, [p.name, *sample(rng, others, 3)], 4)
            query = f"{first_person(rng, own, 4, 4)} Who am I?"
            found.append(multiple_choice(query, options, p.name))
    return found


def both_ways() -> list[Episode]:
    """Held-out episodes: of every rule as many that go well as that go badly."""
    found = []
    known = [e for split in HELD_OUT for e in episodes(split)]
    for title in sorted({e.title for e in known}):
        good = [e for e in known if e.title == title and e.good]
        bad = [e for e in known if e.title == title and not e.good]
        found += [e for pair in zip(good, bad, strict=False) for e in pair]
    return found


def causes() -> list[Item]:
    """Which of two causes leads to an effect?"""
    other_way = {(e.title, e.hero.name, e.good): e for s in SPLITS for e in episodes(s)}
    found = []
    for e in both_ways():
        rng = generator("causes", e.title, e.hero.name, int(e.good))
        other = other_way[e.title, e.hero.name, not e.good]
        setting = pick(rng, e.settings)
        gold = int(rng.random() < 0.5)
        contexts = [f"{setting} {pick(rng, way.causes)}" for way in (e, other)]
        found.append(
            {
                "context_options": contexts[::-1] if gold else contexts,
                "continuation": pick(rng, e.effects),
                "gold": gold,
            }
        )
    return found


SPLITS: tuple[Split, ...] = ("train", "val", "test")


def endings() -> list[Item]:
    """What came of it: the answer, or that of the other way."""
    found = []
    for e in both_ways():
        rng = generator("endings", e.title, e.hero.name, int(e.good))
        query = f"{pick(rng, e.settings)} {pick(rng, e.causes)}\nQuestion: {e.question}"
        found.append(multiple_choice(query, sample(rng, (e.answer, e.wrong), 2), e.answer))
    return found


def calculations() -> list[Item]:
    """All calculations with held-out operands."""
    found = []
    for operation in OPERATIONS:
        for a, b in (pair for s in HELD_OUT for pair in operand_pairs(operation.operands, s)):
            c = a + b if operation.operands == "sum" else a * b
            x, y, z = (c, a, b) if operation.undoes else (a, b, c)
            found.append({"context": f"{x} {operation.symbol} {y}", "continuation": str(z)})
    return found


def set_ups() -> list[Item]:
    """Word problems up to where the first calculation is written down."""
    found = []
    for split in HELD_OUT:
        for i in range(NUM_PROBLEMS):
            p = problem(split, i)
            step = p.steps[0]
            before = step.text.split(" {}")[0]
            found.append(
                {
                    "context": f"{p.story} {p.question} {before}",
                    "continuation": f"{step.expression} =",
                }
            )
    return found
