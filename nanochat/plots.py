"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg

A training run has one figure with a panel for each metric of PANELS. Text is text, so that a figure
is small.
"""

import io
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
STYLE: Any = {
    "font.size": 8,
    "font.sans-serif": ["DejaVu Sans", "Arial"],  # few, because each text lists them
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "nanochat",  # deterministic element ids
    "text.parse_math": False,  # names may contain dollar signs
}
Curve = np.ndarray
"""Rows x, y and, if it is known, the standard error of y."""


def new_figure(panels: int = 1, height: float = HEIGHT, columns: int = 1) -> tuple[Figure, Any]:
    """A figure, and the axes of its panels."""
    style.use(["default", STYLE])
    rows = -(-panels // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False).flat
    for unused in every[panels:]:
        unused.set_axis_off()
    return figure, every[:panels]


def draw_panel(axes: Any, title: str, x_label: str, curves: Mapping[str, Curve]) -> None:
    """Draw curves into a panel, each with its label; a legend if there are several."""
    for label, curve in curves.items():
        bins = np.array_split(curve.T, min(curve.shape[1], MAX_POINTS))
        points = np.array([each.mean(0) for each in bins]).T
        axes.errorbar(*points, marker="." if len(bins) < 30 else "", linewidth=1, label=label)
    axes.set(title=title, xlabel=x_label)
    axes.locator_params(nbins=5)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(loc="lower left")


def to_svg(figure: Figure) -> str:
    """A figure as the text of an SVG file, in one line."""
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return " ".join(svg.getvalue().split()) + "\n"


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
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    chats = [record for record in written if record["section"].startswith("Chat evaluation")]
    scores = {name: by for name, by in collect_scores(chats).values.items() if len(by) > 1}
    figures = {"results-stages": draw_scores(scores)} if scores else {}
    runs = {}
    for record in written:
        if record["metrics"] and (entries := read_metrics(base_dir() / record["metrics"])):
            batch = record["values"].get("Batch tokens", record["settings"].get("total_batch_size"))
            runs[record["section"]] = entries, batch
            figures[f"{slug(record['section'])}-training"] = draw_run(entries)
    if losses := losses_by_tokens(runs):
        figures["results-losses"], [axes] = new_figure()
        draw_panel(axes, "Training loss (nats per token)", "million tokens, all stages", losses)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(to_svg(figure))
    return sorted(figures)


def losses_by_tokens(runs: Mapping[str, tuple[Sequence[Mapping[str, Any]], Any]]) -> dict[str, Any]:
    """
    Section -> curve of its losses by tokens since the start of the first stage. Runs have entries
    of their log and tokens per step; those without, and RL, are left out.
    """
    found, begin = {}, 0.0
    for section, (entries, batch_tokens) in runs.items():
        steps = [(e["step"], e["loss"]) for e in entries if "loss" in e and "reward" not in e]
        if batch_tokens and steps:
            x, y = np.array(steps, float).T
            found[section] = np.stack([begin + x * batch_tokens / 1e6, y])
            begin = found[section][0, -1]
    return found


def draw_scores(scores: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Scores of chat evaluations, metric -> stage -> value, ± 1 standard error."""
    figure, [axes] = new_figure(height=1.1 + 0.27 * len(scores))
    for i, (stage, label) in enumerate(STAGES.items()):
        points = [(n, by[stage]) for n, by in enumerate(scores.values()) if stage in by]
        if points:
            x, error = ([f(v) for _, v in points] for f in (plain_value, standard_error))
            y = [n + i / 10 - 0.2 for n, _ in points]
            axes.errorbar(x, y, xerr=error, fmt=".", color=f"C{i}", label=label)
    axes.set_yticks(range(len(scores)), map(printable, scores))
    axes.set(title="Chat tasks after each stage", xlabel="score, ± 1 standard error")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_run(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """The panels of a training run, from the entries of its log."""
    shown = [name for name in PANELS if any(name in entry for entry in entries)]
    if "reward" in shown:
        shown = [name for name in shown if name != "loss"]  # of RL, not informative
    figure, panels = new_figure(len(shown), columns=2)
    for axes, name in zip(panels, shown, strict=True):
        keys = ("step", name, f"{name}_se")
        points = [[e[key] for key in keys if key in e] for e in entries if name in e]
        draw_panel(axes, PANELS[name], "step", {name: np.array(points, float).T})
    return figure
