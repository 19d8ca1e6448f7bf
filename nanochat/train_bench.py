"""
The speed of a training step, and how far it is from what the device can do.

    shape, rows of noise -> steps -> seconds of forward, backward and update; share of the ceiling

The ceiling is measured in the same run: the rate of plain matrix products of the model's width, and
the bandwidth of a copy. Noise costs as much as text, so this needs neither data nor tokenizer.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.bench_table import Findings, Rate
from nanochat.gpt import GPT, GPTConfig, build_model
from nanochat.hardware import known_peak, peak_memory_bytes
from nanochat.kernels import KernelConfig, set_kernels
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.preflight import matrix_rate
from nanochat.tokenizer import Tokenizer

COPY_BYTES = 256 << 20  # larger than any cache
WARMUP_STEPS = 2
PATH = "Training"


class StepTimes(NamedTuple):
    """Seconds of one step."""

    forward: float
    backward: float
    update: float


class Work(NamedTuple):
    """A model with rows of noise, and the two calls of a training step around the backward pass."""

    model: GPT
    tokens: Tensor
    targets: Tensor
    forward: Callable[[], Tensor]
    update: Callable[[], None]
    compiled: bool


def prepared(cfg: GPTConfig, rows: int, machine: Machine, kernels: KernelConfig) -> Work:
    """A model of this shape with its optimizer and kernels."""
    model = build_model(cfg, machine.device, machine.dtype, seed=0)
    table = rules(OptimConfig(weight_decay=0.1), cfg.d_model)
    named = dict(model.named_parameters())
    optimizer = MuonAdamW(named, model.param_roles(), table, machine)
    compiled = set_kernels(kernels, model, machine, float("inf"), optimizer)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(cfg.vocab_size, (rows, cfg.max_seq_len + 1), generator=generator)
    ids = ids.to(machine.device)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward() -> Tensor:
        return model.loss(tokens, targets) / tokens.numel()

    def update() -> None:
        optimizer.reduce_gradients()
        optimizer.step(1.0)

    return Work(model, tokens, targets, forward, update, compiled)


def bench_training(
    cfg: GPTConfig,
    rows: int,
    machine: Machine,
    kernels: KernelConfig,
    steps: int,
    repeats: int,
    found: Findings,
) -> None:
    """Time `repeats` times `steps` optimizer steps of `rows` rows each; rank 0 tells of it."""
    rates = [matrix_rate(machine, cfg.d_model, seconds=0.5)]
    bandwidth = copy_bandwidth(machine)
    model, tokens, _, forward, update, compiled = prepared(cfg, rows, machine, kernels)
    times = time_steps(forward, update, machine, WARMUP_STEPS + steps * repeats)
    first, times = sum(times[0]), times[WARMUP_STEPS:]  # the first one compiles
    rates.append(matrix_rate(machine, cfg.d_model, seconds=0.5))  # machines are noisy
    if not machine.is_main:
        return
    ceiling = statistics.mean(rates) * machine.world_size
    medians = StepTimes(*(statistics.median(column) for column in zip(*times, strict=True)))
    all_tokens = tokens.numel() * machine.world_size
    groups = [times[i * steps : (i + 1) * steps] for i in range(repeats)]
    rate = Rate.of(all_tokens / statistics.median(map(sum, group)) for group in groups)
    flops = rate.median * model.flops_per_token()
    peak = known_peak(machine.device)
    memory = peak_memory_bytes(machine.device) / 2**20
    print(
        f"device      {machine.device_name}, {str(machine.dtype).removeprefix('torch.')}, "
        f"attention {model.blocks[0].attention.backend}, {'compiled' if compiled else 'eager'}\n"
        f"model       depth {cfg.n_layer}, width {cfg.d_model}, {model.num_params():,} parameters, "
        f"{cfg.vocab_size:,} ids; {rows} rows of {cfg.max_seq_len}\n"
        f"ceiling     {ceiling / 1e12:.3f} TFLOP/s on products of this width"
        + (f" ({ceiling / peak.flops:.0%} of the data sheet)" if peak else "")
        + f", {bandwidth / 1e9:.1f} GB/s copied\n"
        f"first step  {first:.1f} s\n"
        f"reached     {flops / 1e12:.3f} TFLOP/s"
        + (f", {flops / peak.flops:.1%} of the data sheet" if peak else "")
        + f"\nmemory      {memory:,.0f} MiB at its peak"
    )
    ranks = "" if machine.world_size == 1 else f", {machine.world_size} processes"
    label = f"depth {cfg.n_layer}{ranks}"
    found.line(PATH, label, "tokens/s", rate, ceiling=flops / ceiling)
    step = sum(medians)
    found.note(
        f"Training, {label}: {step * 1e3:.0f} ms a step of {all_tokens:,} tokens: forward and loss "
        f"{medians.forward / step:.0%}, backward {medians.backward / step:.0%}, update "
        f"{medians.update / step:.0%}; first step {first:.0f} s, {memory:,.0f} MiB at the peak; "
        f"the ceiling is {ceiling / 1e12:.2f} TFLOP/s, copies run at {bandwidth / 1e9:.0f} GB/s"
    )
    if machine.world_size == 1 and torch.get_num_threads() > 1:
        found.point("layers, each 64 wider: a training step", cfg.n_layer, step, memory)
    else:
        found.point(
            "processes of one thread: seconds per million tokens",
            machine.world_size,
            1e6 / rate.median,
        )


def bench_against(
    cfg: GPTConfig,
    rows: int,
    machine: Machine,
    kernels: KernelConfig,
    repeats: int,
    found: Findings,
    peer: Callable[[GPT, Tokenizer, Machine, bool], Callable[[Tensor], float]] | None,
) -> None:
    """A step of the same model beside that of `peer`: of ids (B, T + 1) it tells the seconds."""
    work = prepared(cfg, rows, machine, kernels)
    tokenizer = Tokenizer.train(["noise"], 265)
    theirs = peer(work.model, tokenizer, machine, work.compiled) if peer else None
    ids = torch.cat((work.tokens, work.targets[:, -1:]), dim=1)
    ours, others = [], []
    for _ in range(repeats + WARMUP_STEPS):
        ours.append(work.tokens.numel() / sum(time_steps(work.forward, work.update, machine, 1)[0]))
        if theirs:
            others.append(work.tokens.numel() / theirs(ids))
    other = Rate.of(others[WARMUP_STEPS:]) if others else None
    label = f"depth {cfg.n_layer}, plain architecture, {'compiled' if work.compiled else 'eager'}"
    found.line(PATH, label, "tokens/s", Rate.of(ours[WARMUP_STEPS:]), "transformers", other)


def time_steps(
    forward: Callable[[], Tensor], update: Callable[[], None], machine: Machine, steps: int
) -> list[StepTimes]:
    """The seconds of so many training steps, by part."""
    times: list[StepTimes] = []
    for _ in range(steps):
        marks = [clock(machine)]
        loss = forward()
        marks.append(clock(machine))
        loss.backward()
        marks.append(clock(machine))
        update()
        marks.append(clock(machine))
        times.append(StepTimes(marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
    return times


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
