"""
The report: report.md, rendered from the records of the stages.

    records + header (time, hardware, code version) -> render_report -> report.md with SVG figures

`render_report` is a pure function; a stage calls `update` after `records.write_record`. The report
opens with a verdict, a table of results, samples and costs. Each section shows results first and
folds the rest. Names, order and keys of the fixed sections must not change, because reports are
compared line by line; additions come after them. Reports are never parsed. Names, settings and
values are untrusted text (from models, data and users) and are escaped for Markdown.
"""

import math
import platform
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nanochat import records, stats
from nanochat.common import (
    REPOSITORY,
    MissingInput,
    cpu_info,
    hold_lock,
    printable,
    read_json,
    write_atomic,
    write_json,
)
from nanochat.config import settings
from nanochat.recipe import make_recipe
from nanochat.records import (
    SECTIONS,
    Record,
    plain_value,
    read_clusters,
    read_scores,
    readable_time,
    seconds,
    slug,
    standard_error,
)

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
    name: str, cfg: Any, values: Any, inputs: Any, cost: records.Cost | None = None, **shown: Any
) -> None:
    """
    Print the tables of a script, write its record and update the report. cfg: the script's config.
    cost: default: of one CPU since the start of the process. The other arguments are those of
    `records.write_record`.
    """
    for table in shown.get("tables", ()):
        print(render_table(table), flush=True)
    cost = cost or records.Cost.so_far()
    recipe = make_recipe(cfg, inputs)
    records.write_record(name, settings(cfg), values, inputs, cost, recipe=recipe, **shown)
    update(renew="outputs" in shown)


def update(
    hourly_rate: float | None = None, renew: bool = False, figures: Sequence[str] = ()
) -> Path:
    """
    Render the report of all current records. Returns the path of report.md.

    hourly_rate: dollars per hour for the whole machine, saved for later calls. renew: set by a
    stage that has run on this machine, which the header describes from then on. figures: names of
    those in report/figures to show. Raises MissingInput if there are no records.
    """
    folder = records.report_folder()
    path = folder.parent / "report.md"
    with hold_lock(folder / ".lock", "writing the report"):
        written = records.read_records()
        if not written:
            raise MissingInput(f"no records in {folder}", "bash speedrun.sh")
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
    if renew or "git" not in header:
        header |= {
            "git": records.git_state(),
            "hardware": hardware(),
            "software": {"Python": platform.python_version(), "PyTorch": version("torch")},
            "gpus": gpu_names(),
            "bloat": code_size(),
        }
    if rate is not None:
        header["hourly_rate"] = rate
    write_json(path, header)
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

    Counts tracked py, md, rs, html, js, css, toml and sh files except report.md; 0 without git.
    Dependencies are 0 without uv.lock.
    """
    names = records.git(repository, "ls-files", "-z", "--", *CODE, ":(exclude)report.md")
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
    written = sorted(written, key=lambda r: seconds(r["timestamp"]))
    written.sort(key=lambda r: order.get(r["section"], len(order)))
    scores = collect_scores(written)
    changes = differences(scores, parent_stages(written))
    hardware, rate = header["hardware"], f"${header['hourly_rate']:.2f}/hour"
    bloat = bullets({name: f"{number:,}" for name, number in header["bloat"].items()})
    fixed = [r for r in written if r["section"] in SECTIONS] or written
    started = min(seconds(r["timestamp"]) - r["cost"]["wall_seconds"] for r in fixed)
    costs = cost_table(written, header["hourly_rate"])
    _, spent, _, price = costs["rows"][-1]
    cpu = f"{hardware['CPUs']} of {hardware['CPU Model']}"
    spent += f" on {cpu if hardware['GPUs'] == 'None' else hardware['GPUs']}, {price}"
    samples = [
        {**table, "title": f"{SAMPLES} ({record['section'].split()[-1]})"}
        for record in written
        for table in record["tables"]
        if table["title"] == SAMPLES and record["section"] in STAGE_OF
    ]
    faults = [f"\n> - {escape(fault)}" for fault in find_faults(written)]
    warning = "> [!WARNING]\n> **Provenance: these sections are inconsistent.**"
    blocks = [
        f"# nanochat training report\n\nGenerated: {generated}",
        "## Results",
        "".join([warning, *faults]) if faults else "",
        escape(verdict(written, scores, changes, spent)),
        render_table(score_table(scores, show_score)),
        render_figures(figures, "results"),
        *map(render_table, samples[-1:]),  # of the last stage
        render_table(costs),
        "## Environment",
        f"### Git Information\n{bullets(header['git'])}",
        f"### Hardware\n{bullets({**hardware, 'Hourly Rate': rate})}",
        f"### Software\n{bullets(header['software'])}",
        f"\n### Bloat\n{bloat}",
        f"Run started: {records.local_time(started)}",
        "---",
    ]
    blocks.append("\n\n\n".join(render_section(record, figures) for record in written))
    plain = score_table(scores, lambda value: f"{float(plain_value(value)):.4f}")
    blocks += ["\n## Summary", bloat, render_table(plain)]
    times = [(r["section"].lower().endswith(" rl"), seconds(r["timestamp"])) for r in fixed]
    first_rl = min((t for is_rl, t in times if is_rl), default=math.inf)
    ends = [t for is_rl, t in times if t <= first_rl and not is_rl]
    if ends:  # without RL and what follows, as in the original
        minutes = int(max(ends) - started) // 60
        without = "" if len(ends) == len(fixed) else " (without RL)"
        blocks.append(f"Total wall clock time: {minutes // 60}h{minutes % 60}m{without}")
    if changes:
        blocks.append(render_table(difference_table(changes)))
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
    made = {key: origin[key] for key in ("command", "commit")} | inputs | outputs
    blocks = [
        f"## {escape(name)}\ntimestamp: {records.local_time(seconds(record['timestamp']))}",
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


STAGES = {"base": "base", "mid": "mid", "sft": "SFT", "dpo": "DPO", "rl": "RL"}  # names in texts
STAGE_OF = {  # section -> stage that it evaluates
    **dict.fromkeys(("Base model loss", "Base model evaluation"), "base"),
    **{f"Chat evaluation {stage}": stage for stage in STAGES},
}
FIRST, LAST = ("CORE", "World few-shot"), ("ChatCORE", "World chat")  # rows of the tables
BASE_METRICS = ("CORE metric", "World few-shot", "val bpb")

# ---- Scores of each stage ------------------------------------------------------------------------


class Scores(NamedTuple):
    """Scores of all stages, or of the two sides of a comparison."""

    values: Mapping[str, Mapping[str, Any]]
    """Metric -> stage -> value."""
    items: Mapping[str, Mapping[str, Any]]
    """Stage -> metric -> recorded item scores."""


def collect_scores(written: Sequence[Record]) -> Scores:
    """
    Collect CORE, val bpb and all chat scores: CORE first, ChatCORE last, the rest by name. Of the
    scores after other turns, only the mean.
    """
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    items: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for record in written:
        if stage := STAGE_OF.get(record["section"]):
            is_chat = record["section"].startswith("Chat")
            items[stage] |= record["items"]
            for key, value in record["values"].items():
                is_shown = not key.endswith(" turns") or key.startswith(LAST)
                if key in BASE_METRICS or (is_chat and isinstance(value, Mapping) and is_shown):
                    found["CORE" if key == "CORE metric" else key][stage] = value
    order = sorted(found, key=lambda name: (name not in FIRST, name in LAST, name))
    return Scores({name: found[name] for name in order}, items)


def score_table(scores: Scores, show: Callable[[Any], str]) -> dict[str, Any]:
    """Table of all scores by stage. DPO has a column only if it was evaluated."""
    stages = [s for s in STAGES if s != "dpo" or any(s in by for by in scores.values.values())]
    rows = [["Metric", *(stage.upper() for stage in stages)]]
    for name, by in scores.values.items():
        rows.append([name, *(show(by[stage]) if stage in by else "-" for stage in stages)])
    columns, *rows = [[f"{name:<15}", *(f"{x:<8}" for x in cells)] for name, *cells in rows]
    return {"columns": columns, "rows": rows}


# ---- Differences between stages ------------------------------------------------------------------


class Difference(NamedTuple):
    """Change of a metric between two stages."""

    metric: str
    stages: str
    change: stats.Comparison
    """Comparison item by item."""


def parent_stages(written: Sequence[Record]) -> dict[str, str]:
    """Stage -> the stage that its training started from, as recorded."""
    parents = {}
    for record in written:
        made, used = (record["provenance"][name] for name in ("outputs", "inputs"))
        parents |= {to: by for to in STAGES if to in made for by in STAGES if by in used}
    return parents


def differences(scores: Scores, parents: Mapping[str, str]) -> list[Difference]:
    """
    Differences of each metric between a stage and the nearest of its `parents` that has it, if both
    were evaluated on the same items with the same sampling settings.
    """
    changes = []
    for name, by in scores.values.items():
        for after, before in parents.items():
            for _ in STAGES:  # bounded: records of several runs may form a cycle
                before = before if before in by else parents.get(before, before)
            if {before, after} <= by.keys() and before != after:
                change = compare_items(name, scores.items[before], scores.items[after])
                stages = " to ".join(STAGES.get(stage, stage) for stage in (before, after))
                changes += [Difference(name, stages, change)] if change else []
    return changes


def weights_of(name: str, items: Record) -> Mapping[str, float]:
    """Weights of the tasks whose weighted sum a metric is; its own name for a single task."""
    return items.get(name, {}).get("weights", {name: 1.0})


def compare_items(name: str, before: Record, after: Record) -> stats.Comparison | None:
    """Compare a metric item by item; None unless the items and sampling settings are the same."""
    weights = weights_of(name, after)
    if weights != weights_of(name, before) or not weights.keys() <= before.keys() & after.keys():
        return None
    pairs = [(before[part], after[part]) for part in weights]
    if any(old.get(key) != new.get(key) for old, new in pairs for key in ("of", "how")):
        return None
    parts = [stats.compare(read_scores(a), read_scores(b), read_clusters(b)) for a, b in pairs]
    return stats.combine(parts, list(weights.values()))


def difference_table(changes: Sequence[Difference]) -> dict[str, Any]:
    """Table of differences."""
    rows = []
    for metric, stages, change in changes:
        error = f"{change.se:.4f}" if math.isfinite(change.se) else "-"
        counts = f"{change.won:,} won, {change.lost:,} lost of {change.n:,}"
        rows.append([metric, stages, f"{change.difference:+.4f}", error, change.verdict, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


# ---- Cost, verdict and consistency ---------------------------------------------------------------


def cost_table(written: Sequence[Record], hourly_rate: float) -> dict[str, Any]:
    """Table of the time and cost of each stage. hourly_rate: dollars for the whole machine."""
    costs = [(record["section"], record["cost"]) for record in written]
    rows = [
        [name, each["wall_seconds"], f"{each['devices']}x {each['device']}"] for name, each in costs
    ]
    rows.append(["Total", sum(row[1] for row in rows), ""])
    rows = [[a, readable_time(t), b, f"${t / 3600 * hourly_rate:.2f}"] for a, t, b in rows]
    return {"title": "Cost", "columns": ["Section", "Wall clock", "Devices", "Cost"], "rows": rows}


def verdict(
    written: Sequence[Record], scores: Scores, changes: Sequence[Difference], spent: str
) -> str:
    """
    The result of the run in a few sentences: model, machine, time and cost; best scores; changes of
    the mean over tasks, and tasks that became worse. spent: time, machine and cost.
    """
    model = "The stages below"
    for record in written:
        depth, values = record["settings"].get("depth"), record["values"]
        if record["section"] == "Base model training" and depth:
            size, tokens = values["Number of parameters"], values["Number of training tokens"]
            model = f"A model of depth {depth} ({size:,} parameters, {tokens:,} pretraining tokens)"
    sentences = [f"{model}: {spent}."]
    best = []
    for name, by in scores.values.items():
        if name in (*FIRST, *LAST, "val bpb"):
            stage = max(by, key=lambda stage: float(plain_value(by[stage])))
            best.append(f"{name} {show_score(by[stage])} ({STAGES[stage]})")
    if best:
        sentences.append(f"Best scores: {', '.join(best)}.")
    found = [
        f"{name} {change.difference:+.3f}{show_error(change.se)} from {stages} ({change.verdict})"
        for name, stages, change in changes
        if name in LAST or change.verdict == "worse"
    ]
    if changes:
        sentences.append(
            f"Changes of the mean, and tasks that became worse: {', '.join(found) or 'none'}. "
            "± is one standard error over questions; other seeds are not included. "
            "Means over tasks are rescaled so that 0 is chance."
        )
    return " ".join(sentences)


def show_score(value: Any) -> str:
    """A score with its standard error."""
    return f"{float(plain_value(value)):.3f}{show_error(standard_error(value))}"


def show_error(se: float) -> str:
    """A standard error; empty if it is unknown."""
    return f" ± {se:.3f}" if math.isfinite(se) else ""


def find_faults(written: Sequence[Record]) -> list[str]:
    """
    Inputs that no section has produced although some section produced another one of that name, and
    code of which sections were made with different versions. Sections that evaluate or compare
    models from outside the run are ignored.
    """
    own = [r for r in written if not {"hf", "before"} & r["provenance"]["inputs"].keys()]
    made = {item for record in own for item in record["provenance"]["outputs"].items()}
    names = {name for name, _ in made}
    faults = []
    for record in own:
        for name, used in record["provenance"]["inputs"].items():
            if name in names and (name, used) not in made:
                faults.append(f"{record['section']} used {name} {used}, which no section produced.")
    versions = Counter(path for path, _ in {item for r in own for item in r["code"].items()})
    if changed := sorted(path for path, number in versions.items() if number > 1):
        faults.append(f"Sections were made by different versions of {', '.join(changed)}.")
    return faults


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
