"""
Before a long run: what fits, how long it will take, what it will cost; one screen, or a refusal.

    model, machine -> rows per device, seconds, bytes on device and disk -> screen, or Refused

Memory and time are measured on real micro-batches, which also compile what is compiled. Changes
nothing about the result of a run. A run that cannot finish is refused with a way out: too little
memory or disk. One that is merely long is not.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.common import Refused, free_bytes
from nanochat.disk import require_free
from nanochat.environment import accelerators, default_rate
from nanochat.gpt import GPT, GPTConfig
from nanochat.hardware import (
    free_memory_bytes,
    known_peak,
    peak_memory_bytes,
    used_memory_bytes,
)
from nanochat.kernels import KernelConfig, set_kernels
from nanochat.loss import Trainable
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW

CPU_TOKENS = 8192  # tokens of one micro-batch on a CPU: more gains nothing, measured d4, 2026-11
GPU_EFFICIENCY = 0.4  # share of the peak that a first estimate of the time assumes
CPU_EFFICIENCY = 0.5  # the same for the measured matrix rate: d4 compiled, 2026-11
GPU_FILL = 0.9  # of the free memory
SMALLER = "a smaller --depth or --max_seq_len, --checkpoint_activations, or a larger machine"


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
    """
    Rough training time of `tokens` tokens on all ranks, before the first step was timed. Each
    rank measures its own device, so they differ in it.
    """
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
    head = model.readouts * model.head_weight.numel() * 4  # its gradients are not kept per row
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
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(machine.device)
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
    max_seconds: float | None = None,
) -> Prepared:
    """
    Choose kernels and micro-batch, and set the model up for them.

    `max_seconds` may end the training before its tokens do; compiling is not part of them.
    `trainable` gives the loss: the model, or what stands around it. A micro-batch nobody asked for
    is made smaller until it fits. Raises Refused where not even one row does.
    """
    T = model.cfg.max_seq_len
    used = used_memory_bytes(machine.device)
    model.checkpoint_activations = cfg.checkpoint_activations
    try:
        row_bytes = activation_bytes(model, machine) if machine.device.type == "cuda" else 1
    except torch.OutOfMemoryError:
        row_bytes = 1 << 50  # one row at a time is tried, compiled perhaps
    fixed = plan_memory(model, optimizer, 0).total
    rows = batch_tokens // T // machine.world_size
    device_rows = choose_device_rows(device_batch_size, rows, T, row_bytes, fixed, machine)
    guess = estimate_seconds(model, tokens_left, machine)
    compiled = set_kernels(cfg, model, machine, guess, optimizer)
    machine.print0(
        f"preflight  about {duration(min(guess, max_seconds or guess))} of training; measuring "
        f"{device_rows} rows at a time ({'compiles first' if compiled else 'eager'}) ..."
    )
    while True:
        try:
            rehearsal = rehearse(model, trainable, machine, device_rows)
        except torch.OutOfMemoryError:
            rehearsal = None
        if not machine.any(rehearsal is None):
            break
        torch.cuda.empty_cache()
        if device_batch_size is not None and device_rows > 1:
            raise Refused(
                f"--device_batch_size={device_batch_size} takes more memory than "
                f"{machine.device_name} has",
                "leave it out, and the largest that fits is found",
            )
        if device_rows == 1:
            raise Refused(f"not even one row fits on {machine.device_name}", SMALLER)
        device_rows = max(d for d in range(1, device_rows) if rows % d == 0)
        machine.print0(f"preflight  too little memory for that; trying {device_rows} rows")
    assert rehearsal is not None
    memory = plan_memory(model, optimizer, rehearsal.peak_bytes - used)
    passes = tokens_left / (device_rows * T * machine.world_size)
    return Prepared(device_rows, compiled, memory, passes * rehearsal.seconds)


def require_memory(shape: GPTConfig, machine: Machine) -> None:
    """
    Raise Refused naming both numbers where weights, gradients and optimizer alone do not fit.

    Before anything is allocated: a process that asks for too much is killed without a word.
    """
    with torch.device("meta"):
        model = shape.new()
    roles = model.param_roles()
    state = sum(
        p.numel() * (4 if roles[name] == "matrix" else 8) for name, p in model.named_parameters()
    )
    weights = 4 * model.num_params()
    # the ranks of a machine share its memory, and each holds its share of the optimizer's state
    neighbours = machine.local_size if machine.device.type != "cuda" else 1
    needed = neighbours * (2 * weights + state // machine.world_size)
    free = free_memory_bytes(machine.device)
    if machine.any(needed > free):
        raise Refused(
            f"{model.num_params():,} parameters with their gradients and the optimizer's state "
            f"take {needed / 1e9:.2f} GB, but {machine.device_name} has {free / 1e9:.2f} GB free",
            SMALLER,
        )


def require_disk(folder: Path, machine: Machine, **needed_bytes: int) -> str:
    """
    What `folder`'s disk has to hold, by name, as the screen says it. Raises Refused, on every rank,
    naming the numbers where it does not.
    """
    listed = ", ".join(f"{name} {n / 1e9:.2f} GB" for name, n in needed_bytes.items() if n)
    refused = None
    if machine.is_main:
        try:
            require_free(folder, sum(needed_bytes.values()), listed, "a smaller --keep")
        except Refused as error:
            refused = error
    refused = machine.broadcast(refused)
    if refused:
        raise refused
    return f"{listed or 'nothing more'}; {free_bytes(folder) / 1e9:.2f} GB free in {folder}"


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3.4 h, 5.1 days."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def price(seconds: float, hourly_rate: float | None, machine: Machine) -> str:
    """What a time costs; the rate by default what such a machine's GPUs are rented for."""
    if hourly_rate is None and machine.device.type == "cuda":
        nodes = machine.world_size / machine.local_size
        hourly_rate = default_rate(accelerators()["gpus"]) * nodes
    rate = hourly_rate or 0.0
    return f"${seconds / 3600 * rate:.2f} at ${rate:.2f} an hour"


def screen(lines: Mapping[str, str], machine: Machine) -> None:
    """Print what a run is about to do, in one block."""
    machine.print0("\n".join(f"{name:<10} {text}" for name, text in lines.items()))


def describe(model: GPT, machine: Machine, compiled: bool) -> dict[str, str]:
    """Where a run computes, and what."""
    cfg, visits = model.cfg, len(model.cfg.order)
    layers = f"{cfg.n_layer} layers" + (f" in {visits} visits" if visits > cfg.n_layer else "")
    dtype = str(machine.dtype).removeprefix("torch.")
    return {
        "device": f"{machine.device_name} x {machine.world_size}, compute in {dtype}",
        "kernels": f"attention {model.blocks[0].attention.backend} (passed its probe), "
        f"{'compiled' if compiled else 'eager'}",
        "model": f"{model.num_params():,} parameters: {layers}, width {cfg.d_model}, "
        f"{cfg.n_head} heads of {cfg.head_dim}, {cfg.vocab_size:,} ids",
    }


def describe_memory(memory: Memory, device_rows: int, machine: Machine) -> str:
    """What a run takes on each device, and what there is left."""
    mib = {name: getattr(memory, name) / 2**20 for name in memory.__dataclass_fields__}
    return (
        f"{memory.total / 2**20:,.0f} MiB a device with {device_rows} rows at a time: "
        + ", ".join(f"{name} {n:,.0f}" for name, n in mib.items())
        + f"; {free_memory_bytes(machine.device) / 2**20:,.0f} free"
    )
