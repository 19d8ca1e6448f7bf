"""
The engine: generates for the terminal, the server, the evaluations and the RL rollouts.

    prompts -> queue -> slots -> one token per step for every sequence -> Completions

Continuous batching: whenever a sequence ends, the next waiting one takes its slot. A prompt is
read once and shared by its samples. A sequence is a small state machine: what the model writes
between <|python_start|> and <|python_end|> goes to the tool, whose answer is then put in for it,
token by token; while a tool takes its time, the sequence leaves its slot to others. What a sequence
says does not depend on its neighbours. Knows no chat format.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Literal

import torch

from nanochat.common import printable
from nanochat.decode import NextLogits
from nanochat.gpt import GPT
from nanochat.sampling import Sampling, TokenLogprob, likelihoods, sample
from nanochat.tokenizer import Tokenizer

# Code in, its answer out, now or as a future; None: nothing is put in
Tool = Callable[[str], str | None | Future[str | None]]
# Tokens of one pass over waiting prompts, padding included: a GPU is filled by many, while on a
# CPU the least padding counts, that is, prompts of nearly the same length in each pass
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 2048, 8192
LOGITS_TOKENS = 512  # of a prompt whose likelihoods are wanted: so many logits at a time
PATIENCE_SECONDS = 0.01  # how long a step waits for a tool when there is nothing else to do


@dataclass(eq=False)
class Completion:
    """
    One sample of a prompt: grows while the engine runs, whole when `finish` is set.

    `ids` leaves out the token that ended it, `end`; `sampled[i]` is False where a tool's answer was
    put in. `logprobs`, where the settings want them, has an entry for each of `ids`;
    `prompt_logprobs` one for each of `prompt` but the first, shared by its samples.
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
    forced: deque[int] = field(default_factory=deque)
    """Tokens that will be put in next."""
    called: Future[str | None] | None = None
    """The tool's answer, while it is not there."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.settings.seed}-{self.index}")

    @property
    def known(self) -> list[int]:
        """The prompt and what was said so far."""
        return self.prompt + self.ids


class Engine:
    """
    Generates with `model` (best `gpt.for_inference` of it), at most `slots` sequences at a time.

    capacity: tokens of a prompt and its completion together, by default the model's context.
    tool: what answers the model's calls; without one they stay unanswered. compiled: fuse the step
    that writes a token, which is worth it for thousands of them.
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
        self.slots = slots
        self.device = model.device
        self.prefill_tokens = (
            CPU_PREFILL_TOKENS if self.device.type == "cpu" else GPU_PREFILL_TOKENS
        )
        self.cache = model.new_cache(slots, capacity)
        self.next_logits = NextLogits(model, self.cache, compiled)
        self.waiting: deque[Completion] = deque()
        self.active: list[Completion] = []  # number i has slot i
        self.calling: list[Completion] = []  # away until their tool has answered
        self.ends = {tokenizer.bos_id, tokenizer.special("<|assistant_end|>")}

    # ---- what callers use --------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], settings: Sampling, n: int = 1) -> list[Completion]:
        """Queue `n` samples of a prompt. Raises ValueError for one that leaves no room."""
        self.check(prompt)
        shared = list(prompt)  # one list for all samples: that is how they know each other
        noted: list[TokenLogprob] = []
        samples = [Completion(shared, settings, i, prompt_logprobs=noted) for i in range(n)]
        self.waiting.extend(samples)
        return samples

    def check(self, prompt: Sequence[int]) -> None:
        """Raises ValueError for a prompt that is empty or leaves no room for an answer."""
        if not 0 < len(prompt) < self.cache.capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens: it must have at least one, and leave room for "
                f"an answer within {self.cache.capacity}"
            )

    def generate(
        self, prompts: Iterable[Sequence[int]], settings: Sampling, n: int = 1
    ) -> list[list[Completion]]:
        """`n` whole completions of every prompt."""
        groups = [self.submit(prompt, settings, n) for prompt in prompts]
        while self.busy:
            self.step()
        return groups

    def stream(self, prompt: Sequence[int], settings: Sampling) -> Generator[int, None, None]:
        """The tokens of one completion as they come. Closing the iterator ends the completion."""
        completion = self.submit(prompt, settings)[0]
        told = 0
        try:
            while completion.finish is None:
                self.step()
                yield from completion.ids[told:]
                told = len(completion.ids)
        finally:
            self.cancel(completion)

    def cancel(self, completion: Completion) -> None:
        """End a completion now; its slot is free before the next step."""
        if completion.finish is None:
            completion.finish = "cancelled"
        if completion in self.waiting:
            self.waiting.remove(completion)
        if completion in self.calling:
            self.calling.remove(completion)
        if completion.called:
            completion.called.cancel()
            completion.called = None
        self.evict()

    def cancel_all(self) -> None:
        """End whatever waits or grows; every slot is free. Needs nothing of a broken device."""
        for completion in (*self.waiting, *self.active, *self.calling):
            completion.finish = completion.finish or "cancelled"
            if completion.called:
                completion.called.cancel()
                completion.called = None
        for sequences in (self.waiting, self.active, self.calling):
            sequences.clear()
        self.cache.lengths = [0] * self.slots

    @property
    def busy(self) -> bool:
        """True while something waits or grows."""
        return bool(self.waiting or self.active or self.calling)

    @torch.inference_mode()
    def step(self, patience_seconds: float = PATIENCE_SECONDS) -> list[Completion]:
        """
        Let waiting prompts in and every active completion grow by a token; returns those.

        Where all are away at their tools, it waits so long for the first to come back.
        """
        self.take_back(patience_seconds)
        self.admit()
        if not self.active:
            return []
        grown = list(self.active)
        logits = self.next_logits([c.ids[-1] if c.ids else c.prompt[-1] for c in grown])  # (B, V)
        for slot in range(len(grown)):
            self.cache.lengths[slot] += 1
        picked = sample(logits, [c.settings for c in grown], [c.random.random() for c in grown])
        for completion, token in zip(grown, picked, strict=True):
            self.advance(completion, token)
        self.note(grown, logits)
        self.evict()
        return grown

    # ---- slots -------------------------------------------------------------------------------

    def admit(self) -> None:
        """
        Give free slots to those who wait longest, and read their prompts but for the last token,
        which is the first step's input. Samples of one prompt copy what the first of them read.
        """
        readers: dict[int, int] = {id(c.prompt): slot for slot, c in enumerate(self.active)}
        unread, copies = [], []
        while self.waiting and len(self.active) < self.slots:
            completion = self.waiting.popleft()
            slot = len(self.active)
            self.active.append(completion)
            self.cache.lengths[slot] = 0
            reader = slot if completion.ids else readers.setdefault(id(completion.prompt), slot)
            if reader != slot:
                copies.append((reader, slot, len(completion.prompt) - 1))
            elif len(completion.known) > 1:
                unread.append(slot)
        unread.sort(key=lambda slot: len(self.active[slot].known))
        while unread:
            unread = unread[self.read(unread) :]
        for copy in copies:
            self.cache.copy(*copy)

    def read(self, unread: Sequence[int]) -> int:
        """Prefill the first prompts of `unread`, as many as fit one pass; returns how many."""
        prompts = [self.active[slot].known[:-1] for slot in unread]  # the shortest first
        count = 1
        while count < len(prompts) and len(prompts[count]) * (count + 1) <= self.prefill_tokens:
            count += 1
        slots, prompts = unread[:count], prompts[:count]
        T = len(prompts[-1])
        padded = [prompt + [self.tokenizer.bos_id] * (T - len(prompt)) for prompt in prompts]
        view = self.cache.view(slots, T)
        hidden = self.model.hidden(torch.tensor(padded, device=self.device), view)  # (N, T, C)
        for row, slot in enumerate(slots):
            self.cache.lengths[slot] = len(prompts[row])
            c = self.active[slot]
            if c.settings.prompt_logprobs and not c.prompt_logprobs:
                c.prompt_logprobs += self.reread(hidden[row], c.prompt, c.settings.logprobs or 0)
        return count

    def reread(self, hidden: torch.Tensor, prompt: Sequence[int], top: int) -> list[TokenLogprob]:
        """How likely each token of a prompt was after those before it; hidden (T, C)."""
        found = []
        for first in range(0, len(prompt) - 1, LOGITS_TOKENS):
            tokens = prompt[first + 1 : first + 1 + LOGITS_TOKENS]
            logits = self.model.logits(hidden[first : first + len(tokens)])
            found += likelihoods(logits, tokens, [top] * len(tokens))
        return found

    def evict(self) -> None:
        """Free the slots of what is finished or away; the last ones move into the gaps."""
        for slot in reversed(range(len(self.active))):
            c = self.active[slot]
            if c.finish is None and c.called is None:
                continue
            if c.called is not None:
                self.calling.append(c)
            last = len(self.active) - 1
            if slot != last:
                self.cache.copy(last, slot, self.cache.lengths[last])
                self.active[slot] = self.active[last]
            self.active.pop()
            self.cache.lengths[last] = 0

    # ---- one completion ----------------------------------------------------------------------

    def advance(self, completion: Completion, token: int) -> None:
        """Append the sampled token, or the forced one in its place; notice what it means."""
        c = completion
        sampled = not c.forced
        token = token if sampled else c.forced.popleft()
        if sampled and token in self.ends:
            c.finish, c.end = "stop", token
            return
        c.ids.append(token)
        c.sampled.append(sampled)
        if sampled:
            self.call_tool(c, token)
        room = self.cache.capacity - len(c.prompt)
        if len(c.ids) >= min(c.settings.max_new_tokens, room):
            c.finish, c.called = "length", None

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
                c.called = answer
            else:
                self.put_in(c, answer)

    def put_in(self, c: Completion, answer: str | None) -> None:
        """Let a tool's answer follow what the model wrote."""
        if answer is not None:
            c.forced.append(self.tokenizer.special("<|output_start|>"))
            c.forced.extend(self.tokenizer.encode(answer))
            c.forced.append(self.tokenizer.special("<|output_end|>"))

    def take_back(self, patience_seconds: float) -> None:
        """Queue, first of all, those whose tool has answered; wait a moment if all are away."""
        if not self.calling:
            return
        pending = {c.called for c in self.calling if c.called}
        if not self.active and not self.waiting:
            wait(pending, patience_seconds, FIRST_COMPLETED)
        for c in [c for c in self.calling if c.called and c.called.done()]:
            self.calling.remove(c)
            if c.called and (error := c.called.exception()):
                print(f"a tool failed: {type(error).__name__}: {printable(error)}", flush=True)
            elif c.called:
                self.put_in(c, c.called.result())
            c.called = None
            self.waiting.appendleft(c)

    def note(self, grown: Sequence[Completion], logits: torch.Tensor) -> None:
        """Keep how likely the newest token was, for those who want to know; logits (B, V)."""
        rows = [
            row
            for row, c in enumerate(grown)
            if c.settings.logprobs is not None and len(c.ids) > len(c.logprobs)
        ]
        if rows:
            said = [grown[row].ids[-1] for row in rows]
            top = [grown[row].settings.logprobs or 0 for row in rows]
            for row, found in zip(rows, likelihoods(logits[rows], said, top), strict=True):
                grown[row].logprobs.append(found)
