"""
Metrics of a recursive model by loop: loss, bits per byte, states.

    training step -> {loss_loop_1, ..., total_loss}
    validation batches -> bpb after each loop -> {bpb_loop_1, ..., refinement_percent}
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch

from nanochat.common import StopRequest
from nanochat.dist import DistContext
from nanochat.eval_bpb import Batch, Validation
from nanochat.recursion.model import RecursiveGPT


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


def step_metrics(model: RecursiveGPT, dist: DistContext) -> dict[str, float]:
    """
    Return the loss of each supervised loop and the total loss, in nats per token over all ranks.
    Every rank must call this.
    """
    sums = dist.sum(*map(float, model.noted.values()))
    found = dict(zip(model.noted, sums, strict=True))
    counted = found.pop("counted")
    return {name: nats / counted if counted else 0.0 for name, nats in found.items()}


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
