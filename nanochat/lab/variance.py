"""
Variance of scores between sampled evaluations of the same weights, and the repeats it requires.

    scores of R runs of M checkpoints -> Variance per task -> class, repeats that it requires

This is sampling noise only: weights and items stay the same. Variance classes, in accuracy points,
are those of the Olmo 3 tables (post-training chapter of the RLHF book).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from nanochat.stats import split_error

STABLE, VERY_STABLE = 0.6, 0.3  # upper bounds of the classes, in points
MAX_REPEATS = 16
SHARE = 0.5  # target ratio of sampling error to item error


@dataclass(frozen=True)
class Variance:
    """Score noise of a task over R runs of M checkpoints; scores are 0 to 1."""

    task: str
    n: int
    """Number of items."""
    num_runs: int
    """Runs per checkpoint."""
    stds: tuple[float, ...]
    """Standard deviation of the score between runs, by checkpoint."""
    item_se: float
    """Standard error from the choice of items, RMS over checkpoints."""

    @property
    def std(self) -> float:
        """Mean of `stds` over checkpoints."""
        return fmean(self.stds)

    @property
    def label(self) -> str:
        """Variance class: high, stable or very stable."""
        points = 100 * self.std
        return "very stable" if points < VERY_STABLE else "stable" if points < STABLE else "high"

    @property
    def repeats(self) -> int:
        """
        Answers per item, at most MAX_REPEATS, to keep the sampling error within SHARE times the
        item error. Holds for any number of items, since both errors shrink at the same rate.
        """
        if self.std == 0 or self.item_se == 0:
            return MAX_REPEATS if self.std else 1
        return min(MAX_REPEATS, max(1, math.ceil((self.std / self.item_se / SHARE) ** 2)))


def measure(task: str, scores: Sequence[Sequence[Sequence[float]]]) -> Variance:
    """
    Compute the variance from scores[checkpoint][item][run].

    Raises ValueError for fewer than two runs or items, or if checkpoints differ in either.
    """
    shapes = {(len(items), len(items[0]) if items else 0) for items in scores}
    if len(shapes) != 1:
        raise ValueError(f"{task}: checkpoints differ in items or runs: {sorted(shapes)}")
    ((n, num_runs),) = shapes
    split = [split_error(items) for items in scores]
    stds = tuple(stdev(fmean(run) for run in zip(*items, strict=True)) for items in scores)
    return Variance(task, n, num_runs, stds, math.sqrt(fmean(r.item_se**2 for r in split)))


def variance_table(found: Sequence[Variance], checkpoints: Sequence[str]) -> dict[str, Any]:
    """Report table in accuracy points, noisiest task first."""
    columns = ["Class", "Task", "Items", "Runs", "Std", *checkpoints, "Item SE", "Repeats"]
    rows = [
        [
            *(v.label, v.task, v.n, v.num_runs),
            *(f"{100 * x:.2f}" for x in (v.std, *v.stds, v.item_se)),
            v.repeats,
        ]
        for v in sorted(found, key=lambda v: -v.std)
    ]
    return {"title": "Evaluation variance (points)", "columns": columns, "rows": rows}
