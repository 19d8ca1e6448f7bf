"""
Many runs of the ordinary scripts: one after the other, or several at a time; none twice.

    jobs -> Sweep.run_all -> sweeps/runs/<key>/: log.txt, report/, done.json -> what they scored

A job is the commands of one run, training and evaluations, each a process of its own. Its key is
the fingerprint of all that decides the outcome: the commands, what they start from, the code. A job
that is done is never repeated, whichever sweep asks for it; one that was stopped goes on from its
newest checkpoint. A ledger has what every command took, lost attempts included, and a cap on device
time ends a sweep between two jobs. Knows nothing of what the commands do.
"""

import ctypes
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nanochat.common import (
    BROKEN,
    PREEMPTED,
    REPOSITORY,
    Refused,
    RunLock,
    StopRequest,
    base_dir,
    fingerprint,
    printable,
    read_json,
    sha256_file,
    write_json,
)
from nanochat.lab.significance import Scores
from nanochat.records import append_line, locked, plain_value, read_lines, read_records, read_scores

LEDGER, DONE = "ledger.jsonl", "done.json"
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # of Linux: which signal a process gets when its parent ends
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before anything forks
GRACE_SECONDS = 120.0  # for a run that was asked to stop to save its state


@dataclass(frozen=True)
class SweepConfig:
    devices: int = 1
    """Runs at a time. On GPUs each has one of its own; on a CPU they share its cores."""
    cap_hours: float | None = None
    """Device hours that all runs of this sweep may take, those of earlier calls included; a run
    that would go beyond is not begun. Default: no limit."""
    same_code: bool = True
    """Repeat runs whose code has changed since; --no-same_code takes the newest as they are."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        if self.cap_hours is not None and not self.cap_hours > 0:
            raise ValueError(f"cap_hours must be positive, got {self.cap_hours}")


@dataclass(frozen=True)
class Job:
    """One run. `commands` are module and flags; {tag} in them is the run's own checkpoint tag."""

    name: str
    """For people."""
    commands: Sequence[Sequence[str]]
    starts_from: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what it reads."""

    def key(self, code: str) -> str:
        """Names the outcome: equal keys, equal results."""
        return fingerprint(
            {
                "commands": [list(c) for c in self.commands],
                "from": dict(self.starts_from),
                "code": code,
            }
        )


@dataclass(frozen=True)
class Done:
    """A finished run."""

    job: Job
    folder: Path
    is_broken: bool = False
    """Its canaries stopped it: it scored nothing."""

    @property
    def tag(self) -> str:
        """Of its checkpoints."""
        return tag_of(self.folder.name)

    def values(self) -> dict[str, Any]:
        """Every value of its records."""
        found: dict[str, Any] = {}
        for record in read_records(self.folder / "report"):
            found |= record["values"]
        return found

    def metric(self, name: str) -> float:
        """A value as a number. Raises ValueError naming those there are."""
        values = self.values()
        if name not in values:
            raise ValueError(f"{self.job.name} recorded no {name!r}, but {', '.join(values)}")
        return float(plain_value(values[name]))

    def items(self, name: str) -> list[float]:
        """What each item of a metric scored; nothing where no items are recorded."""
        for record in read_records(self.folder / "report"):
            entry = record["items"].get(name)
            if entry and "scores" in entry:
                return read_scores(entry)
        return []


def code_print() -> str:
    """Names the code that runs are made by: all that is imported, and the scripts."""
    folders = [REPOSITORY / name for name in ("nanochat", "scripts", "tasks")]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return fingerprint(
        {path.relative_to(REPOSITORY).as_posix(): sha256_file(path) for path in files}
    )


def sweep_folder() -> Path:
    """Where runs and sweeps live."""
    return base_dir() / "sweeps"


def tag_of(key: str) -> str:
    """The checkpoint tag of a run."""
    return f"sweep-{key}"


def gathered(runs: Iterable[Done], metric: str) -> Scores:
    """A metric of the seeds of one arm."""
    runs = list(runs)
    items = [run.items(metric) for run in runs]
    return Scores([run.metric(metric) for run in runs], items if all(items) else ())


# ------------------------------------------------------------------------------------------------
# Running


class Sweep:
    """Runs jobs for one sweep, whose ledger is in `folder`. Raises Refused where it is stopped."""

    def __init__(self, cfg: SweepConfig, name: str):
        self.cfg, self.folder = cfg, sweep_folder() / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self.folder / ".lock.sweep", own="--name")
        self.code = code_print()
        self.slots: queue.Queue[dict[str, str]] = queue.Queue()
        for variables in environments(cfg.devices):
            self.slots.put(variables)
        self.stop = StopRequest()
        self.under_way = 0
        self.counting = threading.Lock()

    def __enter__(self) -> "Sweep":
        """Raises Refused where another process runs the same sweep."""
        self.lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def run_all(self, jobs: Sequence[Job]) -> dict[str, Done]:
        """
        Name -> outcome of every job. What is done already is taken as it is.

        Raises Refused when asked to stop, when the cap is reached, or where a command fails: with
        what is left to do, after the jobs under way have ended.
        """
        done, todo = {}, []
        for job in jobs:
            found = self.finished(job)
            if found:
                done[job.name] = found
            else:
                todo.append(job)
        print(f"{len(jobs)} runs: {len(done)} are done, {len(todo)} to go", flush=True)
        problems: list[str] = []
        with self.stop, ThreadPoolExecutor(self.cfg.devices) as pool:
            waiting = {pool.submit(self.run, job, problems): job for job in todo}
            for future in as_completed(waiting):
                result = future.result()
                if result:
                    done[waiting[future].name] = result
                    name = printable(waiting[future].name)
                    print(f"done: {name} ({len(done)} of {len(jobs)})", flush=True)
        if self.stop.asked:
            raise SystemExit(PREEMPTED)
        if problems:
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise Refused(
                f"{len(jobs) - len(done)} of {len(jobs)} runs are not done: {problems[0]}{more}",
                "the same command goes on with them; --cap_hours raises the cap",
            )
        return done

    def finished(self, job: Job) -> Done | None:
        """The outcome of a job that was run before."""
        notes = [self.run_folder(job) / DONE]
        if not self.cfg.same_code:
            every = (sweep_folder() / "runs").glob(f"*/{DONE}")
            notes += sorted(every, key=lambda path: path.stat().st_mtime, reverse=True)
        for note in notes:
            found = read_json(note) if note.exists() else {}
            if found and (note == notes[0] or found["job"] == job.key("")):
                return Done(job, note.parent, found["is_broken"])
        return None

    def run_folder(self, job: Job) -> Path:
        """Where a job is run."""
        return sweep_folder() / "runs" / job.key(self.code)

    def run(self, job: Job, problems: list[str]) -> Done | None:
        """Run one job in a slot; None, and a line among the problems, where it does not end."""
        if self.stop.asked or problems:
            return None
        with self.counting:
            if problem := self.beyond_cap():
                problems.append(problem)
                return None
            self.under_way += 1
        folder = self.run_folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        variables = self.slots.get()
        try:
            status = 0
            for words in job.commands:
                status = status or self.call(job, words, folder, variables)
        finally:
            self.slots.put(variables)
            with self.counting:
                self.under_way -= 1
        if status and (self.stop.asked or status != BROKEN):
            if not self.stop.asked:
                problems.append(f"{job.name} failed with status {status}, see {folder}/log.txt")
            return None
        done = {"name": job.name, "job": job.key(""), "is_broken": status == BROKEN}
        write_json(folder / DONE, done)
        return Done(job, folder, status == BROKEN)

    def call(
        self, job: Job, words: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> int:
        """One command, in a group of its own; told to stop when we are."""
        filled = [word.replace("{tag}", tag_of(folder.name)) for word in words]
        command = [sys.executable, "-m", *filled, f"--report_dir={folder / 'report'}"]
        started = time.perf_counter()
        with (folder / "log.txt").open("a") as log:
            print("$", *map(printable, command[1:]), file=log, flush=True)
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip
            asked = math.inf
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if self.stop.asked and asked == math.inf:
                    asked = time.monotonic()
                    process.send_signal(signal.SIGTERM)
                if time.monotonic() > asked + GRACE_SECONDS:
                    os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - started
        entry = {
            "job": job.name,
            "key": folder.name,
            "command": next((word for word in words if word.startswith("scripts.")), words[0]),
            "seconds": seconds,
            "status": process.returncode,
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with locked(self.folder):
            append_line(self.folder / LEDGER, json.dumps(entry))
        return process.returncode

    # ---- what it took ------------------------------------------------------------------------

    def ledger(self) -> list[dict[str, Any]]:
        """What every command took."""
        path = self.folder / LEDGER
        return list(read_lines(path)) if path.exists() else []

    def spent_seconds(self) -> float:
        """Device time of all commands so far."""
        return math.fsum(entry["seconds"] for entry in self.ledger())

    def typical_seconds(self) -> float:
        """Of one run: the median over the finished ones; 0 before any is."""
        by_run: dict[str, float] = {}
        for entry in self.ledger():
            if (sweep_folder() / "runs" / entry["key"] / DONE).exists():
                by_run[entry["key"]] = by_run.get(entry["key"], 0.0) + entry["seconds"]
        return median(by_run.values()) if by_run else 0.0

    def beyond_cap(self) -> str:
        """Why no further run fits, those under way taken to need all their time; else nothing."""
        if self.cfg.cap_hours is None:
            return ""
        spent, each = self.spent_seconds(), self.typical_seconds()
        if spent + (self.under_way + 1) * each <= 3600 * self.cfg.cap_hours:
            return ""
        return (
            f"{spent / 3600:.2f} device hours are spent, {self.under_way} runs are under way and "
            f"each takes about {each / 3600:.2f}: more than the cap of {self.cfg.cap_hours:g}"
        )


def end_with_parent() -> None:
    """In a new process: be asked to stop when the sweep is killed, where there is a way."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environments(devices: int) -> list[dict[str, str]]:
    """The variables of each slot: a GPU of its own, or its share of the cores."""
    from nanochat.distributed import visible_gpus  # here: whoever only reads a sweep needs no torch

    gpus = visible_gpus()
    if gpus:
        if devices > len(gpus):
            raise ValueError(f"--devices={devices}, but this machine has {len(gpus)}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:devices]]
    threads = max(1, (os.cpu_count() or 1) // devices)
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"} if devices > 1 else {}
    return [{"OMP_NUM_THREADS": str(threads), **quiet} for _ in range(devices)]


def purpose(entry: Mapping[str, Any]) -> str:
    """What the device time of a command in a ledger was for."""
    if entry["status"] not in (0, BROKEN):
        return "Lost to failures"
    return "Training" if entry["command"].rpartition(".")[2] in TRAINING else "Evaluation"


def ledger_table(entries: Sequence[Mapping[str, Any]], hourly_rate: float) -> dict[str, Any]:
    """What a sweep took: training, evaluation, and what failed."""
    kinds = {"Training": 0.0, "Evaluation": 0.0, "Lost to failures": 0.0}
    for entry in entries:
        kinds[purpose(entry)] += entry["seconds"]
    rows = [
        [name, f"{seconds / 3600:.3f}", f"${seconds / 3600 * hourly_rate:.2f}"]
        for name, seconds in {**kinds, "All": sum(kinds.values())}.items()
    ]
    return {"title": "Device time", "columns": ["What", "Device hours", "Cost"], "rows": rows}


TRAINING = frozenset({"tok_train", "base_train", "mid_train", "chat_sft", "chat_rl"})
