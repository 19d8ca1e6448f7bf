"""
The log of a training run: metrics.jsonl, a console line, and optionally Weights & Biases.

    log.log(step, values) -> metrics.jsonl, then the console, then a queue -> thread -> wandb

`metrics.jsonl` is always complete. The tracker runs on its own daemon thread behind a bounded
queue: when it raises, hangs or lags, training goes on and dropped entries are counted.
Only the main rank logs. Values have the same names everywhere:

    loss  val_bpb  reward  pass_at_1  lr (share of its peak)  tokens_per_second  mfu (a fraction)
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
from nanochat.records import append_line, plain, read_lines

METRICS_FILE = "metrics.jsonl"
QUEUE_ENTRIES = 1000  # what a tracker may lag behind before it loses entries
FINISH_SECONDS = 30.0  # what a tracker is granted for its last uploads
WARMUP_STEPS = 3
NOT_FINITE = ("nan", "inf", "-inf")
SHOWN = {  # what a line of the console shows of a step, in order
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
    Log of one training run in `folder`, for the main rank; a context manager, or call `finish`.

    On a terminal a progress bar shows the steps; elsewhere each has a line. Evaluations always have
    one. A resumed run appends. It says at which step it takes over, and readers (`read_metrics`)
    then forget what an earlier process had logged for later steps.
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
        run          its name at Weights & Biases; dummy: no tracker
        run_id       names the run at the tracker, together with the folder's name
        settings     the whole config, for the tracker
        first_step   the step this process starts with (0, or where it resumes)
        total_steps  the horizon, for progress and time left
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.total_steps = folder / METRICS_FILE, total_steps
        if self.path.exists() and self.path.stat().st_size:
            append_line(self.path, json.dumps({"resumed_at": first_step}))
        self.file = self.path.open("a", encoding="utf-8")
        self.warm_step, self.warm_time = first_step + WARMUP_STEPS, time.monotonic()
        columns = ("step", MofNCompleteColumn(), BarColumn(20), "{task.fields[now]}")
        self.bar = Progress(*columns, refresh_per_second=4, disable=not Console().is_terminal)
        self.task = self.bar.add_task("", total=total_steps, completed=first_step, now="")
        self.bar.start()
        open_run = partial(open_wandb, run, folder, run_id, settings)
        self.tracker = Tracker(open_run) if run != "dummy" else None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """
        Log what step `step` gave. Readers merge the entries of a step, the later value winning.

        An entry with neither loss nor reward is an evaluation: its line shows all of it.
        """
        self.file.write(json.dumps(plain({"step": step, **values}), allow_nan=False) + "\n")
        self.file.flush()
        if self.tracker:
            self.tracker.put(step, values)
        evaluation = "loss" not in values and "reward" not in values
        shown, left = format_values(values, evaluation), self.time_left(step)
        if not self.bar.disable and not evaluation:
            self.bar.update(self.task, completed=step + 1, now=" | ".join([*shown, *left]))
        elif shown:
            total = f"/{self.total_steps}" if self.total_steps else ""
            line = " | ".join([f"step {step:>5}{total}", *shown, *left])
            print(printable(line), flush=True)  # above the bar where there is one

    def time_left(self, step: int) -> list[str]:
        """The time left, at the pace after the first steps, which compile; empty if unknown."""
        now = time.monotonic()
        if step <= self.warm_step:
            self.warm_time = now
        if step <= self.warm_step or self.total_steps is None:
            return []
        pace = (now - self.warm_time) / (step - self.warm_step)
        return [f"{duration(max(0.0, pace * (self.total_steps - 1 - step)))} left"]

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Close everything; waits at most `seconds` for the tracker and says what it missed."""
        self.file.close()
        self.bar.stop()
        if self.tracker and (missed := self.tracker.finish(seconds)):
            print(printable(f"{missed}; everything is in {self.path}"), flush=True)

    def __exit__(self, *error: object) -> None:
        self.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """
    The entries of a metrics file, one per step, in order; numbers that are not finite restored.

    Where a process resumed at step n, what earlier ones logged for steps after n is dropped, and
    at n itself new values replace old ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    for entry in read_lines(path):
        if not isinstance(entry.get("resumed_at", entry.get("step")), int):
            continue  # damaged: it loses only itself, as a torn line does
        if "resumed_at" in entry:
            steps = {step: old for step, old in steps.items() if step <= entry["resumed_at"]}
        else:
            numbers = {k: float(v) if v in NOT_FINITE else v for k, v in entry.items()}
            steps.setdefault(entry["step"], {}).update(numbers)
    return [steps[step] for step in sorted(steps)]


def format_values(values: Mapping[str, Any], evaluation: bool) -> list[str]:
    """
    The values a line shows, as text: the usual ones first, of an evaluation the others too, but for
    those of a recursive model's states and of the canaries.
    """
    shown = [form.format(values[name]) for name, form in SHOWN.items() if name in values]
    for name, value in values.items() if evaluation else ():
        if name not in SHOWN and not name.startswith(("state_", "canary_")):
            shown.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return shown


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 3m10s, 2h05m."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


# ------------------------------------------------------------------------------------------------
# The tracker


class Tracker:
    """
    Hands entries to a tracker's run on a thread of its own; `put` never waits and never raises.

    `open_run()` gives an object with `log(values, step=...)` and `finish()`; it is called on the
    thread, because opening a run may take as long as the network pleases.
    """

    def __init__(self, open_run: Callable[[], Any], capacity: int = QUEUE_ENTRIES):
        self.entries: queue.Queue = queue.Queue(capacity)
        self.offered = self.sent = 0
        self.error = ""
        self.thread = threading.Thread(target=self.work, args=(open_run,), daemon=True)
        self.thread.start()

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue an entry; where the queue is full, it is dropped."""
        self.offered += 1
        with contextlib.suppress(queue.Full):  # counted: offered, never sent
            self.entries.put_nowait((step, dict(values)))

    def work(self, open_run: Callable[[], Any]) -> None:
        """The thread: send entries until `None` comes. The first failure is printed and final."""
        try:
            run = open_run()
            while (entry := self.entries.get()) is not None:
                run.log(entry[1], step=entry[0])
                self.sent += 1
            run.finish()
        except Exception as error:  # whatever a tracker does, the run goes on
            self.error = f"{type(error).__name__}: {error}"
            message = printable(f"tracker: stopped, the run goes on ({self.error})")
            print(message, file=sys.stderr, flush=True)

    def finish(self, seconds: float) -> str:
        """Wait at most `seconds` for the thread. Returns what went wrong, or nothing."""
        deadline = time.monotonic() + seconds
        if self.thread.is_alive():
            with contextlib.suppress(queue.Full):
                self.entries.put(None, timeout=seconds)
        self.thread.join(max(0.0, deadline - time.monotonic()))
        error = f"no answer within {seconds:g} s" if self.thread.is_alive() else self.error
        missed, why = self.offered - self.sent, f" ({error})" if error else ""
        if not missed and not error:
            return ""
        return f"tracker: {missed} of {self.offered} entries were dropped{why}"


def open_wandb(name: str, folder: Path, run_id: str, settings: Mapping[str, Any]) -> Any:
    """
    A run at Weights & Biases, continued when the same run resumes in the same folder.

    Raises RuntimeError where it would ask for a key: nobody may be there to answer.
    """
    import wandb  # here, so that a run without a tracker neither waits for it nor needs it

    online = wandb.setup().settings.mode == "online"
    if online and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
    # without its timeouts its hook at exit could wait for long
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
