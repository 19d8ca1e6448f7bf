"""
Logging of a training run to metrics.jsonl, the console and, optionally, Weights & Biases.

    log.log(step, values) -> metrics.jsonl and console, and queue -> thread -> wandb

`metrics.jsonl` is always complete. The tracker runs in a daemon thread with a bounded queue: if it
raises, hangs or lags, training continues and dropped entries are counted. Only rank 0 logs. Metric
names are the same in all stages:

    loss  val_bpb  reward  pass_at_1  lr (fraction of peak)  tokens_per_second  mfu (fraction)
"""

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from nanochat.common import fingerprint, printable
from nanochat.records import append_line, read_lines, to_json_types

METRICS_FILE = "metrics.jsonl"
QUEUE_ENTRIES = 1000  # capacity of the tracker queue; further entries are dropped
FINISH_SECONDS = 30.0  # timeout for the tracker's last uploads
WARMUP_STEPS = 3
NOT_FINITE = ("nan", "inf", "-inf")
CONSOLE_FORMATS = {  # console format of metrics, in order
    "loss": "loss {:.4f}",
    "reward": "reward {:.4f}",
    "val_bpb": "val bpb {:.4f}",
    "lr": "lr x{:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "seconds_left": "{:.0f}s left",
}


class RunLog(contextlib.AbstractContextManager):
    """
    Log of one training run in `folder`, for rank 0. Use as a context manager or call `finish`.

    On a terminal, a progress bar shows the steps; otherwise each step prints a line. Evaluations
    always print a line. A resumed run appends a marker with its first step, and `read_metrics` then
    discards entries that earlier processes logged for later steps.
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
        if self.path.exists() and self.path.stat().st_size:
            append_line(self.path, {"resumed_at": first_step})
        self.file = self.path.open("ab", buffering=0)
        self.unwritten = b""
        """Lines that could not be written yet."""
        self.warm_step, self.warm_time = first_step + WARMUP_STEPS, time.monotonic()
        columns = ("step", MofNCompleteColumn(), BarColumn(20), "{task.fields[now]}")
        self.bar = Progress(*columns, refresh_per_second=4, disable=not Console().is_terminal)
        self.task = self.bar.add_task("", total=total_steps, completed=first_step, now="")
        self.bar.start()
        open_run = partial(open_wandb, run, folder, run_id, settings)
        self.tracker = Tracker(open_run) if run != "dummy" else None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """
        Log metrics of a step. Entries of the same step are merged when read; later values win.

        An entry without loss or reward is an evaluation; its line shows all metrics.
        """
        self.write(json.dumps(to_json_types({"step": step, **values}), allow_nan=False) + "\n")
        if self.tracker:
            self.tracker.put(step, values)
        evaluation = "loss" not in values and "reward" not in values
        shown, left = format_values(values, evaluation), self.time_left(step)
        if not self.bar.disable and not evaluation:
            self.bar.update(self.task, completed=step + 1, now=" | ".join([*shown, *left]))
        elif shown:
            total = f"/{self.total_steps}" if self.total_steps else ""
            line = " | ".join([f"step {step:>5}{total}", *shown, *left])
            print(printable(line), flush=True)  # above the progress bar, if any

    def write(self, line: str) -> None:
        """Append a line. If the disk is full, warns once and tries again with the next line."""
        failed_before, self.unwritten = bool(self.unwritten), self.unwritten + line.encode()
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if not failed_before:
                problem = f"{self.path} cannot be written ({error}); trying again at each step"
                print(printable(problem), flush=True)

    def time_left(self, step: int) -> list[str]:
        """Time left; empty if unknown. The pace excludes the first steps, because they compile."""
        now = time.monotonic()
        if step <= self.warm_step:
            self.warm_time = now
        if step <= self.warm_step or self.total_steps is None:
            return []
        pace = (now - self.warm_time) / (step - self.warm_step)
        return [f"{duration(max(0.0, pace * (self.total_steps - 1 - step)))} left"]

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Close the log; waits up to `seconds` for the tracker and reports dropped entries."""
        self.write("")
        self.file.close()
        self.bar.stop()
        if self.tracker and (missed := self.tracker.finish(seconds)):
            print(printable(f"{missed}; all entries are in {self.path}"), flush=True)

    def __exit__(self, *error: object) -> None:
        self.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """
    Entries of a metrics file, one per step, in order, with non-finite numbers as floats.

    If a process resumed at step n, earlier entries for steps after n are dropped; at step n, new
    values override old ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_lines(path):
        if not isinstance(entry.get("resumed_at", entry.get("step")), int):
            continue  # damaged: skip it, like a truncated line
        if "resumed_at" in entry:
            steps = {step: old for step, old in steps.items() if step <= entry["resumed_at"]}
        else:
            numbers = {k: float(v) if v in NOT_FINITE else v for k, v in entry.items()}
            steps.setdefault(entry["step"], {}).update(numbers)
    return [steps[step] for step in sorted(steps)]


def format_values(values: Mapping[str, Any], evaluation: bool) -> list[str]:
    """
    Format the values of a console line. Evaluations show all values except those of a recursive
    model's states and of canaries.
    """
    shown = [form.format(values[name]) for name, form in CONSOLE_FORMATS.items() if name in values]
    for name, value in values.items() if evaluation else ():
        if name not in CONSOLE_FORMATS and not name.startswith(("state_", "canary_")):
            shown.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return shown


def duration(seconds: float) -> str:
    """Format seconds as 42s, 3m10s or 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


# ------------------------------------------------------------------------------------------------
# Tracker


class Tracker:
    """
    Sends entries to a tracker from a separate thread; `put` never blocks or raises.

    open_run: returns an object with `log(values, step=...)` and `finish()`. It is called in the
    thread because it may block on the network.
    """

    def __init__(self, open_run: Callable[[], Any], capacity: int = QUEUE_ENTRIES):
        self.entries: queue.Queue = queue.Queue(capacity)
        self.offered = self.sent = 0
        self.error = ""
        self.thread = threading.Thread(target=self.work, args=(open_run,), daemon=True)
        self.thread.start()

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue an entry; drop it if the queue is full."""
        self.offered += 1
        with contextlib.suppress(queue.Full):  # counted as offered but not sent
            self.entries.put_nowait((step, dict(values)))

    def work(self, open_run: Callable[[], Any]) -> None:
        """Thread body: send entries until None. The first error is printed and ends the thread."""
        try:
            run = open_run()
            while (entry := self.entries.get()) is not None:
                run.log(entry[1], step=entry[0])
                self.sent += 1
            run.finish()
        except Exception as error:  # a tracker failure must not stop the run
            self.error = f"{type(error).__name__}: {error}"
            message = printable(f"tracker: stopped, training continues ({self.error})")
            print(message, file=sys.stderr, flush=True)

    def finish(self, seconds: float) -> str:
        """Wait up to `seconds` for the thread. Returns an error message, or "" if all was sent."""
        deadline = time.monotonic() + seconds
        if self.thread.is_alive():
            with contextlib.suppress(queue.Full):
                self.entries.put(None, timeout=seconds)
        self.thread.join(max(0.0, deadline - time.monotonic()))
        error = f"no answer within {seconds:g} s" if self.thread.is_alive() else self.error
        dropped, reason = self.offered - self.sent, f" ({error})" if error else ""
        if not dropped and not error:
            return ""
        return f"tracker: {dropped} of {self.offered} entries were dropped{reason}"


def open_wandb(name: str, folder: Path, run_id: str, settings: Mapping[str, Any]) -> Any:
    """
    Open a run on Weights & Biases, or resume it if it has the same name, run id and folder.

    Raises RuntimeError instead of prompting for an API key.
    """
    import wandb  # imported here because it is slow and optional

    online = wandb.setup().settings.mode == "online"
    if online and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
    # without timeouts, wandb's exit hook could block for a long time
    limits: Any = {"init_timeout": FINISH_SECONDS, "finish_timeout": FINISH_SECONDS}
    return wandb.init(
        project="nanochat",
        name=name,
        id=fingerprint([name, run_id, folder.parent.name, folder.name]),
        resume="allow",
        dir=folder,
        config=dict(settings),
        settings=wandb.Settings(silent=True, console="off", **limits),
    )
