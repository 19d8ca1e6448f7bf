"""
Tasks by name, and mixtures of them in words.

    make("ARC-Easy", "test") -> Task
    mixture("smoltalk=10000,gsm8k*2,jsonl:identity.jsonl") -> Mixture

A mixture is a list of `name[:source][=rows][*repeats]`: a task, how many of its conversations, how
often they come. Where its data come from can be chosen for some: jsonl:<file>, spelling:<file of
words>, smoltalk:<owner>/<name>. Training takes the split "train" of each task and no other; nothing
is downloaded before it is needed.
"""

import difflib
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tasks.aqua import AQuA, AQuALetter
from tasks.arc import ARCChallenge, ARCEasy
from tasks.base import Mixture, Subset, Task
from tasks.embedded import WorldChat, WorldChoice, WorldFacts, WorldProblems, WorldSpelling
from tasks.gsm8k import GSM8K
from tasks.humaneval import HumanEval
from tasks.jsonl import JSONL
from tasks.mmlu import MMLU
from tasks.smoltalk import SmolTalk
from tasks.spelling import SimpleSpelling, SpellingBee


class Entry(NamedTuple):
    """A task, and the option that the `source` of a mixture sets."""

    task: type[Task]
    source: str | None = None


TASKS = {
    "arc_easy": Entry(ARCEasy),
    "arc_challenge": Entry(ARCChallenge),
    "mmlu": Entry(MMLU),
    "gsm8k": Entry(GSM8K),
    "aqua": Entry(AQuA),
    "aqua_letter": Entry(AQuALetter),
    "humaneval": Entry(HumanEval),
    "smoltalk": Entry(SmolTalk, "repo"),
    "spelling": Entry(SpellingBee, "words"),
    "simple_spelling": Entry(SimpleSpelling, "words"),
    "jsonl": Entry(JSONL, "path"),
    "world_chat": Entry(WorldChat),
    "world_facts": Entry(WorldFacts),
    "world_choice": Entry(WorldChoice),
    "world_problems": Entry(WorldProblems),
    "world_spelling": Entry(WorldSpelling),
}

VAL_ROWS = 1_000  # of each task: enough to measure a loss, and none drowns the others
PART = re.compile(r"([\w-]+)(?::([^,=*]+))?(?:=([1-9]\d*))?(?:\*([1-9]\d*))?")


class Part(NamedTuple):
    """One task of a mixture."""

    name: str
    source: str | None
    rows: int | None
    """None for all there are."""
    repeats: int

    def task(self, split: str) -> Task:
        """The whole task."""
        option = TASKS[self.name].source
        return make(self.name, split, **({option: self.source} if option and self.source else {}))


def key_of(name: str) -> str:
    """The key in TASKS of a task, by that key or as the report prints it. Raises ValueError."""
    known = {plain(entry.task.name): key for key, entry in TASKS.items()}
    known |= {plain(key): key for key in TASKS}
    if plain(name) not in known:
        near = difflib.get_close_matches(plain(name), known, n=1, cutoff=0.0)
        raise ValueError(
            f"there is no task {name!r}; did you mean {known[near[0]]}? "
            f"The tasks are {', '.join(TASKS)}"
        )
    return known[plain(name)]


def plain(name: str) -> str:
    """A name without capitals, spaces and hyphens."""
    return re.sub(r"[\W_]", "", name.lower())


def make(name: str, split: str, **options) -> Task:
    """One split of a task. Raises ValueError naming what there is for a wrong name or split."""
    return TASKS[key_of(name)].task(split, **options)


def parse_mixture(spec: str) -> list[Part]:
    """The parts of a mixture. Raises ValueError naming the part that is amiss."""
    parts = []
    for words in spec.split(","):
        found = PART.fullmatch(words.strip())
        if not found:
            raise ValueError(
                f"{words!r} in the mixture {spec!r} is not name[:source][=rows][*repeats]"
            )
        name, source, rows, repeats = found.groups()
        key = key_of(name)
        entry = TASKS[key]
        if "train" not in entry.task.splits:
            raise ValueError(f"{key} is only for evaluation: it has no split to train on")
        if source and not entry.source:
            raise ValueError(f"{words!r}: the data of {key} cannot be chosen")
        parts.append(Part(key, source, int(rows) if rows else None, int(repeats or 1)))
    return parts


def exam(name: str, unsafe: bool = False) -> Task:
    """
    The test split of a task, to score a model on. `unsafe`: run what the model wrote with all your
    rights where this machine has no sandbox. Raises ValueError for a task that cannot be scored.
    """
    runs_code = key_of(name) == "humaneval"
    task = make(name, "test", **({"unsafe": unsafe} if runs_code else {}))
    if task.kind == "talk":
        raise ValueError(f"{task.name} is only trained on: it has no right answers to score")
    return task


def mixture(spec: str, split: str = "train", seed: int = 0) -> Mixture:
    """
    One split of the tasks of a mixture, shuffled together.

    Raises ValueError for a spec that is amiss.
    """
    tasks = []
    for part in parse_mixture(spec):
        task = part.task(split)
        tasks += [task if part.rows is None else Subset(task, 0, part.rows)] * part.repeats
    return Mixture(tasks, seed)


def validation(spec: str, seed: int = 0) -> Mixture:
    """
    What measures the loss on a mixture.

    Up to VAL_ROWS conversations of each task's split "val", or where there is none "test".
    """
    parts = unique(parse_mixture(spec))
    return Mixture([Subset(p.task(held_out(p.name)), 0, VAL_ROWS) for p in parts], seed)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the split "test", as many from each task of a mixture.

    Raises ValueError for a task whose answers cannot be scored.
    """
    parts = unique(parse_mixture(spec))
    for part in parts:
        if TASKS[part.name].task.kind == "talk":
            raise ValueError(f"{part.name} is only trained on: it has no right answers to score")
    return Mixture([Subset(p.task("test"), 0, math.ceil(count / len(parts))) for p in parts])


def unique(parts: Sequence[Part]) -> list[Part]:
    """One part for each task and source."""
    return list({(part.name, part.source): part for part in parts}.values())


def held_out(name: str) -> str:
    """The split that is never trained on and measures the loss."""
    return "val" if "val" in TASKS[name].task.splits else "test"
