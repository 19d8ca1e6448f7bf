"""Attention kernels against a reference implementation."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanochat import attention
from nanochat.attention import attend, attend_blocks, attend_plain, causal_mask, make_mask


def loop_attention(q, k, v, window, scale):
    """Reference implementation: a Python loop over queries."""
    B, T, H, D = q.shape
    group = H // k.size(2)
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                first = 0 if window is None else max(0, i - window)
                keys = k[b, first : i + 1, h // group]
                weights = (keys @ q[b, i, h] * scale).softmax(0)
                out[b, i, h] = weights @ v[b, first : i + 1, h // group]
    return out


@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocks"])
@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_all_backends_match_reference(backend, window, groups):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 4, 8, generator=generator)
    k = torch.randn(2, 9, groups, 8, generator=generator)
    v = torch.randn(2, 9, groups, 8, generator=generator)
    got = attend(q, k, v, window, scale=0.7, backend=backend)
    torch.testing.assert_close(got, loop_attention(q, k, v, window, 0.7), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocks", "flex"])
@pytest.mark.parametrize("window", [None, 3])
def test_output_dtype_equals_input_dtype(backend, window, dtype, monkeypatch):
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(
        attention, "compiled_flex", partial(getattr, flex_attention)
    )  # eager on a CPU
    q = torch.randn(1, 16, 4, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    k = v = q[:, :, :2]
    assert attend(q, k, v, window, backend=backend).dtype == dtype


@pytest.mark.parametrize("T", [100, 128, 300])
@pytest.mark.parametrize("window", [None, 40, 200])
def test_blockwise_gradients_match_reference(T, window):
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(2, T, heads, 8, generator=generator) for heads in (4, 2, 2, 4)]
    (q, k, v), grad = (x.requires_grad_() for x in draw[:3]), draw[3]
    found, want = (
        torch.autograd.grad(attend(q, k, v, window, 0.7, backend), (q, k, v), grad)
        for backend in ("blocks", "plain")
    )
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_blockwise_attention_respects_segment_mask():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 150, 2, 8, generator=generator).unbind(0)
    segments = torch.tensor([[0] * 90 + [1] * 60, [0] * 140 + [1] * 10])
    same = segments[:, :, None] == segments[:, None, :]
    mask = (same & causal_mask(150, None, q.device))[:, None]
    got = attend_blocks(q, k, v, mask, None, 0.5)
    for row, cut in ((0, 90), (1, 140)):
        for part in (slice(0, cut), slice(cut, 150)):
            alone = attend_plain(*(x[row : row + 1, part] for x in (q, k, v)), None, 0.5)
            torch.testing.assert_close(got[row : row + 1, part], alone, rtol=1e-5, atol=1e-5)


def test_blockwise_attention_is_stable_for_large_scores():
    q = torch.full((1, 130, 1, 4), 1e3)
    assert attend(q, q, q, None, 1.0, "blocks").equal(q)
    assert attend(-q, q, q, None, 1.0, "blocks").equal(q)


def test_default_scale_is_inverse_sqrt_of_head_dim():
    q, k, v = torch.randn(3, 1, 5, 2, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v, scale=1 / math.sqrt(16)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cut", [None, 200])
def test_gpu_kernels_match_reference(backend, window, cut):
    q, k, v = torch.randn(3, 2, 512, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    segments = None if cut is None else (torch.arange(512, device="cuda") >= cut).expand(2, -1)
    masks = [make_mask(kind, q, window, segments) for kind in (backend, "plain")]
    got, want = (
        attend(q, k, v, window, backend=kind, mask=mask).float()
        for kind, mask in zip((backend, "plain"), masks, strict=True)
    )
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_flash_attention_3_is_the_installed_package_or_the_build_of_the_hub(monkeypatch):
    q, calls = torch.randn(1, 4, 2, 8), []

    def build(name):
        def flash_attn_func(q, k, v, **settings):
            calls.append((name, settings))
            return q, None

        return SimpleNamespace(flash_attn_func=flash_attn_func)

    def get_kernel(repository, version):
        return build(f"{repository} {version}")

    monkeypatch.setattr(attention, "fa3_function", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # not installed
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    attention.load_fa3(torch.device("cuda"))
    assert attend(q, q, q, 2, 0.7, "fa3") is q
    monkeypatch.setitem(sys.modules, "flash_attn_interface", build("from source"))
    attention.load_fa3(torch.device("cuda"))
    assert attend(q, q, q, None, 0.7, "fa3") is q
    settings = {"softmax_scale": 0.7, "causal": True}
    assert calls == [
        ("kernels-community/flash-attn3 1", settings | {"window_size": (2, 0)}),
        ("from source", settings | {"window_size": (-1, 0)}),
    ]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match="kernels"):
        attention.load_fa3(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(RuntimeError, match="needs a Hopper GPU"):
        attention.load_fa3(torch.device("cuda"))
