"""
Few-shot evaluation: the CORE metric of DataComp-LM, on any suite of tasks.

    bundle -> open_suite -> Suite: tasks -> prompts -> losses of the options -> accuracy -> CORE

CORE is the mean centered accuracy: 0 is chance, 1 is perfect.
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
from os.path import commonprefix  # also works on lists
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args

import pooch
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from nanochat import stats
from nanochat.attention import KVCache, fill_batches, pad_right
from nanochat.common import (
    StopRequest,
    StopRequested,
    UsageError,
    base_dir,
    fingerprint,
    sha256_file,
)
from nanochat.dataset import line_error, read_json_lines
from nanochat.dist import DistContext
from nanochat.gpt import GPT
from nanochat.hub import is_inside
from nanochat.records import SECTIONS

# ---- Scoring few-shot tasks ----------------------------------------------------------------------


EXAMPLE_DELIMITER = "\n\n"  # after each few-shot example
ORDER_SEED = 1337  # shuffles the items; `max_items` keeps the first ones
EXAMPLES_SEED = 1234  # an item's few-shot seed is this plus its shuffled index
CPU_PASS_TOKENS, GPU_PASS_TOKENS = 4096, 32_768  # per forward pass, including padding
HEAD_TOKENS = 512  # tokens whose logits are computed at once
MIN_SHARED_FRACTION = 0.3  # a separate prefix pass must save at least this fraction of tokens

# ------------------------------------------------------------------------------------------------
# Tasks

TaskType = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass(frozen=True)
class FewShotTask:
    """
    A few-shot task. Items have DCLM's fields: `query`, `choices`, `gold`; `context_options`,
    `continuation`, `gold`; or `context`, `continuation`.

    Raises ValueError naming the task if a setting is out of range.
    """

    name: str
    kind: TaskType
    num_fewshot: int
    """Few-shot examples per item; fewer if the task has too few other items."""
    random_baseline: float
    """Chance accuracy, in [0, 1)."""
    continuation_delimiter: str
    """Separator between a context and its continuation."""
    items: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        is_valid = self.kind in get_args(TaskType) and self.items and self.num_fewshot >= 0
        if not is_valid or not 0 <= self.random_baseline < 1:
            raise ValueError(
                f"invalid settings for task {self.name}: kind {self.kind!r}, {len(self.items)} "
                f"items, num_fewshot {self.num_fewshot}, random_baseline {self.random_baseline}"
            )

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
        num_others = len(self.items) - 1
        count = min(self.num_fewshot, num_others)
        text = ""
        for other in Random(EXAMPLES_SEED + number).sample(range(num_others), count):
            item = self.items[other + (other >= number)]  # skips the item itself
            text += "".join(self.options(item)[item.get("gold", 0)]) + EXAMPLE_DELIMITER
        return text

    def outcome(self, number: int, scores: Sequence["OptionScore"]) -> int:
        """1 if these option scores select the correct answer, else 0."""
        if self.kind == "language_modeling":
            return int(scores[0].is_greedy)
        best = min(range(len(scores)), key=lambda n: scores[n].nats)
        return int(best == self.items[number]["gold"])


@dataclass(frozen=True)
class Question:
    """A tokenized item: one sequence per option, scored from its `starts` index on."""

    number: int
    options: Sequence[Sequence[int]]
    starts: Sequence[int]
    shared: int
    """Length of the common prefix that can be prefilled once for all options because it predicts
    no scored token; 0 for a single option."""
    truncated: bool
    """Whether options were truncated to fit the context."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of options, tokens of the longest)."""
        return len(self.options), max(map(len, self.options))


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
    """A causal language model and its tokenizer, ours or another library's."""

    model: Any
    """Has two methods, so that logits are computed only for scored tokens: `hidden(tokens (B, T),
    view)` returns states (B, T, C), continuing the cache of `view` if not None; `logits(states
    (N, C))` returns (N, V)."""
    tokenizer: Any
    """Has `bos_id` and `encode(text)`."""
    context: int
    """Maximum number of input tokens."""
    new_cache: Callable[[int, int], KVCache] | None = None
    """(slots, capacity) -> a cache for `hidden`. None: options do not share a prefix pass."""
    pass_tokens: int = CPU_PASS_TOKENS
    """Maximum number of tokens per forward pass, including padding."""
    device: torch.device = torch.device("cpu")


def eval_model_of(model: GPT, tokenizer: Any) -> EvalModel:
    """Wrap one of our own models, preferably a `gpt.inference_copy`."""
    most = CPU_PASS_TOKENS if model.device.type == "cpu" else GPU_PASS_TOKENS
    context, device = model.cfg.max_seq_len, model.device
    return EvalModel(model, tokenizer, context, model.new_cache, most, device)


class OptionScore(NamedTuple):
    """Likelihood of an option."""

    nats: float
    """Mean cross-entropy (nats) of the scored tokens."""
    is_greedy: bool
    """Whether every scored token is the argmax."""


@torch.inference_mode()
def score_batch(subject: EvalModel, questions: Sequence[Question]) -> list[list[OptionScore]]:
    """Score every option of every question in one batch."""
    rows = [row for q in questions for row in zip(q.options, q.starts, strict=True)]
    saved = sum(q.shared * (len(q.options) - 1) for q in questions)
    twice = saved >= MIN_SHARED_FRACTION * sum(len(ids) for ids, _ in rows)
    past = [q.shared if subject.new_cache and twice else 0 for q in questions for _ in q.options]
    unread = [ids[n:-1] for (ids, _), n in zip(rows, past, strict=True)]
    tokens, view = pad_right(unread, 0, subject.device), None  # (B, T)
    if subject.new_cache and any(past):
        cache = subject.new_cache(len(rows), max(past) + tokens.size(1))
        prefill_shared(subject, questions, cache)
        view = cache.view(range(len(rows)), tokens.size(1))
    hidden = subject.model.hidden(tokens, view)  # (B, T, C)

    positions = [(b, i) for b, (ids, start) in enumerate(rows) for i in range(start, len(ids))]
    at = [(b, i - 1 - past[b], rows[b][0][i]) for b, i in positions]
    row, column, targets = torch.tensor(at, device=subject.device).unbind(1)  # (N,) each
    found: list[tuple[float, bool]] = []  # nats of each target, whether it is the argmax
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


def prefill_shared(subject: EvalModel, questions: Sequence[Question], cache: KVCache) -> None:
    """Prefill the cache: one slot per option, with the common prefix of its question's options."""
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
    """Result of a model on a task."""

    task: FewShotTask
    """The task with the evaluated items, in order."""
    outcomes: list[int]
    """1 for each correct item, else 0."""
    num_truncated: int
    """Items that were truncated to fit the context."""
    seconds: float = field(compare=False)

    @property
    def accuracy(self) -> stats.Estimate:
        return stats.proportion(sum(self.outcomes), len(self.outcomes))

    @property
    def centered_accuracy(self) -> stats.Estimate:
        """Centered accuracy: 0 is chance, 1 is perfect."""
        return stats.center_accuracy(self.accuracy, self.task.random_baseline)


def evaluate_task(
    subject: EvalModel,
    task: FewShotTask,
    dist: DistContext,
    max_items: int | None = None,
    stop: StopRequest | None = None,
) -> TaskScore:
    """
    Score a model on a task, split among ranks; the result is the same on every rank.

    A batch that runs out of memory is halved. Raises StopRequested on all ranks if `stop` is
    asked on any of them, and ValueError if a loss is not finite.
    """
    begun = time.perf_counter()
    task = task.shuffled(max_items)
    mine = range(dist.rank, len(task.items), dist.world_size)
    found: dict[int, tuple[list[OptionScore], bool]] = {}
    stopped = False
    questions = [tokenize(task, number, subject.tokenizer, subject.context) for number in mine]
    for q, scores in score_options(subject, questions):
        if stopped := stop is not None and stop.asked:
            break
        found[q.number] = scores, q.truncated
    for others, stopped_too in dist.gather((found, stopped)):
        found |= others
        stopped |= stopped_too
    for number, (scores, _) in found.items():
        if not all(math.isfinite(nats) for nats, _ in scores):
            raise ValueError(
                f"{task.name}: losses of item {number} are {[nats for nats, _ in scores]}; "
                "the weights are corrupt, so use an earlier checkpoint"
            )
    if stopped:
        raise StopRequested
    outcomes = [task.outcome(number, found[number][0]) for number in range(len(task.items))]
    num_truncated = sum(truncated for _, truncated in found.values())
    return TaskScore(task, outcomes, num_truncated, time.perf_counter() - begun)


def score_options(
    subject: EvalModel, questions: Sequence[Question]
) -> Iterator[tuple[Question, list[OptionScore]]]:
    """Yield each question with its option scores, longest questions first, in batches that fit."""
    longest_first = sorted(questions, key=lambda q: q.shape[1], reverse=True)
    for batch in fill_batches(longest_first, lambda q: q.shape, subject.pass_tokens):
        yield from zip(batch, score_or_split(subject, batch), strict=True)


def score_or_split(subject: EvalModel, questions: Sequence[Question]) -> list[list[OptionScore]]:
    """`score_batch`, but halves the batch when out of memory."""
    try:
        return score_batch(subject, questions)
    except torch.OutOfMemoryError:
        if len(questions) == 1:
            raise
    torch.cuda.empty_cache()  # outside `except`: the exception keeps tensors alive
    half = len(questions) // 2
    return score_or_split(subject, questions[:half]) + score_or_split(subject, questions[half:])


def core(scores: Sequence[TaskScore]) -> stats.Estimate:
    """Unweighted mean of the tasks' centered accuracies."""
    return stats.average([score.centered_accuracy for score in scores])


# ---- Suites of few-shot tasks --------------------------------------------------------------------
# An evaluation bundle (folder, zip or URL) holds core.yaml (prompt settings of each task),
# eval_meta_data.csv (chance accuracy) and eval_data/ (items, one JSON object per line). Source:
# DataComp-LM, arXiv:2406.11794, in the form published with nanochat.


PUBLISHED_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# its hash, as pinned by several independent public projects (2026-06)
PUBLISHED_SHA256 = "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200"
PUBLISHED_ITEMS = 91_037  # over all tasks in the archive
CORE_TASKS = SECTIONS["Base model evaluation"].split(", ")[2:]
TIMEOUT_SECONDS = 30
MAX_UNPACKED_BYTES = 1 << 30  # per archive
BUNDLE_HINT = "pass a local copy with --eval_bundle=<folder or zip>"


@dataclass(frozen=True)
class Suite:
    """Tasks to evaluate a model on."""

    tasks: tuple[FewShotTask, ...]
    fingerprint: str
    """16 hex digits; identifies all tasks, including items."""
    about: str
    """Source and comparability with the published suite, for the report."""
    missing: tuple[str, ...] = ()
    """CORE tasks that the suite lacks."""


def open_suite(bundle: str | None) -> Suite:
    """
    Open a bundle: a folder, a zip file or its URL. Default: the published archive.

    Raises FileNotFoundError if it does not exist, and UsageError if it is invalid.
    """
    path = fetch(bundle or PUBLISHED_URL)
    try:
        if path.is_dir():
            return read_bundle(path)
        require_safe(path)
        return read_bundle(zipfile.Path(path))
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
    known = f"sha256:{PUBLISHED_SHA256}" if location == PUBLISHED_URL else None
    name = f"{hashlib.sha256(location.encode()).hexdigest()[:8]}-{Path(location).name}"
    folder = base_dir() / "data" / "eval_bundle"
    client: Any = pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS)
    try:
        return Path(pooch.retrieve(location, known, name, folder, downloader=client))
    except (OSError, ValueError) as error:  # ValueError: wrong hash
        why = str(error).partition("\n")[0]
        raise UsageError(f"cannot download {location}: {why}", BUNDLE_HINT) from error


def require_safe(path: Path) -> None:
    """Raise ValueError if an archive has a path that leads outside it, a link or too many bytes."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        if not is_inside(member.orig_filename):
            raise ValueError(f"{member.orig_filename!r} points outside of the archive")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ValueError(f"{member.orig_filename!r} is a link or a device, not a file")
    total = sum(member.file_size for member in members)
    if total > MAX_UNPACKED_BYTES:
        raise ValueError(f"{total:,} bytes unpacked exceed the limit of {MAX_UNPACKED_BYTES:,}")


def find_item_problem(kind: str, item: Any) -> str | None:
    """Why an item is not one of `FewShotTask`; None if it is."""
    texts, options = {
        "multiple_choice": (("query",), "choices"),
        "schema": (("continuation",), "context_options"),
    }.get(kind, (("context", "continuation"), ""))
    fields = item if isinstance(item, dict) else {}
    if wrong := [name for name in texts if not isinstance(fields.get(name), str)]:
        return f"{wrong[0]} must be a string"
    if not options:
        return None
    found, gold = fields.get(options), fields.get("gold")
    if not (isinstance(found, list) and found and all(isinstance(x, str) for x in found)):
        return f"{options} must be a list of strings"
    if type(gold) is not int or not 0 <= gold < len(found):
        return f"gold must be an index of {options}, not {gold!r}"
    return None


def read_bundle(root: Path | zipfile.Path) -> Suite:
    """
    Read the tasks of a folder or archive; tasks without an item file are skipped. A suite other
    than DCLM's is described by `about` in its core.yaml.
    """
    folders: list[Any] = [root, *(path for path in root.iterdir() if path.is_dir())]
    folder = next((path for path in folders if (path / "core.yaml").is_file()), None)
    if folder is None:
        raise ValueError("it contains no core.yaml")
    content = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))
    table = (folder / "eval_meta_data.csv").read_text(encoding="utf-8").splitlines()
    baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(table)}
    tasks = []
    for entry in content["icl_tasks"]:
        name, kind, uri = entry["label"], entry["icl_task_type"], entry["dataset_uri"]
        if not isinstance(uri, str) or uri in ("", ".") or not is_inside(uri):
            raise ValueError(f"dataset_uri {uri!r} of {name} is not a path inside eval_data/")
        file = folder / "eval_data" / uri
        if file.is_file():
            lines = list(read_json_lines(file))
            items = [item for _, item in lines]
            num_fewshot, baseline = int(entry["num_fewshot"][0]), baselines[name] / 100
            delimiter = entry.get("continuation_delimiter", " ")
            tasks.append(FewShotTask(name, kind, num_fewshot, baseline, delimiter, items))
            for number, item in lines:
                if problem := find_item_problem(kind, item):
                    raise line_error(file, number, problem)
    if not tasks:
        raise ValueError("it contains no items of any task")
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


# ---- Models of transformers ----------------------------------------------------------------------
# Every architecture that transformers loads is scored by the same code as ours.

LOGIT_BYTES = 2**30  # logits of one forward pass; these models return them for every token


class HFEncoder:
    """A transformers tokenizer. Raises ValueError if it has no token to start a text with."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        known = [number for number in ids if number is not None]
        if not known:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has neither bos_token nor eos_token; "
                "set one in its tokenizer_config.json"
            )
        self.bos_id: int = known[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class HFLanguageModel:
    """
    A transformers model with the `hidden` and `logits` methods of GPT. `hidden` returns the logits,
    because the steps after the last layer (caps, scales, norms) differ by architecture.
    """

    def __init__(self, model: Any):
        self.model = model

    def hidden(self, tokens: Tensor, cache: None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (N, V) unchanged."""
        return hidden


def find_hf_model(
    path: str, dist: DistContext, trust_remote_code: bool = False
) -> tuple[str, Callable[[], EvalModel]]:
    """
    Read a model's configuration. Returns its revision (the commit on the Hub, or a fingerprint of
    the files in the folder) and a function that loads it on the device in its compute
    dtype.

    Raises OSError or ValueError if the model does not exist, requires remote code, or does not
    declare its context length.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # optional package

    options = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, **options)
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ValueError(f"max_position_embeddings is missing in the configuration of {path}")
    folder = Path(path)
    if folder.is_dir():
        files = sorted(f for f in folder.iterdir() if f.is_file())
        revision = fingerprint({file.name: sha256_file(file) for file in files})
    else:
        revision = config._commit_hash or path

    def load() -> EvalModel:
        encoder = HFEncoder(AutoTokenizer.from_pretrained(path, **options))
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(path, dtype=dist.dtype, **options)
        model = model.to(dist.device).eval().requires_grad_(False)
        per_token = model.config.vocab_size * torch.finfo(dist.dtype).bits // 8
        most = max(context, LOGIT_BYTES // per_token)
        return EvalModel(HFLanguageModel(model), encoder, context, None, most, dist.device)

    return revision, load
