"""Training by its scripts: gradients, memory, numbers that are not finite, stops, lost data."""

import errno
import itertools
import math
import os
import re
import shutil
import signal

import pytest
import torch

from nanochat.checkpoint import stage_folder
from nanochat.common import PREEMPTED, UNEVALUATED, UsageError, read_json
from nanochat.dist import matmul_rate, peak_flops
from nanochat.optim import MuonAdamW
from nanochat.rows import Rows
from nanochat.run import Run
from nanochat.train import Step, set_kernels
from tests.faulty import during_step
from tests.training_runs import (
    SMALL,
    STEPS,
    all_ranks,
    begin_ranks,
    copy_until,
    curve,
    equal,
    folder,
    gradient,
    losses,
    rest_of,
    saved_steps,
    tensors,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def train(command, monkeypatch, tag, action, *flags, method="loss"):
    """Train with a fault (`faulty.during_step`); returns exit status and output."""
    with monkeypatch.context() as patch:
        during_step(action, patch.setattr, method)
        return command("base_train", *SMALL, f"--model_tag={tag}", *flags)


def test_model_is_not_compiled_under_a_memory_limit(monkeypatch, tiny_gpt, dist):
    monkeypatch.setattr("resource.getrlimit", lambda _: (6e9, 6e9))
    assert set_kernels("auto", tiny_gpt, 1e20, dist) == "off"


def test_compiler_that_cannot_work_is_named(monkeypatch, tiny_gpt, dist, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/cache")
    assert set_kernels("auto", tiny_gpt, 1e20, dist) == "off"
    assert "slower: torch.compile cannot work: /proc/cache cannot be" in capsys.readouterr().out
    with pytest.raises(UsageError, match="set TORCHINDUCTOR_CACHE_DIR"):
        set_kernels("on", tiny_gpt, 1e20, dist)


def first_step(command, base, tag, *flags):
    """The folder of a run of one step, and its gradient."""
    command.works("base_train", *SMALL, "--num_iterations=1", f"--model_tag={tag}", *flags)
    return folder(base, tag), gradient(folder(base, tag))


def test_R20_B4_gradient_does_not_depend_on_micro_batch(trained, command):
    whole, want = first_step(command, trained, "whole")
    for rows in (1, 2, 4, 8, 64):
        run, found = first_step(command, trained, "parts", f"--device_batch_size={rows}")
        assert (found - want).norm() < 1e-5 * want.norm()
        assert curve(run, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-6)
    run, found = first_step(command, trained, "half", "--dtype=float16", "--device_batch_size=8")
    assert (found - want).norm() < 0.01 * want.norm()
    assert curve(run, "grad_norm") == pytest.approx(curve(whole, "grad_norm"), rel=0.01)


def test_R4_schedule_of_the_batch_trains_each_row_once(trained, command, monkeypatch):
    """Half of the batch in the first 8 steps, also in a run that is resumed within them."""
    plain, seen = Step.load, []

    def load(run, rows):
        batch = plain(run, rows, batch_tokens=256 if run.progress.step < 8 else None)
        seen.extend(map(tuple, batch.ids.tolist()))
        return batch

    monkeypatch.setattr(Step, "load", load)
    command.works("base_train", *SMALL, "--model_tag=ramp")
    assert len(seen) == len(set(seen)) == 8 * 8 + (STEPS - 8) * 16
    values = read_json(trained / "report" / "base-model-training.json")["values"]
    assert values["Number of training tokens"] == len(seen) * 32
    copy_until(4, folder(trained, "ramp"), folder(trained, "cut"))
    every, seen[:] = seen.copy(), []
    command.works("base_train", *SMALL, "--model_tag=cut", "--resume=auto")
    assert seen == every[4 * 8 :] and losses(trained, "cut") == losses(trained, "ramp")


def test_matmul_rate_is_in_flops_per_second():
    assert 1e8 < matmul_rate(torch.float32) < 1e14


def test_grad_clip_bounds_the_gradient(trained, command):
    whole, want = first_step(command, trained, "whole")
    [norm] = curve(whole, "grad_norm")
    for limit, factor in ((norm / 8, 1 / 8), (2 * norm, 1.0)):
        run, found = first_step(command, trained, "clipped", f"--grad_clip={limit}")
        assert curve(run, "grad_norm") == [norm]  # before clipping
        torch.testing.assert_close(found, factor * want)


# ---- The compute dtype -----------------------------------------------------------------------


@pytest.fixture
def measure(monkeypatch):
    """
    Let a CPU measure bfloat16 matmuls of this speed, relative to float32; returns the dtypes that
    are measured from then on.
    """

    def install(gain):
        measured = []
        rates = {torch.bfloat16: gain, torch.float32: 1.0}
        record = lambda dtype: measured.append(dtype) or rates[dtype]  # noqa: E731
        monkeypatch.setattr("nanochat.dist.matmul_rate", record)
        return measured

    return install


def test_dtype_is_measured_once_and_kept_when_resumed_and_in_later_stages(
    trained, command, measure
):
    def dtype_of(section):
        return read_json(trained / "report" / f"{section}.json")["values"]["Compute dtype"]

    free = [flag for flag in SMALL if "dtype" not in flag]
    free += ["--num_iterations=4", "--save_every=2"]
    measured = measure(2.0)
    text = command.works("base_train", *free, "--model_tag=half")
    assert measured == [torch.bfloat16, torch.float32] and "as before" not in text
    assert dtype_of("base-model-training") == "bfloat16"
    copy_until(4, folder(trained, "half"), folder(trained, "cut"))
    shutil.rmtree(folder(trained, "cut") / "step_000004")

    measure(1.1)  # on another machine
    text = command.works("base_train", *free, "--model_tag=cut", "--resume=auto")
    assert "bfloat16, as before; --dtype=float32 is the default of this device" in text
    assert losses(trained, "cut") == losses(trained, "half")
    tune = ["mid_train", *"--source=base:cut --mixture=world_facts=60 --num_iterations=2".split()]
    command.works(*tune)
    assert dtype_of("midtraining") == "bfloat16"
    command.works(*tune, "--dtype=float32")
    assert dtype_of("midtraining") == "float32"
    command.works("base_train", *free, "--model_tag=new", "--num_iterations=1")
    assert dtype_of("base-model-training") == "float32"


# ---- Memory --------------------------------------------------------------------------------------


def allocate(now, model, tokens, loss):
    """PyTorch's allocator for CPUs fails for more than two rows."""
    if len(tokens) > 2:
        torch.empty(1 << 50)


def out_of_memory(*_):
    raise torch.OutOfMemoryError


def test_R17_rows_that_do_not_fit_are_halved(trained, command, monkeypatch):
    flags = (command, monkeypatch, "short", allocate, "--num_iterations=2")
    status, text = train(*flags, "--device_batch_size=4")
    assert status == 2 and "device_batch_size=4" in text and "omit --device_batch_size" in text
    status, text = train(*flags)
    assert status == 0 and "out of memory" in text and "device_batch_size=2" in text
    assert saved_steps(folder(trained, "short")) == [2]
    status, text = train(command, monkeypatch, "none", out_of_memory)
    assert status == 2 and "device_batch_size=1" in text and "a smaller model" in text


def test_R17_ranks_agree_on_rows_that_fit_on_each(trained):
    words = ["-m", "tests.faulty", "crowd", "1", "base_train", *SMALL]
    assert "device_batch_size=2" in all_ranks(trained, *words, "--model_tag=crowded")
    for name in ("loss", "grad_norm"):
        found, want = (curve(folder(trained, tag), name) for tag in ("crowded", "one"))
        assert found == pytest.approx(want, rel=1e-4)


def test_weights_between_two_steps_are_not_saved(trained, command, monkeypatch):
    plain = MuonAdamW.step

    def step(optimizer):
        plain(optimizer)
        if optimizer.steps_taken == 3:
            out_of_memory()

    monkeypatch.setattr(MuonAdamW, "step", step)
    assert "out of memory at step 2" in command.rejects("base_train", *SMALL, "--model_tag=half")
    assert not saved_steps(folder(trained, "half"))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peak_flops_are_those_of_the_named_gpu(name, peak):
    assert peak_flops(name) == peak


# ---- Numbers that are not finite -----------------------------------------------------------------


def spoil_gradient(now, model, tokens, loss):
    """An infinite gradient with a finite loss."""
    if now.step in (3, 7):
        loss.register_hook(lambda gradient: gradient * math.inf)


def test_R13_steps_that_are_not_finite_are_skipped(trained, command, monkeypatch):
    status, text = train(command, monkeypatch, "bad", spoil_gradient, "--save_every=1", "--keep=99")
    assert status == 0
    assert re.search(r"step 3: loss \d.*skipped on all ranks.*rows \S*\d", text)
    smooth = curve(folder(trained, "bad"), "smooth_loss")
    for step in (3, 7):
        assert equal(weights(trained, "bad", step), weights(trained, "bad", step + 1))
        assert smooth[step] == smooth[step - 1]
    assert not equal(weights(trained, "bad", 4), weights(trained, "bad", 5))
    assert smooth[-1] < smooth[0]


def test_R13_repeated_bad_steps_end_a_run(trained, trained_base, command, monkeypatch):
    def lose(now, model, tokens, loss):
        return loss * math.nan if now.step >= 8 else None

    status, text = train(command, monkeypatch, "lost", lose, "--save_every=0")
    assert status == 2 and "step 12" in text
    [newest] = saved_steps(folder(trained, "lost"))
    assert equal(weights(trained, "lost", newest), weights(trained_base, "one", 8))  # last good


def test_R13_weights_that_are_not_finite_are_not_saved(trained, command, monkeypatch):
    name = "blocks.1.mlp.up.weight"

    def spoil(now, model, *_):
        if now.step == 6:
            model.get_parameter(name).data[0, 0] = math.inf

    status, text = train(command, monkeypatch, "spoiled", spoil)
    assert status == 2 and re.search(rf"{name} has non-finite.*before step 8, not saved", text)
    assert saved_steps(folder(trained, "spoiled")) == [4]


def test_R13_R15_faults_of_one_rank_are_found_on_all(trained):
    words = ["-m", "tests.faulty", "corrupt", "1", "base_train", *SMALL, "--num_iterations=200"]
    ranks = begin_ranks(trained, *words, "--model_tag=corrupt", "--compile=off")
    text = "".join(map(rest_of, ranks))
    assert all(rank.returncode for rank in ranks)
    assert re.search(r"step 3: loss nan.*skipped on all ranks", text)
    changed = re.search(r"changed (\S+)", text)
    assert changed and f": {changed[1]} differs on rank 1 of 2" in text, text[-3000:]
    assert saved_steps(folder(trained, "corrupt"))[0] == 4  # the weights were equal then


def test_R43_tensors_of_a_script_are_saved_and_restored(trained, command, monkeypatch):
    plain = Run.update

    def update(run, *rest, **metrics):
        plain(run, *rest, **metrics)
        head = run.model.head.weight.detach()
        run.tensors.setdefault("average", torch.zeros_like(head)).lerp_(head, 0.1)

    monkeypatch.setattr(Run, "update", update)
    command.works("base_train", *SMALL, "--model_tag=whole")
    whole, cut = folder(trained, "whole"), folder(trained, "cut")
    copy_until(8, whole, cut)
    command.works("base_train", *SMALL, "--model_tag=cut", "--resume=auto")
    assert tensors(cut, file="optim")["run.average"].any()
    assert equal(tensors(cut, file="optim"), tensors(whole, file="optim"))


# ---- Learning rates ------------------------------------------------------------------------------


def test_rates_of_later_stages_are_fractions_of_those_of_the_base_model(trained, command):
    slow = ("--num_iterations=4", "--matrix_lr=0.002", "--model_tag=slow")
    command.works("base_train", *SMALL, *slow)
    tune = "--mixture=world_chat=300 --max_seq_len=64 --total_batch_size=512 --eval_tokens=1024"
    words = f"{tune} --num_iterations=2 --dtype=float32".split()
    for tag, rate in {"mine": None, "same": 0.002, "own": 0.02}.items():
        given = [f"--matrix_lr={rate}"] if rate else []
        command.works("mid_train", "--source=base:slow", *words, f"--model_tag={tag}", *given)
    mine, same, own = (tensors(stage_folder("mid") / tag, 2) for tag in ("mine", "same", "own"))
    assert equal(mine, same) and not equal(mine, own)
    command.works("chat_sft", "--source=mid:own", *words, "--model_tag=sft")  # not those of mid
    assert read_json(trained / "report" / "chat-sft.json")["settings"]["matrix_lr"] == 0.002


# ---- Evaluations ---------------------------------------------------------------------------------


def test_R17_B12_model_is_saved_before_an_evaluation_that_fails(trained, command, monkeypatch):
    flags = (command, monkeypatch, "full", out_of_memory)
    status, text = train(*flags, "--save_every=0", "--eval_every=6", method="token_losses")
    assert status == 2 and "out of memory at step 6" in text
    run = folder(trained, "full")
    assert saved_steps(run) == [6]
    status, text = train(*flags, "--resume=auto", method="token_losses")  # only the last evaluation
    assert status == UNEVALUATED and "--resume=auto" in text
    assert equal(weights(trained, "full"), weights(trained, "one"))
    command.works("base_train", *SMALL, "--model_tag=full", "--resume=auto")  # evaluates
    assert curve(run, "val_bpb") == curve(folder(trained, "one"), "val_bpb")
    values = read_json(trained / "report" / "base-model-training.json")["values"]
    assert [values["Minimum validation bpb"]] == curve(run, "val_bpb")


def test_B16_refused_command_leaves_a_finished_model_in_place(trained, command):
    """A2: everything is checked before checkpoints of an earlier run are moved."""
    wrong = {"device_batch_size=5": "use 4", "total_batch_size=500": "=512", "mixture=none": "none"}
    for flag, fix in wrong.items():
        assert fix in command.rejects("base_train", *SMALL, "--model_tag=one", f"--{flag}")
    assert saved_steps(folder(trained, "one")) == [STEPS]
    assert not list(folder(trained, "one").parent.glob("*.before-*"))


# ---- Stops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("during", "step"), [("loss", 5), ("token_losses", 8), ("token_losses", STEPS)]
)
def test_R7_stop_request_saves_and_the_run_resumes(trained, command, monkeypatch, during, step):
    """A step, an evaluation and the last evaluation are interrupted."""

    def stop(now, *_):
        if now.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    flags = ("--save_every=0", "--eval_every=8")
    status, _ = train(command, monkeypatch, "stopped", stop, *flags, method=during)
    run = folder(trained, "stopped")
    assert status == PREEMPTED and step <= saved_steps(run)[-1] <= step + 2
    words = ["base_train", *SMALL, *flags, "--model_tag=stopped", "--resume=auto"]
    assert "resumed" in command.works(*words)
    assert equal(weights(trained, "stopped"), weights(trained, "one"))
    assert losses(trained, "stopped") == losses(trained, "one")
    assert curve(run, "val_bpb")[-1:] == curve(folder(trained, "one"), "val_bpb")


def test_R7_second_interrupt_exits_at_once(trained, command, monkeypatch):
    def leave(status):
        raise SystemExit(status)

    def interrupt_twice(now, *_):
        if now.step == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "_exit", leave)
    status, _ = train(command, monkeypatch, "twice", interrupt_twice)
    assert status == 128 + signal.SIGINT and not saved_steps(folder(trained, "twice"))
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
    command.works("base_train", *words, "--resume=auto", "--compile=off")
    assert losses(trained, "busy") == pytest.approx(losses(trained, "one"), rel=1e-3)
