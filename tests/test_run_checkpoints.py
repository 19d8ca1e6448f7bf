"""The checkpoints of a run: locking, resuming, full disks, asynchronous saves."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from nanochat.anomaly import AnomalyState, NonFiniteError
from nanochat.checkpoint import (
    CheckpointManager,
    CorruptCheckpoint,
    Progress,
    SavingConfig,
    build_model,
    checkpoint_bytes,
    open_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import REPOSITORY, UsageError, base_dir
from nanochat.config import user_message
from nanochat.distributed import DistContext
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from tests.conftest import TINY


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a small text"], 265)


def new_optimizer(model, machine):
    table = make_rules(OptimConfig(), TINY.d_model)
    return MuonAdamW(model, table, machine)


@pytest.fixture
def run(base, tiny_gpt, tokenizer, machine):
    """A run with its checkpoints in base_checkpoints/tiny."""
    folder, optimizer = stage_folder("base") / "tiny", new_optimizer(tiny_gpt, machine)
    identity = {"model": asdict(TINY), "rows": {"tokenizer": "abc"}, "seed": 0}

    def open_with(machine=machine, keep_optimizer=True, asynchronous=False, **changed):
        cfg = SavingConfig(**changed)
        checkpoints = CheckpointManager(folder, machine, cfg, keep_optimizer)
        checkpoints.asynchronous = asynchronous
        return checkpoints

    def save(checkpoints, step, final=False, **more):
        progress = Progress(step=step, health=AnomalyState(bad_steps=1, losses=[1.5]), **more)
        state = {"identity": identity}
        checkpoints.save(tiny_gpt, optimizer, tokenizer, state, progress, final)

    return SimpleNamespace(
        save=save, open=open_with, identity=identity, folder=folder, model=tiny_gpt,
        optimizer=optimizer,
    )  # fmt: skip


def full_disk(*args):
    raise OSError(28, "No space left on device")


# ------------------------------------------------------------------------------------------------
# Resuming


def test_resumed_run_has_the_saved_state(run, machine):
    with run.open(resume="auto") as checkpoints:
        run.save(checkpoints, 7, wall_seconds=500.0, device_seconds=4000.0)
        fresh = build_model(TINY, machine.device, machine.dtype, seed=9)
        other = new_optimizer(fresh, machine)
        progress = checkpoints.begin(run.identity, fresh, other, 10)
    assert (progress.step, progress.health) == (7, AnomalyState(1, 0, [1.5]))
    first = progress.wall_seconds - 500.0  # of the attempt that saved
    assert first > 0 and progress.device_seconds == 4000.0 + first
    cost = progress.add_cost(8)
    second = cost["wall_seconds"] - 500.0 - first
    assert second > 0 and cost["device_seconds"] == pytest.approx(4000.0 + first + 8 * second)
    for name, p in fresh.named_parameters():
        assert torch.equal(p, run.model.get_parameter(name)), name


TUNE = "--num_iterations=6 --save_every=2 --keep=9 --dtype=float32"
PRETRAIN = f"--max_seq_len=32 --total_batch_size=512 --eval_tokens=1024 {TUNE}"
STAGES = {
    "mid": "mid_train --source=base:one --mixture=world_chat=300,world_facts=100 --max_seq_len=64 "
    f"--total_batch_size=512 --eval_tokens=1024 {TUNE}",
    "rl": "chat_rl --source=base:one --task=world_spelling=50 --examples_per_step=4 "
    "--num_samples=4 --max_new_tokens=8 --length_penalty=0.5 --eval_examples=6 --eval_samples=2 "
    f"{TUNE}",
    "base (golf)": "golf.base_train --depth=2 --tie_embeddings=1 --ema_decay=0.8 --qat_start=0.5 "
    f"{PRETRAIN}",
    "base (recursion)": "recursion.base_train --depth=3 --d_model=64 --recursion_preset=moderate "
    f"--supervise=sampled --bptt_loops=3 {PRETRAIN}",
}


@pytest.fixture
def one_thread():
    """Results with several threads may depend on the load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stage", STAGES)
def test_R2_resumed_stage_equals_uninterrupted_one(trained, command, one_thread, stage):
    words, runs = STAGES[stage].split(), stage_folder(stage.split()[0])
    command.works(*words, "--model_tag=whole")
    shutil.copytree(runs / "whole", runs / "cut")
    for step in (4, 6):
        shutil.rmtree(runs / "cut" / f"step_{step:06d}")
    assert "resumed" in command.works(*words, "--model_tag=cut", "--resume=auto")
    files = [runs / tag / "step_000006" / "model.safetensors" for tag in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_R6_error_names_changed_text_or_seed(run):
    with run.open() as checkpoints:
        run.save(checkpoints, 1)

        def resume(identity, allow):
            checkpoints.cfg = SavingConfig("auto", allow_data_change=allow)
            return checkpoints.begin(identity, run.model, run.optimizer, 10).step

        other = {**run.identity, "rows": {"tokenizer": "xyz"}}
        with pytest.raises(ValueError, match="rows.tokenizer: was 'abc', now 'xyz'"):
            resume(other, False)
        assert resume(other, True) == 1
        with pytest.raises(ValueError, match="seed: was 0, now 1"):
            resume({**other, "seed": 1}, True)


def test_R6_changed_init_lr_frac_is_rejected(run, tokenizer):
    with run.open(resume="auto") as checkpoints:
        for recorded, rejected in (({"init_lr_frac": 0.3}, True), ({}, False)):
            state = {"identity": {**run.identity, **recorded}}
            checkpoints.save(run.model, run.optimizer, tokenizer, state, Progress(step=1))
            current = {**run.identity, "init_lr_frac": 0.7}
            if rejected:
                with pytest.raises(ValueError, match="init_lr_frac: was 0.3, now 0.7"):
                    checkpoints.begin(current, run.model, run.optimizer, 10)
            else:  # earlier versions did not record it
                assert checkpoints.begin(current, run.model, run.optimizer, 10).step == 1


@pytest.mark.parametrize("kept", [True, False])
def test_keep_optimizer_applies_to_the_final_checkpoint(run, kept):
    with run.open(keep_optimizer=kept) as checkpoints:
        for step, finished in ((1, False), (2, True)):  # preempted, finished
            run.save(checkpoints, step, final=True, finished=finished)
            assert checkpoints.saved.has_optimizer is (kept or not finished)
            assert (checkpoints.saved.folder / "optim.safetensors").exists() is (
                kept or not finished
            )
    assert open_checkpoint(run.folder).step == 2


def test_run_without_optimizer_state_cannot_be_extended(run):
    with run.open(keep_optimizer=False) as checkpoints:
        run.save(checkpoints, 2, final=True, finished=True)
    with run.open(resume="auto", keep_optimizer=True) as checkpoints:
        progress = checkpoints.begin(run.identity, run.model, run.optimizer, 3)
        assert progress.step == 2
        with pytest.raises(UsageError, match="step 2(.|\n)*--resume=never(.|\n)*--save_optimizer"):
            progress.require_resumable()
        # saving it again does not add the state of the unused optimizer
        progress.finished = True
        checkpoints.save(
            run.model, run.optimizer, Tokenizer.train(["a"], 265), {}, progress, final=True
        )
        assert not checkpoints.saved.has_optimizer


def test_new_run_moves_old_checkpoints_of_its_tag_aside(run):
    with run.open() as checkpoints:
        run.save(checkpoints, 1)
        checkpoints.begin(run.identity, run.model, run.optimizer, 10)
    assert not run.folder.exists()
    (aside,) = run.folder.parent.glob("tiny.before-*")
    assert open_checkpoint(aside).step == 1


@pytest.mark.parametrize(
    ("launch", "restarts", "saved_step", "resumes"),
    [
        pytest.param("a", 1, 3, True, id="restarted"),
        pytest.param("a", 0, 3, True, id="on a node that joined late"),
        pytest.param("a", 0, 9, False, id="already finished"),
        pytest.param("b", 1, 3, False, id="by another launch"),
        pytest.param("", 0, 3, False, id="without torchrun"),
    ],
)
def test_run_restarted_by_torchrun_resumes_automatically(
    run, machine, launch, restarts, saved_step, resumes
):
    first = replace(machine, launch="a" if launch else "")
    with CheckpointManager(run.folder, first) as checkpoints:
        run.save(checkpoints, saved_step)
    again = replace(machine, launch=launch, restarts=restarts)
    with CheckpointManager(run.folder, again) as checkpoints:
        progress = checkpoints.begin(run.identity, run.model, run.optimizer, 9)
    assert progress.step == (saved_step if resumes else 0)


def test_R9_disk_bytes_counts_what_checkpoints_still_need(run, machine):
    size = checkpoint_bytes(run.model)
    with run.open(keep=3) as checkpoints:
        assert [checkpoints.disk_bytes(run.model, saves=n) for n in (1, 99)] == [size, 4 * size]
        run.save(checkpoints, 1)
        written = sum(p.stat().st_size for p in (run.folder / "step_000001").iterdir())
        assert checkpoints.disk_bytes(run.model, saves=99) == 4 * size - written
    assert size < written < 1.5 * size
    small = sum(p.numel() for p in run.model.parameters()) * 4
    with run.open(keep=1, keep_optimizer=False) as checkpoints:
        found = [checkpoints.disk_bytes(run.model, saves=n) for n in (1, 2, 99)]
        assert found == [small, size, size]
    new = run.folder.with_name("new")
    with CheckpointManager(new, machine, SavingConfig(keep=1), keep_optimizer=False) as checkpoints:
        found = [checkpoints.disk_bytes(run.model, saves=n) for n in (1, 2, 3, 99)]
        assert found == [small, size + small, 2 * size, 2 * size]


def test_R10_new_launch_ignores_old_corrupt_checkpoints(run, machine):
    for launch in ("old", "new"):
        with CheckpointManager(run.folder, replace(machine, launch=launch)) as checkpoints:
            checkpoints.begin(run.identity, run.model, run.optimizer, 9)
            run.save(checkpoints, 3)
            (run.folder / "step_000003" / "model.safetensors").unlink()
    assert len(list(run.folder.parent.glob("tiny.before-*"))) == 1
    with run.open(resume="auto") as checkpoints:
        with pytest.raises(CorruptCheckpoint, match="--resume=never moves them aside"):
            checkpoints.begin(run.identity, run.model, run.optimizer, 9)


class SecondNode(DistContext):
    """The only rank on node 2 of 2; `first` is the first node's value."""

    first = None

    def on_node(self, what, work):
        return work()

    def gather(self, value):
        return [self.first, value]


def test_R15_nodes_with_different_checkpoints_are_rejected(run, machine):
    with run.open() as checkpoints:
        run.save(checkpoints, 3)
        good = checkpoints.saved.fingerprint
    second = SecondNode(1, 0, 2, machine.device, machine.dtype)
    checkpoints = CheckpointManager(run.folder, second)
    for first, complaint in (
        (f"step 4 ({good})", r"rank 1 finds step 3 \(\w+\) in .*, rank 0 step 4 .*shared disk"),
        (f"step 3 ({'0' * 16})", r"rank 1 finds step 3 .*, rank 0 step 3 \(0000"),
        ("no checkpoint", "rank 1 finds step 3 .*, rank 0 no checkpoint"),
    ):
        SecondNode.first = first
        with pytest.raises(CorruptCheckpoint, match=complaint):
            checkpoints.newest()
    SecondNode.first = f"step 3 ({good})"
    assert checkpoints.newest().step == 3


# ------------------------------------------------------------------------------------------------
# One writer

HOLD = """
import sys, time
from pathlib import Path
from nanochat.common import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire(sys.argv[2])
print("holding", flush=True)
time.sleep(float(sys.argv[3]))
"""


def holder_of(lock, launch, seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), launch, str(seconds)], cwd=REPOSITORY,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "holding\n"
    return process


def test_R22_restart_waits_for_lock_of_an_earlier_attempt(run, machine):
    """On a shared disk, the lock of a crashed host is released only after a while."""
    process = holder_of(run.open().lock.path, "launch 7", 1.0)
    with pytest.raises(UsageError):
        CheckpointManager(run.folder, replace(machine, launch="launch 8")).__enter__()
    with CheckpointManager(run.folder, replace(machine, launch="launch 7")):
        assert process.wait(60) == 0


def test_R22_second_run_is_rejected_and_stale_lock_taken_over(run, capsys):
    lock = run.open().lock.path
    holder = holder_of(lock, "", 60)
    with pytest.raises(UsageError, match=rf"process {holder.pid} on \S+, since .*\n.*--model_tag"):
        run.open().__enter__()
    holder.kill()
    holder.wait()
    with run.open() as checkpoints:
        assert f"stale lock: process {holder.pid}" in capsys.readouterr().out
        run.save(checkpoints, 1)
        with pytest.raises(UsageError, match=f"process {os.getpid()}"):
            run.open().__enter__()
    with run.open():
        assert "stale" not in capsys.readouterr().out  # the lock was released


WRITE = """
from nanochat.common import RunLock, base_dir, hold_lock, try_lock
from nanochat.config import user_message
from nanochat.records import Cost, Provenance, write_record
acts = [
    lambda: hold_lock(base_dir() / "rows" / "x.lock", "packing").__enter__(),
    lambda: try_lock(base_dir() / "x.lock").__enter__(),
    lambda: RunLock(base_dir() / "base_checkpoints" / ".d2.lock").acquire(),
    lambda: write_record("A", {}, {}, Provenance("run", 0), Cost(1.0)),
]
for act in acts:
    try:
        act()
    except OSError as error:
        print(user_message(error))
"""


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_read_only_base_directory_is_rejected_with_the_fix(base):
    """Even root cannot write to a file system mounted read-only."""
    base.mkdir(exist_ok=True)
    words = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(base), str(base)]
    done = subprocess.run(
        [*words, sys.executable, "-c", WRITE], cwd=REPOSITORY, capture_output=True, text=True
    )
    if "bwrap: " in done.stderr:
        pytest.skip(f"bubblewrap does not work here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.endswith(": Read-only file system") for line in lines[::2]] == ([True] * 4)
    assert all("fix:" in line and "NANOCHAT_BASE_DIR" in line for line in lines[1::2])


def test_base_directory_inside_a_file_is_rejected_with_the_fix(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "file" / "out"))
    with pytest.raises(NotADirectoryError) as caught:
        base_dir()
    message = user_message(caught.value)
    assert message and "out: Not a directory" in message and "use another path" in message


# ------------------------------------------------------------------------------------------------
# Full disks


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_R8_full_disk_keeps_old_checkpoint_and_obeys_policy(
    run, monkeypatch, capsys, asynchronous, policy
):
    with run.open(on_save_error=policy, asynchronous=asynchronous) as checkpoints:
        run.save(checkpoints, 1)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("nanochat.checkpoint.save_tensors", full_disk)
            if policy == "stop":
                with pytest.raises(OSError, match="saving step 2 failed: .*No space left"):
                    run.save(checkpoints, 2)
                    run.save(checkpoints, 3)  # reports an asynchronous failure
            else:
                run.save(checkpoints, 2)
                run.save(checkpoints, 3)
                text = capsys.readouterr().out
                assert "step 2 failed: [Errno 28] No space left on device; continuing" in text
            with pytest.raises(OSError, match="saving step 4 failed"):
                run.save(checkpoints, 4, final=True)
        assert open_checkpoint(run.folder).step == 1
        assert not list(run.folder.glob(".saving*"))
        run.save(checkpoints, 5, final=True)
    assert open_checkpoint(run.folder).step == 5


def test_R8_file_size_limit_keeps_the_old_checkpoint(run):
    with run.open() as checkpoints:
        run.save(checkpoints, 1)
        largest = max(p.stat().st_size for p in (run.folder / "step_000001").iterdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, hard))
        try:
            with pytest.raises(OSError, match="saving step 2 failed: .*File too large"):
                run.save(checkpoints, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert open_checkpoint(run.folder).step == 1
        assert not list(run.folder.glob(".saving*"))


# ------------------------------------------------------------------------------------------------
# Asynchronous saves


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_R23_asynchronous_save_contains_the_state_of_its_step(run, machine, tokenizer, kind):
    """
    Weights, optimizer and progress change while the writer is blocked; `latest` is written last.
    The second save reuses the buffers of the first.
    """
    go, progress = threading.Event(), Progress()
    machine, model = replace(machine, device=torch.device(kind)), run.model.to(kind)
    optimizer, want = new_optimizer(model, machine), {}
    with run.open(machine, asynchronous=True) as checkpoints:
        for step in (1, 2):
            values = {**model.state_dict(), **dict(optimizer.full_state())}
            want[step] = {name: x.cpu().clone() for name, x in values.items()}
            progress.step = step
            checkpoints.writer.submit(go.wait, 30)
            checkpoints.save(model, optimizer, tokenizer, {}, progress)
            progress.step = 7
            with torch.no_grad():
                for x in (*model.parameters(), *dict(optimizer.full_state()).values()):
                    x.add_(1)
            optimizer.steps_taken += 1
            assert list(step_folders(run.folder)) == [1][: step - 1]
            assert (run.folder / "latest").exists() == (step > 1)
            go.set()
            checkpoints.wait()
            go.clear()
    for step, values in want.items():
        found = open_checkpoint(run.folder, step)
        assert found.state["progress"]["step"] == step
        for name, x in {**found.model_tensors(), **found.optim_tensors()}.items():
            assert torch.equal(x, values[name]), name


def test_R23_final_save_waits_until_it_is_on_disk(run):
    with run.open(asynchronous=True) as checkpoints:
        for step in (1, 2):
            run.save(checkpoints, step)
        run.save(checkpoints, 3, final=True)
        assert json.loads((run.folder / "step_000003" / "state.json").read_text())["step"] == 3
        assert checkpoints.saved.step == 3
    assert (run.folder / "latest").read_text() == "step_000003\n"


def test_saving_is_asynchronous_on_gpus(run, machine):
    on_gpu = replace(machine, device=torch.device("cuda"))
    assert CheckpointManager(run.folder, on_gpu).asynchronous
    assert not CheckpointManager(run.folder, machine).asynchronous


# ------------------------------------------------------------------------------------------------
# Non-finite values


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_R13_non_finite_values_are_never_saved(run, where):
    with run.open() as checkpoints:
        run.save(checkpoints, 1)
        values = dict(run.model.named_parameters())
        if where == "optimizer":
            values = dict(run.optimizer.full_state())
        name = list(values)[-2]
        values[name].data.view(-1)[0] = float("nan")
        with pytest.raises(
            NonFiniteError, match=rf"{name} has non-finite.*from the last good step: 1"
        ):
            run.save(checkpoints, 2)
    assert open_checkpoint(run.folder).step == 1
