"""
Metrics of a recursive model by loop: loss, bits per byte, state and gradient norms.

    training step -> {loss_loop_1, ..., total_loss, grad_norm_core, ...}
    validation batches -> bpb after each loop -> {bpb_loop_1, ..., refinement_percent}
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch

from nanochat.common import StopRequest
from nanochat.eval_bpb import Batch, Validation
from nanochat.optim import MuonAdamW
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT


def validation_metrics(
    model: RecursiveGPT, validation: Validation, device_rows: int, stop: StopRequest
) -> dict[str, float]:
    """Validation metrics of the last loop, those of every loop, and those of the states."""
    by_loop, metrics = [], {}
    for loops in range(1, model.cfg.n_loops + 1):
        metrics = validation.score(partial(model.losses_after, loops), device_rows, stop)
        by_loop.append(metrics["val_bpb"])
    batches = (validation.batches(name, device_rows) for name in validation.rows)
    return {
        **metrics,
        **loop_metrics(by_loop),
        **state_metrics(model, itertools.chain.from_iterable(batches)),
    }


def step_metrics(model: RecursiveGPT, optimizer: MuonAdamW, scale: float) -> dict[str, float]:
    """
    Return the loss of each supervised loop and the total loss, in nats per token over all ranks,
    and gradient norms by model part, times `scale`. Every rank must call this, after gradients are
    reduced.
    """
    sums = optimizer.dist.sum(*map(float, model.noted.values()))
    found = dict(zip(model.noted, sums, strict=True))
    counted = found.pop("counted")
    return {
        **{name: nats / counted if counted else 0.0 for name, nats in found.items()},
        **{k: norm * scale for k, norm in gradient_norms(model.cfg, optimizer).items()},
    }


@torch.no_grad()
def gradient_norms(cfg: RecursiveConfig, optimizer: MuonAdamW) -> dict[str, float]:
    """Norms of the reduced gradients by model part, {"grad_norm_core": ...}."""
    dist, groups = optimizer.dist, optimizer.param_groups
    names = [name for group in groups for name in group["param_names"]]
    parts = {name: f"grad_norm_{part_of(name, cfg)}" for name in names}
    squares = dict.fromkeys(sorted(set(parts.values())), 0.0)
    for group, grad in zip(groups, optimizer.gradients, strict=True):
        stacked, sharded = group["kind"] == "muon", group["sharded"]
        rows = grad.flatten(1) if stacked else grad.flatten()[None]
        first = dist.rank * len(rows) if sharded and stacked else 0
        mine = sharded or dist.is_main  # replicated gradients count once
        sums = rows.square().sum(1).tolist()
        for name, square in zip(group["param_names"][first:], sums, strict=False):
            squares[parts[name]] += square * mine
    summed = dist.sum(*squares.values())
    return {part: total**0.5 for part, total in zip(squares, summed, strict=True)}


def part_of(name: str, cfg: RecursiveConfig) -> str:
    """Return the part of a parameter: prelude, core, coda, inject or outside."""
    first, *rest = name.split(".")
    if first != "blocks":
        return "outside"
    if "inject" in rest:
        return "inject"
    layer = int(rest[0])
    return "prelude" if layer in cfg.prelude else "core" if layer in cfg.core else "coda"


def loop_metrics(bpb: Sequence[float]) -> dict[str, float]:
    """
    Return metrics from the bits per byte after 1, 2, ... loops: the values, whether no loop is
    worse than the previous one (1 or 0), and the improvement from first to last in percent.

    The percentage does not measure model quality: a bad first loop makes it large.
    """
    return {
        **{f"bpb_loop_{k}": value for k, value in enumerate(bpb, start=1)},
        "loops_in_order": float(is_monotonic(bpb)),
        "refinement_percent": refinement(bpb),
    }


def is_monotonic(bpb: Sequence[float]) -> bool:
    """Whether no loop is worse than the previous one."""
    return all(after <= before for before, after in pairwise(bpb))


def refinement(bpb: Sequence[float]) -> float:
    """Improvement of the last loop over the first in percent."""
    return 100 * (bpb[0] - bpb[-1]) / bpb[0]


def state_metrics(model: RecursiveGPT, batches: Iterable[Batch]) -> dict[str, float]:
    """State RMS after each loop and cosine similarity to the previous state, on the first batch."""
    first = next(iter(batches), None)
    if first is None:  # rank without validation data
        return {}
    rms, cosines = model.trace(torch.from_numpy(first[0]).to(model.device), model.cfg.n_loops)
    return {
        **{f"state_rms_{k}": value for k, value in enumerate(rms.tolist(), start=1)},
        **{f"state_cosine_{k}": value for k, value in enumerate(cosines.tolist(), start=2)},
    }
