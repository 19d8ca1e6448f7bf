"""
Compare two checkpoints on the same items, two settings trained with several seeds, or all
checkpoints of runs.

    python -m scripts.lab.compare --before=mid --after=sft
    python -m scripts.lab.compare --before=base:d4:200 --after=base:d4:400
    python -m scripts.lab.compare --before=hf:openai-community/gpt2 --after=base:d12
    python -m scripts.lab.compare --before=base:a0,base:a1,base:a2 --after=base:b0,base:b1,base:b2
    python -m scripts.lab.compare --all=base:d4,sft:d4

Reads   records from scripts.base_eval, base_loss and chat_eval for all; evaluates nothing itself.
        With several seeds also the validation bpb in the training log of base models. With --all,
        the checkpoints, which answer the questions of the static suite (nanochat/lab/canaries.py)
Writes  the section "Comparison of <before> and <after>", with a verdict for every metric; with
        --all, the section "Suite"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from nanochat import records, report, stats, summary
from nanochat.checkpoint import (
    Checkpoint,
    find_checkpoint,
    intact_checkpoints,
    load_inference,
    parse_checkpoint_ref,
)
from nanochat.common import MissingInput, fingerprint
from nanochat.config import start
from nanochat.distributed import init_distributed
from nanochat.lab.canaries import open_suite, score_suite
from nanochat.lab.significance import Scores, contrasts, holm_correct, read_items
from nanochat.logger import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Compare:
    before: str = "mid"
    """Checkpoint as stage[:tag[:step]], or hf:<model> as in scripts.base_eval --hf_path; several
    seeds of the same setting are separated by commas."""
    after: str = "sft"
    """Compared with `before`."""
    all: str = ""
    """Runs as stage:tag, separated by commas: scores every saved checkpoint on a fixed suite of
    questions instead. Each is compared with its parent if that is listed, else with the first."""
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
    if cfg.all:
        return compare_all(cfg)
    if cfg.before == cfg.after:
        raise ValueError(f"{cfg.before} and {cfg.after} are the same; set --before and --after")
    refs = [[ref.strip() for ref in side.split(",")] for side in (cfg.before, cfg.after)]
    several = max(map(len, refs)) > 1
    sides = [[find_run(ref, cfg.report_dir, several) for ref in side] for side in refs]
    runs = [run for side in sides for run in side]
    names = [name for name in runs[0].values if all(name in run.values for run in runs)]
    alike = partial(summary.sampled_alike, before=runs[0].items)
    if other := [name for name in names if not all(alike(name, after=run.items) for run in runs)]:
        print(f"not compared, because of other sampling settings: {', '.join(other)}")
    names = [name for name in names if name not in other]
    if not names:
        found = "; ".join(f"{run.name} has {', '.join(run.values)}" for run in runs)
        raise ValueError(f"{found}; evaluate all on the same tasks with the same settings")
    table, verdicts = compare_seeds(names, *sides) if several else compare_items(names, *runs)
    prints = [[run.fingerprint for run in side] for side in sides]
    inputs = {
        name: fingerprint(side) if several else side[0]
        for name, side in zip(("before", "after"), prints, strict=True)
    }
    provenance = records.Provenance(runs[-1].run_id, 0, inputs)
    before, after = (", ".join(run.name for run in side) for side in sides)
    section = f"Comparison of {before} and {after}"
    report.append_section(section, cfg, verdicts, provenance, tables=[table])


def compare_all(cfg: Compare) -> None:
    """Score all checkpoints of runs on the suite, print a table and record it."""
    machine = init_distributed()
    checkpoints = machine.on_main(
        lambda: [each for run in cfg.all.split(",") for each in saved_steps(run.strip())]
    )
    suite = open_suite(checkpoints[0].state["source"].get("dataset"))
    if not suite:
        raise ValueError("all tasks of the suite are final benchmarks: there is nothing to score")
    different = {each.fingerprint: each for each in checkpoints}
    by_task = {
        key: score_suite(*load_inference(each, machine), suite, machine)
        for key, each in different.items()
    }
    scored = {key: [x for one in scores.values() for x in one] for key, scores in by_task.items()}
    runs = [f"{each.state['stage']}:{each.folder.parent.name}" for each in checkpoints]
    names = {c.fingerprint: f"{run}:{c.step}" for run, c in zip(runs, checkpoints, strict=True)}
    values: dict[str, Any] = {}
    series: dict[str, list[list[float]]] = {}
    rows = []
    for run, each in zip(runs, checkpoints, strict=True):
        key = each.fingerprint
        mean = stats.mean(scored[key])
        values[names[key]] = records.estimate(*mean)
        series.setdefault(run, []).append([each.step, mean.value])
        parents = each.state["provenance"]["inputs"].values()
        origin = next((parent for parent in parents if parent in scored), next(iter(scored)))
        change = stats.compare(scored[origin], scored[key])
        row = [run, str(each.step)]
        row += [f"{stats.mean(one).value:.3f}" for one in by_task[key].values()]
        row += [f"{mean.value:.3f} +- {mean.se:.3f}"]
        versus = [f"{change.difference:+.3f} +- {change.se:.3f}", names[origin], change.verdict]
        rows.append([*row, *(["-", "-", "-"] if origin == key else versus)])
    columns = ["Run", "Step", *(task.name for task in suite), "All", "Difference", "From"]
    table = {"title": None, "columns": [*columns, "Verdict"], "rows": rows}
    inputs = {"before": fingerprint(list(scored))}
    provenance = records.Provenance(checkpoints[-1].state["provenance"]["run_id"], 0, inputs)
    cost = records.Cost.so_far(machine)
    curves = series if len(checkpoints) > len(series) else {}  # one point is no curve
    if machine.is_main:
        report.append_section("Suite", cfg, values, provenance, cost, tables=[table], series=curves)
    machine.close()


def saved_steps(run: str) -> list[Checkpoint]:
    """Intact checkpoints of a run, stage[:tag], by step. Raises MissingInput if there are none."""
    stage, _, tag = run.partition(":")
    folder = find_checkpoint(stage, tag or None).folder.parent
    return list(intact_checkpoints(folder))[::-1]


def compare_items(
    names: Sequence[str], before: ScoredRun, after: ScoredRun
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare two checkpoints, item by item where possible. Returns a table and the verdicts."""
    metrics = {n: {side.name: side.values[n] for side in (before, after)} for n in names}
    items = {side.name: side.items for side in (before, after)}
    changes = summary.differences(metrics, items, {after.name: before.name})
    table = summary.difference_table(changes)
    verdicts = {row[0]: f"{row[2]} ({row[4]})" for row in table["rows"]}
    return {**table, "title": None}, verdicts


def compare_seeds(
    names: Sequence[str], before: Sequence[ScoredRun], after: Sequence[ScoredRun]
) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Compare two settings by the spread over their seeds. Returns a table and the verdicts.

    The noise bar is the smallest difference that is significant at 5% (lab.significance).
    """
    found = []
    for name in names:
        runs, n = (*before, *after), len(before)
        values = [float(records.plain_value(run.values[name])) for run in runs]
        tasks = read_items(name, [run.items for run in runs])
        arms = {
            arm: Scores(values[part], [t._replace(scores=t.scores[part]) for t in tasks])
            for arm, part in (("before", slice(n)), ("after", slice(n, None)))
        }
        found += contrasts("", name, arms, "before")
    columns = "Metric|Before|After|Difference|Noise bar|p (Holm)|Verdict".split("|")
    rows = [
        [
            c.metric,
            f"{c.value - c.difference:.4f} ({len(before)} seeds)",
            f"{c.value:.4f} ({len(after)} seeds)",
            f"{c.difference:+.4f}",
            f"{c.bar:.4f}",
            "< 1e-15" if c.adjusted_p < 1e-15 else f"{c.adjusted_p:.2g}",
            c.verdict,
        ]
        for c in holm_correct(found)
    ]
    verdicts = {row[0]: f"{row[3]} ({row[6]}, noise bar {row[4]})" for row in rows}
    return {"title": None, "columns": columns, "rows": rows}, verdicts


def find_run(name: str, report_dir: str | None, with_log: bool) -> ScoredRun:
    """
    Return the newest recorded value of every metric of a model. `with_log`: of a base model, also
    the validation bpb in its training log.

    Raises MissingInput with the evaluation command if there is none.
    """
    stage, _, path = name.partition(":")
    model, run_id = "", ""
    values: dict[str, Any] = {}
    items: dict[str, Any] = {}
    history = records.read_history(report_dir)
    if stage == "hf":
        about = (r for r in history if r["section"] == f"Evaluation of {path}")
        model = "".join([r["provenance"]["inputs"]["hf"] for r in about][-1:])  # newest revision
        maker = f"python -m scripts.base_eval --hf_path={path}"
    else:
        checkpoint = parse_checkpoint_ref(name)
        stage, model = checkpoint.state["stage"], checkpoint.fingerprint
        tag, step = checkpoint.folder.parent.name, checkpoint.step
        maker = f"python -m scripts.chat_eval -i {stage} -g {tag} -s {step}"
        if stage == "base":
            maker = f"python -m scripts.base_eval --model_tag={tag} --model_step={step}"
            log = read_metrics(checkpoint.folder.parent / METRICS_FILE) if with_log else []
            run_id = checkpoint.state["provenance"]["run_id"]
            for entry in log:
                if entry["step"] == step and "val_bpb" in entry:
                    values["val_bpb"] = entry["val_bpb"]
    for record in history:
        provenance = record["provenance"]
        inputs = provenance["inputs"]
        is_evaluation = not provenance["outputs"] and "before" not in inputs  # of a single model
        if is_evaluation and model and inputs.get(stage) == model:
            for key, value in record["values"].items():
                if isinstance(value, Mapping) or summary.is_metric(record["section"], key, value):
                    values[summary.metric_name(record, key)] = value
            items |= {summary.metric_name(record, k): v for k, v in record["items"].items()}
            run_id = provenance["run_id"]
    if not values:
        raise MissingInput(f"no recorded scores for {name}", maker)
    return ScoredRun(name, model, values, items, run_id)


if __name__ == "__main__":
    start(main, Compare(), __doc__)
