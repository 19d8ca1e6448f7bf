"""
The speed of a training step, and how far it is from what the device can do.

    shape, rows of noise -> steps -> seconds of forward, backward and update; share of the ceiling

The ceiling is measured in the same run: the rate of plain matrix products of the model's width, and
the bandwidth of a copy. Noise costs as much as text, so this needs neither data nor tokenizer.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.gpt import GPTConfig, build_model
from nanochat.hardware import known_peak, peak_memory_bytes
from nanochat.kernels import KernelConfig, set_kernels
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.preflight import matrix_rate

COPY_BYTES = 256 << 20  # larger than any cache


@dataclass(frozen=True)
class StepTimes:
    """Medians over the timed steps, in seconds; `first` is the first step, compilation included."""

    first: float
    forward: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.update


def bench_training(
    cfg: GPTConfig, rows: int, machine: Machine, kernels: KernelConfig, steps: int
) -> None:
    """Time `steps` optimizer steps of `rows` rows each and print a table."""
    model = build_model(cfg, machine.device, machine.dtype, seed=0)
    table = rules(OptimConfig(weight_decay=0.1), cfg.d_model)
    named = dict(model.named_parameters())
    optimizer = MuonAdamW(named, model.param_roles(), table, machine)
    ceiling = matrix_rate(machine, cfg.d_model, seconds=1.0)
    bandwidth = copy_bandwidth(machine)
    compiled = set_kernels(kernels, model, machine, float("inf"), optimizer)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(cfg.vocab_size, (rows, cfg.max_seq_len + 1), generator=generator)
    ids = ids.to(machine.device)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward() -> torch.Tensor:
        return model.loss(tokens, targets) / tokens.numel()

    def update() -> None:
        optimizer.reduce_gradients()
        optimizer.step(1.0)

    times = time_steps(forward, update, machine, steps)
    rate = tokens.numel() / times.step
    flops = rate * model.flops_per_token()
    peak = known_peak(machine.device)
    machine.print0(
        f"device      {machine.device_name}, {str(machine.dtype).removeprefix('torch.')}, "
        f"attention {model.blocks[0].attention.backend}, {'compiled' if compiled else 'eager'}\n"
        f"model       depth {cfg.n_layer}, width {cfg.d_model}, {model.num_params():,} parameters, "
        f"{cfg.vocab_size:,} ids; {rows} rows of {cfg.max_seq_len}\n"
        f"ceiling     {ceiling / 1e12:.3f} TFLOP/s on products of this width"
        + (f" ({ceiling / peak.flops:.0%} of the data sheet)" if peak else "")
        + f", {bandwidth / 1e9:.1f} GB/s copied\n"
        f"first step  {times.first:.1f} s\n"
        f"step        {times.step * 1e3:.1f} ms: forward and loss {times.forward * 1e3:.1f}, "
        f"backward {times.backward * 1e3:.1f}, update {times.update * 1e3:.1f}\n"
        f"rate        {rate:,.0f} tokens/s, {flops / 1e12:.3f} TFLOP/s = "
        f"{flops / ceiling:.0%} of the ceiling"
        + (f", {flops / peak.flops:.1%} of the data sheet" if peak else "")
        + f"\nmemory      {peak_memory_bytes(machine.device) / 2**20:,.0f} MiB at its peak"
    )


def time_steps(
    forward: Callable[[], torch.Tensor], update: Callable[[], None], machine: Machine, steps: int
) -> StepTimes:
    """Run and time the three parts of a step; the first two steps warm up."""
    parts: list[tuple[float, float, float]] = []
    for _ in range(steps + 2):
        marks = [clock(machine)]
        loss = forward()
        marks.append(clock(machine))
        loss.backward()
        marks.append(clock(machine))
        update()
        marks.append(clock(machine))
        parts.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
    medians = [statistics.median(column) for column in zip(*parts[2:], strict=True)]
    return StepTimes(sum(parts[0]), *medians)


def clock(machine: Machine) -> float:
    """The time when the device has done what was asked of it."""
    machine.synchronize()
    return time.perf_counter()


def copy_bandwidth(machine: Machine, repeats: int = 5) -> float:
    """Bytes read and written per second by a large copy, the best of `repeats`."""
    source = torch.ones(COPY_BYTES // 4, device=machine.device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        started = clock(machine)
        target.copy_(source)
        best = min(best, clock(machine) - started)
    return 2 * COPY_BYTES / best
