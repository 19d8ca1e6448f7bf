"""
The few-shot suite of the embedded world: CORE-style tasks for base models.

    held-out questions, stories, calculations -> suite() -> tasks in DCLM format

Prompts look like the documents, so a pretrained model can answer them. Items come from the "val"
and "test" splits: no training document contains their questions, stories or calculations. Only
questions that join two facts are not split: they are of a kind that no document contains. Without
the question, all options of an item are equally likely.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

from tasks.world.drills import CALCULATION, OPERANDS, calculation, operand_pairs
from tasks.world.facts import Draw, Split, subjects, table_rows
from tasks.world.stories import Episode, beginning, episodes
from tasks.world.task import NUM_OPTIONS, WorldProblems, choice_questions, fact_questions

SUITE_VERSION = 3  # bump whenever an item changes
HELD_OUT: tuple[Split, ...] = ("val", "test")
NUM_PROBLEMS = 150  # per split

SuiteItem = dict[str, Any]
# The fields of a task; `random_baseline` is the chance accuracy, from 0 to 1
FIELDS = ("name", "kind", "num_fewshot", "random_baseline", "continuation_delimiter", "items")


def suite() -> list[dict[str, Any]]:
    """All tasks, each a dict with the keys FIELDS; deterministic."""
    mc, lm, qa = "multiple_choice", "language_modeling", "\nAnswer: "
    tasks = [
        ("world_people", mc, 3, 0.25, qa, fact_choices(people=True)),
        ("world_things", mc, 3, 0.25, qa, fact_choices(people=False)),
        ("world_two_steps", mc, 3, 0.25, qa, two_steps()),
        ("world_stories", "schema", 0, 0.5, " ", causes()),
        ("world_story_questions", mc, 2, 0.5, qa, endings()),
        ("world_answers", lm, 3, 0.0, qa, answers(opposites=False)),
        ("world_opposites", lm, 3, 0.0, qa, answers(opposites=True)),
        ("world_sums", lm, 4, 0.0, " = ", calculations()),
        ("world_problems", lm, 1, 0.0, " ", problem_prefixes()),
    ]
    return [dict(zip(FIELDS, (*task, list(items)), strict=True)) for *task, items in tasks]


def item_draw(name: str, *key: str | int) -> Draw:
    """Random choices for one item."""
    return Draw("test", "suite", SUITE_VERSION, name, *key)


def multiple_choice(query: str, options: list[str], right: str) -> SuiteItem:
    """A multiple-choice item."""
    return {"query": query, "choices": options, "gold": options.index(right)}


def ask(rng: Draw, question: str, right: str, rivals: Sequence[str]) -> SuiteItem:
    """
    The correct option and different rivals, NUM_OPTIONS in all, in random order.

    A rival that occurs n times in `rivals` is n times as likely to be drawn.
    """
    found = [right]
    while len(found) < NUM_OPTIONS:
        found = list(dict.fromkeys([*found, rng.pick(rivals)]))
    return multiple_choice(f"Question: {question}", rng.pick_n(found, NUM_OPTIONS), right)


# ---- Facts ---------------------------------------------------------------------------------------


def fact_choices(people: bool) -> Iterator[SuiteItem]:
    """Questions about people, or about everything else, with four options."""
    for q in chain(*map(choice_questions, HELD_OUT)):
        if (q.fact.subject.kind == "person") == people:
            yield ask(item_draw("facts", q.text), q.text, q.answer, q.fair_rivals)


def answers(opposites: bool) -> Iterator[SuiteItem]:
    """Questions about opposites, or about everything else, without options."""
    for q in chain(*map(fact_questions, HELD_OUT)):
        if (q.fact.subject.kind == "opposite") == opposites:
            yield {"context": f"Question: {q.text}", "continuation": q.answer}


def two_steps() -> Iterator[SuiteItem]:
    """Questions that need two facts; documents state both but never join them."""
    for text, via, kind, field in table_rows("two_steps"):
        people = subjects("person")
        values = [getattr(subjects(kind, name=getattr(p, via))[0], field) for p in people]
        for p, right in zip(people, values, strict=True):
            yield ask(item_draw("two steps", text, p.name), text.format(p.name), right, values)


# ---- Stories -------------------------------------------------------------------------------------


def balanced_episodes() -> Iterator[Episode]:
    """Held-out episodes, with equally many good and bad outcomes per rule."""
    held_out = [*chain(*map(episodes, HELD_OUT))]
    for title in sorted({e.title for e in held_out}):
        alike = [e for e in held_out if e.title == title]
        ways = ([e for e in alike if e.good == good] for good in (True, False))
        yield from chain(*zip(*ways, strict=False))


def causes() -> Iterator[SuiteItem]:
    """Which of two causes leads to an effect?"""
    for e in balanced_episodes():
        rng = item_draw("causes", e.title, e.hero.name, int(e.good))
        setting = rng.pick(e.settings)
        right = f"{setting} {rng.pick(e.causes)}"
        options = rng.pick_n((right, f"{setting} {rng.pick(e.other_causes)}"), 2)
        yield {
            "context_options": options,
            "continuation": rng.pick(e.effects),
            "gold": options.index(right),
        }


def endings() -> Iterator[SuiteItem]:
    """A question about the outcome, with the answers for both outcomes."""
    for e in balanced_episodes():
        rng = item_draw("endings", e.title, e.hero.name, int(e.good))
        query = f"{beginning(rng, e)}\nQuestion: {e.question}"
        yield multiple_choice(query, rng.pick_n((e.answer, e.wrong), 2), e.answer)


# ---- Numbers -------------------------------------------------------------------------------------


def calculations() -> Iterator[SuiteItem]:
    """All calculations with held-out operands."""
    for symbol, split in product(OPERANDS, HELD_OUT):
        for a, b in operand_pairs(OPERANDS[symbol], split):
            context, continuation = calculation(symbol, a, b).split(" = ")
            yield {"context": context, "continuation": continuation}


def problem_prefixes() -> Iterator[SuiteItem]:
    """Word problems up to their first calculation."""
    for task, i in product(map(WorldProblems, HELD_OUT), range(NUM_PROBLEMS)):
        story, question, steps = task.problem(i)
        before, expression, *_ = CALCULATION.split(steps[0])
        yield {
            "context": f"{story} {question} {before}".rstrip(),
            "continuation": f"{expression} =",
        }
