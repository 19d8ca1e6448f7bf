"""
Search for the best value of one setting: a wide grid, a tight grid, then several seeds.

    low..high -> wide grid -> bracket of the best -> tight grid -> best few x seeds -> Found

An optimum at the edge of the wide grid is rejected. The best of several looks better than it is;
the expected excess is reported with it. The trials are a function of values and seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from nanochat.common import UsageError
from nanochat.lab.significance import expected_maximum

DIGITS = 4  # significant, of a value that is tried
SAME = 0.01  # values closer than this share are tried once


@dataclass(frozen=True)
class SearchConfig:
    search: str | None = None
    """Flag whose best value is searched: wide, then tight, then with several seeds."""
    low: float = 0.01
    """Smallest value of the wide grid."""
    high: float = 3.0
    """Largest value of the wide grid."""
    wide: int = 10
    """Values of the wide grid, evenly on a logarithmic scale."""
    tight: int = 5
    """Values between the neighbors of the best."""
    unit: int | None = None
    """Round values to multiples of this, as for --total_batch_size."""
    finalists: int = 2
    """Values that are tried with several new seeds."""


Try = Callable[[Sequence[float], Sequence[int]], dict[float, list[float]]]
"""Values and seeds -> by value the score of each seed; NaN for a run that broke."""


@dataclass(frozen=True)
class Found:
    """The result of a search. Scores are by value."""

    cfg: SearchConfig
    lower_is_better: bool
    wide: dict[float, float]
    tight: dict[float, float]
    finals: dict[float, list[float]]
    """Of every seed; seed 0 chose the finalists and is not among them."""

    @property
    def chosen(self) -> float:
        """The finalist with the best mean."""
        means = {value: fmean(scores) for value, scores in self.finals.items()}
        return rank(means, self.lower_is_better)[0]

    @property
    def lucky(self) -> int:
        """Index of the best seed of the chosen value."""
        scores = self.finals[self.chosen]
        return scores.index(min(scores) if self.lower_is_better else max(scores))

    @property
    def inflation(self) -> float:
        """The expected excess of the best seed over the mean."""
        scores = self.finals[self.chosen]
        return expected_maximum(len(scores)) * stdev(scores)

    def table(self) -> dict[str, Any]:
        """Every value that was tried, in order."""
        rows = []
        for value in sorted({**self.wide, **self.tight}):
            final = self.finals.get(value, [])
            cells, note = ["", "", ""], "chosen" if value == self.chosen else ""
            if broke := sum(map(math.isnan, final)):
                note = f"{broke} of {len(final)} broke"
            elif final:
                best = min(final) if self.lower_is_better else max(final)
                cells = [f"{x:.4f}" for x in (fmean(final), stdev(final), best)]
            once = [scores.get(value) for scores in (self.wide, self.tight)]
            tried = ["" if x is None else f"{x:.4f}".replace("nan", "broke") for x in once]
            rows.append([shown(value), *tried, *cells, note])
        columns = [self.cfg.search, "Wide", "Tight", "Mean of seeds", "Std", "Best seed", ""]
        return {"title": "Search", "columns": columns, "rows": rows}

    def series(self) -> dict[str, list[list[float]]]:
        """The curves of a figure."""
        means = {value: fmean(scores) for value, scores in self.finals.items()}
        curves = {"wide": self.wide, "tight": self.tight, "mean of seeds": means}
        return {
            name: [[x, y] for x, y in sorted(curve.items()) if math.isfinite(y)]
            for name, curve in curves.items()
        }


def seek(cfg: SearchConfig, tried: Try, lower_is_better: bool, num_seeds: int) -> Found:
    """Search. Raises UsageError for an optimum at the edge, ValueError for an impossible grid."""

    def once(values: Sequence[float]) -> dict[float, float]:
        return {value: scores[0] for value, scores in tried(values, [0]).items()}

    wide = once(spaced(cfg.low, cfg.high, cfg.wide, cfg.unit))
    values = sorted(wide)
    i = values.index(rank(wide, lower_is_better)[0])
    if i in (0, len(values) - 1):
        side, flag = ("smallest", "--low") if i == 0 else ("largest", "--high")
        raise UsageError(
            f"the best {cfg.search} of the wide grid is the {side} that was tried, "
            f"{shown(values[i])}: the optimum may lie beyond",
            f"extend the grid by {flag} and start again; finished runs are kept",
        )
    between = inside(values[i - 1], values[i + 1], cfg.tight, cfg.unit)
    tight = once([x for x in between if not any(math.isclose(x, y, rel_tol=SAME) for y in wide)])
    best = rank({**wide, **tight}, lower_is_better)[: cfg.finalists]
    return Found(cfg, lower_is_better, wide, tight, tried(best, range(1, 1 + num_seeds)))


def spaced(low: float, high: float, n: int, unit: int | None = None) -> list[float]:
    """
    `n` values from low to high, evenly on a logarithmic scale; multiples of `unit` where given.

    Raises ValueError for an empty range, or one too narrow for `n` values.
    """
    if not 0 < low < high or n < 3:
        raise ValueError(f"no grid of {n} values goes from {low:g} to {high:g}: take 3 or more")
    found = [rounded(low * (high / low) ** (i / (n - 1)), unit) for i in range(n)]
    if len(set(found)) < n:
        raise ValueError(f"{n} values from {low:g} to {high:g} are not all different: {found}")
    return found


def inside(low: float, high: float, n: int, unit: int | None = None) -> list[float]:
    """As `spaced`, without the ends; fewer where several round to one value."""
    values = [low * (high / low) ** (i / (n + 1)) for i in range(1, n + 1)]
    return sorted({rounded(value, unit) for value in values} - {low, high})


def rounded(value: float, unit: int | None) -> float:
    """A value as it is tried."""
    if unit is not None:
        return max(1, round(value / unit)) * unit
    return float(f"{value:.{DIGITS}g}")


def shown(value: float) -> str:
    """A value as a flag takes it."""
    return f"{value:.12g}"


def rank(scores: Mapping[float, float], lower_is_better: bool) -> list[float]:
    """Values from the best to the worst, without broken runs. Raises ValueError for none."""
    finite = [value for value in scores if math.isfinite(scores[value])]
    if not finite:
        raise ValueError(f"every run broke: {', '.join(map(shown, scores))}")
    return sorted(finite, key=lambda value: scores[value], reverse=not lower_is_better)
