"""
Schedules: what the rates are at a step, as pure functions of progress.

    (step, num_steps) -> learning rate factor, Muon momentum, weight decay factor

Nothing is remembered, so a resumed run continues exactly where it was. A run that ends by the clock
passes the steps it will have at its pace so far, so that step / num_steps is the share of its time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int = 40
    """Steps in which the rates rise linearly to their peak; a short run never reaches it."""
    warmdown_ratio: float = 0.65
    """Share of the run, at its end, in which the rates fall linearly."""
    final_lr_frac: float = 0.05
    """What the rates fall to, as a fraction of the peak."""
    muon_momentum: float = 0.95
    """Muon's momentum after its own warmup, from 0.85 over the first 300 steps."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        for name in ("warmdown_ratio", "final_lr_frac", "muon_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction in [0, 1], got {getattr(self, name)}")


def lr_factor(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """
    Trapezoid: up over the warmup, flat, down to the final fraction at the last step.

    Where a run is too short for both slopes the lower one counts: a run of 20 steps at its full
    rate would diverge, and with it two runs that differ by rounding alone.
    """
    up = (step + 1) / max(1, cfg.warmup_steps)
    left = (num_steps - step) / max(1.0, cfg.warmdown_ratio * num_steps)
    down = cfg.final_lr_frac + (1 - cfg.final_lr_frac) * left
    return min(up, down, 1.0)


def muon_momentum(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """From 0.85 up over 300 steps, or a third of a shorter run."""
    ramp = max(1, min(300, num_steps // 3))
    return 0.85 + (cfg.muon_momentum - 0.85) * min(1.0, step / ramp)


def decay_factor(step: int, num_steps: float) -> float:
    """Weight decay falls linearly to 0 over the run (measured by nanochat, 2026-01-10)."""
    return 1 - step / num_steps
