"""
Tasks as buckets of a mixture: their tags and conversations.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> buckets -> name, tags, train and val of each

Some tasks take a data source: jsonl:<file>, spelling:<word file>, smoltalk:<owner>/<name>. Training
uses only the "train" split of a task. Data is downloaded on first use.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanochat.mixture import (
    BUDGET,
    Bucket,
    ChatMixture,
    Part,
    Tags,
    parse_mixture,
    read_mixture,
    tags_of,
)
from tasks.augment import AUGMENTERS
from tasks.base import Mixture, Subset, Task
from tasks.held_out import check_finetuning_buckets
from tasks.registry import TASKS, WITH_SOURCE, key_of, make_task

VAL_ROWS = 1_000  # per task: enough to measure a loss, without one task dominating

# Licenses as stated by the dataset owners
TAGS = {
    "arc_easy": Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc"),
    "arc_challenge": Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc"),
    "arc_easy_10": Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc"),
    "arc_challenge_10": Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc"),
    "mmlu": Tags("exams", "en", "native", "MIT", "letter", "mmlu"),
    # KMMLU-Pro has other questions than KMMLU, but in the style of the same exams
    "kmmlu": Tags("exams", "ko", "native", "CC BY-ND 4.0", "letter", "kmmlu+kmmlu-pro"),
    "kmmlu_redux": Tags("exams", "ko", "native", "CC BY-NC-ND 4.0", "letter", "kmmlu"),
    "kmmlu_redux_10": Tags("exams", "ko", "native", "CC BY-NC-ND 4.0", "letter", "kmmlu"),
    "kmmlu_pro": Tags("exams", "ko", "native", "CC BY-NC-ND 4.0", "letter", "kmmlu-pro"),
    "hae_rae": Tags("culture", "ko", "native", "CC BY-NC-ND 4.0", "letter", "hae-rae"),
    "clinical_qa": Tags("medicine", "ko", "synthetic", "", "letter", "clinical-qa"),
    "click": Tags("culture", "ko", "native", "", "letter", "click"),
    "kobalt": Tags("language", "ko", "native", "CC BY-NC 4.0", "letter", "kobalt"),
    "gpqa": Tags("science", "en", "native", "CC BY 4.0", "letter", "gpqa"),
    "mclm_ko": Tags("math", "ko", "translated", "MIT", "number", "math"),
    "hrm8k": Tags("math", "ko", "translated", "MIT", "number", "gsm8k+math+omni-math+mmlu+ksm"),
    "livecodebench": Tags("code", "en", "native", "", "code", "livecodebench"),
    "gsm8k": Tags("math", "en", "native", "MIT", "number", "gsm8k"),
    "aqua": Tags("math", "en", "native", "Apache-2.0", "marker", "aqua"),
    "aqua_letter": Tags("math", "en", "native", "Apache-2.0", "letter", "aqua"),
    "humaneval": Tags("code", "en", "native", "MIT", "code", "humaneval"),
    "smoltalk": Tags("chat", "en", "synthetic", "Apache-2.0", "free", "smoltalk", "several"),
    "openthoughts3": Tags(
        "reasoning", "en", "mixed", "Apache-2.0", "free", "openthoughts3", "QwQ-32B"
    ),
    "rstar_coder": Tags("code", "en", "synthetic", "CC BY 4.0", "code", "rstar-coder", "QwQ-32B"),
    "yisang": Tags("reasoning", "ko", "native", "Apache-2.0", "free", "yisang", "Qwen3-32B"),
    "spelling": Tags("spelling", "en", "synthetic", "", "number", "spelling"),
    "simple_spelling": Tags("spelling", "en", "synthetic", "", "free", "spelling"),
    "identity": Tags("chat", "en", "synthetic", "MIT", "free", "identity"),
    "world_chat": Tags("chat", "en", "synthetic", "MIT", "free", "world"),
    "world_facts": Tags("facts", "en", "synthetic", "MIT", "free", "world"),
    "world_choice": Tags("facts", "en", "synthetic", "MIT", "letter", "world"),
    "world_problems": Tags("math", "en", "synthetic", "MIT", "number", "world"),
    "world_spelling": Tags("spelling", "en", "synthetic", "MIT", "number", "world"),
}


def parse_task_mixture(spec: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> list[Part]:
    """
    Parse a mixture and resolve its names to task keys or declared names (`mixture.read_mixture`).

    Raises ValueError for an invalid part or a task without a train split.
    """
    parts = []
    for part in parse_mixture(spec):
        entry = declared.get(part.name, {"task": part.name, "source": part.source})
        if part.name in declared and (part.source or "task" not in entry):
            raise ValueError(
                f"{part.label!r}: {part.name} is declared as {entry}; the declaration must name a "
                f"task, and the mixture must use {part.name} without a source"
            )
        key = key_of(entry["task"])
        if "train" not in TASKS[key].splits:
            raise ValueError(f"{key} is evaluation-only: it has no train split")
        if entry.get("source") and not issubclass(TASKS[key], WITH_SOURCE):
            raise ValueError(f"{part.label!r}: {key} takes no data source; remove it")
        parts.append(part if part.name in declared else part._replace(name=key))
    return parts


def task_of(part: Part, split: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> Task:
    """A full split of a part's task; "held out" selects the split for the validation loss."""
    entry = declared.get(part.name, {"task": part.name, "source": part.source})
    key, source = key_of(entry["task"]), entry.get("source")
    if split == "held out":
        split = "val" if "val" in TASKS[key].splits else "test"
    task = make_task(key, split, **({"source": source} if source else {}))
    if kind := entry.get("augment"):
        if kind not in AUGMENTERS:
            raise ValueError(f"{part.name}: augment {kind!r} is not one of {', '.join(AUGMENTERS)}")
        return AUGMENTERS[kind](task)
    return task


def chat_mixture(words: str, val_words: str | None = None) -> ChatMixture:
    """
    The conversations of a --mixture, and those of --val_mixture to validate on. Raises UsageError
    if a bucket belongs to a final benchmark.
    """
    spec, own = read_mixture(words)
    chats = ChatMixture(spec, own, buckets(spec, own), buckets(val_words or spec, own))
    check_finetuning_buckets(chats.train_buckets, chats.val_buckets)
    return chats


def buckets(spec: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> list[Bucket]:
    """
    The buckets of a mixture, one per part, in order.

    val: up to VAL_ROWS conversations of the "val" split, or "test" if there is none. Raises
    ValueError for an invalid spec or a duplicate bucket.
    """
    parts = parse_task_mixture(spec, declared)
    labels = [part.label for part in parts]
    if twice := [label for n, label in enumerate(labels) if label in labels[:n]]:
        raise ValueError(f"{twice[0]} appears twice in the mixture {spec!r}; use {twice[0]}*2")
    found = []
    for part in parts:
        train = task_of(part, "train", declared)
        train = train if part.rows is None else Subset(train, part.rows)
        val = Subset(task_of(part, "held out", declared), VAL_ROWS)
        found.append(Bucket(part.label, tags(part, declared), train, val))
    return found


def tags(part: Part, declared: Mapping[str, Mapping[str, Any]] = {}) -> Tags:
    """The tags of a bucket; a task with a data source has only the declared ones."""
    entry = declared.get(part.name, {"task": part.name, "source": part.source})
    default = Tags() if entry.get("source") else TAGS.get(key_of(entry["task"]), Tags())
    kind = entry.get("augment", "")
    form = "several" if kind == "styles" else default.answer_format
    return tags_of(entry, replace(default, augmented=kind, answer_format=form))


# ------------------------------------------------------------------------------------------------
# Questions for RL


def parse_scored_tasks(spec: str) -> list[Part]:
    """The parts of a mixture of tasks. Raises ValueError also for a training-only task."""
    parts = parse_task_mixture(spec)
    for part in parts:
        if TASKS[part.name].kind == "talk":
            raise ValueError(f"{part.name} is training-only: it has no reference answers to score")
    return parts


def rl_questions(spec: str, seed: int = 0) -> Mixture:
    """
    Questions of a mixture of tasks that RL trains on, shuffled together.

    Raises ValueError for an invalid spec, a training-only task, or amounts other than question
    counts and whole repeats.
    """
    tasks = []
    if BUDGET.search(spec):
        raise ValueError(f"RL takes no budget of tokens, got {spec!r}; use a number such as =500")
    for part in parse_scored_tasks(spec):
        if part.tokens is not None or part.share is not None or (part.repeats or 1) % 1:
            raise ValueError(
                f"{part.label!r} in {spec!r}: use a number of questions (=500) or repeats (*2)"
            )
        task = task_of(part, TASKS[part.name].rl_split)
        chosen = task if part.rows is None else Subset(task, part.rows)
        tasks += [chosen] * round(part.repeats or 1)
    return Mixture(tasks, seed)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the "test" split, equally many of each different task in a mixture.

    Raises ValueError for a training-only task.
    """
    parts = {part.label: part for part in parse_scored_tasks(spec)}.values()
    each = math.ceil(count / len(parts))
    return Mixture([Subset(task_of(part, "test"), each) for part in parts])
