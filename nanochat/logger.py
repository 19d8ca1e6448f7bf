"""
Logging of a training run to metrics.jsonl, the console and, optionally, Weights & Biases.

    log.log(step, values) -> metrics.jsonl, console, wandb

If the tracker fails, training continues. Only rank 0 logs.
Metric names are the same in all stages:

    loss  val_bpb  reward  pass_at_1  lr (fraction of peak)  tokens_per_second  mfu (fraction)
"""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import fingerprint, printable
from nanochat.records import append_line, read_lines, readable_time

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


class RunLog(contextlib.AbstractContextManager):
    """
    Log of one training run in `folder`, for rank 0. Use as a context manager or call `finish`.

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
        is_tracked = run != "dummy"
        self.tracker = open_tracker(run, folder, run_id, settings) if is_tracked else None
        self.unwritten: list[Any] = []
        """Entries that could not be written yet."""
        if self.path.exists():
            self.write([{"resumed_at": first_step}])

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """
        Log metrics of a step. Entries of the same step are merged when read; later values win.

        An entry without loss or reward is an evaluation; its line shows all metrics.
        """
        self.write([{"step": step, **values}])
        self.track("log", dict(values), step=step)
        shown = [form.format(values[k]) for k, form in CONSOLE_FORMATS.items() if k in values]
        if "loss" not in values and "reward" not in values:
            others = [(k, v) for k, v in values.items() if k not in CONSOLE_FORMATS]
            shown += [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in others]
        if shown:
            total = f"/{self.total_steps}" if self.total_steps else ""
            line = " | ".join([f"step {step:>5}{total}", *shown, *self.time_left(step)])
            print(printable(line), flush=True)

    def write(self, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append entries. If the disk is full, warns once and tries again with the next ones."""
        failed_before, self.unwritten = bool(self.unwritten), [*self.unwritten, *entries]
        try:
            while self.unwritten:
                append_line(self.path, self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as error:
            if not failed_before:
                problem = f"{self.path} cannot be written ({error}); trying again at each step"
                print(printable(problem), flush=True)

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

    def finish(self) -> None:
        """Close the log."""
        self.write()
        self.track("finish")

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
            id=fingerprint([name, run_id, folder.parent.name, folder.name]),
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
    print(printable(problem), file=sys.stderr, flush=True)
