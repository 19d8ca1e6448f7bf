"""Training runs that are killed, preempted, frozen or broken: no data is lost; errors say why."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from nanochat.checkpoint import step_folders
from nanochat.common import HUNG, PREEMPTED, StopRequest
from nanochat.logger import read_metrics
from tests.training_runs import (
    OWN_STORE,
    SMALL,
    STEPS,
    TRAIN,
    begin,
    folder,
    free_port,
    losses,
    node,
    python,
    read_until_step,
    same_weights,
    torchrun,
)

TUNE = (
    "--max_seq_len=64 --num_iterations=4 --total_batch_size=512 --eval_tokens=1024 --dtype=float32"
).split()
LATER = ("encode", "write", "suite", "verify")  # jobs run only in the slow suite
ENDLESS = [*SMALL, "--num_iterations=100000", "--no-compile"]


@pytest.fixture(scope="module")
def base(trained_base, tmp_path_factory) -> Path:
    return shutil.copytree(trained_base, tmp_path_factory.mktemp("runs") / "base")


def rest_of(process: subprocess.Popen[str], seconds: float = 60) -> str:
    """The output of a process until it exits, within `seconds`."""
    text, _ = process.communicate(timeout=seconds)
    return text


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that torchrun started, in order."""
    ranks = {}
    for child in psutil.Process(process.pid).children():
        if "RANK" in (env := child.environ()):
            ranks[int(env["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


# ------------------------------------------------------------------------------------------------
# Killed


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(3, STEPS), pytest.param(50, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_R1_R2_random_kills_and_resumes_give_identical_weights(base, kills, steps, record_property):
    """Every second kill is timed to hit a save."""
    rng, tag = np.random.default_rng(0), f"killed-{kills}"
    words = [*TRAIN, *SMALL, f"--num_iterations={steps}", "--save_every=1", "--keep=2"]
    run, inside, newest = folder(base, tag), 0, 0
    for kill in range(kills):
        process = begin(base, *words, f"--model_tag={tag}", "--resume=auto")
        target = newest + int(rng.integers(1, 5))
        while max(step_folders(run), default=0) < target and process.poll() is None:
            time.sleep(0.001)
        deadline = time.monotonic() + 2
        while kill % 2 and not list(run.glob(".saving*")) and time.monotonic() < deadline:
            pass
        time.sleep(float(rng.uniform(0, 0.02)))
        process.kill()
        text = rest_of(process)
        assert process.returncode == -signal.SIGKILL, text[-3000:]
        if newest:
            assert f"resumed {run / f'step_{newest:06d}'}" in text
        newest = max(step_folders(run))
        inside += bool(list(run.glob(".saving*")))
        logged = [e["step"] for e in read_metrics(run / "metrics.jsonl") if "loss" in e]
        assert newest >= logged[-1] - 1  # a kill loses at most the unsaved step
    python(base, *words, f"--model_tag={tag}", "--resume=auto")
    whole = "one" if steps == STEPS else "whole"
    if whole != "one":
        python(base, *words, f"--model_tag={whole}")
    assert same_weights(base, tag, whole, steps) and losses(base, tag) == losses(base, whole)
    record_property("kills survived", kills)
    record_property("of them inside a save", inside)


def test_killed_worker_is_restarted_and_the_run_resumes(base, record_property):
    words = [*TRAIN, *SMALL, "--model_tag=restarted"]
    process = begin(base, *torchrun(2, "--max-restarts=3"), *words)
    for step, rank in ((6, 0), (13, 1)):
        read_until_step(process, step)
        workers(process)[rank].kill()
    text = rest_of(process)
    assert process.returncode == 0, text[-3000:]
    assert "resumed" in text
    assert same_weights(base, "restarted", "two")
    assert losses(base, "restarted") == losses(base, "two")
    record_property("kills survived", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "comes_back"), [("2", True), ("1:2", False)])
def test_run_survives_temporary_or_lasting_node_loss(base, nodes, comes_back, record_property):
    tag, port = f"died-{comes_back}", free_port()
    words = [*TRAIN, *SMALL, f"--model_tag={tag}"]

    def agent(number: int) -> subprocess.Popen[str]:
        return begin(base, *node(port, number, nodes, "--max-restarts=3"), *words, **OWN_STORE)

    agents = [agent(0), agent(1)]
    lines: list[str] = []
    seen = threading.Event()

    def listen(process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            lines.append(line)
            if re.match(r"step +[6-9]/", line):
                seen.set()

    threads = [threading.Thread(target=listen, args=(process,)) for process in agents]
    for thread in threads:
        thread.start()
    assert seen.wait(60), "".join(lines)[-3000:]
    for process in (*workers(agents[1]), agents[1]):  # together, as in a power outage
        process.kill()
    if comes_back:
        agents.append(agent(1))
        threads.append(threading.Thread(target=listen, args=(agents[2],)))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    assert agents[0].wait(60) == 0, "".join(lines)[-4000:]
    np.testing.assert_allclose(losses(base, tag), losses(base, "two"), rtol=1e-5)
    if comes_back:
        assert same_weights(base, tag, "two")
    record_property("kills survived", 1)


# ------------------------------------------------------------------------------------------------
# Stop requests


@pytest.mark.parametrize(
    "whom", ["alone", "torchrun", "one worker", pytest.param("all workers", marks=pytest.mark.slow)]
)
def test_R7_signal_stops_a_run_and_saves_its_step(base, whom):
    tag = "stopped-" + whom.replace(" ", "-")
    process = begin(
        base, *torchrun(1 if whom == "alone" else 2), *TRAIN, *ENDLESS, f"--model_tag={tag}"
    )
    read_until_step(process, 5)
    targets = {
        "alone": lambda: [process], "torchrun": lambda: [process],
        "one worker": lambda: workers(process)[1:], "all workers": lambda: workers(process),
    }[whom]()  # fmt: skip
    for target in targets:
        target.send_signal(signal.SIGTERM)
    text = rest_of(process)
    saved = re.search(r"stop requested: saved step (\d+)", text)
    assert saved, text[-3000:]
    step = int(saved[1])
    assert max(step_folders(folder(base, tag))) == step
    entries = [e["step"] for e in read_metrics(folder(base, tag) / "metrics.jsonl")]
    assert max(entries) <= step + 1
    if whom == "alone":
        assert process.returncode == PREEMPTED
    else:  # torchrun has its own exit status and prints that of its workers
        assert process.returncode == 1
        assert f"exitcode: {PREEMPTED}" in re.sub(r" +", " ", text) or whom == "torchrun"


def test_R7_second_interrupt_exits_immediately(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked and not ended
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGINT]


# ------------------------------------------------------------------------------------------------
# Faults


def test_R13_non_finite_gradient_on_one_rank_is_skipped_on_all(base):
    text = python(
        base, *torchrun(2), "-m", "tests.faulty", "nan", "1", "7", *SMALL, "--model_tag=nan",
        "--num_iterations=10",
    )  # fmt: skip
    assert re.search(r"step 7: loss .*, gradient norm nan: skipped on all ranks", text)


def test_R15_error_names_parameter_that_differs_by_rank(base):
    process = begin(
        base, *torchrun(2), "-m", "tests.faulty", "flip", "1", "6", *ENDLESS,
        "--model_tag=flipped",
    )  # fmt: skip
    text = rest_of(process)
    assert process.returncode != 0
    assert re.search(r"error: weights differ .*step (8|10): (\S+) differs on rank 1 of 2", text)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_R16_frozen_rank_is_named_and_the_run_aborts(base, rank):
    process = begin(
        base, *torchrun(2), *TRAIN, *ENDLESS, f"--model_tag=frozen-{rank}",
        "--collective_timeout_minutes=0.1",
    )  # fmt: skip
    read_until_step(process, 5)
    frozen = workers(process)[rank]
    other = workers(process)[1 - rank]
    frozen.suspend()
    began = time.monotonic()
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 120, "the other rank is still waiting"
        time.sleep(0.1)
    frozen.kill()  # torchrun would, after a grace period of 30 s
    text = rest_of(process)
    assert process.returncode != 0
    assert re.search(
        rf"rank {1 - rank} has waited [\d.]+ s in .*collective_timeout_minutes allows: "
        rf"rank {rank}: no heartbeat for \d+ s \(process {frozen.pid} on ",
        text,
    ), text[-3000:]
    assert re.search(rf"exitcode\s*: {HUNG} ", text)


BY_THE_CLOCK = [*SMALL[1:], "--depth=2", "--max_wallclock_seconds=1", "--eval_tokens=1024"]
SLOW_JOBS = {  # job -> its script and flags
    "pack": ("golf.base_train", [*BY_THE_CLOCK, "--max_seq_len=48", "--total_batch_size=768"]),
    "write": ("base_train", SMALL),
    "suite": ("base_train", [*SMALL, "--core_metric_every=20", "--core_metric_max_per_task=2"]),
    "verify": ("mid_train", ["--source=base:one", "--mixture=world_facts=50", *TUNE]),
    "encode": ("mid_train", ["--source=base:one", "--mixture=world_facts=60", *TUNE]),
}


def slow_rank(base: Path, job: str, *flags: str, seconds: int = 20) -> subprocess.Popen[str]:
    """Start two ranks; rank 0 works much longer than the 12 s timeout."""
    script, words = SLOW_JOBS.get(job, ("base_train", SMALL))
    return begin(
        base, *torchrun(2), "-m", "tests.slow_rank", str(seconds), job, script, *words, *flags,
        "--collective_timeout_minutes=0.2", f"--model_tag=slow-{job}",
    )  # fmt: skip


@pytest.mark.parametrize("job", ["pack", *(pytest.param(j, marks=pytest.mark.slow) for j in LATER)])
def test_R31_run_waits_for_reported_long_work(base, job):
    process = slow_rank(base, job)
    text = rest_of(process, 240)
    assert process.returncode == 0, text[-3000:]
    assert f"rank 0 is in {job}" in text and "collective_timeout" not in text


@pytest.mark.slow
def test_R31_rank_frozen_in_reported_work_ends_the_run(base):
    process = slow_rank(base, "pack", "--max_seq_len=40", "--total_batch_size=640", seconds=600)
    for line in process.stdout or ():
        if line.startswith("rank 0 is in pack"):
            break
    time.sleep(3)
    frozen, other = workers(process)
    frozen.suspend()
    began = time.monotonic()
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 120, "the other rank is still waiting"
        time.sleep(0.1)
    frozen.kill()
    text = rest_of(process)
    assert re.search(r"rank 0: no heartbeat for \d+ s \(process \d+ on .*, packing ", text), text
    assert re.search(rf"exitcode\s*: {HUNG} ", text)


@pytest.mark.slow
def test_R31_unreported_long_work_ends_the_run(base):
    process = slow_rank(base, "step", seconds=60)
    text = rest_of(process, 180)
    assert process.returncode != 0
    assert re.search(r"rank 1 has waited \d+ s in .*: rank 0: alive \(.* unreported work", text)
    assert re.search(rf"exitcode\s*: {HUNG} ", text)
