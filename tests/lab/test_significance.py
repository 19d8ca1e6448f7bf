"""Noise bars: planted differences are found, false positives occur at the nominal rate."""

import math
import random

import numpy as np
import pytest

from nanochat import stats
from nanochat.lab.significance import (
    Contrast,
    Items,
    Scores,
    contrasts,
    holm_correct,
    noise_bar,
    pooled_spread,
    read_items,
    student_p,
    student_quantile,
)
from nanochat.records import item_scores


@pytest.mark.parametrize(
    "df, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (30, 2.042), (999, 1.962)]
)
def test_students_t_matches_published_tables(df, t):
    assert student_p(t, df) == student_p(-t, df) == pytest.approx(0.05, abs=1e-4)
    assert student_quantile(df) == pytest.approx(t, abs=1e-3)
    assert student_p(0.0, df) == pytest.approx(1.0) and student_p(math.inf, df) == 0.0
    for n in range(1, 40):  # one source of noise keeps its degrees of freedom
        assert noise_bar(0.02, [(0.0001 * n, df)])[0] == pytest.approx(
            t * math.sqrt(n) / 100, rel=1e-3
        )


def test_holm_corrects_for_multiple_comparisons():
    def adjusted(*ps):
        found = [Contrast("d4", "x", "bpb", 0.0, 2, 0.2, 0.1, p) for p in ps]
        return [(pytest.approx(c.adjusted_p), c.stands) for c in holm_correct(found)]

    assert adjusted(0.01, 0.04, 0.03) == [(0.03, True), (0.06, False), (0.06, False)]
    assert adjusted(0.5, 0.9) == [(1.0, False)] * 2 and adjusted() == []


def test_variance_is_pooled_over_arms():
    variance, df = pooled_spread([[1.0, 3.0], [10.0, 12.0, 14.0], [5.0]])
    assert (variance, df) == (pytest.approx((2 + 8) / 3), 3)
    one = {"control": Scores([1.0]), "x": Scores([2.0])}
    [found] = contrasts("d4", "bpb", one)  # no repeats
    assert found.verdict == "unknown" and not holm_correct([found])[0].stands


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
        arms = {"control": Scores([rng.gauss(1, 0.01) for _ in range(3)])}
        for name, by in (("x", shift), ("y", 0.0), ("z", 0.1)):
            arms[name] = Scores([rng.gauss(1 + by, 0.01) for _ in range(2)])
        count += contrasts("d4", metric, arms)[0].verdict == verdict
    assert least * 400 < count <= most * 400


def test_paired_items_add_their_variance():
    hard = [float(i % 2) for i in range(200)]
    few = [1.0 if i < 10 else x for i, x in enumerate(hard)]  # 5 more items are correct
    arms = {
        "control": Scores([sum(hard) / 200] * 3, [Items([hard] * 3)]),
        "x": Scores([sum(few) / 200] * 2, [Items([few] * 2)]),
    }
    [found] = contrasts("d4", "ARC", arms)
    assert found.difference == pytest.approx(0.025) and found.verdict == "better"
    assert found.bar == pytest.approx(student_quantile(199) * stats.compare(hard, few).se)

    mean = {"Mean": {"weights": {"ARC": 0.25}}}
    runs = [{**mean, "ARC": item_scores(range(200), x)} for x in (hard, few)]
    of_mean = {
        arm: Scores([v / 4 for v in arms[arm].values], read_items("Mean", [run, run]))
        for arm, run in zip(arms, runs, strict=True)
    }
    [scaled] = contrasts("d4", "Mean", of_mean)
    assert scaled.bar == pytest.approx(found.bar / 4) and read_items("Mean", [mean, mean]) == []

    clusters = [str(i // 10) for i in range(200)]  # all 5 of one cluster
    for name, (values, [task]) in arms.items():
        arms[name] = Scores(values, [task._replace(clusters=clusters)])
    [wider] = contrasts("d4", "ARC", arms)
    assert wider.bar == pytest.approx(student_quantile(19) * stats.compare(hard, few, clusters).se)
    assert wider.verdict == "within noise"


def test_sampling_error_is_not_counted_twice():
    """Equal arms that sample 4 answers to each of 100 questions; seeds differ in sampling only."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(400):
        rates = rng.uniform(0.1, 0.9, 100)
        items = {arm: rng.binomial(4, rates, (3, 100)) / 4 for arm in ("control", "x")}
        arms = {arm: Scores(x.mean(1).tolist(), [Items(x.tolist())]) for arm, x in items.items()}
        false += contrasts("d4", "pass@1 after", arms)[0].verdict != "within noise"
    assert 0.03 * 400 < false < 0.085 * 400  # nominal: 5%; 1.5% if counted twice
