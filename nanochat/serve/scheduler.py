"""
Continuous batching: requests arrive on the event loop; one thread generates.

    request, prompts -> Worker.submit -> Reply
    generation thread: engine.step() -> Answer.advance -> deltas -> Reply.news()

Each model has its own engine; one thread steps all engines in turn so that they do not compete for
the device. Requests wait in the engine's queue, which the worker bounds. Closing a reply frees its
slots before the next step.
"""

import asyncio
import threading
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from nanochat.chat_format import Transcript
from nanochat.engine import Completion, Engine, Sampling
from nanochat.serve.openai_api import ApiError, Asked, Delta, FinishReason, Prompt, bad_field
from nanochat.tokenizer import Tokenizer

RETRY_SECONDS = 2  # Retry-After of a request that finds the queue full


class Answer:
    """
    Converts one completion to text deltas. Used only by the generation thread.

    Text that may be the start of a stop string is held back until later text settles it. index:
    number of the completion within its reply.
    """

    def __init__(self, completion: Completion, tokenizer: Tokenizer, asked: Asked, index: int):
        self.completion, self.kind, self.index = completion, asked.kind, index
        self.stops = list(filter(None, asked.stop))
        self.transcript = Transcript(tokenizer)
        self.num_tokens = 0  # completion tokens processed
        self.held = ""  # text that is not in a delta yet
        self.finish: FinishReason | None = None

    def advance(self) -> list[Delta]:
        """Return the deltas of a step of the completion."""
        c, pieces = self.completion, []
        if self.num_tokens < len(c.ids):
            self.num_tokens = len(c.ids)
            pieces = self.transcript.add(c.ids[-1])
        if c.finish == "stop":  # at a limit, the beginning of a character is no text
            pieces += self.transcript.close()
        deltas = [delta for kind, text in pieces for delta in self.show(kind, text)]
        if c.finish is not None and self.finish is None:
            deltas += self.emit(len(self.held))
            self.finish = "stop" if c.finish == "stop" else "length"
        if self.finish:
            deltas.append(Delta(self.index, finish=self.finish))
        return deltas

    def show(self, kind: str, text: str) -> list[Delta]:
        """Emit new text up to the first stop string, or up to a suffix that may start one."""
        if self.finish:  # at a stop string
            return []
        if kind != "text" and self.kind == "chat":
            return [*self.emit(len(self.held)), Delta(self.index, kind, text)]
        self.held += text
        begins = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if begins:
            self.finish = "stop"
            return self.emit(min(begins))
        overlaps = [prefix_overlap(self.held, stop) for stop in self.stops]
        return self.emit(len(self.held) - max(overlaps, default=0))

    def emit(self, end: int) -> list[Delta]:
        """Return the first `end` characters of the text held back, if any."""
        text, self.held = self.held[:end], self.held[end:]
        return [Delta(self.index, "text", text)] if text else []


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
        self.arrived: asyncio.Queue[Sequence[Delta] | ApiError] = asyncio.Queue()
        self.total = self.unfinished = len(prompts) * (asked.n or 1)

    async def news(self, timeout_seconds: float) -> AsyncIterator[Sequence[Delta]]:
        """
        Yield new deltas until the last one; an empty list after each timeout.

        Raises ApiError if the reply failed.
        """
        while self.unfinished or not self.arrived.empty():
            news = []
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    news = await self.arrived.get()
            if isinstance(news, ApiError):
                raise news
            yield news

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

    def put(self, news: Sequence[Delta] | ApiError) -> None:
        """Add deltas, or the error that ends the reply; called on the event loop."""
        if self.unfinished:
            self.arrived.put_nowait(news)
        if not isinstance(news, ApiError):
            self.unfinished -= sum(delta.finish is not None for delta in news)


class Worker:
    """
    The generation thread: runs all engines from `start` to `stop`.

    max_waiting: maximum number of queued completions per engine.
    """

    def __init__(self, max_waiting: int = 64):
        self.max_waiting = max_waiting
        self.replies: list[Reply] = []  # changed by the event loop, read by the thread
        self.wake = threading.Event()
        self.deadline: float | None = None  # set during shutdown
        self.closed = False
        self.begun: set[Reply] = set()  # in their engines; used only by the generation thread
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
        Queue a request. Raises ApiError if the queue is full or too short for it.
        """
        reply, unfinished = Reply(engine, asked, prompts), self.num_unfinished(engine)
        limit = engine.slots + self.max_waiting
        if reply.total > limit:
            name = "n" if (asked.n or 1) > 1 else asked.prompt_field
            raise bad_field(name, f"{reply.total} completions requested; the limit is {limit}")
        if unfinished + reply.total > limit:
            wait = {"Retry-After": str(RETRY_SECONDS)}
            message = f"{unfinished} completions are running or queued"
            raise ApiError(429, message, "rate_limit_exceeded", headers=wait)
        self.replies.append(reply)
        self.wake.set()
        return reply

    def close(self, reply: Reply) -> None:
        """Stop generating a reply; frees its slots before the next step."""
        self.replies.remove(reply)
        self.wake.set()

    def drain(self, seconds: float) -> None:
        """Abort completions that have not ended after `seconds`."""
        self.deadline = time.monotonic() + seconds

    def stop(self) -> None:
        """Stop the thread and join it."""
        self.closed = True
        self.wake.set()
        self.thread.join()

    def is_busy(self, engine: Engine) -> bool:
        """Whether an engine has replies that are not complete or not sent yet."""
        return any(reply.engine is engine for reply in self.replies)

    def num_unfinished(self, engine: Engine) -> int:
        """Number of queued and running completions of an engine."""
        return sum(reply.unfinished for reply in self.replies if reply.engine is engine)

    def counts(self) -> tuple[int, int]:
        """Numbers of running and queued completions across all engines."""
        engines = {reply.engine for reply in self.replies}
        running = sum(min(self.num_unfinished(engine), engine.slots) for engine in engines)
        return running, sum(reply.unfinished for reply in self.replies) - running

    # ---- called on the generation thread -----------------------------------------------------

    def run(self) -> None:
        """Thread body: generate until stopped."""
        while not self.closed:
            self.wake.wait()
            self.wake.clear()
            self.step_all()

    def step_all(self) -> None:
        """Step the engines of all replies. Keeps no reference to an engine, which may unload."""
        opened = list(self.replies)
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.fail(opened, ApiError(503, "the server shut down", "shutting_down"))
        engines = {reply.engine for reply in (*opened, *self.begun)}
        for engine in engines:
            mine = [reply for reply in opened if reply.engine is engine]
            try:
                self.update(engine, mine)
                engine.step()
                for reply in mine:
                    self.deliver(reply)
            except Exception as error:  # fails this engine's replies, not the server
                traceback.print_exc()
                cancel_all(engine)
                message = f"generation failed: {error!r}"
                self.fail(mine, ApiError(500, message, "generation_failed"))
        if any(engine.busy for engine in engines):
            self.wake.set()

    def update(self, engine: Engine, opened: Sequence[Reply]) -> None:
        """Cancel the completions of replies that were closed, and begin new replies."""
        for reply in [r for r in self.begun if r.engine is engine and r not in opened]:
            self.begun.remove(reply)
            for answer in reply.answers:
                engine.cancel(answer.completion)
        for reply in [r for r in opened if r not in self.begun]:
            self.begun.add(reply)
            for prompt, sampling in reply.prompts:
                for completion in engine.submit(prompt.ids, sampling, reply.asked.n or 1):
                    answer = Answer(completion, engine.tokenizer, reply.asked, len(reply.answers))
                    reply.answers.append(answer)

    def deliver(self, reply: Reply) -> None:
        """Pass the new text of a reply to the event loop; cancel completions at a stop string."""
        growing = [answer for answer in reply.answers if answer.finish is None]
        if deltas := [delta for answer in growing for delta in answer.advance()]:
            self.loop.call_soon_threadsafe(reply.put, deltas)
        for answer in growing:
            if answer.finish and answer.completion.finish is None:
                reply.engine.cancel(answer.completion)

    def fail(self, replies: Sequence[Reply], error: ApiError) -> None:
        """End replies with an error."""
        for reply in replies:
            self.loop.call_soon_threadsafe(reply.put, error)


def cancel_all(engine: Engine) -> None:
    """Cancel all completions without using the device, which may be broken."""
    completions = [*engine.waiting, *engine.active, *engine.calling]
    for completion in completions:
        completion.cancel()  # all, before the first slot is freed: no other moves there
    for completion in completions:
        engine.cancel(completion)
