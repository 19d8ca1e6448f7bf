"""
Benchmark a training step, and compare it with transformers.

    shape, random rows -> steps -> seconds of forward, backward and update

Timing does not depend on token values, so this needs neither data nor tokenizer.
"""

import gc
import math
import time
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any

import torch

from nanochat.bench.table import alternate, compare, print_table
from nanochat.checkpoint import build_model
from nanochat.dist import DistContext, peak_flops
from nanochat.gpt import GPTConfig
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.scaling import make_rules
from nanochat.train import Compile, set_kernels

NOTE = "Training step on random tokens, median times."
PEER = " Peer: the same model of transformers with autocast and PyTorch's AdamW."


def bench_training(
    cfg: GPTConfig,
    rows: int,
    dist: DistContext,
    compile: Compile,
    repeats: int,
    peers: ModuleType | None,
) -> None:
    """Time steps on `rows` rows of random tokens, ours and those of a peer; rank 0 reports."""
    model = build_model(cfg, dist.device, dist.dtype, seed=0)
    optimizer = MuonAdamW(model, make_rules(OptimConfig(weight_decay=0.1), cfg.d_model), dist)
    wanted: Compile = "on" if peers and compile == "auto" else compile  # as a peer
    compiled = set_kernels(wanted, model, math.inf, dist, optimizer) != "off"
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

    first = sum(step())  # includes compilation
    train_step = peers and peers.make_train_step(model, dist, compiled)
    works: list[Any] = [step, partial(train_step, ids) if train_step else None]
    times, others = alternate(repeats, *works)
    if not dist.is_main:
        return
    tokens = y.numel() * dist.world_size
    seconds = sum(parts := list(map(median, zip(*times, strict=True))))
    flops = model.flops_per_token() * y.numel() / seconds
    peak = peak_flops(dist.device_name)
    case = f"depth {cfg.n_layer}"
    if dist.world_size > 1:  # under torchrun
        case += f", {dist.world_size} processes"
    rates, other_rates = [tokens / sum(t) for t in times], [tokens / t for t in others]
    cells = {
        "kernels": f"{model.backend}, {'compiled' if compiled else 'eager'}",
        "tokens per step": f"{tokens:,}",
        "step (ms)": f"{seconds * 1e3:,.0f}",
        "forward, backward, update": ", ".join(f"{t / seconds:.0%}" for t in parts),
        "MFU": f"{flops / peak:.1%}" if peak else "",
        "first step (s)": f"{first:.0f}",
        "peak memory (MiB)": f"{dist.peak_memory_bytes() / 2**20:,.0f}",
    }
    peer = "transformers" if peers else ""
    found = compare(case, "tokens/s", rates, peer, other_rates)
    print_table("Training", NOTE + PEER * bool(peers), [found | cells])


def clock(dist: DistContext) -> float:
    """Current time after synchronizing the device."""
    dist.synchronize()
    return time.perf_counter()
