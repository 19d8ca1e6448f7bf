"""
Mixtures of conversations: notation, and the conversations of every bucket.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> buckets -> train and val of each

A bucket is a task or one declared in a JSON file. Some tasks take a data source: jsonl:<file>,
spelling:<word file>, smoltalk:<owner>/<name>. Training uses only the "train" split of a task. Data
is downloaded on first use.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.common import is_main_process, read_json
from nanochat.rows import ChatPart
from tasks.augment import AUGMENTERS
from tasks.base import LaterTurns, Mixture, Subset, Tags, Task
from tasks.held_out import reject_contaminated, require_access
from tasks.registry import TASKS, key_of, scored_task

PART = re.compile(
    r"(?P<name>[\w./-]+(:(?P<source>([^,=*{}]|\{[^{}]*\})+))?)"
    r"(=(?P<rows>[1-9]\d*))?(\*(?P<repeats>\d+\.?\d*|\.\d+)|[=*](?P<tokens>\d+)t)?"
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


@dataclass(frozen=True)
class Bucket:
    """A named set of conversations, and its amount in a mixture."""

    name: str
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

    def open(self, split: str) -> Task:
        """A full split of its task."""
        task = TASKS[self.task](split, self.source)
        return AUGMENTERS[self.augment](task) if self.augment else task

    def used(self, split: str) -> Task:
        """The conversations of a split that the mixture uses."""
        return self.open(split) if self.rows is None else Subset(self.open(split), self.rows)

    @cached_property
    def train(self) -> Task:
        """The conversations to train on."""
        return self.used("train")

    @cached_property
    def val(self) -> Task:
        """Up to VAL_ROWS conversations of the "val" split, or "test" if there is none."""
        split = "val" if "val" in TASKS[self.task].splits else "test"
        return Subset(self.open(split), VAL_ROWS)

    @property
    def benchmark(self) -> str:
        """Name of the benchmark if `val` is its test split, else empty."""
        return self.val.name if self.val.split == "test" and self.val.kind != "talk" else ""


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
    content = read_json(file)
    if content.keys() != {"mixture", "buckets"}:
        raise ValueError(f'{file} must be {{"mixture": "...", "buckets": {{name: {{...}}}}}}')
    known = {"task", "source", "augment", *Tags.__annotations__}
    for name, entry in content["buckets"].items():
        if "task" not in entry or not all(k in known and type(entry[k]) is str for k in entry):
            fix = (
                f"use task and others of these keys, with string values: {', '.join(sorted(known))}"
            )
            raise ValueError(f"{file}: {name} is {entry}; {fix}")
    return content["mixture"], content["buckets"]


def buckets(spec: str, declared: Mapping[str, Mapping[str, str]] = {}) -> list[Bucket]:
    """
    The buckets of a mixture, in order; a split that does not exist raises ValueError when it is
    used. Raises ValueError for a part that is malformed or repeated, or has an unknown task.
    """
    found = {}
    for words in COMMA.split(spec):
        bucket = parse_bucket(words.strip(), spec, declared)
        if found.setdefault(bucket.name, bucket) is not bucket:
            name = bucket.name
            raise ValueError(f"{name} appears twice in the mixture {spec!r}; use {name}*2")
    return list(found.values())


def parse_bucket(words: str, spec: str, declared: Declared) -> Bucket:
    """One part of the mixture `spec`."""
    part = PART.fullmatch(words)
    if part is None:
        raise ValueError(f"{words!r} in the mixture {spec!r} must be {FORM}; *0 uses none")
    name = part["name"]
    entry = declared.get(name, {})
    key = key_of(entry.get("task", name.partition(":")[0]))
    source, augment = entry.get("source", part["source"]), entry.get("augment")
    if not entry:
        name = f"{key}:{source}" if source else key
    if augment and augment not in AUGMENTERS:
        raise ValueError(f"{name}: augment {augment!r} is not one of {', '.join(AUGMENTERS)}")
    own = {tag: entry[tag] for tag in Tags.__annotations__ if tag in entry}
    known = Tags() if source else TASKS[key].tags
    own["parent"] = "+".join(filter(None, (known.parent, own.get("parent"))))
    tags = replace(known, **{"augmented": augment or "", **own})
    rows, tokens = (int(number) if number else None for number in (part["rows"], part["tokens"]))
    repeats = float(part["repeats"] or 1)
    return Bucket(name, key, source, augment, tags, rows, repeats, tokens)


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
        learned = {name: part[1:] for name, part in self.train_parts().items()}
        measured = {name: part.identity for name, part in self.val_parts().items()}
        return {"learned": learned, "measured": measured}

    def train_parts(self) -> dict[str, ChatPart]:
        """Conversations to train on, by bucket."""
        return {
            b.name: ChatPart(b.train, b.train.identity, b.repeats, b.tokens)
            for b in self.train_buckets
        }

    def val_parts(self) -> dict[str, ChatPart]:
        """Conversations to validate on, by bucket."""
        return {b.name: ChatPart(b.val, b.val.identity) for b in self.val_buckets}

    def tables(self, counts: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
        """Tables for a record: amounts by bucket, and shares by every tag with several values."""
        total = sum(count["used_tokens"] for count in counts.values())
        rows, shares = [], Counter()
        for bucket in self.train_buckets:
            count, tags = counts[bucket.name], vars(bucket.tags)
            used, named = count["used_tokens"], ", ".join(filter(None, tags.values())) or "-"
            numbers = [f"{count[k]:,}" for k in ("conversations", "tokens", "trained")]
            repeats = f"{used / count['tokens']:.3g}"
            rows.append([bucket.name, named, *numbers, repeats, f"{used / total:.1%}"])
            shares.update({(tag, value or "-"): used for tag, value in tags.items()})
        values = Counter(tag for tag, _ in shares)
        by_tag = [
            [*tag, f"{used / total:.1%}"]
            for tag, used in sorted(shares.items())
            if values[tag[0]] > 1
        ]
        columns = "Bucket, Tags, Conversations, Tokens, With loss, Repeats, Share".split(", ")
        by_bucket = {"title": "Mixture", "columns": columns, "rows": rows}
        shown = {"title": "Mixture by tag", "columns": ["Tag", "Value", "Share"], "rows": by_tag}
        return [by_bucket, shown] if by_tag else [by_bucket]


def chat_mixture(words: str, val_words: str | None = None) -> ChatMixture:
    """
    The conversations of a --mixture, and those of --val_mixture to validate on. Raises UsageError
    if a training bucket belongs to the family of a final benchmark, or a final benchmark would
    validate.
    """
    spec, own = read_mixture(words)
    chats = ChatMixture(spec, own, buckets(spec, own), buckets(val_words or spec, own))
    reject_contaminated({bucket.name: bucket.tags for bucket in chats.train_buckets})
    require_access((bucket.benchmark for bucket in chats.val_buckets), False, {})
    for bucket in chats.train_buckets:
        if bucket.repeats > MOST_REPEATS and is_main_process():
            print(f"warning: more than {MOST_REPEATS} repeats of {bucket.name} add little")
    return chats


# ------------------------------------------------------------------------------------------------
# Questions for RL


def scored_buckets(spec: str) -> list[Bucket]:
    """The buckets of a mixture of tasks. Raises ValueError also for a training-only task."""
    found = buckets(spec)
    for bucket in found:
        scored_task(bucket.task)
    return found


def rl_questions(spec: str, seed: int = 0) -> Mixture:
    """
    Questions of a mixture of tasks that RL trains on, shuffled together; half of them are asked
    after others, as later in a chat.

    Raises ValueError for an invalid spec, a training-only task, or amounts other than question
    counts and whole repeats.
    """
    tasks = []
    for bucket in scored_buckets(spec):
        if bucket.repeats % 1 or bucket.tokens is not None:
            raise ValueError(
                f"{bucket.name!r} in {spec!r}: use a number of questions (=500) or repeats (*2)"
            )
        tasks += [bucket.used(TASKS[bucket.task].rl_split)] * int(bucket.repeats)
    every = Mixture(tasks, seed)
    return LaterTurns(every, every, RL_TURNS)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the "test" split, equally many of each task in a mixture.

    Raises ValueError for a training-only task.
    """
    found = scored_buckets(spec)
    each = math.ceil(count / len(found))
    return Mixture([Subset(bucket.open("test"), each) for bucket in found])
