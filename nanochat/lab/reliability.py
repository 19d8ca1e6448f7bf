"""
The section "Reliability" of the report: seeds, measured noise, and what all runs cost.

    records, their history, ledgers of sweeps -> sections -> tables
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.common import base_dir
from nanochat.lab import held_out
from nanochat.lab.sweep import purpose
from nanochat.records import read_lines

Record = Mapping[str, Any]
Table = Mapping[str, Any]

MADE_BY = {  # beginning of a section -> what its device time was for
    "Tokenizer training": "Training",
    "Base model training": "Training",
    "Midtraining": "Training",
    "Chat SFT": "Training",
    "Chat RL": "Training",
    "Generation": "Generation",
}


def sections(
    records: Sequence[Record], history: Sequence[Record], hourly_rate: float, damaged: list[str]
) -> dict[str, list[Table]]:
    """
    The section "Reliability": seeds, what measured noise, accesses to final benchmarks, and the
    cost of all that was run; empty where none of it is known.

    history: every record ever written there, those of repeated stages too. hourly_rate: of one
    device. Damaged files are added to `damaged`.
    """
    paths = sorted((base_dir() / "sweeps").glob("*/ledger.jsonl"))
    ledgers = [entry for path in paths for entry in read_lines(path)]
    tables: list[Table] = []
    if held_out.accesses(damaged):
        tables.append(held_out.access_table())
    final = sum(r["cost"]["device_seconds"] for r in records)
    whole = sum(own_seconds(r["cost"]) for r in history)
    if ledgers or whole > final * (1 + 1e-6):  # more was run than the report is of
        tables.append(recipe(records, history, ledgers, hourly_rate))
    found = [seeds(records), *tables] if tables or measured(records) else []
    return {"Reliability": found}


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


def recipe(
    records: Sequence[Record],
    history: Sequence[Record],
    ledgers: Sequence[Mapping[str, Any]],
    hourly_rate: float,
) -> Table:
    """What the final run took, and all that was run to find it: repeats, sweeps, failures."""
    final = by_purpose((r["section"], r["cost"]["device_seconds"]) for r in records)
    whole = by_purpose((r["section"], own_seconds(r["cost"])) for r in history)
    for entry in ledgers:
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
    return [f"{final / 60:.2f}m", f"{whole / 60:.2f}m", ratio, f"${whole / 3600 * hourly_rate:.2f}"]
