"""
Tasks as the buckets of a mixture: what they are, in tags, and which conversations they hold.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> buckets -> name, tags, train and val of each

Where its data come from can be chosen for some: jsonl:<file>, spelling:<file of words>,
smoltalk:<owner>/<name>. Training takes the split "train" of each task and no other; nothing is
downloaded before it is needed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanochat.mixture import Bucket, Part, Tags, parse_mixture, tags_of
from tasks.augment import AUGMENTERS
from tasks.base import Mixture, Subset, Task
from tasks.registry import TASKS, held_out, key_of, make

VAL_ROWS = 1_000  # of each task: enough to measure a loss, and none drowns the others

# As the owners of the data sets state it
TAGS = {
    "arc_easy": Tags("science", "en", "native", "", "CC BY-SA 4.0", "letter", parent="arc"),
    "arc_challenge": Tags("science", "en", "native", "", "CC BY-SA 4.0", "letter", parent="arc"),
    "arc_easy_10": Tags("science", "en", "native", "", "CC BY-SA 4.0", "letter", parent="arc"),
    "arc_challenge_10": Tags("science", "en", "native", "", "CC BY-SA 4.0", "letter", parent="arc"),
    "mmlu": Tags("exams", "en", "native", "", "MIT", "letter", parent="mmlu"),
    "kmmlu": Tags("exams", "ko", "native", "", "CC BY-ND 4.0", "letter", parent="kmmlu"),
    "gsm8k": Tags("math", "en", "native", "", "MIT", "number", parent="gsm8k"),
    "aqua": Tags("math", "en", "native", "", "Apache-2.0", "marker", parent="aqua"),
    "aqua_letter": Tags("math", "en", "native", "", "Apache-2.0", "letter", parent="aqua"),
    "humaneval": Tags("code", "en", "native", "", "MIT", "code", parent="humaneval"),
    "smoltalk": Tags("chat", "en", "synthetic", "several", "Apache-2.0", "free", parent="smoltalk"),
    "spelling": Tags("spelling", "en", "synthetic", "", "", "number", parent="spelling"),
    "simple_spelling": Tags("spelling", "en", "synthetic", "", "", "free", parent="spelling"),
    "world_chat": Tags("chat", "en", "synthetic", "", "MIT", "free", parent="world"),
    "world_facts": Tags("facts", "en", "synthetic", "", "MIT", "free", parent="world"),
    "world_choice": Tags("facts", "en", "synthetic", "", "MIT", "letter", parent="world"),
    "world_problems": Tags("math", "en", "synthetic", "", "MIT", "number", parent="world"),
    "world_spelling": Tags("spelling", "en", "synthetic", "", "MIT", "number", parent="world"),
}


def known(spec: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> list[Part]:
    """
    The parts of a mixture, by the keys of their tasks or the names they were declared under
    (`mixture.read_mixture`).

    Raises ValueError naming a part that is amiss, or that names no task to train on.
    """
    parts = []
    for part in parse_mixture(spec):
        if part.name in declared:
            if part.source or "task" not in declared[part.name]:
                raise ValueError(
                    f"{part.label!r}: {part.name} is declared as {declared[part.name]}"
                )
            parts.append(part)
            continue
        key = key_of(part.name)
        entry = TASKS[key]
        if "train" not in entry.task.splits:
            raise ValueError(f"{key} is only for evaluation: it has no split to train on")
        if part.source and not entry.source:
            raise ValueError(f"{part.label!r}: the data of {key} cannot be chosen")
        parts.append(part._replace(name=key))
    return parts


def task_of(part: Part, split: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> Task:
    """A split of the task behind a part, whole; "held out" is that which measures the loss."""
    entry = declared.get(part.name, {"task": part.name, "source": part.source})
    key, source = key_of(entry["task"]), entry.get("source")
    option = TASKS[key].source
    split = held_out(key) if split == "held out" else split
    task = make(key, split, **({option: source} if option and source else {}))
    if kind := entry.get("augment"):
        if kind not in AUGMENTERS:
            raise ValueError(f"{part.name}: augment is {' or '.join(AUGMENTERS)}, not {kind!r}")
        return AUGMENTERS[kind](task)
    return task


def buckets(spec: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> list[Bucket]:
    """
    The buckets of a mixture, one for each of its parts, in order.

    val: up to VAL_ROWS conversations of the split "val", or where there is none "test". Raises
    ValueError for a spec that is amiss, or names a bucket twice.
    """
    parts = known(spec, declared)
    labels = [part.label for part in parts]
    if twice := [label for n, label in enumerate(labels) if label in labels[:n]]:
        raise ValueError(f"{twice[0]} comes twice in the mixture {spec!r}; say {twice[0]}*2")
    found = []
    for part in parts:
        train = task_of(part, "train", declared)
        train = train if part.rows is None else Subset(train, 0, part.rows)
        val = Subset(task_of(part, "held out", declared), 0, VAL_ROWS)
        found.append(Bucket(part.label, tags(part, declared), train, val))
    return found


def tags(part: Part, declared: Mapping[str, Mapping[str, Any]] = {}) -> Tags:
    """What is said of a bucket; of a task with data of one's own only what one declares."""
    entry = declared.get(part.name)
    if entry is None:
        return Tags() if part.source else TAGS.get(part.name, Tags())
    default = Tags() if entry.get("source") else TAGS.get(key_of(entry["task"]), Tags())
    kind = entry.get("augment", "")
    form = "several" if kind == "styles" else default.answer_format
    return tags_of(entry, replace(default, augmented=kind, answer_format=form))


# ------------------------------------------------------------------------------------------------
# Questions to practise


def questions(spec: str, split: str = "train", seed: int = 0) -> Mixture:
    """
    One split of the tasks of a mixture, shuffled together.

    Raises ValueError for a spec that is amiss, or counts anything but questions.
    """
    tasks = []
    for part in known(spec):
        if part.tokens is not None or part.share is not None or (part.repeats or 1) % 1:
            raise ValueError(
                f"{part.label!r} in {spec!r}: questions are counted (=500) and repeated (*2)"
            )
        task = task_of(part, split)
        chosen = task if part.rows is None else Subset(task, 0, part.rows)
        tasks += [chosen] * round(part.repeats or 1)
    return Mixture(tasks, seed)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the split "test", as many from each task of a mixture.

    Raises ValueError for a task whose answers cannot be scored.
    """
    parts = unique(known(spec))
    for part in parts:
        if TASKS[part.name].task.kind == "talk":
            raise ValueError(f"{part.name} is only trained on: it has no right answers to score")
    each = math.ceil(count / len(parts))
    return Mixture([Subset(task_of(part, "test"), 0, each) for part in parts])


def unique(parts: Sequence[Part]) -> list[Part]:
    """One part for each task and source."""
    return list({part.label: part for part in parts}.values())
