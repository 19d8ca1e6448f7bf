"""
Run training jobs with the standard scripts, one or several at a time, each only once.

    jobs -> Sweep.run_all -> sweeps/runs/<key>/: log.txt, report/, done.json -> Job.recorded

A job is the commands of one run (training and evaluations), each run in its own process. Its key is
the fingerprint of commands, inputs and code, but not of the device and the installed packages: use
another base directory after changing those. A finished job is never repeated, even by another
sweep; an interrupted one resumes from its newest checkpoint. A ledger records the time of every
command, including failed attempts; a cap on device time stops a sweep between jobs.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanochat.common import (
    PREEMPTED,
    REPOSITORY,
    StopRequest,
    UsageError,
    base_dir,
    fingerprint,
    hold_run_lock,
    printable,
    read_json,
    sha256_file,
    write_json,
)
from nanochat.config import require_at_least, require_positive
from nanochat.lab.canaries import BROKEN
from nanochat.lab.significance import Recorded
from nanochat.records import (
    NOT_IN_CODE,
    Cost,
    append_line,
    code_digest,
    plain_value,
    read_lines,
    read_records,
)

LEDGER, DONE = "ledger.jsonl", "done.json"
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # Linux: prctl option for the signal that a process gets when its parent exits
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before forking


@dataclass(frozen=True)
class SweepConfig:
    devices: int = 1
    """Number of parallel runs: one GPU each; on CPU they share the cores."""
    cap_hours: float | None = None
    """Device hours, including earlier runs, after which this sweep starts no further run. Default:
    no limit."""

    def __post_init__(self) -> None:
        require_at_least(self, devices=1)
        require_positive(self, "cap_hours")


def sweep_folder() -> Path:
    """Folder of runs and sweeps."""
    return base_dir() / "sweeps"


@cache
def code_fingerprint() -> str:
    """Fingerprint of the code and the texts that runs use; docstrings do not count."""
    patterns = ("nanochat/*.py", "scripts/*.py", "tasks/**/*.py")
    code = sorted(path for each in patterns for path in REPOSITORY.glob(each))
    digests = [code_digest(path.read_text()) for path in code if path.stem not in NOT_IN_CODE]
    texts = sorted(REPOSITORY.glob("tasks/world/data/*"))
    return fingerprint([*digests, *map(sha256_file, texts)])


@dataclass(frozen=True)
class Job:
    """One run. Each command is a module with flags; {tag} expands to the run's checkpoint tag."""

    name: str
    """Display name."""
    commands: Sequence[Sequence[str]]
    starts_from: Mapping[str, str]
    """Fingerprints of its inputs."""

    @property
    def folder(self) -> Path:
        """Folder of the run, named by its key."""
        key = fingerprint([code_fingerprint(), self.commands, self.starts_from])
        return sweep_folder() / "runs" / key

    @property
    def tag(self) -> str:
        """Tag of its checkpoints."""
        return f"sweep-{self.folder.name}"

    @property
    def is_broken(self) -> bool | None:
        """Whether the finished run was stopped by its canaries; None = not finished."""
        path = self.folder / DONE
        return read_json(path)["is_broken"] if path.exists() else None

    def recorded(self) -> Recorded:
        """Values and item scores of all records of the run."""
        found = Recorded({}, {})
        for record in read_records(self.folder / "report"):
            found = Recorded(found.values | record["values"], found.items | record["items"])
        return found

    def metric(self, name: str) -> float:
        """Return a recorded value as a number. Raises ValueError if it is missing."""
        values = self.recorded().values
        if name not in values:
            raise ValueError(f"{self.name} did not record {name!r}; it has {', '.join(values)}")
        return float(plain_value(values[name]))


class Sweep:
    """Runs the jobs of one sweep; a lock prevents a second process from running it."""

    def __init__(self, cfg: SweepConfig, name: str):
        self.cfg, self.folder = cfg, sweep_folder() / name
        self.lock = hold_run_lock(self.folder / ".lock.sweep", "--name")
        self.slots: queue.Queue[dict[str, str]] = queue.Queue()  # environment of each free device
        for variables in environments(cfg.devices):
            self.slots.put(variables)
        self.stop = StopRequest()
        self.problem = ""

    def __enter__(self) -> "Sweep":
        """Raises UsageError if the same sweep is already running."""
        self.lock.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(*error)

    def run_all(self, jobs: Sequence[Job]) -> None:
        """
        Run all unfinished jobs.

        Raises UsageError, once the running jobs end, if the cap is reached or a command fails, and
        SystemExit(PREEMPTED) if a stop was requested.
        """
        todo = [job for job in jobs if job.is_broken is None]
        print(f"{len(jobs)} runs: {len(jobs) - len(todo)} done, {len(todo)} to go", flush=True)
        with self.stop, ThreadPoolExecutor(self.cfg.devices) as pool:
            list(pool.map(self.run, todo))  # raises what a thread raised
        left = sum(job.is_broken is None for job in jobs)
        if self.stop.asked:
            print(f"stopped, {left} of {len(jobs)} runs unfinished; rerun the same command")
            raise SystemExit(PREEMPTED)
        if self.problem:
            raise UsageError(
                f"{left} of {len(jobs)} runs unfinished: {self.problem}",
                "rerun the same command to continue; --cap_hours raises the cap",
            )

    def run(self, job: Job) -> None:
        """Run the commands of a job on a free device, unless there is a problem."""
        hours, status = sum(entry["seconds"] for entry in self.ledger()) / 3600, 0
        if self.cfg.cap_hours is not None and hours >= self.cfg.cap_hours:
            self.problem = f"{hours:.2f} device hours used, the cap is {self.cfg.cap_hours:g}"
        if self.problem:
            return
        variables = self.slots.get()
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            for words in job.commands:
                if status == 0 and not self.stop.asked:
                    status = self.call(job, words, variables)
        finally:
            self.slots.put(variables)
        if self.stop.asked:
            return
        if status in (0, BROKEN):
            write_json(job.folder / DONE, {"is_broken": status == BROKEN})
            print(f"done: {printable(job.name)}", flush=True)
        else:
            self.problem = f"{job.name} failed with status {status}; see {job.folder}/log.txt"

    def call(self, job: Job, words: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run one command in its own process group; forward a stop request to it."""
        folder, started = job.folder, time.perf_counter()
        filled = [word.replace("{tag}", job.tag) for word in words]
        command = [sys.executable, "-m", *filled, f"--report_dir={folder / 'report'}"]
        with (folder / "log.txt").open("a") as log:
            print("$", *map(printable, command[1:]), file=log, flush=True)
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            while process.poll() is None and not self.stop.asked:
                time.sleep(POLL_SECONDS)
            process.terminate()  # only a stop request finds it running
            status = process.wait()  # until it has saved
        entry = {"job": job.name, "command": words[0], "status": status}
        entry["seconds"] = time.perf_counter() - started
        append_line(self.folder / LEDGER, entry)
        return status

    # ---- Device time -------------------------------------------------------------------------

    def ledger(self) -> list[dict[str, Any]]:
        """Ledger entries of all commands so far."""
        return read_lines(self.folder / LEDGER)

    def cost(self) -> Cost:
        """Time of the sweep. Its device time is 0, because the runs record it."""
        seconds = sum(entry["seconds"] for entry in self.ledger())
        return Cost(seconds / self.cfg.devices, self.cfg.devices, device_seconds=0.0)


def end_with_parent() -> None:
    """Called in a child process: on Linux, request SIGTERM when the sweep is killed."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def visible_gpus() -> list[str]:
    """GPUs of this process, as named in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")][:count]


def environments(devices: int) -> list[dict[str, str]]:
    """Environment variables for each slot: one GPU, or a share of the CPU cores."""
    gpus = visible_gpus()
    if gpus:
        if devices > len(gpus):
            raise ValueError(f"--devices={devices}, but only {len(gpus)} GPUs are visible")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:devices]]
    threads = max(1, torch.get_num_threads() // devices)  # OMP_NUM_THREADS, or all cores
    return [{"OMP_NUM_THREADS": str(threads)}] * devices


def purpose(entry: Mapping[str, Any]) -> str:
    """Row of `ledger_table` for an entry."""
    if entry["status"] not in (0, BROKEN, PREEMPTED):
        return "Lost to failures"
    return "Evaluation" if entry["command"] == "scripts.chat_eval" else "Training"


def ledger_table(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Table of the device time of a sweep."""
    hours = {"Training": 0.0, "Evaluation": 0.0, "Lost to failures": 0.0}
    for entry in entries:
        hours[purpose(entry)] += entry["seconds"] / 3600
    rows = [[name, f"{x:.3f}"] for name, x in {**hours, "All": sum(hours.values())}.items()]
    return {"title": "Device time", "columns": ["What", "Device hours"], "rows": rows}
