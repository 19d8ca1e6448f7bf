"""
Few-shot evaluation: CORE of DataComp-LM on any suite of tasks.

    bundle -> open_suite -> Suite: tasks -> prompts -> losses of the options -> accuracy -> CORE

CORE is the mean accuracy, centered on chance: 0 is chance, 1 is perfect.
"""

import csv
import hashlib
import itertools
import math
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os.path import commonprefix  # of any lists
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import pooch
import torch
import torch.nn.functional as F
import yaml

from nanochat import stats
from nanochat.attention import KVCache, fill_batches, pad_right
from nanochat.common import Interrupted, UsageError, base_dir, fingerprint
from nanochat.dataset import json_lines
from nanochat.distributed import DistContext
from nanochat.gpt import GPT
from nanochat.hub import is_inside, with_retries

# ---- Scoring few-shot tasks ----------------------------------------------------------------------


EXAMPLE_DELIMITER = "\n\n"  # behind each solved example
ORDER_SEED = 1337  # of the items: the first ones are what remains of a task that is cut short
EXAMPLES_SEED = 1234  # plus an item's place in that order: decides which examples it gets
CPU_PASS_TOKENS, GPU_PASS_TOKENS = 4096, 32_768  # of one forward pass, padding included
HEAD_TOKENS = 512  # tokens whose logits exist at once
LEAST_SAVING = 0.3  # share of a batch's tokens: to read less of it, in two passes, takes longer

# ------------------------------------------------------------------------------------------------
# Tasks

Kind = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass(frozen=True)
class FewShotTask:
    """
    A task of a suite. Its items have the fields of DCLM's: `query`, `choices`, `gold`;
    `context_options`, `continuation`, `gold`; or `context`, `continuation`.

    Raises ValueError naming the task where a setting is out of range.
    """

    name: str
    kind: Kind
    num_fewshot: int
    """Solved examples in front of an item; fewer where the task has not that many other items."""
    random_baseline: float
    """Accuracy of guessing, from 0 to below 1."""
    continuation_delimiter: str
    """Between a context and its continuation."""
    items: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        is_valid = self.kind in get_args(Kind) and self.items and self.num_fewshot >= 0
        if not is_valid or not 0 <= self.random_baseline < 1:
            raise ValueError(
                f"task {self.name} cannot have kind {self.kind!r}, {len(self.items)} items, "
                f"num_fewshot {self.num_fewshot} and random_baseline {self.random_baseline}"
            )

    def options(self, item: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What an item offers to choose from: (context with delimiter, continuation) pairs."""
        if self.kind == "multiple_choice":
            pairs = [(item["query"], choice) for choice in item["choices"]]
        elif self.kind == "schema":
            pairs = [(context, item["continuation"]) for context in item["context_options"]]
        else:
            pairs = [(item["context"].strip(), item["continuation"])]
        return [(context + self.continuation_delimiter, ending) for context, ending in pairs]

    def drawn(self, max_items: int | None = None) -> "FewShotTask":
        """
        The task as it is asked: its items in an order that is always the same, or the first
        `max_items` of them, which then are each other's examples too.
        """
        order = list(self.items)
        Random(ORDER_SEED).shuffle(order)
        return replace(self, items=order[:max_items])

    def examples(self, number: int) -> str:
        """The solved examples in front of an item: other items of the task, always the same."""
        num_others = len(self.items) - 1
        count = min(self.num_fewshot, num_others)
        text = ""
        for other in Random(EXAMPLES_SEED + number).sample(range(num_others), count):
            item = self.items[other + (other >= number)]  # passes over the item itself
            text += "".join(self.options(item)[item.get("gold", 0)]) + EXAMPLE_DELIMITER
        return text

    def outcome(self, number: int, scores: Sequence["OptionScore"]) -> int:
        """1 where a model that scores an item's options like this is right, else 0."""
        if self.kind == "language_modeling":
            return int(scores[0].is_greedy)
        best = min(range(len(scores)), key=lambda n: scores[n].nats)
        return int(best == self.items[number]["gold"])


@dataclass(frozen=True)
class Question:
    """An item as tokens: one sequence per option, scored from its index in `starts` on."""

    number: int
    options: Sequence[Sequence[int]]
    starts: Sequence[int]
    shared: int
    """How many first tokens can be read once for all options: none of them predicts a scored one.
    0 where there is but one option."""
    cropped: bool
    """Whether its beginning was cut off to fit the model's context."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of options, and the tokens of the longest."""
        return len(self.options), max(map(len, self.options))


def ask(task: FewShotTask, number: int, tokenizer: Any, context: int) -> Question:
    """An item as a model sees it that reads at most `context` tokens at once."""
    front, pairs = task.examples(number), task.options(task.items[number])
    options = [[tokenizer.bos_id, *tokenizer.encode(front + a + b)] for a, b in pairs]
    if task.kind == "schema":
        ending = max(1, len(commonprefix([ids[:0:-1] for ids in options])))
        starts = [len(ids) - ending for ids in options]
    else:  # the continuation begins where the options part, or where the context alone would go on
        alone = [tokenizer.bos_id, *tokenizer.encode(front + pairs[0][0])]
        same = len(commonprefix(options if len(options) > 1 else [*options, alone]))
        starts = [min(same, *(len(ids) - 1 for ids in options))] * len(options)
    return fitted(number, options, starts, context)


def fitted(
    number: int, options: Sequence[list[int]], starts: Sequence[int], context: int
) -> Question:
    """
    A question whose options are cropped from the left, behind their BOS, where the longest does not
    fit: all lose the same, and what is scored is cut only where it alone is too long.
    """
    limit = context + 1  # the last token is only predicted
    over = max(map(len, options)) - limit
    if over > 0:
        pairs = list(zip(options, starts, strict=True))
        cuts = [max(min(over, start - 1), len(ids) - limit) for ids, start in pairs]
        options = [[*ids[:1], *ids[1 + cut :]] for ids, cut in zip(options, cuts, strict=True)]
        starts = [max(1, start - cut) for start, cut in zip(starts, cuts, strict=True)]
    shared = min(len(commonprefix(options)), *starts) - 1 if len(options) > 1 else 0
    return Question(number, options, starts, shared, over > 0)


# ------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class EvalModel:
    """A causal language model with its tokenizer, ours or another library's."""

    model: Any
    """In two halves, so that logits are made only where they count: `hidden(tokens (B, T), view)`
    gives states (B, T, C), of tokens that continue the cache in `view` where that is not None;
    `logits(states (N, C))` gives (N, V)."""
    tokenizer: Any
    """It has `bos_id` and `encode(text)`."""
    context: int
    """The most tokens it reads at once."""
    new_cache: Callable[[int, int], KVCache] | None = None
    """(slots, capacity) -> a cache for `hidden`. None: every option is read from its beginning."""
    pass_tokens: int = CPU_PASS_TOKENS
    """The most tokens of one forward pass, padding included."""
    device: torch.device = torch.device("cpu")


def eval_model_of(model: GPT, tokenizer: Any) -> EvalModel:
    """One of our own models, best `gpt.for_inference` of it."""
    most = CPU_PASS_TOKENS if model.device.type == "cpu" else GPU_PASS_TOKENS
    context, device = model.cfg.max_seq_len, model.device
    return EvalModel(model, tokenizer, context, model.new_cache, most, device)


class OptionScore(NamedTuple):
    """How likely an option is to a model."""

    nats: float
    """Mean over the scored tokens."""
    is_greedy: bool
    """Whether each of them was the model's first choice."""


@torch.inference_mode()
def read(subject: EvalModel, questions: Sequence[Question]) -> list[list[OptionScore]]:
    """The score of every option of every question, all in one batch."""
    rows = [row for q in questions for row in zip(q.options, q.starts, strict=True)]
    saved = sum(q.shared * (len(q.options) - 1) for q in questions)
    twice = saved >= LEAST_SAVING * sum(len(ids) for ids, _ in rows)
    past = [q.shared if subject.new_cache and twice else 0 for q in questions for _ in q.options]
    unread = [ids[n:-1] for (ids, _), n in zip(rows, past, strict=True)]
    tokens, view = pad_right(unread, 0, subject.device), None  # (B, T)
    if subject.new_cache and any(past):
        cache = subject.new_cache(len(rows), max(past) + tokens.size(1))
        read_shared(subject, questions, cache)
        view = cache.view(range(len(rows)), tokens.size(1))
    hidden = subject.model.hidden(tokens, view)  # (B, T, C)

    places = [(b, i) for b, (ids, start) in enumerate(rows) for i in range(start, len(ids))]
    at = [(b, i - 1 - past[b], rows[b][0][i]) for b, i in places]
    row, column, targets = torch.tensor(at, device=subject.device).unbind(1)  # (N,) each
    found: list[tuple[float, bool]] = []  # nats of each target, whether it is the first choice
    states = hidden[row, column].split(HEAD_TOKENS)
    for h, y in zip(states, targets.split(HEAD_TOKENS), strict=True):
        logits = subject.model.logits(h).float()
        nats = F.cross_entropy(logits, y, reduction="none").tolist()
        found += zip(nats, (logits.argmax(dim=1) == y).tolist(), strict=True)
    scored = iter(found)

    def score(ids: Sequence[int], start: int) -> OptionScore:
        nats, first = zip(*itertools.islice(scored, len(ids) - start), strict=True)
        return OptionScore(sum(nats) / len(nats), all(first))

    return [list(map(score, q.options, q.starts)) for q in questions]


def read_shared(subject: EvalModel, questions: Sequence[Question], cache: KVCache) -> None:
    """Fill the cache: a slot per option, each with what the options of its question share."""
    ends = itertools.accumulate(len(q.options) for q in questions)
    slots = [range(end - len(q.options), end) for q, end in zip(questions, ends, strict=True)]
    tokens = pad_right([q.options[0][: q.shared] for q in questions], 0, subject.device)
    subject.model.hidden(tokens, cache.view([first for first, *_ in slots], tokens.size(1)))
    for (first, *others), q in zip(slots, questions, strict=True):
        cache.lengths[first] = q.shared
        for other in others:
            cache.copy(first, other, q.shared)


# ------------------------------------------------------------------------------------------------
# Scores


@dataclass(frozen=True)
class TaskScore:
    """How a model did on a task."""

    task: FewShotTask
    """With the items that were asked, in their order."""
    outcomes: list[int]
    """1 for each of them that it got right, else 0."""
    num_cropped: int
    """Items whose beginning did not fit the model's context."""
    seconds: float = field(compare=False)

    @property
    def accuracy(self) -> stats.Estimate:
        return stats.proportion(sum(self.outcomes), len(self.outcomes))

    @property
    def centred(self) -> stats.Estimate:
        """0 for guessing, 1 for everything right."""
        return stats.centred(self.accuracy, self.task.random_baseline)


def examine(
    subject: EvalModel,
    task: FewShotTask,
    machine: DistContext,
    max_items: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> TaskScore:
    """
    Score a model on a task, on all ranks together; the result is on every rank.

    A batch that does not fit into memory is read in halves. Raises Interrupted on all ranks where
    `stopping()` is true on one of them, ValueError for a model that computes no numbers.
    """
    begun = time.perf_counter()
    task = task.drawn(max_items)
    mine = range(machine.rank, len(task.items), machine.world_size)
    found: dict[int, tuple[list[OptionScore], bool]] = {}
    stopped = False
    with machine.working(f"scoring {task.name}"):  # others may finish earlier
        questions = [ask(task, number, subject.tokenizer, subject.context) for number in mine]
        for q, scores in score_options(subject, questions):
            if stopped := stopping():
                break
            found[q.number] = scores, q.cropped
    for others, stopped_too in machine.gather((found, stopped)):
        found |= others
        stopped |= stopped_too
    for number, (scores, _) in found.items():
        if not all(math.isfinite(nats) for nats, _ in scores):
            raise ValueError(
                f"{task.name}: item {number} gets {[nats for nats, _ in scores]} nats; "
                "the model's weights are broken, take an earlier checkpoint"
            )
    if stopped:
        raise Interrupted
    outcomes = [task.outcome(number, found[number][0]) for number in range(len(task.items))]
    num_cropped = sum(cropped for _, cropped in found.values())
    return TaskScore(task, outcomes, num_cropped, time.perf_counter() - begun)


def score_options(
    subject: EvalModel, questions: Sequence[Question]
) -> Iterator[tuple[Question, list[OptionScore]]]:
    """Each question with the scores of its options; the longest first, in batches that fit."""
    longest_first = sorted(questions, key=lambda q: q.shape[1], reverse=True)
    for batch in fill_batches(longest_first, lambda q: q.shape, subject.pass_tokens):
        yield from zip(batch, read_safely(subject, batch), strict=True)


def read_safely(subject: EvalModel, questions: Sequence[Question]) -> list[list[OptionScore]]:
    """`read`, in halves where the memory does not suffice."""
    try:
        return read(subject, questions)
    except torch.OutOfMemoryError:
        if len(questions) == 1:
            raise
    torch.cuda.empty_cache()  # outside the handler, which keeps the tensors of the failed try
    half = len(questions) // 2
    return read_safely(subject, questions[:half]) + read_safely(subject, questions[half:])


def core(scores: Sequence[TaskScore]) -> stats.Estimate:
    """The mean of the tasks' centred accuracies, each counting the same."""
    return stats.average([score.centred for score in scores])


# ---- Suites of few-shot tasks --------------------------------------------------------------------
# An evaluation bundle (folder, zip or URL) holds core.yaml (how each task is prompted),
# eval_meta_data.csv (accuracy of chance) and eval_data/ (items, one JSON object per line). Source:
# DataComp-LM, arXiv:2406.11794, in the form published with nanochat.


PUBLISHED_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# Of the archive behind that address, as several independent public projects pin it (2026-06)
PUBLISHED_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
PUBLISHED_ITEMS = 91_037  # of all its tasks
# The tasks of CORE in the report's order
CORE_TASKS = """
    hellaswag_zeroshot jeopardy bigbench_qa_wikidata arc_easy arc_challenge copa commonsense_qa piqa
    openbook_qa lambada_openai hellaswag winograd winogrande bigbench_dyck_languages
    agi_eval_lsat_ar bigbench_cs_algorithms bigbench_operators bigbench_repeat_copy_logic squad
    coqa boolq bigbench_language_identification
""".split()
TIMEOUT_SECONDS = 30
PATIENCE_SECONDS = 120.0  # a run goes on without the bundle, so it does not wait for long
MAX_UNPACKED_BYTES = 1 << 30  # of an archive
HINT = "unpack one by hand and name it: --eval_bundle=<folder or zip>"


@dataclass(frozen=True)
class Suite:
    """Tasks to evaluate a model on."""

    tasks: tuple[FewShotTask, ...]
    fingerprint: str
    """16 hex digits of all tasks, items included."""
    about: str
    """Their source, and whether they are the published ones, for the report."""
    missing: tuple[str, ...] = ()
    """Tasks of CORE that are not among them."""


def open_suite(bundle: str | None) -> Suite:
    """
    The tasks of a bundle: a folder, a zip file or its URL, by default the published archive.

    Raises FileNotFoundError, or UsageError with what is wrong in which file, and the fix.
    """
    path = fetch(bundle or PUBLISHED_URL)
    try:
        if path.is_dir():
            return read_bundle(path)
        require_safe(path)
        return read_bundle(zipfile.Path(path))
    except Exception as error:  # whatever damaged or unexpected content leads to
        why = f"{path} is no sound evaluation bundle ({type(error).__name__}: {error})"
        raise UsageError(why, f"delete it if it was downloaded, or {HINT}") from error


def fetch(location: str) -> Path:
    """A folder or file by its path, or the copy of what a URL names, downloaded once."""
    if not location.startswith(("http://", "https://")):
        path = Path(location).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"there is no evaluation bundle {path}; {HINT}")
        return path
    known = f"sha256:{PUBLISHED_SHA256}" if location == PUBLISHED_URL else None
    name = f"{hashlib.sha256(location.encode()).hexdigest()[:8]}-{Path(location).name}"
    folder = base_dir() / "data" / "eval_bundle"

    def download() -> str:
        client: Any = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS)
        return pooch.retrieve(location, known, name, folder, downloader=client)

    try:
        return Path(with_retries(location, download, PATIENCE_SECONDS))
    except (UsageError, OSError, ValueError) as error:  # ValueError: it has another digest
        why = str(error).partition("\n")[0]
        raise UsageError(f"{location} cannot be used: {why}", HINT) from error


def require_safe(path: Path) -> None:
    """Raises ValueError for an archive with a path outside of it, a link or too many bytes."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        if not is_inside(member.orig_filename):
            raise ValueError(f"{member.orig_filename!r} is a path outside of the archive")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{member.orig_filename!r} is a link or a device, not a file")
    total = sum(member.file_size for member in members)
    if total > MAX_UNPACKED_BYTES:
        raise ValueError(f"{total:,} bytes unpacked; {MAX_UNPACKED_BYTES:,} is the limit")


def read_bundle(root: Path | zipfile.Path) -> Suite:
    """
    The tasks of a folder, or of an archive, whose files of items are there. Their core.yaml may
    have a line `about`, a name for tasks that are not DCLM's.
    """
    folders: list[Any] = [root, *(place for place in root.iterdir() if place.is_dir())]
    place = next((place for place in folders if (place / "core.yaml").is_file()), None)
    if place is None:
        raise ValueError("no core.yaml is in it")
    content = yaml.safe_load((place / "core.yaml").read_text(encoding="utf-8"))
    table = (place / "eval_meta_data.csv").read_text(encoding="utf-8").splitlines()
    baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(table)}
    tasks = []
    for entry in content["icl_tasks"]:
        name, kind, uri = entry["label"], entry["icl_task_type"], entry["dataset_uri"]
        if not isinstance(uri, str) or uri in ("", ".") or not is_inside(uri):
            raise ValueError(f"dataset_uri {uri!r} of {name} is no path inside eval_data/")
        file = place / "eval_data" / uri
        if file.is_file():
            items = [dict(item) for _, item in json_lines(file)]
            num_fewshot, baseline = int(entry["num_fewshot"][0]), baselines[name] / 100
            delimiter = entry.get("continuation_delimiter", " ")
            tasks.append(FewShotTask(name, kind, num_fewshot, baseline, delimiter, items))
    if not tasks:
        raise ValueError("the items of no task are in it")
    digest, num_items = fingerprint([asdict(t) for t in tasks]), sum(len(t.items) for t in tasks)
    if "about" in content:
        return Suite(tuple(tasks), digest, str(content["about"]))
    missing = tuple(name for name in CORE_TASKS if name not in {task.name for task in tasks})
    about = (
        f"DCLM, {len(CORE_TASKS) - len(missing)} of {len(CORE_TASKS)} tasks, "
        f"{num_items:,} of {PUBLISHED_ITEMS:,} items"
    )
    if missing or num_items != PUBLISHED_ITEMS:
        about += "; not comparable with published CORE"
    return Suite(tuple(tasks), digest, about, missing)
