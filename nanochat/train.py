"""
One training step: batches, gradients, updates. The run around it is run.py.

    packed rows -> load -> Batch -> backward -> gradients -> update -> weights, metrics

The loop itself stands in the script of each stage.
"""

import gc
import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat import common, optim
from nanochat.attention import choose_backend
from nanochat.common import StopRequest, StopRequested, UsageError, is_out_of_memory
from nanochat.config import require_at_least
from nanochat.dist import DistConfig, DistContext, as_picklable, compiler_problem, memory_bytes
from nanochat.gpt import GPT
from nanochat.loss import Loss, cross_entropy
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.records import UNTIMED_STEPS
from nanochat.rows import Rows, inputs_and_targets

MAX_BAD_STEPS = 5  # consecutive non-finite steps, each skipped, that stop the run
LOSS_BETA = 0.9  # decay of the moving average of the training loss
FLOAT16_LOSS_SCALE = 2.0**14  # at the start of training
RAISE_SCALE_AFTER = 2000  # finite steps
SMALLER = "a smaller model, shorter sequences or a larger machine"


@dataclass(frozen=True)
class TrainConfig:
    NOT_IN_RECIPE: ClassVar[str] = (
        "device_batch_size model_tag eval_every save_every keep resume allow_data_change "
        "skip_if_done run"
    )

    device_batch_size: int | None = None
    """Rows of a micro-batch per device; changes rounding only. Default: automatic (RL, DPO: 8)."""
    model_tag: str = ""
    """Checkpoint folder. Default: d<depth> or the parent's."""
    seed: int = 0
    """Seed of initial weights and data order."""
    eval_every: int = 250
    """Evaluate every N steps; 0 = only at the end."""
    save_every: int = 0
    """Save a checkpoint every N steps; 0 = only at the end or when preempted."""
    keep: int = 2
    """Number of checkpoints to keep."""
    resume: Literal["never", "auto"] = "never"
    """auto: resume from the newest checkpoint of this tag, if any."""
    allow_data_change: bool = False
    """Resume even if text, tokenizer or rows have changed."""
    skip_if_done: bool = False
    """Do nothing if the run has finished."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    run: str = "dummy"
    """Weights & Biases run name; dummy = no tracking. WANDB_MODE is respected."""

    def __post_init__(self) -> None:
        common.require_name("model_tag", self.model_tag)
        require_at_least(self, device_batch_size=1, seed=0, eval_every=0, save_every=0, keep=1)
        if self.seed >= 1 << 63:
            raise ValueError(f"seed {self.seed} is too large; use one below 2^63")


class NonFiniteError(RuntimeError):
    """The loss, gradients or weights are not finite, and the run cannot continue."""


class RankMismatchError(RuntimeError):
    """Weights differ between ranks."""


# ---- Kernels: what the device can do decides -----------------------------------------------------


COMPILE_FLOPS = 1.5e13  # from which compilation pays on a CPU: 3 minutes of training at depth 4


Compile = Literal["auto", "off", "on", "autotune"]
"""
How a model is compiled. auto: on a GPU, and on a CPU if the run is long enough to amortize compile
time. autotune: the compiler times several kernels for each matmul, which takes minutes; +2.5%
tokens/s at depth 16 on H100 (karpathy/nanochat#747). It chooses kernels at random.
"""


def set_kernels(
    wanted: Compile, model: GPT, flops: float, dist: DistContext, optimizer: MuonAdamW | None = None
) -> Compile:
    """
    Choose the attention kernel and compile, if worthwhile for a run of `flops`. Returns what was
    chosen. Raises UsageError if a compiler is needed and does not work on some rank.
    """
    is_auto, on_cpu = wanted == "auto", dist.device.type == "cpu"
    if is_auto:
        # compiling needs gigabytes of addresses, which `ulimit -v` may deny
        free = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        long = flops / dist.world_size > COMPILE_FLOPS and free
        wanted = "on" if dist.device.type == "cuda" or (on_cpu and long) else "off"
    if wanted != "off" and (problem := next(filter(None, dist.gather(compiler_problem())), None)):
        if not (is_auto and on_cpu):
            raise problem
        dist.print0(f"not compiled, which is slower: {problem.args[0]}")
        wanted = "off"
    model.backend = choose_backend(dist, wanted != "off")
    if wanted != "off":
        model.compile(mode="max-autotune-no-cudagraphs" if wanted == "autotune" else None)
        if optimizer is not None:
            optimizer.compiled = dist.device.type != "cpu"  # no faster there: mostly matmuls
    return wanted


def prepare_scoring(
    wanted: Compile, model: GPT, tokens: int, gpu_rows: int, dist: DistContext
) -> int:
    """
    Set kernels to score `tokens` tokens, or a few more. Returns the default number of rows per
    forward pass.
    """
    set_kernels(wanted, model, tokens * model.flops_per_token() / 3, dist)  # no backward pass
    T = model.cfg.max_seq_len
    most = CPU_TOKENS // T if dist.device.type == "cpu" else gpu_rows
    return max(1, min(most, tokens // T))


# ---- Micro-batch size ----------------------------------------------------------------------------


CPU_TOKENS = 8192  # per CPU micro-batch; larger is no faster (measured: d4, 2026-11)
# Per token, layer and unit of width; measured: eager 46 to 49 at depths 4 to 32, compiled 0.73 of
# that at depth 8 and 0.95 at depth 24 (torch 2.15). The least of these: too large a try is halved
ACTIVATION_BYTES = 33
GPU_RESERVE = 2 << 30  # bytes for NCCL and cuBLAS, which allocate in the first steps


def largest_divisor(rows: int, limit: int) -> int:
    """Largest divisor of `rows` (rows per rank and step) up to `limit`, but at least 1."""
    return max(d for d in range(1, rows + 1) if rows % d == 0 and d <= max(1, limit))


def rows_to_try(model: GPT, dist: DistContext) -> int:
    """
    Micro-batch size to try first, equal on all ranks: on a GPU, about what fits next to weights and
    gradients, else about CPU_TOKENS tokens.
    """
    cfg, device = model.cfg, dist.device
    if device.type != "cuda":
        return max(1, CPU_TOKENS // cfg.max_seq_len)
    room = memory_bytes(device)[0] - GPU_RESERVE - 4 * model.num_params()  # gradients
    row = ACTIVATION_BYTES * cfg.max_seq_len * cfg.n_layer * cfg.d_model
    return max(1, min(dist.gather(room)) // row)


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
    tensors: tuple[Tensor, ...] = ()
    """Further arguments of the loss, such as advantages."""
    ids: Any = ()
    """The rows, for messages."""

    def split(self, rows: int) -> Iterator["Batch"]:
        """Micro-batches of `rows` rows."""
        for first in range(0, len(self.counts), rows):
            part = slice(first, first + rows)
            segments = None if self.segments is None else self.segments[part]
            tensors = tuple(x[part] for x in self.tensors)
            each = self.tokens[part], self.targets[part], self.counts[part]
            yield Batch(*each, segments, tensors)


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    """
    Copy to the device. Each call pins new memory, so no later step can overwrite it. PyTorch would
    copy a slice synchronously, so the array is made contiguous first.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(x: Tensor) -> Tensor:
    """Copy of a tensor of a GPU, which later updates do not change; one in host memory as it is."""
    return x.detach().to("cpu")


def document_segments(tokens: Tensor, bos_id: int) -> Tensor:
    """Index of each token's document within its row, (B, T); BOS starts a document."""
    return (tokens == bos_id).cumsum(dim=1)


# ---- The state of a run --------------------------------------------------------------------------


@dataclass
class Progress:
    """State of a run other than weights and settings; saved with each checkpoint."""

    step: int = 0
    """Completed steps."""
    rows: int = 0
    """Packed rows of these steps, over all ranks."""
    finished: bool = False
    """In a checkpoint: whether all planned steps are done."""
    loss_average: float = 0.0
    """Moving average of the training loss, biased towards 0 (see `smooth_loss`)."""
    min_val: float | None = None
    last_val: float | None = None
    flops: float = 0.0
    """FLOPs of all steps, forward and backward."""
    train_seconds: float = 0.0
    """Time of the steps, without the first UNTIMED_STEPS of each attempt."""
    wall_seconds: float = 0.0
    """Time of all attempts from the start of each process to its last save."""
    compile: Compile = "auto"
    """How the model is compiled; kept when the run resumes, because rounding differs."""
    device_rows: int | None = None
    """Rows of a micro-batch; kept on any device, because sums round differently."""
    loss_scale: float = FLOAT16_LOSS_SCALE
    """Factor on the loss in the backward pass in float16, whose range is too small for most
    gradients otherwise: halved after a bad step, doubled after RAISE_SCALE_AFTER good ones."""
    steps_at_scale: int = 0
    """Finite steps since `loss_scale` last changed."""
    updates: int = 0
    """Number of steps that updated the weights."""
    bad_steps: int = 0
    """Number of steps skipped as non-finite."""

    @property
    def smooth_loss(self) -> float:
        """Bias-corrected moving average of the loss; NaN before the first update."""
        return self.loss_average / (1 - LOSS_BETA**self.updates) if self.updates else math.nan


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
    """Reduced gradients: this rank's slices."""


def check_weights(model: GPT, dist: DistContext, step: int) -> None:
    """
    Raise an error on every rank, naming the first weight that is not finite or differs between
    ranks. Compares sums of bits, so a single flipped one is found.
    """
    named = dict(model.named_parameters())
    bits = [x.detach().view(torch.int32).sum(dtype=torch.int64) for x in named.values()]
    finite = [x.detach().isfinite().all() for x in named.values()]
    found = dist.gather((torch.stack(bits).tolist(), torch.stack(finite).tolist()))
    for i, name in enumerate(named):
        sums = [sums_of_rank[i] for sums_of_rank, _ in found]
        if not all(finite_of_rank[i] for _, finite_of_rank in found):
            raise NonFiniteError(
                f"{name} has non-finite values before step {step}, not saved; --resume=auto "
                "resumes from the last good step"
            )
        usual = max(sums, key=sums.count)  # rank 0 wins ties
        if others := [rank for rank, value in enumerate(sums) if value != usual]:
            raise RankMismatchError(
                f"weights differ between ranks before step {step}: {name} differs on rank "
                f"{', '.join(map(str, others))} of {dist.world_size}; check that device and "
                "its links, and restart with --resume=auto, preferably without that device"
            )


# ---- The step ------------------------------------------------------------------------------------


class Step:
    """
    The training steps of a model, with the state that they share.

    `start` sets their size: tokens per step over all ranks (DPO: at most; RL: of its answers, at
    most), and rows per micro-batch.
    """

    def __init__(self, model: GPT, optimizer: MuonAdamW, cfg: TrainConfig, dist: DistContext):
        self.model, self.optimizer, self.cfg, self.dist = model, optimizer, cfg, dist
        self.progress = Progress()
        self.stop = StopRequest()
        self.bad_in_a_row, self.diverged = 0, False
        self.failure: Exception | None = None
        """Why rows could not be read, on any rank."""
        self.updating = False
        """Within an update: the weights belong to no step and must not be saved."""
        self.discard()

    def start(self, batch_tokens: int, varying: bool) -> None:
        """
        Set the size of the steps to come. varying: rows have any length, as in RL and DPO, and
        micro-batches a fixed number of rows. Raises ValueError if `device_batch_size` does not
        divide the batch.
        """
        cfg, self.batch_tokens, self.first_step = self.cfg, batch_tokens, self.progress.step
        rows = max(1, batch_tokens // self.model.cfg.max_seq_len // self.dist.world_size)
        self.rows_per_rank, self.device_rows = rows, cfg.device_batch_size or 8
        self.started = time.perf_counter()
        if varying:
            return
        limit = self.progress.device_rows or rows_to_try(self.model, self.dist)
        asked = min(cfg.device_batch_size or limit, rows)
        self.device_rows = largest_divisor(rows, asked)
        if cfg.device_batch_size and self.device_rows != asked:
            share = f"{rows} rows per device and step; use {self.device_rows}"
            raise ValueError(f"device_batch_size {asked} does not divide {share}")
        self.progress.device_rows = self.device_rows

    def load(
        self, rows: Rows, chats_begin_with: int | None = None, batch_tokens: int | None = None
    ) -> Batch:
        """
        Read this rank's part of the next rows and start copying them to the device.

        chats_begin_with: the token that begins a chat, if attention stays within each.
        batch_tokens: of this step, over all ranks, whole rows of each. Default: those of `start`.
        If the rows cannot be read, the batch is empty, and `update` raises the error on all ranks.
        """
        dist, device = self.dist, self.dist.device
        number = (batch_tokens or self.batch_tokens) // rows.max_seq_len
        ids, mine = np.zeros((0, 4), np.int64), np.zeros((0, rows.max_seq_len + 1), np.int64)
        try:
            if number % dist.world_size or not number:
                problem = f"a batch of {number} rows for {dist.world_size} ranks"
                raise UsageError(problem, "use batch_tokens with whole rows for each rank")
            ids = rows.row_ids(self.progress.rows, number, self.cfg.seed)
            mine = rows.read(np.split(ids, dist.world_size)[dist.rank])
        except (UsageError, OSError, ValueError) as error:
            self.failure = error
        x, y = inputs_and_targets(mine)
        tokens, targets = to_device(x, device), to_device(y, device)
        bos_id = chats_begin_with
        segments = None if bos_id is None else document_segments(tokens, bos_id)
        return Batch(tokens, targets, (y >= 0).sum(axis=1), segments, ids=ids)

    def backward(self, batch: Batch, loss: Loss = cross_entropy) -> None:
        """
        Accumulate the gradients of a loss on a batch, `device_rows` rows at a time. Ends early at a
        stop request.

        If the first step runs out of memory on any rank, all ranks halve `device_rows` and start
        it again. Raises UsageError if not even one row fits, or if `device_batch_size` is set.
        """
        while True:
            self.batch_ids, fault = batch.ids, None
            try:
                for part in batch.split(self.device_rows):
                    if self.stop.asked:
                        break
                    args = part.tokens, part.targets, part.segments, loss, part.tensors
                    count, tokens = int(sum(part.counts)), part.tokens.numel()
                    self.accumulate(self.model.loss(*args), count, tokens)
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
            raise UsageError(why, f"use {SMALLER}" if self.device_rows == 1 else fix)
        if self.dist.device.type == "cuda":
            torch.cuda.empty_cache()
        self.device_rows = largest_divisor(self.rows_per_rank, self.device_rows // 2)
        self.progress.device_rows = self.device_rows
        self.dist.print0(f"out of memory; trying --device_batch_size={self.device_rows}")

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in the backward pass: 1 except in float16."""
        return self.progress.loss_scale if self.dist.dtype == torch.float16 else 1.0

    def accumulate(self, loss: Tensor, count: int, tokens: int) -> None:
        """
        Add the gradients of a summed loss (nats) over `count` targets to those of the step; the
        update makes them means over all targets of all ranks. tokens: number processed.
        """
        # divided by about the number of targets, which is known after the last micro-batch
        (loss * self.loss_scale / self.batch_tokens).backward()
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
        norm = self.optimizer.reduce_gradients()
        ending = self.stop.asked or self.failure is not None
        losses = sum(self.losses, torch.zeros((), device=dist.device))
        sums = dist.sum_on_device(losses, self.count, self.tokens, ending)
        totals = torch.cat((sums, norm.to(sums.dtype)[None]))
        nats, count, tokens, ended, norm = totals.tolist()
        if ended:
            mine = self.failure and as_picklable(self.failure)
            self.failure = next(filter(None, dist.gather(mine)), None)
            raise self.failure or StopRequested()
        scale = self.batch_tokens / self.loss_scale / count if count else 0.0
        loss = nats / count if count else 0.0
        self.totals = Totals(loss, norm * scale, int(tokens), scale, self.optimizer.gradients)
        return self.totals

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yield the mean gradients of the step by the names of their parameters, before clipping.
        Between `backward` and the update, on every rank. Raises as `reduce`.
        """
        totals = self.totals or self.reduce()
        for name, gradient in self.optimizer.named_gradients():
            yield name, gradient * totals.scale

    def apply(
        self, lr: float, momentum: float, decay: float, other_seconds: float = 0.0
    ) -> dict[str, Any]:
        """
        Update the weights with the accumulated gradients. Returns the metrics of the step.

        lr, decay: factors on the peak learning rates and Muon's weight decay. momentum: Muon's.
        other_seconds: time of the step that was not training, without which MFU is measured. The
        update is skipped if the loss or a gradient is not finite or all targets are ignored. Raises
        as `reduce`.
        """
        totals, progress = self.totals or self.reduce(), self.progress  # a script may have reduced
        finite = math.isfinite(totals.loss + totals.norm)
        optim.set_schedule(self.optimizer, lr, momentum, decay)
        if finite and totals.scale:
            clip = self.cfg.optim.grad_clip
            clipped = min(1.0, clip / totals.norm) if clip and totals.norm else 1.0
            for grad in totals.gradients:
                grad.mul_(totals.scale * clipped)
            self.updating = True
            self.optimizer.step()
            self.updating = False
        metrics = self.count_step(totals, finite, other_seconds)
        self.note_bad_step(finite, totals)
        self.discard()
        if progress.step == self.first_step + 1:
            gc.collect()
            gc.freeze()  # exclude long-lived objects from later collections
        return {**metrics, "lr": lr}

    def count_step(self, totals: Totals, finite: bool, other_seconds: float) -> dict[str, Any]:
        """Count a completed step in the progress. Returns its metrics."""
        progress, seconds = self.progress, time.perf_counter() - self.started
        flops = totals.tokens * self.model.flops_per_token()
        if finite and totals.scale:
            average = LOSS_BETA * progress.loss_average
            progress.loss_average = average + (1 - LOSS_BETA) * totals.loss
            progress.updates += 1
        progress.flops += flops
        if progress.step - self.first_step >= UNTIMED_STEPS:
            progress.train_seconds += seconds
        progress.step += 1
        progress.rows += len(self.batch_ids)
        used = self.dist.utilization(flops / (seconds - other_seconds))
        return {
            "loss": totals.loss,
            "grad_norm": totals.norm,
            "smooth_loss": progress.smooth_loss,
            "tokens_per_second": totals.tokens / seconds,
            "step_seconds": seconds,
            **({} if used is None else {"mfu": used}),
        }

    def note_bad_step(self, finite: bool, totals: Totals) -> None:
        """Report a step that was skipped, and adjust the loss scale."""
        progress, step, ids = self.progress, self.progress.step - 1, self.batch_ids
        float16 = self.dist.dtype == torch.float16
        if finite:
            self.bad_in_a_row = 0
            progress.steps_at_scale += float16
            if progress.steps_at_scale == RAISE_SCALE_AFTER:
                progress.loss_scale, progress.steps_at_scale = progress.loss_scale * 2, 0
            return
        self.bad_in_a_row += 1
        self.diverged = self.bad_in_a_row >= MAX_BAD_STEPS and self.loss_scale == 1.0
        progress.bad_steps += 1
        rows = f"; rows {ids.tolist()}" if len(ids) else ""
        self.dist.print0(
            f"step {step}: loss {totals.loss:.4f}, gradient norm {totals.norm:.4g}: skipped on "
            f"all ranks ({self.bad_in_a_row} consecutive){rows}"
        )
        if float16:
            progress.loss_scale, progress.steps_at_scale = max(1.0, progress.loss_scale / 2), 0

    def raise_if_diverged(self) -> None:
        """
        Raise NonFiniteError after MAX_BAD_STEPS skipped steps in a row (in float16, once the loss
        scale is 1).
        """
        if self.diverged:
            last = self.progress.step - 1
            raise NonFiniteError(
                f"{MAX_BAD_STEPS} consecutive non-finite steps, the last at step {last}; inspect "
                "the logged rows or lower the learning rates"
            )
