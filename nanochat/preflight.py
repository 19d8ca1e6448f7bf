"""
Preflight checks: working kernels, micro-batch size, memory, disk space and training time.

    model shapes, device -> probe forward and backward -> first kernel that works, in order of speed
    model, machine -> micro-batch size, seconds, memory and disk bytes -> summary, or UsageError

Memory and time are measured on real micro-batches, which also trigger compilation. None of this
changes a run's results except for rounding. A run that cannot finish for lack of memory or
disk space is rejected with a suggested fix.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import hardware
from nanochat.attention import Backend, attend, attend_plain, load_fa3, make_mask, segment_mask
from nanochat.common import UsageError, free_bytes, require_free
from nanochat.distributed import DistContext
from nanochat.fp8 import fp8_linear
from nanochat.gpt import GPT, GPTConfig, Linear
from nanochat.optim import MuonAdamW, reduce_gradients, state_bytes

# ---- Kernel selection: each kernel is probed once ------------------------------------------------
# A kernel that can be imported may still fail on this device or return wrong results; then it is
# skipped with a message. The choice affects only rounding.


CHARS_PER_TOKEN = 3  # rough, for time estimates
COMPILE_SECONDS = 45.0  # compile time on two CPU cores (measured: d4, 2026-11)
COMPILE_GAIN = 0.25  # fraction of training time saved by compiling on CPU
# Compiling the decode step twice takes 15 s on two cores; it saves 0.06 ms per token (64 slots, d4)
FUSED_ENGINE_TOKENS = 1_000_000
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


def probe_attention(
    backend: Backend, cfg: GPTConfig, machine: DistContext, compiled: bool = False
) -> str | None:
    """
    Run a kernel forward and backward on this model's shapes, with each window, without and with a
    segment mask (pretraining and finetuning). Returns what is wrong with its results or gradients,
    or None. Raises any error the kernel raises.

    On a GPU, `compiled` compiles it as in training, because PyTorch then picks other kernels. All
    ranks must probe FlashAttention 3.
    """
    B, T, run = 2, cfg.max_seq_len, attend
    if backend == "fa3":
        machine.on_node("loading FlashAttention 3", partial(load_fa3, machine.device))
        load_fa3(machine.device)  # from the cache that the first rank of this node has filled
    if compiled and machine.device.type == "cuda":
        run = torch.compile(attend, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, heads, cfg.head_dim) for heads in (cfg.n_head, cfg.n_kv_head, cfg.n_kv_head)]
    qkv = [torch.randn(shape, generator=generator) for shape in shapes]
    starts = torch.zeros(B, T, dtype=torch.int64)
    starts[0, T // 2] = starts[1, T // 3] = 1  # a different mask for each row
    segments = starts.cumsum(1).to(machine.device)
    # Largest error that rounding explains for inputs of unit variance: TF32 and float16 have a
    # relative error of 2^-11, and the largest of many normal values is near 5
    full = machine.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    tolerance = 0.05 if machine.dtype == torch.bfloat16 else 1e-3 if full else 1e-2
    for window in dict.fromkeys(map(cfg.window, range(cfg.n_layer))):
        for own in (None, segments):
            where = "" if own is None else " with a segment mask"
            q, k, v = (x.to(machine.device, machine.dtype, copy=True).requires_grad_() for x in qkv)
            mask = make_mask(backend, q, window, own)
            y = run(q, k, v, window=window, backend=backend, mask=mask)
            if y.dtype != q.dtype:
                return f"returns {y.dtype} for {q.dtype} inputs{where}"
            y.float().square().sum().backward()
            if any(x.grad is None or not bool(x.grad.isfinite().all()) for x in (q, k, v)):
                return f"has missing or non-finite gradients{where}"
            seen = None if own is None else segment_mask(own, window)
            error, wrong = reference_errors(y, q, k, v, window, seen)
            if not error < tolerance:
                return f"differs from the reference by {error:.3g}{where}"
            if not wrong < 0.05:
                return f"has gradients that differ from the reference by {wrong:.1%}{where}"
    return None


def reference_errors(
    y: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None
) -> tuple[float, float]:
    """
    Largest absolute error of the outputs `y`, and largest error of the gradients of q, k and v
    divided by the largest gradient; the gradients are those of the sum of squared outputs.

    The reference is in float64 (unaffected by TF32), over the heads of the first and the last
    group. One group at a time, because the (T, T) scores of several may not fit in memory.
    """
    R = q.size(2) // k.size(2)

    def errors(g: int) -> Tensor:
        parts = [(x, slice(g * n, (g + 1) * n)) for x, n in ((q, R), (k, 1), (v, 1))]
        query, key, value = exact = [in_float64(x[:, :, own]).requires_grad_() for x, own in parts]
        seen = None if mask is None else mask.to(query.device)
        want = attend_plain(query, key, value, window, q.size(-1) ** -0.5, seen)
        want.square().sum().backward()
        wrong = [(in_float64(y[:, :, parts[0][1]]) - want.detach()).abs().max()]
        for (x, own), each in zip(parts, exact, strict=True):
            assert x.grad is not None and each.grad is not None
            difference = in_float64(x.grad[:, :, own]) - each.grad
            wrong.append(difference.abs().max() / each.grad.abs().max())
        return torch.stack(wrong)

    worst = torch.stack([errors(g) for g in {0, k.size(2) - 1}]).amax(0)  # NaN if any is NaN
    return float(worst[0]), float(worst[1:].max())


def in_float64(x: Tensor) -> Tensor:
    """Detached copy of `x` in float64; on the CPU if it was on MPS, which has no float64."""
    return x.detach().to("cpu" if x.device.type == "mps" else x.device, torch.float64)


def choose_attention(cfg: GPTConfig, machine: DistContext, compiled: bool = False) -> Backend:
    """
    First kernel that works on all ranks: fa3 or flex (CUDA), blocks (compiled CPU), sdpa, plain.
    """
    wanted: list[Backend] = ["sdpa"]
    if machine.device.type == "cuda":
        wanted = ["fa3", "flex", "sdpa"]
        if torch.are_deterministic_algorithms_enabled():
            wanted.remove("fa3")  # its backward pass is not, and does not say so
    elif machine.device.type == "cpu" and compiled:
        wanted = ["blocks", "sdpa"]
    for backend in wanted:
        probe = partial(probe_attention, backend, cfg, machine, compiled)
        if probe_works(f"attention kernel {backend}", probe, machine):
            return backend
    return "plain"


def choose_autotune(cfg: KernelConfig, machine: DistContext, train_seconds: float) -> bool:
    """Whether to autotune: as configured; by default, in long runs on a GPU of AUTOTUNED."""
    if cfg.autotune is not None:
        return cfg.autotune
    known = any(name in machine.device_name for name in AUTOTUNED)
    return known and machine.broadcast(train_seconds) > AUTOTUNE_SECONDS


def choose_compile(cfg: KernelConfig, machine: DistContext, train_seconds: float) -> bool:
    """
    Whether to compile: as configured; by default, if it works and saves more time than it takes.
    All ranks agree, using `train_seconds` of the main rank.
    """
    if cfg.compile is not None:
        return cfg.compile
    saved_seconds = machine.broadcast(train_seconds) * COMPILE_GAIN
    kind = machine.device.type
    if kind == "mps" or (kind == "cpu" and saved_seconds < COMPILE_SECONDS):
        return False
    return probe_works("torch.compile", partial(probe_compiler, machine.device), machine)


def probe_compiler(device: torch.device) -> None:
    """
    Compile a tiny function with a scalar on the CPU, which needs a C++ compiler, too. Raises any
    error of the compiler.
    """
    example = torch.ones(8, device=device), torch.tensor(0.5)
    torch.compile(lambda x, scalar: (x * (1 - scalar).sqrt()).sum(), dynamic=False)(*example)


def probe_works(name: str, probe: Callable[[], str | None], machine: DistContext) -> bool:
    """Whether a probe returns None on all ranks; otherwise prints its result or error."""
    try:
        why = probe()
    except Exception as error:  # any error means it does not work here
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    faults = [each for each in machine.gather(why) if each is not None]
    if faults:
        machine.print0(f"skipping {name}: {faults[0]}")
    return not faults


def choose_engine_compile(wanted: bool | None, machine: DistContext, most_tokens: int) -> bool:
    """
    Whether to compile the decode step: as `wanted`; if that is None, on a GPU, and on a CPU only
    for FUSED_ENGINE_TOKENS or more tokens. most_tokens: maximum number of tokens to generate.
    """
    if wanted is None and machine.device.type == "cpu" and most_tokens < FUSED_ENGINE_TOKENS:
        return False
    return choose_compile(KernelConfig(compile=wanted), machine, float("inf"))


def set_kernels(
    cfg: KernelConfig, model: GPT, machine: DistContext, seconds: float, optimizer: Any = None
) -> bool:
    """
    Set kernels; compile if worthwhile for `seconds` of training. Returns whether compiled. Raises
    UsageError if a GPU would train without compilation although that was not asked for.
    """
    compiled = choose_compile(cfg, machine, seconds)
    required = machine.device.type == "cuda" and cfg.compile is None
    if optimizer is not None and required and not compiled:
        raise UsageError(
            f"torch.compile does not work on this {machine.device_name} (reason above)",
            "install a C++ compiler and Python's headers (apt-get install g++ python3-dev), or use "
            "--compile=0, which is several times slower",
        )
    backend = choose_attention(model.cfg, machine, compiled)
    for block in model.blocks:
        block.attention.backend = backend
    if compiled:
        model.compile(mode="max-autotune-no-cudagraphs" if cfg.autotune else None)
    if compiled and isinstance(optimizer, MuonAdamW):
        optimizer.compiled = True
    return compiled


def prepare_scoring(
    cfg: KernelConfig, model: GPT, tokens: int, gpu_rows: int, machine: DistContext
) -> int:
    """Set kernels to score `tokens` tokens. Returns the default number of rows per forward pass."""
    set_kernels(cfg, model, machine, estimate_seconds(model, tokens, machine) / 3)  # no backward
    on_cpu = machine.device.type == "cpu"
    return max(1, CPU_TOKENS // model.cfg.max_seq_len) if on_cpu else gpu_rows


def enable_fp8(model: GPT, machine: DistContext) -> None:
    """
    Train the matrices inside the layers and the LM head in fp8, which multiplies multiples of 16
    only. Embeddings, gates and attention are unchanged. Raises UsageError if fp8 does not work for
    this model on every rank's device.
    """
    linear = [layer for layer in model.modules() if isinstance(layer, Linear)]
    layers = [layer for layer in linear if not any(n % 16 for n in layer.weight.shape)]
    fault = None
    try:
        for shape in {tuple(layer.weight.shape) for layer in layers}:
            weight = torch.zeros(shape, device=machine.device, requires_grad=True)
            x = torch.zeros(model.cfg.max_seq_len, shape[1], device=machine.device)
            fp8_linear(x.to(machine.dtype).requires_grad_(), weight).sum().backward()
    except RuntimeError as error:  # also NotImplementedError
        fault = str(error).partition("\n")[0] or repr(error)
    if faults := [each for each in machine.gather(fault) if each]:
        raise UsageError(
            f"fp8 does not work on {machine.device_name}: {faults[0]}", "omit --dtype=fp8"
        )
    for layer in layers:
        layer.fp8 = True


# ---- Memory and time -----------------------------------------------------------------------------


CPU_TOKENS = 8192  # per CPU micro-batch; larger is no faster (measured: d4, 2026-11)
GPU_EFFICIENCY = 0.4  # fraction of peak FLOP/s that the initial time estimate assumes
# The same, as a fraction of measured matmul FLOP/s (CPU, d4 compiled, 2026-11)
MATMUL_EFFICIENCY = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 0.75}
GPU_RESERVE = 2 << 30  # bytes for NCCL and cuBLAS, which allocate in the first steps
COMPILED_SHARE = 0.7  # of eager memory per row; measured: 0.73 at d8, 0.95 at d24 (torch 2.15)
RATE_SECONDS = 0.5  # duration of the matmul benchmark, long enough for a CPU to raise its clock
SMALLER = "a smaller --depth or --max_seq_len, or a larger machine"
LET_CHOOSE = "omit --device_batch_size to use the largest size that fits"


def matrix_rate(machine: DistContext, width: int) -> float:
    """Highest measured matmul FLOP/s of this device at the model's width, in the compute dtype."""
    a = torch.randn(4096, width, device=machine.device).to(machine.dtype)
    b = torch.randn(width, 4 * width, device=machine.device).to(machine.dtype)
    for _ in range(3):
        torch.mm(a, b)
    machine.synchronize()
    fastest, started = math.inf, time.perf_counter()
    while (begun := time.perf_counter()) - started < RATE_SECONDS:
        torch.mm(a, b)
        machine.synchronize()
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * 4096 * width * 4 * width / fastest


def estimate_seconds(model: GPT, tokens: int, machine: DistContext) -> float:
    """
    Rough training time for `tokens` tokens on all ranks in seconds, before the first step is timed.
    Each rank measures its own device, so estimates differ.
    """
    if peak := hardware.peak_flops(machine.device_name):
        rate = peak * GPU_EFFICIENCY
    else:
        rate = matrix_rate(machine, model.cfg.d_model) * MATMUL_EFFICIENCY[machine.dtype]
    return model.flops_per_token() * tokens / (rate * machine.world_size)


def max_rows(model: GPT, trainable: Any, machine: DistContext, grad_bytes: int) -> int:
    """
    Micro-batch size to try first, equal on all ranks. On a CPU, about CPU_TOKENS tokens; on a GPU
    or MPS, what fits alongside the gradients (`grad_bytes`), if compiled blocks use COMPILED_SHARE
    of eager memory (on MPS, nothing is compiled), and on MPS at most CPU_TOKENS tokens.
    """
    T, device = model.cfg.max_seq_len, machine.device
    if device.type == "cpu":
        return max(1, CPU_TOKENS // T)
    used = []
    with suppress(torch.OutOfMemoryError):
        for rows in (1, 2):  # the difference is the activation memory per row
            ids = torch.zeros(rows, T, dtype=torch.int64, device=device)
            loss = trainable.loss(ids, ids)
            used.append(hardware.used_memory_bytes(device))
            del loss
    torch.cuda.empty_cache()
    room = hardware.free_memory_bytes(device) - GPU_RESERVE - grad_bytes
    each = max(1, used[1] - used[0]) if len(used) == 2 else room / 2
    each *= COMPILED_SHARE if device.type == "cuda" else 1
    most = CPU_TOKENS // T if device.type == "mps" else room
    return int(min(machine.gather(max(1, int(min(room / each, most))))))


def rehearse(
    trainable: Any,
    optimizer: torch.optim.Optimizer,
    machine: DistContext,
    ids: Tensor,
    device_rows: int,
) -> tuple[int, float, float] | None:
    """
    Peak bytes of a step, seconds per micro-batch and per update, or None if any rank runs out of
    memory. Does not change the weights.

    Takes two steps of two micro-batches of `device_rows` rows of `ids` (4, B, T) each. Gradients
    accumulate as in a training step of B rows; the updates change nothing. The first step compiles;
    the end of the second is timed. On a CPU, the peak is that of the process.
    """
    seconds = []

    def backward() -> None:
        loss = trainable.loss(ids[0, :device_rows], ids[1, :device_rows])
        (loss / ids[0].numel()).backward()

    def timed(work: Callable[[], None]) -> None:
        machine.synchronize()
        started = time.perf_counter()
        work()
        machine.synchronize()
        seconds.append(time.perf_counter() - started)

    def accumulate() -> None:
        for _ in range(2):
            if device_rows == ids.size(1):
                optimizer.zero_grad()  # no accumulation with one micro-batch per step
            timed(backward)

    hardware.reset_peak_memory(machine.device)
    parts = 2 * (accumulate, partial(timed, partial(rehearse_update, optimizer, machine)))
    done = all(try_run(part, machine) for part in parts)
    peak = hardware.peak_memory_bytes(machine.device)
    optimizer.zero_grad()
    hardware.reset_peak_memory(machine.device)
    return (peak, seconds[-2], seconds[-1]) if done else None


@torch.no_grad()
def rehearse_update(optimizer: torch.optim.Optimizer, machine: DistContext) -> None:
    """Reduce the gradients, and update copies of the weights: compiles and reaches the peak."""
    reduce_gradients(optimizer, machine)
    if isinstance(optimizer, MuonAdamW):
        for group, grad in zip(optimizer.param_groups, optimizer.gradients, strict=True):
            first, params = group["params"][0], group["params"]
            kept = optimizer.state[first]
            optimizer.state[first] = {moment: x.clone() for moment, x in kept.items()}
            try:
                optimizer.update(group, optimizer.local_shard(group, params).clone(), grad)
            finally:  # it may run out of memory
                optimizer.state[first] = kept
    optimizer.zero_grad()


def try_run(work: Callable[[], None], machine: DistContext) -> bool:
    """Run `work`. Returns whether all ranks have enough memory for it."""
    done = False
    with suppress(torch.OutOfMemoryError):
        work()
        done = True
    return not machine.any(not done)


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


def require_memory(model: GPT, machine: DistContext) -> None:
    """
    Raise UsageError if weights, gradients and optimizer state alone do not fit in memory, or on a
    GPU, if the copies that the main rank saves do not fit in host memory.

    model: on the meta device, because a process that allocates too much is killed without an error.
    """
    weights, state, device = 4 * model.num_params(), state_bytes(model), machine.device

    def require(device: torch.device, what: str, needed: int) -> None:
        free, name = hardware.free_memory_bytes(device), hardware.device_name(device)
        _, needed, free = max(machine.gather((needed - free, needed, free)))  # the fullest rank's
        if needed > free:
            raise UsageError(
                f"{model.num_params():,} parameters {what} take {needed / 1e9:.2f} GB, but {name} "
                f"has {free / 1e9:.2f} GB free",
                "a smaller --depth, or more GPUs or a larger machine",
            )

    # the ranks of a host share its memory; each one holds its shard of the optimizer state
    sharing = machine.local_size if device.type != "cuda" else 1
    each = 2 * weights + state // machine.world_size
    require(device, "with gradients and optimizer state", sharing * each)
    if device.type == "cuda":
        # PyTorch rounds pinned blocks up to powers of two: 1.5 times as much at depth 12 to 24
        saved = 3 * (weights + state) // 2 if machine.is_main else 0
        require(torch.device("cpu"), "and optimizer state, copied for each save,", saved)


def require_disk(folder: Path, machine: DistContext, **needed_bytes: int) -> str:
    """
    Check that `folder`'s disk has room for `needed_bytes` (by name); if not, raise UsageError
    with all numbers on every rank. Returns a summary line.
    """
    listed = ", ".join(f"{name} {n / 1e9:.2f} GB" for name, n in needed_bytes.items() if n)
    needed = sum(needed_bytes.values())
    check = partial(require_free, folder, needed, f"the run ({listed})", "a smaller --keep")
    machine.on_main("checking the disk", check)
    return f"{listed or 'nothing to write'}; {free_bytes(folder) / 1e9:.2f} GB free in {folder}"


def describe_dtype(machine: DistContext) -> str:
    """The compute dtype, for a summary."""
    return str(machine.dtype).removeprefix("torch.") + (" with fp8 matmuls" if machine.fp8 else "")


def describe_run(model: GPT, machine: DistContext, compiled: bool) -> dict[str, str]:
    """Device, kernels and model of a run, for its summary."""
    cfg, total = model.cfg, model.num_params()
    matrices = sum(map(model.layer_params, range(cfg.n_layer)))
    split = f"{matrices / 1e6:.1f}M in matrices, {(total - matrices) / 1e6:.1f}M in embeddings"
    mode = "compiled" if compiled else "eager"
    dtype = describe_dtype(machine)
    return {
        "device": f"{machine.device_name} x {machine.world_size}, compute in {dtype}",
        "kernels": f"attention {model.blocks[0].attention.backend}, {mode}",
        "model": f"{total:,} parameters ({split} and head): {cfg.n_layer} layers, "
        f"width {cfg.d_model}, {cfg.n_head} heads of {cfg.head_dim}, vocabulary {cfg.vocab_size:,}",
    }
