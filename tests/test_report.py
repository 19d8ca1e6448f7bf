"""The report, from records on disk to the Markdown that a reader sees."""

import base64
import json
import math
import re
import socket
import time
from collections import defaultdict
from contextlib import suppress
from html.parser import HTMLParser
from threading import Thread
from urllib.error import URLError
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from nanochat.common import read_json
from nanochat.records import Cost, RunLog, item_scores, mean_name, write_record
from nanochat.report import TITLE, literal, update
from scripts.report import follow, show_progress

HARDWARE = {"CPUs": "104 cores", "GPUs": "8x H100", "CPU Model": "Some CPU"}
HEADER = {
    "git": {"Commit": "f1e8954 (dirty)"},
    "hardware": HARDWARE,
    "software": {"PyTorch": "2.8.0"},
    "gpus": ["H100"] * 8,
    "bloat": {"Lines": 12350},
}
ENVIRONMENT = (
    "Commit: f1e8954 (dirty), CPUs: 104 cores, GPUs: 8x H100, CPU Model: Some CPU, "
    "Hourly Rate: $24.00/hour, PyTorch: 2.8.0, Lines: 12,350"
)
HALF, OTHER_HALF, MOST = [0, 1] * 50, [1, 0] * 50, [1] * 12 + [0, 1] * 44
FOLDED = "<details><summary>Settings and provenance</summary>\n"
# value -> its text in the list of a section
PRINTED = {
    1.0: "1.0000",
    9999: "9999",
    10000: "10,000",
    "21.07%": "21.07%",
    (0.8, 0.95): "0.8000, 0.9500",
    "two\nlines\r": "`two\\nlines\\r`",
}

# S13: untrusted text
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> </td></table><!-- <?a <b",
    "<!-- the rest of the report",
    "[click](javascript:alert(1)) [a][b] [b]: javascript:alert(1)",
    "![x](https://evil.example/x.png) ![y][b]",
    "<https://evil.example> https://evil.example WWW.evil.example <a|b@evil.example>",
    "\x1b[2J\x1b]8;;https://evil.example\x07here\x9b31m \rover \x00 \x7f \b",
    "user\u202e\u2066gpj.exe\u2069 \u200b\ufeff",
    "a | b || c \\| d |",
    "---|---|---",
    "`a` ``` b ```` ~~~ c",
    "**bold** __bold__ _i_ *i* ~~gone~~ $x$ a*b*",
    "$\\frac$ $\\href{javascript:alert(1)}{x}$",
    "# top",
    "one\n# top\n\n---\n<div>\n\n```\n| a |\n|---|\n\n    code\r\n\u2028end",
    "- item",
    "12. item",
    "> quoted",
    "====",
    "&lt;script&gt; &#x202e; &amp;",
    "\\<b> \\[x](javascript:alert\\(1\\)) \\\\<i> \\",
)
HARMLESS = (
    "<|bos|>If 5*x + 3 = 13, then x is 3.5 < 4",
    "\ud55c\uad6d\uc5b4 \u4e2d\u6587 na\u00efve \u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "C:\\Users\\me & you, HuggingFaceFW/fineweb-edu, snake_case_d12, ~5%, $24.00/hour, #1, (n=3)",
)
CONTROL = "[\x00-\x1f\x7f-\x9f\u200b\u2028\u202e\u2066\u2069\ufeff]"
MARKUP = "html_inline link_open code_block fence s_open em_open ordered_list_open hardbreak"


def estimate(value, n, se):
    return {"value": value, "n": n, "se": se}


class Report:
    """Writes a header and records to disk, runs `scripts.report`, and reads the Markdown."""

    def __init__(self, base, command, monkeypatch):
        self.command, self.patch = command, monkeypatch
        self.folder, self.path = base / "report", base / "report.md"
        self.folder.mkdir(parents=True)
        self.header = self.folder / "header.json"
        self.header.write_text(json.dumps(HEADER))

    def write(
        self, section, values, settings=None, at="2025-10-24 01:00:00", seconds=90.0,
        inputs=None, **more,
    ):  # fmt: skip
        cost = Cost(seconds, 8, "H100", "Kind", 4, "bfloat16")
        with self.patch.context() as patch:
            then = time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S"))
            patch.setattr(time, "time", lambda: then)
            write_record(section, settings or {}, values, inputs or {}, cost, **more)

    def chat(self, stage, arc, gsm, of="the same questions", how="greedy", parent=None):
        """
        A chat evaluation of two tasks, scored item by item, and their centered mean; parent: also
        the training of the model.
        """
        if parent:
            self.write(f"Chat {stage.upper()}", {}, inputs={parent: "f"}, outputs={stage: "f"})
        items = {"ARC-Easy": item_scores([of, "a"], arc), "GSM8K": item_scores([of, "g"], gsm)}
        items = {name: {**each, "how": how} for name, each in items.items()}
        values = {"ARC-Easy": sum(arc) / 100, "GSM8K": sum(gsm) / 100}
        values["ChatCORE"] = (values["ARC-Easy"] - 0.25) / 0.75 / 2 + values["GSM8K"] / 2
        values = {name: estimate(value, 100, 0.05) for name, value in values.items()}
        items["ChatCORE"] = {"weights": {"ARC-Easy": 1 / 2 / 0.75, "GSM8K": 1 / 2}}
        self.write(f"Chat evaluation {stage}", values, items=items)

    def render(self, *flags):
        self.command.works("report", *flags)
        return self.path.read_text()

    def differences(self):
        """Rows of the table of differences."""
        return rows_of(section_of(self.render(), "Summary").partition("### Differences")[2])[2:]


@pytest.fixture
def report(base, command, monkeypatch):
    return Report(base, command, monkeypatch)


def section_of(text, name):
    """One section of a report, from its heading to the next."""
    return re.findall(rf"^## {name}\n.*?(?=^## |^---$|\Z)", text, re.S | re.M)[0]


def bullets(text):
    return re.findall("^- (.*)", text, re.M)


def rows_of(text):
    """Rows of tables, without frame and padding."""
    rows = [line.strip("| ").split("|") for line in re.findall(r"^\|.*", text, re.M)]
    return [" | ".join(cell.strip() for cell in row) for row in rows]


def test_sections_stand_in_order_with_their_keys_and_values(report):
    scores = {"more": 0, "ChatCORE": 7, "ARC-Easy": 7}
    report.write("Chat evaluation rl", scores, at="2025-10-24 03:52:40")
    report.write("Midtraining", {}, at="2025-10-24 01:52:40", seconds=12339)
    for day, name in (("26", "Own"), ("20", "Golf")):  # do not count as wall clock time
        report.write(name, {"score": 0.5}, {"left": -1, "text": ""}, f"2025-10-{day} 00:00:00")
    text = report.render()
    assert text.startswith("# nanochat training report\n\nGenerated: 20")
    sections = "Results, Environment, Midtraining, Chat evaluation rl, Golf, Own, Summary"
    assert ", ".join(re.findall("^## (.*)", text, re.M)) == sections
    shown = bullets(section_of(text, "Chat evaluation rl"))
    assert shown[:3] == ["more: 0", "ChatCORE: 7", "ARC-Easy: 7"]  # as the script has them
    start = "## Golf\ntimestamp: 2025-10-20 00:00:00\n\n- score: 0.5000\n\n"
    assert f"{start}{FOLDED}\n- left: -1\n- text: \n" in text
    environment, end = section_of(text, "Environment"), section_of(text, "Summary")
    assert ", ".join(bullets(environment)) == ENVIRONMENT
    assert environment.rstrip().endswith("Run started: 2025-10-23 22:27:01")
    assert "Total wall clock time: 3h25m (without RL)\n" in end and "- Lines: 12,350\n" in end


def test_values_and_tables_are_printed_as_in_the_original(report):
    columns = ["Text Type", "GPT-2 Ratio"]
    table = {"title": "Comparison", "columns": columns, "rows": [["x|y", 0.5], ["z", 5028883]]}
    origin = {"inputs": {"tokenizer": "t1", "data": "d1"}, "outputs": {"base": "b1"}}
    scores = {"a": estimate(0.2756, 254, 0.02803), "k": estimate(0.5, 9, 0.1) | {"k": 8}}
    values = {f"v{i}": value for i, value in enumerate(PRINTED)} | scores
    report.write("Golf", values, tables=[table], **origin)
    section = section_of(report.render(), "Golf")
    wanted = [f"v{i}: {text}" for i, text in enumerate(PRINTED.values())]
    wanted += ["a: 0.2756 +- 0.0280 (n=254)", "k: 0.5000 +- 0.1000 (n=9, k=8)"]
    shown = ", ".join(bullets(section))
    assert shown.startswith(", ".join([*wanted, "command: python "]))
    made = "input tokenizer: t1, input data: d1, output base: b1"
    assert shown.endswith(f"{made}, cost: 1.50m on 8x H100, Kind, 4 threads, bfloat16")
    assert (
        "### Comparison\n\n| Text Type | GPT-2 Ratio |\n| --------- | ----------- |\n"
        "| x│y       | 0.5000      |\n| z         | 5028883     |\n"
    ) in section


def test_verdict_table_and_cost_of_a_run(report):
    values = {"Number of parameters": 9_437_704, "Number of training tokens": 1_638_400}
    flags = {"depth": 4, "dataset": "my_text"}
    report.write("Base model training", values, flags, seconds=3600.0)
    report.chat("mid", [1] * 100, [0] * 100)
    report.chat("sft", [1] * 90 + [0] * 10, [1] * 100, parent="mid")
    text = section_of(report.render(), "Results")
    assert text.split("\n\n")[1:4] == [
        "A model of depth 4 (9,437,704 parameters, 1,638,400 tokens of my_text): 64.5 min on "
        "8x H100, $25.80.",
        "ChatCORE is 0.933 ± 0.050 after SFT: SFT +0.433 ± 0.020.",
        "Its weakest task is ARC-Easy, 0.900 ± 0.050; worse than after the stage before: "
        "ARC-Easy after SFT (-0.100 ± 0.030).",
    ]
    rows = rows_of(text)
    assert rows[0] == "Metric | BASE | MID | SFT | RL" and "Bold: the best" in text
    assert "ARC-Easy | - | **1.000 ± 0.050** | 0.900 ± 0.050 ▼ | -" in rows
    assert "ChatCORE | - | 0.500 ± 0.050 | **0.933 ± 0.050** ▲ | -" in rows
    assert f"Base model training | 60.0 min | {'█' * 28} | $24.00" in rows
    assert rows[-1] == "Total | 64.5 min |  | $25.80"


def test_cost_stands_beside_the_plan_of_the_run(report):
    report.write("Base model training", {}, seconds=3600.0)
    plan = {"Base model training": 1800, "Chat RL": 60}
    (report.folder / "_plan.json").write_text(json.dumps(plan))
    rows = rows_of(section_of(report.render(), "Results"))
    assert rows[-4:-3] + rows[-2:] == [
        "Section | Wall clock | Planned | Share of the time | Cost",
        f"Base model training | 60.0 min | 30.0 min | {'█' * 30} | $24.00",
        "Total | 60.0 min | 31.0 min |  | $24.00",
    ]


def test_stages_with_the_same_items_are_compared_in_pairs(report):
    report.chat("mid", HALF, HALF)
    report.chat("sft", MOST, OTHER_HALF, parent="mid")
    report.chat("rl", MOST, OTHER_HALF, of="other questions", parent="sft")
    noise = "within noise"
    wanted = [
        # 6 of 100 changed, all better: se = sqrt(0.06 * 0.94 / 99)
        "ARC-Easy | mid to SFT | +0.0600 | 0.0239 | better | 6 won, 0 lost of 100",
        # all changed, half of them worse: se = sqrt(1 / 99)
        f"GSM8K | mid to SFT | +0.0000 | 0.1005 | {noise} | 50 won, 50 lost of 100",
        # 0.06 / 1.5, with the errors of both parts propagated
        f"ChatCORE | mid to SFT | +0.0400 | 0.0527 | {noise} | 56 won, 50 lost of 200",
    ]
    assert report.differences() == wanted
    assert "SFT +0.040 ± 0.053 (within noise)." in report.path.read_text()
    report.chat("sft", MOST, OTHER_HALF, how="temperature 1")
    assert report.differences() == []


@pytest.mark.parametrize(
    ("parents", "steps"),
    [
        ({"rl": "sft", "dpo": "rl"}, {"SFT to RL", "RL to DPO"}),
        ({"rl": "dpo", "dpo": "mid", "mid": "sft"}, {"DPO to RL", "SFT to DPO"}),
        ({"rl": "mid", "mid": "rl"}, set()),  # of several runs
        ({}, set()),
    ],
)
def test_changes_are_from_the_nearest_parent_that_was_evaluated(report, parents, steps):
    for stage in ("sft", "dpo", "rl"):
        report.chat(stage, HALF, HALF)
    for stage, parent in parents.items():
        report.write(f"Training {stage}", {}, inputs={parent: "f"}, outputs={stage: "f"})
    assert {row.split(" | ")[1] for row in report.differences()} == steps


def test_built_in_world_is_no_core_and_samples_are_on_top(report):
    table = {"title": "Sample conversations", "columns": ["User", "Model"]}
    assert mean_name("ChatCORE", ["World-Facts", "GSM8K"]) == "ChatCORE"
    values = {mean_name("CORE metric", ["world_sums"]): estimate(0.7, 100, 0.01)}
    old = {**table, "rows": [["Hi", "Old."]]}
    report.write("Base model evaluation", values, tables=[old])
    rows = [["Two\nlines", "a | b"], ["Silent", ""], ["", "\nA `` b"]]
    report.write("Chat evaluation rl", {}, tables=[{**table, "rows": rows}])
    report.write("Chat evaluation rl, 5 answers at temperature 1", {}, tables=[old])
    report.write("Base model loss", {"val bpb": 1.5})
    text = report.render()
    assert "CORE" not in text and "Old." not in text
    assert "World few-shot | 0.7000 | - | - | -" in rows_of(text)
    assert "- World few-shot: 0.7000" in section_of(text, "Base model evaluation")
    top = section_of(text, "Results")
    assert "World few-shot is 0.700 ± 0.010 after base." in top
    dialog = "User   Two\n       lines\nModel  a | b\n\nUser   Silent\nModel\n\n"
    dialog += "User\nModel\n       A `` b\n"
    assert f"### Sample conversations (rl)\n\n```text\n{dialog}```\n" in top


def test_stages_that_do_not_belong_together_give_a_warning(report):
    report.write("Tokenizer training", {}, outputs={"tokenizer": "t1"})
    report.write("Evaluation of gpt2", {}, inputs={"hf": "x", "tokenizer": "t2"})
    warning = "> - Base training used tokenizer t0, which no section produced.\n\n"
    for used in ("t1", "t0"):
        report.write("Base training", {}, inputs={"tokenizer": used})
        assert (warning in report.render()) == (used == "t0")


def test_figures_are_linked_kept_copied_and_reset(report, base):
    with RunLog(base / "d4") as log:
        log.log(0, {"loss": 5.0})
    for name in ("d4", "gone"):
        report.write(f"Run {name}", {}, metrics=base / name / "metrics.jsonl")
    old = base / "copy/dev/report/old.svg"
    old.parent.mkdir(parents=True)
    old.touch()
    (base / "copy/report.md").write_text(f"{TITLE}\n")  # an earlier one
    report.render(f"--out={base / 'copy'}")
    for path, folder in ((report.path, "report/figures"), (base / "copy/report.md", "dev/report")):
        links = re.findall(r"!\[.*?\]\((.*?)\)", path.read_text())
        assert links == [f"{folder}/run-d4-training.svg"]
        assert len([*(path.parent / folder).iterdir()]) == 1
    (base / "own").mkdir()
    own = base / "own" / "report.md"
    own.write_text("# My report")
    assert f"{own} is not a report" in report.command.rejects("report", f"--out={own.parent}")
    assert ".svg" not in update().read_text()  # a stage may have changed what they show
    report.command.works("report", "--reset", "--hourly_rate=0.5")
    [archive] = base.glob("report-*")
    assert (archive / "run-d4.json").exists() and not report.path.exists()
    assert read_json(report.header)["hourly_rate"] == 0.5


def test_results_are_printed_and_the_page_has_its_figures_inside(report, base):
    with RunLog(base / "d4") as log:
        log.log(0, {"loss": 5.0})
    report.write("Base model training", {"Batch tokens": 8}, metrics=base / "d4/metrics.jsonl")
    printed = report.command.works("report", "--print")
    assert "The stages below: 1.5 min" in printed and "### Cost" in printed
    assert "Environment" not in printed
    page = Elements(report.path.with_suffix(".html").read_text())
    pictures = [base64.b64decode(source.split(",")[1]) for source in page.attributes["src"]]
    assert len(pictures) == 2 and all(b"Training loss" in picture for picture in pictures)


def test_running_stage_is_followed_in_a_browser(report, base):
    assert "No run has logged a step yet." in show_progress()
    with RunLog(base / "chatdpo_checkpoints/d4") as log:
        log.log(0, {"held_out_loss": 0.5})
    assert "held_out_loss: 0.5000" in show_progress()
    torn = base / "mid_checkpoints/d4/metrics.jsonl"
    torn.parent.mkdir(parents=True)
    torn.write_text('{"step": 1')
    assert "No run has logged a step yet." in show_progress()
    report.write("Base model evaluation", {"CORE metric": 0.25})
    with RunLog(base / "base_checkpoints/d4") as log:
        for step in range(3):
            log.log(step, {"loss": 5.0 - step})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Thread(target=follow, args=(port,), daemon=True).start()
    for _ in range(100):
        with suppress(URLError), urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            text = answer.read().decode()
            break
        time.sleep(0.05)
    assert "base_checkpoints/d4, step 2, logged 0 s ago" in text and "loss: 3.0000" in text
    assert "0.250" in text and 'http-equiv="refresh"' in text
    assert len(Elements(text).attributes["src"]) == 1


def test_header_describes_the_machine_and_rate_of_the_run(report):
    report.write("Golf", {}, seconds=3600.0)
    report.render("--hourly_rate=16")
    text = report.render()
    assert "- Hourly Rate: $16.00/hour" in text and "- GPUs: 8x H100" in text
    assert f"Golf | 60.0 min | {'█' * 30} | $16.00" in rows_of(text)
    update(renew=True)  # a stage that runs on this machine
    header = read_json(report.header)
    assert header["hardware"] != HARDWARE and header["hourly_rate"] == 16
    report.header.write_text("{}")
    assert "- GPUs: " in report.render()


HARMLESS_ELEMENTS = (
    "html meta title style h1 h2 h3 p ul li table thead tbody tr th td code pre img hr details "
    "summary strong blockquote"
)


class Elements(HTMLParser):
    """Names and attributes of the elements of a page."""

    def __init__(self, page):
        super().__init__()
        self.names, self.attributes = set(), defaultdict(list)
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        for key, value in attributes:
            self.attributes[key].append(value)


def plain(text):
    """The text a reader should see: one line, with control and invisible characters escaped."""
    lines = text.replace("\n", r"\n")
    escaped = re.sub(CONTROL, lambda found: ascii(found[0])[1:-1], lines)
    return " ".join(escaped.split(" ")).strip()


def test_S13_report_shows_untrusted_text_literally(report):
    texts = [*HOSTILE, *HARMLESS]
    for n, text in enumerate(texts):
        report.write(
            f"Own {n} {text}",
            {f"value {text}": text},
            {"run": text, text: text},
            inputs={text: text, "hf": ""},
            tables=[{"title": text, "columns": [text, "other"], "rows": [[text, 1]]}],
        )
    for stage in ("mid", "sft"):
        report.write(f"Chat evaluation {stage}", {text: estimate(0.5, 9, 0.1) for text in texts})
    report.header.write_text(json.dumps({**HEADER, "git": {"Branch": HOSTILE[0]}}))
    written = report.render()
    assert not re.search(CONTROL, written.replace("\n", " "))
    renderer = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    blocks = renderer.parse(written)
    tokens = [*blocks, *(child for token in blocks for child in token.children or [])]
    assert not {token.type for token in tokens} & set(MARKUP.split())
    folds = {token.content for token in tokens if token.type == "html_block"}
    assert folds == {FOLDED, "</details>\n"}
    assert sum(token.type == "hr" for token in tokens) == 1  # only the rule after the header
    images = [str(token.attrs["src"]) for token in tokens if token.type == "image"]
    assert all(re.fullmatch(r"report/figures/[\w%-]+\.svg", image) for image in images)
    # Every text is shown completely, in headings, lists and tables
    children = [token.children for token in blocks if token.children]
    seen = ["".join(child.content for child in each).strip() for each in children]
    assert f"Branch: {plain(HOSTILE[0])}" in seen
    for n, text in enumerate(texts):
        shown = plain(text)
        wanted = {f"Own {n} {shown}", f"run: {shown}", f"{shown}: {shown}"}
        assert wanted | {f"value {shown}: {shown}"} <= set(seen)
        assert seen.count(shown) >= 1 and seen.count(shown.replace("|", "│")) >= 2
    drawing = ElementTree.parse(report.folder / "figures" / "results-stages.svg")
    assert not drawing.findall(".//{*}script") + drawing.findall(".//{*}a")
    page = Elements(report.path.with_suffix(".html").read_text())
    assert page.names <= set(HARMLESS_ELEMENTS.split())
    assert page.attributes.keys() <= {
        "src",
        "alt",
        "class",
        "lang",
        "content",
        "charset",
        "name",
        "http-equiv",
    }
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.attributes["src"])
    assert "default-src 'none'" in page.attributes["content"][0]


def test_records_and_report_go_to_the_report_folder(report, base, monkeypatch):
    monkeypatch.setenv("NANOCHAT_REPORT_DIR", str(base / "own"))
    report.write("Golf", {"score": 0.5})
    report.command.works("report")
    assert "## Golf" in (base / "own" / "report.md").read_text()
    assert (base / "own" / "report" / "golf.json").exists() and not report.path.exists()
    monkeypatch.setenv("NANOCHAT_REPORT_DIR", str(base / "own" / "report.md"))
    assert "report.md" in report.command.rejects("report")


def test_sections_of_different_code_give_a_warning(report):
    for name in ("Golf", "Own"):
        report.write(name, {})
    assert "different versions" not in report.render()
    path = report.folder / "own.json"
    record = read_json(path)
    record["code"]["nanochat/common.py"] = "0123456789abcdef"
    path.write_text(json.dumps(record))
    assert "Sections were made by different versions of nanochat/common.py." in report.render()


# ---- Figures -------------------------------------------------------------------------------------

STEPS = [
    {"step": x, "loss": 3 + math.sin(x), "lr": 0.5, "tokens_per_second": 1e6, "grad_norm": 2}
    for x in range(20_000)
]
STEPS.append({"step": 20_000, "val_bpb": 1.2})
POLICY = [
    {"step": 0, "loss": 1.0, "reward": 0.1, "pass_at_1": 0.1, "pass_at_1_se": 0.02},
    {"step": 1, "reward": math.nan, "lr": 0.02},
    {"step": 2, "reward": math.inf, "lr": 0.0},
]
FIGURES = {  # texts that each figure must show
    "results-stages": {"mid", "SFT", "$Task$"},
    "base-training-training": {"Training loss", "Gradient norm before clipping"},
    "chat-rl-training": {"Mean reward of a step"},
}


def test_figures_show_every_metric_and_are_small(report, base):
    for section, logged in (("Base training", STEPS), ("Chat RL", POLICY)):
        metrics = base / section
        metrics.write_text("".join(json.dumps(entry) + "\n" for entry in logged))
        report.write(section, {}, metrics=metrics)
    for stage in ("mid", "sft"):
        report.write(f"Chat evaluation {stage}", {"$Task$": estimate(0.1, 100, 0.05)})
    report.render()
    for name, texts in FIGURES.items():
        svg = (report.folder / "figures" / f"{name}.svg").read_text()
        assert texts <= set(re.findall("<text[^>]*>(.*?)</text>", svg))
        assert ElementTree.fromstring(svg).tag.endswith("svg") and len(svg) < 60_000


def test_common_names_are_not_put_into_code_spans():
    for name in ("Intel(R) Xeon(R) CPU @ 2.20GHz", "snake_case, 0.5 +- 0.1 (n=3)", "a - b: 100%"):
        assert literal(name) == name
    assert literal("me@example.org :tada:") == "`me@example.org :tada:`"
