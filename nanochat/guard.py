"""
What a step must pass before it counts, and what the ranks must agree on.

    loss, gradient norm -> finite? a spike? -> update or skip -> counted, named, stopped after K

A number that is not finite never reaches the weights. A spike is a loss far above those of the
steps before it; it is told of, and skipped where that is asked for. Knows no model: the numbers it
sees are the same on every rank, so all ranks judge alike.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from nanochat.machine import Machine

SPIKE_RATIO = 2.0  # times the highest loss of the window, and at least
SPIKE_NATS = 0.5  # above it: a loss near 0 may double by chance
SPIKE_WINDOW = 8  # steps: short, because the loss falls fast in the beginning
SPIKE_FIRST = 3  # steps that must have been seen before one can be called a spike
NORM_RATIO = 4.0  # times the median gradient norm of the window: a spike of the gradient
NORM_WINDOW = 32  # steps


@dataclass(frozen=True)
class GuardConfig:
    max_bad_steps: int = 5
    """So many losses or gradients in a row that are not finite stop the run; each is skipped."""
    on_spike: Literal["warn", "skip"] = "warn"
    """What becomes of a step whose loss is twice the highest of the 8 before: it is told of, or
    skipped too."""
    check_ranks_every: int = 100
    """Steps between checks that all ranks hold the same weights; 0 = never."""

    def __post_init__(self) -> None:
        if self.max_bad_steps < 1:
            raise ValueError(f"max_bad_steps must be at least 1, got {self.max_bad_steps}")
        if self.check_ranks_every < 0:
            raise ValueError(f"check_ranks_every counts steps, got {self.check_ranks_every}")


class NotFinite(RuntimeError):
    """The loss, the gradient or the weights are not finite, and the run cannot go on."""


class RanksDiffer(RuntimeError):
    """Ranks that must hold the same weights do not."""


@dataclass
class Health:
    """What the guard remembers of a run; saved with each checkpoint."""

    bad_steps: int = 0
    """Steps skipped because something was not finite."""
    spikes: int = 0
    """Steps whose loss was far above those before them."""
    losses: list[float] = field(default_factory=list)
    """The latest losses that were neither."""
    norm_spikes: int = 0
    """Steps whose gradient was far larger than those before them, whatever their loss."""
    norms: list[float] = field(default_factory=list)
    """The latest gradient norms."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


Verdict = Literal["good", "spike", "bad"]


class Guard:
    """Judges the steps of one run. `watch_spikes` is off where a loss has no level (RL)."""

    def __init__(
        self, cfg: GuardConfig, health: Health, machine: Machine, watch_spikes: bool = True
    ):
        self.cfg, self.health, self.machine = cfg, health, machine
        self.watch_spikes = watch_spikes
        self.bad_in_a_row = self.spikes_in_a_row = 0

    def judge(self, loss: float, norm: float) -> Verdict:
        """What a step is, before its update; changes nothing."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "bad"
        seen = self.health.losses[-SPIKE_WINDOW:]
        if not self.watch_spikes or len(seen) < SPIKE_FIRST:
            return "good"
        highest = max(seen)
        return "spike" if loss > max(SPIKE_RATIO * highest, highest + SPIKE_NATS) else "good"

    def allows(self, loss: float, norm: float) -> bool:
        """Whether the update of such a step is to be made."""
        verdict = self.judge(loss, norm)
        return verdict == "good" or (verdict == "spike" and self.cfg.on_spike == "warn")

    def note(self, step: int, loss: float, norm: float, rows: Callable[[], str]) -> Verdict:
        """
        Count a step, and say of a bad one which it was; `rows` names what it saw.

        As many spikes in a row as the window is long are no spikes but a new level.
        """
        verdict, health = self.judge(loss, norm), self.health
        health.norm_spikes += self.is_norm_spike(norm)
        if math.isfinite(norm):
            health.norms = [*health.norms, norm][-NORM_WINDOW:]
        self.bad_in_a_row = self.bad_in_a_row + 1 if verdict == "bad" else 0
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if verdict == "spike" else 0
        if verdict == "bad":
            health.bad_steps += 1
            self.machine.print0(
                f"step {step}: loss {loss}, gradient norm {norm}: skipped on all ranks "
                f"({self.bad_in_a_row} in a row); rows {rows()}"
            )
        elif verdict == "spike":
            health.spikes += 1
            done = "skipped on all ranks" if self.cfg.on_spike == "skip" else "learned all the same"
            self.machine.print0(
                f"step {step}: a spike, loss {loss:.4f} (the highest of the "
                f"{len(health.losses)} steps before was {max(health.losses):.4f}), gradient norm "
                f"{norm:.4g}: {done}; rows {rows()}"
            )
        if verdict == "good" or self.spikes_in_a_row == SPIKE_WINDOW:
            health.losses = [*health.losses, loss][-SPIKE_WINDOW:]
        return verdict

    def is_norm_spike(self, norm: float) -> bool:
        """Whether a gradient norm is far above those before it."""
        seen = self.health.norms
        return len(seen) >= SPIKE_WINDOW and norm > NORM_RATIO * statistics.median(seen)

    def check_ranks(self, step: int, named: Mapping[str, Tensor]) -> None:
        """At its cadence, `require_equal_ranks`."""
        every = self.cfg.check_ranks_every
        if every and step % every == 0:
            require_equal_ranks(named, self.machine, step)

    @property
    def lost(self) -> bool:
        """Whether so many steps in a row were bad that the run is to stop."""
        return self.bad_in_a_row >= self.cfg.max_bad_steps


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None."""
    floats = {name: x for name, x in named.items() if x.is_floating_point()}
    if not floats:
        return None
    finite = torch.stack([x.detach().isfinite().all() for x in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def require_equal_ranks(named: Mapping[str, Tensor], machine: Machine, step: int) -> None:
    """
    Raise RanksDiffer, on every rank, naming the first parameter that is not the same on all.

    named: float32 tensors. Compared are sums of their bits, so that one flipped bit is seen.
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
                f"before step {step} the ranks do not hold the same weights: {name} is another one "
                f"on rank {', '.join(map(str, others))} of {machine.world_size}. A device or a "
                "link is at fault; --resume=auto goes on from the last checkpoint, best without it"
            )
