"""
Anomaly detection in training: non-finite values, loss spikes, ranks with different weights.

    loss, gradient norm of a step -> AnomalyDetector -> "good", "spike" or "bad"
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nanochat.distributed import DistContext

SPIKE_RATIO = 2.0  # minimum ratio of a spike to the highest loss of the window
SPIKE_NATS = 0.5  # minimum difference: a loss near 0 may double by chance
SPIKE_WINDOW = 8  # steps; short, because the loss falls fast at first
SPIKE_FIRST = 3  # minimum number of steps before spikes are detected
# Consecutive non-finite steps, each skipped, that stop the run; in float16, once the scale is 1
MAX_BAD_STEPS = 5

StepVerdict = Literal["good", "spike", "bad"]


class NonFiniteError(RuntimeError):
    """The loss, gradients or weights are not finite, and the run cannot continue."""


class RankMismatchError(RuntimeError):
    """Weights differ between ranks."""


@dataclass
class AnomalyState:
    """State of the detector, saved with each checkpoint."""

    bad_steps: int = 0
    """Number of steps skipped as non-finite."""
    spikes: int = 0
    """Number of loss spikes."""
    losses: list[float] = field(default_factory=list)
    """Window of the latest losses, without anomalies."""


class AnomalyDetector:
    """Classifies training steps. Set `spikes` to False if the loss has no stable level (RL)."""

    def __init__(self, state: AnomalyState, machine: DistContext, spikes: bool = True):
        self.state, self.machine, self.spikes = state, machine, spikes
        self.bad_in_a_row = self.spikes_in_a_row = 0

    def classify(self, loss: float, norm: float) -> StepVerdict:
        """Classify a step by its loss and gradient norm, without recording it."""
        if not math.isfinite(loss + norm):
            return "bad"
        if not self.spikes or len(self.state.losses) < SPIKE_FIRST:
            return "good"
        highest = max(self.state.losses)
        return "spike" if loss > max(SPIKE_RATIO * highest, highest + SPIKE_NATS) else "good"

    def record(self, step: int, loss: float, norm: float, rows: Callable[[], str]) -> StepVerdict:
        """
        Classify and record a step; log anomalies. `rows` returns a description of its batch.

        After SPIKE_WINDOW consecutive spikes, the loss is accepted as the new level.
        """
        verdict, state = self.classify(loss, norm), self.state
        self.bad_in_a_row = self.bad_in_a_row + 1 if verdict == "bad" else 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if verdict == "spike" else 0
        state.bad_steps += verdict == "bad"
        state.spikes += verdict == "spike"
        if verdict != "good":
            problem = f"skipped on all ranks ({self.bad_in_a_row} consecutive)"
            if verdict == "spike":
                problem = f"loss spike (highest recent loss: {max(state.losses):.4f})"
            self.machine.print0(
                f"step {step}: loss {loss:.4f}, gradient norm {norm:.4g}: {problem}; rows {rows()}"
            )
        if verdict == "good" or self.spikes_in_a_row == SPIKE_WINDOW:
            state.losses = [*state.losses, loss][-SPIKE_WINDOW:]
        return verdict


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a NaN or infinity, or None."""
    floats = {name: x for name, x in named.items() if x.is_floating_point()}
    finite = torch.stack([x.detach().isfinite().all() for x in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def require_equal_ranks(named: Mapping[str, Tensor], machine: DistContext, step: int) -> None:
    """
    Raise RankMismatchError on every rank, naming the first parameter that differs.

    named: float32 or bfloat16 tensors. Compares sums of their bits, so it detects a single flipped
    bit.
    """
    if machine.world_size == 1:
        return
    bits = {2: torch.int16, 4: torch.int32}
    sums = [x.detach().view(bits[x.element_size()]).sum(dtype=torch.int64) for x in named.values()]
    with machine.waiting("device synchronization"):
        mine = torch.stack(sums).tolist()
    found = machine.gather(mine)
    for i, name in enumerate(named):
        values = [sums[i] for sums in found]
        common = max(values, key=values.count)  # rank 0 wins ties
        if others := [rank for rank, value in enumerate(values) if value != common]:
            raise RankMismatchError(
                f"weights differ between ranks before step {step}: {name} differs on rank "
                f"{', '.join(map(str, others))} of {machine.world_size}; check that device and "
                "its links, and restart with --resume=auto, preferably without that device"
            )
