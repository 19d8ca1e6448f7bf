"""
Command-line flags from config dataclasses, and the end of a script.

    frozen dataclass with docstrings -> flat flags with help (tyro) -> the same dataclass, filled in

`--device_batch_size=8` and `--device-batch-size 8` are the same flag. Nested dataclasses share one
flat namespace. Booleans are `--x` and `--no-x`, lists `--x a b`. For optional settings, None means
"decide for me", which is usually the default. A leading bare `--` is dropped.
"""

import atexit
import dataclasses
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import tyro

from nanochat import recipe
from nanochat.common import REPOSITORY, MissingInput, UsageError, is_out_of_memory, printable

C = TypeVar("C")
ROOM = "free some space, or set NANOCHAT_BASE_DIR to a larger disk"
ACCESS = (
    "change its permissions, or use another path (NANOCHAT_REPORT_DIR for records and report, "
    "NANOCHAT_BASE_DIR for all generated files)"
)
FOLDER = "this must be a folder, but a file with that name exists; use another path"
OS_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), FOLDER),
}


def start(main: Callable[[C], Any], default: C, doc: str | None):
    """
    Parse the command line and run a script's `main`.

    User errors print a message and exit with status 2 or the error's own `status`; internal errors
    keep their traceback. An interrupt exits with status 130.
    """
    recipe.read_code(Path(sys.modules[type(default).__module__].__file__ or ""))
    atexit.register(speed_up_exit)  # registered first, so it runs last
    sys.excepthook = print_traceback
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # set by scripts/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(parse(default, doc))
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from error
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"error: {printable(message)}", file=sys.stderr)
        raise SystemExit(getattr(error, "status", 2)) from error


class Console:
    """
    A stream for a console that may be gone, on a full disk, or not UTF-8: what cannot be written is
    escaped or lost, and never an error.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        with suppress(AttributeError, ValueError):  # a replaced stream
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, AttributeError):  # a closed one is None
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, AttributeError):
            self.stream.flush()


def user_message(error: BaseException) -> str | None:
    """
    Message to print instead of a traceback; None for an internal error.

    User errors: any OSError, and any ValueError or RuntimeError that a `raise` statement in this
    repository raises. A ValueError or RuntimeError from a library is an internal error.
    """
    if isinstance(error, MissingInput | UsageError):
        return str(error)
    if isinstance(error, OSError):
        fix = OS_FIXES.get(error.errno or 0, "check the path" if error.filename else "")
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return (message or type(error).__name__) + (fix and f"\n  fix:  {fix}")
    if isinstance(error, UnicodeEncodeError):  # the name of a file, or a flag
        return f"{error.object[: error.end][-99:]!r} is not valid UTF-8; use other characters"
    if is_out_of_memory(error):
        return "out of memory; use a smaller model, batch or sequence length, or another machine"
    if not isinstance(error, ValueError | RuntimeError):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename)
    own = any(file.is_relative_to(REPOSITORY / name) for name in ("nanochat", "scripts", "tasks"))
    return str(error) if own and (last.line or "").startswith("raise ") else None


def print_traceback(*error: Any) -> None:
    """Print a traceback, escaping any control characters in the messages."""
    lines = traceback.format_exception(*error)
    print(printable("".join(lines)), end="", file=sys.stderr, flush=True)


def speed_up_exit() -> None:
    """Skip the garbage collection at exit (0.6 s with torch), and hide triton's leak warnings."""
    gc.freeze()
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def parse(default: C, doc: str | None = None, args: Sequence[str] | None = None) -> C:
    """Fill a config dataclass from `args` (default: sys.argv). Exits with status 2 on bad flags."""
    args = list(sys.argv[1:] if args is None else args)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return tyro.cli(
        type(default),
        default=default,
        args=args[args[:1] == ["--"] :],
        prog=f"python -m {spec.name}" if spec else None,
        description=(doc or "").strip().replace("\nWrites ", "\n\nWrites "),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def short(letter: str) -> Any:
    """A one-letter alias of a flag: `temperature: Annotated[float, short("t")] = 1.0`."""
    return tyro.conf.arg(aliases=[f"-{letter}"])


def require_at_least(cfg: Any, **minimum: float) -> None:
    """Raise ValueError if a setting is below its minimum; None is allowed."""
    for name, bound in minimum.items():
        value = getattr(cfg, name)
        if value is not None and not value >= bound:  # also rejects NaN
            never = " (0 = never)" if name.endswith("_every") and not bound else ""
            raise ValueError(f"{name} must be at least {bound}{never}, got {value}")


def require_positive(cfg: Any, *names: str) -> None:
    """Raise ValueError if one of these settings is not above 0; None is allowed."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")


def settings(cfg: Any) -> dict[str, Any]:
    """All settings as a flat dict, in declaration order, including those of nested dataclasses."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        flat |= settings(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return flat
