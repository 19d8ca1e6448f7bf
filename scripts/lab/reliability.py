"""
Record how far results can be trusted: seeds, noise, accesses to final benchmarks, total cost.

    python -m scripts.lab.reliability

Reads   all records ever written, the ledgers of sweeps, held_out_access.jsonl
Writes  the section "Reliability"
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat import records, report
from nanochat.common import UsageError
from nanochat.config import start
from nanochat.lab.sweep import LEDGER, purpose, sweep_folder
from tasks import held_out

SECTION = "Reliability"
PURPOSES = ("Training", "Evaluation", "Generation", "Lost to failures")
TRAINING = ("Tokenizer training", "Base model training", "Midtraining")
TRAINING += ("Chat SFT", "Chat DPO", "Chat RL")  # first words of their sections
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Reliability:
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


def main(cfg: Reliability) -> None:
    final = [r for r in records.read_records(cfg.report_dir) if r["section"] != SECTION]
    if not final:
        raise UsageError("there are no records yet", "run bash speedrun.sh first")
    history = records.read_history(cfg.report_dir)
    paths = sorted(sweep_folder().glob(f"*/{LEDGER}"))
    ledger = [entry for path in paths for entry in records.read_lines(path)]
    tables = [seed_table(final), recipe_table(final, history, ledger)]
    if (accesses := held_out.access_table())["rows"]:
        tables.append(accesses)
    provenance = records.Provenance(records.new_run_id(), 0)
    report.append_section(SECTION, cfg, {}, provenance, tables=tables)


def seed_table(final: Sequence[Record]) -> dict[str, Any]:
    """Table of seeds: the sections that used each, and those that measure noise over several."""
    rows = {"several": []}
    for record in final:
        section, seed = record["section"], record["provenance"]["seed"]
        rows.setdefault(str(seed), []).append(section)
        if section.startswith("Sweep") or record["values"].get("Seeds", 1) > 1:
            rows["several"].append(section)
    cells = [
        [seed, ", ".join(names) or "none: seed noise is unknown"] for seed, names in rows.items()
    ]
    return {"title": "Seeds", "columns": ["Seed", "Sections"], "rows": cells}


def recipe_table(
    final: Sequence[Record], history: Sequence[Record], ledger: Sequence[Record]
) -> dict[str, Any]:
    """
    Device time of the final run and of all runs, including repeats, sweeps and failures.

    history: every record ever written. ledger: the commands of all sweeps.
    """
    run, recipe = Counter(), Counter()  # seconds by purpose
    for record in final:
        run[purpose_of(record)] += record["cost"]["device_seconds"]
    for record in history:  # own: of one script run; a section can cover several
        recipe[purpose_of(record)] += record["cost"]["own_device_seconds"]
    for entry in ledger:
        recipe[purpose(entry)] += entry["seconds"]
    run["All"], recipe["All"] = run.total(), recipe.total()
    rows = []
    for kind in (*PURPOSES, "All"):
        if recipe[kind]:
            ratio = f"{recipe[kind] / run[kind]:.1f}" if run[kind] else "-"
            times = [f"{seconds / 60:.2f}m" for seconds in (run[kind], recipe[kind])]
            rows.append([kind, *times, ratio])
    columns = ["Device time", "Final run", "Recipe", "Ratio"]
    return {"title": "Final run against recipe", "columns": columns, "rows": rows}


def purpose_of(record: Record) -> str:
    """Row of `recipe_table` for a record."""
    section = record["section"]
    if section.startswith("Generation"):
        return "Generation"
    return "Training" if section.startswith(TRAINING) else "Evaluation"


if __name__ == "__main__":
    start(main, Reliability(), __doc__)
