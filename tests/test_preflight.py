"""Preflight: micro-batch size, memory, disk space, and errors with a fix."""

import gc
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanochat import hardware, preflight
from nanochat.common import REPOSITORY, UsageError, read_json
from nanochat.distributed import DistContext
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import (
    KernelConfig,
    choose_device_rows,
    describe_run,
    require_disk,
    require_memory,
)
from nanochat.scaling import make_rules
from nanochat.train import TrainConfig, TrainingRun, fit_rows
from tests.commands import Command, mib_after_imports
from tests.conftest import TINY
from tests.test_train import TOKENIZER, Given


def test_B16_error_suggests_device_batch_size_that_divides():
    def choose(asked, rows=12):
        return choose_device_rows(asked, rows, limit=12)

    with pytest.raises(ValueError, match="use 4"):
        choose(5)
    assert choose(6) == 6
    assert choose(64) == 12  # capped at the number of rows
    assert choose(None) == 12


def test_micro_batch_size_is_largest_divisor_within_limit():
    assert choose_device_rows(None, 96, limit=16) == 16
    assert choose_device_rows(None, 96, limit=20) == 16
    assert choose_device_rows(None, 7, limit=2) == 1
    assert choose_device_rows(None, 7, limit=0) == 1


def test_estimated_memory_includes_every_tensor(machine, tiny_gpt, optimizer, capsys):
    named = dict(tiny_gpt.named_parameters())
    run = run_of(tiny_gpt, optimizer, machine)
    fit_rows(run, 8)
    weights = 4 * tiny_gpt.num_params()
    blocks = 4 * sum(p.numel() for name, p in named.items() if name.startswith("blocks."))
    assert run.memory_bytes >= 4 * weights - blocks
    sizes = (f"{n / 2**20:,.0f}" for n in (weights, weights, 2 * weights - blocks))
    listed = "weights {}, gradients {}, optimizer {}, activations ".format(*sizes)
    assert listed in capsys.readouterr().out


def test_R32_rehearsals_leak_no_activations(machine, tiny_gpt, optimizer):
    outputs = []
    for block in tiny_gpt.blocks:
        block.register_forward_hook(lambda block, x, y: outputs.append(weakref.ref(y)))
    gc.disable()
    try:
        for _ in range(5):
            fit_rows(run_of(tiny_gpt, optimizer, machine), 8)
        assert outputs and not any(y() is not None for y in outputs)
    finally:
        gc.enable()
    assert all(p.grad is None for p in tiny_gpt.parameters())


def test_resumed_eager_run_does_not_compile_by_default(machine, tiny_gpt, optimizer, monkeypatch):
    """On a GPU, the length of the run does not matter."""
    asked = []
    monkeypatch.setattr(preflight, "set_kernels", lambda cfg, *rest: asked.append(cfg.compile))
    for compiled, flag in ((False, None), (False, True), (True, None), (None, None)):
        run = run_of(tiny_gpt, optimizer, machine, kernels=KernelConfig(flag))
        run.progress.compiled = compiled
        fit_rows(run, 8)
    assert asked == [False, True, None, None]


@pytest.mark.parametrize("compiled", [True, False])
def test_resumed_run_is_compiled_as_before(compiled, machine, tiny_gpt, optimizer, monkeypatch):
    def set_kernels(cfg, model, machine, seconds, optimizer):
        return preflight.choose_compile(cfg, machine, seconds)

    monkeypatch.setattr(preflight, "set_kernels", set_kernels)  # choose, but do not compile
    monkeypatch.setattr(preflight, "probe_works", lambda *args: True)
    estimates = iter((1e9, 1.0) if compiled else (1.0, 1e9))
    monkeypatch.setattr(preflight, "estimate_seconds", lambda *args: next(estimates))
    run, resumed = (run_of(tiny_gpt, optimizer, machine) for _ in range(2))
    fit_rows(run, 8)
    assert run.progress.compiled is compiled
    resumed.progress.load_state_dict(run.progress.state_dict())
    fit_rows(resumed, 8)
    assert resumed.progress.compiled is compiled


def run_of(model, optimizer, machine, device_batch_size=None, **changes):
    """A run of a tiny model with 8 rows of 16 tokens per step."""
    return TrainingRun(
        kind="base",
        model=model,
        tokenizer=TOKENIZER,
        optimizer=optimizer,
        loader=Given(None),
        machine=machine,
        cfg=TrainConfig(device_batch_size=device_batch_size),
        tag="tiny",
        num_steps=8,
        schedule=ScheduleConfig(),
        **changes,
    )


@pytest.fixture
def optimizer(machine, tiny_gpt):
    table = make_rules(OptimConfig(), TINY.d_model)
    return MuonAdamW(tiny_gpt, table, machine)


def test_fit_rows_keeps_weights_and_chooses_batch_size(machine, tiny_gpt, optimizer):
    before = {n: p.detach().clone() for n, p in tiny_gpt.named_parameters()}
    run = run_of(tiny_gpt, optimizer, machine)
    assert fit_rows(run, 8) > 0
    assert run.device_rows == 8 and not run.progress.compiled
    assert all(torch.equal(p, before[n]) for n, p in tiny_gpt.named_parameters())


class HeldGradients:
    """A model that counts, in each forward pass, the parameters that hold a gradient."""

    def __init__(self, model):
        self.model, self.held = model, []

    def loss(self, tokens, targets):
        self.held.append(sum(p.grad is not None for p in self.model.parameters()))
        return self.model.loss(tokens, targets)


@pytest.mark.parametrize(("asked", "accumulates"), [(2, True), (8, False)])
def test_R32_rehearsal_holds_gradients_like_training(
    machine, tiny_gpt, optimizer, asked, accumulates
):
    model = HeldGradients(tiny_gpt)
    fit_rows(run_of(tiny_gpt, optimizer, machine, objective=model, device_batch_size=asked), 8)
    assert [n > 0 for n in model.held] == [False, accumulates] * 2
    assert all(p.grad is None for p in tiny_gpt.parameters())


def test_estimate_counts_micro_batches_and_updates(machine, tiny_gpt, optimizer, monkeypatch):
    monkeypatch.setattr(preflight, "rehearse", lambda *arguments: (1 << 20, 0.5, 3.0))
    run = run_of(tiny_gpt, optimizer, machine, device_batch_size=2)
    num_rows = run.batch_tokens // tiny_gpt.cfg.max_seq_len
    assert fit_rows(run, 8) == 8 * (0.5 * num_rows / 2 + 3.0)


def test_out_of_memory_in_rehearsed_step_changes_nothing(machine, tiny_gpt, optimizer, monkeypatch):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    optimizer.reduce_gradients()
    optimizer.step()
    weights = {n: p.detach().clone() for n, p in tiny_gpt.named_parameters()}
    state = {n: v.clone() for n, v in optimizer.full_state()}
    update = optimizer.update

    def out_of_memory(*arguments):
        update(*arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(optimizer, "update", out_of_memory)
    with pytest.raises(UsageError, match="smaller --depth"):
        fit_rows(run_of(tiny_gpt, optimizer, machine), 8)
    assert all(torch.equal(p, weights[n]) for n, p in tiny_gpt.named_parameters())
    assert all(torch.equal(v, state[n]) for n, v in optimizer.full_state())


@pytest.mark.parametrize(("asked", "reserve"), [(None, preflight.GPU_RESERVE), (2, 0)])
def test_R37_ranks_rehearse_with_same_memory_limit(
    machine, tiny_gpt, optimizer, monkeypatch, asked, reserve
):
    """The limit comes from the rank with the least memory."""

    class SecondRank(DistContext):
        def gather(self, value):
            return [40 << 30, value] if value == 64 << 30 else [value]

    limits = []

    def record(device, max_bytes):
        limits.append(max_bytes)
        return nullcontext()

    monkeypatch.setattr(hardware, "limit_memory", record)
    monkeypatch.setattr(hardware, "used_memory_bytes", lambda device: 4 << 30)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: 60 << 30)
    second = SecondRank(0, 0, 1, machine.device, machine.dtype)
    fit_rows(run_of(tiny_gpt, optimizer, second, device_batch_size=asked), 8)
    assert limits == [(40 << 30) - reserve]


class Crowded:
    """A model that runs out of memory above a micro-batch size of `rows`."""

    def __init__(self, model, rows):
        self.model, self.rows = model, rows

    def loss(self, tokens, targets):
        if len(tokens) > self.rows:
            raise torch.OutOfMemoryError
        return self.model.loss(tokens, targets)


@pytest.mark.parametrize(("fits", "asked"), [(3, None), (0, None), (3, 4), (0, 1)])
def test_batch_that_does_not_fit_shrinks_or_fails_with_fix(
    machine, tiny_gpt, optimizer, fits, asked
):
    model = Crowded(tiny_gpt, fits)
    run = run_of(tiny_gpt, optimizer, machine, objective=model, device_batch_size=asked)
    if fits and asked is None:
        fit_rows(run, 8)
        assert run.device_rows == 2  # 8 and 4 do not fit
        return
    with pytest.raises(
        UsageError, match="omit --device_batch_size" if asked == 4 else "smaller --depth"
    ):
        fit_rows(run, 8)


def test_too_large_model_is_rejected_before_allocation(machine, monkeypatch):
    def meta(cfg):
        with torch.device("meta"):
            return GPT(cfg)

    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: 64e9)
    huge = replace(TINY, vocab_size=32768, n_layer=64, d_model=8192, head_dim=2048)
    with pytest.raises(
        UsageError, match=r"parameters.* GB, but cpu has 64.00 GB free.*\n.*--depth"
    ):
        require_memory(meta(huge), machine)
    require_memory(meta(TINY), machine)


def test_checkpoint_copies_must_fit_in_host_memory(machine, monkeypatch):
    free = {"cuda": 64e9, "cpu": 1e6}
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda device: free[device.type])
    monkeypatch.setattr(hardware, "device_name", lambda device: device.type)
    with torch.device("meta"):
        model = GPT(TINY)
    require_memory(model, replace(machine, device=torch.device("cuda")))
    free["cpu"] = 1e5
    with pytest.raises(UsageError, match="copied for each save, take .* but cpu has"):
        require_memory(model, replace(machine, device=torch.device("cuda")))


def test_R9_insufficient_disk_space_is_reported_with_all_numbers(machine, base, monkeypatch):
    monkeypatch.setattr("nanochat.common.free_bytes", lambda folder: int(5e9))
    with pytest.raises(
        UsageError,
        match=r"\(checkpoints 4\.00 GB, rows 1\.50 GB\) needs about 5\.50 GB.*5\.00 GB free",
    ):
        require_disk(base, machine, checkpoints=4 * 10**9, rows=15 * 10**8)
    text = require_disk(base, machine, checkpoints=4 * 10**9, rows=0)
    assert text.startswith("checkpoints 4.00 GB; ")


def test_describe_lists_device_kernels_and_model(machine, tiny_gpt):
    assert list(describe_run(tiny_gpt, machine, False)) == ["device", "kernels", "model"]


@pytest.mark.parametrize("compiled", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_peak_memory_is_close_to_estimated_memory(base: Path, command: Command, compiled):
    command.works("tok_train", "--dataset=embedded", "--num_shards=1", "--vocab_size=4096")
    shape = ("--depth=4", "--max_seq_len=256", "--total_batch_size=4096", "--eval_tokens=4096")
    alone = [sys.executable, "-m", "scripts.base_train", *shape, "--num_iterations=3"]
    alone.append(f"--compile={compiled}")
    done = subprocess.run(alone, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    values = read_json(base / "report" / "base-model-training.json")["values"]
    mib = {k: float(v.removesuffix("MiB")) for k, v in values.items() if "emory" in k}
    grown = mib["Peak memory usage"] - mib_after_imports()
    assert 0.5 * mib["Estimated memory"] < grown <= 1.3 * mib["Estimated memory"]


def test_rows_on_mps_follow_free_memory(machine, monkeypatch, tiny_gpt):
    mps, growth = replace(machine, device=torch.device("mps")), iter((0, 1 << 20) * 4)
    monkeypatch.setattr(torch, "zeros", lambda *size, **kind: None)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(growth))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 1 << 30)
    silent = SimpleNamespace(loss=lambda tokens, targets: None)
    for recommended, rows in ((0, 1), ((3 << 30) + (5 << 20), 4), (1 << 50, None)):
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda free=recommended: free)
        found = preflight.max_rows(tiny_gpt, silent, mps, 4 * tiny_gpt.num_params())
        if rows:
            assert found == rows
        else:
            assert 4 < found <= preflight.CPU_TOKENS // tiny_gpt.cfg.max_seq_len


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100X", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
    ],
)
def test_peak_flops_are_those_of_the_named_gpu(name, peak):
    assert hardware.peak_flops(name) == peak
