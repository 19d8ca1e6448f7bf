"""
The training loop: gradient accumulation, schedule, evaluation, checkpoints, anomalies.

    rows of step n -> loss and gradients in micro-batches -> sum over ranks -> check -> update

A script says what to train; this file says how. A loss or gradient that is not finite never reaches
the weights.
"""

import contextlib
import gc
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat.common import UNEVALUATED, Interrupted, Refused, StoppedWaiting, StopRequest
from nanochat.distributed import Machine
from nanochat.hardware import utilization
from nanochat.loss import Trainable
from nanochat.optim import (
    MuonAdamW,
    ScheduleConfig,
    decay_factor,
    lr_factor,
    muon_momentum,
)

# ---- Anomaly detection: non-finite steps, spikes, ranks that differ ------------------------------


SPIKE_RATIO = 2.0  # times the highest loss of the window, and at least
SPIKE_NATS = 0.5  # above it: a loss near 0 may double by chance
SPIKE_WINDOW = 8  # steps: short, because the loss falls fast in the beginning
SPIKE_FIRST = 3  # steps that must have been seen before one can be called a spike
NORM_RATIO = 4.0  # times the median gradient norm of the window: a spike of the gradient
NORM_WINDOW = 32  # steps


@dataclass(frozen=True)
class GuardConfig:
    max_bad_steps: int = 5
    """So many losses or gradients in a row that are not finite stop the run; each is skipped."""
    on_spike: Literal["warn", "skip"] = "warn"
    """What becomes of a step whose loss is twice the highest of the 8 before: it is told of, or
    skipped too."""
    check_ranks_every: int = 100
    """Steps between checks that all ranks hold the same weights; 0 = never."""

    def __post_init__(self) -> None:
        if self.max_bad_steps < 1:
            raise ValueError(f"max_bad_steps must be at least 1, got {self.max_bad_steps}")
        if self.check_ranks_every < 0:
            raise ValueError(f"check_ranks_every counts steps, got {self.check_ranks_every}")


class NotFinite(RuntimeError):
    """The loss, the gradient or the weights are not finite, and the run cannot go on."""


class RanksDiffer(RuntimeError):
    """Ranks that must hold the same weights do not."""


@dataclass
class Health:
    """What the guard remembers of a run; saved with each checkpoint."""

    bad_steps: int = 0
    """Steps skipped because something was not finite."""
    spikes: int = 0
    """Steps whose loss was far above those before them."""
    losses: list[float] = field(default_factory=list)
    """The latest losses that were neither."""
    norm_spikes: int = 0
    """Steps whose gradient was far larger than those before them, whatever their loss."""
    norms: list[float] = field(default_factory=list)
    """The latest gradient norms."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


Verdict = Literal["good", "spike", "bad"]


class Guard:
    """Judges the steps of one run. `watch_spikes` is off where a loss has no level (RL)."""

    def __init__(
        self, cfg: GuardConfig, health: Health, machine: Machine, watch_spikes: bool = True
    ):
        self.cfg, self.health, self.machine = cfg, health, machine
        self.watch_spikes = watch_spikes
        self.bad_in_a_row = self.spikes_in_a_row = 0

    def judge(self, loss: float, norm: float) -> Verdict:
        """What a step is, before its update; changes nothing."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "bad"
        seen = self.health.losses[-SPIKE_WINDOW:]
        if not self.watch_spikes or len(seen) < SPIKE_FIRST:
            return "good"
        highest = max(seen)
        return "spike" if loss > max(SPIKE_RATIO * highest, highest + SPIKE_NATS) else "good"

    def allows(self, loss: float, norm: float) -> bool:
        """Whether the update of such a step is to be made."""
        verdict = self.judge(loss, norm)
        return verdict == "good" or (verdict == "spike" and self.cfg.on_spike == "warn")

    def note(self, step: int, loss: float, norm: float, rows: Callable[[], str]) -> Verdict:
        """
        Count a step, and say of a bad one which it was; `rows` names what it saw.

        As many spikes in a row as the window is long are no spikes but a new level.
        """
        verdict, health = self.judge(loss, norm), self.health
        health.norm_spikes += self.is_norm_spike(norm)
        if math.isfinite(norm):
            health.norms = [*health.norms, norm][-NORM_WINDOW:]
        self.bad_in_a_row = self.bad_in_a_row + 1 if verdict == "bad" else 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if verdict == "spike" else 0
        if verdict == "bad":
            health.bad_steps += 1
            self.machine.print0(
                f"step {step}: loss {loss}, gradient norm {norm}: skipped on all ranks "
                f"({self.bad_in_a_row} in a row); rows {rows()}"
            )
        elif verdict == "spike":
            health.spikes += 1
            done = "skipped on all ranks" if self.cfg.on_spike == "skip" else "learned all the same"
            self.machine.print0(
                f"step {step}: a spike, loss {loss:.4f} (the highest of the "
                f"{len(health.losses)} steps before was {max(health.losses):.4f}), gradient norm "
                f"{norm:.4g}: {done}; rows {rows()}"
            )
        if verdict == "good" or self.spikes_in_a_row == SPIKE_WINDOW:
            health.losses = [*health.losses, loss][-SPIKE_WINDOW:]
        return verdict

    def is_norm_spike(self, norm: float) -> bool:
        """Whether a gradient norm is far above those before it."""
        seen = self.health.norms
        return len(seen) >= SPIKE_WINDOW and norm > NORM_RATIO * statistics.median(seen)

    def check_ranks(self, step: int, named: Mapping[str, Tensor]) -> None:
        """At its cadence, `require_equal_ranks`."""
        every = self.cfg.check_ranks_every
        if every and step % every == 0:
            require_equal_ranks(named, self.machine, step)

    @property
    def lost(self) -> bool:
        """Whether so many steps in a row were bad that the run is to stop."""
        return self.bad_in_a_row >= self.cfg.max_bad_steps


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None."""
    floats = {name: x for name, x in named.items() if x.is_floating_point()}
    if not floats:
        return None
    finite = torch.stack([x.detach().isfinite().all() for x in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def require_equal_ranks(named: Mapping[str, Tensor], machine: Machine, step: int) -> None:
    """
    Raise RanksDiffer, on every rank, naming the first parameter that is not the same on all.

    named: float32 tensors. Compared are sums of their bits, so that one flipped bit is seen.
    """
    if machine.world_size == 1:
        return
    sums = [x.detach().view(torch.int32).sum(dtype=torch.int64) for x in named.values()]
    found = machine.gather(torch.stack(sums).tolist())
    for i, name in enumerate(named):
        values = [sums[i] for sums in found]
        common = max(values, key=values.count)  # of equals, rank 0's
        if others := [rank for rank, value in enumerate(values) if value != common]:
            raise RanksDiffer(
                f"before step {step} the ranks do not hold the same weights: {name} is another one "
                f"on rank {', '.join(map(str, others))} of {machine.world_size}. A device or a "
                "link is at fault; --resume=auto goes on from the last checkpoint, best without it"
            )


# ---- The loop ------------------------------------------------------------------------------------


LOSS_BETA = 0.9  # of the moving average of the training loss
MOST_SEEN = 7  # times that a row came before; more are counted as so many
UNTIMED_STEPS = 3  # the first steps compile and allocate; they are not part of a rate


@dataclass(frozen=True)
class LoopConfig:
    eval_every: int = 250
    """Steps between evaluations; 0 = only at the end."""
    save_every: int = 0
    """Steps between checkpoints; 0 = only at the end and when stopped."""
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        for name in ("eval_every", "save_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} counts steps, got {getattr(self, name)}; 0 turns it off")


@dataclass
class Progress:
    """Everything about a run that is neither weight nor setting; saved with each checkpoint."""

    step: int = 0
    """Steps done."""
    loss_average: float = 0.0
    """Moving average of the training loss, biased towards 0 (see `smooth_loss`)."""
    train_seconds: float = 0.0
    """Time spent in timed steps, by all attempts together."""
    timed_steps: int = 0
    flops: float = 0.0
    """Spent on all steps, forward and backward."""
    clock_seconds: float = 0.0
    """Time spent in all steps, the mean of the ranks: what a budget of seconds is compared with."""
    averaged: bool = False
    """The weights are the average that the run ended with: there is no going on from them."""
    finished: bool = False
    """All steps are done, as far as this run was planned."""
    optimizer_missing: bool = False
    """The checkpoint that was loaded holds no optimizer state: there is no going on from it."""
    health: Health = field(default_factory=Health)
    min_val: float | None = None
    last_val: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    """The latest steps, for a median rate."""

    def state_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in vars(self).items() if k != "step_seconds"}
        return {**plain, "health": self.health.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])
        self.health = Health(**state["health"])

    @property
    def smooth_loss(self) -> float:
        """The moving average, free of its start at 0."""
        return self.loss_average / (1 - LOSS_BETA**self.step) if self.step else math.nan


class Callback:
    """
    Extends a training run. Every method is called on every rank and does nothing by default; one
    that raises ends the run. Figures that a method returns are logged.
    """

    def start(self, run: "Run") -> None:
        """Before the first step of an attempt."""

    def before_step(self, step: int, share: float) -> None:
        """Before each step and its evaluation; `share` of the run is done."""

    def forward_context(self, share: float) -> AbstractContextManager[None]:
        """Entered around the forward and backward passes of a step."""
        return nullcontext()

    def after_backward(self, scale: float) -> dict[str, float]:
        """When gradients are reduced; times `scale` they are the mean over the targets."""
        return {}

    def after_step(self, done: "Step", progress: Progress) -> None:
        """After each step, when it is logged."""

    def evaluate(
        self, step: int, stopping: Callable[[], bool], last: bool
    ) -> dict[str, float] | None:
        """
        Before each step but the first, and once with `last` when all is trained. Returns figures,
        the one to be smallest under "val_bpb"; None where `stopping()` interrupted it.
        """
        return {}

    def values(self) -> dict[str, Any]:
        """Values for the record of the finished run."""
        return {}

    def tables(self) -> list[dict[str, Any]]:
        """Tables for that record."""
        return []


class Evaluator(Callback, ABC):
    """
    Measures every `every` steps (0 = only at the end) and at the end, `rows_per_pass` rows at a
    time. Out of memory, it goes on with half as many rows.
    """

    every = 0
    rows_per_pass = 1

    def start(self, run: "Run") -> None:
        self.rows_per_pass = run.device_rows

    @abstractmethod
    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        """The figures. Raises Interrupted where `stopping()` became true."""

    def evaluate(
        self, step: int, stopping: Callable[[], bool], last: bool
    ) -> dict[str, float] | None:
        if not last and not (self.every and step % self.every == 0):
            return {}
        while True:
            try:
                return self.measure(stopping)
            except Interrupted:
                return None
            except torch.OutOfMemoryError:
                if self.rows_per_pass == 1:
                    raise
            torch.cuda.empty_cache()  # outside the handler, which keeps the failed try's tensors
            self.rows_per_pass //= 2
            print(
                f"evaluation: out of memory, going on with {self.rows_per_pass} rows at a time",
                flush=True,
            )


class Save(Protocol):
    """
    Writes a checkpoint; `final` returns only when it is safe on disk. That of a run which is
    `progress.finished` may leave out the optimizer state.
    """

    def __call__(self, progress: Progress, final: bool = False) -> None: ...


@dataclass(frozen=True)
class Run:
    """
    What to train. `rows(step)` gives this rank's (tokens, targets), both (rows, T) int64 arrays
    with IGNORE among the targets where one does not count; `rows_name(step)` says which they
    are, for messages. `save` is called on every rank.
    """

    model: Trainable
    optimizer: MuonAdamW
    machine: Machine
    num_steps: int
    """Steps to train; at most so many where `max_seconds` may end the run before."""
    batch_tokens: int
    """Tokens per step, all ranks together."""
    device_rows: int
    """Rows per micro-batch on one device."""
    flops_per_token: Callable[[], float]
    """Of the model as it is at a step."""
    rows: Callable[[int], tuple[np.ndarray, np.ndarray]]
    rows_name: Callable[[int], str]
    save: Save
    log: Callable[[int, dict[str, Any]], None]
    schedule: ScheduleConfig
    loop: LoopConfig
    grad_clip: float = 0.0
    stop: StopRequest = field(default_factory=StopRequest)
    times_seen: Callable[[int], np.ndarray] | None = None
    """How often each of the rows of a step came before; None where nobody knows."""
    max_seconds: float | None = None
    """Training ends with the step that reaches so many seconds of steps; evaluations and saving
    are not counted. The schedules then follow the clock."""
    callbacks: Sequence[Callback] = ()

    def horizon(self, progress: Progress) -> float:
        """How many steps the run will have in all: as told, or as the clock will allow."""
        if self.max_seconds is None or not progress.clock_seconds:
            return self.num_steps
        return min(self.num_steps, progress.step * self.max_seconds / progress.clock_seconds)

    def finished(self, progress: Progress) -> bool:
        """Whether nothing is left to train."""
        return progress.step >= self.horizon(progress)


def train(run: Run, progress: Progress) -> bool:
    """
    Train from `progress.step` to the end. Returns False when the run was asked to stop early.

    The last thing before the final evaluation is a checkpoint. Asked to stop, it leaves the
    evaluation or the step at hand and saves. Raises NotFinite after saving the last good state,
    RanksDiffer, and Refused for more steps after the weights were averaged or where the checkpoint
    of the finished run holds no optimizer state.
    """
    if not run.finished(progress):
        require_resumable(progress)
    guard = Guard(run.loop.guard, progress.health, run.machine)
    for callback in run.callbacks:
        callback.start(run)
    with run.stop as stop:
        while not run.finished(progress):
            step, horizon = progress.step, run.horizon(progress)
            for callback in run.callbacks:
                callback.before_step(step, step / horizon)
            if step:
                evaluate(run, progress, step, stop)
            guard.check_ranks(step, run.optimizer.named_params())
            started = time.perf_counter()
            done = train_step(run, step, lambda: stop.asked, guard.allows, horizon)
            loss, norm = done.loss, done.norm
            if done.stopped:
                run.save(progress, final=True)
                run.machine.print0(f"asked to stop: saved step {progress.step}")
                return False
            seconds = time.perf_counter() - started
            if run.max_seconds is not None:  # all ranks must agree on when to end
                seconds = run.machine.sum(seconds)[0] / run.machine.world_size
            progress.clock_seconds += seconds
            spiked = guard.is_norm_spike(norm)
            verdict = guard.note(step, loss, norm, lambda at=step: run.rows_name(at))
            progress.step += 1
            progress.flops += run.batch_tokens * run.flops_per_token()
            average = loss if verdict == "good" else progress.smooth_loss
            average = average if math.isfinite(average) else 0.0
            progress.loss_average = LOSS_BETA * progress.loss_average + (1 - LOSS_BETA) * average
            if step >= UNTIMED_STEPS:
                progress.train_seconds += seconds
                progress.timed_steps += 1
                progress.step_seconds = [*progress.step_seconds[-999:], seconds]
            log_step(run, progress, horizon, done, seconds, spiked)
            for callback in run.callbacks:
                callback.after_step(done, progress)
            if step == 0:
                gc.collect()
                gc.freeze()  # what lives now lives on: keep it out of every later collection
            if guard.lost:
                give_up(run.save, progress, guard)
            every = run.loop.save_every
            if every and progress.step % every == 0 and not run.finished(progress):
                run.save(progress)
        for callback in run.callbacks:
            callback.before_step(progress.step, 1.0)
        if not progress.averaged:  # the optimizer state of a resumed run may be missing
            progress.averaged = run.optimizer.take_average()
        progress.finished = True
        run.save(progress, final=True)
        with last_evaluation(run.machine):
            return evaluate(run, progress, progress.step, stop, last=True)


def require_resumable(progress: Progress) -> None:
    """
    Raise Refused where training cannot go on from `progress`; for runs with steps left to train.
    """
    progress.finished = False
    if progress.averaged:
        raise Refused(
            f"the run ended after step {progress.step} with the average of its weights, and cannot "
            "be made longer",
            "another --model_tag, or no --ema_decay",
        )
    if progress.optimizer_missing:
        raise Refused(
            f"the run finished at step {progress.step}, and its last checkpoint holds no optimizer "
            "state, so it cannot be made longer",
            "train all steps anew with --resume=never, and keep the optimizer state of the last "
            "checkpoint with --save_optimizer",
        )


def give_up(save: Save, progress: Progress, guard: Guard) -> None:
    """Save the weights, which no bad step has touched, and raise NotFinite."""
    save(progress, final=True)
    raise NotFinite(
        f"{guard.bad_in_a_row} steps in a row were not finite, the last one step "
        f"{progress.step - 1}; the weights before them are saved. Lower the rates, or look at "
        "those rows"
    )


class Step(NamedTuple):
    """What became of a step; the same on every rank."""

    loss: float
    """Mean nats per counted target."""
    norm: float
    """Of the gradient."""
    stopped: bool = False
    """A rank was asked to stop meanwhile: it is as if the step had not begun."""
    figures: Mapping[str, float] = {}
    """What else is to be logged of it."""


def train_step(
    run: Run,
    step: int,
    stopping: Callable[[], bool] = lambda: False,
    allows: Callable[[float, float], bool] = lambda loss, norm: math.isfinite(loss + norm),
    horizon: float | None = None,
) -> Step:
    """
    One optimizer step of a run of `horizon` steps, by default its num_steps. An update happens only
    when its loss and norm are allowed to make one, and when no rank was asked to stop meanwhile.
    """
    machine, optimizer = run.machine, run.optimizer
    horizon = horizon or run.num_steps
    try:
        tokens, targets = (to_device(x, machine.device) for x in run.rows(step))
    except StoppedWaiting:
        tokens = targets = torch.empty(0, 1, dtype=torch.int64)
    local = torch.zeros((), device=machine.device)
    tally = SeenTally(run.times_seen(step) if run.times_seen and len(tokens) else None)
    if (order := tally.order) is not None:
        order = order.to(tokens.device)
        tokens, targets = tokens[order], targets[order]
    with contextlib.ExitStack() as stack:
        for callback in run.callbacks:
            stack.enter_context(callback.forward_context(step / horizon))
        for i in range(0, len(tokens), run.device_rows):
            if stopping():
                break
            loss = run.model.loss(tokens[i : i + run.device_rows], targets[i : i + run.device_rows])
            # divided by what a full step counts, so that gradients have a fixed scale in bf16
            (loss / run.batch_tokens).backward()
            local += loss.detach()
            tally.add(i, run.device_rows, loss, targets)
    counted = (targets >= 0).sum()
    nats, count, asked, *seen = machine.sum(
        float(local), float(counted), float(stopping()), *tally.sums()
    )
    if asked:
        optimizer.drop_gradients()
        return Step(math.nan, math.nan, stopped=True)
    norm = optimizer.reduce_gradients()
    scale = run.batch_tokens / count if count else 0.0  # exactly the mean over counted targets
    figures = by_times_seen(seen)
    for callback in run.callbacks:
        figures |= callback.after_backward(scale)
    norm *= scale
    loss_mean = nats / count if count else 0.0
    if not allows(loss_mean, norm):
        optimizer.drop_gradients()
    else:
        if run.grad_clip and norm > run.grad_clip:
            scale *= run.grad_clip / norm
        optimizer.step(
            lr_factor(step, horizon, run.schedule),
            muon_momentum(step, horizon),
            decay_factor(step, horizon),
            scale,
        )
    machine.synchronize()
    return Step(loss_mean, norm, figures=figures)


class SeenTally:
    """
    Sums the loss of a step by how often its rows came before, where some did: the rows are taken in
    that order, and a micro-batch counts whose rows all came as often.
    """

    def __init__(self, seen: np.ndarray | None):
        self.order: Tensor | None = None
        self.seen = np.empty(0, np.int64)
        if seen is not None and seen.any():
            order = np.argsort(seen, kind="stable")
            self.order, self.seen = torch.from_numpy(order), seen[order]
        self.losses: list[tuple[int, Tensor, Tensor]] = []

    def add(self, first: int, rows: int, loss: Tensor, targets: Tensor) -> None:
        """A micro-batch of `rows` rows from place `first` on."""
        if len(set(self.seen[first : first + rows].tolist())) == 1:
            times = min(int(self.seen[first]), MOST_SEEN)
            counted = (targets[first : first + rows] >= 0).sum()
            self.losses.append((times, loss.detach(), counted))

    def sums(self) -> list[float]:
        """Nats and counted targets of each number of times, one after the other."""
        found = [0.0] * 2 * (MOST_SEEN + 1)
        for times, loss, counted in self.losses:
            found[2 * times] += float(loss)
            found[2 * times + 1] += float(counted)
        return found


def by_times_seen(sums: Sequence[float]) -> dict[str, float]:
    """The mean loss of rows that came before so many times, as it is logged."""
    pairs = enumerate(zip(sums[::2], sums[1::2], strict=True))
    return {f"loss_seen_{times}": nats / count for times, (nats, count) in pairs if count}


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """
    Copy to the device; each call pins memory of its own, so no later step can overwrite it. Only a
    contiguous copy runs beside the device's work: of a slice PyTorch copies unpinned memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def evaluate(
    run: Run, progress: Progress, step: int, stop: StopRequest, last: bool = False
) -> bool:
    """Measure, keep the smallest validation value, log. False when asked to stop instead."""
    figures: dict[str, float] = {}
    for callback in run.callbacks:
        found = callback.evaluate(step, lambda: stop.asked, last)
        if found is None:
            run.machine.print0(f"asked to stop: evaluation at step {step} aborted")
            return False
        figures |= found
    value = figures.get("val_bpb")
    if value is not None:
        progress.last_val = value
        progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
    if figures:
        run.log(step, figures)
    return True


@contextlib.contextmanager
def last_evaluation(machine: Machine) -> Iterator[None]:
    """
    What is measured when the model is saved: out of memory, it ends the run with UNEVALUATED.

    The same command with --resume=auto then measures again, without training.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        machine.print0(
            "the model is trained and saved, but memory ran out in its last evaluation; the same "
            "command with --resume=auto evaluates it, best with fewer rows at a time: a smaller "
            "--device_batch_size, in RL --slots"
        )
        raise SystemExit(UNEVALUATED) from error


def log_step(
    run: Run, progress: Progress, horizon: float, done: Step, seconds: float, spiked: bool
) -> None:
    """Hand the figures of the step just done to the log; its rates were those of `horizon`."""
    step = progress.step - 1
    rate = run.batch_tokens / seconds
    used = utilization(rate * run.flops_per_token(), run.machine.device, run.machine.world_size)
    figures = {
        "loss": done.loss,
        "smooth_loss": progress.smooth_loss,
        "lr": lr_factor(step, horizon, run.schedule),
        "grad_norm": done.norm,
        "tokens_per_second": rate,
        "step_seconds": seconds,
        **done.figures,
    }
    if spiked:
        figures["norm_spike"] = done.norm
    if used is not None:
        figures["mfu"] = used
    if run.max_seconds is not None:
        figures["seconds_left"] = max(0.0, run.max_seconds - progress.clock_seconds)
    run.log(step, figures)


def median_rate(run: Run, progress: Progress) -> float | None:
    """Tokens per second over the latest timed steps; None where there were none."""
    if not progress.step_seconds:
        return None
    return run.batch_tokens / statistics.median(progress.step_seconds)
