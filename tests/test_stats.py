"""Statistics: against enumeration and simulation, and never more certain than the items allow."""

import itertools
import math
import random

import numpy as np
import pytest

from nanochat import stats


def test_a_proportion_has_the_binomial_standard_error():
    value, n, se = stats.proportion(70, 254)
    assert (round(value, 4), n, round(se, 4)) == (0.2756, 254, 0.0280)


def test_the_error_of_a_mean_is_that_seen_when_drawing_again_and_again():
    rng = np.random.default_rng(0)
    draws = rng.exponential(2.0, (4000, 50))
    seen = draws.mean(axis=1).std()
    told = np.mean([stats.mean(row).se for row in draws])
    assert told == pytest.approx(seen, rel=0.05)


def test_one_score_alone_has_no_known_error():
    assert math.isnan(stats.mean([1.0]).se)
    with pytest.raises(ValueError, match="at least one"):
        stats.mean([])


def test_guessing_scores_nothing_and_perfection_one():
    half = stats.centred(stats.Estimate(0.625, 100, 0.03), 0.25)
    assert half == pytest.approx((0.5, 100, 0.04))
    assert stats.centred(stats.Estimate(0.25, 9, 0.0), 0.25).value == 0
    assert stats.centred(stats.Estimate(1.0, 9, 0.0), 0.25).value == 1


def test_an_average_has_the_error_of_independent_parts():
    parts = [stats.Estimate(0.1, 10, 0.03), stats.Estimate(0.5, 30, 0.04)]
    assert stats.average(parts) == pytest.approx((0.3, 40, 0.025))


# ------------------------------------------------------------------------------------------------
# Two runs


def test_what_both_runs_find_hard_cancels_out_of_a_comparison():
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


def test_a_comparison_turned_around_says_the_opposite():
    rng = np.random.default_rng(1)
    before, after = rng.random(60), rng.random(60) + 0.3
    there, back = stats.compare(before, after), stats.compare(after, before)
    assert there.verdict == "better" and back.verdict == "worse"
    assert (there.won, there.lost, there.p) == (back.lost, back.won, back.p)
    assert there.difference == -back.difference and there.se == back.se


def test_equal_runs_differ_beyond_noise_once_in_twenty_times():
    rng = np.random.default_rng(2)
    hard = rng.random(300)  # how hard each item is, for both
    verdicts = []
    for _ in range(1000):
        before, after = (rng.random(300) < hard for _ in range(2))
        verdicts.append(stats.compare(before, after).verdict)
    assert 0.02 < 1 - verdicts.count("within noise") / 1000 < 0.08


def test_runs_on_other_items_cannot_be_paired():
    with pytest.raises(ValueError, match="3 scores .* 2"):
        stats.compare([0, 1, 1], [0, 1])


def test_a_difference_of_unknown_noise_is_no_difference():
    assert stats.compare([0], [1]).verdict == "within noise"
    assert stats.verdict(0.0, 0.0) == "within noise"


def test_the_sign_test_counts_coin_falls():
    for won, lost in itertools.product(range(6), repeat=2):
        n = won + lost
        falls = [sum(fall) for fall in itertools.product((0, 1), repeat=n)]
        as_uneven = [abs(2 * heads - n) >= abs(won - lost) for heads in falls]
        assert stats.sign_test(won, lost) == pytest.approx(sum(as_uneven) / len(falls))
    assert stats.sign_test(7300, 6900) == pytest.approx(
        stats.normal_p(399, math.sqrt(14200)), rel=0.01
    )


def test_the_comparison_of_an_average_is_that_of_its_parts():
    rng = np.random.default_rng(3)
    baselines, sizes = (0.25, 0.0, 0.5), (40, 300, 7)
    runs = [[rng.integers(0, 2, n).tolist() for n in sizes] for _ in range(2)]
    core = [
        stats.average(
            [stats.centred(stats.mean(scores), b) for scores, b in zip(run, baselines, strict=True)]
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
# Several samples of each item


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_sample(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        held = [min(choice) < right for choice in itertools.combinations(range(n), k)]
        assert stats.pass_at_k(n, right, k) == pytest.approx(sum(held) / len(held), abs=1e-15)


def test_pass_at_k_keeps_its_digits_for_many_samples():
    assert stats.pass_at_k(100_000, 1, 7) == 7 / 100_000
    assert stats.pass_at_k(100_000, 50_000, 99) == 1.0
    assert stats.pass_at_k(10**6, 1, 1) == 1e-6
