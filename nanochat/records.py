"""
Records: one JSON file for each section of the report, and what they say together.

    settings, values, provenance, cost -> write_record -> report/<slug>.json, records.jsonl
    records -> metrics by stage, differences, costs, broken chains

A record names the fingerprints of its inputs and outputs, so a report can tell which belong
together.
"""

import contextlib
import json
import math
import os
import re
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat.common import (
    REPOSITORY,
    base_dir,
    fingerprint,
    locked,
    printable,
    sealed,
    sha256_file,
    unseal,
    write_atomic,
)

if TYPE_CHECKING:  # it imports torch, which records do without
    from nanochat.distributed import DistContext

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

# ---- Writing and reading records -----------------------------------------------------------------


Record = Mapping[str, Any]
Folder = Path | str | None  # None: report/ under the base directory
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
# Settings that say how a stage is run or watched, not what it makes: a finished stage stays
# finished when they change.
NOT_IN_KEY = frozenset(
    "run skip_if_done resume keep report_dir allow_data_change device_batch_size hourly_rate "
    "collective_timeout_minutes on_save_error save_every canaries compile_engine".split()
)
ADDED_COSTS = ("wall_seconds", "device_seconds")


@dataclass(frozen=True)
class Provenance:
    """Whence a record comes: the run, its seed, and the fingerprints of what went in and out."""

    run_id: str
    seed: int
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of every artifact the stage read, the closest parent first."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of every artifact the stage made."""


@dataclass(frozen=True)
class Cost:
    """What a stage took. `devices` of the kind `device` worked for `device_seconds` in all."""

    wall_seconds: float
    devices: int = 1
    device: str = "cpu"
    device_seconds: float | None = None
    """Default: every device for the whole time."""

    @classmethod
    def since(cls, started: float, machine: "DistContext") -> "Cost":
        """All of a machine's devices since `time.perf_counter()` was `started`."""
        return cls(time.perf_counter() - started, machine.world_size, machine.device_name)


def new_run_id() -> str:
    """A name for a run, e.g. 20261120-085201-3f9c01d2: sorts by time, two at once differ."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(4)


def inherited_run_id(inputs: Mapping[str, str], report_dir: Folder = None) -> str:
    """
    The run a stage belongs to: that of the first input some recorded stage made, else a new one.

    `inputs` is the stage's own, the closest parent first (a checkpoint before its tokenizer).
    """
    history = [record["provenance"] for record in read_history(report_dir)]
    made = product(inputs.items(), reversed(history))
    found = (by["run_id"] for (name, print_), by in made if by["outputs"].get(name) == print_)
    return next(found, None) or new_run_id()


def estimate(value: float, n: int, se: float, *repeats: float | None) -> dict[str, Any]:
    """
    A measured value with the number of items behind it and its standard error; of items that were
    asked k times also k, and what comes from the choice of items and from the repeats (`stats`).
    """
    names = ("k", "item_se", "repeat_se")
    return {"value": value, "n": n, "se": se, **dict(zip(names, repeats, strict=False))}


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
    report_dir: Folder = None,
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
    metrics     the run's metrics.jsonl (`logger`), for the figures
    files       what the stage made, as files or folders: `finished` checks their content later
    extend      keep the values, items and tables of the section's last record where it has the
                same inputs, and add the costs: a section filled by several calls. A value of None
                removes the one of that name.

    Safe for two processes at once. Returns the path of the record.
    """
    folder = report_folder(report_dir)
    code = git_state()
    busy = cost.wall_seconds * cost.devices if cost.device_seconds is None else cost.device_seconds
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
        "provenance": {**asdict(provenance), "commit": code["commit"], "dirty": code["dirty"]},
        "cost": {**asdict(cost), "device_seconds": busy, "own_device_seconds": busy},
    }
    path = folder / f"{slug(section)}.json"
    with locked(folder / ".lock", f"recording {section}"):
        if extend and (old := read_if_sound(path)):
            record = extend_record(old, record)
        record = sealed(plain(record))
        append_line(folder / "records.jsonl", one_line(record))
        write_atomic(path, indented(record))
    return path


def finished(section: str, key: str, report_dir: Folder = None) -> dict[str, Any] | None:
    """
    The section's record, if a stage with this `stage_key` ended and what it made is still there.

    "Still there" is judged by content: size and SHA-256 of every recorded file. A stage that made
    something but recorded no file cannot be checked, and counts as not finished. Only the record
    that the report shows counts, so that skipping a stage never leaves another one's figures in
    its section. In a script:

        if cfg.skip_if_done and records.finished(SECTION, stage_key(settings(cfg), inputs)):
            return machine.print0(f"{SECTION}: finished already, skipped")
    """
    record = read_if_sound(report_folder(report_dir) / f"{slug(section)}.json")
    if record is None or record["key"] != key:
        return None
    files = [base_dir() / name for name in record["files"]]
    checked = files or not record["provenance"]["outputs"]
    intact = checked and all(map(Path.is_file, files)) and content(files) == record["files"]
    return record if intact else None


def read_records(report_dir: Folder = None, damaged: list[str] | None = None) -> list[Record]:
    """
    The present record of every section, oldest first.

    Raises ValueError naming a damaged one, unless `damaged` is given: then such records are left
    out, and what is wrong with them is appended there.
    """
    records: list[Record] = []
    for path in sorted(report_folder(report_dir).glob("*.json")):
        try:
            if path.name != "header.json":  # of the report
                records.append(read_record(path))
        except ValueError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
    return sorted(records, key=lambda record: record["timestamp"])


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file. Raises ValueError unless it is what was written."""
    try:
        return unseal(path.read_bytes().decode(), indented)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; delete it and repeat that stage") from error


def read_if_sound(path: Path) -> dict[str, Any] | None:
    """A record; None where there is none, or a damaged one, which is reported."""
    try:
        return read_record(path) if path.exists() else None
    except ValueError as error:
        print(f"passed over: {printable(error)}", flush=True)
        return None


def read_history(report_dir: Folder = None, damaged: list[str] | None = None) -> list[Record]:
    """
    Every record ever written to the folder, in the order of writing, but for damaged ones. What is
    wrong with those is appended to `damaged`.
    """
    return read_sealed_lines(report_folder(report_dir) / "records.jsonl", damaged)


def report_folder(report_dir: Folder = None) -> Path:
    """Where records live: report/ under the base directory, or the folder given. Made if absent."""
    folder = Path(report_dir).expanduser() if report_dir else base_dir() / "report"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def slug(section: str) -> str:
    """A section's file name: lower case, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")


# ------------------------------------------------------------------------------------------------
# The parts of a record


def content(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files, and of all files below folders, by `portable` name."""
    below = [sorted(filter(Path.is_file, p.rglob("*"))) if p.is_dir() else [p] for p in files]
    return {
        portable(path): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in chain.from_iterable(below)
    }


def portable(path: Path) -> str:
    """A path as a record names it: relative to the base directory where it is below."""
    path = path.resolve()
    return str(path.relative_to(base_dir()) if path.is_relative_to(base_dir()) else path)


def extend_record(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with the values, items, tables and costs of `old` added, if their inputs are equal."""
    if old["provenance"]["inputs"] != dict(new["provenance"]["inputs"]):
        return new
    both = {part: {**old[part], **new[part]} for part in ("values", "items", "series", "files")}
    if new["values"].keys() >= old["values"].keys():
        both["values"] = new["values"]  # in its order
    both["values"] = {name: value for name, value in both["values"].items() if value is not None}
    titles = {table["title"] for table in new["tables"]}
    tables = [table for table in old["tables"] if table["title"] not in titles]
    cost = new["cost"] | {name: old["cost"][name] + new["cost"][name] for name in ADDED_COSTS}
    return {**new, **both, "tables": [*tables, *new["tables"]], "cost": cost}


# ------------------------------------------------------------------------------------------------
# Valid JSON, one value per line


def plain(value: Any) -> Any:
    """
    `value` in types JSON has, order kept. Numbers that are not finite become "nan", "inf", "-inf".

    Raises TypeError for what JSON cannot hold.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    if isinstance(value, str | bool | int | float | None):
        return value
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    raise TypeError(f"a record holds numbers, text, lists and dicts, not {type(value).__name__}")


def append_line(path: Path, line: str) -> None:
    """Append a line, after closing one that a killed process left open. The caller has the lock."""
    with path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        torn = size and os.pread(stream.fileno(), 1, size - 1) != b"\n"
        stream.write(b"\n" * bool(torn) + line.encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; a torn or damaged line is passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(value := json.loads(line), dict):
                    yield value


def read_sealed_lines(path: Path, damaged: list[str] | None = None) -> list[Record]:
    """
    The JSON objects of a file of sealed lines; none where there is no file. Lines that are not what
    was written are left out and named in `damaged`.
    """
    found: list[Record] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(unseal(line.decode(), one_line))
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


# ---- The code, and what machines cost ------------------------------------------------------------


# What git is asked about: a report that was just written makes no commit dirty
WITHOUT_REPORT = (":(exclude)report.md", ":(exclude)dev/report")
DOLLARS_PER_GPU_HOUR = {"H100": 3.00, "A100": 1.79, "V100": 0.55}  # on demand, October 2025
OTHER_PER_HOUR = 2.00


def git(repository: Path, *words: str) -> str:
    """The output of a git command in a repository; empty where git has no answer."""
    command = ["git", "-C", str(repository), *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=30)
    return ""


def git_state(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Branch, short commit, whether files differ from it, and the first line of its message."""
    return {
        "branch": git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip() or "unknown",
        "commit": git(repository, "rev-parse", "--short=7", "HEAD").strip() or "unknown",
        "dirty": bool(git(repository, "status", "--porcelain", "--", ".", *WITHOUT_REPORT)),
        "message": git(repository, "log", "-1", "--format=%s").strip(),
    }


def default_rate(gpus: Sequence[str]) -> float:
    """What a machine with these accelerators costs to rent, in dollars per hour; 0 without any."""
    prices = DOLLARS_PER_GPU_HOUR.items()
    return sum(next((p for kind, p in prices if kind in name), OTHER_PER_HOUR) for name in gpus)


# ---- Values of records ---------------------------------------------------------------------------


def plain_value(value: Any) -> Any:
    """The number of an estimate, any other value itself."""
    return value["value"] if isinstance(value, Mapping) else value


def standard_error(value: Any) -> float:
    """The standard error of an estimate; NaN where nobody gave one."""
    known = isinstance(value, Mapping) and value.get("se") is not None
    return float(value["se"]) if known else math.nan


def seconds(timestamp: str) -> float:
    """A timestamp as seconds since the epoch."""
    return time.mktime(time.strptime(timestamp, TIME_FORMAT))
