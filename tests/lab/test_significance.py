"""Noise bars: planted differences are found, false positives occur at the nominal rate."""

import random

import numpy as np
import pytest

from nanochat import stats
from nanochat.lab.significance import Contrast, Recorded, contrasts, holm, t_test
from nanochat.records import item_scores


def runs(metric, values, **items):
    """Recorded runs with these values of a metric, and equal item scores."""
    return [Recorded({metric: value}, items) for value in values]


@pytest.mark.parametrize(
    "df, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (30, 2.042), (999, 1.962)]
)
def test_students_t_matches_published_tables(df, t):
    bar, p = t_test(t, [(1.0, df)])
    assert bar == pytest.approx(t, abs=1e-3) and p == pytest.approx(0.05, abs=1e-4)
    assert t_test(-t, [(1.0, df)])[1] == p and t_test(0.0, [(1.0, df)])[1] == 1.0
    # equal sources of noise add their degrees of freedom
    both = t_test(t, [(0.5, df), (0.5, df)])
    assert both == pytest.approx(t_test(t, [(1.0, 2 * df)]))
    assert t_test(0.1, [(0.0, df)]) == (0.0, 0.0) and t_test(0.0, [(0.0, df)]) == (0.0, 1.0)


def test_holm_corrects_for_multiple_comparisons():
    def corrected(*ps):
        found = [Contrast("d4", "x", "bpb", 0.0, 0.2, 0.1, p) for p in ps]
        return [(pytest.approx(c.p), c.verdict) for c in holm(found)]

    noise = "within noise"
    assert corrected(0.01, 0.04, 0.03) == [(0.03, "worse"), (0.06, noise), (0.06, noise)]
    assert corrected(0.5, 0.9) == [(1.0, noise)] * 2 and corrected() == []


def test_variance_is_pooled_over_arms():
    values = {"control": [1.0, 3.0], "x": [10.0, 12.0, 14.0], "y": [5.0]}
    found = contrasts("d4", "bpb", {arm: runs("bpb", each) for arm, each in values.items()})
    assert [c.arm for c in found] == ["y", "x"]  # the smallest loss first
    bars = [3.182 * (10 / 3 * (1 / n + 1 / 2)) ** 0.5 for n in (1, 3)]
    assert [c.bar for c in found] == pytest.approx(bars, rel=1e-3)


@pytest.mark.parametrize(
    "shift, metric, verdict, least, most",
    [
        (0.0, "bpb", "within noise", 0.915, 0.98),  # nominal: 95%
        (0.05, "bpb", "worse", 0.95, 1),
        (-0.05, "bpb", "better", 0.95, 1),
        (0.05, "ARC", "better", 0.95, 1),
    ],
)
def test_verdicts_on_planted_differences(shift, metric, verdict, least, most):
    """400 studies: 3 seeds of the control, 2 of each arm."""
    rng, count = random.Random(1), 0
    for _ in range(400):
        arms = {"control": runs(metric, [rng.gauss(1, 0.01) for _ in range(3)])}
        for name, by in (("x", shift), ("y", 0.0), ("z", 0.1)):
            arms[name] = runs(metric, [rng.gauss(1 + by, 0.01) for _ in range(2)])
        count += {c.arm: c.verdict for c in contrasts("d4", metric, arms)}["x"] == verdict
    assert least * 400 < count <= most * 400


def test_paired_items_add_their_variance():
    hard = [float(i % 2) for i in range(200)]
    few = [1.0 if i < 10 else x for i, x in enumerate(hard)]  # 5 more items are correct

    def compare(metric, weight, clusters=()):
        mean, arms = {"weights": {"ARC": weight}}, {}
        for arm, scores in (("control", hard), ("x", few)):
            items = {"ARC": item_scores(range(200), scores, clusters), "Mean": mean}
            arms[arm] = runs(metric, [weight * sum(scores) / 200] * 2, **items)
        [found] = contrasts("d4", metric, arms)
        return found

    found = compare("ARC", 1.0)
    assert found.difference == pytest.approx(0.025) and found.verdict == "better"
    se = stats.compare(hard, few).se
    assert found.bar == pytest.approx(t_test(0.0, [(se**2, 199)])[0])
    assert compare("Mean", 0.25).bar == pytest.approx(found.bar / 4)
    clusters = [str(i // 10) for i in range(200)]  # all 5 of one cluster
    wider, se = compare("ARC", 1.0, clusters), stats.compare(hard, few, clusters).se
    assert wider.bar == pytest.approx(t_test(0.0, [(se**2, 19)])[0])
    assert wider.verdict == "within noise"


def test_sampling_error_is_not_counted_twice():
    """Equal arms that sample 4 answers to each of 100 questions; seeds differ in sampling only."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(400):
        rates, arms = rng.uniform(0.1, 0.9, 100), {}
        for arm in ("control", "x"):
            answers = rng.binomial(4, rates, (3, 100)) / 4
            arms[arm] = [
                Recorded({"ARC": scores.mean()}, {"ARC": item_scores(range(100), scores)})
                for scores in answers
            ]
        false += contrasts("d4", "ARC", arms)[0].verdict != "within noise"
    assert 0.03 * 400 < false < 0.085 * 400  # nominal: 5%; 1.5% if counted twice
