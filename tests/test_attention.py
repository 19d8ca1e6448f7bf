"""Attention kernels against the formula in float64; FlashAttention 3; padded batches."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import flex_attention

from nanochat import attention
from nanochat.attention import attend, choose_backend, make_mask


def reference(q, k, v, window, scale, segments):
    """Attention with the full matrix of scores."""
    T, group = q.size(1), q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance <= (T if window is None else window))
    seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def check(device, dtype, backend, window, groups, segmented, most):
    """Compare outputs and gradients with the reference, relative to their largest norm."""
    generator, T = torch.Generator().manual_seed(0), 200
    shapes = [(2, T, heads, 16) for heads in (4, groups, groups, 4)]
    draws = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    segments = torch.arange(2 * T).view(2, T) // (110 if segmented else 2 * T)
    exact = [x.double().cpu().requires_grad_() for x in draws[:3]]
    # FlexAttention has no gradients on a CPU
    inputs = [x.requires_grad_(backend != "flex" or device == "cuda") for x in draws[:3]]
    mask = make_mask(backend, inputs[0], window, segments.to(device) if segmented else None)
    found = [attend(*inputs, mask, 0.7)]
    wanted = [reference(*exact, window, 0.7, segments)]
    if found[0].requires_grad:
        found += torch.autograd.grad(found[0], inputs, draws[3])
        wanted += torch.autograd.grad(wanted[0], exact, draws[3].double().cpu())
    most *= max(want.norm() for want in wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype and (got.cpu() - want).norm() < most


@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3, 150])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_backends_match_reference(backend, window, segmented, monkeypatch):
    monkeypatch.setattr(attention, "compiled_flex", partial(getattr, flex_attention))  # on a CPU
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # no tracing
    for groups in (1, 2, 4):
        check("cpu", torch.float32, backend, window, groups, segmented, 1e-5)
    check("cpu", torch.bfloat16, backend, window, 2, segmented, 0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_B13_gpu_kernels_match_reference(backend, window, segmented):
    check("cuda", torch.bfloat16, backend, window, 2, segmented, 0.02)


@pytest.mark.parametrize(("window", "sizes"), [(2, (2, 0)), (None, (-1, 0))])
def test_flash_attention_3_gets_scale_and_window(monkeypatch, window, sizes):
    q = torch.randn(1, 4, 2, 8)
    function = Mock(return_value=(q, None))
    package = SimpleNamespace(get_kernel=lambda **build: SimpleNamespace(flash_attn_func=function))
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(attention, "fa3_function", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    attention.load_fa3(torch.device("cuda"))
    assert attend(q, q, q, make_mask("fa3", q, window), 0.7) is q
    wanted = {"softmax_scale": 0.7, "causal": True, "window_size": sizes}
    assert function.call_args.kwargs == wanted


@pytest.mark.parametrize(
    "device, compiled, kernel",
    [("cpu", True, "sdpa"), ("mps", True, "sdpa"), ("cuda", True, "flex"), ("cuda", False, "sdpa")],
)
def test_device_and_compilation_decide_the_kernel(dist, device, compiled, kernel):
    there = replace(dist, device=torch.device(device))
    assert choose_backend(there, compiled) == kernel
