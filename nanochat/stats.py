"""
Statistics of evaluations: standard errors and paired comparisons.

    scores of items -> Estimate (value, n, se); two scores per item -> Comparison

Items are treated as a random sample of all possible items: the standard error estimates how much
the value would vary with other items. Items of a cluster, such as questions about one text, are
drawn together. All functions are pure. Source unless stated otherwise: Miller, "Adding Error Bars
to Evals", arXiv:2411.00640.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

NOISE = 2.0  # differences within this many standard errors are noise

Verdict = Literal["better", "worse", "within noise"]


class Estimate(NamedTuple):
    """A measured value, the number of items, and the standard error (NaN = unknown)."""

    value: float
    n: int
    se: float


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
    return Estimate(float(values.mean()), n, se)


def center_accuracy(accuracy: Estimate, baseline: float) -> Estimate:
    """Rescale accuracy so that chance level (`baseline`) is 0 and perfect is 1."""
    scale = 1 - baseline
    return Estimate((accuracy.value - baseline) / scale, accuracy.n, accuracy.se / scale)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Unweighted mean of independent estimates with propagated error; n counts all items."""
    value = math.fsum(e.value for e in estimates) / len(estimates)
    se = math.hypot(*(e.se for e in estimates)) / len(estimates)
    return Estimate(value, sum(e.n for e in estimates), se)


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
    difference, n, se = mean(change.tolist(), clusters)
    return Comparison(difference, se, n, int((change > 0).sum()), int((change < 0).sum()))


def combine(parts: Sequence[Comparison], weights: Sequence[float]) -> Comparison:
    """Comparison of a weighted sum of independent metrics, such as a mean over tasks."""
    difference = math.fsum(w * c.difference for w, c in zip(weights, parts, strict=True))
    se = math.hypot(*(w * c.se for w, c in zip(weights, parts, strict=True)))
    n, won, lost = (sum(counts) for counts in zip(*(c[2:] for c in parts), strict=True))
    return Comparison(difference, se, n, won, lost)


# ---- Several samples per item --------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """
    Unbiased estimate of pass@k from `correct` of `n` samples: 1 - C(n - correct, k) / C(n, k), in
    integers until the final division. Requires 1 <= k <= n. Source: Chen et al., "Evaluating Large
    Language Models Trained on Code", arXiv:2107.03374.
    """
    total = math.comb(n, k)
    return (total - math.comb(n - correct, k)) / total
