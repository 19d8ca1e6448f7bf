"""Noise bars: real differences are found, and false positives occur at the nominal rate."""

import math
import random

import numpy as np
import pytest

from nanochat import stats
from nanochat.lab.significance import (
    Contrast,
    Items,
    Scores,
    agreement,
    contrasts,
    expected_maximum,
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
    assert student_p(t, df) == pytest.approx(0.05, abs=1e-4)
    assert student_quantile(df) == pytest.approx(t, abs=1e-3)
    assert student_p(-t, df) == student_p(t, df)
    assert student_p(0.0, df) == pytest.approx(1.0) and student_p(math.inf, df) == 0.0


@pytest.mark.parametrize("df", [1, 7, 15, 31])
def test_one_source_of_noise_keeps_its_degrees_of_freedom(df):
    for n in range(1, 500):  # some squares round down
        bar, _ = noise_bar(0.02, [(0.0001 * n, df)])
        assert bar == pytest.approx(student_quantile(df) * math.sqrt(0.0001 * n))


def test_holm_corrects_for_multiple_comparisons():
    def adjusted(*ps):
        found = [Contrast("d4", "x", "bpb", 0.0, 2, 0.0, 0.0, p) for p in ps]
        return [c.adjusted_p for c in holm_correct(found)]

    assert adjusted(0.01, 0.04, 0.03) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted(0.5, 0.9) == [1.0, 1.0] and adjusted() == []


def test_expected_maximum_of_n_normal_values():
    found = [round(expected_maximum(n), 2) for n in range(1, 7)]
    assert found == [0.0, 0.56, 0.85, 1.03, 1.16, 1.27]
    rng = random.Random(0)
    drawn = [max(rng.gauss(0, 1) for _ in range(3)) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_maximum(3), abs=0.02)


def test_variance_is_pooled_over_arms():
    variance, df = pooled_spread([[1.0, 3.0], [10.0, 12.0, 14.0], [5.0]])
    assert (variance, df) == (pytest.approx((2 + 8) / 3), 3)
    assert pooled_spread([[1.0], [2.0]])[1] == 0


def studies(shift, count=400, sigma=0.01):
    """Verdicts on arm x over many studies: 3 control seeds, 2 seeds per arm, x shifted."""
    rng = random.Random(1)
    verdicts = []
    for _ in range(count):
        arms = {"control": Scores([rng.gauss(1, sigma) for _ in range(3)])}
        for name, by in (("x", shift), ("y", 0.0), ("z", 0.1)):
            arms[name] = Scores([rng.gauss(1 + by, sigma) for _ in range(2)])
        verdicts.append(contrasts("d4", "bpb", arms)[0].verdict)
    return verdicts


def test_false_positive_rate_is_about_5_percent():
    false = sum(verdict != "within noise" for verdict in studies(0.0))
    assert 0.02 * 400 < false < 0.085 * 400  # nominal: 5%


def test_two_standard_errors_give_too_many_false_positives():
    """With few seeds, a noise bar of 2 standard errors is far too low."""
    rng = random.Random(1)
    false = 0
    for _ in range(400):
        control, arm = ([rng.gauss(0, 1) for _ in range(n)] for n in (3, 2))
        se = math.sqrt(pooled_spread([control])[0] * (1 / 3 + 1 / 2))
        false += abs(sum(arm) / 2 - sum(control) / 3) > 2 * se
    assert false > 0.15 * 400


def test_shifted_arm_is_detected():
    assert studies(0.05).count("worse") > 0.95 * 400
    assert studies(-0.05).count("better") > 0.95 * 400


def test_paired_items_add_their_variance():
    hard = [float(i % 2) for i in range(200)]
    few = [1.0 if i < 10 else x for i, x in enumerate(hard)]  # 5 more items are correct
    values = [sum(hard) / 200] * 3
    arms = {
        "control": Scores(values, [Items([hard] * 3)]),
        "x": Scores([sum(few) / 200] * 2, [Items([few] * 2)]),
    }
    [found] = contrasts("d4", "ARC", arms)
    pairs = stats.compare(hard, few)
    assert found.difference == pytest.approx(0.025)
    assert found.bar == pytest.approx(student_quantile(199) * pairs.se)
    assert found.bar < 0.5 * 2 * math.sqrt(2 * 0.25 / 200)  # half of the unpaired bar
    assert found.verdict == "better"

    mean = {"Mean": {"weights": {"ARC": 0.25}}}
    runs = [{**mean, "ARC": item_scores([f"{i}" for i in range(200)], x)} for x in (hard, few)]
    of_mean = {
        arm: Scores([v / 4 for v in arms[arm].values], read_items("Mean", [run, run]))
        for arm, run in zip(arms, runs, strict=True)
    }
    [scaled] = contrasts("d4", "Mean", of_mean)
    assert scaled.bar == pytest.approx(found.bar / 4) and read_items("Mean", [mean, mean]) == []

    clusters = [str(i // 10) for i in range(200)]  # all 5 of one cluster
    for name in arms:
        arms[name] = Scores(arms[name].values, [arms[name].tasks[0]._replace(clusters=clusters)])
    [wider] = contrasts("d4", "ARC", arms)
    assert wider.bar == pytest.approx(student_quantile(19) * stats.compare(hard, few, clusters).se)
    assert wider.bar > 2 * found.bar and wider.verdict == "within noise"


def test_sampling_error_is_not_counted_twice():
    """Equal arms that sample 4 answers to each of 100 questions; seeds differ in sampling only."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(400):
        rates = rng.uniform(0.1, 0.9, 100)
        items = {arm: rng.binomial(4, rates, (3, 100)) / 4 for arm in ("control", "x")}
        arms = {arm: Scores(x.mean(1).tolist(), [Items(x.tolist())]) for arm, x in items.items()}
        false += contrasts("d4", "pass@1 after", arms)[0].verdict != "within noise"
    assert 0.03 * 400 < false < 0.085 * 400  # nominal: 5%; 1.5% if counted twice


def test_verdict_is_unknown_without_repeats():
    arms = {"control": Scores([1.0]), "x": Scores([2.0])}
    [found] = contrasts("d4", "bpb", arms)
    assert found.verdict == "unknown" and not holm_correct([found])[0].stands


def test_agreement_summarizes_verdicts_over_bases():
    def one(base, difference):
        return Contrast(base, "x", "bpb", 1.0, 2, difference, 0.1, 0.01)

    assert agreement([one("d4", 0.2), one("d6", 0.3)], "x", "bpb") == "all worse"
    assert agreement([one("d4", 0.2), one("d6", -0.3)], "x", "bpb") == "the bases disagree"
    assert agreement([one("d4", 0.2), one("d6", 0.0)], "x", "bpb") == "only d4 worse"
    assert agreement([one("d4", 0.0), one("d6", 0.0)], "x", "bpb") == "all within noise"
    assert agreement([one("d4", 0.0)], "x", "bpb") == "one base"
