"""speedrun.sh end to end in its smallest profile: a report, safe to run again."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json

STAGES = (
    "Tokenizer training", "Tokenizer evaluation", "Base model training", "Base model loss",
    "Base model evaluation", "Chat evaluation base", "Midtraining", "Chat evaluation mid",
    "Chat SFT", "Chat evaluation sft", "Chat RL", "Chat evaluation rl",
)  # fmt: skip


def environment(base: Path, **extra: str) -> dict[str, str]:
    mine = {"NANOCHAT_BASE_DIR": str(base), "REPORT_OUT": str(base / "copy"), "PROFILE": "smoke"}
    return {**os.environ, **mine, **extra}


def speedrun(base: Path, **extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "speedrun.sh"],
        cwd=REPOSITORY, env=environment(base, **extra), capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def values(base: Path, section: str) -> dict:
    return read_json(base / "report" / f"{section.lower().replace(' ', '-')}.json")["values"]


def results(base: Path, section: str) -> dict:
    """What a repetition must reproduce: all but times and memory."""
    varying = ("time", "second", "memory")
    every = values(base, section).items()
    return {k: v for k, v in every if not any(word in k.lower() for word in varying)}


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

    # The tokenizer's file is still there, but no longer what was recorded: content decides
    tokenizer = base / "tokenizer" / "main" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    redone = speedrun(base)
    assert redone.returncode == 0, redone.stdout + redone.stderr
    assert redone.stdout.count("finished already, skipped") == len(STAGES) - 1
    for stage in STAGES:
        assert results(base, stage) == figures[stage]


def kill_in(base: Path, label: str, seconds: float) -> None:
    """Start speedrun.sh and kill all its processes `seconds` after a stage has begun."""
    process = subprocess.Popen(
        ["bash", "speedrun.sh"], cwd=REPOSITORY, env=environment(base), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.strip() == f"=== {label}":
            break
    time.sleep(seconds)
    assert said[-1].strip() == f"=== {label}", "".join(said)
    with contextlib.suppress(ProcessLookupError):  # the whole run was faster
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_R18_killed_in_every_stage_it_ends_with_the_same_figures(tmp_path, record_property):
    rng = random.Random(0)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert speedrun(straight).returncode == 0
    labels = re.findall(r'^ *stage "([^"]+)"', (REPOSITORY / "speedrun.sh").read_text(), re.M)
    assert len(labels) == len(STAGES)
    for label in labels:
        kill_in(killed, label, rng.uniform(2.0, 9.0))
    done = speedrun(killed)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in STAGES:
        assert results(killed, stage) == results(straight, stage), stage
    record_property("kills survived", len(labels))
    again = speedrun(killed)
    assert again.stdout.count("finished already, skipped") == len(STAGES), again.stdout


def test_an_unknown_profile_is_refused_by_name(tmp_path):
    done = speedrun(tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr
