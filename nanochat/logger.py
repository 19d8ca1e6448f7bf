"""
The log of a training run: a file that is always complete, a console line, a tracker beside it.

    log.log(step, values) -> metrics.jsonl, then the console, then a queue -> thread -> wandb

`metrics.jsonl` is the truth; console and tracker are views of it that may thin out or fall
silent. The tracker lives on its own daemon thread behind a bounded queue: when it raises, hangs
or lags, the loop goes on at the same speed and the entries it missed are counted. Only the main
rank logs. Knows nothing of what is trained; values go by one name everywhere:

    loss  val_bpb  reward  pass_at_1  lr (share of its peak)  tokens_per_second  mfu (a fraction)
"""

import functools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nanochat.common import fingerprint, printable
from nanochat.records import ends_with_newline, plain, read_lines

METRICS_FILE = "metrics.jsonl"
QUEUE_ENTRIES = 1000  # what a tracker may lag behind before it loses entries
FINISH_SECONDS = 30.0  # what a tracker is granted for its last uploads
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


@dataclass(frozen=True)
class RunLogConfig:
    run: str = "dummy"
    """Name of the run at the tracker, Weights & Biases. dummy: no tracker."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Where the tracker writes: to its server, to files beside the checkpoints, or nowhere.
    Default: what WANDB_MODE says, else online."""
    log_every: int = 1
    """Steps between lines of the console where it is no terminal; 0 = only evaluations."""

    def __post_init__(self):
        if self.log_every < 0:
            raise ValueError(f"--log_every counts steps, got {self.log_every}; 0 turns lines off")

    @property
    def tracks(self) -> bool:
        """Whether there is a tracker at all."""
        return self.run != "dummy" and self.wandb_mode != "disabled"


class RunLog:
    """
    Log of one training run in `folder`; a context manager, or call `finish` at the end.

    A resumed run appends. It says at which step it takes over, and readers (`read_metrics`) then
    forget what an earlier process had logged for later steps.
    """

    def __init__(
        self,
        cfg: RunLogConfig,
        folder: Path,
        *,
        is_main: bool = True,
        first_step: int = 0,
        total_steps: int | None = None,
        run_id: str = "",
        settings: Mapping[str, Any] | None = None,
        out: TextIO | None = None,
    ):
        """
        first_step   the step this process starts with (0, or where it resumes)
        total_steps  the horizon, for progress and time left
        run_id       names the run at the tracker, together with the folder's name
        settings     the whole config, for the tracker
        out          where the console's lines go, by default stdout
        """
        self.path = folder / METRICS_FILE
        self.is_main = is_main
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open_metrics(self.path, first_step)
        self.console = make_console(cfg, first_step, total_steps, out or sys.stdout)
        open_run = functools.partial(open_wandb, cfg, folder, run_id, dict(settings or {}))
        self.tracker = Tracker(open_run) if cfg.tracks else None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """
        Log what step `step` gave. Readers merge the entries of a step, the later value winning.

        An entry with neither loss nor reward is an evaluation: the console always shows it, whole.
        """
        if not self.is_main:
            return
        self.file.write(json.dumps(plain({"step": step, **values}), allow_nan=False) + "\n")
        self.file.flush()
        self.console.show(step, values)
        if self.tracker:
            self.tracker.put(step, values)

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Close everything; waits at most `seconds` for the tracker and says what it missed."""
        if not self.is_main or self.file.closed:
            return
        self.file.close()
        self.console.close()
        missed = self.tracker.finish(seconds) if self.tracker else ""
        if missed:
            self.console.print(f"{missed}; everything is in {self.path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()


# ------------------------------------------------------------------------------------------------
# The file


def open_metrics(path: Path, first_step: int) -> TextIO:
    """Open for appending; in a file that has entries, mark the step from which they are void."""
    with path.open("ab+") as stream:
        size = stream.seek(0, 2)
        if size and not ends_with_newline(stream.fileno(), size):
            stream.write(b"\n")  # a killed process left a torn line
        if size:
            stream.write(json.dumps({"resumed_at": first_step}).encode() + b"\n")
    return path.open("a", encoding="utf-8")


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


# ------------------------------------------------------------------------------------------------
# The console


class Lines:
    """One plain line per step, for files and pipes."""

    def __init__(self, every: int, first_step: int, total_steps: int | None, out: TextIO):
        self.every, self.out = every, out
        self.clock = Clock(first_step, total_steps)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        left = self.clock.left(step)
        due = self.every and (step % self.every == 0 or self.clock.is_last(step))
        told = parts(values)
        if told and (due or is_evaluation(values)):
            total = f"/{self.clock.total}" if self.clock.total else ""
            self.print(" | ".join([f"step {step:>5}{total}", *told, *left]))

    def print(self, text: str) -> None:
        print(printable(text), file=self.out, flush=True)

    def close(self) -> None:
        pass


class Live:
    """A progress bar at the foot of a terminal, evaluations as lines above it."""

    def __init__(self, console: Console, first_step: int, total_steps: int | None):
        self.clock = Clock(first_step, total_steps)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(20),
            TextColumn("{task.fields[now]}"),
        )
        self.progress = Progress(*columns, console=console, refresh_per_second=4)
        self.task = self.progress.add_task("", total=total_steps, completed=first_step, now="")
        self.progress.start()

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        left = self.clock.left(step)
        told = parts(values)
        if told and is_evaluation(values):
            self.print(" | ".join([f"step {step:>5}", *told]))
        elif not is_evaluation(values):
            now = " | ".join([*told, *left])
            self.progress.update(self.task, completed=step + 1, now=now)

    def print(self, text: str) -> None:
        self.progress.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


class Clock:
    """Time left, from the pace since the first steps (which compile and warm up)."""

    def __init__(self, first_step: int, total_steps: int | None, warmup: int = 3):
        self.start, self.total = first_step + warmup, total_steps
        self.started: tuple[int, float] | None = None  # step and time where the pace begins

    def is_last(self, step: int) -> bool:
        return self.total is not None and step >= self.total - 1

    def left(self, step: int) -> list[str]:
        """What a line says of the time left: nothing while it is unknown."""
        now = time.monotonic()
        if step >= self.start and self.started is None:
            self.started = (step, now)
        if self.started is None or self.total is None or step <= self.started[0]:
            return []
        seconds = (now - self.started[1]) / (step - self.started[0]) * (self.total - 1 - step)
        return [f"{duration(max(seconds, 0))} left"]


def make_console(
    cfg: RunLogConfig, first_step: int, total_steps: int | None, out: TextIO
) -> Lines | Live:
    """A live display on a terminal, lines elsewhere."""
    console = Console(file=out)
    if console.is_terminal:
        return Live(console, first_step, total_steps)
    return Lines(cfg.log_every, first_step, total_steps, out)


def is_evaluation(values: Mapping[str, Any]) -> bool:
    """Whether an entry is what an evaluation found, not what a step of training did."""
    return "loss" not in values and "reward" not in values


def parts(values: Mapping[str, Any]) -> list[str]:
    """
    The values a line shows, as text: the usual ones first, of an evaluation the others too, but for
    those of a recursive model's states and of the canaries.
    """
    known = [form.format(values[name]) for name, form in SHOWN.items() if name in values]
    ours = ("state_", "canary_")
    others = [name for name in values if name not in SHOWN and not name.startswith(ours)]
    rest = others if is_evaluation(values) else []
    return known + [f"{name} {number(values[name])}" for name in rest]


def number(value: Any) -> str:
    """Four significant digits, or the text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
        self.thread = threading.Thread(
            target=self.work, args=(open_run,), name="tracker", daemon=True
        )
        self.thread.start()

    def put(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue an entry; where the queue is full, it is dropped."""
        self.offered += 1
        try:
            self.entries.put_nowait((step, dict(values)))
        except queue.Full:
            pass  # counted: offered, never sent

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
            error = printable(self.error)
            print(f"tracker: stopped, the run goes on ({error})", file=sys.stderr, flush=True)

    def finish(self, seconds: float) -> str:
        """Wait at most `seconds` for the thread. Returns what went wrong, or nothing."""
        deadline = time.monotonic() + seconds
        while self.thread.is_alive() and time.monotonic() < deadline:
            try:
                self.entries.put_nowait(None)
                self.thread.join(max(0.0, deadline - time.monotonic()))
            except queue.Full:  # it lags: let it catch up
                self.thread.join(0.05)
        missed = self.offered - self.sent
        if self.thread.is_alive():
            self.error = f"no answer within {seconds:g} s"
        if missed or self.error:
            why = f" ({self.error})" if self.error else ""
            return f"tracker: {missed} of {self.offered} entries were dropped{why}"
        return ""


def open_wandb(cfg: RunLogConfig, folder: Path, run_id: str, settings: dict[str, Any]) -> Any:
    """
    A run at Weights & Biases, continued when the same run resumes in the same folder.

    Raises RuntimeError where it would ask for a key: nobody may be there to answer.
    """
    import wandb  # here, so that a run without a tracker neither waits for it nor needs it

    mode = cfg.wandb_mode or wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no API key; run `wandb login`, or use --wandb_mode=offline")
    return wandb.init(
        project="nanochat",
        name=cfg.run,
        id=fingerprint([cfg.run, run_id, folder.parent.name, folder.name]),
        resume="allow",
        dir=folder,
        mode=cfg.wandb_mode,
        config=settings,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=FINISH_SECONDS,  # else its hook at exit could wait for long
            finish_timeout=FINISH_SECONDS,
        ),
    )
