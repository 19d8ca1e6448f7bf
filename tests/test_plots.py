"""Figures: the same numbers give the same bytes, and what is drawn is what was measured."""

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from nanochat import plots

LOSS = [(step, 3 + math.exp(-step / 20) + 0.1 * math.sin(step)) for step in range(200)]
SCORES = {"winograd": 0.08, "boolq": -0.15, "copa": 0.0}
FIGURES = {
    "loss": lambda **form: plots.loss_figure(LOSS, [(0, 3.0), (200, 1.2)], **form),
    "lr": lambda **form: plots.lr_figure([(0, 1.0), (100, 0.0)], **form),
    "throughput": lambda **form: plots.throughput_figure([(0, 1e6), (10, 1.2e6)], **form),
    "reward": lambda **form: plots.reward_figure(LOSS, [(0, 0.1), (60, 0.3)], **form),
    "core": lambda **form: plots.core_figure(SCORES, {"copa": 0.05}, **form),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_same_bytes_every_time(name):
    image = FIGURES[name]()
    assert image == FIGURES[name]()
    assert ET.fromstring(image).tag.endswith("svg")
    assert not re.search(rb"20\d\d-\d\d-\d\d", image), "a date would change with every rendering"


def test_a_figure_is_the_same_bytes_in_another_process():
    code = (
        "import sys; from nanochat import plots;"
        "sys.stdout.buffer.write(plots.lr_figure([(0, 1.0), (100, 0.0)]))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert other == FIGURES["lr"]()


def test_other_numbers_are_another_figure():
    assert plots.lr_figure([(0, 1.0), (100, 0.5)]) != FIGURES["lr"]()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_looked_at_as_png(name):
    assert FIGURES[name](form="png").startswith(b"\x89PNG")


def test_the_running_mean_is_debiased_and_leaves_out_what_is_not_finite():
    assert plots.ema([(0, 2.0), (1, 2.0)]) == [(0, 2.0), (1, pytest.approx(2.0))]
    steps = plots.ema([(0, 1.0), (1, math.nan), (2, 3.0)])
    assert [x for x, _ in steps] == [0, 2]
    assert steps[1][1] == pytest.approx((0.9 * 0.1 * 1.0 + 0.1 * 3.0) / (0.09 + 0.1))


def test_a_long_curve_is_thinned_and_keeps_both_ends():
    xs, ys = plots.columns([(x, float(x)) for x in range(100_001)])
    assert len(xs) <= plots.MOST_POINTS + 1
    assert (xs[0], xs[-1], ys[-1]) == (0, 100_000, 100_000.0)
    assert plots.columns([(0, 1.0), (1, 2.0)]) == ([0, 1], [1.0, 2.0])


def test_gaps_and_single_points_are_drawn_without_complaint():
    plots.loss_figure([(0, math.nan), (1, 2.0), (2, math.inf)])
    plots.loss_figure([(0, math.nan)])
    plots.lr_figure([(0, 1.0)])
    plots.core_figure({"a": math.nan, "b": 0.1})


def test_the_largest_figures_stay_small_enough_for_a_repository():
    long = [(x, 3 + math.sin(x)) for x in range(50_000)]
    assert len(plots.loss_figure(long, long)) < 120_000


def test_the_loss_of_rows_that_came_before_is_a_curve_of_its_own(tmp_path):
    lines = [{"step": s, "loss": 3.0, "grad_norm": 1.0} for s in range(5)]
    lines.append({"step": 5, "loss": 2.0, "loss_seen_0": 3.0, "loss_seen_1": 1.0, "grad_norm": 1.0})
    lines += [{"step": s, "loss": 1.0, "loss_seen_1": 1.0, "grad_norm": 1.0} for s in range(6, 9)]
    curves = plots.by_times_seen(lines)
    assert {name: [step for step, _ in points] for name, points in curves.items()} == {
        "never": [0, 1, 2, 3, 4, 5],
        "once": [5, 6, 7, 8],
    }
    assert [y for _, y in curves["never"]] == pytest.approx([3.0] * 6)
    assert [y for _, y in curves["once"]] == pytest.approx([1.0] * 4)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, draw = plots.of_run(file)["gradient"]
    assert b"came before" in draw()
