"""
Mixtures of conversations: notation, and the conversations of every bucket.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> buckets -> train and val of each

A bucket is a task or one declared in a JSON file. Some tasks take a data source: jsonl:<file>, or
the file alone, smoltalk:<owner>/<name>. Fine-tuning uses only the "train" split of a task, RL its
`rl_split`. Data is downloaded on first use.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.common import is_main_process, read_json
from nanochat.rows import ChatPart
from tasks.augment import augment
from tasks.base import LaterTurns, Mixture, Tags, Task
from tasks.chats import FILES
from tasks.held_out import reject_contaminated, require_access
from tasks.registry import TASKS, key_of, scored_task

PART = re.compile(
    r"(?P<name>[\w./~-]+(:(?P<source>([^,=*{}]|\{[^{}]*\})+))?)"
    r"(=(?P<count>[1-9]\d*))?(\*(?P<repeats>\d+\.?\d*|\.\d+)|[=*](?P<tokens>\d+)t)?"
)
COMMA = re.compile(r",(?![^{}]*\})")  # not inside braces
FORM = "name[:source], then =<number of conversations>, *<repeats>, both, or =<tokens>t"
MOST_REPEATS = 4  # more have diminishing returns: Muennighoff et al., arXiv:2305.16264
RL_TURNS = (0, 0, 1, 3)  # numbers of earlier questions in RL, equally likely
VAL_COUNT = 1_000  # per task: enough to measure a loss, without one task dominating

Declared = Mapping[str, Mapping[str, str]]  # own buckets: name -> task, source, augment and tags


@dataclass(frozen=True)
class Bucket:
    """A named set of conversations, and its amount in a mixture."""

    name: str
    """Declared name, or task and source; unique in a mixture."""
    task: type[Task]
    source: str | None
    tags: Tags
    """Those of the task and the declared ones; a task with a data source has only the latter."""
    count: int | None
    """Use the first N conversations; None = all."""
    repeats: float
    """How often each is used in an epoch; 0 = not at all."""
    tokens: int | None
    """Tokens used in an epoch, instead of repeats."""

    def open(self, split: str, count: int | None = None) -> Mixture:
        """A split of its task: the first `count` conversations, or all."""
        return Mixture([self.task(split, self.source)], count=count)

    @cached_property
    def train(self) -> Task:
        """The conversations to train on."""
        return self.open("train", self.count)

    @cached_property
    def val(self) -> Task:
        """Up to VAL_COUNT conversations of the "val" split, or "test" if there is none."""
        split = "val" if "val" in self.task.splits else "test"
        return self.open(split, VAL_COUNT)


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
    try:
        content = read_json(file)
    except ValueError:
        text = file.read_text(encoding="utf-8", errors="replace")
        if '"mixture"' in text or text.lstrip()[:1] not in ("[", "{"):
            raise
        return words, {}  # JSON Lines
    if isinstance(content, list) or not content.keys() & {"mixture", "buckets"}:  # conversations
        return words, {}
    if not isinstance(content, dict) or content.keys() != {"mixture", "buckets"}:
        form = '{"mixture": "...", "buckets": {name: {...}}}'
        raise ValueError(f"{file} must be {form}, or a list of conversations")
    known = "task", "source", "augment", *Tags.__annotations__
    for name, entry in content["buckets"].items():
        if "task" not in entry or not all(k in known and type(entry[k]) is str for k in entry):
            fix = f"use task and others of these keys, with string values: {', '.join(known)}"
            raise ValueError(f"{file}: {name} is {entry}; {fix}")
    return content["mixture"], content["buckets"]


def buckets(spec: str, declared: Mapping[str, Mapping[str, str]] = {}) -> list[Bucket]:
    """
    The buckets of a mixture, in order; a split that does not exist raises ValueError when it is
    used. Raises ValueError for a part that is malformed or repeated, or has an unknown task.
    """
    found = {}
    for words in map(str.strip, COMMA.split(spec)):
        part = PART.fullmatch(words)
        if part is None:
            raise ValueError(f"{words!r} in the mixture {spec!r} must be {FORM}; *0 trains on none")
        name, source, count, repeats, tokens = part.group(*PART.groupindex)
        if name.lower().endswith(FILES) and ":" not in name and name not in declared:
            name, source = f"jsonl:{name}", name
        if "." in name and ":" not in name and name not in declared and Path(name).is_file():
            raise ValueError(f"{name} is a file; use jsonl:{name} if it has JSON in each line")
        entry = declared.get(name, {})
        key, how = key_of(entry.get("task", name.partition(":")[0])), entry.get("augment", "")
        source, task = entry.get("source", source), TASKS[key]
        if not entry:
            name = f"{key}:{source}" if source else key
        if name in found:
            raise ValueError(f"{name} appears twice in the mixture {spec!r}; use {name}*2")
        tags = Tags() if source else replace(task.tags, answer_format=task.answer_format)
        own = {tag: entry[tag] for tag in Tags.__annotations__ if tag in entry}
        own["parent"] = "+".join(filter(None, (tags.parent, entry.get("parent"))))
        found[name] = Bucket(
            name,
            augment(task, how) if how else task,
            source,
            replace(tags, **own),
            count=int(count) if count else None,
            repeats=float(repeats or 1),
            tokens=int(tokens) if tokens else None,
        )
    return list(found.values())


@dataclass(frozen=True)
class ChatMixture:
    """Conversations for training and validation, by bucket."""

    spec: str
    declared: Declared
    train: Mapping[str, ChatPart]
    val: Mapping[str, ChatPart]
    tags: Mapping[str, Tags]
    """Tags of each bucket to train on."""

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; identical for the same conversations in the same proportions."""
        return {
            "learned": {name: part[1:] for name, part in self.train.items()},
            "measured": {name: part.identity for name, part in self.val.items()},
        }

    def tables(self, counts: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
        """Tables for a record: amounts by bucket, and shares by every tag with several values."""
        used = {name: count["used_tokens"] for name, count in counts.items()}
        total, rows, by_tag = sum(used.values()), [], []
        for name, tags in self.tags.items():
            named = ", ".join(filter(None, vars(tags).values())) or "-"
            amounts = [f"{counts[name][k]:,}" for k in ("conversations", "tokens", "trained")]
            repeats = f"{used[name] / counts[name]['tokens']:.3g}"
            rows.append([name, named, *amounts, repeats, f"{used[name] / total:.1%}"])
        for tag in Tags.__annotations__:
            shares = Counter()
            for name, tags in self.tags.items():
                shares[getattr(tags, tag) or "-"] += used[name]
            if len(shares) > 1:
                by_tag += [[tag, value, f"{n / total:.1%}"] for value, n in sorted(shares.items())]
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
    val_spec, val_own = read_mixture(val_words or spec)
    learned, measured = buckets(spec, own), buckets(val_spec, val_own or own)
    tags = {bucket.name: bucket.tags for bucket in learned}
    reject_contaminated(tags)
    require_access(b.task.name for b in measured if "val" not in b.task.splits)
    for bucket in learned:
        if bucket.repeats > MOST_REPEATS and is_main_process():
            print(f"warning: more than {MOST_REPEATS} repeats of {bucket.name} add little")
    train = {b.name: ChatPart(b.train, b.train.identity, b.repeats, b.tokens) for b in learned}
    val = {b.name: ChatPart(b.val, b.val.identity) for b in measured}
    return ChatMixture(spec, own, train, val, tags)


# ---- Questions for RL ----------------------------------------------------------------------------


def scored_buckets(spec: str) -> list[Bucket]:
    """The buckets of a mixture of tasks. Raises ValueError also for a training-only task."""
    found = buckets(spec)
    for bucket in found:
        scored_task(bucket.task.name)
    return found


def rl_questions(spec: str, seed: int = 0) -> Mixture:
    """
    Questions of a mixture of tasks that RL trains on, shuffled together; half of them are asked
    after others, as later in a chat.

    Raises ValueError for an invalid spec, a training-only task, no questions, or amounts other than
    question counts and whole repeats; UsageError if a final benchmark is of the family of a task.
    """
    found, tasks = scored_buckets(spec), []
    reject_contaminated({bucket.name: bucket.tags for bucket in found})
    for bucket in found:
        if bucket.repeats % 1 or bucket.tokens is not None:
            raise ValueError(
                f"{bucket.name!r} in {spec!r}: use a number of questions (=500) or repeats (*2)"
            )
        tasks += [bucket.open(bucket.task.rl_split, bucket.count)] * int(bucket.repeats)
    if not tasks:
        raise ValueError(f"{spec!r} has no questions to train on; use at least one task without *0")
    every = Mixture(tasks, seed)
    return LaterTurns(every, every, RL_TURNS)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the "test" split, equally many of each task in a mixture.

    Raises ValueError for a training-only task, and UsageError for a final benchmark.
    """
    found = scored_buckets(spec)
    require_access(bucket.task.name for bucket in found)
    each = math.ceil(count / len(found))
    return Mixture([bucket.open("test", each) for bucket in found])
