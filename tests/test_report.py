"""
The report card: fixed sections byte for byte, additional content, summary and warnings.

The expected text is from an October 2025 report, whose names, order and formats are fixed.
"""

import random
import re
import shutil
import sys
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from nanochat import records as records_module
from nanochat import report, summary
from nanochat.common import MissingInput
from nanochat.logger import RunLog
from nanochat.plots import draw_figures
from nanochat.records import (
    Cost,
    Provenance,
    estimate,
    item_scores,
    read_history,
    read_records,
    slug,
    write_record,
)
from scripts import report as script

HEADER = {
    "run_started": "2025-10-23 22:27:01",
    "git": {
        "branch": "main",
        "commit": "f1e8954",
        "dirty": True,
        "message": "Document Hyperbolic setup and fix lite RL script",
    },
    "hardware": {
        "platform": "Linux",
        "cpu": "Some CPU",
        "cores": 104,
        "logical_cores": 104,
        "memory_gib": 1007.44,
        "gpus": ["NVIDIA H100 80GB HBM3"] * 8,
        "gpu_memory_gib": 633.66,
        "cuda": "12.8",
    },
    "software": {"python": "3.10.12", "torch": "2.8.0+cu128"},
    "bloat": {
        "characters": 474203,
        "lines": 12350,
        "files": 57,
        "tokens": 118550,
        "lock_lines": 2220,
    },
    "hourly_rate": 24.0,
}


def listing(entries: str) -> str:
    """A Markdown list, as in the report, of the ` | `-separated entries."""
    return "".join(f"- {entry}\n" for entry in entries.split(" | "))


HEADER_TEXT = (
    "## Environment\n"
    + "\n"
    + "### Git Information\n"
    + listing(
        "Branch: main | Commit: f1e8954 (dirty) | "
        "Message: Document Hyperbolic setup and fix lite RL script"
    )
    + "\n"
    + "### Hardware\n"
    + listing(
        "Platform: Linux | CPUs: 104 cores (104 logical) | Memory: 1007.4 GB | "
        "GPUs: 8x NVIDIA H100 80GB HBM3 | GPU Memory: 633.7 GB total | "
        "CUDA Version: 12.8 | Hourly Rate: $24.00/hour | CPU Model: Some CPU"
    )
    + "\n"
    + "### Software\n"
    + listing("Python: 3.10.12 | PyTorch: 2.8.0+cu128")
    + "\n"
    + "\n"
    + "### Bloat\n"
    + listing(
        "Characters: 474,203 | Lines: 12,350 | Files: 57 | Tokens (approx): 118,550 | "
        "Dependencies (uv.lock lines): 2,220"
    )
    + "\n"
    + "Run started: 2025-10-23 22:27:01\n"
    + "\n"
    + "---\n"
    + "\n"
)
TOKENIZER_TEXT = listing(
    "max_chars: 10,000,000,000 | doc_cap: 10,000 | vocab_size: 65,536 | "
    "train_time: 167.3429 | num_special_tokens: 9 | token_bytes_min: 1 | "
    "token_bytes_max: 32 | token_bytes_mean: 6.9125 | token_bytes_std: 2.8738"
)
TOKENIZER_EVALUATION_TEXT = (
    "## Tokenizer evaluation\n"
    + "timestamp: 2025-10-24 01:20:28\n"
    + "\n"
    + "### Comparison with GPT-2\n"
    + "\n"
    + "| Text Type | Bytes | GPT-2 Tokens | GPT-2 Ratio "
    "| Ours Tokens | Ours Ratio | Relative Diff % |\n"
    + "|-----------|-------|--------------|--------------"
    "|-------------|------------|-----------------|\n"
    + "| news | 1819 | 404 | 4.50 | 371 | 4.90 | +8.2% |\n"
    + "| fwe-val | 5028883 | 1083776 | 4.64 | 1033017 | 4.87 | +4.7% |\n"
    + "\n"
    + "### Comparison with GPT-4\n"
    + "\n"
    + "| Text Type | Bytes | GPT-4 Tokens | GPT-4 Ratio "
    "| Ours Tokens | Ours Ratio | Relative Diff % |\n"
    + "|-----------|-------|--------------|--------------"
    "|-------------|------------|-----------------|\n"
    + "| korean | 893 | 364 | 2.45 | 723 | 1.24 | -98.6% |\n"
    + "\n"
)
BASE_TEXT = listing(
    "run: aquarat-20251023-222655 | device_type:  | depth: 8 | max_seq_len: 2048 | "
    "num_iterations: 200 | target_flops: -1.0000 | target_param_data_ratio: 20 | "
    "device_batch_size: 32 | total_batch_size: 524,288 | embedding_lr: 0.2000 | "
    "unembedding_lr: 0.0040 | weight_decay: 0.0000 | matrix_lr: 0.0200 | "
    "grad_clip: 1.0000 | eval_every: 250 | eval_tokens: 10,485,760 | "
    "core_metric_every: 2000 | core_metric_max_per_task: 500 | sample_every: 2000 | "
    "model_tag:  | Number of parameters: 92,274,688 | "
    "Number of FLOPs per token: 4.529848e+08 | "
    "Calculated number of iterations: 200 | Number of training tokens: 104,857,600 | "
    "Tokens : Params ratio: 1.1364 | DDP world size: 8 | warmup_ratio: 0.0000 | "
    "warmdown_ratio: 0.2000 | final_lr_frac: 0.0000 | "
    "Minimum validation bpb: 1.2992 | Final validation bpb: 1.2992 | "
    "CORE metric estimate: 0.0135 | MFU %: 21.07% | "
    "Total training flops: 4.749890e+16 | Total training time: 0.39m | "
    "Peak memory usage: 19176.26MiB"
)
CHAT_TEXT = listing(
    "source: mid | task_name: GSM8K | dtype: bfloat16 | temperature: 0.0000 | "
    "max_new_tokens: 512 | num_samples: 1 | top_k: 50 | batch_size: 8 | "
    "model_tag: None | step: None | max_problems: None | device_type:  | "
    "GSM8K: 0.0023"
)
SUMMARY_TEXT = (
    "## Summary\n"
    + "\n"
    + listing(
        "Characters: 474,203 | Lines: 12,350 | Files: 57 | Tokens (approx): 118,550 | "
        "Dependencies (uv.lock lines): 2,220"
    )
    + "\n"
    + "| Metric          | BASE     | MID      | SFT      | RL       |\n"
    + "|-----------------|----------|----------|----------|----------|\n"
    + "| CORE            | 0.0155   | -        | -        | -        |\n"
    + "| GSM8K           | -        | 0.0023   | -        | -        |\n"
    + "\n"
    + "Total wall clock time: 3h25m\n"
)
ADDED = listing("provenance: run run-1, commit f1e8954 (dirty), seed 0 | cost: 1.50m on 8x H100")


def record(section, timestamp="2025-10-24 01:00:00", settings=None, values=None, **more):
    """A record as returned by `read_record`."""
    origin = {"run_id": "run-1", "seed": 0, "inputs": {}, "outputs": {}}
    origin |= {"commit": "f1e8954", "dirty": True} | more.pop("provenance", {})
    cost = {"wall_seconds": 90.0, "device_seconds": 720.0, "devices": 8, "device": "H100"}
    return {
        "section": section,
        "timestamp": timestamp,
        "settings": settings or {},
        "values": values or {},
        "items": more.pop("items", {}),
        "tables": more.pop("tables", []),
        "series": {},
        "metrics": None,
        "provenance": origin,
        "cost": {**cost, **more.pop("cost", {})},
    }


def section_of(text, name):
    """One section of a rendered report, including its heading."""
    return re.findall(rf"^## {name}\n.*?(?=\n\n\n## |\Z)", text, re.S | re.M)[0]


def seed_records():
    """
    Records with the values of the expected text, in the wrong order and with shuffled keys: the
    report must restore the fixed order.
    """
    tokenizer = {
        "token_bytes_std": 2.8738,
        "token_bytes_mean": 6.9125,
        "token_bytes_max": 32,
        "token_bytes_min": 1,
        "num_special_tokens": 9,
        "train_time": 167.34288,
    }
    limits = {"vocab_size": 65536, "doc_cap": 10000, "max_chars": 10_000_000_000}
    columns = "Text Type,Bytes,{0} Tokens,{0} Ratio,Ours Tokens,Ours Ratio,Relative Diff %"
    news = ["news", 1819, 404, "4.50", 371, "4.90", "+8.2%"]
    valid = ["fwe-val", 5028883, 1083776, "4.64", 1033017, "4.87", "+4.7%"]
    korean = ["korean", 893, 364, "2.45", 723, "1.24", "-98.6%"]
    tables = [
        {
            "title": f"Comparison with {name}",
            "columns": columns.format(name).split(","),
            "rows": rows,
        }
        for name, rows in (("GPT-2", [news, valid]), ("GPT-4", [korean]))
    ]
    base = {
        "run": "aquarat-20251023-222655",
        "device_type": "",
        "depth": 8,
        "max_seq_len": 2048,
        "num_iterations": 200,
        "target_flops": -1.0,
        "target_param_data_ratio": 20,
        "device_batch_size": 32,
        "total_batch_size": 524288,
        "embedding_lr": 0.2,
        "unembedding_lr": 0.004,
        "weight_decay": 0.0,
        "matrix_lr": 0.02,
        "grad_clip": 1.0,
        "eval_every": 250,
        "eval_tokens": 10485760,
        "core_metric_every": 2000,
        "core_metric_max_per_task": 500,
        "sample_every": 2000,
        "model_tag": "",
        "warmup_ratio": 0.0,
        "warmdown_ratio": 0.2,
        "final_lr_frac": 0.0,
    }
    trained = {
        "Number of parameters": 92274688,
        "Number of FLOPs per token": "4.529848e+08",
        "Calculated number of iterations": 200,
        "Number of training tokens": 104857600,
        "Tokens : Params ratio": 1.13636,
        "DDP world size": 8,
        "Minimum validation bpb": 1.29921,
        "Final validation bpb": 1.29921,
        "CORE metric estimate": 0.0135,
        "MFU %": "21.07%",
        "Total training flops": "4.749890e+16",
        "Total training time": "0.39m",
        "Peak memory usage": "19176.26MiB",
    }
    chat = {
        "source": "mid",
        "task_name": "GSM8K",
        "dtype": "bfloat16",
        "temperature": 0.0,
        "max_new_tokens": 512,
        "num_samples": 1,
        "top_k": 50,
        "batch_size": 8,
        "model_tag": None,
        "step": None,
        "max_problems": None,
        "device_type": "",
    }
    rng = random.Random(0)
    base, trained, chat = (
        dict(rng.sample(list(part.items()), len(part))) for part in (base, trained, chat)
    )
    core = {"Model": "base_model (step 200)", "CORE metric": 0.0155}
    late = "2025-10-24 01:52:40"
    return [
        record("Chat evaluation sft", late, {"source": "sft"}),
        record("Chat evaluation mid", "2025-10-24 01:52:32", chat, {"GSM8K": 3 / 1319}),
        record("Base model evaluation", "2025-10-24 01:32:41", {}, core),
        record("Tokenizer evaluation", "2025-10-24 01:20:28", tables=tables),
        record("Tokenizer training", "2025-10-24 01:20:23", limits, tokenizer),
        record("Base model training", "2025-10-23 22:28:41", base, trained),
    ]


def folded(text, name):
    """The folded list of a section."""
    opening, closing = "<details><summary>All settings and values</summary>\n\n", "\n</details>"
    return section_of(text, name).split(opening)[1].split(closing)[0]


def test_fixed_texts_are_reproduced_byte_for_byte():
    text = report.render_report(seed_records(), HEADER, "2025-10-23 22:26:58")
    assert text.startswith(
        "# nanochat training report\n\nGenerated: 2025-10-23 22:26:58\n\n## Results\n\n"
    )
    assert f"\n\n{HEADER_TEXT}## Tokenizer training\ntimestamp: 2025-10-24 01:20:23\n\n" in text
    assert TOKENIZER_EVALUATION_TEXT in text and SUMMARY_TEXT in text
    assert folded(text, "Tokenizer training") == TOKENIZER_TEXT + ADDED
    assert folded(text, "Base model training") == BASE_TEXT + ADDED
    assert folded(text, "Chat evaluation mid") == CHAT_TEXT + ADDED
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_fixed_sections_come_first_then_others_by_age():
    records = [
        record("Sweep of seeds", "2025-01-01 00:00:02"),
        record("Golf", "2025-01-01 00:00:01"),
        *seed_records(),
        record("Chat RL", "2020-01-01 00:00:00"),
    ]
    more = {"Reliability": [{"columns": ["Seed"], "rows": [["0"]]}], "Empty": []}
    text = report.render_report(records, HEADER, "now", more=more)
    assert re.findall("^## (.*)", text, re.M) == [
        "Results",
        "Environment",
        "Tokenizer training",
        "Tokenizer evaluation",
        "Base model training",
        "Base model evaluation",
        "Chat evaluation mid",
        "Chat evaluation sft",
        "Chat RL",
        "Golf",
        "Sweep of seeds",
        "Reliability",
        "Summary",
    ]


def test_additional_keys_follow_the_fixed_keys():
    origin = {"inputs": {"tokenizer": "t1", "data": "d1"}, "outputs": {"base": "b1"}}
    found = record(
        "Base model loss",
        settings={"split_tokens": 1000000},
        values={"document bpb": estimate(1.5, 12000, 0.01), "val bpb": 1.3, "train bpb": 1.29},
        provenance=origin,
    )
    figures = {"base-model-loss": [("Loss", "dev/report/loss.svg")]}
    text = section_of(report.render_report([found], HEADER, "now", figures), "Base model loss")
    assert text.split("\n\n", 1)[1] == (
        "- train bpb: 1.2900\n"
        "- val bpb: 1.3000\n"
        + "".join(f"- sample {i}: -\n" for i in range(7))
        + "\n![Loss](dev/report/loss.svg)\n\n"
        "<details><summary>All settings and values</summary>\n\n"
        "- split_tokens: 1,000,000\n"
        "- document bpb: 1.5000 +- 0.0100 (n=12,000)\n"
        "- provenance: run run-1, commit f1e8954 (dirty), seed 0; "
        "tokenizer t1, data d1 -> base b1\n"
        "- cost: 1.50m on 8x H100\n\n</details>"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0000"),
        (-0.00004, "-0.0000"),
        (9999, "9999"),
        (10000, "10,000"),
        (-1, "-1"),
        (True, "True"),
        (None, "None"),
        ("", ""),
        ("21.07%", "21.07%"),
        ([0.8, 0.95], "0.8000, 0.9500"),
        (estimate(0.2756, 254, 0.02803), "0.2756 +- 0.0280 (n=254)"),
        (
            estimate(0.5, 9, 0.1, 8, 0.06, 0.08),
            "0.5000 +- 0.1000 (n=9, k=8; items 0.0600, repeats 0.0800)",
        ),
        (estimate(0.5, 1, float("nan"), 8, None, None), "0.5000 +- nan (n=1, k=8)"),
        ({"value": 0.5}, "0.5000"),
        ("two\nlines\r\nand\u2028three", "two\\nlines\\nand\\nthree"),
    ],
)
def test_values_are_formatted_on_one_line(value, text):
    assert report.escape(report.format_value(value)) == text


# ------------------------------------------------------------------------------------------------
# S13: untrusted text

HOSTILE = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)> </td></table><!-- <?a <b",
    "comment": "<!-- the rest of the report",
    "link": "[click](javascript:alert(1)) [a][b] [b]: javascript:alert(1)",
    "image": "![x](https://evil.example/x.png) ![y][b]",
    "address": "<https://evil.example> https://evil.example WWW.evil.example <a|b@evil.example>",
    "terminal": "\x1b[2J\x1b]8;;https://evil.example\x07here\x9b31m \rover \x00 \x7f \b",
    "order": "user\u202e\u2066gpj.exe\u2069 \u200b\ufeff \ud800",
    "table": "a | b || c \\| d |",
    "rule": "---|---|---",
    "code": "`a` ``` b ```` ~~~ c",
    "emphasis": "**bold** __bold__ _i_ *i* ~~gone~~ $x$ a*b*",
    "formula": "$\\frac$ $\\href{javascript:alert(1)}{x}$",
    "heading": "# top",
    "lines": "one\n# top\n\n---\n<div>\n\n```\n| a |\n|---|\n\n    code\r\n\u2028end",
    "list": "- item",
    "number": "12. item",
    "quote": "> quoted",
    "underline": "====",
    "entity": "&lt;script&gt; &#x202e; &amp;",
    "escaped": "\\<b> \\[x](javascript:alert\\(1\\)) \\\\<i> \\",
}
HARMLESS = (
    "<|bos|>If 5*x + 3 = 13, then x is 3.5 < 4",
    "\ud55c\uad6d\uc5b4 \u4e2d\u6587 na\u00efve \u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "C:\\Users\\me & you, HuggingFaceFW/fineweb-edu, snake_case_d12, ~5%, $24.00/hour, #1, (n=3)",
)
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def plain(text: str) -> str:
    """The text a reader should see: one line, with control and invisible characters escaped."""
    lines = re.sub("\r\n|[\n\r\u2028]", r"\\n", text)
    return re.sub(
        "[\x00-\x1f\x7f-\x9f\u200b\u202e\u2066\u2069\ufeff\ud800]",
        lambda found: ascii(found[0])[1:-1],
        lines,
    )


def record_of(text: str):
    """A record with `text` in every field that can hold untrusted text."""
    return record(
        f"{text}",
        settings={"run": text, text: text, "texts": [text, text]},
        values={f"value {text}": text, f"score {text}": estimate(0.5, 10, 0.1)},
        tables=[{"title": text, "columns": [text, "other"], "rows": [[text, text], [1, text]]}],
        provenance={
            "run_id": text,
            "command": f"python {text} x",
            "inputs": {text: text},
            "outputs": {text: text},
        },
        cost={"device": text},
    )


def render_markdown(text: str):
    """Render a report that contains `text` everywhere; returns its Markdown and parsed tokens."""
    evaluated = record("Chat evaluation sft", values={text: estimate(0.5, 10, 0.1)})
    before = record("Chat evaluation mid", values={text: estimate(0.4, 10, 0.1)})
    git = {"branch": text, "commit": text, "dirty": False, "message": text}
    header = {**HEADER, "git": git, "software": {"python": text, "torch": text}}
    header["hardware"] = {**HEADER["hardware"], "cpu": text, "gpus": [text], "platform": text}
    figures = {slug(text): [(text, "report of (me)/a.svg")]}
    written = report.render_report([record_of(text), before, evaluated], header, "now", figures)
    tokens = RENDERER.parse(written)
    return written, [*tokens, *(child for token in tokens for child in token.children or [])]


@pytest.mark.parametrize("text", [*HOSTILE.values(), *HARMLESS])
def test_S13_report_shows_untrusted_text_literally(text):
    written, tokens = render_markdown(text)
    assert plain(written.replace("\n", " ")) == written.replace("\n", " "), "control characters"
    kinds = {token.type for token in tokens}
    assert not kinds & {
        *("html_inline", "link_open", "code_block", "fence"),
        *("s_open", "em_open", "ordered_list_open", "hardbreak"),
    }
    folds = {token.content for token in tokens if token.type == "html_block"}
    assert folds == {"<details><summary>All settings and values</summary>\n", "</details>\n"}
    [command] = [token.content for token in tokens if token.type == "code_inline"]
    assert command.startswith("python ") and command.endswith(" x")
    images = [token.attrs["src"] for token in tokens if token.type == "image"]
    assert images == ["report%20of%20%28me%29/a.svg"]
    assert [token.content for token in tokens if token.type == "strong_open"] == [""]
    assert sum(token.type == "hr" for token in tokens) == 1, "only the rule after the header"
    # Every text is shown completely and in the right place: headings, list items, cells
    seen = {"heading": [], "list_item": [], "th": [], "td": []}
    for i, token in enumerate(tokens):
        kind = token.type.removesuffix("_open")
        if token.type.endswith("_open") and kind in seen:
            inline = next(t for t in tokens[i:] if t.type == "inline")
            seen[kind].append("".join(c.content for c in inline.children or ()).strip())
    shown = " ".join(plain(text).split(" ")).strip()
    assert seen["heading"].count(shown) == 2, "the section and its table"
    assert {f"Branch: {shown}", f"GPUs: 1x {shown}", f"run: {shown}"} <= set(seen["list_item"])
    assert {f"{shown}: {shown}", f"value {shown}: {shown}"} <= set(seen["list_item"])
    assert shown in seen["th"] and seen["td"].count(shown) >= 4


@pytest.mark.parametrize("text", HARMLESS)
def test_S13_harmless_text_is_not_escaped(text):
    written = render_markdown(text)[0]
    assert f"\n- run: {text}\n" in written and f"\n- Message: {text[:80]}\n" in written


def test_S13_tables_keep_their_number_of_columns():
    for text in HOSTILE.values():
        tokens = [token.type for token in render_markdown(text)[1]]
        rows = " ".join(tokens).split("tr_open")[1:]
        assert {row.count("td_open") + row.count("th_open") for row in rows} == {1, 2, 5, 6}


@pytest.mark.parametrize("text", HOSTILE.values())
def test_S13_figures_show_untrusted_text_literally(base, text):
    text = text.replace("\ud800", "")  # records cannot contain lone surrogates
    curves = {text: [[0, 1.0], [1, 0.5]], "other": [[0, 1.0], [1, 0.5]]}
    write_record(f"Sweep {text}", {}, {}, Provenance("run-1", 0), Cost(1.0), series=curves)
    report.update(draw=draw_figures)
    (drawing,) = (base / "report" / "figures").iterdir()
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(drawing).iter()}
    assert "svg" in tags and not tags & {"script", "a", "image", "foreignObject"}


# ------------------------------------------------------------------------------------------------
# Summary


def test_summary_has_every_metric_of_every_stage_in_order():
    records = [
        record("Base model evaluation", values={"CORE metric": 0.2, "copa": 0.5}),
        record("Chat evaluation mid", values={"MMLU": 0.3, "ChatCORE": 0.1}),
        record("Chat evaluation sft", values={"Weather": estimate(0.5, 10, 0.1), "seconds": 12.0}),
        record("Chat evaluation rl", values={"GSM8K": estimate(0.25, 100, 0.04)}),
    ]
    text = section_of(report.render_report(records, HEADER, "now"), "Summary")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][:6]
    names = [row[0].strip("| ") for row in rows]
    assert names == ["Metric", "CORE", "GSM8K", "MMLU", "Weather", "ChatCORE"]
    assert [cell.strip(" |") for cell in rows[2][1:]] == ["-", "-", "-", "0.2500"]


def differences(found, items=MappingProxyType({}), records=()):
    """Table of the differences between stages."""
    parents = summary.parent_columns(records)
    return summary.difference_table(summary.differences(found, items, parents))


def changes(records):
    return differences(*summary.result_metrics(records), records)


def test_differences_have_standard_errors_and_verdicts():
    records = [
        record("Chat evaluation mid", values={"ARC-Easy": estimate(0.30, 1000, 0.01)}),
        record(
            "Chat evaluation sft",
            values={"AQUA": estimate(0.2756, 254, 0.0280), "ARC-Easy": estimate(0.40, 1000, 0.01)},
        ),
        record("Chat evaluation rl", values={"AQUA": estimate(0.2717, 254, 0.0279)}),
        record("Base model evaluation", values={"CORE metric": 0.1}),
    ]
    assert changes(records)["rows"] == [
        ["AQUA", "SFT to RL", "-0.0039", "0.0395", "within noise", "-"],
        ["ARC-Easy", "MID to SFT", "+0.1000", "0.0141", "better", "-"],
    ]
    assert "| AQUA | SFT to RL | -0.0039 | 0.0395 | within noise | - |" in report.render_report(
        records, HEADER, "now"
    )


def test_difference_without_standard_error_has_no_verdict():
    found = {"GSM8K": {"SFT": 0.1, "RL": estimate(0.2, 100, 0.04)}}
    assert summary.difference_table(summary.differences(found, {}, summary.parent_columns([])))[
        "rows"
    ] == [["GSM8K", "SFT to RL", "+0.1000", "-", "noise unknown", "-"]]


def test_lower_val_bpb_is_better():
    found = {"val bpb": {"BASE": estimate(1.0, 9, 0.01), "MID": estimate(0.9, 9, 0.01)}}
    rows = summary.difference_table(summary.differences(found, {}, summary.parent_columns([])))[
        "rows"
    ]
    assert rows[0][2:5] == ["-0.1000", "0.0141", "better"]


def test_differences_skip_stages_without_the_metric():
    stages = ("base", "mid", "sft", "rl")
    values = [{"MMLU": 0.2}, {"AQUA": 0.3}, {"MMLU": 0.4, "AQUA": 0.5}, {"MMLU": 0.6, "AQUA": 0.6}]
    records = [
        record(f"Chat evaluation {stage}", values=v)
        for stage, v in zip(stages, values, strict=True)
    ]
    rows = changes(records)["rows"]
    assert [row[:3] for row in rows] == [
        ["AQUA", "MID to SFT", "+0.2000"],
        ["AQUA", "SFT to RL", "+0.1000"],
        ["MMLU", "BASE to SFT", "+0.2000"],
        ["MMLU", "SFT to RL", "+0.2000"],
    ]


def test_dpo_has_a_column_only_if_it_was_evaluated():
    records = [record(f"Chat evaluation {s}", values={"AQUA": 0.3}) for s in ("sft", "rl")]
    assert "DPO" not in report.render_report(records, HEADER, "now")
    records.append(record("Chat evaluation dpo", values={"AQUA": estimate(0.4, 254, 0.01)}))
    text = report.render_report(records, HEADER, "now")
    assert "|  | base | mid | SFT | DPO | RL |" in text
    assert "| AQUA | - | - | 0.300 | 0.400 ± 0.010 | 0.300 |" in text
    summary_row = next(line for line in text.splitlines() if line.startswith("| AQUA     "))
    assert summary_row.replace(" ", "") == "|AQUA|-|-|0.3000|0.4000|0.3000|"
    assert [row[:3] for row in changes(records)["rows"]] == [
        ["AQUA", "SFT to DPO", "+0.1000"],
        ["AQUA", "DPO to RL", "-0.1000"],
    ]
    trained = record("Chat RL")
    trained["provenance"] |= {"inputs": {"sft": "f"}, "outputs": {"rl": "g"}}
    assert changes([*records, trained])["rows"][-1][:3] == ["AQUA", "SFT to RL", "+0.0000"]


def chat_record(stage, arc, gsm, items="the same"):
    """A chat evaluation of two tasks and their centered mean."""
    values = {
        "ARC-Easy": estimate(sum(arc) / len(arc), len(arc), 0.05),
        "GSM8K": estimate(sum(gsm) / len(gsm), len(gsm), 0.05),
    }
    values["ChatCORE"] = estimate(
        (values["ARC-Easy"]["value"] - 0.25) / 0.75 / 2 + values["GSM8K"]["value"] / 2, 200, 0.04
    )
    scores = {
        "ARC-Easy": item_scores([items, "arc"], arc),
        "GSM8K": item_scores([items, "gsm"], gsm),
        "ChatCORE": {"weights": {"ARC-Easy": 1 / 2 / 0.75, "GSM8K": 1 / 2}},
    }
    return record(f"Chat evaluation {stage}", values=values, items=scores)


def test_stages_with_the_same_items_are_compared_item_by_item():
    before, after = [0, 1] * 50, [1] * 12 + [0, 1] * 44
    records = [chat_record("mid", before, before), chat_record("sft", after, [1, 0] * 50)]
    text = report.render_report(records, HEADER, "now")
    # 6 of 100 changed, all better: se = sqrt(0.06 * 0.94 / 99)
    assert (
        "| ARC-Easy | MID to SFT | +0.0600 | 0.0239 | better | 6 won, 0 lost of 100 (p = 0.031) |"
    ) in text
    # all changed, half of them worse: se = sqrt(1 / 99)
    assert (
        "| GSM8K | MID to SFT | +0.0000 | 0.1005 | within noise | 50 won, 50 lost of 100 (p = 1) |"
    ) in text
    # 0.06 / 1.5, with the errors of both parts propagated
    assert (
        "| ChatCORE | MID to SFT | +0.0400 | 0.0527 | within noise | 56 won, 50 lost of 200 "
    ) in text


def test_stages_with_different_items_are_compared_as_independent():
    records = [
        chat_record("mid", [0, 1] * 50, [0, 1] * 50),
        chat_record("sft", [1, 1] * 50, [0, 1] * 50, items="others"),
    ]
    rows = changes(records)["rows"]
    assert rows[0] == ["ARC-Easy", "MID to SFT", "+0.5000", "0.0707", "better", "-"]
    assert [row[-1] for row in rows] == ["-", "-", "-"]


def test_scores_with_other_sampling_settings_are_not_compared():
    records = [chat_record(stage, [0, 1] * 50, [0, 1] * 50) for stage in ("mid", "sft")]
    for record, how in zip(records, ("greedy", "temperature 1"), strict=True):
        record["items"]["GSM8K"]["how"] = how
    assert [row[0] for row in changes(records)["rows"]] == ["ARC-Easy"]


def test_ledger_sums_time_and_cost():
    hour = {"wall_seconds": 3600.0, "device_seconds": 28800.0}
    records = [record("Base model training", cost=hour), record("Chat SFT")]
    rows = summary.cost_table(records, 24.0)["rows"]
    assert rows == [
        ["Base model training", "60.0 min", "8.0 h", "8x H100", "$24.00"],
        ["Chat SFT", "1.5 min", "12.0 min", "8x H100", "$0.60"],
        ["Total", "61.5 min", "8.2 h", "", "$24.60"],
    ]


def test_wall_clock_time_is_reported_without_and_with_rl():
    records = [
        record("Chat SFT", "2025-10-24 01:52:40"),
        record("Chat evaluation rl", "2025-10-24 03:52:41"),
        record("Golf", "2025-10-25 00:00:00"),
    ]
    text = report.render_report(records, HEADER, "now")
    assert "Total wall clock time: 3h25m\n" in text
    assert "Total wall clock time with RL: 5h25m\n" in text


@pytest.mark.parametrize(
    ("gpus", "dollars"),
    [([], 0), (["NVIDIA H100 80GB HBM3"] * 8, 24), (["NVIDIA A100-SXM4-80GB"], 1.79), (["X"], 2)],
)
def test_default_hourly_rate_is_the_sum_over_gpus(gpus, dollars):
    assert records_module.default_rate(gpus) == pytest.approx(dollars)


# ------------------------------------------------------------------------------------------------
# Top of the report


def results(text):
    """The first section of a rendered report."""
    return section_of(text, "Results")


def test_verdict_names_model_cost_scores_changes_and_losses():
    base = record(
        "Base model training",
        settings={"depth": 4},
        values={"Number of parameters": 9_437_704, "Number of training tokens": 1_638_400},
        cost={"wall_seconds": 3600.0},
    )
    mid = chat_record("mid", [1] * 100, [0] * 100)
    sft = chat_record("sft", [1] * 90 + [0] * 10, [1] * 100)
    text = report.render_report([base, mid, sft], HEADER, "now")
    assert results(text).split("\n\n")[1] == (
        "A model of depth 4 (9.44 M parameters, 1.64 M pretraining tokens): 63.0 min on "
        "8x NVIDIA H100 80GB HBM3, $25.20. "
        "Best scores: ChatCORE 0.933 ± 0.040 (SFT). "
        "ChatCORE changed by +0.433 ± 0.020 from mid to SFT (better). "
        "Worse by more than 2 standard errors: ARC-Easy -0.100 ± 0.030 from mid to SFT. "
        "± is one standard error over questions; other seeds are not included. "
        "Means over tasks are rescaled so that 0 is chance."
    )


def test_verdict_says_that_no_task_lost():
    records = [chat_record(stage, [0, 1] * 50, [0, 1] * 50) for stage in ("mid", "sft")]
    text = report.render_report(records, HEADER, "now")
    assert "Worse by more than 2 standard errors: no task." in results(text)
    assert "The stages below: " in results(text)  # no model was trained


def test_table_of_results_has_every_stage_and_standard_errors():
    text = results(report.render_report([chat_record("sft", [1, 0], [1, 0])], HEADER, "now"))
    assert "|  | base | mid | SFT | RL |\n" in text
    assert "| ARC-Easy | - | - | 0.500 ± 0.050 | - |\n" in text


def test_scores_on_the_built_in_world_are_named_world():
    weights = {"World-Facts": 0.5, "World-Choice": 0.5}
    chat = record(
        "Chat evaluation mid",
        values={"ChatCORE": estimate(0.8, 100, 0.01)},
        items={"ChatCORE": {"weights": weights}},
    )
    scores = {"CORE metric": estimate(0.7, 100, 0.01), "Suite": "embedded world"}
    text = report.render_report([record("Base model evaluation", values=scores), chat], HEADER, "")
    assert "CORE" not in text
    assert "| World few-shot  | 0.7000   | -        | -        | -        |" in text
    assert "| World chat      | -        | 0.8000   | -        | -        |" in text
    assert "- World few-shot: 0.7000" in folded(text, "Base model evaluation")


def test_samples_of_the_last_stage_are_shown_at_the_top_only():
    def sampled(stage, answer):
        rows = [["Who are you?", answer], ["Two\nlines", "a | b"]]
        table = {"title": report.SAMPLES, "columns": ["User", "Model"], "rows": rows}
        return record(f"Chat evaluation {stage}", tables=[table])

    text = report.render_report([sampled("mid", "Old."), sampled("rl", "New.")], HEADER, "now")
    assert "### Sample conversations (rl)\n" in results(text)
    assert "| Who are you? | New. |\n| Two lines | a \\| b |" in results(text)
    assert "Old." not in text and text.count("New.") == 1


def test_section_shows_results_and_command_and_folds_settings():
    trained = record(
        "Midtraining",
        settings={"run": "dummy", "num_iterations": 260, "mixture": "", "keep": -1},
        values={"Number of iterations": 260, "Final validation bpb": 0.12647},
        provenance={"command": "python -m scripts.mid_train --num_iterations=260"},
    )
    text = section_of(report.render_report([trained], HEADER, "now"), "Midtraining")
    front = text.split("<details>")[0]
    assert "| 260 | 0.1265 |" in front
    assert "\n`python -m scripts.mid_train --num_iterations=260`\n" in front
    assert "- run: dummy" not in front and "- run: dummy\n" in text
    assert "- mixture: auto\n- keep: auto\n" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        ("1484.12MiB", "MiB", "1.4 GiB"),
        ("682.37MiB", "MiB", "682.37 MiB"),
        ("2.68m", "m", "2.7 min"),
        (0.76, "s", "0.8 s"),
        (9_437_704, "count", "9.44 M"),
        (1.2e9, "count", "1.2 B"),
        (999_600_000, "count", "1 B"),
        ("10,164", "count", "10,164"),
        ("-", "count", "-"),
        ("205.00m", "m", "3.4 h"),
        (0.12647, "", "0.1265"),
        (estimate(0.5, 10, 0.1), "", "0.500 ± 0.100"),
    ],
)
def test_headline_values_have_the_units_of_a_reader(value, unit, text):
    assert report.readable(value, unit) == text


def test_p_values_are_never_zero_and_unknown_ones_not_printed():
    many = summary.stats.compare([0.0] * 2000, [1.0] * 2000)
    one_cluster = summary.stats.compare([0.0, 0.0], [1.0, 1.0], ["a", "a"])
    rows = summary.difference_table(
        [summary.Difference("A", "MID", "SFT", 1.0, 0.0, "better", c) for c in (many, one_cluster)]
    )["rows"]
    assert rows[0][-1] == "2,000 won, 0 lost of 2,000 (p < 1e-100)"
    assert rows[1][-1] == "2 won, 0 lost of 2"


def test_record_has_the_command_of_a_script(base, monkeypatch):
    spec = SimpleNamespace(name="scripts.base_train")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
    monkeypatch.setattr(sys, "argv", ["base_train.py", "--depth=4", "--mixture=a b"])
    assert records_module.command_line() == "python -m scripts.base_train --depth=4 '--mixture=a b'"
    assert records_module.command_line(8).startswith(
        "torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=4"
    )
    spec.name = "pytest"
    assert records_module.command_line() == ""


# ------------------------------------------------------------------------------------------------
# Provenance


def chain(**changes):
    """Records of three consecutive stages of one run, with `changes` to their provenance."""
    links = {
        "Tokenizer training": {"inputs": {"data": "d1"}, "outputs": {"tokenizer": "t1"}},
        "Base model training": {"inputs": {"tokenizer": "t1"}, "outputs": {"base": "b1"}},
        "Midtraining": {"inputs": {"base": "b1", "tokenizer": "t1"}, "outputs": {"mid": "m1"}},
    }
    return [
        record(name, provenance={**link, **changes.get(name, {})}) for name, link in links.items()
    ]


def test_report_of_one_run_has_no_warning():
    text = report.render_report(chain(), HEADER, "now")
    assert "WARNING" not in text
    assert summary.find_faults(chain()) == []


def test_retrained_tokenizer_gives_a_warning():
    records = chain(**{"Tokenizer training": {"outputs": {"tokenizer": "t2"}}})
    text = report.render_report(records, HEADER, "now")
    assert (
        "---\n\n> [!WARNING]\n> **Provenance: these sections are inconsistent.**\n"
        "> - Base model training used tokenizer t1, but Tokenizer training produced t2.\n"
        "> - Midtraining used tokenizer t1, but Tokenizer training produced t2.\n"
        "\n## Tokenizer training\n"
    ) in text


def test_sections_of_several_runs_or_commits_give_a_warning():
    records = chain(**{"Midtraining": {"run_id": "run-2", "commit": "abcdef0"}})
    faults = summary.find_faults(records)
    assert faults == [
        "Sections come from 2 runs: run-1 (Tokenizer training, Base model training); "
        "run-2 (Midtraining).",
        "Sections come from 2 commits: f1e8954 (Tokenizer training, Base model training); "
        "abcdef0 (Midtraining).",
    ]


def test_evaluations_of_external_models_give_no_warning():
    other = {**chain()[0], "section": "Evaluation of gpt2"}
    other["provenance"] = {**other["provenance"], "run_id": "other", "inputs": {"hf": "x"}}
    assert summary.find_faults([*chain(), other]) == []


# ------------------------------------------------------------------------------------------------
# Files


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    """Use fixed hardware and code size instead of querying them."""
    monkeypatch.setattr(report, "hardware", lambda: HEADER["hardware"])
    monkeypatch.setattr(report, "code_size", lambda: HEADER["bloat"])


def finish_base_stage(base, report_dir=None):
    """Record a short training run and update the report, as a script does."""
    folder = base / "base_checkpoints" / "d4"
    with RunLog(folder) as log:
        for step in range(20):
            log.log(step, {"loss": 5 - step / 10, "lr": 1.0, "tokens_per_second": 1e6 + step})
        log.log(20, {"val_bpb": 1.5})
    write_record(
        "Base model training",
        {"depth": 4},
        {"Minimum validation bpb": 1.5},
        Provenance("run-1", 0, {"tokenizer": "t1"}, {"base": "b1"}),
        Cost(12.0),
        report_dir,
        metrics=folder / "metrics.jsonl",
    )
    return report.update(report_dir, draw=draw_figures)


def links(path):
    """Paths of the figures in a report."""
    return [path.parent / link for link in re.findall(r"!\[.*?\]\((.*?)\)", path.read_text())]


def test_update_keeps_existing_figures_without_redrawing(base):
    first = {link: link.read_bytes() for link in links(finish_base_stage(base))}
    write_record("Base model", {}, {}, Provenance("run-1", 0), Cost(1.0), series={"a": [[0, 1.0]]})
    assert links(report.update()) == list(first)
    assert {link: link.read_bytes() for link in links(base / "report.md")} == first


def test_report_links_its_figures(base):
    path = finish_base_stage(base)
    assert path == base / "report.md"
    assert [link.name for link in links(path)] == ["base-model-training-training.svg"]
    assert all(link.read_bytes().startswith(b"<?xml") for link in links(path))


def test_rendering_again_changes_only_the_time(base):
    path = finish_base_stage(base)
    first = {p: p.read_bytes() for p in [path, *links(path)]}
    report.update(draw=draw_figures)
    for p, content in first.items():
        again = re.sub(rb"Generated: .*", b"", p.read_bytes())
        assert again == re.sub(rb"Generated: .*", b"", content), p.name


@dataclass(frozen=True)
class InFolder:
    report_dir: str | None = None


def test_header_keeps_the_hardware_of_the_run(base, monkeypatch):
    finish_base_stage(base)
    laptop = {**HEADER["hardware"], "gpus": [], "cpu": "A laptop"}
    monkeypatch.setattr(report, "hardware", lambda: laptop)
    text = report.update().read_text()
    assert "8x NVIDIA H100 80GB HBM3" in text and "A laptop" not in text
    for stage, outputs, machine in (("sft", {}, "8x NVIDIA"), ("rl", {"rl": "g"}, "A laptop")):
        origin = Provenance("run-1", 0, {}, outputs)
        report.append_section(f"Chat {stage}", InFolder(), {}, origin)
        assert machine in (base / "report.md").read_text()


def test_report_dir_has_its_own_report(base):
    path = finish_base_stage(base, report_dir=base / "sweep" / "seed1")
    assert path == base / "sweep" / "seed1" / "report.md"
    assert all(link.exists() for link in links(path)) and len(links(path)) == 1
    assert not (base / "report.md").exists()


def test_run_without_metrics_file_is_reported_without_figures(base, capsys):
    finish_base_stage(base)
    shutil.rmtree(base / "base_checkpoints")
    assert links(report.update(draw=draw_figures)) == []
    assert "metrics.jsonl: it does not exist" in capsys.readouterr().out
    assert list((base / "report" / "figures").iterdir()) == []


def test_report_has_every_kind_of_figure(base):
    origin = Provenance("run-1", 0)
    scores = {"CORE metric": 0.1, "copa": 0.2, "Our suite": estimate(0.3, 10, 0.1), "seconds": 9.0}
    write_record("Base model evaluation", {}, scores, origin, Cost(1.0))
    with RunLog(base / "rl") as log:
        for step in range(5):
            log.log(step, {"reward": 0.1 * step, "pass_at_1": 0.2})
    write_record("Chat RL", {}, {}, origin, Cost(1.0), metrics=base / "rl" / "metrics.jsonl")
    curves = {"seed 0": [[0, 1.0], [1, float("nan")], [2, 0.5]]}
    write_record("Sweep", {}, {}, origin, Cost(1.0), series=curves)
    assert [link.name for link in links(report.update(draw=draw_figures))] == [
        "base-model-evaluation-core.svg",
        "chat-rl-training.svg",
        "sweep-series.svg",
    ]


def test_copied_report_includes_its_figures(base, tmp_path_factory):
    finish_base_stage(base)
    out = tmp_path_factory.mktemp("repository")
    (out / "dev" / "report").mkdir(parents=True)
    (out / "dev" / "report" / "of-an-older-run.svg").write_text("")
    script.main(script.Report(out=str(out)))
    found = links(out / "report.md")
    assert len(found) == 1 and all(link.parent == out / "dev" / "report" for link in found)
    assert sorted((out / "dev" / "report").iterdir()) == sorted(found)
    assert (base / "report.md").exists()


def test_reset_archives_everything(base):
    finish_base_stage(base)
    old = sorted(p.name for p in (base / "report").iterdir() if not p.name.startswith("."))
    archive = script.reset(None, None)
    assert archive is not None and archive.parent == base / "report"
    assert sorted(p.name for p in archive.iterdir()) == sorted([*old, "report.md"])
    assert read_records() == [] and read_history() == []
    assert not (base / "report.md").exists()
    again = script.reset(None, None)
    assert again is not None and again != archive and archive.exists()


def test_hourly_rate_is_saved_for_later_stages(base):
    script.main(script.Report(reset=True, hourly_rate=16.0))
    path = finish_base_stage(base)
    assert "- Hourly Rate: $16.00/hour" in path.read_text()
    script.main(script.Report(hourly_rate=3600.0))
    finish_base_stage(base)
    assert "| Base model training | 12.0 s | 12.0 s | 1x cpu | $12.00 |" in path.read_text()


def test_report_without_records_names_the_command_to_run(base):
    with pytest.raises(MissingInput, match="no records in.*\n.*speedrun"):
        script.main(script.Report())
    assert not list((base / "report").iterdir())  # a header would set the start of a later run
