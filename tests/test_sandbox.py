"""
Attacks on the sandbox (nanochat.sandbox, nanochat.sandbox_child) and the calculator.

An attack bounds itself and aims only at the files, processes and listeners of its own test, so a
broken sandbox does no more harm than a failing test.
"""

import ctypes
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat.common import REPOSITORY
from nanochat.sandbox import Limits, SandboxUnavailable, Tools, find_problem, run, run_python
from tasks.code import run_test

PRELUDE = """
import _thread, ctypes, gc, os, socket, stat, sys, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
argv = (ctypes.c_char_p * 2)(b"true", None)
def call(name, *args):
    found = getattr(libc, name)(*args)
    if found < 0: raise OSError(ctypes.get_errno(), name)
    return found
def shell(system):
    if system(b"echo escaped > {target}"): raise PermissionError(1, "no shell")
def frames(frame=sys._getframe()):
    while frame: yield (frame := frame.f_back) or sys._getframe()
def attempt(name, attack):
    try: print(name, "worked", eval(attack))
    except OSError as error: print(name, "denied" if error.errno in (1, 2, 9, 13, 30) else error)
    except (KeyError, RuntimeError): print(name, "denied")
    except Exception as error: print(name, repr(error))
"""
ATTACKS = {
    "S1": {
        "import": "shell(os.system)",
        "frames": "shell([v.system for f in frames() for v in f.f_globals.values()"
        " if hasattr(v, 'system')][-1])",
        "subclasses": "shell([c for c in object.__subclasses__() if c.__name__ == '_wrap_close']"
        "[0].__init__.__globals__['system'])",
        "gc": "shell([o for o in gc.get_objects() if isinstance(o, dict)"
        " and o.get('__name__') == 'posix'][0]['system'])",
    },
    "S2": {
        "execve": "call('execve', b'/bin/true', argv, None)",
        "ptrace": "call('ptrace', 0, 0, None, None)",
        "unshare": "call('unshare', 0x10000000)",
        "mount": "call('mount', b'none', b'/', b'tmpfs', 0, None)",
        "io_uring": "call('syscall', 425, 1, bytes(256))",
        "memfd_create": "call('fexecve', call('memfd_create', b'x', 0), argv, None)",
        "capset": "call('capset', (ctypes.c_int * 2)(0x20080522, 0), b'\\xff' * 24)",
        "kill": "call('kill', libc.getppid(), 0)",
        "prlimit": "call('prlimit', 0, 7, None, (ctypes.c_long * 2)())",
        "F_SETOWN": "call('fcntl', 0, 8, libc.getpid())",
        "TIOCSTI": "call('ioctl', 0, 0x5412, b'x')",
    },
    "S3": {
        "key": "open('{folder}/.ssh/id_rsa').read()",
        "shadow": "open('/etc/shadow').read()",
        "variable": "os.environ['WANDB_API_KEY']",
        "own environ": "open('/proc/self/environ').read()",
        "environ": "open('/proc/{pid}/environ').read()",
        "memory": "open('/proc/{pid}/mem', 'rb')",
        "vm_readv": "call('process_vm_readv', {pid}, None, 0, None, 0, 0)",
        "inherited": "os.fstat({handle})",
    },
    "S4": {
        "tcp": "socket.create_connection({tcp})",
        "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {udp})",
        "unix": "socket.socket(socket.AF_UNIX).connect('{unix}')",
        "abstract": "socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
        "pair": "socket.socketpair()",
    },
    "S5": {
        "fork": "os.fork() or os._exit(0)",
        "thread": "_thread.start_new_thread(time.sleep, (1,))",
    },
    "S7": {
        "write": "open('{target}', 'w')",
        "truncate": "os.truncate('{target}', 0)",
        "truncate by reading": "os.open('{target}', os.O_RDONLY | os.O_TRUNC)",
        "create": "open('{folder}/new', 'w')",
        "unnamed": "os.open('{folder}', os.O_TMPFILE | os.O_RDWR)",
        "remove": "os.remove('{target}')",
        "symlink": "os.symlink('{target}', 'soft')",
        "hardlink": "os.link('{target}', 'hard')",
        "chmod": "os.chmod('{target}', 0o777)",
        "times": "os.utime('{target}', (0, 0))",
        "attribute": "os.setxattr('{target}', 'user.x', b'x')",
        "device": "os.mknod('device', stat.S_IFCHR | 0o600, os.makedev(1, 3))",
        "fifo": "os.mkfifo('fifo')",
        "chroot": "os.chroot('.')",
    },
    "S7 own": {
        "here": "open('new', 'w')",
        "temporary": "tempfile.TemporaryFile()",
        "unnamed": "os.open('.', os.O_TMPFILE | os.O_RDWR)",
        "shared memory": "open('/dev/shm/new', 'w')",
    },
}


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """What attacks aim at: secrets, a file, this process and listeners on loopback."""
    folder = tmp_path / "open"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    for name in ("target", ".ssh/id_rsa"):
        (folder / name).write_text("untouched")
    found = {"folder": folder, "target": folder / "target", "pid": os.getpid()}
    unix, abstract = str(folder / "listener"), f"nanochat-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
        open(folder / "target") as held,
    ):
        udp.bind(("127.0.0.1", 0))
        os.set_inheritable(held.fileno(), True)
        for listener, address in ((named, unix), (unnamed, f"\0{abstract}")):
            listener.bind(address)
            listener.listen()
        found |= {"unix": unix, "abstract": abstract, "handle": held.fileno()}
        yield found | {"tcp": tcp.getsockname(), "udp": udp.getsockname()}


@pytest.mark.parametrize("case", ATTACKS)
def test_S1_S2_S3_S4_S5_S7_attack_is_denied(sandbox, facts, case):
    target, attempts = facts["target"], ATTACKS[case]
    before = target.stat(), sorted(target.parent.iterdir())
    lines = [f"attempt({name!r}, {attempts[name].format(**facts)!r})" for name in attempts]
    result = run_python("\n".join([PRELUDE.format(**facts), *lines]))
    assert result.stdout.splitlines() == [f"{name} denied" for name in attempts], result.stderr
    after = target.stat(), sorted(target.parent.iterdir())
    assert target.read_text() == "untouched" and after == before


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is x86-64 machine code")
def test_S2_32_bit_system_calls_do_not_bypass_the_filter(sandbox):
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by its 32-bit number, return
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("survived")
"""
    result = run_python(code)
    assert result.stdout == "" and result.reason in ("exit status 159", "exit status 139")


# ---- S5, S6, S9: limits, and nothing that is left ------------------------------------------------

ENDINGS = {
    "import sys; sys.stdin.read()" + "#" * 200_000: "",
    "import sys; sys.exit(3)": "exit status 3",
    "def": "exit status 1",
    "'\ud800'.encode()": "exit status 1",
    "import ctypes; ctypes.string_at(0)": "exit status 139",
    "pieces = [bytes([1]) * 2**20 for _ in range(256)]": "exit status 1",
    "while True: print('a' * 2**20)": "output",
    "import sys\nwhile True: sys.stderr.write('a' * 2**20)": "output",
    "import time; time.sleep(600)": "time",
    "import os, time\nfor handle in range(3): os.close(handle)\ntime.sleep(600)": "time",
    """
import signal, time
for number in set(signal.valid_signals()) - {9, 19}:
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(600)""": "time",
    """
import os, time
for leave in (os.fork, os.setsid, os.fork):
    try: leave() and os._exit(0)
    except OSError: pass
time.sleep(600)""": "time",
}
SMALL = Limits(memory_bytes=2**27, output_bytes=10_000)


@pytest.fixture
def offspring():
    """Function that lists descendants started during the test, orphans and zombies included."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before = set(psutil.Process().children(recursive=True))
    yield lambda: [p for p in psutil.Process().children(recursive=True) if p not in before]
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch, offspring):
    """Check that no process, open file or temporary file remains, and that the next run works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handles = len(os.listdir("/proc/self/fd"))
    yield
    assert not offspring() and not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == handles
    assert run_python("print(1)").stdout == "1\n"


@pytest.mark.parametrize("code", ENDINGS, ids=range(len(ENDINGS)))
def test_S5_S6_program_ends_within_its_limits(sandbox, nothing_left, code):
    reason = ENDINGS[code]
    result = run_python(code, replace(SMALL, seconds=0.4 if reason == "time" else 5.0))
    assert (result.ok, result.reason) == (not reason, reason)
    assert len(result.stdout) <= SMALL.output_bytes and len(result.stderr) <= SMALL.output_bytes


def test_S6_child_is_killed_with_its_parent(sandbox, offspring):
    code = """
from nanochat import sandbox
big = "import time; held = bytes([1]) * 2**28; time.sleep(600)"
sandbox.run_python(big, sandbox.Limits(seconds=600))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    while not (program := [p for p in offspring() if rss(p) > 2**28 and p.pid != parent.pid]):
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(program, timeout=120)[1] == []  # it would sleep for 600 s
    for orphan in offspring():
        os.waitpid(orphan.pid, 0)


def test_S6_offspring_of_an_unsandboxed_program_ends_with_it(offspring):
    code = "import os, time\nif os.fork() == 0: time.sleep(600)"  # only root may fork
    run({"role": "program", "code": code}, replace(SMALL, seconds=0.4), False)
    for orphan in offspring():
        assert os.waitstatus_to_exitcode(os.waitpid(orphan.pid, 0)[1]) == -signal.SIGKILL


def rss(process: psutil.Process) -> int:
    """Memory of a process in bytes; 0 if it has exited."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.parametrize("runs", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_S9_many_runs_get_their_own_results(sandbox, nothing_left, runs):
    codes = ["print('a' * 10**6)", "1 / 0", "import time; time.sleep(60)"]
    codes += [f"print({i})" for i in range(runs)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda code: run_python(code, SMALL), codes))
    assert [r.reason for r in results[:4]] == ["output", "exit status 1", "time", ""]
    assert [r.stdout for r in results[3:]] == [f"{i}\n" for i in range(runs)]


# ---- S8: verdicts --------------------------------------------------------------------------------

RIGHT = "def double(x): return 2 * x"
SETUP = "def same(a, b): return a == b"
TEST = "assert all(map(lambda x: same(double(x), 2 * x), [2, 5]))"
VALUES = r"""
for value in [None, True, 1, -2**100, 1.5, float("inf"), "\ud800 é\n", b"\x00\xff", (), (1,), [],
    [[1], (2,)], {1, "a"}, frozenset([(1, 2)]), {}, {(1, "a"): {"b": [b"c"]}, 2.5: None}]:
    answer, named = double(value, named=value)
    assert answer == value == named and type(answer) is type(value)
"""
RAISES = """
try: double(-1)
except ValueError as error: assert "ValueError" in str(error)
else: assert False
"""
RIGHT_PROGRAMS = [  # program, test
    (RIGHT, TEST),
    ("print('loaded')\nclass double:\n    def __new__(cls, x): return x + x", TEST),
    ("def double(value, named=None): return value, named", VALUES),
    ("def double(x):\n    if x < 0: raise ValueError", RAISES),
]
CHEATS = {
    "prints": "print('passed\\nOK\\nready')\ndef double(x): return 0",
    "is missing": "x = 1",
    "fails to load": f"{RIGHT}\n1 / 0",
    "exits when called": "import os\ndef double(x): os._exit(0)",
    "ends with an exit hook": "import atexit, os\natexit.register(os._exit, 0)\n"
    "def double(x): raise SystemExit(0)",
    "equals everything": "class Equal:\n    __class__ = int\n"
    "    def __eq__(self, other): return True\ndef double(x): return Equal()",
    "is a list that equals everything": "class Equal(list):\n"
    "    def __eq__(self, other): return True\ndef double(x): return Equal([1])",
    "patches the judge": "import builtins, json\nbuiltins.AssertionError = ValueError\n"
    "builtins.all = json.dumps = lambda x: '[]'\ndef double(x): return 0",
    "answers in advance": """
import os
for handle in range(256):
    for line in (b"ready", b"passed", b"True\\n", b'["tuple", ["value", 4]]\\n', b"[]\\n"):
        try: os.write(handle, line * 9)
        except OSError: pass
def double(x): return 4""",
    "answers with an endless line": """
import os
def double(x):
    for handle in range(3, 256):
        try:
            for _ in range(1024): os.write(handle, b"[" * 2**20)
        except OSError: pass""",
    "looks for the test": """
import gc, sys
seen, frame = [o for o in gc.get_objects() if isinstance(o, str)], sys._getframe()
while frame:
    seen += map(repr, frame.f_locals.values())
    frame = frame.f_back
answers = [4, 10] if any("assert " + "all" in text for text in seen) else [0, 0]
def double(x): return answers.pop(0)""",
    "stops the loop that checks it": "def double(x): raise StopIteration",
    "changes the setup": "def same(a, b): return True\ndef double(x): return 0",
    "takes forever": "import time\ndef double(x): time.sleep(600)",
    "is wrong": "def double(x): return x * x",
}


@pytest.mark.parametrize(("program", "test"), RIGHT_PROGRAMS, ids=range(len(RIGHT_PROGRAMS)))
def test_S8_right_program_passes(sandbox, nothing_left, program, test):
    assert run_test(program, test, "double", SETUP)


@pytest.mark.parametrize("way", CHEATS)
def test_S8_cheating_program_fails(sandbox, nothing_left, way):
    assert not run_test(CHEATS[way], TEST, "double", SETUP)


# ---- S10: no sandbox -----------------------------------------------------------------------------


def run_without_landlock() -> None:
    """Print what programs get on another platform, and if the kernel has no Landlock."""
    # BPF: load the number of the call; 444 (Landlock) fails with ENOSYS
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50026), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, program, 0, 0) == 0
    for sys.platform in ("darwin", "linux"):
        find_problem.cache_clear()
        try:
            print(run_python("print('ran')"))
        except SandboxUnavailable as error:
            print(error)
    for code in ("print('hi')", "while True: pass", "while True: print('a' * 2**20)"):
        result = run_python(code, replace(SMALL, seconds=0.4), unsafe=True)
        print(result.ok, result.reason, result.stdout[:2])


@pytest.mark.skipif(sys.platform != "linux", reason="removes Landlock with seccomp")
def test_S10_nothing_runs_without_a_sandbox():
    code = "from tests.test_sandbox import run_without_landlock as run; run()"
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    other, kernel, ran = printed.split("--unsafe_exec (chat_cli, chat_web, chat_eval)")
    assert "needs Linux" in other and "Function not implemented" in kernel
    assert ran.split() == ["True", "hi", "False", "time", "False", "output", "aa"]


# ---- S11: tools ----------------------------------------------------------------------------------

CALCULATED = {
    "12*(3+4)": "84",
    "5/3": "1.666667",
    ".5*3": "1.5",
    "0.1+0.2": "0.3",
    "1,250*2": "2500",
    "-3--4": "1",
    "17//5": "3",
    "17%5": "2",
    "2**10": "1024",
    "2**-1": "0.5",
    "2**99": "633825300114114700748351602688",
    "2**-256": "0",
    "10**30-1": "999999999999999999999999999999",
    " 1 + 1 \n": "2",
    '"strawberry".count("r")': "3",
    "'a,b,c'.count(',')": "2",
    "1" + "+1" * 127: "128",
}
REJECTED = [
    *("9**9**9", "(-8)**0.5", "1/0", "0**-1", "5%0", "10.0**300*9"),
    *('"a"*10**9', "'a'.upper()", "'a'.count.__self__", '"a".count("b").real', '"\\n".count("A")'),
    *("f'{1+1}'", "lambda: 1", "().__class__.__base__", "__import__('os')", "[1][0]"),
    *("", "1 2", "1;2", "1<<9", "True", "1e9", "1.5.real", "print(6*7)"),
    *("(", "*1", "1\x00", "\u0661+\u0661", "2**257", "10**30+1", "10**17/10"),
    *("(" * 128 + ")" * 128, "9" * 256, "1+" * 128 + "1"),
]
PROGRAMS = {
    "print(sum(range(10)))": "45",
    "6*7": "42",
    "print('a' * 1999)": "a" * 1999,
    "print('a' * 2001)": None,
    "x = 1": None,
    "print(1); 1/0": None,
    "import socket; socket.socket()": None,
    "(": None,
}


@pytest.mark.parametrize("expression", [*CALCULATED, *REJECTED])
def test_S11_calculator_returns_a_value_or_nothing(expression):
    assert Tools()(expression) == CALCULATED.get(expression)


@settings(max_examples=150, derandomize=True)
@given(st.text(alphabet="0123456789.,+-*/%() \n\"'count", max_size=300))
@example("9**9**9**9")
@example("(" * 250)
def test_S11_calculator_ends_with_a_bounded_result(expression):
    answer = Tools()(expression)
    assert answer is None or re.fullmatch(r"-?\d{1,31}(\.\d{1,6})?", str(answer))


@pytest.mark.parametrize("threads", [0, 4])
def test_S11_python_tool_returns_its_limited_output(sandbox, threads):
    tools = Tools(python=True, threads=threads)
    answers = [tools(code) for code in PROGRAMS]

    found = [a.result(120) if isinstance(a, Future) else a for a in answers]
    assert found == list(PROGRAMS.values())
