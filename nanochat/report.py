"""
The report: report.md, rendered from the records of the stages.

    records + header (time, hardware, code version) -> render_report -> report.md with SVG figures

`render_report` is a pure function; a stage calls `update` after `records.write_record`. The report
opens with what was trained and how good it is; then the stages follow, results first, the rest
folded. The names of SECTIONS and the keys of the original report do not change, because reports are
compared line by line. Reports are never parsed. Names, settings and values are untrusted (from
models, data and users): `literal` shows them as text.
"""

import math
import platform
import re
import textwrap
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
    Record,
    plain_value,
    read_clusters,
    read_scores,
    readable_time,
    seconds,
    slug,
    standard_error,
)

TITLE = "# nanochat training report"
SECTIONS = (  # in order; others follow by time
    "Tokenizer training", "Tokenizer evaluation", "Base model training", "Base model loss",
    "Base model evaluation", "Chat evaluation base", "Midtraining", "Chat evaluation mid",
    "Chat SFT", "Chat evaluation sft", "Chat DPO", "Chat evaluation dpo", "Chat RL",
    "Chat evaluation rl",
)  # fmt: skip
SIGNS = {"better": " ▲", "worse": " ▼"}
LEGEND = (
    "Bold: the best stage. ▲ ▼: better or worse than the stage before by more than two standard "
    "errors of the difference. ± is one standard error over questions; other seeds are not "
    "included. Means over tasks are rescaled so that 0 is chance."
)
BAR = 30  # characters of a bar for the whole time
WIDTH = 100  # characters of a line of a dialog
PIPE = "│"  # in a cell; "|" would end it, and after a backslash even if escaped
SAMPLES = "Sample conversations"  # table of a record, shown as a dialog at the top of the report


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
    Read the header (code version, machine, hourly rate, planned seconds of each section), creating
    it on the first call and if `renew` is set: it describes the machine of the newest stage, not
    that of a later evaluation.

    rate: dollars per hour, kept from then on. Default: the rental price of the GPUs.
    """
    path = records.report_folder() / records.HEADER_FILE
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
    plan = path.with_name(records.PLAN_FILE)
    header["plan"] = read_json(plan) if plan.exists() else {}
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

    Order: results, environment, SECTIONS, others oldest first, the summary. figures: names,
    <section>-<kind>; those of the section "results" are at the top. generated: date and time.
    """
    order = {name: i for i, name in enumerate(SECTIONS)}
    written = sorted(written, key=lambda r: seconds(r["timestamp"]))
    written.sort(key=lambda r: order.get(r["section"], len(order)))
    scores = collect_scores(written)
    changes = differences(scores, parent_stages(written))
    hardware, rate = header["hardware"], header["hourly_rate"]
    bloat = bullets({name: f"{number:,}" for name, number in header["bloat"].items()})
    fixed = [r for r in written if r["section"] in SECTIONS] or written
    started = min(seconds(r["timestamp"]) - r["cost"]["wall_seconds"] for r in fixed)
    total = sum(record["cost"]["wall_seconds"] for record in written)
    cpu = f"{hardware['CPUs']} of {hardware['CPU Model']}"
    machine = cpu if hardware["GPUs"] == "None" else hardware["GPUs"]
    spent = f"{readable_time(total)} on {machine}, ${total / 3600 * rate:.2f}"
    samples = [
        {**table, "title": f"{SAMPLES} ({record['section'].split()[-1]})"}
        for record in written
        for table in record["tables"]
        if table["title"] == SAMPLES and record["section"] in STAGE_OF
    ]
    blocks = [
        f"{TITLE}\n\nGenerated: {generated}",
        "## Results",
        render_faults(find_faults(written)),
        *map(literal, verdict(written, scores, changes, spent)),
        render_table(score_table(scores, changes)),
        LEGEND if scores.values else "",
        render_figures(figures, "results"),
        *map(render_dialog, samples[-1:]),  # of the last stage
        render_table(cost_table(written, rate, header.get("plan", {}))),
        "## Environment",
        f"### Git Information\n{bullets(header['git'])}",
        f"### Hardware\n{bullets({**hardware, 'Hourly Rate': Markdown(f'${rate:.2f}/hour')})}",
        f"### Software\n{bullets(header['software'])}",
        f"\n### Bloat\n{bloat}",
        f"Run started: {records.local_time(started)}",
        "---",
    ]
    blocks.append("\n\n\n".join(render_section(record, figures) for record in written))
    blocks += ["\n## Summary", bloat, render_table(plain_table(scores))]
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


def render_faults(faults: Sequence[str]) -> str:
    """A warning with these lines; empty without any."""
    lines = ["[!WARNING]", "**Provenance: these sections are inconsistent.**"]
    return "\n".join(f"> {x}" for x in [*lines, *(f"- {literal(x)}" for x in faults)] if faults)


def render_section(record: Record, figures: Sequence[str]) -> str:
    """
    A section: values in the order of the script, tables, figures; then, folded, the settings,
    command, provenance and cost.
    """
    name, origin, cost = record["section"], record["provenance"], record["cost"]
    shown = {k: v for k, v in record["settings"].items() if k not in record["values"]}
    on = [cost.get("cpu"), cost.get("threads") and f"{cost['threads']} threads", cost.get("dtype")]
    where = ", ".join([f"{cost['devices']}x {cost['device']}", *filter(None, on)])
    made = {
        **{key: origin[key] for key in ("command", "commit")},
        **{f"input {key}": x for key, x in origin["inputs"].items()},
        **{f"output {key}": x for key, x in origin["outputs"].items()},
        "cost": f"{cost['wall_seconds'] / 60:.2f}m on {where}",
    }
    blocks = [
        f"## {literal(name)}\ntimestamp: {records.local_time(seconds(record['timestamp']))}",
        bullets(record["values"]),
        *(render_table(table) for table in record["tables"] if table["title"] != SAMPLES),
        render_figures(figures, slug(name)),
        "<details><summary>Settings and provenance</summary>",
        bullets({**shown, **made}),
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


def score_table(scores: Scores, changes: Sequence["Difference"]) -> dict[str, Any]:
    """
    Table of all scores by stage: the best of each metric in bold; ▲ and ▼ where it is better or
    worse than after the stage before.
    """
    signs = {(x.metric, x.after): SIGNS.get(x.change.verdict, "") for x in changes}
    best = {
        name: (min if name.endswith("bpb") else max)(by, key=lambda s: float(plain_value(by[s])))
        for name, by in scores.values.items()
    }

    def show(name: str, stage: str, value: Any) -> Markdown:
        shown = show_score(value)
        shown = f"**{shown}**" if stage == best[name] and len(scores.values[name]) > 1 else shown
        return Markdown(shown + signs.get((name, stage), ""))

    return make_score_table(scores, show)


def plain_table(scores: Scores) -> dict[str, Any]:
    """Table of all scores by stage, as in the original report."""
    return make_score_table(scores, lambda _, __, value: f"{float(plain_value(value)):.4f}")


def make_score_table(scores: Scores, show: Callable[[str, str, Any], str]) -> dict[str, Any]:
    """Table of metrics by stage. DPO has a column only if it was evaluated."""
    stages = [s for s in STAGES if s != "dpo" or any(s in by for by in scores.values.values())]
    rows = [["Metric", *(stage.upper() for stage in stages)]]
    for name, by in scores.values.items():
        rows.append([name, *(show(name, s, by[s]) if s in by else "-" for s in stages)])
    return {"columns": rows[0], "rows": rows[1:]}


# ---- Differences between stages ------------------------------------------------------------------


class Difference(NamedTuple):
    """Change of a metric between two stages."""

    metric: str
    before: str
    after: str
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
                changes += [Difference(name, before, after, change)] if change else []
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
    for metric, before, after, change in changes:
        stages = f"{STAGES.get(before, before)} to {STAGES.get(after, after)}"
        error = f"{change.se:.4f}" if math.isfinite(change.se) else "-"
        counts = f"{change.won:,} won, {change.lost:,} lost of {change.n:,}"
        rows.append([metric, stages, f"{change.difference:+.4f}", error, change.verdict, counts])
    columns = ["Metric", "Stages", "Difference", "Standard error", "Against 2 standard errors"]
    return {"title": "Differences", "columns": [*columns, "Same items"], "rows": rows}


# ---- Cost, verdict and consistency ---------------------------------------------------------------


def cost_table(
    written: Sequence[Record], hourly_rate: float, planned: Mapping[str, float]
) -> dict[str, Any]:
    """
    Table of the time and cost of each stage, with a bar of its share. hourly_rate: dollars for the
    whole machine. planned: section -> seconds that the plan promised, if there was one.
    """
    times = {record["section"]: record["cost"]["wall_seconds"] for record in written}
    total, rows = sum(times.values()), []
    for name, spent in {**times, "Total": total}.items():
        bar = "█" * round(BAR * spent / max(total, 1e-9)) if name != "Total" else ""
        price = Markdown(f"${spent / 3600 * hourly_rate:.2f}")
        known = planned.get(name, sum(planned.values()) if name == "Total" else None)
        promise = [readable_time(known) if known else "-"] if planned else []
        rows.append([name, readable_time(spent), *promise, bar, price])
    promise = ["Planned"] if planned else []
    columns = ["Section", "Wall clock", *promise, "Share of the time", "Cost"]
    return {"title": "Cost", "columns": columns, "rows": rows}


def verdict(
    written: Sequence[Record], scores: Scores, changes: Sequence[Difference], spent: str
) -> list[str]:
    """
    The result of the run in up to three sentences: what was trained, and time, machine and cost
    (`spent`); the main score and what each stage added to it; the weakest task, and what became
    worse.
    """
    model, of = "The stages below", "text"
    for record in written:
        depth, values = record["settings"].get("depth"), record["values"]
        of = record["settings"].get("dataset") or of
        if record["section"] == "Base model training" and depth:
            size, tokens = values["Number of parameters"], values["Number of training tokens"]
            model = f"A model of depth {depth} ({size:,} parameters, {tokens:,} tokens of {of})"
    sentences = [f"{model}: {spent}."]
    named = [name for name in (*LAST, *FIRST, "val bpb") if name in scores.values]
    if not named:
        return sentences
    main, steps = named[0], [x for x in changes if x.metric == named[0]]
    *_, stage = [stage for stage in STAGES if stage in scores.values[main]]
    added = [f"{STAGES[x.after]} {show_change(x.change)}" for x in steps]
    about = f": {', '.join(added)}" if added else ""
    sentences.append(
        f"{main} is {show_score(scores.values[main][stage])} after {STAGES[stage]}{about}."
    )
    parts = [name for name in weights_of(main, scores.items[stage]) if name in scores.values]
    tasks = {name: scores.values[name][stage] for name in parts if stage in scores.values[name]}
    if main not in tasks and tasks:
        weakest = min(tasks, key=lambda name: float(plain_value(tasks[name])))
        worse = [
            f"{x.metric} after {STAGES[x.after]} ({show_change(x.change)})"
            for x in changes
            if x.change.verdict == "worse"
        ]
        sentences.append(
            f"Its weakest task is {weakest}, {show_score(tasks[weakest])}; "
            f"worse than after the stage before: {', '.join(worse) or 'none'}."
        )
    return sentences


def show_change(change: stats.Comparison) -> str:
    """A difference with its standard error, and whether it is noise."""
    noise = f" ({change.verdict})" if change.verdict not in SIGNS else ""
    return f"{change.difference:+.3f}{show_error(change.se)}{noise}"


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

# What Markdown, or GitHub's extensions, may read as more than text: characters; underscores at the
# edge of a word; autolinks; emoji names; lists and rules at the start
ACTIVE = re.compile(
    r"""[^\w\ .,:;()%+/=±▲▼█│'"?!$@-] | (?<![^\W_])_ | _(?![^\W_]) | \$.*\$ | :// | \bwww\.
    | @(?!\ ) | (?<!\ )@ | :[a-z+-][\w+-]*:
    | ^\ *(?:[-+]\ |[-=]{2,}\ *$|\d+[.)](?:\ |$)) | ^\ {4}""",
    re.VERBOSE | re.IGNORECASE,
)


class Markdown(str):
    """Text that is Markdown, not to be shown literally."""


def literal(value: Any) -> str:
    """
    A value as one line of Markdown that shows it literally: in a code span if Markdown might read
    it otherwise.
    """
    if isinstance(value, Markdown):
        return value
    line = printable(format_value(value)).replace("\n", r"\n")
    if not ACTIVE.search(line):
        return line
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def bullets(entries: Mapping[str, Any]) -> str:
    """A list of keys and values."""
    return "\n".join(f"- {literal(key)}: {literal(value)}" for key, value in entries.items())


def format_value(value: Any) -> str:
    """Format a value for the report."""
    if isinstance(value, Mapping):  # an estimate
        text = format_value(value["value"])
        if math.isfinite(error := standard_error(value)):
            text += f" +- {format_value(error)}"
        answers = f", k={value['k']}" if "k" in value else ""
        return f"{text} (n={value['n']:,}{answers})"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:g}"
    is_large = isinstance(value, int) and value >= 10_000
    return f"{value:,}" if is_large else str(value)


def render_table(table: Record) -> str:
    """
    A Markdown table with its title, its columns padded to equal width. Integers are printed as is,
    floats with 4 decimals.
    """

    def cell(value: Any) -> str:
        if isinstance(value, int | Markdown):
            return str(value)
        return literal(format_value(value).replace("|", PIPE))

    lines = [list(map(cell, row)) for row in (table["columns"], *table["rows"])]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = [
        f"| {' | '.join(x.ljust(w) for x, w in zip(row, widths, strict=True))} |" for row in lines
    ]
    title = table.get("title")
    return "\n".join([f"### {literal(title)}\n", *rows] if title else rows)


def render_dialog(table: Record) -> str:
    """
    Conversations, rows of texts of the speakers that the columns name, in a code fence; of the
    third and later ones, empty texts are left out.
    """
    lines, indent = [], max(map(len, table["columns"])) + 2
    for row in table["rows"]:
        for number, (who, words) in enumerate(zip(table["columns"], row, strict=True)):
            begin, space = f"{printable(who):<{indent}}", " " * indent
            for line in printable(words).split("\n") if words or number < 2 else ():
                filled = textwrap.wrap(line, WIDTH, initial_indent=begin, subsequent_indent=space)
                lines += filled or [begin.rstrip()]
                begin = space
        lines.append("")
    dialog = "\n".join(lines[:-1])
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", dialog)), default=0))
    return f"### {literal(table['title'])}\n\n{fence}text\n{dialog}\n{fence}"


if __name__ == "__main__":
    raise SystemExit("use python -m scripts.report; with --reset, to start a new report")
