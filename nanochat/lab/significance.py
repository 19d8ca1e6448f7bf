"""
Test whether ablation arms differ from their control by more than noise.

    recorded runs of every arm -> contrasts -> holm -> verdicts

There is one method, a t test. Its variance has two sources. The variance between seeds is pooled
over all arms, since three seeds alone estimate it poorly. If all runs recorded scores of the same
items, the paired variance of the items is added (Miller, "Adding Error Bars to Evals",
arXiv:2411.00640). The degrees of freedom are those of Satterthwaite, "An Approximate Distribution
of Estimates of Variance Components", 1946. P values are corrected for the number of comparisons
(Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from nanochat import stats
from nanochat.records import estimate, plain_value, read_clusters, read_scores
from nanochat.stats import LEVEL, Verdict

POINTS = 4_000  # for numerical integration
LOWER_IS_BETTER = ("bpb", "loss", "perplexity")  # substrings of metric names


class Recorded(NamedTuple):
    """Values and item scores by name, as in the records of a run."""

    values: dict[str, Any]
    items: dict[str, Any]


class Contrast(NamedTuple):
    """An arm compared with the control of its base on one metric; means are over seeds."""

    base: str
    arm: str
    metric: str
    control: float
    num_control: int
    """Number of seeds of the control."""
    value: float
    num_seeds: int
    bar: float
    """Noise bar: the smallest difference that is significant in a single comparison."""
    p: float
    """Two-sided p value; `holm` corrects it."""

    @property
    def difference(self) -> float:
        """Arm minus control."""
        return self.value - self.control

    @property
    def gain(self) -> float:
        """The difference, positive if the arm is better."""
        return -self.difference if lower_is_better(self.metric) else self.difference

    @property
    def verdict(self) -> Verdict:
        """better or worse if p is below LEVEL."""
        if not self.p < LEVEL:  # NaN is noise, too
            return "within noise"
        return "better" if self.gain > 0 else "worse"

    def cells(self) -> list[str]:
        """Table cells, see CELLS."""
        return [
            f"{self.control:.4f} ({self.num_control} seeds)",
            f"{self.value:.4f} ({self.num_seeds} seeds)",
            f"{self.difference:+.4f}",
            f"{self.bar:.4f}",
            f"{self.p:.2g}",
            self.verdict,
        ]


CELLS = ("Control", "Arm", "Difference", "Noise bar", "p (Holm)", "Verdict")


def over_seeds(values: Sequence[float]) -> Any:
    """Mean of a metric over runs, as an `estimate`; for a single run, the plain value."""
    return values[0] if len(values) == 1 else estimate(*stats.mean(values))


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, judged by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def contrasts(base: str, metric: str, arms: Mapping[str, Sequence[Recorded]]) -> list[Contrast]:
    """
    Compare every arm of a base with the first, the control; the largest gain comes first.

    The variance of a difference is s^2 (1/n_arm + 1/n_control), where s^2 is the pooled variance
    between seeds, plus that of the items. Raises ValueError if no arm has two runs.
    """
    scores = {
        arm: [float(plain_value(run.values[metric])) for run in runs] for arm, runs in arms.items()
    }
    means = {arm: fmean(values) for arm, values in scores.items()}
    squares = sum((x - means[arm]) ** 2 for arm, values in scores.items() for x in values)
    df = sum(map(len, scores.values())) - len(scores)
    if df == 0:
        raise ValueError(f"{base}: no arm has two runs, so the noise is unknown; use more seeds")
    control, *others = arms
    n, found = len(scores[control]), []
    for arm in others:
        num_seeds = len(scores[arm])
        parts = [(squares / df * (1 / num_seeds + 1 / n), df)]
        parts += item_variances(metric, arms[control], arms[arm])
        noise = t_test(means[arm] - means[control], parts)
        found.append(Contrast(base, arm, metric, means[control], n, means[arm], num_seeds, *noise))
    return sorted(found, key=lambda c: -c.gain)


def item_variances(
    metric: str, before: Sequence[Recorded], after: Sequence[Recorded]
) -> list[tuple[float, float]]:
    """
    (variance, degrees of freedom) of the difference by the choice of items, for each task that the
    metric is a mean of. Empty unless all runs have scores of the same items.

    Differences between the answers of seeds are part of the variance between seeds and not counted
    again.
    """
    runs, parts = [*before, *after], []
    for task, weight in runs[0].items.get(metric, {}).get("weights", {metric: 1.0}).items():
        entries = [run.items.get(task, {}) for run in runs]
        if len({entry.get("of") for entry in entries}) > 1 or "scores" not in entries[0]:
            return []
        scores, clusters = np.array([read_scores(e) for e in entries]), read_clusters(entries[0])
        draws = len(set(clusters)) if clusters else scores.shape[1]
        sides = np.split(scores, [len(before)])  # (seeds, items) each
        old, new = (side.mean(axis=0).tolist() for side in sides)
        paired = stats.compare(old, new, clusters)
        repeats = sum(stats.repeat_error(s.T.tolist()) ** 2 for s in sides if len(s) > 1)
        parts.append((weight**2 * max(paired.se**2 - repeats, 0.0), draws - 1))
    return parts


def t_test(difference: float, parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """
    Noise bar and two-sided p value of a difference whose variance is the sum of (variance, df)
    parts, by Student's t: the tangent of an angle whose density is cos^(df - 1), times sqrt(df).
    """
    total = math.fsum(variance for variance, _ in parts)
    df = total**2 / math.fsum(variance**2 / df for variance, df in parts) if total else 1.0
    angles = np.linspace(0, math.pi / 2, POINTS + 1)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (df - 1)
    below = np.concatenate([[0.0], density.cumsum() / density.sum()])
    scale = math.sqrt(total * df)
    bar = scale * math.tan(np.interp(1 - LEVEL, below, angles))
    return bar, 1 - float(np.interp(math.atan2(abs(difference), scale), angles, below))


def holm(found: Sequence[Contrast]) -> list[Contrast]:
    """The contrasts with corrected p values: one false verdict in 20 tables, however long."""
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    corrected, most = list(found), 0.0
    for rank, i in enumerate(order):
        most = max(most, min(1.0, (len(found) - rank) * found[i].p))
        corrected[i] = found[i]._replace(p=most)
    return corrected


def agreement(found: Sequence[Contrast], one: Contrast) -> str:
    """Number of bases by verdict on the arm and metric of a contrast, as in "2 worse"."""
    same = Counter(c.verdict for c in found if (c.arm, c.metric) == (one.arm, one.metric))
    return ", ".join(f"{n} {verdict}" for verdict, n in same.items())


def expected_maximum(n: int) -> float:
    """
    Expected maximum of `n` standard normal values: 0, 0.56, 0.85, 1.03, 1.16, 1.27 for n = 1 to 6.

    The best of n runs overestimates their mean by this many standard deviations.
    """
    quantile = NormalDist().inv_cdf
    return fmean(quantile(((i + 0.5) / POINTS) ** (1 / n)) for i in range(POINTS))
