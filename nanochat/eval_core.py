"""
Few-shot evaluation: the CORE metric of DataComp-LM, on any suite of tasks.

    bundle -> open_suite -> Suite: tasks -> prompts -> losses of the options -> accuracy -> CORE

CORE is the mean centered accuracy: 0 is chance, 1 is perfect.
"""

import csv
import math
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from http.client import HTTPException
from os.path import commonprefix  # also works on lists
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple
from urllib.request import urlopen

import torch
import torch.nn.functional as F
import yaml

from nanochat import stats
from nanochat.attention import CacheView, fill_batches, pad_right
from nanochat.common import (
    IGNORE,
    UsageError,
    base_dir,
    fingerprint,
    is_out_of_memory,
    sha256_file,
    write_atomic,
)
from nanochat.dataset import line_error, read_json_lines
from nanochat.dist import DistContext
from nanochat.hub import is_inside

# ---- Tasks ---------------------------------------------------------------------------------------

EXAMPLE_DELIMITER = "\n\n"  # after each few-shot example
ORDER_SEED = 1337  # shuffles the items; `max_items` keeps the first ones
EXAMPLES_SEED = 1234  # an item's few-shot seed is this plus its shuffled index

TaskType = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass(frozen=True)
class FewShotTask:
    """A few-shot task. Items have DCLM's fields."""

    name: str
    kind: TaskType
    num_fewshot: int
    """Few-shot examples per item; fewer if the task has too few other items."""
    random_baseline: float
    """Chance accuracy, in [0, 1)."""
    continuation_delimiter: str
    """Separator between a context and its continuation."""
    items: Sequence[Mapping[str, Any]]

    def options(self, item: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Options of an item as (context with delimiter, continuation) pairs."""
        if self.kind == "multiple_choice":
            pairs = [(item["query"], choice) for choice in item["choices"]]
        elif self.kind == "schema":
            pairs = [(context, item["continuation"]) for context in item["context_options"]]
        else:
            pairs = [(item["context"].strip(), item["continuation"])]
        return [(context + self.continuation_delimiter, ending) for context, ending in pairs]

    def shuffled(self, max_items: int | None = None) -> "FewShotTask":
        """
        Return the task with its items shuffled in a fixed order, or only the first `max_items` of
        them, which then also provide the few-shot examples.
        """
        order = list(self.items)
        Random(ORDER_SEED).shuffle(order)
        return replace(self, items=order[:max_items])

    def examples(self, number: int) -> str:
        """Few-shot examples of an item: other items of the task, drawn with a fixed seed."""
        others = len(self.items) - 1
        drawn = Random(EXAMPLES_SEED + number).sample(range(others), min(self.num_fewshot, others))
        items = [self.items[n + (n >= number)] for n in drawn]  # skips the item itself
        pairs = [self.options(item)[item.get("gold", 0)] for item in items]
        return "".join(context + ending + EXAMPLE_DELIMITER for context, ending in pairs)

    def outcome(self, number: int, scores: Sequence["OptionScore"]) -> int:
        """1 if these option scores select the correct answer, else 0."""
        if self.kind == "language_modeling":
            return int(scores[0].is_greedy)
        nats = [score.nats for score in scores]
        return int(nats.index(min(nats)) == self.items[number]["gold"])


# ---- Scores of options ---------------------------------------------------------------------------
# A model is a GPT, preferably a `gpt.inference_copy`, or has its `hidden`, `logits`, `new_cache`,
# `cfg.max_seq_len` and `device`; `new_cache` None: options do not share a prefix pass.

CPU_PASS_TOKENS, GPU_PASS_TOKENS = 4096, 32_768  # per forward pass, including padding
HEAD_TOKENS = 512  # tokens whose logits are computed at once
MIN_SHARED_FRACTION = 0.3  # a separate prefix pass must save at least this fraction of tokens


@dataclass(frozen=True)
class Question:
    """A tokenized item: one sequence per option, scored from its `starts` index on."""

    number: int
    options: Sequence[Sequence[int]]
    starts: Sequence[int]
    shared: int = 0
    """Length of the common prefix that can be prefilled once for all options because it predicts
    no scored token; 0 for a single option."""
    truncated: bool = False
    """Whether options were truncated to fit the context."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of options, tokens of the longest)."""
        return len(self.options), max(map(len, self.options))


class OptionScore(NamedTuple):
    """Likelihood of an option."""

    nats: float
    """Mean cross-entropy (nats) of the scored tokens."""
    is_greedy: bool
    """Whether every scored token is the argmax."""


def tokenize(task: FewShotTask, number: int, tokenizer: Any, context: int) -> Question:
    """Tokenize an item for a model with a context of `context` tokens."""
    front, pairs = task.examples(number), task.options(task.items[number])
    options = [[tokenizer.bos_id, *tokenizer.encode(front + a + b)] for a, b in pairs]
    if task.kind == "schema":
        ending = max(1, len(commonprefix([ids[:0:-1] for ids in options])))
        starts = [len(ids) - ending for ids in options]
    else:  # the continuation starts where the options differ or, with one option, after the context
        before = (front + pairs[0][0]).rstrip()  # the space before an answer is scored with it
        alone = [tokenizer.bos_id, *tokenizer.encode(before)]
        same = len(commonprefix(options if len(options) > 1 else [*options, alone]))
        starts = [min(same, *(len(ids) - 1 for ids in options))] * len(options)
    return truncate_options(number, options, starts, context)


def truncate_options(
    number: int, options: Sequence[list[int]], starts: Sequence[int], context: int
) -> Question:
    """
    Build a question. If the longest option does not fit, all options are truncated equally on the
    left, after BOS; scored tokens are removed only if they alone do not fit.
    """
    limit = context + 1  # the last token is only predicted
    over = max(0, max(map(len, options)) - limit)
    kept, first = [], []
    for ids, start in zip(options, starts, strict=True):
        cut = max(min(over, start - 1), len(ids) - limit)
        kept.append([*ids[:1], *ids[1 + cut :]])
        first.append(max(1, start - cut))
    shared = min(len(commonprefix(kept)), *first) - 1 if len(kept) > 1 else 0
    return Question(number, kept, first, shared, over > 0)


@torch.inference_mode()
def score_batch(model: Any, questions: Sequence[Question]) -> list[list[OptionScore]]:
    """Score every option of every question in one batch."""
    saved = sum(q.shared * (len(q.options) - 1) for q in questions)
    total = sum(len(ids) for q in questions for ids in q.options)
    shares_prefix = model.new_cache and saved >= MIN_SHARED_FRACTION * total
    inputs, targets = [], []  # a row for each option
    for q in questions:
        skipped = q.shared if shares_prefix else 0
        for ids, start in zip(q.options, q.starts, strict=True):
            inputs.append(ids[skipped:-1])
            targets.append([*[IGNORE] * (start - 1 - skipped), *ids[start:]])
    x = pad_right(inputs, 0, model.device)  # (B, T)
    padded = pad_right(targets, IGNORE, torch.device("cpu"))
    view = prefill_shared(model, questions, x.size(1)) if shares_prefix else None
    scored = padded != IGNORE  # on the host, so that its device need not be waited for
    where = tuple(i.to(model.device) for i in scored.nonzero(as_tuple=True))
    states, y = model.hidden(x, view)[where], padded[scored].to(model.device)  # (N, C), (N,)
    nats, greedy = torch.empty(len(y)), torch.empty(len(y), dtype=torch.bool)
    for first in range(0, len(y), HEAD_TOKENS):
        part = slice(first, first + HEAD_TOKENS)
        logits = model.logits(states[part]).float()
        nats[part] = F.cross_entropy(logits, y[part], reduction="none")
        greedy[part] = logits.argmax(dim=1) == y[part]
    counts = scored.sum(dim=1).tolist()
    each = zip(nats.double().split(counts), greedy.split(counts), strict=True)
    scores = (OptionScore(n.mean().item(), bool(g.all())) for n, g in each)
    return [[next(scores) for _ in q.options] for q in questions]


def prefill_shared(model: Any, questions: Sequence[Question], T: int) -> CacheView:
    """
    Prefill the common prefix of each question's options and copy it to a slot for each option.
    Returns the view of these slots for T more tokens.
    """
    prefixes = pad_right([q.options[0][: q.shared] for q in questions], 0, model.device)
    owners = [n for n, q in enumerate(questions) for _ in q.options]
    end = len(owners)  # the slots after those of the options hold the prefixes
    cache = model.new_cache(end + len(questions), prefixes.size(1) + T)
    model.hidden(prefixes, cache.view(range(end, end + len(questions)), prefixes.size(1)))
    for slot, n in enumerate(owners):
        cache.copy(end + n, slot, questions[n].shared)
    return cache.view(range(end), T)


def score_options(
    model: Any, questions: Sequence[Question]
) -> Iterator[tuple[Question, list[OptionScore]]]:
    """
    Yield each question with its option scores, longest questions first, in batches that fit; a
    batch that runs out of memory is halved.
    """
    longest_first = sorted(questions, key=lambda q: q.shape[1], reverse=True)
    most = CPU_PASS_TOKENS if model.device.type == "cpu" else GPU_PASS_TOKENS
    batches = list(fill_batches(longest_first, lambda q: q.shape, most))
    while batches:
        batch = batches.pop(0)
        try:
            scores = score_batch(model, batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
            half = len(batch) // 2
            batches[:0] = batch[:half], batch[half:]
        else:
            yield from zip(batch, scores, strict=True)


# ---- Scores of tasks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskScore:
    """Result of a model on a task."""

    task: FewShotTask
    """The task with the evaluated items, in order."""
    outcomes: list[int]
    """1 for each correct item, else 0."""
    num_truncated: int
    """Items that were truncated to fit the context."""
    seconds: float

    @property
    def accuracy(self) -> stats.Estimate:
        return stats.mean(self.outcomes)

    @property
    def centered(self) -> list[float]:
        """Score of each item, rescaled so that 0 is chance and 1 is correct."""
        chance = self.task.random_baseline
        return [(outcome - chance) / (1 - chance) for outcome in self.outcomes]

    @property
    def centered_accuracy(self) -> stats.Estimate:
        """Centered accuracy: 0 is chance, 1 is perfect."""
        return stats.mean(self.centered)


def evaluate_task(
    model: Any, tokenizer: Any, task: FewShotTask, dist: DistContext, max_items: int | None = None
) -> TaskScore:
    """
    Score a model on a task, split among ranks; the result is the same on every rank.

    A batch that runs out of memory is halved. Raises ValueError if a loss is not finite.
    """
    started = time.perf_counter()
    task = task.shuffled(max_items)
    mine = range(dist.rank, len(task.items), dist.world_size)
    own = score_options(model, [tokenize(task, n, tokenizer, model.cfg.max_seq_len) for n in mine])
    found = {q.number: (scores, q.truncated) for q, scores in own}
    for others in dist.gather(found):
        found |= others
    outcomes, num_truncated = [], 0
    for number in range(len(task.items)):
        scores, truncated = found[number]
        if not all(math.isfinite(nats) for nats, _ in scores):
            raise ValueError(
                f"{task.name}: losses of item {number} are {[nats for nats, _ in scores]}; "
                "the weights are corrupt, so use an earlier checkpoint"
            )
        outcomes.append(task.outcome(number, scores))
        num_truncated += truncated
    return TaskScore(task, outcomes, num_truncated, time.perf_counter() - started)


def core(scores: Sequence[TaskScore]) -> stats.Estimate:
    """Unweighted mean of the tasks' centered accuracies."""
    return stats.combine([s.centered_accuracy for s in scores], [1 / len(scores)] * len(scores))


# ---- Suites of few-shot tasks --------------------------------------------------------------------
# An evaluation bundle (folder, zip or URL) holds core.yaml (prompt settings of each task),
# eval_meta_data.csv (chance accuracy) and eval_data/ (items, one JSON object per line). Source:
# DataComp-LM, arXiv:2406.11794, in the form published with nanochat.

PUBLISHED_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# its hash, as pinned by several independent public projects (2026-06)
PUBLISHED_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
PUBLISHED_ITEMS = 91_037  # over all tasks in the archive
PUBLISHED_TASKS = 22
MAX_UNPACKED_BYTES = 1 << 30  # per archive
TIMEOUT_SECONDS = 30.0  # of a download without news
BUNDLE_HINT = "pass a local copy with --eval_bundle=<folder or zip>"


@dataclass(frozen=True)
class Suite:
    """Tasks to evaluate a model on."""

    tasks: tuple[FewShotTask, ...]
    fingerprint: str
    """16 hex digits; identifies all tasks, including items."""
    about: str
    """Source and comparability with the published suite, for the report."""


def open_suite(bundle: str | None) -> Suite:
    """
    Open a bundle: a folder, a zip file or its URL. Default: the published archive.

    Raises FileNotFoundError if it does not exist, and UsageError if it is invalid.
    """
    path = fetch(bundle or PUBLISHED_URL)
    try:
        return read_bundle(path if path.is_dir() else open_archive(path))
    except Exception as error:  # damaged content can raise anything
        why = f"{path} is not a valid evaluation bundle ({type(error).__name__}: {error})"
        raise UsageError(why, f"delete it if it was downloaded, or {BUNDLE_HINT}") from error


def fetch(location: str) -> Path:
    """Local path of a bundle; a URL is downloaded once."""
    if not location.startswith(("http://", "https://")):
        path = Path(location).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"evaluation bundle {path} does not exist; {BUNDLE_HINT}")
        return path
    known = PUBLISHED_SHA256 if location == PUBLISHED_URL else None
    path = base_dir() / "data" / "eval_bundle" / f"{fingerprint(location)}.zip"
    if not path.exists() or known not in (None, sha256_file(path)):
        try:
            with urlopen(location, timeout=TIMEOUT_SECONDS) as response:
                content = response.read()
        except (OSError, HTTPException) as error:
            raise UsageError(f"cannot download {location}: {error}", BUNDLE_HINT) from error
        if known not in (None, found := sha256(content).hexdigest()):
            raise UsageError(f"{location} has SHA-256 {found}, not {known}", BUNDLE_HINT)
        write_atomic(path, content)
    return path


def open_archive(path: Path) -> zipfile.Path:
    """
    Open a zip file, which is read in place. Raises ValueError if it has too many bytes.
    """
    root = zipfile.Path(path)
    total = sum(member.file_size for member in root.root.infolist())
    if total > MAX_UNPACKED_BYTES:
        raise ValueError(f"{total:,} bytes unpacked exceed the limit of {MAX_UNPACKED_BYTES:,}")
    return root


def is_item(task: FewShotTask, item: Any) -> bool:
    """Whether an item has the fields of its kind, and `gold` is the number of an option."""
    try:
        options = task.options(item)
    except (LookupError, TypeError, AttributeError):
        return False
    gold = item.get("gold", 0 if task.kind == "language_modeling" else None)
    return type(gold) is int and gold in range(len(options))


def read_bundle(root: Path | zipfile.Path) -> Suite:
    """
    Read the tasks of a folder or archive; tasks without items are skipped. A suite other
    than DCLM's is described by `about` in its core.yaml.
    """
    folders: list[Any] = [root, *root.iterdir()]
    folder = next((path for path in folders if (path / "core.yaml").is_file()), None)
    if folder is None:
        raise ValueError("it contains no core.yaml")
    content = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))
    table = (folder / "eval_meta_data.csv").read_text(encoding="utf-8").splitlines()
    baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(table)}
    tasks, missing = [], []
    for entry in content["icl_tasks"]:
        name, kind, uri = entry["label"], entry["icl_task_type"], entry["dataset_uri"]
        if not is_inside(uri):
            raise ValueError(f"dataset_uri {uri!r} of {name} is not a path inside eval_data/")
        file = folder / "eval_data" / uri
        lines = list(read_json_lines(file)) if file.is_file() else []
        if not lines:
            missing.append(name)
            continue
        num_fewshot, baseline = int(entry["num_fewshot"][0]), baselines[name] / 100
        delimiter, items = entry.get("continuation_delimiter", " "), [item for _, item in lines]
        task = FewShotTask(name, kind, num_fewshot, baseline, delimiter, items)
        for number, item in lines:
            if not is_item(task, item):
                raise line_error(file, number, f"not an item of kind {kind}: {item!r:.200}")
        tasks.append(task)
    if not tasks:
        raise ValueError("it contains no items of any task")
    digest = fingerprint([asdict(task) for task in tasks])
    if "about" in content:
        return Suite(tuple(tasks), digest, str(content["about"]))
    num_items = sum(len(task.items) for task in tasks)
    about = (
        f"DCLM, {len(tasks)} of {PUBLISHED_TASKS} tasks, {num_items:,} of {PUBLISHED_ITEMS:,} items"
    )
    if missing:
        about += f", without {', '.join(missing)}"
    if (len(tasks), num_items) != (PUBLISHED_TASKS, PUBLISHED_ITEMS):
        about += "; not comparable with published CORE"
    return Suite(tuple(tasks), digest, about)
