"""
Run what a model wrote: Python in a child that can compute, print and keep a few files; sums in a
calculator.

    code -> [bubblewrap, or Landlock] + seccomp + limits -> stdout, stderr, how it ended
    a model's call -> Tools: calculate, else (if allowed) run_python -> the text to inject, or None

Two layers keep the child from everything else. bubblewrap gives it namespaces of its own: a file
system with nothing but the interpreter and a tmpfs of limited size, no network, no processes but
its own. Where that does not work, as in most containers, Landlock closes the file system and the
system call filter the rest; the child's files are then on disk, where they are counted. A layer
counts only after a probe that tried to break out of it. Where none holds nothing is run, unless
the caller says so. The child's half is `sandbox_child.py`. Safe from any thread.
"""

import ast
import contextlib
import fcntl
import functools
import marshal
import math
import operator
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

Layer = Literal["bubblewrap", "landlock", "none"]
LAYERS: tuple[Layer, ...] = ("bubblewrap", "landlock")  # the better one first
START_SECONDS = 20.0  # for an interpreter to start, on a machine that is busy with training
TICK = 0.01  # seconds between looks at the clock and the files: at 1 GB/s 10 MB are written in it
CHUNK = 2**16
READY = b"ready"  # the child's word that it is confined
CHILD_PID = re.compile(rb'"child-pid": (\d+)')
BLOCK = 4096  # bytes that even an empty file counts for
NOBODY = 65534
CAP_SYS_PTRACE = 1 << 19
FOLDER_PREFIX = "nanochat-sandbox-"
DELETED = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +(.*) \(deleted\)")  # a line of /proc/<pid>/maps
NAMESPACES = """
    --unshare-user --unshare-all --as-pid-1 --die-with-parent --cap-drop ALL
    --uid 65534 --gid 65534
""".split()
PROBE = """
import _socket, json, os, time
def refused(attempt, *args):
    try: attempt(*args)
    except OSError: return True
if refused(open, {outside!r}) and refused(os.fork) and refused(_socket.socket):
    print("confined", flush=True)
files = [open(name, "wb", 0) for name in "ab"]
for file in files:
    os.remove(file.name)
    file.write(bytes({limit}))
time.sleep(5)
"""


class SandboxUnavailable(RuntimeError):
    """Nothing on this machine confines a child, or a child could not be started in it."""


@dataclass(frozen=True)
class Limits:
    """What a program may use; where it wants more, it fails or is stopped."""

    seconds: float = 5.0
    """Of wall-clock time, from the program's first line on."""
    memory_bytes: int = 512 * 2**20
    """Of address space; Python itself takes about 30 MB."""
    output_bytes: int = 64 * 2**10
    """Of stdout, and as many of stderr."""
    file_bytes: int = 16 * 2**20
    """Of its files, removed ones that are still open included; a small one counts as 4 KiB. Under
    bubblewrap they are in memory, in a file system of this size. Under Landlock they are on disk
    and counted every 10 ms: what is written in between comes on top."""


@dataclass(frozen=True)
class Result:
    """How a program ended. All of it is the program's own word: `tasks.humaneval` judges one."""

    ok: bool
    """It ended by itself, within its limits, with exit status 0."""
    stdout: str
    stderr: str
    reason: str
    """Why not ok: time, output, files, exit status <n> (128 + a signal). Empty if ok."""


def run_python(code: str, limits: Limits = Limits(), *, unsafe: bool = False) -> Result:
    """
    Run a program: confined, or unconfined where no layer works here and `unsafe` allows it.

    It starts with an empty environment, no input, the standard library, and an empty folder that
    nothing but files can be put into and that is gone afterwards. It can start no process or
    thread, open no socket, send no signal, and see no file but its own and the interpreter's; of
    other files it may at most learn that they exist (Landlock). Its limits hold in the unconfined
    case too. Raises SandboxUnavailable, whose message names the ways out.
    """
    return run({"role": "program", "code": code}, limits, choose_layer(unsafe))


# ------------------------------------------------------------------------------------------------
# Which layer works here


def choose_layer(unsafe: bool = False) -> Layer:
    """The best layer that works here, "none" if `unsafe` allows it. Raises SandboxUnavailable."""
    for layer in LAYERS:
        if trouble_with(layer) is None:
            return layer
    if unsafe:
        return "none"
    troubles = "\n".join(f"  {layer}: {trouble_with(layer)}" for layer in LAYERS)
    raise SandboxUnavailable(
        f"nothing here confines code that a model wrote, so it is not run:\n{troubles}\n"
        "  use Linux with bubblewrap installed and user namespaces allowed, or with Landlock\n"
        "  (5.13 or newer); or let it run with all your rights: --unsafe_exec"
    )


@functools.cache
def trouble_with(layer: Layer) -> str | None:
    """Why a layer does not confine here; None if it does. Tried once per process, for real."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    with tempfile.NamedTemporaryFile() as outside:
        os.chmod(outside.name, 0o644)  # so that no user's rights keep the probe from reading it
        limits = Limits(seconds=START_SECONDS, file_bytes=2**16)
        code = PROBE.format(outside=outside.name, limit=limits.file_bytes)
        try:
            result = run({"role": "program", "code": code}, limits, layer)
        except (SandboxUnavailable, OSError) as error:
            return str(error)
    if result.stdout == "confined\n" and result.reason == "files":
        return None
    return f"{result.reason or 'it let the probe out'} {result.stderr[-200:]}".strip()


def command(layer: Layer, limits: Limits, info: int) -> list[str]:
    """The child's half, inside bubblewrap where that is the layer, which tells of it on `info`."""
    child = [interpreter(), "-I", "-S", "-X", "utf8", "-c", child_source()]
    if layer != "bubblewrap":
        return child
    bwrap = shutil.which("bwrap") or "bwrap"  # which cannot be started: the reason is reported
    shown = [word for path in readable() for word in ("--ro-bind", path, path)]
    size = str(limits.file_bytes + BLOCK)  # a block more, so that `watch` sees the limit broken
    kept = ["--size", size, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [bwrap, *NAMESPACES, "--info-fd", str(info), *shown, *kept, "--", *child]


def child_source() -> str:
    """The text of the child's half."""
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


def interpreter() -> str:
    """The running interpreter, outside of any virtual environment."""
    return os.path.realpath(sys._base_executable)  # type: ignore


def readable() -> tuple[str, ...]:
    """All that a child may read: the interpreter, its library, the system's shared libraries."""
    prefix = os.path.realpath(sys.base_prefix)
    folders = (f"{prefix}/lib", f"{prefix}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    wanted = dict.fromkeys((*folders, "/etc/ld.so.cache", interpreter()))
    return tuple(path for path in wanted if os.path.exists(path))


# ------------------------------------------------------------------------------------------------
# One child


def run(job: dict[str, Any], limits: Limits, layer: Layer, handed: Sequence[int] = ()) -> Result:
    """
    Do one job in a child. The handles in `handed` go to the child and are closed here.

    The child says over a pipe of its own that it is confined, and closes that before it runs any
    code: no code can make it look as if the sandbox had failed. Raises SandboxUnavailable if
    it did.
    """
    said, say = os.pipe()
    with contextlib.ExitStack() as until_end:
        status = until_end.enter_context(open(said, "rb", buffering=0))
        with contextlib.ExitStack() as until_started:
            info = os.dup(say) if layer == "bubblewrap" else say
            passed = {say, info, *handed}
            for handle in passed:
                until_started.callback(os.close, handle)
            folder = "/" if layer == "bubblewrap" else own_folder(until_end)
            process = until_end.enter_context(
                subprocess.Popen(
                    command(layer, limits, info),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd=folder,
                    pass_fds=tuple(passed),
                    start_new_session=True,  # a process group of its own, and no terminal
                )
            )
            until_end.callback(kill, process, process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # else it did not start
            pipe.write(marshal.dumps({**job, **rights(limits, layer), "status": say}))
        inner = await_start(process, status)
        used = file_counter(layer, inner, folder, until_end)
        output, reason = watch(process, limits, used)
        exit_status = kill(process, inner)
        reason = reason or (f"exit status {exit_status}" if exit_status else "")
        stdout, stderr = (x[: limits.output_bytes].decode("utf-8", "replace") for x in output)
        return Result(not reason, stdout, stderr, reason)


def rights(limits: Limits, layer: Layer) -> dict[str, Any]:
    """The part of a job that says what the child gives up and what it keeps."""
    rlimits = {
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,  # should this process die before the child
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 32,
        "RLIMIT_NPROC": 1,
        "RLIMIT_CORE": 0,
    }
    if sys.platform.startswith("linux"):  # others do not keep to it, or refuse it
        rlimits["RLIMIT_AS"] = limits.memory_bytes
    is_root = layer == "landlock" and os.geteuid() == 0 and may_trace()
    nobody = is_root and all(map(open_to_all, (*readable(), tempfile.gettempdir())))
    return {"layer": layer, "rlimits": rlimits, "nobody": nobody, "readable": list(readable())}


def may_trace() -> bool:
    """Whether this process may read in /proc which files another user's process holds open."""
    found = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & CAP_SYS_PTRACE)


def open_to_all(path: str) -> bool:
    """Whether every user of the machine can read a file or folder."""
    reachable = all(folder.stat().st_mode & 0o001 for folder in Path(path).parents)
    return reachable and Path(path).stat().st_mode & 0o004 != 0


def await_start(process: subprocess.Popen[bytes], status: IO[bytes]) -> int:
    """
    The id of the confined process, which bubblewrap tells, once that process says it is ready.

    Raises SandboxUnavailable with what is said instead.
    """
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        while not said.endswith(READY) and selector.select(START_SECONDS):
            if not (piece := status.read(CHUNK)):
                break
            said += piece
    found = CHILD_PID.search(said)
    inner = int(found[1]) if found else process.pid
    if not said.endswith(READY):
        kill(process, inner)
        assert process.stderr is not None
        told = said.rpartition(b"}")[2] + process.stderr.read(1000)
        why = told.decode("utf-8", "replace").strip() or "no answer"
        raise SandboxUnavailable(f"the sandbox did not start: {why}")
    return inner


def watch(
    process: subprocess.Popen[bytes], limits: Limits, used: Callable[[], float]
) -> tuple[list[bytearray], str]:
    """
    Read until the child ends or breaks a limit: its stdout and stderr, and which limit.

    used: returns the bytes of its files.
    """
    assert process.stdout is not None and process.stderr is not None
    output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    deadline = time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as selector:
        for handle in output:
            selector.register(handle, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            wait = max(0.0, min(TICK, deadline - time.monotonic()))
            if selector.get_map():
                for key, _ in selector.select(wait):
                    piece = os.read(key.fd, CHUNK)
                    output[key.fd] += piece
                    if not piece:
                        selector.unregister(key.fd)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
            broken = {
                "time": time.monotonic() >= deadline,
                "output": max(map(len, output.values())) > limits.output_bytes,
                "files": used() > limits.file_bytes,
            }
            if reason := next((name for name in broken if broken[name]), ""):
                for key, _ in selector.select(0):  # what was printed before the limit was passed
                    output[key.fd] += os.read(key.fd, CHUNK)
                return list(output.values()), reason
    return list(output.values()), ""


def kill(process: subprocess.Popen[bytes], inner: int) -> int:
    """
    End the child: the confined process, or its whole group where it was started as `process`.

    bubblewrap ends by itself, after its child: killed, it would leave the child as a zombie to
    an init that in many containers collects none. Returns the exit status, 128 + n for signal n.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            stop = os.killpg if inner == process.pid else os.kill
            stop(inner, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


# ------------------------------------------------------------------------------------------------
# Files of a child


def own_folder(until_end: contextlib.ExitStack) -> str:
    """
    A new folder for one child's files, locked while it is in use, removed with `until_end`.

    Removes first what killed processes left: the folders that nobody has locked.
    """
    parent = tempfile.gettempdir()
    remove_stale_folders(parent)
    while True:
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        until_end.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # else another process took it for stale before it was locked
            until_end.callback(shutil.rmtree, folder)
            return folder


@functools.cache
def remove_stale_folders(parent: str) -> None:
    """Remove the folders of processes that were killed. Once per process and parent folder."""
    for path in Path(parent).glob(f"{FOLDER_PREFIX}*"):
        # An OSError: another user's, in use, or removed by another process at this moment
        with contextlib.suppress(OSError), contextlib.ExitStack() as until_end:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            until_end.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid in (os.geteuid(), NOBODY):
                shutil.rmtree(path)


def file_counter(
    layer: Layer, pid: int, folder: str, until_end: contextlib.ExitStack
) -> Callable[[], float]:
    """A function that returns the bytes of the files of process `pid`, removed ones included."""
    if layer != "bubblewrap":
        return functools.partial(disk_bytes, folder, pid)
    try:
        mounted = os.open(f"/proc/{pid}/root/tmp", os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # it has ended already
        return lambda: 0
    until_end.callback(os.close, mounted)
    return functools.partial(mounted_bytes, mounted)


def mounted_bytes(folder: int) -> int:
    """Bytes in use on the file system of an open folder; an inode counts as a block at least."""
    status = os.fstatvfs(folder)
    inodes = status.f_files - status.f_ffree - 1  # without the folder itself
    return max((status.f_blocks - status.f_bfree) * status.f_frsize, inodes * BLOCK)


def disk_bytes(folder: str, pid: int) -> float:
    """
    Bytes of the files in a flat folder, which may change meanwhile, and of those removed from it
    that process `pid` has open or mapped. Infinite with a removed file that is mapped but not open:
    /proc does not tell its size.
    """
    sizes: dict[int, float] = {}  # by inode
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
    # A process that is ending has neither files nor mappings, and /proc refuses or lacks them
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(f"/proc/{pid}/fd/{handle}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    sizes[status.st_ino] = status.st_size
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        for inode, path in DELETED.findall(maps):
            if path.startswith(f"{folder}/"):
                sizes.setdefault(int(inode), math.inf)
    return sum(max(BLOCK, size) for size in sizes.values())


# ------------------------------------------------------------------------------------------------
# Tools of a model: a calculator, and Python where that is allowed. The calculator never lets Python
# evaluate what a model wrote: it walks a syntax tree of numbers and operators and rejects the rest,
# what would be slow, and what would be large.

PYTHON_LIMITS = Limits(seconds=3.0, output_bytes=2000)
MAX_CHARACTERS = 256  # of an expression
LARGEST = 10**30  # of all values on the way
LARGEST_EXPONENT = 256
DECIMALS = 6  # with 3 or more, as many results of GSM8K's annotations come out as they stand there
ARITHMETIC = re.compile(r"[0-9.,+*/%()\s-]+")
QUOTED = r"\"[^\"\\\n]*\"|'[^'\\\n]*'"
COUNT = re.compile(rf"({QUOTED})\.count\(({QUOTED})\)")
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Tools:
    """
    Answers a model's calls: `Engine(..., tool=Tools())`.

    python: let the sandbox run what is no arithmetic; what it prints is the answer. unsafe: run it
    unconfined where nothing confines it. threads: run up to so many programs alongside the engine;
    their answers are then futures. Raises SandboxUnavailable if Python is allowed and nothing
    here confines it.
    """

    def __init__(self, python: bool = False, unsafe: bool = False, threads: int = 0):
        if python:
            choose_layer(unsafe)
        self.python, self.unsafe = python, unsafe
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="tools") if threads else None

    def __call__(self, code: str) -> str | None | Future[str | None]:
        """The answer to one call, or its future; None where there is none."""
        answer = calculate(code)
        if answer is not None or not self.python:
            return answer
        return self.pool.submit(self.run, code) if self.pool else self.run(code)

    def run(self, code: str) -> str | None:
        """What a program prints; None where it prints nothing, or fails."""
        result = run_python(code, PYTHON_LIMITS, unsafe=self.unsafe)
        return result.stdout.strip() or None if result.ok else None


def calculate(expression: str) -> str | None:
    """
    The value of `12*(3+4)/7`, or of `"strawberry".count("r")`; None for anything else.

    Numbers, + - * / // % **, signs and parentheses; commas are dropped. Whole numbers come out
    without a decimal point, others rounded to DECIMALS.
    """
    expression = expression.strip()
    if len(expression) > MAX_CHARACTERS:
        return None
    counted = COUNT.fullmatch(expression)
    if counted:
        text, part = (quoted[1:-1] for quoted in counted.groups())
        return str(text.count(part))
    if not ARITHMETIC.fullmatch(expression):
        return None
    try:
        value = evaluate(ast.parse(expression.replace(",", ""), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    rounded = round(value, DECIMALS)
    return str(int(rounded)) if rounded == int(rounded) else f"{value:.{DECIMALS}f}".rstrip("0")


def evaluate(node: ast.AST) -> int | float:
    """The value of a syntax tree. Raises ValueError or ArithmeticError where it has none for us."""
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.UnaryOp(op=sign, operand=operand):
            value = OPERATORS[type(sign)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = evaluate(left), evaluate(right)
            if isinstance(op, ast.Pow) and abs(b) > LARGEST_EXPONENT:
                raise ValueError("too large an exponent")
            value = OPERATORS[type(op)](a, b)
        case _:
            raise ValueError("no arithmetic")
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("too large, or no real number")
    return value
