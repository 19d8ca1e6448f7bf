"""
Statistics of evaluations: what a figure is worth, and whether two of them differ.

    scores of items -> Estimate (value, n, se); scores of the same items twice -> Comparison

Items count as a sample of those that could have been asked: a standard error says how much the
figure would vary with others. Pure functions of numbers; knows nothing of tasks or records.
Source, where no other is named: Miller, "Adding Error Bars to Evals", arXiv:2411.00640.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

NOISE = 2.0  # a difference of fewer standard errors is within noise

Verdict = Literal["better", "worse", "within noise"]


class Estimate(NamedTuple):
    """A measured value, the number of items behind it, and its standard error (NaN: unknown)."""

    value: float
    n: int
    se: float


def mean(scores: Sequence[float]) -> Estimate:
    """The mean of any scores. Raises ValueError without a score; one alone has no known error."""
    values = np.asarray(scores, dtype=np.float64)
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs at least one score")
    se = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(float(values.mean()), n, se)


def proportion(successes: int, n: int) -> Estimate:
    """`successes` of `n`, with the binomial standard error."""
    p = successes / n
    return Estimate(p, n, math.sqrt(p * (1 - p) / n))


def centred(accuracy: Estimate, baseline: float) -> Estimate:
    """Accuracy on a scale where guessing, which gets `baseline` right, is 0 and perfect is 1."""
    scale = 1 - baseline
    return Estimate((accuracy.value - baseline) / scale, accuracy.n, accuracy.se / scale)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean of independent estimates, their errors propagated; n counts all items."""
    value = math.fsum(e.value for e in estimates) / len(estimates)
    se = math.hypot(*(e.se for e in estimates)) / len(estimates)
    return Estimate(value, sum(e.n for e in estimates), se)


# ------------------------------------------------------------------------------------------------
# Two runs


class Comparison(NamedTuple):
    """What changed from one run to another on the same items."""

    difference: float
    """After minus before."""
    se: float
    n: int
    won: int
    """Items with a higher score than before."""
    lost: int
    p: float
    """How often chance alone would make the runs differ this much or more, two-sided."""

    @property
    def verdict(self) -> Verdict:
        return verdict(self.difference, self.se)


def verdict(difference: float, se: float) -> Verdict:
    """better or worse where the difference exceeds NOISE standard errors; higher is better."""
    if not abs(difference) > NOISE * se:
        return "within noise"
    return "better" if difference > 0 else "worse"


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """
    Compare two runs item by item: what both find easy or hard cancels out of the standard error.

    p is that of the exact sign test on the items that changed; for right and wrong it is McNemar's
    (McNemar, "Sampling error of the difference between correlated proportions", 1947). Raises
    ValueError where the items are not the same in number.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} scores cannot be paired with {len(after)}")
    change = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    difference, n, se = mean(change.tolist())
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    return Comparison(difference, se, n, won, lost, sign_test(won, lost))


def sign_test(won: int, lost: int) -> float:
    """The chance that fair coins fall at least as unevenly as `won` to `lost`, exactly."""
    n = won + lost
    # binomial coefficients of n, from 0 to the smaller side
    terms = accumulate(range(min(won, lost)), lambda x, i: x * (n - i) // (i + 1), initial=1)
    return min(1.0, 2 * sum(terms) / 2**n)


def combine(parts: Sequence[Comparison], weights: Sequence[float]) -> Comparison:
    """
    The comparison of a weighted sum of independent figures, such as a mean over tasks.

    p comes from the normal distribution, but for a single part, whose own is exact.
    """
    difference = math.fsum(w * c.difference for w, c in zip(weights, parts, strict=True))
    se = math.hypot(*(w * c.se for w, c in zip(weights, parts, strict=True)))
    p = parts[0].p if len(parts) == 1 else normal_p(difference, se)
    n, won, lost = (sum(counts) for counts in zip(*(c[2:5] for c in parts), strict=True))
    return Comparison(difference, se, n, won, lost, p)


def normal_p(difference: float, se: float) -> float:
    """The two-sided chance of a difference at least this large, were there none in truth."""
    if difference == 0:
        return 1.0
    return math.erfc(abs(difference) / se / math.sqrt(2)) if se else 0.0


# ------------------------------------------------------------------------------------------------
# Several samples of each item


def pass_at_k(n: int, correct: int, k: int) -> float:
    """
    The chance that at least one of `k` samples is right, unbiased, from `correct` of `n` that are:
    1 - C(n - correct, k) / C(n, k), in whole numbers until the last division.

    1 <= k <= n. Source: Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374.
    """
    ways = math.comb(n, k)
    return (ways - math.comb(n - correct, k)) / ways
