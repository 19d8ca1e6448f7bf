"""Verdict on recursion: arms are compared at equal cost, with enough seeds."""

import math

import pytest

from nanochat.recursion.verdict import (
    LoopArm,
    check_equal_flops,
    check_first_loop,
    check_gradients_finite,
    check_loop_order,
    check_loss_falling,
    show_gap,
)

RECURSIVE = LoopArm("looped", [2.00, 2.01, 1.99], 4, 64, 6, 100, 200, 1000, 1e9)
LONGER = LoopArm("longer", [2.10, 2.11, 2.09], 4, 64, 4, 98, 98, 1500, 1e9)
DEEPER = LoopArm("deeper", [2.00, 2.02, 1.98], 6, 64, 6, 150, 150, 1000, 1.02e9)
TWIN = LoopArm("twin", [2.12, 2.12, 2.12], 4, 64, 4, 97, 97, 1000, 0.7e9)
ALL = [LONGER, DEEPER, TWIN]
AS_GOOD = LONGER._replace(bpb=[2.01, 2.02, 2.00])


@pytest.mark.parametrize("changes,plain,met", [
    ({}, ALL, True),  # as good as deeper, with two thirds of its parameters
    ({"params": 140}, ALL, False),  # as good, but without clearly fewer parameters
    ({"bpb": [1.90, 1.91, 1.89], "params": 140}, ALL, True),  # better by over two deviations
    ({"bpb": [1.97, 1.98, 1.96], "params": 140}, ALL, False),  # better by less
    ({"bpb": [2.10, 2.11, 2.09]}, ALL, False),  # worse, although smaller
    ({"bpb": [2.02, 2.03, 2.01]}, ALL, True),  # as good: worse by one deviation
    ({}, [DEEPER, AS_GOOD], False),  # an arm of the same size is as good as the larger one
    ({}, [TWIN], None),  # no arm of equal FLOPs
    ({"bpb": [1.0]}, ALL, None),  # one seed
    ({}, [LONGER, DEEPER._replace(bpb=[2.5])], None),
    ({"bpb": [2.1]}, [LONGER._replace(bpb=[2.0])], False),  # worse and not smaller
    ({"bpb": [2.1], "params": 50}, [LONGER._replace(bpb=[2.0])], None),
])  # fmt: skip
def test_recursion_pays_off_if_better_or_as_good_and_smaller(changes, plain, met):
    assert check_equal_flops(RECURSIVE._replace(**changes), plain).met is met


def test_gap_names_what_costs_the_same():
    assert "deeper" in check_equal_flops(RECURSIVE, ALL).why  # the best arm of equal FLOPs
    assert "more seeds" in check_equal_flops(RECURSIVE._replace(bpb=[1.0]), ALL).summary
    assert show_gap(LONGER, RECURSIVE) == "+0.1000 (equal params, flops)"
    assert show_gap(TWIN, RECURSIVE) == "+0.1200 (equal params, tokens)"


FALLING = [5 - 0.1 * i for i in range(40)]


@pytest.mark.parametrize("criterion,met", [
    (check_first_loop(RECURSIVE, [2.13, 2.13, 2.14], ALL, trained=True), True),
    (check_first_loop(RECURSIVE, [2.15, 2.15, 2.15], ALL, trained=True), False),
    (check_first_loop(RECURSIVE, [2.0], [LONGER], trained=True), None),  # no plain twin
    (check_first_loop(RECURSIVE, [9.0], ALL, trained=False), None),
    (check_loop_order([[3.0, 3.0], [2.0, 2.9], [2.1, 2.7]]), True),  # means over seeds
    (check_loop_order([[3.0], [2.0], [2.1]]), False),
    (check_gradients_finite([0.3, 0.2], 0), True),
    (check_gradients_finite([0.3, 0.2], 1), False),
    (check_gradients_finite([], 0), None),
    (check_loss_falling([FALLING, FALLING]), True),
    (check_loss_falling([FALLING, FALLING[::-1]]), False),
    (check_loss_falling([[9.0, math.nan, 8.0]]), True),  # a skipped step is left out
    (check_loss_falling([[math.log(64)]]), False),
    (check_loss_falling([[]]), None),
])  # fmt: skip
def test_health_criteria_are_met_missed_or_inconclusive(criterion, met):
    assert criterion.met is met
