"""Chunked cross-entropy against PyTorch in float64; bits per byte."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from nanochat import loss as loss_module
from nanochat.common import UsageError
from nanochat.eval_bpb import bits_per_byte
from nanochat.loss import IGNORE, SOFTCAP, chunked_loss, cross_entropy, token_losses

V, C, N = 64, 32, 80


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 32 * V)


def problem(size=1.0, dtype=torch.float32):
    """Hidden states, head and targets, a third of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = (size * torch.randn(N, C, generator=generator)).to(dtype).requires_grad_()
    head = torch.randn(V, C, generator=generator).to(dtype).float().requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    return hidden, head, targets.masked_fill(torch.arange(N) % 3 == 0, IGNORE)


@pytest.mark.parametrize("weights", [None, torch.linspace(-2, 3, N)])
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])  # 0.01: all tokens are equally likely
@pytest.mark.parametrize(
    ("dtype", "fp8", "most"),
    [
        (torch.float32, False, 1e-5),
        (torch.float16, False, 2e-3),
        (torch.bfloat16, False, 2e-2),
        (torch.bfloat16, True, 0.15),
    ],
)
def test_loss_and_gradients_match_pytorch(dtype, fp8, most, size, weights):
    hidden, head, targets = problem(size, dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = SOFTCAP * torch.tanh(exact[0] @ exact[1].T / SOFTCAP)
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    weighted = nats if weights is None else nats * weights
    tensors = () if weights is None else (weights,)
    loss = chunked_loss(hidden, head, targets, cross_entropy, tensors, fp8=fp8)
    found = loss, *torch.autograd.grad(2 * loss, (hidden, head))
    wanted = weighted.sum(), *torch.autograd.grad(2 * weighted.sum(), exact)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).norm() < most * want.norm()
    assert not fp8 or (found[-1] - wanted[-1]).norm() > 1e-4 * wanted[-1].norm()
    assert (token_losses(hidden, head, targets) - nats).norm() < most * nats.norm()


def z_loss(logits, targets):
    return cross_entropy(logits, targets) + 0.1 * logits.logsumexp(1) ** 2


def label_smoothing(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


def ppo(logits, targets, advantages, old):
    ratio = (old - cross_entropy(logits, targets)).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def entropy_bonus(logits, targets, advantages):
    p = logits.softmax(1)
    return advantages * cross_entropy(logits, targets) + 0.1 * (p * p.log()).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loss", [z_loss, label_smoothing, ppo, entropy_bonus])
def test_any_function_of_logits_and_targets_is_a_loss(loss, compiled):
    """IGNORE is 0, in chunks as in one."""
    hidden, head, targets = problem()
    extra = torch.linspace(-2, 3, N), torch.linspace(2, 4, N)
    extra = extra[: len(inspect.signature(loss).parameters) - 2]
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = SOFTCAP * torch.tanh(exact[0] @ exact[1].T / SOFTCAP)
    counted = targets != IGNORE
    nats = loss(logits[counted], targets[counted], *(x[counted].double() for x in extra)).sum()
    found = chunked_loss(hidden, head, targets, loss, extra, compiled)
    for got, want in zip(
        (found, *torch.autograd.grad(found, (hidden, head))),
        (nats, *torch.autograd.grad(nats, exact)),
        strict=True,
    ):
        assert (got - want).norm() < 1e-5 * want.norm()


def test_B1_batch_with_all_targets_ignored_has_zero_loss_and_gradients():
    hidden, head, targets = problem()
    loss = chunked_loss(hidden, head, torch.full_like(targets, IGNORE))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not head.grad.any()


# ---- Bits per byte -------------------------------------------------------------------------------


def test_special_tokens_and_ignored_targets_are_excluded(dist):
    sizes = torch.tensor([0, 1, 2, 3, 4, 0, 6, 7]).numpy()  # tokens 0 and 5 are special
    batch = torch.tensor([[[1] * 6], [[1, 5, 7, IGNORE, 0, 2]]]).numpy()
    nats = torch.tensor([[1.0, 2.0, 3.0, 0.0, 4.0, 5.0]])
    found = bits_per_byte(lambda x, y: nats, [tuple(batch)], sizes, dist)
    assert (found.nats, found.bytes, found.tokens) == (9, 10, 3) and found.loss == 15 / 5
    with pytest.raises(UsageError, match="loss on 5 tokens is nan"):
        bits_per_byte(lambda x, y: nats * math.nan, [tuple(batch)], sizes, dist)
    with pytest.raises(UsageError, match="the text has no scorable token"):
        _ = bits_per_byte(lambda x, y: nats, [], sizes, dist).value
