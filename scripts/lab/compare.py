"""
Compare two checkpoints on the same items, two settings trained with several seeds, or all
checkpoints of runs.

    python -m scripts.lab.compare --before=mid --after=sft
    python -m scripts.lab.compare --before=base:d4:200 --after=base:d4:400
    python -m scripts.lab.compare --before=base:a0,base:a1,base:a2 --after=base:b0,base:b1,base:b2
    python -m scripts.lab.compare --all=base:d4,sft:d4

Reads   records from scripts.base_eval and chat_eval and, for several seeds, the validation bpb in
        the training log of base models; evaluates nothing itself. With --all, the checkpoints,
        which answer the questions of the static suite (nanochat/lab/canaries.py)
Writes  the section "Comparison of <before> and <after>", with a verdict for every metric that all
        have, of the same items; with --all, the section "Suite"
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanochat import records, report, stats
from nanochat.checkpoint import Checkpoint, find_checkpoint, intact_checkpoints, load_inference
from nanochat.common import MissingInput, fingerprint
from nanochat.config import start
from nanochat.dist import init_dist
from nanochat.lab.canaries import open_suite, score_suite
from nanochat.lab.significance import CELLS, Recorded, contrasts, holm
from nanochat.records import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Compare:
    before: str = "mid"
    """Checkpoint as stage[:tag[:step]]; several seeds of the same setting are separated by
    commas."""
    after: str = "sft"
    """Compared with `before`."""
    all: str = ""
    """Runs as stage:tag, separated by commas: scores every saved checkpoint on a fixed suite of
    questions instead. Each is compared with the first."""

    def __post_init__(self) -> None:
        if self.before == self.after:
            raise ValueError(f"{self.before} is compared with itself; set --before and --after")


def main(cfg: Compare) -> None:
    records.require_writable()
    if cfg.all:
        return compare_all(cfg)
    sides = {
        side: sorted((find_checkpoint(ref.strip()) for ref in side.split(",")), key=seed_of)
        for side in (cfg.before, cfg.after)
    }
    runs = {side: [recorded_scores(c) for c in each] for side, each in sides.items()}
    first, *others = [run for side in runs.values() for run in side]
    names = [name for name in first.values if all(is_shared(name, first, run) for run in others)]
    if len({validation_text(each) for side in sides.values() for each in side}) > 1:
        names = [name for name in names if "bpb" not in name]
    if len(others) == 1:
        stages = cfg.before, cfg.after
        found = {name: report.compare_items(name, first.items, others[0].items) for name in names}
        changes = [report.Difference(name, *stages, each) for name, each in found.items() if each]
        names, table = [each.metric for each in changes], report.difference_table(changes)
    else:
        before, after = ([*map(seed_of, side)] for side in sides.values())
        paired = before == after and len({*before}) == len(before)
        found = holm([c for name in names for c in contrasts("", name, runs, paired)])
        rows = [[c.metric, *c.cells()] for c in found]
        title = f"Differences, {'' if paired else 'not '}paired by seed"
        table = {"title": title, "columns": ["Metric", *CELLS], "rows": rows}
    if left_out := first.values.keys() - names:
        print(f"not compared, without the same items and settings: {', '.join(left_out)}")
    if not names:
        raise ValueError(
            f"{cfg.before} and {cfg.after} share no score: evaluate all on the same tasks with the "
            "same settings"
        )
    compared = [each.fingerprint for side in sides.values() for each in side]
    inputs = {"before": fingerprint(compared)}
    section = f"Comparison of {cfg.before} and {cfg.after}"
    report.append_section(section, cfg, {}, inputs, tables=[table])


def seed_of(checkpoint: Checkpoint) -> int:
    """The seed of the run that saved a checkpoint."""
    return checkpoint.state["provenance"]["seed"]


def validation_text(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What determines the packed rows of text that a run validates on."""
    inputs, flags = checkpoint.state["provenance"]["inputs"], checkpoint.state.get("settings", {})
    length = checkpoint.state["model"]["max_seq_len"]
    return inputs.get("data"), inputs.get("tokenizer"), length, flags.get("eval_tokens")


def is_shared(name: str, one: Recorded, other: Recorded) -> bool:
    """Whether both runs have a metric, of the same items and sampling settings."""
    parts, others = (report.weights_of(name, each.items) for each in (one, other))
    pairs = [(one.items.get(part, {}), other.items.get(part, {})) for part in parts]
    alike = all(a.get(key) == b.get(key) for a, b in pairs for key in ("of", "how"))
    return name in other.values and parts == others and alike


def recorded_scores(checkpoint: Checkpoint, sampled: bool = False) -> Recorded:
    """
    The newest recorded value of every metric of a model; for a base model, also the validation bpb
    in its training log. If a task was scored by greedy and by sampled answers, the latter count
    only if `sampled`.

    Raises MissingInput with the evaluation command if there is none.
    """
    stage, tag, step = checkpoint.state["stage"], checkpoint.folder.parent.name, checkpoint.step
    found, items = {}, {}
    for entry in read_metrics(checkpoint.folder.parent / METRICS_FILE) if stage == "base" else []:
        if entry["step"] == step and "val_bpb" in entry:
            found["val_bpb"] = entry["val_bpb"]
    history = sorted(records.read_history(), key=is_sampled, reverse=not sampled)
    for record in history:
        inputs = record["provenance"]["inputs"]
        is_evaluation = not record["provenance"]["outputs"] and "before" not in inputs
        if is_evaluation and inputs.get(stage) == checkpoint.fingerprint:
            for key, value in record["values"].items():
                if isinstance(value, Mapping):
                    found[key] = value
            items |= record["items"]
    if not found:
        maker = f"python -m scripts.chat_eval -i {stage} -g {tag} -s {step}"
        raise MissingInput(f"no recorded scores for {stage}:{tag}:{step}", maker)
    return Recorded(found, items)


def is_sampled(record: records.Record) -> bool:
    """Whether a record is an evaluation of sampled answers."""
    return record["settings"].get("temperature", 0) > 0


def compare_all(cfg: Compare) -> None:
    """Score all checkpoints of runs on the suite, print a table and record it."""
    dist = init_dist()
    checkpoints = dist.on_main(
        lambda: [each for run in cfg.all.split(",") for each in saved_steps(run.strip())]
    )
    suite = open_suite(checkpoints[0].state["source"].get("dataset"))
    first, rows = [], []
    for each in checkpoints:
        run = f"{each.state['stage']}:{each.folder.parent.name}"
        by_task = score_suite(*load_inference(each, dist), suite, dist)
        scores = sum(by_task.values(), [])
        first, mean = first or scores, stats.mean(scores)
        change = stats.compare(first, scores)
        versus = [f"{change.difference:+.3f}{report.show_error(change.se)}", change.verdict]
        tasks = [f"{stats.mean(task).value:.3f}" for task in by_task.values()]
        rows.append(
            [run, str(each.step), *tasks, f"{mean.value:.3f}{report.show_error(mean.se)}", *versus]
        )
    columns = ["Run", "Step", *(task.name for task in suite), "All", "From the first", "Verdict"]
    table = {"title": "Accuracy", "columns": columns, "rows": rows}
    inputs = {"before": fingerprint([each.fingerprint for each in checkpoints])}
    if dist.is_main:
        report.append_section("Suite", cfg, {}, inputs, records.Cost.so_far(dist), tables=[table])
    dist.close()


def saved_steps(run: str) -> list[Checkpoint]:
    """Intact checkpoints of a run, stage[:tag], by step. Raises MissingInput if there are none."""
    folder = find_checkpoint(run).folder.parent
    return list(intact_checkpoints(folder))[::-1]


if __name__ == "__main__":
    start(main, Compare(), __doc__)
