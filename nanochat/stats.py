"""
Statistics of evaluations: standard errors and paired comparisons.

    scores of items -> Estimate (value, se, n); two scores per item -> Comparison

Items are treated as a random sample of all possible items: the standard error estimates how much
the value would vary with other items. Items of a cluster, such as questions about one text, are
drawn together. All functions are pure. Source unless stated otherwise: Miller, "Adding Error Bars
to Evals", arXiv:2411.00640.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

NOISE = 2.0  # differences within this many standard errors are noise

Verdict = Literal["better", "worse", "within noise"]


class Estimate(NamedTuple):
    """A measured value, its standard error (NaN = unknown), and the number of items."""

    value: float
    se: float
    n: int

    def __str__(self) -> str:
        """The value with its standard error, if it is known."""
        return f"{self.value:.4f}" + f" +- {self.se:.4f}" * math.isfinite(self.se)


def mean(
    scores: Sequence[float], clusters: Sequence[str] | Sequence[int] | None = None
) -> Estimate:
    """
    Mean of scores. clusters: the cluster of each item; default: its own.

    The error of a single cluster is NaN. Raises ValueError if scores is empty.
    """
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    if n == 0:
        raise ValueError("mean needs at least one score")
    _, index = np.unique(list(clusters or range(n)), return_inverse=True)
    deviations = np.bincount(index, values - values.mean())  # sum of each cluster
    groups, squares = len(deviations), math.fsum(deviations**2)
    se = math.sqrt(groups / (groups - 1) * squares) / n if groups > 1 else math.nan
    return Estimate(float(values.mean()), se, n)


# ---- Comparison of two runs ----------------------------------------------------------------------


class Comparison(NamedTuple):
    """Difference between two runs on the same items."""

    difference: float
    """After minus before."""
    se: float
    n: int
    won: int
    """Number of items with a higher score than before."""
    lost: int

    @property
    def verdict(self) -> Verdict:
        """Better or worse if |difference| > NOISE * se; assumes higher is better."""
        if not abs(self.difference) > NOISE * self.se:
            return "within noise"
        return "better" if self.difference > 0 else "worse"


def compare(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[str] | Sequence[int] | None = None,
) -> Comparison:
    """
    Compare two runs item by item, which removes item difficulty from the standard error. Both have
    the same items.
    """
    change = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    difference, se, n = mean(change.tolist(), clusters)
    return Comparison(difference, se, n, int((change > 0).sum()), int((change < 0).sum()))


Part = TypeVar("Part", Estimate, Comparison)


def combine(parts: Sequence[Part], weights: Sequence[float]) -> Part:
    """Weighted sum of independent estimates or comparisons, such as a mean over tasks."""
    value = math.fsum(w * part[0] for w, part in zip(weights, parts, strict=True))
    se = math.hypot(*(w * part.se for w, part in zip(weights, parts, strict=True)))
    counts = map(sum, zip(*(part[2:] for part in parts), strict=True))
    return type(parts[0])(value, se, *counts)


# ---- Several samples per item --------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """
    Unbiased estimate of pass@k from `correct` of `n` samples: 1 - C(n - correct, k) / C(n, k), in
    integers until the final division. Requires 1 <= k <= n. Source: Chen et al., "Evaluating Large
    Language Models Trained on Code", arXiv:2107.03374.
    """
    total = math.comb(n, k)
    return (total - math.comb(n - correct, k)) / total
