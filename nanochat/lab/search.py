"""
Looking for the best value of one setting: wide, then tight, then with several seeds.

    low..high -> wide grid -> bracket of the best -> tight grid -> best few x seeds -> Found

An optimum at the edge of the wide grid is no optimum: it is refused. What is chosen for being best
of several seems better than it is; by how much is expected is told beside it. Knows nothing of what
is tried: that is a function of value and seed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from nanochat.common import Refused
from nanochat.lab.significance import expected_maximum

DIGITS = 4  # of a value that is tried
ALIKE = 0.01  # values nearer than this, as a share, are one


@dataclass(frozen=True)
class SearchConfig:
    search: str | None = None
    """Flag whose best value is sought: wide, then tight, then with several seeds."""
    low: float = 0.01
    """Smallest value of the wide grid."""
    high: float = 3.0
    """Its largest value."""
    wide: int = 10
    """Values of the wide grid, evenly on a logarithmic scale."""
    tight: int = 5
    """Values between the neighbours of the best, that one often among them."""
    unit: int | None = None
    """Values are multiples of this, as of --total_batch_size."""
    finalists: int = 2
    """Values that are tried with several seeds, none of which chose them."""


Try = Callable[[Sequence[float], Sequence[int]], dict[float, list[float]]]
"""Values and seeds -> by value the score of each seed; NaN for a run that broke."""


@dataclass(frozen=True)
class Found:
    """What a search came to. Scores are by value."""

    cfg: SearchConfig
    lower_is_better: bool
    wide: dict[float, float]
    tight: dict[float, float]
    finals: dict[float, list[float]]
    """Of every seed; seed 0 chose the finalists and is none of them."""

    @property
    def chosen(self) -> float:
        """The finalist with the best mean."""
        return best_of(
            {x: fmean(scores) for x, scores in self.finals.items()}, self.lower_is_better
        )

    @property
    def lucky(self) -> int:
        """Which of the chosen value's seeds is the best."""
        scores = self.finals[self.chosen]
        return scores.index(min(scores) if self.lower_is_better else max(scores))

    @property
    def inflation(self) -> float:
        """How much too good the best of the seeds is expected to look."""
        scores = self.finals[self.chosen]
        return expected_maximum(len(scores)) * stdev(scores)

    def table(self) -> dict[str, Any]:
        """Every value that was tried, in order."""
        rows = []
        for value in sorted({**self.wide, **self.tight}):
            final = self.finals.get(value, [])
            cells = ["", "", ""]
            if broke := sum(map(math.isnan, final)):
                note = f"{broke} of {len(final)} broke"
            else:
                note = "chosen" if value == self.chosen else ""
                if final:
                    best = min(final) if self.lower_is_better else max(final)
                    cells = [f"{x:.4f}" for x in (fmean(final), stdev(final), best)]
            once = (self.wide, self.tight)
            tried = [told(scores[value]) if value in scores else "" for scores in once]
            rows.append([shown(value), *tried, *cells, note])
        columns = [self.cfg.search, "Wide", "Tight", "Mean of seeds", "Std", "Best seed", ""]
        return {"title": "Search", "columns": columns, "rows": rows}

    def series(self) -> dict[str, list[list[float]]]:
        """As a figure shows it."""
        means = {value: fmean(scores) for value, scores in self.finals.items()}
        curves = {"wide": self.wide, "tight": self.tight, "mean of seeds": means}
        return {
            name: [[x, y] for x, y in sorted(curve.items()) if math.isfinite(y)]
            for name, curve in curves.items()
        }


def seek(cfg: SearchConfig, tried: Try, lower_is_better: bool, num_seeds: int) -> Found:
    """Search. Raises Refused for an optimum at the edge, ValueError for a grid that is none."""
    assert cfg.search is not None, "what is sought is named"

    def once(values: Sequence[float]) -> dict[float, float]:
        return {value: scores[0] for value, scores in tried(values, [0]).items()}

    wide = once(spaced(cfg.low, cfg.high, cfg.wide, cfg.unit))
    ends = bracket(wide, lower_is_better, cfg.search)
    between = inside(ends, cfg.tight, cfg.unit)
    tight = once([x for x in between if not any(alike(x, known) for known in wide)])
    best = ranked({**wide, **tight}, lower_is_better)[: cfg.finalists]
    finals = tried(best, range(1, 1 + num_seeds))
    return Found(cfg, lower_is_better, wide, tight, finals)


def spaced(low: float, high: float, n: int, unit: int | None = None) -> list[float]:
    """
    `n` values from low to high, evenly on a logarithmic scale; multiples of `unit` where given.

    Raises ValueError for a range that is none, or too narrow for so many.
    """
    if not 0 < low < high or n < 3:
        raise ValueError(f"no grid of {n} values goes from {low:g} to {high:g}: take 3 or more")
    found = [rounded(low * (high / low) ** (i / (n - 1)), unit) for i in range(n)]
    if len(set(found)) < n:
        raise ValueError(f"{n} values from {low:g} to {high:g} are not all different: {found}")
    return found


def alike(one: float, other: float) -> bool:
    """Whether two values are so near that one run does for both."""
    return abs(one - other) <= ALIKE * max(abs(one), abs(other))


def told(score: float) -> str:
    """A score as the table has it."""
    return "broke" if math.isnan(score) else f"{score:.4f}"


def shown(value: float) -> str:
    """A value as a flag has it."""
    return f"{value:.12g}"


def rounded(value: float, unit: int | None) -> float:
    """A value as it is tried."""
    if unit is not None:
        return max(1, round(value / unit)) * unit
    return float(f"{value:.{DIGITS}g}")


def best_of(scores: Mapping[float, float], lower_is_better: bool) -> float:
    """The value with the best score."""
    return ranked(scores, lower_is_better)[0]


def ranked(scores: Mapping[float, float], lower_is_better: bool) -> list[float]:
    """Values from the best to the worst; those that are not finite are none. Raises ValueError."""
    finite = [value for value in scores if math.isfinite(scores[value])]
    if not finite:
        raise ValueError(f"every run broke: {', '.join(map(shown, scores))}")
    return sorted(finite, key=lambda value: scores[value], reverse=not lower_is_better)


def bracket(scores: Mapping[float, float], lower_is_better: bool, flag: str) -> tuple[float, float]:
    """
    The neighbours of the best value. Raises Refused where it lies at an edge: what is best then
    lies beyond what was tried.
    """
    values = sorted(scores)
    place = values.index(best_of(scores, lower_is_better))
    if place in (0, len(values) - 1):
        side, way = ("smallest", "--low") if place == 0 else ("largest", "--high")
        raise Refused(
            f"the best {flag} of the wide grid is the {side} that was tried, "
            f"{shown(values[place])}: the optimum may lie beyond",
            f"extend the grid by {way} and start again; what was run is kept",
        )
    return values[place - 1], values[place + 1]


def inside(ends: tuple[float, float], n: int, unit: int | None = None) -> list[float]:
    """`n` values between two, evenly on a logarithmic scale, without the ends."""
    low, high = ends
    values = [low * (high / low) ** (i / (n + 1)) for i in range(1, n + 1)]
    return sorted({rounded(value, unit) for value in values} - {low, high})
