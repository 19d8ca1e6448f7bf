"""
Before a run: which kernels work here, what fits, how long it takes.

    model shapes, device -> probe forward and backward -> the fastest kernel that agrees
    model, machine -> rows per device, seconds, bytes on device and disk -> screen, or UsageError

Memory and time are measured on real micro-batches, which also compile what is compiled. Nothing
here changes what a run computes but rounding. A run that cannot finish, for want of memory or disk,
is rejected with a fix; one that is merely long is not.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat import hardware
from nanochat.attention import Backend, attend, attend_plain, segment_mask
from nanochat.common import UsageError, free_bytes, require_free
from nanochat.distributed import DistContext
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss import Trainable
from nanochat.optim import MuonAdamW, state_bytes

# ---- Choosing kernels: each is probed once, for real ---------------------------------------------
# A kernel that imports may still fail on this device, or compute something else: then it is left
# out with a printed line. The choice changes nothing in what is computed but rounding.


COMPILE_SECONDS = 45.0  # what compiling costs on two CPU cores, measured d4, 2026-11
COMPILE_GAIN = 0.25  # share of the time that it saves there
# Two compilations of the engine's step take 15 s there and save 0.06 ms a token (64 slots, d4)
FUSED_ENGINE_TOKENS = 1_000_000


@dataclass(frozen=True)
class KernelConfig:
    compile: bool | None = None
    """Fuse the model with torch.compile. Default: on a GPU, and on a CPU where the run is long
    enough to amortize compile time."""


def probe_attention(backend: Backend, cfg: GPTConfig, machine: DistContext) -> str | None:
    """
    Run a kernel forward and backward on this model's shapes: as pretraining calls it, with each
    window, and as finetuning does, with a mask of segments. Returns how results or gradients differ
    from the definition, or None. Raises whatever the kernel does.
    """
    B, T = 2, cfg.max_seq_len
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, heads, cfg.head_dim) for heads in (cfg.n_head, cfg.n_kv_head, cfg.n_kv_head)]
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    starts = torch.zeros(B, T, dtype=torch.int64)
    starts[0, T // 2] = starts[1, T // 3] = 1  # the rows of the mask differ
    segments = starts.cumsum(1).to(machine.device)
    # The largest error that rounding explains, for inputs of unit variance: TF32 rounds to 2^-11 of
    # their size, and the largest of many normal ones is near 5
    tf32 = torch.get_float32_matmul_precision() != "highest"
    tolerance = 0.05 if machine.dtype == torch.bfloat16 else 1e-2 if tf32 else 1e-3
    for window in dict.fromkeys(map(cfg.window, range(cfg.n_layer))):
        for mask in (None, segment_mask(segments, window)):
            where = "" if mask is None else " under a mask of segments"
            q, k, v = (x.to(machine.device, machine.dtype, copy=True).requires_grad_() for x in qkv)
            y = attend(q, k, v, window=window, backend=backend, mask=mask)
            if y.dtype != q.dtype:
                return f"returns {y.dtype} for inputs of {q.dtype}{where}"
            y.float().square().sum().backward()
            error = largest_error(y, q, k, v, window, mask)
            if not error < tolerance:
                return f"differs from the definition by {error:.3g}{where}"
            if any(x.grad is None or not bool(x.grad.isfinite().all()) for x in (q, k, v)):
                return f"has gradients that are missing or not finite{where}"
    return None


@torch.no_grad()
def largest_error(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None
) -> float:
    """
    The largest absolute error of `y` against the definition in float64, which TF32 does not touch.
    Of the heads of the first and the last group, one at a time: the (T, T) scores of several may
    not fit the memory.
    """
    device = torch.device("cpu") if q.device.type == "mps" else q.device  # MPS has no float64
    y, q, k, v = (x.to(device, torch.float64) for x in (y, q, k, v))
    mask = None if mask is None else mask.to(device)
    H, R = q.size(2), q.size(2) // k.size(2)

    def error(h: int) -> float:
        query, key, value = q[:, :, [h]], k[:, :, [h // R]], v[:, :, [h // R]]
        want = attend_plain(query, key, value, window, q.size(-1) ** -0.5, mask)
        return float((y[:, :, [h]] - want).abs().max())

    return max(map(error, {*range(R), *range(H - R, H)}))


def choose_attention(cfg: GPTConfig, machine: DistContext, compiled: bool = False) -> Backend:
    """
    The first kernel that works on all ranks: on CUDA fa3, then flex with windows; on a CPU blocks
    where the model is compiled; sdpa, plain.
    """
    wanted: list[Backend] = ["sdpa"]
    if machine.device.type == "cuda":
        wanted = ["fa3", "flex", "sdpa"] if "S" in cfg.window_pattern else ["fa3", "sdpa"]
    elif machine.device.type == "cpu" and compiled:
        wanted = ["blocks", "sdpa"]
    for backend in wanted:
        probe = partial(probe_attention, backend, cfg, machine)
        if works(f"attention kernel {backend}", probe, machine):
            return backend
    return "plain"


def choose_compile(cfg: KernelConfig, machine: DistContext, train_seconds: float) -> bool:
    """
    Compile where asked; by default where it saves more time than it takes and works. The ranks
    agree, by the main one's `train_seconds`.
    """
    if cfg.compile is not None:
        return cfg.compile
    saved_seconds = machine.broadcast(train_seconds) * COMPILE_GAIN
    kind = machine.device.type
    if kind == "mps" or (kind == "cpu" and saved_seconds < COMPILE_SECONDS):
        return False
    return works("torch.compile", partial(probe_compiler, machine.device), machine)


def probe_compiler(device: torch.device) -> None:
    """Compile a trifle. Raises whatever the compiler does."""
    torch.compile(lambda x: (x * 2).sum(), dynamic=False)(torch.ones(8, device=device))


def works(name: str, probe: Callable[[], str | None], machine: DistContext) -> bool:
    """Whether a probe returns None on all ranks; else what it returned or raised is printed."""
    try:
        why = probe()
    except Exception as error:  # whatever it raises, it does not work here
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    faults = [each for each in machine.gather(why) if each is not None]
    if faults:
        machine.print0(f"{name} left out: {faults[0]}")
    return not faults


def choose_fused_engine(wanted: bool | None, machine: DistContext, most_tokens: int) -> bool:
    """
    Whether to fuse the step that writes a token: where asked; by default on a GPU, and on a CPU
    where so many tokens may be written that it pays.
    """
    if wanted is None and machine.device.type == "cpu" and most_tokens < FUSED_ENGINE_TOKENS:
        return False
    return choose_compile(KernelConfig(compile=wanted), machine, float("inf"))


def set_kernels(
    cfg: KernelConfig, model: GPT, machine: DistContext, seconds: float, optimizer: Any = None
) -> bool:
    """Set the attention kernel, and compile where `seconds` of work earn it. Returns: compiled?"""
    compiled = choose_compile(cfg, machine, seconds)
    backend = choose_attention(model.cfg, machine, compiled)
    for block in model.blocks:
        block.attention.backend = backend
    if model.bigrams is not None and machine.device.type == "cpu":
        model.bigrams.use_sparse_gradient()
    if compiled:
        model.compile()
    if compiled and optimizer is not None:
        optimizer.compile()
    return compiled


# ---- What fits, how long it takes ----------------------------------------------------------------


CPU_TOKENS = 8192  # tokens of one micro-batch on a CPU: more gains nothing, measured d4, 2026-11
GPU_EFFICIENCY = 0.4  # share of the peak that a first estimate of the time assumes
CPU_EFFICIENCY = 0.5  # the same for the measured matrix rate: d4 compiled, 2026-11
GPU_RESERVE = 2 << 30  # bytes left to NCCL and cuBLAS, which allocate in the first steps
COMPILED_SHARE = 0.7  # of what eager rows hold; measured: 0.73 at d8, 0.95 at d24 (torch 2.15)
RATE_SECONDS = 0.2  # for which the matrix rate is measured
SMALLER = "a smaller --depth or --max_seq_len, or a larger machine"
LET_CHOOSE = "leave out --device_batch_size, and the largest that fits is found"


def matrix_rate(machine: DistContext, width: int) -> float:
    """FLOP/s of this device in the compute dtype on matmuls of the model's width."""
    a = torch.randn(4096, width, device=machine.device).to(machine.dtype)
    b = torch.randn(width, 4 * width, device=machine.device).to(machine.dtype)
    for _ in range(3):
        torch.mm(a, b)
    machine.synchronize()
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < RATE_SECONDS:
        torch.mm(a, b)
        machine.synchronize()
        count += 1
    return 2 * 4096 * width * 4 * width * count / spent


def estimate_seconds(model: GPT, tokens: int, machine: DistContext) -> float:
    """
    Rough training time of `tokens` tokens on all ranks, before the first step was timed. Each
    rank measures its own device, so they differ in it.
    """
    if peak := hardware.peak_flops(machine.device_name):
        rate = peak * GPU_EFFICIENCY
    else:
        rate = matrix_rate(machine, model.cfg.d_model) * CPU_EFFICIENCY
    return model.flops_per_token() * tokens / (rate * machine.world_size)


def most_rows(model: GPT, trainable: Trainable, machine: DistContext) -> int:
    """
    Rows per micro-batch to try first, the same on all ranks: on a CPU about CPU_TOKENS tokens; on a
    GPU, beside the weights' gradients, what fits if compiled blocks hold COMPILED_SHARE as much.
    """
    T, device = model.cfg.max_seq_len, machine.device
    if device.type != "cuda":
        return max(1, CPU_TOKENS // T)
    used = []
    with suppress(torch.OutOfMemoryError):
        for rows in (1, 2):  # their difference is what a row holds for the backward pass
            ids = torch.zeros(rows, T, dtype=torch.int64, device=device)
            loss = trainable.loss(ids, ids)
            used.append(hardware.used_memory_bytes(device))
            del loss
    torch.cuda.empty_cache()
    room = hardware.free_memory_bytes(device) - GPU_RESERVE - 4 * model.num_params()
    each = max(1, used[1] - used[0]) if len(used) == 2 else room / 2
    return int(min(machine.gather(max(1, int(room / (each * COMPILED_SHARE))))))


def rehearse(
    trainable: Trainable,
    optimizer: MuonAdamW,
    machine: DistContext,
    ids: Tensor,
    update: bool,
    device_rows: int,
) -> tuple[int, float] | None:
    """
    The peak memory in bytes of a step, and the seconds of one micro-batch; None where some rank
    runs out of memory. Changes no weight.

    Runs three micro-batches of `device_rows` rows of `ids` (4, B, T), which accumulate gradients as
    those of a training step of B rows do; with `update`, also applies these and undoes it.

    The first micro-batch compiles, the last is timed. On a CPU the peak is that of the process.
    """
    seconds = []

    def accumulate() -> None:
        for _ in range(3):
            if device_rows == ids.size(1):
                optimizer.drop_gradients()  # a step of one micro-batch holds none before it
            machine.synchronize()
            started = time.perf_counter()
            loss = trainable.loss(ids[0, :device_rows], ids[1, :device_rows])
            (loss / ids[0].numel()).backward()
            machine.synchronize()
            seconds.append(time.perf_counter() - started)

    hardware.reset_peak_memory(machine.device)
    done = fits(accumulate, machine) and (not update or fits(optimizer.rehearse, machine))
    peak = hardware.peak_memory_bytes(machine.device)
    optimizer.drop_gradients()
    hardware.reset_peak_memory(machine.device)
    return (peak, seconds[-1]) if done else None


def fits(work: Callable[[], None], machine: DistContext) -> bool:
    """Do it. Returns whether every rank has the memory for it."""
    done = False
    with suppress(torch.OutOfMemoryError):
        work()
        done = True
    return not machine.any(not done)


def choose_device_rows(asked: int | None, rows: int, limit: int) -> int:
    """
    Rows per micro-batch: the largest divisor up to `limit` of `rows`, the rows of one rank and
    step. Raises ValueError naming a value that divides when the one asked for does not.
    """
    most = max(1, limit) if asked is None else asked
    best = max(d for d in range(1, rows + 1) if rows % d == 0 and d <= most)
    if asked is not None and best < min(asked, rows):
        share = f"{rows} rows of one device and step"
        raise ValueError(f"device_batch_size {asked} does not divide the {share}; use {best}")
    return best


class Prepared(NamedTuple):
    """How a run will be carried out; none of it changes the result."""

    device_rows: int
    compiled: bool
    memory_bytes: int
    """On each device: weights, gradients, optimizer, and all else that a step takes."""
    train_seconds: float
    """From before the first step: micro-batches as they were measured."""


def require_memory(model: GPT, machine: DistContext) -> None:
    """
    Raise UsageError naming both numbers where weights, gradients and optimizer alone do not fit.

    model: on the meta device, before anything is allocated: a process that asks for too much is
    killed without a word.
    """
    state = state_bytes(model)
    weights = 4 * model.num_params()
    # the ranks of a machine share its memory, and each holds its share of the optimizer's state
    neighbours = machine.local_size if machine.device.type != "cuda" else 1
    needed = neighbours * (2 * weights + state // machine.world_size)
    free = hardware.free_memory_bytes(machine.device)
    if machine.any(needed > free):
        raise UsageError(
            f"{model.num_params():,} parameters with their gradients and the optimizer's state "
            f"take {needed / 1e9:.2f} GB, but {machine.device_name} has {free / 1e9:.2f} GB free",
            SMALLER,
        )


def require_disk(folder: Path, machine: DistContext, **needed_bytes: int) -> str:
    """
    What `folder`'s disk has to hold, by name, as the screen says it. Raises UsageError, on every
    rank, naming the numbers where it does not.
    """
    listed = ", ".join(f"{name} {n / 1e9:.2f} GB" for name, n in needed_bytes.items() if n)
    needed = sum(needed_bytes.values())
    check = partial(require_free, folder, needed, listed, "a smaller --keep")
    machine.on_main("checking the disk", check)
    return f"{listed or 'nothing more'}; {free_bytes(folder) / 1e9:.2f} GB free in {folder}"


def describe(model: GPT, machine: DistContext, compiled: bool) -> dict[str, str]:
    """Where a run computes, and what."""
    cfg, roles, total = model.cfg, model.param_roles(), model.num_params()
    matrices = sum(p.numel() for name, p in model.named_parameters() if roles[name] == "matrix")
    split = f"{matrices / 1e6:.1f}M in matrices, {(total - matrices) / 1e6:.1f}M in embeddings"
    mode = "compiled" if compiled else "eager"
    dtype = str(machine.dtype).removeprefix("torch.")
    return {
        "device": f"{machine.device_name} x {machine.world_size}, compute in {dtype}",
        "kernels": f"attention {model.blocks[0].attention.backend} (passed its probe), {mode}",
        "model": f"{total:,} parameters ({split} and head): {cfg.n_layer} layers, "
        f"width {cfg.d_model}, {cfg.n_head} heads of {cfg.head_dim}, {cfg.vocab_size:,} ids",
    }
