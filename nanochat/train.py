"""
The training loop shared by all stages: gradients, update, evaluation, checkpoints, logging.

    loader -> micro-batches of a step -> loss and gradients -> sum over ranks -> check -> update

A script builds a `TrainingRun`; `train` starts or resumes it and runs it to completion. A step with
a non-finite loss or gradient is skipped.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import checkpoint, common, hardware, optim, preflight, records, report
from nanochat.anomaly import MAX_BAD_STEPS, AnomalyDetector, NonFiniteError, require_equal_ranks
from nanochat.checkpoint import Checkpoint, CheckpointManager, Progress, SavingConfig, Stage
from nanochat.common import EvaluationAborted, StopRequest, UsageError, WaitAborted
from nanochat.config import require_at_least
from nanochat.dataloader import MixedRows, Rows
from nanochat.distributed import DistConfig, DistContext
from nanochat.gpt import GPT
from nanochat.logger import METRICS_FILE, RunLog, duration
from nanochat.loss import IGNORE
from nanochat.optim import OptimConfig, ScheduleConfig
from nanochat.preflight import KernelConfig
from nanochat.tokenizer import Tokenizer

ShouldStop = Callable[[], bool]  # whether a stop was requested
RL_MOMENTUM = 0.95  # constant Muon momentum; other stages warm up to this value
UNTIMED_STEPS = 3  # first steps of each attempt, which compile and allocate
CHECK_RANKS_EVERY = 100  # steps between checks that the weights are equal on all ranks


@dataclass(frozen=True)
class TrainConfig:
    device_batch_size: int | None = None
    """Micro-batch size per device, in rows; does not change the result. Default: automatic."""
    model_tag: str = ""
    """Checkpoint folder. Default: d<depth> or the parent's."""
    seed: int = 0
    """Seed of initial weights and data order."""
    eval_every: int = 250
    """Evaluate every N steps; 0 = only at the end."""
    save_every: int = 0
    """Save a checkpoint every N steps; 0 = only at the end or when preempted."""
    skip_if_done: bool = False
    """Do nothing if the run has finished."""
    report_dir: str | None = None
    """Directory for records. Default: report/ under the base directory."""
    saving: SavingConfig = field(default_factory=SavingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    machine: DistConfig = field(default_factory=DistConfig)
    run: str = "dummy"
    """Weights & Biases run name; dummy = no tracking. WANDB_MODE is respected."""

    def __post_init__(self) -> None:
        common.require_name("model_tag", self.model_tag)
        require_at_least(self, device_batch_size=1, seed=0, eval_every=0, save_every=0)


# ---- Callbacks -----------------------------------------------------------------------------------


class Callback:
    """
    Base class of callbacks. Methods are called on every rank and do nothing by default; an
    exception ends the run. Returned metrics are logged.
    """

    every: int | None = None
    """Steps between calls of `evaluate`; 0 = only at the end. Default: --eval_every."""

    def start(self, run: "TrainingRun") -> None:
        """Called before the first step of each attempt."""
        self.run = run

    def before_step(self, step: int, share: float) -> None:
        """Called before each step and its evaluation; `share` is the completed fraction."""

    def forward_context(self, share: float) -> AbstractContextManager[None]:
        """Context manager around the forward and backward passes of a step."""
        return nullcontext()

    def after_backward(self, scale: float) -> dict[str, float]:
        """Called after gradient reduction; gradients times `scale` are means over the targets."""
        return {}

    def after_step(self, done: "Step", progress: Progress) -> None:
        """Called after each step is logged."""

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        """
        Called every `every` steps and, with `last`, after training. Returns metrics ("val_bpb" is
        to be minimized). May raise EvaluationAborted if `stopping()` becomes true.
        """
        return {}

    def values(self) -> dict[str, Any]:
        """Return values for the record of the finished run."""
        return {}

    def items(self) -> dict[str, Any]:
        """Return the item scores of values, by name, for the record of the finished run."""
        return {}

    def tables(self) -> list[dict[str, Any]]:
        """Return tables for the record of the finished run."""
        return []


# ---- Batches -------------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """Packed sequences (rows) for one forward and backward pass, on the device."""

    tokens: Tensor
    """(B, T) int64."""
    targets: Tensor
    """(B, T) int64, IGNORE for positions without loss."""
    num_targets: int
    """Number of non-ignored targets; in DPO, of pairs. The loss of a step is the mean over it."""
    weights: Tensor | None = None
    """(B, T) loss weights. Default: 1."""


class Loader(Protocol):
    """Source of batches; a batch depends only on the step (and, in RL, on the current model)."""

    batch_tokens: int
    """Tokens per step over all ranks; in DPO, an upper bound, in RL one on the generated tokens."""
    identity: dict[str, Any]
    """Settings that must match for a checkpoint to be resumed."""
    metrics: dict[str, float]
    """Metrics of the batch that was read last; a prefetch replaces them."""

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        """
        This rank's part of a step. Raises WaitAborted if `stopping()`, and UsageError or OSError
        if its data cannot be read.
        """
        ...

    def prefetch(self, step: int, device_rows: int, stopping: ShouldStop) -> None:
        """
        Prepare a later step as far as possible; called while the device computes. Raises like
        `micro_batches`. Default: nothing, because pairs are in memory, and RL answers need the
        updated model.
        """

    def row_names(self, step: int) -> str:
        """Rows of a step, for messages."""
        return f"of step {step}"

    # Lines of the startup summary
    def describe(self, run: "TrainingRun") -> dict[str, str]: ...


@dataclass(eq=False)
class RowLoader:
    """Packed rows in batches of `batch_tokens` tokens over all ranks."""

    rows: Rows | MixedRows
    batch_tokens: int
    seed: int
    machine: DistContext

    def __post_init__(self) -> None:
        self.num_rows = self.batch_tokens // self.rows.max_seq_len
        self.identity = {"rows": self.rows.recipe, "batch_tokens": self.batch_tokens}
        self.metrics: dict[str, float] = {}
        self.prefetched: dict[int, list[MicroBatch]] = {}  # by step

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        return self.prefetched.pop(step, None) or self.load(step, device_rows, stopping)

    def prefetch(self, step: int, device_rows: int, stopping: ShouldStop) -> None:
        self.prefetched = {step: self.load(step, device_rows, stopping)}

    def load(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        """Read this rank's rows of a step, and start copying them to the device."""
        self.rows.should_stop = stopping
        with self.machine.working("waiting for rows to be packed"):
            ids = self.rows.row_ids(step, self.num_rows, self.seed)
            mine = self.rows.read(np.split(ids, self.machine.world_size)[self.machine.rank])
        seen = ids[:, 0]
        same = 0 < seen.min() == seen.max()  # all rows seen equally often, at least once
        self.metrics = {"times_seen": int(seen[0])} if same else {}
        return split_micro_batches(*inputs_and_targets(mine), device_rows, self.machine.device)

    def row_names(self, step: int) -> str:
        return str(self.rows.row_ids(step, self.num_rows, self.seed).tolist())

    def describe(self, run: "TrainingRun") -> dict[str, str]:
        epochs = self.rows.epochs_for(run.num_steps * self.num_rows)
        repeats = "not all packed yet" if epochs is None else f"{epochs:.2f} epochs"
        T, n, world_size = self.rows.max_seq_len, run.device_rows, self.machine.world_size
        return {
            "rows": f"{self.rows.fingerprint} of {T:,} tokens, {repeats}",
            "batch": f"{self.batch_tokens:,} tokens, micro-batch {n} rows x {world_size} devices",
        }


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Stored rows (B, T + 1) -> tokens and targets, (B, T) int64 each.

    Every row starts with BOS. Targets are IGNORE for tokens stored as ~id, which have no loss
    (chat_packing.py), and for padding: a BOS after a BOS (packing.py).
    """
    stored = rows.astype(np.int64)
    ids = np.where(stored < 0, ~stored, stored)
    is_bos = ids == ids[:, :1]
    ignored = (stored[:, 1:] < 0) | (is_bos[:, 1:] & is_bos[:, :-1])
    return ids[:, :-1], np.where(ignored, IGNORE, ids[:, 1:])


def split_micro_batches(
    tokens: np.ndarray, targets: np.ndarray, device_rows: int, device: torch.device
) -> list[MicroBatch]:
    """Copy a batch to `device` and split it into micro-batches of `device_rows` rows."""
    x, y = to_device(tokens, device), to_device(targets, device)
    parts = [slice(i, i + device_rows) for i in range(0, len(tokens), device_rows)]
    return [MicroBatch(x[p], y[p], int((targets[p] >= 0).sum())) for p in parts]


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """
    Copy to the device. Each call pins new memory, so no later step can overwrite it. PyTorch would
    copy a slice synchronously, so the array is made contiguous first.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# ---- The loop ------------------------------------------------------------------------------------


@dataclass
class TrainingRun:
    """Definition of a training run. `train` adds callbacks and sets the last group of fields."""

    kind: Stage
    model: GPT
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    loader: Loader
    machine: DistContext
    cfg: TrainConfig
    tag: str
    """Checkpoint directory name."""
    num_steps: int
    """Steps to train; the maximum if `max_seconds` is set."""
    schedule: ScheduleConfig
    kernels: KernelConfig = KernelConfig()
    device_rows: int = 0
    """Micro-batch size per device, in rows. 0 = choose the largest that fits, by measuring."""
    objective: Any = None
    """Computes the loss. Default: the model."""
    callbacks: Sequence[Callback] = ()
    max_seconds: float | None = None
    """End after the step that reaches this many seconds of training, not counting
    evaluations and saves. The schedules then follow the elapsed time."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of each input, closest parent first."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that must match for a checkpoint to be resumed."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Further checkpoint state."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Script settings, for the log, checkpoint and record."""
    keep_optimizer: bool = True
    """Whether the final checkpoint includes the optimizer state."""
    background: Callable[[], AbstractContextManager] = nullcontext
    """Context manager around the training loop."""
    bytes_to_pack: int = 0
    """Bytes that `background` writes to disk."""

    progress: Progress = field(default_factory=Progress)
    """Training progress."""
    checkpoint: Checkpoint | None = None
    """Last checkpoint; None on all ranks but the main one."""
    memory_bytes: int = 0
    """Bytes per device for weights, gradients, optimizer state and activations, if measured."""
    save: Callable[..., None] = lambda progress, final=False: None
    """Saves a checkpoint; `final` waits until it is on disk. Call on every rank."""
    log: Callable[[int, dict[str, Any]], None] = lambda step, values: None
    stop: StopRequest = field(default_factory=StopRequest)
    failure: UsageError | OSError | None = None
    """Why this rank cannot load its data; it then stops as if asked to."""

    @property
    def batch_tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.loader.batch_tokens

    def stopping(self) -> bool:
        """Whether this rank was asked to stop or cannot load its data."""
        return self.stop.asked or self.failure is not None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let all ranks stop and save if data cannot be loaded, instead of losing the steps."""
        try:
            yield
        except WaitAborted:
            pass
        except (UsageError, OSError) as error:
            self.failure = error

    @property
    def tokens_per_second(self) -> float | None:
        """Median throughput of the latest timed steps; None if there are none."""
        seconds = self.progress.step_seconds
        return self.batch_tokens / statistics.median(seconds) if seconds else None

    def horizon(self, progress: Progress) -> float:
        """Expected total number of steps: num_steps, or fewer if `max_seconds` limits them."""
        if self.max_seconds is None or not progress.clock_seconds:
            return self.num_steps
        return min(self.num_steps, progress.step * self.max_seconds / progress.clock_seconds)

    def finished(self, progress: Progress) -> bool:
        """Whether training is complete."""
        return progress.step >= self.horizon(progress)


def run_loop(run: TrainingRun, progress: Progress) -> bool:
    """
    Train from `progress.step` to the end. Returns False if the run was stopped early.

    The final checkpoint is saved before the final evaluation. A stop request ends the current step
    (RL: after its answers) and, except in RL and DPO, the evaluation; then saves, unless no step
    was completed. Raises RankMismatchError; after saving the last good state, NonFiniteError, and
    UsageError or OSError for data that cannot be loaded; and UsageError, if steps remain but the
    weights are already averaged or the checkpoint has no optimizer state. Exits with UNEVALUATED if
    the final evaluation runs out of memory.
    """
    machine, first_step = run.machine, progress.step
    if not run.finished(progress):
        progress.require_resumable()
    detector = AnomalyDetector(progress.health, machine, spikes=run.kind != "rl")
    for callback in run.callbacks:
        callback.start(run)
    with run.stop:
        while not run.finished(progress):
            step, horizon = progress.step, run.horizon(progress)
            for callback in run.callbacks:
                callback.before_step(step, step / horizon)
            if step:
                evaluate(run, progress, last=False)
            if step % CHECK_RANKS_EVERY == 0:
                require_equal_ranks(dict(run.model.named_parameters()), machine, step)
            started = time.perf_counter()
            done = train_step(run, step, horizon)
            if done is None:
                why = "data cannot be loaded" if run.failure else "stop requested"
                if step > first_step:
                    run.save(progress, final=True)
                    machine.print0(f"{why}: saved step {step} (continue with --resume=auto)")
                else:
                    machine.print0(f"{why}: no step completed, nothing saved")
                if run.failure:
                    raise run.failure
                return False
            seconds = time.perf_counter() - started
            if run.max_seconds is not None:  # all ranks must end at the same step
                seconds = machine.sum(seconds)[0] / machine.world_size
            rows = partial(run.loader.row_names, step)
            verdict = detector.record(step, done.loss, done.norm, rows)
            flops = done.tokens * run.model.flops_per_token()
            timed = step - first_step >= UNTIMED_STEPS
            progress.add_step(done.loss if verdict == "good" else None, flops, seconds, timed)
            log_step(run, progress, done, seconds)
            for callback in run.callbacks:
                callback.after_step(done, progress)
            if step == first_step:
                gc.collect()
                gc.freeze()  # exclude long-lived objects from later collections
            if detector.bad_in_a_row >= MAX_BAD_STEPS and progress.loss_scale == 1.0:
                run.save(progress, final=True)
                raise NonFiniteError(
                    f"{MAX_BAD_STEPS} consecutive non-finite steps, the last at step {step}; the "
                    "last good state is saved. Inspect the logged rows or lower the learning rates"
                )
            progress.adjust_loss_scale(machine.dtype, finite=verdict != "bad")
            every = run.cfg.save_every
            if every and progress.step % every == 0 and not run.finished(progress):
                run.save(progress)
        for callback in run.callbacks:
            callback.before_step(progress.step, 1.0)
        if not progress.averaged:  # a resumed run may have no optimizer state
            average = getattr(run.optimizer, "take_average", lambda: False)  # golf's
            progress.averaged = average()
        progress.finished = True
        run.save(progress, final=True)
        try:
            return evaluate(run, progress, last=True)
        except torch.OutOfMemoryError as error:
            print(  # on any rank
                "out of memory in the final evaluation; the trained model is saved. Rerun with "
                "--resume=auto and a smaller --device_batch_size to repeat only the evaluation",
                flush=True,
            )
            raise SystemExit(common.UNEVALUATED) from error


def evaluate(run: TrainingRun, progress: Progress, last: bool) -> bool:
    """
    Run the callbacks' evaluations that are due and log the metrics. Returns False if a stop aborted
    them. A single process that runs out of memory before the end of training skips the rest.
    """
    metrics: dict[str, float] = {}
    try:
        for callback in run.callbacks:
            every = run.cfg.eval_every if callback.every is None else callback.every
            if last or (every and progress.step % every == 0):
                metrics |= callback.evaluate(progress.step, run.stopping, last)
    except EvaluationAborted:
        run.machine.print0(f"stop requested: evaluation at step {progress.step} aborted")
        return False
    except torch.OutOfMemoryError:
        if last or run.machine.world_size > 1:  # other ranks would wait
            raise
        print(f"out of memory: evaluation at step {progress.step} skipped", flush=True)
    if (value := metrics.get("val_bpb")) is not None:
        progress.last_val = value
        progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
    if metrics:
        run.log(progress.step, metrics)
    return True


class Step(NamedTuple):
    """Result of a training step; identical on every rank."""

    loss: float
    """Mean loss per target (nats); weighted by advantages in RL, per pair in DPO."""
    norm: float
    """Global gradient norm before clipping."""
    tokens: int
    """Tokens processed over all ranks, including padding, even if the update is skipped."""
    metrics: dict[str, float]
    """Metrics to log."""


def train_step(run: TrainingRun, step: int, horizon: float | None = None) -> Step | None:
    """
    Run one optimizer step of a run of `horizon` steps (default: num_steps). The update is skipped
    if the loss or gradient is not finite or all targets are ignored. Returns None, with nothing
    changed, if any rank was asked to stop or cannot load its data.
    """
    machine, optimizer, horizon = run.machine, run.optimizer, horizon or run.num_steps
    objective = run.objective or run.model
    divisor = run.batch_tokens / run.progress.loss_scale
    losses, micro_batches = [], []
    with ExitStack() as stack:
        with run.loading():
            micro_batches = run.loader.micro_batches(step, run.device_rows, run.stopping)
        for callback in run.callbacks:
            stack.enter_context(callback.forward_context(step / horizon))
        for each in micro_batches:
            if run.stopping():
                break
            weights = {} if each.weights is None else {"weights": each.weights}
            loss_sum = objective.loss(each.tokens, each.targets, **weights)
            (loss_sum / divisor).backward()  # `scale` below makes it a mean over all targets
            losses.append(loss_sum.detach())
    norm, gradients = optim.reduce_gradients(optimizer, machine)
    sums = machine.sum_on_device(
        sum(losses, torch.zeros((), device=machine.device)),
        sum(each.num_targets for each in micro_batches),
        sum(each.tokens.numel() for each in micro_batches),
        run.stopping(),
    )
    nats, count, tokens, stopped, norm = read_totals(sums, norm, machine)
    if stopped:
        optimizer.zero_grad()
        return None
    scale = divisor / count if count else 0.0
    loss, norm = nats / count if count else 0.0, norm * scale
    lr = optim.lr_factor(step, horizon, run.schedule)
    momentum = optim.muon_momentum(step, horizon, run.schedule)
    if run.kind == "rl":
        momentum = RL_MOMENTUM
    optim.set_schedule(optimizer, lr, momentum, optim.decay_factor(step, horizon))
    metrics = {"loss": loss, "lr": lr, "grad_norm": norm}
    metrics |= {**optim.learning_rates(optimizer), **run.loader.metrics}
    for callback in run.callbacks:
        metrics |= callback.after_backward(scale)
    if count and math.isfinite(loss + norm):
        clip = run.cfg.optim.grad_clip
        for grad in gradients:
            grad.mul_(scale * min(1.0, clip / norm if clip and norm else 1.0))
        optimizer.step()
    optimizer.zero_grad()
    if step + 1 < horizon:
        with run.loading():  # while the device updates the weights
            run.loader.prefetch(step + 1, run.device_rows, run.stopping)
    return Step(loss, norm, int(tokens), metrics)


def read_totals(sums: Tensor, norm: Tensor, machine: DistContext) -> list[float]:
    """Sums and gradient norm of a step as numbers; the only wait for the device in a step."""
    with machine.waiting("device synchronization"):
        return torch.cat((sums, norm.to(sums.dtype)[None])).tolist()


def log_step(run: TrainingRun, progress: Progress, done: Step, seconds: float) -> None:
    """Log a completed step."""
    machine, rate = run.machine, done.tokens / seconds
    values = {**done.metrics, "smooth_loss": progress.smooth_loss}
    values |= {"tokens_per_second": rate, "step_seconds": seconds}
    used = machine.utilization(rate * run.model.flops_per_token())
    if used is not None:
        values["mfu"] = used
    if run.max_seconds is not None:
        values["seconds_left"] = max(0.0, run.max_seconds - progress.clock_seconds)
    run.log(progress.step - 1, values)


# ---- Setup, training, record ---------------------------------------------------------------------


def skip_if_finished(
    section: str, settings: dict[str, Any], inputs: dict[str, str], cfg: Any, machine: DistContext
) -> bool:
    """
    Whether --skip_if_done is set and this stage is already recorded, with its checkpoint intact.
    `cfg` has skip_if_done and report_dir.
    """
    key = records.stage_key(settings, inputs)
    found = cfg.skip_if_done and machine.on_main(
        "verifying files", lambda: records.find_finished(section, key, cfg.report_dir) is not None
    )
    if found:
        machine.print0(f"{section}: finished already, skipped")
    return found


def train(run: TrainingRun) -> None:
    """
    Start or resume `run`, choose the micro-batch size, train, save and evaluate.

    Raises UsageError if the run cannot finish or another run is using its directory, and
    SystemExit(PREEMPTED) if it was stopped early, with its completed steps saved.
    """
    cfg, model, machine = run.cfg, run.model, run.machine
    run_id = machine.broadcast(records.inherited_run_id(run.inputs, cfg.report_dir))
    identity = {
        **run.loader.identity,
        "model": asdict(model.cfg),
        "seed": cfg.seed,
        "optim": asdict(cfg.optim),
        "schedule": asdict(run.schedule),
        **({"fp8": True} if machine.fp8 else {}),
        **run.identity,
    }
    state = {
        "stage": run.kind,
        "identity": identity,
        "settings": run.settings,
        "provenance": {"run_id": run_id, "seed": cfg.seed, "inputs": run.inputs},
        **run.state,
    }
    folder = checkpoint.stage_folder(run.kind) / run.tag
    with CheckpointManager(folder, machine, cfg.saving, run.keep_optimizer) as checkpoints:
        run.progress = checkpoints.begin(identity, model, run.optimizer, run.num_steps)
        run.progress.begin_loss_scale(machine.dtype)
        prepare(run, checkpoints)
        log: AbstractContextManager = nullcontext()
        if machine.is_main:
            total = run.num_steps if run.max_seconds is None else None
            log = RunLog(folder, cfg.run, run_id, run.settings, run.progress.step, total)
            run.log = log.log
        run.save = partial(checkpoints.save, model, run.optimizer, run.tokenizer, state)
        for module in checkpoint.architectures_of(model.cfg):
            run.callbacks = [*run.callbacks, *module.callbacks(model, run.optimizer, cfg.seed)]
        with log, run.background():
            done = run_loop(run, run.progress)
    run.checkpoint = checkpoints.saved
    if not done:
        machine.close()
        raise SystemExit(common.PREEMPTED)


def prepare(run: TrainingRun, checkpoints: CheckpointManager) -> None:
    """
    Check memory and disk space and print a summary; choose kernels and micro-batch size first,
    unless the run has `device_rows` (RL and DPO).
    """
    cfg, model, machine = run.cfg, run.model, run.machine
    left, folder = run.num_steps - run.progress.step, checkpoints.folder
    saves = 1 + (left // cfg.save_every if cfg.save_every else 0)
    size = checkpoints.disk_bytes(model, saves)
    disk = preflight.require_disk(folder, machine, checkpoints=size, rows=run.bytes_to_pack)
    if machine.fp8:
        preflight.enable_fp8(model, machine)
    seconds, most = None if run.device_rows else fit_rows(run, left), ""
    if run.max_seconds is not None and seconds is not None:
        seconds = max(0.0, min(seconds, run.max_seconds - run.progress.clock_seconds))
        most = f"{run.max_seconds:g} s of training, at most "
    lines = {
        **preflight.describe_run(model, machine, bool(run.progress.compiled)),
        "disk": disk,
        "inputs": ", ".join(map(" ".join, run.inputs.items())),
        **run.loader.describe(run),
        "training": f"{most}{run.num_steps:,} steps; from step {run.progress.step:,}",
    }
    if seconds is not None:
        lines["estimate"] = f"about {duration(seconds)} of training"
    machine.print0("\n".join(f"{name:<10} {text}" for name, text in lines.items()))


def fit_rows(run: TrainingRun, steps: int) -> float:
    """
    Choose kernels and micro-batch size, set up the model, and return the estimated seconds of the
    remaining `steps`. Raises UsageError if the requested micro-batch, or even a single row, does
    not fit in memory.
    """
    model, optimizer, machine = run.model, run.optimizer, run.machine
    trainable, requested = run.objective or model, run.cfg.device_batch_size
    T, device = model.cfg.max_seq_len, machine.device
    used = hardware.used_memory_bytes(device)
    rows = run.batch_tokens // T // machine.world_size
    grads = 4 * model.num_params()
    limit = rows if requested is not None else preflight.max_rows(model, trainable, machine, grads)
    device_rows = preflight.choose_device_rows(requested, rows, limit)
    guess = preflight.estimate_seconds(model, steps * run.batch_tokens, machine)
    kernels = run.kernels
    if run.progress.autotuned is None:
        run.progress.autotuned = preflight.choose_autotune(kernels, machine, guess)
    kernels = replace(kernels, autotune=run.progress.autotuned)
    if run.progress.compiled:
        guess = math.inf
    elif run.progress.compiled is False and kernels.compile is None:
        kernels = replace(kernels, compile=False)
    compiled = preflight.set_kernels(kernels, model, machine, guess, optimizer)
    run.progress.compiled = compiled
    mode = "compiling first" if compiled else "eager"
    machine.print0(f"preflight  measuring a micro-batch of {device_rows} rows ({mode}) ...")
    # tokens and targets of a step, and of the step that is prefetched meanwhile
    ids = torch.arange(4 * rows * T, device=device).view(4, rows, T) % model.cfg.vocab_size
    rehearse = partial(preflight.rehearse, trainable, optimizer, machine, ids)
    # same limit on all ranks: if only one ran out of memory, it would miss a collective
    available = hardware.free_memory_bytes(device) + hardware.used_memory_bytes(device)
    reserve = preflight.GPU_RESERVE if requested is None else 0
    with hardware.limit_memory(device, min(machine.gather(available)) - reserve):
        while not (measured := rehearse(device_rows)):
            torch.cuda.empty_cache()
            if device_rows == 1 or requested is not None:
                why = f"out of memory at device_batch_size={device_rows} on {machine.device_name}"
                fix = preflight.SMALLER if device_rows == 1 else preflight.LET_CHOOSE
                raise common.UsageError(why, fix)
            device_rows = preflight.choose_device_rows(None, rows, device_rows // 2)
            machine.print0(f"preflight  out of memory; trying {device_rows} rows")
    peak_bytes, micro_batch, update = measured  # the last two in seconds
    weights = sum(p.nbytes for p in model.parameters())
    state = sum(x.nbytes for moments in optimizer.state.values() for x in moments.values())
    memory = {"weights": weights, "gradients": grads, "optimizer": state}
    if device.type == "cuda":  # the rest is rounding by the allocator
        used = min(used, weights + state)
    memory["activations"] = max(0, peak_bytes - used - grads)  # including kernel workspaces
    total, free = sum(memory.values()), weights + state + hardware.free_memory_bytes(device)
    parts = ", ".join(f"{name} {n / 2**20:,.0f}" for name, n in memory.items())
    machine.print0(
        f"memory     {total / 2**20:,.0f} MiB per device at device_batch_size={device_rows}: "
        f"{parts}; {free / 2**20:,.0f} available"
    )
    run.device_rows, run.memory_bytes = device_rows, total
    return steps * (micro_batch * rows / device_rows + update)


def write_section(
    section: str, run: TrainingRun, values: dict[str, Any], tables: Sequence = ()
) -> None:
    """Write the record of a finished run, update the report and print the next commands."""
    saved, machine = run.checkpoint, run.machine
    if saved is not None:
        if run.kind in ("base", "mid", "sft"):  # steps of `batch_tokens` tokens, measured before
            rate, health = run.tokens_per_second, run.progress.health
            values = {
                **values,
                "Tokens per second": "-" if rate is None else f"{rate:,.0f}",
                "Batch tokens": run.batch_tokens,
                "Rows per device pass": run.device_rows,
                "Compute dtype": preflight.describe_dtype(machine),
                "Compiled": run.progress.compiled,
                "Estimated memory": f"{run.memory_bytes / 2**20:.2f}MiB",
                "Skipped steps": health.bad_steps,
                "Loss spikes": health.spikes,
            }
        origin, outputs = saved.state["provenance"], {run.kind: saved.fingerprint}
        spent = run.progress.add_cost(machine.world_size)
        with machine.working("writing the report"):
            records.write_record(
                section,
                run.settings,
                {**values, **{n: x for each in run.callbacks for n, x in each.values().items()}},
                records.Provenance(**origin, outputs=outputs),
                replace(records.Cost.so_far(machine), **spent),
                run.cfg.report_dir,
                items={n: item for each in run.callbacks for n, item in each.items().items()},
                tables=[*tables, *(table for each in run.callbacks for table in each.tables())],
                metrics=saved.folder.parent / METRICS_FILE,
                files=[saved.folder],
            )
            report.update(run.cfg.report_dir, renew=True)
        machine.print0(saved.next_commands(machine))
    machine.close()
