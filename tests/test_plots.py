"""Figures are deterministic and show the recorded values."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib import style
from matplotlib.figure import Figure

from nanochat import plots
from nanochat.plots import INK, as_svg, draw_curves
from nanochat.records import estimate

LOSS = [(step, 3 + math.exp(-step / 20) + 0.1 * math.sin(step)) for step in range(200)]
METRICS = [
    {
        "step": step,
        "loss": y,
        "matrix_lr": 1 - step / 200,
        "grad_norm": y,
        "tokens_per_second": 1e6 + y,
    }
    for step, y in LOSS
]
METRICS += [
    {"step": 20 * (n + 1), "val_bpb": 1.2, "bpb_loop_1": 1.3, "bpb_loop_2": 1.2} for n in range(8)
]
POLICY = [
    {"step": 0, "loss": 1.0, "reward": 0.1, "pass_at_1": 0.1, "pass_at_1_se": 0.02},
    {"step": 1, "reward": 0.2, "matrix_lr": 0.02},
    {"step": 2, "reward": 0.2, "matrix_lr": 0.0},
]
SCORES = {"winograd": 0.08, "boolq": -0.15, "copa": 0.0}
SEARCH = {"section": "Sweep", "settings": {"search": "lr"}, "series": {"0": [[0.01, 1.0]]}}
ARMS = {"only:chat, d2": [[0.9, 0.1]], "drop:math, d2": [[-0.3, 0.1]], "only:chat, d4": [[1, 0.1]]}
SWEEP = {"section": "Sweep", "settings": {"metric": "Final bpb"}, "series": ARMS}
STAGES = [
    {"section": f"Chat evaluation {stage}", "items": {}, "values": {"AQUA": score, "MMLU": score}}
    for stage, score in (("mid", estimate(0.25, 100, 0.04)), ("sft", estimate(0.5, 100, 0.05)))
]
FIGURES = {
    "training": lambda: dashboard(METRICS),
    "reward": lambda: dashboard(POLICY),
    "stages": lambda: plots.draw_stages(STAGES)["stages"][1],
    "bars": lambda: plots.bar_figure("Scores", SCORES, {"copa": 0.05}),
    "search": lambda: plots.draw_series(SEARCH),
    "arms": lambda: plots.draw_series(SWEEP),
}


def dashboard(entries):
    """The figure of a training run."""
    return as_svg(*plots.run_panels(entries).values(), columns=2)


def test_run_has_a_panel_for_each_logged_metric():
    loops, rest = ["bpb_loop_1"], ["matrix_lr", "tokens_per_second", "grad_norm"]
    assert list(plots.run_panels(METRICS)) == ["loss", "val_bpb", *loops, *rest]
    assert list(plots.run_panels(POLICY)) == ["reward", "pass_at_1", "matrix_lr"]


def test_validation_curve_needs_eight_points():
    assert "val_bpb" not in plots.run_panels(METRICS[:-1])


def drawn(draw, *args):
    """Axes after `draw`."""
    with style.context(plots.STYLE):
        axes = Figure().subplots()
        draw(axes, *args)
    return axes


def test_loss_axis_is_logarithmic_and_starts_at_step_0():
    axes = drawn(plots.run_panels(METRICS)["loss"])
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_xdata()[0] == 0 and axes.lines[0].get_ydata()[0] == LOSS[0][1]


def test_throughput_panel_names_the_median():
    title = drawn(plots.run_panels(METRICS)["tokens_per_second"]).get_title(loc="left")
    assert title == "Throughput (tokens/s), median 1.0M"


def test_pass_at_1_has_error_bars():
    axes = drawn(plots.run_panels(POLICY)["pass_at_1"])
    [[low, high]] = axes.collections[0].get_segments()
    assert (low[1], high[1]) == (pytest.approx(0.08), pytest.approx(0.12))


def test_figure_of_stages_has_error_bars_and_end_labels():
    svg = plots.draw_stages(STAGES)["stages"][1]
    exact = [{**s, "values": {n: {**v, "se": 0.0} for n, v in s["values"].items()}} for s in STAGES]
    assert svg != plots.draw_stages(exact)["stages"][1] and b"AQUA 0.500" in svg
    assert plots.draw_stages(STAGES[:1]) == {}, "one stage is no development"


@pytest.mark.parametrize("name", FIGURES)
def test_labels_are_plain_text(name):
    texts = re.findall("<!-- (.*?) -->", FIGURES[name]().decode())
    assert texts and not any(re.search(r"[$\\]", text) for text in texts)


def test_tasks_with_equal_scores_all_have_end_labels():
    names = [f"Task {n}" for n in range(6)]
    scores = (dict.fromkeys(names, estimate(score, 100, 0.01)) for score in (0.1, 0.9))
    stages = [{**stage, "values": by} for stage, by in zip(STAGES, scores, strict=True)]
    svg = plots.draw_stages(stages)["stages"][1].decode()
    assert re.findall(r"<!-- +(Task \d) ", svg) == names


def test_text_follows_the_color_scheme_of_the_viewer():
    svg = FIGURES["training"]().decode()
    assert f"fill: {INK}" in svg.split("</style>", 1)[1]
    assert f'[style*="fill: {INK}"] {{fill: #e6edf3 !important}}' in svg
    root = ET.fromstring(svg)
    patches = [e.get("style") for e in root.iter() if (e.get("id") or "").startswith("patch")]
    assert not any("fill: #ffffff" in style for style in patches if style), "no white background"


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


def test_arms_are_bars_around_zero_with_names_and_metric():
    texts = re.findall("<!-- (.*?) -->", plots.draw_series(SWEEP).decode())
    names = [text for text in texts if ", d" in text]
    assert names == ["only:chat, d2", "only:chat, d4", "drop:math, d2"]
    assert {"+0.9000", "+1.0000", "-0.3000", "Sweep: effect of each arm"} <= set(texts)
    assert any("Final bpb, arm minus control" in text for text in texts)


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
    assert dashboard([{"step": s, "loss": x, "matrix_lr": x} for s, x in enumerate(losses)])
    plots.bar_figure("Scores", {"a": math.nan, "b": 0.1}, {})


def test_figure_of_a_long_run_is_small():
    long = [{"step": x, "loss": 3 + math.sin(x), "val_bpb": math.sin(x)} for x in range(50_000)]
    assert len(dashboard(long)) < 120_000
