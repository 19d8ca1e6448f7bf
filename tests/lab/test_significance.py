"""Noise bars: what differs is found, what does not is called noise, about as often as promised."""

import math
import random

import pytest

from nanochat import stats
from nanochat.lab.significance import (
    Contrast,
    Scores,
    adjusted,
    agreement,
    contrasts,
    expected_maximum,
    holm,
    spread,
    student_p,
    student_quantile,
)


@pytest.mark.parametrize(
    "df, t",
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (30, 2.042), (999, 1.962)],
)
def test_students_t_agrees_with_the_printed_tables(df, t):
    assert student_p(t, df) == pytest.approx(0.05, abs=1e-4)
    assert student_quantile(df) == pytest.approx(t, abs=1e-3)
    assert student_p(-t, df) == student_p(t, df)
    assert student_p(0.0, df) == pytest.approx(1.0) and student_p(math.inf, df) == 0.0


def test_holm_adjusts_for_the_number_of_comparisons():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_the_best_of_n_is_expected_above_the_mean():
    found = [round(expected_maximum(n), 2) for n in range(1, 7)]
    assert found == [0.0, 0.56, 0.85, 1.03, 1.16, 1.27]
    rng = random.Random(0)
    drawn = [max(rng.gauss(0, 1) for _ in range(3)) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected_maximum(3), abs=0.02)


def test_noise_is_pooled_over_the_arms():
    variance, df = spread([[1.0, 3.0], [10.0, 12.0, 14.0], [5.0]])
    assert (variance, df) == (pytest.approx((2 + 8) / 3), 3)
    assert spread([[1.0], [2.0]])[1] == 0


def studies(shift, count=400, sigma=0.01):
    """Verdicts on the arm of many studies: a control of 3 seeds, arms of 2, one of them shifted."""
    rng = random.Random(1)
    verdicts = []
    for _ in range(count):
        arms = {"control": Scores([rng.gauss(1, sigma) for _ in range(3)])}
        for name, by in (("x", shift), ("y", 0.0), ("z", 0.1)):
            arms[name] = Scores([rng.gauss(1 + by, sigma) for _ in range(2)])
        verdicts.append(contrasts("d4", "bpb", arms)[0].verdict)
    return verdicts


def test_a_copy_of_the_control_is_called_noise_as_often_as_promised():
    false = sum(verdict != "within noise" for verdict in studies(0.0))
    assert 0.02 * 400 < false < 0.085 * 400  # 5%


def test_two_standard_errors_of_three_seeds_would_cry_wolf():
    """Why the bar is not 2 standard errors: with so few seeds that is far too near."""
    rng = random.Random(1)
    false = 0
    for _ in range(400):
        control, arm = ([rng.gauss(0, 1) for _ in range(n)] for n in (3, 2))
        se = math.sqrt(spread([control])[0] * (1 / 3 + 1 / 2))
        false += abs(sum(arm) / 2 - sum(control) / 3) > 2 * se
    assert false > 0.15 * 400


def test_an_arm_that_is_worse_is_found():
    assert studies(0.05).count("worse") > 0.95 * 400
    assert studies(-0.05).count("better") > 0.95 * 400


def test_items_are_compared_in_pairs_and_their_noise_is_added():
    hard = [float(i % 2) for i in range(200)]
    few = [1.0 if i < 10 else x for i, x in enumerate(hard)]  # 5 items more are right
    values = [sum(hard) / 200] * 3
    arms = {
        "control": Scores(values, [hard] * 3),
        "x": Scores([sum(few) / 200] * 2, [few] * 2),
    }
    [found] = contrasts("d4", "ARC", arms)
    pairs = stats.compare(hard, few)
    assert found.difference == pytest.approx(0.025)
    assert found.bar == pytest.approx(student_quantile(199) * pairs.se)
    assert found.bar < 0.5 * 2 * math.sqrt(2 * 0.25 / 200)  # half of what strangers would need
    assert found.verdict == "better"


def test_without_repeats_nothing_is_known():
    arms = {"control": Scores([1.0]), "x": Scores([2.0])}
    [found] = contrasts("d4", "bpb", arms)
    assert found.verdict == "unknown" and not adjusted([found])[0].stands


def test_an_effect_is_believed_where_all_bases_show_it():
    def one(base, difference):
        return Contrast(base, "x", "bpb", 1.0, 2, difference, 0.1, 0.01)

    assert agreement([one("d4", 0.2), one("d6", 0.3)], "x", "bpb") == "all worse"
    assert agreement([one("d4", 0.2), one("d6", -0.3)], "x", "bpb") == "the bases contradict"
    assert agreement([one("d4", 0.2), one("d6", 0.0)], "x", "bpb") == "only d4 worse"
    assert agreement([one("d4", 0.0), one("d6", 0.0)], "x", "bpb") == "all within noise"
    assert agreement([one("d4", 0.0)], "x", "bpb") == "one base"
