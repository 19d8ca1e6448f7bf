"""speedrun.sh end to end in its smallest profile: a report, safe to run again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json

STAGES = (
    "Tokenizer training", "Tokenizer evaluation", "Base model training", "Base model loss",
    "Base model evaluation", "Chat evaluation base", "Midtraining", "Chat evaluation mid",
    "Chat SFT", "Chat evaluation sft", "Chat RL", "Chat evaluation rl",
)  # fmt: skip


def speedrun(base: Path, **extra: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "NANOCHAT_BASE_DIR": str(base),
        "REPORT_OUT": str(base / "copy"),
        "PROFILE": "smoke",
        **extra,
    }
    return subprocess.run(
        ["bash", "speedrun.sh"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def values(base: Path, section: str) -> dict:
    return read_json(base / "report" / f"{section.lower().replace(' ', '-')}.json")["values"]


def results(base: Path, section: str) -> dict:
    """What a repetition must reproduce: all but times and memory."""
    varying = ("time", "second", "memory", "Memory")
    return {k: v for k, v in values(base, section).items() if not any(w in k for w in varying)}


@pytest.mark.timeout(1200)
def test_R18_a_second_run_skips_what_is_there_and_redoes_what_was_damaged(tmp_path):
    base = tmp_path / "base"
    first = speedrun(base)
    assert first.returncode == 0, first.stdout + first.stderr
    report = (base / "copy" / "report.md").read_text()
    assert all(f"## {stage}" in report for stage in STAGES)
    asked = subprocess.run(
        [sys.executable, "-m", "scripts.chat_cli", "-p", "Who are you?", "-m", "8"],
        cwd=REPOSITORY, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert asked.returncode == 0 and asked.stdout.strip(), asked.stdout + asked.stderr
    figures = {stage: results(base, stage) for stage in STAGES}

    again = speedrun(base)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("finished already, skipped") == len(STAGES), again.stdout

    # The tokenizer's file is still there, but no longer what was recorded: content decides
    tokenizer = base / "tokenizer" / "main" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    redone = speedrun(base)
    assert redone.returncode == 0, redone.stdout + redone.stderr
    assert redone.stdout.count("finished already, skipped") == len(STAGES) - 1
    for stage in STAGES:
        assert results(base, stage) == figures[stage]


def test_an_unknown_profile_is_refused_by_name(tmp_path):
    done = speedrun(tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr
