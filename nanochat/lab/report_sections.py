"""
What the records of the lab say together: what was learned, how sure the figures are, what all cost.

    records, history, ledgers of sweeps -> sections "Data mix" and "Reliability", as tables

Tables that stages record under these titles are shown here instead of in their sections. Pure
functions but for `look_around`, which reads what lies beside the records.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanochat.common import base_dir
from nanochat.lab import held_out
from nanochat.lab.sweep import purpose
from nanochat.records import read_lines

Record = Mapping[str, Any]
Table = Mapping[str, Any]

DATA = ("Mixture", "Mixture by tag", "Filters", "Overlap with benchmarks")
SENTINELS = "Sentinels"
MOVED = (*DATA, SENTINELS)
MADE_BY = {  # beginning of a section -> what its device time was for
    "Tokenizer training": "Training",
    "Base model training": "Training",
    "Midtraining": "Training",
    "Chat SFT": "Training",
    "Chat RL": "Training",
    "Generation": "Generation",
}


class Around(NamedTuple):
    """What lies beside the records of a report."""

    accesses: Sequence[Mapping[str, Any]] = ()
    """To final benchmarks."""
    history: Sequence[Record] = ()
    """Every record ever written there, those of repeated stages too."""
    sweeps: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    """Name of a sweep -> its ledger."""
    damaged: Sequence[str] = ()
    """What is wrong with records and accesses that were left out."""


NOTHING = Around()


def look_around(history: Sequence[Record], damaged: list[str]) -> Around:
    """Read it, of the base directory. damaged: what is known to be so, to which is added."""
    ledgers = sorted((base_dir() / "sweeps").glob("*/ledger.jsonl"))
    sweeps = {path.parent.name: list(read_lines(path)) for path in ledgers}
    return Around(held_out.accesses(damaged), history, sweeps, damaged)


def data_mix(records: Sequence[Record], around: Around) -> list[Table]:
    """The section "Data mix": what was learned, left out, shared; who looked at what is final."""
    tables: list[Table] = [
        {**table, "title": f"{table['title']}, {record['section']}"}
        for record in records
        for table in record["tables"]
        if table.get("title") in DATA
    ]
    return [*tables, *([held_out.access_table()] if around.accesses else [])]


def reliability(records: Sequence[Record], around: Around, hourly_rate: float) -> list[Table]:
    """The section "Reliability": seeds, what was measured of noise, sentinels, what all took."""
    tables: list[Table] = [
        {**table, "title": f"{SENTINELS}, {record['section']}"}
        for record in records
        for table in record["tables"]
        if table.get("title") == SENTINELS and table["rows"]
    ]
    final = sum(r["cost"]["device_seconds"] for r in records)
    whole = sum(own_seconds(r["cost"]) for r in around.history)
    if around.sweeps or whole > final * (1 + 1e-6):  # more was run than the report is of
        tables.append(recipe(records, around, hourly_rate))
    return [seeds(records), *tables] if tables or measured(records) else []


def seeds(records: Sequence[Record]) -> Table:
    """Which seeds are behind the figures, and what says how much others would change."""
    rows = []
    for seed in dict.fromkeys(record["provenance"]["seed"] for record in records):
        mine = [r["section"] for r in records if r["provenance"]["seed"] == seed]
        rows.append([str(seed), ", ".join(mine)])
    many = ", ".join(measured(records))
    rows.append(["several", many or "none: by how much other seeds would differ is unknown"])
    return {"title": "Seeds", "columns": ["Seed", "Sections"], "rows": rows}


def measured(records: Sequence[Record]) -> list[str]:
    """Sections that tell how much figures vary."""
    names = ("Evaluation variance", "Sweep", "Merge", "Recursion")
    return [r["section"] for r in records if r["section"].startswith(names)]


def recipe(records: Sequence[Record], around: Around, hourly_rate: float) -> Table:
    """What the final run took, and all that was run to find it: repeats, sweeps, failures."""
    final = by_purpose((r["section"], r["cost"]["device_seconds"]) for r in records)
    whole = by_purpose((r["section"], own_seconds(r["cost"])) for r in around.history)
    for ledger in around.sweeps.values():
        for entry in ledger:
            whole[purpose(entry)] = whole.get(purpose(entry), 0.0) + entry["seconds"]
    kinds = [k for k in ("Training", "Evaluation", "Generation", "Lost to failures") if k in whole]
    rows = [
        [kind, *cells(final.get(kind, 0.0), whole[kind], hourly_rate)]
        for kind in kinds
    ] + [["All", *cells(sum(final.values()), sum(whole.values()), hourly_rate)]]  # fmt: skip
    columns = ["Device time", "Final run", "Recipe", "Ratio", "Cost of the recipe"]
    return {"title": "Final run against recipe", "columns": columns, "rows": rows}


def own_seconds(cost: Mapping[str, Any]) -> float:
    """Device time of one call, of a section that several calls fill."""
    own = cost.get("own_device_seconds")
    return cost["device_seconds"] if own is None else own


def by_purpose(costs: Any) -> dict[str, float]:
    """Purpose -> device seconds."""
    found: dict[str, float] = {}
    for section, spent in costs:
        kind = next((k for s, k in MADE_BY.items() if section.startswith(s)), "Evaluation")
        found[kind] = found.get(kind, 0.0) + spent
    return found


def cells(final: float, whole: float, hourly_rate: float) -> list[str]:
    """As the table shows two times."""
    ratio = f"{whole / final:.1f}" if final else "-"
    return [
        f"{final / 60:.2f}m",
        f"{whole / 60:.2f}m",
        ratio,
        f"${whole / 3600 * hourly_rate:.2f}",
    ]
