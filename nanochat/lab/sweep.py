"""
Run many training jobs with the standard scripts, one or several at a time, each only once.

    jobs -> Sweep.run_all -> sweeps/runs/<key>/: log.txt, report/, done.json -> scores

A job is the commands of one run (training and evaluations), each run in its own process. Its key is
the fingerprint of commands, inputs and code, but not of the device and the installed packages: use
another base directory after changing those. A finished job is never repeated, even by another
sweep; an interrupted one resumes from its newest checkpoint. A ledger records the time of every
command, including failed attempts; a cap on device time stops a sweep between jobs.
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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from nanochat import report
from nanochat.common import (
    PREEMPTED,
    REPOSITORY,
    RunLock,
    StopRequest,
    UsageError,
    base_dir,
    fingerprint,
    hold_lock,
    printable,
    read_json,
    sha256_file,
    write_json,
)
from nanochat.config import require_at_least, require_positive
from nanochat.lab.canaries import BROKEN
from nanochat.lab.significance import Scores, read_items
from nanochat.records import Cost, append_line, default_rate, plain_value, read_lines, read_records

LEDGER, DONE = "ledger.jsonl", "done.json"
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # Linux: prctl option for the signal that a process gets when its parent exits
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before forking
GRACE_SECONDS = 120.0  # for an interrupted run to save a checkpoint
TRAINING_SCRIPTS = frozenset("tok_train base_train mid_train chat_sft chat_dpo chat_rl".split())


@dataclass(frozen=True)
class SweepConfig:
    devices: int = 1
    """Number of parallel runs: one GPU each; on CPU they share the cores."""
    cap_hours: float | None = None
    """Maximum device hours for this sweep, including earlier runs; jobs that would exceed it are
    not started. Default: no limit."""
    same_code: bool = True
    """Rerun jobs if the code changed; --no-same_code reuses old results."""

    def __post_init__(self) -> None:
        require_at_least(self, devices=1)
        require_positive(self, "cap_hours")


@dataclass(frozen=True)
class Job:
    """One run. Each command is a module with flags; {tag} expands to the run's checkpoint tag."""

    name: str
    """Display name."""
    commands: Sequence[Sequence[str]]
    starts_from: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of its inputs."""

    def key(self, code: str) -> str:
        """Fingerprint of commands, inputs and code."""
        commands = [list(command) for command in self.commands]
        return fingerprint({"commands": commands, "from": dict(self.starts_from), "code": code})


@dataclass(frozen=True)
class DoneRun:
    """A finished run."""

    job: Job
    folder: Path
    is_broken: bool = False
    """Stopped by its canaries; has no scores."""

    @property
    def tag(self) -> str:
        """Tag of its checkpoints."""
        return f"sweep-{self.folder.name}"

    def values(self) -> dict[str, Any]:
        """All values of its records."""
        records = read_records(self.folder / "report")
        return {name: value for record in records for name, value in record["values"].items()}

    def metric(self, name: str) -> float:
        """Return a recorded value as a number. Raises ValueError if it is missing."""
        values = self.values()
        if name not in values:
            raise ValueError(f"{self.job.name} did not record {name!r}; it has {', '.join(values)}")
        return float(plain_value(values[name]))

    def items(self) -> dict[str, Any]:
        """All item scores of its records."""
        records = read_records(self.folder / "report")
        return {name: entry for record in records for name, entry in record["items"].items()}


def code_fingerprint() -> str:
    """Fingerprint of the code that runs use, and of the texts in its folders."""
    folders = [REPOSITORY / name for name in ("nanochat", "scripts", "tasks")]
    every = sorted(path for folder in folders for path in folder.rglob("*"))
    files = [path for path in every if path.suffix in (".py", ".txt", ".json")]
    digests = {path.relative_to(REPOSITORY).as_posix(): sha256_file(path) for path in files}
    return fingerprint(digests)


def sweep_folder() -> Path:
    """Folder of runs and sweeps."""
    return base_dir() / "sweeps"


def collect_scores(runs: Sequence[DoneRun], metric: str) -> Scores:
    """Collect a metric over the seeds of one ablation arm."""
    values = [run.metric(metric) for run in runs]
    return Scores(values, read_items(metric, [run.items() for run in runs]))


# ------------------------------------------------------------------------------------------------
# Running


class Sweep:
    """Runs the jobs of one sweep; a lock prevents a second process from running it."""

    def __init__(self, cfg: SweepConfig, name: str):
        self.cfg, self.folder = cfg, sweep_folder() / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self.folder / ".lock.sweep", own="--name")
        self.code = code_fingerprint()
        self.slots: queue.Queue[dict[str, str]] = queue.Queue()
        for variables in environments(cfg.devices):
            self.slots.put(variables)
        self.stop = StopRequest()
        self.counting = threading.Lock()

    def __enter__(self) -> "Sweep":
        """Raises UsageError if the same sweep is already running."""
        self.lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def run_all(self, jobs: Sequence[Job]) -> dict[str, DoneRun]:
        """
        Run all unfinished jobs; return name -> finished run for every job.

        Raises UsageError, once the running jobs end, if the cap is reached or a command fails, and
        SystemExit(PREEMPTED) if a stop was requested.
        """
        found = {job.name: self.finished(job) for job in jobs}
        done = {name: run for name, run in found.items() if run}
        todo = [job for job in jobs if job.name not in done]
        print(f"{len(jobs)} runs: {len(done)} done, {len(todo)} to go", flush=True)
        problems: list[str] = []
        with self.stop, ThreadPoolExecutor(self.cfg.devices) as pool:
            for future in as_completed([pool.submit(self.run, job, problems) for job in todo]):
                if run := future.result():
                    done[run.job.name] = run
                    count = f"{len(done)} of {len(jobs)}"
                    print(f"done: {printable(run.job.name)} ({count})", flush=True)
        if self.stop.asked:
            print(f"stopped with {len(done)} of {len(jobs)} runs done; rerun the same command")
            raise SystemExit(PREEMPTED)
        if problems:
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise UsageError(
                f"{len(jobs) - len(done)} of {len(jobs)} runs unfinished: {problems[0]}{more}",
                "rerun the same command to continue; --cap_hours raises the cap",
            )
        return done

    def finished(self, job: Job) -> DoneRun | None:
        """Return the earlier result of a job, or None."""
        own = self.run_folder(job) / DONE
        others: list[Path] = []
        if not self.cfg.same_code:
            every = (sweep_folder() / "runs").glob(f"*/{DONE}")
            others = sorted(every, key=lambda path: path.stat().st_mtime, reverse=True)
        for path in [own, *others]:
            found = read_json(path) if path.exists() else {}
            if found and (path == own or found["job"] == job.key("")):
                return DoneRun(job, path.parent, found["is_broken"])
        return None

    def run_folder(self, job: Job) -> Path:
        """Run folder of a job."""
        return sweep_folder() / "runs" / job.key(self.code)

    def run(self, job: Job, problems: list[str]) -> DoneRun | None:
        """Run one job in a free slot; on failure, return None and append to `problems`."""
        if self.stop.asked or problems:
            return None
        run = DoneRun(job, self.run_folder(job))
        with self.counting:
            if problem := self.beyond_cap():
                problems.append(problem)
                return None
            variables, status = self.slots.get(), 0
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            for words in job.commands:
                status = status or self.call(run, words, variables)
        finally:
            self.slots.put(variables)
        if status and (self.stop.asked or status != BROKEN):
            if not self.stop.asked:
                problems.append(f"{job.name} failed with status {status}; see {run.folder}/log.txt")
            return None
        run = replace(run, is_broken=status == BROKEN)
        note = {"name": job.name, "job": job.key(""), "is_broken": run.is_broken}
        write_json(run.folder / DONE, note)
        return run

    def call(self, run: DoneRun, words: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run one command in its own process group; forward a stop request to it."""
        filled = [word.replace("{tag}", run.tag) for word in words]
        command = [sys.executable, "-m", *filled, f"--report_dir={run.folder / 'report'}"]
        started, deadline = time.perf_counter(), math.inf
        with (run.folder / "log.txt").open("a") as log:
            print("$", *map(printable, command[1:]), file=log, flush=True)
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if self.stop.asked and deadline == math.inf:
                    deadline = time.monotonic() + GRACE_SECONDS
                    process.send_signal(signal.SIGTERM)
                if time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
        entry = {
            "job": run.job.name,
            "key": run.folder.name,
            "command": next((word for word in words if word.startswith("scripts.")), words[0]),
            "seconds": time.perf_counter() - started,
            "status": process.returncode,
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with hold_lock(self.folder / ".lock", "the ledger"):
            append_line(self.folder / LEDGER, json.dumps(entry))
        return process.returncode

    # ---- device time -------------------------------------------------------------------------

    def ledger(self) -> list[dict[str, Any]]:
        """Ledger entries of all commands so far."""
        path = self.folder / LEDGER
        return list(read_lines(path)) if path.exists() else []

    def cost(self) -> Cost:
        """
        Time of the sweep, at least that of its ledger, because earlier calls count too. Device time
        is 0, because the runs record it.
        """
        so_far, seconds = Cost.so_far(), sum(entry["seconds"] for entry in self.ledger())
        wall = max(so_far.wall_seconds, seconds / self.cfg.devices)
        return replace(so_far, wall_seconds=wall, devices=self.cfg.devices, device_seconds=0.0)

    def typical_seconds(self) -> float:
        """Median device time of finished runs; 0 if there are none."""
        by_run = defaultdict[str, float](float)
        for entry in self.ledger():
            if (sweep_folder() / "runs" / entry["key"] / DONE).exists():
                by_run[entry["key"]] += entry["seconds"]
        return median(by_run.values()) if by_run else 0.0

    def beyond_cap(self) -> str:
        """Why another run would exceed the cap; empty if it fits."""
        if self.cfg.cap_hours is None:
            return ""
        spent, each = math.fsum(e["seconds"] for e in self.ledger()), self.typical_seconds()
        num_running = self.cfg.devices - self.slots.qsize()
        if spent + (num_running + 1) * each <= 3600 * self.cfg.cap_hours:
            return ""
        return (
            f"{spent / 3600:.2f} device hours used, {num_running} runs in progress at about "
            f"{each / 3600:.2f} each; another would exceed the cap of {self.cfg.cap_hours:g}"
        )


def end_with_parent() -> None:
    """Called in a child process: on Linux, request SIGTERM when the sweep is killed."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environments(devices: int) -> list[dict[str, str]]:
    """Environment variables for each slot: one GPU, or a share of the CPU cores."""
    import torch  # lazy: reading sweeps does not require torch

    from nanochat.distributed import visible_gpus

    gpus = visible_gpus()
    if gpus:
        if devices > len(gpus):
            raise ValueError(f"--devices={devices}, but only {len(gpus)} GPUs are visible")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:devices]]
    threads = max(1, torch.get_num_threads() // devices)  # OMP_NUM_THREADS, or all cores
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"} if devices > 1 else {}
    return [{"OMP_NUM_THREADS": str(threads), **quiet} for _ in range(devices)]


def purpose(entry: Mapping[str, Any]) -> str:
    """Row of `ledger_table` for an entry."""
    if entry["status"] not in (0, BROKEN, PREEMPTED):
        return "Lost to failures"
    return "Training" if entry["command"].rpartition(".")[2] in TRAINING_SCRIPTS else "Evaluation"


def ledger_table(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Table of the device time of a sweep, and its cost at the rental price of a GPU."""
    hourly_rate = default_rate(report.hardware()["gpus"][:1])
    kinds = {"Training": 0.0, "Evaluation": 0.0, "Lost to failures": 0.0}
    for entry in entries:
        kinds[purpose(entry)] += entry["seconds"]
    rows = [
        [name, f"{seconds / 3600:.3f}", f"${seconds / 3600 * hourly_rate:.2f}"]
        for name, seconds in {**kinds, "All": sum(kinds.values())}.items()
    ]
    return {"title": "Device time", "columns": ["What", "Device hours", "Cost"], "rows": rows}
