"""
Files, locks, stop signals, and facts about the code and the machine.

    base directory, atomic writes | locks, free space | SIGTERM -> flag | git, CPU, GPU

Imports no other module of the project.
"""

import ast
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import psutil
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
    An earlier stage has not run. The message says what is missing and which command makes it.

    Scripts print it without a traceback (`config.start`).
    """

    def __init__(self, what: str, command: str):
        super().__init__(f"{what}\n  make it with:  {command}")
        self.parts = (what, command)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), self.parts


class Refused(RuntimeError):
    """
    A run that cannot go on as it was asked to. The message says why, and the way out.

    Scripts print it without a traceback (`config.start`).
    """

    def __init__(self, why: str, way_out: str):
        super().__init__(f"{why}\n  way out:  {way_out}")
        self.parts = (why, way_out)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), self.parts  # one rank refuses, all of them say so


def printable(text: Any) -> str:
    """
    Text from elsewhere (models, data, users, errors) for a terminal or a log: what could control
    the terminal, or show something else than what is there, as Python's escapes.
    """
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def base_dir() -> Path:
    """The folder of everything generated: NANOCHAT_BASE_DIR, by default out/ in the repository."""
    path = Path(os.environ.get("NANOCHAT_BASE_DIR") or REPOSITORY / "out").expanduser().resolve()
    with require_writable(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def require_writable(path: Path) -> Iterator[None]:
    """Raise Refused where what is done inside fails because nothing can be written to `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise Refused(
            f"{path} cannot be written: {error.strerror}",
            "set NANOCHAT_BASE_DIR to a folder that you can write to",
        ) from error


def require_name(flag: str, name: str) -> str:
    """`name`, which must name a folder below another. Raises ValueError for one that leads out."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"--{flag}={name} is not a plain name; use letters, digits, - and _")
    return name


def canonical_json(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces. Raises TypeError for other types."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def fingerprint(value: Any) -> str:
    """16 hex digits that name a JSON value: equal values, equal names, on every machine."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


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
    rest = {n: v for n, v in value.items() if n != "seal"} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it has no seal")
    if written(sealed(rest)) != text:
        raise ValueError("it does not match its seal")
    return rest


def read_sealed(path: Path) -> dict[str, Any]:
    """
    The JSON object that `write_json` wrote `sealed`. Raises ValueError naming the file when it is
    not, byte for byte, what was written.
    """
    try:
        return unseal(path.read_bytes().decode(), json_text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def free_bytes(path: Path) -> int:
    """Free space, in bytes, on the file system that holds `path`, or would."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


# ---- Locks and free space ------------------------------------------------------------------------
# Locks are the operating system's: the lock of a process that exited is free again.


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

    def __init__(self) -> None:
        self.asked = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self.previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(128 + number)
        self.asked = True


# ---- Source of our own modules -------------------------------------------------------------------
# For an export or an artifact, which carry the code they need.


def source_of(module: str) -> str:
    """The text of one of our modules, named as in "hf.export"."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text(encoding="utf-8")


def code_of(module: str) -> list[str]:
    """A module and all of ours that it imports, directly or not."""
    found, waiting = [], [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += own_imports(source_of(name))
    return found


def own_imports(text: str) -> list[str]:
    """Which of our modules a module imports."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes]
    return [n.removeprefix("nanochat.") for n in modules if n.startswith("nanochat.")]


# ---- Facts about the code and the machine --------------------------------------------------------
# Each function returns plain values: "unknown", "none" or an empty dict where there is no answer.


GIB = 1024**3
CODE_SUFFIXES = (".py", ".md", ".rs", ".html", ".toml", ".sh")
GENERATED = ("report.md", "dev/report")  # a report that was just written makes no commit dirty
DOLLARS_PER_GPU_HOUR = {"H100": 3.00, "A100": 1.79, "V100": 0.55}  # on demand, October 2025
OTHER_DOLLARS_PER_GPU_HOUR = 2.00
NOT_CODE = {"out", "target", "build", "dist", "node_modules", "__pycache__"}


def git(*words: str, repository: Path = REPOSITORY) -> str | None:
    """The output of a git command in the repository, or None where git has no answer."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *words], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def git_state(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Branch, short commit, whether files differ from it, and the first line of its message."""
    if git("rev-parse", "--is-inside-work-tree", repository=repository) != "true":
        return {"branch": "unknown", "commit": "unknown", "dirty": False, "message": ""}
    others = [f":(exclude){path}" for path in GENERATED]
    changes = git("status", "--porcelain", "--", ".", *others, repository=repository)
    return {
        "branch": git("rev-parse", "--abbrev-ref", "HEAD", repository=repository) or "unknown",
        "commit": git("rev-parse", "--short=7", "HEAD", repository=repository) or "unknown",
        "dirty": bool(changes),
        "message": git("log", "-1", "--format=%s", repository=repository) or "",
    }


def hardware() -> dict[str, Any]:
    """Operating system, processors, memory, and the accelerators PyTorch sees."""
    return {
        "platform": platform.system(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "logical_cores": psutil.cpu_count() or 1,
        "memory_gib": psutil.virtual_memory().total / GIB,
        **accelerators(),
    }


def accelerators() -> dict[str, Any]:
    """`gpus` (their names, in order), `gpu_memory_gib` in total, `cuda`; empty without any."""
    import torch  # slow to import, and a report of a machine without GPUs is still a report

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return {
            "gpus": [card.name for card in cards],
            "gpu_memory_gib": sum(card.total_memory for card in cards) / GIB,
            "cuda": torch.version.cuda or "unknown",
        }
    return {"gpus": []}


def default_rate(gpus: Sequence[str]) -> float:
    """What a machine with these accelerators costs to rent, in dollars per hour; 0 without any."""
    rates = DOLLARS_PER_GPU_HOUR
    known = [next((rates[kind] for kind in rates if kind in name), None) for name in gpus]
    return sum(OTHER_DOLLARS_PER_GPU_HOUR if rate is None else rate for rate in known)


def cpu_name() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()


def software() -> dict[str, str]:
    """Versions of Python and PyTorch."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "unknown"
    return {"python": platform.python_version(), "torch": torch_version}


def bloat(repository: Path = REPOSITORY) -> dict[str, int]:
    """
    The size of the code: characters, lines, files, tokens (characters // 4), lines of uv.lock.

    Counts the py, md, rs, html, toml and sh files git tracks, generated reports left out; where
    git tracks none, those outside hidden and build folders. `lock_lines` is 0 without uv.lock.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in code_files(repository)]
    characters = sum(len(text) for text in texts)
    lock = repository / "uv.lock"
    return {
        "characters": characters,
        "lines": sum(len(text.splitlines()) for text in texts),
        "files": len(texts),
        "tokens": characters // 4,
        "lock_lines": len(lock.read_text(encoding="utf-8").splitlines()) if lock.exists() else 0,
    }


def code_files(repository: Path) -> list[Path]:
    """The files that `bloat` counts, sorted."""
    tracked = git("ls-files", "-z", repository=repository)
    names = tracked.split("\0") if tracked else walk(repository)
    return sorted(
        repository / name
        for name in names
        if name.endswith(CODE_SUFFIXES)
        and not name.startswith(GENERATED)
        and (repository / name).is_file()
    )


def walk(repository: Path) -> Iterator[str]:
    """Relative names of all files, hidden and build folders left out."""
    for folder, subfolders, files in os.walk(repository):
        subfolders[:] = [d for d in subfolders if d not in NOT_CODE and not d.startswith(".")]
        for name in files:
            yield str((Path(folder) / name).relative_to(repository))
