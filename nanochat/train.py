"""
What all training scripts share: batches, gradients, updates, and the run around the loop.

    packed rows -> Run.load -> Batch -> Run.backward -> gradients -> Run.update -> weights
    Run: lock, resume -> steps -> log, save, stop signal -> finish: record and report

The loop itself stands in the script of each stage:

    with run:
        for step in run.steps():  # from the last checkpoint on
            if run.due(cfg.eval_every):
                run.log(...)
            if run.finished:  # trained and saved; only the last evaluation was left
                break
            run.backward(run.load(rows))
            run.update(learning rate factor, Muon momentum, weight decay factor)
    run.finish("Base model training", values)
"""

import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nanochat import checkpoint, common, hardware, optim, records, report
from nanochat.attention import choose_backend
from nanochat.checkpoint import (
    Checkpoint,
    CheckpointManager,
    NonFiniteError,
    Progress,
    SavingConfig,
    Stage,
    require_equal_ranks,
)
from nanochat.common import StopRequest, StopRequested, UsageError
from nanochat.config import require_at_least
from nanochat.distributed import DistConfig, DistContext
from nanochat.fp8 import enable_fp8
from nanochat.gpt import GPT
from nanochat.logger import METRICS_FILE, RunLog
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.rows import Rows, inputs_and_targets
from nanochat.tokenizer import Tokenizer

UNTIMED_STEPS = 3  # first steps of each attempt, which compile and allocate
CHECK_RANKS_EVERY = 100  # steps between checks that the weights are equal on all ranks
MAX_BAD_STEPS = 5  # consecutive non-finite steps, each skipped, that stop the run


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
        if self.seed >= 1 << 63:
            raise ValueError(f"seed {self.seed} is too large; use one below 2^63")


# ---- Kernels: what the device can do decides -----------------------------------------------------


COMPILE_FLOPS = 1.5e13  # from which compilation pays on a CPU: 3 minutes of training at depth 4
AUTOTUNED = ("H100", "H200")  # +2.5% at depth 16 on H100 (nanochat's pull request 747)
AUTOTUNE_SECONDS = 3600.0  # shortest run that is autotuned by default


@dataclass(frozen=True)
class KernelConfig:
    compile: bool | None = None
    """Compile the model with torch.compile. Default: on a GPU, and on a CPU if the run is long
    enough to amortize compile time."""
    autotune: bool | None = None
    """Let the compiler time several kernels for each matmul: minutes of compilation. Default: in
    runs of over an hour on the GPUs where it was measured to pay, H100 and H200."""


def set_kernels(
    cfg: KernelConfig, model: GPT, flops: float, dist: DistContext, optimizer: Any = None
) -> KernelConfig:
    """
    Choose the attention kernel and compile, if worthwhile for a run of `flops`. Returns what was
    chosen. Raises UsageError if a GPU would train without the compiler that it needs.
    """
    compiled, autotuned = cfg.compile, cfg.autotune
    if compiled is None:
        compiled = dist.device.type == "cuda" or (
            dist.device.type == "cpu" and flops > COMPILE_FLOPS and hardware.has_compiler()
        )
        if compiled and not hardware.has_compiler():
            raise UsageError(
                "torch.compile needs a C++ compiler and Python's headers",
                "apt-get install g++ python3-dev, or use --compile=0, which is several times "
                "slower",
            )
    if autotuned is None:
        peak = hardware.peak_flops(dist.device_name) or math.inf
        seconds = flops / (peak * hardware.GPU_EFFICIENCY * dist.world_size)
        known = any(name in dist.device_name for name in AUTOTUNED)
        autotuned = known and seconds > AUTOTUNE_SECONDS
    backend = choose_backend(dist, compiled)
    for block in model.blocks:
        block.attention.backend = backend
    if compiled:
        model.compile(mode="max-autotune-no-cudagraphs" if autotuned else None)
    if compiled and isinstance(optimizer, MuonAdamW):
        optimizer.compiled = True
    return KernelConfig(compiled, autotuned)


def prepare_scoring(
    cfg: KernelConfig, model: GPT, tokens: int, gpu_rows: int, dist: DistContext
) -> int:
    """Set kernels to score `tokens` tokens. Returns the default number of rows per forward pass."""
    set_kernels(cfg, model, tokens * model.flops_per_token() / 3, dist)  # no backward pass
    on_cpu = dist.device.type == "cpu"
    return max(1, CPU_TOKENS // model.cfg.max_seq_len) if on_cpu else gpu_rows


# ---- Micro-batch size ----------------------------------------------------------------------------


CPU_TOKENS = 8192  # per CPU micro-batch; larger is no faster (measured: d4, 2026-11)
COMPILED_SHARE = 0.7  # of eager memory per row; measured: 0.73 at d8, 0.95 at d24 (torch 2.15)
GPU_RESERVE = 2 << 30  # bytes for NCCL and cuBLAS, which allocate in the first steps


def choose_device_rows(asked: int | None, rows: int, limit: int) -> int:
    """
    Micro-batch size: the largest divisor of `rows` (rows per rank and step) that is at most
    `limit`. Raises ValueError suggesting a divisor if `asked` is not one.
    """
    most = max(1, limit) if asked is None else asked
    best = max(d for d in range(1, rows + 1) if rows % d == 0 and d <= most)
    if asked is not None and best < min(asked, rows):
        share = f"{rows} rows per device and step"
        raise ValueError(f"device_batch_size {asked} does not divide {share}; use {best}")
    return best


def rows_to_try(model: GPT, dist: DistContext) -> int:
    """
    Micro-batch size to try first, equal on all ranks: on a CPU, about CPU_TOKENS tokens; on a GPU
    or MPS, what an eager forward pass of one and two rows says would fit.
    """
    T, device = model.cfg.max_seq_len, dist.device
    if device.type == "cpu":
        return max(1, CPU_TOKENS // T)
    used = []
    with suppress(torch.OutOfMemoryError):
        for rows in (1, 2):  # the difference is the activation memory per row
            ids = torch.zeros(rows, T, dtype=torch.int64, device=device)
            loss = model.loss(ids, ids)
            used.append(hardware.used_memory_bytes(device))
            del loss
    room = hardware.free_memory_bytes(device) - GPU_RESERVE - 4 * model.num_params()  # gradients
    each = max(1, used[1] - used[0]) if len(used) == 2 else room / 2
    each *= COMPILED_SHARE if device.type == "cuda" else 1
    most = CPU_TOKENS // T if device.type == "mps" else room
    return int(min(dist.gather(max(1, int(min(room / each, most))))))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device, or the allocator of the CPU, has no memory left."""
    lacking = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return lacking or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


# ---- Batches -------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Rows for forward and backward passes, on the device. All tensors are (B, T)."""

    tokens: Tensor
    targets: Tensor
    """IGNORE for positions without loss."""
    counts: Sequence[int]
    """Number of non-ignored targets of each row."""
    segments: Tensor | None = None
    """Index of each token's document within its row, if attention stays within documents."""
    weights: Tensor | None = None
    """Loss weights. Default: 1."""
    ids: Any = ()
    """The rows, for messages."""

    def split(self, rows: int) -> Iterator["Batch"]:
        """Micro-batches of `rows` rows."""
        for first in range(0, len(self.counts), rows):
            part = slice(first, first + rows)
            tokens, targets, counts, *others = self
            masks = (None if x is None else x[part] for x in others[:2])
            yield Batch(tokens[part], targets[part], counts[part], *masks)


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """
    Copy to the device. Each call pins new memory, so no later step can overwrite it. PyTorch would
    copy a slice synchronously, so the array is made contiguous first.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def document_segments(tokens: Tensor, bos_id: int) -> Tensor:
    """Index of each token's document within its row, (B, T); BOS starts a document."""
    return (tokens == bos_id).cumsum(dim=1)


# ---- The run around a training loop --------------------------------------------------------------


class Totals(NamedTuple):
    """Sums of a step over micro-batches and ranks; identical on every rank."""

    loss: float
    """Mean loss per target (nats)."""
    norm: float
    """Global gradient norm before clipping."""
    tokens: int
    """Tokens processed, including padding."""
    scale: float
    """Gradients times `scale` are means over all targets; 0 if there are none."""
    gradients: list[Tensor]
    """Reduced gradients; under MuonAdamW, this rank's slices."""


class Run:
    """
    The run around a training loop: lock and resume, steps, log, saves, stop signal, record.

    stage, tag    the checkpoints are <stage>_checkpoints/<tag>/
    num_steps     steps to train; a loop with a time limit lowers it to end the run
    batch_tokens  tokens of a step over all ranks (in DPO and RL, the most it can have)
    kernels       kernels to set; None = an eager model
    settings      the script's flags, for log, checkpoint and record
    inputs        name -> fingerprint of each input, closest parent first
    identity      further settings that must match for a checkpoint to be resumed
    state         further checkpoint state

    As a context manager it leaves no step behind: a stop request, five bad steps in a row, data
    that cannot be read or a lack of memory end the loop after saving the completed steps. A stop
    exits with status PREEMPTED, too little memory for the last evaluation with UNEVALUATED. Raises
    UsageError if the run cannot be extended or another one is using its folder, and ValueError if
    the checkpoint to resume has other settings or `device_batch_size` does not divide the batch.
    """

    def __init__(
        self,
        stage: Stage,
        tag: str,
        cfg: TrainConfig,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        dist: DistContext,
        *,
        num_steps: int,
        batch_tokens: int,
        kernels: KernelConfig | None,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str],
        identity: Mapping[str, Any],
        state: Mapping[str, Any],
        keep_optimizer: bool = True,
    ):
        self.stage, self.tag, self.cfg = stage, tag, cfg
        self.model, self.optimizer, self.tokenizer, self.dist = model, optimizer, tokenizer, dist
        self.num_steps, self.batch_tokens, self.kernels = num_steps, batch_tokens, kernels
        self.settings, self.inputs, self.keep_optimizer = settings, inputs, keep_optimizer
        self.identity = {
            "model": asdict(model.cfg),
            "batch_tokens": batch_tokens,
            "seed": cfg.seed,
            "optim": asdict(cfg.optim),
            **({"fp8": True} if dist.fp8 else {}),
            **identity,
        }
        self.state = {"stage": stage, "identity": self.identity, "settings": settings, **state}
        self.rows = max(1, batch_tokens // model.cfg.max_seq_len // dist.world_size)  # per rank
        self.device_rows = cfg.device_batch_size or 1
        if kernels is not None:
            self.device_rows = choose_device_rows(cfg.device_batch_size, self.rows, self.rows)
        self.stop = StopRequest()
        self.progress = Progress()
        self.logger: RunLog | None = None
        self.checkpoint: Checkpoint | None = None
        self.bad_in_a_row, self.failure = 0, None
        self.discard()

    # ---- beginning and end -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        cfg, dist, model = self.cfg, self.dist, self.model
        run_id = dist.broadcast(records.inherited_run_id(self.inputs, cfg.report_dir))
        origin = {"run_id": run_id, "seed": cfg.seed, "inputs": self.inputs}
        self.state["provenance"] = origin
        folder = checkpoint.stage_folder(self.stage) / self.tag
        with ExitStack() as stack:
            manager = CheckpointManager(folder, dist, cfg.saving, self.keep_optimizer)
            self.checkpoints = stack.enter_context(manager)
            self.progress = manager.begin(self.identity, model, self.optimizer, self.num_steps)
            self.first_step = self.progress.step
            self.note_code(manager.resumed)
            self.progress.begin_loss_scale(dist.dtype)
            if self.kernels is not None:
                self.choose_kernels(self.kernels)
            self.describe()
            stack.enter_context(self.stop)
            self.open = stack.pop_all()
        return self

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics to the log. The first entry moves an earlier run with this name aside."""
        if self.logger is None and self.dist.is_main:
            self.checkpoints.move_aside()
            name, run_id = self.cfg.run, self.state["provenance"]["run_id"]
            about = (name, run_id, self.settings, self.first_step, self.num_steps)
            self.logger = self.open.enter_context(RunLog(self.checkpoints.folder, *about))
        if self.logger and metrics:
            self.logger.log(step, metrics)

    def note_code(self, resumed: Checkpoint | None) -> None:
        """Note code and commit of this attempt; report what changed since the last one."""
        code = records.git_state()
        commit = code["commit"] + " (dirty)" * bool(code["dirty"])
        earlier = resumed.state["commits"] if resumed else []
        self.state |= {"code": records.code_digests(), "commits": [*earlier, commit]}
        if resumed and (changed := records.changed_code(resumed.state["code"])):
            self.dist.print0(f"resuming with changed code: {', '.join(changed)}")

    def choose_kernels(self, kernels: KernelConfig) -> None:
        """Set kernels and micro-batch size; a resumed run keeps its kernels."""
        progress, dist = self.progress, self.dist
        if progress.compiled is not None and kernels.compile is None:
            kernels = KernelConfig(progress.compiled, progress.autotuned)
        if dist.fp8:
            enable_fp8(self.model, dist.device)
        if self.cfg.device_batch_size is None:
            limit = rows_to_try(self.model, dist)
            self.device_rows = choose_device_rows(None, self.rows, limit)
        left = (self.num_steps - progress.step) * self.batch_tokens
        flops = left * self.model.flops_per_token()
        chosen = set_kernels(kernels, self.model, flops, dist, self.optimizer)
        progress.compiled, progress.autotuned = chosen.compile, chosen.autotune

    def describe(self) -> None:
        """Print what is about to be trained, and where."""
        model, dist, cfg = self.model, self.dist, self.model.cfg
        mode = "compiled" if self.progress.compiled else "eager"
        lines = {
            "device": f"{dist.device_name} x {dist.world_size}, {describe_dtype(dist)}",
            "kernels": f"attention {model.blocks[0].attention.backend}, {mode}",
            "model": f"{model.num_params():,} parameters: {cfg.n_layer} layers, width "
            f"{cfg.d_model}, {cfg.n_head} heads of {cfg.head_dim}, vocabulary {cfg.vocab_size:,}",
            "inputs": ", ".join(map(" ".join, self.inputs.items())),
            "batch": f"{self.batch_tokens:,} tokens, {self.device_rows} rows per pass",
            "training": f"{self.num_steps:,} steps, from step {self.first_step:,}",
        }
        dist.print0("\n".join(f"{name:<10}{text}" for name, text in lines.items()))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        dist, finished = self.dist, self.progress.finished
        stopped = isinstance(error, StopRequested)
        lacking, alone = is_out_of_memory(error), dist.world_size == 1
        # an error of a single rank must not start a save that the other ranks do not join
        shared = stopped or error is self.failure or isinstance(error, NonFiniteError)
        broken = alone and (lacking or isinstance(error, UsageError | OSError))
        with self.open:
            if error is not None and (shared or broken) and not finished:
                if self.progress.step > self.first_step:
                    self.discard()
                    self.save(final=True)
                    why = "stop requested" if stopped else "training ended"
                    dist.print0(f"{why}: saved step {self.progress.step} (continue with "
                                "--resume=auto)")  # fmt: skip
                else:
                    dist.print0("no step was completed, nothing saved")
        if stopped:
            dist.close()
            raise SystemExit(common.PREEMPTED) from error
        if lacking and finished:
            print(
                "out of memory in the final evaluation; the trained model is saved. Rerun with "
                "--resume=auto and a smaller --device_batch_size to repeat only the evaluation",
                flush=True,
            )
            raise SystemExit(common.UNEVALUATED) from error
        if lacking:
            raise UsageError(f"out of memory at step {self.progress.step}", SMALLER) from error

    # ---- the loop --------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is saved."""
        return self.progress.finished

    def steps(self) -> Iterator[int]:
        """
        Yield the index of each step, from the last checkpoint on; then, once the trained model is
        saved, their number, for the last evaluation.
        """
        progress, every = self.progress, self.cfg.save_every
        if progress.step < self.num_steps:
            progress.require_resumable()
        while progress.step < self.num_steps:
            if progress.step % CHECK_RANKS_EVERY == 0:
                named = dict(self.model.named_parameters())
                require_equal_ranks(named, self.dist, progress.step)
            self.started = time.perf_counter()
            yield progress.step
            if every and progress.step % every == 0 and progress.step < self.num_steps:
                self.save()
        progress.finished = True
        self.save(final=True)
        yield progress.step

    def due(self, every: int) -> bool:
        """Whether something that happens every N steps happens now; always after the last step."""
        step = self.progress.step
        return self.finished or bool(step and every and step % every == 0)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation before the current step. "val_bpb" is to be minimized."""
        progress = self.progress
        if (value := metrics.get("val_bpb")) is not None:
            progress.last_val = value
            progress.min_val = value if progress.min_val is None else min(progress.min_val, value)
        self.write(progress.step, metrics)
        self.started = time.perf_counter()  # evaluations do not count as training

    def save(self, final: bool = False) -> None:
        """Save a checkpoint; `final` waits until it is on disk. Call on every rank."""
        self.write(self.progress.step, {})
        arguments = (self.model, self.optimizer, self.tokenizer, self.state, self.progress)
        self.checkpoints.save(*arguments, final=final)
        self.checkpoint = self.checkpoints.saved  # None on all ranks but the main one

    def raise_if_stopped(self) -> None:
        """Raise StopRequested on every rank if any was asked to stop. Waits for all ranks."""
        if self.dist.any(self.stop.asked):
            raise StopRequested

    # ---- one step --------------------------------------------------------------------------------

    def load(self, rows: Rows, mask_documents: bool = False) -> Batch:
        """
        Read this rank's rows of the current step and start copying them to the device.

        mask_documents: attention stays within each document or conversation. If the rows cannot be
        read, the batch is empty, and `update` raises the error on all ranks.
        """
        dist, device = self.dist, self.dist.device
        number = self.batch_tokens // rows.max_seq_len
        ids, mine = np.zeros((0, 3), np.int64), np.zeros((0, rows.max_seq_len + 1), np.int64)
        try:
            ids = rows.row_ids(self.progress.step, number, self.cfg.seed)
            mine = rows.read(np.split(ids, dist.world_size)[dist.rank])
        except StopRequested:
            pass
        except (UsageError, OSError) as error:
            self.failure = error
        x, y = inputs_and_targets(mine)
        tokens, targets = to_device(x, device), to_device(y, device)
        segments = document_segments(tokens, self.tokenizer.bos_id) if mask_documents else None
        return Batch(tokens, targets, (y >= 0).sum(axis=1), segments, ids=ids)

    def backward(self, batch: Batch) -> None:
        """
        Accumulate the gradients of the model's loss on a batch, `device_rows` rows at a time. Ends
        early at a stop request.

        If the first step runs out of memory on any rank, all ranks halve `device_rows` and start
        it again. Raises UsageError if not even one row fits, or if `device_batch_size` is set.
        """
        while True:
            self.batch_ids, fault = batch.ids, None
            try:
                for part in batch.split(self.device_rows):
                    if self.stop.asked:
                        break
                    loss = self.model.loss(part.tokens, part.targets, part.segments, part.weights)
                    self.accumulate(loss, int(sum(part.counts)), part.tokens.numel())
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fault = error.with_traceback(None)  # frees the tensors that it holds
            if self.progress.step > self.first_step:
                if fault:
                    raise fault
                return
            if not self.dist.any(fault is not None):
                return
            self.discard()
            self.use_fewer_rows()

    def use_fewer_rows(self) -> None:
        """Halve the micro-batch. Raises UsageError if that is not possible."""
        if self.device_rows == 1 or self.cfg.device_batch_size is not None:
            name = self.dist.device_name
            why = f"out of memory at device_batch_size={self.device_rows} on {name}"
            fix = "omit --device_batch_size to use the largest size that fits"
            raise UsageError(why, SMALLER if self.device_rows == 1 else fix)
        if self.dist.device.type == "cuda":
            torch.cuda.empty_cache()
        self.device_rows = choose_device_rows(None, self.rows, self.device_rows // 2)
        self.dist.print0(f"out of memory; trying --device_batch_size={self.device_rows}")

    def accumulate(self, loss: Tensor, count: int, tokens: int) -> None:
        """
        Add the gradients of a summed loss (nats) over `count` targets to those of the step; the
        update makes them means over all targets of all ranks. tokens: number processed.
        """
        (loss * self.progress.loss_scale / self.batch_tokens).backward()
        self.losses.append(loss.detach())
        self.count, self.tokens = self.count + count, self.tokens + tokens

    def discard(self) -> None:
        """Forget the accumulated gradients."""
        self.losses: list[Tensor] = []
        self.count = self.tokens = 0
        self.totals: Totals | None = None
        self.batch_ids: Any = ()
        self.optimizer.zero_grad()

    def reduce(self) -> Totals:
        """
        Sum gradients, losses and counts over ranks; the only wait for the device in a step. On all
        ranks, raises StopRequested if any of them was asked to stop, and the error of one that
        could not read its rows.
        """
        dist = self.dist
        norm, gradients = optim.reduce_gradients(self.optimizer, dist)
        ending = self.stop.asked or self.failure is not None
        losses = sum(self.losses, torch.zeros((), device=dist.device))
        sums = dist.sum_on_device(losses, self.count, self.tokens, ending)
        totals = torch.cat((sums, norm.to(sums.dtype)[None]))
        nats, count, tokens, ended, norm = dist.wait(totals.tolist)
        if ended:
            self.failure = next(filter(None, dist.gather(self.failure)), None)
            raise self.failure or StopRequested()
        scale = self.batch_tokens / self.progress.loss_scale / count if count else 0.0
        loss = nats / count if count else 0.0
        self.totals = Totals(loss, norm * scale, int(tokens), scale, gradients)
        return self.totals

    def update(self, lr: float, momentum: float, decay: float, **metrics: float) -> None:
        """
        Update the weights with the accumulated gradients, and log the step with `metrics`.

        lr, decay: factors on the peak learning rates and Muon's weight decay. momentum: Muon's. The
        update is skipped if the loss or a gradient is not finite or all targets are ignored. Raises
        NonFiniteError after MAX_BAD_STEPS skipped steps in a row, and as `reduce`.
        """
        totals, progress = self.totals or self.reduce(), self.progress
        finite = math.isfinite(totals.loss + totals.norm)
        optim.set_schedule(self.optimizer, lr, momentum, decay)
        if finite and totals.scale:
            clip = self.cfg.optim.grad_clip
            clipped = min(1.0, clip / totals.norm) if clip and totals.norm else 1.0
            for grad in totals.gradients:
                grad.mul_(totals.scale * clipped)
            self.optimizer.step()
        ids = self.batch_ids
        self.discard()
        seconds = time.perf_counter() - self.started
        timed = progress.step - self.first_step >= UNTIMED_STEPS
        flops = totals.tokens * self.model.flops_per_token()
        progress.add_step(totals.loss if finite else None, flops, seconds, timed)
        self.log_step(totals, seconds, {"lr": lr, **metrics})
        if progress.step == self.first_step + 1:
            gc.collect()
            gc.freeze()  # exclude long-lived objects from later collections
        self.handle_bad_step(finite, totals, ids)

    def log_step(self, totals: Totals, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Log a completed step."""
        speed = totals.tokens / seconds
        used = self.dist.utilization(speed * self.model.flops_per_token())
        values = {
            "loss": totals.loss,
            "grad_norm": totals.norm,
            **optim.learning_rates(self.optimizer),
            **metrics,
            "smooth_loss": self.progress.smooth_loss,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            **({} if used is None else {"mfu": used}),
        }
        self.write(self.progress.step - 1, values)

    def handle_bad_step(self, finite: bool, totals: Totals, ids: Any) -> None:
        """Count and report a step that was skipped; end the run after too many of them."""
        progress, step = self.progress, self.progress.step - 1
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + 1
        if not finite:
            progress.bad_steps += 1
            rows = f"; rows {ids.tolist()}" if len(ids) else ""
            self.dist.print0(
                f"step {step}: loss {totals.loss:.4f}, gradient norm {totals.norm:.4g}: skipped on "
                f"all ranks ({self.bad_in_a_row} consecutive){rows}"
            )
        if self.bad_in_a_row >= MAX_BAD_STEPS and progress.loss_scale == 1.0:
            raise NonFiniteError(
                f"{MAX_BAD_STEPS} consecutive non-finite steps, the last at step {step}; inspect "
                "the logged rows or lower the learning rates"
            )
        progress.adjust_loss_scale(self.dist.dtype, finite)

    # ---- the record ------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float | None:
        """Median throughput of the latest timed steps; None if there are none."""
        seconds = self.progress.step_seconds
        return self.batch_tokens / statistics.median(seconds) if seconds else None

    def measurements(self) -> dict[str, Any]:
        """Values for the record of a stage whose steps all have `batch_tokens` tokens."""
        speed, progress = self.tokens_per_second, self.progress
        return {
            "Tokens per second": "-" if speed is None else f"{speed:,.0f}",
            "Batch tokens": self.batch_tokens,
            "Rows per device pass": self.device_rows,
            "Compute dtype": describe_dtype(self.dist),
            "Compiled": progress.compiled,
            "Skipped steps": progress.bad_steps,
        }

    def finish(
        self,
        section: str,
        values: Mapping[str, Any],
        tables: Sequence[Mapping[str, Any]] = (),
        items: Mapping[str, Any] = {},
    ) -> None:
        """Write the record of the finished run, update the report and print the next commands."""
        saved, dist = self.checkpoint, self.dist
        if saved is not None:
            spent = self.progress.add_cost(dist.world_size)
            records.write_record(
                section,
                self.settings,
                values,
                records.Provenance(
                    **saved.state["provenance"], outputs={self.stage: saved.fingerprint}
                ),
                replace(records.Cost.so_far(dist), **spent),
                self.cfg.report_dir,
                items=items,
                tables=tables,
                metrics=saved.folder.parent / METRICS_FILE,
                files=[saved.folder],
                commits=list(dict.fromkeys(saved.state["commits"])),
            )
            report.update(self.cfg.report_dir, renew=True)
            dist.print0(saved.next_commands(dist))
        dist.close()


SMALLER = "a smaller --depth or --max_seq_len, or a larger machine"


def describe_dtype(dist: DistContext) -> str:
    """The compute dtype, for a summary."""
    return str(dist.dtype).removeprefix("torch.") + (" with fp8 matmuls" if dist.fp8 else "")


def skip_if_finished(
    section: str, settings: dict[str, Any], inputs: dict[str, str], cfg: Any, dist: DistContext
) -> bool:
    """
    Whether --skip_if_done is set and this stage is already recorded, with its checkpoint intact.
    `cfg` has skip_if_done and report_dir.
    """
    key = records.stage_key(settings, inputs)
    found = cfg.skip_if_done and dist.on_main(
        lambda: records.find_finished(section, key, cfg.report_dir) is not None
    )
    if found:
        dist.print0(f"{section}: finished already, skipped")
    return found
