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

BLOCK = 32  # a step reads a multiple of so many tokens


class KVCache:
    """
    Room for `slots` sequences of up to `capacity` tokens. `lengths[s]` tokens of slot s are valid.

    visits: how many times a token passes a layer; each visit has keys and values of its own.
    Takes 2 * visits * slots * room * n_kv_head * head_dim elements of `dtype`, from the start;
    `room` is at least a token more than any step reads, so that what it reads is never all there
    is: a compiled step would be compiled anew for that.
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
        def empty(*shape: int) -> list[Tensor]:
            shape = (slots, n_kv_head, *shape)
            return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(visits)]

        self.capacity = capacity
        self.room = -(-capacity // BLOCK) * BLOCK + BLOCK

        # Keys lie with the tokens last, so that a query multiplies them as they are: on a CPU a
        # step over 64 slots takes 1.1 ms instead of 7.6 a layer (bf16, one core, 2026-11)
        self.keys = empty(head_dim, self.room)
        self.values = empty(self.room, head_dim)
        self.tokens = torch.zeros((slots, self.room), device=device, dtype=torch.long)
        self.lengths = [0] * slots

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def view(self, slots: Sequence[int], T: int) -> "CacheView":
        """For a forward pass over T new tokens in each of `slots`. Raises ValueError if full."""
        past = [self.lengths[s] for s in slots]
        reach = max(past) + T
        if reach > self.capacity:
            raise ValueError(f"{reach} tokens do not fit a cache of {self.capacity}")
        device = self.tokens.device
        positions = torch.tensor(past, device=device)[:, None] + torch.arange(T, device=device)
        in_order = list(slots) == list(range(len(slots)))
        which = None if in_order else torch.tensor(slots, device=device)
        return CacheView(self, which, positions, reach, fresh=not any(past))

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target` begin with the first `length` tokens of `source`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, ..., :length] = keys[source, ..., :length]
            values[target, :, :length] = values[source, :, :length]
        self.tokens[target, :length] = self.tokens[source, :length]
        self.lengths[target] = length


class CacheView:
    """
    What one forward pass needs of a cache: where its B x T tokens stand, and what they see.

    slots: (B,), None = the first B, read without a copy. positions: (B, T), the place of each new
    token in its sequence; no token sees further than `reach`. fresh: the new tokens are all there
    is, so plain causal attention will do. The caller adds what counts of the T tokens to
    `cache.lengths` afterwards; the rest (padding on the right) is overwritten by the next pass.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor | None,
        positions: Tensor,
        reach: int,
        fresh: bool = False,
    ):
        self.cache, self.slots, self.positions = cache, slots, positions
        self.reach, self.fresh = reach, fresh

    @property
    def rows(self) -> Tensor:
        """(B, 1), the slot of each sequence."""
        if self.slots is None:
            return torch.arange(self.positions.size(0), device=self.positions.device)[:, None]
        return self.slots[:, None]

    def preceding(self, tokens: Tensor) -> Tensor:
        """Store the new tokens (B, T): the one in front of each, -1 where a sequence begins."""
        self.cache.tokens[self.rows, self.positions] = tokens
        before = self.cache.tokens[self.rows, (self.positions - 1).clamp(min=0)]
        return before.masked_fill(self.positions == 0, -1)

    def write(self, visit: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens' keys and values at a visit to a layer, (B, T, G, D) each."""
        self.cache.keys[visit][self.rows, :, :, self.positions] = k
        self.cache.values[visit][self.rows, :, self.positions] = v

    def read(self, visit: int) -> tuple[Tensor, Tensor]:
        """All that may be seen at it: keys (B, G, D, M) and values (B, G, M, D)."""
        keys, values = self.cache.keys[visit], self.cache.values[visit]
        if self.slots is None:
            B = self.positions.size(0)
            keys, values = keys.narrow(0, 0, B), values.narrow(0, 0, B)
        else:
            keys, values = keys[self.slots], values[self.slots]
        return keys.narrow(3, 0, self.reach), values.narrow(2, 0, self.reach)

    def mask(self, window: int | None) -> Tensor | None:
        """(B, 1, T, M) bool: which stored tokens each new one sees. None: simply its row's past."""
        if self.fresh:
            return None
        key = torch.arange(self.reach, device=self.positions.device)
        distance = self.positions[:, None, :, None] - key  # (B, 1, T, M)
        seen = distance >= 0
        return seen if window is None else seen & (distance <= window)
