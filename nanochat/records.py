"""
Records: one JSON file for each section of the report, and what they say together.

    settings, values, provenance, cost -> write_record -> report/<slug>.json, records.jsonl
    records -> metrics by stage, differences, costs, broken chains

A record names the fingerprints of its inputs and outputs, so a report can tell which belong
together.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, StringConstraints, ValidationError

from nanochat import stats
from nanochat.common import (
    base_dir,
    fingerprint,
    git_state,
    printable,
    read_json,
    require_writable,
    sealed,
    sha256_file,
    unseal,
    write_atomic,
)
from nanochat.stats import mean

# ---- The shape of a record -----------------------------------------------------------------------


TIME = StringConstraints(pattern=r"^\d{4}-[01]\d-[0-3]\d [0-2]\d:[0-5]\d:[0-5]\d$")
Setting = str | float | int | bool | None
Number = float | int | str  # "nan", "inf", "-inf": what JSON has no number for


class Shape(BaseModel, strict=True, extra="forbid"):
    """Nothing is converted, nothing unknown is let through."""


class ProvenanceSchema(Shape):
    run_id: str
    seed: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    commit: str
    dirty: bool


class CostSchema(Shape):
    wall_seconds: float
    devices: int
    device: str
    device_seconds: float
    own_device_seconds: float | None = None
    """Without what earlier calls added to the section."""


class File(Shape):
    bytes: int
    sha256: str


class Table(Shape):
    title: str | None = None
    columns: list[str]
    rows: list[list[Number | bool | None]]


class Estimate(Shape):
    value: Number
    n: int
    se: Number
    k: int | None = None
    item_se: Number | None = None
    repeat_se: Number | None = None


class Scores(Shape):
    of: str
    scores: str
    key: str | None = None
    """What decides these scores, where a section is filled task by task."""


class Weights(Shape):
    weights: dict[str, float]


class RecordSchema(Shape):
    """`records.write_record` says what each field is."""

    section: Annotated[str, StringConstraints(min_length=1)]
    timestamp: Annotated[str, TIME]
    key: str
    settings: dict[str, Setting | list[Setting]]
    values: dict[str, Estimate | Number | bool | None]
    items: dict[str, Scores | Weights]
    tables: list[Table]
    series: dict[str, list[list[Number]]]
    metrics: str | None
    files: dict[str, File]
    provenance: ProvenanceSchema
    cost: CostSchema


def check_record(record: Any, path: Path) -> dict[str, Any]:
    """The record that `path` holds. Raises ValueError naming the file and the first wrong field."""
    try:
        RecordSchema.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(
            f"{path} is no record: {where}: {first['msg']}; delete it and repeat that stage"
        ) from error
    return record


# ---- Sections of the report, in order ------------------------------------------------------------
# These names never change, so that reports can be compared line by line.


CHAT_TASKS = "ARC-Easy, ARC-Challenge, MMLU, GSM8K, HumanEval, AQUA, ChatCORE"
CHAT_KEYS = (
    "source, task_name, dtype, temperature, max_new_tokens, num_samples, top_k, batch_size, "
    f"model_tag, step, max_problems, device_type, {CHAT_TASKS}"
)
# The fixed sections in order, each with the keys that open it.
SECTIONS: dict[str, str] = {
    "Tokenizer training": "max_chars, doc_cap, vocab_size, train_time, num_special_tokens, "
    "token_bytes_min, token_bytes_max, token_bytes_mean, token_bytes_std",
    "Tokenizer evaluation": "",
    "Base model training": "run, device_type, depth, max_seq_len, num_iterations, target_flops, "
    "target_param_data_ratio, device_batch_size, total_batch_size, embedding_lr, "
    "unembedding_lr, weight_decay, matrix_lr, grad_clip, eval_every, eval_tokens, "
    "core_metric_every, core_metric_max_per_task, sample_every, model_tag, "
    "Number of parameters, Number of FLOPs per token, Calculated number of iterations, "
    "Number of training tokens, Tokens : Params ratio, DDP world size, warmup_ratio, "
    "warmdown_ratio, final_lr_frac, Minimum validation bpb, Final validation bpb, "
    "CORE metric estimate, MFU %, Total training flops, Total training time, Peak memory usage",
    "Base model loss": "train bpb, val bpb, sample 0, sample 1, sample 2, sample 3, sample 4, "
    "sample 5, sample 6",
    "Base model evaluation": "Model, CORE metric, hellaswag_zeroshot, jeopardy, "
    "bigbench_qa_wikidata, arc_easy, arc_challenge, copa, commonsense_qa, piqa, openbook_qa, "
    "lambada_openai, hellaswag, winograd, winogrande, bigbench_dyck_languages, "
    "agi_eval_lsat_ar, bigbench_cs_algorithms, bigbench_operators, "
    "bigbench_repeat_copy_logic, squad, coqa, boolq, bigbench_language_identification",
    "Midtraining": "run, device_type, dtype, num_iterations, max_seq_len, device_batch_size, "
    "unembedding_lr, embedding_lr, matrix_lr, init_lr_frac, weight_decay, eval_every, "
    "eval_tokens, total_batch_size, dry_run, Number of iterations, DDP world size, "
    "Minimum validation bpb",
    "Chat evaluation mid": CHAT_KEYS,
    "Chat SFT": "run, source, device_type, dtype, device_batch_size, num_epochs, "
    "num_iterations, target_examples_per_step, unembedding_lr, embedding_lr, matrix_lr, "
    "weight_decay, init_lr_frac, aqua_train_examples, aqua_val_examples, eval_every, "
    "eval_steps, eval_metrics_every, eval_metrics_max_problems, Training rows, "
    "Number of iterations, Training loss, Validation loss",
    "Chat evaluation sft": CHAT_KEYS,
    "Chat RL": "run, source, dtype, device_batch_size, examples_per_step, num_samples, "
    "max_new_tokens, temperature, top_k, unembedding_lr, embedding_lr, matrix_lr, "
    "weight_decay, init_lr_frac, num_epochs, save_every, eval_every, eval_examples",
    "Chat evaluation rl": CHAT_KEYS,
}
# Column of the summary -> the sections whose metrics it shows.
COLUMNS = {
    "BASE": ("Base model loss", "Base model evaluation", "Chat evaluation base"),
    "MID": ("Chat evaluation mid",),
    "SFT": ("Chat evaluation sft",),
    "RL": ("Chat evaluation rl",),
}
BASE_METRICS = {"CORE metric": "CORE", "val bpb": "val bpb"}
LOWER_IS_BETTER = frozenset({"val bpb"})


# ---- Writing and reading records -----------------------------------------------------------------


TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
# Settings that say how a stage is run or watched, not what it makes: a finished stage stays
# finished when they change.
NOT_IN_KEY = frozenset(
    "run wandb_mode log_every once resume keep report_dir allow_data_change device_batch_size "
    "collective_timeout_minutes async_save on_save_error save_every check_ranks_every hourly_rate "
    "max_bad_steps canary_every sentinel_every sentinel_tokens sentinel_answers on_broken buckets "
    "compile_engine".split()
)

NO_PARENTS = ("data", "rows", "tokenizer", "mixture", "suite")  # inputs that are no models


@dataclass(frozen=True)
class Provenance:
    """Whence a record comes: the run, its seed, and the fingerprints of what went in and out."""

    run_id: str
    seed: int
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of every artifact the stage read, the closest parent first."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of every artifact the stage made."""


class Devices(Protocol):
    """What does the work; `machine.Machine` has it."""

    @property
    def world_size(self) -> int: ...
    @property
    def device_name(self) -> str: ...


@dataclass(frozen=True)
class Cost:
    """What a stage took. `devices` of the kind `device` worked for `device_seconds` in all."""

    wall_seconds: float
    devices: int = 1
    device: str = "cpu"
    device_seconds: float | None = None
    """Default: every device for the whole time."""

    @classmethod
    def since(cls, started: float, machine: Devices) -> "Cost":
        """All of a machine's devices since `time.perf_counter()` was `started`."""
        return cls(time.perf_counter() - started, machine.world_size, machine.device_name)


def new_run_id() -> str:
    """A name for a run, e.g. 20261120-085201-3f9c01d2: sorts by time, two at once differ."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4)


def inherited_run_id(inputs: Mapping[str, str], report_dir: Path | str | None = None) -> str:
    """
    The run a stage belongs to: that of the first input some recorded stage made, else a new one.

    `inputs` is the stage's own, the closest parent first (a checkpoint before its tokenizer).
    """
    history = read_history(report_dir)
    for name, print_ in inputs.items():
        for record in reversed(history):
            if record["provenance"]["outputs"].get(name) == print_:
                return record["provenance"]["run_id"]
    return new_run_id()


def ancestors(
    print_: str, inputs: Mapping[str, str], report_dir: Path | str | None = None
) -> set[str]:
    """
    A checkpoint and all the checkpoints it comes from, by fingerprint, as far as they are recorded.

    inputs: what its own stage has read; text, rows and tokenizers are no ancestors.
    """
    made = {
        output: record["provenance"]["inputs"]
        for record in read_history(report_dir)
        for output in record["provenance"]["outputs"].values()
    }
    found, waiting = {print_}, [inputs]
    while waiting:
        for name, parent in waiting.pop().items():
            if name not in NO_PARENTS and parent not in found:
                found.add(parent)
                waiting.append(made.get(parent, {}))
    return found


def estimate(
    value: float,
    n: int,
    se: float,
    k: int | None = None,
    item_se: float | None = None,
    repeat_se: float | None = None,
) -> dict[str, Any]:
    """
    A measured value with the number of items behind it and its standard error; of items that were
    asked k times also what comes from the choice of items, and what from the repeats (`stats`).
    """
    found = {"value": value, "n": n, "se": se}
    return found if k is None else {**found, "k": k, "item_se": item_se, "repeat_se": repeat_se}


def over_seeds(values: Sequence[float]) -> Any:
    """The mean of one figure of several runs, as an `estimate`; of a single run just the figure."""
    return values[0] if len(values) == 1 else estimate(*mean(values))


def item_scores(items: Iterable[Any], scores: Sequence[float]) -> dict[str, Any]:
    """
    What each item scored, so that another run can be compared on the very same items.

    items: JSON values that say what was asked, named here by their fingerprint. The metric these
    are recorded under is the mean of the scores.
    """
    return {"of": fingerprint(list(items)), "scores": " ".join(f"{x:g}" for x in scores)}


def weighted_scores(weights: Mapping[str, float]) -> dict[str, Any]:
    """The same for a metric that is made of others: a sum over `item_scores`, name -> weight."""
    return {"weights": dict(weights)}


def read_scores(entry: Mapping[str, Any]) -> list[float]:
    """The scores of an `item_scores`."""
    return [float(x) for x in entry["scores"].split()]


def stage_key(settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Fingerprint of what decides a stage's result: its settings and the artifacts it read."""
    asked = {name: value for name, value in settings.items() if name not in NOT_IN_KEY}
    return fingerprint(plain({"settings": asked, "inputs": inputs}))


def write_record(
    section: str,
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    provenance: Provenance,
    cost: Cost,
    report_dir: Path | str | None = None,
    *,
    items: Mapping[str, Mapping[str, Any]] | None = None,
    tables: Sequence[Mapping[str, Any]] = (),
    series: Mapping[str, Sequence[Sequence[float]]] | None = None,
    metrics: Path | None = None,
    files: Iterable[Path] = (),
    extend: bool = False,
) -> Path:
    """
    Record that a stage ended; the main rank calls this, once, last of all.

    settings    the whole config (`config.settings`), in order
    values      name -> number, text, or `estimate`, in the order in which the report shows them
    items       name of a metric -> its `item_scores` or `weighted_scores`
    tables      {"title", "columns", "rows"}, rows of text or numbers
    series      name -> [[x, y], ...], curves that belong into no metrics file
    metrics     the run's metrics.jsonl (`runlog`), for the figures
    files       what the stage made, as files or folders: `finished` checks their content later
    extend      keep the values, items and tables of the section's last record where it has the
                same inputs, and add the costs: a section filled by several calls. A value of None
                removes the one of that name.

    Safe for two processes at once. Returns the path of the record.
    """
    folder = report_folder(report_dir)
    record = {
        "section": section,
        "timestamp": time.strftime(TIME_FORMAT),
        "key": stage_key(settings, provenance.inputs),
        "settings": settings,
        "values": values,
        "items": items or {},
        "tables": tables,
        "series": series or {},
        "metrics": portable(metrics) if metrics else None,
        "files": content(files),
        "provenance": {**asdict(provenance), **code_state()},
        "cost": {
            **asdict(cost),
            "device_seconds": device_seconds(cost),
            "own_device_seconds": device_seconds(cost),
        },
    }
    path = folder / f"{slug(section)}.json"
    with locked(folder):
        if extend and (old := read_if_sound(path)):
            record = extended(old, record)
        record = sealed(plain(record))
        append_line(folder / "records.jsonl", one_line(record))
        write_atomic(path, indented(record))
    return path


def finished(section: str, key: str, report_dir: Path | str | None = None) -> dict[str, Any] | None:
    """
    The section's record, if a stage with this `stage_key` ended and what it made is still there.

    "Still there" is judged by content: size and SHA-256 of every recorded file. A stage that made
    something but recorded no file cannot be checked, and counts as not finished. Only the record
    that the report shows counts, so that skipping a stage never leaves another one's figures in
    its section. In a script:

        if cfg.once and records.finished(SECTION, stage_key(settings(cfg), inputs)):
            return machine.print0(f"{SECTION}: finished already, skipped")
    """
    record = read_if_sound(report_folder(report_dir) / f"{slug(section)}.json")
    if (
        record is None
        or record["key"] != key
        or (record["provenance"]["outputs"] and not record["files"])
    ):
        return None
    for name, was in record["files"].items():
        file = base_dir() / name
        if not file.is_file() or file.stat().st_size != was["bytes"]:
            return None
    whole = all(sha256_file(base_dir() / n) == f["sha256"] for n, f in record["files"].items())
    return record if whole else None


def read_records(
    report_dir: Path | str | None = None, damaged: list[str] | None = None
) -> list[dict[str, Any]]:
    """
    The present record of every section, oldest first.

    Raises ValueError naming a damaged one, unless `damaged` is given: then such records are left
    out, and what is wrong with them is appended there.
    """
    records = []
    for path in sorted(report_folder(report_dir).glob("*.json")):
        try:
            if not looks_like_one(read_json(path)):
                continue
            record = read_record(path)
            if path.stem != slug(record["section"]):
                raise ValueError(f"{path} is of another section, {record['section']!r}; delete it")
            records.append(record)
        except ValueError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
    return sorted(records, key=lambda record: record["timestamp"])


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file. Raises ValueError unless it is what was written, and a record."""
    try:
        record = unseal(path.read_bytes().decode(), indented)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete it and repeat that stage") from error
    return check_record(record, path)


def read_if_sound(path: Path) -> dict[str, Any] | None:
    """A record; None where there is none, or a damaged one, which is reported."""
    try:
        return read_record(path) if path.exists() else None
    except ValueError as error:
        print(f"passed over: {printable(error)}", flush=True)
        return None


def looks_like_one(content: Any) -> bool:
    """Whether a JSON file of the folder means to be a record, though it may be damaged."""
    return not isinstance(content, dict) or bool({"section", "provenance", "cost"} & content.keys())


def read_history(
    report_dir: Path | str | None = None, damaged: list[str] | None = None
) -> list[dict[str, Any]]:
    """
    Every record ever written to the folder, in the order of writing, but for damaged ones. What is
    wrong with those is appended to `damaged`.
    """
    path = report_folder(report_dir) / "records.jsonl"
    return read_sealed_lines(path, damaged, lambda record: check_record(record, path))


def report_folder(report_dir: Path | str | None = None) -> Path:
    """Where records live: report/ under the base directory, or the folder given. Made if absent."""
    folder = Path(report_dir).expanduser() if report_dir else base_dir() / "report"
    with require_writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def slug(section: str) -> str:
    """A section's file name: lower case, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")


# ------------------------------------------------------------------------------------------------
# The parts of a record


def code_state() -> dict[str, Any]:
    """Commit of the running code, and whether files differ from it."""
    state = git_state()
    return {"commit": state["commit"], "dirty": state["dirty"]}


def device_seconds(cost: Cost) -> float:
    """Time of all devices together."""
    given = cost.device_seconds
    return cost.wall_seconds * cost.devices if given is None else given


def content(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, and of all files below folders, by `portable` name."""
    found: list[Path] = []
    for path in files:
        found += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {
        portable(path): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in found
    }


def portable(path: Path) -> str:
    """A path as a record names it: relative to the base directory where it is below."""
    path = path.resolve()
    return str(path.relative_to(base_dir()) if path.is_relative_to(base_dir()) else path)


def extended(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with the values, items, tables and costs of `old` added, if their inputs are equal."""
    if old["provenance"]["inputs"] != dict(new["provenance"]["inputs"]):
        return new
    titles = {table["title"] for table in new["tables"]}
    spent = {
        name: old["cost"][name] + new["cost"][name] for name in ("wall_seconds", "device_seconds")
    }
    values = {**old["values"], **new["values"]}
    if new["values"].keys() >= old["values"].keys():
        values = new["values"]  # in its order
    return {
        **new,
        "values": {name: value for name, value in values.items() if value is not None},
        "items": {**old["items"], **new["items"]},
        "tables": [t for t in old["tables"] if t["title"] not in titles] + list(new["tables"]),
        "series": {**old["series"], **new["series"]},
        "files": {**old["files"], **new["files"]},
        "cost": {**new["cost"], **spent},
    }


# ------------------------------------------------------------------------------------------------
# Valid JSON, one value per line


def plain(value: Any) -> Any:
    """
    `value` in types JSON has, order kept. Numbers that are not finite become "nan", "inf", "-inf".

    Raises TypeError for what JSON cannot hold.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    raise TypeError(f"a record holds numbers, text, lists and dicts, not {type(value).__name__}")


def append_line(path: Path, line: str) -> None:
    """Append a line, after closing one that a killed process left open. The caller has the lock."""
    with path.open("ab+") as stream:
        if stream.seek(0, os.SEEK_END) and not ends_with_newline(stream.fileno(), stream.tell()):
            line = "\n" + line
        stream.write(line.encode() + b"\n")


def ends_with_newline(handle: int, size: int) -> bool:
    """Whether the last of `size` bytes ends a line."""
    return os.pread(handle, 1, size - 1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; a torn or damaged line is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(value := json.loads(line), dict):
                    yield value


def read_sealed_lines(
    path: Path,
    damaged: list[str] | None = None,
    check: Callable[[dict[str, Any]], dict[str, Any]] = lambda value: value,
) -> list[dict[str, Any]]:
    """
    The JSON objects of a file of sealed lines; none where there is no file. Lines that are not what
    was written, or that `check` rejects with a ValueError, are left out and named in `damaged`.
    """
    found = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line and number == len(lines):
            continue
        try:
            found.append(check(unseal(line.decode(), one_line)))
        except (ValueError, RecursionError) as error:
            if damaged is not None:
                damaged.append(f"{path}, line {number} is damaged: {error}; delete that line")
    return found


def one_line(value: Any) -> str:
    """JSON as a line of a file has it."""
    return json.dumps(value, allow_nan=False)


def indented(value: Any) -> str:
    """JSON as the file of a record has it: order kept, for people to read."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder alone, among processes; a killed holder lets go by itself."""
    path = folder / ".lock"
    with require_writable(path):
        handle = path.open("w")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ---- Summaries over records: metrics by stage, costs, warnings -----------------------------------


Record = Mapping[str, Any]
GUESTS = frozenset({"hf", "before"})  # inputs of sections about models of any run


def metrics(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Metric -> column -> value: CORE first, ChatCORE last, the rest by name."""
    found: dict[str, dict[str, Any]] = {}
    for column, record in in_columns(records):
        for key, value in record["values"].items():
            if is_metric(record["section"], key, value):
                found.setdefault(metric_name(key), {})[column] = value
    names = sorted(found, key=lambda name: (name != "CORE", name == "ChatCORE", name))
    return {name: found[name] for name in names}


def scores_by_item(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Column -> metric -> what its items scored, as the records have it."""
    found: dict[str, dict[str, Any]] = {column: {} for column in COLUMNS}
    for column, record in in_columns(records):
        for key, entry in record.get("items", {}).items():
            found[column][metric_name(key)] = entry
    return found


def in_columns(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """The records that the summary's columns show, each with its column."""
    for record in records:
        for column, sections in COLUMNS.items():
            if record["section"] in sections:
                yield column, record


def metric_name(key: str) -> str:
    """What the summary calls a value of a record."""
    return str(BASE_METRICS.get(key, key))


def is_metric(section: str, key: str, value: Any) -> bool:
    """Whether a value belongs into the summary: of a chat evaluation, its tasks and ChatCORE."""
    if not section.startswith("Chat evaluation"):
        return key in BASE_METRICS
    return isinstance(value, Mapping) or key in CHAT_TASKS.split(", ")


def plain_value(value: Any) -> Any:
    """The number of an estimate, any other value itself."""
    return value["value"] if isinstance(value, Mapping) else value


def standard_error(value: Any) -> float:
    """The standard error of an estimate; NaN where nobody gave one."""
    known = isinstance(value, Mapping) and value.get("se") is not None
    return float(value["se"]) if known else math.nan


def differences(
    found: Mapping[str, Mapping[str, Any]],
    items: Mapping[str, Mapping[str, Any]] = {},
    order: Sequence[str] = tuple(COLUMNS),
) -> dict[str, Any]:
    """
    Table of what each column changed: per metric, against the one before it that has one.

    Where both stages were asked the same items (`scores_by_item`), these are compared one by one;
    elsewhere the standard error is that of a difference of independent measurements.
    """
    rows = []
    for name, by in found.items():
        columns = [column for column in order if column in by]
        for before, after in zip(columns, columns[1:], strict=False):
            pairs = paired(name, items.get(before, {}), items.get(after, {}))
            if pairs:
                change, error = pairs.difference, pairs.se
            else:
                change = float(plain_value(by[after])) - float(plain_value(by[before]))
                error = math.hypot(standard_error(by[before]), standard_error(by[after]))
            noise = ["-", "noise unknown"]
            if math.isfinite(error):
                gain = -change if name in LOWER_IS_BETTER else change
                noise = [f"{error:.4f}", stats.verdict(gain, error)]
            rows.append([name, f"{before} to {after}", f"{change:+.4f}", *noise, show_pairs(pairs)])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


def paired(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> stats.Comparison | None:
    """Compare a metric on the items of two columns; None unless both have scores of the same."""
    weights = [entries.get(name, {}).get("weights", {name: 1.0}) for entries in (before, after)]
    if weights[0] != weights[1]:
        return None
    parts = []
    for part in weights[0]:
        old, new = before.get(part), after.get(part)
        if old is None or new is None or old["of"] != new["of"]:
            return None
        parts.append(stats.compare(read_scores(old), read_scores(new)))
    return stats.combine(parts, list(weights[0].values()))


def show_pairs(pairs: stats.Comparison | None) -> str:
    """What became of the items, in words."""
    if pairs is None:
        return "-"
    return f"{pairs.won:,} won, {pairs.lost:,} lost of {pairs.n:,} (p = {pairs.p:.2g})"


def ledger(records: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of what each stage took, in time and in money at the machine's hourly rate."""
    rows = []
    for record in records:
        cost = record["cost"]
        devices = f"{cost['devices']}x {cost['device']}"
        rows.append([record["section"], cost["wall_seconds"], cost["device_seconds"], devices])
    if rows:
        rows.append(["Total", sum(row[1] for row in rows), sum(row[2] for row in rows), ""])
    columns = ["Section", "Wall clock", "Device time", "Devices", "Cost"]
    cells = [
        [name, f"{wall / 60:.2f}m", f"{busy / 60:.2f}m", on, f"${wall / 3600 * hourly_rate:.2f}"]
        for name, wall, busy, on in rows
    ]
    return {"title": "Cost", "columns": columns, "rows": cells}


def wall_clock(records: Sequence[Record], run_started: str) -> dict[str, int]:
    """Whole minutes from the start to the last fixed section before RL; with RL, if it ran."""
    ends = {r["section"]: seconds(r["timestamp"]) for r in records if r["section"] in SECTIONS}
    before_rl = [end for section, end in ends.items() if "rl" not in slug(section).split("-")]
    spans = {"Total wall clock time": before_rl}
    if len(before_rl) < len(ends):
        spans["Total wall clock time with RL"] = list(ends.values())
    started = seconds(run_started)
    return {label: int(max(times) - started) // 60 for label, times in spans.items() if times}


def seconds(timestamp: str) -> float:
    """A timestamp as seconds since the epoch."""
    return datetime.strptime(timestamp, TIME_FORMAT).timestamp()


def find_faults(records: Sequence[Record]) -> list[str]:
    """
    What breaks the chain from section to section: several runs, several versions of the code, a
    stage that read something else than what the stage before it is recorded to have made. What
    scores or compares models from outside the run is no part of the chain.
    """
    faults = []
    records = [r for r in records if not GUESTS & r["provenance"]["inputs"].keys()]
    for what, key in {"runs": "run_id", "commits": "commit"}.items():
        groups: dict[str, list[str]] = {}
        for record in records:
            groups.setdefault(record["provenance"][key], []).append(record["section"])
        if len(groups) > 1:
            parts = [f"{name} ({', '.join(sections)})" for name, sections in groups.items()]
            faults.append(f"They come from {len(groups)} {what}: {'; '.join(parts)}.")
    for record in records:
        for name, read in record["provenance"]["inputs"].items():
            makers = [r for r in records if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in makers}
            if made and read not in made:
                others = " and ".join(
                    f"{section} made {print_}" for print_, section in made.items()
                )
                faults.append(f"{record['section']} read {name} {read}, but {others}.")
    return faults
