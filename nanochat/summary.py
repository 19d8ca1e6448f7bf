"""
Results of a run, collected from the records of its stages.

    records -> collect_scores -> differences, verdict -> top and summary of report.md

Scores on the built-in world are named World: they cannot be compared with published scores.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from nanochat import stats
from nanochat.records import (
    Record,
    plain_value,
    read_clusters,
    read_scores,
    readable_time,
    standard_error,
)

STAGES = {"base": "base", "mid": "mid", "sft": "SFT", "dpo": "DPO", "rl": "RL"}  # names in texts
STAGE_OF = {  # section -> stage that it evaluates
    **dict.fromkeys(("Base model loss", "Base model evaluation"), "base"),
    **{f"Chat evaluation {stage}": stage for stage in STAGES},
}
BASE_METRICS = ("CORE metric", "val bpb")
WORLD_NAMES = {"CORE metric": "World few-shot", "ChatCORE": "World chat"}
FIRST, LAST = ("CORE", "World few-shot"), ("ChatCORE", "World chat")  # rows of the tables

# ---- Scores of each stage -----------------------------------------------------------------------


class Scores(NamedTuple):
    """Scores of all stages, or of the two sides of a comparison."""

    values: Mapping[str, Mapping[str, Any]]
    """Metric -> stage -> value."""
    items: Mapping[str, Mapping[str, Any]]
    """Stage -> metric -> recorded item scores."""


def shown_name(record: Record, key: str) -> str:
    """Name of a recorded value in the report."""
    parts = weights_of(key, record["items"])
    is_world = all(part.lower().startswith("world") for part in parts)
    for name, shown in WORLD_NAMES.items() if is_world else ():
        key = key.replace(name, shown)
    return key


def metric_name(record: Record, key: str) -> str:
    """Name of a recorded value in the tables of scores."""
    return shown_name(record, key).replace("CORE metric", "CORE")


def collect_scores(written: Sequence[Record]) -> Scores:
    """
    Collect CORE, val bpb and all chat scores: CORE first, ChatCORE last, the rest by name. Of the
    scores after other turns, only the mean.
    """
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    items: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for record in written:
        if stage := STAGE_OF.get(record["section"]):
            is_chat = record["section"].startswith("Chat")
            items[stage] |= {metric_name(record, k): each for k, each in record["items"].items()}
            for key, value in record["values"].items():
                is_part = key.endswith(" turns") and "weights" not in record["items"].get(key, {})
                if key in BASE_METRICS or (is_chat and isinstance(value, Mapping) and not is_part):
                    found[metric_name(record, key)][stage] = value
    order = sorted(found, key=lambda name: (name not in FIRST, name in LAST, name))
    return Scores({name: found[name] for name in order}, items)


def score_table(scores: Scores, show: Callable[[Any], str]) -> dict[str, Any]:
    """Table of all scores by stage. DPO has a column only if it was evaluated."""
    stages = [s for s in STAGES if s != "dpo" or any(s in by for by in scores.values.values())]
    rows = [["Metric", *(stage.upper() for stage in stages)]]
    for name, by in scores.values.items():
        rows.append([name, *(show(by[stage]) if stage in by else "-" for stage in stages)])
    columns, *rows = [[f"{name:<15}", *(f"{x:<8}" for x in cells)] for name, *cells in rows]
    return {"columns": columns, "rows": rows}


# ---- Differences between stages ------------------------------------------------------------------


class Difference(NamedTuple):
    """Change of a metric between two stages."""

    metric: str
    stages: str
    change: float
    se: float
    """Standard error; NaN if unknown."""
    verdict: str
    """better, worse, within noise, or noise unknown."""
    items: stats.Comparison | None
    """Comparison item by item, if both were evaluated on the same items."""


def parent_stages(written: Sequence[Record]) -> dict[str, str]:
    """Stage -> the stage that it was trained from; by default the one before."""
    parents = {stage: source for source, stage in pairwise(STAGES)}
    for record in written:
        made, used = (record["provenance"][name] for name in ("outputs", "inputs"))
        parents |= {to: by for by, to in combinations(STAGES, 2) if by in used and to in made}
    return parents


def differences(scores: Scores, parents: Mapping[str, str]) -> list[Difference]:
    """
    Differences of each metric between a stage and the nearest of its `parents` that has it.

    Stages evaluated on the same items are compared item by item; otherwise the standard error
    treats them as independent measurements. Scores with other sampling settings are not compared.
    """
    changes = []
    for name, by in scores.values.items():
        for after, before in parents.items():
            while before not in by and before in parents:
                before = parents[before]
            if before not in by or after not in by:
                continue
            old, new = scores.items[before], scores.items[after]
            if not sampled_alike(name, old, new):
                continue
            change = float(plain_value(by[after])) - float(plain_value(by[before]))
            se = math.hypot(standard_error(by[before]), standard_error(by[after]))
            if same := compare_items(name, old, new):
                change, se = same.difference, same.se
            found = "noise unknown"
            if math.isfinite(se):
                gain = -change if name == "val bpb" else change
                found = stats.verdict(gain, se, same.p if same else 0.0)
            stages = " to ".join(STAGES.get(stage, stage) for stage in (before, after))
            changes.append(Difference(name, stages, change, se, found, same))
    return changes


def weights_of(name: str, items: Record) -> Mapping[str, float]:
    """Weights of the tasks whose weighted sum a metric is; its own name for a single task."""
    return items.get(name, {}).get("weights", {name: 1.0})


def sampled_alike(name: str, before: Record, after: Record) -> bool:
    """Whether a metric was scored with the same sampling settings."""
    parts = weights_of(name, after)
    return all(before.get(x, {}).get("how") == after.get(x, {}).get("how") for x in parts)


def compare_items(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric item by item; None unless both stages have scores of the same items."""
    weights = weights_of(name, after)
    if weights != weights_of(name, before) or not weights.keys() <= before.keys() & after.keys():
        return None
    pairs = [(before[part], after[part]) for part in weights]
    if any(old["of"] != new["of"] for old, new in pairs):
        return None
    parts = [stats.compare(read_scores(a), read_scores(b), read_clusters(b)) for a, b in pairs]
    return stats.combine(parts, list(weights.values()))


def difference_table(changes: Sequence[Difference]) -> dict[str, Any]:
    """Table of differences."""
    rows = []
    for each in changes:
        error, counts = "-", "-"
        if same := each.items:
            counts = f"{same.won:,} won, {same.lost:,} lost of {same.n:,}"
        if math.isfinite(each.se):
            error, counts = f"{each.se:.4f}", counts + (f" (p = {same.p:.2g})" if same else "")
        rows.append([each.metric, each.stages, f"{each.change:+.4f}", error, each.verdict, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


# ---- Cost, verdict and consistency ---------------------------------------------------------------


def cost_table(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of the time and cost of each stage. hourly_rate: dollars for the whole machine."""
    parts = []
    for record in written:
        cost = record["cost"]
        devices = f"{cost['devices']}x {cost['device']}"
        parts.append((record["section"], cost["wall_seconds"], devices))
    parts.append(("Total", sum(seconds for _, seconds, _ in parts), ""))
    rows = [
        [name, readable_time(seconds), devices, f"${seconds / 3600 * hourly_rate:.2f}"]
        for name, seconds, devices in parts
    ]
    return {"title": "Cost", "columns": ["Section", "Wall clock", "Devices", "Cost"], "rows": rows}


def verdict(
    written: Sequence[Record], scores: Scores, changes: Sequence[Difference], spent: str
) -> str:
    """
    The result of the run in a few sentences: model, machine, time and cost; best scores; what each
    stage changed; what a stage lost. spent: time, machine and cost.
    """
    model = "The stages below"
    for record in written:
        depth, values = record["settings"].get("depth"), record["values"]
        if record["section"] == "Base model training" and depth:
            size, tokens = values["Number of parameters"], values["Number of training tokens"]
            model = f"A model of depth {depth} ({size:,} parameters, {tokens:,} pretraining tokens)"
    sentences = [f"{model}: {spent}."]
    best = []
    for name, by in scores.values.items():
        if name in (*FIRST, *LAST, "val bpb"):
            highest = max if name != "val bpb" else min
            stage = highest(by, key=lambda stage: float(plain_value(by[stage])))
            best.append(f"{name} {show_score(by[stage])} ({STAGES[stage]})")
    if best:
        sentences.append(f"Best scores: {', '.join(best)}.")
    means = [each for each in changes if each.metric in LAST]
    if means:
        steps = ", ".join(f"{show_change(each)} ({each.verdict})" for each in means)
        sentences.append(f"{means[0].metric} changed by {steps}.")
    lost = [each for each in changes if each.verdict == "worse" and each not in means]
    if len(changes) > len(means):
        named = ", ".join(f"{each.metric} {show_change(each)}" for each in lost) or "no task"
        sentences.append(f"Worse by more than 2 standard errors: {named}.")
    if changes:
        sentences.append(
            "± is one standard error over questions; other seeds are not included. "
            "Means over tasks are rescaled so that 0 is chance."
        )
    return " ".join(sentences)


def show_score(value: Any) -> str:
    """A score with its standard error."""
    return f"{float(plain_value(value)):.3f}{show_error(standard_error(value))}"


def show_change(each: Difference) -> str:
    """A difference with sign, standard error and stages."""
    return f"{each.change:+.3f}{show_error(each.se)} from {each.stages}"


def show_error(se: float) -> str:
    """A standard error; empty if it is unknown."""
    return f" ± {se:.3f}" if math.isfinite(se) else ""


def find_faults(written: Sequence[Record]) -> list[str]:
    """
    Stages whose input is not the recorded output of the stage that produced it, and code of which
    sections were made with different versions. Sections that evaluate or compare models from
    outside the run are ignored.
    """
    own = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    faults = []
    for record in own:
        for name, used in record["provenance"]["inputs"].items():
            others = [r for r in own if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in others}
            if made and used not in made:
                makers = " and ".join(f"{by} produced {each}" for each, by in made.items())
                faults.append(f"{record['section']} used {name} {used}, but {makers}.")
    versions = defaultdict[str, set[str]](set)
    for path, digest in (item for record in own for item in record["code"].items()):
        versions[path].add(digest)
    if changed := sorted(path for path, digests in versions.items() if len(digests) > 1):
        faults.append(f"Sections were made by different versions of {', '.join(changed)}.")
    return faults
