"""
One step of generation: the newest token of every sequence in, the logits of the next one out.

    newest ids, cache with their past -> NextLogits -> logits (B, V)

A step of a small model is hundreds of operations on few numbers, and to start them takes most of
the time: compiled, they become a few dozen. Sizes stay open, so that sequences may come, go and
grow: there is one compilation for a single sequence and one for several, and the next model of the
same shape shares them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nanochat.common import printable
from nanochat.gpt import GPT
from nanochat.kv_cache import BLOCK, CacheView, KVCache

# Logits of a compiled step that are further off than this show that it computes something else
AGREEMENT = {torch.bfloat16: 1.0, torch.float32: 0.01}
CPU_CHECKS, GPU_CHECKS = 1, 3  # steps; on a GPU one warms up, one is recorded, one replayed


def next_logits(
    model: GPT, cache: KVCache, tokens: Tensor, positions: Tensor, places: Tensor
) -> Tensor:
    """
    tokens and positions (B, 1), in the first B slots -> (B, V). They see as many places of the
    cache as `places` is long: a size that may change without a new compilation.
    """
    view = CacheView(cache, None, positions, places.size(0))
    return model.logits(model.hidden(tokens, view)[:, -1])


@lru_cache(maxsize=2)
def fused(device_type: str) -> Callable[..., Tensor]:
    """`next_logits`, compiled. On a GPU a step of each size is recorded, then replayed whole."""
    torch._dynamo.config.recompile_limit = 64  # kinds of model in one process
    return torch.compile(next_logits, mode="reduce-overhead" if device_type == "cuda" else None)


class NextLogits:
    """
    The step over one cache; `compiled` fuses it. That takes seconds the first time, and one or two
    in a later process, from what the compiler keeps on disk. The first steps of a single sequence
    and those of several are computed both ways: what does not compile, or computes something else,
    is said and left out.
    """

    def __init__(self, model: GPT, cache: KVCache, compiled: bool = False):
        self.model, self.cache = model, cache
        self.compiled = compiled
        self.places = torch.arange(cache.room, device=model.device)
        checks = GPU_CHECKS if model.device.type == "cuda" else CPU_CHECKS
        self.unchecked = {"one": checks, "several": checks}
        if compiled:
            blocks = (block.attention.together for block in model.blocks)
            joined = [weight for weight in blocks if weight is not None]
            for tensor in (*joined, *cache.keys, *cache.values, cache.tokens):
                torch._dynamo.mark_static_address(tensor)  # a replay finds them where they were

    def __call__(self, newest: Sequence[int]) -> Tensor:
        """Read the newest token of the first slots: (B, V). `cache.lengths` is left to others."""
        past = self.cache.lengths[: len(newest)]
        if not self.compiled:
            return self.run(newest, past, compiled=False)
        want, kind = None, "one" if len(newest) == 1 else "several"
        if self.unchecked[kind]:
            self.unchecked[kind] -= 1
            want = self.run(newest, past, compiled=False)
        try:
            logits = self.run(newest, past, compiled=True)
        except Exception as error:  # whatever a compiler raises, it does not work here
            self.give_up(f"{type(error).__name__}: {error}")
        else:
            error = 0.0 if want is None else float((logits - want).abs().max())
            if error < AGREEMENT[self.model.dtype]:
                return logits
            self.give_up(f"logits differ by {error:.3g}")
        return self.run(newest, past, compiled=False)  # and what was written is written anew

    def run(self, newest: Sequence[int], past: Sequence[int], compiled: bool) -> Tensor:
        """The step, as it is or fused: newest ids and lengths of B sequences -> (B, V)."""
        B, device = len(newest), self.places.device
        recorded = compiled and device.type == "cuda"
        if recorded:  # few sizes; the rows that are added lie in slots that nobody uses
            added = min(power_of_two(B), len(self.cache.lengths)) - B
            newest, past = [*newest, *[0] * added], [*past, *[0] * added]
        tokens = torch.tensor(newest, device=device)[:, None]
        positions = torch.tensor(past, device=device)[:, None]
        reach = -(-(max(past) + 1) // BLOCK) * BLOCK
        reach = min(power_of_two(reach), self.cache.room - BLOCK) if recorded else reach
        places = self.places[:reach]
        if not compiled:
            return next_logits(self.model, self.cache, tokens, positions, places)
        for tensor in (places, tokens, positions)[: 3 if B > 1 else 1]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        logits = fused(device.type)(self.model, self.cache, tokens, positions, places)
        return logits[:B].clone() if recorded else logits

    def give_up(self, reason: str) -> None:
        """Go on with the step as it is."""
        self.compiled = False
        print(f"generation is not compiled: {printable(reason)}", flush=True)


def power_of_two(n: int) -> int:
    """The next one from n up."""
    return 1 << (n - 1).bit_length()
