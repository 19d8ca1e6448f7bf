"""
Records: one JSON file for each section of the report, and the log of a training run.

    settings, values, provenance, cost -> write_record -> report/<slug>.json, records.jsonl
    records -> read_records, read_history -> report, comparisons
    step, metrics -> RunLog.log -> metrics.jsonl, console, Weights & Biases

NANOCHAT_REPORT_DIR is the folder of report.md and report/; by default, the base directory.

A record stores the fingerprints of its inputs and outputs, so a report can check that its sections
belong to the same run.
"""

import json
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat import common
from nanochat.common import to_json_types
from nanochat.recipe import Recipe, changed_code, code_digests, list_changes, require_same_code

# Means over tasks -> their names on the built-in world, whose scores compare with no published ones
WORLD_NAMES = {"CORE metric": "World few-shot", "ChatCORE": "World chat"}


def mean_name(name: str, tasks: Iterable[str]) -> str:
    """Name of a mean over tasks, a key of WORLD_NAMES: the other one if all are World tasks."""
    return WORLD_NAMES[name] if all(t.lower().startswith("world") for t in tasks) else name


# ---- Writing and reading records -----------------------------------------------------------------


Record = Mapping[str, Any]
HEADER_FILE, PLAN_FILE = "header.json", "_plan.json"  # in the folder of the records
HISTORY_FILE = "records.jsonl"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
STARTED = time.perf_counter()  # this module is imported when a process starts


@dataclass(frozen=True)
class Cost:
    """Cost of a stage that ran on `devices` devices of type `device`."""

    wall_seconds: float
    devices: int = 1
    device: str = "cpu"
    cpu: str = ""
    """Kind of CPU."""
    threads: int = 0
    """Of a process; 0: not recorded."""
    dtype: str = ""
    """Of the matmuls of a model."""

    @classmethod
    def so_far(cls, dist: Any = None, seconds: float | None = None) -> "Cost":
        """
        Cost of `seconds` of all devices of `dist` (DistContext), by default of one CPU since the
        start of the process.
        """
        seconds = time.perf_counter() - STARTED if seconds is None else seconds
        cpu = common.cpu_info("model name")
        if dist is None:
            return cls(seconds, cpu=cpu)
        return cls(
            *(seconds, dist.world_size, dist.device_name, cpu),
            *(dist.num_threads, dist.describe_dtype()),
        )


def new_run_id() -> str:
    """Unique run id that sorts by time (UTC), e.g. 20261120-085201-3f9c01d2."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(4)


def item_scores(
    items: Iterable[Any], scores: Sequence[float], clusters: Sequence[str] = ()
) -> dict[str, Any]:
    """
    Score of each item, so that two runs can be compared item by item.

    items: JSON values that identify the items; only their fingerprint is stored. The metric of the
    same name must be the mean of the scores. clusters: the cluster of each item (`stats.mean`).
    """
    entry = {"of": common.fingerprint(list(items)), "scores": " ".join(f"{x:g}" for x in scores)}
    names, numbers = np.unique(list(clusters), return_inverse=True)
    if len(names) < len(clusters):
        entry["clusters"] = " ".join(map(str, numbers))
    return entry


def read_scores(entry: Mapping[str, Any]) -> list[float]:
    """Read the scores of an `item_scores` entry."""
    return [float(x) for x in entry["scores"].split()]


def read_clusters(entry: Mapping[str, Any]) -> list[str] | None:
    """Read the cluster of each item of an `item_scores` entry; None if items are independent."""
    return entry.get("clusters", "").split() or None


def write_record(
    section: str,
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    inputs: Mapping[str, str],
    cost: Cost,
    *,
    outputs: Mapping[str, str] = {},
    items: Mapping[str, Mapping[str, Any]] = {},
    tables: Sequence[Mapping[str, Any]] = (),
    metrics: Path | None = None,
    files: Iterable[Path] = (),
    commits: Sequence[str] = (),
    code: Mapping[str, str] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """
    Record a stage; call it on rank 0, once at its end.

    settings    the whole config (`config.settings`), in order
    values      name -> number, text, or a `stats.Estimate` as a dict; without those of None
    inputs      name -> fingerprint of each artifact that it was made from, closest parent first
    outputs     name -> fingerprint of each artifact that it made
    items       metric name -> its `item_scores`, or {"weights": {name: weight}} for a sum of such
    tables      {"title", "columns", "rows"}, rows of text or numbers
    metrics     the run's metrics.jsonl (`RunLog`), for the figures
    files       output files or directories; `find_finished` checks their content later
    commits     commits of all attempts of a run, by default the current one
    code        `code_digests` of the run; default: of this process
    recipe      what determines the result; default: all settings, and the inputs

    Safe to call from concurrent processes. Returns the path of the record.
    """
    record = {
        "section": section,
        "timestamp": time.time(),
        "recipe": (recipe or Recipe(settings, inputs, settings)).to_json(),
        "settings": settings,
        "values": {name: value for name, value in values.items() if value is not None},
        "items": items,
        "tables": tables,
        "metrics": relative_path(metrics) if metrics else None,
        "files": hash_files(files),
        "code": code or code_digests(),
        "provenance": {
            "inputs": inputs,
            "outputs": outputs,
            "commit": ", ".join(commits or [git_state()["Commit"]]),
            "command": command_line(),
        },
        "cost": asdict(cost),
    }
    require_writable()
    folder, path = report_folder(), record_path(section)
    with common.hold_lock(folder / ".lock", f"recording {section}"):
        common.write_json(path, to_json_types(record))  # first: see `read_history`
        append_line(folder / HISTORY_FILE, record)
    return path


def require_writable() -> None:
    """Raise UsageError if records cannot be written, before a stage that would be lost works."""
    folder = report_home() / "report"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").open("a").close()
    except OSError as error:
        problem = f"records cannot be written to {error.filename} ({error.strerror})"
        raise common.UsageError(problem, "set NANOCHAT_REPORT_DIR to another folder") from error


def command_line() -> str:
    """The command that runs this process, or the torchrun that started it."""
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        words = [f"--nproc_per_node={ranks}", *words[:2], "--", *words[2:]]
    return shlex.join(["torchrun" if ranks else "python", *words])


def find_finished(section: str, recipe: Recipe, tag: str = "") -> Record | None:
    """
    Record of the section if it was made by the same recipe (with the same tag, if there is one) and
    its output files are intact; else None, and differences are printed. Raises UsageError if it was
    made by other code.

    The SHA-256 of every recorded file must match. A stage that has outputs but recorded no
    files cannot be checked and is not finished. Only the section's current record is considered, so
    that the report shows the results of a skipped stage, not those of another run.
    """
    record = read_record(section)
    if record is None:
        return None
    fix = "run it again without --skip_if_done"
    if "recipe" not in record:
        problem = f"{section} was recorded before 2026-12, without its recipe"
        raise common.UsageError(problem, f"{fix}, or delete {record_path(section)}")
    files = [common.base_dir() / name for name in record["files"]]
    changes = list_changes(record["recipe"], recipe)
    if tag and files and (saved := files[0].parent.parent.name) != tag:
        changes.append(f"--model_tag: was {saved!r}, now {tag!r}")
    if changes:
        print(common.printable(f"{section}: not as recorded; {'; '.join(changes)}"), flush=True)
        return None
    if (record["provenance"]["outputs"] and not files) or hash_files(files) != record["files"]:
        return None
    if files and "resume" in record["settings"]:
        fix += f" and with --resume=never, or rename {files[0].parent.parent}"
    require_same_code(section, changed_code(record["code"]), fix)
    return record


def read_record(section: str) -> Record | None:
    """Current record of a section, or None."""
    path = record_path(section)
    return common.read_json(path) if path.exists() else None


def read_records() -> list[Record]:
    """Current record of every section, oldest first."""
    paths = [x for x in report_folder().glob("*.json") if x.name not in (HEADER_FILE, PLAN_FILE)]
    found = {path: common.read_json(path) for path in paths}
    if broken := [path for path, record in found.items() if "timestamp" not in record]:
        raise ValueError(f"{broken[0]} is not a record of a stage; delete it")
    return sorted(found.values(), key=lambda record: seconds(record["timestamp"]))


def read_history() -> Sequence[Record]:
    """All records ever written, oldest first, also those that did not fit on a full disk."""
    past = read_lines(report_folder() / HISTORY_FILE)
    known = {(record["section"], record["timestamp"]) for record in past}
    now = [r for r in read_records() if (r["section"], r["timestamp"]) not in known]
    return [*past, *now]


def report_home() -> Path:
    """Folder of report.md and of report/: NANOCHAT_REPORT_DIR or the base directory."""
    return Path(os.environ.get("NANOCHAT_REPORT_DIR") or common.base_dir()).expanduser()


def report_folder() -> Path:
    """Folder of records: report/ in `report_home`. Creates it."""
    folder = report_home() / "report"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def record_path(section: str) -> Path:
    """File of a section's current record."""
    return report_folder() / f"{slug(section)}.json"


def slug(section: str) -> str:
    """File name stem of a section: lower case, with hyphens; a hash tells apart all but words."""
    name = re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")
    plain = len(name) < 99 and name == section.lower().replace(" ", "-")
    return name if plain else f"{name[:80]}-{common.fingerprint(section)}"


# ---- Parts of a record ---------------------------------------------------------------------------


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file at or below `paths`, by `relative_path`."""
    found = [file for path in paths for file in (path, *path.rglob("*")) if file.is_file()]
    return {relative_path(file): common.sha256_file(file) for file in sorted(found)}


def relative_path(path: Path) -> str:
    """Path relative to the base directory, so that records stay valid when that is moved."""
    return os.path.relpath(path.resolve(), common.base_dir())


# ---- Files with one JSON value per line ----------------------------------------------------------


def append_line(path: Path, value: Any) -> None:
    """
    Append `to_json_types` of a value as a line, in one write, ending an unfinished last line.
    """
    with common.errors_name(path), path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        torn = size and os.pread(stream.fileno(), 1, size - 1) != b"\n"
        stream.write(b"\n" * bool(torn) + json.dumps(to_json_types(value)).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects in a file, one per line; skips damaged lines. Empty without the file."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


# ---- The log of a training run -----------------------------------------------------------------

METRICS_FILE = "metrics.jsonl"
TRACKER_SECONDS = 30.0  # timeout for the tracker to start and to finish
UNTIMED_STEPS = 3
NOT_FINITE = ("nan", "inf", "-inf")
CONSOLE_FORMATS = {  # console format of metrics, in order
    "loss": "loss {:.4f}",
    "reward": "reward {:.4f}",
    "val_bpb": "val bpb {:.4f}",
    "lr": "lr x{:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
}


class RunLog(AbstractContextManager):
    """
    Log of one training run in `folder`, for rank 0. Use as a context manager.

    Each entry prints a line. A resumed run appends a marker with its first step, and `read_metrics`
    then discards entries that earlier processes logged for later steps.
    """

    def __init__(
        self,
        folder: Path,
        run: str = "dummy",
        run_id: str = "",
        settings: Mapping[str, Any] = {},
        first_step: int = 0,
        total_steps: int | None = None,
    ):
        """
        run          name on Weights & Biases; "dummy" = no tracker
        run_id       identifies the run on the tracker, together with run and folder names
        settings     the whole config, for the tracker
        first_step   first step of this process (0, or the step it resumes at)
        total_steps  number of training steps, for progress and ETA
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.total_steps = folder / METRICS_FILE, total_steps
        self.warm_step, self.warm_time = first_step + UNTIMED_STEPS, time.monotonic()
        self.tracker = None if run == "dummy" else open_tracker(run, folder, run_id, settings)
        self.unwritten: list[Any] = []
        """Entries that could not be written yet."""
        if self.path.exists():
            self.write({"resumed_at": first_step})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """
        Log metrics of a step. Entries of the same step are merged when read; later values win.

        An entry without loss or reward is an evaluation; its line shows all metrics.
        """
        self.write({"step": step, **values})
        self.track("log", dict(values), step=step)
        shown = [form.format(values[k]) for k, form in CONSOLE_FORMATS.items() if k in values]
        if "loss" not in values and "reward" not in values:
            others = [(k, v) for k, v in values.items() if k not in CONSOLE_FORMATS]
            shown += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in others]
        if shown:
            total = f"/{self.total_steps}" if self.total_steps else ""
            line = " | ".join([f"step {step:>5}{total}", *shown, *self.time_left(step)])
            print(common.printable(line), flush=True)

    def write(self, *entries: Mapping[str, Any]) -> None:
        """Append entries. If the disk is full, warns once and tries again with the next ones."""
        failed_before, self.unwritten = bool(self.unwritten), [*self.unwritten, *entries]
        try:
            while self.unwritten:
                append_line(self.path, self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as error:
            if not failed_before:
                problem = f"{self.path} cannot be written ({error}); trying again at each step"
                print(common.printable(problem), flush=True)

    def time_left(self, step: int) -> list[str]:
        """Time left; empty if unknown. The pace excludes the first steps, because they compile."""
        if step <= self.warm_step or self.total_steps is None:
            self.warm_time = time.monotonic()
            return []
        pace = (time.monotonic() - self.warm_time) / (step - self.warm_step)
        return [f"{readable_time(max(0.0, pace * (self.total_steps - 1 - step)))} left"]

    def track(self, action: str, *args: Any, **options: Any) -> None:
        """Call a method of the tracker, which is not used any more after its first error."""
        if self.tracker is not None:
            try:
                getattr(self.tracker, action)(*args, **options)
            except Exception as error:
                print_tracker_error(error)
                self.tracker = None

    def __exit__(self, *error: object) -> None:
        self.write()
        self.track("finish")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """
    Entries of a metrics file, one per step, in order, with non-finite numbers as floats.

    If a process resumed at step n, earlier entries for steps after n are dropped; at step n, new
    values override old ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_lines(path):
        if "resumed_at" in entry:
            steps = {step: old for step, old in steps.items() if step <= entry["resumed_at"]}
        else:
            numbers = {k: float(v) if v in NOT_FINITE else v for k, v in entry.items()}
            steps.setdefault(entry["step"], {}).update(numbers)
    return [steps[step] for step in sorted(steps)]


def open_tracker(name: str, folder: Path, run_id: str, settings: Mapping[str, Any]) -> Any:
    """
    A run on Weights & Biases, which sends its entries from a process of its own; a run with the
    same name, run id and folder is resumed. Never prompts for an API key. If it fails, this is
    printed, and None returned.
    """
    try:
        import wandb  # imported here because it is slow and optional

        online = wandb.setup().settings.mode == "online"
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        # without timeouts, wandb could block for a long time
        limits: Any = {"init_timeout": TRACKER_SECONDS, "finish_timeout": TRACKER_SECONDS}
        return wandb.init(
            project="nanochat",
            name=name,
            id=common.fingerprint([name, run_id, folder.parent.name, folder.name]),
            resume="allow",
            dir=folder,
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off", **limits),
        )
    except Exception as error:  # a tracker failure must not stop the run
        print_tracker_error(error)
        return None


def print_tracker_error(error: Exception) -> None:
    """Say that the tracker is not used any more."""
    problem = f"tracker: stopped, training continues ({type(error).__name__}: {error})"
    print(common.printable(problem), file=sys.stderr, flush=True)


# ---- Git state and hourly rates ------------------------------------------------------------------


# Changes of these are "dirty"
CODE_PATHS = "nanochat tasks scripts rustbpe dev/*.sh speedrun.sh pyproject.toml".split()
DOLLARS_PER_GPU_HOUR = {"H100": 3.00, "A100": 1.79, "V100": 0.55}  # on demand, October 2025
OTHER_PER_HOUR = 2.00


def git(repository: Path, *words: str) -> str:
    """Output of a git command in a repository; empty if it fails."""
    command = ["git", "-C", str(repository), *words]
    with suppress(OSError):  # git is not installed
        return subprocess.run(command, capture_output=True, text=True).stdout
    return ""


def git_state(repository: Path = common.REPOSITORY) -> dict[str, str]:
    """
    Branch, short commit hash and whether code has changed, and commit subject; unknown for a copy
    without .git, also inside of another repository.
    """
    if not git(repository, "ls-files"):
        return {"Branch": "unknown", "Commit": "unknown", "Message": ""}
    commit, _, message = git(repository, "log", "-1", "--abbrev=7", "--format=%h %s").partition(" ")
    changes = git(repository, "status", "--porcelain", "--", *CODE_PATHS)
    return {
        "Branch": git(repository, "rev-parse", "--abbrev-ref", "HEAD").strip() or "unknown",
        "Commit": f"{commit} ({'dirty' if changes else 'clean'})" if commit else "unknown",
        "Message": message.strip()[:80],
    }


def default_rate(gpus: Sequence[str]) -> float:
    """Rental price of a machine with these GPUs in dollars per hour; 0 without GPUs."""
    prices = DOLLARS_PER_GPU_HOUR.items()
    return sum(next((p for kind, p in prices if kind in name), OTHER_PER_HOUR) for name in gpus)


# ---- Values of records ---------------------------------------------------------------------------


def plain_value(value: Any) -> Any:
    """Value of an estimate; any other value unchanged."""
    return value["value"] if isinstance(value, Mapping) else value


def standard_error(value: Any) -> float:
    """Standard error of an estimate; NaN if unknown."""
    return float(value["se"]) if isinstance(value, Mapping) else math.nan


def seconds(timestamp: float | str) -> float:
    """A record's timestamp in seconds since 1970; before 2026-12, they were local time as text."""
    if isinstance(timestamp, str):
        return time.mktime(time.strptime(timestamp, TIME_FORMAT))
    return timestamp


def local_time(seconds: float) -> str:
    """Seconds since 1970 as local date and time."""
    return time.strftime(TIME_FORMAT, time.localtime(seconds))


def readable_time(seconds: float) -> str:
    """Seconds as 0.8 s, 2.7 min or 3.4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
