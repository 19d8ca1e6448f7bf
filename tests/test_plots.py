"""Figures of recorded stages are deterministic, small, and show the recorded values."""

import json
import math
import re
import xml.etree.ElementTree as ET

from nanochat.plots import INK, draw_figures
from nanochat.records import estimate

STEPS = [
    {"step": x, "loss": 3 + math.sin(x), "lr": 0.5, "tokens_per_second": 1e6, "grad_norm": 2}
    for x in range(20_000)
]
STEPS.append({"step": 20_000, "val_bpb": 1.2})
POLICY = [
    {"step": 0, "loss": 1.0, "reward": 0.1, "pass_at_1": 0.1, "pass_at_1_se": 0.02},
    {"step": 1, "reward": math.nan, "lr": 0.02},
    {"step": 2, "reward": math.inf, "lr": 0.0},
]
FIGURES = {  # texts that each figure must show
    "results-stages.svg": ["mid", "SFT", "Task"],
    "base-training-training.svg": [
        "Training loss (nats per token)",
        "Validation loss (bits per byte)",
        "Learning rate, fraction of the peak",
        "Tokens per second",
        "Gradient norm before clipping",
    ],
    "chat-rl-training.svg": ["Mean reward of a step", "Held-out pass@1, ± 1 standard error"],
    "base-model-evaluation-core.svg": ["winograd", "copa", "boolq"],
    "search-series.svg": ["Search", "$a$", "b"],
}


def draw(folder):
    """Figures of one record of every kind: file name -> SVG."""
    for name, logged in (("steps", STEPS), ("rl", POLICY)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in logged))
    core = {"winograd": 0.08, "boolq": -0.15, "copa": 0.0}
    core = {name: estimate(value, 10, 0.05) for name, value in core.items()}
    records = [
        {"section": "Chat evaluation mid", "values": {"Task": estimate(0.1, 100, 0.05)}},
        {"section": "Chat evaluation sft", "values": {"Task": estimate(0.5, 100, 0.05)}},
        {"section": "Base training", "metrics": folder / "steps"},
        {"section": "Chat RL", "metrics": folder / "rl"},
        {"section": "Base model evaluation", "values": core},
        {"section": "Search", "series": {"$a$": [[0.01, 1.0], [0.1, math.nan]], "b": [[1, 1]]}},
    ]
    empty = {"values": {}, "items": {}, "settings": {}, "series": {}, "metrics": None}
    draw_figures(folder / "figures", [{**empty, **record} for record in records])
    return {path.name: path.read_text() for path in (folder / "figures").iterdir()}


def test_figures_show_every_metric_and_are_small(tmp_path):
    figures = draw(tmp_path)
    assert figures.keys() == FIGURES.keys()
    for name, svg in figures.items():
        assert set(FIGURES[name]) <= set(re.findall("<text[^>]*>(.*?)</text>", svg))
        assert ET.fromstring(svg).tag.endswith("svg") and len(svg) < 60_000
        assert f'[style*="fill: {INK}"] {{fill: #e6edf3 !important}}' in svg
    assert draw(tmp_path) == figures
    draw_figures(tmp_path / "figures", [])
    assert not list((tmp_path / "figures").iterdir())
