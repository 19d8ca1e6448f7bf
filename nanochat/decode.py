"""
One step of generation: the newest token of every sequence in, the logits of the next one out.

    newest ids, cache with their past -> NextLogits -> logits (B, V)

A step of a small model is hundreds of operations on few numbers, and to start them takes most of
the time: compiled, they become a few dozen. Sizes stay open, so that sequences may come, go and
grow: there is one compilation for a single sequence and one for several, and the next model of the
same shape shares them. On a GPU the compiled step is recorded once per size as a CUDA graph, which
any thread may replay.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.common import printable
from nanochat.gpt import GPT
from nanochat.kv_cache import BLOCK, CacheView, KVCache

# Logits of a compiled step that are further off than this show that it computes something else
AGREEMENT = {torch.bfloat16: 1.0, torch.float32: 0.01}


def next_logits(
    model: GPT, cache: KVCache, tokens: Tensor, positions: Tensor, places: Tensor
) -> Tensor:
    """
    tokens and positions (B, 1), in the first B slots -> (B, V). They see as many places of the
    cache as `places` is long: a size that may change without a new compilation.
    """
    view = CacheView(cache, None, positions, places.size(0))
    return model.logits(model.hidden(tokens, view)[:, -1])


@lru_cache(maxsize=1)
def fused() -> Callable[..., Tensor]:
    """`next_logits`, compiled."""
    torch._dynamo.config.recompile_limit = 64  # kinds of model in one process
    return torch.compile(next_logits)


class Recording(NamedTuple):
    """A step of one size as a CUDA graph: it reads `tokens` and `positions`, writes `logits`."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    positions: Tensor
    logits: Tensor


class NextLogits:
    """
    The step over one cache; `compiled` fuses it. That takes seconds the first time, and one or two
    in a later process, from what the compiler keeps on disk. The first step of a single sequence,
    the first of several, and on a GPU every recording are computed both ways: what does not
    compile, or computes something else, is said and left out.
    """

    def __init__(self, model: GPT, cache: KVCache, compiled: bool = False):
        self.model, self.cache = model, cache
        self.compiled = compiled
        self.recorded = model.device.type == "cuda"
        self.places = torch.arange(cache.room, device=model.device)
        self.checked: set[tuple[int, int]] = set()
        self.recordings: dict[tuple[int, int], Recording] = {}

    def __call__(self, newest: Sequence[int]) -> Tensor:
        """Read the newest token of the first slots: (B, V). `cache.lengths` is left to others."""
        past = self.cache.lengths[: len(newest)]
        if not self.compiled:
            return self.eager(newest, past)
        kind = self.recorded_size(past) if self.recorded else (min(2, len(past)), 0)
        want = None if kind in self.checked else self.eager(newest, past)
        self.checked.add(kind)
        try:
            logits = (self.replay if self.recorded else self.fused)(newest, past)
        except Exception as error:  # whatever a compiler raises, it does not work here
            self.give_up(f"{type(error).__name__}: {error}")
        else:
            error = 0.0 if want is None else float((logits - want).abs().max())
            if error < AGREEMENT[self.model.dtype]:
                return logits
            self.give_up(f"logits differ by {error:.3g}")
        return self.eager(newest, past)  # and what was written is written anew

    def eager(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """The step as it is: newest ids and lengths of B sequences -> (B, V)."""
        tokens, positions = self.inputs(newest, past)
        places = self.places[: reach(past)]
        return next_logits(self.model, self.cache, tokens, positions, places)

    def fused(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """The same, compiled."""
        tokens, positions = self.inputs(newest, past)
        return self.run_fused(tokens, positions, self.places[: reach(past)])

    def replay(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """
        The same, compiled and recorded. There are few sizes: a batch is filled up with rows in
        slots that nobody uses.
        """
        B, (rows, seen) = len(past), self.recorded_size(past)
        added = [0] * (rows - B)
        tokens, positions = self.inputs([*newest, *added], [*past, *added])
        if (rows, seen) not in self.recordings:
            self.recordings[rows, seen] = self.record(tokens, positions, self.places[:seen])
        step = self.recordings[rows, seen]
        step.tokens.copy_(tokens)
        step.positions.copy_(positions)
        step.graph.replay()
        return step.logits[:B].clone()  # the next replay writes there

    def record(self, tokens: Tensor, positions: Tensor, places: Tensor) -> Recording:
        """
        Record the step on these inputs. All recordings of a cache share their memory: no two run at
        a time, and only their inputs and logits outlive a step.
        """
        self.run_fused(tokens, positions, places)  # compiles, and loads what kernels need
        graph = torch.cuda.CUDAGraph()
        others = next(iter(self.recordings.values()), None)
        pool = None if others is None else others.graph.pool()
        # Other threads may use the device meanwhile: the server loads models
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self.run_fused(tokens, positions, places)
        return Recording(graph, tokens, positions, logits)

    def recorded_size(self, past: Sequence[int]) -> tuple[int, int]:
        """Rows of the recording for sequences of these lengths, and how many places it reads."""
        rows = min(power_of_two(len(past)), len(self.cache.lengths))
        return rows, min(power_of_two(reach(past)), self.cache.room - BLOCK)

    def run_fused(self, tokens: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """The compiled step; of several sequences their number may change, and `places` always."""
        for tensor in (places, tokens, positions)[: 3 if len(tokens) > 1 else 1]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return fused()(self.model, self.cache, tokens, positions, places)

    def inputs(self, newest: Sequence[int], past: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and positions, (B, 1) each, on the device."""
        device = self.places.device
        return (
            torch.tensor(newest, device=device)[:, None],
            torch.tensor(past, device=device)[:, None],
        )

    def give_up(self, reason: str) -> None:
        """Go on with the step as it is."""
        self.compiled = False
        self.recordings.clear()
        print(f"generation is not compiled: {printable(reason)}", flush=True)


def reach(past: Sequence[int]) -> int:
    """How many places of the cache a step reads after sequences of these lengths."""
    return -(-(max(past) + 1) // BLOCK) * BLOCK


def power_of_two(n: int) -> int:
    """The next one from n up."""
    return 1 << (n - 1).bit_length()
