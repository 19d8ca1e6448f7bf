"""
The loss, and its gradients with respect to hidden states and LM head.

    function of logits and targets -> chunk by chunk, on hidden (..., C), head (V, C) -> summed nats

A loss is a plain function (logits, targets, *tensors) -> nats of each token, such as
`cross_entropy`; autograd differentiates it. The N x V logits are never materialized: each chunk of
tokens computes its logits, loss and gradients in the forward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nanochat.common import IGNORE
from nanochat.fp8 import E4M3, E5M2, multiply, quantize, transpose

SOFTCAP = 15.0  # logits lie in (-15, 15)
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}  # logits in one chunk

Loss = Callable[..., Tensor]
"""
Logits (n, V) in float32, soft cap included, targets (n,) and further tensors (n,) -> nats (n,). On
a GPU it also sees positions without a target, as target 0, whose losses are then left out.
"""


def cap(logits: Tensor) -> Tensor:
    """
    SOFTCAP * tanh(logits / SOFTCAP) in float32, any shape. By exp2, which is cheaper than tanh: the
    compiler recomputes it in each pass instead of storing it.
    """
    r = (1.0 + torch.exp2(logits.float() * (2.0 / math.log(2) / SOFTCAP))).reciprocal()
    return SOFTCAP - 2.0 * SOFTCAP * r


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """
    Nats of each target, times its weight; a `Loss`. The cap bounds the logits, so exponentials are
    summed without a running maximum, one pass less than `F.cross_entropy`.
    """
    total = torch.exp(logits - SOFTCAP).sum(dim=1).log() + SOFTCAP
    # not gathered: the gradient of that would be another (n, V)
    at_target = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    nats = total - torch.where(at_target, logits, 0.0).sum(dim=1)
    return nats if weights is None else weights * nats


# ---- One chunk -----------------------------------------------------------------------------------


def chunk_losses(loss: Loss, logits: Tensor, targets: Tensor, *tensors: Tensor) -> Tensor:
    """Losses (n,) of the uncapped logits (n, V); 0 for IGNORE."""
    losses = loss(cap(logits), targets.clamp(min=0), *tensors)
    return losses.masked_fill(targets == IGNORE, 0.0)


def chunk_gradients(
    loss: Loss, logits: Tensor, targets: Tensor, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the summed losses with respect to the logits, in their dtype, and the sum."""

    def total(logits: Tensor) -> Tensor:
        return chunk_losses(loss, logits, targets, *tensors).sum()

    if torch.compiler.is_compiling():  # what the compiler can trace; it imports torch.compile
        return torch.func.grad_and_value(total)(logits)
    with torch.enable_grad():
        nats = total(logits := logits.detach().requires_grad_())
    return torch.autograd.grad(nats, logits)[0], nats.detach()


@lru_cache
def compiled_version(function: Callable) -> Callable:
    """`function`, compiled by torch.compile at its first call."""
    return torch.compile(function, dynamic=False)


def run_compiled(function: Callable, loss: Loss, *tensors: Tensor) -> Any:
    """
    Run a function of a loss and tensors (n, ...) with `compiled_version`; on a CPU, compiled once
    for any n > 1.
    """
    for x in tensors:
        if x.device.type == "cpu":
            torch._dynamo.maybe_mark_dynamic(x, 0)
    return compiled_version(function)(loss, *tensors)


# ---- All chunks ----------------------------------------------------------------------------------


class ChunkedLoss(torch.autograd.Function):
    """Sum of the losses. The forward pass also computes its gradients."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, loss: Loss, compiled, fp8, *tensors: Tensor):
        weight, dtype = head.to(hidden.dtype), hidden.dtype
        scaled = transposed = None
        if fp8:
            scaled = quantize(weight, E4M3)
            transposed = transpose(scaled)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), head, compiled):
            h = hidden[part]
            logits = multiply(quantize(h, E4M3), scaled, dtype, True) if scaled else h @ weight.mT
            args = loss, logits, *(x[part] for x in tensors)
            found = run_compiled(chunk_gradients, *args) if compiled else chunk_gradients(*args)
            slope, nats = found
            total += nats
            if transposed:
                slope = quantize(slope, E5M2)
                d_hidden[part] = multiply(slope, transposed, dtype)
                d_head += multiply(transpose(slope), quantize(h.mT, E4M3), dtype)
            else:
                torch.mm(slope, weight, out=d_hidden[part])
                d_head += slope.mT @ h
        ctx.save_for_backward(d_hidden, d_head)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        d_hidden, d_head = ctx.saved_tensors
        d_hidden.mul_(grad.to(d_hidden.dtype))
        return d_hidden, d_head.mul_(grad), *[None] * (len(ctx.needs_input_grad) - 2)


def chunked_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    loss: Loss = cross_entropy,
    tensors: Sequence[Tensor] = (),
    compiled: bool = False,
    fp8: bool = False,
) -> Tensor:
    """
    Return the sum of a loss over the targets, a float32 scalar with gradients for `hidden` and
    `head`.

    hidden (..., C) in the compute dtype, head (V, C) float32, targets (...), IGNORE to exclude;
    tensors (...) are further arguments of the loss. fp8: all matmuls are in fp8. The backward pass
    may run only once: it scales the stored gradients in place.
    """
    hidden, flat = hidden.flatten(0, -2), [targets.flatten(), *(x.flatten() for x in tensors)]
    if (counted := skip_ignored(flat[0])) is not None and not fp8:
        hidden, flat = hidden[counted], [x[counted] for x in flat]
    return ChunkedLoss.apply(hidden, head, loss, compiled, fp8, *flat)  # type: ignore


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    compiled: bool = False,
    loss: Loss = cross_entropy,
) -> Tensor:
    """A loss of each target, (...) float32, 0 for IGNORE; no gradients. Shapes as above."""
    hidden, flat, weight = hidden.flatten(0, -2), targets.flatten(), head.to(hidden.dtype)
    if (counted := skip_ignored(flat)) is not None:
        found = torch.zeros_like(flat, dtype=torch.float32)
        found[counted] = token_losses(hidden[counted], head, flat[counted], compiled, loss)
        return found.view_as(targets)
    nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in chunks(len(hidden), head, compiled):
        args = loss, hidden[part] @ weight.mT, flat[part]
        nats[part] = run_compiled(chunk_losses, *args) if compiled else chunk_losses(*args)
    return nats.view_as(targets)


def skip_ignored(targets: Tensor) -> Tensor | None:
    """
    Indices of the targets (n,) that are not IGNORE, if some are and it pays to leave these out: on
    a CPU. On a GPU, their number would have to be waited for.
    """
    counted = (targets != IGNORE).nonzero().squeeze(1) if targets.device.type == "cpu" else targets
    return None if len(counted) == len(targets) else counted


def chunks(num_tokens: int, head: Tensor, compiled: bool) -> Iterator[slice]:
    """
    Slices of tokens whose logits fit in a CPU cache, or in a small part of a GPU's memory, where
    several copies of them exist if they are not compiled: a multiple of 16, as fp8 needs it.
    """
    kind = head.device.type
    most = CHUNK_ELEMENTS.get(kind, 1 << 25) // (4 if kind == "cuda" and not compiled else 1)
    rows = max(1, most // len(head) // 16) * 16
    for i in range(0, num_tokens, rows):
        yield slice(i, i + rows)
