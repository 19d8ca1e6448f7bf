"""
The report card: report.md, rendered from the records of the stages.

    records + header (time, hardware, code version) -> render_report -> report.md with SVG figures

`render_report` is a pure function; a stage calls `update` after `records.write_record`. The report
opens with a verdict, a table of results, samples and costs. Each section shows results first and
folds the rest. Names, order and keys of the fixed sections must not change, because reports are
compared line by line; additions come after them. Reports are never parsed. Names, settings and
values are untrusted text (from models, data and users) and are escaped for Markdown.
"""

import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from nanochat import records, summary
from nanochat.common import (
    REPOSITORY,
    MissingInput,
    base_dir,
    cpu_info,
    printable,
    read_json,
    write_atomic,
    write_json,
)
from nanochat.config import settings
from nanochat.records import SECTIONS, Folder, Record, plain_value, seconds, slug
from nanochat.summary import Difference, shown_name

RULE_DASHES = {"GPT-2 Ratio": 14, "GPT-4 Ratio": 14}  # one too many, as published
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
LINE_BREAKS = re.compile(r"\r\n|[\r\n\v\f\x85\u2028\u2029]")
SAMPLES = "Sample conversations"  # table of a record shown at the top of the report


Figure = tuple[str, str]  # title, path relative to the report


# ------------------------------------------------------------------------------------------------
# Public interface


def append_section(
    name: str, cfg: Any, values: Any, origin: Any, cost: records.Cost | None = None, **shown: Any
) -> None:
    """
    Print the tables of a script, write its record and update the report. cfg: the script's config,
    with a field `report_dir`. cost: default: of one CPU since the start of the process. The other
    arguments are those of `records.write_record`.
    """
    for table in shown.get("tables", ()):
        print(render_table(table), flush=True)
    cost = cost or records.Cost.so_far()
    records.write_record(name, settings(cfg), values, origin, cost, cfg.report_dir, **shown)
    update(cfg.report_dir, renew=bool(origin.outputs))


def update(
    report_dir: Folder = None,
    hourly_rate: float | None = None,
    draw: Callable[[Path, Sequence[Record]], Mapping[Path, str]] | None = None,
    renew: bool = False,
) -> Path:
    """
    Render the report of a record folder. Returns the path of report.md, which is in the base
    directory for the main report, else in the record folder.

    hourly_rate: dollars per hour for the whole machine, saved for later calls.
    draw(figure folder, records) -> {path: title} of the figures, e.g. `plots.draw_figures`;
    default: keep the existing figures. renew: set by a stage that has run on this machine, which
    the header describes from then on. Raises MissingInput if there are no records.
    """
    folder = records.report_folder(report_dir)
    home = folder if report_dir else base_dir()
    written = records.read_records(folder)
    if not written:
        raise MissingInput(f"no records in {folder}", "bash speedrun.sh")
    header = read_header(folder, written, hourly_rate, renew)
    figures: dict[str, list[Figure]] = {}
    existing = {path: path.stem for path in sorted(folder.glob("figures/*.svg"))}
    for path, title in (draw(folder / "figures", written) if draw else existing).items():
        section, link = path.stem.rpartition("-")[0], path.relative_to(home).as_posix()
        figures.setdefault(section, []).append((title, link))
    now = time.strftime(records.TIME_FORMAT)
    write_atomic(home / "report.md", render_report(written, header, now, figures))
    return home / "report.md"


# ------------------------------------------------------------------------------------------------
# Header


GIB = 1024**3
HEADER = {"run_started", "git", "hardware", "software", "bloat", "hourly_rate"}
CODE = ("*.py", "*.md", "*.rs", "*.html", "*.js", "*.css", "*.toml", "*.sh")


def read_header(
    folder: Path, written: Sequence[Record], rate: float | None = None, renew: bool = False
) -> dict[str, Any]:
    """
    Read the header (start time, hardware, code version), creating it on the first call and if
    `renew` is set: it describes the machine of the newest stage, not that of a later evaluation.

    rate: dollars per hour, kept from then on. The run starts at the earliest start of a recorded
    stage.
    """
    path = folder / "header.json"
    header = read_json(path) if path.exists() else {}
    if header and (missing := HEADER - header.keys()):
        print(printable(f"{path} has no {', '.join(sorted(missing))}: written again"), flush=True)
        header = {}
    if header and header["hourly_rate"] != records.default_rate(header["hardware"]["gpus"]):
        rate = header["hourly_rate"] if rate is None else rate  # set by the user
    if is_new := renew or not header:
        starts = [seconds(r["timestamp"]) - r["cost"]["wall_seconds"] for r in written]
        started = time.localtime(min(starts, default=time.time()))
        machine = hardware()
        header = {
            "run_started": time.strftime(records.TIME_FORMAT, started),
            "git": records.git_state(),
            "hardware": machine,
            "software": {"python": platform.python_version(), "torch": version("torch")},
            "bloat": code_size(),
            "hourly_rate": records.default_rate(machine["gpus"]),
        }
    if rate is not None:
        header["hourly_rate"] = rate
    if rate is not None or is_new:
        write_json(path, header)
    return header


def hardware() -> dict[str, Any]:
    """Operating system, CPUs, memory, and the GPUs visible to PyTorch."""
    import torch  # slow to import; not needed for --help

    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "platform": platform.system(),
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "logical_cores": psutil.cpu_count() or 1,
        "memory_gib": psutil.virtual_memory().total / GIB,
        "gpus": [card.name for card in cards],
        "gpu_memory_gib": sum(card.total_memory for card in cards) / GIB,
        "cuda": torch.version.cuda or "unknown",
    }


def code_size(repository: Path = REPOSITORY) -> dict[str, int]:
    """
    Size of the code: characters, lines, files, tokens (characters // 4), lines of uv.lock.

    Counts tracked py, md, rs, html, js, css, toml and sh files except generated reports; 0 without
    git. `lock_lines` is 0 without uv.lock.
    """
    names = records.git(repository, "ls-files", "-z", "--", *CODE, *records.WITHOUT_REPORT)
    paths = [repository / name for name in names.split("\0")]
    texts = [path.read_text("utf-8", "replace") for path in paths if path.is_file()]
    characters = sum(map(len, texts))
    lock = repository / "uv.lock"
    return {
        "characters": characters,
        "lines": sum(len(text.splitlines()) for text in texts),
        "files": len(texts),
        "tokens": characters // 4,
        "lock_lines": len(lock.read_text().splitlines()) if lock.exists() else 0,
    }


# ------------------------------------------------------------------------------------------------
# Rendering


def render_report(
    written: Sequence[Record],
    header: Record,
    generated: str,
    figures: Mapping[str, Sequence[Figure]] = {},
) -> str:
    """
    Text of report.md, a pure function of its arguments.

    Order: results, environment, fixed sections, others oldest first, the summary. figures: by
    section slug; "results" for the top. generated: date and time.
    """
    order = {name: i for i, name in enumerate(SECTIONS)}
    ordered = sorted(written, key=lambda r: (order.get(r["section"], len(order)), r["timestamp"]))
    sections = [render_section(r, figures.get(slug(r["section"]), ())) for r in ordered]
    parents = summary.parent_columns(ordered)
    changes = summary.differences(*summary.result_metrics(ordered), parents)
    top = [f"# nanochat training report\n\nGenerated: {generated}"]
    top.append(render_results(ordered, header, figures.get("results", ()), changes))
    top.append(render_header(header))
    if faults := summary.find_faults(ordered):
        lines = ["> [!WARNING]", "> **Provenance: these sections are inconsistent.**"]
        top.append("\n".join([*lines, *(f"> - {escape(fault)}" for fault in faults)]))
    sections.append(render_summary(ordered, header, changes))
    return "\n\n".join([*top, "\n\n\n".join(sections)]) + "\n"


def render_header(header: Record) -> str:
    """Code version, hardware and software."""
    code, machine, software = header["git"], header["hardware"], header["software"]
    gpus = machine["gpus"]
    state = {True: " (dirty)", False: " (clean)", None: ""}[code["dirty"]]
    facts = {
        "Git Information": {
            "Branch": code["branch"],
            "Commit": f"{code['commit']}{state}",
            "Message": code["message"][:80],
        },
        "Hardware": {
            "Platform": machine["platform"],
            "CPUs": f"{machine['cores']} cores ({machine['logical_cores']} logical)",
            "Memory": f"{machine['memory_gib']:.1f} GB",
            "GPUs": summary.machine(header) if gpus else "None",
            "GPU Memory": f"{machine['gpu_memory_gib']:.1f} GB total" if gpus else None,
            "CUDA Version": machine["cuda"] if gpus else None,
            "Hourly Rate": f"${header['hourly_rate']:.2f}/hour",
            "CPU Model": machine["cpu"],
        },
        "Software": {"Python": software["python"], "PyTorch": software["torch"]},
    }
    blocks = ["## Environment"]
    for title, entries in facts.items():
        lines = [bullet(key, value) for key, value in entries.items() if value is not None]
        blocks.append("\n".join([f"### {title}", *lines]))
    blocks.append(f"\n### Bloat\n{render_bloat(header['bloat'])}")
    return "\n\n".join([*blocks, f"Run started: {header['run_started']}", "---"])


def render_bloat(bloat: Mapping[str, int]) -> str:
    """Size of the code, for the header and the summary."""
    names = ("characters", "lines", "files", "tokens", "lock_lines")
    labels = ("Characters", "Lines", "Files", "Tokens (approx)", "Dependencies (uv.lock lines)")
    shown = dict(zip(labels, names, strict=True))
    return "\n".join(f"- {label}: {bloat[name]:,}" for label, name in shown.items())


def render_section(record: Record, figures: Sequence[Figure] = ()) -> str:
    """
    A section: results, tables, figures, command; then, folded, the settings, provenance and cost.
    Keys of SECTIONS come first, in their order.
    """
    name, values = record["section"], record["values"]
    entries, fixed = {**record["settings"], **values}, SECTIONS.get(name, "").split(", ")
    front, folded = [], []
    for key in [*fixed, *(key for key in entries if key not in fixed)]:
        if key in entries:
            is_auto = key not in values and entries[key] in ("", -1)
            text = bullet(shown_name(record, key), "auto" if is_auto else entries[key])
            (front if key in values else folded).append(text)
    cost = record["cost"]
    spent = f"{cost['wall_seconds'] / 60:.2f}m on {cost['devices']}x {cost['device']}"
    folded += [bullet("provenance", show_provenance(record["provenance"])), bullet("cost", spent)]
    blocks = ["\n".join(front)]
    blocks += [render_table(table) for table in record["tables"] if table["title"] != SAMPLES]
    blocks.append("\n".join(f"![{escape(title)}]({quote(link)})" for title, link in figures))
    if command := record["provenance"].get("command"):
        code = printable(LINE_BREAKS.sub(" ", command)).replace("`", "'")  # cannot end the span
        blocks.append(f"`{code}`")
    lines = "\n".join(folded)
    blocks.append(f"<details><summary>Settings and provenance</summary>\n\n{lines}\n\n</details>")
    body = "\n\n".join(filter(None, blocks))
    return f"## {escape(name)}\ntimestamp: {record['timestamp']}\n\n{body}"


def bullet(key: str, value: Any) -> str:
    """A list item. Key and value are escaped together, so markup cannot span both."""
    return "- " + BLOCK_START.sub(r"\1\\", escape(f"{key}: {format_value(value)}").lstrip())


def cell(value: Any) -> str:
    """A table cell."""
    return escape(format_value(value)).replace("|", r"\|")


def escape(text: str) -> str:
    """Escape text as one line of Markdown; markup at the start of a block is not escaped."""
    return MARKDOWN_SYNTAX.sub(r"\\\g<0>", printable(LINE_BREAKS.sub(r"\\n", text)))


def format_value(value: Any) -> str:
    """Format a value for the report."""
    if isinstance(value, Mapping):
        error = "" if value.get("se") is None else f" +- {format_value(value['se'])}"
        count = "" if value.get("n") is None else f"n={value['n']:,}"
        if (value.get("k") or 1) > 1:  # items sampled k times, and the parts of the error
            parts = (format_value(value[name]) for name in ("item_se", "repeat_se"))
            count += f", k={value['k']}"
            count += "; items {}, repeats {}".format(*parts) if value["item_se"] is not None else ""
        return f"{format_value(value['value'])}{error}" + (count and f" ({count})")
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return str(value)


def show_provenance(origin: Record) -> str:
    """Run, commit, seed, inputs and outputs on one line."""
    read, made = (", ".join(map(" ".join, origin[s].items())) for s in ("inputs", "outputs"))
    commit = origin["commit"] + " (dirty)" * bool(origin["dirty"])
    flow = (read and f"; {read}") + (made and f" -> {made}")
    return f"run {origin['run_id']}, commit {commit}, seed {origin['seed']}{flow}"


def render_table(table: Record) -> str:
    """A Markdown table with its title. Integers are printed as is, floats with 4 decimals."""
    columns, title = [cell(column) for column in table["columns"]], table.get("title")
    rule = "|".join("-" * RULE_DASHES.get(column, len(column) + 2) for column in columns)
    rows = [[str(c) if isinstance(c, int) else cell(c) for c in row] for row in table["rows"]]
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(r)} |" for r in rows)]
    return "\n".join([f"### {escape(title)}\n", *lines] if title else lines)


# ------------------------------------------------------------------------------------------------
# Top of the report and summary


def render_results(
    written: Sequence[Record], header: Record, figures: Sequence[Figure], changes: Sequence
) -> str:
    """What a reader wants first: verdict, scores by stage, figure, sample conversations, cost."""
    found, _ = summary.result_metrics(written)
    columns = summary.shown_stages(found)
    rows = [
        [name, *(summary.with_error(by[c]) if c in by else "-" for c in columns)]
        for name, by in found.items()
    ]
    blocks = ["## Results", escape(summary.verdict(written, header, changes))]
    if rows:
        names = [summary.STAGE_NAMES[c] for c in columns]
        blocks.append(render_table({"columns": ["", *names], "rows": rows}))
    blocks.append("\n".join(f"![{escape(title)}]({quote(link)})" for title, link in figures))
    samples = [(r, t) for r in written for t in r["tables"] if t["title"] == SAMPLES]
    if samples:
        record, table = samples[-1]  # of the last stage
        title = f"{SAMPLES} ({record['section'].removeprefix('Chat evaluation ')})"
        rows = [[" ".join(text.split()) for text in row] for row in table["rows"]]
        blocks.append(render_table({**table, "title": title, "rows": rows}))
    blocks.append(render_table(summary.cost_table(written, header["hourly_rate"])))
    return "\n\n".join(filter(None, blocks))


def render_summary(written: Sequence[Record], header: Record, changes: Sequence[Difference]) -> str:
    """
    Size of the code, metrics by stage, wall clock time from the start to the last fixed section
    (without RL and, if it ran, with RL), and differences.
    """
    found, _ = summary.result_metrics(written)
    columns = summary.shown_stages(found)
    rows = [["Metric", *columns]]
    for name, by in found.items():
        rows.append([name, *(format_value(plain_value(by.get(column, "-"))) for column in columns)])
    head, *body = [[f"{row[0]:<15}", *(f"{text:<8}" for text in row[1:])] for row in rows]
    table = render_table({"columns": head, "rows": body})
    blocks = ["## Summary", render_bloat(header["bloat"]), table]
    ends = {r["section"]: seconds(r["timestamp"]) for r in written if r["section"] in SECTIONS}
    before_rl = {n: e for n, e in ends.items() if n not in ("Chat RL", "Chat evaluation rl")}
    for label, each in ("", before_rl), (" with RL", ends if ends != before_rl else {}):
        if each:
            minutes = int(max(each.values()) - seconds(header["run_started"])) // 60
            blocks.append(f"Total wall clock time{label}: {minutes // 60}h{minutes % 60}m")
    if changes:
        blocks.append(render_table(summary.difference_table(changes)))
    return "\n\n".join(blocks)
