"""
Figures of the report, drawn as SVG with matplotlib.

    record -> drawings -> {name: (title, what draws the SVG)}
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from nanochat.common import base_dir, printable
from nanochat.logger import read_metrics
from nanochat.records import SECTIONS, Record, plain_value, standard_error

# ---- Drawing -------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]  # (x, y), in order of x
Format = Literal["svg", "png"]

BLUE, ORANGE, GREEN, PINK, AMBER, SKY = (
    "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9".split()  # fmt: skip
)
COLOURS = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
INK, FAINT, GRID = "#222222", "#5f6b76", "#e3e7eb"
MOST_POINTS = 400  # more than an SVG of this width can show
EMA_BETA = 0.9
ROUND_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "nanochat",  # ids of elements come from it instead of from chance
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.xmargin": 0.01,
    "axes.ymargin": 0.08,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 110,
}


@dataclass(frozen=True)
class Panel:
    """One set of axes: named curves, each of (x, y) points; `faint` ones lie behind, unnamed."""

    title: str
    curves: Mapping[str, Points]
    faint: Sequence[Points] = field(default_factory=tuple)
    x_label: str = "step"
    y_from_zero: bool = False
    log_x: bool = False
    points: Sequence[str] = ()
    """Curves of which only the points are drawn."""


def loss_figure(loss: Points, val_bpb: Points = (), form: Format = "svg") -> bytes:
    """Training loss (raw behind its running mean) and, beside it, validation bits per byte."""
    smooth = ema(loss)
    panels = [Panel("Training loss (nats per token)", {"running mean": smooth}, faint=[loss])]
    if val_bpb:
        panels.append(Panel("Validation loss (bits per byte)", {"val bpb": val_bpb}))
    return line_figure(panels, form=form)


def lr_figure(lr: Points, form: Format = "svg") -> bytes:
    """The learning rate over the run, as a share of its peak: each kind of weight has its own."""
    panel = Panel("Learning rate (share of its peak)", {"lr": lr}, y_from_zero=True)
    return line_figure([panel], form=form)


def throughput_figure(tokens_per_second: Points, form: Format = "svg") -> bytes:
    """Tokens per second over the run."""
    panel = Panel("Throughput (tokens/s)", {"tokens/s": tokens_per_second}, y_from_zero=True)
    return line_figure([panel], form=form)


def reward_figure(reward: Points, pass_at_1: Points = (), form: Format = "svg") -> bytes:
    """Mean reward of the rollouts (raw behind its running mean) and held-out pass@1."""
    panels = [Panel("Mean reward", {"running mean": ema(reward)}, faint=[reward])]
    if pass_at_1:
        panels.append(Panel("Held-out pass@1", {"pass@1": pass_at_1}))
    return line_figure(panels, form=form)


def core_figure(
    scores: Mapping[str, float], errors: Mapping[str, float] = {}, form: Format = "svg"
) -> bytes:
    """Centered score of every task of CORE, best first: 0 is chance, 1 is perfect."""
    return bar_figure("Centered score per task (0 = chance)", scores, errors, form=form)


def line_figure(panels: Sequence[Panel], form: Format = "svg") -> bytes:
    """Panels side by side, each with its curves. A legend only where a panel has several."""
    with rc_context(STYLE):
        figure = Figure(figsize=(3.7 * len(panels), 2.6))
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            draw_panel(axes, panel)
        return rendered(figure, form)


def bar_figure(
    title: str,
    values: Mapping[str, float],
    errors: Mapping[str, float] = {},
    form: Format = "svg",
) -> bytes:
    """Horizontal bars, largest first, with the value beside each and +- one error where known."""
    names = sorted(values, key=lambda name: (not math.isfinite(values[name]), -values[name], name))
    numbers = [values[name] if math.isfinite(values[name]) else 0.0 for name in names]
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.4, 0.7 + 0.24 * len(names)))
        axes = figure.subplots()
        bars = axes.barh(
            range(len(names)),
            numbers,
            height=0.68,
            color=[BLUE if number >= 0 else ORANGE for number in numbers],
            xerr=[errors.get(name, 0.0) for name in names] if errors else None,
            error_kw={"ecolor": INK, "elinewidth": 1.0, "capsize": 2.0},
        )
        axes.bar_label(bars, [f"{values[name]:.3f}" for name in names], padding=4, fontsize=8)
        axes.set_yticks(range(len(names)), map(printable, names))
        axes.invert_yaxis()
        axes.axvline(0, color=FAINT, linewidth=0.8)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.1, y=0.01)
        axes.set_title(printable(title))
        return rendered(figure, form)


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one panel's curves."""
    for points in panel.faint:
        axes.plot(*columns(points), color=SKY, alpha=0.45, linewidth=0.9)
    for i, (name, points) in enumerate(panel.curves.items()):
        xs, ys = columns(points)
        style: dict[str, Any] = {"label": printable(name), "color": COLOURS[i % len(COLOURS)]}
        style["linestyle"] = DASHES[i % len(DASHES)]
        if name in panel.points:
            style["linestyle"] = "none"
        dots = len(xs) < 30 or name in panel.points
        axes.plot(xs, ys, marker="o" if dots else None, markersize=3.5, **style)
    axes.set_title(printable(panel.title))
    axes.set_xlabel(printable(panel.x_label))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND_STEPS))
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND_STEPS, integer=True))
    for axis in (axes.yaxis,) if panel.log_x else (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if max(abs(low), abs(high)) >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=""))
    if panel.y_from_zero:
        axes.set_ylim(bottom=0)
    if len(panel.curves) > 1:
        axes.legend()
    elif not panel.y_from_zero:
        name_the_end(axes, next(iter(panel.curves.values())))


def name_the_end(axes: Axes, points: Points) -> None:
    """Write the last value beside a curve's end."""
    if points and math.isfinite(points[-1][1]):
        place: Any = {"textcoords": "offset points", "xytext": (0, 7), "ha": "right"}
        axes.annotate(f"{points[-1][1]:.4g}", points[-1], color=INK, fontsize=8, **place)


def columns(points: Points) -> tuple[list[float], list[float]]:
    """Points as lists of x and y, thinned to what can be seen; gaps where y is not finite."""
    stride = max(1, math.ceil(len(points) / MOST_POINTS))
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


def rendered(figure: Figure, form: Format) -> bytes:
    """The figure's bytes; equal figures give equal bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format=form, metadata={"Date": None} if form == "svg" else None)
    return stream.getvalue()


# ---- Figures of each record: curves, bars and series ---------------------------------------------


Drawing = tuple[str, Callable[[], bytes]]  # its title, and what makes the SVG
TIMES = {"1": "once", "2": "twice"}


def drawings(record: Record) -> dict[str, Drawing]:
    """A record's figures by file name."""
    figures = of_run(base_dir() / record["metrics"]) if record["metrics"] else {}
    if record["section"] == "Base model evaluation":
        figures |= of_scores(record)
    if record["series"]:
        figures["series"] = (record["section"], of_series(record))
    return figures


def of_series(record: Record) -> Callable[[], bytes]:
    """The curves that a record holds itself; of a sweep over arms its bars."""
    curves = {
        name: [(float(x), float(y)) for x, y in points] for name, points in record["series"].items()
    }
    section, settings = record["section"], record["settings"]
    if section == "Recursion":
        panel = Panel("validation bits per byte", curves, x_label="loops")
    elif section.startswith("Sweep") and settings.get("search"):
        panel = Panel(settings["metric"], curves, x_label=settings["search"], log_x=True)
    elif section.startswith("Sweep") and "metric" in settings:
        title = f"{settings['metric']}: difference from the control, and what is noise"
        ends = {name: points[0] for name, points in curves.items()}
        values = {name: difference for name, (difference, _) in ends.items()}
        return partial(bar_figure, title, values, {name: bar for name, (_, bar) in ends.items()})
    else:
        panel = Panel(section, curves)
    return partial(line_figure, [panel])


def of_run(metrics_file: Path) -> dict[str, Drawing]:
    """Figures of a training run, those for which its metrics file has curves."""
    if not metrics_file.exists():
        gone = f"report: {metrics_file} is gone, so its figures are left out"
        print(printable(gone), flush=True)
        return {}
    entries = read_metrics(metrics_file)

    def curve(name: str) -> Points:
        return [(entry["step"], entry[name]) for entry in entries if name in entry]

    figures: dict[str, Drawing] = {}
    if curve("loss") and not curve("reward"):  # the loss of a policy says nothing by itself
        image = partial(loss_figure, curve("loss"), curve("val_bpb"))
        figures["loss"] = ("Training and validation loss", image)
    if curve("grad_norm"):
        norms = {"gradient norm": curve("grad_norm")}
        if curve("norm_spike"):
            norms["spikes"] = curve("norm_spike")
        panels = [Panel("Gradient norm", norms, y_from_zero=True, points=("spikes",))]
        if curve("loss_seen_1"):
            panels.append(Panel("Loss by how often rows came before", by_times_seen(entries)))
        figures["gradient"] = ("Gradient norm", partial(line_figure, panels))
    if curve("bpb_loop_1"):
        names = sorted(
            {name for entry in entries for name in entry if name.startswith("bpb_loop_")}
        )
        loops = {f"loop {name.removeprefix('bpb_loop_')}": curve(name) for name in names}
        panel = Panel("validation bits per byte, by loop", loops)
        figures["loops"] = ("Validation by loop", partial(line_figure, [panel]))
    if curve("core_metric"):
        panel = Panel("CORE (mean centred accuracy)", {"CORE": curve("core_metric")})
        figures["core"] = ("Few-shot score on the way", partial(line_figure, [panel]))
    if curve("reward"):
        image = partial(reward_figure, curve("reward"), curve("pass_at_1"))
        figures["reward"] = ("Mean reward and held-out pass@1", image)
    if curve("lr"):
        figures["lr"] = ("Learning rate", partial(lr_figure, curve("lr")))
    if curve("tokens_per_second"):
        image = partial(throughput_figure, curve("tokens_per_second"))
        figures["throughput"] = ("Throughput", image)
    return figures


def by_times_seen(entries: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Curves of the loss, one for each number of times that rows came before; running means."""
    names = sorted({name for entry in entries for name in entry if name.startswith("loss_seen_")})
    first = [
        (entry["step"], entry.get("loss_seen_0", entry["loss"]))
        for entry in entries
        if "loss" in entry and ("loss_seen_0" in entry or not any(n in entry for n in names))
    ]
    later = {
        name.removeprefix("loss_seen_"): [(e["step"], e[name]) for e in entries if name in e]
        for name in names
        if name != "loss_seen_0"
    }
    return {
        "never": ema(first),
        **{TIMES.get(times, f"{times} times"): ema(points) for times, points in later.items()},
    }


def of_scores(record: Record) -> dict[str, Drawing]:
    """The bars of CORE, one per task."""
    tasks = {
        key: value
        for key, value in record["values"].items()
        if key not in ("Model", "CORE metric")
        and (isinstance(value, Mapping) or key in SECTIONS[record["section"]].split(", "))
    }
    scores = {key: float(plain_value(value)) for key, value in tasks.items()}
    errors = {key: standard_error(value) for key, value in tasks.items()}
    errors = {key: error for key, error in errors.items() if math.isfinite(error)}
    return {"core": ("CORE per task", partial(core_figure, scores, errors))} if scores else {}
