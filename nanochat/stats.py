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
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

NOISE = 2.0  # differences within this many standard errors are noise
LEVEL = 0.05  # differences with a higher p-value are noise

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


def proportion(successes: int, n: int) -> Estimate:
    """Proportion `successes` / `n` with the binomial standard error."""
    p = successes / n
    return Estimate(p, n, math.sqrt(p * (1 - p) / n))


def center_accuracy(accuracy: Estimate, baseline: float) -> Estimate:
    """Rescale accuracy so that chance level (`baseline`) is 0 and perfect is 1."""
    scale = 1 - baseline
    return Estimate((accuracy.value - baseline) / scale, accuracy.n, accuracy.se / scale)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Unweighted mean of independent estimates with propagated error; n counts all items."""
    value = math.fsum(e.value for e in estimates) / len(estimates)
    se = math.hypot(*(e.se for e in estimates)) / len(estimates)
    return Estimate(value, sum(e.n for e in estimates), se)


# ------------------------------------------------------------------------------------------------
# Comparison of two runs


class Comparison(NamedTuple):
    """Difference between two runs on the same items."""

    difference: float
    """After minus before."""
    se: float
    n: int
    won: int
    """Number of items with a higher score than before."""
    lost: int
    p: float
    """Two-sided p-value."""

    @property
    def verdict(self) -> Verdict:
        return verdict(self.difference, self.se, self.p)


def verdict(difference: float, se: float, p: float = 0.0) -> Verdict:
    """
    Return "better" or "worse" if |difference| > NOISE * se and p < LEVEL; assumes higher is better.
    """
    if not abs(difference) > NOISE * se or p >= LEVEL:
        return "within noise"
    return "better" if difference > 0 else "worse"


def compare(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[str] | Sequence[int] | None = None,
) -> Comparison:
    """
    Compare two runs item by item, which removes item difficulty from the standard error.

    For scores of 0 and 1, p is from the exact sign test on the items that changed (McNemar,
    "Sampling error of the difference between correlated proportions", 1947); for other scores, and
    with clusters of several items, from the normal distribution. Raises ValueError if the numbers
    of items differ.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} scores cannot be paired with {len(after)}")
    change = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    difference, n, se = mean(change.tolist(), clusters)
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    shared = clusters is not None and len(set(clusters)) < n
    is_binary = bool(np.isin(change, (-1, 0, 1)).all())
    p = sign_test(won, lost) if is_binary and not shared else normal_test(difference, se)
    return Comparison(difference, se, n, won, lost, p)


def sign_test(won: int, lost: int) -> float:
    """Exact two-sided p-value of `won` against `lost` under a fair coin."""
    n = won + lost
    # C(n, k) for k from 0 to min(won, lost)
    terms = accumulate(range(min(won, lost)), lambda x, i: x * (n - i) // (i + 1), initial=1)
    return min(1.0, 2 * sum(terms) / 2**n)


def normal_test(difference: float, se: float) -> float:
    """Two-sided p-value of a difference from the normal distribution."""
    return math.erfc(abs(difference) / se / math.sqrt(2)) if se else float(difference == 0)


def combine(parts: Sequence[Comparison], weights: Sequence[float]) -> Comparison:
    """
    Comparison of a weighted sum of independent metrics, such as a mean over tasks.

    p is from the normal distribution; a single part keeps its exact p.
    """
    difference = math.fsum(w * c.difference for w, c in zip(weights, parts, strict=True))
    se = math.hypot(*(w * c.se for w, c in zip(weights, parts, strict=True)))
    p = parts[0].p if len(parts) == 1 else normal_test(difference, se)
    n, won, lost = (sum(counts) for counts in zip(*(c[2:5] for c in parts), strict=True))
    return Comparison(difference, se, n, won, lost, p)


# ------------------------------------------------------------------------------------------------
# Several samples per item


def pass_at_k(n: int, correct: int, k: int) -> float:
    """
    Unbiased estimate of pass@k from `correct` of `n` samples: 1 - C(n - correct, k) / C(n, k), in
    integers until the final division. Requires 1 <= k <= n. Source: Chen et al., "Evaluating Large
    Language Models Trained on Code", arXiv:2107.03374.
    """
    total = math.comb(n, k)
    return (total - math.comb(n - correct, k)) / total


def repeat_error(scores: Sequence[Sequence[float]]) -> float:
    """
    Part of the standard error of the mean of `scores[item][repeat]` that comes from sampling the
    answers, by one-way analysis of variance; scales as 1 / sqrt(number of repeats).
    """
    table = np.asarray(scores, dtype=np.float64)  # (n, k)
    return math.sqrt(float(table.var(axis=1, ddof=1).mean()) / table.size)
