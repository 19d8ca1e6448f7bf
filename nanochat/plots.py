"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg and their titles

A training run has one figure with a panel for each metric of PANELS. Text and axes follow the
viewer's light or dark color scheme; text is text, so that a figure is small.
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib import rcsetup, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from nanochat.common import base_dir, printable, write_atomic
from nanochat.logger import read_metrics
from nanochat.records import Record, plain_value, slug, standard_error
from nanochat.summary import LAST, STAGE_NAMES, result_metrics, shown_name

# ---- Drawing -------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]  # (x, y), sorted by x
Panel = Callable[[Axes], None]

WIDTH, HEIGHT = 7.4, 2.3  # inches: of a figure, and of a row of panels
MAX_POINTS = 150  # of a curve; keeps a figure below 60 kB
EMA_BETA = 0.9
INK, PALE = "#1f2328", "#8b949e"  # text and axes; grid and raw values
COLORS = ("#3a86c8", "#d98324", "#2a9d72", "#c8553d", "#a56cc1", "#8c6d4f", "#7f8790")
STYLE: Any = [
    "default",
    {
        "axes.prop_cycle": rcsetup.cycler(color=COLORS),  # readable on white and on black
        "svg.hashsalt": "nanochat",  # deterministic element ids
        "svg.fonttype": "none",  # text, not outlines
        "font.sans-serif": ["DejaVu Sans", "Arial"],
        "font.size": 8,
        **dict.fromkeys(("axes.titlesize", "axes.labelsize", "legend.fontsize"), 8),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
        **{"axes.grid": True, "grid.color": PALE, "grid.alpha": 0.3, "axes.titlelocation": "left"},
        "text.parse_math": False,  # names may contain dollar signs
        "lines.markersize": 3.5,
        "figure.constrained_layout.use": True,
    },
]
DARK = f"""<style>@media (prefers-color-scheme: dark) {{
 [style*="fill: {INK}"] {{fill: #e6edf3 !important}}
 [style*="stroke: {INK}"] {{stroke: #e6edf3 !important}}
}}</style>"""


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
    axes: Axes, title: str, curves: Mapping[str, Points], x_label: str = "step", **how: Any
) -> None:
    """Draw curves by name; a legend names several."""
    axes.set(title=printable(title), xlabel=printable(x_label))
    for name, points in curves.items():
        marker = "o" if len(points) < 30 else ""
        axes.plot(*thin(points), label=printable(name), **{"marker": marker, **how})
    axes.locator_params("x", nbins=6)
    if len(curves) > 1:
        axes.legend(frameon=False)


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic with plain numbers as labels."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


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

PANELS = {  # logged metric -> title of its panel, in order
    "loss": "Training loss (nats per token)",
    "val_bpb": "Validation loss (bits per byte)",
    "core_metric": "Few-shot score (mean centered accuracy)",
    "reward": "Mean reward of a step",
    "pass_at_1": "Held-out pass@1, ± 1 standard error",
    "lr": "Learning rate, fraction of the peak",
    "tokens_per_second": "Tokens per second",
    "grad_norm": "Gradient norm before clipping",
}
NOISY = ("loss", "reward", "tokens_per_second")  # drawn with a running mean


def draw_figures(folder: Path, records: Sequence[Record]) -> dict[Path, str]:
    """Draw the figures of all records and delete other SVG files. Returns {path: title}."""
    figures = {"results-stages": ("Scores after each stage", draw_stages(records))}
    for record in records:
        section, name = record["section"], slug(record["section"])
        if record["metrics"]:
            figures[f"{name}-training"] = (f"{section}: metrics by step", draw_run(record))
        if section == "Base model evaluation":
            figures[f"{name}-core"] = ("Few-shot tasks", draw_tasks(record))
        if record["series"]:
            figures[f"{name}-series"] = (section, draw_series(record))
    titles = {}
    for name, (title, image) in figures.items():
        if image:
            write_atomic(folder / f"{name}.svg", image)
            titles[folder / f"{name}.svg"] = title
    for path in set(folder.glob("*.svg")) - titles.keys():
        path.unlink(missing_ok=True)
    return titles


def draw_stages(records: Sequence[Record]) -> bytes:
    """Score of each chat task after each stage, with standard errors; empty for one stage."""
    found, _ = result_metrics([r for r in records if r["section"].startswith("Chat evaluation")])
    several = {name: by for name, by in found.items() if len(by) > 1}
    if not several:
        return b""

    def draw(axes: Axes) -> None:
        columns = [c for c in STAGE_NAMES if any(c in by for by in several.values())]
        for name, by in several.items():
            x = [columns.index(c) for c in columns if c in by]
            y = [float(plain_value(by[c])) for c in columns if c in by]
            error = [standard_error(by[c]) for c in columns if c in by]
            how: Any = {"color": INK, "linewidth": 2.2} if name in LAST else {"linewidth": 1.2}
            label = printable(f"{name} {y[-1]:.3f}")
            axes.errorbar(x, y, error, marker="o", capsize=2, label=label, **how)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.set_xticks(range(len(columns)), [STAGE_NAMES[c] for c in columns])
        axes.set(title="Chat tasks after each stage", xlabel="stage")
        axes.set(ylabel="accuracy, ± 1 standard error")

    return as_svg(draw, height=3.2)


def draw_run(record: Record) -> bytes:
    """The panels of a training run, from its log; empty if the log is gone."""
    path = base_dir() / record["metrics"]
    if not path.exists():
        print(f"report: no figures for {printable(path)}: it does not exist", flush=True)
        return b""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in read_metrics(path):
        for name, value in entry.items():
            if name in PANELS or name == "pass_at_1_se":
                curves[name].append((entry["step"], value))
    errors = dict(curves.pop("pass_at_1_se", ()))

    def panel(name: str) -> Panel:
        def draw(axes: Axes) -> None:
            points = curves[name]
            if name in NOISY:
                axes.plot(*thin(points), color=PALE, alpha=0.7, linewidth=0.8)
                points = ema(points)
            draw_curves(axes, PANELS[name], {name: points}, linewidth=1.2)
            if name == "pass_at_1":
                x, y = thin(points)
                axes.errorbar(x, y, [errors.get(step, math.nan) for step in x], color="C0")
            if name == "loss":
                set_log_scale(axes, "y")
            elif name in ("tokens_per_second", "grad_norm"):
                axes.set_ylim(bottom=0)
                axes.yaxis.set_major_formatter("{x:,g}")

        return draw

    shown = [name for name in PANELS if curves[name]]
    if "reward" in shown and "loss" in shown:
        shown.remove("loss")  # the policy loss of RL is not informative
    return as_svg(*map(panel, shown), columns=2) if shown else b""


def draw_tasks(record: Record) -> bytes:
    """Bars of the centered CORE scores per task, best first; gray if within the error."""
    values = {n: v for n, v in record["values"].items() if isinstance(v, Mapping)}
    mean = values.pop("CORE metric", None)
    scores = {name: float(plain_value(value)) for name, value in values.items()}
    names = sorted(filter(lambda n: math.isfinite(scores[n]), scores), key=lambda n: -scores[n])
    errors = [standard_error(values[name]) for name in names]
    if not names:
        return b""

    def draw(axes: Axes) -> None:
        noise = [abs(scores[n]) <= error for n, error in zip(names, errors, strict=True)]
        bars = axes.barh(
            [printable(name) for name in names],
            [scores[name] for name in names],
            color=[PALE if within else "C0" for within in noise],
            xerr=errors,
            error_kw={"capsize": 2.5, "elinewidth": 1, "ecolor": INK},
        )
        axes.bar_label(bars, fmt="%.3f", padding=4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.invert_yaxis()
        axes.margins(x=0.15, y=0.02)
        label = "centered accuracy (0 = chance, 1 = all correct), ± 1 standard error"
        title = "Few-shot tasks"
        if mean is not None:
            what = shown_name(record, "CORE metric").replace(" metric", "")
            title += f"; {what} = mean = {float(plain_value(mean)):.3f}"
        axes.set(title=printable(title), xlabel=label)

    return as_svg(draw, height=1.1 + 0.27 * len(names))


def draw_series(record: Record) -> bytes:
    """A record's own series; on a log scale over the setting `search`, if it has one."""
    curves = {name: [(float(x), float(y)) for x, y in s] for name, s in record["series"].items()}
    searched = record["settings"].get("search", "")

    def draw(axes: Axes) -> None:
        title = record["settings"].get("metric", record["section"])
        draw_curves(axes, title, curves, searched or "step")
        if searched:
            set_log_scale(axes, "x")

    return as_svg(draw)
