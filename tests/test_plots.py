"""Figures are deterministic and show the recorded values."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from nanochat import plots
from nanochat.plots import as_svg, draw_curves

LOSS = [(step, 3 + math.exp(-step / 20) + 0.1 * math.sin(step)) for step in range(200)]
METRICS = [
    {"step": step, "loss": y, "lr": 1 - step / 200, "grad_norm": y, "tokens_per_second": 1e6 + y}
    for step, y in LOSS
]
METRICS += [{"step": 200, "val_bpb": 1.2, "bpb_loop_1": 1.3, "bpb_loop_2": 1.2}]
POLICY = [{"step": 0, "loss": 1.0, "reward": 0.1, "pass_at_1": 0.1}, {"step": 1, "reward": 0.2}]
SCORES = {"winograd": 0.08, "boolq": -0.15, "copa": 0.0}
SEARCH = {"section": "Sweep", "settings": {"search": "lr"}, "series": {"0": [[0.01, 1.0]]}}
RUN = ["loss", "gradient", "loops", "lr", "throughput"]
FIGURES = {
    **{name: lambda n=name: plots.run_figures(METRICS)[n][1] for name in RUN},
    "reward": lambda: plots.run_figures(POLICY)["reward"][1],
    "bars": lambda: plots.bar_figure("Scores", SCORES, {"copa": 0.05}),
    "search": lambda: plots.draw_series(SEARCH),
}


def test_run_has_a_figure_for_each_logged_metric():
    assert list(plots.run_figures(METRICS)) == RUN
    assert list(plots.run_figures(POLICY)) == ["reward"]


@pytest.mark.parametrize("name", FIGURES)
def test_rendering_is_deterministic(name):
    image = FIGURES[name]()
    assert image == FIGURES[name]()
    assert ET.fromstring(image).tag.endswith("svg")
    assert not re.search(rb"20\d\d-\d\d-\d\d", image), "the SVG must not contain a date"


def rates(last):
    """A figure of a learning rate curve."""
    curves = {"lr": [(0, 1.0), (100, last)]}
    return as_svg(lambda axes: draw_curves(axes, "Learning rate", curves))


def test_rendering_is_the_same_in_another_process():
    code = "import sys; from tests.test_plots import rates; sys.stdout.buffer.write(rates(0.0))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert other == rates(0.0)


def test_figure_depends_on_the_values():
    assert rates(0.5) != rates(0.0)


def test_ema_is_bias_corrected_and_skips_non_finite_values():
    assert plots.ema([(0, 2.0), (1, 2.0)]) == [(0, 2.0), (1, pytest.approx(2.0))]
    steps = plots.ema([(0, 1.0), (1, math.nan), (2, 3.0)])
    assert [x for x, _ in steps] == [0, 2]
    assert steps[1][1] == pytest.approx((0.9 * 0.1 * 1.0 + 0.1 * 3.0) / (0.09 + 0.1))


def test_long_curve_is_subsampled_and_keeps_both_ends():
    xs, ys = plots.thin([(x, float(x)) for x in range(100_001)])
    assert len(xs) <= plots.MAX_POINTS + 1
    assert (xs[0], xs[-1], ys[-1]) == (0, 100_000, 100_000.0)
    assert plots.thin([(0, 1.0), (1, 2.0)]) == ([0, 1], [1.0, 2.0])


@pytest.mark.parametrize("losses", [[math.nan, 2.0, math.inf], [math.nan], [1.0]])
def test_curves_with_gaps_or_single_points_are_drawn(losses):
    figures = plots.run_figures([{"step": s, "loss": x, "lr": x} for s, x in enumerate(losses)])
    assert all(svg for _, svg in figures.values())
    plots.bar_figure("Scores", {"a": math.nan, "b": 0.1}, {})


def test_figure_of_a_long_run_is_small():
    long = [{"step": x, "loss": 3 + math.sin(x), "val_bpb": math.sin(x)} for x in range(50_000)]
    assert len(plots.run_figures(long)["loss"][1]) < 120_000
