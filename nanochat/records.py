"""
One JSON record per stage: what it was asked, what it measured, what it cost, whence it came.

    a stage ends -> write_record -> report/<slug>.json, and a line in report/records.jsonl

    {section, timestamp, key, settings, values, items, tables, series, metrics, files, provenance,
     cost, seal}

`seal` is the digest of all the rest: a file or line that differs in a single bit is not read as a
record. `<slug>.json` is the section as the report shows it; `records.jsonl` keeps every record ever
written. Knows nothing of torch, nor of how a report looks. Artifacts go by one name everywhere,
in `inputs` and in `outputs`, so that a reader can follow the chain: `data`, `tokenizer`, `rows`,
and a checkpoint by the stage that made it: `base`, `mid`, `sft`, `rl`.
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
from pathlib import Path
from typing import Any, Protocol

from nanochat.common import (
    base_dir,
    fingerprint,
    printable,
    read_json,
    require_writable,
    sealed,
    sha256_file,
    unseal,
    write_atomic,
)
from nanochat.environment import git_state
from nanochat.record_shape import check_record
from nanochat.stats import mean

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
# Settings that say how a stage is run or watched, not what it makes: a finished stage stays
# finished when they change.
NOT_IN_KEY = frozenset(
    "run wandb_mode log_every once resume keep report_dir allow_data_change device_batch_size "
    "collective_timeout_minutes async_save on_save_error save_every check_ranks_every hourly_rate "
    "max_bad_steps sentinel_every sentinel_tokens sentinel_answers on_broken buckets "
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
