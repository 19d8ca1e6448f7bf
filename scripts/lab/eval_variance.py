"""
Show how much scores vary when the same model answers the same questions repeatedly.

    python -m scripts.chat_eval -i sft -t 1 -n 5     # five sampled answers per question
    python -m scripts.lab.eval_variance --checkpoints="sft|rl:d4:50"

This is sampling noise only: weights and items stay the same. The classes, in accuracy points, are
those of the Olmo 3 tables (post-training chapter of the RLHF book).

Reads   records of scripts.chat_eval with several sampled answers per question
Writes  the section "Evaluation variance", with the num_samples that each task needs in
        scripts.chat_eval
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nanochat import report
from nanochat.checkpoint import find_checkpoint
from nanochat.config import start
from nanochat.records import read_scores
from scripts.lab.compare import recorded_scores

SECTION = "Evaluation variance"
STABLE, VERY_STABLE = 0.006, 0.003  # upper bounds of the classes
MAX_REPEATS = 16
SHARE = 0.5  # target ratio of sampling error to item error


@dataclass(frozen=True)
class EvalVariance:
    checkpoints: str = "sft|rl"
    """Checkpoints as stage[:tag[:step]], separated by |."""


def main(cfg: EvalVariance) -> None:
    models = {name: find_checkpoint(name) for name in cfg.checkpoints.split("|")}
    scores = [recorded_scores(model, sampled=True) for model in models.values()]
    rows = []
    for task, first in scores[0].values.items():
        each: list[Any] = [recorded.values.get(task) for recorded in scores]
        if not all(isinstance(x, dict) and "k" in x for x in each):
            continue
        rates = [read_scores(recorded.items[task]) for recorded in scores]
        stds = [sampling_std(p, x["k"]) for p, x in zip(rates, each, strict=True)]
        squares = [x["se"] ** 2 - std**2 / x["k"] for x, std in zip(each, stds, strict=True)]
        std, item_se = fmean(stds), math.sqrt(max(0.0, fmean(squares)))
        points = [f"{100 * x:.2f}" for x in (std, *stds, item_se)]
        counts = [first["n"], first["k"]]
        rows.append([classify(std), task, *counts, *points, needed_repeats(std, item_se)])
    if not rows:
        raise ValueError(
            f"{cfg.checkpoints} share no task with several sampled answers per question; evaluate "
            "each with scripts.chat_eval --temperature=1 --num_samples=5"
        )
    columns = ["Class", "Task", "Items", "Runs", "Std", *models, "Item SE", "Repeats"]
    table = {"title": f"{SECTION} (points)", "columns": columns, "rows": rows}
    inputs = {name: model.fingerprint for name, model in models.items()}
    report.append_section(SECTION, cfg, {}, inputs, tables=[table])


def sampling_std(rates: Sequence[float], k: int) -> float:
    """
    Standard deviation of a score between runs with one answer per item. rates: the share of right
    answers to each item, of `k` sampled ones.
    """
    variances = [p * (1 - p) * k / (k - 1) for p in rates]  # of an answer, unbiased
    return math.sqrt(fmean(variances) / len(rates))


def classify(std: float) -> str:
    """Variance class of a standard deviation between runs: high, stable or very stable."""
    return "very stable" if std < VERY_STABLE else "stable" if std < STABLE else "high"


def needed_repeats(std: float, item_se: float) -> int:
    """
    Answers per item, at most MAX_REPEATS, to keep the sampling error within SHARE times the item
    error. Holds for any number of items, since both errors shrink at the same rate.
    """
    if std == 0 or item_se == 0:
        return MAX_REPEATS if std else 1
    return min(MAX_REPEATS, max(1, math.ceil((std / item_se / SHARE) ** 2)))


if __name__ == "__main__":
    start(main, EvalVariance(), __doc__)
