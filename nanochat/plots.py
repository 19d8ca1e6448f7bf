"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg and their titles

A training run has one figure with a panel for each kind of metric. Text and axes follow the
viewer's light or dark color scheme.
"""

import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from matplotlib import rcsetup, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from nanochat.common import base_dir, printable, write_atomic
from nanochat.logger import read_metrics
from nanochat.records import Record, plain_value, slug, standard_error
from nanochat.summary import LAST, STAGE_NAMES, result_metrics, shown_name

# ---- Drawing -------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]  # (x, y), sorted by x
Curves = Mapping[str, Points]
Drawing = tuple[str, bytes]  # title, SVG
Panel = Callable[[Axes], None]
EndLabel = tuple[tuple[float, float], str, str]  # last point of a curve, text, color

WIDTH, HEIGHT = 7.4, 2.3  # inches: of a figure, and of a row of panels
LABEL_PIXELS = 13  # from one line of text to the next, at 100 per inch
MAX_POINTS = 400  # a figure this wide cannot show more
MIN_VALIDATIONS = 8  # fewer points are no curve
EMA_BETA = 0.9
INK, PALE = "#1f2328", "#8b949e"  # text and axes; grid and raw values
COLORS = ("#3a86c8", "#d98324", "#2a9d72", "#c8553d", "#a56cc1", "#8c6d4f", "#7f8790")
STYLE: Any = [
    "default",
    {
        "axes.prop_cycle": rcsetup.cycler(color=COLORS),  # readable on white and on black
        "svg.hashsalt": "nanochat",  # deterministic element ids
        "font.family": "DejaVu Sans",  # bundled with matplotlib
        "font.size": 8,
        **dict.fromkeys(("axes.titlesize", "axes.labelsize", "legend.fontsize"), 8),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
        **{"axes.grid": True, "grid.color": PALE, "grid.alpha": 0.3, "axes.titlelocation": "left"},
        "savefig.facecolor": "none",
        "text.parse_math": False,  # names may contain dollar signs
        "lines.markersize": 3.5,
        "figure.constrained_layout.use": True,
    },
]
DARK = f"""<style>@media (prefers-color-scheme: dark) {{
 [style*="fill: {INK}"] {{fill: #e6edf3 !important}}
 [style*="stroke: {INK}"] {{stroke: #e6edf3 !important}}
}}</style>"""
LEARNING_RATES = {"matrix_lr": "matrices", "embedding_lr": "embeddings", "head_lr": "head"}


def as_svg(*panels: Panel, columns: int = 1, height: float = HEIGHT) -> bytes:
    """SVG with the panels in rows of `columns`; the output is deterministic."""
    stream = io.BytesIO()
    rows = -(-len(panels) // columns)
    with style.context(STYLE):
        figure = Figure(figsize=(WIDTH, height * rows))
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, draw in zip(grid, panels, strict=False):
            draw(axes)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue().replace(b"<defs>", f"{DARK}<defs>".encode(), 1)


def draw_curves(
    axes: Axes, title: str, curves: Curves, x_label: str = "step", log: bool = False, **how: Any
) -> None:
    """Draw curves by name; several are labeled at their ends. `log`: logarithmic y axis."""
    axes.set(title=printable(title), xlabel=printable(x_label))
    ends: list[EndLabel] = []
    for n, (name, points) in enumerate(curves.items()):
        marker = "o" if len(points) < 30 else ""
        axes.plot(*thin(points), color=f"C{n}", marker=marker, **how)
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        if len(curves) > 1 and finite:
            ends.append((finite[-1], name, f"C{n}"))
    if log:
        set_log_scale(axes, "y")
    label_ends(axes, ends)


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic with plain numbers as labels."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def label_ends(axes: Axes, ends: Sequence[EndLabel]) -> None:
    """Write texts to the right of the last points of curves. A text that would overlap another
    moves up. Call after setting the scales."""
    axes.autoscale_view()
    to_fraction = axes.transScale + axes.transLimits  # of the height of the panel
    step = LABEL_PIXELS / axes.bbox.height
    lowest = -math.inf
    positions = [(to_fraction.transform(point)[1], point[0], *text) for point, *text in ends]
    for y, x, text, color in sorted(positions):
        lowest = max(y, lowest + step)
        mixed = axes.get_xaxis_transform()  # x of the data, y as a fraction
        axes.text(x, lowest, f" {printable(text)}", color=color, va="center", transform=mixed)


def bar_figure(
    title: str,
    values: Mapping[str, float],
    errors: Mapping[str, float],
    x_label: str = "",
    label: str = "%.3f",
) -> bytes:
    """
    SVG of horizontal bars with error bars on both sides, from top to bottom; gray if smaller than
    the error, labeled with the value as in `label`. Skips non-finite values.
    """
    names = [name for name in values if math.isfinite(values[name])]
    widths, each_error = ([by.get(name, math.nan) for name in names] for by in (values, errors))

    def draw(axes: Axes) -> None:
        bars = axes.barh(
            [printable(name) for name in names],
            widths,
            color=[PALE if abs(values[n]) <= errors.get(n, math.nan) else "C0" for n in names],
            xerr=each_error,
            error_kw={"capsize": 2.5, "elinewidth": 1, "ecolor": INK},
        )
        axes.bar_label(bars, fmt=label, padding=4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.15, y=0.02)
        axes.set(title=printable(title), xlabel=x_label)

    return as_svg(draw, height=1.1 + 0.27 * len(names))


def thin(points: Points) -> tuple[list[float], list[float]]:
    """Subsample to about MAX_POINTS; returns lists of x and y. Non-finite y become NaN (gaps)."""
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    kept = [*points[::stride], *([points[-1]] if (len(points) - 1) % stride else [])]
    return [x for x, _ in kept], [y if math.isfinite(y) else math.nan for _, y in kept]


def ema(points: Points) -> list[tuple[float, float]]:
    """Bias-corrected exponential moving average of y; skips non-finite values."""
    mean, weight, smooth = 0.0, 0.0, []
    for x, y in points:
        if math.isfinite(y):
            mean = EMA_BETA * mean + (1 - EMA_BETA) * y
            weight = EMA_BETA * weight + (1 - EMA_BETA)
            smooth.append((x, mean / weight))
    return smooth


# ---- Figures of a report -------------------------------------------------------------------------


def draw_figures(folder: Path, records: Sequence[Record]) -> dict[Path, str]:
    """Draw the figures of all records and delete other SVG files. Returns {path: title}."""
    titles: dict[Path, str] = {}
    figures = [("results", draw_stages(records))]
    figures += [(slug(record["section"]), drawings(record)) for record in records]
    for name, each in figures:
        for kind, (title, image) in each.items():
            path = folder / f"{name}-{kind}.svg"
            write_atomic(path, image)
            titles[path] = title
    for path in set(folder.glob("*.svg")) - titles.keys():
        path.unlink(missing_ok=True)
    return titles


def drawings(record: Record) -> dict[str, Drawing]:
    """Figures of a record by kind, which is one word."""
    figures: dict[str, Drawing] = {}
    if record["metrics"]:
        path = base_dir() / record["metrics"]
        if not path.exists():
            print(f"report: no figures for {printable(path)}: it does not exist", flush=True)
        elif panels := run_panels(read_metrics(path)):
            title = f"{record['section']}: metrics by step"
            figures["training"] = (title, as_svg(*panels.values(), columns=2))
    if record["section"] == "Base model evaluation":
        figures |= task_bars(record)
    if record["series"]:
        figures["series"] = (record["section"], draw_series(record))
    return figures


def draw_stages(records: Sequence[Record]) -> dict[str, Drawing]:
    """Score of each chat task after each stage, with standard errors."""
    found, _ = result_metrics([r for r in records if r["section"].startswith("Chat evaluation")])
    several = {name: by for name, by in found.items() if len(by) > 1}
    if not several:
        return {}

    def draw(axes: Axes) -> None:
        columns = [c for c in STAGE_NAMES if any(c in by for by in several.values())]
        ends: list[EndLabel] = []
        for n, (name, by) in enumerate(several.items()):
            x = [columns.index(c) for c in columns if c in by]
            y = [float(plain_value(by[c])) for c in columns if c in by]
            error = [standard_error(by[c]) for c in columns if c in by]
            color, width = (INK, 2.2) if name in LAST else (f"C{n}", 1.2)
            axes.errorbar(x, y, error, color=color, marker="o", capsize=2, linewidth=width)
            ends.append(((x[-1], y[-1]), f"{name} {y[-1]:.3f}", color))
        label_ends(axes, ends)
        axes.set_xticks(range(len(columns)), [STAGE_NAMES[c] for c in columns])
        axes.set(title="Chat tasks after each stage", xlabel="stage")
        axes.set(ylabel="accuracy, ± 1 standard error", xlim=(-0.2, len(columns) - 0.3))

    return {"stages": ("Scores after each stage", as_svg(draw, height=3.2))}


def run_panels(entries: Sequence[Mapping[str, Any]]) -> dict[str, Panel]:
    """Panels of a training run for the metrics that were logged."""
    curves: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for entry in entries:
        for name, value in entry.items():
            curves[name].append((entry["step"], value))
    loops = [name for name in curves if name.startswith("bpb_loop_")]
    loops.sort(key=lambda name: int(name.removeprefix("bpb_loop_")))
    rates = [name for name in LEARNING_RATES if curves[name]]
    unit = "pair" if curves["held_out_accuracy"] else "token"
    panels: dict[str, Callable[..., None]] = {
        "loss": partial(draw_noisy, title=f"Training loss (nats per {unit})", log=True),
        "val_bpb": partial(draw_one, title="Validation loss (bits per byte)"),
        "bpb_loop_1": lambda axes, points: draw_curves(
            axes,
            "Validation loss by loop (bits per byte)",
            {f"loop {name.removeprefix('bpb_loop_')}": curves[name] for name in loops},
        ),
        "core_metric": partial(draw_one, title="Few-shot score (mean centered accuracy)"),
        "held_out_accuracy": partial(draw_one, title="Accuracy on held-out pairs"),
        "reward": partial(draw_noisy, title="Mean reward of a step"),
        "pass_at_1": lambda axes, points: draw_pass_at_1(axes, points, curves["pass_at_1_se"]),
        "matrix_lr": lambda axes, points: draw_rates(axes, {name: curves[name] for name in rates}),
        "tokens_per_second": draw_throughput,
        "grad_norm": partial(draw_one, title="Gradient norm before clipping", floor=0),
    }
    if curves["reward"]:
        del panels["loss"]  # the policy loss of RL is not informative
    if len(curves["val_bpb"]) < MIN_VALIDATIONS:
        del panels["val_bpb"]
    return {n: partial(draw, points=curves[n]) for n, draw in panels.items() if curves[n]}


def draw_one(axes: Axes, points: Points, title: str, floor: float | None = None) -> None:
    """Draw one metric."""
    draw_curves(axes, title, {title: points}, linewidth=1.2)
    if floor is not None:
        axes.set_ylim(bottom=floor)


def draw_noisy(axes: Axes, points: Points, title: str, log: bool = False) -> None:
    """Draw a metric of single steps in the background and its running mean."""
    axes.plot(*thin(points), color=PALE, alpha=0.7, linewidth=0.8)
    smooth = ema(points)
    draw_curves(axes, title, {title: smooth}, log=log)
    label_ends(axes, [(point, f"{point[1]:.3g}", "C0") for point in smooth[-1:]])


def draw_pass_at_1(axes: Axes, points: Points, errors: Points) -> None:
    """Draw held-out pass@1 with standard errors, if they were logged."""
    se = dict(errors)
    x, y = thin(points)
    axes.errorbar(x, y, [se.get(step, math.nan) for step in x], marker="o", capsize=2)
    axes.set(title="Held-out pass@1, ± 1 standard error", xlabel="step")


def draw_rates(axes: Axes, rates: Curves) -> None:
    """Draw the learning rates on a log axis."""
    positive = {
        LEARNING_RATES[name]: [(x, y) for x, y in points if y > 0] for name, points in rates.items()
    }
    positive = {name: points for name, points in positive.items() if points}
    draw_curves(axes, "Learning rate", positive, log=True)


def draw_throughput(axes: Axes, points: Points) -> None:
    """Draw the throughput and its median."""
    rates = [y for _, y in points if math.isfinite(y)] or [math.nan]
    median = statistics.median(rates)
    axes.plot(*thin(points), color=PALE, linewidth=0.8)
    axes.axhline(median, color="C0")
    axes.set_title(f"Throughput (tokens/s), median {EngFormatter(places=1, sep='')(median)}")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)


def task_bars(record: Record) -> dict[str, Drawing]:
    """Bar chart of the centered CORE scores per task (0 = chance, 1 = perfect)."""
    tasks = {n: v for n, v in record["values"].items() if isinstance(v, Mapping)}
    mean = tasks.pop("CORE metric", None)
    scores = {key: float(plain_value(value)) for key, value in tasks.items()}
    finite = [key for key, score in scores.items() if math.isfinite(score)]
    scores = {key: scores[key] for key in sorted(finite, key=lambda key: -scores[key])}
    errors = {key: standard_error(value) for key, value in tasks.items()}
    title = "Few-shot tasks"
    if mean is not None:
        what = shown_name(record, "CORE metric").replace(" metric", "")
        title += f"; {what} = mean = {float(plain_value(mean)):.3f}"
    label = "centered accuracy (0 = chance, 1 = all correct), ± 1 standard error; gray: within it"
    return {"core": (title, bar_figure(title, scores, errors, label))} if scores else {}


def draw_series(record: Record) -> bytes:
    """
    SVG of a record's own series. If the record has a setting `search`, x is the searched setting
    on a log scale. Otherwise, series of single points are drawn by `draw_arms`.
    """
    curves = {
        name: [(float(x), float(y)) for x, y in points] for name, points in record["series"].items()
    }
    title = record["settings"].get("metric", record["section"])
    searched = record["settings"].get("search", "")
    if not searched and all(len(points) == 1 for points in curves.values()):
        return draw_arms(record["section"], title, {n: points[0] for n, points in curves.items()})

    def draw(axes: Axes) -> None:
        draw_curves(axes, title, curves, searched)
        if searched:
            set_log_scale(axes, "x")

    return as_svg(draw)


def draw_arms(section: str, metric: str, effects: Mapping[str, tuple[float, float]]) -> bytes:
    """
    SVG of the effects of ablation arms: bars, the arm with the largest mean difference first.
    effects: "<arm>, <base>" -> (difference from the control, smallest significant difference).
    """
    by_arm: dict[str, dict[str, float]] = defaultdict(dict)
    for name, (difference, _) in effects.items():
        if math.isfinite(difference):
            by_arm[name.rpartition(", ")[0]][name] = difference
    arms = sorted(by_arm.values(), key=lambda by_base: -statistics.fmean(by_base.values()))
    values = {name: difference for by_base in arms for name, difference in by_base.items()}
    noise = {name: bar for name, (_, bar) in effects.items()}
    label = (
        f"{printable(metric)}, arm minus control\n"
        "Error bars: noise bar (95%, Student's t over seeds). Gray: within noise."
    )
    return bar_figure(f"{section}: effect of each arm", values, noise, label, "%+.4f")
