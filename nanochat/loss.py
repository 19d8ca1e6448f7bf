"""
Chunked cross-entropy of the LM head.

    hidden (..., C), head (V, C), targets (...) -> nats per token, or their sum and its gradients

The N x V logits are never materialized: each chunk of tokens computes its logits, loss and
gradients in one pass. Logits are soft-capped to +-SOFTCAP, which bounds every exponential, so no
running maximum is needed.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

IGNORE = -1  # target excluded from the loss
SOFTCAP = 15.0  # logits lie in (-15, 15)
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28, "mps": 1 << 25}  # logits in one chunk


class Trainable(Protocol):
    """Losses of a model, in nats; tokens and targets are (B, T). `loss` returns the sum."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


def cap(logits: Tensor) -> Tensor:
    """SOFTCAP * tanh(logits / SOFTCAP) in float32, any shape."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return r and exp(capped - SOFTCAP) in float32, any shape; capped logits are SOFTCAP * (1 - 2 r).

    exp2 is cheaper than exp, and the compiler recomputes it instead of storing it.
    """
    r = (1.0 + torch.exp2(logits.float() * (2.0 / math.log(2) / SOFTCAP))).reciprocal()
    return r, torch.exp(r * (-2.0 * SOFTCAP))


def log_total(logits: Tensor) -> Tensor:
    """Log-sum-exp of the capped logits: (n, V) -> (n, 1) in float32. Compiles into one pass."""
    return exponentials(logits)[1].sum(dim=1, keepdim=True).log() + SOFTCAP


def softmax_terms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    Softmax denominators and unnormalized gradients of the log-sum-exp of capped logits (n, V).

    Returns the row sums of exp(capped - SOFTCAP), (n, 1) in float32, and the summands times
    d capped / d logit = 4 r (1 - r), (n, V) in the logits' dtype. The division by the sums is left
    to the matmuls, so this compiles into one pass; float16 has too few exponents and divides here.
    """
    r, e = exponentials(logits)
    total, slope = e.sum(dim=1, keepdim=True), e * (4.0 * (r - r * r))
    return total, (slope / total if logits.dtype == torch.float16 else slope).to(logits.dtype)


def accumulate(total: Tensor, part: Tensor) -> None:
    """`total += part` across dtypes. When compiled, does not copy `part`."""
    total += part


class LossKernels(NamedTuple):
    """Functions over all logits or head weights, compiled or eager."""

    log_total: Callable[[Tensor], Tensor] = log_total
    softmax_terms: Callable[[Tensor], tuple[Tensor, Tensor]] = softmax_terms
    accumulate: Callable[[Tensor, Tensor], None] = accumulate


EAGER = LossKernels()


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Capped logit of each target, (n, 1) in float32; for IGNORE, the logit of token 0."""
    return cap(logits.gather(1, targets.clamp(min=0)[:, None]))


def chunk_loss(logits: Tensor, targets: Tensor, kernels: LossKernels) -> tuple[Tensor, ...]:
    """
    logits (n, V), targets (n,) -> nats (n,) in float32, gradients (n, V), unnormalized except in
    float16, and the factors (n, 1) that normalize their rows. Nats and factors are 0 for IGNORE.
    """
    counted = (targets != IGNORE)[:, None]
    total, slope = kernels.softmax_terms(logits)
    capped = target_logits(logits, targets)  # (n, 1)
    at_target = (torch.exp(capped - SOFTCAP) - total) * (1.0 - (capped / SOFTCAP) ** 2)
    divisor = total
    if slope.dtype == torch.float16:  # already divided
        at_target, divisor = at_target / total, torch.ones_like(total)
    here = torch.arange(len(slope), device=slope.device)
    slope[here, targets.clamp(min=0)] = at_target.squeeze(1).to(slope.dtype)
    nats = (total.log() + SOFTCAP - capped) * counted
    return nats.squeeze(1), slope, counted / divisor


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Sum of weighted nats, and the weighted nats of each target (no gradients). The forward pass
    also computes the gradients of the sum.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets, weights, kernels):
        weight = head.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        each = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), head):
            h = hidden[part]
            nats, slope, scale = chunk_loss(h @ weight.mT, targets[part], kernels)
            if weights is not None:
                nats, scale = nats * weights[part], scale * weights[part, None]
            total += nats.sum()
            each[part] = nats
            torch.mm(slope, weight, out=d_hidden[part]).mul_(scale)
            kernels.accumulate(d_head, slope.mT @ (h * scale).to(h.dtype))
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(each)
        return total, each

    @staticmethod
    def backward(ctx, grad: Tensor, _):  # type: ignore[override]
        d_hidden, d_head = ctx.saved_tensors
        d_hidden.mul_(grad.to(d_hidden.dtype))
        return d_hidden, d_head.mul_(grad), None, None, None


def chunked_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None, kernels: LossKernels
) -> tuple[Tensor, Tensor]:
    """
    Return the weighted sum of nats (a float32 scalar with gradients for `hidden` and `head`) and
    the weighted nats of each target ((...) float32, without gradients).

    hidden (..., C) in the compute dtype, head (V, C) float32, targets (...), IGNORE to exclude;
    weights (...) float32 of either sign, None = ones. The backward pass may run only once: it
    scales the stored gradients in place.
    """
    flat = None if weights is None else weights.flatten()
    total, nats = ChunkedCrossEntropy.apply(  # type: ignore[misc]
        hidden.flatten(0, -2), head, targets.flatten(), flat, kernels
    )
    return total, nats.view_as(targets)


@torch.no_grad()
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor, kernels: LossKernels) -> Tensor:
    """Nats of each target, (...) float32, 0 for IGNORE; no gradients. Shapes as above."""
    hidden, flat, weight = hidden.flatten(0, -2), targets.flatten(), head.to(hidden.dtype)
    nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in chunks(len(hidden), head):
        logits = hidden[part] @ weight.mT
        nats[part] = (kernels.log_total(logits) - target_logits(logits, flat[part])).squeeze(1)
    return (nats * (flat != IGNORE)).view_as(targets)


def chunks(num_tokens: int, head: Tensor) -> Iterator[slice]:
    """Slices of tokens whose logits fit in a CPU cache, or in a small part of a GPU's memory."""
    rows = max(16, CHUNK_ELEMENTS.get(head.device.type, 1 << 25) // len(head))
    for i in range(0, num_tokens, rows):
        yield slice(i, i + rows)
