"""
Run model-written code: Python in a sandboxed child process, arithmetic in a calculator.

    code -> child process: Landlock, seccomp, resource limits -> stdout, stderr, reason for failure
    tool call -> Tools: calculate, else (if enabled) run_python -> text to inject, or None

A program can compute, print, and read the standard library; there is no file that it can write.
Landlock restricts the file system and a seccomp filter the rest, so it needs no privilege and no
other program, only Linux 5.13 or newer. Where they do not work, nothing is run unless the caller
passes `unsafe`. The child's side is `sandbox_child.py`. Thread-safe.
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
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import sandbox_child

START_SECONDS = 20.0  # timeout for interpreter startup on a machine that is busy training
CHUNK = 2**16
READY = b"ready"  # sent by the child once it is confined
PROBE = """
import _socket, os
def refused(attempt, *args):
    try: attempt(*args)
    except OSError: return True
print(refused(open, "/etc/passwd") and refused(os.fork) and refused(_socket.socket))
"""


class SandboxUnavailable(RuntimeError):
    """The sandbox does not work on this machine, or the sandboxed child did not start."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program; it fails or is killed when it exceeds one."""

    seconds: float = 5.0
    """Wall-clock seconds, counted from the start of the program itself."""
    memory_bytes: int = 512 * 2**20
    """Address space in bytes; Python itself takes about 30 MB."""
    output_bytes: int = 64 * 2**10
    """Bytes of stdout and of stderr, each."""


@dataclass(frozen=True)
class Result:
    """Outcome of a program. It can fake any field; `tasks.code` guards against that."""

    ok: bool
    """It exited with status 0 within its limits."""
    stdout: str
    stderr: str
    reason: str
    """Why not ok: time, output, or exit status <n> (128 + signal). Empty if ok."""


def run_python(code: str, limits: Limits = Limits(), *, unsafe: bool = False) -> Result:
    """
    Run a program in the sandbox, or unsandboxed if that does not work and `unsafe` is True.

    It gets an empty environment, empty stdin and the standard library. It cannot write files, start
    processes or threads, open sockets, send signals, or read files other than those of the
    interpreter and system libraries; it may learn that other files exist. The limits also hold
    unsandboxed, except that root can start processes, and keep them. Raises SandboxUnavailable.
    """
    return run({"role": "program", "code": code}, limits, is_confined(unsafe))


def is_confined(unsafe: bool = False) -> bool:
    """True if the sandbox works, else False if `unsafe`; otherwise raises SandboxUnavailable."""
    problem = find_problem()
    if problem and not unsafe:
        raise SandboxUnavailable(
            f"the sandbox does not work on this machine ({problem}), so model-written code is not "
            "run; use Linux 5.13 or newer with Landlock and seccomp; to run it unsandboxed, with "
            "your permissions: --unsafe_exec (chat_cli, chat_web, chat_eval)"
        )
    return not problem


@functools.cache
def find_problem() -> str | None:
    """Why the sandbox does not work; None if it does. Tries to break out once per process."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    try:
        result = run({"role": "program", "code": PROBE}, Limits(seconds=START_SECONDS), True)
    except (SandboxUnavailable, OSError) as error:
        return str(error)
    if result.stdout == "True\n":
        return None
    return f"{result.reason or 'the probe broke out'} {result.stderr[-200:]}".strip()


def run(
    job: dict[str, Any],
    limits: Limits,
    confined: bool,
    handed: Sequence[int] = (),
    together: threading.Barrier | None = None,
) -> Result:
    """
    Run one job in a child. The fds in `handed` are passed to the child and closed here. together:
    waited for before the time is counted, by jobs that need each other.

    On a separate pipe, the child reports that it is confined. It closes the pipe before it runs any
    code, so that no code can fake a failure of the sandbox. Raises SandboxUnavailable if the child
    did not start.
    """
    child = Path(sandbox_child.__file__).read_text(encoding="utf-8")
    rights = {"confined": confined, "rlimits": rlimits(limits), "readable": read_paths()}
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as status:
        try:
            process: Any = subprocess.Popen(
                [interpreter(), "-I", "-S", "-X", "utf8", "-c", child],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=(writer, *handed),
                start_new_session=True,  # its own process group, no terminal
            )
        finally:
            for handle in {writer, *handed}:
                os.close(handle)
        with process:
            try:
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(marshal.dumps({**job, **rights, "status": writer}))
                await_start(process, status.fileno())
                if together:
                    with contextlib.suppress(threading.BrokenBarrierError):
                        together.wait(START_SECONDS)  # the other may not have started
                output, reason = watch(process, limits)
            finally:
                exit_status = kill(process)
    reason = reason or (f"exit status {exit_status}" if exit_status else "")
    stdout, stderr = (x[: limits.output_bytes].decode("utf-8", "replace") for x in output)
    return Result(not reason, stdout, stderr, reason)


def interpreter() -> str:
    """Path of the running interpreter, outside any virtual environment."""
    return os.path.realpath(sys._base_executable)  # type: ignore


def read_paths() -> list[str]:
    """Paths a child may read: the interpreter, its library, the system's shared libraries."""
    prefix = os.path.realpath(sys.base_prefix)
    folders = (f"{prefix}/lib", f"{prefix}/lib64", "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    wanted = dict.fromkeys((*folders, "/etc/ld.so.cache", interpreter()))
    return [path for path in wanted if os.path.exists(path)]


def rlimits(limits: Limits) -> dict[str, int]:
    """Limits of the `resource` module."""
    found = {
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,  # in case this process is killed first
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": 32,
        "RLIMIT_NPROC": 1,
        "RLIMIT_CORE": 0,
    }
    if sys.platform.startswith("linux"):  # other systems ignore or reject RLIMIT_AS
        found["RLIMIT_AS"] = limits.memory_bytes
    return found


def await_start(process: Any, status: int) -> None:
    """Wait until the child is confined; else raise SandboxUnavailable with its output."""
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        while received != READY and selector.select(START_SECONDS):
            if not (piece := os.read(status, CHUNK)):
                break
            received += piece
    if received != READY:
        kill(process)
        reason = (received + process.stderr.read(1000)).decode("utf-8", "replace").strip()
        raise SandboxUnavailable(f"it did not start: {reason or 'no answer'}")


def watch(process: Any, limits: Limits) -> tuple[list[bytearray], str]:
    """
    Read until the child exits or exceeds a limit. Returns [stdout, stderr] and the name of the
    exceeded limit, or "".
    """
    output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    deadline = time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as selector:
        for handle in output:
            selector.register(handle, selectors.EVENT_READ)
        while selector.get_map() or process.poll() is None:
            if (wait := deadline - time.monotonic()) <= 0:
                return list(output.values()), "time"
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
                continue
            for key, _ in selector.select(wait):
                piece = os.read(key.fd, CHUNK)
                output[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
            if max(map(len, output.values())) > limits.output_bytes:
                return list(output.values()), "output"
    return list(output.values()), ""


def kill(process: subprocess.Popen[bytes]) -> int:
    """
    Kill the process group of a child, which outlives it if it has started processes (unsandboxed,
    as root). Returns the exit status, 128 + n for signal n.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # of a zombie, on macOS
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return status if status >= 0 else 128 - status


# ---- Tools of the model: a calculator and, if enabled, Python ------------------------------------
# The calculator never evaluates model output as Python: it walks a syntax tree of numbers and
# operators. It rejects everything else, and also slow or large computations.

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
    unsafe: run it unsandboxed if the sandbox does not work. threads: worker threads for programs;
    if > 0, their results are futures. Raises SandboxUnavailable if `python` is set, `unsafe` is
    not, and the sandbox does not work.
    """

    def __init__(self, python: bool = False, unsafe: bool = False, threads: int = 0):
        if python:
            is_confined(unsafe)
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
        rounded = round(value, DECIMALS)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return None
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
    largest = LARGEST if isinstance(value, int) else 2**53 - 1  # exact for floats
    if not abs(value) <= largest:  # a complex number fails when it is rounded
        raise ValueError("too large")
    return value
