"""
Compare two checkpoints, metric by metric, on the same items.

    python -m scripts.lab.compare --before=mid --after=sft
    python -m scripts.lab.compare --before=base:d4:200 --after=base:d4:400
    python -m scripts.lab.compare --before=hf:openai-community/gpt2 --after=base:d12

Reads   records from scripts.base_eval, base_loss and chat_eval for both; evaluates nothing itself
Writes  the section "Comparison of <before> and <after>", with a verdict for every metric
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanochat import records, report, summary
from nanochat.checkpoint import parse_checkpoint_ref
from nanochat.common import MissingInput, printable
from nanochat.config import start


@dataclass(frozen=True)
class Compare:
    before: str = "mid"
    """Checkpoint as stage[:tag[:step]], or hf:<model> as in scripts.base_eval --hf_path."""
    after: str = "sft"
    """Compared with `before`."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


class ScoredRun(NamedTuple):
    """Recorded scores of a model."""

    name: str
    fingerprint: str
    values: dict[str, Any]
    items: dict[str, Any]
    run_id: str


def main(cfg: Compare) -> None:
    started = time.perf_counter()
    if cfg.before == cfg.after:
        raise ValueError(f"{cfg.before} and {cfg.after} are the same; set --before and --after")
    sides = [find_run(name, cfg.report_dir) for name in (cfg.before, cfg.after)]
    before, after = sides
    names = [name for name in before.values if name in after.values]
    if not names:
        raise ValueError(
            f"{cfg.before} has {', '.join(before.values)}, {cfg.after} has "
            f"{', '.join(after.values)}; evaluate both on the same tasks"
        )
    metrics = {name: {side.name: side.values[name] for side in sides} for name in names}
    items = {side.name: side.items for side in sides}
    order = [before.name, after.name]
    table = summary.difference_table(summary.differences(metrics, items, order))
    for row in [table["columns"], *table["rows"]]:
        print("  ".join(f"{printable(cell):<24}" for cell in row[:1] + row[2:]))
    verdicts = {row[0]: f"{row[2]} ({row[4]})" for row in table["rows"]}
    inputs = {"before": before.fingerprint, "after": after.fingerprint}
    provenance = records.Provenance(after.run_id, 0, inputs)
    cost = records.Cost(time.perf_counter() - started)
    section, table["title"] = f"Comparison of {before.name} and {after.name}", None
    report.append_section(section, cfg, verdicts, provenance, cost, tables=[table])


def find_run(name: str, report_dir: str | None) -> ScoredRun:
    """
    Return the newest recorded value of every metric of a model.

    Raises MissingInput with the evaluation command if there is none.
    """
    stage, _, path = name.partition(":")
    fingerprint, run_id = "", ""
    if stage == "hf":
        maker = f"python -m scripts.base_eval --hf_path={path}"
    else:
        checkpoint = parse_checkpoint_ref(name)
        stage, fingerprint = checkpoint.state["stage"], checkpoint.fingerprint
        tag, step = checkpoint.folder.parent.name, checkpoint.step
        maker = f"python -m scripts.chat_eval -i {stage} -g {tag} -s {step}"
        if stage == "base":
            maker = f"python -m scripts.base_eval --model_tag={tag} --model_step={step}"
    values: dict[str, Any] = {}
    items: dict[str, Any] = {}
    for record in records.read_history(report_dir):
        provenance = record["provenance"]
        inputs = provenance["inputs"]
        if stage == "hf" and record["section"] == f"Evaluation of {path}":
            fingerprint = inputs["hf"]
        is_evaluation = not provenance["outputs"] and "before" not in inputs  # of a single model
        if is_evaluation and fingerprint and inputs.get(stage) == fingerprint:
            for key, value in record["values"].items():
                if isinstance(value, Mapping) or summary.is_metric(record["section"], key, value):
                    values[summary.metric_name(record, key)] = value
            items |= {summary.metric_name(record, k): v for k, v in record["items"].items()}
            run_id = provenance["run_id"]
    if not values:
        raise MissingInput(f"no recorded scores for {name}", maker)
    return ScoredRun(name, fingerprint, values, items, run_id)


if __name__ == "__main__":
    start(main, Compare(), __doc__)
