"""What a run finds out before it starts, and that it refuses with a way out."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanochat import attention, preflight
from nanochat.common import REPOSITORY, read_json
from nanochat.gpt import build_model
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.preflight import (
    KernelConfig,
    activation_bytes,
    choose_attention,
    choose_compile,
    choose_device_rows,
    plan_memory,
    prepare,
    probe_attention,
)
from tests.conftest import TINY

BROKEN = {
    "raises": lambda q, k, v, w, s: (_ for _ in ()).throw(RuntimeError("no kernel image")),
    "wrong": lambda q, k, v, w, s: attention.attend_plain(q, k, v, w, s) + 1.0,
    "not causal": lambda q, k, v, w, s: (
        v.float().mean(1, True).expand(-1, v.size(1), q.size(2), -1)
    ),
    "no gradient": lambda q, k, v, w, s: attention.attend_plain(q, k, v, w, s).detach(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_B13_a_kernel_that_imports_but_does_not_work_fails_its_probe(kind, machine, monkeypatch):
    cfg = build_model(TINY, machine.device, machine.dtype, 0).cfg
    assert probe_attention("sdpa", cfg, machine) is None
    monkeypatch.setattr(attention, "attend_sdpa", BROKEN[kind])
    assert probe_attention("sdpa", TINY, machine)


def test_B13_a_kernel_asked_for_by_name_is_refused_with_the_reason(machine, monkeypatch):
    monkeypatch.setattr(attention, "attend_sdpa", BROKEN["raises"])
    with pytest.raises(ValueError, match="no kernel image"):
        choose_attention(KernelConfig(attention="sdpa"), TINY, machine)


def test_compiling_is_left_out_where_it_does_not_pay(machine):
    assert not choose_compile(KernelConfig(), machine, train_seconds=5)
    assert choose_compile(KernelConfig(compile=True), machine, train_seconds=5)
    assert not choose_compile(KernelConfig(compile=False), machine, train_seconds=1e9)


def test_compiling_is_left_out_where_it_does_not_work(machine, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(preflight.torch, "compile", broken)
    assert not choose_compile(KernelConfig(), machine, train_seconds=1e9)
    assert "no compiler" in capsys.readouterr().out


def test_B16_a_device_batch_that_does_not_divide_names_one_that_does(machine):
    def choose(asked, rows=12):
        return choose_device_rows(asked, rows, 16, 100, 0, machine)

    with pytest.raises(ValueError, match="use 4"):
        choose(5)
    assert choose(6) == 6
    assert choose(64) == 12  # more than there are: all of them
    assert choose(None) == 12


def test_the_micro_batch_of_a_cpu_is_bounded_and_divides(machine):
    assert choose_device_rows(None, 96, 512, 1, 0, machine) == 16
    assert choose_device_rows(None, 7, 4096, 1, 0, machine) == 1


def test_stated_memory_counts_every_tensor(machine, tiny_gpt):
    named = dict(tiny_gpt.named_parameters())
    table = rules(OptimConfig(), TINY.d_model)
    optimizer = MuonAdamW(named, tiny_gpt.param_roles(), table, machine)
    memory = plan_memory(tiny_gpt, optimizer, pass_bytes=4 * tiny_gpt.num_params() + 3000)
    weights = 4 * tiny_gpt.num_params()
    matrices = 4 * sum(p.numel() for n, p in named.items() if tiny_gpt.param_roles()[n] == "matrix")
    assert memory.weights == memory.gradients == weights
    assert memory.optimizer == 2 * weights - matrices
    assert memory.activations == 3000


def test_activations_are_measured_on_the_model_itself(machine, tiny_gpt):
    one = activation_bytes(tiny_gpt, machine)
    B, T, C = 1, TINY.max_seq_len, TINY.d_model
    assert 10 * TINY.n_layer * B * T * C * 4 < one < 60 * TINY.n_layer * B * T * C * 4
    assert all(p.grad is None for p in tiny_gpt.parameters())


def test_preparing_changes_no_weight_and_prints_what_it_found(machine, tiny_gpt, capsys):
    before = {n: p.detach().clone() for n, p in tiny_gpt.named_parameters()}
    table = rules(OptimConfig(), TINY.d_model)
    optimizer = MuonAdamW(dict(tiny_gpt.named_parameters()), tiny_gpt.param_roles(), table, machine)
    ready = prepare(KernelConfig(), tiny_gpt, tiny_gpt, optimizer, machine, 128, 1000, None)
    assert ready.device_rows == 8 and not ready.compiled
    text = capsys.readouterr().out
    for word in ("cpu", "float32", "sdpa", "eager", "weights", "activations"):
        assert word in text
    assert all(torch.equal(p, before[n]) for n, p in tiny_gpt.named_parameters())


@pytest.mark.parametrize("compiled", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_takes_little_more_memory_than_it_stated_beforehand(base: Path, compiled):
    def run(script: str, *flags: str) -> None:
        command = [sys.executable, "-m", f"scripts.{script}", *flags]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr

    run("tok_train", "--dataset=embedded", "--num_shards=1", "--vocab_size=4096")
    shape = ("--depth=4", "--max_seq_len=256", "--total_batch_size=4096", "--eval_tokens=4096")
    run("base_train", *shape, "--num_iterations=6", f"--compile={compiled}")
    values = read_json(base / "report" / "base-model-training.json")["values"]
    mib = {k: float(v.removesuffix("MiB")) for k, v in values.items() if "emory" in k}
    grown = mib["Peak memory usage"] - mib["Memory after imports"]
    assert 0.5 * mib["Stated memory"] < grown <= 1.3 * mib["Stated memory"]
