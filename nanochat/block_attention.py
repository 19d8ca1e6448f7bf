"""
Attention in blocks of queries, for CPUs and a compiler.

    q (B, T, H, D), k and v (B, T, G, D), mask (B or 1, 1, T, T) -> attend_blocks -> (B, T, H, D)

A block of queries is multiplied with the keys that it may see as plain batched products, which run
near the machine's matrix rate; what lies between them is written so that torch.compile fuses it
into one pass over the scores. PyTorch's own CPU kernel takes 2.5 times as long, and 3 times with a
mask (measured: T 512, bfloat16, forward and backward, dev/LOG.md). Weights are kept for the
backward pass, T^2 / 2 numbers a head. Not compiled it is slower than PyTorch's.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

QUERIES = 128  # in a block


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window: int | None, scale: float
) -> Tensor:
    """
    Attention where `mask` (B or 1, 1, T, T) is True; it lies within the causal `window`.

    Shapes as in `attention.attend`. Every query must see a key, itself say.
    """
    B, T, H, D = q.shape
    G = k.size(2)
    grouped = q.view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4)  # (B, G, R, T, D)
    y = Blocks.apply(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, window, scale)
    return y.permute(0, 3, 1, 2, 4).reshape(B, T, H, D)  # type: ignore[union-attr]


def spans(T: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, first key, end of both) of each block."""
    for first in range(0, T, QUERIES):
        yield first, 0 if window is None else max(0, first - window), min(T, first + QUERIES)


class Blocks(torch.autograd.Function):
    """q (B, G, R, T, D) in groups of R heads that share k and v (B, G, T, D)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, window, scale: float):
        B, G, R, T, D = q.shape
        outputs, weights, sums = [], [], []
        for i, s, j in spans(T, window):
            shape = (B, G * R, j - i, j - s)
            queries, keys, values = flat(q[:, :, :, i:j]), flat(k[:, :, s:j]), flat(v[:, :, s:j])
            scores = torch.bmm(queries, keys.mT).view(shape).float() * scale
            scores = torch.where(mask[:, :, i:j, s:j], scores, -1e30)
            w = torch.exp(scores - scores.amax(-1, keepdim=True)).to(q.dtype)
            total = w.sum(-1, keepdim=True, dtype=torch.float32)
            y = torch.bmm(w.view(B * G, -1, j - s), values).view(B, G * R, j - i, D)
            outputs.append((y.float() / total).to(q.dtype))
            weights.append(w)
            sums.append(total)
        y = torch.cat(outputs, dim=2)
        ctx.save_for_backward(q, k, v, y, *weights, *sums)
        ctx.window, ctx.scale = window, scale
        return y.view(B, G, R, T, D)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k, v, y, *kept = ctx.saved_tensors
        B, G, R, T, D = q.shape
        grad = grad.reshape(B, G * R, T, D)
        d_q, d_k, d_v = [], [], []
        blocks = list(spans(T, ctx.window))
        for n, (i, s, j) in enumerate(blocks):
            w, total = kept[n], kept[len(blocks) + n]
            each = grad[:, :, i:j].float() / total
            along = (each * y[:, :, i:j].float()).sum(-1, keepdim=True)
            each = each.to(q.dtype).reshape(B * G, -1, D)
            d_v.append(torch.bmm(w.view(B * G, -1, j - s).mT, each).view(B, G, j - s, D))
            d_w = torch.bmm(each, flat(v[:, :, s:j]).mT).view(w.shape).float()
            d_scores = (w.float() * (d_w - along) * ctx.scale).to(q.dtype).view(B * G, -1, j - s)
            d_q.append(torch.bmm(d_scores, flat(k[:, :, s:j])).view(B, G, R, j - i, D))
            d_k.append(torch.bmm(d_scores.mT, flat(q[:, :, :, i:j])).view(B, G, j - s, D))
        return torch.cat(d_q, dim=3), added(d_k, blocks), added(d_v, blocks), None, None, None


def added(parts: list[Tensor], blocks: list[tuple[int, int, int]]) -> Tensor:
    """
    The sum of what each block adds to its keys, (B, G, T, D) of parts (B, G, end - first key, D).

    Taken key by key: of sums into slices the compiler makes nested conditions on every number.
    """
    ends = sorted({end for _, s, j in blocks for end in (s, j)})
    sums = []
    for a, b in pairwise(ends):
        first, *others = (
            x[:, :, a - s : b - s].float()
            for x, (_, s, j) in zip(parts, blocks, strict=True)
            if s <= a and b <= j
        )
        sums.append(sum(others, first).to(parts[0].dtype))
    return torch.cat(sums, dim=2)


def flat(x: Tensor) -> Tensor:
    """(B, G, ..., D) as a batch of matrices, (B * G, n, D)."""
    return x.reshape(x.size(0) * x.size(1), -1, x.size(-1))
