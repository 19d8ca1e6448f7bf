"""
The training loop of every stage: gradients, update, evaluation, checkpoints, log.

    loader -> micro-batches of a step -> loss and gradients -> sum over ranks -> check -> update

A script describes a `TrainingRun`; `train` takes it from the checkpoint it resumes to its result. A
loss or gradient that is not finite never reaches the weights.
"""

import contextlib
import gc
import importlib
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import preflight, records, report
from nanochat.anomaly import AnomalyDetector, NotFinite, require_equal_ranks
from nanochat.checkpoint import (
    ARCHITECTURES,
    LOSS_BETA,
    Checkpoint,
    Checkpoints,
    Progress,
    SavingConfig,
    closing_lines,
    stage_folder,
)
from nanochat.common import (
    PREEMPTED,
    UNEVALUATED,
    Interrupted,
    StoppedWaiting,
    StopRequest,
    require_name,
)
from nanochat.dataloader import MixedRows, Rows
from nanochat.distributed import DistConfig, DistContext
from nanochat.gpt import GPT
from nanochat.hardware import used_memory_bytes, utilization
from nanochat.logger import METRICS_FILE, RunLog, duration
from nanochat.loss import Trainable
from nanochat.optim import (
    MuonAdamW,
    OptimConfig,
    ScheduleConfig,
    decay_factor,
    lr_factor,
    muon_momentum,
)
from nanochat.preflight import KernelConfig, Prepared
from nanochat.tokenizer import Tokenizer

MAX_TIMES_SEEN = 7  # times that a row came before; more are counted as this many
UNTIMED_STEPS = 3  # of each attempt, which compile and allocate, are left out of a median
CHECK_RANKS_EVERY = 100  # steps between checks that all ranks hold the same weights


@dataclass(frozen=True)
class TrainConfig:
    device_batch_size: int | None = None
    """Rows per forward pass on one device; never changes the result. Default: what fits."""
    model_tag: str = ""
    """Name of the folder of checkpoints. Default: d<depth>, or that of the parent checkpoint."""
    seed: int = 0
    """Seed of new weights and of the data order."""
    eval_every: int = 250
    """Steps between evaluations; 0 = only at the end."""
    save_every: int = 0
    """Steps between checkpoints; 0 = only at the end and when stopped."""
    skip_if_done: bool = False
    """Do nothing when the same training has finished before and its checkpoint is still there."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    saving: SavingConfig = field(default_factory=SavingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    machine: DistConfig = field(default_factory=DistConfig)
    run: str = "dummy"
    """Name of the run at Weights & Biases, which reads WANDB_MODE. dummy: no tracker."""

    def __post_init__(self) -> None:
        require_name("model_tag", self.model_tag)
        if self.device_batch_size is not None and self.device_batch_size < 1:
            raise ValueError(
                f"device_batch_size must be at least 1, got {self.device_batch_size}; leave it out "
                "to use the largest that fits"
            )
        for name in ("seed", "eval_every", "save_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


# ---- What extends a run --------------------------------------------------------------------------


class Callback:
    """
    Extends a training run. Every method is called on every rank and does nothing by default; one
    that raises ends the run. Values that a method returns are logged.
    """

    def start(self, run: "TrainingRun") -> None:
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
        Before each step but the first, and once with `last` when all is trained. Returns metrics,
        the one to minimize under "val_bpb"; None where `stopping()` interrupted it.
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

    def start(self, run: "TrainingRun") -> None:
        self.rows_per_pass = run.device_rows

    @abstractmethod
    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        """The metrics. Raises Interrupted where `stopping()` became true."""

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


# ---- Batches -------------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """Rows of one forward and backward pass, on the device."""

    tokens: Tensor
    """(B, T) int64."""
    targets: Tensor
    """(B, T) int64, IGNORE where one does not count."""
    num_targets: int
    """How many count."""
    weights: Tensor | None = None
    """(B, T) factors of the targets' losses. Default: 1."""
    times_seen: int | None = None
    """How often all of these rows came before, where that is counted and the same for all."""


class Loader(Protocol):
    """Gives the batches of a run: a pure function of the step and, in RL, of the model."""

    should_stop: Callable[[], bool]
    """Set by the loop."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued."""
        ...

    def micro_batches(self, step: int, device_rows: int) -> list[MicroBatch]:
        """This rank's share of a step. Raises StoppedWaiting where `should_stop()`."""
        ...

    def row_names(self, step: int) -> str:
        """Which rows a step trains on, for messages."""
        ...

    def describe(self, run: "TrainingRun") -> dict[str, str]:
        """Lines for the screen before a run."""
        ...


class RowLoader:
    """
    Packed rows in batches of `batch_tokens` tokens over all ranks. split: rows as they are stored
    -> tokens and targets, both (B, T) int64.
    """

    def __init__(
        self,
        rows: Rows | MixedRows,
        split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
        batch_tokens: int,
        seed: int,
        machine: DistContext,
    ):
        self.rows, self.split, self.seed, self.machine = rows, split, seed, machine
        self.num_rows = batch_tokens // rows.max_seq_len
        self.should_stop: Callable[[], bool] = lambda: False
        rows.should_stop = lambda: self.should_stop()

    @property
    def identity(self) -> dict[str, Any]:
        return {"rows": self.rows.recipe, "batch_tokens": self.num_rows * self.rows.max_seq_len}

    def micro_batches(self, step: int, device_rows: int) -> list[MicroBatch]:
        share = (step, self.num_rows, self.seed, self.machine.rank, self.machine.world_size)
        with self.machine.working("waiting for rows that are being packed"):
            mine = self.rows.batch(*share)
        seen = self.rows.times_seen(*share)
        return split_micro_batches(*self.split(mine), device_rows, self.machine.device, seen)

    def row_names(self, step: int) -> str:
        return str(self.rows.row_ids(step, self.num_rows, self.seed).tolist())

    def describe(self, run: "TrainingRun") -> dict[str, str]:
        T, world_size = self.rows.max_seq_len, self.machine.world_size
        epochs = self.rows.epochs_for(run.num_steps * self.num_rows)
        repeats = "not all packed yet" if epochs is None else f"{epochs:.2f} epochs"
        passes = self.num_rows // (run.device_rows * world_size)
        return {
            "rows": f"{self.rows.fingerprint} of {T:,} tokens, {repeats}",
            "batch": f"{run.batch_tokens:,} tokens: {passes} passes of {run.device_rows} rows on "
            f"each of {world_size} devices",
        }


def split_micro_batches(
    tokens: np.ndarray,
    targets: np.ndarray,
    device_rows: int,
    device: torch.device,
    times_seen: np.ndarray | None = None,
) -> list[MicroBatch]:
    """
    Micro-batches of `device_rows` rows, copied to `device` all at once. Where some rows came
    before, rows are ordered by how often, so that most micro-batches have one number.
    """
    seen = None
    if times_seen is not None and times_seen.any():
        order = np.argsort(times_seen, kind="stable")
        tokens, targets, seen = tokens[order], targets[order], times_seen[order]
    x, y = to_device(tokens, device), to_device(targets, device)
    found = []
    for i in range(0, len(tokens), device_rows):
        rows = slice(i, i + device_rows)
        same = seen is not None and len(set(seen[rows].tolist())) == 1
        times = min(int(seen[i]), MAX_TIMES_SEEN) if seen is not None and same else None
        count = int((targets[rows] >= 0).sum())
        found.append(MicroBatch(x[rows], y[rows], count, times_seen=times))
    return found


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """
    Copy to the device; each call pins memory of its own, so no later step can overwrite it. Only a
    contiguous copy is asynchronous: of a slice PyTorch copies unpinned memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ---- The loop ------------------------------------------------------------------------------------


@dataclass
class TrainingRun:
    """What is trained, on what, for how long. The last group of fields is set by `train`."""

    kind: Literal["base", "mid", "sft", "rl"]
    model: GPT
    optimizer: MuonAdamW
    loader: Loader
    machine: DistContext
    cfg: TrainConfig
    tag: str
    """Name of the folder of checkpoints."""
    num_steps: int
    """Steps to train; the most there can be where `max_seconds` ends the run before."""
    batch_tokens: int
    """Tokens per step, all ranks together; in RL, the most that can be sampled."""
    schedule: ScheduleConfig
    momentum: Callable[[int, float], float] = muon_momentum
    """(step, steps of the run) -> Muon's momentum."""
    kernels: KernelConfig = KernelConfig()
    prepared: Prepared | None = None
    """Kernels and micro-batch where they are not to be chosen (RL), for a run from step 0."""
    objective: Trainable | None = None
    """Gives the loss. Default: the model."""
    callbacks: Sequence[Callback] = ()
    max_seconds: float | None = None
    """Training ends with the step that reaches this many seconds of steps, evaluations and saves
    not counted. The schedules then follow the clock."""
    finds_spikes: bool = True
    """Off where the loss has no level."""

    tokenizer: Tokenizer | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What else a checkpoint must agree with to be continued."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """run_id of the pipeline, seed, and inputs: the fingerprints of what was read."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What else a checkpoint holds."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the script, for log, checkpoint and record."""
    keep_optimizer: bool = True
    """Whether the checkpoint of the finished run holds the optimizer state."""
    background: Callable[[], AbstractContextManager] = nullcontext
    """Entered around the training."""
    bytes_to_pack: int = 0
    """What that will write to the disk."""

    device_rows: int = 1
    """Rows per micro-batch on one device."""
    save: Callable[..., None] = lambda progress, final=False: None
    """Writes a checkpoint; `final` returns only when it is safe on disk. Called on every rank."""
    log: Callable[[int, dict[str, Any]], None] = lambda step, values: None
    stop: StopRequest = field(default_factory=StopRequest)

    def horizon(self, progress: Progress) -> float:
        """How many steps the run will have in all: num_steps, or what the clock allows."""
        if self.max_seconds is None or not progress.clock_seconds:
            return self.num_steps
        return min(self.num_steps, progress.step * self.max_seconds / progress.clock_seconds)

    def finished(self, progress: Progress) -> bool:
        """Whether nothing is left to train."""
        return progress.step >= self.horizon(progress)


def run_loop(run: TrainingRun, progress: Progress) -> bool:
    """
    Train from `progress.step` to the end. Returns False when the run was asked to stop early.

    The last thing before the final evaluation is a checkpoint. Asked to stop, it drops the
    evaluation or the step at hand and saves. Raises NotFinite after saving the last good state,
    RanksDiffer, and UsageError for more steps after the weights were averaged or where the
    checkpoint of the finished run holds no optimizer state.
    """
    if not run.finished(progress):
        progress.require_resumable()
    first_step = progress.step
    detector = AnomalyDetector(progress.health, run.machine, run.finds_spikes)
    for callback in run.callbacks:
        callback.start(run)
    with run.stop as stop:
        run.loader.should_stop = lambda: stop.asked
        while not run.finished(progress):
            step, horizon = progress.step, run.horizon(progress)
            for callback in run.callbacks:
                callback.before_step(step, step / horizon)
            if step:
                evaluate(run, progress, last=False)
            if step % CHECK_RANKS_EVERY == 0:
                require_equal_ranks(run.optimizer.named_params(), run.machine, step)
            started = time.perf_counter()
            done = train_step(run, step, horizon)
            if done.stopped:
                run.save(progress, final=True)
                run.machine.print0(f"asked to stop: saved step {step}")
                return False
            seconds = time.perf_counter() - started
            if run.max_seconds is not None:  # all ranks must agree on when to end
                seconds = run.machine.sum(seconds)[0] / run.machine.world_size
            spiked = detector.is_norm_spike(done.norm)
            count_step(run, progress, detector, done, seconds, step - first_step >= UNTIMED_STEPS)
            log_step(run, progress, horizon, done, seconds, spiked)
            for callback in run.callbacks:
                callback.after_step(done, progress)
            if step == first_step:
                gc.collect()
                gc.freeze()  # what is alive now stays: keep it out of every later collection
            if detector.should_abort:
                run.save(progress, final=True)
                raise NotFinite(
                    f"{detector.bad_in_a_row} steps in a row were not finite, the last one step "
                    f"{step}; the weights before them are saved. Look at those rows, or train anew "
                    "with lower learning rates and another --model_tag"
                )
            every = run.cfg.save_every
            if every and progress.step % every == 0 and not run.finished(progress):
                run.save(progress)
        for callback in run.callbacks:
            callback.before_step(progress.step, 1.0)
        if not progress.averaged:  # the optimizer state of a resumed run may be missing
            progress.averaged = run.optimizer.take_average()
        progress.finished = True
        run.save(progress, final=True)
        with last_evaluation(run.machine):
            return evaluate(run, progress, last=True)


def evaluate(run: TrainingRun, progress: Progress, last: bool) -> bool:
    """Measure, keep the smallest validation value, log. False when asked to stop instead."""
    metrics: dict[str, float] = {}
    for callback in run.callbacks:
        found = callback.evaluate(progress.step, lambda: run.stop.asked, last)
        if found is None:
            run.machine.print0(f"asked to stop: evaluation at step {progress.step} aborted")
            return False
        metrics |= found
    value = metrics.get("val_bpb")
    if value is not None:
        progress.last_val = value
        progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
    if metrics:
        run.log(progress.step, metrics)
    return True


@contextlib.contextmanager
def last_evaluation(machine: DistContext) -> Iterator[None]:
    """
    Around what is measured when the model is saved: out of memory, it ends the run with
    UNEVALUATED. The same command with --resume=auto then measures again, without training.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        machine.print0(
            "the model is trained and saved, but memory ran out in its last evaluation; the same "
            "command with --resume=auto evaluates it, best with fewer rows at a time: a smaller "
            "--device_batch_size"
        )
        raise SystemExit(UNEVALUATED) from error


class Step(NamedTuple):
    """Result of a step; the same on every rank."""

    loss: float
    """Mean nats per counted target."""
    norm: float
    """Of the gradient."""
    tokens: int = 0
    """Tokens processed, also in skipped steps, padding included, all ranks together."""
    stopped: bool = False
    """A rank was asked to stop meanwhile: it is as if the step had not begun."""
    metrics: Mapping[str, float] = {}
    """What else is to be logged of it."""


def train_step(run: TrainingRun, step: int, horizon: float | None = None) -> Step:
    """
    One optimizer step of a run of `horizon` steps, by default its num_steps. There is no update
    where loss or gradient are not finite or no target counts, nor when a rank was asked to stop.
    """
    machine, optimizer = run.machine, run.optimizer
    horizon = horizon or run.num_steps
    objective = run.objective or run.model
    loss_by_times_seen = torch.zeros(MAX_TIMES_SEEN + 1, 2, dtype=torch.float64)
    losses = []
    with contextlib.ExitStack() as stack:
        try:
            micro_batches = run.loader.micro_batches(step, run.device_rows)
        except StoppedWaiting:
            micro_batches = []
        for callback in run.callbacks:
            stack.enter_context(callback.forward_context(step / horizon))
        for each in micro_batches:
            if run.stop.asked:
                break
            weights = {} if each.weights is None else {"weights": each.weights}
            loss_sum = objective.loss(each.tokens, each.targets, **weights)
            # a constant divisor, so that gradients have a fixed scale in bf16; `scale` corrects it
            (loss_sum / run.batch_tokens).backward()
            losses.append(loss_sum.detach())
    for each, loss in zip(micro_batches, losses, strict=False):
        if each.times_seen is not None:
            loss_by_times_seen[each.times_seen] += torch.tensor([float(loss), each.num_targets])
    nats, count, tokens, stopping, *by_times_seen = machine.sum(
        float(sum(losses)),
        float(sum(each.num_targets for each in micro_batches)),
        float(sum(each.tokens.numel() for each in micro_batches)),
        float(run.stop.asked),
        *loss_by_times_seen.flatten().tolist(),
    )
    if stopping:
        optimizer.drop_gradients()
        return Step(math.nan, math.nan, stopped=True)
    norm = optimizer.reduce_gradients()
    scale = run.batch_tokens / count if count else 0.0  # exactly the mean over counted targets
    pairs = zip(by_times_seen[::2], by_times_seen[1::2], strict=True)
    metrics = {f"loss_seen_{n}": bucket / of for n, (bucket, of) in enumerate(pairs) if of}
    for callback in run.callbacks:
        metrics |= callback.after_backward(scale)
    loss, norm = nats / count if count else 0.0, norm * scale
    if count and math.isfinite(loss + norm):
        if run.cfg.optim.grad_clip and norm > run.cfg.optim.grad_clip:
            scale *= run.cfg.optim.grad_clip / norm
        optimizer.step(
            lr_factor(step, horizon, run.schedule),
            run.momentum(step, horizon),
            decay_factor(step, horizon),
            scale,
        )
    else:
        optimizer.drop_gradients()
    machine.synchronize()
    return Step(loss, norm, int(tokens), metrics=metrics)


def count_step(
    run: TrainingRun,
    progress: Progress,
    detector: AnomalyDetector,
    done: Step,
    seconds: float,
    timed: bool,
) -> None:
    """Enter a step into the progress of the run; `timed` steps count towards its throughput."""
    step = progress.step
    verdict = detector.record(step, done.loss, done.norm, lambda: run.loader.row_names(step))
    loss = done.loss if verdict == "good" else progress.smooth_loss
    loss = loss if math.isfinite(loss) else 0.0
    progress.loss_average = LOSS_BETA * progress.loss_average + (1 - LOSS_BETA) * loss
    progress.step += 1
    progress.flops += done.tokens * run.model.flops_per_token()
    progress.clock_seconds += seconds
    if timed:
        progress.train_seconds += seconds
        progress.timed_steps += 1
        progress.step_seconds = [*progress.step_seconds[-999:], seconds]


def log_step(
    run: TrainingRun,
    progress: Progress,
    horizon: float,
    done: Step,
    seconds: float,
    spiked: bool,
) -> None:
    """Log the step just done; its learning rates were those of `horizon`."""
    step, machine = progress.step - 1, run.machine
    rate = done.tokens / seconds
    used = utilization(rate * run.model.flops_per_token(), machine.device, machine.world_size)
    values = {
        "loss": done.loss,
        "smooth_loss": progress.smooth_loss,
        "lr": lr_factor(step, horizon, run.schedule),
        "grad_norm": done.norm,
        "tokens_per_second": rate,
        "step_seconds": seconds,
        **done.metrics,
    }
    if spiked:
        values["norm_spike"] = done.norm
    if used is not None:
        values["mfu"] = used
    if run.max_seconds is not None:
        values["seconds_left"] = max(0.0, run.max_seconds - progress.clock_seconds)
    run.log(step, values)


# ---- From an opened model and its rows to a record -----------------------------------------------


@dataclass(frozen=True)
class TrainingResult:
    """What a finished run leaves for its record."""

    run: TrainingRun
    prepared: Prepared
    progress: Progress
    folder: Path
    """Of the run's checkpoints and metrics."""
    checkpoint: Checkpoint | None
    """The last one; None on the ranks that do not write."""

    @property
    def tokens_per_second(self) -> float | None:
        """At the median of the latest timed steps; None where there were none."""
        seconds = self.progress.step_seconds
        return self.run.batch_tokens / statistics.median(seconds) if seconds else None

    @property
    def utilization(self) -> float | None:
        """Share of the device's peak (MFU) at the median step, None where one is unknown."""
        rate, machine = self.tokens_per_second, self.run.machine
        if rate is None:
            return None
        flops = self.progress.flops / (self.progress.step * self.run.batch_tokens)  # of a token
        return utilization(rate * flops, machine.device, machine.world_size)

    def values(self, memory_at_start: int) -> dict[str, Any]:
        """Values that the record of every training on rows ends with."""
        rate, health = self.tokens_per_second, self.progress.health
        return {
            "Tokens per second": "-" if rate is None else f"{rate:,.0f}",
            "Batch tokens": self.run.batch_tokens,
            "Rows per device pass": self.prepared.device_rows,
            "Compute dtype": str(self.run.machine.dtype).removeprefix("torch."),
            "Compiled": self.prepared.compiled,
            "Stated memory": f"{self.prepared.memory_bytes / 2**20:.2f}MiB",
            "Memory after imports": f"{memory_at_start / 2**20:.2f}MiB",
            "Skipped steps": health.bad_steps,
            "Loss spikes": health.spikes,
            "Gradient norm spikes": health.norm_spikes,
        }


class Stopwatch(NamedTuple):
    """Taken when a script begins, for the cost in its record."""

    seconds: float
    memory_bytes: int

    @staticmethod
    def start() -> "Stopwatch":
        return Stopwatch(time.perf_counter(), used_memory_bytes(torch.device("cpu")))


def finished_before(
    section: str,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    cfg: TrainConfig,
    machine: DistContext,
) -> bool:
    """Whether --skip_if_done finds this very training recorded and its checkpoint intact."""
    if not cfg.skip_if_done:
        return False
    key = records.stage_key(settings, inputs)
    found = machine.on_main(
        "verifying files", lambda: records.finished(section, key, cfg.report_dir) is not None
    )
    if found:
        machine.print0(f"{section}: finished already, skipped")
    return found


def train(run: TrainingRun) -> TrainingResult:
    """
    Resume or begin, check what fits, train, save and evaluate.

    Raises UsageError where the run cannot finish, or where another one writes to its folder;
    SystemExit(PREEMPTED) when it was asked to stop: saved, not finished.
    """
    cfg, model, machine = run.cfg, run.model, run.machine
    tokenizer = run.tokenizer
    assert tokenizer is not None, "a checkpoint holds the tokenizer"
    folder = stage_folder(run.kind) / run.tag
    with Checkpoints(folder, machine, cfg.saving, run.keep_optimizer) as checkpoints:
        identity = {
            **run.loader.identity,
            "model": asdict(model.cfg),
            "seed": cfg.seed,
            "optim": asdict(cfg.optim),
            "schedule": asdict(run.schedule),
            **run.identity,
        }
        progress = checkpoints.begin(identity, model, run.optimizer, run.num_steps)
        prepared = prepare(run, progress, checkpoints)
        state = {
            "stage": run.kind,
            "identity": identity,
            "settings": run.settings,
            "provenance": run.provenance,
            **run.state,
        }
        log: AbstractContextManager = nullcontext()
        if machine.is_main:
            total = run.num_steps if run.max_seconds is None else None
            names = cfg.run, run.provenance["run_id"]
            log = RunLog(checkpoints.folder, *names, run.settings, progress.step, total)
            run.log = log.log
        run.save = lambda progress, final=False: checkpoints.save(
            model, run.optimizer, tokenizer, state, progress, final
        )
        run.callbacks = [*run.callbacks, *model_callbacks(run)]
        with log, run.background():
            done = run_loop(run, progress)
    if not done:
        machine.close()
        raise SystemExit(PREEMPTED)
    return TrainingResult(run, prepared, progress, folder, checkpoints.saved)


def model_callbacks(run: TrainingRun) -> list[Callback]:
    """The callbacks that every training of this kind of model needs."""
    names = [module for name, module in ARCHITECTURES.items() if hasattr(run.model.cfg, name)]
    modules = map(importlib.import_module, names)
    return [c for m in modules for c in m.callbacks(run.model, run.optimizer, run.cfg.seed)]


def prepare(run: TrainingRun, progress: Progress, checkpoints: Checkpoints) -> Prepared:
    """Choose kernels and micro-batch, check memory and disk, and print it all on one screen."""
    cfg, model, machine = run.cfg, run.model, run.machine
    left = run.num_steps - progress.step
    saves = 1 + (left // cfg.save_every if cfg.save_every else 0)
    disk = preflight.require_disk(
        checkpoints.folder,
        machine,
        checkpoints=checkpoints.disk_bytes(model, saves),
        rows=run.bytes_to_pack,
    )
    most = ""
    if run.prepared is not None:
        prepared, seconds = run.prepared, run.prepared.train_seconds * left / run.num_steps
    else:
        prepared = preflight.prepare(
            run.kernels,
            model,
            run.objective or model,
            run.optimizer,
            machine,
            run.batch_tokens,
            left * run.batch_tokens,
            cfg.device_batch_size,
            timed=run.max_seconds is not None,
        )
        seconds = prepared.train_seconds
    run.device_rows = prepared.device_rows
    if run.max_seconds is not None:
        seconds = max(0.0, min(seconds, run.max_seconds - progress.clock_seconds))
        most = f"{run.max_seconds:g} s of steps, at most "
    inputs = run.provenance["inputs"]
    preflight.screen(
        {
            **preflight.describe(model, machine, prepared.compiled),
            "disk": disk,
            "inputs": ", ".join(f"{name} {print_}" for name, print_ in inputs.items()),
            **run.loader.describe(run),
            "training": f"{most}{run.num_steps:,} steps; from step {progress.step:,}",
            "estimate": f"about {duration(seconds)} of training",
        },
        machine,
    )
    return prepared


def write_section(
    section: str,
    result: TrainingResult,
    values: Mapping[str, Any],
    began: Stopwatch,
    tables: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the record of a finished run, render the report, and print the next command."""
    run, checkpoint, machine = result.run, result.checkpoint, result.run.machine
    if checkpoint is not None:
        if run.kind != "rl":
            values = {**values, **result.values(began.memory_bytes)}
        with machine.working("writing the report"):
            records.write_record(
                section,
                run.settings,
                {**values, **{k: v for each in run.callbacks for k, v in each.values().items()}},
                records.Provenance(**run.provenance, outputs={run.kind: checkpoint.fingerprint}),
                records.Cost.since(began.seconds, machine),
                run.cfg.report_dir,
                tables=[*tables, *(table for each in run.callbacks for table in each.tables())],
                metrics=result.folder / METRICS_FILE,
                files=[checkpoint.folder],
            )
            report.update(run.cfg.report_dir)
        machine.print0(closing_lines(run.kind, checkpoint, machine))
    machine.close()
