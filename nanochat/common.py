"""
Files, locks and stop signals.

    base directory, atomic writes | locks, free space | SIGTERM -> flag

Imports no other module of the project.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

# ---- Files and names -----------------------------------------------------------------------------


REPOSITORY = Path(__file__).resolve().parent.parent
# Control characters but tab and newline, separators of lines, surrogates, what reorders text
# (bidirectional controls, Unicode UAX 9) and what is invisible, but for the joiners of emoji and
# scripts
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


class MissingInput(FileNotFoundError):
    """
    MissingInput(what is missing, command that makes it): an earlier stage has not run.

    Scripts print it without a traceback (`config.start`).
    """

    def __str__(self) -> str:
        return "{}\n  make it with:  {}".format(*self.args)


class UsageError(RuntimeError):
    """
    UsageError(why, fix): a run that cannot go on as it was asked to.

    Scripts print it without a traceback (`config.start`).
    """

    def __str__(self) -> str:
        return "{}\n  way out:  {}".format(*self.args)


def printable(text: Any) -> str:
    """
    Text from elsewhere (models, data, users, errors) for a terminal or a log: what could control
    the terminal, or show something else than what is there, as Python's escapes.
    """
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def base_dir() -> Path:
    """The folder of everything generated: NANOCHAT_BASE_DIR, by default out/ in the repository."""
    path = Path(os.environ.get("NANOCHAT_BASE_DIR") or REPOSITORY / "out").expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_name(flag: str, name: str) -> str:
    """`name`, which must name a folder below another. Raises ValueError for one that leads out."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"--{flag}={name} is not a plain name; use letters, digits, - and _")
    return name


def fingerprint(value: Any) -> str:
    """16 hex digits that name a JSON value: equal values, equal names, on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | str) -> None:
    """
    Write a file so that a reader sees the old content or the new, never a part, even after
    a power cut. The temporary file is removed when writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or the names inside a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> str:
    """Indented JSON with sorted keys, as files have it: the same value gives the same text."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `json_text`."""
    write_atomic(path, json_text(value))


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError naming the file when it does not parse."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct or delete it") from error


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of all the rest of it, under `seal`."""
    return {**value, "seal": hashlib.sha256(json_text(value).encode()).hexdigest()}


def unseal(text: str, written: Callable[[Any], str]) -> dict[str, Any]:
    """
    The JSON object that was `sealed` and then `written` as `text`, without its seal.

    Raises ValueError where a single character is not as it was written.
    """
    value = json.loads(text)
    if not isinstance(value, dict) or value.pop("seal", None) is None:
        raise ValueError("it has no seal")
    if written(sealed(value)) != text:
        raise ValueError("it does not match its seal")
    return value


def read_sealed(path: Path) -> dict[str, Any]:
    """
    The JSON object that `write_json` wrote `sealed`. Raises ValueError naming the file when it is
    not, byte for byte, what was written.
    """
    try:
        return unseal(path.read_bytes().decode(), json_text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def cpu_info(name: str) -> str:
    """A field of the first processor in Linux's /proc/cpuinfo; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def free_bytes(path: Path) -> int:
    """Free space, in bytes, on the file system that holds `path`, or would."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


# ---- Locks and free space ------------------------------------------------------------------------
# Locks are the operating system's: the lock of a process that exited is free again.


SPARE_BYTES = 256 << 20  # what a download or a packed shard must leave free


@contextmanager
def claimed(path: Path, patience_seconds: float = 0.0) -> Iterator[bool]:
    """True while holding a lock file; False when another process keeps it for longer than that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    with suppress(Timeout):
        lock.acquire(patience_seconds)
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; when another process has it, say `what` is waited for."""
    with claimed(path, patience_seconds=2.0) as mine:
        if not mine:
            print(f"waiting for another process: {printable(what)}", flush=True)
        with nullcontext() if mine else FileLock(path):
            yield


class RunLock:
    """
    One run at a time: a lock file, and beside it one that says who holds it, since when.

    The process holds the lock, not the file: what a killed run left behind is stale, recognized as
    such, and taken over.
    """

    def __init__(self, path: Path, own: str = "--model_tag"):
        """own: the flag by which another run gets a folder of its own."""
        self.path, self.own = path, own
        self.lock, self.owner = FileLock(path), path.with_name(f"{path.name}.owner")

    def acquire(self, launch: str = "", patience_seconds: float = 180.0) -> None:
        """
        Raises UsageError naming process and host of the run that holds the lock.

        One that another attempt of the same `launch` holds is waited for: on a shared disk the
        lock of a host that died lives on for a while.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.owner.read_text() if self.owner.exists() else ""
        owner, _, launch_of_owner = text.partition("\n")
        try:
            self.lock.acquire(patience_seconds if launch and launch == launch_of_owner else 0)
        except Timeout:
            raise UsageError(
                f"another run writes there: {owner} holds {self.path}",
                f"wait for it or stop it, or give this run another {self.own}",
            ) from None
        if self.owner.exists():
            print(f"the lock of an earlier run is stale, taken over: {owner}")
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self.owner.write_text(f"{me}\n{launch}")

    def release(self) -> None:
        """Let go, where this run has the lock."""
        if self.lock.is_locked:
            self.owner.unlink(missing_ok=True)
            self.lock.release()


def require_free(folder: Path, needed_bytes: float, what: str, way_out: str) -> None:
    """Raise UsageError naming both numbers unless `needed_bytes` and a reserve are free."""
    free = free_bytes(folder)
    if needed_bytes + SPARE_BYTES > free:
        needs = f"{needed_bytes / 1e9:.2f} GB and a reserve of {SPARE_BYTES / 1e9:.2f} GB"
        why = f"{what} needs about {needs}, but {folder} has {free / 1e9:.2f} GB free"
        raise UsageError(why, f"make room, set NANOCHAT_BASE_DIR to a larger disk, or {way_out}")


# ---- Exit statuses and stop signals --------------------------------------------------------------


PREEMPTED = 75  # exit status of a run that saved and stopped because it was asked to
UNEVALUATED = 76  # of one that trained and saved, but had no memory for its last evaluation
BROKEN = 78  # of a run that its canaries called broken
HUNG = 77  # of a rank that waited too long for another one


class StoppedWaiting(RuntimeError):
    """A wait ended because the run was asked to stop."""


class Interrupted(RuntimeError):
    """An evaluation ended early because the run was asked to stop."""


class StopRequest:
    """
    Turns SIGTERM, SIGINT and a lost terminal's SIGHUP into a flag that the loop reads between
    micro-batches.

    A second SIGINT ends the process at once; under nohup SIGHUP goes on meaning nothing.
    """

    asked = False

    def __enter__(self) -> "StopRequest":
        numbers = [signal.SIGTERM, signal.SIGINT]
        numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)
        self.previous = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)
        self.asked = True
