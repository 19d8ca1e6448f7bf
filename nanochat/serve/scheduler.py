"""
Engines among many users: requests come from the server's event loop, one thread generates.

    Ask -> Worker.submit -> Reply;  thread: engine.step() -> Answer -> pieces -> Reply.news()

Every model has an engine, and one thread steps them all in turn, so that they do not fight over the
device. What is asked waits in the engine's queue, up to a bound. A reply that nobody reads any more
is closed, which frees its slots before the next step. Knows nothing of HTTP.
"""

import asyncio
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanochat.chat_format import Transcript
from nanochat.engine import PATIENCE_SECONDS, Completion, Engine, Sampling, TokenLogprob
from nanochat.tokenizer import Tokenizer

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


Finish = Literal["stop", "length"]
LONGEST_RETRY_SECONDS = 60


class Busy(Exception):
    """The queue is full; there will be room in about `seconds`."""

    def __init__(self, message: str, seconds: int):
        super().__init__(message)
        self.seconds = seconds


class Closing(Exception):
    """The server is being stopped."""


class Failed(Exception):
    """The engine could not go on with this request."""


@dataclass(frozen=True)
class Ask:
    """A prompt to be continued `n` times, each until one of `stop` would begin in the text."""

    prompt: list[int]
    settings: Sampling
    n: int = 1
    stop: tuple[str, ...] = ()
    parts: bool = True
    """Tell calls of the tool from text; else all of it is text."""
    hidden: int = 1
    """So many tokens at the start of the prompt are ours, not the user's."""


class Said(NamedTuple):
    """A token of the text: how likely it was, and the character of the text it begins at."""

    logprob: TokenLogprob
    start: int


class Piece(NamedTuple):
    """What is new of one answer; `finish` is set in its last piece."""

    index: int
    kind: str = "text"
    text: str = ""
    said: Sequence[Said] = ()
    finish: Finish | None = None


class Answer:
    """
    One sample of a prompt, as its tokens become text. Lives on the thread of the engines.

    index: its number among all answers of a reply.
    """

    def __init__(self, completion: Completion, tokenizer: Tokenizer, ask: Ask, index: int):
        self.completion, self.ask, self.index = completion, ask, index
        self.transcript = Transcript(tokenizer)
        self.stops = StopFinder(ask.stop)
        self.tokens = 0  # that were taken from the completion
        self.length = 0  # characters of text that were read, what is held back included
        self.told = 0  # characters of text that were passed on
        self.said: deque[Said] = deque()  # not passed on yet
        self.finish: Finish | None = None

    def advance(self) -> list[Piece]:
        """The text of what the completion grew by."""
        c, pieces = self.completion, []
        while self.tokens < len(c.ids) and not self.stops.found:
            token = c.ids[self.tokens]
            shown = self.transcript.add(token)
            if c.logprobs and (not self.ask.parts or self.transcript.is_text(token)):
                self.said.append(Said(c.logprobs[self.tokens], self.length))
            for kind, text in shown:
                pieces += self.show(kind, text)
            self.tokens += 1
        if self.stops.found or c.finish is not None:
            pieces += self.end()
        return pieces

    def show(self, kind: str, text: str) -> list[Piece]:
        """Pass text on; where a stop may have begun in it, keep it back until that is clear."""
        if self.stops.found:
            return []
        if self.ask.parts and kind != "text":
            return [*self.pass_on(self.stops.close()), Piece(self.index, kind, text)]
        self.length += len(text)
        return self.pass_on(self.stops.add(text))

    def pass_on(self, text: str) -> list[Piece]:
        """A piece of text, with those tokens that begin in what was passed on."""
        if not text:
            return []
        self.told += len(text)
        said = []
        while self.said and self.said[0].start < self.told:
            said.append(self.said.popleft())
        return [Piece(self.index, "text", text, said)]

    def end(self) -> list[Piece]:
        """The last pieces."""
        pieces = []
        for kind, text in self.transcript.close():
            pieces += self.show(kind, text)
        if not self.stops.found:
            pieces += self.pass_on(self.stops.close())
        rest = () if self.stops.found else tuple(self.said)
        stopped = self.stops.found or self.completion.finish == "stop"
        self.finish = "stop" if stopped else "length"
        return [*pieces, Piece(self.index, said=rest, finish=self.finish)]


class Reply:
    """
    What comes of a request: `n` answers to each of its asks, numbered through.

    Belongs to the task that asked; the thread gives it `answers`, and news through `put`.
    `first_seconds` is the time until the first piece was there, None before.
    """

    def __init__(self, asks: Sequence[Ask]):
        self.asks = list(asks)
        self.answers: list[Answer] = []
        self.arrived: list[Piece] = []
        self.ready = asyncio.Event()
        self.total = self.unfinished = sum(ask.n for ask in asks)
        self.error: Exception | None = None
        self.asked_at = time.perf_counter()
        self.first_seconds: float | None = None

    async def news(self, patience_seconds: float | None = None) -> list[Piece]:
        """
        The pieces since the last call, at least one; none when `patience_seconds` passed without.

        Raises Failed or Closing where there will be no more.
        """
        try:
            async with asyncio.timeout(patience_seconds):
                await self.ready.wait()
        except TimeoutError:
            return []
        self.ready.clear()
        pieces, self.arrived = self.arrived, []
        self.unfinished -= sum(piece.finish is not None for piece in pieces)
        if self.error and not pieces:
            raise self.error
        if self.error:
            self.ready.set()
        return pieces

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(ask.prompt) for ask in self.asks)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far, a tool's included."""
        return sum(answer.tokens for answer in self.answers)

    def put(self, pieces: Sequence[Piece], error: Exception | None = None) -> None:
        """Called on the event loop when there is something new."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.asked_at
        self.arrived += pieces
        self.error = self.error or error
        self.ready.set()


class Worker:
    """
    The thread that runs the engines, from `start` to `stop`.

    max_waiting: how many answers may wait for a slot, per engine.
    on_step: told, after each step, how many tokens it made and how long it took.
    """

    def __init__(
        self, max_waiting: int = 64, on_step: Callable[[int, float], None] = lambda *_: None
    ):
        self.max_waiting, self.on_step = max_waiting, on_step
        self.wake = threading.Condition()
        self.inbox: deque[Callable[[], None]] = deque()  # what the thread does before a step
        self.open: set[Reply] = set()  # that somebody may be waiting for
        self.load: Counter[Engine] = Counter()  # answers that wait or grow
        self.seconds = 1.0  # that an answer took lately, for a guess when there will be room
        self.deadline: float | None = None  # set while the server is being stopped
        self.closed = self.ended = False
        # Below: of the thread alone
        self.owners: dict[Completion, tuple[Engine, Reply, Answer]] = {}
        self.thread = threading.Thread(target=self.run, name="engines", daemon=True)

    # ---- for the event loop ------------------------------------------------------------------

    def start(self) -> None:
        """Begin; call it on the event loop that will read the replies."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def submit(self, engine: Engine, asks: Sequence[Ask]) -> Reply:
        """
        Queue a request. Raises Busy when the queue is full, Closing when the server stops,
        ValueError for a prompt that does not fit the engine.
        """
        for ask in asks:
            engine.check(ask.prompt)
        reply = Reply(asks)
        with self.wake:
            if self.deadline is not None:
                raise Closing("the server is being stopped")
            if self.ended:
                raise Closing("the engines have failed; the server must be started anew")
            waiting = self.load[engine] + reply.total - engine.slots
            if waiting > self.max_waiting:
                rounds = 1 + self.load[engine] / engine.slots
                seconds = min(LONGEST_RETRY_SECONDS, max(1, round(self.seconds * rounds)))
                raise Busy(f"{self.load[engine]} answers are being written or waited for", seconds)
            self.load[engine] += reply.total
            self.open.add(reply)
            self.inbox.append(lambda: self.begin(engine, reply))
            self.wake.notify()
        return reply

    def close(self, reply: Reply) -> None:
        """Nobody reads this reply any more: its slots are free before the next step."""
        with self.wake:
            self.open.discard(reply)
            self.inbox.append(lambda: self.drop([a.completion for a in reply.answers]))
            self.wake.notify()

    def drain(self, seconds: float) -> None:
        """Take no more requests; those under way have so long, then they are ended with Closing."""
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
        """True while an answer of this engine waits or grows."""
        return engine in self.load

    def status(self) -> str:
        """ok, stopping, or broken: the thread has ended."""
        if self.deadline is not None:
            return "stopping"
        return "broken" if self.ended else "ok"

    def counts(self) -> tuple[int, int]:
        """How many answers grow and how many wait, of all engines."""
        with self.wake:
            running = [min(load, engine.slots) for engine, load in self.load.items()]
            return sum(running), self.load.total() - sum(running)

    # ---- on the thread -----------------------------------------------------------------------

    def run(self) -> None:
        """The thread's life; should it end early, nobody is left waiting."""
        try:
            self.work()
        finally:
            with self.wake:
                self.ended, left = True, list(self.open)
                self.load.clear()
            self.tell([(reply, [], Failed("the engines have ended")) for reply in left])

    def work(self) -> None:
        """Until it is closed: do what was asked, then a step of every engine that is busy."""
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
                self.fail(list(self.owners), Closing("the server was stopped"))
            engines = {engine for engine, _, _ in self.owners.values()}
            away = not any(engine.active or engine.waiting for engine in engines)
            for engine in engines:
                self.step(engine, PATIENCE_SECONDS if away else 0)

    def begin(self, engine: Engine, reply: Reply) -> None:
        """Give a request to its engine."""
        for ask in reply.asks:
            for completion in engine.submit(ask.prompt, ask.settings, ask.n):
                answer = Answer(completion, engine.tokenizer, ask, len(reply.answers))
                reply.answers.append(answer)
                self.owners[completion] = (engine, reply, answer)

    def step(self, engine: Engine, patience_seconds: float) -> None:
        """Let an engine make a step, and pass on what is new."""
        started = time.perf_counter()
        try:
            grown = engine.step(patience_seconds)
        except Exception as error:  # ends what this engine was doing, not the server
            traceback.print_exc()
            engine.cancel_all()
            mine = [c for c, owner in self.owners.items() if owner[0] is engine]
            self.fail(mine, Failed(f"generation failed: {error!r}"))
            return
        news: dict[Reply, list[Piece]] = {}
        ended = []
        for completion in grown:
            _, reply, answer = self.owners[completion]
            if pieces := answer.advance():
                news.setdefault(reply, []).extend(pieces)
            if answer.finish:
                self.seconds += 0.1 * (time.perf_counter() - reply.asked_at - self.seconds)
                ended.append(completion)
        self.drop(ended)
        self.tell([(reply, pieces, None) for reply, pieces in news.items()])
        if grown:
            self.on_step(len(grown), time.perf_counter() - started)

    def drop(self, completions: Sequence[Completion]) -> None:
        """Forget answers; where one still grows, it ends here."""
        for completion in completions:
            if owner := self.owners.pop(completion, None):
                owner[0].cancel(completion)
                self.release(owner[0], 1)

    def fail(self, completions: Sequence[Completion], error: Exception) -> None:
        """End answers with an error."""
        replies = {self.owners[c][1] for c in completions}
        self.tell([(reply, [], error) for reply in replies])
        self.drop(completions)

    def release(self, engine: Engine, answers: int) -> None:
        """Make room in the queue."""
        with self.wake:
            self.load[engine] -= answers
            if not self.load[engine]:
                del self.load[engine]  # so that a model nobody asks can be forgotten

    def tell(self, news: Sequence[tuple[Reply, Sequence[Piece], Exception | None]]) -> None:
        """Hand news over to the event loop, all of a step at once."""
        if news and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(
                lambda: [reply.put(pieces, error) for reply, pieces, error in news]
            )
