"""
Start Python processes for tests by forking one that has imported torch and nanochat, which saves 2
CPU seconds each. They are processes of their own, with their own memory, signals and exit status.

    fork(["-m", "scripts.base_train", ...], environment) -> ForkedProcess, used as subprocess.Popen

What torch reads when it is imported, such as OMP_NUM_THREADS, and limits of resources are those of
the process that forks. It ends with the tests.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

from nanochat import recipe, records
from nanochat.common import REPOSITORY

MODULES = (
    "torch.distributed numpy pyarrow.parquet psutil safetensors.torch tyro nanochat.finetune "
    "nanochat.eval_core nanochat.rl nanochat.report tasks.buckets"
)
REQUEST_BYTES = 1 << 20

# ---- The tests' side -----------------------------------------------------------------------------


class ForkedProcess:
    """What tests use of subprocess.Popen. Standard output and error are one pipe."""

    def __init__(self, pid: int, output: int, status: int):
        self.pid, self.returncode = pid, None
        self.stdout = open(output, encoding="utf-8", errors="replace")
        self.status = status
        """Pipe for the exit status."""

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(os.read(self.status, 16))
            os.close(self.status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """The rest of the output; the process is killed if it takes longer than `timeout`."""
        killer = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        killer.start()
        text = self.stdout.read()
        killer.cancel()
        self.wait(timeout)
        return text, None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@lru_cache
def zygote() -> socket.socket:
    """Start the process that forks; returns the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=REPOSITORY, env=env, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait(60)))
    return ours


def fork(words: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Start `python <words>`, which begin with -m or -c, in a new session."""
    read_output, output = os.pipe()
    read_status, status = os.pipe()
    request = json.dumps([words, dict(environment)]).encode()
    socket.send_fds(zygote(), [request], [output, status])
    os.close(output)
    os.close(status)
    return ForkedProcess(int(zygote().recv(16)), read_output, read_status)


# ---- The process that forks ----------------------------------------------------------------------


def serve(connection: socket.socket) -> list[str]:
    """
    Fork a process for each request, and report its exit status. Returns the words of the request in
    the new process; does not return in this one.
    """
    running: dict[int, int] = {}  # process -> pipe for its status

    def report(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):  # none is left
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = found
                os.write(running[pid], str(os.waitstatus_to_exitcode(code)).encode())
                os.close(running.pop(pid))

    signal.signal(signal.SIGCHLD, report)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the tests' terminal
    while True:
        request, (*pipes,), *_ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if pid := os.fork():
            running[pid] = pipes[1]
            os.close(pipes[0])
            connection.send(str(pid).encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if not pid:
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            os.dup2(pipes[0], 1)
            os.dup2(pipes[0], 2)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False, buffering=1)
            for descriptor in (*pipes, connection.detach(), *running.values()):
                os.close(descriptor)
            words, environment = json.loads(request)
            records.STARTED = time.perf_counter()
            os.environ.clear()
            os.environ.update(environment)
            return words


if __name__ == "__main__":
    for module in MODULES.split():
        __import__(module)
    for script in (REPOSITORY / "scripts").rglob("*.py"):
        recipe.read_code(script)
        recipe.code_digests()  # remembers those of texts
    recipe.code_of_process.clear()
    gc.collect()
    gc.freeze()
    kind, name, *arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv[1:] = arguments
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = kind
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
