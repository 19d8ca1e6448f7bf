"""Kernels are trusted after they were run, and left out with a reason."""

import pytest
import torch

from nanochat import attention, kernels
from nanochat.gpt import build_model, for_inference
from nanochat.kernels import KernelConfig, choose_attention, choose_compile, probe_attention
from tests.conftest import TINY

BROKEN = {
    "raises": lambda q, k, v, w, s: (_ for _ in ()).throw(RuntimeError("no kernel image")),
    "wrong": lambda q, k, v, w, s: attention.attend_plain(q, k, v, w, s) + 1.0,
    "not causal": lambda q, k, v, w, s: (
        v.float().mean(1, True).expand(-1, v.size(1), q.size(2), -1)
    ),
    "another dtype": lambda q, k, v, w, s: attention.attend_plain(q, k, v, w, s).double(),
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


def test_a_compiled_model_attends_in_blocks_on_a_cpu(machine):
    assert choose_attention(KernelConfig(), TINY, machine, compiled=True) == "blocks"
    assert choose_attention(KernelConfig(), TINY, machine) == "sdpa"


def test_blocks_change_nothing_but_rounding_and_leave_the_engine_its_kernel(machine):
    models = [build_model(TINY, machine.device, machine.dtype, 0) for _ in range(2)]
    tokens = torch.randint(64, (3, TINY.max_seq_len), generator=torch.Generator().manual_seed(0))
    segments = (tokens % 16 == 0).cumsum(1)
    for block in models[1].blocks:
        torch.nn.init.normal_(block.attention.out.weight, std=0.1, generator=seeded())
        block.attention.backend = "blocks"
    for block in models[0].blocks:
        torch.nn.init.normal_(block.attention.out.weight, std=0.1, generator=seeded())
    for own in (None, segments):
        ours, theirs = (model.token_losses(tokens, tokens, own) for model in models)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert for_inference(models[1]).blocks[0].attention.backend == "sdpa"


def seeded():
    return torch.Generator().manual_seed(1)


def test_compiling_is_left_out_where_it_does_not_pay(machine):
    assert not choose_compile(KernelConfig(), machine, train_seconds=5)
    assert choose_compile(KernelConfig(compile=True), machine, train_seconds=5)
    assert not choose_compile(KernelConfig(compile=False), machine, train_seconds=1e9)


def test_compiling_is_left_out_where_it_does_not_work(machine, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels.torch, "compile", broken)
    assert not choose_compile(KernelConfig(), machine, train_seconds=1e9)
    assert "no compiler" in capsys.readouterr().out


def test_B13_where_no_fast_kernel_works_the_plain_one_does_and_that_is_said(
    machine, monkeypatch, capsys
):
    monkeypatch.setattr(attention, "attend_sdpa", BROKEN["wrong"])
    assert choose_attention(KernelConfig(), TINY, machine) == "plain"
    assert "sdpa left out: differs from the definition" in capsys.readouterr().out
