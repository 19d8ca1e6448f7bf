"""
Results of a run, collected from the records of its stages.

    records -> result_metrics -> differences, verdict -> top and summary of report.md

Scores on the built-in world are named World: they cannot be compared with published scores.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from nanochat import records, stats
from nanochat.records import Record, plain_value, read_clusters, read_scores, standard_error

STAGE_NAMES = {"BASE": "base", "MID": "mid", "SFT": "SFT", "DPO": "DPO", "RL": "RL"}
STAGES = tuple(STAGE_NAMES)  # columns of the summary
COLUMN_OF = {  # section -> summary column of its metrics
    **dict.fromkeys(("Base model loss", "Base model evaluation"), "BASE"),
    **{f"Chat evaluation {column.lower()}": column for column in STAGES},
}
BASE_METRICS = ("CORE metric", "val bpb")
WORLD_NAMES = {"CORE metric": "World few-shot", "ChatCORE": "World chat"}
FIRST, LAST = ("CORE", "World few-shot"), ("ChatCORE", "World chat")  # rows of the summary
MODEL_SIZE = ("parameters", "training tokens")
TINY = 1e-100  # smaller p-values are not printed
Nested = Mapping[str, Mapping[str, Any]]


# ---- Metrics of each stage -----------------------------------------------------------------------


def is_world(record: Record) -> bool:
    """Whether the scores of a record are on the built-in world."""
    weights = record["items"].get("ChatCORE", {}).get("weights", {})
    only_world = bool(weights) and all(name.startswith("World-") for name in weights)
    return only_world or record["values"].get("Suite") == "embedded world"


def shown_name(record: Record, key: str) -> str:
    """Name of a recorded value in the report."""
    return WORLD_NAMES.get(key, key) if is_world(record) else key


def metric_name(record: Record, key: str) -> str:
    """Name of a recorded value in the summary."""
    return shown_name(record, key).replace("CORE metric", "CORE")


def is_metric(section: str, key: str, value: Any) -> bool:
    """Whether a value belongs in the summary: CORE, val bpb, chat tasks and ChatCORE."""
    if not section.startswith("Chat evaluation"):
        return key in BASE_METRICS
    return isinstance(value, Mapping) or key in records.CHAT_TASKS.split(", ")


def result_metrics(written: Sequence[Record]) -> tuple[Nested, Nested]:
    """
    Collect metric -> column -> value (CORE first, ChatCORE last, the rest by name) and column ->
    metric -> recorded item scores.
    """
    found: dict[str, dict[str, Any]] = {}
    items: dict[str, dict[str, Any]] = {column: {} for column in STAGES}
    for record in written:
        if column := COLUMN_OF.get(record["section"]):
            items[column] |= {metric_name(record, k): each for k, each in record["items"].items()}
            for key, value in record["values"].items():
                if is_metric(record["section"], key, value):
                    found.setdefault(metric_name(record, key), {})[column] = value
    order = sorted(found, key=lambda name: (name not in FIRST, name in LAST, name))
    return {name: found[name] for name in order}, items


def shown_stages(found: Nested) -> list[str]:
    """Columns of the tables: all stages, but DPO only if it was evaluated."""
    return [c for c in STAGES if c != "DPO" or any(c in by for by in found.values())]


# ---- Differences between stages ------------------------------------------------------------------


class Difference(NamedTuple):
    """Change of a metric between two columns."""

    metric: str
    before: str
    after: str
    change: float
    se: float
    """Standard error; NaN if unknown."""
    verdict: str
    """better, worse, within noise, or noise unknown."""
    items: stats.Comparison | None
    """Comparison item by item, if both were evaluated on the same items."""


def parent_columns(written: Sequence[Record]) -> dict[str, str]:
    """Column -> column of the stage that it was trained from; by default the one before."""
    found = dict(zip(STAGES[1:], STAGES, strict=False))
    for record in written:
        made, used = (record["provenance"][name] for name in ("outputs", "inputs"))
        for source, stage in combinations(STAGES, 2):
            if source.lower() in used and stage.lower() in made:
                found[stage] = source
    return found


def differences(found: Nested, items: Nested, parents: Mapping[str, str]) -> list[Difference]:
    """
    Differences of each metric between a column and the nearest of its `parents` that has it.

    Columns evaluated on the same items are compared item by item; otherwise the standard error
    treats them as independent measurements. Scores with other sampling settings are not compared.
    """
    changes = []
    for name, by in found.items():
        for after in (column for column in parents if column in by):
            before = parents[after]
            while before not in by and before in parents:
                before = parents[before]
            if before not in by:
                continue
            old, new = items.get(before, {}), items.get(after, {})
            if not sampled_alike(name, old, new):
                continue
            same = compare_items(name, old, new)
            change = float(plain_value(by[after])) - float(plain_value(by[before]))
            se = math.hypot(*(standard_error(by[c]) for c in (before, after)))
            if same:
                change, se = same.difference, same.se
            gain = -change if name == "val bpb" else change
            verdict = "noise unknown"
            if math.isfinite(se):
                verdict = stats.verdict(gain, se, same.p if same else 0.0)
            changes.append(Difference(name, before, after, change, se, verdict, same))
    return changes


def compare_items(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric item by item; None unless both columns have scores of the same items."""
    weights, others = (by.get(name, {}).get("weights", {name: 1.0}) for by in (before, after))
    pairs = [(before.get(part, {}), after.get(part, {})) for part in weights]
    if weights != others or not all(a and a.get("of") == b.get("of") for a, b in pairs):
        return None
    parts = [stats.compare(read_scores(a), read_scores(b), read_clusters(b)) for a, b in pairs]
    return stats.combine(parts, list(weights.values()))


def sampled_alike(name: str, before: Record, after: Record) -> bool:
    """Whether a metric was scored with the same sampling settings, as far as they are recorded."""
    parts = after.get(name, {}).get("weights", {name: 1.0})
    settings = [{by.get(part, {}).get("how") for by in (before, after)} - {None} for part in parts]
    return all(len(different) < 2 for different in settings)


def difference_table(changes: Sequence[Difference]) -> dict[str, Any]:
    """Table of differences."""
    rows = []
    for each in changes:
        error, counts = "-" if math.isnan(each.se) else f"{each.se:.4f}", "-"
        if each.items:
            same = each.items
            p_value = f" (p < {TINY:g})" if same.p < TINY else f" (p = {same.p:.2g})"
            counts = f"{same.won:,} won, {same.lost:,} lost of {same.n:,}"
            counts += "" if math.isnan(same.p) else p_value
        stages = f"{each.before} to {each.after}"
        rows.append([each.metric, stages, f"{each.change:+.4f}", error, each.verdict, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


# ---- Cost and consistency ------------------------------------------------------------------------


def cost_table(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of the time and cost of each stage. hourly_rate: dollars for the whole machine."""
    costs = [(r["section"], r["cost"]) for r in written]
    total = {name: sum(cost[name] for _, cost in costs) for name in records.ADDED_COSTS}
    rows = []
    for name, cost in [*costs, ("Total", total)]:
        wall, busy = cost["wall_seconds"], cost["device_seconds"]
        devices = f"{cost['devices']}x {cost['device']}" if "device" in cost else ""
        price = f"${wall / 3600 * hourly_rate:.2f}"
        rows.append([name, readable_time(wall), readable_time(busy), devices, price])
    columns = ["Section", "Wall clock", "Device time", "Devices", "Cost"]
    return {"title": "Cost", "columns": columns, "rows": rows}


def find_faults(written: Sequence[Record]) -> list[str]:
    """
    Inconsistencies between sections: different runs, different commits, or a stage whose input
    is not the recorded output of the stage that produced it. Sections that evaluate or compare
    models from outside the run are ignored.
    """
    faults = []
    written = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    for what, key in {"runs": "run_id", "commits": "commit"}.items():
        groups: dict[str, list[str]] = {}
        for record in written:
            groups.setdefault(record["provenance"][key], []).append(record["section"])
        if len(groups) > 1:
            parts = [f"{name} ({', '.join(sections)})" for name, sections in groups.items()]
            faults.append(f"Sections come from {len(groups)} {what}: {'; '.join(parts)}.")
    for record in written:
        for name, read in record["provenance"]["inputs"].items():
            makers = [r for r in written if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in makers}
            if made and read not in made:
                others = " and ".join(f"{by} produced {each}" for each, by in made.items())
                faults.append(f"{record['section']} used {name} {read}, but {others}.")
    return faults


# ---- Verdict -------------------------------------------------------------------------------------


def verdict(written: Sequence[Record], header: Record, changes: Sequence[Difference]) -> str:
    """
    The result of the run in a few sentences: model, machine, time and cost; best scores; what each
    stage changed; what a stage lost.
    """
    found, seconds = result_metrics(written)[0], sum(r["cost"]["wall_seconds"] for r in written)
    model = "The stages below"
    for record in written:
        values = record["values"]
        if record["section"] == "Base model training" and "Number of parameters" in values:
            size, tokens = (readable_count(values[f"Number of {x}"]) for x in MODEL_SIZE)
            depth = record["settings"].get("depth")
            model = f"A model of depth {depth} ({size} parameters, {tokens} pretraining tokens)"
    price = f"${seconds / 3600 * header['hourly_rate']:.2f}"
    sentences = [f"{model}: {readable_time(seconds)} on {machine(header)}, {price}."]
    best = []
    for name in (*FIRST, *LAST, "val bpb"):
        if by := found.get(name):
            lowest = min if name == "val bpb" else max
            stage, _ = lowest(by.items(), key=lambda each: float(plain_value(each[1])))
            best.append(f"{name} {with_error(by[stage])} ({STAGE_NAMES[stage]})")
    if best:
        sentences.append(f"Best scores: {', '.join(best)}.")
    means = [each for each in changes if each.metric in LAST]
    if means:
        steps = [f"{signed(each)} from {stages(each)} ({each.verdict})" for each in means]
        sentences.append(f"{means[0].metric} changed by {', '.join(steps)}.")
    if len(changes) > len(means):
        lost = [each for each in changes if each.verdict == "worse" and each not in means]
        named = ", ".join(f"{each.metric} {signed(each)} from {stages(each)}" for each in lost)
        sentences.append(f"Worse by more than 2 standard errors: {named or 'no task'}.")
        sentences.append(
            "± is one standard error over questions; other seeds are not included. "
            "Means over tasks are rescaled so that 0 is chance."
        )
    return " ".join(sentences)


def machine(header: Record) -> str:
    """GPUs, or CPU cores and their type."""
    hardware, gpus = header["hardware"], header["hardware"]["gpus"]
    names = ", ".join(f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus))
    return names or f"{hardware['cores']} CPU cores ({hardware['cpu']})"


def stages(each: Difference) -> str:
    """Names of the two stages of a difference."""
    return " to ".join(STAGE_NAMES.get(column, column) for column in (each.before, each.after))


def signed(each: Difference) -> str:
    """A difference with sign and standard error."""
    return f"{each.change:+.3f}" + (f" ± {each.se:.3f}" if math.isfinite(each.se) else "")


def with_error(value: Any) -> str:
    """A score with its standard error, if known."""
    se = standard_error(value)
    return f"{float(plain_value(value)):.3f}" + (f" ± {se:.3f}" if math.isfinite(se) else "")


def readable_count(number: float) -> str:
    """A count in three digits: 9.44 M, 1.2 B; below 999,500 with separators."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def readable_time(seconds: float) -> str:
    """Seconds as 0.8 s, 2.7 min or 3.4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
