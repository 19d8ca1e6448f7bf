"""
The report card: report.md, rendered from the records of the stages.

    records + header (when, where, by which code) -> render -> report.md with its SVG figures

`render` is a pure function; `update` is what a stage calls after `records.write_record`. Names,
order and keys of the fixed sections never change, so that report cards can be compared line by
line; what we add comes after them. Nothing is read back from the text of a report. Names, settings
and values are text from elsewhere (models, data, users): `escape` makes Markdown show it as it is.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple
from urllib.parse import quote

from nanochat import common
from nanochat.common import (
    base_dir,
    printable,
    read_json,
    write_atomic,
    write_json,
)
from nanochat.records import (
    COLUMNS,
    SECTIONS,
    TIME_FORMAT,
    Record,
    differences,
    find_faults,
    ledger,
    metrics,
    plain_value,
    read_history,
    read_records,
    report_folder,
    scores_by_item,
    seconds,
    slug,
    wall_clock,
)

RULE_DASHES = {"GPT-2 Ratio": 14, "GPT-4 Ratio": 14}  # fixed text: a dash more than the others
# What Markdown (CommonMark and GitHub's extensions of it) would not show as it is, within a line
ACTIVE = re.compile(
    r"""
    [`\[\]]                           # code, links, images
    | \\(?=[!-/:-@\[-`{-~]|$)         # escapes
    | <(?=[a-z/!?]|[^\s<>]*@)         # HTML, links; not a special token such as <|bos|>
    | &(?=\#?\w+;)                    # entities
    | (?<![^\W_])_ | _(?![^\W_])      # emphasis; not within a word
    | \*(?=[^*]*\*) | ~(?=[^~]*~) | \$(?=[^$]*\$)  # emphasis, formulas: all but the last
    | :(?=//) | (?<=\bwww)\. | (?<=\w)@(?=\w)  # addresses that become links
    """,
    re.VERBOSE | re.IGNORECASE,
)
BLOCK_START = re.compile(  # of a heading, a list, a rule, a quote, a numbered list
    r"^((?=#{1,6}(\s|$)|[-+*](\s|$)|[-=]+\s*$|>)|\d{1,9}(?=[.)](\s|$)))"
)
LINE_BREAKS = re.compile(r"\r\n|[\r\n\v\f\x85\u2028\u2029]")


Table = Mapping[str, Any]
# All records and those that they replaced, the hourly rate of a device, a list to which damaged
# files are added -> tables by the name of their section
MoreSections = Callable[
    [Sequence[Record], Sequence[Record], float, list[str]], Mapping[str, Sequence[Table]]
]


def no_more_sections(*about: Any) -> Mapping[str, Sequence[Table]]:
    """The default: a report of its records alone."""
    return {}


class Figure(NamedTuple):
    """A drawing of a section: its title, and its file relative to the report."""

    title: str
    link: str


# ------------------------------------------------------------------------------------------------
# What stages and scripts call


def update(
    report_dir: Path | str | None = None,
    hourly_rate: float | None = None,
    redraw: bool = False,
    more: MoreSections = no_more_sections,
) -> Path:
    """
    Render the report of a record folder again. Returns the path of report.md: in the base
    directory for the main report, else beside the records.

    hourly_rate: dollars per hour of the whole machine, kept for later calls. redraw: all figures,
    not only those of records that are newer. more: makes further sections of all records.
    """
    folder = report_folder(report_dir)
    report = report_path(report_dir)
    write_report(folder, report, folder / "figures", hourly_rate, redraw, more)
    return report


def export(
    out: Path, report_dir: Path | str | None = None, more: MoreSections = no_more_sections
) -> Path:
    """Render the report into another folder: report.md there, its figures in dev/report/."""
    folder = report_folder(report_dir)
    write_report(folder, out / "report.md", out / "dev" / "report", more=more)
    return out / "report.md"


def reset(report_dir: Path | str | None = None, hourly_rate: float | None = None) -> Path | None:
    """
    Start a new report: its header is made now. What the old one had moves to a folder
    archive-<time> beside it, whose path is returned; nothing is deleted.
    """
    folder = report_folder(report_dir)
    old = {path for path in folder.iterdir() if not path.name.startswith((".", "archive-"))}
    old |= {path for path in [report_path(report_dir)] if path.exists()}
    archive = None
    if old:
        archive = Path(mkdtemp(prefix=time.strftime("archive-%Y%m%d-%H%M%S-"), dir=folder))
        archive.chmod(0o755)  # mkdtemp makes it private
        for path in old:
            shutil.move(path, archive / path.name)
    write_json(folder / "header.json", make_header(time.strftime(TIME_FORMAT), hourly_rate))
    return archive


def report_path(report_dir: Path | str | None = None) -> Path:
    """Where the report of a record folder goes."""
    return (report_folder(report_dir) if report_dir else base_dir()) / "report.md"


def write_report(
    folder: Path,
    report: Path,
    figure_folder: Path,
    hourly_rate: float | None = None,
    redraw: bool = True,
    more: MoreSections = no_more_sections,
) -> None:
    """Draw, render and write; figures that the report no longer shows are removed."""
    from nanochat.plots import drawings  # brings matplotlib: not for those who only want --help

    damaged: list[str] = []
    records = read_records(folder, damaged)
    header = header_of(folder, records, hourly_rate)
    figures: dict[str, list[Figure]] = {}
    for record in records:
        written = (folder / f"{slug(record['section'])}.json").stat().st_mtime
        for name, (title, draw) in drawings(record).items():
            path = figure_folder / f"{slug(record['section'])}-{name}.svg"
            if redraw or not path.exists() or path.stat().st_mtime < written:
                write_atomic(path, draw())
            link = Path(os.path.relpath(path, report.parent)).as_posix()
            figures.setdefault(record["section"], []).append(Figure(title, link))
    shown = {Path(figure.link).name for drawn in figures.values() for figure in drawn}
    for stale in (path for path in figure_folder.glob("*.svg") if path.name not in shown):
        stale.unlink()
    history = read_history(folder, damaged)
    device_rate = header["hourly_rate"] / max(1, len(header["hardware"]["gpus"]))
    tables = more(records, history, device_rate, damaged)
    now = time.strftime(TIME_FORMAT)
    write_atomic(report, render(records, header, now, figures, tables, damaged))


# ------------------------------------------------------------------------------------------------
# The header's facts


def header_of(folder: Path, records: Sequence[Record], hourly_rate: float | None) -> Record:
    """
    The report's header: that of `reset`, or made when the first stage ends without one.

    It stays as it was made, wherever and whenever the report is rendered again.
    """
    path = folder / "header.json"
    if path.exists() and hourly_rate is None:
        return read_json(path)
    if path.exists():
        header = {**read_json(path), "hourly_rate": hourly_rate}
    else:
        header = make_header(first_start(records), hourly_rate)
    write_json(path, header)
    return header


def make_header(run_started: str, hourly_rate: float | None) -> dict[str, Any]:
    """Facts about this machine and this code."""
    hardware = common.hardware()
    return {
        "run_started": run_started,
        "git": common.git_state(),
        "hardware": hardware,
        "software": common.software(),
        "bloat": common.bloat(),
        "hourly_rate": common.default_rate(hardware["gpus"])
        if hourly_rate is None
        else hourly_rate,
    }


def first_start(records: Sequence[Record]) -> str:
    """When the first of the records' stages started; now, without records."""
    starts = [seconds(r["timestamp"]) - r["cost"]["wall_seconds"] for r in records]
    return time.strftime(TIME_FORMAT, time.localtime(min(starts, default=time.time())))


# ------------------------------------------------------------------------------------------------
# Rendering


def render(
    records: Sequence[Record],
    header: Record,
    generated: str,
    figures: Mapping[str, Sequence[Figure]] = {},
    more: Mapping[str, Sequence[Table]] = {},
    damaged: Sequence[str] = (),
) -> str:
    """
    The text of report.md, a pure function of its arguments.

    Fixed sections come in their order, others after them by age, then the tables of `more`
    sections; `figures` are those of each section. `generated` is the time to print; `damaged` lists
    records that were left out.
    """
    by_name = {record["section"]: record for record in sorted(records, key=by_age)}
    order = [name for name in SECTIONS if name in by_name]
    order += [name for name in by_name if name not in SECTIONS]
    ordered = [by_name[name] for name in order]
    sections = [render_section(record, figures.get(record["section"], ())) for record in ordered]
    sections += [
        "\n\n".join([f"## {name}", *(render_table(table) for table in tables)])
        for name, tables in more.items()
        if tables
    ]
    warnings = [*render_faults(ordered), *render_damage(damaged)]
    top = "\n\n".join([render_header(header, generated), *warnings])
    return top + "\n\n" + "\n\n\n".join([*sections, render_summary(ordered, header)]) + "\n"


def by_age(record: Record) -> str:
    """Sorts records from old to new."""
    return record["timestamp"]


def render_header(header: Record, generated: str) -> str:
    """Everything above the first section."""
    git, machine, software = header["git"], header["hardware"], header["software"]
    gpus = machine["gpus"]
    lines = [
        f"# nanochat training report\n\nGenerated: {generated}\n\n## Environment\n",
        "### Git Information",
        bullet("Branch", git["branch"]),
        bullet("Commit", f"{git['commit']} ({'dirty' if git['dirty'] else 'clean'})"),
        bullet("Message", git["message"][:80]),
        "\n### Hardware",
        bullet("Platform", machine["platform"]),
        f"- CPUs: {machine['cores']} cores ({machine['logical_cores']} logical)",
        f"- Memory: {machine['memory_gib']:.1f} GB",
        bullet("GPUs", ", ".join(counted(gpus)) if gpus else "None"),
        *([f"- GPU Memory: {machine['gpu_memory_gib']:.1f} GB total"] if gpus else []),
        *([bullet("CUDA Version", machine["cuda"])] if gpus else []),
        f"- Hourly Rate: ${header['hourly_rate']:.2f}/hour",
        bullet("CPU Model", machine["cpu"]),
        "\n### Software",
        bullet("Python", software["python"]),
        bullet("PyTorch", software["torch"]),
        "\n\n### Bloat",
        render_bloat(header["bloat"]),
        f"\nRun started: {header['run_started']}\n\n---",
    ]
    return "\n".join(lines)


def counted(names: Sequence[str]) -> list[str]:
    """`8x name` for each distinct name."""
    return [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]


def render_bloat(bloat: Mapping[str, int]) -> str:
    """The size of the code, as it stands in the header and again in the summary."""
    names = {
        "characters": "Characters",
        "lines": "Lines",
        "files": "Files",
        "tokens": "Tokens (approx)",
        "lock_lines": "Dependencies (uv.lock lines)",
    }
    shown = {name: label for name, label in names.items() if bloat[name] or name != "lock_lines"}
    return "\n".join(f"- {label}: {bloat[name]:,}" for name, label in shown.items())


def render_section(record: Record, figures: Sequence[Figure] = ()) -> str:
    """A section: its fixed keys, its tables, then what we add: keys, provenance, cost, figures."""
    fixed = fixed_keys(record)
    entries = {**record["settings"], **record["values"]}
    ours = [bullet(key, value) for key, value in entries.items() if key not in fixed]
    ours += [bullet("provenance", show_provenance(record))]
    ours += [bullet("cost", show_cost(record["cost"]))]
    own = [bullet(key, entries[key]) for key in fixed if key in entries]
    tables = [render_table(t) for t in record["tables"]]
    lists = ["\n".join(own), *tables, "\n".join(ours)] if tables else ["\n".join(own + ours)]
    links = "\n".join(f"![{escape(figure.title)}]({quote(figure.link)})" for figure in figures)
    body = "\n\n".join(block for block in [*lists, links] if block)
    return f"## {escape(record['section'])}\ntimestamp: {record['timestamp']}\n\n{body}"


def fixed_keys(record: Record) -> list[str]:
    """The keys that open a section, in order; all it has where nothing is fixed."""
    if record["section"] in SECTIONS:
        return SECTIONS[record["section"]].split(", ")
    return [*record["settings"], *record["values"]]


def bullet(key: str, value: Any) -> str:
    """A line of a list. Key and value are escaped together: neither can pair with the other."""
    return "- " + BLOCK_START.sub(r"\1\\", escape(f"{key}: {show(value)}").lstrip())


def cell(value: Any) -> str:
    """A cell of a table."""
    return escape(show(value)).replace("|", r"\|")


def escape(text: str) -> str:
    """Text as one line of Markdown that shows it and nothing else, as long as no block begins."""
    return ACTIVE.sub(r"\\\g<0>", one_line(text))


def one_line(text: str) -> str:
    """Text without line breaks and control characters: both as escapes."""
    return printable(LINE_BREAKS.sub(r"\\n", text))


def show(value: Any) -> str:
    """A value as the report prints it, on one line."""
    if isinstance(value, Mapping):
        error = "" if value.get("se") is None else f" +- {show(value['se'])}"
        count = "" if value.get("n") is None else f" (n={value['n']:,}{show_repeats(value)})"
        return f"{show(value['value'])}{error}{count}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value)
    return one_line(str(value))


def show_repeats(value: Mapping[str, Any]) -> str:
    """Of items asked several times: how often, and the parts of the error."""
    if (value.get("k") or 1) == 1:
        return ""
    return f", k={value['k']}; items {show(value['item_se'])}, repeats {show(value['repeat_se'])}"


def show_provenance(record: Record) -> str:
    """Run, commit, seed, and what went in and came out, on one line."""
    origin = record["provenance"]
    dirty = " (dirty)" if origin["dirty"] else ""
    ways = [
        ", ".join(f"{name} {print_}" for name, print_ in origin[side].items())
        for side in ("inputs", "outputs")
    ]
    flow = f"; {ways[0]}" if ways[0] else ""
    flow += f" -> {ways[1]}" if ways[1] else ""
    return f"run {origin['run_id']}, commit {origin['commit']}{dirty}, seed {origin['seed']}{flow}"


def show_cost(cost: Record) -> str:
    """Wall clock and devices, on one line."""
    return f"{cost['wall_seconds'] / 60:.2f}m on {cost['devices']}x {cost['device']}"


def render_table(table: Record) -> str:
    """A table as Markdown, under its title. Whole numbers stand plain, others have 4 decimals."""
    columns, title = [cell(column) for column in table["columns"]], table.get("title")
    rule = "|".join("-" * RULE_DASHES.get(column, len(column) + 2) for column in columns)
    rows = [[str(c) if isinstance(c, int) else cell(c) for c in row] for row in table["rows"]]
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(r)} |" for r in rows)]
    return "\n".join([f"### {escape(title)}\n", *lines] if title else lines)


def render_faults(records: Sequence[Record]) -> list[str]:
    """A warning, where the sections do not belong together; nothing where they do."""
    faults = find_faults(records)
    if not faults:
        return []
    head = "> [!WARNING]\n> **Provenance: these sections do not belong together.**"
    return ["\n".join([head, *(f"> - {escape(fault)}" for fault in faults)])]


def render_damage(damaged: Sequence[str]) -> list[str]:
    """A warning that names the damaged records, which the report leaves out."""
    if not damaged:
        return []
    head = "> [!WARNING]\n> **Damaged records, left out of this report.**"
    return ["\n".join([head, *(f"> - {escape(each)}" for each in damaged)])]


# ------------------------------------------------------------------------------------------------
# The summary


def render_summary(records: Sequence[Record], header: Record) -> str:
    """Size of the code, metrics by stage, wall clock; then differences and costs."""
    found = metrics(records)
    blocks = ["## Summary", render_bloat(header["bloat"]), render_metrics(found)]
    for label, minutes in wall_clock(records, header["run_started"]).items():
        blocks.append(f"{label}: {minutes // 60}h{minutes % 60}m")
    tables = [differences(found, scores_by_item(records)), ledger(records, header["hourly_rate"])]
    return "\n\n".join([*blocks, *(render_table(table) for table in tables if table["rows"])])


def render_metrics(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the summary, one column per stage."""
    rows = [
        [cell(name), *(cell(plain_value(by[c])) if c in by else "-" for c in COLUMNS)]
        for name, by in found.items()
    ]
    lines = [["Metric", *COLUMNS], *rows]
    cells = [[line[0].ljust(15), *(cell.ljust(8) for cell in line[1:])] for line in lines]
    text = [f"| {' | '.join(line)} |" for line in cells]
    rule = "|".join(["-" * 17, *["-" * 10] * len(COLUMNS)])
    return "\n".join([text[0], f"|{rule}|", *text[1:]])
