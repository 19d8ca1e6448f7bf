"""
Mixtures of conversations: notation, tags of the tasks, and the conversations of every bucket.

    "smoltalk=10000,gsm8k*2,jsonl:mine.jsonl" -> parse_mixture -> buckets -> train and val of each

A bucket is a task or one declared in a JSON file. Some tasks take a data source: jsonl:<file>,
spelling:<word file>, smoltalk:<owner>/<name>. Training uses only the "train" split of a task. Data
is downloaded on first use.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.common import is_main_process, read_json
from nanochat.rows import ChatPart
from tasks.augment import AUGMENTERS
from tasks.base import Mixture, Subset, Task
from tasks.held_out import check_finetuning_buckets
from tasks.registry import TASKS, WITH_SOURCE, key_of, make_task

# ---- Notation ------------------------------------------------------------------------------------

PART = re.compile(
    r"(?P<name>[\w./-]+)(?::(?P<source>(?:[^,=*{}]|\{[^{}]*\})+))?"
    r"(?:=(?:(?P<of>\d+)\*)?(?P<tokens>\d+)t"
    r"|(?:=(?P<rows>\d+))?(?:\*(?P<repeats>\d+\.?\d*|\.\d+))?)"
)
COMMA = re.compile(r",(?![^{}]*\})")  # not inside braces
FORM = "name[:source], then =<number of conversations>, *<repeats>, both, or =<tokens>t"


@dataclass(frozen=True)
class MixConfig:
    mixture: str = ""
    """Buckets with amounts, such as smoltalk=10000,gsm8k*4,aqua, or a JSON file that defines
    buckets; see docs/data.md. Default: depends on the base model."""


class Part(NamedTuple):
    """A bucket of a mixture and its amount."""

    name: str
    source: str | None = None
    rows: int | None = None
    """Use the first N conversations; None = all."""
    repeats: float = 1.0
    """How often each is used in an epoch; 0 = not at all."""
    tokens: int | None = None
    """Tokens used in an epoch, instead of repeats."""

    @property
    def label(self) -> str:
        """Name and source, unique in a mixture."""
        return self.name if self.source is None else f"{self.name}:{self.source}"


def parse_mixture(spec: str) -> list[Part]:
    """Parse the parts of a mixture. Raises ValueError naming one that is malformed."""
    parts = []
    for words in COMMA.split(spec):
        found = PART.fullmatch(words.strip())
        if found is None or "0" in (found["rows"], found["of"]):
            raise ValueError(f"{words!r} in the mixture {spec!r} must be {FORM}; *0 uses none")
        numbers = found["rows"] or found["of"], found["tokens"]
        rows, tokens = (int(number) if number else None for number in numbers)
        repeats = float(found["repeats"] or 1)
        parts.append(Part(found["name"], found["source"], rows, repeats, tokens))
    return parts


@dataclass(frozen=True)
class Tags:
    """Properties of a bucket; empty if not declared."""

    domain: str = ""
    language: str = ""
    origin: str = ""
    """native, translated, synthetic or mixed."""
    licence: str = ""
    answer_format: str = ""
    """letter, number, marker, code or free."""
    parent: str = ""
    """Datasets it was derived from, separated by +. Evaluations that share one are in the same
    family."""
    teacher: str = ""
    """Model that generated the answers, if any."""
    augmented: str = ""
    """How its questions were modified: styles, order or options."""
    waived: str = ""
    """Final benchmarks of its family, separated by +, that do not block training on it."""


def read_mixture(words: str) -> tuple[str, dict[str, dict[str, str]]]:
    """
    Return the notation of a --mixture and its own buckets, name -> task, source, augment and tags.

    `words` is the notation, or a file X.json: {"mixture": ..., "buckets": {name: {"task":
    "smoltalk", "source": "local/chat-korean", "language": "ko", ...}}}; for questions, "augment"
    is styles, order or options. Raises ValueError for other content, naming the bucket.
    """
    if not re.fullmatch(r"[^:=,]+\.json", words):
        return words, {}
    file = Path(words).expanduser()
    content = read_json(file)
    known = {"task", "source", "augment", *(tag.name for tag in fields(Tags))}
    if not isinstance(content, dict) or content.keys() != {"mixture", "buckets"}:
        raise ValueError(f'{file} must be {{"mixture": "...", "buckets": {{name: {{...}}}}}}')
    if not (isinstance(content["mixture"], str) and isinstance(content["buckets"], dict)):
        raise ValueError(f"{file}: mixture must be a string, buckets {{name: {{...}}}}")
    for name, entry in content["buckets"].items():
        if not isinstance(entry, dict) or "task" not in entry:
            raise ValueError(f"{file}: {name} must be an object with a task")
        if wrong := {k: v for k, v in entry.items() if k not in known or not isinstance(v, str)}:
            fix = f"use only these keys, with string values: {', '.join(sorted(known))}"
            raise ValueError(f"{file}: {name} has invalid {wrong}; {fix}")
    return content["mixture"], content["buckets"]


# ---- Buckets -------------------------------------------------------------------------------------

MOST_REPEATS = 4  # more have diminishing returns: Muennighoff et al., arXiv:2305.16264
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


@dataclass(frozen=True)
class ChatMixture:
    """Buckets of conversations for training and validation."""

    spec: str
    declared: Mapping[str, Any]
    """Own buckets, as returned by `read_mixture`."""
    train_buckets: Sequence[Bucket]
    val_buckets: Sequence[Bucket]

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; identical for the same conversations in the same proportions."""
        return {
            "learned": {b.name: [b.train.identity, b.part[2:]] for b in self.train_buckets},
            "measured": {b.name: b.val.identity for b in self.val_buckets},
        }

    def train_parts(self) -> dict[str, ChatPart]:
        """Conversations to train on, by bucket."""
        return {
            b.name: ChatPart(b.train, b.train.identity, b.part.repeats, b.part.tokens)
            for b in self.train_buckets
        }

    def val_parts(self) -> dict[str, ChatPart]:
        """Conversations to validate on, by bucket."""
        return {b.name: ChatPart(b.val, b.val.identity) for b in self.val_buckets}

    def tables(self, counts: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
        """Tables for a record: amounts by bucket, and shares by every tag with several values."""
        total = sum(count["used_tokens"] for count in counts.values())
        rows, shares = [], {}
        for bucket in self.train_buckets:
            count, tags = counts[bucket.name], asdict(bucket.tags)
            share = count["used_tokens"] / total
            named = ", ".join(value for value in tags.values() if value) or "-"
            numbers = [f"{count[k]:,}" for k in ("conversations", "tokens", "trained")]
            repeats = f"{count['used_tokens'] / count['tokens']:.3g}"
            rows.append([bucket.name, named, *numbers, repeats, f"{share:.1%}"])
            for tag, value in tags.items():
                of_tag = shares.setdefault(tag, {})
                of_tag[value] = of_tag.get(value, 0.0) + share
        by_tag = [
            [tag, value or "-", f"{share:.1%}"]
            for tag, of_tag in shares.items()
            if len(of_tag) > 1
            for value, share in of_tag.items()
        ]
        columns = "Bucket, Tags, Conversations, Tokens, With loss, Repeats, Share".split(", ")
        tables = [
            {"title": "Mixture", "columns": columns, "rows": rows},
            {"title": "Mixture by tag", "columns": ["Tag", "Value", "Share"], "rows": by_tag},
        ]
        return tables if by_tag else tables[:1]


def parse_task_mixture(spec: str, declared: Mapping[str, Mapping[str, Any]] = {}) -> list[Part]:
    """
    Parse a mixture and resolve its names to task keys or declared names (`read_mixture`).

    Raises ValueError for an invalid part or a task without a train split.
    """
    parts = []
    for part in parse_mixture(spec):
        entry = declared.get(part.name, {"task": part.name, "source": part.source})
        if part.name in declared and part.source:
            raise ValueError(f"{part.label!r}: {part.name} is declared; remove {part.source!r}")
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
    for bucket in chats.train_buckets:
        if bucket.part.repeats > MOST_REPEATS and is_main_process():
            print(f"warning: more than {MOST_REPEATS} repeats of {bucket.name} add little")
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
        found.append(Bucket(part.label, tags(part, declared), train, val, part))
    return found


def tags(part: Part, declared: Mapping[str, Mapping[str, Any]] = {}) -> Tags:
    """The tags of a bucket; a task with a data source has only the declared ones."""
    entry = declared.get(part.name, {"task": part.name, "source": part.source})
    default = Tags() if entry.get("source") else TAGS.get(key_of(entry["task"]), Tags())
    kind = entry.get("augment", "")
    form = "several" if kind == "styles" else default.answer_format
    own = {tag.name: entry[tag.name] for tag in fields(Tags) if tag.name in entry}
    return replace(default, **{"augmented": kind, "answer_format": form, **own})


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
    for part in parse_scored_tasks(spec):
        if part.repeats % 1 or part.tokens is not None:
            raise ValueError(
                f"{part.label!r} in {spec!r}: use a number of questions (=500) or repeats (*2)"
            )
        task = task_of(part, TASKS[part.name].rl_split)
        chosen = task if part.rows is None else Subset(task, part.rows)
        tasks += [chosen] * int(part.repeats)
    return Mixture(tasks, seed)


def held_out_questions(spec: str, count: int) -> Mixture:
    """
    About `count` questions of the "test" split, equally many of each different task in a mixture.

    Raises ValueError for a training-only task.
    """
    parts = {part.label: part for part in parse_scored_tasks(spec)}.values()
    each = math.ceil(count / len(parts))
    return Mixture([Subset(task_of(part, "test"), each) for part in parts])
