"""
Before a long run: what works here, what fits, and how long it will take.

    model, machine -> kernels that passed a real probe, rows per device, seconds, bytes -> printed

Every optional kernel is run once, forward and backward, against the plain definition; one that
fails is left out with a printed line. Memory and time are measured on real micro-batches, which
also compile what is compiled. Changes nothing about the result of a run.
"""

import shutil
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanochat.attention import Backend, attend, attend_plain
from nanochat.gpt import GPT, GPTConfig
from nanochat.hardware import known_peak, peak_memory_bytes, used_memory_bytes
from nanochat.loss import Trainable
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW

CPU_TOKENS = 8192  # tokens of one micro-batch on a CPU: more gains nothing, measured d4, 2026-11
GPU_EFFICIENCY = 0.4  # share of the peak that a first estimate of the time assumes
CPU_EFFICIENCY = 0.5  # the same for the measured matrix rate: d4 compiled, 2026-11
COMPILE_SECONDS = 45.0  # what compiling costs on two CPU cores, measured d4, 2026-11
COMPILE_GAIN = 0.25  # share of the time that it saves there
GPU_FILL = 0.9  # of the free memory


@dataclass(frozen=True)
class KernelConfig:
    attention: Literal["sdpa", "flex", "fa3", "plain"] | None = None
    """Attention kernel. Default: the fastest that passes its probe here."""
    compile: bool | None = None
    """Fuse the model with torch.compile. Default: on a GPU, and on a CPU where the run is long
    enough to earn the compilation back."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


def probe_attention(backend: Backend, cfg: GPTConfig, machine: Machine) -> str | None:
    """Run a kernel forward and backward on this model's shapes. Returns why it failed, or None."""
    T = min(cfg.max_seq_len, 256)
    window = next((w for w in map(cfg.window, range(cfg.n_layer)) if w is not None), None)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        x = torch.randn(1, T, heads, cfg.head_dim, generator=generator)
        return x.to(machine.device, machine.dtype).requires_grad_()

    q, k, v = draw(cfg.n_head), draw(cfg.n_kv_head), draw(cfg.n_kv_head)
    window = None if window is None else min(window, T // 2)
    try:
        got = attend(q, k, v, window=window, backend=backend)
        got.float().square().sum().backward()
        machine.synchronize()
    except Exception as error:  # whatever a kernel raises, it does not work here
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    want = attend_plain(q, k, v, window, cfg.head_dim**-0.5)
    error = float((got.detach().float() - want.detach()).abs().max())
    limit = 0.05 if machine.dtype == torch.bfloat16 else 1e-3
    if not error < limit or q.grad is None or not bool(q.grad.isfinite().all()):
        return f"differs from the definition by {error:.3g}"
    return None


def choose_attention(cfg: KernelConfig, model: GPTConfig, machine: Machine) -> Backend:
    """The kernel asked for, or the first of fa3, flex (with windows, on CUDA), sdpa that works."""
    if cfg.attention is not None:
        if why := probe_attention(cfg.attention, model, machine):
            raise ValueError(f"--attention={cfg.attention} does not work here: {why}")
        return cfg.attention
    wanted: list[Backend] = []
    if machine.device.type == "cuda":
        wanted.append("fa3")
        if "S" in model.window_pattern:
            wanted.append("flex")
    for backend in wanted:
        why = probe_attention(backend, model, machine)
        if why is None:
            return backend
        machine.print0(f"attention kernel {backend} left out: {why}")
    return "sdpa"


def choose_compile(cfg: KernelConfig, machine: Machine, train_seconds: float) -> bool:
    """Compile where asked; by default where it saves more time than it takes and works."""
    if cfg.compile is not None:
        return cfg.compile
    if machine.device.type == "mps":
        return False
    if machine.device.type == "cpu" and train_seconds * COMPILE_GAIN < COMPILE_SECONDS:
        return False
    if machine.device.type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        machine.print0("torch.compile left out: it needs a C++ compiler (install g++)")
        return False
    try:
        torch.compile(lambda x: (x * 2).sum(), dynamic=False)(torch.ones(8, device=machine.device))
    except Exception as error:
        machine.print0(f"torch.compile left out: {type(error).__name__}: {error}")
        return False
    return True


def matrix_rate(machine: Machine, width: int, seconds: float = 0.2) -> float:
    """FLOP/s of this device in the compute dtype on products of the model's width."""
    a = torch.randn(4096, width, device=machine.device).to(machine.dtype)
    b = torch.randn(width, 4 * width, device=machine.device).to(machine.dtype)
    count, started = 0, 0.0
    for _ in range(3):
        torch.mm(a, b)
    machine.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        torch.mm(a, b)
        machine.synchronize()
        count += 1
    spent = time.perf_counter() - started
    return 2 * 4096 * width * 4 * width * count / spent


def estimate_seconds(model: GPT, tokens: int, machine: Machine) -> float:
    """Rough training time of `tokens` tokens on all ranks, before the first step was timed."""
    peak = known_peak(machine.device)
    if peak:
        rate = peak.flops * GPU_EFFICIENCY
    else:
        rate = matrix_rate(machine, model.cfg.d_model) * CPU_EFFICIENCY
    return model.flops_per_token() * tokens / (rate * machine.world_size)


def activation_bytes(model: GPT, machine: Machine) -> int:
    """
    What one row keeps for the backward pass, measured on one real row: a first guess of what fits.

    An upper bound where the model is compiled later: compiled blocks keep less.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    row = torch.zeros(1, model.cfg.max_seq_len, dtype=torch.int64, device=machine.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.loss(row, row)
    head = model.head.weight.numel() * 4  # the head's gradient is kept once, not per row
    return max(1, sum(seen.values()) - head)


class Rehearsal(NamedTuple):
    """What a micro-batch takes: the most bytes in use during it, and its seconds."""

    peak_bytes: int
    seconds: float


def rehearse(model: GPT, trainable: Trainable, machine: Machine, rows: int) -> Rehearsal:
    """
    Run a micro-batch of `rows` rows forward and backward, as training will; changes no weight.

    The first of three passes compiles; memory settles with the second. On a CPU the bytes are those
    of the whole process.
    """
    ids = torch.arange(rows * model.cfg.max_seq_len, device=machine.device) % model.cfg.vocab_size
    ids = ids.view(rows, model.cfg.max_seq_len)
    seconds = 0.0
    for _ in range(3):
        machine.synchronize()
        started = time.perf_counter()
        (trainable.loss(ids, ids) / ids.numel()).backward()
        machine.synchronize()
        seconds = time.perf_counter() - started
        for p in model.parameters():
            p.grad = None
    return Rehearsal(peak_memory_bytes(machine.device), seconds)


@dataclass(frozen=True)
class Memory:
    """Bytes a training process needs on its device, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """All else that a micro-batch takes. On a CPU what kernels, compiler and allocator hold too."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def plan_memory(model: GPT, optimizer: MuonAdamW, pass_bytes: int) -> Memory:
    """The stated memory of a run whose micro-batch takes `pass_bytes`, gradients included."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(x.numel() * 4 for part in optimizer.parts for x in part.state.values())
    return Memory(weights, weights, state, max(0, pass_bytes - weights))


def choose_device_rows(
    asked: int | None, rows: int, T: int, row_bytes: int, fixed_bytes: int, machine: Machine
) -> int:
    """
    Rows per micro-batch, a divisor of `rows`, the rows of one rank and step.

    On a CPU about CPU_TOKENS tokens; on a GPU the most that fits beside `fixed_bytes`. Raises
    ValueError naming a value that divides when the one asked for does not.
    """
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    if asked is not None:
        if asked not in divisors:
            if asked > rows:
                return rows
            best = max(d for d in divisors if d <= asked)
            raise ValueError(
                f"device_batch_size {asked} does not divide the {rows} rows of one device and "
                f"step; use {best}"
            )
        return asked
    limit = max(1, CPU_TOKENS // T)
    if machine.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(machine.device)
        limit = max(1, int((free * GPU_FILL - fixed_bytes) / row_bytes))
        limit = int(min(machine.gather(limit)))
    return max(d for d in divisors if d <= limit)


def set_kernels(
    cfg: KernelConfig, model: GPT, machine: Machine, seconds: float, optimizer: Any = None
) -> bool:
    """Set the attention kernel, and compile where `seconds` of work earn it. Returns: compiled?"""
    backend = choose_attention(cfg, model.cfg, machine)
    for block in model.blocks:
        block.attention.backend = backend
    compiled = choose_compile(cfg, machine, seconds)
    if compiled:
        model.compile()
    if compiled and optimizer is not None:
        optimizer.compile()
    return compiled


class Prepared(NamedTuple):
    """How a run will be carried out; none of it changes the result."""

    device_rows: int
    compiled: bool
    memory: Memory
    train_seconds: float
    """From before the first step: micro-batches as they were measured."""


def prepare(
    cfg: KernelConfig,
    model: GPT,
    trainable: Trainable,
    optimizer: MuonAdamW,
    machine: Machine,
    batch_tokens: int,
    tokens_left: int,
    device_batch_size: int | None,
) -> Prepared:
    """
    Choose kernels and micro-batch, set the model up for them, and print what was found.

    `trainable` gives the loss: the model, or what stands around it. A micro-batch nobody asked for
    is made smaller until it fits. Raises torch.OutOfMemoryError where not even one row does.
    """
    T = model.cfg.max_seq_len
    used = used_memory_bytes(machine.device)
    model.checkpoint_activations = cfg.checkpoint_activations
    row_bytes = activation_bytes(model, machine) if machine.device.type == "cuda" else 1
    fixed = plan_memory(model, optimizer, 0).total
    rows = batch_tokens // T // machine.world_size
    device_rows = choose_device_rows(device_batch_size, rows, T, row_bytes, fixed, machine)
    guess = estimate_seconds(model, tokens_left, machine)
    compiled = set_kernels(cfg, model, machine, guess, optimizer)
    for line in describe(model, machine, compiled):
        machine.print0(line)
    machine.print0(f"estimate   {duration(guess)} of training; measuring {device_rows} rows ...")
    while True:
        try:
            rehearsal = rehearse(model, trainable, machine, device_rows)
        except torch.OutOfMemoryError:
            if device_batch_size is not None or device_rows == 1:
                raise
            rehearsal = None
        if not machine.any(rehearsal is None):
            break
        torch.cuda.empty_cache()
        device_rows = max(d for d in range(1, device_rows) if rows % d == 0)
        machine.print0(f"memory     too small for that; trying {device_rows} rows at a time")
    assert rehearsal is not None
    memory = plan_memory(model, optimizer, rehearsal.peak_bytes - used)
    machine.print0(
        f"memory     {memory.total / 2**20:,.0f} MiB a device: weights "
        f"{memory.weights / 2**20:,.0f}, gradients {memory.gradients / 2**20:,.0f}, optimizer "
        f"{memory.optimizer / 2**20:,.0f}, activations {memory.activations / 2**20:,.0f} "
        f"({device_rows} rows at a time)"
    )
    passes = tokens_left / (device_rows * T * machine.world_size)
    return Prepared(device_rows, compiled, memory, passes * rehearsal.seconds)


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3.4 h, 5.1 days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def describe(model: GPT, machine: Machine, compiled: bool) -> list[str]:
    """The lines a run prints about where it runs."""
    cfg = model.cfg
    return [
        f"device     {machine.device_name} x {machine.world_size}, compute in "
        f"{str(machine.dtype).removeprefix('torch.')}, attention "
        f"{model.blocks[0].attention.backend}, {'compiled' if compiled else 'eager'}",
        f"model      {model.num_params():,} parameters: {cfg.n_layer} layers, width {cfg.d_model}, "
        f"{cfg.n_head} heads of {cfg.head_dim}, {cfg.vocab_size:,} ids",
    ]
