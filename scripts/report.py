"""
Render report.md and its figures from the records of finished stages, or start a new report.

    python -m scripts.report                     # out/report.md
    python -m scripts.report --out=.             # also a copy here, with figures in dev/report/

Reads   report/ under the base directory
Writes  report.md and report/figures/ there; with --out, also <out>/report.md and <out>/dev/report/
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat import report, summary
from nanochat.common import base_dir, write_atomic
from nanochat.config import require_at_least, start
from nanochat.records import Folder, new_run_id, read_records, report_folder


@dataclass(frozen=True)
class Report:
    reset: bool = False
    """Start a new report; move the old one to report-<time>/."""
    out: str | None = None
    """Folder for a copy of report.md, with figures in dev/report/. Default: no copy."""
    hourly_rate: float | None = None
    """Dollars per hour for the whole machine, or for all nodes; saved for later runs. Default:
    rental price of this machine's GPUs; 0 without GPUs."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


def main(cfg: Report) -> None:
    require_at_least(cfg, hourly_rate=0)
    if cfg.reset:
        print(f"new report; moved the old one to {reset(cfg.report_dir)}")
        report.read_header(report_folder(cfg.report_dir), cfg.hourly_rate)
        return

    path = report.update(cfg.report_dir, cfg.hourly_rate, draw=True)
    scores = summary.collect_scores(read_records(cfg.report_dir))
    print(report.render_table(summary.score_table(scores, summary.show_score)))
    print(path)
    if cfg.out:
        print(copy(path, report_folder(cfg.report_dir) / "figures", Path(cfg.out)))


def reset(report_dir: Folder) -> Path:
    """Move the records, figures and text of a report to a new folder; returns it."""
    folder = report_folder(report_dir)
    archive = folder.rename(folder.with_name(f"{folder.name}-{new_run_id()}"))
    for page in () if report_dir else base_dir().glob("report.md"):
        page.rename(archive / page.name)
    return archive


def copy(report: Path, figures: Path, out: Path) -> Path:
    """Copy the report to `out` and its figures to `out`/dev/report; return the copied report."""
    for old in (out / "dev" / "report").glob("*.svg"):
        old.unlink()
    figures.mkdir(exist_ok=True)  # a report may have no figures
    shutil.copytree(figures, out / "dev" / "report", dirs_exist_ok=True)
    links = f"]({figures.relative_to(report.parent).as_posix()}/"  # other ] are escaped
    write_atomic(out / "report.md", report.read_text().replace(links, "](dev/report/"))
    return out / "report.md"


if __name__ == "__main__":
    start(main, Report(), __doc__)
