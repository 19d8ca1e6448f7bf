"""
Chunked cross-entropy of the LM head.

    hidden (..., C), head (V, C), targets (...) -> nats per token, or their sum and its gradients

The N x V logits are never materialized: each chunk of tokens computes its logits, loss and
gradients in one pass. Logits are soft-capped to +-SOFTCAP, which bounds the exponentials to be
summed, so no running maximum is needed.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nanochat.common import IGNORE
from nanochat.fp8 import E4M3, E5M2, multiply, quantize, transpose

SOFTCAP = 15.0  # logits lie in (-15, 15)
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}  # logits in one chunk


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


# ---- Passes over all logits or head weights, compiled or eager -----------------------------------


def log_total(logits: Tensor) -> Tensor:
    """Log-sum-exp of the capped logits: (n, V) -> (n, 1) in float32."""
    return exponentials(logits)[1].sum(dim=1, keepdim=True).log() + SOFTCAP


def softmax_terms(logits: Tensor, divide: bool) -> tuple[Tensor, Tensor]:
    """
    Softmax denominators and gradients of the log-sum-exp of capped logits (n, V).

    Returns the row sums of exp(capped - SOFTCAP), (n, 1) in float32, and the summands times
    d capped / d logit = 4 r (1 - r), (n, V) in the logits' dtype. Unless `divide` is set, the
    division by the sums is left to the matmuls, so that this compiles into one pass.
    """
    r, e = exponentials(logits)
    total, slope = e.sum(dim=1, keepdim=True), e * (4.0 * (r - r * r))
    return total, (slope / total if divide else slope).to(logits.dtype)


@lru_cache
def compiled_version(function: Callable) -> Callable:
    """`function`, compiled by torch.compile at its first call."""
    return torch.compile(function, dynamic=False)


def run_compiled(function: Callable, logits: Tensor, *args: Any) -> Any:
    """
    Run a function of logits (n, V) with `compiled_version`; on a CPU, compiled once for any n > 1.
    """
    if logits.device.type == "cpu":
        torch._dynamo.maybe_mark_dynamic(logits, 0)
    return compiled_version(function)(logits, *args)


# ---- Loss and gradients --------------------------------------------------------------------------


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Capped logit of each target, (n, 1) in float32; for IGNORE, the logit of token 0."""
    return cap(logits.gather(1, targets.clamp(min=0)[:, None]))


def chunk_loss(
    logits: Tensor, targets: Tensor, compiled: bool, divide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """
    logits (n, V), targets (n,) -> nats (n,) in float32, gradients (n, V), unnormalized unless
    `divide`, and the factors (n, 1) that normalize their rows. Nats and factors are 0 for IGNORE.
    """
    counted = (targets != IGNORE)[:, None]
    terms = (logits, divide)
    total, slope = run_compiled(softmax_terms, *terms) if compiled else softmax_terms(*terms)
    capped = target_logits(logits, targets)  # (n, 1)
    at_target = (torch.exp(capped - SOFTCAP) - total) * (1.0 - (capped / SOFTCAP) ** 2)
    divisor = torch.ones_like(total) if divide else total
    here = torch.arange(len(slope), device=slope.device)
    slope[here, targets.clamp(min=0)] = (at_target * divisor / total).squeeze(1).to(slope.dtype)
    nats = (total.log() + SOFTCAP - capped) * counted
    return nats.squeeze(1), slope, counted / divisor


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Sum of weighted nats. The forward pass also computes its gradients.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets, weights, compiled, fp8):
        weight, dtype = head.to(hidden.dtype), hidden.dtype
        scaled = transposed = None
        if fp8:
            scaled = quantize(weight, E4M3)
            transposed = transpose(scaled)
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in chunks(len(hidden), head):
            h = hidden[part]
            logits = multiply(quantize(h, E4M3), scaled, dtype, True) if scaled else h @ weight.mT
            # float16 and fp8 have too few exponents for unnormalized gradients
            divide = fp8 or dtype == torch.float16
            nats, slope, scale = chunk_loss(logits, targets[part], compiled, divide)
            if weights is not None:
                nats, scale = nats * weights[part], scale * weights[part, None]
            total += nats.sum()
            if transposed:
                slope = quantize(slope * scale, E5M2)
                d_hidden[part] = multiply(slope, transposed, dtype)
                d_head += multiply(transpose(slope), quantize(h.mT, E4M3), dtype)
            else:
                torch.mm(slope, weight, out=d_hidden[part]).mul_(scale)
                d_head += slope.mT @ (h * scale).to(h.dtype)
        ctx.save_for_backward(d_hidden, d_head)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        d_hidden, d_head = ctx.saved_tensors
        d_hidden.mul_(grad.to(d_hidden.dtype))
        return d_hidden, d_head.mul_(grad), None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    compiled: bool = False,
    fp8: bool = False,
) -> Tensor:
    """
    Return the weighted sum of nats, a float32 scalar with gradients for `hidden` and `head`.

    hidden (..., C) in the compute dtype, head (V, C) float32, targets (...), IGNORE to exclude;
    weights (...) float32 of either sign, None = ones. fp8: all matmuls are in fp8. The backward
    pass may run only once: it scales the stored gradients in place.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    weights = None if weights is None else weights.flatten()
    if (counted := skip_ignored(targets)) is not None and not fp8:
        hidden, targets = hidden[counted], targets[counted]
        weights = None if weights is None else weights[counted]
    return ChunkedCrossEntropy.apply(hidden, head, targets, weights, compiled, fp8)  # type: ignore


@torch.no_grad()
def token_losses(hidden: Tensor, head: Tensor, targets: Tensor, compiled: bool = False) -> Tensor:
    """Nats of each target, (...) float32, 0 for IGNORE; no gradients. Shapes as above."""
    hidden, flat, weight = hidden.flatten(0, -2), targets.flatten(), head.to(hidden.dtype)
    if (counted := skip_ignored(flat)) is not None:
        found = torch.zeros_like(flat, dtype=torch.float32)
        found[counted] = token_losses(hidden[counted], head, flat[counted], compiled)
        return found.view_as(targets)
    nats = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in chunks(len(hidden), head):
        logits = hidden[part] @ weight.mT
        total = run_compiled(log_total, logits) if compiled else log_total(logits)
        nats[part] = (total - target_logits(logits, flat[part])).squeeze(1)
    return (nats * (flat != IGNORE)).view_as(targets)


def skip_ignored(targets: Tensor) -> Tensor | None:
    """
    Indices of the targets (n,) that are not IGNORE, if some are and it pays to leave these out: on
    a CPU. On a GPU, their number would have to be waited for.
    """
    counted = (targets != IGNORE).nonzero().squeeze(1) if targets.device.type == "cpu" else targets
    return None if len(counted) == len(targets) else counted


def chunks(num_tokens: int, head: Tensor) -> Iterator[slice]:
    """
    Slices of tokens whose logits fit in a CPU cache, or in a small part of a GPU's memory: a
    multiple of 16, as fp8 needs it.
    """
    rows = max(1, CHUNK_ELEMENTS.get(head.device.type, 1 << 25) // len(head) // 16) * 16
    for i in range(0, num_tokens, rows):
        yield slice(i, i + rows)
