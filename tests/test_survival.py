"""Runs whose processes, nodes, console or log disk are lost: no step is lost; errors say why."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import PREEMPTED, REPOSITORY
from tests.training_runs import (
    SMALL,
    STEPS,
    TRAIN,
    begin,
    environment,
    equal,
    folder,
    losses,
    python,
    read_until_step,
    rest_of,
    saved_steps,
    torchrun,
    weights,
    workers,
)

ENDLESS = [*SMALL, "--num_iterations=100000", "--compile=off"]


# ---- Kills ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(3, STEPS), pytest.param(50, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_R1_R2_random_kills_and_resumes_give_identical_weights(trained, kills, steps):
    """Every second kill is timed to hit a save."""
    rng, run, newest = np.random.default_rng(0), folder(trained, "killed"), 0
    words = [*TRAIN, *SMALL, f"--num_iterations={steps}", "--save_every=1", "--keep=2"]
    for kill in range(kills):
        process = begin(trained, *words, "--model_tag=killed", "--resume=auto")
        target = newest + int(rng.integers(1, 5))
        while max(saved_steps(run), default=0) < target and process.poll() is None:
            time.sleep(0.001)
        deadline = time.monotonic() + 2
        while kill % 2 and not list(run.glob(".saving*")) and time.monotonic() < deadline:
            pass
        time.sleep(float(rng.uniform(0, 0.02)))
        process.kill()
        text = rest_of(process)
        assert process.returncode == -signal.SIGKILL, text[-3000:]
        assert not newest or f"resumed {run / f'step_{newest:06d}'}" in text
        newest = saved_steps(run)[-1]
        assert newest >= len(losses(trained, "killed")) - 1  # at most the unsaved step is lost
    python(trained, *words, "--model_tag=killed", "--resume=auto")
    if steps != STEPS:
        python(trained, *words, "--model_tag=one")
    assert equal(weights(trained, "killed", steps), weights(trained, "one", steps))
    assert losses(trained, "killed") == losses(trained, "one")


def test_killed_worker_is_restarted_and_the_run_resumes(trained):
    words = [*torchrun(2, "--max-restarts=3"), *TRAIN, *SMALL, "--model_tag=restarted"]
    process = begin(trained, *words)
    read_until_step(process, 6)
    workers(process)[0].kill()
    text = rest_of(process)
    assert process.returncode == 0 and "resumed" in text, text[-3000:]
    assert equal(weights(trained, "restarted"), weights(trained, "two"))
    assert losses(trained, "restarted") == losses(trained, "two")


@pytest.mark.parametrize(
    "whom", ["torchrun", "one worker", pytest.param("all workers", marks=pytest.mark.slow)]
)
def test_R7_signal_stops_all_ranks_and_saves_their_step(trained, whom):
    process = begin(trained, *torchrun(2), *TRAIN, *ENDLESS, "--model_tag=stopped")
    read_until_step(process, 5)
    ranks = workers(process)
    targets = {"torchrun": [process], "one worker": ranks[1:], "all workers": ranks}
    for target in targets[whom]:
        target.send_signal(signal.SIGTERM)
    text = rest_of(process)
    saved = re.search(r"stop requested: saved step (\d+)", text)
    assert saved, text[-3000:]
    assert saved_steps(folder(trained, "stopped"))[-1] == int(saved[1])
    assert len(losses(trained, "stopped")) <= int(saved[1]) + 2
    assert process.returncode == 1  # torchrun's own status; it prints that of its workers
    assert f"exitcode: {PREEMPTED}" in re.sub(r" +", " ", text) or whom == "torchrun"


# ---- Console and log -----------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True])
def test_lost_console_does_not_end_or_unsave_a_run(trained, stopped):
    """As in `... | tee log` and Ctrl-C: tee is gone first."""
    flags = ["--save_every=0", *(["--num_iterations=100000"] if stopped else [])]
    process = begin(trained, *TRAIN, *SMALL, "--compile=off", "--model_tag=lost", *flags)
    read_until_step(process, 3)
    assert process.stdout is not None
    process.stdout.close()
    if stopped:
        process.send_signal(signal.SIGINT)
    assert process.wait(240) == (PREEMPTED if stopped else 0)
    assert saved_steps(folder(trained, "lost"))


def test_console_on_a_full_disk_does_not_end_a_run(trained):
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-u", *TRAIN, *SMALL, "--model_tag=full"]
        done = subprocess.run(words, cwd=REPOSITORY, env=environment(trained), stdout=full)
    assert done.returncode == 0
    assert equal(weights(trained, "full"), weights(trained, "one"))


def test_log_on_a_full_disk_does_not_end_a_run(trained, command):
    run = folder(trained, "logless")
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    text = command("base_train", *SMALL, "--model_tag=logless").text
    assert saved_steps(run)[-1:] == [STEPS] and "metrics.jsonl" in text
