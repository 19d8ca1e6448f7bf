"""
The report's section "Reliability": seeds, measured noise, and total cost.

    records, record history, sweep ledgers -> section_tables -> tables
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.lab.sweep import LEDGER, purpose, sweep_folder
from nanochat.records import read_lines
from tasks import held_out

Record = Mapping[str, Any]
Table = Mapping[str, Any]

TRAINING = (
    *("Tokenizer training", "Base model training", "Midtraining"),
    *("Chat SFT", "Chat DPO", "Chat RL"),
)
MADE_BY = {**dict.fromkeys(TRAINING, "Training"), "Generation": "Generation"}
"""Prefix of a section name -> category of its device time."""


def section_tables(
    records: Sequence[Record], history: Sequence[Record], hourly_rate: float, damaged: list[str]
) -> list[Table]:
    """
    Return the tables of the section "Reliability": seeds, sections that measure noise, accesses to
    final benchmarks, and the cost of all runs; no tables if none of these exist.

    history: every record ever written, including repeated stages. hourly_rate: dollars per device
    hour. Appends damaged files to `damaged`.
    """
    paths = sorted(sweep_folder().glob(f"*/{LEDGER}"))
    ledgers = [entry for path in paths for entry in read_lines(path)]
    tables: list[Table] = []
    if held_out.read_access_log(damaged):
        tables.append(held_out.access_table())
    final = sum(r["cost"]["device_seconds"] for r in records)
    # own: device time of one script run; a section can cover several
    whole = sum(r["cost"]["own_device_seconds"] for r in history)
    if ledgers or whole > final * (1 + 1e-6):  # more runs than the report covers
        tables.append(recipe_table(records, history, ledgers, hourly_rate))
    return [seed_table(records), *tables] if tables or noise_sections(records) else []


def seed_table(records: Sequence[Record]) -> Table:
    """Table of seeds: the sections that used each, and those that measure noise over several."""
    by_seed: dict[str, list[str]] = {}
    for record in records:
        by_seed.setdefault(str(record["provenance"]["seed"]), []).append(record["section"])
    by_seed["several"] = noise_sections(records) or ["none: seed noise is unknown"]
    rows = [[seed, ", ".join(names)] for seed, names in by_seed.items()]
    return {"title": "Seeds", "columns": ["Seed", "Sections"], "rows": rows}


def noise_sections(records: Sequence[Record]) -> list[str]:
    """Sections that measure how much metrics vary over seeds; a sweep always has several."""
    return [
        r["section"]
        for r in records
        if r["section"].startswith("Sweep") or r["values"].get("Seeds", 1) > 1
    ]


def recipe_table(
    records: Sequence[Record],
    history: Sequence[Record],
    ledgers: Sequence[Mapping[str, Any]],
    hourly_rate: float,
) -> Table:
    """Device time of the final run and of all runs, including repeats, sweeps and failures."""
    final, whole = (defaultdict[str, float](float) for _ in range(2))  # seconds by purpose
    for record in records:
        final[purpose_of(record)] += record["cost"]["device_seconds"]
    for record in history:
        whole[purpose_of(record)] += record["cost"]["own_device_seconds"]
    for entry in ledgers:
        whole[purpose(entry)] += entry["seconds"]
    kinds = [k for k in ("Training", "Evaluation", "Generation", "Lost to failures") if k in whole]
    final["All"], whole["All"] = sum(final.values()), sum(whole.values())
    rows = []
    for kind in (*kinds, "All"):
        ratio = f"{whole[kind] / final[kind]:.1f}" if final[kind] else "-"
        cost = f"${whole[kind] / 3600 * hourly_rate:.2f}"
        rows.append([kind, f"{final[kind] / 60:.2f}m", f"{whole[kind] / 60:.2f}m", ratio, cost])
    columns = ["Device time", "Final run", "Recipe", "Ratio", "Cost of the recipe"]
    return {"title": "Final run against recipe", "columns": columns, "rows": rows}


def purpose_of(record: Record) -> str:
    """Row of `recipe_table` for a record."""
    return next((k for s, k in MADE_BY.items() if record["section"].startswith(s)), "Evaluation")
