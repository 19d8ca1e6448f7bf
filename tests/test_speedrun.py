"""Dry runs of speedrun.sh from end to end, its plan, and resuming interrupted runs."""

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

from dev.plan import STAGES
from nanochat import config
from nanochat.common import REPOSITORY, read_json
from tests.hub_server import hub_served, small_hub
from tests.training_runs import copy_code
from tests.zygote import zygote

installs = pytest.mark.skipif(
    not os.access(REPOSITORY / ".venv", os.W_OK), reason="this user cannot install packages here"
)


def run(base: Path, *words: str, **extra: str) -> subprocess.CompletedProcess:
    """Run a program in the environment of a speedrun; a dry run on a CPU by default."""
    return subprocess.run(
        words, cwd=REPOSITORY, env=environment(base) | extra, capture_output=True, text=True
    )


def environment(base: Path) -> dict[str, str]:
    own = {"NANOCHAT_BASE_DIR": str(base), "REPORT_OUT": str(base / "copy")}
    return {**os.environ, **own, "PROFILE": "cpu", "DEPTH": "2", "DRY_RUN": "1"}


def speedrun(base: Path, *words: str, **extra: str) -> subprocess.CompletedProcess:
    return run(base, "bash", "speedrun.sh", *words, **extra)


def forked_speedrun(base: Path) -> subprocess.CompletedProcess:
    """A speedrun whose Python processes are forked from one that has imported torch."""
    connection = zygote().fileno()
    command = f"command python -S tests/forked_python.py {connection}"
    env = environment(base) | {"BASH_FUNC_python%%": f'() {{ {command} "$@"; }}'}
    return subprocess.run(
        ["bash", "speedrun.sh"], cwd=REPOSITORY, env=env, capture_output=True, text=True,
        pass_fds=[connection],
    )  # fmt: skip


def values(base: Path, section: str) -> dict:
    name = section.lower().replace(" ", "-")
    return read_json(base / "dry-run" / "report" / f"{name}.json")["values"]


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
    assert f"=== {label}\n" in process.stdout  # reads until there
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # the run has already finished
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def fixed_keys():
    """Section -> keys of the October 2025 report."""
    text = (REPOSITORY / "tests/report_keys.txt").read_text()
    parts = re.findall(r"\[(.*?)\]\n(.*?)(?=\n\[|\Z)", text, re.S)
    return {name: re.findall(r"[^, ][^,]*", " ".join(keys.split())) for name, keys in parts}


def check_fixed_keys(report: str, *tasks: str) -> None:
    """
    All sections are in the report in order, and those of the October 2025 report with their keys.
    Only scores may be missing, but not those of `tasks`.
    """
    assert all(f"## {stage}" in report for stage in STAGES)
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", report, re.M | re.S))
    assert [name for name in sections if name in fixed_keys()] == list(fixed_keys())
    every = set()
    for name, keys in fixed_keys().items():
        text = sections[name]
        text = text.replace("World few-shot", "CORE metric").replace("World chat", "ChatCORE")
        found = set(re.findall(r"^- (.+?\S):(?: |$)", text, re.M))
        every |= found
        missing = set(keys) - found
        assert "evaluation" in name or missing <= {"CORE metric estimate"}
        assert "Chat eval" not in name or missing <= {"GSM8K", "AQUA"}
    assert set(tasks) <= every


@installs
@pytest.mark.timeout(1200)
def test_R18_rerun_after_a_kill_skips_finished_stages_and_redoes_damaged_ones(tmp_path):
    base = tmp_path / "my models"
    kill_in(base, "base model loss", 0)
    before = {stage: results(base, stage) for stage in STAGES[:3]}
    tokenizer = base / "dry-run" / "tokenizer" / "main" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    done = forked_speedrun(base)
    assert done.returncode == 0, done.stdout + done.stderr
    assert r"my\ models" in done.stdout  # in the last hint
    assert re.findall("(.*): finished already, skipped", done.stdout) == list(STAGES[1:3])
    assert {stage: results(base, stage) for stage in STAGES[:3]} == before
    check_fixed_keys((base / "copy" / "report.md").read_text(), "CORE metric", "ChatCORE")


@installs
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_R18_run_killed_in_every_stage_gives_the_same_results(tmp_path):
    rng = random.Random(0)
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert speedrun(uninterrupted).returncode == 0
    labels = re.findall(r'^ *stage "([^"]+)"', (REPOSITORY / "speedrun.sh").read_text(), re.M)
    assert len(labels) == len(STAGES)
    for label in labels:
        kill_in(killed, label, rng.uniform(2.0, 9.0))
    assert speedrun(killed).returncode == 0
    for stage in STAGES:
        assert results(killed, stage) == results(uninterrupted, stage), stage
    again = speedrun(killed)
    assert again.stdout.count("finished already, skipped") == len(STAGES), again.stdout


@installs
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_h100x8_dry_run_finishes_on_eight_processes(hub, tmp_path, monkeypatch):
    base = tmp_path / "base"
    with hub_served(hub, monkeypatch) as serve:
        serve(small_hub(hub, tmp_path / "hub", rows=300))
        extra = {"PROFILE": "h100x8", "DEPTH": "1", "EVAL_BUNDLE": str(hub / "eval_bundle")}
        done = speedrun(base, **extra)  # gloo instead of NCCL
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    report = (base / "copy" / "report.md").read_text()
    check_fixed_keys(report, "CORE metric", "hellaswag_zeroshot", "arc_easy", "GSM8K")
    assert values(base, "Base model training")["DDP world size"] == 8
    assert {"GSM8K", "ChatCORE"} <= values(base, "Chat evaluation rl").keys()


SMI = 'nvidia-smi() { [ "${SMI-}" ] && [ "$1" = -L ] && echo GPU 0 || echo 535.104.05; }\n'


# ---- The plan, and runs that are rejected before training ----------------------------------------


@pytest.mark.parametrize(
    ("gpus", "extra", "detected"),
    [
        (0, "", "cpu 0 1 16"),
        (3, "", "gpu 3 3 15"),
        (9, "", "h100x8 9 8 16"),
        (3, "PROFILE=cpu", "cpu 0 1 16"),
        (3, "PROFILE=h100x8", "use PROFILE=gpu"),
        (3, "PROFILE=h100x8 plan_only=1", "h100x8 0 8 16"),
        (0, "PROFILE=gpu", "or PROFILE=cpu"),
        (0, "PROFILE=h100x8 DRY_RUN=1", "h100x8 0 8 16"),
        (3, "PROFILE=typo", "use h100x8, gpu or cpu"),
        (0, "SMI=1", "lists GPUs.*535.104.05.*for CUDA.*docs/quickstart.md.*PROFILE=cpu"),
    ],
)
def test_profile_is_derived_from_the_gpus(tmp_path, gpus, extra, detected):
    (tmp_path / "dev").mkdir()
    copy_code(tmp_path, "dev/profile.sh")
    fail = re.findall(r"(?ms)^fail.*?^}", (REPOSITORY / "dev" / "setup.sh").read_text())[0]
    fakes = f"python() {{ echo {gpus} NVIDIA H100; }}\n{SMI}{fail}"
    (tmp_path / "dev" / "setup.sh").write_text(fakes)
    command = 'source dev/profile.sh; echo "$PROFILE $gpus $processes $(whole 16)"'
    words = ["bash", "-c", f"exec 2>&1; unset PROFILE; export X= {extra}; {command}"]
    printed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.search(f"(?s){detected}", printed)


# ---- First contact -------------------------------------------------------------------------------


def test_wrong_shell_gets_one_sentence(tmp_path):
    done = run(tmp_path, "sh", "speedrun.sh")
    assert done.returncode == 2 and "bash speedrun.sh" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@installs
def test_failed_installation_ends_the_setup(tmp_path):
    done = run(tmp_path, "bash", "dev/setup.sh", SYNC_FLAGS="--no-such-flag")
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


def test_script_can_be_started_by_its_path(tmp_path):
    done = run(tmp_path, sys.executable, "scripts/base_train.py", "--help")
    assert done.returncode == 0 and "--depth" in done.stdout, done.stderr


# ---- Flags of the scripts ------------------------------------------------------------------------

FAKES = r"""
python() {
    if [ "$1" = -c ]; then echo 8; return; fi # the number of GPUs, or FLOPs of a record
    printf '%s\t' "$@"; echo
}
torchrun() { python "$@"; }
"""


def commands_of(script: str, folder: Path, **variables: str) -> list[tuple[str, list[str]]]:
    """(script, flags) of what a shell script would run; it runs in a copy, `folder`."""
    copy_code(folder, "scripts", "dev", "speedrun.sh")
    for name in ("dev/setup.sh", ".venv/bin/activate"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FAKES)
    env = {**os.environ, **variables}
    done = subprocess.run(
        ["bash", *script.split()], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip("\t").split("\t") for line in done.stdout.splitlines()]
    found = [words[words.index("-m") + 1 :] for words in lines if "-m" in words]
    return [(name.removeprefix("scripts."), flags) for name, *flags in found]


def test_ranks_of_one_host_need_no_name_of_it():
    text = (REPOSITORY / "dev/profile.sh").read_text()
    [launch] = re.findall(r"torchrun --standalone .*", text)
    assert "--local-addr=127.0.0.1" in launch


def test_plan_needs_no_gpu_prints_cost_and_runs_no_stage(tmp_path, command):
    [(name, flags)] = commands_of("speedrun.sh --plan", tmp_path, PROFILE="h100x8")
    assert re.search(r"run +about \d+ min, \$\d", command.works(name, *flags))


def test_plan_of_a_slow_cpu_names_a_shorter_run(command, monkeypatch):
    monkeypatch.setattr("nanochat.dist.matmul_rate", lambda _: 1e10)
    shorter = "more than 20 minutes; DEPTH=2 takes about "
    assert shorter in command.works("dev.plan") and shorter not in command.works(
        "dev.plan", "--depth=2"
    )


@pytest.mark.parametrize("profile", ["h100x8", "gpu", "cpu"])
@pytest.mark.parametrize("script", ["speedrun.sh", "aqua", "golf", "h100_fast", "h100_extreme"])
def test_stages_get_valid_flags(script, profile, tmp_path, command, monkeypatch):
    if (script, profile) == ("aqua", "cpu"):
        pytest.skip("the script needs GPUs")
    start = config.start
    monkeypatch.setattr(config, "start", lambda _, *rest: start(print, *rest))
    path = script if script == "speedrun.sh" else f"scripts/train_{script}.sh"
    found = commands_of(path, tmp_path, PROFILE=profile, SEEDS="1")
    printed = [command.works(name, *flags) for name, flags in found]
    assert len(printed) > 4
