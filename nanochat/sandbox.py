"""
Run model-written code: Python in a sandboxed child process, arithmetic in a calculator.

    code -> [bubblewrap or Landlock] + seccomp + limits -> stdout, stderr, reason for failure
    tool call -> Tools: calculate, else (if enabled) run_python -> text to inject, or None

There are two sandbox layers. bubblewrap runs the child in its own namespaces: a file system with
only the interpreter and a tmpfs of limited size, no network, no other processes. If it does not
work, as in most containers, Landlock restricts the file system and a seccomp filter the rest; the
child's files are then on disk, where their size is polled. A layer is used only if a probe could
not break out of it. If neither works, nothing is run unless the caller passes `unsafe`. The child's
side is `sandbox_child.py`. Thread-safe.
"""

import ast
import contextlib
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
LAYERS: tuple[Layer, ...] = ("bubblewrap", "landlock")  # in order of preference
START_SECONDS = 20.0  # timeout for interpreter startup on a machine that is busy training
TICK = 0.01  # seconds between checks of time and file limits; 10 MB of writes at 1 GB/s
CHUNK = 2**16
READY = b"ready"  # sent by the child once it is confined
CHILD_PID = re.compile(rb'"child-pid": (\d+)')
BLOCK = 4096  # minimum size in bytes that is charged for a file
CAP_SYS_PTRACE = 1 << 19
DELETED = re.compile(r"\S+ \S+ \S+ \S+ (\d+) +(.*) \(deleted\)")  # a line of /proc/<pid>/maps
NAMESPACES = """
    --unshare-user --unshare-all --as-pid-1 --die-with-parent --cap-drop ALL
    --uid 65534 --gid 65534
""".split()
PROBE_PROGRAM = """
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
    """No sandbox layer works on this machine, or the sandboxed child did not start."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program; it fails or is killed when it exceeds one."""

    seconds: float = 5.0
    """Wall-clock seconds, counted from the start of the program itself."""
    memory_bytes: int = 512 * 2**20
    """Address space in bytes; Python itself takes about 30 MB."""
    output_bytes: int = 64 * 2**10
    """Bytes of stdout and of stderr, each."""
    file_bytes: int = 16 * 2**20
    """Total bytes of its files, including deleted ones that are still open; each counts as at
    least 4 KiB. Under bubblewrap they are in a tmpfs of this size. Under Landlock they are on disk
    and checked every 10 ms; writes in between may exceed the limit."""


@dataclass(frozen=True)
class Result:
    """Outcome of a program. It can fake any field; `tasks.humaneval` guards against that."""

    ok: bool
    """It exited with status 0 within its limits."""
    stdout: str
    stderr: str
    reason: str
    """Why not ok: time, output, files, or exit status <n> (128 + signal). Empty if ok."""


def run_python(code: str, limits: Limits = Limits(), *, unsafe: bool = False) -> Result:
    """
    Run a program in the sandbox, or unsandboxed if no layer works and `unsafe` is True.

    It gets an empty environment, empty stdin, the standard library, and an empty flat directory
    for its files, which is deleted afterwards. It cannot start processes or threads, open sockets,
    send signals, or read files other than its own and the interpreter's; under Landlock it may
    learn that other files exist. The limits also hold unsandboxed. Raises SandboxUnavailable.
    """
    return run({"role": "program", "code": code}, limits, choose_layer(unsafe))


# ------------------------------------------------------------------------------------------------
# Choosing a layer


def choose_layer(unsafe: bool = False) -> Layer:
    """First layer that works, else "none" if `unsafe`; otherwise raises SandboxUnavailable."""
    for layer in LAYERS:
        if probe_layer(layer) is None:
            return layer
    if unsafe:
        return "none"
    reasons = "\n".join(f"  {layer}: {probe_layer(layer)}" for layer in LAYERS)
    raise SandboxUnavailable(
        f"no sandbox works on this machine, so model-written code is not run:\n{reasons}\n"
        "  use Linux with bubblewrap installed and user namespaces enabled, or with Landlock\n"
        "  (5.13 or newer); to run it unsandboxed, with your permissions: --unsafe_exec"
    )


@functools.cache
def probe_layer(layer: Layer) -> str | None:
    """Why a layer does not work; None if it does. Runs the probe once per process and layer."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    with tempfile.NamedTemporaryFile() as outside:
        os.chmod(outside.name, 0o644)  # readable by all: only the sandbox may stop it
        limits = Limits(seconds=START_SECONDS, file_bytes=2**16)
        code = PROBE_PROGRAM.format(outside=outside.name, limit=limits.file_bytes)
        try:
            result = run({"role": "program", "code": code}, limits, layer)
        except (SandboxUnavailable, OSError) as error:
            return str(error)
    if result.stdout == "confined\n" and result.reason == "files":
        return None
    return f"{result.reason or 'the probe broke out'} {result.stderr[-200:]}".strip()


def command(layer: Layer, limits: Limits, info: int) -> list[str]:
    """Command line of the child; bubblewrap reports the child's process id on fd `info`."""
    child = [interpreter(), "-I", "-S", "-X", "utf8", "-c", child_source()]
    if layer != "bubblewrap":
        return child
    bwrap = shutil.which("bwrap") or "bwrap"  # if missing, the failed start is reported
    binds = [word for path in read_paths() for word in ("--ro-bind", path, path)]
    size = str(limits.file_bytes + BLOCK)  # one extra block, so that `watch` can detect an overrun
    kept = ["--size", size, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [bwrap, *NAMESPACES, "--info-fd", str(info), *binds, *kept, "--", *child]


def child_source() -> str:
    """Source code of the child."""
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


def interpreter() -> str:
    """Path of the running interpreter, outside any virtual environment."""
    return os.path.realpath(sys._base_executable)  # type: ignore


def read_paths() -> tuple[str, ...]:
    """Paths a child may read: the interpreter, its library, the system's shared libraries."""
    prefix = os.path.realpath(sys.base_prefix)
    folders = (f"{prefix}/lib", f"{prefix}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    wanted = dict.fromkeys((*folders, "/etc/ld.so.cache", interpreter()))
    return tuple(path for path in wanted if os.path.exists(path))


# ------------------------------------------------------------------------------------------------
# One child


def run(job: dict[str, Any], limits: Limits, layer: Layer, handed: Sequence[int] = ()) -> Result:
    """
    Run one job in a child. The fds in `handed` are passed to the child and closed here.

    On a separate pipe, the child reports that it is confined. It closes the pipe before it runs any
    code, so that no code can fake a failure of the sandbox. Raises SandboxUnavailable if the child
    did not start.
    """
    reader, writer = os.pipe()
    with contextlib.ExitStack() as until_end:
        status = until_end.enter_context(open(reader, "rb", buffering=0))
        with contextlib.ExitStack() as until_started:
            info = os.dup(writer) if layer == "bubblewrap" else writer
            passed = {writer, info, *handed}
            for handle in passed:
                until_started.callback(os.close, handle)
            folder = "/"
            if layer != "bubblewrap":
                own = tempfile.TemporaryDirectory(prefix="nanochat-sandbox-")
                folder = until_end.enter_context(own)
            process = until_end.enter_context(
                subprocess.Popen(
                    command(layer, limits, info),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd=folder,
                    pass_fds=tuple(passed),
                    start_new_session=True,  # its own process group, no terminal
                )
            )
            until_end.callback(kill, process, process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # the child did not start
            pipe.write(marshal.dumps({**job, **list_rights(limits, layer), "status": writer}))
        inner = await_start(process, status)
        used = byte_counter(layer, inner, folder, until_end)
        output, reason = watch(process, limits, used)
        exit_status = kill(process, inner)
        reason = reason or (f"exit status {exit_status}" if exit_status else "")
        stdout, stderr = (x[: limits.output_bytes].decode("utf-8", "replace") for x in output)
        return Result(not reason, stdout, stderr, reason)


def list_rights(limits: Limits, layer: Layer) -> dict[str, Any]:
    """The part of a job that defines the child's restrictions."""
    rlimits = {
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,  # in case this process is killed first
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 32,
        "RLIMIT_NPROC": 1,
        "RLIMIT_CORE": 0,
    }
    if sys.platform.startswith("linux"):  # other systems ignore or reject RLIMIT_AS
        rlimits["RLIMIT_AS"] = limits.memory_bytes
    is_root = layer == "landlock" and os.geteuid() == 0 and has_ptrace()
    nobody = is_root and all(map(is_world_readable, (*read_paths(), tempfile.gettempdir())))
    return {"layer": layer, "rlimits": rlimits, "nobody": nobody, "readable": list(read_paths())}


def has_ptrace() -> bool:
    """Whether this process may list the open files of other users' processes in /proc."""
    found = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & CAP_SYS_PTRACE)


def is_world_readable(path: str) -> bool:
    """Whether every user can read a file or directory."""
    reachable = all(folder.stat().st_mode & 0o001 for folder in Path(path).parents)
    return reachable and Path(path).stat().st_mode & 0o004 != 0


def await_start(process: subprocess.Popen[bytes], status: IO[bytes]) -> int:
    """
    Wait until the confined process is ready; returns its process id, which bubblewrap reports.

    Raises SandboxUnavailable with the output of the child if it does not become ready.
    """
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        while not received.endswith(READY) and selector.select(START_SECONDS):
            if not (piece := status.read(CHUNK)):
                break
            received += piece
    found = CHILD_PID.search(received)
    inner = int(found[1]) if found else process.pid
    if not received.endswith(READY):
        kill(process, inner)
        assert process.stderr is not None
        output = received.rpartition(b"}")[2] + process.stderr.read(1000)
        reason = output.decode("utf-8", "replace").strip() or "no answer"
        raise SandboxUnavailable(f"sandbox did not start: {reason}")
    return inner


def watch(
    process: subprocess.Popen[bytes], limits: Limits, used: Callable[[], float]
) -> tuple[list[bytearray], str]:
    """
    Read until the child exits or exceeds a limit. Returns [stdout, stderr] and the name of the
    exceeded limit, or "". used: returns the total size of the child's files in bytes.
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
            exceeded = {
                "time": time.monotonic() >= deadline,
                "output": max(map(len, output.values())) > limits.output_bytes,
                "files": used() > limits.file_bytes,
            }
            if reason := next((name for name in exceeded if exceeded[name]), ""):
                for key, _ in selector.select(0):  # output printed before the limit was hit
                    output[key.fd] += os.read(key.fd, CHUNK)
                return list(output.values()), reason
    return list(output.values()), ""


def kill(process: subprocess.Popen[bytes], inner: int) -> int:
    """
    Kill the confined process `inner`, or its whole process group if `inner` is `process`.

    bubblewrap exits after its child. Killing bubblewrap would leave the child as a zombie, which
    the init of many containers does not reap. Returns the exit status, 128 + n for signal n.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            stop = os.killpg if inner == process.pid else os.kill
            stop(inner, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


# ------------------------------------------------------------------------------------------------
# Files of a child


def byte_counter(
    layer: Layer, pid: int, folder: str, until_end: contextlib.ExitStack
) -> Callable[[], float]:
    """Return a function that counts the bytes of the child's files, deleted ones included."""
    if layer != "bubblewrap":
        return functools.partial(disk_bytes, folder, pid)
    try:
        mounted = os.open(f"/proc/{pid}/root/tmp", os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # the child has already exited
        return lambda: 0
    until_end.callback(os.close, mounted)
    return functools.partial(mounted_bytes, mounted)


def mounted_bytes(folder: int) -> int:
    """Bytes used on the file system of an open directory; at least one block per inode."""
    status = os.fstatvfs(folder)
    inodes = status.f_files - status.f_ffree - 1  # excluding the directory itself
    return max((status.f_blocks - status.f_bfree) * status.f_frsize, inodes * BLOCK)


def disk_bytes(folder: str, pid: int) -> float:
    """
    Bytes of the files in a flat directory plus deleted files that process `pid` has open or mapped.

    Infinite if a deleted file is mapped but not open: /proc does not show its size. The files may
    change during the scan.
    """
    sizes: dict[int, float] = {}  # by inode
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes[entry.inode()] = entry.stat(follow_symlinks=False).st_size
    # /proc entries of an exiting process may be missing or unreadable
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
# Tools of the model: a calculator and, if enabled, Python. The calculator never evaluates model
# output as Python: it walks a syntax tree of numbers and operators. It rejects everything else, and
# also slow or large computations.

PYTHON_LIMITS = Limits(seconds=3.0, output_bytes=2000)
MAX_CHARACTERS = 256  # length limit of an expression
LARGEST = 10**30  # magnitude limit of all intermediate values
LARGEST_EXPONENT = 256
DECIMALS = 6  # any value >= 3 reproduces the same number of GSM8K annotations
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
    Executes a model's tool calls: `Engine(..., tool=Tools())`.

    python: run non-arithmetic code as Python in the sandbox; its stdout is the result.
    unsafe: run it unsandboxed if no layer works. threads: number of worker threads for programs;
    if > 0, their results are futures. Raises SandboxUnavailable if `python` is set, `unsafe` is
    not, and no layer works.
    """

    def __init__(self, python: bool = False, unsafe: bool = False, threads: int = 0):
        if python:
            choose_layer(unsafe)
        self.python, self.unsafe = python, unsafe
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="tools") if threads else None

    def __call__(self, code: str) -> str | None | Future[str | None]:
        """Result of a call, or a future for it; None if there is no result."""
        answer = calculate(code)
        if answer is not None or not self.python:
            return answer
        return self.pool.submit(self.run, code) if self.pool else self.run(code)

    def run(self, code: str) -> str | None:
        """Stripped stdout of a program; None if it prints nothing or fails."""
        result = run_python(code, PYTHON_LIMITS, unsafe=self.unsafe)
        return result.stdout.strip() or None if result.ok else None


def calculate(expression: str) -> str | None:
    """
    Evaluate arithmetic such as `12*(3+4)/7`, or `"strawberry".count("r")`; None for anything else.

    Supports numbers, + - * / // % **, signs and parentheses; commas are dropped. The result is
    rounded to DECIMALS; integers have no decimal point.
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
        value = evaluate_node(ast.parse(expression.replace(",", ""), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    rounded = round(value, DECIMALS)
    return str(int(rounded)) if rounded == int(rounded) else f"{value:.{DECIMALS}f}".rstrip("0")


def evaluate_node(node: ast.AST) -> int | float:
    """Value of a syntax tree. Raises ValueError or ArithmeticError if it is not supported."""
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.UnaryOp(op=sign, operand=operand):
            value = OPERATORS[type(sign)](evaluate_node(operand))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = evaluate_node(left), evaluate_node(right)
            if isinstance(op, ast.Pow) and abs(b) > LARGEST_EXPONENT:
                raise ValueError("exponent too large")
            value = OPERATORS[type(op)](a, b)
        case _:
            raise ValueError("not arithmetic")
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("too large or not real")
    return value
