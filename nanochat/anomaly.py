"""
Anomalies of a training run: non-finite numbers, spikes, ranks whose weights differ.

    loss, gradient norm of a step -> AnomalyDetector -> "good", "spike" or "bad"
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nanochat.distributed import DistContext

SPIKE_RATIO = 2.0  # times the highest loss of the window, and at least
SPIKE_NATS = 0.5  # above it: a loss near 0 may double by chance
SPIKE_WINDOW = 8  # steps: short, because the loss falls fast in the beginning
SPIKE_FIRST = 3  # steps that must have been seen before one can be called a spike
MAX_BAD_STEPS = 5  # non-finite steps in a row that stop the run; each is skipped

Verdict = Literal["good", "spike", "bad"]


class NotFinite(RuntimeError):
    """The loss, the gradient or the weights are not finite, and the run cannot go on."""


class RanksDiffer(RuntimeError):
    """Ranks that must hold the same weights do not."""


@dataclass
class AnomalyState:
    """What the detector remembers of a run; saved with each checkpoint."""

    bad_steps: int = 0
    """Steps skipped because something was not finite."""
    spikes: int = 0
    """Steps whose loss was far above those before them."""
    losses: list[float] = field(default_factory=list)
    """The latest losses that were neither."""


class AnomalyDetector:
    """Classifies the steps of a run. `spikes` is off where a loss has no level, as in RL."""

    def __init__(self, state: AnomalyState, machine: DistContext, spikes: bool = True):
        self.state, self.machine, self.spikes = state, machine, spikes
        self.bad_in_a_row = self.spikes_in_a_row = 0

    def classify(self, loss: float, norm: float) -> Verdict:
        """Classify a step by its loss and gradient norm; changes nothing."""
        if not math.isfinite(loss + norm):
            return "bad"
        if not self.spikes or len(self.state.losses) < SPIKE_FIRST:
            return "good"
        highest = max(self.state.losses)
        return "spike" if loss > max(SPIKE_RATIO * highest, highest + SPIKE_NATS) else "good"

    def record(self, step: int, loss: float, norm: float, rows: Callable[[], str]) -> Verdict:
        """
        Count a step, and report it where it is bad or a spike; `rows` names what it trained on.

        As many spikes in a row as the window is long are a new level of the loss.
        """
        verdict, state = self.classify(loss, norm), self.state
        self.bad_in_a_row = self.bad_in_a_row + 1 if verdict == "bad" else 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if verdict == "spike" else 0
        state.bad_steps += verdict == "bad"
        state.spikes += verdict == "spike"
        if verdict != "good":
            problem = f"skipped on all ranks ({self.bad_in_a_row} in a row)"
            if verdict == "spike":
                problem = f"a spike, above {max(state.losses):.4f}, the highest of the steps before"
            self.machine.print0(
                f"step {step}: loss {loss:.4f}, gradient norm {norm:.4g}: {problem}; rows {rows()}"
            )
        if verdict == "good" or self.spikes_in_a_row == SPIKE_WINDOW:
            state.losses = [*state.losses, loss][-SPIKE_WINDOW:]
        return verdict


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None."""
    floats = {name: x for name, x in named.items() if x.is_floating_point()}
    finite = torch.stack([x.detach().isfinite().all() for x in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def require_equal_ranks(named: Mapping[str, Tensor], machine: DistContext, step: int) -> None:
    """
    Raise RanksDiffer, on every rank, naming the first parameter that is not the same on all.

    named: float32 tensors. Sums of their bits are compared, so a single flipped bit is found.
    """
    if machine.world_size == 1:
        return
    sums = [x.detach().view(torch.int32).sum(dtype=torch.int64) for x in named.values()]
    found = machine.gather(torch.stack(sums).tolist())
    for i, name in enumerate(named):
        values = [sums[i] for sums in found]
        common = max(values, key=values.count)  # of equals, rank 0's
        if others := [rank for rank, value in enumerate(values) if value != common]:
            raise RanksDiffer(
                f"before step {step} the ranks do not hold the same weights: {name} differs on "
                f"rank {', '.join(map(str, others))} of {machine.world_size}. A device or a link "
                "is at fault; --resume=auto goes on from the last checkpoint, best without it"
            )
