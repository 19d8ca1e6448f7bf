"""
Generation: sampling, the decode step, and an engine with continuous batching and tool calls.

    prompts -> prefill -> decode step -> sample -> tool calls -> Completion: ids, finish reason
    logits (B, V), settings and one uniform number per sequence -> token ids (B,)

When a sequence finishes, the next queued one takes its slot. A prompt is prefilled once for all
its samples that are active together. Text between <|python_start|> and <|python_end|> is passed to
the tool, and the result is injected token by token; while the tool runs, other sequences may use
the slot. The output of a sequence does not depend on the rest of the batch, except for rounding.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from nanochat.attention import BLOCK, CacheView, KVCache, fill_batches, pad_right
from nanochat.common import StopRequest, printable
from nanochat.config import require_at_least, short
from nanochat.dist import compiler_problem, memory_bytes
from nanochat.gpt import GPT
from nanochat.loss import cap
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

# ---- Sampling: temperature, top-k, top-p, min-p and penalties per sequence -----------------------
# Each sequence has its own generator: its output does not depend on the rest of the batch.


MIN_TEMP = 2.0**-126  # smallest normal float32; lower temperatures sample greedily


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a completion. Raises ValueError if a setting is out of range."""

    max_new_tokens: Annotated[int, short("m")] = 256
    """Maximum number of tokens per answer, tool output included."""
    temperature: Annotated[float, short("t")] = 1.0
    """Sampling temperature; 0 = greedy."""
    top_k: Annotated[int | None, short("k")] = None
    """Sample from the k most likely tokens; None = all tokens."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Sample from tokens of at least this fraction of the highest probability; 0 = all tokens."""
    seed: int = 0
    """Random seed for sampling; sample i of a prompt uses (seed, i)."""

    def __post_init__(self) -> None:
        require_at_least(self, max_new_tokens=1, temperature=0, top_k=1, min_p=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.min_p > 1:
            raise ValueError(f"min_p must be at most 1, got {self.min_p}")


@dataclass(frozen=True)
class PenalizedSampling(Sampling):
    """
    Sampling with changed logits, which only requests of the API set.

    Penalties apply to tokens that the completion already has, tool output included; the prompt
    does not count. Sources: OpenAI API reference for frequency and presence penalty and logit_bias;
    repetition penalty: CTRL, arXiv:1909.05858.
    """

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs."""
    repetition_penalty: float = 1.0
    """A token that occurs has its logit divided by this; a negative one is multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""


def penalize(logits: Tensor, settings: Sequence[Sampling], ids: Sequence[Sequence[int]]) -> None:
    """
    Apply the penalties and biases of each row to logits (B, V), in place. ids: the tokens of each
    completion so far.
    """
    for x, s, own in zip(logits, settings, ids, strict=True):
        if not isinstance(s, PenalizedSampling):
            continue
        there = torch.tensor(own, dtype=torch.long, device=x.device)
        counts = torch.bincount(there, minlength=len(x))
        scaled = torch.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty)
        penalty = s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
        x.copy_(torch.where(counts > 0, scaled, x) - penalty)
        if s.logit_bias:
            x[list(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), device=x.device)


def sample(
    logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float], capped: bool = True
) -> list[int]:
    """
    Sample the next token id of each row from logits (B, V), float32. If they are not soft-capped,
    only those of the candidates will be: the cap does not change their order.

    uniform: one number in [0, 1) per row. Temperature applies first, then top-k, top-p and min-p
    (arXiv:2407.01082). Among tied tokens, top-k keeps exactly k tokens; the others keep all.
    """
    V = logits.size(1)
    groups: dict[int, list[int]] = {}  # number of candidate tokens -> rows
    for row, s in enumerate(settings):
        groups.setdefault(1 if s.temperature < MIN_TEMP else min(s.top_k or V, V), []).append(row)
    picked = [0] * len(settings)
    for k, rows in groups.items():
        of_group = logits if len(rows) == len(settings) else logits[rows]
        if k == 1:
            found = of_group.argmax(dim=-1)
        else:
            of_rows = [settings[r] for r in rows], [uniform[r] for r in rows]
            found = draw(of_group, k, *of_rows, capped)
        for row, token in zip(rows, found.tolist(), strict=True):
            picked[row] = token
    return picked


def draw(
    logits: Tensor,
    k: int,
    settings: Sequence[Sampling],
    uniform: Sequence[float],
    capped: bool = True,
) -> Tensor:
    """
    Sample from each row's `k` most likely tokens: (B, V) -> (B,). Needs temperatures > 0; others as
    in `sample`.
    """

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    ids, descending = None, k < logits.size(1)
    if descending:
        logits, ids = logits.topk(k, dim=-1)  # (B, k), in descending order
    logits = logits if capped else cap(logits)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    # unnormalized probabilities, largest = 1
    weights = (shifted / column(s.temperature for s in settings)).exp()
    if any(s.top_p < 1 for s in settings):
        ordered = weights if descending else weights.sort(dim=-1, descending=True).values
        mass = column(s.top_p for s in settings) * ordered.sum(dim=-1, keepdim=True)
        kept = running_sum(ordered) - ordered < mass
        cutoff = torch.where(kept, ordered, torch.inf).amin(dim=-1, keepdim=True)
        weights = weights * ((weights >= cutoff) | (column(s.top_p for s in settings) == 1))
    if any(s.min_p > 0 for s in settings):
        weights = weights * (weights >= column(s.min_p for s in settings))
    total = running_sum(weights)
    threshold = column(uniform).clamp(max=1 - 2**-24) * total[:, -1:]  # below total in float32 too
    index = (total <= threshold).sum(dim=-1)
    return index if ids is None else ids.gather(1, index[:, None])[:, 0]


def running_sum(weights: Tensor) -> Tensor:
    """
    Cumulative sum of float32 numbers in [0, 1] along the last dimension: of integer multiples of
    2^-40, which is exact in any order, because PyTorch's sum of floats varies on a GPU.
    """
    return (weights * 2.0**40).long().cumsum(dim=-1).float() * 2.0**-40


# ---- One decode step, compiled and captured as a CUDA graph --------------------------------------
# Kernel launches dominate the decode step of a small model; compilation fuses hundreds of kernels
# into a few dozen. Sizes are dynamic: models of one architecture share one compilation for B = 1
# and one for B > 1. On a GPU, each size is captured as a CUDA graph, which any thread may replay.


def next_logits(
    model: GPT, cache: KVCache, tokens: Tensor, positions: Tensor, key_positions: Tensor
) -> Tensor:
    """
    Decode tokens (B, 1) at positions (B, 1) of the first B slots; returns logits (B, V), on a CPU
    without the soft cap.

    The tokens attend to the first len(key_positions) cache positions; this number may vary without
    recompilation.
    """
    view = CacheView(cache, None, positions, key_positions.size(0))
    logits = model.uncapped_logits(model.hidden(tokens, view)).squeeze(1)
    return logits if logits.device.type == "cpu" else cap(logits)


CAPTURING = threading.Lock()  # PyTorch captures one CUDA graph at a time in a process


@lru_cache(maxsize=1)
def compiled_next_logits() -> Callable[..., Tensor]:
    """Return the compiled `next_logits`."""
    return torch.compile(next_logits)


class DecodeStep:
    """
    Decode step over one KV cache, optionally compiled.

    Compilation takes seconds (1-2 with a warm on-disk compiler cache). If it fails, this is
    printed, and all steps are eager from then on.
    """

    def __init__(self, model: GPT, cache: KVCache, compiled: bool = False):
        self.model, self.cache = model, cache
        self.compiled = compiled
        self.recorded = model.device.type == "cuda"
        self.key_positions = torch.arange(cache.room, device=model.device)
        self.recordings: dict[tuple[int, int], Any] = {}
        """
        (rows, cache positions read) -> tokens, positions, CUDA graph of a step, its logits. All
        share one memory pool: they never run concurrently, and only these tensors outlive a step.
        """
        self.pool = torch.cuda.graph_pool_handle() if self.recorded else None

    def __call__(self, newest: Sequence[int]) -> Tensor:
        """`next_logits` after the newest tokens; the caller must update `cache.lengths`."""
        past = self.cache.lengths[: len(newest)]
        if self.compiled:
            try:
                return self.run_compiled(newest, past)
            except Exception as error:  # a compiler may raise anything
                reason = f"{type(error).__name__}: {printable(error)}"
                print(f"decode step not compiled: {reason}", flush=True)
                self.compiled = False
                self.recordings.clear()  # frees their memory
        return next_logits(self.model, self.cache, *self.inputs(newest, past))

    def run_compiled(self, newest: Sequence[int], past: Sequence[int]) -> Tensor:
        """
        Compiled step; on a GPU, a CUDA graph replay. The batch is padded with unused slots to one
        of a few sizes.
        """
        if not self.recorded:
            return self.run_fused(*self.inputs(newest, past))
        rows = min(power_of_two(len(past)), len(self.cache.lengths))
        read = min(power_of_two(num_positions_read(past)), self.cache.room - BLOCK)
        unused = [0] * (rows - len(past))
        tokens, positions, _ = self.inputs([*newest, *unused], [*past, *unused])
        if (rows, read) not in self.recordings:
            args = tokens, positions, self.key_positions[:read]
            self.run_fused(*args)  # compile and load kernels before capture
            # thread_local: other threads may use the device, e.g. when the server loads a model
            graph, mode = torch.cuda.CUDAGraph(), "thread_local"
            with CAPTURING, torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode):
                self.recordings[rows, read] = tokens, positions, graph, self.run_fused(*args)
        inputs, their_positions, graph, logits = self.recordings[rows, read]
        inputs.copy_(tokens)
        their_positions.copy_(positions)
        graph.replay()
        return logits[: len(past)].clone()  # the next replay overwrites them

    def run_fused(self, tokens: Tensor, positions: Tensor, key_positions: Tensor) -> Tensor:
        """Compiled step with dynamic len(key_positions) and, if B > 1, dynamic B."""
        for tensor in (key_positions, tokens, positions)[: 3 if len(tokens) > 1 else 1]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.config.recompile_limit = 64  # many model shapes; each thread has its own
        return compiled_next_logits()(self.model, self.cache, tokens, positions, key_positions)

    def inputs(self, newest: Sequence[int], past: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors of a step: tokens (B, 1), positions (B, 1), and the cache positions it reads."""
        tokens, positions = (
            torch.tensor(x, device=self.key_positions.device)[:, None] for x in (newest, past)
        )
        return tokens, positions, self.key_positions[: num_positions_read(past)]


def num_positions_read(past: Sequence[int]) -> int:
    """Number of cache positions a decode step reads, rounded up to BLOCK."""
    return -(-(max(past) + 1) // BLOCK) * BLOCK


def power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


# ---- Generation with tools -----------------------------------------------------------------------


# Code -> result or a future of it; None = inject nothing
Tool = Callable[[str], str | None | Future[str | None]]
# Maximum number of tokens per prefill batch, padding included. A GPU needs large batches; on a
# CPU, small batches of similarly long prompts waste less on padding.
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 2048, 8192
TOOL_WAIT_SECONDS = 0.01  # wait for a tool result when all sequences are idle
TURN_TOKENS = SPECIAL_TOKENS[:5]  # <|bos|>, start and end of both speakers' turns


@dataclass(eq=False)
class Completion:
    """
    One sample of a prompt; it is complete when `finish` is set.

    A sampled turn token is the stop token `end`, which `ids` excludes; `sampled[i]` is False if
    ids[i] was injected by a tool.
    """

    prompt: list[int]
    settings: Sampling
    index: int
    """Index among the samples of the prompt."""
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    finish: Literal["stop", "length", "cancelled"] | None = None
    """stop: the model sampled a stop token; length: max_new_tokens or the context is exhausted."""
    end: int | None = None
    """The sampled stop token."""
    code: list[int] | None = None
    """Tokens since <|python_start|>; None outside a tool call."""
    injected_ids: deque[int] = field(default_factory=deque)
    """Tokens to inject next."""
    pending_tool_call: Future[str | None] | None = None
    """Future of the tool result while the tool is running."""

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.settings.seed}-{self.index}")

    def cancel(self) -> None:
        """Mark the completion as cancelled and cancel its pending tool call."""
        self.finish = self.finish or "cancelled"
        if self.pending_tool_call:
            self.pending_tool_call.cancel()
            self.pending_tool_call = None


MAX_SLOTS = 64
CACHE_SHARE = 0.25  # of the memory: in RL, the rest holds two models, gradients and optimizer


def most_slots(model: GPT, memory_bytes: int) -> int:
    """Number of sequences, 1 to MAX_SLOTS, whose KV cache fits in a share of the memory."""
    return max(1, min(MAX_SLOTS, int(CACHE_SHARE * memory_bytes) // model.new_cache(1).nbytes))


class Engine:
    """
    Generates with `model` (ideally `gpt.inference_copy(model)`), up to `slots` sequences at once;
    default: `most_slots`.

    capacity: maximum tokens of prompt plus completion; default: the model's context length.
    tool: executes the model's tool calls; None = calls get no result. compiled: compile the decode
    step (see COMPILED_ENGINE_TOKENS).
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        slots: int | None = None,
        capacity: int | None = None,
        tool: Tool | None = None,
        compiled: bool = False,
    ):
        self.model, self.tokenizer, self.tool = model, tokenizer, tool
        self.slots = slots or most_slots(model, memory_bytes(model.device)[1])
        on_cpu = model.device.type == "cpu"
        self.prefill_tokens = CPU_PREFILL_TOKENS if on_cpu else GPU_PREFILL_TOKENS
        self.cache = model.new_cache(self.slots, capacity)
        self.decode_step = DecodeStep(model, self.cache, compiled)
        self.waiting: deque[Completion] = deque()
        self.active: list[Completion] = []  # active[i] occupies slot i
        self.calling: list[Completion] = []  # waiting for a tool, without a slot
        self.ends = set(map(tokenizer.special, TURN_TOKENS))
        self.stop: StopRequest | None = None
        """Ends `generate` early; the completions are cancelled."""

    # ---- public interface --------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], settings: Sampling, n: int = 1) -> list[Completion]:
        """Queue `n` samples of a prompt. Raises ValueError like `check`."""
        self.check(prompt)
        shared = list(prompt)  # its identity tells `admit` which samples share a prefill
        samples = [Completion(shared, settings, i) for i in range(n)]
        self.waiting.extend(samples)
        return samples

    def check(self, prompt: Sequence[int]) -> None:
        """Raise ValueError if a prompt is empty or leaves no room for a completion."""
        if not 0 < len(prompt) < self.cache.capacity:
            raise ValueError(
                f"the prompt has {len(prompt):,} tokens; it must have 1 to "
                f"{self.cache.capacity - 1:,} to leave room for the answer; use a shorter prompt"
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sampling,
        n: int = 1,
        seeds: Iterable[int] | None = None,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt. seeds: one per prompt; default: `settings.seed`."""
        each = [replace(settings, seed=seed) for seed in seeds or [settings.seed] * len(prompts)]
        groups = [self.submit(prompt, s, n) for prompt, s in zip(prompts, each, strict=True)]
        while self.busy and not (self.stop and self.stop.asked):
            self.step()
        for completion in (each for group in groups for each in group if not each.finish):
            self.cancel(completion)
        return groups

    def cancel(self, completion: Completion) -> None:
        """Cancel a completion and free its slot."""
        completion.cancel()
        for queue in (self.waiting, self.calling):
            if completion in queue:
                queue.remove(completion)
        self.evict()

    @property
    def busy(self) -> bool:
        """True while any completion is queued, active or waiting for a tool."""
        return bool(self.waiting or self.active or self.calling)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """
        Admit queued completions and decode one token for each active one; return the active ones.

        If all completions wait for tools, wait up to TOOL_WAIT_SECONDS for the first result.
        """
        self.collect_tool_results()
        self.admit()
        if not self.active:
            return []
        grown = list(self.active)
        newest = [c.ids[-1] if c.ids else c.prompt[-1] for c in grown]
        logits = self.decode_step(newest)  # (B, V)
        for slot in range(len(grown)):
            self.cache.lengths[slot] += 1
        uniform = [c.random.random() for c in grown]
        settings = [c.settings for c in grown]
        capped = self.model.device.type != "cpu"
        if any(isinstance(s, PenalizedSampling) for s in settings):
            logits, capped = logits if capped else cap(logits), True
            penalize(logits, settings, [c.ids for c in grown])
        picked = sample(logits, settings, uniform, capped)
        for completion, token in zip(grown, picked, strict=True):
            self.advance(completion, token)
        self.evict()
        return grown

    # ---- slots -------------------------------------------------------------------------------

    def admit(self) -> None:
        """
        Assign free slots to queued completions and prefill their tokens except the last, which is
        the input of the next step. Samples of a prompt copy the cache of an active one.
        """
        sources = {id(c.prompt): slot for slot, c in enumerate(self.active)}
        unfilled: dict[int, list[int]] = {}  # slot -> tokens to prefill
        copies = []
        while self.waiting and len(self.active) < self.slots:
            completion = self.waiting.popleft()
            slot = len(self.active)
            self.active.append(completion)
            self.cache.lengths[slot] = 0
            # resumed after a tool call: prefills its own tokens; a new sample may copy its prompt's
            source = slot if completion.ids else sources.setdefault(id(completion.prompt), slot)
            if source != slot:
                copies.append((source, slot, len(completion.prompt) - 1))
            elif known := (completion.prompt + completion.ids)[:-1]:
                unfilled[slot] = known
        by_length = sorted(unfilled, key=lambda slot: len(unfilled[slot]))
        for slots in fill_batches(by_length, lambda s: (1, len(unfilled[s])), self.prefill_tokens):
            self.prefill(slots, [unfilled[slot] for slot in slots])
        for copy in copies:
            self.cache.copy(*copy)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Prefill several empty slots in one forward pass."""
        tokens = pad_right(prompts, self.tokenizer.bos_id, self.model.device)  # (B, T)
        self.model.hidden(tokens, self.cache.view(slots, tokens.size(1)))
        for slot, prompt in zip(slots, prompts, strict=True):
            self.cache.lengths[slot] = len(prompt)

    def evict(self) -> None:
        """Free the slots of finished and tool-calling completions, filling gaps from the end."""
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

    def advance(self, c: Completion, token: int) -> None:
        """Append the sampled or next injected token; may end the completion or call the tool."""
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
            c.finish = "length"
            c.cancel()

    def call_tool(self, c: Completion, token: int) -> None:
        """Collect the tokens of a tool call; at its end, run the tool."""
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
        """Queue the tokens of a tool result for injection; None = nothing."""
        if answer is not None:
            first, last = map(self.tokenizer.special, ("<|output_start|>", "<|output_end|>"))
            c.injected_ids += [first, *self.tokenizer.encode(answer), last]

    def collect_tool_results(self) -> None:
        """
        Move completions whose tool has finished to the front of the queue. If nothing else can
        run, wait a moment for the first.
        """
        if self.calling and not self.active and not self.waiting:
            pending = [c.pending_tool_call for c in self.calling if c.pending_tool_call]
            wait(pending, TOOL_WAIT_SECONDS, FIRST_COMPLETED)
        for c in list(self.calling):
            call = c.pending_tool_call
            if call is None or not call.done():
                continue
            if error := call.exception():
                print(f"tool call failed: {type(error).__name__}: {printable(error)}", flush=True)
            else:
                self.inject_tool_result(c, call.result())
            c.pending_tool_call = None
            self.calling.remove(c)
            self.waiting.appendleft(c)


# Compiling the decode step twice takes 15 s on two cores; it saves 0.06 ms per token (64 slots,
# d4), and most answers are shorter than a quarter of their limit
COMPILED_ENGINE_TOKENS = 1_000_000


def choose_engine_compile(device: torch.device, most_tokens: int = 0) -> bool:
    """
    Whether to compile the decode step: on a GPU, and on a CPU for many tokens. most_tokens: maximum
    number of tokens to generate.
    """
    pays = device.type == "cuda" or (device.type == "cpu" and most_tokens >= COMPILED_ENGINE_TOKENS)
    return pays and compiler_problem() is None
