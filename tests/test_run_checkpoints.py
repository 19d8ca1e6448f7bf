"""The checkpoints of a run: resuming, full disks, two runs in one folder, changed code."""

import errno
import io
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.checkpoint import read_state, seal_of, stage_folder
from nanochat.common import PREEMPTED, code_digest, read_json, write_json
from nanochat.records import read_history
from tests.faulty import during_step, grade
from tests.training_runs import (
    SMALL,
    STEPS,
    TRAIN,
    begin,
    begin_ranks,
    copy_code,
    copy_until,
    curve,
    environment,
    equal,
    folder,
    losses,
    read_until_step,
    rest_of,
    saved_steps,
    tensors,
    torchrun,
    weights,
    workers,
)

pytestmark = pytest.mark.usefixtures("one_thread")


TUNE = "--num_iterations=6 --save_every=2 --keep=9 --dtype=float32"
PRETRAIN = f"--max_seq_len=32 --total_batch_size=512 --eval_tokens=1024 {TUNE}"
STAGES = {
    "base": "base_train --depth=1 --max_seq_len=32 --total_batch_size=64 --eval_tokens=1024 "
    "--dtype=float32 --num_iterations=208 --save_every=8 --keep=99",
    "mid": "mid_train --source=base:one --mixture=world_chat=300,world_facts=100 --max_seq_len=64 "
    f"--total_batch_size=512 --eval_tokens=1024 {TUNE}",
    "rl": "chat_rl --source=base:one --task=world_spelling=50 --examples_per_step=4 "
    "--num_samples=4 --max_new_tokens=8 --length_penalty=0.5 --eval_examples=6 --eval_samples=2 "
    f"{TUNE}",
    "base (golf)": "golf.base_train --depth=2 --tie_embeddings --ema_decay=0.8 --qat_start=0.5 "
    f"{PRETRAIN}",
    "base (recursion)": "recursion.base_train --depth=3 --recursion_preset=moderate "
    f"--supervise=sampled --bptt_loops=3 {PRETRAIN}",
}


def damage(run, step):
    path = run / f"step_{step:06d}" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


# ---- Resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_R2_resumed_stage_equals_uninterrupted_one(trained, command, stage, monkeypatch):
    monkeypatch.setattr("nanochat.rl.score_answer", grade)
    words, runs = STAGES[stage].split(), stage_folder(stage.split()[0])
    command.works(*words, "--model_tag=whole")
    first, *_, last = saved_steps(runs / "whole")
    copy_until(first, runs / "whole", runs / "cut")
    assert "resumed" in command.works(*words, "--model_tag=cut", "--resume=auto")
    for path in (runs / "whole" / f"step_{last:06d}").glob("*.safetensors"):
        assert equal(*(tensors(runs / tag, last, path.stem) for tag in ("cut", "whole")))
    for name in ("loss", "lr", "grad_norm"):
        assert curve(runs / "cut", name) == curve(runs / "whole", name)
    if stage == "rl":  # measured with the parent's weights
        whole, cut = (record["values"] for record in read_history()[-2:])
        assert whole == cut and "pass@1 before" in whole


CHANGED = {
    "--seed=1": "seed: was 0, now 1",
    "--matrix_lr=0.03": "matrix_lr: was 0.02, now 0.03",
    "--total_batch_size=1024": "total_batch_size: was 512, now 1024",
    "--depth=3": "depth: was 2, now 3",
}
OTHER_ROWS = "--dataset=embedded", "--num_shards=2"


def test_R6_resuming_with_other_settings_is_an_error(trained, command):
    """Otherwise, the run would mix two recipes and be recorded as the second one."""
    words = ["base_train", *SMALL, "--model_tag=one", "--resume=auto"]
    allowed = "--allow_data_change"
    for flags in (CHANGED, [*CHANGED, allowed]):
        text = command.rejects(*words, *flags)
        assert all(line in text for line in CHANGED.values())
    line = "rows.text.num_shards: was 1, now 2"  # only rows may change, if asked for
    assert line in command.rejects(*words, *OTHER_ROWS)
    assert line in command.works(*words, *OTHER_ROWS, allowed)
    record = read_json(trained / "report" / "base-model-training.json")
    assert line in record["values"]["Changed when resumed"]
    assert saved_steps(folder(trained, "one")) == [STEPS]


def test_stage_of_code_without_recipes_is_refused_in_one_sentence(trained, command):
    path = folder(trained, "one") / f"step_{STEPS:06d}"
    state = read_state(path)
    state.pop("recipe")
    write_json(path / "state.json", {**state, "seal": seal_of(state)})
    words = ("base_train", *SMALL, "--model_tag=one")
    for flag, why in (
        ("--resume=auto", "no recipe to compare"),
        ("--skip_if_done", "recorded before 2026-12, without its recipe"),
    ):
        record = trained / "report" / "base-model-training.json"
        write_json(record, {k: v for k, v in read_json(record).items() if k != "recipe"})
        text = command.rejects(*words, flag)
        assert why in text and "fix:" in text
    assert saved_steps(folder(trained, "one")) == [STEPS]


def test_batch_and_windows_of_a_resumed_run_are_kept(trained, command, monkeypatch):
    """Their defaults depend on ranks and machine."""
    free = [flag for flag in SMALL if "batch_size" not in flag]
    command.works("base_train", *free, "--model_tag=whole")
    copy_until(8, folder(trained, "whole"), folder(trained, "cut"))
    monkeypatch.setattr("nanochat.scaling.auto_batch", lambda tokens, T: 4 * T)
    monkeypatch.setattr("scripts.base_train.default_windows", lambda device_type: "SL")
    text = command.works("base_train", *free, "--model_tag=cut", "--resume=auto")
    assert "resumed" in text and losses(trained, "cut") == losses(trained, "whole")
    assert equal(weights(trained, "cut"), weights(trained, "whole"))


def test_finished_stage_is_skipped_or_extended(trained, command):
    words = (*STAGES["mid"].split(), "--model_tag=small", "--resume=auto", "--skip_if_done")
    command.works(*words)
    assert "finished already, skipped" in command.works(*words)
    command.works(*words, "--num_iterations=9")
    assert len(curve(stage_folder("mid") / "small", "loss")) == 9
    shorter = command.rejects(*words, "--num_iterations=8")
    assert "--num_iterations: was 9, now 8" in shorter
    other = command.works(*words, "--num_iterations=9", "--model_tag=other")
    assert "--model_tag: was 'small', now 'other'" in other
    assert len(curve(stage_folder("mid") / "other", "loss")) == 9


def test_R10_damaged_checkpoints_are_skipped_or_moved_aside(trained, trained_base, command):
    run = folder(trained, "damaged")
    copy_until(8, folder(trained_base, "one"), run)
    words = ["base_train", *SMALL, "--model_tag=damaged"]
    damage(run, 8)
    text = command.works(*words, "--resume=auto")
    assert "skipping corrupt checkpoint" in text and f"resumed {run}/step_000004" in text
    for step in saved_steps(run):
        damage(run, step)
    text = command.rejects(*words, "--resume=auto")
    assert "corrupt" in text and "rename it" in text
    run.rename(run.with_name("aside"))
    command.works(*words, "--resume=auto")
    assert equal(weights(trained, "damaged"), weights(trained, "one"))


# ---- Two runs ------------------------------------------------------------------------------------


def test_R22_second_run_is_rejected_and_a_stale_lock_taken_over(trained, command):
    words = [*SMALL, "--num_iterations=2", "--model_tag=shared"]
    process = begin(trained, *TRAIN, *words, "--num_iterations=100000", "--compile=off")
    read_until_step(process, 1)
    text = command.rejects("base_train", *words)
    assert f"process {process.pid} on" in text and "--model_tag" in text
    process.kill()
    process.wait()
    text = command.works("base_train", *words)
    assert f"stale lock: process {process.pid}" in text
    assert "stale" not in command.works("base_train", *words)  # released


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_R22_run_goes_on_without_locks_and_says_where(trained, command, monkeypatch, code):
    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    text = command.works("base_train", *SMALL, "--num_iterations=2", f"--model_tag=free{code}")
    line = f"no file locks in {folder(trained, 'one').parent} ({os.strerror(code)})"
    assert text.count(line) == 1


@pytest.mark.parametrize(("code", "works"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_run_is_saved_where_folders_cannot_be_flushed(trained, command, monkeypatch, code, works):
    plain = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        plain(handle)

    monkeypatch.setattr("os.fsync", fsync)
    words = ("base_train", *SMALL, "--num_iterations=2", f"--model_tag=dirs{code}")
    if works:
        command.works(*words)
        assert saved_steps(folder(trained, f"dirs{code}")) == [2]
    else:
        assert os.strerror(code) in command.rejects(*words)


# ---- Full disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("failing", "saved"), [(8, [4, 12, 16, 20]), (20, [4, 8, 12, 16])])
def test_R8_full_disk_keeps_old_checkpoints(trained, command, monkeypatch, failing, saved):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(now, *_):
        full = failing - 3 < now.step < failing
        limit = 1 << 20 if full else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))

    with monkeypatch.context() as patch:
        during_step(fill, patch.setattr)
        status, text = command("base_train", *SMALL, "--model_tag=full")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run = folder(trained, "full")
    assert f"saving step {failing} failed: [Errno 27] File too large" in text
    assert not list(run.glob(".saving*")) and saved_steps(run) == saved
    assert status == (2 if failing == 20 else 0)
    if status:
        command.works("base_train", *SMALL, "--model_tag=full", "--resume=auto")
    assert equal(weights(trained, "full"), weights(trained, "one"))


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_R23_slow_saves_contain_the_state_of_their_step(trained, command, monkeypatch, kind):
    words = ["base_train", *SMALL, f"--device_type={kind}", "--deterministic", "--compile=off"]
    words.append("--num_iterations=8")
    command.works(*words, "--model_tag=quick")
    quick, slow = (folder(trained, tag) for tag in ("quick", "slow"))
    plain = os.fsync

    def synchronize(handle):
        for step in saved_steps(slow):  # final names are of complete checkpoints
            assert (slow / f"step_{step:06d}" / "state.json").exists()
        time.sleep(0.05)
        plain(handle)

    monkeypatch.setattr(os, "fsync", synchronize)
    command.works(*words, "--model_tag=slow", "--save_every=1", "--keep=99")
    assert saved_steps(slow) == list(range(1, 9))
    for step in (4, 8):
        for file in ("model", "optim"):
            assert equal(tensors(slow, step, file), tensors(quick, step, file))


# ---- Changed code --------------------------------------------------------------------------------

ACTIVATION = ".square())"


@pytest.mark.parametrize(
    ("new", "flag", "status", "found"),
    [
        (f"{ACTIVATION}  # a comment", "--skip_if_done", 0, "finished already, skipped"),
        (".sin())", "--skip_if_done", 2, "gpt.py"),
        (".sin())", "--resume=auto", 0, "gpt.py"),
    ],
)
def test_R38_edited_code_is_named(trained, trained_base, tmp_path, new, flag, status, found):
    copy_edited(tmp_path, new)
    if flag == "--resume=auto":
        shutil.rmtree(folder(trained, "two"))
        copy_until(8, folder(trained_base, "two"), folder(trained, "two"))
    words = [*TRAIN, *SMALL, "--device_type=cpu", "--model_tag=two", flag]
    done = run_copy(tmp_path, trained, *words)
    assert done.returncode == status and found in done.stdout + done.stderr
    assert status == 0 or "ACCEPT_CODE_CHANGE=1" in done.stderr


def test_R38_model_loaded_by_other_code_is_printed_and_recorded(trained, tmp_path):
    copy_edited(tmp_path, ".sin())")
    words = "-m scripts.base_loss --model_tag=one --split_tokens=64 --max_documents=1".split()
    done = run_copy(tmp_path, trained, *words)
    assert done.returncode == 0, done.stderr
    assert "was trained by other code: nanochat/gpt.py changed" in done.stdout
    values = read_json(trained / "report" / "base-model-loss.json")["values"]
    assert values["Model code changed since"] == "nanochat/gpt.py"


def test_R38_code_is_recorded_as_it_was_when_the_process_started(trained, tmp_path):
    copy_edited(tmp_path)
    model = tmp_path / "nanochat" / "gpt.py"
    ran = code_digest(model.read_text())
    words = ["-m", "tests.faulty", "edit", "all", "base_train", *SMALL, "--model_tag=edited"]
    done = run_copy(tmp_path, trained, *words)
    assert done.returncode == 0 and model.read_text() == "def (", done.stderr
    record = read_json(trained / "report" / "base-model-training.json")
    assert record["code"]["nanochat/gpt.py"] == ran


def copy_edited(copy: Path, activation: str = ACTIVATION) -> None:
    """Copy the code into a folder, with another activation."""
    copy_code(copy, "nanochat", "scripts", "tasks", "tests", "rustbpe/src")
    model = copy / "nanochat" / "gpt.py"
    assert ACTIVATION in model.read_text()
    model.write_text(model.read_text().replace(ACTIVATION, activation))


def run_copy(copy: Path, base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a copy of the code."""
    command, env = [sys.executable, *words], environment(base)
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)


# ---- Kills ---------------------------------------------------------------------------------------

ENDLESS = [*SMALL, "--num_iterations=100000", "--compile=off"]


@pytest.mark.parametrize(
    ("kills", "steps"),
    [(3, STEPS), pytest.param(50, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_R1_R2_random_kills_and_resumes_give_identical_weights(trained, command, kills, steps):
    """Each kill hits a save, or comes right after it."""
    rng, run, newest = np.random.default_rng(0), folder(trained, "killed"), 0
    words = [*SMALL, f"--num_iterations={steps}", "--save_every=1", "--keep=2"]
    for _ in range(kills):
        process = begin(trained, *TRAIN, *words, "--model_tag=killed", "--resume=auto")
        target = newest + int(rng.integers(2, 4))  # .saving_* of the next step may be left
        while not list(run.glob(f"*_{target:06d}")) and process.poll() is None:
            time.sleep(0.001)  # .saving_* becomes step_*
        time.sleep(float(rng.uniform(0, 0.02)))
        process.kill()
        text = rest_of(process)
        assert process.returncode == -signal.SIGKILL, text[-3000:]
        assert not newest or f"resumed {run / f'step_{newest:06d}'}" in text
        newest = max(saved_steps(run), default=0)
        assert newest >= len(losses(trained, "killed")) - 1  # at most the unsaved step is lost
    command.works("base_train", *words, "--model_tag=killed", "--resume=auto")
    if steps != STEPS:
        command.works("base_train", *words, "--model_tag=one")
    assert equal(weights(trained, "killed", steps), weights(trained, "one", steps))
    assert losses(trained, "killed") == losses(trained, "one")


def test_killed_worker_is_restarted_and_the_run_resumes(trained):
    words = [*torchrun(2, "--max-restarts=3"), *TRAIN, *SMALL, "--model_tag=restarted"]
    words.append("--resume=auto")
    process = begin(trained, *words)
    read_until_step(process, 6)
    workers(process)[0].kill()
    text = rest_of(process)
    assert process.returncode == 0 and "resumed" in text, text[-3000:]
    assert equal(weights(trained, "restarted"), weights(trained, "two"))
    assert losses(trained, "restarted") == losses(trained, "two")


@pytest.mark.parametrize(
    "whom", ["torchrun", "one rank", pytest.param("all ranks", marks=pytest.mark.slow)]
)
def test_R7_signal_stops_all_ranks_and_saves_their_step(trained, whom):
    words = [*TRAIN, *ENDLESS, "--model_tag=stopped"]
    if whom == "torchrun":
        started = signaled = [begin(trained, *torchrun(2), *words)]
    else:
        started = begin_ranks(trained, *words)
        signaled = started if whom == "all ranks" else started[1:]
    read_until_step(started[0], 5)
    for process in signaled:
        process.send_signal(signal.SIGTERM)
    text = rest_of(started[0])
    saved = re.search(r"stop requested: saved step (\d+)", text)
    assert saved, text[-3000:]
    assert saved_steps(folder(trained, "stopped"))[-1] == int(saved[1])
    assert len(losses(trained, "stopped")) <= int(saved[1]) + 2
    status = 1 if whom == "torchrun" else PREEMPTED
    assert [process.wait(60) for process in started] == [status] * len(started)


# ---- Console -------------------------------------------------------------------------------------


def test_lost_console_does_not_end_or_unsave_a_run(trained):
    """As in `... | tee log` and Ctrl-C: tee is gone first."""
    process = begin(trained, *TRAIN, *ENDLESS, "--save_every=0", "--model_tag=lost")
    read_until_step(process, 3)
    assert process.stdout is not None
    process.stdout.close()
    while len(losses(trained, "lost")) < 20 and process.poll() is None:
        time.sleep(0.1)  # it goes on and tries to print
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == PREEMPTED
    assert saved_steps(folder(trained, "lost"))


def test_console_on_a_full_disk_does_not_end_a_run(trained, command, monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        command.works("base_train", *SMALL, "--model_tag=full")
    assert equal(weights(trained, "full"), weights(trained, "one"))
