"""
Figures of the report, drawn as SVG with matplotlib.

    records -> draw_figures -> figures/<section>-<kind>.svg and their titles
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanochat.common import base_dir, printable, write_atomic
from nanochat.logger import read_metrics
from nanochat.records import Record, plain_value, slug, standard_error

# ---- Drawing -------------------------------------------------------------------------------------


Points = Sequence[tuple[float, float]]  # (x, y), sorted by x
Curves = Mapping[str, Points]
Drawing = tuple[str, bytes]  # title, SVG

MAX_POINTS = 400  # a figure this wide cannot show more
EMA_BETA = 0.9
STYLE: Any = [  # with colorblind-friendly colors C0, C1, ...
    *("seaborn-v0_8-whitegrid", "seaborn-v0_8-colorblind"),
    {
        "svg.hashsalt": "nanochat",  # deterministic element ids
        "font.family": "DejaVu Sans",  # bundled with matplotlib
        "font.size": 8,
        "text.parse_math": False,  # names may contain dollar signs
        "lines.markersize": 3.5,
        "figure.constrained_layout.use": True,
    },
]
TITLES = {  # metric of a training run -> panel title
    "loss": "Training loss (nats per token)",
    "val_bpb": "Validation loss (bits per byte)",
    "bpb_loop_1": "Validation loss by loop (bits per byte)",
    "grad_norm": "Gradient norm",
    "core_metric": "Few-shot score during training (mean centered accuracy)",
    "reward": "Mean reward",
    "pass_at_1": "Held-out pass@1",
    "lr": "Learning rate (fraction of peak)",
    "tokens_per_second": "Throughput (tokens/s)",
}


def as_svg(*draws: Callable[[Axes], None], width: float = 3.7, height: float = 2.6) -> bytes:
    """SVG with one panel per function, side by side; the output is deterministic."""
    stream = io.BytesIO()
    with style.context(STYLE):
        figure = Figure(figsize=(width * len(draws), height))
        for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def draw_curves(axes: Axes, title: str, curves: Curves, x_label: str = "step") -> None:
    """Draw curves by name, with a legend if there are several."""
    for name, points in curves.items():
        axes.plot(*thin(points), marker="o" if len(points) < 30 else "", label=printable(name))
    axes.set_title(printable(title))
    axes.set_xlabel(printable(x_label))
    if len(curves) > 1:
        axes.legend()


def bar_figure(title: str, values: Mapping[str, float], errors: Mapping[str, float]) -> bytes:
    """SVG of horizontal bars with error bars (+- 1 SE), largest first; skips non-finite values."""
    finite = [name for name in values if math.isfinite(values[name])]
    names = sorted(finite, key=lambda name: (-values[name], name))

    def draw(axes: Axes) -> None:
        bars = axes.barh(
            [printable(name) for name in names],
            [values[name] for name in names],
            color=["C0" if values[name] >= 0 else "C2" for name in names],
            xerr=[errors.get(name, math.nan) for name in names],
        )
        axes.bar_label(bars, fmt="%.3f", padding=4)
        axes.invert_yaxis()
        axes.grid(False)
        axes.margins(x=0.1, y=0.01)
        axes.set_title(printable(title))

    return as_svg(draw, width=7.4, height=0.7 + 0.24 * len(names))


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


# ---- Figures of a record: curves, bars and series ------------------------------------------------


def draw_figures(folder: Path, records: Sequence[Record]) -> dict[Path, str]:
    """Draw the figures of all records and delete other SVG files. Returns {path: title}."""
    titles: dict[Path, str] = {}
    for record in records:
        for kind, (title, image) in drawings(record).items():
            path = folder / f"{slug(record['section'])}-{kind}.svg"
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
        if path.exists():
            figures = run_figures(read_metrics(path))
        else:
            print(f"report: no figures for {printable(path)}: it does not exist", flush=True)
    if record["section"] == "Base model evaluation":
        figures |= task_bars(record)
    if record["series"]:
        figures["series"] = (record["section"], draw_series(record))
    return figures


def run_figures(entries: Sequence[Mapping[str, Any]]) -> dict[str, Drawing]:
    """Figures of a training run for the metrics that were logged."""
    curves: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for entry in entries:
        for name, value in entry.items():
            curves[name].append((entry["step"], value))

    kinds = {
        # the policy loss of RL is not informative
        "loss": [] if curves["reward"] else ["loss", "val_bpb"],
        "gradient": ["grad_norm"],
        "loops": ["bpb_loop_1"],
        "core": ["core_metric"],
        "reward": ["reward", "pass_at_1"],
        "lr": ["lr"],
        "throughput": ["tokens_per_second"],
    }
    figures = {}
    for kind, wanted in kinds.items():
        if names := [name for name in wanted if curves[name]]:
            draws = [partial(draw_metric, name=name, curves=curves) for name in names]
            figures[kind] = (TITLES[names[0]], as_svg(*draws))
    return figures


def draw_metric(axes: Axes, name: str, curves: Curves) -> None:
    """Draw one metric; `curves` holds those of every metric."""
    shown = {TITLES[name]: curves[name]}
    if name in ("loss", "reward"):
        axes.plot(*thin(curves[name]), color="C5", alpha=0.45, linewidth=0.9)
        shown = {"running mean": ema(curves[name])}
    if name == "bpb_loop_1":
        loops = sorted(each for each in curves if each.startswith("bpb_loop_"))
        shown = {f"loop {loop.removeprefix('bpb_loop_')}": curves[loop] for loop in loops}
    draw_curves(axes, TITLES[name], shown)
    if name in ("grad_norm", "lr", "tokens_per_second"):
        axes.set_ylim(bottom=0)


def task_bars(record: Record) -> dict[str, Drawing]:
    """Bar chart of the centered CORE scores per task (0 = chance, 1 = perfect)."""
    tasks = {n: v for n, v in record["values"].items() if isinstance(v, Mapping)}
    scores = {name: float(plain_value(v)) for name, v in tasks.items() if name != "CORE metric"}
    errors = {name: standard_error(value) for name, value in tasks.items()}
    title = "Centered score per task (0 = chance)"
    return {"core": ("CORE per task", bar_figure(title, scores, errors))} if scores else {}


def draw_series(record: Record) -> bytes:
    """
    SVG of a record's own series. If the record has a setting `search`, x is the searched setting
    on a log scale. Otherwise, series of single points (value, noise) are drawn as bars.
    """
    curves = {
        name: [(float(x), float(y)) for x, y in points] for name, points in record["series"].items()
    }
    title = record["settings"].get("metric", record["section"])
    searched = record["settings"].get("search", "")
    if not searched and all(len(points) == 1 for points in curves.values()):
        values, noise = ({name: curves[name][0][i] for name in curves} for i in (0, 1))
        return bar_figure(title, values, noise)

    def draw(axes: Axes) -> None:
        draw_curves(axes, title, curves, searched)
        if searched:
            axes.set_xscale("log")

    return as_svg(draw)
