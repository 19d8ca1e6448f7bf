"""
Which figures a record has: curves of its metrics file, bars of its scores, series of its own.

    record -> {name: (title, what draws the SVG)}

Knows neither how a figure is drawn (`plots`) nor where it goes (`report`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, printable
from nanochat.plots import (
    Panel,
    Points,
    bar_figure,
    core_figure,
    ema,
    line_figure,
    loss_figure,
    lr_figure,
    reward_figure,
    throughput_figure,
)
from nanochat.runlog import read_metrics
from nanochat.sections import SECTIONS
from nanochat.summary import Record, plain_value, standard_error

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
