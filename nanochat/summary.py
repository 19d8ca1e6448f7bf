"""
Results of a run, collected from the records of its stages.

    records -> collect_scores -> differences, verdict -> top and summary of report.md
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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
FIRST, LAST = ("CORE", "World few-shot"), ("ChatCORE", "World chat")  # rows of the tables
BASE_METRICS = ("CORE metric", "World few-shot", "val bpb")

# ---- Scores of each stage ------------------------------------------------------------------------


class Scores(NamedTuple):
    """Scores of all stages, or of the two sides of a comparison."""

    values: Mapping[str, Mapping[str, Any]]
    """Metric -> stage -> value."""
    items: Mapping[str, Mapping[str, Any]]
    """Stage -> metric -> recorded item scores."""


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
            items[stage] |= record["items"]
            for key, value in record["values"].items():
                is_shown = not key.endswith(" turns") or key.startswith(LAST)
                if key in BASE_METRICS or (is_chat and isinstance(value, Mapping) and is_shown):
                    found["CORE" if key == "CORE metric" else key][stage] = value
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
    change: stats.Comparison
    """Comparison item by item."""


def parent_stages(written: Sequence[Record]) -> dict[str, str]:
    """Stage -> the stage that its training started from, as recorded."""
    parents = {}
    for record in written:
        made, used = (record["provenance"][name] for name in ("outputs", "inputs"))
        parents |= {to: by for to in STAGES if to in made for by in STAGES if by in used}
    return parents


def differences(scores: Scores, parents: Mapping[str, str]) -> list[Difference]:
    """
    Differences of each metric between a stage and the nearest of its `parents` that has it, if both
    were evaluated on the same items with the same sampling settings.
    """
    changes = []
    for name, by in scores.values.items():
        for after, before in parents.items():
            for _ in STAGES:  # bounded: records of several runs may form a cycle
                before = before if before in by else parents.get(before, before)
            if {before, after} <= by.keys() and before != after:
                change = compare_items(name, scores.items[before], scores.items[after])
                stages = " to ".join(STAGES.get(stage, stage) for stage in (before, after))
                changes += [Difference(name, stages, change)] if change else []
    return changes


def weights_of(name: str, items: Record) -> Mapping[str, float]:
    """Weights of the tasks whose weighted sum a metric is; its own name for a single task."""
    return items.get(name, {}).get("weights", {name: 1.0})


def compare_items(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric item by item; None unless the items and sampling settings are the same."""
    weights = weights_of(name, after)
    if weights != weights_of(name, before) or not weights.keys() <= before.keys() & after.keys():
        return None
    pairs = [(before[part], after[part]) for part in weights]
    if any(old.get(key) != new.get(key) for old, new in pairs for key in ("of", "how")):
        return None
    parts = [stats.compare(read_scores(a), read_scores(b), read_clusters(b)) for a, b in pairs]
    return stats.combine(parts, list(weights.values()))


def difference_table(changes: Sequence[Difference]) -> dict[str, Any]:
    """Table of differences."""
    rows = []
    for metric, stages, change in changes:
        error = f"{change.se:.4f}" if math.isfinite(change.se) else "-"
        counts = f"{change.won:,} won, {change.lost:,} lost of {change.n:,}"
        rows.append([metric, stages, f"{change.difference:+.4f}", error, change.verdict, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


# ---- Cost, verdict and consistency ---------------------------------------------------------------


def cost_table(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of the time and cost of each stage. hourly_rate: dollars for the whole machine."""
    costs = [(record["section"], record["cost"]) for record in written]
    rows = [
        [name, each["wall_seconds"], f"{each['devices']}x {each['device']}"] for name, each in costs
    ]
    rows.append(["Total", sum(row[1] for row in rows), ""])
    rows = [[a, readable_time(t), b, f"${t / 3600 * hourly_rate:.2f}"] for a, t, b in rows]
    return {"title": "Cost", "columns": ["Section", "Wall clock", "Devices", "Cost"], "rows": rows}


def verdict(
    written: Sequence[Record], scores: Scores, changes: Sequence[Difference], spent: str
) -> str:
    """
    The result of the run in a few sentences: model, machine, time and cost; best scores; changes of
    the mean over tasks, and tasks that became worse. spent: time, machine and cost.
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
            stage = max(by, key=lambda stage: float(plain_value(by[stage])))
            best.append(f"{name} {show_score(by[stage])} ({STAGES[stage]})")
    if best:
        sentences.append(f"Best scores: {', '.join(best)}.")
    found = [
        f"{name} {change.difference:+.3f}{show_error(change.se)} from {stages} ({change.verdict})"
        for name, stages, change in changes
        if name in LAST or change.verdict == "worse"
    ]
    if changes:
        sentences.append(
            f"Changes of the mean, and tasks that became worse: {', '.join(found) or 'none'}. "
            "± is one standard error over questions; other seeds are not included. "
            "Means over tasks are rescaled so that 0 is chance."
        )
    return " ".join(sentences)


def show_score(value: Any) -> str:
    """A score with its standard error."""
    return f"{float(plain_value(value)):.3f}{show_error(standard_error(value))}"


def show_error(se: float) -> str:
    """A standard error; empty if it is unknown."""
    return f" ± {se:.3f}" if math.isfinite(se) else ""


def find_faults(written: Sequence[Record]) -> list[str]:
    """
    Inputs that no section has produced although some section produced another one of that name, and
    code of which sections were made with different versions. Sections that evaluate or compare
    models from outside the run are ignored.
    """
    own = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    made = {item for record in own for item in record["provenance"]["outputs"].items()}
    names = {name for name, _ in made}
    faults = []
    for record in own:
        for name, used in record["provenance"]["inputs"].items():
            if name in names and (name, used) not in made:
                faults.append(f"{record['section']} used {name} {used}, which no section produced.")
    versions = Counter(path for path, _ in {item for r in own for item in r["code"].items()})
    if changed := sorted(path for path, number in versions.items() if number > 1):
        faults.append(f"Sections were made by different versions of {', '.join(changed)}.")
    return faults
