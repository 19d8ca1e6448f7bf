"""
Attention: one function over the kernels a machine has.

    q (B, T, H, D), k and v (B, T, G, D) -> attend(...) -> (B, T, H, D)

Every backend computes the same causal, optionally windowed, grouped-query attention; the plain
one in `attend_plain` is the oracle of the tests. Which backend runs is decided once, by
`nanochat/preflight.py`, and handed in; nothing here looks for hardware.
"""

import math
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.block_attention import attend_blocks

Backend = Literal["sdpa", "blocks", "flex", "fa3", "plain"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    scale: float | None = None,
    backend: Backend = "sdpa",
    mask: Any = None,
) -> Tensor:
    """
    Causal attention. A query sees itself and at most `window` earlier tokens (None = all).

    q (B, T, H, D); k, v (B, T, G, D) with G dividing H. `scale` multiplies the scores, by
    default D^-0.5. `mask`: what `shared_mask` returned for this shape, so that layers share it; or
    (B, 1, T, T) bool within the causal window, True where a query sees a key. Returns (B, T, H, D)
    in the dtype of q. Raises ValueError for an unknown backend.
    """
    if scale is None:
        scale = float(q.size(-1) ** -0.5)
    if window is not None and window >= q.size(1) - 1:
        window = None
    if mask is None:
        mask = shared_mask(backend, q.size(1), window, q.device)
    if backend == "blocks":
        return attend_blocks(q, k, v, mask, window, scale)
    if backend == "plain":
        return attend_plain(q, k, v, window, scale, mask)
    if backend == "fa3" and mask is None:
        return attend_fa3(q, k, v, window, scale)
    if backend == "flex" and not isinstance(mask, Tensor):
        return attend_flex(q, k, v, mask, scale)
    if backend in ("sdpa", "fa3", "flex"):
        return attend_sdpa(q, k, v, mask, scale)
    raise ValueError(f"attention backend {backend!r} is not one of sdpa, blocks, flex, fa3, plain")


def shared_mask(backend: Backend, T: int, window: int | None, device: torch.device) -> Any:
    """
    The causal mask of rows of T tokens as `backend` takes it, None where it takes `window` alone.
    A model makes it once for all layers of a forward pass.
    """
    if window is not None and window >= T - 1:
        window = None
    if backend == "flex":
        return block_mask(T, window, device)
    if backend == "blocks" or (backend == "sdpa" and window is not None):
        return visible(T, window, device)[None, None]
    return None


def visible(T: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T) bool: may query i (row) see key j (column)?"""
    i = torch.arange(T, device=device)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance <= window)


def segment_mask(segments: Tensor, window: int | None) -> Tensor:
    """(B, T) numbers -> (B, 1, T, T) bool: a token sees its past within its own segment."""
    same = segments[:, :, None] == segments[:, None, :]
    return (same & visible(segments.size(1), window, segments.device))[:, None]


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    """The definition, with the (T, T) scores written out in float32; in float64 if q, k, v are."""
    group, dtype = q.size(2) // k.size(2), q.dtype
    precise = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(precise) for x in (q, k, v))  # (B, heads, T, D)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.mT) * scale  # (B, H, T, T)
    seen = visible(q.size(2), window, q.device) if mask is None else mask
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).to(dtype)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's fused kernels. `mask` as in `attend`, None is causal; a mask costs their speed."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.size(2) != k.size(2),
    )
    return y.transpose(1, 2)


def attend_stored(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """
    A few queries over many stored tokens: q (B, T, H, D), keys (B, G, D, M), values (B, G, M, D),
    mask (B, 1, T, M) bool -> (B, T, H, D). Two plain products, the fastest way for T = 1.
    """
    B, T, H, D = q.shape
    G = keys.size(1)
    q = q.view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4)  # (B, G, H/G, T, D)
    scores = (q.flatten(2, 3) @ keys).view(B, G, H // G, T, -1).float() * scale
    scores = scores.masked_fill(~mask[:, :, None], -math.inf)
    weights = scores.softmax(dim=-1).to(values.dtype)  # (B, G, H/G, T, M)
    y = (weights.flatten(2, 3) @ values).view(B, G, H // G, T, D)
    return y.permute(0, 3, 1, 2, 4).reshape(B, T, H, D)


@lru_cache(maxsize=16)
def block_mask(T: int, window: int | None, device: torch.device) -> Any:
    """
    FlexAttention's block-sparse form of `visible`, made once per shape. Inside a compiled function
    the cache does not count: there the mask must be an argument.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def may_see(b, h, i, j):
        return (i >= j) if window is None else (i >= j) & (i - j <= window)

    with torch.inference_mode(False):  # an evaluation may make what training then uses
        return create_block_mask(may_see, None, None, T, T, device=str(device))


@lru_cache(maxsize=1)
def compiled_flex():
    """FlexAttention is fast only when compiled; shapes are fixed during a run."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """FlexAttention under a `block_mask`: skips the blocks that a window hides. CUDA."""
    y = compiled_flex()(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.size(2) != k.size(2),
    )
    return y.transpose(1, 2)


def attend_fa3(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """FlashAttention 3 (arXiv:2407.08608) where its package is installed. Hopper GPUs."""
    from flash_attn_interface import flash_attn_func  # type: ignore

    sizes = (-1 if window is None else window, 0)
    y = flash_attn_func(q, k, v, softmax_scale=scale, causal=True, window_size=sizes)
    return y[0] if isinstance(y, tuple) else y
