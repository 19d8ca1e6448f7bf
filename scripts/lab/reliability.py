"""
Record what a result took: device time of all runs, and accesses to final benchmarks.

    python -m scripts.lab.reliability

Reads   all records ever written, the ledgers of sweeps, held_out_access.jsonl
Writes  the section "Reliability"
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat import records, report
from nanochat.config import start
from nanochat.lab.sweep import LEDGER, sweep_folder
from tasks import held_out

SECTION = "Reliability"
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Reliability:
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


def main(cfg: Reliability) -> None:
    final = [r for r in records.read_records(cfg.report_dir) if r["section"] != SECTION]
    paths = sweep_folder().glob(f"*/{LEDGER}")
    ledger = [entry for path in paths for entry in records.read_lines(path)]
    tables = [recipe_table(final, records.read_history(cfg.report_dir), ledger)]
    tables.append(held_out.access_table())
    provenance = records.Provenance(records.new_run_id(), 0)
    report.append_section(SECTION, cfg, {}, provenance, tables=tables)


def recipe_table(final: Entries, history: Entries, ledger: Entries) -> dict[str, Any]:
    """
    Device time of the final run and of all runs, including repeats, sweeps and failures.

    final, history: current records, and all ever written. ledger: the commands of all sweeps.
    """
    run, recipe = Counter[str](), Counter[str]()  # minutes by section
    for record in final:
        run[record["section"]] += record["cost"]["device_seconds"] / 60
    for record in history:  # own: of one script run; a section can cover several
        recipe[record["section"]] += record["cost"]["own_device_seconds"] / 60
    for entry in ledger:
        recipe["Sweeps"] += entry["seconds"] / 60
    rows = [
        [name, *(f"{minutes:.2f}m" for minutes in (run[name], recipe[name]))] for name in recipe
    ]
    whole, all_runs = run.total(), recipe.total()
    ratio = f"{all_runs / whole:.1f} times" if whole else "-"
    rows += [["All", f"{whole:.2f}m", f"{all_runs:.2f}m"], ["Ratio", "", ratio]]
    columns = ["Device time", "Final run", "All runs"]
    return {"title": "Final run against recipe", "columns": columns, "rows": rows}


if __name__ == "__main__":
    start(main, Reliability(), __doc__)
