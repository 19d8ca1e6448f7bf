"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg

A training run has one figure with a panel for each metric of PANELS. Text and axes follow the
viewer's light or dark color scheme; text is text, so that a figure is small.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcsetup, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from nanochat.common import base_dir, printable, write_atomic
from nanochat.logger import read_metrics
from nanochat.records import Record, plain_value, slug, standard_error
from nanochat.summary import STAGES, collect_scores, shown_name

# ---- Drawing -------------------------------------------------------------------------------------

WIDTH, HEIGHT = 7.4, 2.3  # inches: of a figure, and of a row of panels
MAX_POINTS = 100  # of a curve; keeps a figure below 60 kB
INK, PALE = "#1f2328", "#8b949e"  # text and axes; grid
COLORS = ("#3a86c8", "#d98324", "#2a9d72", "#c8553d", "#a56cc1", "#8c6d4f", "#7f8790")
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: Any = [
    "default",
    {
        "axes.prop_cycle": rcsetup.cycler(color=COLORS),  # readable on white and on black
        "svg.hashsalt": "nanochat",  # deterministic element ids
        "svg.fonttype": "none",  # text, not outlines
        "font.sans-serif": ["DejaVu Sans", "Arial"],
        **{"font.size": 8, "axes.titlesize": "medium", "axes.titlelocation": "left"},
        **dict.fromkeys(INKED, INK),
        **{"axes.spines.top": False, "axes.spines.right": False},
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
        **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": PALE, "grid.alpha": 0.3},
        **{
            "legend.frameon": False,
            "lines.markersize": 3.5,
            "lines.linewidth": 1.2,
            "errorbar.capsize": 2,
        },
        "text.parse_math": False,  # names may contain dollar signs
        "figure.constrained_layout.use": True,
    },
]
DARK = f"""<style>text {{white-space: pre}} @media (prefers-color-scheme: dark) {{
 [style*="fill: {INK}"] {{fill: #e6edf3 !important}}
 [style*="stroke: {INK}"] {{stroke: #e6edf3 !important}}
}}</style>"""


def new_figure(rows: int = 1, columns: int = 1, height: float = HEIGHT) -> tuple[Figure, Any]:
    """An empty figure in the style of the project, and its axes (rows, columns)."""
    style.use(STYLE)
    figure = Figure(figsize=(WIDTH, height * rows))
    return figure, figure.subplots(rows, columns, squeeze=False)


def as_svg(figure: Figure) -> bytes:
    """The figure as SVG, a line per element; the output is deterministic."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = re.sub(rb" ?\n(?=[A-Za-z\"])", b" ", stream.getvalue())  # within the data of paths
    return svg.replace(b"<defs>", f"{DARK}<defs>".encode(), 1)


def draw_curve(axes: Axes, points: Sequence[Sequence[float]], label: str = "") -> None:
    """
    Draw points (x, y) or (x, y, standard error), in order of x. Of more than MAX_POINTS, draw means
    of consecutive ones.
    """
    bins = np.array_split(np.array(points, float), min(len(points), MAX_POINTS))
    x, y, *error = np.array([each.mean(0) for each in bins]).T
    axes.errorbar(x, y, *error, marker="o" if len(x) < 30 else "", label=printable(label))


def set_log_scale(axis: Any) -> None:
    """Make an axis (`axes.xaxis` or `axes.yaxis`) logarithmic with plain numbers as labels."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


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


def draw_figures(folder: Path, written: Sequence[Record]) -> None:
    """Draw the figures of all records into `folder`, and delete its other SVG files."""
    chats = [record for record in written if record["section"].startswith("Chat evaluation")]
    scores = collect_scores(chats).values
    several = {name: by for name, by in scores.items() if len(by) > 1}
    label = "accuracy, ± 1 standard error"
    figures = {"results-stages": draw_scores("Chat tasks after each stage", label, several)}
    for record in written:
        name = slug(record["section"])
        if record["metrics"]:
            figures[f"{name}-training"] = draw_run(base_dir() / record["metrics"])
        if record["section"] == "Base model evaluation":
            values = {k: v for k, v in record["values"].items() if isinstance(v, Mapping)}
            order = sorted(values, key=lambda task: -float(plain_value(values[task])))
            tasks = {shown_name(record, task): {"base": values[task]} for task in order}
            title = "Few-shot tasks (0 = chance, 1 = all correct)"
            figures[f"{name}-core"] = draw_scores(title, f"centered {label}", tasks)
        if record["series"]:
            figures[f"{name}-series"] = draw_series(record)
    for path in folder.glob("*.svg"):
        path.unlink()
    for name, image in figures.items():
        if image:
            write_atomic(folder / f"{name}.svg", image)


def draw_scores(title: str, x_label: str, scores: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Scores, metric -> stage -> value, ± 1 standard error; empty without scores."""
    if not scores:
        return b""
    figure, [[axes]] = new_figure(height=1.1 + 0.27 * len(scores))
    for i, (stage, label) in enumerate(STAGES.items()):
        values = [by[stage] for by in scores.values() if stage in by]
        x, error = [float(plain_value(v)) for v in values], [standard_error(v) for v in values]
        y = [n + i / 10 - 0.2 for n, by in enumerate(scores.values()) if stage in by]
        if values:
            axes.errorbar(x, y, xerr=error, fmt="o", color=f"C{i}", label=label)
    axes.set_yticks(range(len(scores)), [printable(name) for name in scores])
    axes.set(title=title, xlabel=x_label)
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return as_svg(figure)


def draw_run(path: Path) -> bytes:
    """The panels of a training run, from its log; empty if the log is gone."""
    entries = read_metrics(path)
    shown = [name for name in PANELS if any(name in entry for entry in entries)]
    if not shown:
        print(f"report: no figures for {printable(path)}: it has no metrics", flush=True)
        return b""
    if "reward" in shown:
        shown = [name for name in shown if name != "loss"]  # of RL, not informative
    figure, panels = new_figure(-(-len(shown) // 2), 2)
    for axes, name in zip(panels.flat, shown, strict=False):
        keys = ("step", name, f"{name}_se")
        draw_curve(axes, [[e[key] for key in keys if key in e] for e in entries if name in e])
        axes.set(title=PANELS[name], xlabel="step")
        axes.locator_params(nbins=5)
        if name == "loss":
            set_log_scale(axes.yaxis)
        elif name in ("tokens_per_second", "grad_norm"):
            axes.set_ylim(bottom=0)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    return as_svg(figure)


def draw_series(record: Record) -> bytes:
    """A record's own series; on a log scale if x grows more than 20 times."""
    figure, [[axes]] = new_figure()
    for name, points in record["series"].items():
        draw_curve(axes, points, name)
    low, high = (find(x for s in record["series"].values() for x, _ in s) for find in (min, max))
    if 0 < 20 * low < high:
        set_log_scale(axes.xaxis)
    axes.set(title=printable(record["section"]))
    axes.legend()
    return as_svg(figure)
