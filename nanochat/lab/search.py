"""
Search for the best value of one setting: a wide grid, a tight grid, then several seeds.

    low..high -> wide grid -> bracket of the best -> tight grid -> best few x seeds -> SearchResult

An optimum at the edge of the wide grid is rejected. The best of several noisy scores overestimates
the mean; the expected excess is reported.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from nanochat.common import UsageError
from nanochat.config import require_at_least
from nanochat.lab.significance import expected_maximum

DIGITS = 4  # significant digits of a trial value
SAME = 0.01  # values within this relative distance are tried once


@dataclass(frozen=True)
class SearchConfig:
    search: str | None = None
    """Flag to search: wide grid, tight grid, then several seeds. Default: no search."""
    low: float = 0.01
    """Smallest value of the wide grid."""
    high: float = 3.0
    """Largest value of the wide grid."""
    wide: int = 10
    """Size of the wide grid, evenly spaced on a log scale."""
    tight: int = 5
    """Size of the tight grid around the best value."""
    unit: int | None = None
    """Round values to multiples of this, as for --total_batch_size. Default: no rounding."""
    finalists: int = 2
    """Number of values to rerun with several new seeds."""

    def __post_init__(self) -> None:
        require_at_least(self, unit=1, finalists=1)


Try = Callable[[Sequence[float], Sequence[int]], dict[float, list[float]]]
"""Values, seeds -> scores by value, one per seed; NaN for a broken run."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search; scores by value."""

    cfg: SearchConfig
    lower_is_better: bool
    wide: dict[float, float]
    tight: dict[float, float]
    finals: dict[float, list[float]]
    """Scores of every seed except 0, which chose the finalists."""

    def unbroken(self, value: float) -> list[float]:
        """Scores of the seeds of a finalist that did not break."""
        return [score for score in self.finals[value] if math.isfinite(score)]

    @property
    def chosen(self) -> float:
        """Finalist with the best mean of unbroken seeds, among those with the most of them."""
        found = {value: self.unbroken(value) for value in self.finals}
        most = max(map(len, found.values()))
        means = {v: fmean(s or [math.nan]) for v, s in found.items() if len(s) == most}
        return rank(means, self.lower_is_better)[0]

    @property
    def best_seed(self) -> int:
        """Index of the best seed of the chosen value."""
        scores = self.unbroken(self.chosen)
        best = min(scores) if self.lower_is_better else max(scores)
        return self.finals[self.chosen].index(best)

    @property
    def inflation(self) -> float:
        """Expected excess of the best seed over the mean."""
        scores = self.unbroken(self.chosen)
        return expected_maximum(len(scores)) * stdev(scores) if len(scores) > 1 else 0.0

    def table(self) -> dict[str, Any]:
        """Table of all tried values, in order."""
        rows = []
        for value in sorted({**self.wide, **self.tight}):
            final = self.finals.get(value, [])
            scores = [score for score in final if math.isfinite(score)]
            cells, note = ["", "", ""], "chosen" if value == self.chosen else ""
            if broke := len(final) - len(scores):
                note = f"{note}, {broke} of {len(final)} broke".removeprefix(", ")
            if scores:
                best = min(scores) if self.lower_is_better else max(scores)
                std = f"{stdev(scores):.4f}" if len(scores) > 1 else ""
                cells = [f"{fmean(scores):.4f}", std, f"{best:.4f}"]
            once = [scores.get(value) for scores in (self.wide, self.tight)]
            tried = ["" if x is None else f"{x:.4f}".replace("nan", "broke") for x in once]
            rows.append([show_setting(value), *tried, *cells, note])
        columns = [self.cfg.search, "Wide", "Tight", "Mean of seeds", "Std", "Best seed", ""]
        return {"title": "Search", "columns": columns, "rows": rows}

    def series(self) -> dict[str, list[list[float]]]:
        """Curves for a plot."""
        means = {value: fmean(self.unbroken(value) or [math.nan]) for value in self.finals}
        curves = {"wide": self.wide, "tight": self.tight, "mean of seeds": means}
        return {
            name: [[x, y] for x, y in sorted(curve.items()) if math.isfinite(y)]
            for name, curve in curves.items()
        }


def run_search(
    cfg: SearchConfig, tried: Try, lower_is_better: bool, num_seeds: int
) -> SearchResult:
    """Run the search. Raises UsageError for an optimum at the edge of the grid."""

    def once(values: Sequence[float]) -> dict[float, float]:
        return {value: scores[0] for value, scores in tried(values, [0]).items()}

    wide = once(log_grid(cfg.low, cfg.high, cfg.wide, cfg.unit))
    values = sorted(wide)
    i = values.index(rank(wide, lower_is_better)[0])
    if i in (0, len(values) - 1):
        side, flag = ("smallest", "--low") if i == 0 else ("largest", "--high")
        raise UsageError(
            f"the best {cfg.search} in the wide grid is the {side} value tried, "
            f"{show_setting(values[i])}: the optimum may be outside the grid",
            f"extend it with {flag} and rerun; finished runs are reused",
        )
    between = inner_grid(values[i - 1], values[i + 1], cfg.tight, cfg.unit)
    tight = once([x for x in between if not any(math.isclose(x, y, rel_tol=SAME) for y in wide)])
    best = rank({**wide, **tight}, lower_is_better)[: cfg.finalists]
    return SearchResult(cfg, lower_is_better, wide, tight, tried(best, range(1, 1 + num_seeds)))


def log_grid(low: float, high: float, n: int, unit: int | None = None) -> list[float]:
    """
    Return `n` values from low to high, evenly spaced on a log scale, rounded to `unit` if set.

    Raises ValueError for an empty range or one too narrow for `n` values.
    """
    if not 0 < low < high or n < 3:
        raise ValueError(f"need n >= 3 and 0 < low < high, got {n} from {low:g} to {high:g}")
    found = [round_value(low * (high / low) ** (i / (n - 1)), unit) for i in range(n)]
    if len(set(found)) < n:
        raise ValueError(f"{n} values from {low:g} to {high:g} are not distinct: {found}")
    return found


def inner_grid(low: float, high: float, n: int, unit: int | None = None) -> list[float]:
    """Like `log_grid`, without the ends; fewer if values coincide after rounding."""
    values = [low * (high / low) ** (i / (n + 1)) for i in range(1, n + 1)]
    return sorted({round_value(value, unit) for value in values} - {low, high})


def round_value(value: float, unit: int | None) -> float:
    """Round a value to `unit`, or to DIGITS significant digits."""
    if unit is not None:
        return max(1, round(value / unit)) * unit
    return float(f"{value:.{DIGITS}g}")


def show_setting(value: float) -> str:
    """Format a value for a flag."""
    return f"{value:.12g}"


def rank(scores: Mapping[float, float], lower_is_better: bool) -> list[float]:
    """Values from best to worst, without broken runs. Raises ValueError if all broke."""
    finite = [value for value in scores if math.isfinite(scores[value])]
    if not finite:
        raise ValueError(f"every run broke: {', '.join(map(show_setting, scores))}")
    return sorted(finite, key=lambda value: scores[value], reverse=not lower_is_better)
