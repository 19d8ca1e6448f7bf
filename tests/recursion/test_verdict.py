"""Recursion verdicts compare runs of equal cost and require enough seeds."""

import math

import pytest

from nanochat.recursion.verdict import (
    LoopArm,
    check_equal_flops,
    check_first_loop,
    check_gradients_finite,
    check_loop_order,
    check_loss_falling,
    find_same_layers_arm,
    show_gap,
)

RECURSIVE = LoopArm("looped", [2.00, 2.01, 1.99], 4, 64, 6, 100, 200, 1000, 1e9)
LONGER = LoopArm("longer", [2.10, 2.11, 2.09], 4, 64, 4, 98, 98, 1500, 1e9)
DEEPER = LoopArm("deeper", [2.00, 2.02, 1.98], 6, 64, 6, 150, 150, 1000, 1.02e9)
TWIN = LoopArm("twin", [2.12, 2.12, 2.12], 4, 64, 4, 97, 97, 1000, 0.7e9)
REPEATED = LoopArm("repeated", [2.0, 2.0, 2.0], 4, 64, 6, 97, 194, 1000, 1e9)
ALL = [LONGER, DEEPER, TWIN]


def test_arms_are_compared_at_equal_cost():
    assert "deeper" in check_equal_flops(RECURSIVE, ALL).why, "the best arm of equal FLOPs"
    assert "longer" in check_equal_flops(RECURSIVE, [LONGER, TWIN]).why
    assert find_same_layers_arm(RECURSIVE, [REPEATED, *ALL]) is TWIN
    assert find_same_layers_arm(RECURSIVE, [LONGER, DEEPER, REPEATED]) is None
    assert show_gap(LONGER, RECURSIVE) == "+0.1000 (equal params, flops)"
    assert show_gap(TWIN, RECURSIVE) == "+0.1200 (equal params, tokens)"


@pytest.mark.parametrize("bpb,params,met", [
    ([2.00, 2.01, 1.99], 100, True),  # as good as deeper, with two thirds of its parameters
    ([2.00, 2.01, 1.99], 140, False),  # as good, but without clearly fewer parameters
    ([1.90, 1.91, 1.89], 140, True),  # better by more than two standard deviations
    ([1.97, 1.98, 1.96], 140, False),  # better by less
    ([2.10, 2.11, 2.09], 100, False),  # worse, although smaller
    ([2.02, 2.03, 2.01], 100, True),  # as good: worse by 0.02, which is one standard deviation
])  # fmt: skip
def test_recursion_pays_off_if_better_or_as_good_and_clearly_smaller(bpb, params, met):
    criterion = check_equal_flops(RECURSIVE._replace(bpb=bpb, params=params), ALL)
    assert criterion.met is met and "deeper" in criterion.why


def test_matching_a_larger_arm_is_not_enough_if_a_same_size_arm_also_matches_it():
    assert check_equal_flops(RECURSIVE, [DEEPER]).met is True
    as_good = LONGER._replace(bpb=[2.01, 2.02, 2.00])
    assert check_equal_flops(RECURSIVE, [DEEPER, as_good]).met is False


def test_missing_arms_seeds_or_logs_are_inconclusive():
    assert check_equal_flops(RECURSIVE, [TWIN]).met is None
    one = check_equal_flops(RECURSIVE._replace(bpb=[1.0]), ALL)
    assert one.met is None and "-1.0000" in one.why and "more seeds" in one.why
    alone = [LONGER._replace(bpb=[2.0])]
    assert check_equal_flops(RECURSIVE._replace(bpb=[2.1]), alone).met is False, (
        "worse and not smaller"
    )
    assert check_equal_flops(RECURSIVE._replace(bpb=[2.1], params=50), alone).met is None
    worse = LONGER._replace(name="one seed", bpb=[2.5])
    assert check_equal_flops(RECURSIVE, [LONGER, worse]).met is None
    assert check_loss_falling([[9.0, float("nan"), 8.0]]).met is True, "skipped steps are left out"
    assert check_first_loop(RECURSIVE, [2.0], [LONGER], trained=True).met is None
    assert check_first_loop(RECURSIVE, [9.0], ALL, trained=False).met is None
    assert check_gradients_finite([], 0).met is None and check_loss_falling([[]]).met is None


def test_first_loop_must_not_be_harmed():
    assert check_first_loop(RECURSIVE, [2.13, 2.13, 2.14], ALL, trained=True).met is True
    assert check_first_loop(RECURSIVE, [2.15, 2.15, 2.15], ALL, trained=True).met is False


def test_loop_order_uses_means_over_seeds():
    assert check_loop_order([[3.0, 3.0], [2.0, 2.9], [2.1, 2.7]]).met is True
    assert check_loop_order([[3.0], [2.0], [2.1]]).met is False


def test_health_needs_finite_gradients_and_falling_loss():
    assert check_gradients_finite([0.3, 0.2], 0).met is True
    assert check_gradients_finite([0.3, 0.2], 1).met is False
    curve = [5 - 0.1 * i for i in range(40)]
    assert check_loss_falling([curve, curve]).met is True
    assert check_loss_falling([curve, curve[::-1]]).met is False
    assert check_loss_falling([[math.log(64)]]).met is False, "one step shows no decrease"
