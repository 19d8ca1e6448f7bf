"""
Benchmark a training step and compare it with a measured roofline.

    shape, random rows -> steps -> seconds of forward, backward and update; share of the roofline

The roofline is the time of a step's matmuls alone, measured in the same run. Timing does not
depend on token values, so this needs neither data nor tokenizer.
"""

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.bench.table import BenchLog, Detail, TableLine, alternate
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext, peak_flops
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import POLAR_EXPRESS, MuonAdamW, OptimConfig
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import KernelConfig, set_kernels

TIMED_COPY_BYTES = 256 << 20  # larger than any cache
WARMUP_STEPS = 2
TIMED_HEAD_TOKENS = 512  # for timing LM head matmuls
TABLE = "Training"
NOTE = """\
Tokens per second of a training step (forward, loss, backward, update) on random tokens. Plain
architecture: the one that transformers implements too, compared with its model, autocast and
PyTorch's AdamW. All other rows are the default architecture with Muon, without a peer."""


class StepTimes(NamedTuple):
    """Seconds of one step."""

    forward: float
    backward: float
    update: float


class Work:
    """Model, optimizer, kernels and random packed sequences ("rows") for training steps."""

    def __init__(self, cfg: GPTConfig, rows: int, dist: DistContext, kernels: KernelConfig):
        self.model = build_model(cfg, dist.device, dist.dtype, seed=0)
        table = make_rules(OptimConfig(weight_decay=0.1), cfg.d_model)
        self.optimizer = MuonAdamW(self.model, table, dist)
        chosen = set_kernels(kernels, self.model, float("inf"), dist, self.optimizer)
        self.compiled = bool(chosen.compile)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(cfg.vocab_size, (rows, cfg.max_seq_len + 1), generator=generator)
        self.ids = ids.to(dist.device)
        self.tokens, self.targets = self.ids[:, :-1].contiguous(), self.ids[:, 1:].contiguous()
        self.dist = dist

    def time_steps(self, steps: int) -> list[StepTimes]:
        """Time `steps` training steps."""
        gc.freeze()  # as in the training loop
        times = []
        for _ in range(steps):
            started = clock(self.dist)
            loss = self.model.loss(self.tokens, self.targets) / self.tokens.numel()
            forward = clock(self.dist)
            loss.backward()
            backward = clock(self.dist)
            self.optimizer.reduce_gradients()
            self.optimizer.step()
            ended = clock(self.dist)
            times.append(StepTimes(forward - started, backward - forward, ended - backward))
        return times


def bench_training(
    cfg: GPTConfig,
    rows: int,
    dist: DistContext,
    kernels: KernelConfig,
    steps: int,
    repeats: int,
    found: BenchLog,
) -> None:
    """
    Time `repeats` groups of `steps` steps on `rows` rows each; rank 0 reports.
    """
    bandwidth = read_bandwidth(dist)
    work = Work(cfg, rows, dist, kernels)
    model, tokens = work.model, work.tokens
    products = [matmul_seconds(model, rows, dist)]
    first = sum(work.time_steps(WARMUP_STEPS)[0])  # includes compilation
    times = work.time_steps(steps * repeats)
    products.append(matmul_seconds(model, rows, dist))  # again: timings drift
    if not dist.is_main:
        return
    medians = StepTimes(*(statistics.median(column) for column in zip(*times, strict=True)))
    all_tokens = tokens.numel() * dist.world_size
    groups = [times[i * steps : (i + 1) * steps] for i in range(repeats)]
    rates = [all_tokens / statistics.median(map(sum, group)) for group in groups]
    step, least = sum(medians), statistics.mean(products)
    flops = model.flops_per_token() * tokens.numel() / step
    peak = peak_flops(dist.device_name)
    memory = dist.peak_memory_bytes() / 2**20
    mode = "compiled" if work.compiled else "eager"
    print(
        f"device      {dist.device_name}, {str(dist.dtype).removeprefix('torch.')}, "
        f"attention {model.blocks[0].attention.backend}, {mode}\n"
        f"model       depth {cfg.n_layer}, width {cfg.d_model}, {model.num_params():,} parameters, "
        f"vocabulary {cfg.vocab_size:,}; {rows} rows of {cfg.max_seq_len} tokens\n"
        f"achieved    {flops / 1e12:.3f} TFLOP/s"
        + (f", {flops / peak:.1%} MFU" if peak else "")
        + f"; read bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    label = f"depth {cfg.n_layer}"
    if dist.launch:  # under torchrun: part of a scaling series
        label += f", {dist.world_size} process{'es' if dist.world_size > 1 else ''}"
        threads = torch.get_num_threads()
        label += " of one thread" if dist.device.type == "cpu" and threads == 1 else ""
    found.note(TABLE, NOTE)
    found.line(TableLine(TABLE, label, "tokens/s", rates, roofline=least / step))
    cells = {
        "case": label,
        "tokens per step": f"{all_tokens:,}",
        "step (ms)": f"{step * 1e3:,.0f}",
        "forward and loss (% of step)": f"{medians.forward / step:.0%}",
        "backward (% of step)": f"{medians.backward / step:.0%}",
        "update (% of step)": f"{medians.update / step:.0%}",
        "matmuls alone (ms)": f"{least * 1e3:,.0f}",
        "first step (s)": f"{first:.0f}",
        "peak memory (MiB)": f"{memory:,.0f}",
    }
    found.detail(Detail(TABLE, "Median time of a step, its parts, and memory per process", cells))


def matmul_seconds(model: GPT, rows: int, dist: DistContext) -> float:
    """
    Seconds that a training step's matmuls take on their own: the forward and both backward matmuls
    of every matrix, the causal half of attention, and Muon's matmuls. For those, the matrices of
    each shape are sharded over ranks, and only this rank's shard counts.
    """
    cfg, M = model.cfg, rows * model.cfg.max_seq_len

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=dist.device).to(dist.dtype)

    def seconds(product: Callable[[], Tensor]) -> float:
        return statistics.median(time_calls(product, dist, 7))

    shapes = Counter(tuple(p.shape) for block in model.blocks for p in block.parameters())
    spent = 0.0
    for shape, count in shapes.items():
        short, long = sorted(shape)
        x = draw(math.ceil(count / dist.world_size), short, long)
        gram = x @ x.mT
        for product in (lambda x=x: x @ x.mT, lambda g=gram: g @ g, lambda g=gram, x=x: g @ x):
            spent += len(POLAR_EXPRESS) * seconds(product)
    shapes[tuple(model.head.weight.shape)] += 1
    for (N, K), count in shapes.items():
        m = M if N != cfg.vocab_size else min(M, TIMED_HEAD_TOKENS)
        x, weight, slope = draw(m, K), draw(N, K), draw(m, N)
        three = seconds(lambda x=x, weight=weight: x @ weight.mT)
        three += seconds(lambda slope=slope, weight=weight: slope @ weight)
        three += seconds(lambda slope=slope, x=x: slope.mT @ x)
        spent += count * three * M / m
    heads, T, D = rows * cfg.n_head, cfg.max_seq_len, cfg.head_dim
    q, scores = draw(heads, T, D), draw(heads, T, T)
    # two matmuls have an output (T, T): scores or their gradient; four have an output (T, D)
    both = 2 * seconds(lambda: q @ q.mT) + 4 * seconds(lambda: scores @ q)
    return spent + cfg.n_layer * both / 2


def bench_against(
    cfg: GPTConfig,
    rows: int,
    dist: DistContext,
    kernels: KernelConfig,
    repeats: int,
    found: BenchLog,
    peer: Callable[[GPT, Tokenizer, DistContext, bool], Callable[[Tensor], float]] | None,
) -> None:
    """Compare a step with that of `peer`, which returns a function: ids (B, T + 1) -> seconds."""
    work = Work(cfg, rows, dist, kernels)
    tokenizer = Tokenizer.train(["noise"], 265)
    theirs = peer(work.model, tokenizer, dist, work.compiled) if peer else None
    seconds = alternate(
        repeats,
        lambda: sum(work.time_steps(1)[0]),
        theirs and (lambda: theirs(work.ids)),
        num_warmup=WARMUP_STEPS,
    )
    ours, others = ([work.tokens.numel() / x for x in each] for each in seconds)
    label = f"depth {cfg.n_layer}, plain architecture, {'compiled' if work.compiled else 'eager'}"
    found.line(TableLine(TABLE, label, "tokens/s", ours, "transformers", others))


def clock(dist: DistContext) -> float:
    """Current time after synchronizing the device."""
    dist.synchronize()
    return time.perf_counter()


def read_bandwidth(dist: DistContext) -> float:
    """Read bandwidth in bytes per second: best of nine large sums."""
    source = torch.ones(TIMED_COPY_BYTES // 4, device=dist.device)
    return TIMED_COPY_BYTES / min(time_calls(source.sum, dist, 9))


def time_calls(work: Callable[[], Tensor], dist: DistContext, repeats: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for _ in range(repeats):
        started = clock(dist)
        work()
        times.append(clock(dist) - started)
    return times
