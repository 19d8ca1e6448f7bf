"""
Compare ablation arms with their control and test whether differences exceed the noise.

    scores of every seed of every arm -> Contrast per base, arm and metric -> tables

The variance between seeds is pooled over the arms of a base, since three seeds alone estimate it
poorly. The noise threshold uses Student's t at the available degrees of freedom; with few seeds it
is far above two standard errors. If per-item scores exist, items are paired and their variance is
added, without the part that differs between seeds, which the seed variance contains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nanochat import stats
from nanochat.records import estimate, read_clusters, read_scores
from nanochat.stats import LEVEL, Verdict

LOWER_IS_BETTER = ("bpb", "loss", "perplexity")  # substrings of metric names


def over_seeds(values: Sequence[float]) -> Any:
    """Mean of a metric over runs, as an `estimate`; for a single run, the plain value."""
    return values[0] if len(values) == 1 else estimate(*stats.mean(values))


class Items(NamedTuple):
    """Item scores of a task per seed."""

    scores: Sequence[Sequence[float]]
    clusters: Sequence[str] | None = None
    """The cluster of each item (`stats.mean`)."""
    weight: float = 1.0
    """Weight of the task in the metric, such as ChatCORE."""

    def means(self) -> list[float]:
        """Mean score of each item over seeds."""
        return [sum(scores) / len(scores) for scores in zip(*self.scores, strict=True)]


class Scores(NamedTuple):
    """One metric of one arm: its value per seed and, if known, the item scores of its tasks."""

    values: Sequence[float]
    tasks: Sequence[Items] = ()


def read_items(metric: str, recorded: Sequence[Mapping[str, Any]]) -> list[Items]:
    """
    Item scores of a metric in the `items` of several runs; of each task, if it is a mean over
    tasks. Empty unless all runs have scores of the same items.
    """
    weights, *others = (run.get(metric, {}).get("weights", {metric: 1.0}) for run in recorded)
    found = []
    for task, weight in weights.items():
        each = [run.get(task, {}) for run in recorded]
        same = all("scores" in one and one.get("of") == each[0].get("of") for one in each)
        if not same or any(other != weights for other in others):
            return []
        found.append(Items([read_scores(one) for one in each], read_clusters(each[0]), weight))
    return found


@dataclass(frozen=True)
class Contrast:
    """Comparison of an arm with the control of its base."""

    base: str
    arm: str
    metric: str
    value: float
    """Mean over seeds."""
    num_seeds: int
    difference: float
    """Difference of means, arm minus control."""
    bar: float
    """Smallest significant difference; NaN if the spread is unknown."""
    p: float
    adjusted_p: float = math.nan
    """p value after Holm correction."""

    @property
    def verdict(self) -> Verdict | str:
        """better, worse or within noise; unknown if the spread is unknown."""
        if math.isnan(self.bar):
            return "unknown"
        gain = -self.difference if lower_is_better(self.metric) else self.difference
        if not abs(gain) > self.bar:
            return "within noise"
        return "better" if gain > 0 else "worse"

    @property
    def stands(self) -> bool:
        """Whether the verdict holds after Holm correction."""
        return self.verdict in ("better", "worse") and self.adjusted_p < LEVEL


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, judged by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Pooled within-group variance and its degrees of freedom; (NaN, 0) without repeats."""
    df = sum(len(values) - 1 for values in groups)
    if not df:
        return math.nan, 0
    squares = sum(sum((x - sum(g) / len(g)) ** 2 for x in g) for g in groups)
    return squares / df, df


def contrasts(
    base: str, metric: str, arms: Mapping[str, Scores], control: str = "control"
) -> list[Contrast]:
    """
    Compare every arm of a base with its control.

    The squared standard error is the seed variance, which is s^2 (1/n_arm + 1/n_control) with
    pooled s^2, plus the paired item variance. Answers that differ between seeds, by training or by
    sampling, are part of the seed variance and subtracted from the item variance. Degrees of
    freedom: Welch-Satterthwaite, rounded down.
    """
    spread, df = pooled_spread([scores.values for scores in arms.values()])
    against = arms[control]
    middle = sum(against.values) / len(against.values)
    found = []
    for name, scores in arms.items():
        if name == control:
            continue
        n = len(scores.values)
        value = sum(scores.values) / n
        parts = [(spread * (1 / n + 1 / len(against.values)), df)]
        for mine, theirs in zip(scores.tasks, against.tasks, strict=False):  # both or none
            pairs = stats.compare(theirs.means(), mine.means(), mine.clusters)
            each = [list(zip(*s.scores, strict=True)) for s in (mine, theirs) if len(s.scores) > 1]
            repeats = math.fsum(stats.split_error(items).repeat_se ** 2 for items in each)
            draws = len(set(mine.clusters)) if mine.clusters else pairs.n
            variance = max(pairs.se**2 - repeats, 0.0)  # NaN stays NaN
            parts.append((mine.weight**2 * variance, draws - 1))
        bar, p = noise_bar(value - middle, parts)
        found.append(Contrast(base, name, metric, value, n, value - middle, bar, p))
    return found


def noise_bar(difference: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Noise threshold and p value of a difference, given (variance, degrees of freedom) parts."""
    total = math.fsum(variance for variance, _ in parts)
    if math.isnan(total):
        return math.nan, math.nan
    if total == 0:
        return 0.0, 0.0 if difference else 1.0
    each = [variance**2 / df for variance, df in parts if variance and df]
    df = max(1, int(total**2 / math.fsum(each) + 1e-9))  # rounding errors cost no degree
    se = math.sqrt(total)
    return student_quantile(df, LEVEL) * se, student_p(difference / se, df)


def holm_correct(found: Sequence[Contrast]) -> list[Contrast]:
    """
    Return the contrasts with Holm-corrected p values, which control the family-wise error rate at
    the tested level.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    known = sorted((c for c in found if not math.isnan(c.p)), key=lambda c: c.p)
    adjusted, most = {}, 0.0
    for rank, c in enumerate(known):
        most = max(most, min(1.0, (len(known) - rank) * c.p))
        adjusted[id(c)] = most
    return [replace(c, adjusted_p=adjusted.get(id(c), math.nan)) for c in found]


def agreement(found: Sequence[Contrast], arm: str, metric: str) -> str:
    """Summarize the verdicts on an arm over all bases: an effect should appear on each."""
    verdicts = {c.base: c.verdict for c in found if (c.arm, c.metric) == (arm, metric)}
    kinds = set(verdicts.values())
    if len(verdicts) == 1:
        return "one base"
    if len(kinds) == 1:
        return f"all {kinds.pop()}"
    if {"better", "worse"} <= kinds:
        return "the bases disagree"
    return "only " + ", ".join(f"{base} {v}" for base, v in verdicts.items() if v != "within noise")


def comparison_table(
    found: Sequence[Contrast],
    controls: Mapping[tuple[str, str], Scores],
    million_tokens: float | None,
) -> dict[str, Any]:
    """
    Table with one row per base, metric and arm, largest gain first, after the control's row.

    controls: (base, metric) -> scores. million_tokens: training tokens of each run, in
    millions; None in RL.
    """
    rows = []
    for (base, metric), scores in controls.items():
        mean = stats.mean(scores.values)
        std = "" if math.isnan(mean.se) else f"std {mean.se * math.sqrt(mean.n):.4f}"
        head = [metric, base, "control", f"{mean.value:.4f}", str(mean.n), "", std]
        rows.append(head + [""] * 4)
        sign = -1 if lower_is_better(metric) else 1
        mine = [c for c in found if (c.base, c.metric) == (base, metric)]
        for c in sorted(mine, key=lambda c: -sign * c.difference):
            bar = "-" if math.isnan(c.bar) else f"{c.bar:.4f}"
            row = [metric, base, c.arm, f"{c.value:.4f}", str(c.num_seeds), f"{c.difference:+.4f}"]
            row += [bar, c.verdict, "yes" if c.stands else "no", agreement(found, c.arm, metric)]
            rows.append([*row, f"{c.difference / million_tokens:+.4f}" if million_tokens else "-"])
    columns = "Metric|Base|Arm|Mean|Seeds|Difference|Noise bar|Verdict|Holm|Bases|Per Mtok"
    return {"title": "Arms", "columns": columns.split("|"), "rows": rows}


# ------------------------------------------------------------------------------------------------
# Statistics for few runs and many comparisons


def student_p(t: float, df: int) -> float:
    """
    Two-sided p value of Student's t with `df` >= 1 degrees of freedom.

    Exact finite series for integer `df`: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(abs(t), math.sqrt(df))
    cos, sin = math.cos(angle), math.sin(angle)
    term, total = 1.0, 0.0
    for k in range(df % 2, df - 1, 2):  # k is the power of the cosine
        total += term * cos**k
        term *= (k + 1) / (k + 2)
    inside = sin * total if df % 2 == 0 else 2 / math.pi * (angle + sin * total)
    return max(0.0, 1.0 - inside)


def student_quantile(df: int, p: float = 0.05) -> float:
    """Two-sided critical value of Student's t at level `p`: 2.78 for df = 4, 1.96 as df grows."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > p else (low, middle)
    return high


def expected_maximum(n: int) -> float:
    """
    Expected maximum of `n` standard normal values: 0, 0.56, 0.85, 1.03, 1.16, 1.27 for n = 1 to 6.

    The best of n runs overestimates their mean by this many standard deviations.
    """
    xs = np.linspace(-9.0, 9.0, 20_001)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in xs])
    density = n * below ** (n - 1) * np.exp(-(xs**2) / 2) / math.sqrt(2 * math.pi)
    return float((xs * density).sum() * (xs[1] - xs[0]))
