"""
Mixtures of conversations: notation, and the conversations of every bucket.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> parse_mixture -> buckets -> train and val of each

A bucket is a task or one declared in a JSON file. Some tasks take a data source: jsonl:<file>,
spelling:<word file>, smoltalk:<owner>/<name>. Training uses only the "train" split of a task. Data
is downloaded on first use.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import is_main_process, read_json
from nanochat.rows import ChatPart
from tasks.augment import AUGMENTERS
from tasks.base import LaterTurns, Mixture, Subset, Tags, Task
from tasks.held_out import reject_contaminated, require_access
from tasks.registry import TASKS, WITH_SOURCE, key_of, make_task

PART = re.compile(
    r"(?P<name>[\w./-]+)(?::(?P<source>(?:[^,=*{}]|\{[^{}]*\})+))?"
    r"(?:=(?:(?P<of>\d+)\*)?(?P<tokens>\d+)t"
    r"|(?:=(?P<rows>\d+))?(?:\*(?P<repeats>\d+\.?\d*|\.\d+))?)"
)
COMMA = re.compile(r",(?![^{}]*\})")  # not inside braces
FORM = "name[:source], then =<number of conversations>, *<repeats>, both, or =<tokens>t"
MOST_REPEATS = 4  # more have diminishing returns: Muennighoff et al., arXiv:2305.16264
RL_TURNS = (0, 0, 1, 3)  # numbers of earlier questions in RL, equally likely
VAL_ROWS = 1_000  # per task: enough to measure a loss, without one task dominating

Declared = Mapping[str, Mapping[str, str]]  # own buckets: name -> task, source, augment and tags


@dataclass(frozen=True)
class MixConfig:
    mixture: str = ""
    """Buckets with amounts, such as smoltalk=10000,gsm8k*4,aqua, or a JSON file that defines
    buckets; see docs/data.md. Default: depends on the base model."""


class Part(NamedTuple):
    """A part of a mixture: its task and its amount."""

    label: str
    """Declared name, or task and source; unique in a mixture."""
    task: str
    """Key of the task."""
    source: str | None
    augment: str | None
    """Key in AUGMENTERS."""
    tags: Tags
    """Those of the task and the declared ones; a task with a data source has only the latter."""
    rows: int | None
    """Use the first N conversations; None = all."""
    repeats: float
    """How often each is used in an epoch; 0 = not at all."""
    tokens: int | None
    """Tokens used in an epoch, instead of repeats."""


def read_mixture(words: str) -> tuple[str, Declared]:
    """
    Return the notation of a --mixture and its own buckets.

    `words` is the notation, or a file X.json: {"mixture": ..., "buckets": {name: {"task":
    "smoltalk", "source": "local/chat-korean", "language": "ko", ...}}}; for questions, "augment"
    is styles, order or options. Raises ValueError for other content, naming the bucket.
    """
    if not re.fullmatch(r"[^:=,]+\.json", words):
        return words, {}
    file = Path(words).expanduser()
    match read_json(file):
        case {"mixture": str(spec), "buckets": dict(declared), **others} if not others:
            pass
        case _:
            raise ValueError(f'{file} must be {{"mixture": "...", "buckets": {{name: {{...}}}}}}')
    known = {"task", "source", "augment", *(tag.name for tag in fields(Tags))}
    for name, entry in declared.items():
        if not isinstance(entry, dict) or "task" not in entry:
            raise ValueError(f"{file}: {name} must be an object with a task")
        if wrong := {k: v for k, v in entry.items() if k not in known or not isinstance(v, str)}:
            fix = f"use only these keys, with string values: {', '.join(sorted(known))}"
            raise ValueError(f"{file}: {name} has invalid {wrong}; {fix}")
    return spec, declared


def parse_mixture(spec: str, declared: Mapping[str, Mapping[str, str]] = {}) -> list[Part]:
    """
    Parse the parts of a mixture. Raises ValueError naming one that is malformed, or whose task is
    unknown, has no train split or takes no data source.
    """
    return [parse_part(words, spec, declared) for words in COMMA.split(spec)]


def parse_part(words: str, spec: str, declared: Declared) -> Part:
    """A part of the mixture `spec`."""
    found = PART.fullmatch(words.strip())
    if found is None or "0" in (found["rows"], found["of"]):
        raise ValueError(f"{words!r} in the mixture {spec!r} must be {FORM}; *0 uses none")
    label, source = found["name"], found["source"]
    if label in declared:
        entry = declared[label]
        if source:
            raise ValueError(f"'{label}:{source}': {label} is declared; remove {source!r}")
        key, source = key_of(entry["task"]), entry.get("source")
    else:
        entry, key = {}, key_of(label)
        label = f"{key}:{source}" if source else key
    if "train" not in TASKS[key].splits:
        raise ValueError(f"{key} is evaluation-only: it has no train split")
    if source and not issubclass(TASKS[key], WITH_SOURCE):
        raise ValueError(f"{label!r}: {key} takes no data source; remove it")
    own = {tag.name: entry[tag.name] for tag in fields(Tags) if tag.name in entry}
    if augment := entry.get("augment"):
        if augment not in AUGMENTERS:
            raise ValueError(f"{label}: augment {augment!r} is not one of {', '.join(AUGMENTERS)}")
        own = {"augmented": augment} | own
        own = {"answer_format": "several"} | own if augment == "styles" else own
    tags = replace(Tags() if source else TASKS[key].tags, **own)
    numbers = found["rows"] or found["of"], found["tokens"]
    rows, tokens = (int(number) if number else None for number in numbers)
    repeats = float(found["repeats"] or 1)
    return Part(label, key, source, augment, tags, rows, repeats, tokens)


def task_of(part: Part, split: str) -> Task:
    """A full split of a part's task; "held out" selects the split for the validation loss."""
    if split == "held out":
        split = "val" if "val" in TASKS[part.task].splits else "test"
    task = make_task(part.task, split, **({"source": part.source} if part.source else {}))
    return AUGMENTERS[part.augment](task) if part.augment else task


class Bucket(NamedTuple):
    """A named set of conversations."""

    name: str
    tags: Tags
    train: Task
    val: Task
    part: Part
    """Its amount."""

    @property
    def benchmark(self) -> str:
        """Name of the benchmark if `val` is its test split, else empty."""
        return self.val.name if self.val.split == "test" and self.val.kind != "talk" else ""


def buckets(spec: str, declared: Mapping[str, Mapping[str, str]] = {}) -> list[Bucket]:
    """
    The buckets of a mixture, one per part, in order.

    val: up to VAL_ROWS conversations of the "val" split, or "test" if there is none. Raises
    ValueError for an invalid spec or a duplicate bucket.
    """
    parts = parse_mixture(spec, declared)
    [(most, times), *_] = Counter(part.label for part in parts).most_common()
    if times > 1:
        raise ValueError(f"{most} appears twice in the mixture {spec!r}; use {most}*2")
    found = []
    for part in parts:
        val = Subset(task_of(part, "held out"), VAL_ROWS)
        found.append(Bucket(part.label, part.tags, first_rows(part, "train"), val, part))
    return found


def first_rows(part: Part, split: str) -> Task:
    """The conversations of a split that a part uses."""
    task = task_of(part, split)
    return task if part.rows is None else Subset(task, part.rows)


@dataclass(frozen=True)
class ChatMixture:
    """Buckets of conversations for training and validation."""

    spec: str
    declared: Declared
    train_buckets: Sequence[Bucket]
    val_buckets: Sequence[Bucket]

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; identical for the same conversations in the same proportions."""
        return {
            "learned": {b.name: [b.train.identity, b.part[-3:]] for b in self.train_buckets},
            "measured": {b.name: b.val.identity for b in self.val_buckets},
        }

    def train_parts(self) -> dict[str, ChatPart]:
        """Conversations to train on, by bucket."""
        return {
            b.name: ChatPart(b.train, b.train.identity, *b.part[-2:]) for b in self.train_buckets
        }

    def val_parts(self) -> dict[str, ChatPart]:
        """Conversations to validate on, by bucket."""
        return {b.name: ChatPart(b.val, b.val.identity) for b in self.val_buckets}

    def tables(self, counts: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
        """Tables for a record: amounts by bucket, and shares by every tag with several values."""
        total = sum(count["used_tokens"] for count in counts.values())
        rows, shares = [], defaultdict[tuple[str, str], float](float)
        for bucket in self.train_buckets:
            count, tags = counts[bucket.name], vars(bucket.tags)
            share = count["used_tokens"] / total
            numbers = [f"{count[k]:,}" for k in ("conversations", "tokens", "trained")]
            repeats = f"{count['used_tokens'] / count['tokens']:.3g}"
            named = ", ".join(filter(None, tags.values())) or "-"
            rows.append([bucket.name, named, *numbers, repeats, f"{share:.1%}"])
            for item in tags.items():
                shares[item] += share
        values = Counter(tag for tag, _ in shares)
        by_tag = [
            [tag, value or "-", f"{share:.1%}"]
            for (tag, value), share in sorted(shares.items())
            if values[tag] > 1
        ]
        columns = "Bucket, Tags, Conversations, Tokens, With loss, Repeats, Share".split(", ")
        tables = [
            {"title": "Mixture", "columns": columns, "rows": rows},
            {"title": "Mixture by tag", "columns": ["Tag", "Value", "Share"], "rows": by_tag},
        ]
        return tables if by_tag else tables[:1]


def chat_mixture(words: str, val_words: str | None = None) -> ChatMixture:
    """
    The conversations of a --mixture, and those of --val_mixture to validate on. Raises UsageError
    if a training bucket belongs to the family of a final benchmark, or any bucket's benchmark is
    final.
    """
    spec, own = read_mixture(words)
    chats = ChatMixture(spec, own, buckets(spec, own), buckets(val_words or spec, own))
    reject_contaminated({bucket.name: bucket.tags for bucket in chats.train_buckets})
    require_access((b.benchmark for b in (*chats.val_buckets, *chats.train_buckets)), False, {})
    for bucket in chats.train_buckets:
        if bucket.part.repeats > MOST_REPEATS and is_main_process():
            print(f"warning: more than {MOST_REPEATS} repeats of {bucket.name} add little")
    return chats


# ------------------------------------------------------------------------------------------------
# Questions for RL


def scored_parts(spec: str) -> list[Part]:
    """The parts of a mixture of tasks. Raises ValueError also for a training-only task."""
    parts = parse_mixture(spec)
    for part in parts:
        if TASKS[part.task].kind == "talk":
            raise ValueError(f"{part.task} is training-only: it has no reference answers to score")
    return parts


def rl_questions(spec: str, seed: int = 0) -> Mixture:
    """
    Questions of a mixture of tasks that RL trains on, shuffled together; half of them are asked
    after others, as later in a chat.

    Raises ValueError for an invalid spec, a training-only task, or amounts other than question
    counts and whole repeats.
    """
    tasks = []
    for part in scored_parts(spec):
        if part.repeats % 1 or part.tokens is not None:
            raise ValueError(
                f"{part.label!r} in {spec!r}: use a number of questions (=500) or repeats (*2)"
            )
        tasks += [first_rows(part, TASKS[part.task].rl_split)] * int(part.repeats)
    every = Mixture(tasks, seed)
    return LaterTurns(every, every, RL_TURNS)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the "test" split, equally many of each different task in a mixture.

    Raises ValueError for a training-only task.
    """
    parts = {part.label: part for part in scored_parts(spec)}.values()
    each = math.ceil(count / len(parts))
    return Mixture([Subset(task_of(part, "test"), each) for part in parts])
