"""
Who still lives: a watch over the ranks, so that one that hangs is named instead of waited for.

    every rank: a beat into the launcher's store -> one waits too long -> who is silent, where

A thread of each rank tells the store every second that it lives and what it waits for. Whoever
waits for others longer than the timeout looks at their beats: one that has stopped is a process
that was stopped or a machine that died, one that goes on is at work elsewhere. The message names
both, and the process ends, so that the launcher can start again. Knows nothing of training.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from nanochat.stopping import HUNG

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a beat: something is wrong with that process or its machine
NOTICE_SECONDS = 30.0  # of waiting, until a silent rank is spoken of


class Beat(NamedTuple):
    """The last word of another rank, and how long after the start it came."""

    at: float = 0.0
    text: str = "nothing heard of it"


class Store(Protocol):
    """What of torch.distributed's stores is used."""

    def set(self, key: str, value: str) -> Any: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Watch:
    """
    The watch of one rank, made by all of them at the same moment. `waiting` wraps whatever waits
    for other ranks; `timeout_seconds` of it end the process with status HUNG.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float):
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self.notice_seconds = min(NOTICE_SECONDS, timeout_seconds / 2)
        self.others = {r: Beat() for r in range(world_size) if r != rank}
        self.started = self.busy_since = time.monotonic()
        self.wait: tuple[str, float] | None = None  # for what, since when
        self.told: set[int] = set()
        self.closed = threading.Event()
        threading.Thread(target=self.work, name="watch", daemon=True).start()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """While inside, this rank waits for others."""
        before, self.wait = self.wait, (what, time.monotonic())
        try:
            yield
        finally:
            self.wait, self.busy_since = before, time.monotonic()

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
                self.others = {r: Beat(beat.at, lost) for r, beat in self.others.items()}
            self.judge()
            self.rest()

    def rest(self) -> None:
        """Sleep until the next beat; what it lasts longer, this process was stopped itself."""
        began = time.monotonic()
        self.closed.wait(BEAT_SECONDS)
        stopped = time.monotonic() - began - BEAT_SECONDS
        if stopped > self.silent_seconds and (wait := self.wait):
            self.wait = (wait[0], wait[1] + stopped)

    def beat(self) -> None:
        """Tell that this rank lives, and where it is."""
        now, wait = time.monotonic(), self.wait
        word = {
            "at": now - self.started,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "doing": f"in {wait[0]}" if wait else "at work by itself",
            "seconds": now - (wait[1] if wait else self.busy_since),
        }
        self.store.set(key(self.rank), json.dumps(word))

    def listen(self) -> None:
        """Read the beats of the others."""
        ranks = list(self.others)
        for rank, data in zip(ranks, self.store.multi_get([key(r) for r in ranks]), strict=True):
            word = json.loads(data)
            text = f"{word['process']}, {word['doing']} for {word['seconds']:.0f} s"
            self.others[rank] = Beat(word["at"], text)

    def waited(self) -> float:
        """Seconds that this rank has waited for others by now."""
        wait = self.wait
        return time.monotonic() - wait[1] if wait else 0.0

    def judge(self) -> None:
        """Speak of silent ranks; end this process when the timeout is over."""
        wait, waited = self.wait, self.waited()
        if wait is None:
            return
        silent = [r for r in self.others if self.silence(r) > self.silent_seconds]
        if waited > self.notice_seconds and set(silent) - self.told:
            self.told |= set(silent)
            self.say(f"has waited {waited:.0f} s in {wait[0]}; {self.describe(silent)}")
        if waited > self.timeout_seconds:
            self.say(
                f"has waited {waited:.0f} s in {wait[0]}, longer than "
                f"--collective_timeout_minutes allows: {self.describe(list(self.others))}. "
                "Stopping; --resume=auto goes on from the last checkpoint"
            )
            os._exit(HUNG)

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
        print(f"rank {self.rank} {text}", flush=True)


def key(rank: int) -> str:
    """Where a rank's beat lies in the store."""
    return f"beat/{rank}"
