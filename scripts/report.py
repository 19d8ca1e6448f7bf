"""
Render report.md and its figures from the records of finished stages, or start a new report.

    python -m scripts.report                     # out/report.md
    python -m scripts.report --out=.             # also a copy here, with figures in dev/report/

Reads   report/ under the base directory, or under NANOCHAT_REPORT_DIR
Writes  report.md and report/figures/ there; with --out, also <out>/report.md and <out>/dev/report/
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat import report
from nanochat.common import write_atomic
from nanochat.config import require_at_least, start
from nanochat.plots import draw_figures
from nanochat.records import new_run_id, read_records, report_folder


@dataclass(frozen=True)
class Report:
    reset: bool = False
    """Start a new report; move the old one to report-<time>/."""
    out: str | None = None
    """Folder for a copy of report.md, with figures in dev/report/. Default: no copy."""
    hourly_rate: float | None = None
    """Dollars per hour for the whole machine, or for all nodes; kept until --reset. Default: rental
    price of this machine's GPUs, a flat 2.00 for other ones than H100, A100 and V100."""


def main(cfg: Report) -> None:
    require_at_least(cfg, hourly_rate=0)
    if cfg.reset:
        print(f"new report; moved the old one to {reset()}")
        report.read_header(cfg.hourly_rate)
        return

    drawn = draw_figures(report_folder() / "figures", read_records())
    path = report.update(cfg.hourly_rate, figures=drawn)
    scores = report.collect_scores(read_records())
    print(report.render_table(report.score_table(scores, report.show_score)))
    print(path)
    if cfg.out:
        print(copy(path, Path(cfg.out)))


def reset() -> Path:
    """Move the records, figures and text of a report to a new folder; returns it."""
    folder = report_folder()
    archive = folder.rename(folder.with_name(f"{folder.name}-{new_run_id()}"))
    for page in folder.parent.glob("report.md"):
        write_atomic(archive / page.name, page.read_text().replace("](report/figures", "](figures"))
        page.unlink()
    return archive


def copy(report: Path, out: Path) -> Path:
    """Copy the report to `out` and its figures to `out`/dev/report; return the copied report."""
    for old in (out / "dev" / "report").glob("*.svg"):
        old.unlink()
    figures = report.parent / "report" / "figures"
    shutil.copytree(figures, out / "dev" / "report", dirs_exist_ok=True)
    text = report.read_text().replace("](report/figures/", "](dev/report/")  # other ] are escaped
    write_atomic(out / "report.md", text)
    return out / "report.md"


if __name__ == "__main__":
    start(main, Report(), __doc__)
