"""Statistics of evaluations, checked by hand, by enumeration and by simulation."""

import math

import numpy as np
import pytest
from pytest import approx

from nanochat import stats
from nanochat.report import format_value
from nanochat.stats import Estimate


def test_estimates_equal_hand_computed_values():
    assert stats.mean([0, 1, 1]) == approx((2 / 3, 1 / 3, 3))
    assert stats.mean([0, 1, 1, 1], "aabb") == approx((0.75, 0.25, 4))
    parts = [Estimate(0.1, 0.03, 10), Estimate(0.5, 0.04, 30)]
    assert stats.combine(parts, [0.5, 0.5]) == approx((0.3, 0.025, 40))
    assert math.isnan(stats.mean([1.0]).se) and math.isnan(stats.mean([0, 1], "aa").se)
    with pytest.raises(ValueError, match="at least one"):
        stats.mean([])


@pytest.mark.parametrize(
    ("won", "lost", "verdict"),
    [
        (0, 0, "within noise"),
        (3, 2, "within noise"),
        (6, 0, "better"),
        (1, 9, "worse"),
        (7300, 6900, "better"),
    ],
)
def test_comparison_counts_only_items_that_changed(won, lost, verdict):
    before, after = [0] * won + [1] * lost + [0, 1], [1] * won + [0] * lost + [0, 1]
    found = stats.compare(before, after)
    assert found[2:] == (won + lost + 2, won, lost)
    assert found.difference == approx((won - lost) / found.n) and found.verdict == verdict


def test_items_of_a_cluster_count_as_one_draw():
    before, after = np.random.default_rng(1).random((2, 60))
    found = stats.compare(before + 0.3, after)
    change = after - before - 0.3
    se = change.std(ddof=1) / math.sqrt(60)
    want = (change.mean(), se, 60, sum(change > 0), sum(change < 0))
    assert found == approx(want) and found.verdict == "worse"
    repeated = stats.compare([*before + 0.3] * 4, [*after] * 4, [*range(60)] * 4)
    assert repeated[:2] == approx(want[:2])


def test_R34_unknown_error_is_not_printed():
    assert str(stats.mean([1.0])) == "1.0000"
    assert str(stats.mean([0.0, 1.0])) == "0.5000 +- 0.5000"
    assert format_value({"value": 1.0, "se": "nan", "n": 1}) == "1.0000 (n=1)"
