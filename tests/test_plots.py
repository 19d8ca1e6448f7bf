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
EVALS = [{"step": 20 * n, "val_bpb": 1.2, "core_metric": 0.1} for n in range(100)]
POLICY = [
    {"step": 0, "loss": 1.0, "reward": 0.1, "pass_at_1": 0.1, "pass_at_1_se": 0.02},
    {"step": 1, "reward": math.nan, "lr": 0.02},
    {"step": 2, "reward": math.inf, "lr": 0.0},
]
TASKS = [f"Task {n}" for n in range(6)]
CORE = {"winograd": 0.08, "boolq": -0.15, "copa": 0.0, "CORE metric": 0.2}
SEARCH = {"$a$": [[0.01, 1.0], [0.1, math.nan], [1, 0.5]], "b": [[0.01, 1.0]]}
# texts that each figure must show
FIGURES = {
    "results-stages.svg": ["mid", "SFT", *TASKS],
    "base-training-training.svg": [
        "Training loss (nats per token)",
        "Validation loss (bits per byte)",
        "Learning rate, fraction of the peak",
        "Tokens per second",
        "Gradient norm before clipping",
    ],
    "chat-rl-training.svg": [
        "Mean reward of a step",
        "Held-out pass@1, ± 1 standard error",
        "Learning rate, fraction of the peak",
    ],
    "base-model-evaluation-core.svg": ["winograd", "copa", "boolq"],
    "search-series.svg": ["Search", "$a$", "b"],
}


def draw(folder, se=0.05, entries=(*STEPS, *EVALS)):
    """Figures of one record of every kind: file name -> SVG."""
    for name, logged in (("steps", entries), ("rl", POLICY)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in logged))
    scores = {stage: estimate(value, 100, se) for stage, value in (("mid", 0.1), ("sft", 0.5))}
    records = [
        {"section": f"Chat evaluation {stage}", "values": dict.fromkeys(TASKS, score)}
        for stage, score in scores.items()
    ]
    core = {name: estimate(value, 10, se) for name, value in CORE.items()}
    records += [
        {"section": "Base training", "metrics": folder / "steps"},
        {"section": "Chat RL", "metrics": folder / "rl"},
        {"section": "Base model evaluation", "values": core},
        {"section": "Search", "series": SEARCH},
    ]
    empty = {"values": {}, "items": {}, "settings": {}, "series": {}, "metrics": None}
    draw_figures(folder / "figures", [{**empty, **record} for record in records])
    return {path.name: path.read_text() for path in (folder / "figures").iterdir()}


def texts(svg):
    return re.findall("<text[^>]*>(.*?)</text>", svg)


def test_figures_show_every_metric_and_are_small(tmp_path):
    figures = draw(tmp_path)
    assert figures.keys() == FIGURES.keys()
    for name, svg in figures.items():
        assert set(FIGURES[name]) <= set(texts(svg)), texts(svg)
        assert ET.fromstring(svg).tag.endswith("svg") and len(svg) < 60_000
        assert not re.search(r"20\d\d-\d\d-\d\d", svg), "the SVG must not contain a date"
        assert "fill: #ffffff" not in svg and f"fill: {INK}" in svg.split("</style>", 1)[1]
        assert f'[style*="fill: {INK}"] {{fill: #e6edf3 !important}}' in svg


def test_figures_depend_on_values_and_errors_only(tmp_path):
    figures = draw(tmp_path)
    assert draw(tmp_path) == figures
    changed = draw(tmp_path, se=0.01, entries=EVALS)
    same = {name for name, svg in figures.items() if changed[name] == svg}
    assert same == {"chat-rl-training.svg", "search-series.svg"}
    draw_figures(tmp_path / "figures", [])
    assert not list((tmp_path / "figures").iterdir())
