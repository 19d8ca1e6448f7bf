"""
Heartbeats of the ranks, so that one that hangs is named and one that works is waited for.

    every rank: a beat into the launcher's store -> one waits too long -> which rank, doing what

A thread of each rank tells the store every second that it is running, and whether it waits for
others, does long work that it names (`working`), or neither. A rank that waits for others looks at
their beats. As long as one of them names its work, it goes on waiting. The process ends, with a
message that names every other rank, when for the whole timeout one of them sent no beat, or did
something it does not name, or when all of them wait. Knows nothing of training.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

from nanochat.common import printable
from nanochat.stopping import HUNG

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a beat: something is wrong with that process or its machine
NOTICE_SECONDS = 30.0  # of waiting, until a silent rank is spoken of


class Activity(NamedTuple):
    """What a rank does, and since when."""

    kind: Literal["waiting", "working", "unnamed"]
    what: str
    since: float


class Beat(NamedTuple):
    """The last word of another rank, and how long after the start it came."""

    at: float = 0.0
    text: str = "nothing heard of it"
    kind: str = "unnamed"
    seconds: float = 0.0
    """How long it had done this."""


class Store(Protocol):
    """What of torch.distributed's stores is used."""

    def set(self, key: str, value: str) -> Any: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Watch:
    """
    The watch of one rank, made by all of them at the same moment. `waiting` wraps whatever waits
    for other ranks, `working` long work that they wait for; `timeout_seconds` of waiting in vain
    end the process with status HUNG.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float):
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self.notice_seconds = min(NOTICE_SECONDS, timeout_seconds / 2)
        self.others = {r: Beat() for r in range(world_size) if r != rank}
        self.started = time.monotonic()
        self.activity = Activity("unnamed", "at work by itself", self.started)
        self.last_work = 0.0  # the latest beat of a rank that named its work
        self.told: set[int] = set()
        self.closed = threading.Event()
        threading.Thread(target=self.work, name="watch", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While inside, this rank waits for others."""
        with self.doing("waiting", what):
            yield

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """While inside, the others wait for this rank as long as its beats come."""
        with self.doing("working", what):
            yield

    @contextmanager
    def doing(self, kind: Literal["waiting", "working"], what: str) -> Iterator[None]:
        """Set what the beats say, and what they said before afterwards."""
        before, self.activity = self.activity, Activity(kind, what, time.monotonic())
        try:
            yield
        finally:
            self.activity = before._replace(since=time.monotonic())

    def rename(self, what: str) -> None:
        """The same work, told in other words: its progress."""
        self.activity = self.activity._replace(what=what)

    def close(self) -> None:
        """Stop watching; the others may go on."""
        self.closed.set()

    # ---- the thread --------------------------------------------------------------------------

    def work(self) -> None:
        """Beat, and look at the others when they are waited for too long."""
        while not self.closed.is_set():
            try:
                self.beat()
                if self.waited() > self.notice_seconds / 2:
                    self.listen()
            except Exception as error:  # the store is gone: the launcher, or its machine, died
                lost = f"the launcher does not answer: {type(error).__name__}"
                self.others = {r: beat._replace(text=lost) for r, beat in self.others.items()}
            self.judge()
            self.rest()

    def rest(self) -> None:
        """Sleep until the next beat; what it lasts longer, this process was stopped itself."""
        began = time.monotonic()
        self.closed.wait(BEAT_SECONDS)
        stopped = time.monotonic() - began - BEAT_SECONDS
        if stopped > self.silent_seconds:
            self.activity = self.activity._replace(since=self.activity.since + stopped)

    def beat(self) -> None:
        """Tell that this rank is running, and what it does."""
        now, activity = time.monotonic(), self.activity
        word = {
            "at": now - self.started,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "kind": activity.kind,
            "doing": f"in {activity.what}" if activity.kind == "waiting" else activity.what,
            "seconds": now - activity.since,
        }
        self.store.set(key(self.rank), json.dumps(word))

    def listen(self) -> None:
        """Read the beats of the others."""
        ranks = list(self.others)
        for rank, data in zip(ranks, self.store.multi_get([key(r) for r in ranks]), strict=True):
            word = json.loads(data)
            text = f"{word['process']}, {word['doing']} for {word['seconds']:.0f} s"
            self.others[rank] = Beat(word["at"], text, word["kind"], word["seconds"])
            if word["kind"] == "working":
                self.last_work = max(self.last_work, word["at"])

    def waited(self) -> float:
        """Seconds that this rank has waited for others by now."""
        activity = self.activity
        return time.monotonic() - activity.since if activity.kind == "waiting" else 0.0

    def judge(self) -> None:
        """Report silent ranks; end this process when one of them is waited for in vain."""
        activity, waited = self.activity, self.waited()
        if activity.kind != "waiting":
            return
        silent = [r for r in self.others if self.silence(r) > self.silent_seconds]
        if waited > self.notice_seconds and set(silent) - self.told:
            self.told |= set(silent)
            self.say(f"has waited {waited:.0f} s in {activity.what}; {self.describe(silent)}")
        if waited > self.timeout_seconds and self.in_vain():
            self.say(
                f"has waited {waited:.0f} s in {activity.what}, longer than "
                f"--collective_timeout_minutes allows: {self.describe(list(self.others))}. "
                "Stopping; --resume=auto goes on from the last checkpoint"
            )
            os._exit(HUNG)

    def in_vain(self) -> bool:
        """Whether, for so long, a rank sent no beat or named no work, or none of them did."""
        timeout = self.timeout_seconds
        lost = any(
            self.silence(rank) > timeout or (beat.kind == "unnamed" and beat.seconds > timeout)
            for rank, beat in self.others.items()
        )
        return lost or time.monotonic() - self.started - self.last_work > timeout

    def silence(self, rank: int) -> float:
        """
        Seconds without a beat. Clocks of several machines differ, the time since the common start
        does not.
        """
        return time.monotonic() - self.started - self.others[rank].at

    def describe(self, ranks: list[int]) -> str:
        """What is known of these ranks, the silent ones first."""
        parts = []
        for rank in sorted(ranks, key=self.silence, reverse=True):
            silence = self.silence(rank)
            quiet = silence > self.silent_seconds
            state = f"no sign of life for {silence:.0f} s" if quiet else "alive"
            parts.append(f"rank {rank}: {state} ({self.others[rank].text})")
        return "; ".join(parts)

    def say(self, text: str) -> None:
        """Every rank speaks for itself: the main one may be the one that hangs."""
        print(f"rank {self.rank} {printable(text)}", flush=True)


def key(rank: int) -> str:
    """Where a rank's beat lies in the store."""
    return f"beat/{rank}"
