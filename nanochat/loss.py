"""
Cross-entropy of a language model head, in chunks.

    hidden (..., C), head (V, C), targets (...) -> nats per token, or their sum with its gradients

The N x V logits never exist at once: a chunk of tokens is multiplied with the head, turned into
its loss and its gradients, and forgotten. Logits are capped at +-softcap, which also bounds every
exponential, so no running maximum is needed.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

IGNORE = -1  # a target that does not count
SOFTCAP = 15.0  # logits lie in (-15, 15)
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27, "mps": 1 << 25}  # logits in one chunk


class Trainable(Protocol):
    """What training needs of a model: nats summed over the counted targets, (B, T) in."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...
    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


def cap(logits: Tensor) -> Tensor:
    """SOFTCAP * tanh(logits / SOFTCAP) in float32, any shape."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    r and exp(capped - SOFTCAP), both float32 of any shape, where capped = SOFTCAP - 2 SOFTCAP r.

    exp2 is the cheaper power, and one that the compiler does not store but repeats where needed.
    """
    r = (1.0 + torch.exp2(logits.float() * (2.0 / math.log(2) / SOFTCAP))).reciprocal()
    return r, torch.exp(r * (-2.0 * SOFTCAP))


def log_total(logits: Tensor) -> Tensor:
    """Log of the sum of exp(capped logits): (n, V) -> (n, 1) in float32. Compiles into one pass."""
    return exponentials(logits)[1].sum(dim=1, keepdim=True).log() + SOFTCAP


def total_and_slope(logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    Each row's sum of exp(capped - SOFTCAP), (n, 1) in float32; and its terms times d capped /
    d logit, (n, V) in the logits' dtype, which divided by the sum are the softmax's slope.

    It is not divided here but in the rows of the matmuls: so this compiles into one pass. The
    derivative of the cap is 4 r (1 - r).
    """
    r, e = exponentials(logits)
    return e.sum(dim=1, keepdim=True), (e * (4.0 * (r - r * r))).to(logits.dtype)


def accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, of another dtype. Compiled it needs no copy of the part."""
    total += part


class LossKernels(NamedTuple):
    """The functions that touch every logit or weight of the head, compiled or not."""

    log_total: Callable[[Tensor], Tensor] = log_total
    total_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]] = total_and_slope
    accumulate: Callable[[Tensor, Tensor], None] = accumulate


EAGER = LossKernels()


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The capped logit of each target, (n, 1) in float32; that of token 0 where it is IGNORE."""
    return cap(logits.gather(1, targets.clamp(min=0)[:, None]))


def chunk_loss(logits: Tensor, targets: Tensor, kernels: LossKernels) -> tuple[Tensor, ...]:
    """
    logits (n, V), targets (n,) -> nats (n,) float32, the slope (n, V) of each times a factor of its
    row, and what undoes that factor, (n, 1). Where the target is IGNORE nats and the last are 0.
    """
    counted = (targets != IGNORE)[:, None]
    total, slope = kernels.total_and_slope(logits)
    capped = target_logits(logits, targets)  # (n, 1)
    at_target = (torch.exp(capped - SOFTCAP) - total) * (1.0 - (capped / SOFTCAP) ** 2)
    here = torch.arange(len(slope), device=slope.device)
    slope[here, targets.clamp(min=0)] = at_target.squeeze(1).to(slope.dtype)
    nats = (total.log() + SOFTCAP - capped) * counted
    return nats.squeeze(1), slope, counted / total


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Sum of weighted nats over the counted targets, and these nats one by one, without gradients;
    those of the sum are made in the same pass.
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
    Nats summed over counted targets, a float32 scalar with gradients to `hidden` and `head`; and
    what each target adds to it, (...) float32 without gradients.

    hidden (..., C) in the compute dtype, head (V, C) float32, targets (...) with IGNORE where a
    target does not count; weights (...) float32 of either sign, None for ones. The backward pass
    may run once: it scales the stored gradients in place.
    """
    flat = None if weights is None else weights.flatten()
    total, nats = ChunkedCrossEntropy.apply(  # type: ignore[misc]
        hidden.flatten(0, -2), head, targets.flatten(), flat, kernels
    )
    return total, nats.view_as(targets)


@torch.no_grad()
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor, kernels: LossKernels) -> Tensor:
    """Nats of every target, (...) float32, 0 where ignored; no gradients. Shapes as above."""
    hidden, flat, weight = hidden.flatten(0, -2), targets.flatten(), head.to(hidden.dtype)
    nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in chunks(len(hidden), head):
        logits = hidden[part] @ weight.mT
        nats[part] = (kernels.log_total(logits) - target_logits(logits, flat[part])).squeeze(1)
    return (nats * (flat != IGNORE)).view_as(targets)


def chunks(num_tokens: int, head: Tensor) -> Iterator[slice]:
    """The tokens in chunks whose logits fill a cache, or a small part of a GPU."""
    rows = max(16, CHUNK_ELEMENTS.get(head.device.type, 1 << 25) // len(head))
    for i in range(0, num_tokens, rows):
        yield slice(i, i + rows)
