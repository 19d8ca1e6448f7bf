"""
The child's side of the sandbox: drop privileges, report "ready", then run the code.

    job on fd 0 -> limits, Landlock, capabilities, seccomp -> "ready" -> run code, serve calls

`sandbox.py` runs the source of this file with `python -I -S -c`. It imports little, because imports
take most of a child's time. The kernel enforces every restriction on the whole process, so nothing
the code finds in this interpreter (these functions, ctypes, parent frames) can lift it. The code
can compute, read the standard library, and use the pipes it was started with. It cannot write
files or use processes, threads, sockets or signals, nor library modules that need them (subprocess,
threading, asyncio).
"""

import ctypes
import marshal
import os
import resource
import stat
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)

# System calls that Python needs: name, number on x86-64, number on 64-bit Arm (- = none).
SYSCALLS = """
    read 0 63, write 1 64, pread64 17 67, lseek 8 62, close 3 57, openat 257 56,
    dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29,
    stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, access 21 -,
    faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61,
    getcwd 79 17,
    mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132,
    restart_syscall 219 128, alarm 37 -, setitimer 38 103, time 201 -, gettimeofday 96 169,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
    times 100 153, getrusage 98 165, getpid 39 172, getppid 110 173, gettid 186 178,
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
    getgroups 115 158, uname 63 160, getrandom 318 278, futex 202 98, sched_yield 24 124,
    sched_getaffinity 204 123, exit 60 93, exit_group 231 94
"""
# System calls allowed only for some argument values: (argument index, mask, allowed values).
ARGUMENTS = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG,
    # which together can send any signal to any process.
    "fcntl": (1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030)),
    "ioctl": (1, 0xFFFFFFFF, (0x5401, 0x5451)),  # TCGETS (isatty), FIOCLEX
    # Reading only. No openat2: its flags are in memory, where seccomp cannot see them.
    "openat": (2, os.O_TRUNC | os.O_CREAT | os.O_ACCMODE | os.O_APPEND, (0,)),
}
ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column, AUDIT_ARCH_*
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: fail with EPERM
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06  # BPF operations

# Landlock access rights.
READ_FILE, READ_DIR = 1 << 2, 1 << 3
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # same on all architectures


def main() -> None:
    """
    Read a job from fd 0 and run it. Its role is `program`, which runs alone; or `candidate`, which
    defines a function and answers calls of it, and `judge`, which tests that function.
    """
    with open(0, "rb", closefd=False) as stream:
        job = marshal.loads(stream.read())
    try:
        confine(job)
    except Exception as error:
        os.write(job["status"], f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(job["status"], b"ready")
    os.close(job["status"])  # before the code runs, so that it cannot write there
    os.environ.clear()

    program = type(sys)("__main__")
    sys.modules["__main__"] = program
    namespace = program.__dict__
    namespace.update(exit=sys.exit, quit=sys.exit)  # usually added by `site`
    if job["role"] == "candidate":  # a function, not a program: its main guard does not run
        del namespace["__name__"]
    if job["role"] == "judge":
        exec(job["setup"], namespace)
        namespace[job["entry"]] = remote(*job["channel"])
    exec(job["code"], namespace)
    if job["role"] == "candidate":
        serve(namespace[job["entry"]], *job["channel"])


# ---- Dropping privileges -------------------------------------------------------------------------


def confine(job: dict) -> None:
    """Apply the job's restrictions, ordered so that each step is still allowed. Raises OSError."""
    for name, value in job["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if not job["confined"]:
        return
    call(LIBC.prctl, 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: exit with the parent
    call(LIBC.prctl, 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    landlock(job["readable"])
    call(LIBC.capset, struct.pack("=Ii", 0x20080522, 0), bytes(24))  # drop all capabilities
    program = ctypes.create_string_buffer(seccomp_program())
    seccomp_filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    call(LIBC.prctl, 22, 2, seccomp_filter, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def landlock(readable: list[str]) -> None:
    """
    Restrict file access to reading under `readable`.

    Actions that older versions of Landlock do not control (truncation before Linux 6.2) are
    also denied by the seccomp filter. Source: Linux, Documentation/userspace-api/landlock.rst.
    """
    version = call(LIBC.syscall, CREATE_RULESET, 0, 0, 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scopes = (0b11 if version >= first else 0 for first in (4, 6))
    ruleset = call(LIBC.syscall, CREATE_RULESET, struct.pack("=QQQ", files, network, scopes), 24, 0)
    for path in readable:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)  # READ_DIR is invalid for files
        rights = READ_FILE | READ_DIR if is_folder else READ_FILE
        call(LIBC.syscall, ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
        os.close(handle)
    call(LIBC.syscall, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def seccomp_program() -> bytes:
    """
    Build the BPF program that allows the calls in SYSCALLS; others fail with EPERM.

    A call with another architecture's numbering kills the process. Raises OSError on unsupported
    architectures. Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
    """
    if os.uname().machine not in ARCHITECTURES:
        raise OSError(f"system call numbers of {os.uname().machine} are unknown")
    column, audit = ARCHITECTURES[os.uname().machine]
    steps = [step(LOAD, 4), step(EQUAL, audit, yes=1), step(RETURN, KILL), step(LOAD, 0)]
    for row in (entry.split() for entry in SYSCALLS.split(",")):
        if row[column] == "-":
            continue
        then = [step(RETURN, ALLOW)]
        if row[0] in ARGUMENTS:
            argument, mask, values = ARGUMENTS[row[0]]
            then = [step(LOAD, 16 + 8 * argument), step(AND, mask)]
            for value in values:
                then += [step(EQUAL, value, no=1), step(RETURN, ALLOW)]
            then.append(step(RETURN, REFUSE))
        steps += [step(EQUAL, int(row[column]), no=len(then)), *then]
    return b"".join([*steps, step(RETURN, REFUSE)])


def step(operation: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One BPF instruction; a comparison skips `yes` instructions if true and `no` if false."""
    return struct.pack("=HBBI", operation, yes, no, value)


def call(function, *values: int | bytes) -> int:
    """Call a libc function with longs and addresses; returns its result. Raises OSError."""
    result = function(*(ctypes.c_long(v) if isinstance(v, int) else v for v in values))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ---- Calls between the candidate (runs the program) and the judge (runs the test) ----------------


COLLECTIONS: dict[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes)
}
# Not StopIteration, which would silently end a loop in the test and skip its checks.
ERRORS = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, OverflowError)
}


def serve(function, calls: int, replies: int) -> None:
    """Serve calls to `function`, one JSON line each, until the caller closes the pipe."""
    import json  # slow to import; only candidate and judge need it

    with open(calls) as lines, open(replies, "w") as answers:
        for line in lines:
            args, kwargs = unpack(json.loads(line))
            try:
                answer = ("value", function(*args, **kwargs))
            except Exception as error:
                answer = ("error", type(error).__name__)
            answers.write(json.dumps(encode_value(answer)) + "\n")
            answers.flush()


def remote(replies: int, calls: int):
    """
    Return a proxy for the function served by the process at the other end of the pipes.

    The proxy returns plain data or raises one of ERRORS, or RuntimeError for all others. On
    an invalid or missing answer, this process exits immediately with status 1.
    """
    import json  # see `serve`

    answers, questions = open(replies), open(calls, "w")

    def ask(*args, **kwargs):
        question = json.dumps(encode_value((args, kwargs)))
        try:
            questions.write(question + "\n")
            questions.flush()
            outcome, value = unpack(json.loads(answers.readline()))
        except Exception:
            os._exit(1)
        if outcome == "value":
            return value
        raise ERRORS.get(value, RuntimeError)(f"raised by the program: {value}")

    return ask


def encode_value(value):
    """Convert plain data to JSON types. Raises TypeError for other values."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            items = value.items() if isinstance(value, dict) else value
            return [name, [encode_value(item) for item in items]]
    raise TypeError(f"only plain data can leave the sandbox, got {type(value).__name__}")


def unpack(value):
    """Inverse of `encode_value`; instances of subclasses become instances of the base type."""
    if not isinstance(value, list):
        return value
    name, items = value
    return COLLECTIONS[name](map(unpack, items))


if __name__ == "__main__":
    main()
