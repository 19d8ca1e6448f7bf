"""
Continuous batching: requests arrive on the event loop; one thread generates.

    request, prompts -> Worker.submit -> Reply
    generation thread: engine.step() -> Answer.advance -> deltas -> Reply.news()

Each model has its own engine; one thread steps all engines in turn so that they do not compete for
the device. Requests wait in the engine's bounded queue. Closing a reply frees its slots before the
next step.
"""

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence

from torch import Tensor

from nanochat.chat_format import Transcript
from nanochat.engine import TOOL_WAIT_SECONDS, Completion, Engine, Sampling
from nanochat.serve.openai_api import (
    ApiError,
    Asked,
    Delta,
    FinishReason,
    Prompt,
    TokenLogprob,
    bad_field,
)
from nanochat.tokenizer import Tokenizer

RETRY_SECONDS = 2  # Retry-After of a request that finds the queue full


def token_logprob(logits: Tensor, token: int, top: int, start: int) -> TokenLogprob:
    """
    From float32 logits (V,): the log-probability of a token that begins at character `start`, and
    those of the `top` most likely tokens, before temperature and sampling filters.
    """
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(top, len(logits)))
    alternatives = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, logprobs[token].item(), alternatives, start)


class Answer:
    """
    Converts one completion to text deltas. Used only by the generation thread.

    Text that may be the start of a stop string is held back until later text settles it. index:
    number of the completion within its reply.
    """

    def __init__(self, completion: Completion, tokenizer: Tokenizer, asked: Asked, index: int):
        self.completion, self.asked, self.index = completion, asked, index
        self.transcript = Transcript(tokenizer)
        self.num_tokens = 0  # completion tokens processed
        self.text, self.sent = "", 0  # characters of text that were emitted
        self.pending: deque[TokenLogprob] = deque()  # their text is held back or incomplete
        self.stopped = False  # at a stop string
        self.finish: FinishReason | None = None

    def advance(self, logits: Tensor) -> list[Delta]:
        """Return the deltas of a step of the completion. logits (V,): those of the step."""
        c, asked, shown = self.completion, self.asked, []
        if self.num_tokens < len(c.ids):
            token, self.num_tokens = c.ids[-1], len(c.ids)
            shown = self.transcript.add(token)
            is_text = asked.kind == "text" or self.transcript.is_text(token)
            if asked.num_logprobs is not None and is_text:
                start = len(self.text)
                self.pending.append(token_logprob(logits, token, asked.num_logprobs, start))
        if c.finish is not None:
            shown += self.transcript.close()
        deltas = [delta for kind, text in shown for delta in self.show(kind, text)]
        if self.stopped:
            self.finish, self.pending = "stop", deque()
        elif c.finish is not None:
            deltas += self.emit(len(self.text))
            self.finish = "stop" if c.finish == "stop" else "length"
        if self.finish:
            deltas.append(Delta(self.index, tokens=list(self.pending), finish=self.finish))
        return deltas

    def show(self, kind: str, text: str) -> list[Delta]:
        """Emit new text up to the first stop string, or up to a suffix that may start one."""
        if self.stopped:
            return []
        if kind != "text" and self.asked.kind == "chat":
            return [*self.emit(len(self.text)), Delta(self.index, kind, text)]
        self.text += text
        new, stops = self.text[self.sent :], list(filter(None, self.asked.stop))
        begins = [at for stop in stops if (at := new.find(stop)) >= 0]
        self.stopped = bool(begins)
        held = max((prefix_overlap(new, stop) for stop in stops), default=0)
        return self.emit(self.sent + min(begins, default=len(new) - held))

    def emit(self, end: int) -> list[Delta]:
        """Return the text up to character `end` and the tokens that begin in it, if any."""
        text, self.sent, tokens = self.text[self.sent : end], end, []
        while self.pending and self.pending[0].start < end:
            tokens.append(self.pending.popleft())
        return [Delta(self.index, "text", text, tokens)] if text else []


def prefix_overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Reply:
    """
    The completions of a request, `asked.n` per prompt, numbered consecutively.

    Owned by an event loop task; the generation thread adds `answers` and, through `put`, deltas.
    """

    def __init__(self, engine: Engine, asked: Asked, prompts: Sequence[tuple[Prompt, Sampling]]):
        self.engine, self.asked, self.prompts = engine, asked, prompts
        self.answers: list[Answer] = []
        self.arrived: list[Delta] = []
        self.ready = asyncio.Event()
        self.total = self.unfinished = len(prompts) * (asked.n or 1)
        self.error: ApiError | None = None

    async def news(self, timeout_seconds: float) -> AsyncIterator[list[Delta]]:
        """
        Yield new deltas until the last one; an empty list after each timeout.

        Raises ApiError if the reply failed, after its last delta.
        """
        while self.unfinished or self.arrived:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self.ready.wait()
            except TimeoutError:
                pass
            self.ready.clear()
            deltas, self.arrived = self.arrived, []
            yield deltas
            if self.error and not self.arrived:
                raise self.error

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of all prompts and completions so far, including tool results."""
        prompt = sum(len(prompt.ids) for prompt, _ in self.prompts)
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def put(self, deltas: Sequence[Delta], error: ApiError | None = None) -> None:
        """Add deltas; called on the event loop."""
        self.arrived += deltas
        self.unfinished -= sum(delta.finish is not None for delta in deltas)
        self.error = (error or self.error) if self.unfinished else None
        self.ready.set()


class Worker:
    """
    The generation thread: runs all engines from `start` to `stop`.

    max_waiting: maximum number of queued completions per engine.
    """

    def __init__(self, max_waiting: int = 64):
        self.max_waiting = max_waiting
        self.open: list[Reply] = []  # changed by the event loop, read by the thread
        self.wake = threading.Event()
        self.deadline: float | None = None  # set during shutdown
        self.closed = False
        # Used only by the generation thread
        self.begun: set[Reply] = set()
        self.owners: dict[Completion, tuple[Reply, Answer]] = {}
        self.thread = threading.Thread(target=self.run, name="engines", daemon=True)

    # ---- called on the event loop ------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. Call this on the event loop that reads the replies."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def submit(
        self, engine: Engine, asked: Asked, prompts: Sequence[tuple[Prompt, Sampling]]
    ) -> Reply:
        """
        Queue a request. Raises ApiError if the queue is full or too short for it, or the server is
        shutting down.
        """
        if self.deadline is not None:
            raise ApiError(503, "the server is shutting down", "shutting_down")
        reply, load = Reply(engine, asked, prompts), self.load(engine)
        limit = engine.slots + self.max_waiting
        if reply.total > limit:
            raise bad_field("n", f"{reply.total} completions requested; the limit is {limit}")
        if load + reply.total > limit:
            wait = {"Retry-After": str(RETRY_SECONDS)}
            message = f"{load} completions are running or queued"
            raise ApiError(429, message, "rate_limit_exceeded", headers=wait)
        self.open.append(reply)
        self.wake.set()
        return reply

    def close(self, reply: Reply) -> None:
        """Stop generating a reply; frees its slots before the next step."""
        self.open.remove(reply)
        self.wake.set()

    def drain(self, seconds: float) -> None:
        """Reject new requests, and abort completions that have not ended after `seconds`."""
        self.deadline = time.monotonic() + seconds

    def stop(self) -> None:
        """Stop the thread and join it."""
        self.closed = True
        self.wake.set()
        self.thread.join()

    def busy(self, engine: Engine) -> bool:
        """Whether an engine has replies that are not complete or not sent yet."""
        return any(reply.engine is engine for reply in self.open)

    def load(self, engine: Engine) -> int:
        """Number of queued and running completions of an engine."""
        return sum(reply.unfinished for reply in self.open if reply.engine is engine)

    def counts(self) -> tuple[int, int]:
        """Numbers of running and queued completions across all engines."""
        engines = {reply.engine for reply in self.open}
        running = sum(min(self.load(engine), engine.slots) for engine in engines)
        return running, sum(reply.unfinished for reply in self.open) - running

    # ---- called on the generation thread -----------------------------------------------------

    def run(self) -> None:
        """Thread body: generate until stopped."""
        while not self.closed:
            self.wake.wait()
            self.wake.clear()
            self.step_all()

    def step_all(self) -> None:
        """Step the engines of all replies. Keeps no reference to an engine, which may unload."""
        opened = list(self.open)
        if self.deadline is not None and time.monotonic() > self.deadline:
            for reply in opened:
                self.deliver(reply, error=ApiError(503, "the server shut down", "shutting_down"))
        engines = {reply.engine for reply in (*opened, *self.begun)}
        idle = not any(engine.active or engine.waiting for engine in engines)
        for engine in engines:
            mine = [reply for reply in opened if reply.engine is engine]
            try:
                self.update(engine, mine)
                self.step(engine, TOOL_WAIT_SECONDS if idle else 0)
            except Exception as error:  # fails this engine's replies, not the server
                traceback.print_exc()
                cancel_all(engine)
                failure = ApiError(500, f"generation failed: {error!r}", "generation_failed")
                for reply in mine:
                    self.deliver(reply, error=failure)
        if any(engine.busy for engine in engines):
            self.wake.set()

    def update(self, engine: Engine, opened: Sequence[Reply]) -> None:
        """Cancel the completions of replies that were closed, and begin new replies."""
        for reply in [r for r in self.begun if r.engine is engine and r not in opened]:
            self.begun.remove(reply)
            for answer in reply.answers:
                del self.owners[answer.completion]
                engine.cancel(answer.completion)
        for reply in [r for r in opened if r not in self.begun]:
            self.begun.add(reply)
            for prompt, sampling in reply.prompts:
                for completion in engine.submit(prompt.ids, sampling, reply.asked.n or 1):
                    answer = Answer(completion, engine.tokenizer, reply.asked, len(reply.answers))
                    reply.answers.append(answer)
                    self.owners[completion] = (reply, answer)

    def step(self, engine: Engine, patience_seconds: float) -> None:
        """Step an engine and deliver the new deltas."""
        for row, completion in enumerate(engine.step(patience_seconds)):
            reply, answer = self.owners[completion]
            if deltas := answer.advance(engine.logits[row]):
                self.deliver(reply, deltas)
            if answer.finish and completion.finish is None:  # at a stop string
                engine.cancel(completion)

    def deliver(
        self, reply: Reply, deltas: Sequence[Delta] = (), error: ApiError | None = None
    ) -> None:
        """Pass deltas or an error to the event loop."""
        self.loop.call_soon_threadsafe(reply.put, deltas, error)


def cancel_all(engine: Engine) -> None:
    """Cancel all completions and free all slots without using the device, which may be broken."""
    for queue in (engine.waiting, engine.active, engine.calling):
        for completion in queue:
            completion.cancel()
        queue.clear()
    engine.cache.lengths = [0] * engine.slots
