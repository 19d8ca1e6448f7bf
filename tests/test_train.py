"""Training by its scripts: gradients, evaluations, memory, stop requests, unreadable data."""

import errno
import itertools
import os
import signal

import pytest
import torch

from nanochat.common import PREEMPTED, UNEVALUATED, read_json
from nanochat.gpt import GPT
from nanochat.logger import read_metrics
from nanochat.rows import Rows
from nanochat.train import KernelConfig, set_kernels
from tests.faulty import during_step
from tests.training_runs import (
    SMALL,
    STEPS,
    copy_until,
    curve,
    equal,
    folder,
    gradient,
    losses,
    saved_steps,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def interrupt(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def first_step(command, base, tag, *flags):
    """The folder of a run of one step, and its gradient."""
    command.works("base_train", *SMALL, "--num_iterations=1", f"--model_tag={tag}", *flags)
    return folder(base, tag), gradient(folder(base, tag))


def test_R20_B4_gradient_does_not_depend_on_micro_batch(trained, command):
    whole, want = first_step(command, trained, "whole")
    for rows in (1, 2, 4, 8):
        run, found = first_step(command, trained, "parts", f"--device_batch_size={rows}")
        assert (found - want).norm() < 1e-5 * want.norm()
        assert curve(run, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)
    run, found = first_step(command, trained, "half", "--dtype=float16", "--device_batch_size=8")
    assert (found - want).norm() < 0.01 * want.norm()
    assert curve(run, "grad_norm") == pytest.approx(curve(whole, "grad_norm"), rel=0.01)


def test_grad_clip_bounds_the_gradient(trained, command):
    whole, want = first_step(command, trained, "whole")
    [norm] = curve(whole, "grad_norm")
    for limit, factor in ((norm / 8, 1 / 8), (2 * norm, 1.0)):
        run, found = first_step(command, trained, "clipped", f"--grad_clip={limit}")
        assert curve(run, "grad_norm") == [norm]  # before clipping
        torch.testing.assert_close(found, factor * want)


# ---- Evaluations ---------------------------------------------------------------------------------


def out_of_memory(*_):
    raise torch.OutOfMemoryError


def test_R17_B12_model_is_saved_before_an_evaluation_that_fails(trained, command, monkeypatch):
    words = ["base_train", *SMALL, "--model_tag=unevaluated"]
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "token_losses", out_of_memory)
        status, text = command(*words)
    assert status == UNEVALUATED and "--resume=auto" in text
    assert equal(weights(trained, "unevaluated"), weights(trained, "one"))
    command.works(*words, "--resume=auto")  # evaluates
    run = folder(trained, "unevaluated")
    assert curve(run, "val_bpb") == curve(folder(trained, "one"), "val_bpb")
    values = read_json(trained / "report" / "base-model-training.json")["values"]
    assert [values["Minimum validation bpb"]] == curve(run, "val_bpb")


def test_R17_evaluation_that_does_not_fit_loses_no_step(trained, command, monkeypatch):
    words = ["base_train", *SMALL, "--save_every=0", "--eval_every=6", "--model_tag=full"]
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "token_losses", out_of_memory)
        text = command.rejects(*words)
    assert "out of memory at step 6" in text
    assert saved_steps(folder(trained, "full")) == [6]
    command.works(*words, "--resume=auto")
    assert equal(weights(trained, "full"), weights(trained, "one"))
    entries = read_metrics(folder(trained, "full") / "metrics.jsonl")
    assert [e["step"] for e in entries if "val_bpb" in e] == [6, 12, 18, STEPS]


# ---- Kernels -------------------------------------------------------------------------------------


def test_compilation_must_pay_on_a_cpu(tiny_gpt, dist):
    assert not set_kernels(KernelConfig(), tiny_gpt, 1e12, dist).compile
    assert tiny_gpt.blocks[0].attention.backend == "sdpa"
    assert set_kernels(KernelConfig(), tiny_gpt, 1e15, dist).compile
    assert tiny_gpt.blocks[0].attention.backend == "blocks"
    assert not set_kernels(KernelConfig(compile=False), tiny_gpt, 1e15, dist).compile


def test_a_refused_command_leaves_a_finished_model_in_place(trained, command):
    """A2: everything is checked before checkpoints of an earlier run are moved."""
    for flag in ("--device_batch_size=5", "--total_batch_size=500", "--mixture=none"):
        assert command("base_train", *SMALL, "--model_tag=one", flag).status
    assert saved_steps(folder(trained, "one")) == [STEPS]
    assert not list(folder(trained, "one").parent.glob("*.before-*"))


# ---- Stops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("during", "step"), [("loss", 5), ("token_losses", 8), ("token_losses", STEPS)]
)
def test_R7_stop_request_saves_and_the_run_resumes(trained, command, monkeypatch, during, step):
    """A step, an evaluation and the last evaluation are interrupted."""
    words = ["base_train", *SMALL, "--save_every=0", "--eval_every=8", "--model_tag=stopped"]

    def stop(now, *_):
        if now.step == step:
            interrupt()

    with monkeypatch.context() as patch:
        during_step(stop, patch.setattr, during)
        assert command(*words).status == PREEMPTED
    run = folder(trained, "stopped")
    assert step <= saved_steps(run)[-1] <= step + 2
    assert "resumed" in command.works(*words, "--resume=auto")
    assert equal(weights(trained, "stopped"), weights(trained, "one"))
    assert losses(trained, "stopped") == losses(trained, "one")
    assert curve(run, "val_bpb")[-1:] == curve(folder(trained, "one"), "val_bpb")


def test_R7_second_interrupt_exits_at_once(trained, command, monkeypatch):
    def leave(status):
        raise SystemExit(status)

    def interrupt_twice(now, *_):
        if now.step == 3:
            interrupt(signal.SIGINT)
            interrupt(signal.SIGINT)

    monkeypatch.setattr(os, "_exit", leave)
    during_step(interrupt_twice, monkeypatch.setattr)
    assert command("base_train", *SMALL, "--model_tag=twice").status == 128 + signal.SIGINT
    assert not saved_steps(folder(trained, "twice"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_R11_rows_that_cannot_be_read_lose_no_step(trained, command, monkeypatch):
    words = ["base_train", *SMALL, "--save_every=0", "--model_tag=unread"]
    read, counts = Rows.read, itertools.count()

    def fail(rows, ids):
        if next(counts) == 8:
            raise OSError(errno.EIO, "Input/output error", "a.bin")
        return read(rows, ids)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "read", fail)
        status, text = command(*words)
    assert status and "Traceback" not in text and "a.bin" in text
    assert saved_steps(folder(trained, "unread"))[-1] == 8
    command.works(*words, "--resume=auto")
    assert equal(weights(trained, "unread"), weights(trained, "one"))


def test_huge_seed_is_rejected_in_one_sentence(trained, command):
    assert "seed" in command.rejects("base_train", *SMALL, f"--seed={10**22}")


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_B7_batches_stay_intact_while_the_gpu_is_behind(trained, command, monkeypatch):
    copy_until(4, folder(trained, "one"), folder(trained, "busy"))
    matrix = torch.randn(8192, 8192, device="cuda")

    def keep_busy(*_):
        for _ in range(20):
            matrix.copy_(matrix @ matrix / 100)

    during_step(keep_busy, monkeypatch.setattr)
    words = [*SMALL, "--device_type=cuda", "--device_batch_size=2", "--model_tag=busy"]
    command.works("base_train", *words, "--resume=auto", "--no-compile")
    assert losses(trained, "busy") == pytest.approx(losses(trained, "one"), rel=1e-3)
