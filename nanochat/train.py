"""
What all training scripts share: batches, gradients, updates, and the run around the loop.

    packed rows -> Run.load -> Batch -> Run.backward -> gradients -> Run.update -> weights
    Run: lock, resume -> steps -> log, save, stop signal -> finish: record and report

The loop itself stands in the script of each stage:

    with run:
        for step in run.steps():  # from the last checkpoint on; the last turn only evaluates
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
import os
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nanochat import common, optim, records, report
from nanochat.attention import choose_backend
from nanochat.checkpoint import (
    ASIDE,
    Checkpoint,
    CorruptCheckpoint,
    Stage,
    newest_state,
    open_checkpoint,
    save_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import StopRequest, StopRequested, UsageError, is_out_of_memory
from nanochat.config import require_at_least
from nanochat.dist import DistConfig, DistContext, has_compiler, memory_bytes
from nanochat.fp8 import enable_fp8
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.records import METRICS_FILE, UNTIMED_STEPS, RunLog
from nanochat.rows import Rows, inputs_and_targets
from nanochat.tokenizer import Tokenizer

CHECK_RANKS_EVERY = 100  # steps between checks that the weights are equal on all ranks
MAX_BAD_STEPS = 5  # consecutive non-finite steps, each skipped, that stop the run
LOSS_BETA = 0.9  # decay of the moving average of the training loss
FLOAT16_LOSS_SCALE = 2.0**14  # at the start of training
RAISE_SCALE_AFTER = 2000  # finite steps
SMALLER = "a smaller model, shorter sequences or a larger machine"


@dataclass(frozen=True)
class TrainConfig:
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
tokens/s at depth 16 on H100 (nanochat's pull request 747). It chooses kernels at random.
"""


def set_kernels(
    wanted: Compile, model: GPT, flops: float, dist: DistContext, optimizer: Any = None
) -> Compile:
    """
    Choose the attention kernel and compile, if worthwhile for a run of `flops`. Returns what was
    chosen. Raises UsageError if that needs a compiler which is not installed.
    """
    if wanted == "auto":
        # compiling needs gigabytes of addresses, which `ulimit -v` may deny
        free = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        long = flops / dist.world_size > COMPILE_FLOPS and free and has_compiler()
        pays = dist.device.type == "cuda" or (dist.device.type == "cpu" and long)
        wanted = "on" if pays else "off"
    if wanted != "off" and not has_compiler():
        raise UsageError(
            "torch.compile needs a C++ compiler and Python's headers",
            "apt-get install g++ python3-dev, or use --compile=off, several times slower on a GPU",
        )
    model.backend = choose_backend(dist, wanted != "off")
    if wanted != "off":
        model.compile(mode="max-autotune-no-cudagraphs" if wanted == "autotune" else None)
        if isinstance(optimizer, MuonAdamW):
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
    weights: Tensor | None = None
    """Loss weights. Default: 1."""
    ids: Any = ()
    """The rows, for messages."""

    def split(self, rows: int) -> Iterator["Batch"]:
        """Micro-batches of `rows` rows."""
        for first in range(0, len(self.counts), rows):
            part = slice(first, first + rows)
            yield Batch(*(None if x is None else x[part] for x in self[:5]))  # type: ignore


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
    """Copy of a tensor in host memory, which later updates do not change."""
    return x.detach().to("cpu", copy=True)


def document_segments(tokens: Tensor, bos_id: int) -> Tensor:
    """Index of each token's document within its row, (B, T); BOS starts a document."""
    return (tokens == bos_id).cumsum(dim=1)


# ---- The state of a run --------------------------------------------------------------------------


@dataclass
class Progress:
    """State of a run other than weights and settings; saved with each checkpoint."""

    step: int = 0
    """Completed steps."""
    finished: bool = False
    """All planned steps are done."""
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
    """Reduced gradients; under MuonAdamW, this rank's slices."""


def check_weights(model: GPT, dist: DistContext, step: int) -> None:
    """
    Raise an error on every rank, naming the first weight that is not finite or differs between
    ranks. Compares sums of bits, so a single flipped one is found.
    """
    named = {name: weight.detach() for name, weight in model.named_parameters()}
    sums = [x.view(torch.int32).sum(dtype=torch.int64) for x in named.values()]
    finite = [x.isfinite().all() for x in named.values()]
    found = dist.gather(list(zip(*torch.stack(sums + finite).view(2, -1).tolist(), strict=True)))
    for name, *ranks in zip(named, *found, strict=True):
        if not all(good for _, good in ranks):
            raise NonFiniteError(
                f"{name} has non-finite values before step {step}, not saved; --resume=auto "
                "resumes from the last good step"
            )
        usual = max(ranks, key=ranks.count)  # rank 0 wins ties
        if others := [rank for rank, value in enumerate(ranks) if value != usual]:
            raise RankMismatchError(
                f"weights differ between ranks before step {step}: {name} differs on rank "
                f"{', '.join(map(str, others))} of {dist.world_size}; check that device and "
                "its links, and restart with --resume=auto, preferably without that device"
            )


def list_changes(was: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """
    Differences between two identities of a run, one line per setting. Parts with the same
    fingerprint are equal, even if the text is in another folder.
    """
    lines = []
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if "fingerprint" not in old or old["fingerprint"] != new.get("fingerprint"):
                lines += list_changes(old, new, f"{at}{name}.")
        elif old != new:
            lines.append(f"{at}{name}: was {old!r}, now {new!r}")
    return lines


# ---- The run around a training loop --------------------------------------------------------------


class Run:
    """
    The run around a training loop: lock and resume, steps, log, saves, stop signal, record.

    stage, tag    the checkpoints are <stage>_checkpoints/<tag>/
    num_steps     steps to train; a loop with a time limit lowers it to end the run
    batch_tokens  tokens of a step over all ranks (DPO: at most; RL: of its answers, at most)
    compile       how to compile the model; None = not at all, for rows of any length
    settings      the script's flags; with `inputs` they decide whether --skip_if_done skips
    inputs        name -> fingerprint of each input, closest parent first
    identity      further settings that must match for a checkpoint to be resumed
    state         further checkpoint state, only stored

    As a context manager it leaves no step behind: a stop request, five bad steps in a row, data
    that cannot be read or, with one rank, any error outside an update end the loop after saving the
    completed steps. A stop exits with status PREEMPTED, too little memory for the last evaluation
    with UNEVALUATED. Raises UsageError if another run is using the folder, and ValueError if the
    checkpoint to resume has other settings or `device_batch_size` does not divide the batch.
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
        compile: Compile | None,
        settings: Mapping[str, Any],
        inputs: Mapping[str, str],
        identity: Mapping[str, Any],
        state: Mapping[str, Any],
    ):
        self.stage, self.folder, self.cfg = stage, stage_folder(stage) / tag, cfg
        self.model, self.optimizer, self.tokenizer, self.dist = model, optimizer, tokenizer, dist
        self.num_steps, self.batch_tokens = num_steps, batch_tokens
        self.settings, self.inputs = settings, inputs
        self.compile: Compile | None = compile
        self.identity = {
            "model": asdict(model.cfg),
            "batch_tokens": batch_tokens,
            "seed": cfg.seed,
            "optim": asdict(cfg.optim),
            **({"fp8": True} if dist.fp8 else {}),
            **identity,
        }
        self.state = {"stage": stage, "identity": self.identity, "settings": settings, **state}
        rows = max(1, batch_tokens // model.cfg.max_seq_len // dist.world_size)
        self.rows_per_rank, self.device_rows = rows, cfg.device_batch_size or 8
        if compile is not None:
            asked = min(cfg.device_batch_size or rows, rows)
            self.device_rows = largest_divisor(rows, asked)
            if self.device_rows != asked:
                share = f"{rows} rows per device and step; use {self.device_rows}"
                raise ValueError(f"device_batch_size {asked} does not divide {share}")
        self.stop = StopRequest()
        self.progress = Progress()
        self.checkpoint: Checkpoint | None = None
        """Newest one, saved or resumed; main rank only."""
        self.saving: tuple[int, Future[Checkpoint]] | None = None
        """Step being saved, and its result."""
        self.writer = ThreadPoolExecutor(1)
        self.logger: RunLog | None = None
        self.charged = records.STARTED  # until when the cost of this attempt is counted
        self.bad_in_a_row, self.failure = 0, None
        self.updating = False
        """Within an update: the weights belong to no step and must not be saved."""
        self.discard()

    # ---- beginning and end -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        cfg, dist = self.cfg, self.dist
        self.state["provenance"] = {"seed": cfg.seed, "inputs": self.inputs}
        with ExitStack() as stack:
            lock = self.folder.parent / f".{self.folder.name}.lock"
            dist.on_main(lambda: stack.enter_context(common.hold_run_lock(lock)))
            stack.enter_context(self.writer)
            stack.callback(self.finish_save)
            self.resume()
            if self.compile is not None:
                self.choose_kernels()
            self.describe()
            stack.enter_context(self.stop)
            self.resources = stack.pop_all()
        return self

    def resume(self) -> None:
        """
        Load the newest good checkpoint if --resume=auto; otherwise, the run starts at step 0 and
        replaces an earlier one (`open_log`).

        Raises CorruptCheckpoint if all are corrupt, and ValueError listing the differences if the
        checkpoint has a different `identity` (model, batch, seed, rows). Rows alone may differ if
        `allow_data_change` is set.
        """
        progress, dist = self.progress, self.dist
        found = self.newest_checkpoint()
        if found is not None:
            changed = list_changes(found.state["identity"], self.identity)
            rows_only = all(line.startswith("rows.") for line in changed)
            if changed and not (self.cfg.allow_data_change and rows_only):
                raise ValueError(
                    f"{self.folder} was trained with different settings:\n  "
                    + "\n  ".join(changed)
                    + "\nuse another --model_tag, or, if nothing else differs: rows, "
                    "--allow_data_change; fp8, the --dtype of before; batch_tokens (its default "
                    "depends on the number of ranks), --total_batch_size with its old value; with "
                    "speedrun.sh, rename that folder"
                )
            for line in changed:
                dist.print0(f"resuming despite {line}")
            self.state["changes"] = found.state.get("changes", []) + changed
            self.model.load_state_dict(found.model_tensors())
            progress = self.progress = Progress(**found.state["progress"])
            try:
                optim.load_full_state(self.optimizer, found.optim_tensors())
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{found.folder} has the state of another optimizer; use another --model_tag"
                ) from error
            self.checkpoint = found if dist.is_main else None
            dist.print0(f"resumed {found.folder}")
        self.first_step = progress.step
        self.state |= {"compute": dist.compute, **records.code_state()}
        if found:
            self.state["commits"] = found.state["commits"] + self.state["commits"]
        self.state["tracked"] = found.state["tracked"] if found else records.new_run_id()
        if found and (changed := records.changed_code(found.state["code"])):
            dist.print0(f"resuming with changed code: {', '.join(changed)}")

    def newest_checkpoint(self) -> Checkpoint | None:
        """
        The checkpoint to resume, verified by one rank per node; None to start at step 0. Raises
        CorruptCheckpoint, on every rank, if all are corrupt or the nodes' files differ.
        """
        dist, folder = self.dist, self.folder
        if self.cfg.resume == "never":
            return None
        found = dist.on_node(lambda: open_checkpoint(folder, optimizer=True))
        name = f"step {found.step} ({found.fingerprint})" if found else "no checkpoint"
        names = dist.gather(name)
        for rank, other in enumerate(names):
            if other != names[0]:
                message = f"rank {rank} finds {other} in {folder}, rank 0 {names[0]}"
                raise CorruptCheckpoint(f"{message}; all nodes need a shared disk")
        return found

    def choose_kernels(self) -> None:
        """Set kernels and micro-batch size; a resumed run keeps that and how it is compiled."""
        progress, dist = self.progress, self.dist
        if dist.fp8:
            enable_fp8(self.model, dist.device)
        if self.cfg.device_batch_size is None:
            limit = progress.device_rows or rows_to_try(self.model, dist)
            self.device_rows = largest_divisor(self.rows_per_rank, limit)
        progress.device_rows = self.device_rows
        left = (self.num_steps - progress.step) * self.batch_tokens
        flops = left * self.model.flops_per_token()
        if self.compile in ("off", "on", "autotune"):
            progress.compile = self.compile
        progress.compile = set_kernels(progress.compile, self.model, flops, dist, self.optimizer)

    def describe(self) -> None:
        """Print what is about to be trained, and where."""
        model, dist, cfg = self.model, self.dist, self.model.cfg
        eager = self.progress.compile in ("auto", "off")
        mode = "eager" if eager else "compiled in the first step, which takes a minute or more"
        lines = {
            "device": f"{dist.device_name} x {dist.world_size}, {describe_dtype(dist)}",
            "kernels": f"attention {model.backend}, {mode}",
            "model": f"{model.num_params():,} parameters: {cfg.n_layer} layers, width "
            f"{cfg.d_model}, {cfg.n_head} heads of {cfg.head_dim}, vocabulary {cfg.vocab_size:,}",
            "inputs": ", ".join(map(" ".join, self.inputs.items())),
            "batch": f"{self.batch_tokens:,} tokens, {self.device_rows} rows per pass",
            "training": f"{self.num_steps:,} steps, from step {self.first_step:,}",
        }
        dist.print0("\n".join(f"{name:<10}{text}" for name, text in lines.items()))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        dist, step, finished = self.dist, self.progress.step, self.progress.finished
        stopped, lacking = isinstance(error, StopRequested), is_out_of_memory(error)
        # shared: every rank raises this error, so all join the save; alone: there is no other rank
        shared = stopped or error is self.failure or isinstance(error, NonFiniteError)
        alone = dist.world_size == 1 and isinstance(error, Exception) and not self.updating
        with self.resources:
            if error is not None and (shared or alone) and not finished:
                text = "no step was completed, nothing saved"
                if step > self.first_step:
                    self.discard()
                    if not dist.on_main(self.is_saved):
                        self.save(final=True)
                    why = "stop requested" if stopped else "training ended"
                    text = f"{why}: saved step {step} (continue with --resume=auto)"
                dist.print0(text)
        if stopped and finished:
            dist.print0("trained and saved; --resume=auto repeats the last evaluation")
        if stopped:
            dist.close()
            raise SystemExit(common.PREEMPTED) from error
        if lacking and finished:
            print(
                "out of memory in the final evaluation; the trained model is saved. Rerun with "
                "--resume=auto to repeat only the evaluation, with more free memory or a smaller "
                "--device_batch_size",
                flush=True,
            )
            raise SystemExit(common.UNEVALUATED) from error
        if lacking:
            fix = f"use a smaller --device_batch_size, {SMALLER}"
            raise UsageError(f"out of memory at step {step}", fix) from error

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
        if progress.step > self.num_steps:
            problem = f"{self.folder} has {progress.step} steps, this run {self.num_steps}"
            raise UsageError(problem, "use another --model_tag, or --resume=never to train again")
        trained = progress.finished and progress.step == self.num_steps
        progress.finished = False  # until all steps are done and saved
        while progress.step < self.num_steps:
            if progress.step % CHECK_RANKS_EVERY == 0:
                check_weights(self.model, self.dist, progress.step)
            self.started = time.perf_counter()
            yield progress.step
            if every and progress.step % every == 0 and progress.step < self.num_steps:
                self.save()
        if not trained:
            self.save(final=True)
        progress.finished = True
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

    def print(self, text: str) -> None:
        """Print on the main rank, after work that does not count as training."""
        self.dist.print0(text)
        self.started = time.perf_counter()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics to the log."""
        self.open_log()
        if self.logger:
            self.logger.log(step, metrics)

    def open_log(self) -> None:
        """
        Open the log, and before that move the checkpoints of an earlier run that this one replaces
        aside: when there is something to log, everything has been checked.
        """
        if self.logger is None and self.dist.is_main:
            if self.cfg.resume == "never" and step_folders(self.folder):
                aside = self.folder.rename(f"{self.folder}{ASIDE}{records.new_run_id()}")
                self.dist.print0(f"moved the checkpoints of an earlier run to {aside}")
            about = (self.cfg.run, self.state["tracked"], self.settings, self.first_step)
            self.logger = self.resources.enter_context(RunLog(self.folder, *about, self.num_steps))

    def raise_if_stopped(self) -> None:
        """Raise StopRequested on every rank if any was asked to stop. Waits for all ranks."""
        if self.dist.any(self.stop.asked):
            raise StopRequested

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, final: bool = False) -> None:
        """
        Save the state of all ranks: on a GPU, a thread writes a copy while training goes on;
        `final` waits until it is on disk. Call on every rank.

        Raises as `check_weights`. If the disk fails, training goes on and the older checkpoints
        stay; a `final` save raises OSError.
        """
        dist, progress, model = self.dist, self.progress, self.model
        self.open_log()
        check_weights(model, dist, progress.step)
        dist.on_main(self.finish_save)  # the previous one; a collective would time out
        gathered = optim.full_state(self.optimizer)  # by all ranks; the main rank copies
        moments = {n: to_host(x) for n, x in gathered if dist.is_main}
        self.add_cost()
        if dist.is_main:
            weights = {name: to_host(x) for name, x in model.state_dict().items()}
            finished = progress.step >= self.num_steps
            state = {**self.state, "progress": {**asdict(progress), "finished": finished}}
            job = (self.folder, progress.step, model, moments, self.tokenizer, state)
            future = self.writer.submit(save_checkpoint, *job, self.cfg.keep, weights)
            self.saving = progress.step, future
        if final or dist.device.type == "cpu":  # where it would slow down training, or see updates
            dist.on_main(lambda: self.finish_save(final))

    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of the current step."""
        self.finish_save()
        return self.checkpoint is not None and self.checkpoint.step == self.progress.step

    def finish_save(self, final: bool = False) -> None:
        """Wait for the save in progress. An error of the disk is printed or, if `final`, raised."""
        if self.saving is None:
            return
        (step, future), self.saving = self.saving, None
        try:
            self.checkpoint = future.result()
        except OSError as error:
            problem = OSError(error.errno, f"saving step {step} failed: {error}")
            if final:
                raise problem from error
            self.dist.print0(problem)

    def add_cost(self) -> None:
        """Add the time since the last call to the cost of the run."""
        seconds, self.charged = time.perf_counter() - self.charged, time.perf_counter()
        self.progress.wall_seconds += seconds

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
        except (UsageError, OSError, ValueError) as error:
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
        norm, gradients = optim.reduce_gradients(self.optimizer, dist)
        ending = self.stop.asked or self.failure is not None
        losses = sum(self.losses, torch.zeros((), device=dist.device))
        sums = dist.sum_on_device(losses, self.count, self.tokens, ending)
        totals = torch.cat((sums, norm.to(sums.dtype)[None]))
        nats, count, tokens, ended, norm = dist.wait(totals.tolist)
        if ended:
            self.failure = next(filter(None, dist.gather(self.failure)), None)
            raise self.failure or StopRequested()
        scale = self.batch_tokens / self.loss_scale / count if count else 0.0
        loss = nats / count if count else 0.0
        self.totals = Totals(loss, norm * scale, int(tokens), scale, gradients)
        return self.totals

    def update(self, lr: float, momentum: float, decay: float, **metrics: float) -> None:
        """
        Update the weights with the accumulated gradients, and log the step with `metrics`.

        lr, decay: factors on the peak learning rates and Muon's weight decay. momentum: Muon's. The
        update is skipped if the loss or a gradient is not finite or all targets are ignored. Raises
        NonFiniteError after MAX_BAD_STEPS skipped steps in a row (in float16, once the loss scale
        is 1), and as `reduce`.
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
        ids = self.batch_ids
        self.discard()
        self.count_step(totals, finite, {"lr": lr, **metrics})
        if progress.step == self.first_step + 1:
            gc.collect()
            gc.freeze()  # exclude long-lived objects from later collections
        self.handle_bad_step(finite, totals, ids)

    def count_step(self, totals: Totals, finite: bool, metrics: Mapping[str, Any]) -> None:
        """Count a completed step in the progress and log it."""
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
        used = self.dist.utilization(flops / (seconds - metrics.get("rollout_seconds", 0.0)))
        values = {
            "loss": totals.loss,
            "grad_norm": totals.norm,
            "smooth_loss": progress.smooth_loss,
            "tokens_per_second": totals.tokens / seconds,
            "step_seconds": seconds,
            **({} if used is None else {"mfu": used}),
            **metrics,
        }
        self.write(progress.step - 1, values)

    def handle_bad_step(self, finite: bool, totals: Totals, ids: Any) -> None:
        """
        Report a step that was skipped, adjust the loss scale, and end the run after too many bad
        steps. ids: the rows of the step.
        """
        progress, step = self.progress, self.progress.step - 1
        float16 = self.dist.dtype == torch.float16
        if finite:
            self.bad_in_a_row = 0
            progress.steps_at_scale += float16
            if progress.steps_at_scale == RAISE_SCALE_AFTER:
                progress.loss_scale, progress.steps_at_scale = progress.loss_scale * 2, 0
            return
        self.bad_in_a_row += 1
        progress.bad_steps += 1
        rows = f"; rows {ids.tolist()}" if len(ids) else ""
        self.dist.print0(
            f"step {step}: loss {totals.loss:.4f}, gradient norm {totals.norm:.4g}: skipped on "
            f"all ranks ({self.bad_in_a_row} consecutive){rows}"
        )
        if self.bad_in_a_row >= MAX_BAD_STEPS and self.loss_scale == 1.0:
            raise NonFiniteError(
                f"{MAX_BAD_STEPS} consecutive non-finite steps, the last at step {step}; inspect "
                "the logged rows or lower the learning rates"
            )
        if float16:
            progress.loss_scale, progress.steps_at_scale = max(1.0, progress.loss_scale / 2), 0

    # ---- the record ------------------------------------------------------------------------------

    @property
    def tokens_per_second(self) -> float | None:
        """Median throughput over all attempts; None for at most UNTIMED_STEPS steps."""
        logged = self.dist.on_main(lambda: records.read_metrics(self.folder / METRICS_FILE))
        seconds = [x["step_seconds"] for x in logged if "step_seconds" in x][UNTIMED_STEPS:]
        return self.batch_tokens / statistics.median(seconds) if seconds else None

    def measurements(self) -> dict[str, Any]:
        """Values for the record of a stage whose steps all have `batch_tokens` tokens."""
        speed, progress = self.tokens_per_second, self.progress
        return {
            "Tokens per second": "-" if speed is None else f"{speed:,.0f}",
            "Batch tokens": self.batch_tokens,
            "Rows per device pass": self.device_rows,
            "Compiled": progress.compile,
            "Skipped steps": progress.bad_steps,
        }

    def finish(
        self,
        section: str,
        values: Mapping[str, Any],
        tables: Sequence[Mapping[str, Any]] = (),
        items: Mapping[str, Any] = {},
        following: str = "",
    ) -> None:
        """
        Write the record of the finished run, update the report and print the next commands: that of
        the `following` script, and for chat models how to talk to them.
        """
        saved, dist = self.checkpoint, self.dist
        if saved is not None:
            self.add_cost()
            devices, spent = dist.world_size, self.progress
            changes = "; ".join(saved.state.get("changes", [])) or None
            about = {"Compute dtype": describe_dtype(dist), "Data changed when resumed": changes}
            records.write_record(
                section,
                self.settings,
                {**values, **about},
                self.inputs,
                records.Cost(spent.wall_seconds, devices, dist.device_name),
                outputs={self.stage: saved.fingerprint},
                items=items,
                tables=tables,
                metrics=self.folder / METRICS_FILE,
                files=[saved.folder],
                commits=list(dict.fromkeys(saved.state["commits"])),
                code=saved.state["code"],
            )
            report.update(renew=True)
            dist.print0(self.next_commands(following))
        dist.close()

    def next_commands(self, following: str) -> str:
        """Lines printed after training: the checkpoint folder and the next commands."""
        stage, tag, dist = self.stage, self.folder.name, self.dist
        ranks = os.environ.get("LOCAL_WORLD_SIZE", dist.world_size)
        many = f"torchrun --nproc_per_node={ranks} -m scripts.{{}} --"
        command = many if dist.world_size > 1 else "python -m scripts.{}"
        lines = [f"checkpoint: {self.folder}/step_{self.progress.step:06d}"]
        if following:
            lines.append(f"next: {command.format(following)} --model_tag={tag}")
        if stage in ("sft", "dpo", "rl"):
            lines.append(f"chat: python -m scripts.chat_cli --source={stage} --model_tag={tag}")
        return "\n".join(lines)


def keep_dtype(
    dist: DistContext, cfg: TrainConfig, stage: Stage, tag: str, parent: Checkpoint | None = None
) -> DistContext:
    """
    The ranks with the dtype of the run that will be resumed, if there is one, else of the parent;
    see `DistContext.keep_dtype`.
    """

    def read() -> dict[str, str] | None:
        own = newest_state(stage_folder(stage) / tag) if cfg.resume == "auto" else None
        return (own or (parent.state if parent else {})).get("compute")

    return dist.keep_dtype(cfg.dist, dist.on_main(read))


def describe_dtype(dist: DistContext) -> str:
    """The compute dtype, for a summary."""
    return str(dist.dtype).removeprefix("torch.") + (" with fp8 matmuls" if dist.fp8 else "")


def skip_if_finished(
    section: str, settings: dict[str, Any], inputs: dict[str, str], cfg: Any, dist: DistContext
) -> bool:
    """
    Whether --skip_if_done is set and this stage is already recorded, with its checkpoint intact.
    `cfg` has skip_if_done.
    """
    key = records.stage_key(settings, inputs)
    found = cfg.skip_if_done and dist.on_main(
        lambda: records.find_finished(section, key) is not None
    )
    if found:
        dist.print0(f"{section}: finished already, skipped")
    return found
