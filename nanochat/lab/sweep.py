"""
Run training jobs with the standard scripts, one or several at a time, each only once.

    jobs -> Sweep.run_all -> sweeps/runs/<key>/: log.txt, report/, done -> Job.recorded

A job is the commands of one run (training and evaluations), each run in its own process. Its key is
the fingerprint of commands, inputs and code, but not of the device and the installed packages: use
another base directory after changing those. A finished job is never repeated, even by another
sweep; an interrupted one resumes from its newest checkpoint. A ledger records the time of every
command, including failed attempts; a cap on device time stops a sweep between jobs.
"""

import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanochat import recipe, records
from nanochat.common import (
    PREEMPTED,
    REPOSITORY,
    StopRequest,
    UsageError,
    base_dir,
    code_digest,
    fingerprint,
    hold_run_lock,
    printable,
)
from nanochat.config import require_at_least
from nanochat.lab.significance import Recorded
from tasks.chats import topics
from tasks.world.facts import DIGEST

CODE = ("nanochat/*.py", "scripts/*.py", "tasks/**/*.py")
LEDGER = "ledger.jsonl"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class SweepConfig:
    devices: int = 1
    """Number of parallel runs: one GPU each; on CPU they share the cores."""
    cap_hours: float = math.inf
    """Device hours, including earlier runs, after which this sweep starts no further run."""

    def __post_init__(self) -> None:
        require_at_least(self, devices=1, cap_hours=0)


def sweep_folder() -> Path:
    """Folder of runs and sweeps."""
    return base_dir() / "sweeps"


@cache
def code_fingerprint() -> str:
    """Fingerprint of the code and the texts that runs use; docstrings do not count."""
    code = itertools.chain.from_iterable(map(REPOSITORY.glob, CODE))
    digests = {str(p.relative_to(REPOSITORY)): code_digest(p.read_text()) for p in code}
    used = {name: digests[name] for name in digests.keys() - recipe.NOT_IN_CODE}
    return fingerprint([used, DIGEST, topics()])


@dataclass(frozen=True)
class Job:
    """One run. Each command is a module with flags; {tag} expands to the run's checkpoint tag."""

    name: str
    """Display name."""
    commands: Sequence[Sequence[str]]
    inputs: Mapping[str, str]
    """Fingerprints of what it starts from."""

    def __post_init__(self) -> None:
        for word in itertools.chain(*self.commands):
            if word.replace("-", "_").startswith("__tokenizer_tag"):
                fix = "a base directory has one tokenizer for all sweeps, main"
                raise ValueError(f"{word} is not supported: {fix}")

    @property
    def folder(self) -> Path:
        """Folder of the run, named by its key."""
        key = fingerprint([code_fingerprint(), self.commands, self.inputs])
        return sweep_folder() / "runs" / key

    @property
    def tag(self) -> str:
        """Tag of its checkpoints."""
        return f"sweep-{self.folder.name}"

    @property
    def done(self) -> Path:
        """File that exists once the run has finished."""
        return self.folder / "done"

    def recorded(self) -> Recorded:
        """Values and item scores of all records of the run."""
        found = Recorded({}, {})
        for record in records.read_lines(self.folder / "report" / records.HISTORY_FILE):
            found = Recorded(found.values | record["values"], found.items | record["items"])
        return found

    def metric(self, name: str) -> float:
        """Return a recorded value as a number. Raises ValueError if it is missing."""
        values = self.recorded().values
        if name not in values:
            raise ValueError(f"{self.name} did not record {name!r}; see {self.folder}/log.txt")
        return float(records.plain_value(values[name]))


class Sweep:
    """Runs the jobs of one sweep."""

    def __init__(self, cfg: SweepConfig, name: str):
        records.require_writable()
        self.cfg, self.folder = cfg, sweep_folder() / name
        self.stop, self.problem = StopRequest(), ""
        self.jobs: Sequence[Job] = []
        self.failed: list[Job] = []

    def run_all(self, jobs: Sequence[Job]) -> None:
        """
        Run all unfinished jobs. One that fails, such as a learning rate that diverges, is listed in
        `failed`; the same command tries it again.

        Raises UsageError if the same sweep is already running or, once the running jobs end, if the
        cap is reached or no job has ever succeeded; and SystemExit(PREEMPTED) if a stop was
        requested.
        """
        self.jobs = jobs
        todo = [job for job in jobs if not job.done.exists() and job not in self.failed]
        print(f"{len(jobs)} runs: {len(jobs) - len(todo)} done, {len(todo)} to go", flush=True)
        lock = hold_run_lock(self.folder / ".lock.sweep", "--name")
        with lock, self.stop, ThreadPoolExecutor(self.cfg.devices) as pool:
            slots, waiting = environments(self.cfg.devices), iter(todo)  # shared by the threads
            list(pool.map(self.work, slots, itertools.repeat(waiting)))  # raises their errors
        left = sum(not job.done.exists() for job in jobs)
        if self.stop.asked:
            print(f"stopped, {left} of {len(jobs)} runs unfinished; rerun the same command")
            raise SystemExit(PREEMPTED)
        if self.problem:
            raise UsageError(
                f"{left} of {len(jobs)} runs unfinished: {self.problem}",
                "rerun the same command to continue; --cap_hours raises the cap",
            )

    def work(self, variables: Mapping[str, str], jobs: Iterator[Job]) -> None:
        """Run jobs on one device until there is none left, a problem or a stop request."""
        for job in jobs:
            hours = sum(entry["seconds"] for entry in self.ledger()) / 3600
            if hours >= self.cfg.cap_hours:
                self.problem = f"{hours:.2f} device hours used, the cap is {self.cfg.cap_hours:g}"
            if self.problem or self.stop.asked:
                return
            job.folder.mkdir(parents=True, exist_ok=True)
            statuses = (self.call(job, words, variables) for words in job.commands)
            if status := next(filter(None, statuses), 0):  # of the first that fails
                problem = f"{job.name} failed with status {status}; see {job.folder}/log.txt"
                print(printable(problem), flush=True)
                self.failed.append(job)
                if status == PREEMPTED or not any(each.done.exists() for each in self.jobs):
                    self.problem = problem
            else:
                job.done.touch()
                print(f"done: {printable(job.name)}", flush=True)

    def call(self, job: Job, words: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run one command in its own process group; forward a stop request to it."""
        started = time.perf_counter()
        filled = [word.replace("{tag}", job.tag) for word in words]
        command = [sys.executable, "-m", *filled]
        with (job.folder / "log.txt").open("a") as log:
            print("$", *map(printable, command[1:]), file=log, flush=True)
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables, "NANOCHAT_REPORT_DIR": str(job.folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None and not self.stop.asked:
                time.sleep(POLL_SECONDS)
            process.terminate()  # only a stop request finds it running
            status = process.wait()  # until it has saved
        if self.stop.asked and status < 0:
            status = PREEMPTED
        entry = {"job": job.name, "command": words[0], "status": status}
        entry["seconds"] = time.perf_counter() - started
        records.append_line(self.folder / LEDGER, entry)
        return status

    @property
    def left_out(self) -> str | None:
        """Names of the jobs that failed and were not run again, for a record; None without any."""
        names = dict.fromkeys(job.name for job in self.failed if not job.done.exists())
        return ", ".join(names) or None

    def ledger(self) -> list[dict[str, Any]]:
        """Ledger entries of all commands so far."""
        return records.read_lines(self.folder / LEDGER)

    def cost(self) -> records.Cost:
        """Time of the sweep."""
        seconds = sum(entry["seconds"] for entry in self.ledger())
        kind = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return records.Cost(seconds / self.cfg.devices, self.cfg.devices, kind)


def environments(devices: int) -> list[dict[str, str]]:
    """Environment variables for each slot: one GPU, or a share of the CPU cores."""
    count = torch.cuda.device_count()
    if count == 0:
        threads = max(1, torch.get_num_threads() // devices)  # OMP_NUM_THREADS, or all cores
        return [{"OMP_NUM_THREADS": str(threads)}] * devices
    if devices > count:
        raise ValueError(f"--devices={devices}, but only {count} GPUs are visible")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus.split(",")[:devices]]


def ledger_table(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Table of the device time of a sweep."""
    hours = Counter[str]()
    for entry in entries:
        lost = entry["status"] not in (0, PREEMPTED)
        hours["lost to failures" if lost else entry["command"]] += entry["seconds"] / 3600
    rows = [[name, f"{x:.3f}"] for name, x in {**hours, "all": hours.total()}.items()]
    return {"title": "Device time", "columns": ["Command", "Device hours"], "rows": rows}
