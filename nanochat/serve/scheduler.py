"""
Continuous batching for many users: requests come from the event loop, one thread generates.

    GenerationRequest -> Worker.submit -> Reply
    thread: engine.step() -> Answer.advance -> deltas -> Reply.news()

Every model has an engine, and one thread steps them all in turn, so that they do not compete for
the device. Requests wait in the engine's queue, up to a bound. A reply that nobody reads any more
is closed, which frees its slots before the next step.
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

from nanochat.engine import PATIENCE_SECONDS, Completion, Engine, Sampling
from nanochat.serve.openai_api import ApiError, Delta, FinishReason, TokenInfo, TokenLogprob
from nanochat.serve.transcript import Transcript
from nanochat.tokenizer import Tokenizer

LONGEST_RETRY_SECONDS = 60
LOGITS_TOKENS = 512  # of a prompt whose log-probabilities are recorded: logits of them at a time

# ---- Stop strings --------------------------------------------------------------------------------
# Text that may be the beginning of a stop string is held back until it is clear.


class StopFinder:
    """Passes a text on until one of `stops` begins in it; `found` is True from then on."""

    def __init__(self, stops: Sequence[str]):
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The next piece; returns what there is to show of all that came."""
        text, self.held = self.held + text, ""
        if self.found:
            return ""
        begins = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if begins is not None:
            self.found = True
            return text[:begins]
        open_end = max((overlap(text, stop) for stop in self.stops), default=0)
        shown = len(text) - open_end
        self.held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """What was held back, when nothing more comes."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, `stop` itself excluded."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


# ---- Continuous batching -------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to complete `n` times, each until one of `stop` would begin in the text."""

    prompt: list[int]
    sampling: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    parts: bool = True
    """Separate tool calls from text; otherwise all of it is text."""
    echo_from: int | None = None
    """Repeat the prompt from this position on before the completion. None: do not."""
    only_prompt: bool = False
    """Discard what is generated."""
    logprobs: int | None = None
    """Record the log-probability of each token, of an echoed prompt too, and of this many most
    likely alternatives. None: record nothing."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each token of the prompt but the first, once it is prefilled."""

    def record_prompt(self, engine: Engine, hidden: Tensor) -> None:
        """Record the log-probabilities of an echoed prompt; hidden (T, C)."""
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
    Of one token per row of logits (B, V) float32, with the `top[row]` likeliest alternatives. Of
    the model itself: temperature and filters do not count.
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
    One completion of a prompt, as its tokens become text. Used by the thread of the engines alone.

    index: its number among all answers of a reply.
    """

    def __init__(
        self, completion: Completion, tokenizer: Tokenizer, request: GenerationRequest, index: int
    ):
        self.completion, self.tokenizer = completion, tokenizer
        self.request, self.index = request, index
        self.transcript = Transcript(tokenizer)
        self.stops = StopFinder(request.stop)
        self.num_tokens = 0  # taken from the completion
        self.logprobs: list[TokenLogprob] = []  # of each of its tokens, where they are recorded
        self.length = 0  # characters of text, including held-back ones
        self.sent = 0  # characters of text that were passed on
        self.pending: deque[TokenInfo] = deque()  # not passed on yet
        self.echoes = request.echo_from is not None
        self.finish: FinishReason | None = None

    def advance(self) -> list[Delta]:
        """The text of the new tokens of the completion."""
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
        """The prompt as text, with the log-probabilities of its tokens where they are wanted."""
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
        """Pass text on; hold back what may be the beginning of a stop string."""
        if self.stops.found:
            return []
        if self.request.parts and kind != "text":
            return [*self.pass_on(self.stops.close()), Delta(self.index, kind, text)]
        self.length += len(text)
        return self.pass_on(self.stops.add(text))

    def pass_on(self, text: str) -> list[Delta]:
        """The text as a delta, with the tokens that begin in it; nothing for no text."""
        if not text:
            return []
        self.sent += len(text)
        tokens = []
        while self.pending and self.pending[0].start < self.sent:
            tokens.append(self.pending.popleft())
        return [Delta(self.index, "text", text, tokens)]

    def end(self) -> list[Delta]:
        """The last deltas."""
        deltas = [d for kind, text in self.transcript.close() for d in self.show(kind, text)]
        rest: list[TokenInfo] = []
        if not self.stops.found:
            deltas += self.pass_on(self.stops.close())
            rest = list(self.pending)
        stopped = self.stops.found or self.completion.finish == "stop"
        self.finish = "stop" if stopped else "length"
        return [*deltas, Delta(self.index, tokens=rest, finish=self.finish)]


def record_logprobs(answers: Sequence[Answer], logits: Tensor) -> None:
    """Record the log-probability of the newest token where it is wanted; logits (B, V)."""
    wanted = {
        row: answer
        for row, answer in enumerate(answers)
        if answer.request.logprobs is not None
        and len(answer.completion.ids) > len(answer.logprobs)  # it has not just ended
    }
    if wanted:
        newest = [answer.completion.ids[-1] for answer in wanted.values()]
        top = [answer.request.logprobs or 0 for answer in wanted.values()]
        found = log_probabilities(logits[list(wanted)], newest, top)
        for answer, one in zip(wanted.values(), found, strict=True):
            answer.logprobs.append(one)


class Reply:
    """
    The answers to a request: `n` for each prompt, numbered through.

    Belongs to a task of the event loop; the thread adds `answers`, and deltas through `put`.
    `first_seconds` is the time to the first delta, None before.
    """

    def __init__(self, requests: Sequence[GenerationRequest]):
        self.requests = requests
        self.answers: list[Answer] = []
        self.arrived: list[Delta] = []
        self.ready = asyncio.Event()
        self.total = self.unfinished = sum(request.n for request in requests)
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.error: ApiError | None = None
        self.submitted_at = time.perf_counter()
        self.first_seconds: float | None = None

    async def news(self, timeout_seconds: float | None = None) -> list[Delta]:
        """
        The deltas since the last call, at least one; none after `timeout_seconds` without any.

        Raises ApiError where there will be no more.
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
        """Tokens of all prompts and of all answers so far, tool results included."""
        prompt, completion = self.prompt_tokens, sum(a.num_tokens for a in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def put(self, deltas: Sequence[Delta], error: ApiError | None = None) -> None:
        """Add deltas; called on the event loop."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.submitted_at
        self.arrived += deltas
        self.error = self.error or error
        self.ready.set()


class Worker:
    """
    The thread that runs the engines, from `start` to `stop`.

    max_waiting: how many answers may wait for a slot, per engine.
    on_step: called after each step with the number of its tokens and its seconds.
    """

    def __init__(
        self, max_waiting: int = 64, on_step: Callable[[int, float], None] = lambda *_: None
    ):
        self.max_waiting, self.on_step = max_waiting, on_step
        self.wake = threading.Condition()
        self.inbox: deque[Callable[[], None]] = deque()  # what the thread does before a step
        self.open: set[Reply] = set()  # that a task may be waiting for
        self.load: Counter[Engine] = Counter()  # answers that are queued or running
        self.seconds = 1.0  # moving average of the time of an answer, to estimate Retry-After
        self.deadline: float | None = None  # set while the server is being stopped
        self.closed = self.ended = False
        # Below: used by the thread alone
        self.owners: dict[Completion, tuple[Engine, Reply, Answer]] = {}
        self.thread = threading.Thread(target=self.run, name="engines", daemon=True)

    # ---- for the event loop ------------------------------------------------------------------

    def start(self) -> None:
        """Begin; call it on the event loop that will read the replies."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> Reply:
        """
        Queue requests. Raises ApiError when the queue is full or the server stops, ValueError for a
        prompt that does not fit the engine.
        """
        for request in requests:
            engine.check(request.prompt)
        reply = Reply(requests)
        with self.wake:
            if self.deadline is not None:
                raise shutting_down("the server is being stopped")
            if self.ended:
                raise shutting_down("the engines have failed; the server must be restarted")
            load = self.load[engine]
            if load + reply.total > engine.slots + self.max_waiting:
                seconds = max(1, round(self.seconds * (1 + load / engine.slots)))
                wait = {"Retry-After": str(min(LONGEST_RETRY_SECONDS, seconds))}
                message = f"{load} answers are running or queued"
                raise ApiError(429, message, "rate_limit_exceeded", headers=wait)
            self.load[engine] += reply.total
            self.open.add(reply)
            self.enqueue(lambda: self.begin(engine, reply))
        return reply

    def enqueue(self, work: Callable[[], None]) -> None:
        """Let the thread do something before its next step; the caller holds `wake`."""
        self.inbox.append(work)
        self.wake.notify()

    def close(self, reply: Reply) -> None:
        """Nobody reads this reply any more: free its slots before the next step."""
        with self.wake:
            self.open.discard(reply)
            self.enqueue(lambda: self.drop([a.completion for a in reply.answers]))

    def drain(self, seconds: float) -> None:
        """Accept no more requests; abort those that are still running after `seconds`."""
        with self.wake:
            self.deadline = time.monotonic() + seconds
            self.wake.notify()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.thread.join()

    def busy(self, engine: Engine) -> bool:
        """True while an answer of this engine is queued or running."""
        return engine in self.load

    def status(self) -> str:
        """ok, stopping, or broken: the thread has ended."""
        if self.deadline is not None:
            return "stopping"
        return "broken" if self.ended else "ok"

    def counts(self) -> tuple[int, int]:
        """How many answers are running and how many are queued, of all engines."""
        with self.wake:
            running = sum(min(load, engine.slots) for engine, load in self.load.items())
            return running, self.load.total() - running

    # ---- on the thread -----------------------------------------------------------------------

    def run(self) -> None:
        """The body of the thread; should it fail, no reply is left waiting."""
        try:
            self.work()
        finally:
            with self.wake:
                self.ended, left = True, list(self.open)
                self.load.clear()
            error = ApiError(500, "the engines have ended", "generation_failed")
            self.deliver([(reply, [], error) for reply in left])

    def work(self) -> None:
        """Until it is closed: do what is in the inbox, then a step of every busy engine."""
        while True:
            with self.wake:
                while not (self.inbox or self.owners or self.closed):
                    self.wake.wait()
                todo, self.inbox = self.inbox, deque()
                if self.closed:
                    return
            for act in todo:
                act()
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.fail(list(self.owners), shutting_down("the server was stopped"))
            engines = {engine for engine, _, _ in self.owners.values()}
            idle = not any(engine.active or engine.waiting for engine in engines)
            for engine in engines:
                self.step(engine, PATIENCE_SECONDS if idle else 0)

    def begin(self, engine: Engine, reply: Reply) -> None:
        """Submit requests to their engine."""
        engine.on_prefill = lambda c, h: self.owners[c][2].request.record_prompt(engine, h)
        for request in reply.requests:
            for completion in engine.submit(request.prompt, request.sampling, request.n):
                answer = Answer(completion, engine.tokenizer, request, len(reply.answers))
                reply.answers.append(answer)
                self.owners[completion] = (engine, reply, answer)

    def step(self, engine: Engine, patience_seconds: float) -> None:
        """Step an engine, and deliver what is new."""
        started = time.perf_counter()
        try:
            grown = engine.step(patience_seconds)
            record_logprobs([self.owners[completion][2] for completion in grown], engine.logits)
        except Exception as error:  # ends what this engine was doing, not the server
            traceback.print_exc()
            cancel_all(engine)
            mine = [c for c, owner in self.owners.items() if owner[0] is engine]
            self.fail(mine, ApiError(500, f"generation failed: {error!r}", "generation_failed"))
            return
        news: dict[Reply, list[Delta]] = {}
        ended = []
        for completion in grown:
            _, reply, answer = self.owners[completion]
            if deltas := answer.advance():
                news.setdefault(reply, []).extend(deltas)
            if answer.finish:
                self.seconds += 0.1 * (time.perf_counter() - reply.submitted_at - self.seconds)
                ended.append(completion)
        self.drop(ended)
        self.deliver([(reply, deltas, None) for reply, deltas in news.items()])
        if grown:
            self.on_step(len(grown), time.perf_counter() - started)

    def drop(self, completions: Sequence[Completion]) -> None:
        """Forget answers, cancel those that are still running, and make room in the queue."""
        for completion in completions:
            if owner := self.owners.pop(completion, None):
                engine = owner[0]
                engine.cancel(completion)
                with self.wake:
                    self.load[engine] -= 1
                    if not self.load[engine]:
                        del self.load[engine]  # so that an idle model can be unloaded

    def fail(self, completions: Sequence[Completion], error: ApiError) -> None:
        """End answers with an error."""
        replies = {self.owners[c][1] for c in completions}
        self.deliver([(reply, [], error) for reply in replies])
        self.drop(completions)

    def deliver(self, news: Sequence[tuple[Reply, Sequence[Delta], ApiError | None]]) -> None:
        """Hand all news of a step over to the event loop at once."""
        if news and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(
                lambda: [reply.put(deltas, error) for reply, deltas, error in news]
            )


def cancel_all(engine: Engine) -> None:
    """End all completions and free all slots. Needs nothing of a broken device."""
    for queue in (engine.waiting, engine.active, engine.calling):
        for completion in queue:
            completion.cancel()
        queue.clear()
    engine.cache.lengths = [0] * engine.slots


def shutting_down(message: str) -> ApiError:
    return ApiError(503, message, "shutting_down")
