"""
Is one checkpoint better than another? On the same items, metric by metric.

    python -m scripts.lab.compare --before=mid --after=sft
    python -m scripts.lab.compare --before=base:d4:200 --after=base:d4:400
    python -m scripts.lab.compare --before=hf:openai-community/gpt2 --after=base:d12

Reads   what scripts.base_eval, base_loss and chat_eval recorded of both; scores nothing itself
Writes  the section "Comparison of <before> and <after>", with a verdict for every metric
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanochat import records, report
from nanochat.checkpoint import referred
from nanochat.common import MissingInput, printable
from nanochat.config import settings, start


@dataclass(frozen=True)
class Compare:
    before: str = "mid"
    """A checkpoint, as stage[:tag[:step]], or hf:<model> as scripts.base_eval --hf_path had it."""
    after: str = "sft"
    """The other."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


class Scored(NamedTuple):
    """All that is recorded of a model's scores."""

    name: str
    fingerprint: str
    values: dict[str, Any]
    items: dict[str, Any]
    run_id: str


def main(cfg: Compare) -> None:
    started = time.perf_counter()
    if cfg.before == cfg.after:
        raise ValueError(f"{cfg.before} and {cfg.after} are the same; name two: --before, --after")
    sides = [find(name, cfg.report_dir) for name in (cfg.before, cfg.after)]
    metrics = {
        name: {side.name: side.values[name] for side in sides}
        for name in sides[0].values
        if name in sides[1].values
    }
    if not metrics:
        raise ValueError(
            f"{cfg.before} has {', '.join(sides[0].values)}, {cfg.after} has "
            f"{', '.join(sides[1].values)}: score both on the same tasks"
        )
    table = report.differences(
        metrics, {side.name: side.items for side in sides}, [side.name for side in sides]
    )
    for row in [table["columns"], *table["rows"]]:
        print("  ".join(f"{printable(cell):<24}" for cell in row[:1] + row[2:]))
    verdicts = {row[0]: f"{row[2]} ({row[4]})" for row in table["rows"]}
    records.write_record(
        f"Comparison of {cfg.before} and {cfg.after}",
        settings(cfg),
        verdicts,
        records.Provenance(
            sides[1].run_id, 0, {"before": sides[0].fingerprint, "after": sides[1].fingerprint}
        ),
        records.Cost(time.perf_counter() - started),
        cfg.report_dir,
        tables=[{**table, "title": None}],
    )
    report.update(cfg.report_dir)


def find(name: str, report_dir: str | None) -> Scored:
    """
    The newest value of every metric recorded of a model.

    Raises MissingInput naming the script that scores it.
    """
    if name.startswith("hf:"):
        stage, print_, path = "hf", None, name.removeprefix("hf:")
        maker = f"python -m scripts.base_eval --hf_path={path}"
    else:
        checkpoint = referred(name)
        stage, print_, path = checkpoint.state["stage"], checkpoint.fingerprint, ""
        tag, step = checkpoint.folder.parent.name, checkpoint.step
        maker = (
            f"python -m scripts.base_eval --model_tag={tag} --model_step={step}"
            if stage == "base"
            else f"python -m scripts.chat_eval -i {stage} -g {tag} -s {step}"
        )
    values: dict[str, Any] = {}
    items: dict[str, Any] = {}
    for record in records.read_history(report_dir):
        read = record["provenance"]["inputs"]
        if stage == "hf":
            mine = record["section"] == f"Evaluation of {path}"
            print_ = read["hf"] if mine else print_
        else:
            mine = read.get(stage) == print_
        if mine and is_evaluation(record):
            values |= {k: v for k, v in record["values"].items() if is_score(k, v, record)}
            items |= {report.metric_name(k): v for k, v in record["items"].items()}
            run_id = record["provenance"]["run_id"]
    if not values:
        raise MissingInput(f"nothing is recorded of how {name} scores", maker)
    named = {report.metric_name(key): value for key, value in values.items()}
    return Scored(name, print_ or "", named, items, run_id)


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record scores one model, and trained none."""
    return not record["provenance"]["outputs"] and "before" not in record["provenance"]["inputs"]


def is_score(key: str, value: Any, record: Mapping[str, Any]) -> bool:
    """Whether a value of a record is a metric: an estimate, or bits per byte."""
    return isinstance(value, Mapping) or report.is_metric(record["section"], key, value)


if __name__ == "__main__":
    start(main, Compare(), __doc__)
