"""
Render report.md and draw its figures from the records of the stages that ran, or start a new one.

    python -m scripts.report                     # out/report.md
    python -m scripts.report --out=.             # and a copy here, its figures in dev/report/

Reads   report/ under the base directory
Writes  report.md there, report/figures/; with --out also <out>/report.md and <out>/dev/report/
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat import report
from nanochat.common import base_dir, write_atomic
from nanochat.config import require_at_least, start
from nanochat.lab.reliability import sections
from nanochat.plots import draw
from nanochat.records import Folder, new_run_id, report_folder


@dataclass(frozen=True)
class Report:
    reset: bool = False
    """Start a new report: the records of the old one move to report/archive-<time>/."""
    out: str | None = None
    """Folder that gets a copy of report.md, with the figures in its dev/report/."""
    hourly_rate: float | None = None
    """Dollars per hour for the whole machine, kept for later calls. Default: by the names of its
    GPUs, 0 for a machine without any."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""


def main(cfg: Report) -> None:
    require_at_least(cfg, hourly_rate=0)
    if cfg.reset:
        archive = reset(cfg.report_dir, cfg.hourly_rate)
        return print(f"new report; the old one is in {archive}" if archive else "new report")

    path = report.update(cfg.report_dir, cfg.hourly_rate, sections, draw)
    print(path)
    if cfg.out:
        print(copy(path, report_folder(cfg.report_dir) / "figures", Path(cfg.out)))


def reset(report_dir: Folder, hourly_rate: float | None) -> Path | None:
    """
    Start a new report: its header is made now. What the old one had moves to a folder
    archive-<time> beside it, whose path is returned; nothing is deleted.
    """
    folder = report_folder(report_dir)
    old = {path for path in folder.iterdir() if not path.name.startswith((".", "archive-"))}
    old |= set((folder if report_dir else base_dir()).glob("report.md"))
    archive = folder / f"archive-{new_run_id()}"
    for path in old:
        archive.mkdir(exist_ok=True)
        shutil.move(path, archive / path.name)
    report.read_header(folder, [], hourly_rate)
    return archive if old else None


def copy(report: Path, figures: Path, out: Path) -> Path:
    """A copy of the report in the folder `out`, with its figures in dev/report/ there."""
    for old in (out / "dev" / "report").glob("*.svg"):
        old.unlink()
    figures.mkdir(exist_ok=True)  # a report may have none
    shutil.copytree(figures, out / "dev" / "report", dirs_exist_ok=True)
    links = f"]({figures.relative_to(report.parent).as_posix()}/"  # no other text has a bare ]
    write_atomic(out / "report.md", report.read_text().replace(links, "](dev/report/"))
    return out / "report.md"


if __name__ == "__main__":
    start(main, Report(), __doc__)
