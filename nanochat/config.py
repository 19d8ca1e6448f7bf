"""
Dataclass in, command line out.

    frozen dataclass with docstrings -> flat flags with help -> the same dataclass, filled in

`--device_batch_size=8` and `--device-batch-size 8` are the same flag; nested dataclasses share
one flat namespace; `--x`, `--no-x`, `--x=1` and `--x=0` set a boolean; a list takes commas
(`--x=a,b`), spaces and repeats; for a setting that may be None, -1 means None ("decide for me"), as
mostly does leaving the flag out. A setting made by `short` has a letter too: `-x 5`. A bare `--` in
front of the flags is dropped. Flags that no longer exist, or that other programs have, are refused
with the name of ours.
"""

import ast
import atexit
import dataclasses
import difflib
import errno
import functools
import inspect
import os
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from nanochat.common import (
    REPOSITORY,
    MissingInput,
    Refused,
    printable,
)

C = TypeVar("C")
ROOM = "make room, or set NANOCHAT_BASE_DIR to a larger disk"
ACCESS = "give this user access to it, or name another path (generated files: NANOCHAT_BASE_DIR)"
CHECK = "check the path"
FOLDER = "a folder is needed there, but a file has that name: name another path"
OS_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), FOLDER),
}
BOOLEAN_WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def start(main: Callable[[C], Any], default: C, doc: str | None, retired: Mapping[str, str] = {}):
    """
    Parse the command line and run a script's `main`.

    An error that the user can fix ends with its message and exit status 2, or that of its own;
    internal errors keep their traceback. An interrupt ends with status 130.
    """
    atexit.register(silence_teardown)  # registered first, so it runs last
    sys.excepthook = print_traceback
    try:
        main(parse(default, doc, retired=retired))
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from error
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        print(f"error: {printable(message)}", file=sys.stderr)
        raise SystemExit(getattr(error, "status", 2)) from error


def user_message(error: BaseException) -> str | None:
    """
    What to print in place of a traceback; None for an internal error.

    Users can fix what this code rejects by a `raise` of ValueError or RuntimeError, and what the
    operating system reports. The same exceptions from within a library are internal errors.
    """
    if isinstance(error, MissingInput | Refused):
        return str(error)
    if isinstance(error, OSError):
        fix = OS_FIXES.get(error.errno or 0, CHECK if error.filename else "")
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return (message or type(error).__name__) + (fix and f"\n  way out:  {fix}")
    if not isinstance(error, ValueError | RuntimeError):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename)
    own = any(file.is_relative_to(REPOSITORY / name) for name in ("nanochat", "scripts", "tasks"))
    return str(error) if own and (last.line or "").startswith("raise ") else None


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """As Python prints it, but messages may hold text from elsewhere: file names, data."""
    lines = traceback.format_exception(kind, error, trace)
    print(printable("".join(lines)), end="", file=sys.stderr, flush=True)


def silence_teardown() -> None:
    """Spare the reader the pages of leak warnings that triton prints when a process ends."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def parse(
    default: C,
    doc: str | None = None,
    args: Sequence[str] | None = None,
    retired: Mapping[str, str] = {},
) -> C:
    """
    Fill a config dataclass from `args` (default: the command line).

    `retired` maps the name of a flag that is not here to a sentence naming what is.
    Exits with status 2 and a message naming the nearest flag when one is unknown.
    """
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["--"]:
        args = args[1:]
    for arg in args:
        if any("\ud800" <= char <= "\udfff" for char in arg):
            refuse(f"{arg!r} is not valid UTF-8; write it in UTF-8")
        name = arg.removeprefix("--").split("=")[0].replace("-", "_")
        if arg.startswith("--") and name in retired:
            refuse(f"there is no --{name} here: {retired[name]}")
    filled = tyro.cli(
        with_help(type(default)),
        default=copy_into(with_help(type(default)), default),
        args=normalize(spell_out(args, type(default)), field_types(type(default))),
        prog=program(),
        description=(doc or "").replace("\nWrites ", "\n\nWrites "),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
    )
    return copy_into(type(default), filled)


def short(letter: str, default: Any) -> Any:
    """A setting that can also be given by one letter: `temperature: float = short("t", 0.0)`."""
    return dataclasses.field(default=default, metadata={"short": f"-{letter}"})


def program() -> str | None:
    """What a user types to start the running script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec else None


def field_docs(cls: type) -> dict[str, str]:
    """Name -> the string below a setting, its lines joined to one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for setting, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if is_text and isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name):
            docs[setting.target.id] = " ".join(str(text.value.value).split())  # type: ignore
    return docs


@functools.cache
def with_help(cls: type) -> type:
    """A twin of a config dataclass whose settings carry their help where tyro looks for it."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    fields = []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            fields.append((f.name, with_help(typing.cast(type, hint))))
        else:
            hint_of_default = "" if f.default is None else None  # its help says what None means
            shown = tyro.conf.arg(
                help=docs.get(f.name),
                help_behavior_hint=hint_of_default,
                aliases=[f.metadata["short"]] if "short" in f.metadata else None,
            )
            fields.append((f.name, typing.Annotated[hint, shown]))
    return dataclasses.make_dataclass(cls.__name__, fields)


def copy_into(cls: type[C], source: Any) -> C:
    """An instance of `cls` with the values of `source`, which has the same settings."""
    hints = typing.get_type_hints(cls)
    values = {f.name: getattr(source, f.name) for f in dataclasses.fields(cls)}  # type: ignore
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            values[name] = copy_into(hints[name], value)
    return cls(**values)


def field_types(cls: type) -> dict[str, Any]:
    """Flat name -> annotation of every setting, nested dataclasses included."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            found |= field_types(typing.cast(type, hints[f.name]))
        else:
            found[f.name] = hints[f.name]
    return found


def spell_out(args: Sequence[str], cls: type) -> list[str]:
    """Replace `-x` by the long name of the setting, where `cls` has one of that letter."""
    long = short_names(cls)
    return [long.get(head, head) + eq + tail for head, eq, tail in (a.partition("=") for a in args)]


def short_names(cls: type) -> dict[str, str]:
    """`-x` -> `--long_name` of the settings that have a letter, nested dataclasses included."""
    found: dict[str, str] = {}
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            found |= short_names(typing.cast(type, hints[f.name]))
        elif "short" in f.metadata:
            found[f.metadata["short"]] = f"--{f.name}"
    return found


def may_be_none(annotation: Any) -> bool:
    """True for `X | None`."""
    is_union = isinstance(annotation, types.UnionType) or (
        typing.get_origin(annotation) is typing.Union
    )
    return is_union and type(None) in typing.get_args(annotation)


def is_list(annotation: Any) -> bool:
    """True for `tuple[X, ...]`, also where it may be None."""
    options = typing.get_args(annotation) if may_be_none(annotation) else (annotation,)
    return any(typing.get_origin(option) is tuple for option in options)


def is_boolean(annotation: Any) -> bool:
    """True for `bool` and `bool | None`."""
    return annotation is bool or annotation == bool | None


def normalize(args: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """
    Translate the forms of a boolean to `--flag True`, those of a list to `--flag a b`, and `-1` to
    None for settings that may be it.

    Exits with status 2 on a flag that is not `known`, naming the nearest one.
    """
    result: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        negated = name.removeprefix("no_")
        if not flag.startswith("--") or name == "help":
            result.append(arg)
        elif is_boolean(known.get(negated)) and not equals and rest[:1] != ["-1"]:
            result += [f"--{negated}", str(negated == name)]
        elif is_list(known.get(name)) and "-1" not in (value, *rest[:1]):
            while not equals and rest and not rest[0].startswith("-"):
                value += f",{rest.pop(0)}"
            lists.setdefault(name, []).extend(filter(None, map(str.strip, value.split(","))))
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            refuse(f"unknown flag {flag}" + (f"; did you mean --{near[0]}?" if near else ""))
        elif is_boolean(known[name]) and value not in ("", "-1"):
            if value.lower() not in BOOLEAN_WORDS:
                refuse(f"{flag} is yes or no (1 or 0), not {value!r}")
            result += [flag, str(BOOLEAN_WORDS[value.lower()])]
        elif may_be_none(known[name]) and (value or rest[:1] == ["-1"] or rest[:1] == ["-1.0"]):
            value = value if equals else rest.pop(0)
            result += [flag, "None" if value in ("-1", "-1.0") else value]
        else:
            result.append(arg)
    for name, values in lists.items():
        result += [f"--{name}", *values]
    return result


def refuse(message: str) -> typing.NoReturn:
    """End the program the way a command line does: message on stderr, status 2."""
    print(f"error: {printable(message)}; see --help", file=sys.stderr)
    raise SystemExit(2)


def settings(cfg: Any) -> dict[str, Any]:
    """
    Every setting as a flat JSON-ready dict, in declaration order.

    None ("decide for me") becomes -1, -1.0 or "" by the setting's type, as the report prints it.
    """
    flat: dict[str, Any] = {}
    hints = typing.get_type_hints(type(cfg))
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            flat |= settings(value)
        elif value is None:
            flat[f.name] = unset_value(hints[f.name])
        else:
            flat[f.name] = list(value) if isinstance(value, tuple) else value
    return flat


def unset_value(annotation: Any) -> Any:
    """How the report prints an optional setting that was not given."""
    options = typing.get_args(annotation)
    return -1 if int in options else -1.0 if float in options else ""
