"""
Record how far results can be trusted: seeds, noise, accesses to final benchmarks, total cost.

    python -m scripts.lab.reliability

Reads   all records ever written, the ledgers of sweeps, held_out_access.jsonl
Writes  the section "Reliability"
"""

from dataclasses import dataclass

from nanochat import records, report
from nanochat.common import UsageError, printable
from nanochat.config import require_at_least, start
from nanochat.lab.reliability import section_tables

SECTION = "Reliability"


@dataclass(frozen=True)
class Reliability:
    hourly_rate: float = 0.0
    """Dollars per device and hour."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""

    def __post_init__(self) -> None:
        require_at_least(self, hourly_rate=0)


def main(cfg: Reliability) -> None:
    damaged: list[str] = []
    written = [r for r in records.read_records(cfg.report_dir, damaged) if r["section"] != SECTION]
    history = records.read_history(cfg.report_dir, damaged)
    tables = section_tables(written, history, cfg.hourly_rate, damaged)
    for each in damaged:
        print(f"skipped: {printable(each)}")
    if not tables:
        raise UsageError("no seed was repeated and no noise measured", "run scripts.lab.sweep")
    provenance = records.Provenance(records.new_run_id(), 0)
    report.append_section(SECTION, cfg, {}, provenance, tables=tables)


if __name__ == "__main__":
    start(main, Reliability(), __doc__)
