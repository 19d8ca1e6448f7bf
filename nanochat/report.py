"""
The report card: report.md, rendered from the records of the stages.

    records + header (time, hardware, code version) -> render_report -> report.md with SVG figures

`render_report` is a pure function; a stage calls `update` after `records.write_record`. Names,
order and keys of the fixed sections must not change, because reports are compared line by line;
additions come after them. Reports are never parsed. Names, settings and values are untrusted text
(from models, data and users) and are escaped for Markdown.
"""

import math
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from nanochat import records, stats
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
from nanochat.records import SECTIONS, Folder, Record, plain_value, read_scores, seconds, slug

RULE_DASHES = {"GPT-2 Ratio": 14, "GPT-4 Ratio": 14}  # fixed format: one extra dash
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


Figure = tuple[str, str]  # title, path relative to the report


# ------------------------------------------------------------------------------------------------
# Public interface


def append_section(name: str, cfg: Any, values: Any, origin: Any, cost: Any, **shown: Any) -> None:
    """
    Write the record of a script and update the report. cfg: the script's config, with a field
    `report_dir`. The other arguments are those of `records.write_record`.
    """
    records.write_record(name, settings(cfg), values, origin, cost, cfg.report_dir, **shown)
    update(cfg.report_dir)


def update(
    report_dir: Folder = None,
    hourly_rate: float | None = None,
    more: Callable[..., Mapping[str, Sequence[Record]]] = lambda *about: {},
    draw: Callable[[Path, Sequence[Record]], Mapping[Path, str]] | None = None,
) -> Path:
    """
    Render the report of a record folder. Returns the path of report.md, which is in the base
    directory for the main report, else in the record folder. Prints and skips damaged records.

    hourly_rate: dollars per hour for the whole machine, saved for later calls. more(records,
    history, hourly rate per device, list for errors) -> tables of extra sections by name.
    draw(figure folder, records) -> {path: title} of the figures, e.g. `plots.draw_figures`;
    default: keep the existing figures. Raises MissingInput if there are no records.
    """
    folder, damaged = records.report_folder(report_dir), []
    home = folder if report_dir else base_dir()
    written = records.read_records(folder, damaged)
    header = read_header(folder, written, hourly_rate)
    device_rate = header["hourly_rate"] / max(1, len(header["hardware"]["gpus"]))
    tables = more(written, records.read_history(folder, damaged), device_rate, damaged)
    for each in damaged:
        print(f"skipped: {printable(each)}")
    if not written:
        raise MissingInput(f"no records in {folder}", "bash speedrun.sh")
    figures: dict[str, list[Figure]] = {}
    existing = {path: path.stem for path in sorted(folder.glob("figures/*.svg"))}
    for path, title in (draw(folder / "figures", written) if draw else existing).items():
        section, link = path.stem.rpartition("-")[0], path.relative_to(home).as_posix()
        figures.setdefault(section, []).append((title, link))
    now = time.strftime(records.TIME_FORMAT)
    write_atomic(home / "report.md", render_report(written, header, now, figures, tables, damaged))
    return home / "report.md"


# ------------------------------------------------------------------------------------------------
# Header


GIB = 1024**3
CODE = ("*.py", "*.md", "*.rs", "*.html", "*.toml", "*.sh")


def read_header(folder: Path, written: Sequence[Record], rate: float | None) -> dict[str, Any]:
    """
    Read the header (start time, hardware, code version), creating it on the first call.

    Once created, only the hourly rate changes, if `rate` is given. The run starts at the earliest
    start of a recorded stage.
    """
    path = folder / "header.json"
    if path.exists():
        header = read_json(path)
    else:
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
    if rate is not None or not path.exists():
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

    Counts tracked py, md, rs, html, toml and sh files except generated reports; 0 without git.
    `lock_lines` is 0 without uv.lock.
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
    more: Mapping[str, Sequence[Record]] = {},
    damaged: Sequence[str] = (),
) -> str:
    """
    Text of report.md, a pure function of its arguments.

    Order: fixed sections, others oldest first, sections of `more`, the summary. figures: by
    section slug. generated: date and time. damaged: errors of skipped records.
    """
    order = {name: i for i, name in enumerate(SECTIONS)}
    ordered = sorted(written, key=lambda r: (order.get(r["section"], len(order)), r["timestamp"]))
    sections = [render_section(r, figures.get(slug(r["section"]), ())) for r in ordered]
    for name, tables in more.items():
        if tables:
            sections.append("\n\n".join([f"## {name}", *map(render_table, tables)]))
    top = [render_header(header, generated)]
    for warning, items in (
        ("Provenance: these sections are inconsistent.", find_faults(ordered)),
        ("Damaged records, not included in this report.", damaged),
    ):
        if items:
            lines = [f"> [!WARNING]\n> **{warning}**", *(f"> - {escape(item)}" for item in items)]
            top.append("\n".join(lines))
    sections.append(render_summary(ordered, header))
    return "\n\n".join([*top, "\n\n\n".join(sections)]) + "\n"


def render_header(header: Record, generated: str) -> str:
    """Everything above the first section."""
    code, machine, software = header["git"], header["hardware"], header["software"]
    gpus = machine["gpus"]
    facts = {
        "Git Information": {
            "Branch": code["branch"],
            "Commit": f"{code['commit']} ({'dirty' if code['dirty'] else 'clean'})",
            "Message": code["message"][:80],
        },
        "Hardware": {
            "Platform": machine["platform"],
            "CPUs": f"{machine['cores']} cores ({machine['logical_cores']} logical)",
            "Memory": f"{machine['memory_gib']:.1f} GB",
            "GPUs": ", ".join(f"{gpus.count(n)}x {n}" for n in dict.fromkeys(gpus)) or "None",
            "GPU Memory": f"{machine['gpu_memory_gib']:.1f} GB total" if gpus else None,
            "CUDA Version": machine["cuda"] if gpus else None,
            "Hourly Rate": f"${header['hourly_rate']:.2f}/hour",
            "CPU Model": machine["cpu"],
        },
        "Software": {"Python": software["python"], "PyTorch": software["torch"]},
    }
    blocks = [f"# nanochat training report\n\nGenerated: {generated}\n\n## Environment"]
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
    """A section: fixed keys, tables, other keys, provenance, cost, figures."""
    entries = {**record["settings"], **record["values"]}
    keys = SECTIONS.get(record["section"])
    fixed = list(entries) if keys is None else keys.split(", ")
    head = [bullet(key, entries[key]) for key in fixed if key in entries]
    rest = [bullet(key, entries[key]) for key in entries if key not in fixed]
    cost = record["cost"]
    spent = f"{cost['wall_seconds'] / 60:.2f}m on {cost['devices']}x {cost['device']}"
    rest += [bullet("provenance", show_provenance(record["provenance"])), bullet("cost", spent)]
    tables = [render_table(t) for t in record["tables"]]
    lists = ["\n".join(head), *tables, "\n".join(rest)] if tables else ["\n".join(head + rest)]
    links = "\n".join(f"![{escape(title)}]({quote(link)})" for title, link in figures)
    body = "\n\n".join(block for block in [*lists, links] if block)
    return f"## {escape(record['section'])}\ntimestamp: {record['timestamp']}\n\n{body}"


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
            count += f", k={value['k']}; " + "items {}, repeats {}".format(*parts)
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
    commit = origin["commit"] + " (dirty)" * origin["dirty"]
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
# Summary: metrics by stage, differences, costs, warnings

STAGES = ("BASE", "MID", "SFT", "RL")
COLUMN_OF = {  # section -> summary column of its metrics
    **dict.fromkeys(("Base model loss", "Base model evaluation"), "BASE"),
    **{f"Chat evaluation {column.lower()}": column for column in STAGES},
}
BASE_METRICS = {"CORE metric": "CORE", "val bpb": "val bpb"}
Nested = Mapping[str, Mapping[str, Any]]


def result_metrics(written: Sequence[Record]) -> tuple[Nested, Nested]:
    """
    Collect metric -> column -> value (CORE first, ChatCORE last, the rest by name) and column ->
    metric -> recorded item scores.
    """
    found: dict[str, dict[str, Any]] = {}
    items: dict[str, dict[str, Any]] = {column: {} for column in STAGES}
    for record in written:
        if column := COLUMN_OF.get(record["section"]):
            items[column] |= {metric_name(key): each for key, each in record["items"].items()}
            for key, value in record["values"].items():
                if is_metric(record["section"], key, value):
                    found.setdefault(metric_name(key), {})[column] = value
    order = sorted(found, key=lambda name: (name != "CORE", name == "ChatCORE", name))
    return {name: found[name] for name in order}, items


def metric_name(key: str) -> str:
    """Name of a recorded value in the summary."""
    return str(BASE_METRICS.get(key, key))


def is_metric(section: str, key: str, value: Any) -> bool:
    """Whether a value belongs in the summary: CORE, val bpb, chat tasks and ChatCORE."""
    if not section.startswith("Chat evaluation"):
        return key in BASE_METRICS
    return isinstance(value, Mapping) or key in records.CHAT_TASKS.split(", ")


def diff_results(found: Nested, items: Nested, order: Sequence[str] = STAGES) -> dict[str, Any]:
    """
    Table of each metric's differences between consecutive columns that have it.

    Stages evaluated on the same items are compared item by item; otherwise the standard error
    treats them as independent measurements.
    """
    rows = []
    for name, by in found.items():
        for before, after in pairwise(column for column in order if column in by):
            same, counts = compare_items(name, items.get(before, {}), items.get(after, {})), "-"
            if same:
                change, error = same.difference, same.se
                counts = f"{same.won:,} won, {same.lost:,} lost of {same.n:,} (p = {same.p:.2g})"
            else:
                change = float(plain_value(by[after])) - float(plain_value(by[before]))
                error = math.hypot(*(records.standard_error(by[c]) for c in (before, after)))
            noise = ["-", "noise unknown"]
            if math.isfinite(error):
                gain = -change if name == "val bpb" else change
                noise = [f"{error:.4f}", stats.verdict(gain, error)]
            rows.append([name, f"{before} to {after}", f"{change:+.4f}", *noise, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


def compare_items(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric item by item; None unless both columns have scores of the same items."""
    weights = before.get(name, {}).get("weights", {name: 1.0})
    if weights != after.get(name, {}).get("weights", {name: 1.0}):
        return None
    if any(p not in before or p not in after or before[p]["of"] != after[p]["of"] for p in weights):
        return None
    parts = [stats.compare(read_scores(before[p]), read_scores(after[p])) for p in weights]
    return stats.combine(parts, list(weights.values()))


def cost_table(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of the time and cost of each stage. hourly_rate: dollars for the whole machine."""
    costs = [(r["section"], r["cost"]) for r in written]
    total = {name: sum(cost[name] for _, cost in costs) for name in records.ADDED_COSTS}
    rows = []
    for name, cost in [*costs, ("Total", total)] if costs else []:
        wall, busy = cost["wall_seconds"], cost["device_seconds"]
        devices = f"{cost['devices']}x {cost['device']}" if "device" in cost else ""
        price = f"${wall / 3600 * hourly_rate:.2f}"
        rows.append([name, f"{wall / 60:.2f}m", f"{busy / 60:.2f}m", devices, price])
    columns = ["Section", "Wall clock", "Device time", "Devices", "Cost"]
    return {"title": "Cost", "columns": columns, "rows": rows}


def find_faults(written: Sequence[Record]) -> list[str]:
    """
    Inconsistencies between sections: different runs, different commits, or a stage whose input
    is not the recorded output of the stage that produced it. Sections that evaluate or compare
    models from outside the run are ignored.
    """
    faults = []
    written = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    for what, key in {"runs": "run_id", "commits": "commit"}.items():
        groups: dict[str, list[str]] = {}
        for record in written:
            groups.setdefault(record["provenance"][key], []).append(record["section"])
        if len(groups) > 1:
            parts = [f"{name} ({', '.join(sections)})" for name, sections in groups.items()]
            faults.append(f"Sections come from {len(groups)} {what}: {'; '.join(parts)}.")
    for record in written:
        for name, read in record["provenance"]["inputs"].items():
            makers = [r for r in written if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in makers}
            if made and read not in made:
                others = " and ".join(f"{by} produced {each}" for each, by in made.items())
                faults.append(f"{record['section']} used {name} {read}, but {others}.")
    return faults


def render_summary(written: Sequence[Record], header: Record) -> str:
    """
    Size of the code, metrics by stage, wall clock time from the start to the last fixed section
    (without RL and, if it ran, with RL), differences and costs.
    """
    found, items = result_metrics(written)
    rows = [["Metric", *STAGES]]
    for name, by in found.items():
        rows.append([name, *(format_value(plain_value(by.get(column, "-"))) for column in STAGES)])
    head, *body = [[f"{row[0]:<15}", *(f"{text:<8}" for text in row[1:])] for row in rows]
    table = render_table({"columns": head, "rows": body})
    blocks = ["## Summary", render_bloat(header["bloat"]), table]
    ends = {r["section"]: seconds(r["timestamp"]) for r in written if r["section"] in SECTIONS}
    before_rl = {n: e for n, e in ends.items() if n not in ("Chat RL", "Chat evaluation rl")}
    for label, each in ("", before_rl), (" with RL", ends if ends != before_rl else {}):
        if each:
            minutes = int(max(each.values()) - seconds(header["run_started"])) // 60
            blocks.append(f"Total wall clock time{label}: {minutes // 60}h{minutes % 60}m")
    tables = [diff_results(found, items), cost_table(written, header["hourly_rate"])]
    return "\n\n".join([*blocks, *(render_table(each) for each in tables if each["rows"])])
