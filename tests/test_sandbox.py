"""
Attacks on the sandbox (cases S1 to S10 and S12), on every layer that works on this machine.

Each attack targets only this process and its test's files and listeners, and bounds itself,
so a broken sandbox does no more harm than a failing test. An attack runs in the child, calls
`attempt(name, function, ...)` for each action, and prints the outcome.
"""

import ctypes
import errno
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from nanochat import sandbox
from nanochat.common import REPOSITORY
from nanochat.sandbox import Limits, Result, SandboxUnavailable, run_python
from tasks.humaneval import run_test

ATTEMPT = """
def attempt(name, function, *args):
    try: print(name, 'WORKED', function(*args), flush=True)
    except OSError as error: print(name, 'refused', error.errno, flush=True)
    except Exception as error: print(name, 'failed', type(error).__name__, error, flush=True)
"""
LIBC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    result = getattr(libc, name)(*args)
    if result < 0: raise OSError(ctypes.get_errno(), name)
    return result
"""


@pytest.fixture(params=sandbox.LAYERS)
def layer(request, monkeypatch) -> str:
    """Each layer that works on this machine; `choose_layer` is patched to return it."""
    reason = sandbox.probe_layer(request.param)
    if reason is not None:
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "choose_layer", lambda unsafe=False: request.param)
    return request.param


@pytest.fixture
def offspring():
    """Function that lists descendants started during the test, orphans and zombies included."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before = set(psutil.Process().children(recursive=True))  # from other tests: compiler, packing
    yield lambda: [p for p in psutil.Process().children(recursive=True) if p not in before]
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """Parent of the sandbox's temporary directories, to check for leftovers."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def attack(code: str) -> dict[str, str]:
    """Run an attack, which must finish; returns {name: outcome} for its attempts."""
    result = run_python(ATTEMPT + code + "\nprint('end of attack')")
    assert result.stdout.endswith("end of attack\n"), result
    return dict(line.split(" ", 1) for line in result.stdout.splitlines()[:-1])


def assert_refused(outcomes: dict[str, str], names: str) -> None:
    """Check that exactly the named attempts were made and the kernel denied each."""
    assert set(outcomes) == set(names.split())
    assert all(outcome.startswith("refused") for outcome in outcomes.values()), outcomes


# ------------------------------------------------------------------------------------------------
# Allowed actions


def test_program_reads_empty_stdin_computes_and_prints(layer):
    code = "import sys\nprint([sys.stdin.read(), 2**70])\nprint('\u00e9', file=sys.stderr)"
    result = run_python(code)
    assert result.ok and result.reason == ""
    assert result.stdout == "['', 1180591620717411303424]\n"
    assert result.stderr == "\u00e9\n"


def test_program_can_use_files_in_a_temporary_directory(layer, scratch):
    code = """
import os, tempfile
with open("a", "w") as file: file.write("text")
os.replace("a", "b")
with tempfile.NamedTemporaryFile("w+") as file: file.write("x")
print(os.listdir("."), open("b").read())
os.remove("b")
open("left behind", "w").close()
"""
    assert run_python(code).stdout == "['b'] text\n"
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "exit status 3"),
        ("exit('no')", "exit status 1"),
        ("1 / 0", "exit status 1"),
        ("def", "exit status 1"),
        ("'\ud800'.encode()", "exit status 1"),
        ("import ctypes; ctypes.string_at(0)", "exit status 139"),
        ("while True: pass", "time"),
    ],
)
def test_failed_program_has_a_reason(layer, code, reason):
    result = run_python(code, Limits(seconds=0.5) if reason == "time" else Limits())
    assert not result.ok and result.reason == reason


# ------------------------------------------------------------------------------------------------
# S1 to S4: access to processes, files and sockets


def test_S1_functions_from_frames_gc_and_subclasses_are_harmless(layer, tmp_path):
    proof = tmp_path / "proof"
    tmp_path.chmod(0o777)
    code = f"""
import gc, sys
found = []
frame = sys._getframe()
while frame:
    found += [v.system for v in frame.f_globals.values() if hasattr(v, "system")]
    frame = frame.f_back
print("frames", len(found))
hidden = [c for c in object.__subclasses__() if c.__name__ == "_wrap_close"]
found += [c.__init__.__globals__["system"] for c in hidden]
print("subclasses", len(hidden))
live = [o for o in gc.get_objects() if isinstance(o, dict) and o.get("__name__") == "posix"]
found += [module["system"] for module in live]
print("gc", len(live))
print("statuses", {{system(b"echo escaped > {proof}") for system in found}})
"""
    outcomes = attack(code)
    assert outcomes.pop("statuses") == "{32512}", "status of system() if it cannot start a shell"
    assert all(int(outcome) > 0 for outcome in outcomes.values()), "each method found a function"
    assert not proof.exists()


def test_S2_libc_cannot_start_processes_or_change_namespaces(layer):
    code = f"""{LIBC}
argv = (ctypes.c_char_p * 2)(b"true", None)
def fork(name):
    pid = call(name)
    if pid == 0: libc._exit(0)
    return pid
def run_from_memory():
    handle = call("memfd_create", b"x", 0)
    return call("fexecve", handle, argv, argv[1:])
attempt("execve", call, "execve", b"/bin/true", argv, None)
attempt("fork", fork, "fork")
attempt("ptrace", call, "ptrace", 0, 0, None, None)
attempt("unshare", call, "unshare", 0x10000000)
attempt("setns", call, "setns", 0, 0)
attempt("mount", call, "mount", b"none", b".", b"tmpfs", 0, None)
attempt("io_uring", call, "syscall", 425, 1, bytes(256))
attempt("memfd_create", run_from_memory)
attempt("setuid", call, "setuid", 0)
attempt("prctl", call, "prctl", 1, 0)
attempt("kill", call, "kill", libc.getppid(), 0)
attempt("prlimit", call, "prlimit", 0, 7, None, (ctypes.c_long * 2)())
attempt("fcntl", call, "fcntl", 0, 8, libc.getpid())
attempt("ioctl", call, "ioctl", 0, 0x5412, b"x")
"""
    outcomes = attack(code)
    assert_refused(
        outcomes,
        "execve fork ptrace unshare setns mount io_uring memfd_create setuid prctl kill prlimit "
        "fcntl ioctl",
    )
    assert set(outcomes.values()) == {f"refused {errno.EPERM}"}, (
        "must be denied by the seccomp filter, not for another reason"
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is x86-64 machine code")
def test_S2_32_bit_system_calls_do_not_bypass_the_filter(layer):
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by its 32-bit number, return
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("survived", function())
"""
    result = run_python(code)
    assert "survived" not in result.stdout
    assert result.reason in (f"exit status {128 + signal.SIGSYS}", "exit status 139"), result


def test_S3_secrets_in_files_environment_and_parent_are_hidden(layer, tmp_path, monkeypatch):
    secret = "hunter2-" + os.urandom(8).hex()
    names = (".ssh/id_rsa", ".netrc", ".cache/huggingface/token", "etc/shadow")
    for path in (tmp_path / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secret)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    memory = ctypes.create_string_buffer(secret.encode())
    code = f"""{LIBC}
import os
def read(path, offset=0):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read({len(secret)})
def read_memory():
    vector = lambda address: (ctypes.c_void_p * 2)(address, {len(secret)})
    buffer = ctypes.create_string_buffer({len(secret)})
    call("process_vm_readv", {os.getpid()}, vector(ctypes.addressof(buffer)), 1,
         vector({ctypes.addressof(memory)}), 1, 0)
    return buffer.raw
for name in {names}: attempt(name, read, f"{tmp_path}/{{name}}")
attempt("listing", os.listdir, "{tmp_path}")
attempt("mem", read, "/proc/{os.getpid()}/mem", {ctypes.addressof(memory)})
attempt("vm_readv", read_memory)
attempt("environ", read, "/proc/{os.getpid()}/environ")
attempt("maps", read, "/proc/{os.getpid()}/maps")
attempt("cwd", os.readlink, "/proc/{os.getpid()}/cwd")
attempt("self", read, "/proc/self/environ")
print("variables", dict(os.environ))
"""
    result = run_python(ATTEMPT + code)
    assert secret not in result.stdout and secret not in result.stderr
    outcomes = attack(code)
    assert outcomes.pop("variables") == "{}"
    assert_refused(outcomes, f"{' '.join(names)} listing mem vm_readv environ maps cwd self")


def test_S3_no_file_descriptor_is_inherited(layer, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        code = """
import os
def is_open(handle):
    try: return bool(os.fstat(handle))
    except OSError: return False
print([handle for handle in range(4096) if is_open(handle)])
"""
        assert run_python(code).stdout == "[0, 1, 2]\n"


def test_S4_no_socket_reaches_a_listener(layer, tmp_path):
    name = f"nanochat-test-{os.urandom(8).hex()}"
    (tmp_path / "open").mkdir(mode=0o777)
    path = str(tmp_path / "open" / "listener")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(path)
        abstract.bind(f"\0{name}")
        for listener in (unix, abstract):
            listener.listen()
        outcomes = attack(f"""
import socket
def connect(family, kind, address):
    with socket.socket(family, kind) as s:
        s.connect(address)
        s.send(b"escaped")
attempt("tcp", connect, socket.AF_INET, socket.SOCK_STREAM, {tcp.getsockname()!r})
attempt("udp", connect, socket.AF_INET, socket.SOCK_DGRAM, {udp.getsockname()!r})
attempt("unix", connect, socket.AF_UNIX, socket.SOCK_STREAM, {path!r})
attempt("abstract", connect, socket.AF_UNIX, socket.SOCK_STREAM, {chr(0) + name!r})
attempt("pair", socket.socketpair)
""")
        for listener in (tcp, udp, unix, abstract):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(1) if listener is udp else listener.accept()
    assert_refused(outcomes, "tcp udp unix abstract pair")


# ------------------------------------------------------------------------------------------------
# S5, S6: resource limits and time limit

SMALL = Limits(seconds=2.0, memory_bytes=2**27, output_bytes=10_000, file_bytes=2**18)


@pytest.fixture
def calm_afterwards(layer, offspring, scratch):
    """Check that the test leaves no processes or files, and that the next run works."""
    yield
    assert run_python("print(1)").stdout == "1\n"
    assert not offspring() and not list(scratch.iterdir())


def test_S5_fork_bomb_cannot_start_a_process(calm_afterwards):
    outcomes = attack("""
import os, time
def fork():
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
for i in range(20): attempt(f"fork{i}", fork)
""")
    assert_refused(outcomes, " ".join(f"fork{i}" for i in range(20)))


def test_S5_thread_bomb_cannot_start_a_thread(calm_afterwards):
    outcomes = attack("""
import _thread, time
for i in range(20): attempt(f"thread{i}", _thread.start_new_thread, time.sleep, (1,))
""")
    assert {o.split(":")[0] for o in outcomes.values()} == {
        "failed RuntimeError can't start new thread"
    }


def test_S5_memory_is_limited(calm_afterwards):
    result = run_python("pieces = [bytes([1]) * 2**20 for _ in range(256)]", SMALL)
    assert result.reason == "exit status 1" and "MemoryError" in result.stderr
    assert not run_python("bytearray(2**40)", SMALL).ok


def test_S5_file_size_is_limited(calm_afterwards):
    code = "file = open('a', 'wb', 0)\nfor _ in range(64): file.write(bytes(2**20))"
    result = run_python(code, SMALL)
    assert result.reason == "exit status 1" and "File too large" in result.stderr


def test_S5_number_of_files_is_limited(calm_afterwards):
    code = """
import time
for i in range(150): open(str(i), "w").close()
time.sleep(600)
"""
    assert run_python(code, replace(SMALL, seconds=120.0)).reason == "files"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_S5_output_is_limited(calm_afterwards, stream):
    code = f"import sys\nfor _ in range(1000): sys.{stream}.write('a' * 2**20)"
    result = run_python(code, SMALL)
    assert result.reason == "output"
    assert getattr(result, stream) == "a" * SMALL.output_bytes


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "deaf": """
import signal, time
for number in set(signal.valid_signals()) - {9, 19}:
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(600)""",
    "silent": "import os, time\nfor handle in range(3): os.close(handle)\ntime.sleep(600)",
    "daemon": """
import os, time
try:
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
except OSError: pass
time.sleep(600)""",
    "session": """
import os, time
try: os.setsid()
except OSError: pass
time.sleep(600)""",
    "stubborn": """
import time
def on():
    try: time.sleep(600)
    finally: on()
on()""",
}


@pytest.mark.parametrize("way", ENDLESS)
def test_S6_no_process_outlives_the_time_limit(calm_afterwards, offspring, way):
    result = run_python(ENDLESS[way], Limits(seconds=0.4))
    deadline = time.monotonic() + 120  # the programs sleep for 600 s
    while offspring() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not offspring()
    assert result.reason == "time"


def test_S6_child_is_killed_when_its_parent_is_killed(layer, offspring, scratch):
    code = f"""
from nanochat import sandbox
sandbox.choose_layer = lambda unsafe=False: {layer!r}
sandbox.run_python("import time; time.sleep(600)", sandbox.Limits(seconds=600))
"""
    environment = {**os.environ, "TMPDIR": str(scratch)}  # a killed parent leaves files behind
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, env=environment)
    deadline = time.monotonic() + 120
    while not any(sandbox.child_source() in p.cmdline() for p in offspring()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120  # the child would sleep for 600 s
    while alive := [p for p in offspring() if p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)
    for orphan in offspring():
        os.waitpid(orphan.pid, 0)


# ------------------------------------------------------------------------------------------------
# S7: write access


def test_S7_files_outside_the_sandbox_cannot_be_changed(layer, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside / "target"
    target.write_text("untouched")
    target.chmod(0o666)
    for folder in (tmp_path, outside):
        folder.chmod(0o777)  # so that only the sandbox denies access
    before = target.stat()
    outcomes = attack(f"""
import os, stat
outside, target = {str(outside)!r}, {str(target)!r}
attempt("write", open, target, "w")
attempt("append", open, target, "a")
attempt("truncate", os.truncate, target, 0)
attempt("truncate-reading", os.open, target, os.O_RDONLY | os.O_TRUNC)
attempt("create", open, outside + "/new", "w")
attempt("escape", open, "../new", "w")
attempt("unnamed", os.open, outside, os.O_TMPFILE | os.O_RDWR)
attempt("folder", os.mkdir, outside + "/new")
attempt("remove", os.remove, target)
attempt("take", os.rename, target, "taken")
open("mine", "w").close()
attempt("replace", os.replace, "mine", target)
attempt("symlink", os.symlink, target, "soft")
attempt("hardlink", os.link, target, "hard")
attempt("hardlink-out", os.link, "mine", outside + "/new")
attempt("chmod", os.chmod, target, 0o777)
attempt("chown", os.chown, target, 1, 1)
attempt("times", os.utime, target, (0, 0))
attempt("attribute", os.setxattr, target, "user.x", b"x")
attempt("device", os.mknod, "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
attempt("fifo", os.mkfifo, "fifo")
attempt("chroot", os.chroot, ".")
""")
    assert_refused(
        outcomes,
        "write append truncate truncate-reading create escape unnamed folder remove take replace "
        "symlink hardlink hardlink-out chmod chown times attribute device fifo chroot",
    )
    after = target.stat()
    assert target.read_text() == "untouched" and list(outside.iterdir()) == [target]
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (
        (before.st_mode, before.st_mtime_ns, before.st_nlink)
    )


def test_S7_read_only_open_cannot_truncate(layer):
    """Landlock checks truncation only since version 3, so the seccomp filter must deny it."""
    outcomes = attack("""
import os
open("mine", "w").close()
attempt("truncate", os.open, "mine", os.O_RDONLY | os.O_TRUNC)
""")
    assert outcomes == {"truncate": f"refused {errno.EPERM}"}


def test_S7_fifo_does_not_block_program_or_parent(layer):
    code = "import os\nos.mkfifo('fifo')\nopen('fifo').read()"
    result = run_python(code, Limits(seconds=2))  # without the limit it might never end
    assert not result.ok


# ------------------------------------------------------------------------------------------------
# S8: verdicts

DOUBLE = "assert double(2) == 4\nassert double(5) == 10"
CHEATS = {
    "prints": "print('passed\\nOK\\nready')\ndef double(x): return 0",
    "is missing": "x = 1",
    "fails to load": "def double(x): return 2 * x\n1 / 0",
    "is no function": "double = 4",
    "exits at once": "import sys; sys.exit(0)",
    "exits at once, hard": "import os; os._exit(0)",
    "exits when called": "import sys\ndef double(x): sys.exit(0)",
    "exits when called, hard": "import os\ndef double(x): os._exit(0)",
    "ends with an exit hook": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): raise SystemExit(0)"
    ),
    "equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def double(x): return Equal()""",
    "is a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def double(x): return Equal(0)""",
    "lies about its class": """
class Equal:
    __class__ = int
    def __eq__(self, other): return True
def double(x): return Equal()""",
    "is a list that equals everything": """
class Equal(list):
    def __eq__(self, other): return True
def double(x): return Equal([1])""",
    "patches the judge's tools": """
import builtins, json, sys, unittest
unittest.TestCase.assertEqual = lambda *a: None
builtins.AssertionError = ValueError
builtins.abs = builtins.len = lambda x: 0
sys.excepthook = lambda *a: None
main = sys._getframe(2).f_globals
main["ERRORS"] = {}
json.dumps = lambda value: '["tuple", ["list", ["passed"]]]'
def double(x): return 0""",
    "answers in advance": """
import os
def write(line):
    for handle in range(3, 256):
        try: os.write(handle, line)
        except OSError: pass
write(b'["tuple", ["value", 4]]\\n' * 9)
def double(x): return 4""",
    "writes into every pipe": """
import os
for handle in range(256):
    for line in (b"ready", b"passed", b"True\\n", b'["tuple", ["value", true]]\\n', b"[]\\n"):
        try: os.write(handle, line)
        except OSError: pass
def double(x): return 0""",
    "answers with an endless line": """
import os
def double(x):
    for handle in range(3, 256):
        try:
            for _ in range(1024): os.write(handle, b"a" * 2**20)
        except OSError: pass""",
    "answers with a bottomless list": """
import os
def double(x):
    for handle in range(3, 256):
        try: os.write(handle, b"[" * 10**5 + b"\\n")
        except OSError: pass""",
    "looks for the test": """
import gc, os, sys
seen = []
for handle in range(256):
    try: seen.append(os.pread(handle, 10**6, 0))
    except OSError: pass
seen += [o.encode() for o in gc.get_objects() if isinstance(o, str)]
frame = sys._getframe()
while frame:
    seen += [repr(v).encode() for v in frame.f_locals.values()]
    frame = frame.f_back
answers = [4, 10] if any(b"assert doub" + b"le" in text for text in seen) else [0, 0]
def double(x): return answers.pop(0)""",
    "stops the loop that checks it": "def double(x): raise StopIteration",
    "is not a number": "def double(x): return float('nan')",
    "takes forever": "def double(x):\n    while True: pass",
    "is wrong": "def double(x): return x * x",
}


@pytest.mark.parametrize("way", CHEATS)
def test_S8_cheating_program_does_not_pass(layer, way):
    assert not run_test(CHEATS[way], DOUBLE, "double")


@pytest.mark.parametrize("way", ["stops the loop that checks it", "exits when called, hard"])
def test_S8_cheating_program_does_not_pass_other_tests(layer, way):
    for test in (
        "assert all(map(double, [1, 2]))",
        "for _ in map(double, [1, 2]): pass\nassert False",
        "try: double(1)\nexcept ValueError: pass",
    ):
        assert not run_test(CHEATS[way], test, "double")


def test_S8_correct_program_passes(layer):
    assert run_test("def double(x): return 2 * x", DOUBLE, "double")
    assert run_test(
        "print('loaded')\nclass double:\n    def __new__(cls, x): return x + x", DOUBLE, "double"
    )


def test_S8_plain_data_round_trips_unchanged(layer):
    values = r"""[
        None, True, 1, -2**100, 1.5, float("inf"), "\ud800 \u00e9\n", b"\x00\xff", (), (1,), [],
        [[1], (2,)], {1, "a"}, frozenset([(1, 2)]), {}, {(1, "a"): {"b": [b"c"]}, 2.5: None}]"""
    test = f"""
for value in {values}:
    answer, named = echo(value, named=value)
    assert answer == value == named and type(answer) is type(value), value
assert type(echo(True)[0]) is bool
"""
    assert run_test("def echo(value, named=None): return value, named", test, "echo")


def test_S8_program_may_raise_the_expected_exception(layer):
    test = """
try: root(-1)
except ValueError as error: assert "ValueError" in str(error)
else: assert False
assert root(4) == 2
"""
    assert run_test("def root(x):\n    if x < 0: raise ValueError\n    return x**0.5", test, "root")
    assert not run_test("def root(x): return x**0.5", test, "root")


def test_S8_program_cannot_change_the_setup_of_the_test(layer):
    setup = "def scaled(x): return 10 * x\ndef double(x):\n    'Twice x.'\n"
    test = "assert scaled(double(1)) == 20"
    assert run_test("def double(x): return 2 * x", test, "double", setup)
    cheat = "def scaled(x): return 20\nabs = scaled\ndef double(x): return 0"
    assert not run_test(cheat, test, "double", setup)


def test_S8_verdicts_leak_no_descriptors_or_threads(calm_afterwards):
    handles = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    assert run_test("def double(x): return 2 * x", DOUBLE, "double")
    assert not run_test("def double(x): return 0", DOUBLE, "double")
    assert len(os.listdir("/proc/self/fd")) == handles
    assert threading.active_count() == threads


@pytest.mark.slow
def test_S8_humaneval_accepts_canonical_solutions_only(layer, hub):
    files = sorted((hub / "datasets/openai/openai_humaneval").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]

    def passed(row, body: str) -> bool:
        test = f"{row['test']}\ncheck({row['entry_point']})"
        return run_test(row["prompt"] + body, test, row["entry_point"], row["prompt"])

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda row: passed(row, row["canonical_solution"]), rows))
        assert not any(pool.map(lambda row: passed(row, "    return None\n"), rows))


# ------------------------------------------------------------------------------------------------
# S9: many runs


def check_many(runs: int, offspring, scratch: Path) -> None:
    """Run different programs, 16 at a time: each gets its own result, and nothing leaks."""
    programs = {
        "print(6 * 7)": "",
        "1 / 0": "exit status 1",
        "print('a' * 10**6)": "output",
        "import time; time.sleep(9)": "time",
    }
    limits = Limits(seconds=2, output_bytes=1000)
    codes = [list(programs)[0 if i % 10 else i // 10 % 4] for i in range(runs)]
    handles = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda code: run_python(code, limits), codes))
    wrong = [(c, r) for c, r in zip(codes, results, strict=True) if r.reason != programs[c]]
    assert not wrong
    assert len(os.listdir("/proc/self/fd")) == handles
    assert not offspring(), "zombies included"
    assert not list(scratch.iterdir())


def test_S9_fifty_runs_leak_nothing(layer, offspring, scratch):
    check_many(50, offspring, scratch)


@pytest.mark.slow
def test_S9_a_thousand_runs_leak_nothing(layer, offspring, scratch):
    check_many(1000, offspring, scratch)


def test_S9_child_loads_few_extra_modules(layer):
    code = "import sys; print(*sys.modules)"
    command = [sandbox.interpreter(), "-I", "-c", code]
    bare = subprocess.run(command, capture_output=True, text=True).stdout.split()
    confined = run_python(code).stdout.split()
    assert confined and len(set(confined) - set(bare)) < 15


# ------------------------------------------------------------------------------------------------
# S12: size of unnamed files

KEEP = {
    "unlinked": """
def keep(name):
    file = open(name, "wb", 0)
    os.remove(name)
    file.write(piece)
    kept.append(file)""",
    "O_TMPFILE": """
def keep(name):
    handle = os.open(".", os.O_TMPFILE | os.O_RDWR)
    kept.append(handle)
    os.write(handle, piece)""",
    "overwritten by a rename": """
def keep(name):
    kept.append(open("same", "wb", 0))
    kept[-1].write(piece)
    open("new", "w").close()
    os.replace("new", "same")""",
    "mapped and closed": """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 5]
def keep(name):
    with open(name, "w+b", 0) as file:
        file.write(piece)
        page = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        if page % 2**64 == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
        kept.append(page)
    os.remove(name)""",
    "written through a mapping": """
import mmap
def keep(name):
    with open(name, "w+b") as file:
        file.truncate(len(piece))
        os.remove(name)
        kept.append(mmap.mmap(file.fileno(), len(piece)))
    kept[-1][:] = piece""",
    "read again": """
def keep(name):
    with open(name, "wb", 0) as file:
        file.write(piece)
    kept.append(open(name, "rb"))
    os.remove(name)""",
    "the standard input": """
def keep(name):
    kept.append(os.pwrite(0, piece, 2**20 * len(kept)))""",
}
FILL = """
import os, time
kept, piece = [], bytes(2**20)
{keep}
for i in range(16):
    try: keep(str(i))
    except OSError as error: print("refused", error.errno, flush=True)
print("kept", len(kept))
if kept: time.sleep(20)
"""


@pytest.mark.parametrize("way", KEEP)
def test_S12_unnamed_files_count_toward_the_limit(layer, way):
    """Writes 16 MiB with a limit of 2: the kernel denies every write or the program is killed."""
    result = run_python(FILL.format(keep=KEEP[way]), Limits(seconds=10, file_bytes=2**21))
    refused = {"O_TMPFILE": errno.EPERM, "the standard input": errno.ESPIPE}
    if way in refused:
        assert result.stdout == f"refused {refused[way]}\n" * 16 + "kept 0\n"
    elif way == "written through a mapping" and layer == "bubblewrap":  # SIGBUS: tmpfs is full
        assert result.reason in ("files", f"exit status {128 + signal.SIGBUS}"), result
    else:
        assert result.reason == "files", result


def test_S12_output_before_the_file_limit_is_kept(layer, monkeypatch):
    name = "mounted_bytes" if layer == "bubblewrap" else "disk_bytes"
    count = getattr(sandbox, name)

    def slow(*args):
        time.sleep(1.0)  # the program prints and writes meanwhile
        return count(*args)

    monkeypatch.setattr(sandbox, name, slow)
    code = """
import time
time.sleep(0.3)
print("said", flush=True)
for name in "ab":
    try: open(name, "wb", 0).write(bytes(2**20))
    except OSError: pass
time.sleep(20)
"""
    result = run_python(code, Limits(seconds=15, file_bytes=2**20))
    assert (result.stdout, result.reason) == ("said\n", "files")


@pytest.mark.parametrize("layer", ["bubblewrap"], indirect=True)  # with its own file system
def test_S12_bubblewrap_files_never_exceed_the_limit(layer):
    """The size of the tmpfs is the limit, so even writes too fast for polling are stopped."""
    code = """
import os
total = 0
for i in range(16):
    file = open(str(i), "wb", 0)
    os.remove(str(i))
    globals()[f"file{i}"] = file
    try: total += file.write(bytes(2**20))
    except OSError as error: print(error.errno)
print("written", total, flush=True)
"""
    result = run_python(code, Limits(file_bytes=2**21))
    written = result.stdout.rpartition("written ")[2]
    assert result.reason == "files" or int(written) <= 2**21 + sandbox.BLOCK, result


def test_S12_temporary_files_within_the_limit_work(layer):
    code = """
import mmap, tempfile, time
with tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as named:
    file.write(bytes(2**20))
    file.flush()
    named.write(bytes(2**19))
    named.flush()
    with mmap.mmap(file.fileno(), 2**20) as view, mmap.mmap(-1, 2**24) as anonymous:
        view[5], anonymous[5] = 7, 7
        time.sleep(0.2)
        print(view[5])
"""
    assert run_python(code, Limits(file_bytes=2**21)).stdout == "7\n"


# ------------------------------------------------------------------------------------------------
# S10: no sandbox

REFUSES = """
import ctypes, struct, sys
from nanochat import sandbox
from nanochat.sandbox_child import ALLOW, EQUAL, LIBC, LOAD, RETURN, call, step
ENOSYS = 0x00050026
mount = {"x86_64": 165, "aarch64": 40}[sys.argv[1]]
steps = [step(LOAD, 0)]
for number in (444, mount): steps += [step(EQUAL, number, no=1), step(RETURN, ENOSYS)]
program = ctypes.create_string_buffer(b"".join([*steps, step(RETURN, ALLOW)]))
call(LIBC.prctl, 38, 1, 0, 0, 0)
call(LIBC.prctl, 22, 2, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program)), 0, 0)
try: print(sandbox.run_python("print('ran')"))
except sandbox.SandboxUnavailable as error: print(error)
print(sandbox.run_python("print('ran unsafe')", unsafe=True).stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="locks a container down with seccomp")
def test_S10_locked_down_container_needs_unsafe_exec():
    """A process denied mounts and Landlock, as in a container with a strict profile."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSES, platform.machine()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    error, ran = done.stdout.rsplit("--unsafe_exec", 1)
    assert "bubblewrap: " in error and "landlock: " in error and "Result" not in error
    assert "Function not implemented" in error, "must include the kernel's reason"
    assert ran.strip() == "ran unsafe", done.stderr


def test_S10_other_platforms_raise(monkeypatch):
    monkeypatch.setattr(sandbox, "probe_layer", sandbox.probe_layer.__wrapped__)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="--unsafe_exec"):
        run_python("print(1)")


@pytest.mark.parametrize("layer", sandbox.LAYERS)
def test_S10_layer_that_does_not_confine_fails_the_probe(layer, monkeypatch):
    if layer == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    rights = sandbox.list_rights
    monkeypatch.setattr(sandbox, "list_rights", lambda limits, _: rights(limits, "none"))
    assert sandbox.probe_layer.__wrapped__(layer) is not None


@pytest.mark.parametrize("error", ["no such right", ""])
def test_S10_child_that_fails_to_confine_itself_runs_nothing(
    layer, monkeypatch, offspring, scratch, error
):
    source = sandbox.child_source()
    broken = f"\n    raise OSError({error!r})\n" if error else "\n    os._exit(0)\n"
    start = '    if job["nobody"]:'
    assert start in source
    monkeypatch.setattr(sandbox, "child_source", lambda: source.replace(start, broken + start))
    with pytest.raises(SandboxUnavailable, match=error or "no answer"):
        run_python("print(1)")
    assert not offspring() and not list(scratch.iterdir())


def test_root_becomes_nobody_if_interpreter_is_world_readable(monkeypatch):
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
    if os.geteuid() != 0 or python is None or sandbox.probe_layer("landlock"):
        pytest.skip("needs root, Landlock, and an interpreter that other users can read")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(sandbox, "choose_layer", lambda unsafe=False: "landlock")
    monkeypatch.setattr(sandbox, "interpreter", lambda: os.path.realpath(python))
    monkeypatch.setattr(
        sandbox, "read_paths", lambda: ("/usr/lib", "/lib", os.path.realpath(python))
    )
    result = run_python("import os, json\nopen('a', 'w').close()\nprint(os.getuid(), os.getgid())")
    assert result.stdout == "65534 65534\n", result


def test_S12_container_root_counts_deleted_files():
    """Without CAP_SYS_PTRACE, as in most containers, root sees only its own open files."""
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
    if os.geteuid() != 0 or python is None or sandbox.probe_layer("landlock"):
        pytest.skip("needs root, Landlock, and an interpreter that other users can read")
    code = f"""{LIBC}
import os, sys
from nanochat import sandbox
if not sys.argv[1:]:
    call("prctl", 24, 19, 0, 0, 0)  # PR_CAPBSET_DROP: takes effect at exec
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], "again"])
sandbox.interpreter = lambda: os.path.realpath({python!r})
sandbox.read_paths = lambda: ("/usr/lib", "/lib", os.path.realpath({python!r}))
print(sandbox.probe_layer("landlock"))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TMPDIR": "/tmp"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


def test_root_keeps_no_capabilities(layer):
    code = f"""{LIBC}
import struct
data = ctypes.create_string_buffer(24)
attempt("capset", call, "capset", struct.pack("=Ii", 0x20080522, 0), bytes([255]) * 24)
"""
    assert attack(code) == {"capset": f"refused {errno.EPERM}"}


def test_unsandboxed_program_still_has_limits(monkeypatch):
    monkeypatch.setattr(sandbox, "probe_layer", lambda layer: "missing")
    assert run_python("while True: pass", Limits(seconds=0.3), unsafe=True).reason == "time"
    assert run_python("print('a' * 10**6)", unsafe=True).reason == "output"
    assert not run_python("bytearray(2**40)", unsafe=True).ok
    result: Result = run_python("print(1)", unsafe=True)
    assert result.ok and result.stdout == "1\n"


def test_annotations_are_evaluated_as_in_an_ordinary_program():
    result = run_python("def f(x: Missing): pass", unsafe=True)
    assert not result.ok and "name 'Missing' is not defined" in result.stderr
