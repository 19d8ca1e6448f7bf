"""
Generate: sampling, one decode step, and an engine that runs tools.

    prompts -> prefill -> decode step -> sample -> tool calls -> Completion: ids, logprobs, finish
    logits (B, V), settings and a uniform number per sequence -> token ids (B,)

Continuous batching: when a sequence ends, the next waiting one takes its slot. A prompt is
prefilled once and shared by its samples. What the model generates between <|python_start|> and
<|python_end|> goes to the tool, whose result is then injected token by token; while a tool runs,
its sequence leaves the slot to others. A sequence does not depend on the rest of the batch.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from nanochat.attention import BLOCK, CacheView, KVCache, fill_batches, pad_right
from nanochat.common import printable
from nanochat.config import require_at_least
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer

# ---- Sampling: temperature, top-k, top-p per sequence --------------------------------------------
# Each sequence draws from its own generator, so it does not depend on the rest of the batch.


COLDEST = 2.0**-126  # temperatures below lose digits in float32, or are 0 there


@dataclass(frozen=True)
class Sampling:
    """How to sample a completion. Raises ValueError for a setting that is out of range."""

    max_new_tokens: int = 256
    """Most tokens of the completion, tool output included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability."""
    seed: int = 0
    """Sample i of a prompt draws from (seed, i)."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=1, temperature=0, top_k=1)
        if not self.temperature < math.inf:
            raise ValueError(f"temperature must be finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def sample(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """
    The next token of every row. logits (B, V) float32; `uniform` numbers in [0, 1).

    Top-k applies before top-p, to the probabilities at the temperature.
    Of equally likely tokens top-k keeps as many as fit, top-p all.
    """
    V = logits.size(1)
    groups: dict[int, list[int]] = {}  # rows by how many tokens they choose from
    for row, s in enumerate(settings):
        groups.setdefault(1 if s.temperature < COLDEST else min(s.top_k or V, V), []).append(row)
    picked = [0] * len(settings)
    for k, rows in groups.items():
        of_group = logits if len(rows) == len(settings) else logits[rows]
        if k == 1:
            found = of_group.argmax(dim=-1)
        else:
            found = draw(of_group, k, [settings[r] for r in rows], [uniform[r] for r in rows])
        for row, token in zip(rows, found.tolist(), strict=True):
            picked[row] = token
    return picked


def draw(logits: Tensor, k: int, settings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """A token of each row (B,), from the `k` likeliest: logits (B, V), temperatures above 0."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    ids, falling = None, k < logits.size(1)
    if falling:
        logits, ids = logits.topk(k, dim=-1)  # (B, k), falling
    behind = logits - logits.amax(dim=-1, keepdim=True)
    # shares of the likeliest one's
    weights = (behind / column(s.temperature for s in settings)).exp()
    if any(s.top_p < 1 for s in settings):
        ordered = weights if falling else weights.sort(dim=-1, descending=True).values
        mass = column(s.top_p for s in settings) * ordered.sum(dim=-1, keepdim=True)
        inside = running_sum(ordered) - ordered < mass
        last = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
        weights = weights * ((weights >= last) | (column(s.top_p for s in settings) == 1))
    total = running_sum(weights)
    mark = column(uniform).clamp(max=1 - 2**-24) * total[:, -1:]  # below the total in float32 too
    place = (total <= mark).sum(dim=-1)
    return place if ids is None else ids.gather(1, place[:, None])[:, 0]


def running_sum(weights: Tensor) -> Tensor:
    """
    Sums along the last dimension of numbers in [0, 1], float32 of the same shape.

    In deterministic mode PyTorch has no cumsum of floats on CUDA: there it is that of whole
    multiples of 2^-40, which is exact in any order.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(dim=-1)
    return (weights * 2.0**40).long().cumsum(dim=-1).float() * 2.0**-40


# ---- One decode step, compiled and captured as a CUDA graph --------------------------------------
# A step of a small model is hundreds of operations on few numbers and costs mostly their launches:
# compiled they become a few dozen. Sizes stay dynamic: one compilation serves a single sequence,
# one several, and the next model of the same shape. On a GPU the step is captured once per size as
# a CUDA graph, which any thread may replay.


# Logits of a compiled step that are further off than this show that it computes something else
AGREEMENT = {torch.bfloat16: 1.0, torch.float32: 0.01}


def next_logits(
    model: GPT, cache: KVCache, tokens: Tensor, positions: Tensor, places: Tensor
) -> Tensor:
    """
    tokens and positions (B, 1), in the first B slots -> (B, V). They attend to the first
    len(places) positions of the cache: a size that may change without a new compilation.
    """
    view = CacheView(cache, None, positions, places.size(0))
    return model.logits(model.hidden(tokens, view)[:, -1])


@lru_cache(maxsize=1)
def fused() -> Callable[..., Tensor]:
    """`next_logits`, compiled."""
    torch._dynamo.config.recompile_limit = 64  # kinds of model in one process
    return torch.compile(next_logits)


class DecodeStep:
    """
    The step over one cache; `compiled` fuses it. That takes seconds the first time, and one or two
    in a later process, from what the compiler keeps on disk. The first step of a single sequence,
    the first of several, and on a GPU every recording are computed both ways: a step that does
    not compile, or computes something else, is reported and not used.
    """

    def __init__(self, model: GPT, cache: KVCache, compiled: bool = False):
        self.model, self.cache = model, cache
        self.compiled = compiled
        self.recorded = model.device.type == "cuda"
        self.places = torch.arange(cache.room, device=model.device)
        self.checked: set[tuple[int, int]] = set()
        self.recordings: dict[tuple[int, int], Callable[[Tensor, Tensor], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.recorded else None

    def __call__(self, newest: Sequence[int]) -> Tensor:
        """Logits (B, V) after the newest tokens; the caller then updates `cache.lengths`."""
        past = self.cache.lengths[: len(newest)]
        if not self.compiled:
            return self.eager(newest, past)
        kind = self.recorded_size(past) if self.recorded else (min(2, len(past)), 0)
        want = None if kind in self.checked else self.eager(newest, past)
        self.checked.add(kind)
        try:
            logits = self.run_compiled(newest, past)
            distance = 0.0 if want is None else float((logits - want).abs().max())
            if distance < AGREEMENT[self.model.dtype]:
                return logits
            reason = f"logits differ by {distance:.3g}"
        except Exception as error:  # whatever a compiler raises, it does not work here
            reason = f"{type(error).__name__}: {error}"
        print(f"generation is not compiled: {printable(reason)}", flush=True)
        self.compiled = False
        self.recordings.clear()
        return self.eager(newest, past)  # and what was written is written anew

    def eager(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """The step as it is: newest ids and lengths of B sequences -> (B, V)."""
        return next_logits(self.model, self.cache, *self.inputs(newest, past))

    def run_compiled(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """
        The same, compiled and on a GPU recorded. There are few sizes of recordings: a batch is
        filled up with rows in slots that nobody uses.
        """
        if not self.recorded:
            return self.run_fused(*self.inputs(newest, past))
        size = self.recorded_size(past)
        unused = [0] * (size[0] - len(past))
        tokens, positions, _ = self.inputs([*newest, *unused], [*past, *unused])
        if size not in self.recordings:
            self.recordings[size] = self.record(tokens, positions, self.places[: size[1]])
        logits = self.recordings[size](tokens, positions)
        return logits[: len(past)].clone()  # the next replay writes there

    def record(
        self, tokens: Tensor, positions: Tensor, places: Tensor
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """
        The step of one size as a CUDA graph: (tokens, positions) -> logits, the same tensor each
        time. All recordings of a cache share their memory: no two run at a time, and only their
        inputs and logits outlive a step.
        """
        self.run_fused(tokens, positions, places)  # compiles, and loads what kernels need
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: the server loads models
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits = self.run_fused(tokens, positions, places)

        def replay(new_tokens: Tensor, new_positions: Tensor) -> Tensor:
            tokens.copy_(new_tokens)
            positions.copy_(new_positions)
            graph.replay()
            return logits

        return replay

    def recorded_size(self, past: Sequence[int]) -> tuple[int, int]:
        """Rows of the recording for sequences of these lengths, and how many places it reads."""
        rows = min(power_of_two(len(past)), len(self.cache.lengths))
        return rows, min(power_of_two(reach(past)), self.cache.room - BLOCK)

    def run_fused(self, tokens: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """The compiled step; of several sequences their number may change, and `places` always."""
        for tensor in (places, tokens, positions)[: 3 if len(tokens) > 1 else 1]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return fused()(self.model, self.cache, tokens, positions, places)

    def inputs(self, newest: Sequence[int], past: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and positions (B, 1) on the device, and the cache slots that are read."""
        tokens, positions = (
            torch.tensor(values, device=self.places.device)[:, None] for values in (newest, past)
        )
        return tokens, positions, self.places[: reach(past)]


def reach(past: Sequence[int]) -> int:
    """How many places of the cache a step reads after sequences of these lengths."""
    return -(-(max(past) + 1) // BLOCK) * BLOCK


def power_of_two(n: int) -> int:
    """The next one from n up."""
    return 1 << (n - 1).bit_length()


# ---- Generation with tools -----------------------------------------------------------------------


# Code in, its result out, now or as a future; None: nothing is injected
Tool = Callable[[str], str | None | Future[str | None]]
# Tokens of one pass over waiting prompts, padding included: a GPU is filled by many, while on a
# CPU the least padding counts, that is, prompts of nearly the same length in each pass
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 2048, 8192
PATIENCE_SECONDS = 0.01  # how long a step waits for a tool when there is nothing else to do


@dataclass(eq=False)
class Completion:
    """
    One sample of a prompt: grows while the engine runs, whole when `finish` is set.

    `ids` leaves out the token that ended it, `end`; `sampled[i]` is False where a tool's answer was
    put in.
    """

    prompt: list[int]
    settings: Sampling
    index: int
    """Which sample of its prompt this is."""
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish: Literal["stop", "length", "cancelled"] | None = None
    """stop: it ended itself; length: it ran into max_new_tokens or the end of the context."""
    end: int | None = None
    """The token by which it ended itself."""
    code: list[int] | None = None
    """Tokens since <|python_start|>, inside a call."""
    injected_ids: deque[int] = field(default_factory=deque)
    """Tokens that will be put in next."""
    pending_tool_call: Future[str | None] | None = None
    """The tool's answer, while it is not there."""

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.settings.seed}-{self.index}")

    def cancel(self) -> None:
        """End it, and the call of a tool that it waits for."""
        self.finish = self.finish or "cancelled"
        if self.pending_tool_call:
            self.pending_tool_call.cancel()
            self.pending_tool_call = None


class Engine:
    """
    Generates with `model` (best `gpt.for_inference` of it), at most `slots` sequences at a time.

    capacity: tokens of a prompt and its completion together, by default the model's context.
    tool: what answers the model's calls; without one they stay unanswered. compiled: fuse the step
    that writes a token, which is worth it for thousands of them. `logits` (B, V) are those of the
    last step, a row for each completion it returned; `on_prefill`, which by default does nothing,
    is called with a completion and the states (T, C) of the tokens that were prefilled for it.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        slots: int = 64,
        capacity: int | None = None,
        tool: Tool | None = None,
        compiled: bool = False,
    ):
        self.model, self.tokenizer, self.tool = model, tokenizer, tool
        self.slots, self.device = slots, model.device
        on_cpu = self.device.type == "cpu"
        self.prefill_tokens = CPU_PREFILL_TOKENS if on_cpu else GPU_PREFILL_TOKENS
        self.cache = model.new_cache(slots, capacity)
        self.decode_step = DecodeStep(model, self.cache, compiled)
        self.waiting: deque[Completion] = deque()
        self.active: list[Completion] = []  # number i has slot i
        self.calling: list[Completion] = []  # away until their tool has answered
        self.ends = {tokenizer.bos_id, tokenizer.special("<|assistant_end|>")}
        self.logits = torch.empty(0)
        self.on_prefill: Callable[[Completion, Tensor], None] = lambda completion, hidden: None

    # ---- what callers use --------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], settings: Sampling, n: int = 1) -> list[Completion]:
        """Queue `n` samples of a prompt. Raises ValueError for one that leaves no room."""
        self.check(prompt)
        shared = list(prompt)  # one list for all samples: that is how they know each other
        samples = [Completion(shared, settings, i) for i in range(n)]
        self.waiting.extend(samples)
        return samples

    def check(self, prompt: Sequence[int]) -> None:
        """Raises ValueError for a prompt that is empty or leaves no room for an answer."""
        if not 0 < len(prompt) < self.cache.capacity:
            raise ValueError(
                f"the prompt has {len(prompt):,} tokens: it must have at least one, and the "
                f"context holds {self.cache.capacity:,}, the answer included; ask something shorter"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        n: int = 1,
        seeds: Iterable[int] | None = None,
    ) -> list[list[Completion]]:
        """`n` whole completions of each prompt. seeds: of each, by default that of `settings`."""
        each = [replace(settings, seed=seed) for seed in seeds or [settings.seed] * len(prompts)]
        groups = [self.submit(prompt, s, n) for prompt, s in zip(prompts, each, strict=True)]
        while self.busy:
            self.step()
        return groups

    def cancel(self, completion: Completion) -> None:
        """End a completion now; its slot is free before the next step."""
        completion.cancel()
        for queue in (self.waiting, self.calling):
            if completion in queue:
                queue.remove(completion)
        self.evict()

    @property
    def busy(self) -> bool:
        """True while something waits or grows."""
        return bool(self.waiting or self.active or self.calling)

    @torch.inference_mode()
    def step(self, patience_seconds: float = PATIENCE_SECONDS) -> list[Completion]:
        """
        Admit queued prompts, then decode one token for each active completion; returns those.

        Where all wait for their tools, it waits `patience_seconds` at most for the first result.
        """
        self.collect_tool_results(patience_seconds)
        self.admit()
        if not self.active:
            return []
        grown = list(self.active)
        newest = [c.ids[-1] if c.ids else c.prompt[-1] for c in grown]
        self.logits = self.decode_step(newest)  # (B, V)
        for slot in range(len(grown)):
            self.cache.lengths[slot] += 1
        uniform = [c.random.random() for c in grown]
        picked = sample(self.logits, [c.settings for c in grown], uniform)
        for completion, token in zip(grown, picked, strict=True):
            self.advance(completion, token)
        self.evict()
        return grown

    # ---- slots -------------------------------------------------------------------------------

    def admit(self) -> None:
        """
        Give free slots to the queue and prefill the prompts but for their last token, which is the
        next step's input. Samples of one prompt copy the cache of the first of them.
        """
        readers = {id(c.prompt): slot for slot, c in enumerate(self.active)}
        unread: dict[int, list[int]] = {}  # slot -> what to read into it
        copies = []
        while self.waiting and len(self.active) < self.slots:
            completion = self.waiting.popleft()
            slot = len(self.active)
            self.active.append(completion)
            self.cache.lengths[slot] = 0
            reader = slot if completion.ids else readers.setdefault(id(completion.prompt), slot)
            if reader != slot:
                copies.append((reader, slot, len(completion.prompt) - 1))
            elif known := (completion.prompt + completion.ids)[:-1]:
                unread[slot] = known
        by_length = sorted(unread, key=lambda slot: len(unread[slot]))
        for slots in fill_batches(by_length, lambda s: (1, len(unread[s])), self.prefill_tokens):
            self.prefill(slots, [unread[slot] for slot in slots])
        for copy in copies:
            self.cache.copy(*copy)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Read a prompt into each of some empty slots, in one pass."""
        tokens = pad_right(prompts, self.tokenizer.bos_id, self.device)  # (B, T)
        hidden = self.model.hidden(tokens, self.cache.view(slots, tokens.size(1)))  # (B, T, C)
        for row, slot in enumerate(slots):
            self.cache.lengths[slot] = len(prompts[row])
            self.on_prefill(self.active[slot], hidden[row])

    def evict(self) -> None:
        """Free the slots of what is finished or away; the last ones move into the gaps."""
        for slot in reversed(range(len(self.active))):
            c = self.active[slot]
            if c.pending_tool_call is not None:
                self.calling.append(c)
            elif c.finish is None:
                continue
            last = len(self.active) - 1
            if slot != last:
                self.cache.copy(last, slot, self.cache.lengths[last])
                self.active[slot] = self.active[last]
            self.active.pop()
            self.cache.lengths[last] = 0

    # ---- one completion ----------------------------------------------------------------------

    def advance(self, completion: Completion, token: int) -> None:
        """Append the sampled token, or the injected one in its place; end or call a tool."""
        c = completion
        sampled = not c.injected_ids
        token = token if sampled else c.injected_ids.popleft()
        if sampled and token in self.ends:
            c.finish, c.end = "stop", token
            return
        c.ids.append(token)
        c.sampled.append(sampled)
        if sampled:
            self.call_tool(c, token)
        room = self.cache.capacity - len(c.prompt)
        if len(c.ids) >= min(c.settings.max_new_tokens, room):
            c.finish, c.pending_tool_call = "length", None

    def call_tool(self, c: Completion, token: int) -> None:
        """Collect the tokens of a call; at its end, queue the tool's answer."""
        if token == self.tokenizer.special("<|python_start|>"):
            c.code = []
        elif token != self.tokenizer.special("<|python_end|>"):
            if c.code is not None:
                c.code.append(token)
        elif c.code is not None:
            answer = self.tool(self.tokenizer.decode(c.code)) if self.tool else None
            c.code = None
            if isinstance(answer, Future):
                c.pending_tool_call = answer
            else:
                self.inject_tool_result(c, answer)

    def inject_tool_result(self, c: Completion, answer: str | None) -> None:
        """Inject the result of a tool behind its call."""
        if answer is not None:
            first, last = map(self.tokenizer.special, ("<|output_start|>", "<|output_end|>"))
            c.injected_ids += [first, *self.tokenizer.encode(answer), last]

    def collect_tool_results(self, patience_seconds: float) -> None:
        """Queue the completions whose tool has answered first; if all wait for one, wait too."""
        if self.calling and not self.active and not self.waiting:
            pending = [c.pending_tool_call for c in self.calling if c.pending_tool_call]
            wait(pending, patience_seconds, FIRST_COMPLETED)
        for c in list(self.calling):
            call = c.pending_tool_call
            if call is None or not call.done():
                continue
            if error := call.exception():
                print(f"a tool failed: {type(error).__name__}: {printable(error)}", flush=True)
            else:
                self.inject_tool_result(c, call.result())
            c.pending_tool_call = None
            self.calling.remove(c)
            self.waiting.appendleft(c)
