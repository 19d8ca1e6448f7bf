"""Choice of kernels: a broken one is skipped, and fp8 is rejected where it does not work."""

import pytest
import torch

from nanochat import attention
from nanochat.common import UsageError
from nanochat.gpt import Linear
from nanochat.preflight import KernelConfig, choose_attention, choose_compile, enable_fp8
from tests.conftest import TINY


@pytest.mark.parametrize("fault", ["wrong values", "wrong gradients", "ignores masks", ""])
def test_B13_broken_kernel_fails_its_probe(fault, machine, monkeypatch, capsys):
    def attend(q, k, v, mask, scale):
        mask = None if fault == "ignores masks" else mask
        slope = 0.2 * torch.tensor([[0.0], [1.0]]) * (fault == "wrong gradients")  # of one head
        y = attention.attend_plain(q, k + slope * (k - k.detach()), v, None, scale, mask)
        return y + (fault == "wrong values")

    monkeypatch.setattr(attention, "attend_sdpa", attend)
    assert choose_attention(TINY, machine) == ("plain" if fault else "sdpa")
    assert ("skipping attention kernel sdpa: " in capsys.readouterr().out) == bool(fault)


def test_compilation_must_pay_on_a_cpu(machine):
    assert not choose_compile(KernelConfig(), machine, train_seconds=5)
    assert choose_compile(KernelConfig(compile=True), machine, train_seconds=5)
    assert choose_attention(TINY, machine, compiled=True) == "blocks"


def test_layers_and_head_are_in_fp8_where_it_works(tiny_gpt, machine, monkeypatch):
    def fails(*args, **settings):
        raise RuntimeError("needs compute capability 8.9")

    linear = {n: layer for n, layer in tiny_gpt.named_modules() if isinstance(layer, Linear)}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", fails)
        with pytest.raises(UsageError, match="does not work on cpu: needs compute capability 8.9"):
            enable_fp8(tiny_gpt, machine)
    assert not any(layer.fp8 for layer in linear.values())
    enable_fp8(tiny_gpt, machine)
    assert all(layer.fp8 is ("gate" not in name) for name, layer in linear.items())
