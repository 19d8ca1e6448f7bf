"""
Test whether ablation arms differ from their control by more than noise.

    recorded runs of every arm -> compare_arms: contrasts, holm -> comparison_table

There is one method, a t test. Its variance has two sources. The variance between seeds is pooled
over all arms, since three seeds alone estimate it poorly. If all runs recorded scores of the same
items, the paired variance of the items is added (Miller, "Adding Error Bars to Evals",
arXiv:2411.00640). The degrees of freedom are those of Satterthwaite, "An Approximate Distribution
of Estimates of Variance Components", 1946. P values are corrected for the number of comparisons
(Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from nanochat import stats
from nanochat.records import plain_value, read_clusters, read_scores
from nanochat.stats import Verdict

LEVEL = 0.05  # differences with a higher p value are noise
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
    value: float
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
        """The difference, positive if the arm is better, judged by the name of the metric."""
        lower_is_better = any(word in self.metric.lower() for word in LOWER_IS_BETTER)
        return -self.difference if lower_is_better else self.difference

    @property
    def verdict(self) -> Verdict:
        """better or worse if p is below LEVEL."""
        if not self.p < LEVEL:  # NaN is noise, too
            return "within noise"
        return "better" if self.gain > 0 else "worse"

    def cells(self) -> list[str]:
        """Table cells, see CELLS."""
        return [
            f"{self.control:.4f}",
            f"{self.value:.4f}",
            f"{self.difference:+.4f}",
            f"{self.bar:.4f}",
            f"{self.p:.2g}",
            self.verdict,
        ]


CELLS = ("Control", "Arm", "Difference", "Noise bar", "p (Holm)", "Verdict")


def over_seeds(values: Sequence[float]) -> Any:
    """Mean of a metric over runs, with its error; for a single run, the plain value."""
    return values[0] if len(values) == 1 else stats.mean(values)._asdict()


def contrasts(
    base: str, metric: str, arms: Mapping[str, Sequence[Recorded]], paired: bool = False
) -> list[Contrast]:
    """
    Compare every arm of a base with the first, the control; the largest gain comes first.

    The variance of a difference is s^2 (1/n_arm + 1/n_control), where s^2 is the pooled variance
    between seeds, plus that of the items. One arm must have two runs. paired: all arms have runs of
    the same seeds in the same order; what a seed does to all arms is left out of s^2.
    """
    scores = {
        arm: [float(plain_value(run.values[metric])) for run in runs] for arm, runs in arms.items()
    }
    means = {arm: fmean(values) for arm, values in scores.items()}
    deviations = [np.array(values) - means[arm] for arm, values in scores.items()]
    seed_effects = np.mean(deviations, axis=0) if paired else 0.0
    squares = sum(((values - seed_effects) ** 2).sum() for values in deviations)
    df = sum(len(values) - 1 for values in deviations) - (np.size(seed_effects) - 1)
    control, *others = arms
    found = []
    for arm in others:
        counts = 1 / len(scores[arm]) + 1 / len(scores[control])
        parts = [(squares / df * counts, df), *item_variances(metric, arms[control], arms[arm])]
        noise = t_test(means[arm] - means[control], parts)
        found.append(Contrast(base, arm, metric, means[control], means[arm], *noise))
    return sorted(found, key=lambda c: -c.gain)


def item_variances(
    metric: str, before: Sequence[Recorded], after: Sequence[Recorded]
) -> list[tuple[float, float]]:
    """
    (variance, degrees of freedom) of the difference by the choice of items, for each task that the
    metric is a mean of. Empty unless all runs have scores of the same items, two or more.

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
        if draws < 2:
            return []
        sides = np.split(scores, [len(before)])  # (seeds, items) each
        old, new = (side.mean(axis=0).tolist() for side in sides)
        paired = stats.compare(old, new, clusters)
        repeats = sum(s.var(axis=0, ddof=1).mean() / s.size for s in sides if len(s) > 1)
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


# ---- Comparison of all arms ----------------------------------------------------------------------


def compare_arms(
    runs: Mapping[str, Mapping[str, Sequence[Recorded]]], first: str
) -> list[Contrast]:
    """
    Compare base -> arm -> runs with the first arm of the base, the control, on every metric;
    `first` comes first.
    """
    every = [run for arms in runs.values() for each in arms.values() for run in each]
    pairs = itertools.product(list_metrics(every, first), runs.items())
    return holm([c for metric, (base, arms) in pairs for c in contrasts(base, metric, arms)])


def list_metrics(runs: Sequence[Recorded], first: str) -> list[str]:
    """
    Metrics that all runs share: `first`, bits per byte by bucket, and scores. Not those before RL
    and their change, and of pass@k, which contain each other, only pass@1.
    """
    values = runs[0].values
    shared = [name for name in values if all(name in run.values for run in runs)]
    if first not in shared:
        raise ValueError(f"some runs did not record {first!r}; the first has {', '.join(values)}")
    left_out = re.compile(r" before$| change$|pass@(?!1\b)")
    others = [
        name
        for name in shared
        if name.startswith("val_bpb:")
        or (isinstance(values[name], Mapping) and not left_out.search(name))
    ]
    return list(dict.fromkeys([first, *others]))


def comparison_table(found: Sequence[Contrast]) -> dict[str, Any]:
    """Table of corrected contrasts. Its last column counts the bases by verdict on the same arm."""
    rows = []
    for c in found:
        same = Counter(x.verdict for x in found if (x.arm, x.metric) == (c.arm, c.metric))
        bases = ", ".join(f"{n} {verdict}" for verdict, n in same.items())
        rows.append([c.metric, c.base, c.arm, *c.cells(), bases])
    return {"title": "Arms", "columns": ["Metric", "Base", "Name", *CELLS, "Bases"], "rows": rows}
