"""
Sharing a disk: locks between processes, and whether there is room.

Locks are the operating system's, so the one held by a process that died is free again.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from nanochat.common import Refused, free_bytes, printable, require_writable

SPARE_BYTES = 256 << 20  # what a download or a packed shard must leave free


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; when another process has it, say `what` is waited for."""
    lock = FileLock(path)
    try:
        with require_writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=2)
    except Timeout:
        print(f"waiting for another process: {printable(what)}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """True while holding a lock file; False, at once, when another process has it."""
    lock = FileLock(path)
    try:
        with require_writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


class RunLock:
    """
    One run at a time: a lock file that says who holds it, since when.

    It is the process that holds the lock, not the file: what a killed run left behind is stale,
    recognised as such, and taken over.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print, own: str = "--model_tag"):
        """own: the flag by which another run gets a place of its own."""
        self.path, self.say, self.own = path, say, own
        self.file: TextIO | None = None

    def acquire(self, launch: str = "", patience_seconds: float = 180.0) -> None:
        """
        Raises Refused naming process and host of the run that holds the lock.

        One that another attempt of the same `launch` holds is waited for: on a shared disk the
        lock of a host that died lives on for a while.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return self.try_to_acquire(launch)
            except Refused:
                if not launch or self.launch_of_owner() != launch or time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def try_to_acquire(self, launch: str) -> None:
        """Raises Refused where another process has it."""
        with require_writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self.owner(file)
            file.close()
            raise Refused(
                f"another run writes there: {owner} holds {self.path}",
                f"wait for it or stop it, or give this run another {self.own}",
            ) from None
        except OSError as error:  # a file system without locks
            self.say(f"{self.path}: no lock here ({error}); let no two runs write to this folder")
        if file.seek(0, os.SEEK_END):
            self.say(f"the lock of an earlier run is stale, taken over: {self.owner(file)}")
        file.truncate(0)
        me = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "launch": launch,
        }
        file.write(json.dumps(me) + "\n")
        file.flush()
        self.file = file

    def release(self) -> None:
        """Let go; the file stays, empty, so that no two processes lock different ones."""
        if self.file:
            self.file.truncate(0)
            self.file.close()
            self.file = None

    def launch_of_owner(self) -> str | None:
        """The launch that the file's owner belongs to, where it says so."""
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))["launch"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def owner(self, file: TextIO) -> str:
        """Who the file says holds it."""
        file.seek(0)
        try:
            who = json.loads(file.read())
            return f"process {who['process']} on {who['host']}, since {who['since']}"
        except (ValueError, KeyError, TypeError):
            return "a process that has not said its name"


def require_free(folder: Path, needed_bytes: float, what: str, way_out: str = "") -> None:
    """Raise Refused naming both numbers unless `needed_bytes` and a reserve are free."""
    free = free_bytes(folder)
    if needed_bytes + SPARE_BYTES > free:
        raise Refused(
            f"{what} needs about {needed_bytes / 1e9:.2f} GB and a reserve of "
            f"{SPARE_BYTES / 1e9:.2f} GB, but {folder} has {free / 1e9:.2f} GB free",
            f"make room, set NANOCHAT_BASE_DIR to a larger disk{way_out and ', or ' + way_out}",
        )
