"""Statistics of evaluations, checked by enumeration and simulation."""

import itertools
import math
import random

import numpy as np
import pytest

from nanochat import stats


def test_proportion_has_the_binomial_standard_error():
    value, n, se = stats.proportion(70, 254)
    assert (round(value, 4), n, round(se, 4)) == (0.2756, 254, 0.0280)


def test_standard_error_of_mean_matches_simulation():
    rng = np.random.default_rng(0)
    draws = rng.exponential(2.0, (4000, 50))
    observed = draws.mean(axis=1).std()
    estimated = np.mean([stats.mean(row).se for row in draws])
    assert estimated == pytest.approx(observed, rel=0.05)


def test_single_score_has_unknown_standard_error():
    assert math.isnan(stats.mean([1.0]).se)
    with pytest.raises(ValueError, match="at least one"):
        stats.mean([])


def test_items_of_a_cluster_count_as_one_draw():
    rng = np.random.default_rng(0)
    before, after = rng.binomial(1, 0.4, (2, 60)).astype(float)
    repeated, names = [each.repeat(4) for each in (before, after)], np.arange(60).repeat(4)
    assert stats.mean(repeated[0], list(names)).se == pytest.approx(stats.mean(before).se)
    assert stats.mean(repeated[0]).se < 0.6 * stats.mean(before).se
    found, want = stats.compare(*repeated, list(names)), stats.compare(before, after)
    assert (found.difference, found.se) == pytest.approx((want.difference, want.se))
    assert found.p == pytest.approx(math.erfc(abs(want.difference) / want.se / math.sqrt(2)))
    assert math.isnan(stats.mean([0.0, 1.0], ["same", "same"]).se)


def test_centered_score_is_0_at_chance_and_1_if_perfect():
    half = stats.center_accuracy(stats.Estimate(0.625, 100, 0.03), 0.25)
    assert half == pytest.approx((0.5, 100, 0.04))
    assert stats.center_accuracy(stats.Estimate(0.25, 9, 0.0), 0.25).value == 0
    assert stats.center_accuracy(stats.Estimate(1.0, 9, 0.0), 0.25).value == 1


def test_average_propagates_independent_errors():
    parts = [stats.Estimate(0.1, 10, 0.03), stats.Estimate(0.5, 30, 0.04)]
    assert stats.average(parts) == pytest.approx((0.3, 40, 0.025))


# ------------------------------------------------------------------------------------------------
# Comparison of two runs


def test_paired_comparison_removes_item_difficulty():
    rng = random.Random(0)
    before = [rng.randrange(2) for _ in range(400)]
    after = list(before)
    for i in [i for i, right in enumerate(before) if not right][:12]:
        after[i] = 1
    paired = stats.compare(before, after)
    unpaired = math.hypot(stats.mean(before).se, stats.mean(after).se)
    assert (paired.won, paired.lost, paired.n) == (12, 0, 400)
    assert paired.difference == pytest.approx(12 / 400)
    assert paired.se < unpaired / 3
    assert paired.verdict == "better" and stats.verdict(paired.difference, unpaired) != "better"


def test_comparison_is_antisymmetric():
    rng = np.random.default_rng(1)
    before, after = rng.random(60), rng.random(60) + 0.3
    forward, back = stats.compare(before, after), stats.compare(after, before)
    assert forward.verdict == "better" and back.verdict == "worse"
    assert (forward.won, forward.lost, forward.p) == (back.lost, back.won, back.p)
    assert forward.difference == -back.difference and forward.se == back.se


def test_false_positive_rate_is_about_5_percent():
    rng = np.random.default_rng(2)
    p = rng.random(300)  # probability of success per item, the same for both runs
    verdicts = []
    for _ in range(1000):
        before, after = (rng.random(300) < p for _ in range(2))
        verdicts.append(stats.compare(before, after).verdict)
    assert 0.02 < 1 - verdicts.count("within noise") / 1000 < 0.08


def test_few_changed_items_are_within_noise_beyond_two_standard_errors():
    few = stats.compare([0.0] * 200, [1.0] * 4 + [0.0] * 196)
    assert few.difference > stats.NOISE * few.se and few.p == 0.125
    assert few.verdict == "within noise"
    assert stats.compare([0.0] * 200, [1.0] * 6 + [0.0] * 194).verdict == "better"


def test_compare_rejects_different_numbers_of_items():
    with pytest.raises(ValueError, match="3 scores .* 2"):
        stats.compare([0, 1, 1], [0, 1])


def test_difference_with_unknown_error_is_within_noise():
    assert stats.compare([0], [1]).verdict == "within noise"
    assert stats.verdict(0.0, 0.0) == "within noise"


def test_sign_test_equals_enumeration():
    for won, lost in itertools.product(range(6), repeat=2):
        n = won + lost
        heads = [sum(tosses) for tosses in itertools.product((0, 1), repeat=n)]
        extreme = [abs(2 * h - n) >= abs(won - lost) for h in heads]
        assert stats.sign_test(won, lost) == pytest.approx(sum(extreme) / len(heads))
    normal_p = math.erfc(399 / math.sqrt(14200) / math.sqrt(2))
    assert stats.sign_test(7300, 6900) == pytest.approx(normal_p, rel=0.01)


def test_combined_comparison_matches_its_parts():
    rng = np.random.default_rng(3)
    baselines, sizes = (0.25, 0.0, 0.5), (40, 300, 7)
    runs = [[rng.integers(0, 2, n).tolist() for n in sizes] for _ in range(2)]
    core = [
        stats.average(
            [
                stats.center_accuracy(stats.mean(scores), b)
                for scores, b in zip(run, baselines, strict=True)
            ]
        )
        for run in runs
    ]
    parts = [stats.compare(before, after) for before, after in zip(*runs, strict=True)]
    whole = stats.combine(parts, [1 / 3 / (1 - b) for b in baselines])
    assert whole.difference == pytest.approx(core[1].value - core[0].value)
    assert whole.n == sum(sizes) and whole.won + whole.lost <= whole.n
    errors = [c.se / (1 - b) for c, b in zip(parts, baselines, strict=True)]
    assert whole.se == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 3)
    assert stats.combine(parts[:1], [1.0]) == parts[0]


# ------------------------------------------------------------------------------------------------
# Several samples per item


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_equals_enumeration(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        passed = [min(choice) < correct for choice in itertools.combinations(range(n), k)]
        assert stats.pass_at_k(n, correct, k) == pytest.approx(sum(passed) / len(passed), abs=1e-15)


def test_pass_at_k_is_exact_for_many_samples():
    assert stats.pass_at_k(100_000, 1, 7) == 7 / 100_000
    assert stats.pass_at_k(100_000, 50_000, 99) == 1.0
    assert stats.pass_at_k(10**6, 1, 1) == 1e-6


def test_repeats_distinguish_item_from_sampling_error():
    rng = np.random.default_rng(4)
    n, k, item_sd, repeat_sd = 4000, 5, 0.3, 0.6
    scores = rng.normal(0, item_sd, (n, 1)) + rng.normal(0, repeat_sd, (n, k))
    found = stats.split_error(scores.tolist())
    assert found.item_se == pytest.approx(item_sd / math.sqrt(n), rel=0.05)
    assert found.repeat_se == pytest.approx(repeat_sd / math.sqrt(n * k), rel=0.05)
    total = stats.mean(scores.mean(axis=1).tolist()).se
    assert math.hypot(found.item_se, found.repeat_se) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("scores", [[[1, 0]], [[1], [0]], [[1, 0], [1]]])
def test_too_few_items_or_repeats_are_rejected(scores):
    with pytest.raises(ValueError, match="two items"):
        stats.split_error(scores)
