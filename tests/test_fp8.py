"""Matmuls in fp8, computed by the same kernel call on a CPU."""

import pytest
import torch

from nanochat.fp8 import E4M3, fp8_linear
from nanochat.gpt import GPT, Linear, inference_copy
from tests.conftest import TINY, lively

N, K, M = 64, 96, 80
TOKENS = torch.arange(64).view(4, 16)


@pytest.fixture(autouse=True)
def memory_order_of_a_gpu(monkeypatch):
    """Reject operands that a CPU accepts and a GPU does not."""
    multiply = torch._scaled_mm

    def checked(a, b, **settings):
        assert a.is_contiguous() and b.t().is_contiguous()
        assert E4M3 in (a.dtype, b.dtype)
        return multiply(a, b, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", checked)


def operands(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(N, K, generator=generator)).bfloat16().requires_grad_()
    return x, torch.randn(M, K, generator=generator).requires_grad_()


def relative_error(got, want):
    return float((got.detach().double() - want).norm() / want.norm())


def model_in(fp8):
    """A model whose layers and head are in fp8; gates stay, as fp8 needs multiples of 16."""
    model = GPT(TINY, torch.bfloat16)
    model.init_weights(torch.Generator().manual_seed(0))
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and "gate" not in name:
            layer.fp8 = fp8
    return lively(model)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_results_and_gradients_differ_by_no_more_than_rounding(scale):
    inputs = operands(scale)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = torch.randn(N, M, generator=torch.Generator().manual_seed(1)).bfloat16()
    y, product = fp8_linear(*inputs), exact[0] @ exact[1].T
    found = y, *torch.autograd.grad(y, inputs, grad)
    wanted = product, *torch.autograd.grad(product, exact, grad.double())
    assert [x.dtype for x in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    # each operand adds at most the rounding of one value, 2^-4 (e4m3) or 2^-3 (e5m2)
    for got, want, most in zip(found, wanted, (2**-4, 2**-3, 2**-3), strict=True):
        assert 0.01 < relative_error(got, want) < most


def test_zeros_give_zeros_and_non_finite_values_stay_visible():
    x, weight = operands()
    assert not fp8_linear(torch.zeros_like(x), weight).any()
    for bad in (float("inf"), float("nan")):
        assert not fp8_linear(x + bad, weight).isfinite().all()


def test_model_trains_in_fp8_and_infers_without():
    exact, rounded = model_in(fp8=False), model_in(fp8=True)
    for model in (exact, rounded):
        model.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
    for p, q in zip(exact.blocks.parameters(), rounded.blocks.parameters(), strict=True):
        assert 0 < relative_error(q.grad, p.grad) < 0.2
    assert torch.equal(inference_copy(rounded)(TOKENS), exact(TOKENS))
    with torch.no_grad():
        assert torch.equal(rounded(TOKENS), exact(TOKENS))
