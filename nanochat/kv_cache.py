"""
The memory of a model that generates: keys and values of the tokens each sequence has seen.

    KVCache(slots x capacity) -> view(slots, T) -> one forward pass writes and reads it

A slot holds one sequence. Slots are independent, so sequences of different lengths share a batch;
a view says at which positions the T new tokens of each lie, what they may see, and which token is
in front of each, for models that look at that too. Knows nothing of sampling.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """
    Room for `slots` sequences of up to `capacity` tokens. `lengths[s]` tokens of slot s are valid.

    visits: how many times a token passes a layer; each visit has keys and values of its own.
    Takes 2 * visits * slots * capacity * n_kv_head * head_dim elements of `dtype`, from the start.
    """

    def __init__(
        self,
        visits: int,
        slots: int,
        capacity: int,
        n_kv_head: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        heads = (visits, slots, n_kv_head)
        # Keys lie with the tokens last, so that a query multiplies them as they are: on a CPU a
        # step over 64 slots takes 1.1 ms instead of 7.6 a layer (bf16, one core, 2026-11)
        self.keys = torch.zeros((*heads, head_dim, capacity), device=device, dtype=dtype)
        self.values = torch.zeros((*heads, capacity, head_dim), device=device, dtype=dtype)
        self.tokens = torch.zeros((slots, capacity), device=device, dtype=torch.long)
        self.capacity = capacity
        self.lengths = [0] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    def view(self, slots: Sequence[int], T: int) -> "CacheView":
        """For a forward pass over T new tokens in each of `slots`. Raises ValueError if full."""
        longest = max(self.lengths[s] for s in slots) + T
        if longest > self.capacity:
            raise ValueError(f"{longest} tokens do not fit a cache of {self.capacity}")
        return CacheView(self, slots, T)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target` begin with the first `length` tokens of `source`."""
        self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.tokens[target, :length] = self.tokens[source, :length]
        self.lengths[target] = length


class CacheView:
    """
    What one forward pass needs of a cache: where its B x T tokens stand, and what they see.

    The caller adds what counts of the T tokens to `cache.lengths` afterwards; the rest (padding on
    the right) is overwritten by the next pass.
    """

    def __init__(self, cache: KVCache, slots: Sequence[int], T: int):
        device = cache.keys.device
        past = [cache.lengths[s] for s in slots]
        self.cache = cache
        self.reach = max(past) + T  # no token sees further than this
        self.fresh = not any(past)
        """True when the new tokens are all there is: plain causal attention will do."""
        self.in_order = list(slots) == list(range(len(slots)))  # then reading needs no copy
        self.slots = torch.tensor(slots, device=device)
        self.positions = torch.tensor(past, device=device)[:, None] + torch.arange(T, device=device)
        """(B, T), the place of each new token in its sequence."""

    def preceding(self, tokens: Tensor) -> Tensor:
        """Store the new tokens (B, T): the one in front of each, -1 where a sequence begins."""
        rows = self.slots[:, None]
        self.cache.tokens[rows, self.positions] = tokens
        before = self.cache.tokens[rows, (self.positions - 1).clamp(min=0)]
        return before.masked_fill(self.positions == 0, -1)

    def write(self, visit: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values at a visit to a layer, (B, T, G, D) each."""
        rows = self.slots[:, None]
        self.cache.keys[visit, rows, :, :, self.positions] = k
        self.cache.values[visit, rows, :, self.positions] = v

    def read(self, visit: int) -> tuple[Tensor, Tensor]:
        """All that may be seen at it: keys (B, G, D, M) and values (B, G, M, D)."""
        which = slice(len(self.slots)) if self.in_order else self.slots
        keys, values = self.cache.keys[visit, which], self.cache.values[visit, which]
        return keys[..., : self.reach], values[:, :, : self.reach]

    def mask(self, window: int | None) -> Tensor | None:
        """(B, 1, T, M) bool: which stored tokens each new one sees. None: simply its row's past."""
        if self.fresh:
            return None
        key = torch.arange(self.reach, device=self.positions.device)
        distance = self.positions[:, None, :, None] - key  # (B, 1, T, M)
        seen = distance >= 0
        return seen if window is None else seen & (distance <= window)
