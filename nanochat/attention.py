"""
Attention: rotary embeddings, interchangeable kernels, variable-length batches, KV cache.

    q (B, T, H, D), k and v (B, T, G, D) -> attend -> (B, T, H, D)
    KVCache(slots x capacity) -> view(slots, T) -> one forward pass writes and reads it
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# ---- Rotary embeddings ---------------------------------------------------------------------------

Rope = tuple[Tensor, Tensor]  # cosines and sines of positions, (..., 1, D/2) each


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines (..., 1, D/2) of positions (...). Source: RoFormer, arXiv:2104.09864."""
    step = torch.arange(0, head_dim, 2, device=positions.device).float()
    angle = positions.float()[..., None, None] * theta ** (-step / head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + D/2) of x (B, T, heads, D) by the angle of their position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


# ---- Attention kernels behind one call -----------------------------------------------------------


Backend = Literal["sdpa", "flex", "fa3"]
"""
flex (CUDA): FlexAttention for windows and segments, else sdpa. fa3 (Hopper): FlexAttention for
segments, else FlashAttention 3.
"""


class Window(NamedTuple):
    """Numbers of visible tokens before and after each one, for FlashAttention 3; -1 = all."""

    before: int
    after: int


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float,
    cache: "tuple[CacheView, int] | None" = None,
) -> Tensor:
    """
    Causal attention: q (B, T, H, D); k, v (B, T, G, D), where G divides H -> (B, T, H, D).

    mask: the result of `make_mask`, which decides on the kernel. `scale` multiplies the scores.
    cache: a view and the index of the layer where k and v are stored.
    """
    if cache is not None:
        view, layer = cache
        view.write(layer, k, v)
        if not view.fresh:
            return attend_stored(q, *view.read(layer), mask, scale)
    if isinstance(mask, Window):
        y = fa3_function(q, k, v, softmax_scale=scale, causal=True, window_size=mask)
        return y[0] if isinstance(y, tuple) else y
    return attend_sdpa(q, k, v, mask, scale)


def make_mask(
    backend: Backend, x: Tensor, window: int | None, segments: Any = None, cache: Any = None
) -> Any:
    """
    Causal mask for x (B, T, ...): a token sees itself and at most `window` earlier tokens (None =
    all), with `segments` (B, T) only those of its own segment, with `cache` also the cached ones.
    A model calls this once per window and forward pass; layers share the mask.

    The kernel takes its own kind of mask. sdpa: a bool tensor (B or 1, 1, T, keys), True = visible,
    or None = plain causal; FlexAttention: its block mask; FlashAttention 3: a `Window`.
    """
    if cache is not None and not cache.fresh:
        return cache.mask(window)
    T, device = x.size(1), x.device
    window = None if window is None or window >= T - 1 else window
    if backend == "fa3" and segments is None:
        return Window(-1 if window is None else window, 0)
    if segments is None and window is None:
        return None
    if backend == "sdpa":
        return dense_mask(T, window, segments, device)
    if segments is None:
        return block_mask(T, window, device)
    return segment_block_mask(segments, window)


def in_window(distance: Tensor, window: int | None) -> Tensor:
    """Bool of the same shape: whether a query sees the key `distance` tokens back."""
    return (distance >= 0) if window is None else (distance >= 0) & (distance <= window)


def dense_mask(T: int, window: int | None, segments: Tensor | None, device: torch.device) -> Tensor:
    """(B or 1, 1, T, T) bool: whether query i (row) sees key j (column)."""
    i = torch.arange(T, device=device)
    seen = in_window(i[:, None] - i, window)[None]  # (1, T, T)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])  # (B, T, T)
    return seen[:, None]


WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """
    PyTorch's fused kernels. `mask` as in `make_mask`: None is causal, a tensor is slower. A block
    mask selects FlexAttention (CUDA), which skips blocks outside the window.
    """
    gqa = q.size(2) != k.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None or isinstance(mask, Tensor):
        # cuDNN plans each new shape, for tens of milliseconds; compiled functions have few shapes
        eager_on_gpu = q.is_cuda and not torch.compiler.is_compiling()
        with sdpa_kernel(WITHOUT_PLANS) if eager_on_gpu else nullcontext():
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
            )
    else:
        y = flex_kernel()(q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa)
    return y.transpose(1, 2)


def attend_stored(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """
    Attention of a few queries over cached tokens: q (B, T, H, D), keys (B, G, D, M), values
    (B, G, M, D), mask (B, 1, T, M) bool -> (B, T, H, D). Two plain matmuls, fastest for T = 1.
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
    FlexAttention's block-sparse form of `dense_mask`, cached per shape. Compiled functions bypass
    the cache, so pass them the mask as an argument.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.inference_mode(False):  # training may reuse a mask that an evaluation created
        return create_block_mask(
            lambda b, h, i, j: in_window(i - j, window), None, None, T, T, device=str(device)
        )


def segment_block_mask(segments: Tensor, window: int | None) -> Any:
    """The same for segments; never stores (T, T) elements if compiled."""
    T = segments.size(1)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return in_window(i - j, window) & (segments[b, i] == segments[b, j])

    create_block_mask = compiled_flex("create_block_mask")  # in one pass with the mask
    return create_block_mask(seen, len(segments), None, T, T, device=str(segments.device))


def flex_kernel():
    """FlexAttention, compiled as part of the caller or on its own (it is slow uncompiled)."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else compiled_flex("flex_attention")


@lru_cache
def compiled_flex(name: str):
    """A function of FlexAttention, compiled on its own. Shapes are fixed during a run."""
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


FA3_BUILD = {"repo_id": "kernels-community/flash-attn3", "version": 1}  # on the Hub
fa3_function: Any = None  # loaded by `load_fa3`, because compiled code cannot load it


def load_fa3(device: torch.device) -> None:
    """
    Load FlashAttention 3 (arXiv:2407.08608), downloaded by the package kernels. Raises RuntimeError
    if the GPU is not Hopper, ImportError without that package, and the error of a download.
    """
    global fa3_function
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise RuntimeError("needs a Hopper GPU, such as H100 or H200")
    from kernels import get_kernel  # type: ignore

    kernel = get_kernel(**FA3_BUILD)
    fa3_function = getattr(kernel, "flash_attn_interface", kernel).flash_attn_func


def choose_backend(dist: Any, compiled: bool) -> Backend:
    """
    The fastest kernel for the device of `dist` (a DistContext): on a GPU with compilation, fa3 on
    Hopper in bfloat16 where all ranks can load it, else flex; elsewhere sdpa.
    """
    if dist.device.type != "cuda" or not compiled:
        return "sdpa"
    # the backward pass of FlashAttention 3 is not deterministic, and does not say so
    if dist.dtype == torch.bfloat16 and not torch.are_deterministic_algorithms_enabled():
        fault = None
        try:
            dist.on_main(lambda: load_fa3(dist.device))  # one rank downloads
            load_fa3(dist.device)
        except Exception as error:  # not Hopper, no package, no network
            fault = str(error).partition("\n")[0] or repr(error)
        faults = [each for each in dist.gather(fault) if each]
        if not faults:
            return "fa3"
        dist.print0(f"without FlashAttention 3: {faults[0]}")
    return "flex"


# ---- Batching of variable-length sequences -------------------------------------------------------

Item = TypeVar("Item")


def fill_batches(
    items: Iterable[Item], shape: Callable[[Item], tuple[int, int]], max_tokens: int
) -> Iterator[list[Item]]:
    """
    Group consecutive items into batches of at most `max_tokens` padded tokens (but >= 1 item).

    shape: returns an item's number of rows and the length of its longest row.
    """
    batch: list[Item] = []
    rows = longest = 0
    for item in items:
        more, length = shape(item)
        if batch and (rows + more) * max(longest, length) > max_tokens:
            yield batch
            batch, rows, longest = [], 0, 0
        batch.append(item)
        rows, longest = rows + more, max(longest, length)
    if batch:
        yield batch


def pad_right(sequences: Sequence[Sequence[int]], filler: int, device: torch.device) -> Tensor:
    """Right-padded tensor (B, T) of the sequences; causal attention never sees the padding."""
    T = max(map(len, sequences))
    return torch.tensor([[*ids, *[filler] * (T - len(ids))] for ids in sequences], device=device)


# ---- KV cache ------------------------------------------------------------------------------------
# A slot holds one sequence. A batch may mix sequences of different lengths.


BLOCK = 32  # tokens; a decode step reads a multiple of it


class KVCache:
    """
    Cache for `slots` sequences of up to `capacity` tokens. `lengths[s]` tokens of slot s are valid.

    shape: (layers, slots, n_kv_head, head_dim); a layer that runs N times per token counts N times.
    Preallocates 2 * layers * slots * room * n_kv_head * head_dim elements of `dtype`, and slots *
    room * `embed_width` for the embeddings that smear needs; `room` is at least one token more than
    any step reads: torch.compile treats the full size as a special case, so a step that read all of
    it would be recompiled.
    """

    def __init__(
        self,
        shape: Sequence[int],
        capacity: int,
        device: Any,
        dtype: torch.dtype,
        embed_width: int = 0,
    ):
        layers, slots, G, D = shape
        self.capacity = capacity
        self.room = -(-capacity // BLOCK) * BLOCK + BLOCK
        self.lengths, kind = [0] * slots, {"device": device, "dtype": dtype}
        self.embeds = torch.zeros((slots, self.room, embed_width), **kind)
        # Tokens are the last dimension of keys, ready for the matmul with queries: on a CPU, a step
        # over 64 slots takes 1.1 instead of 7.6 ms per layer (bf16, one core, 2026-11)
        self.keys = [torch.zeros((slots, G, D, self.room), **kind) for _ in range(layers)]
        self.values = [torch.zeros((slots, G, self.room, D), **kind) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Size of keys, values and embeddings in bytes."""
        return sum(x.nbytes for x in (*self.keys, *self.values, self.embeds))

    def view(self, slots: Sequence[int], T: int) -> "CacheView":
        """View for a pass over T new tokens in each of `slots`. Raises ValueError if full."""
        past = [self.lengths[s] for s in slots]
        reach = max(past) + T
        if reach > self.capacity:
            raise ValueError(f"{reach} tokens exceed the cache capacity of {self.capacity}")
        device, in_order = self.embeds.device, list(slots) == list(range(len(slots)))
        positions = torch.tensor(past, device=device)[:, None] + torch.arange(T, device=device)
        which = None if in_order else torch.tensor(slots, device=device)
        return CacheView(self, which, positions, reach, fresh=not any(past))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, ..., :length] = keys[source, ..., :length]
            values[target, :, :length] = values[source, :, :length]
        self.embeds[target, :length] = self.embeds[source, :length]
        self.lengths[target] = length


@dataclass(eq=False)
class CacheView:
    """
    View of a cache for one forward pass: positions of its B x T new tokens, and their mask.

    Afterwards, the caller adds the number of valid tokens to `cache.lengths`; the next pass
    overwrites the rest (right padding).
    """

    cache: KVCache
    slots: Tensor | None
    """Slot indices (B,); None = the first B slots, read without a copy."""
    positions: Tensor
    """Position of each new token in its sequence, (B, T)."""
    reach: int
    """Number of cache positions read; no token sees a later one."""
    fresh: bool = False
    """Whether the slots were empty before, so plain causal attention suffices."""

    @property
    def rows(self) -> Tensor:
        """Slot index of each sequence, (B, 1)."""
        B, device = self.positions.size(0), self.positions.device
        return (torch.arange(B, device=device) if self.slots is None else self.slots)[:, None]

    def previous(self, x: Tensor) -> Tensor:
        """Store the embeddings x (B, T, C) of the new tokens; return those one position earlier."""
        self.cache.embeds[self.rows, self.positions] = x
        found = self.cache.embeds[self.rows, (self.positions - 1).clamp(min=0)]
        return found.masked_fill((self.positions == 0)[..., None], 0.0)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values of the new tokens in a layer, (B, T, G, D) each."""
        self.cache.keys[layer][self.rows, :, :, self.positions] = k
        self.cache.values[layer][self.rows, :, self.positions] = v

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cached keys (B, G, D, M) and values (B, G, M, D) of a layer; M = `reach`."""
        stored, B = (self.cache.keys[layer], self.cache.values[layer]), self.positions.size(0)
        keys, values = (x.narrow(0, 0, B) if self.slots is None else x[self.slots] for x in stored)
        return keys.narrow(3, 0, self.reach), values.narrow(2, 0, self.reach)

    def mask(self, window: int | None) -> Tensor:
        """(B, 1, T, M) bool: cached tokens that each new token sees."""
        key = torch.arange(self.reach, device=self.positions.device)
        return in_window(self.positions[:, None, :, None] - key, window)
