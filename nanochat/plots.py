"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg

A training run has one figure with a panel for each metric of PANELS. Text is text, so that a figure
is small.
"""

import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from nanochat.common import base_dir, printable
from nanochat.records import Record, plain_value, read_metrics, slug, standard_error
from nanochat.report import STAGES, collect_scores

# ---- Drawing -------------------------------------------------------------------------------------

WIDTH, HEIGHT = 7.4, 2.3  # inches: of a figure, and of a row of panels
MAX_POINTS = 60  # of a curve, means of consecutive ones; keeps a figure below 60 kB
INK = "#757b84"  # of text and axes; readable on white and on black
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: Any = {
    **dict.fromkeys(INKED, INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.alpha": 0.3, "legend.frameon": False},
    **{"font.size": 8, "axes.titlesize": "medium", "lines.markersize": 3.5, "lines.linewidth": 1.2},
    "svg.hashsalt": "nanochat",  # deterministic element ids
    "svg.fonttype": "none",  # text, not outlines
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # few, because each text lists them
    "text.parse_math": False,  # names may contain dollar signs
    "figure.constrained_layout.use": True,
}


def new_figure(rows: int = 1, columns: int = 1, height: float = HEIGHT) -> tuple[Figure, Any]:
    """An empty figure in the style of the project, and its axes (rows, columns)."""
    style.use(["default", STYLE])
    figure = Figure(figsize=(WIDTH, height * rows))
    return figure, figure.subplots(rows, columns, squeeze=False)


# ---- Figures of a report -------------------------------------------------------------------------

PANELS = {  # logged metric -> title of its panel, in order
    "loss": "Training loss",
    "val_bpb": "Validation loss (bits per byte)",
    "core_metric": "Few-shot score (mean centered accuracy)",
    "reward": "Mean reward of a step",
    "pass_at_1": "Held-out pass@1, ± 1 standard error",
    "grad_norm": "Gradient norm before clipping",
}


def draw_figures(folder: Path, written: Sequence[Record]) -> list[str]:
    """Replace `folder` by the figures of all records; returns their names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    chats = [record for record in written if record["section"].startswith("Chat evaluation")]
    scores = {name: by for name, by in collect_scores(chats).values.items() if len(by) > 1}
    figures = {"results-stages": draw_scores(scores)} if scores else {}
    for record in written:
        name = slug(record["section"])
        if record["metrics"] and (entries := read_metrics(base_dir() / record["metrics"])):
            figures[f"{name}-training"] = draw_run(entries)
    for name, figure in figures.items():
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        (folder / f"{name}.svg").write_text(" ".join(svg.getvalue().split()) + "\n")  # one line
    return sorted(figures)


def draw_scores(scores: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Scores of chat evaluations, metric -> stage -> value, ± 1 standard error."""
    figure, [[axes]] = new_figure(height=1.1 + 0.27 * len(scores))
    for i, (stage, label) in enumerate(STAGES.items()):
        points = [(n, by[stage]) for n, by in enumerate(scores.values()) if stage in by]
        if points:
            x, error = ([f(v) for _, v in points] for f in (plain_value, standard_error))
            y = [n + i / 10 - 0.2 for n, _ in points]
            axes.errorbar(x, y, xerr=error, fmt="o", color=f"C{i}", label=label)
    axes.set_yticks(range(len(scores)), map(printable, scores))
    axes.set(title="Chat tasks after each stage", xlabel="score, ± 1 standard error")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_run(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """The panels of a training run, from the entries of its log."""
    shown = [name for name in PANELS if any(name in entry for entry in entries)]
    if "reward" in shown:
        shown = [name for name in shown if name != "loss"]  # of RL, not informative
    figure, panels = new_figure(-(-len(shown) // 2), 2)
    for axes in panels.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, name in zip(panels.flat, shown, strict=False):
        keys = ("step", name, f"{name}_se")
        points = [[e[key] for key in keys if key in e] for e in entries if name in e]
        bins = np.array_split(np.array(points, float), min(len(points), MAX_POINTS))
        x, y, *error = np.array([each.mean(0) for each in bins]).T
        axes.errorbar(x, y, *error, marker="o" if len(x) < 30 else "")
        axes.set(title=PANELS[name], xlabel="step")
        axes.locator_params(nbins=5)
    return figure
