"""
How much the score of a task varies between runs of the same weights, and the repeats it needs.

    scores of R runs of M checkpoints -> Variance per task -> class, default repeats, a JSON file

This is the noise of sampling answers alone: weights and items stay the same. Classes as in the
tables of Olmo 3 (post-training chapter of the RLHF book): by points of accuracy.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from nanochat.common import base_dir, write_json

FILE_NAME = "eval_variance.json"
STABLE, VERY_STABLE = 0.6, 0.3  # points of accuracy: below, a task belongs to that class
MAX_REPEATS = 16
SHARE = 0.5  # of the items' standard error that sampling may add by default


class Repeats(NamedTuple):
    """The mean over repeated runs of the same items, and the two sources of its error."""

    value: float
    n: int
    num_repeats: int
    item_se: float
    """From having these items and no others: repeating does not lessen it."""
    repeat_se: float
    """From sampling the answers anew in every run: 1 / sqrt(num_repeats) of a single run's."""

    @property
    def se(self) -> float:
        """Both together."""
        return math.hypot(self.item_se, self.repeat_se)


def repeated(scores: Sequence[Sequence[float]]) -> Repeats:
    """
    Split the error of `scores[item][repeat]` by a one-way analysis of variance.

    Raises ValueError below two items or two repeats, and where repeats are missing.
    """
    if len(scores) < 2 or len({len(row) for row in scores}) != 1 or len(scores[0]) < 2:
        raise ValueError(
            "repeats need at least two items, each scored equally often, twice or more"
        )
    table = np.asarray(scores, dtype=np.float64)  # (n, k)
    n, k = table.shape
    within = float(table.var(axis=1, ddof=1).mean())
    between = max(0.0, float(table.mean(axis=1).var(ddof=1)) - within / k)
    value = float(table.mean())
    return Repeats(value, n, k, math.sqrt(between / n), math.sqrt(within / (n * k)))


@dataclass(frozen=True)
class Variance:
    """The noise of a task in R runs of M checkpoints, on the scale of scores (0 to 1)."""

    task: str
    n: int
    """Items of a run."""
    num_runs: int
    """Of each checkpoint."""
    stds: tuple[float, ...]
    """Standard deviation of a run's score, by checkpoint."""
    item_se: float
    """The error from having these items and no others, over the checkpoints."""

    @property
    def std(self) -> float:
        """Of a run's score: the mean over the checkpoints."""
        return fmean(self.stds)

    @property
    def label(self) -> str:
        """high, stable or very stable."""
        points = 100 * self.std
        return "very stable" if points < VERY_STABLE else "stable" if points < STABLE else "high"

    @property
    def repeats(self) -> int:
        """
        Answers per item that keep the error of sampling under SHARE of that of the items, for any
        number of items: both shrink alike.
        """
        if self.std == 0 or self.item_se == 0:
            return MAX_REPEATS if self.std else 1
        return min(MAX_REPEATS, max(1, math.ceil((self.std / self.item_se / SHARE) ** 2)))


def measure(task: str, scores: Sequence[Sequence[Sequence[float]]]) -> Variance:
    """
    scores[checkpoint][item][run] -> Variance.

    Raises ValueError below two runs or two items, and where checkpoints differ in either.
    """
    shapes = {(len(items), len(items[0]) if items else 0) for items in scores}
    if len(shapes) != 1:
        raise ValueError(f"{task}: checkpoints differ in items or runs: {sorted(shapes)}")
    ((n, num_runs),) = shapes
    split = [repeated(items) for items in scores]
    stds = tuple(stdev(fmean(run) for run in zip(*items, strict=True)) for items in scores)
    item_se = math.sqrt(fmean(r.item_se**2 for r in split))
    return Variance(task, n, num_runs, stds, item_se)


def table(found: Sequence[Variance], checkpoints: Sequence[str]) -> dict[str, Any]:
    """The variance table of a report: noisiest first, in points of accuracy."""
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


def save(found: Sequence[Variance], path: Path | None = None) -> Path:
    """Write the file that `default_repeats` reads; tasks measured before stay in it."""
    path = path or base_dir() / FILE_NAME
    known = load(path) | {v.task: v for v in found}
    write_json(path, {name: asdict(v) for name, v in known.items()})
    return path


def load(path: Path | None = None) -> dict[str, Variance]:
    """The measurements by task; empty where nothing was measured."""
    path = path or base_dir() / FILE_NAME
    return (
        TypeAdapter(dict[str, Variance]).validate_json(path.read_bytes()) if path.exists() else {}
    )


def default_repeats(task: str, temperature: float) -> int:
    """Answers per item by default: the measured number, 1 for greedy or unmeasured tasks."""
    known = load().get(task)
    return known.repeats if known and temperature > 0 else 1
