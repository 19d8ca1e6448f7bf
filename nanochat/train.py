"""
The training loop of every stage: gradients, update, evaluation, checkpoints, log.

    loader -> micro-batches of a step -> loss and gradients -> sum over ranks -> check -> update

A script describes a `TrainingRun`; `train` takes it from the checkpoint it resumes to its result. A
loss or gradient that is not finite never reaches the weights.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import checkpoint, common, hardware, optim, preflight, records, report
from nanochat.anomaly import MAX_BAD_STEPS, AnomalyDetector, NotFinite, require_equal_ranks
from nanochat.checkpoint import Checkpoint, Checkpoints, Progress, SavingConfig
from nanochat.common import Interrupted, StoppedWaiting, StopRequest
from nanochat.config import require_at_least
from nanochat.dataloader import MixedRows, Rows
from nanochat.distributed import DistConfig, DistContext
from nanochat.gpt import GPT
from nanochat.logger import METRICS_FILE, RunLog, duration
from nanochat.loss import Trainable
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import KernelConfig, Prepared
from nanochat.tokenizer import Tokenizer

ShouldStop = Callable[[], bool]  # whether the run was asked to stop
RL_MOMENTUM = 0.95  # of Muon; the other stages ramp up to it
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
        common.require_name("model_tag", self.model_tag)
        require_at_least(self, device_batch_size=1, seed=0, eval_every=0, save_every=0)


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

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        """
        Before each step but the first, and once with `last` when all is trained. Returns metrics,
        the one to minimize under "val_bpb". Raises Interrupted where `stopping()` became true.
        """
        return {}

    def values(self) -> dict[str, Any]:
        """Values for the record of the finished run."""
        return {}

    def tables(self) -> list[dict[str, Any]]:
        """Tables for that record."""
        return []


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


class Loader(Protocol):
    """Gives the batches of a run: a pure function of the step and, in RL, of the model."""

    batch_tokens: int
    """Tokens per step, all ranks together; in RL, the most that can be sampled."""
    identity: dict[str, Any]
    """What a checkpoint must agree with to be continued."""
    metrics: dict[str, float]
    """Of the latest step, to be logged."""

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        """This rank's share of a step. Raises StoppedWaiting where `stopping()`."""
        ...

    # Which rows a step trains on, for messages
    def row_names(self, step: int) -> str: ...

    # Lines for the screen before a run
    def describe(self, run: "TrainingRun") -> dict[str, str]: ...


@dataclass(eq=False)
class RowLoader:
    """Packed rows in batches of `batch_tokens` tokens over all ranks."""

    rows: Rows | MixedRows
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Rows as they are stored -> tokens and targets, both (B, T) int64."""
    batch_tokens: int
    seed: int
    machine: DistContext

    def __post_init__(self) -> None:
        self.num_rows = self.batch_tokens // self.rows.max_seq_len
        self.identity = {"rows": self.rows.recipe, "batch_tokens": self.batch_tokens}

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        self.rows.should_stop = stopping
        share = (step, self.num_rows, self.seed)
        with self.machine.working("waiting for rows that are being packed"):
            mine = self.rows.batch(*share, self.machine.rank, self.machine.world_size)
        seen = self.rows.row_ids(*share)[:, 0]
        same = 0 < seen.min() == seen.max()  # how often every row of the step came before
        self.metrics: dict[str, float] = {"times_seen": int(seen[0])} if same else {}
        return split_micro_batches(*self.split(mine), device_rows, self.machine.device)

    def row_names(self, step: int) -> str:
        return str(self.rows.row_ids(step, self.num_rows, self.seed).tolist())

    def describe(self, run: "TrainingRun") -> dict[str, str]:
        epochs = self.rows.epochs_for(run.num_steps * self.num_rows)
        repeats = "not all packed yet" if epochs is None else f"{epochs:.2f} epochs"
        T, n, world_size = self.rows.max_seq_len, run.device_rows, self.machine.world_size
        return {
            "rows": f"{self.rows.fingerprint} of {T:,} tokens, {repeats}",
            "batch": f"{self.batch_tokens:,} tokens, {n} rows at a time on {world_size} devices",
        }


def split_micro_batches(
    tokens: np.ndarray, targets: np.ndarray, device_rows: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of `device_rows` rows, copied to `device` all at once."""
    x, y = to_device(tokens, device), to_device(targets, device)
    counts = (targets >= 0).sum(axis=1)
    parts = [slice(i, i + device_rows) for i in range(0, len(tokens), device_rows)]
    return [MicroBatch(x[p], y[p], int(counts[p].sum())) for p in parts]


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
    tokenizer: Tokenizer
    optimizer: MuonAdamW
    loader: Loader
    machine: DistContext
    cfg: TrainConfig
    tag: str
    """Name of the folder of checkpoints."""
    num_steps: int
    """Steps to train; the most there can be where `max_seconds` ends the run before."""
    schedule: ScheduleConfig
    kernels: KernelConfig = KernelConfig()
    prepared: Prepared | None = None
    """Kernels and micro-batch where they are not to be chosen (RL), for a run from step 0."""
    objective: Trainable | None = None
    """Gives the loss. Default: the model."""
    callbacks: Sequence[Callback] = ()
    max_seconds: float | None = None
    """Training ends with the step that reaches this many seconds of steps, evaluations and saves
    not counted. The schedules then follow the clock."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> fingerprint of what is read, the closest parent first."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What else a checkpoint must agree with to be continued."""
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

    progress: Progress = field(default_factory=Progress)
    """As `train` leaves it."""
    checkpoint: Checkpoint | None = None
    """The last one; None on the ranks that do not write."""
    device_rows: int = 1
    """Rows per micro-batch on one device."""
    save: Callable[..., None] = lambda progress, final=False: None
    """Writes a checkpoint; `final` returns only when it is safe on disk. Called on every rank."""
    log: Callable[[int, dict[str, Any]], None] = lambda step, values: None
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def batch_tokens(self) -> int:
        """Tokens per step, all ranks together."""
        return self.loader.batch_tokens

    def stopping(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.stop.asked

    @property
    def tokens_per_second(self) -> float | None:
        """At the median of the latest timed steps; None where there were none."""
        seconds = self.progress.step_seconds
        return self.batch_tokens / statistics.median(seconds) if seconds else None

    def values(self) -> dict[str, Any]:
        """Of the callbacks, for the record."""
        return {name: value for each in self.callbacks for name, value in each.values().items()}

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
    checkpoint of the finished run holds no optimizer state. Out of memory in the final evaluation,
    it exits with UNEVALUATED.
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
                run.save(progress, final=True)
                machine.print0(f"asked to stop: saved step {step}")
                return False
            seconds = time.perf_counter() - started
            if run.max_seconds is not None:  # all ranks must agree on when to end
                seconds = machine.sum(seconds)[0] / machine.world_size
            rows = partial(run.loader.row_names, step)
            is_good = detector.record(step, done.loss, done.norm, rows) == "good"
            flops = done.tokens * run.model.flops_per_token()
            timed = step - first_step >= UNTIMED_STEPS
            progress.add_step(done.loss if is_good else None, flops, seconds, timed)
            log_step(run, progress, done, seconds)
            for callback in run.callbacks:
                callback.after_step(done, progress)
            if step == first_step:
                gc.collect()
                gc.freeze()  # what is alive now stays: keep it out of every later collection
            if detector.bad_in_a_row >= MAX_BAD_STEPS:
                run.save(progress, final=True)
                raise NotFinite(
                    f"{MAX_BAD_STEPS} steps in a row were not finite, the last one step {step}; "
                    "what was before them is saved. Look at those rows, or lower learning rates"
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
        try:
            return evaluate(run, progress, last=True)
        except torch.OutOfMemoryError as error:
            machine.print0(
                "the model is trained and saved, but memory ran out in its last evaluation; "
                "--resume=auto repeats that alone, best with a smaller --device_batch_size"
            )
            raise SystemExit(common.UNEVALUATED) from error


def evaluate(run: TrainingRun, progress: Progress, last: bool) -> bool:
    """Measure, keep the smallest validation value, log. False when asked to stop instead."""
    metrics: dict[str, float] = {}
    try:
        for callback in run.callbacks:
            metrics |= callback.evaluate(progress.step, run.stopping, last)
    except Interrupted:
        run.machine.print0(f"asked to stop: evaluation at step {progress.step} aborted")
        return False
    if (value := metrics.get("val_bpb")) is not None:
        progress.last_val = value
        progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
    if metrics:
        run.log(progress.step, metrics)
    return True


class Step(NamedTuple):
    """Result of a step; the same on every rank."""

    loss: float
    """Mean nats per counted target."""
    norm: float
    """Of the gradient."""
    tokens: int
    """Tokens processed, also in skipped steps, padding included, all ranks together."""
    metrics: dict[str, float]
    """What is to be logged of it."""


def train_step(run: TrainingRun, step: int, horizon: float | None = None) -> Step | None:
    """
    One optimizer step of a run of `horizon` steps, by default its num_steps. There is no update
    where loss or gradient are not finite or no target counts. None where a rank was asked to stop:
    it is as if the step had not begun.
    """
    machine, optimizer, horizon = run.machine, run.optimizer, horizon or run.num_steps
    objective = run.objective or run.model
    losses = []
    with ExitStack() as stack:
        try:
            micro_batches = run.loader.micro_batches(step, run.device_rows, run.stopping)
        except StoppedWaiting:
            micro_batches = []
        for callback in run.callbacks:
            stack.enter_context(callback.forward_context(step / horizon))
        for each in micro_batches:
            if run.stopping():
                break
            weights = {} if each.weights is None else {"weights": each.weights}
            loss_sum = objective.loss(each.tokens, each.targets, **weights)
            # a constant divisor, so that gradients have a fixed scale in bf16; `scale` corrects it
            (loss_sum / run.batch_tokens).backward()
            losses.append(loss_sum.detach())
    nats, count, tokens, stopped = machine.sum(
        float(sum(losses)),
        float(sum(each.num_targets for each in micro_batches)),
        float(sum(each.tokens.numel() for each in micro_batches)),
        float(run.stopping()),
    )
    if stopped:
        optimizer.drop_gradients()
        return None
    norm = optimizer.reduce_gradients()
    scale = run.batch_tokens / count if count else 0.0  # exactly the mean over counted targets
    loss, norm = nats / count if count else 0.0, norm * scale
    lr = optim.lr_factor(step, horizon, run.schedule)
    metrics = {"loss": loss, "lr": lr, "grad_norm": norm, **run.loader.metrics}
    for callback in run.callbacks:
        metrics |= callback.after_backward(scale)
    if count and math.isfinite(loss + norm):
        if run.cfg.optim.grad_clip and norm > run.cfg.optim.grad_clip:
            scale *= run.cfg.optim.grad_clip / norm
        momentum = RL_MOMENTUM if run.kind == "rl" else optim.muon_momentum(step, horizon)
        optimizer.step(lr, momentum, optim.decay_factor(step, horizon), scale)
    else:
        optimizer.drop_gradients()
    machine.synchronize()
    return Step(loss, norm, int(tokens), metrics)


def log_step(run: TrainingRun, progress: Progress, done: Step, seconds: float) -> None:
    """Log the step just done."""
    machine, rate = run.machine, done.tokens / seconds
    values = {**done.metrics, "smooth_loss": progress.smooth_loss}
    values |= {"tokens_per_second": rate, "step_seconds": seconds}
    used = hardware.utilization(
        rate * run.model.flops_per_token(), machine.device, machine.world_size
    )
    if used is not None:
        values["mfu"] = used
    if run.max_seconds is not None:
        values["seconds_left"] = max(0.0, run.max_seconds - progress.clock_seconds)
    run.log(progress.step - 1, values)


# ---- From an opened model and its rows to a record -----------------------------------------------


@dataclass(frozen=True)
class Stopwatch:
    """Made when a script begins, for the cost in its record."""

    seconds: float = field(default_factory=time.perf_counter)
    memory_bytes: int = field(
        default_factory=lambda: hardware.used_memory_bytes(torch.device("cpu"))
    )


def finished_before(
    section: str, settings: dict[str, Any], inputs: dict[str, str], cfg: Any, machine: DistContext
) -> bool:
    """
    Whether --skip_if_done finds this very stage recorded and its checkpoint intact; `cfg` has
    skip_if_done and report_dir.
    """
    key = records.stage_key(settings, inputs)
    found = cfg.skip_if_done and machine.on_main(
        "verifying files", lambda: records.finished(section, key, cfg.report_dir) is not None
    )
    if found:
        machine.print0(f"{section}: finished already, skipped")
    return found


def train(run: TrainingRun) -> None:
    """
    Resume or begin, check what fits, train, save and evaluate: `run` is complete then.

    Raises UsageError where the run cannot finish, or where another one writes to its folder;
    SystemExit(PREEMPTED) when it was asked to stop: saved, not finished.
    """
    cfg, model, machine = run.cfg, run.model, run.machine
    run_id = machine.broadcast(records.inherited_run_id(run.inputs, cfg.report_dir))
    identity = {
        **run.loader.identity,
        "model": asdict(model.cfg),
        "seed": cfg.seed,
        "optim": asdict(cfg.optim),
        "schedule": asdict(run.schedule),
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
    with Checkpoints(folder, machine, cfg.saving, run.keep_optimizer) as checkpoints:
        run.progress = checkpoints.begin(identity, model, run.optimizer, run.num_steps)
        run.prepared = prepare(run, checkpoints)
        log: AbstractContextManager = nullcontext()
        if machine.is_main:
            total = run.num_steps if run.max_seconds is None else None
            log = RunLog(folder, cfg.run, run_id, run.settings, run.progress.step, total)
            run.log = log.log
        run.save = partial(checkpoints.save, model, run.optimizer, run.tokenizer, state)
        if module := checkpoint.architecture_of(model.cfg):
            more = module.callbacks(model, run.optimizer, cfg.seed)
            run.callbacks = [*run.callbacks, *more]
        with log, run.background():
            done = run_loop(run, run.progress)
    run.checkpoint = checkpoints.saved
    if not done:
        machine.close()
        raise SystemExit(common.PREEMPTED)


def prepare(run: TrainingRun, checkpoints: Checkpoints) -> Prepared:
    """Choose kernels and micro-batch, check memory and disk, and print it all on one screen."""
    cfg, model, machine = run.cfg, run.model, run.machine
    left, folder = run.num_steps - run.progress.step, checkpoints.folder
    saves = 1 + (left // cfg.save_every if cfg.save_every else 0)
    size = checkpoints.disk_bytes(model, saves)
    disk = preflight.require_disk(folder, machine, checkpoints=size, rows=run.bytes_to_pack)
    prepared = run.prepared or fit_rows(run, left)
    run.device_rows, seconds, most = prepared.device_rows, prepared.train_seconds, ""
    if run.prepared:
        seconds *= left / run.num_steps
    if run.max_seconds is not None:
        seconds = max(0.0, min(seconds, run.max_seconds - run.progress.clock_seconds))
        most = f"{run.max_seconds:g} s of steps, at most "
    lines = {
        **preflight.describe(model, machine, prepared.compiled),
        "disk": disk,
        "inputs": ", ".join(map(" ".join, run.inputs.items())),
        **run.loader.describe(run),
        "training": f"{most}{run.num_steps:,} steps; from step {run.progress.step:,}",
        "estimate": f"about {duration(seconds)} of training",
    }
    machine.print0("\n".join(f"{name:<10} {text}" for name, text in lines.items()))
    return prepared


def fit_rows(run: TrainingRun, steps: int) -> Prepared:
    """
    Choose kernels and micro-batch for the `steps` left of a run, and set its model up for them.
    Raises UsageError where not even one row fits.
    """
    model, optimizer, machine = run.model, run.optimizer, run.machine
    trainable, asked = run.objective or model, run.cfg.device_batch_size
    T, device = model.cfg.max_seq_len, machine.device
    used = hardware.used_memory_bytes(device)
    rows = run.batch_tokens // T // machine.world_size
    limit = rows if asked is not None else preflight.most_rows(model, trainable, machine)
    device_rows = preflight.choose_device_rows(asked, rows, limit)
    guess = preflight.estimate_seconds(model, steps * run.batch_tokens, machine)
    compiled = preflight.set_kernels(run.kernels, model, machine, guess, optimizer)
    mode = "compiles first" if compiled else "eager"
    machine.print0(f"preflight  measuring {device_rows} rows at a time ({mode}) ...")
    # tokens and targets of a whole step, twice: a step may reorder its rows
    ids = torch.arange(4 * rows * T, device=device).view(4, rows, T) % model.cfg.vocab_size
    # on a CPU the update is not measured (what undoes it takes more memory than it does), but where
    # the run ends by the clock: compiling the update must not be part of it
    update = device.type == "cuda" or run.max_seconds is not None
    rehearse = partial(preflight.rehearse, trainable, optimizer, machine, ids, update)
    # the same limit on all ranks: one that alone ran out of memory would miss a collective
    available = hardware.free_memory_bytes(device) + hardware.used_memory_bytes(device)
    reserve = preflight.GPU_RESERVE if asked is None else 0
    with hardware.limit_memory(device, min(machine.gather(available)) - reserve):
        while not (measured := rehearse(device_rows)):
            torch.cuda.empty_cache()
            if device_rows == 1 or asked is not None:
                why = f"{device_rows} rows at a time do not fit on {machine.device_name}"
                fix = preflight.SMALLER if device_rows == 1 else preflight.LET_CHOOSE
                raise common.UsageError(why, fix)
            device_rows = preflight.choose_device_rows(None, rows, device_rows // 2)
            machine.print0(f"preflight  too little memory for that; trying {device_rows} rows")
    peak_bytes, seconds = measured
    weights = 4 * model.num_params()  # and their gradients
    state = sum(4 * x.numel() for x in optimizer.local_state().values())
    memory = {"weights": weights, "gradients": weights, "optimizer": state}
    memory["activations"] = max(0, peak_bytes - used - weights)  # and what kernels hold
    total, free = sum(memory.values()), weights + state + hardware.free_memory_bytes(device)
    parts = ", ".join(f"{name} {n / 2**20:,.0f}" for name, n in memory.items())
    machine.print0(
        f"memory     {total / 2**20:,.0f} MiB a device with {device_rows} rows at a time: {parts}; "
        f"{free / 2**20:,.0f} available"
    )
    return Prepared(device_rows, compiled, total, seconds * steps * rows / device_rows)


def write_section(
    section: str, run: TrainingRun, values: dict[str, Any], began: Stopwatch, tables: Sequence = ()
) -> None:
    """Write the record of a finished run, render the report, and print the next command."""
    saved, machine, prepared = run.checkpoint, run.machine, run.prepared
    if saved is not None and prepared is not None:
        if run.kind != "rl":
            rate, health = run.tokens_per_second, run.progress.health
            values = {
                **values,
                "Tokens per second": "-" if rate is None else f"{rate:,.0f}",
                "Batch tokens": run.batch_tokens,
                "Rows per device pass": prepared.device_rows,
                "Compute dtype": str(machine.dtype).removeprefix("torch."),
                "Compiled": prepared.compiled,
                "Stated memory": f"{prepared.memory_bytes / 2**20:.2f}MiB",
                "Memory after imports": f"{began.memory_bytes / 2**20:.2f}MiB",
                "Skipped steps": health.bad_steps,
                "Loss spikes": health.spikes,
            }
        origin, outputs = saved.state["provenance"], {run.kind: saved.fingerprint}
        with machine.working("writing the report"):
            records.write_record(
                section,
                run.settings,
                {**values, **run.values()},
                records.Provenance(**origin, outputs=outputs),
                records.Cost.since(began.seconds, machine),
                run.cfg.report_dir,
                tables=[*tables, *(table for each in run.callbacks for table in each.tables())],
                metrics=saved.folder.parent / METRICS_FILE,
                files=[saved.folder],
            )
            report.update(run.cfg.report_dir)
        machine.print0(saved.next_commands(machine))
    machine.close()
