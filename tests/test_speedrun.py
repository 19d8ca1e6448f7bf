"""speedrun.sh end to end in its smallest profile, its plan, and resuming interrupted runs."""

import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json
from tests.hub_server import hub_served, small_hub

STAGES = (
    "Tokenizer training", "Tokenizer evaluation", "Base model training", "Base model loss",
    "Base model evaluation", "Chat evaluation base", "Midtraining", "Chat evaluation mid",
    "Chat SFT", "Chat evaluation sft", "Chat RL", "Chat evaluation rl",
)  # fmt: skip


def environment(base: Path, **extra: str) -> dict[str, str]:
    own = {"NANOCHAT_BASE_DIR": str(base), "REPORT_OUT": str(base / "copy"), "PROFILE": "smoke"}
    return {**os.environ, **own, **extra}


def speedrun(base: Path, *words: str, **extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "speedrun.sh", *words],
        cwd=REPOSITORY, env=environment(base, **extra), capture_output=True, text=True,
    )  # fmt: skip


def values(base: Path, section: str) -> dict:
    return read_json(base / "report" / f"{section.lower().replace(' ', '-')}.json")["values"]


def results(base: Path, section: str) -> dict:
    """Values that a repeated run must reproduce: all except times and memory."""
    varying = ("time", "second", "memory")
    every = values(base, section).items()
    return {k: v for k, v in every if not any(word in k.lower() for word in varying)}


def kill_in(base: Path, label: str, seconds: float) -> None:
    """Start speedrun.sh and kill all its processes `seconds` after a stage starts."""
    process = subprocess.Popen(
        ["bash", "speedrun.sh"], cwd=REPOSITORY, env=environment(base), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    logged = []
    for line in process.stdout:
        logged.append(line)
        if line.strip() == f"=== {label}":
            break
    time.sleep(seconds)
    assert logged[-1].strip() == f"=== {label}", "".join(logged)
    with contextlib.suppress(ProcessLookupError):  # the run has already finished
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check_fixed_keys(report: str, tasks: Sequence[str]) -> None:
    """
    Sections and keys of the October 2025 report appear in its order, values before settings. Scores
    that were not measured are missing; `tasks` must not be.
    """
    text = (REPOSITORY / "tests" / "report_keys.txt").read_text()
    parts = [part.split("]", 1) for part in text.removeprefix("[").split("\n[")]
    expected = {name: " ".join(keys.split()).split(", ") for name, keys in parts}
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", report, re.M | re.S))
    assert [name for name in sections if name in expected] == list(expected)
    named = {"World few-shot": "CORE metric", "World chat": "ChatCORE"}
    every = set()
    for name, keys in expected.items():
        parts = sections[name].replace(" : ", "@").split("<details>")
        keys_of_parts = [re.findall(r"^- (.+?):(?: |$)", part, re.M) for part in parts]
        ordered = [[named.get(k, k.replace("@", " : ")) for k in part] for part in keys_of_parts]
        found = sum(ordered, [])
        every |= set(found)
        missing = [key for key in keys if key not in found]
        assert "evaluation" in name or set(missing) <= {"CORE metric estimate"}, (name, missing)
        for part in ordered:
            assert [k for k in part if k in keys] == [k for k in keys if k in part], name
        if name.startswith("Chat evaluation"):
            assert set(keys) - set(found) <= {"GSM8K", "AQUA"}, (name, missing)
    assert set(tasks) <= every


@pytest.fixture(scope="module")
def rerun(tmp_path_factory) -> tuple[Path, dict[str, dict], str]:
    """
    A run killed after three stages, its tokenizer changed afterwards, then repeated to the end.
    Returns the base directory, the results of the three stages and the output of the second run.
    """
    base = tmp_path_factory.mktemp("speedrun") / "my models"
    kill_in(base, "base model loss", 0)
    before = {stage: results(base, stage) for stage in STAGES[:3]}
    tokenizer = base / "tokenizer" / "main" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    done = speedrun(base)
    assert done.returncode == 0, done.stdout + done.stderr
    return base, before, done.stdout


@pytest.mark.timeout(1200)
def test_R18_rerun_after_a_kill_skips_finished_stages_and_redoes_damaged_ones(rerun):
    base, before, output = rerun
    assert re.findall("(.*): finished already, skipped", output) == list(STAGES[1:3])
    assert {stage: results(base, stage) for stage in STAGES[:3]} == before
    report = (base / "copy" / "report.md").read_text()
    assert all(f"## {stage}" in report for stage in STAGES)
    check_fixed_keys(report, tasks=("CORE metric", "ChatCORE"))


def test_model_of_a_finished_run_answers_in_the_terminal(rerun):
    chat = subprocess.run(
        [sys.executable, "-m", "scripts.chat_cli", "-p", "Who are you?", "-m", "8"],
        cwd=REPOSITORY, env=environment(rerun[0]), capture_output=True, text=True,
    )  # fmt: skip
    assert chat.returncode == 0 and chat.stdout.strip(), chat.stdout + chat.stderr


def test_last_hint_quotes_a_base_directory_with_spaces(rerun):
    base, _, output = rerun
    [command] = [line for line in output.splitlines() if "scripts.chat_web" in line]
    assert f"NANOCHAT_BASE_DIR={base}" in shlex.split(command, comments=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_R18_run_killed_in_every_stage_gives_the_same_results(tmp_path, record_property):
    rng = random.Random(0)
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert speedrun(uninterrupted).returncode == 0
    labels = re.findall(r'^ *stage "([^"]+)"', (REPOSITORY / "speedrun.sh").read_text(), re.M)
    assert len(labels) == len(STAGES)
    for label in labels:
        kill_in(killed, label, rng.uniform(2.0, 9.0))
    done = speedrun(killed)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in STAGES:
        assert results(killed, stage) == results(uninterrupted, stage), stage
    record_property("kills survived", len(labels))
    again = speedrun(killed)
    assert again.stdout.count("finished already, skipped") == len(STAGES), again.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_h100x8_dry_run_finishes_on_eight_processes(hub, tmp_path, monkeypatch):
    fakes = fake_machine(tmp_path, gpus=0)  # gloo instead of NCCL
    with hub_served(hub, monkeypatch) as serve:
        serve(small_hub(hub, tmp_path / "hub", rows=300))
        bundle = {"EVAL_BUNDLE": str(hub / "eval_bundle")}
        small = {"PROFILE": "h100x8", "DEPTH": "1", "DRY_RUN": "1"}
        done = speedrun(tmp_path / "base", **{**fakes, **bundle, **small})
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        report = (tmp_path / "base" / "copy" / "report.md").read_text()
        assert all(f"## {stage}" in report for stage in STAGES)
        check_fixed_keys(report, tasks=("CORE metric", "hellaswag_zeroshot", "arc_easy", "GSM8K"))
        assert values(tmp_path / "base", "Base model training")["DDP world size"] == 8
        final = values(tmp_path / "base", "Chat evaluation rl")
        assert "GSM8K" in final and "ChatCORE" in final
        again = speedrun(tmp_path / "base", **{**fakes, **bundle, **small})
    assert again.returncode == 0, again.stdout[-5000:] + again.stderr[-5000:]
    assert again.stdout.count("finished already, skipped") == len(STAGES)


def test_error_names_unknown_profile(tmp_path):
    done = speedrun(tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr


# ---- The plan, and runs that are rejected before training ---------------------------------------


def fake_machine(folder: Path, gpus: int) -> dict[str, str]:
    """Environment variables of a machine whose nvidia-smi lists H100s that PyTorch cannot use."""
    smi = folder / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f"-L) for i in $(seq {gpus}); do echo GPU $i: NVIDIA H100; done ;;\n"
        "--query-gpu=name) echo NVIDIA H100 80GB HBM3 ;;\n"
        "--query-gpu=driver_version) echo 535.104.05 ;;\n"
        "esac\n"
    )
    smi.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PROFILE": ""}


def test_gpus_that_pytorch_cannot_use_are_an_error(tmp_path):
    fakes = fake_machine(tmp_path, gpus=3)
    done = speedrun(tmp_path, **fakes)
    assert done.returncode == 2 and "=== " not in done.stdout, done.stdout + done.stderr
    assert "3 x NVIDIA H100" in done.stdout, "not all GPUs are used"
    for part in ("3 GPUs", "535.104.05", "for CUDA", "--torch-backend=auto", "PROFILE=cpu"):
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("extra", "detected"),
    [
        ({}, "gpu 3 3 15"),
        ({"CUDA_VISIBLE_DEVICES": "1,2"}, "gpu 2 2 16"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu 0 1 16"),
        ({"PROFILE": "cpu"}, "cpu 0 1 16"),
        ({"PROFILE": "h100x8"}, ""),
        ({"PROFILE": "h100x8", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"PROFILE": "h100x8", "CUDA_VISIBLE_DEVICES": "", "DRY_RUN": "1"}, "h100x8 0 8 16"),
    ],
)
def test_profile_is_derived_from_the_gpus(tmp_path, extra, detected):
    command = 'source dev/profile.sh; echo "$PROFILE $gpus $processes $(whole 16)"'
    env = {**os.environ, **fake_machine(tmp_path, gpus=3), **extra}
    done = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == detected
    assert detected or re.search("use PROFILE=(gpu|cpu)", done.stderr)


def test_plan_prints_time_and_cost_and_runs_no_stage(tmp_path):
    done = speedrun(tmp_path, "--plan", PROFILE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"total +about \d+ min", done.stdout)
    assert "=== " not in done.stdout and not (tmp_path / "tokenizer").exists()


# ---- First contact -------------------------------------------------------------------------------


def copy_of_script(folder: Path, line_end: str) -> Path:
    """speedrun.sh alone in a folder, with other line ends."""
    script = folder / "speedrun.sh"
    script.write_bytes((REPOSITORY / "speedrun.sh").read_bytes().replace(b"\n", line_end.encode()))
    return script


@pytest.mark.parametrize(("shell", "line_end"), [("sh", "\n"), ("bash", "\r\n")])
def test_wrong_shell_or_line_ends_get_one_sentence(tmp_path, shell, line_end):
    script = copy_of_script(tmp_path, line_end)
    done = subprocess.run([shell, script], capture_output=True, text=True)
    assert done.returncode == 2 and "bash speedrun.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_script_can_be_started_by_its_path():
    done = subprocess.run(
        [sys.executable, "scripts/base_train.py", "--help"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "--depth" in done.stdout, done.stderr
