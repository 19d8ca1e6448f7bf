"""
Cross-entropy of a language model head, in chunks.

    hidden (N, C), head (V, C), targets (N,) -> nats per token, or their sum with its gradients

The N x V logits never exist at once: a chunk of tokens is multiplied with the head, turned into
its loss and its gradients, and forgotten. Logits are capped at +-softcap, which also bounds every
exponential, so no running maximum is needed. Knows nothing of the model above the head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

IGNORE = -1  # a target that does not count
MAX_SOFTCAP = 40.0  # exp(-2 * 40) is still a normal float32
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27, "mps": 1 << 25}  # logits in one chunk


class Trainable(Protocol):
    """What training needs of a model: nats summed over the counted targets, (B, T) in."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


def cap(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap) in float32, any shape."""
    return softcap * torch.tanh(logits.float() / softcap)


def exponentials(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """
    r and exp(capped - softcap), both float32 of any shape, where capped = softcap - 2 softcap r.

    exp2 is the cheaper power, and one that the compiler does not store but repeats where needed.
    """
    r = (1.0 + torch.exp2(logits.float() * (2.0 / math.log(2) / softcap))).reciprocal()
    return r, torch.exp(r * (-2.0 * softcap))


def log_total(logits: Tensor, softcap: float) -> Tensor:
    """Log of the sum of exp(capped logits): (n, V) -> (n, 1) in float32. Compiles into one pass."""
    return exponentials(logits, softcap)[1].sum(dim=1, keepdim=True).log() + softcap


def total_and_slope(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """
    Each row's sum of exp(capped - softcap), (n, 1) in float32; and its terms times d capped /
    d logit, (n, V) in the logits' dtype, which divided by the sum are the softmax's slope.

    It is not divided here but in the rows of the products: so this compiles into one pass. The
    derivative of the cap is 4 r (1 - r).
    """
    r, e = exponentials(logits, softcap)
    return e.sum(dim=1, keepdim=True), (e * (4.0 * (r - r * r))).to(logits.dtype)


def accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, of another dtype. Compiled it needs no copy of the part."""
    total += part


class LossKernels(NamedTuple):
    """The functions that touch every logit or weight of the head, compiled or not."""

    log_total: Callable[[Tensor, float], Tensor] = log_total
    total_and_slope: Callable[[Tensor, float], tuple[Tensor, Tensor]] = total_and_slope
    accumulate: Callable[[Tensor, Tensor], None] = accumulate


EAGER = LossKernels()


def target_logits(logits: Tensor, targets: Tensor, softcap: float) -> Tensor:
    """The capped logit of each target, (n, 1) in float32; that of token 0 where it is IGNORE."""
    return cap(logits.gather(1, targets.clamp(min=0)[:, None]), softcap)


def chunk_loss(
    logits: Tensor, targets: Tensor, softcap: float, kernels: LossKernels = EAGER
) -> tuple[Tensor, Tensor, Tensor]:
    """
    logits (n, V), targets (n,) -> nats (n,) float32, the slope (n, V) of each times a factor of its
    row, and what undoes that factor, (n, 1). Where the target is IGNORE nats and the last are 0.
    """
    counted = (targets != IGNORE)[:, None]
    total, slope = kernels.total_and_slope(logits, softcap)
    capped = target_logits(logits, targets, softcap)  # (n, 1)
    at_target = (torch.exp(capped - softcap) - total) * (1.0 - (capped / softcap) ** 2)
    here = torch.arange(len(slope), device=slope.device)
    slope[here, targets.clamp(min=0)] = at_target.squeeze(1).to(slope.dtype)
    nats = (total.log() + softcap - capped) * counted
    return nats.squeeze(1), slope, counted / total


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Sum of weighted nats over the counted targets, and these nats one by one, without gradients;
    those of the sum are made in the same pass.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets, softcap: float, weights, kernels):
        weight = head.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        each = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for i in range(0, len(hidden), rows := chunk_rows(len(head), hidden.device)):
            part = slice(i, i + rows)
            h = hidden[part]
            nats, slope, scale = chunk_loss(h @ weight.mT, targets[part], softcap, kernels)
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
        return d_hidden, d_head.mul_(grad), None, None, None, None


def summed_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    softcap: float,
    weights: Tensor | None = None,
    kernels: LossKernels = EAGER,
) -> Tensor:
    """
    Nats summed over counted targets, a float32 scalar with gradients to `hidden` and `head`.

    hidden (N, C) in the compute dtype, head (V, C) float32, targets (N,) with IGNORE where a
    target does not count; weights (N,) float32 of either sign, None for ones. The backward pass may
    run once: it scales the stored gradients in place.
    """
    return loss_and_nats(hidden, head, targets, softcap, weights, kernels)[0]


def loss_and_nats(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    softcap: float,
    weights: Tensor | None = None,
    kernels: LossKernels = EAGER,
) -> tuple[Tensor, Tensor]:
    """`summed_loss`, and what each target adds to it, (N,) float32 without gradients."""
    return ChunkedCrossEntropy.apply(hidden, head, targets, softcap, weights, kernels)  # type: ignore


@torch.no_grad()
def token_losses(
    hidden: Tensor, head: Tensor, targets: Tensor, softcap: float, kernels: LossKernels = EAGER
) -> Tensor:
    """Nats of every target, (N,) float32, 0 where ignored; no gradients. Shapes as above."""
    weight = head.to(hidden.dtype)
    rows = chunk_rows(len(head), hidden.device)
    nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for i in range(0, len(hidden), rows):
        logits = hidden[i : i + rows] @ weight.mT
        capped = target_logits(logits, targets[i : i + rows], softcap)
        nats[i : i + rows] = (kernels.log_total(logits, softcap) - capped).squeeze(1)
    return nats * (targets != IGNORE)


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many tokens share one chunk: its logits fill a cache, or a small part of a GPU."""
    return max(16, CHUNK_ELEMENTS.get(device.type, 1 << 25) // vocab_size)
