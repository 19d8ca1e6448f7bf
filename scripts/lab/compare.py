"""
Compare two checkpoints on the same items, two settings trained with several seeds, or all
checkpoints of runs.

    python -m scripts.lab.compare --before=mid --after=sft
    python -m scripts.lab.compare --before=base:d4:200 --after=base:d4:400
    python -m scripts.lab.compare --before=base:a0,base:a1,base:a2 --after=base:b0,base:b1,base:b2
    python -m scripts.lab.compare --all=base:d4,sft:d4

Reads   records from scripts.base_eval, base_loss and chat_eval, and the validation bpb in the
        training log of base models; evaluates nothing itself. With --all, the checkpoints, which
        answer the questions of the static suite (nanochat/lab/canaries.py)
Writes  the section "Comparison of <before> and <after>", with a verdict for every metric; with
        --all, the section "Suite"
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
from nanochat.dist import init_dist
from nanochat.lab.canaries import open_suite, score_suite
from nanochat.lab.significance import CELLS, Recorded, contrasts, holm
from nanochat.logger import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Compare:
    before: str = "mid"
    """Checkpoint as stage[:tag[:step]]; several seeds of the same setting are separated by
    commas."""
    after: str = "sft"
    """Compared with `before`."""
    all: str = ""
    """Runs as stage:tag, separated by commas: scores every saved checkpoint on a fixed suite of
    questions instead. Each is compared with its parent if that is listed before, else with the
    first."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""

    def __post_init__(self) -> None:
        if self.before == self.after:
            raise ValueError(f"{self.before} is compared with itself; set --before and --after")


def main(cfg: Compare) -> None:
    if cfg.all:
        return compare_all(cfg)
    sides = {
        side: [parse_checkpoint_ref(ref.strip()) for ref in side.split(",")]
        for side in (cfg.before, cfg.after)
    }
    runs = {
        side: [recorded_scores(c, cfg.report_dir) for c in each] for side, each in sides.items()
    }
    first, *others = [run for side in runs.values() for run in side]
    names = [
        name
        for name in first.values
        if all(
            name in run.values and summary.sampled_alike(name, first.items, run.items)
            for run in others
        )
    ]
    if left_out := first.values.keys() - names:
        print(f"not compared, missing or with other sampling settings: {', '.join(left_out)}")
    if not names:
        found = "; ".join(", ".join(run.values) for run in (first, *others))
        raise ValueError(
            f"they have {found}: evaluate all on the same tasks with the same settings"
        )
    if len(others) == 1:
        values = {name: {side: run.values[name] for side, [run] in runs.items()} for name in names}
        items = {side: run.items for side, [run] in runs.items()}
        scores = summary.Scores(values, items)
        changes = summary.differences(scores, {cfg.after: cfg.before})
        table = {**summary.difference_table(changes), "title": None}
        verdicts = {row[0]: f"{row[2]} ({row[4]})" for row in table["rows"]}
    else:
        found = holm([c for name in names for c in contrasts("", name, runs)])
        rows = [[c.metric, *c.cells()] for c in found]
        table = {"title": None, "columns": ["Metric", *CELLS], "rows": rows}
        verdicts = {row[0]: f"{row[3]} ({row[6]}, noise bar {row[4]})" for row in rows}
    prints = [fingerprint([each.fingerprint for each in side]) for side in sides.values()]
    inputs: dict[str, str] = dict(zip(("before", "after"), prints, strict=True))
    origin = records.Provenance(sides[cfg.after][0].state["provenance"]["run_id"], 0, inputs)
    section = f"Comparison of {cfg.before} and {cfg.after}"
    report.append_section(section, cfg, verdicts, origin, tables=[table])


def recorded_scores(checkpoint: Checkpoint, report_dir: str | None) -> Recorded:
    """
    The newest recorded value of every metric of a model; for a base model, also the validation bpb
    in its training log.

    Raises MissingInput with the evaluation command if there is none.
    """
    stage, tag, step = checkpoint.state["stage"], checkpoint.folder.parent.name, checkpoint.step
    found = Recorded({}, {})
    for entry in read_metrics(checkpoint.folder.parent / METRICS_FILE) if stage == "base" else []:
        if entry["step"] == step and "val_bpb" in entry:
            found = Recorded({"val_bpb": entry["val_bpb"]}, {})
    for record in records.read_history(report_dir):
        provenance, values = record["provenance"], record["values"]
        is_evaluation = not provenance["outputs"] and "before" not in provenance["inputs"]
        if is_evaluation and provenance["inputs"].get(stage) == checkpoint.fingerprint:
            scores = {
                summary.metric_name(record, key): value
                for key, value in values.items()
                if isinstance(value, Mapping) or key in summary.BASE_METRICS
            }
            items = {
                summary.metric_name(record, key): each for key, each in record["items"].items()
            }
            found = Recorded(found.values | scores, found.items | items)
    if not found.values:
        maker = f"python -m scripts.chat_eval -i {stage} -g {tag} -s {step}"
        raise MissingInput(f"no recorded scores for {stage}:{tag}:{step}", maker)
    return found


def compare_all(cfg: Compare) -> None:
    """Score all checkpoints of runs on the suite, print a table and record it."""
    dist = init_dist()
    checkpoints = dist.on_main(
        lambda: [each for run in cfg.all.split(",") for each in saved_steps(run.strip())]
    )
    suite = open_suite(checkpoints[0].state["source"].get("dataset"))
    if not suite:
        raise ValueError("all tasks of the suite are final benchmarks: there is nothing to score")
    names, scored, values, rows = {}, {}, {}, []  # names and scores by fingerprint
    for each in checkpoints:
        key, run = each.fingerprint, f"{each.state['stage']}:{each.folder.parent.name}"
        by_task = score_suite(*load_inference(each, dist), suite, dist)
        names[key] = f"{run}:{each.step}"
        scored[key] = [score for scores in by_task.values() for score in scores]
        mean = stats.mean(scored[key])
        values[names[key]] = records.estimate(*mean)
        parents = [p for p in each.state["provenance"]["inputs"].values() if p in scored]
        origin = [*parents, *scored][0]
        change = stats.compare(scored[origin], scored[key])
        versus = [f"{change.difference:+.3f} +- {change.se:.3f}", names[origin], change.verdict]
        tasks = [f"{stats.mean(scores).value:.3f}" for scores in by_task.values()]
        row = [run, str(each.step), *tasks, f"{mean.value:.3f} +- {mean.se:.3f}"]
        rows.append([*row, *(versus if origin != key else "---")])
    columns = ["Run", "Step", *(task.name for task in suite), "All", "Difference", "From"]
    table = {"title": None, "columns": [*columns, "Verdict"], "rows": rows}
    run_id = checkpoints[-1].state["provenance"]["run_id"]
    origin = records.Provenance(run_id, 0, {"before": fingerprint(list(scored))})
    if dist.is_main:
        cost = records.Cost.so_far(dist)
        report.append_section("Suite", cfg, values, origin, cost, tables=[table])
    dist.close()


def saved_steps(run: str) -> list[Checkpoint]:
    """Intact checkpoints of a run, stage[:tag], by step. Raises MissingInput if there are none."""
    stage, _, tag = run.partition(":")
    folder = find_checkpoint(stage, tag or None).folder.parent
    return list(intact_checkpoints(folder))[::-1]


if __name__ == "__main__":
    start(main, Compare(), __doc__)
