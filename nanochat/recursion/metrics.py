"""
Metrics of a recursive model: losses, bits per byte, states and gradients by loop.

    a step's gradients -> {loss_loop_1, ..., total_loss, grad_norm_core, ...}
    validation rows -> bits per byte after every number of loops -> {bpb_loop_1, ..., refinement}
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from nanochat.distributed import DistContext
from nanochat.eval_bpb import Batch, Bpb, bits_per_byte
from nanochat.evaluators import ValidationLoss
from nanochat.gpt import config_from
from nanochat.optim import MuonAdamW, values
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT
from nanochat.train import Callback

# For checkpoint.ARCHITECTURES, with `callbacks`
new_model, read_config = RecursiveGPT, partial(config_from, RecursiveConfig)


class LoopMetrics(Callback):
    """Draws the supervised loops of each step, and logs losses and gradient norms by loop."""

    def __init__(self, model: RecursiveGPT, optimizer: MuonAdamW, seed: int):
        self.model, self.optimizer, self.seed = model, optimizer, seed

    def before_step(self, step: int, share: float) -> None:
        self.model.begin_step(step, self.seed)

    def after_backward(self, scale: float) -> dict[str, float]:
        return step_figures(self.model, self.optimizer, scale)


class LoopValidation(ValidationLoss):
    """Bits per byte after each loop of a recursive model."""

    model: RecursiveGPT

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        loops = range(1, self.model.cfg.n_loops + 1)
        every = itertools.chain.from_iterable
        batches = every(map(self.batches, self.rows.values()))
        by_loop = bpb_by_loop(self.model, loops, batches, self.token_bytes, self.machine, stopping)
        return {
            "val_bpb": by_loop[-1].value,
            **loop_figures(self.model.cfg, [bpb.value for bpb in by_loop]),
            **state_figures(self.model, every(map(self.batches, self.rows.values()))),
        }


def callbacks(model: RecursiveGPT, optimizer: MuonAdamW, seed: int) -> list[Callback]:
    """What every training of a recursive model needs."""
    return [LoopMetrics(model, optimizer, seed)]


def step_figures(model: RecursiveGPT, optimizer: MuonAdamW, scale: float) -> dict[str, float]:
    """
    Nats per token of each loop read out and the total that was minimised, both of all ranks; norms
    of the gradients, times `scale`, by part of the model. Every rank calls this, with its gradients
    reduced.
    """
    if not model.noted:
        return {}
    sums = optimizer.machine.sum(*map(float, model.noted.values()))
    found = dict(zip(model.noted, sums, strict=True))
    counted = found.pop("counted")
    return {
        **{name: nats / counted if counted else 0.0 for name, nats in found.items()},
        **{k: norm * scale for k, norm in gradient_norms(model.cfg, optimizer).items()},
    }


@torch.no_grad()
def gradient_norms(cfg: RecursiveConfig, optimizer: MuonAdamW) -> dict[str, float]:
    """Norms of the reduced gradients by part of the model, as {grad_norm_core, ...}."""
    machine = optimizer.machine
    parts = {name: f"grad_norm_{part_of(name, cfg)}" for g in optimizer.groups for name in g.names}
    squares = dict.fromkeys(sorted(set(parts.values())), 0.0)
    for group in optimizer.groups:
        assert group.grad is not None, "gradient_norms without reduce_gradients"
        rows = group.grad.flatten(1) if group.stacked else values(group.grad).flatten()[None]
        first = machine.rank * len(rows) if group.sharded and group.stacked else 0
        mine = group.sharded or machine.is_main  # what all ranks hold counts once
        sums = rows.square().sum(1).tolist()
        for name, square in zip(group.names[first:], sums, strict=False):
            squares[parts[name]] += square * mine
    summed = machine.sum(*squares.values())
    return {part: total**0.5 for part, total in zip(squares, summed, strict=True)}


def part_of(name: str, cfg: RecursiveConfig) -> str:
    """The part of the model that a parameter belongs to."""
    first, _, rest = name.partition(".")
    if first != "blocks":
        return "inject" if first == "inject" else "outside"
    layer = int(rest.split(".")[0])
    return "prelude" if layer in cfg.prelude else "core" if layer in cfg.core else "coda"


def bpb_by_loop(
    model: RecursiveGPT,
    loops: Sequence[int],
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    machine: DistContext,
    stopping: Callable[[], bool] = lambda: False,
) -> list[Bpb]:
    """`bits_per_byte` of the model after each of these numbers of loops, ascending; one pass."""

    def score(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model.losses_by_loop(tokens, targets, loops)

    return bits_per_byte(score, batches, token_bytes, machine, stopping, len(loops))


def loop_figures(cfg: RecursiveConfig, bpb: Sequence[float]) -> dict[str, float]:
    """
    What bits per byte after 1, 2, ... loops say: themselves, whether each loop is at least as good
    as the one before (1 or 0), and by how many percent the last is better than the first.

    That percentage says nothing of how good a model is: a bad first loop makes it large.
    """
    trained = bpb[: cfg.n_loops]
    return {
        **{f"bpb_loop_{k}": value for k, value in enumerate(bpb, start=1)},
        "loops_in_order": float(in_order(trained)),
        "refinement_percent": refinement(trained),
    }


def in_order(bpb: Sequence[float]) -> bool:
    """Whether no loop is worse than the one before it."""
    return all(after <= before for before, after in pairwise(bpb))


def refinement(bpb: Sequence[float]) -> float:
    """By how many percent the last loop is better than the first."""
    return 100 * (bpb[0] - bpb[-1]) / bpb[0]


def state_figures(model: RecursiveGPT, batches: Iterable[Batch]) -> dict[str, float]:
    """Size of the state after each loop, and its cosine to the one before, on the first batch."""
    first = next(iter(batches), None)
    if first is None:  # a rank without validation rows
        return {}
    size, turns = model.trace(torch.from_numpy(first[0]).to(model.device), model.cfg.n_loops)
    return {
        **{f"state_rms_{k}": value for k, value in enumerate(size.tolist(), start=1)},
        **{f"state_cosine_{k}": value for k, value in enumerate(turns.tolist(), start=2)},
    }
