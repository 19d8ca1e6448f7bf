"""
Figures of the report, drawn as SVG with matplotlib.

    record -> drawings -> {name: (title, SVG)}
"""

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from nanochat.common import base_dir, printable
from nanochat.logger import read_metrics
from nanochat.records import Record, plain_value, standard_error

# ---- Drawing -------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]  # (x, y), in order of x
Drawing = tuple[str, bytes]  # title, and SVG

BLUE, ORANGE, GREEN, PINK, AMBER = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, INK, FAINT = "#56B4E9", "#222222", "#5f6b76"
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2))]
MAX_POINTS = 400  # more than an SVG of this width can show
EMA_BETA = 0.9
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "nanochat",  # element ids are the same in every rendering
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, PINK, AMBER, SKY], linestyle=DASHES),
    "axes.labelcolor": FAINT,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7eb",
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
TITLES = {  # metric of a training run -> title of its panel
    "loss": "Training loss (nats per token)",
    "val_bpb": "Validation loss (bits per byte)",
    "grad_norm": "Gradient norm",
    "core_metric": "Few-shot score during training (mean centered accuracy)",
    "reward": "Mean reward",
    "pass_at_1": "Held-out pass@1",
    "lr": "Learning rate (share of its peak)",
    "tokens_per_second": "Throughput (tokens/s)",
}
SMOOTHED = ("loss", "reward")
FROM_ZERO = ("grad_norm", "lr", "tokens_per_second")


class Panel(NamedTuple):
    """One set of axes with named curves."""

    title: str
    curves: Mapping[str, Points]
    raw: Points = ()
    """Drawn faintly behind the curves."""
    dots: Points = ()
    """Drawn as points without a line, named "spikes"."""
    y_from_zero: bool = False
    x_label: str = "step"
    log_x: bool = False


def line_figure(panels: Sequence[Panel]) -> bytes:
    """SVG of panels side by side, each with its curves."""
    with rc_context(STYLE):
        figure = Figure(figsize=(3.7 * len(panels), 2.6))
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for each, panel in zip(axes, panels, strict=True):
            draw_panel(each, panel)
        return svg(figure)


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one panel; a legend where it has several curves."""
    axes.plot(*thin(panel.raw), color=SKY, alpha=0.45, linewidth=0.9, linestyle="-")
    for name, points in panel.curves.items():
        axes.plot(*thin(points), marker="o" if len(points) < 30 else "", label=printable(name))
    if panel.dots:
        axes.plot(*thin(panel.dots), color=ORANGE, marker="o", linestyle="none", label="spikes")
    axes.set_title(printable(panel.title))
    axes.set_xlabel(printable(panel.x_label))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if panel.log_x:
        axes.set_xscale("log")
    if panel.y_from_zero:
        axes.set_ylim(bottom=0)
    if len(panel.curves) > 1 or panel.dots:
        axes.legend()


def bar_figure(title: str, values: Mapping[str, float], errors: Mapping[str, float]) -> bytes:
    """SVG of horizontal bars, largest first, with their values and +- one error; finite ones."""
    finite = [name for name in values if math.isfinite(values[name])]
    names = sorted(finite, key=lambda name: (-values[name], name))
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.4, 0.7 + 0.24 * len(names)))
        axes = figure.subplots()
        bars = axes.barh(
            [printable(name) for name in names],
            [values[name] for name in names],
            height=0.68,
            color=[BLUE if values[name] >= 0 else ORANGE for name in names],
            xerr=[errors.get(name, math.nan) for name in names],
            error_kw={"ecolor": INK, "elinewidth": 1.0, "capsize": 2.0},
        )
        axes.bar_label(bars, fmt="%.3f", padding=4, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color=FAINT, linewidth=0.8)
        axes.margins(x=0.1, y=0.01)
        axes.set_title(printable(title))
        return svg(figure)


def thin(points: Points) -> tuple[list[float], list[float]]:
    """Lists of x and y, thinned to what can be seen; gaps where y is not finite."""
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    kept = [*points[::stride], *([points[-1]] if (len(points) - 1) % stride else [])]
    return [x for x, _ in kept], [y if math.isfinite(y) else math.nan for _, y in kept]


def ema(points: Points, beta: float = EMA_BETA) -> list[tuple[float, float]]:
    """The running mean of the ys, debiased; values that are not finite are left out of it."""
    mean, weight, smooth = 0.0, 0.0, []
    for x, y in points:
        if math.isfinite(y):
            mean = beta * mean + (1 - beta) * y
            weight = beta * weight + (1 - beta)
            smooth.append((x, mean / weight))
    return smooth


def svg(figure: Figure) -> bytes:
    """The figure's SVG; equal figures give equal bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


# ---- Figures of each record: curves, bars and series ---------------------------------------------


def drawings(record: Record) -> dict[str, Drawing]:
    """A record's figures by file name."""
    figures: dict[str, Drawing] = {}
    if record["metrics"]:
        path = base_dir() / record["metrics"]
        if path.exists():
            figures = run_figures(read_metrics(path))
        else:
            print(f"report: {printable(path)} is gone, so its figures are left out", flush=True)
    if record["section"] == "Base model evaluation":
        figures |= task_bars(record)
    if record["series"]:
        figures["series"] = (record["section"], draw_series(record))
    return figures


def run_figures(entries: Sequence[Mapping[str, Any]]) -> dict[str, Drawing]:
    """Figures of a training run, those for which its metrics have curves."""
    curves: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for entry in entries:
        for name, value in entry.items():
            curves[name].append((entry["step"], value))

    def panels(*names: str) -> list[Panel]:
        return [metric_panel(name, curves) for name in names if curves[name]]

    loops = {f"loop {n.removeprefix('bpb_loop_')}": n for n in curves if n.startswith("bpb_loop_")}
    by_loop = {label: curves[loops[label]] for label in sorted(loops)}
    figures = {
        # the loss of a policy says nothing by itself
        "loss": [] if curves["reward"] else panels("loss", "val_bpb"),
        "gradient": panels("grad_norm"),
        "loops": [Panel("Validation loss by loop (bits per byte)", by_loop)] * bool(loops),
        "core": panels("core_metric"),
        "reward": panels("reward", "pass_at_1"),
        "lr": panels("lr"),
        "throughput": panels("tokens_per_second"),
    }
    return {name: (p[0].title, line_figure(p)) for name, p in figures.items() if p}


def metric_panel(name: str, curves: Mapping[str, Points]) -> Panel:
    """The panel of one metric."""
    title, points = TITLES[name], curves[name]
    if name in SMOOTHED:
        return Panel(title, {"running mean": ema(points)}, raw=points)
    dots = curves["norm_spike"] if name == "grad_norm" else ()
    return Panel(title, {title: points}, dots=dots, y_from_zero=name in FROM_ZERO)


def task_bars(record: Record) -> dict[str, Drawing]:
    """The bars of CORE: the centered score of each task, 0 is chance, 1 is perfect."""
    tasks = {name: value for name, value in record["values"].items() if isinstance(value, Mapping)}
    tasks.pop("CORE metric", None)
    scores = {name: plain_value(value) for name, value in tasks.items()}
    errors = {name: standard_error(value) for name, value in tasks.items()}
    title = "Centered score per task (0 = chance)"
    return {"core": ("CORE per task", bar_figure(title, scores, errors))} if scores else {}


def draw_series(record: Record) -> bytes:
    """
    SVG of the curves that a record holds itself: over the values of its setting `search`, where it
    has one. Where each has a single point, these are values and their noise, drawn as bars.
    """
    curves = {
        name: [(float(x), float(y)) for x, y in points] for name, points in record["series"].items()
    }
    title = record["settings"].get("metric", record["section"])
    if searched := record["settings"].get("search"):
        return line_figure([Panel(title, curves, x_label=searched, log_x=True)])
    if all(len(points) == 1 for points in curves.values()):
        values, noise = ({name: curves[name][0][i] for name in curves} for i in (0, 1))
        return bar_figure(title, values, noise)
    return line_figure([Panel(title, curves, x_label="")])
