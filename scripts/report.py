"""
Render report.md and its figures from the records of finished stages, or start a new report.

    python -m scripts.report                     # out/report.md, out/report.html
    python -m scripts.report --print             # also the results, in the terminal
    python -m scripts.report --follow            # a page with the losses of a running stage
    python -m scripts.report --out=.             # also a copy here, with figures in dev/report/

Reads   report/ under the base directory, or under NANOCHAT_REPORT_DIR, and the logs of runs
Writes  report.md, report.html (one file, figures inside) and report/figures/ there; with --out,
        also <out>/report.md and <out>/dev/report/
"""

import base64
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from markdown_it import MarkdownIt

from nanochat import report
from nanochat.common import UsageError, base_dir, write_atomic
from nanochat.config import require_at_least, start
from nanochat.plots import PANELS, draw_figures, draw_run, to_svg
from nanochat.records import METRICS_FILE, new_run_id, read_metrics, read_records, report_folder


@dataclass(frozen=True)
class Report:
    reset: bool = False
    """Start a new report; move the old one to report-<time>/."""
    print: bool = False
    """Print the results: what was trained, scores, samples and cost."""
    follow: bool = False
    """Serve a page with the losses so far of the stage that is running, and the scores of those
    before, until Ctrl-C."""
    port: int = 8001
    """Port of that page, on this machine only."""
    out: str | None = None
    """Folder for a copy of report.md, with figures in dev/report/. Default: no copy."""
    hourly_rate: float | None = None
    """Dollars per hour for the whole machine, or for all nodes; kept until --reset. Default: rental
    price of this machine's GPUs, a flat 2.00 for other ones than H100, A100 and V100."""

    def __post_init__(self) -> None:
        require_at_least(self, hourly_rate=0, port=1)
        if self.port > 65_535:
            raise ValueError(f"--port={self.port}: use one of 1 to 65535, such as --port=8001")


def main(cfg: Report) -> None:
    if cfg.reset:
        print(f"new report; moved the old one to {reset()}")
        report.read_header(cfg.hourly_rate)
        return
    if cfg.follow:
        return follow(cfg.port)

    drawn = draw_figures(report_folder() / "figures", read_records())
    path = report.update(cfg.hourly_rate, figures=drawn)
    figures = path.parent / "report" / "figures"
    images = {f"report/figures/{file.name}": file.read_text() for file in figures.glob("*.svg")}
    write_atomic(path.with_suffix(".html"), to_page(path.read_text(), images))
    results = path.read_text().partition("## Results\n")[2].partition("\n## Environment\n")[0]
    if cfg.print:
        print(results.strip())
    else:
        scores = report.collect_scores(read_records())
        print(report.render_table(report.score_table(scores, [])))
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
    for page in folder.parent.glob("report.html"):
        page.rename(archive / page.name)
    return archive


def copy(path: Path, out: Path) -> Path:
    """
    Copy the report to `out` and its figures to `out`/dev/report; return the copied report. Raises
    UsageError if a report.md there is another document.
    """
    page = out / "report.md"
    if page.exists():
        if not page.read_text(errors="replace").startswith(report.TITLE):
            raise UsageError(f"{page} is not a report of training", "use another folder")
        for old in (out / "dev" / "report").glob("*.svg"):
            old.unlink()
    figures = path.parent / "report" / "figures"
    shutil.copytree(figures, out / "dev" / "report", dirs_exist_ok=True)
    text = path.read_text().replace("](report/figures/", "](dev/report/")  # other ] are in code
    write_atomic(page, text)
    return page


# ---- Pages in HTML -------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">{refresh}
<title>nanochat training report</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
td, th {{ border: 1px solid #8884; padding: .2rem .6rem; text-align: left }}
pre {{ background: #8882; padding: .8rem; overflow-x: auto }}
img {{ max-width: 100%; background: #fff }}
blockquote {{ border-left: 4px solid #c60; margin: 0; padding-left: 1rem }}
</style>
{body}
"""


def to_page(markdown: str, images: Mapping[str, str], refresh: int = 0) -> str:
    """
    Text of the report as one HTML file: nothing in it is active, and nothing is loaded. images:
    address of each figure in the text -> SVG. refresh: seconds until a browser reads it again.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")  # HTML: the folds
    tokens = parser.parse(markdown)
    for image in (x for token in tokens for x in token.children or () if x.type == "image"):
        svg = base64.b64encode(images[str(image.attrs["src"])].encode()).decode()
        image.attrs["src"] = f"data:image/svg+xml;base64,{svg}"
    body = parser.renderer.render(tokens, parser.options, {})
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return PAGE.format(refresh=again, body=body)


def follow(port: int) -> None:
    """Serve the page of the running stage on this machine."""

    class Page(BaseHTTPRequestHandler):
        timeout = 5  # of a browser that opens a connection in advance

        def do_GET(self) -> None:
            body = show_progress().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Page) as server:
        print(f"http://127.0.0.1:{port} shows the running stage; Ctrl-C ends it", flush=True)
        server.serve_forever()


def show_progress() -> str:
    """Page of the run that was logged last, with the scores of finished stages."""
    logs = base_dir().glob(f"*_checkpoints/*/{METRICS_FILE}")
    blocks, images, written = ["# Training"], {}, read_records()
    path = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    if path and (entries := read_metrics(path)):
        age = time.time() - path.stat().st_mtime
        where = report.literal(f"{path.parent.parent.name}/{path.parent.name}")
        blocks.append(f"{where}, step {entries[-1]['step']:,}, logged {age:.0f} s ago")
        last = {name: value for entry in entries[-50:] for name, value in entry.items()}
        if last.keys() & PANELS.keys():
            images["losses"] = to_svg(draw_run(entries))
            blocks.append("![losses](losses)")
        blocks.append(report.bullets(last))
    else:
        blocks.append("No run has logged a step yet.")
    scores = report.collect_scores(written)
    if scores.values:
        blocks += ["## Scores so far", report.render_table(report.score_table(scores, []))]
    return to_page("\n\n".join(blocks), images, refresh=5)


if __name__ == "__main__":
    start(main, Report(), __doc__)
