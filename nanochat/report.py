"""
The report card: report.md, rendered from the records of the stages.

    records + header (when, where, by which code) -> render -> report.md with its SVG figures

`render` is a pure function; `update` is what a stage calls after `records.write_record`. Names,
order and keys of the fixed sections never change, so that report cards can be compared line by
line; what we add comes after them. Nothing is read back from the text of a report. Names, settings
and values are text from elsewhere (models, data, users): `escape` makes Markdown show it as it is.
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


Figure = tuple[str, str]  # title, and file relative to the report


# ------------------------------------------------------------------------------------------------
# What stages and scripts call


def write_section(name: str, cfg: Any, values: Any, origin: Any, cost: Any, **shown: Any) -> None:
    """
    Write the record of a script and render the report again. cfg: the script's settings, one of
    which is report_dir. The others are those of `records.write_record`: values by name, a
    Provenance, a Cost, and what else is shown, such as tables.
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
    Render the report of a record folder again. Returns the path of report.md: in the base
    directory for the main report, else beside the records. Damaged records are reported.

    hourly_rate: dollars per hour of the whole machine, kept for later calls. more(all records,
    those and what they replaced, hourly rate of a device, list to which damaged files are added) ->
    tables of further sections by name. draw(folder of the figures, all records) -> files and titles
    of the figures: `plots.draw` draws them anew; by default those drawn before are shown. Raises
    MissingInput where there is no record.
    """
    folder, damaged = records.report_folder(report_dir), []
    home = folder if report_dir else base_dir()
    written = records.read_records(folder, damaged)
    header = read_header(folder, written, hourly_rate)
    device_rate = header["hourly_rate"] / max(1, len(header["hardware"]["gpus"]))
    tables = more(written, records.read_history(folder, damaged), device_rate, damaged)
    for each in damaged:
        print(f"left out: {printable(each)}")
    if not written:
        raise MissingInput(f"no stage has left a record in {folder}", "bash speedrun.sh")
    figures: dict[str, list[Figure]] = {}
    before = {path: path.stem for path in sorted(folder.glob("figures/*.svg"))}
    for path, title in (draw(folder / "figures", written) if draw else before).items():
        section, link = path.stem.rpartition("-")[0], path.relative_to(home).as_posix()
        figures.setdefault(section, []).append((title, link))
    now = time.strftime(records.TIME_FORMAT)
    write_atomic(home / "report.md", render(written, header, now, figures, tables, damaged))
    return home / "report.md"


# ------------------------------------------------------------------------------------------------
# The header's facts


GIB = 1024**3
CODE = ("*.py", "*.md", "*.rs", "*.html", "*.toml", "*.sh")


def read_header(folder: Path, written: Sequence[Record], rate: float | None) -> dict[str, Any]:
    """
    The report's header, made when the first stage ends or by `reset`: facts about this machine and
    this code, and when the first of the records' stages started. It stays as it was made, wherever
    and whenever the report is rendered again; but for the hourly rate, where one is given.
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
            "bloat": bloat(),
            "hourly_rate": records.default_rate(machine["gpus"]),
        }
    if rate is not None:
        header["hourly_rate"] = rate
    if rate is not None or not path.exists():
        write_json(path, header)
    return header


def hardware() -> dict[str, Any]:
    """Operating system, processors, memory, and the GPUs that PyTorch sees."""
    import torch  # slow to import: not for those who only want --help

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


def bloat(repository: Path = REPOSITORY) -> dict[str, int]:
    """
    The size of the code: characters, lines, files, tokens (characters // 4), lines of uv.lock.

    Counts the py, md, rs, html, toml and sh files git tracks, generated reports left out; none
    without git. `lock_lines` is 0 without uv.lock.
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


def render(
    written: Sequence[Record],
    header: Record,
    generated: str,
    figures: Mapping[str, Sequence[Figure]] = {},
    more: Mapping[str, Sequence[Record]] = {},
    damaged: Sequence[str] = (),
) -> str:
    """
    The text of report.md, a pure function of its arguments.

    Fixed sections come in their order, others after them by age, then the tables of `more`
    sections; `figures` are those of each section, by its slug. `generated` is the time to print;
    `damaged` lists records that were left out.
    """
    places = {name: i for i, name in enumerate(SECTIONS)}
    ordered = sorted(written, key=lambda r: (places.get(r["section"], len(places)), r["timestamp"]))
    sections = [render_section(r, figures.get(slug(r["section"]), ())) for r in ordered]
    for name, tables in more.items():
        if tables:
            sections.append("\n\n".join([f"## {name}", *map(render_table, tables)]))
    top = [render_header(header, generated)]
    for warning, items in (
        ("Provenance: these sections do not belong together.", find_faults(ordered)),
        ("Damaged records, left out of this report.", damaged),
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
    """The size of the code, as it stands in the header and again in the summary."""
    names = ("characters", "lines", "files", "tokens", "lock_lines")
    labels = ("Characters", "Lines", "Files", "Tokens (approx)", "Dependencies (uv.lock lines)")
    shown = dict(zip(labels, names, strict=True))
    return "\n".join(f"- {label}: {bloat[name]:,}" for label, name in shown.items())


def render_section(record: Record, figures: Sequence[Figure] = ()) -> str:
    """A section: its fixed keys, its tables, then what we add: keys, provenance, cost, figures."""
    entries = {**record["settings"], **record["values"]}
    keys = SECTIONS.get(record["section"])
    fixed = list(entries) if keys is None else keys.split(", ")
    own = [bullet(key, entries[key]) for key in fixed if key in entries]
    ours = [bullet(key, entries[key]) for key in entries if key not in fixed]
    cost = record["cost"]
    spent = f"{cost['wall_seconds'] / 60:.2f}m on {cost['devices']}x {cost['device']}"
    ours += [bullet("provenance", show_provenance(record["provenance"])), bullet("cost", spent)]
    tables = [render_table(t) for t in record["tables"]]
    lists = ["\n".join(own), *tables, "\n".join(ours)] if tables else ["\n".join(own + ours)]
    links = "\n".join(f"![{escape(title)}]({quote(link)})" for title, link in figures)
    body = "\n\n".join(block for block in [*lists, links] if block)
    return f"## {escape(record['section'])}\ntimestamp: {record['timestamp']}\n\n{body}"


def bullet(key: str, value: Any) -> str:
    """A line of a list. Key and value are escaped together: neither can pair with the other."""
    return "- " + BLOCK_START.sub(r"\1\\", escape(f"{key}: {show(value)}").lstrip())


def cell(value: Any) -> str:
    """A cell of a table."""
    return escape(show(value)).replace("|", r"\|")


def escape(text: str) -> str:
    """Text as one line of Markdown that shows it and nothing else, as long as no block begins."""
    return ACTIVE.sub(r"\\\g<0>", printable(LINE_BREAKS.sub(r"\\n", text)))


def show(value: Any) -> str:
    """A value as the report prints it."""
    if isinstance(value, Mapping):
        error = "" if value.get("se") is None else f" +- {show(value['se'])}"
        count = "" if value.get("n") is None else f"n={value['n']:,}"
        if (value.get("k") or 1) > 1:  # items asked several times, and the parts of the error
            parts = f"items {show(value['item_se'])}, repeats {show(value['repeat_se'])}"
            count += f", k={value['k']}; {parts}"
        return f"{show(value['value'])}{error}" + (count and f" ({count})")
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value)
    return str(value)


def show_provenance(origin: Record) -> str:
    """Run, commit, seed, and what went in and came out, on one line."""
    read, made = (", ".join(map(" ".join, origin[s].items())) for s in ("inputs", "outputs"))
    commit = origin["commit"] + " (dirty)" * origin["dirty"]
    flow = (read and f"; {read}") + (made and f" -> {made}")
    return f"run {origin['run_id']}, commit {commit}, seed {origin['seed']}{flow}"


def render_table(table: Record) -> str:
    """A table as Markdown, under its title. Whole numbers stand plain, others have 4 decimals."""
    columns, title = [cell(column) for column in table["columns"]], table.get("title")
    rule = "|".join("-" * RULE_DASHES.get(column, len(column) + 2) for column in columns)
    rows = [[str(c) if isinstance(c, int) else cell(c) for c in row] for row in table["rows"]]
    lines = [f"| {' | '.join(columns)} |", f"|{rule}|", *(f"| {' | '.join(r)} |" for r in rows)]
    return "\n".join([f"### {escape(title)}\n", *lines] if title else lines)


# ------------------------------------------------------------------------------------------------
# Summaries over records: metrics by stage, costs, warnings

COLUMNS = ("BASE", "MID", "SFT", "RL")
COLUMN_OF = {  # section -> the column of the summary that shows its metrics
    **dict.fromkeys(("Base model loss", "Base model evaluation"), "BASE"),
    **{f"Chat evaluation {column.lower()}": column for column in COLUMNS},
}
BASE_METRICS = {"CORE metric": "CORE", "val bpb": "val bpb"}
Nested = Mapping[str, Mapping[str, Any]]


def metrics(written: Sequence[Record]) -> tuple[Nested, Nested]:
    """
    Metric -> column -> value: CORE first, ChatCORE last, the rest by name; and column -> metric ->
    what its items scored, as the records have it.
    """
    found: dict[str, dict[str, Any]] = {}
    items: dict[str, dict[str, Any]] = {column: {} for column in COLUMNS}
    for record in written:
        if column := COLUMN_OF.get(record["section"]):
            items[column] |= {metric_name(key): each for key, each in record["items"].items()}
            for key, value in record["values"].items():
                if is_metric(record["section"], key, value):
                    found.setdefault(metric_name(key), {})[column] = value
    order = sorted(found, key=lambda name: (name != "CORE", name == "ChatCORE", name))
    return {name: found[name] for name in order}, items


def metric_name(key: str) -> str:
    """What the summary calls a value of a record."""
    return str(BASE_METRICS.get(key, key))


def is_metric(section: str, key: str, value: Any) -> bool:
    """Whether a value belongs into the summary: of a chat evaluation, its tasks and ChatCORE."""
    if not section.startswith("Chat evaluation"):
        return key in BASE_METRICS
    return isinstance(value, Mapping) or key in records.CHAT_TASKS.split(", ")


def differences(found: Nested, items: Nested, order: Sequence[str] = COLUMNS) -> dict[str, Any]:
    """
    Table of what each column changed: per metric, against the one before it that has one.

    Where both stages were asked the same items (`metrics`), these are compared one by one;
    elsewhere the standard error is that of a difference of independent measurements.
    """
    rows = []
    for name, by in found.items():
        for before, after in pairwise(column for column in order if column in by):
            same, counts = paired(name, items.get(before, {}), items.get(after, {})), "-"
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


def paired(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric on the items of two columns; None unless both have scores of the same."""
    weights = before.get(name, {}).get("weights", {name: 1.0})
    if weights != after.get(name, {}).get("weights", {name: 1.0}):
        return None
    if any(p not in before or p not in after or before[p]["of"] != after[p]["of"] for p in weights):
        return None
    parts = [stats.compare(read_scores(before[p]), read_scores(after[p])) for p in weights]
    return stats.combine(parts, list(weights.values()))


def ledger(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of what each stage took, in time and in money at the machine's hourly rate."""
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
    What breaks the chain from section to section: several runs, several versions of the code, a
    stage that read something else than what the stage before it is recorded to have made. What
    scores or compares models from outside the run is no part of the chain.
    """
    faults = []
    written = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    for what, key in {"runs": "run_id", "commits": "commit"}.items():
        groups: dict[str, list[str]] = {}
        for record in written:
            groups.setdefault(record["provenance"][key], []).append(record["section"])
        if len(groups) > 1:
            parts = [f"{name} ({', '.join(sections)})" for name, sections in groups.items()]
            faults.append(f"They come from {len(groups)} {what}: {'; '.join(parts)}.")
    for record in written:
        for name, read in record["provenance"]["inputs"].items():
            makers = [r for r in written if name in r["provenance"]["outputs"] and r is not record]
            made = {r["provenance"]["outputs"][name]: r["section"] for r in makers}
            if made and read not in made:
                others = " and ".join(f"{section} made {each}" for each, section in made.items())
                faults.append(f"{record['section']} read {name} {read}, but {others}.")
    return faults


def render_summary(written: Sequence[Record], header: Record) -> str:
    """
    Size of the code, metrics by stage; whole minutes from the start to the last fixed section
    before RL, and with RL, if it ran; then differences and costs.
    """
    found, items = metrics(written)
    rows = [["Metric", *COLUMNS]]
    for name, by in found.items():
        rows.append([name, *(show(plain_value(by.get(column, "-"))) for column in COLUMNS)])
    head, *body = [[f"{row[0]:<15}", *(f"{text:<8}" for text in row[1:])] for row in rows]
    table = render_table({"columns": head, "rows": body})
    blocks = ["## Summary", render_bloat(header["bloat"]), table]
    ends = {r["section"]: seconds(r["timestamp"]) for r in written if r["section"] in SECTIONS}
    before_rl = {n: e for n, e in ends.items() if n not in ("Chat RL", "Chat evaluation rl")}
    for label, each in ("", before_rl), (" with RL", ends if ends != before_rl else {}):
        if each:
            minutes = int(max(each.values()) - seconds(header["run_started"])) // 60
            blocks.append(f"Total wall clock time{label}: {minutes // 60}h{minutes % 60}m")
    tables = [differences(found, items), ledger(written, header["hourly_rate"])]
    return "\n\n".join([*blocks, *(render_table(each) for each in tables if each["rows"])])
