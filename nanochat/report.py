"""
The report: report.md, rendered from the records of the stages.

    records + header (time, hardware, code version) -> render_report -> report.md with SVG figures

`render_report` is a pure function; a stage calls `update` after `records.write_record`. The report
opens with a verdict, a table of results, samples and costs. Each section shows results first and
folds the rest. Names, order and keys of the fixed sections must not change, because reports are
compared line by line; additions come after them. Reports are never parsed. Names, settings and
values are untrusted text (from models, data and users) and are escaped for Markdown.
"""

import json
import platform
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from nanochat import records, summary
from nanochat.common import REPOSITORY, MissingInput, cpu_info, printable, read_json, write_atomic
from nanochat.config import settings
from nanochat.records import SECTIONS, Record, plain_value, seconds, slug

# Inline Markdown syntax (CommonMark and GitHub's extensions)
MARKDOWN_SYNTAX = re.compile(
    r"""
    [`\[\]]                           # code, links, images
    | \\(?=[!-/:-@\[-`{-~]|$)         # backslash escapes
    | <(?=[a-z/!?]|[^\s<>]*@)         # HTML, links; not special tokens such as <|bos|>
    | &(?=\#?\w+;)                    # entities
    | (?<![^\W_])_ | _(?![^\W_])      # emphasis; not within a word
    | \*(?=[^*]*\*) | ~(?=[^~]*~) | \$(?=[^$]*\$)  # emphasis, math: all but the last
    | :(?=//) | (?<=\bwww)\. | (?<=\w)@(?=\w)  # autolinks
    """,
    re.VERBOSE | re.IGNORECASE,
)
BLOCK_START = re.compile(  # headings, lists, rules, quotes, numbered lists
    r"^((?=#{1,6}(\s|$)|[-+*](\s|$)|[-=]+\s*$|>)|\d{1,9}(?=[.)](\s|$)))"
)
SAMPLES = "Sample conversations"  # table of a record shown at the top of the report


# ---- Public interface ----------------------------------------------------------------------------


def append_section(
    name: str, cfg: Any, values: Any, origin: Any, cost: records.Cost | None = None, **shown: Any
) -> None:
    """
    Print the tables of a script, write its record and update the report. cfg: the script's config.
    cost: default: of one CPU since the start of the process. The other arguments are those of
    `records.write_record`.
    """
    for table in shown.get("tables", ()):
        print(render_table(table), flush=True)
    cost = cost or records.Cost.so_far()
    records.write_record(name, settings(cfg), values, origin, cost, **shown)
    update(renew=bool(origin.outputs))


def update(hourly_rate: float | None = None, renew: bool = False, draw: bool = False) -> Path:
    """
    Render the report of all current records. Returns the path of report.md.

    hourly_rate: dollars per hour for the whole machine, saved for later calls. renew: set by a
    stage that has run on this machine, which the header describes from then on. draw: also draw the
    figures; without it, the report has none. Raises MissingInput if there are no records.
    """
    folder, written, figures = records.report_folder(), records.read_records(), []
    path = folder.parent / "report.md"
    if not written:
        raise MissingInput(f"no records in {folder}", "bash speedrun.sh")
    if draw:
        from nanochat.plots import draw_figures  # slow to import

        figures = draw_figures(folder / "figures", written)
    header, now = read_header(hourly_rate, renew), time.strftime(records.TIME_FORMAT)
    write_atomic(path, render_report(written, header, now, figures))
    return path


# ---- Header --------------------------------------------------------------------------------------

GIB = 1024**3
CODE = ("*.py", "*.md", "*.rs", "*.html", "*.js", "*.css", "*.toml", "*.sh")


def read_header(rate: float | None = None, renew: bool = False) -> dict[str, Any]:
    """
    Read the header (code version, machine, hourly rate), creating it on the first call and if
    `renew` is set: it describes the machine of the newest stage, not that of a later evaluation.

    rate: dollars per hour, kept from then on. Default: the rental price of the GPUs.
    """
    path = records.report_folder() / "header.json"
    header = read_json(path) if path.exists() else {}
    if renew or not header:
        header |= {
            "git": records.git_state(),
            "hardware": hardware(),
            "software": {"Python": platform.python_version(), "PyTorch": version("torch")},
            "gpus": gpu_names(),
            "bloat": code_size(),
        }
    if rate is not None:
        header["hourly_rate"] = rate
    write_atomic(path, json.dumps(header, indent=1))  # in order
    return {"hourly_rate": records.default_rate(header["gpus"]), **header}


def gpu_names() -> list[str]:
    """Names of the GPUs visible to PyTorch."""
    from torch import cuda  # slow to import; not needed for --help

    return [cuda.get_device_name(i) for i in range(cuda.device_count())]


def hardware() -> dict[str, Any]:
    """Facts about this machine, as shown in the report."""
    import torch

    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    facts = {
        "Platform": platform.system(),
        "CPUs": f"{cores} cores ({psutil.cpu_count()} logical)",
        "Memory": f"{psutil.virtual_memory().total / GIB:.1f} GB",
        "GPUs": ", ".join(f"{n}x {name}" for name, n in Counter(gpu_names()).items()) or "None",
        "CPU Model": cpu_info("model name") or platform.processor(),
    }
    if count := torch.cuda.device_count():
        memory = sum(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        facts |= {"GPU Memory": f"{memory / GIB:.1f} GB total", "CUDA Version": torch.version.cuda}
    return facts


def code_size(repository: Path = REPOSITORY) -> dict[str, int]:
    """
    Size of the code: characters, lines, files, tokens (characters // 4), lines of uv.lock.

    Counts tracked py, md, rs, html, js, css, toml and sh files except generated reports; 0 without
    git. Dependencies are 0 without uv.lock.
    """
    names = records.git(repository, "ls-files", "-z", "--", *CODE, *records.WITHOUT_REPORT)
    paths = [repository / name for name in names.split("\0")]
    texts = [path.read_text("utf-8", "replace") for path in paths if path.is_file()]
    characters, lock = sum(map(len, texts)), repository / "uv.lock"
    return {
        "Characters": characters,
        "Lines": sum(text.count("\n") for text in texts),
        "Files": len(texts),
        "Tokens (approx)": characters // 4,
        "Dependencies (uv.lock lines)": lock.read_text().count("\n") if lock.exists() else 0,
    }


# ---- Rendering -----------------------------------------------------------------------------------


def render_report(
    written: Sequence[Record], header: Record, generated: str, figures: Sequence[str] = ()
) -> str:
    """
    Text of report.md, a pure function of its arguments.

    Order: results, environment, fixed sections, others oldest first, the summary. figures: names,
    <section>-<kind>; those of the section "results" are at the top. generated: date and time.
    """
    order = {name: i for i, name in enumerate(SECTIONS)}
    written = sorted(written, key=lambda r: (order.get(r["section"], len(order)), r["timestamp"]))
    scores = summary.collect_scores(written)
    changes = summary.differences(scores, summary.parent_stages(written))
    hardware, rate = header["hardware"], f"${header['hourly_rate']:.2f}/hour"
    bloat = bullets({name: f"{number:,}" for name, number in header["bloat"].items()})
    fixed = [r for r in written if r["section"] in SECTIONS] or written
    started = min(seconds(r["timestamp"]) - r["cost"]["wall_seconds"] for r in fixed)
    costs = summary.cost_table(written, header["hourly_rate"])
    _, spent, _, price = costs["rows"][-1]
    cpu = f"{hardware['CPUs']} of {hardware['CPU Model']}"
    spent += f" on {cpu if hardware['GPUs'] == 'None' else hardware['GPUs']}, {price}"
    samples = [
        {**table, "title": f"{SAMPLES} ({record['section'].split()[-1]})"}
        for record in written
        for table in record["tables"]
        if table["title"] == SAMPLES and record["section"] in summary.STAGE_OF
    ]
    warnings = []
    if faults := summary.find_faults(written):
        title = "> [!WARNING]\n> **Provenance: these sections are inconsistent.**"
        warnings = ["\n".join([title, *(f"> - {escape(fault)}" for fault in faults)])]
    blocks = [
        f"# nanochat training report\n\nGenerated: {generated}",
        "## Results",
        *warnings,
        escape(summary.verdict(written, scores, changes, spent)),
        render_table(summary.score_table(scores, summary.show_score)),
        render_figures(figures, "results"),
        *map(render_table, samples[-1:]),  # of the last stage
        render_table(costs),
        "## Environment",
        f"### Git Information\n{bullets(header['git'])}",
        f"### Hardware\n{bullets({**hardware, 'Hourly Rate': rate})}",
        f"### Software\n{bullets(header['software'])}",
        f"\n### Bloat\n{bloat}",
        f"Run started: {time.strftime(records.TIME_FORMAT, time.localtime(started))}",
        "---",
    ]
    blocks.append("\n\n\n".join(render_section(record, figures) for record in written))
    plain = summary.score_table(scores, lambda value: f"{float(plain_value(value)):.4f}")
    blocks += ["\n## Summary", bloat, render_table(plain)]
    ends = [seconds(r["timestamp"]) for r in fixed if not r["section"].lower().endswith("rl")]
    if ends:  # without RL, as in the original
        minutes = int(max(ends) - started) // 60
        without = "" if len(ends) == len(fixed) else " (without RL)"
        blocks.append(f"Total wall clock time: {minutes // 60}h{minutes % 60}m{without}")
    if changes:
        blocks.append(render_table(summary.difference_table(changes)))
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_section(record: Record, figures: Sequence[str]) -> str:
    """
    A section: results, tables, figures; then, folded, the settings, command, provenance and cost.
    Keys of SECTIONS come first, in their order.
    """
    name, values, settings = record["section"], record["values"], record["settings"]
    origin, cost, fixed = record["provenance"], record["cost"], SECTIONS.get(name, "").split(", ")
    keys = [*fixed, *values, *settings]
    shown = {key: values[key] for key in keys if key in values}
    folded = {key: settings[key] for key in keys if key in settings and key not in values}
    spent = f"{cost['wall_seconds'] / 60:.2f}m on {cost['devices']}x {cost['device']}"
    inputs = {f"input {key}": x for key, x in origin["inputs"].items()}
    outputs = {f"output {key}": x for key, x in origin["outputs"].items()}
    made = {key: origin[key] for key in ("command", "commit", "run_id")} | inputs | outputs
    blocks = [
        f"## {escape(name)}\ntimestamp: {record['timestamp']}",
        bullets(shown),
        *(render_table(table) for table in record["tables"] if table["title"] != SAMPLES),
        render_figures(figures, slug(name)),
        "<details><summary>Settings and provenance</summary>",
        bullets({**folded, **made, "cost": spent}),
        "</details>",
    ]
    return "\n\n".join(filter(None, blocks))


def render_figures(figures: Sequence[str], section: str) -> str:
    """Links to the figures of a section, given its slug."""
    own = [name for name in figures if name.rpartition("-")[0] == section]
    return "\n".join(f"![{name}](report/figures/{name}.svg)" for name in own)


# ---- Markdown ------------------------------------------------------------------------------------


def bullets(entries: Mapping[str, Any]) -> str:
    """A list. Key and value are escaped together, so markup cannot span both."""
    lines = [escape(f"{key}: {format_value(value)}").lstrip() for key, value in entries.items()]
    return "\n".join("- " + BLOCK_START.sub(r"\1\\", line) for line in lines)


def cell(value: Any) -> str:
    """A table cell."""
    return escape(format_value(value)).replace("|", r"\|")


def escape(text: str) -> str:
    """Escape text as one line of Markdown; markup at the start of a block is not escaped."""
    return MARKDOWN_SYNTAX.sub(r"\\\g<0>", printable(text).replace("\n", r"\n"))


def format_value(value: Any) -> str:
    """Format a value for the report."""
    if isinstance(value, Mapping):  # an estimate
        text = " +- ".join(format_value(value[name]) for name in ("value", "se"))
        answers = f", k={value['k']}" if "k" in value else ""
        return f"{text} (n={value['n']:,}{answers})"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:g}"
    is_large = isinstance(value, int) and value >= 10_000
    return f"{value:,}" if is_large else str(value)


def render_table(table: Record) -> str:
    """A Markdown table with its title. Integers are printed as is, floats with 4 decimals."""
    columns, title = [cell(column) for column in table["columns"]], table.get("title")
    rule = "|".join("-" * (len(column) + 2) for column in columns)
    rows = [[str(c) if isinstance(c, int) else cell(c) for c in row] for row in table["rows"]]
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(r)} |" for r in rows)]
    return "\n".join([f"### {escape(title)}\n", *lines] if title else lines)
