"""
Continuous batching: requests arrive on the event loop; one thread generates.

    GenerationRequest -> Worker.submit -> Reply
    generation thread: engine.step() -> Answer.advance -> deltas -> Reply.news()

Each model has its own engine; one thread steps all engines in turn so that they do not compete for
the device. Requests wait in the engine's bounded queue. Closing a reply frees its slots before the
next step.
"""

import asyncio
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanochat.chat_format import Transcript
from nanochat.engine import TOOL_WAIT_SECONDS, Completion, Engine, Sampling
from nanochat.serve.openai_api import ApiError, Delta, FinishReason, TokenInfo, TokenLogprob
from nanochat.tokenizer import Tokenizer

RETRY_SECONDS = 2  # Retry-After of a request that finds the queue full
LOGITS_TOKENS = 512  # prompt tokens per logits chunk when recording log-probabilities

# ---- Stop strings --------------------------------------------------------------------------------
# Text that may be the start of a stop string is held back until later text settles it.


class StopFinder:
    """Passes text on until the first of `stops` begins; then `found` is True."""

    def __init__(self, stops: Sequence[str]):
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Add a piece of text; returns the text that can be emitted now."""
        text, self.held = self.held + text, ""
        if self.found:
            return ""
        begins = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if begins is not None:
            self.found = True
            return text[:begins]
        shown = len(text) - max((prefix_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """End the text; returns what was held back."""
        held, self.held = self.held, ""
        return held


def prefix_overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


# ---- Continuous batching -------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt with `n` completions, each truncated before the first of the `stop` strings."""

    prompt: list[int]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    parts: bool = True
    """Separate tool calls from text; otherwise everything is text."""
    echo_from: int | None = None
    """Echo the prompt, from this token on, before the completion. None: no echo."""
    only_prompt: bool = False
    """Discard the generated tokens."""
    logprobs: int | None = None
    """Number of alternatives to record with each token's log-probability, including echoed prompt
    tokens. None: record nothing."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of all prompt tokens but the first; set by prefill."""

    def record_prompt(self, engine: Engine, hidden: Tensor) -> None:
        """Record the log-probabilities of an echoed prompt; hidden: (T, C)."""
        if self.logprobs is None or self.echo_from is None or self.prompt_logprobs:
            return
        for first in range(0, len(self.prompt) - 1, LOGITS_TOKENS):
            tokens = self.prompt[first + 1 : first + 1 + LOGITS_TOKENS]
            logits = engine.model.logits(hidden[first : first + len(tokens)])
            top = [self.logprobs] * len(tokens)
            self.prompt_logprobs.extend(log_probabilities(logits, tokens, top))


def log_probabilities(
    logits: Tensor, tokens: Sequence[int], top: Sequence[int]
) -> list[TokenLogprob]:
    """
    For each row of float32 logits (B, V): the log-probability of its token and those of the
    `top[row]` most likely tokens, before temperature and sampling filters.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(top), logits.size(1)), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, chosen[row], list(zip(ids[row][:k], values[row][:k], strict=True)))
        for row, (token, k) in enumerate(zip(tokens, top, strict=True))
    ]


class Answer:
    """
    Converts one completion to text deltas. Used only by the generation thread.

    index: number of the completion within its reply.
    """

    def __init__(
        self, completion: Completion, tokenizer: Tokenizer, request: GenerationRequest, index: int
    ):
        self.completion, self.tokenizer = completion, tokenizer
        self.request, self.index = request, index
        self.transcript = Transcript(tokenizer)
        self.stops = StopFinder(request.stop)
        self.num_tokens = 0  # completion tokens processed
        self.logprobs: list[TokenLogprob] = []  # one per token if they are recorded
        self.length = 0  # characters of text, including held-back ones
        self.sent = 0  # characters of text emitted
        self.pending: deque[TokenInfo] = deque()  # tokens whose text is held back or not complete
        self.echoes = request.echo_from is not None
        self.finish: FinishReason | None = None

    def advance(self) -> list[Delta]:
        """Return the deltas of the tokens added to the completion since the last call."""
        c, request = self.completion, self.request
        deltas = [self.echo_prompt()] if self.echoes else []
        while self.num_tokens < len(c.ids) and not (self.stops.found or request.only_prompt):
            token = c.ids[self.num_tokens]
            shown = self.transcript.add(token)
            if self.logprobs and (not request.parts or self.transcript.is_text(token)):
                self.pending.append(TokenInfo(self.logprobs[self.num_tokens], self.length))
            for kind, text in shown:
                deltas += self.show(kind, text)
            self.num_tokens += 1
        return deltas + self.end() if self.stops.found or c.finish is not None else deltas

    def echo_prompt(self) -> Delta:
        """Return the prompt as text, with its log-probabilities if requested."""
        transcript, text, tokens, self.echoes = Transcript(self.tokenizer), "", [], False
        prompt = list(enumerate(self.request.prompt))
        for i, token in prompt[self.request.echo_from :]:
            if self.request.logprobs is not None:
                noted = self.request.prompt_logprobs[i - 1] if i else None
                tokens.append(TokenInfo(noted or TokenLogprob(token, None, []), len(text)))
            if i or token != self.tokenizer.bos_id:
                text += "".join(shown for _, shown in transcript.add(token))
        text += "".join(shown for _, shown in transcript.close())
        self.length = self.sent = len(text)
        return Delta(self.index, "text", text, tokens)

    def show(self, kind: str, text: str) -> list[Delta]:
        """Emit text, except for a suffix that may start a stop string."""
        if self.stops.found:
            return []
        if self.request.parts and kind != "text":
            return [*self.pass_on(self.stops.close()), Delta(self.index, kind, text)]
        self.length += len(text)
        return self.pass_on(self.stops.add(text))

    def pass_on(self, text: str) -> list[Delta]:
        """Return text as a delta with the tokens that begin in it; no delta for empty text."""
        if not text:
            return []
        self.sent += len(text)
        tokens = []
        while self.pending and self.pending[0].start < self.sent:
            tokens.append(self.pending.popleft())
        return [Delta(self.index, "text", text, tokens)]

    def end(self) -> list[Delta]:
        """Flush the transcript and return the last deltas."""
        deltas = [d for kind, text in self.transcript.close() for d in self.show(kind, text)]
        rest: list[TokenInfo] = []
        if not self.stops.found:
            deltas += self.pass_on(self.stops.close())
            rest = list(self.pending)
        stopped = self.stops.found or self.completion.finish == "stop"
        self.finish = "stop" if stopped else "length"
        return [*deltas, Delta(self.index, tokens=rest, finish=self.finish)]


def record_logprobs(answers: Sequence[Answer], logits: Tensor) -> None:
    """Record the log-probability of each newest token if requested; logits: (B, V)."""
    wanted = {
        row: answer
        for row, answer in enumerate(answers)
        if answer.request.logprobs is not None
        and len(answer.completion.ids) > len(answer.logprobs)  # no new token if it just ended
    }
    if wanted:
        newest = [answer.completion.ids[-1] for answer in wanted.values()]
        top = [answer.request.logprobs or 0 for answer in wanted.values()]
        found = log_probabilities(logits[list(wanted)], newest, top)
        for answer, one in zip(wanted.values(), found, strict=True):
            answer.logprobs.append(one)


class Reply:
    """
    The completions of a request, `n` per prompt, numbered consecutively.

    Owned by an event loop task; the generation thread adds `answers` and, through `put`, deltas.
    """

    def __init__(self, requests: Sequence[GenerationRequest]):
        self.requests = requests
        self.answers: list[Answer] = []
        self.arrived: list[Delta] = []
        self.ready = asyncio.Event()
        self.total = self.unfinished = sum(request.n for request in requests)
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.num_dropped = 0  # tokens of old turns that were left out
        self.error: ApiError | None = None

    async def news(self, timeout_seconds: float | None = None) -> list[Delta]:
        """
        Wait for deltas and return all since the last call; an empty list after the timeout.

        Raises ApiError if the reply failed, after its last delta.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ready.wait()
        except TimeoutError:
            return []
        self.ready.clear()
        deltas, self.arrived = self.arrived, []
        self.unfinished -= sum(delta.finish is not None for delta in deltas)
        if self.error and not deltas:
            raise self.error
        if self.error:
            self.ready.set()
        return deltas

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of all prompts and completions so far, including tool results."""
        prompt, completion = self.prompt_tokens, sum(a.num_tokens for a in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def put(self, deltas: Sequence[Delta], error: ApiError | None = None) -> None:
        """Add deltas; called on the event loop."""
        self.arrived += deltas
        self.error = self.error or error
        self.ready.set()


class Worker:
    """
    The generation thread: runs all engines from `start` to `stop`.

    max_waiting: maximum number of queued completions per engine.
    """

    def __init__(self, max_waiting: int = 64):
        self.max_waiting = max_waiting
        self.wake = threading.Condition()
        self.inbox: deque[Callable[[], None]] = deque()  # calls to make before the next step
        self.open: set[Reply] = set()  # replies that a task may be waiting for
        self.load: Counter[Engine] = Counter()  # queued and running completions
        self.deadline: float | None = None  # set during shutdown
        self.closed = self.ended = False
        # Used only by the generation thread
        self.owners: dict[Completion, tuple[Engine, Reply, Answer]] = {}
        self.thread = threading.Thread(target=self.run, name="engines", daemon=True)

    # ---- called on the event loop ------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Call this on the event loop that reads the replies."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> Reply:
        """
        Queue requests. Raises ApiError if the queue is full or the server is shutting down, and
        ValueError for a prompt that does not fit the engine.
        """
        for request in requests:
            engine.check(request.prompt)
        reply = Reply(requests)
        with self.wake:
            if self.deadline is not None:
                raise shutdown_error("the server is shutting down")
            if self.ended:
                raise shutdown_error("the generation thread crashed; restart the server")
            load = self.load[engine]
            if load + reply.total > engine.slots + self.max_waiting:
                wait = {"Retry-After": str(RETRY_SECONDS)}
                message = f"{load} completions are running or queued"
                raise ApiError(429, message, "rate_limit_exceeded", headers=wait)
            self.load[engine] += reply.total
            self.open.add(reply)
            self.enqueue(lambda: self.begin(engine, reply))
        return reply

    def enqueue(self, work: Callable[[], None]) -> None:
        """Have the thread call `work` before its next step. The caller must hold `wake`."""
        self.inbox.append(work)
        self.wake.notify()

    def close(self, reply: Reply) -> None:
        """Stop generating a reply; frees its slots before the next step."""
        with self.wake:
            self.open.discard(reply)
            self.enqueue(lambda: self.drop([a.completion for a in reply.answers]))

    def drain(self, seconds: float) -> None:
        """Reject new requests, and abort completions that have not ended after `seconds`."""
        with self.wake:
            self.deadline = time.monotonic() + seconds
            self.wake.notify()

    def stop(self) -> None:
        """Stop the thread and join it."""
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.thread.join()

    def busy(self, engine: Engine) -> bool:
        """Whether completions of this engine are queued or running."""
        return engine in self.load

    def status(self) -> str:
        """ok, stopping, or broken (the generation thread has exited)."""
        if self.deadline is not None:
            return "stopping"
        return "broken" if self.ended else "ok"

    def counts(self) -> tuple[int, int]:
        """Numbers of running and queued completions across all engines."""
        with self.wake:
            running = sum(min(load, engine.slots) for engine, load in self.load.items())
            return running, self.load.total() - running

    # ---- called on the generation thread -----------------------------------------------------

    def run(self) -> None:
        """Thread body. When it exits, open replies end with an error instead of waiting."""
        try:
            self.work()
        finally:
            with self.wake:
                self.ended, left = True, list(self.open)
                self.load.clear()
            error = ApiError(500, "the generation thread exited", "generation_failed")
            self.deliver([(reply, [], error) for reply in left])

    def work(self) -> None:
        """Until closed: make the calls in the inbox, then step every busy engine."""
        while True:
            with self.wake:
                while not (self.inbox or self.owners or self.closed):
                    self.wake.wait()
                todo, self.inbox = self.inbox, deque()
                if self.closed:
                    return
            while todo:
                todo.popleft()()
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.fail(list(self.owners), shutdown_error("the server shut down"))
            engines = {engine for engine, _, _ in self.owners.values()}
            idle = not any(engine.active or engine.waiting for engine in engines)
            while engines:  # keeps no reference to an engine, which may be unloaded
                self.step(engines.pop(), TOOL_WAIT_SECONDS if idle else 0)

    def begin(self, engine: Engine, reply: Reply) -> None:
        """Submit the requests of a reply to their engine."""
        engine.on_prefill = lambda c, h: self.owners[c][2].request.record_prompt(engine, h)
        for request in reply.requests:
            for completion in engine.submit(request.prompt, request.sampling, request.n):
                answer = Answer(completion, engine.tokenizer, request, len(reply.answers))
                reply.answers.append(answer)
                self.owners[completion] = (engine, reply, answer)

    def step(self, engine: Engine, patience_seconds: float) -> None:
        """Step an engine and deliver the new deltas."""
        try:
            grown = engine.step(patience_seconds)
            record_logprobs([self.owners[completion][2] for completion in grown], engine.logits)
            news: dict[Reply, list[Delta]] = {}
            ended = []
            for completion in grown:
                _, reply, answer = self.owners[completion]
                if deltas := answer.advance():
                    news.setdefault(reply, []).extend(deltas)
                if answer.finish:
                    ended.append(completion)
        except Exception as error:  # fails this engine's replies, not the server
            traceback.print_exc()
            cancel_all(engine)
            mine = [c for c, owner in self.owners.items() if owner[0] is engine]
            self.fail(mine, ApiError(500, f"generation failed: {error!r}", "generation_failed"))
            return
        self.drop(ended)
        self.deliver([(reply, deltas, None) for reply, deltas in news.items()])

    def drop(self, completions: Sequence[Completion]) -> None:
        """Forget completions: cancel the running ones and update the load."""
        for completion in completions:
            if owner := self.owners.pop(completion, None):
                engine = owner[0]
                engine.cancel(completion)
                with self.wake:
                    self.load[engine] -= 1
                    if not self.load[engine]:
                        del self.load[engine]  # an idle model can be unloaded

    def fail(self, completions: Sequence[Completion], error: ApiError) -> None:
        """End the replies of these completions with an error."""
        self.deliver([(reply, [], error) for reply in {self.owners[c][1] for c in completions}])
        self.drop(completions)

    def deliver(self, news: Sequence[tuple[Reply, Sequence[Delta], ApiError | None]]) -> None:
        """Pass deltas and errors to the event loop in a single call."""
        if news and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(
                lambda: [reply.put(deltas, error) for reply, deltas, error in news]
            )


def cancel_all(engine: Engine) -> None:
    """Cancel all completions and free all slots without using the device, which may be broken."""
    for queue in (engine.waiting, engine.active, engine.calling):
        for completion in queue:
            completion.cancel()
        queue.clear()
    engine.cache.lengths = [0] * engine.slots


def shutdown_error(message: str) -> ApiError:
    return ApiError(503, message, "shutting_down")
