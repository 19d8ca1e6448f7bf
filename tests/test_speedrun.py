"""speedrun.sh end to end in its smallest profile, its plan, and resuming interrupted runs."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import dev.plan
from dev.plan import Plan
from nanochat.common import REPOSITORY, read_json
from nanochat.config import parse
from scripts.base_train import BaseTrain
from tests.commands import mib_after_imports
from tests.hub_server import hub_served, small_hub
from tests.training_runs import SMALL

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
    Sections and keys of the October 2025 report appear in its order. Scores of tasks that were not
    evaluated are missing; `tasks` must not be.
    """
    text = (REPOSITORY / "tests" / "report_keys.txt").read_text()
    parts = [part.split("]", 1) for part in text.removeprefix("[").split("\n[")]
    expected = {name: " ".join(keys.split()).split(", ") for name, keys in parts}
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", report, re.M | re.S))
    assert [name for name in sections if name in expected] == list(expected)
    named = {"World few-shot": "CORE metric", "World chat": "ChatCORE"}
    every = set()
    for name, keys in expected.items():
        found = re.findall(r"^- (.+?):(?: |$)", sections[name].replace(" : ", "@"), re.M)
        found = [named.get(key, key.replace("@", " : ")) for key in found]
        every |= set(found)
        missing = [key for key in keys if key not in found]
        assert "evaluation" in name or not missing, (name, missing)
        assert [key for key in found if key in keys] == [k for k in keys if k in found], name
        if name.startswith("Chat evaluation"):
            assert set(keys) - set(found) <= {"GSM8K", "AQUA"}, (name, missing)
    assert set(tasks) <= every


@pytest.mark.timeout(1200)
def test_R18_rerun_after_a_kill_skips_finished_stages_and_redoes_damaged_ones(tmp_path):
    base, finished = tmp_path / "base", STAGES[:3]
    kill_in(base, "base model loss", 0)
    expected = {stage: results(base, stage) for stage in finished}
    # The tokenizer file still exists but no longer matches its record
    tokenizer = base / "tokenizer" / "main" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    rerun = speedrun(base)
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    assert re.findall("(.*): finished already, skipped", rerun.stdout) == list(finished[1:])
    assert {stage: results(base, stage) for stage in finished} == expected
    report = (base / "copy" / "report.md").read_text()
    assert all(f"## {stage}" in report for stage in STAGES)
    check_fixed_keys(report, tasks=("CORE metric", "ChatCORE"))
    chat = subprocess.run(
        [sys.executable, "-m", "scripts.chat_cli", "-p", "Who are you?", "-m", "8"],
        cwd=REPOSITORY, env={**os.environ, "NANOCHAT_BASE_DIR": str(base)}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert chat.returncode == 0 and chat.stdout.strip(), chat.stdout + chat.stderr


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
    fakes = fake_machine(tmp_path, sandbox=False)  # no GPUs: gloo instead of NCCL
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
        assert "GSM8K" in final and "HumanEval" not in final and "ChatCORE" in final
        again = speedrun(tmp_path / "base", **{**fakes, **bundle, **small})
    assert again.returncode == 0, again.stdout[-5000:] + again.stderr[-5000:]
    assert again.stdout.count("finished already, skipped") == len(STAGES)


@pytest.mark.parametrize("launcher", ["dev/stages.sh", "dev/launch/slurm.sh"])
def test_launchers_separate_script_flags_from_torchrun_flags(launcher):
    text = (REPOSITORY / launcher).read_text()
    launched = re.search(r"-m (\S+) (-- .*\$@.*)", text)
    assert launched, "expected -- between the module and its flags"
    words = ["-m", "scripts.base_train", *launched[2].split()[:1], "--run=dummy", "--seed=9"]
    parsed = get_args_parser().parse_args(words)
    assert parsed.training_script == "scripts.base_train"
    assert parsed.training_script_args[-2:] == ["--run=dummy", "--seed=9"]


def test_base_train_accepts_the_few_shot_flags_of_fetch_suite():
    script = "python() { :; }; source dev/stages.sh; fetch_suite; echo ${estimate[@]}"
    env = {**os.environ, "processes": "1", "gpus": "0", "EVAL_BUNDLE": "bundle.zip"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    cfg = parse(BaseTrain(), None, done.stdout.split())
    assert cfg.evaluation.eval_bundle == "bundle.zip" and cfg.evaluation.core_metric_every == 2000


def test_error_names_unknown_profile(tmp_path):
    done = speedrun(tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr


# ------------------------------------------------------------------------------------------------
# The plan, and runs that are rejected before training


def fake_machine(
    folder: Path, gpus: int = 0, free_bytes: int | None = None, sandbox: bool = True
) -> dict[str, str]:
    """
    Environment variables that fake a machine: the number of H100s listed by nvidia-smi, the free
    bytes on disk, and whether a sandbox works. Python processes load the fakes (sitecustomize).
    """
    lines = ["import shutil"]
    if free_bytes is not None:
        usage = f"shutil._ntuple_diskusage({10**13}, {10**13 - free_bytes}, {free_bytes})"
        lines.append(f"shutil.disk_usage = lambda path: {usage}")
    if not sandbox:
        lines += ["import nanochat.sandbox", "nanochat.sandbox.LAYERS = ()"]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    smi = folder / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f"-L) for i in $(seq {gpus}); do echo GPU $i: NVIDIA H100; done ;;\n"
        "--query-gpu=name) echo NVIDIA H100 80GB HBM3 ;;\n"
        "--query-gpu=driver_version) echo 535.104.05 ;;\n"
        "esac\n"
    )
    smi.chmod(0o755)
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": path, "PROFILE": ""}


def test_R37_plan_that_does_not_fit_on_disk_is_rejected(tmp_path):
    done = speedrun(tmp_path, **fake_machine(tmp_path, gpus=8, free_bytes=10 * 10**9))
    out = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in out, out
    assert "depth 24 on 8 x NVIDIA H100 80GB HBM3" in out
    assert "base model            about 120 min: assuming 49% of 989 TFLOP/s" in out
    assert "cuDNN attention" in out
    needed = re.search(r"disk +([\d.]+) GB more at peak, 10.00 GB free", out)
    assert needed and 90 < float(needed[1]) < 175, out
    assert f"needs about {needed[1]} GB" in done.stderr and "NANOCHAT_BASE_DIR" in done.stderr
    assert "=== " not in out and not (tmp_path / "tokenizer").exists(), "a stage has run"


def test_gpus_that_pytorch_cannot_use_are_an_error(tmp_path):
    fakes = fake_machine(tmp_path, gpus=3, free_bytes=10**12)
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
    fixes = ("use PROFILE=gpu, for any number of GPUs", "or use PROFILE=cpu")
    assert detected or any(fix in done.stderr for fix in fixes)


def test_plan_without_a_sandbox_skips_humaneval(tmp_path):
    fakes = fake_machine(tmp_path, gpus=8, free_bytes=10**12, sandbox=False)
    done = speedrun(tmp_path, "--plan", **fakes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chat evaluations skip HumanEval: " in done.stdout
    assert "SpellingBee" not in done.stdout  # its word list comes with the tokenizer


@pytest.mark.parametrize(("gpus", "digits"), [(1, 2), (8, 0)])
def test_documents_show_time_cost_and_disk_of_the_plan(tmp_path, gpus, digits):
    done = speedrun(tmp_path, "--plan", **fake_machine(tmp_path, gpus=gpus, free_bytes=10**12))
    total = re.search(r"total +about (\d+) min, \$([\d.]+)", done.stdout)
    assert total, done.stdout + done.stderr
    readme = (REPOSITORY / "README.md").read_text()
    assert f"| {total[1]} min (estimate)" in readme
    assert f"| ${float(total[2]):.{digits}f} (estimate)" in readme
    quickstart = (REPOSITORY / "docs" / "quickstart.md").read_text()
    assert f"| {total[1]} min on " in quickstart
    disk = re.search(r"disk +([\d.]+) GB more at peak", done.stdout)
    assert disk, done.stdout
    assert f"| {float(disk[1]):.0f} GB " in quickstart


def test_quickstart_shows_the_disk_of_the_laptop_plan(tmp_path):
    done = speedrun(tmp_path, "--plan", **fake_machine(tmp_path, gpus=0, free_bytes=10**12))
    disk = re.search(r"disk +[\d.]+ MB more at peak", done.stdout)
    assert disk, done.stdout + done.stderr
    assert disk[0] in (REPOSITORY / "docs" / "quickstart.md").read_text()


def in_bytes(text: str) -> float:
    """Parse a size such as 12.3 MB or 4.50 GB."""
    number, unit = text.split()
    return float(number) * {"MB": 1e6, "GB": 1e9}[unit]


def planned(capsys, plan: Plan, part: str = r"disk +") -> float:
    """Bytes in the printed plan, for the whole run or a part of it."""
    capsys.readouterr()
    dev.plan.main(plan)
    found = re.search(part + r"([\d.]+ [MG]B)", capsys.readouterr().out)
    assert found
    return in_bytes(found[1])


@pytest.mark.parametrize(("gpu", "minutes"), [("NVIDIA H100", 10), ("NVIDIA A100-SXM4", 32)])
def test_plan_scales_minutes_with_the_speed_of_the_device(base, capsys, gpu, minutes):
    measured = {"minutes": "0 0 0 0 10 0 0 0", "minutes_rate": 989e12 * Plan.utilization}
    dev.plan.main(Plan(gpu=gpu, base="--depth=4", tokenizer="--dataset=embedded", **measured))
    assert re.search(rf"midtraining +about {minutes} min", capsys.readouterr().out)


def test_plan_subtracts_files_of_an_earlier_attempt(base, capsys):
    plan = Plan(
        base="--depth=2 --max_seq_len=64 --num_iterations=9",
        tokenizer="--dataset=embedded --vocab_size=65536",
    )
    before = planned(capsys, plan)
    weights = base / "base_checkpoints" / "d2" / "step_9" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(100_000_000))
    assert before - planned(capsys, plan) == pytest.approx(1e8, abs=1e6)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_R37_planned_checkpoint_bytes_match_a_run(trained_base, capsys):
    plan = Plan(base=" ".join([*SMALL, "--dataset=embedded"]), tokenizer="--vocab_size=512")
    actual = bytes_in(trained_base / "base_checkpoints" / "one")
    assert planned(capsys, plan, "base checkpoints ") == pytest.approx(actual, rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_R37_disk_and_memory_of_the_cpu_profile_match_the_plan(tmp_path, record_property):
    """A dry run suffices: disk and memory do not depend on the steps. Time is only recorded."""
    begun = time.monotonic()
    done = speedrun(tmp_path, PROFILE="cpu", DRY_RUN="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"disk +([\d.]+ [MG]B) more at peak", done.stdout)
    assert found
    assert in_bytes(found[1]) == pytest.approx(bytes_in(tmp_path), rel=0.15)
    for section in ("Base model training", "Midtraining", "Chat SFT"):
        mib = {k: float(str(v).removesuffix("MiB")) for k, v in values(tmp_path, section).items()
               if "emory" in k}  # fmt: skip
        if "Peak memory usage" in mib:
            planned_mib = mib_after_imports() + mib["Estimated memory"]
            assert planned_mib == pytest.approx(mib["Peak memory usage"], rel=0.15), section
    record_property("minutes of the dry run", (time.monotonic() - begun) / 60)


def test_no_script_pipes_a_download_into_a_shell():
    scripts = [*REPOSITORY.glob("*.sh"), *REPOSITORY.glob("*/*.sh"), *REPOSITORY.glob("*/*/*.sh")]
    for path in scripts:
        assert not re.search(r"(curl|wget)\b.*\|\s*(ba)?sh\b", path.read_text()), path


def test_uv_is_installed_with_pip_at_a_pinned_version(tmp_path):
    calls, python = tmp_path / "calls", tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexit 1\n')
    python.chmod(0o755)
    for tool in ("awk", "df", "id"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = subprocess.run(
        ["/bin/bash", "-c", "set -euo pipefail; source " + str(REPOSITORY / "dev/setup.sh")],
        cwd=tmp_path, env={"PATH": str(tmp_path), "HOME": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "pip install uv==" in done.stderr, done.stderr
    assert re.search(r"-m pip install --user uv==\d+\.\d+\.\d+$", calls.read_text(), re.M)
