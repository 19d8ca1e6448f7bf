"""
Files, locks and stop signals. Does not import other modules of the project.

    base directory, atomic writes | locks | SIGTERM -> flag
"""

import ast
import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Any

# ---- Files and names -----------------------------------------------------------------------------


IGNORE = -1  # target excluded from the loss
REPOSITORY = Path(__file__).resolve().parent.parent
# Control characters (except tab and newline), line separators, surrogates, bidirectional controls
# (Unicode UAX 9), and invisible characters (except the joiners of emoji and scripts)
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


class MissingInput(FileNotFoundError):
    """
    MissingInput(what is missing, command that creates it): an earlier stage has not run.

    Scripts print it without a traceback (`config.start`).
    """

    def __str__(self) -> str:
        return "{}\n  run:  {}".format(*self.args)


class UsageError(RuntimeError):
    """
    UsageError(reason, fix): the run cannot continue as configured.

    Scripts print it without a traceback (`config.start`).
    """

    def __str__(self) -> str:
        return "{}\n  fix:  {}".format(*self.args)


def printable(text: Any) -> str:
    """
    To print untrusted text (from models, data, users or errors), escape characters that could
    control a terminal or disguise text.
    """
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of Python, torch or a GPU says that no memory is left."""
    named = r"MemoryError|allocate memory|(error:|backend|failure \d+) '?out of memory"
    return bool(re.search(named, repr(error)))


def is_main_process() -> bool:
    """False in processes that torchrun started for ranks other than 0."""
    return os.environ.get("RANK", "0") == "0"


def base_dir() -> Path:
    """Folder of all generated files: NANOCHAT_BASE_DIR, default out/ in the repository."""
    path = Path(os.environ.get("NANOCHAT_BASE_DIR") or REPOSITORY / "out").expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def require_name(flag: str, name: str) -> str:
    """Return `name`; raise ValueError unless it has only letters, digits, `.`, `-` and `_`."""
    if not re.fullmatch(r"[\w.-]*", name) or set(name) == {"."}:
        raise ValueError(f"--{flag}={name} is not a plain name; use letters, digits, ., - and _")
    return name


def to_json_types(value: Any) -> Any:
    """
    Convert to JSON types, keeping order: paths to text, scalars of numpy and torch to numbers, and
    numbers that are not finite to "nan", "inf" or "-inf".
    """
    text = json.dumps(value, default=lambda x: str(x) if isinstance(x, Path) else x.item())
    return json.loads(text, parse_constant=lambda name: str(float(name)))


def fingerprint(value: Any) -> str:
    """Hash of a JSON value, 16 hex digits; equal values have equal hashes on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class TextRemover(ast.NodeTransformer):
    """Removes docstrings and help texts from a syntax tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


@cache  # a file is compared more than once
def code_digest(source: str) -> str:
    """Digest of the syntax tree of Python code, without docstrings and help texts."""
    return fingerprint(plain_tree(TextRemover().visit(ast.parse(source))))


def plain_tree(node: Any) -> Any:
    """A syntax tree as JSON, without empty fields: newer versions of Python have more of these."""
    if isinstance(node, list):
        return list(map(plain_tree, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    found = {k: plain_tree(x) for k, x in ast.iter_fields(node) if x is not None and x != []}
    return [type(node).__name__, found]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | str) -> None:
    """
    Write a file atomically and durably: readers see either the old or the new content, even after a
    power failure. The temporary file is removed if writing fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with errors_name(path):
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
            fsync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """In errors of the system that name no file, as those of writing to a full disk, name this."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with errors_name(path):
            os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)):
            raise  # CIFS and VirtualBox flush no directories
    finally:
        os.close(handle)


def json_text(value: Any) -> str:
    """Indented JSON; equal values in equal order give equal text."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a value as `json_text` with `write_atomic`."""
    write_atomic(path, json_text(value))


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError with its path if it is not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct or delete it") from error


def cpu_info(name: str) -> str:
    """A field of the first CPU in /proc/cpuinfo; empty on systems other than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


# ---- Locks ---------------------------------------------------------------------------------------
# The operating system releases the locks of a process when it exits.


# Of file systems that have none, or (EBADF, NFS) none on files that are open to read
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def take_lock(file: IO, wait: bool = False) -> bool:
    """
    Lock an open file until it is closed. Returns False if another process has locked it, or waits.
    On a file system without locks, one line says so, and other processes are not noticed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print_missing_locks(Path(file.name).parent, str(error.strerror))
    return True


@cache
def print_missing_locks(folder: Path, why: str) -> None:
    """Print, once for each folder, that its file system has no locks."""
    text = f"no file locks in {folder} ({why}): do not start two runs there at the same time"
    print(printable(text), flush=True)


@contextmanager
def open_lock(path: Path) -> Iterator[IO | None]:
    """
    Open a lock file, only to read if it is of another user. None if there is none and this process
    cannot make it: in a folder that it can only read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        file = path.open() if path.exists() else None
    with file or nullcontext():
        yield file


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield True while holding a lock file, or False if another process holds it."""
    with open_lock(path) as file:
        yield file is None or take_lock(file)


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file; if another process holds it, print `what` and wait."""
    with open_lock(path) as file:
        if file and not take_lock(file):
            print(f"waiting for another process: {printable(what)}", flush=True)
            take_lock(file, wait=True)
        yield


@contextmanager
def hold_run_lock(path: Path, flag: str = "--model_tag") -> Iterator[None]:
    """
    Hold the lock of a run's folder; the lock file describes this process. What a killed process
    left there is stale: the next run takes over.

    flag: gives a run its own folder. Raises UsageError with process and host if another run holds
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        free = take_lock(file)
        file.seek(0)
        owner = file.read()
        if not free:
            raise UsageError(
                f"another run is using this folder: {owner} holds {path}",
                f"wait for it or stop it, or give this run another {flag}",
            )
        if owner:
            print(f"taking over stale lock: {printable(owner)}")
            file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


# ---- Exit statuses and stop signals --------------------------------------------------------------


PREEMPTED = 75  # stopped on request, with the completed steps saved
UNEVALUATED = 76  # trained and saved, but ran out of memory in the final evaluation
RANK_MISSING = 77  # another rank did not join in time


class StopRequested(RuntimeError):
    """A stop request ended a wait, an evaluation or a step; raised on all ranks."""


class StopRequest:
    """
    Turns SIGTERM, SIGINT and SIGHUP into a flag that the loop checks between micro-batches.

    After that, a SIGINT exits immediately. SIGHUP stays ignored under nohup.
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
