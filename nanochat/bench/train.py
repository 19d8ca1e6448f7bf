"""
Benchmark a training step and compare it with a measured roofline, and with transformers.

    shape, random rows -> steps -> seconds of forward, backward and update; share of the roofline

The roofline is the time of a step's matmuls alone, measured in the same run. Timing does not
depend on token values, so this needs neither data nor tokenizer.
"""

import gc
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanochat.bench.table import alternate, compare, print_table
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext, peak_flops
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import POLAR_EXPRESS, MuonAdamW, OptimConfig
from nanochat.scaling import make_rules
from nanochat.train import KernelConfig, set_kernels

TIMED_COPY_BYTES = 256 << 20  # larger than any cache
WARMUP_STEPS = 2
NOTE = """\
Tokens per second of a training step (forward, loss, backward, update) on random tokens. Plain
architecture: the one that transformers implements too, compared with its model, autocast and
PyTorch's AdamW. All other rows are the default architecture with Muon, without a peer. Times are
medians; memory is per process."""


def bench_training(
    cfg: GPTConfig,
    rows: int,
    dist: DistContext,
    kernels: KernelConfig,
    repeats: int,
    peer: str = "",
    peers: ModuleType | None = None,
) -> None:
    """Time steps on `rows` rows of random tokens, ours and those of a peer; rank 0 reports."""
    model = build_model(cfg, dist.device, dist.dtype, seed=0)
    optimizer = MuonAdamW(model, make_rules(OptimConfig(weight_decay=0.1), cfg.d_model), dist)
    compiled = bool(set_kernels(kernels, model, math.inf, dist, optimizer).compile)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(cfg.vocab_size, (rows, cfg.max_seq_len + 1), generator=generator)
    ids = ids.to(dist.device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    gc.freeze()  # as in the training loop

    def step() -> tuple[float, float, float]:
        """Seconds of forward, backward and update."""
        started = clock(dist)
        loss = model.loss(x, y) / y.numel()
        forward = clock(dist)
        loss.backward()
        backward = clock(dist)
        optimizer.reduce_gradients()
        optimizer.step()
        return forward - started, backward - forward, clock(dist) - backward

    products, first = [matmul_seconds(model, rows, dist)], sum(step())  # includes compilation
    train_step = peers and peers.make_train_step(model, dist, compiled)
    works: list[Any] = [step, partial(train_step, ids) if train_step else None]
    times, others = alternate(repeats, *works, num_warmup=WARMUP_STEPS)
    products.append(matmul_seconds(model, rows, dist))  # again: timings drift
    if not dist.is_main:
        return
    tokens = y.numel() * dist.world_size
    forward, backward, update = map(median, zip(*times, strict=True))
    seconds, least = forward + backward + update, mean(products)
    flops = model.flops_per_token() * y.numel() / seconds
    peak = peak_flops(dist.device_name)
    case = f"depth {cfg.n_layer}{', plain architecture' if peer else ''}"
    if dist.world_size > 1:  # under torchrun
        case += f", {dist.world_size} processes"
    rates, other_rates = [tokens / sum(t) for t in times], [tokens / t for t in others]
    cells = {
        "kernels": f"{model.blocks[0].attention.backend}, {'compiled' if compiled else 'eager'}",
        "tokens per step": f"{tokens:,}",
        "step (ms)": f"{seconds * 1e3:,.0f}",
        "forward and loss (% of step)": f"{forward / seconds:.0%}",
        "backward (% of step)": f"{backward / seconds:.0%}",
        "update (% of step)": f"{update / seconds:.0%}",
        "matmuls alone (ms)": f"{least * 1e3:,.0f}",
        "TFLOP/s": f"{flops / 1e12:.3f}",
        "MFU": f"{flops / peak:.1%}" if peak else "",
        "first step (s)": f"{first:.0f}",
        "peak memory (MiB)": f"{dist.peak_memory_bytes() / 2**20:,.0f}",
    }
    found = compare(case, "tokens/s", rates, peer, other_rates, least / seconds)
    print_table("Training", NOTE, [found | cells])


def matmul_seconds(model: GPT, rows: int, dist: DistContext) -> float:
    """
    Seconds that a training step's matmuls take on their own: the forward and both backward matmuls
    of every matrix, the causal half of attention, and Muon's matmuls. For those, the matrices of
    each shape are sharded over ranks, and only this rank's shard counts.
    """
    cfg, M = model.cfg, rows * model.cfg.max_seq_len

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=dist.device).to(dist.dtype)

    def seconds(a: Tensor, b: Tensor) -> float:
        return median(time_calls(lambda: a @ b, dist, 7))

    shapes = Counter(tuple(p.shape) for block in model.blocks for p in block.parameters())
    spent = 0.0
    for shape, count in shapes.items():
        x = draw(math.ceil(count / dist.world_size), min(shape), max(shape))
        gram = x @ x.mT
        for a, b in ((x, x.mT), (gram, gram), (gram, x)):
            spent += len(POLAR_EXPRESS) * seconds(a, b)
    shapes[tuple(model.head.weight.shape)] += 1
    for (N, K), count in shapes.items():
        x, weight, slope = draw(M, K), draw(N, K), draw(M, N)
        for a, b in ((x, weight.mT), (slope, weight), (slope.mT, x)):
            spent += count * seconds(a, b)
    heads, T, D = rows * cfg.n_head, cfg.max_seq_len, cfg.head_dim
    q, scores = draw(heads, T, D), draw(heads, T, T)
    # two matmuls have an output (T, T): scores or their gradient; four have an output (T, D)
    return spent + cfg.n_layer / 2 * (2 * seconds(q, q.mT) + 4 * seconds(scores, q))


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
