"""
What the records of a run say together: metrics by stage, differences, costs, broken chains.

    records -> {metric: {column: value}}, tables of text, sentences

Pure functions of records; knows nothing of files or Markdown.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from nanochat import stats
from nanochat.records import TIME_FORMAT, read_scores, slug
from nanochat.sections import BASE_METRICS, CHAT_TASKS, COLUMNS, LOWER_IS_BETTER, SECTIONS

Record = Mapping[str, Any]
GUESTS = frozenset({"hf", "before"})  # inputs of sections about models of any run


def metrics(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Metric -> column -> value: CORE first, ChatCORE last, the rest by name."""
    found: dict[str, dict[str, Any]] = {}
    for column, record in in_columns(records):
        for key, value in record["values"].items():
            if is_metric(record["section"], key, value):
                found.setdefault(metric_name(key), {})[column] = value
    names = sorted(found, key=lambda name: (name != "CORE", name == "ChatCORE", name))
    return {name: found[name] for name in names}


def item_scores(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Column -> metric -> what its items scored, as the records have it."""
    found: dict[str, dict[str, Any]] = {column: {} for column in COLUMNS}
    for column, record in in_columns(records):
        for key, entry in record.get("items", {}).items():
            found[column][metric_name(key)] = entry
    return found


def in_columns(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """The records that the summary's columns show, each with its column."""
    for record in records:
        for column, sections in COLUMNS.items():
            if record["section"] in sections:
                yield column, record


def metric_name(key: str) -> str:
    """What the summary calls a value of a record."""
    return str(BASE_METRICS.get(key, key))


def is_metric(section: str, key: str, value: Any) -> bool:
    """Whether a value belongs into the summary: of a chat evaluation, its tasks and ChatCORE."""
    if not section.startswith("Chat evaluation"):
        return key in BASE_METRICS
    return isinstance(value, Mapping) or key in CHAT_TASKS.split(", ")


def plain_value(value: Any) -> Any:
    """The number of an estimate, any other value itself."""
    return value["value"] if isinstance(value, Mapping) else value


def standard_error(value: Any) -> float:
    """The standard error of an estimate; NaN where nobody gave one."""
    known = isinstance(value, Mapping) and value.get("se") is not None
    return float(value["se"]) if known else math.nan


def differences(
    found: Mapping[str, Mapping[str, Any]],
    items: Mapping[str, Mapping[str, Any]] = {},
    order: Sequence[str] = tuple(COLUMNS),
) -> dict[str, Any]:
    """
    Table of what each column changed: per metric, against the one before it that has one.

    Where both stages were asked the same items (`item_scores`), these are compared one by one;
    elsewhere the standard error is that of a difference of independent measurements.
    """
    rows = []
    for name, by in found.items():
        columns = [column for column in order if column in by]
        for before, after in zip(columns, columns[1:], strict=False):
            pairs = paired(name, items.get(before, {}), items.get(after, {}))
            if pairs:
                change, error = pairs.difference, pairs.se
            else:
                change = float(plain_value(by[after])) - float(plain_value(by[before]))
                error = math.hypot(standard_error(by[before]), standard_error(by[after]))
            noise = ["-", "noise unknown"]
            if math.isfinite(error):
                gain = -change if name in LOWER_IS_BETTER else change
                noise = [f"{error:.4f}", stats.verdict(gain, error)]
            rows.append([name, f"{before} to {after}", f"{change:+.4f}", *noise, show_pairs(pairs)])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


def paired(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> stats.Comparison | None:
    """Compare a metric on the items of two columns; None unless both have scores of the same."""
    weights = [entries.get(name, {}).get("weights", {name: 1.0}) for entries in (before, after)]
    if weights[0] != weights[1]:
        return None
    parts = []
    for part in weights[0]:
        old, new = before.get(part), after.get(part)
        if old is None or new is None or old["of"] != new["of"]:
            return None
        parts.append(stats.compare(read_scores(old), read_scores(new)))
    return stats.combine(parts, list(weights[0].values()))


def show_pairs(pairs: stats.Comparison | None) -> str:
    """What became of the items, in words."""
    if pairs is None:
        return "-"
    return f"{pairs.won:,} won, {pairs.lost:,} lost of {pairs.n:,} (p = {pairs.p:.2g})"


def ledger(records: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of what each stage took, in time and in money at the machine's hourly rate."""
    rows = []
    for record in records:
        cost = record["cost"]
        devices = f"{cost['devices']}x {cost['device']}"
        rows.append([record["section"], cost["wall_seconds"], cost["device_seconds"], devices])
    if rows:
        rows.append(["Total", sum(row[1] for row in rows), sum(row[2] for row in rows), ""])
    columns = ["Section", "Wall clock", "Device time", "Devices", "Cost"]
    cells = [
        [name, f"{wall / 60:.2f}m", f"{busy / 60:.2f}m", on, f"${wall / 3600 * hourly_rate:.2f}"]
        for name, wall, busy, on in rows
    ]
    return {"title": "Cost", "columns": columns, "rows": cells}


def wall_clock(records: Sequence[Record], run_started: str) -> dict[str, int]:
    """Whole minutes from the start to the last fixed section before RL; with RL, if it ran."""
    ends = {r["section"]: seconds(r["timestamp"]) for r in records if r["section"] in SECTIONS}
    before_rl = [end for section, end in ends.items() if "rl" not in slug(section).split("-")]
    spans = {"Total wall clock time": before_rl}
    if len(before_rl) < len(ends):
        spans["Total wall clock time with RL"] = list(ends.values())
    started = seconds(run_started)
    return {label: int(max(times) - started) // 60 for label, times in spans.items() if times}


def seconds(timestamp: str) -> float:
    """A timestamp as seconds since the epoch."""
    return datetime.strptime(timestamp, TIME_FORMAT).timestamp()


def find_faults(records: Sequence[Record]) -> list[str]:
    """
    What breaks the chain from section to section: several runs, several versions of the code, a
    stage that read something else than what the stage before it is recorded to have made. What
    scores or compares models from outside the run is no part of the chain.
    """
    faults = []
    records = [r for r in records if not GUESTS & r["provenance"]["inputs"].keys()]
    for what, key in {"runs": "run_id", "commits": "commit"}.items():
        groups: dict[str, list[str]] = {}
        for record in records:
            groups.setdefault(record["provenance"][key], []).append(record["section"])
        if len(groups) > 1:
            parts = [f"{name} ({', '.join(sections)})" for name, sections in groups.items()]
            faults.append(f"They come from {len(groups)} {what}: {'; '.join(parts)}.")
    for record in records:
        for name, read in record["provenance"]["inputs"].items():
            makers = [r for r in records if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in makers}
            if made and read not in made:
                others = " and ".join(
                    f"{section} made {print_}" for print_, section in made.items()
                )
                faults.append(f"{record['section']} read {name} {read}, but {others}.")
    return faults
