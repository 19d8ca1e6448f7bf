"""Chunked cross-entropy against PyTorch: weights, ignored targets, precision, extreme logits."""

import pytest
import torch
import torch.nn.functional as F

from nanochat import loss as loss_module
from nanochat.loss import IGNORE, SOFTCAP, chunked_cross_entropy, token_losses

V, C = 50, 12


@pytest.fixture
def problem(monkeypatch):
    """Hidden states, head and targets, with a chunk size that needs several chunks."""
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 16 * V)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, C, generator=generator, requires_grad=True)
    head = torch.randn(V, C, generator=generator, requires_grad=True)
    targets = torch.randint(V, (70,), generator=generator)
    return hidden, head, targets


def reference(hidden, head, targets):
    logits = SOFTCAP * torch.tanh(hidden @ head.T / SOFTCAP)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def test_weights_scale_loss_and_gradients(problem):
    hidden, head, targets = problem
    targets = targets.masked_fill(torch.arange(70) % 3 == 0, IGNORE)
    weights = torch.linspace(-2, 3, 70)
    want = (reference(hidden, head, targets) * weights).sum()
    wanted = torch.autograd.grad(want, (hidden, head))
    got = chunked_cross_entropy(hidden, head, targets, weights)[0]
    gotten = torch.autograd.grad(got, (hidden, head))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    for g, w in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradients_match_pytorch(problem, masked):
    hidden, head, targets = problem
    if masked:
        targets = targets.masked_fill(torch.arange(70) % 3 == 0, IGNORE)
    want = reference(hidden, head, targets).sum()
    wanted = torch.autograd.grad(want, (hidden, head))
    got = chunked_cross_entropy(hidden, head, targets)[0]
    gotten = torch.autograd.grad(got, (hidden, head))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for g, w in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_token_losses_match_pytorch(problem):
    hidden, head, targets = problem
    targets = targets.masked_fill(torch.arange(70) < 9, IGNORE)
    got = token_losses(hidden, head, targets)
    torch.testing.assert_close(got, reference(hidden, head, targets), rtol=1e-5, atol=1e-5)
    assert (got[:9] == 0).all()


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 0.02), (torch.float16, 0.002)])
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_gradients_are_accurate_in_half_precision(problem, dtype, most, size):
    hidden, head, targets = problem
    hidden = (hidden.detach() * size).requires_grad_()  # 0.01: all tokens are equally likely
    small = hidden.detach().to(dtype).requires_grad_()
    loss = chunked_cross_entropy(small, head, targets)[0]
    gotten = torch.autograd.grad(loss, (small, head))
    rounded = small.detach().float().requires_grad_()
    total = reference(rounded, head.to(dtype).float(), targets).sum()
    (wanted,) = torch.autograd.grad(total, rounded, retain_graph=True)
    assert (gotten[0].float() - wanted).norm() / wanted.norm() < most
    wanted = torch.autograd.grad(reference(rounded, head, targets).sum(), head)[0]
    assert (gotten[1] - wanted).norm() / wanted.norm() < most


def test_B1_batch_with_all_targets_ignored_has_zero_loss_and_gradients(problem):
    hidden, head, targets = problem
    loss = chunked_cross_entropy(hidden, head, torch.full_like(targets, IGNORE))[0]
    loss.backward()
    assert loss.item() == 0
    assert (hidden.grad == 0).all() and (head.grad == 0).all()


def test_extreme_logits_stay_finite(problem):
    hidden, head, targets = problem
    loss = chunked_cross_entropy(hidden * 1e4, head, targets)[0]
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(hidden.grad).all()


def test_fp8_loss_is_close_and_its_gradients_are_rounded(monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 32 * 64)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(96, 32, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(64, 32, generator=generator).requires_grad_()
    targets = torch.randint(64, (96,), generator=generator)
    targets[::5] = IGNORE
    results = []
    for fp8 in (False, True):
        loss = chunked_cross_entropy(hidden, head, targets, fp8=fp8)[0]
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, head))))
    for exact, rounded in zip(*results, strict=True):
        assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.1
    assert not results[1][1][::5].any()
