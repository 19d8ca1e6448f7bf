"""
Dataclass in, command line out.

    frozen dataclass with docstrings -> flat flags with help -> the same dataclass, filled in

`--device_batch_size=8` and `--device-batch-size 8` are the same flag; nested dataclasses share
one flat namespace; `--x`, `--no-x`, `--x=1` and `--x=0` set a boolean; a list takes commas
(`--x=a,b`), spaces and repeats; for a setting that may be None, -1 means None ("decide for me"), as
mostly does leaving the flag out. A setting made by `short` has a letter too: `-x 5`. A bare `--` in
front of the flags is dropped. Flags that no longer exist, or that other programs have, are
rejected with the name of ours.
"""

import ast
import atexit
import dataclasses
import difflib
import errno
import inspect
import os
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from nanochat.common import REPOSITORY, MissingInput, UsageError, printable

C = TypeVar("C")
ROOM = "make room, or set NANOCHAT_BASE_DIR to a larger disk"
ACCESS = "give this user access to it, or name another path (generated files: NANOCHAT_BASE_DIR)"
FOLDER = "a folder is needed there, but a file has that name: name another path"
OS_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), FOLDER),
}
REMOVED = {  # flags that several scripts had -> what to do instead
    "attention": "the fastest kernel that passes its probe is used",
    "checkpoint_activations": "leave out --device_batch_size, and the largest that fits is found",
    "wandb_mode": "set WANDB_MODE=offline or WANDB_MODE=disabled in the environment",
    "once": "it is now --skip_if_done",
    "data_dir": "a local folder is named by --dataset=<folder>",
    "hourly_rate": "it is a flag of scripts.report",
    "mixture_tokens": "a mixture of conversations ends with its budget: --mixture=a,b@500000t",
    "mixture_alpha": "a mixture ends with it: --mixture=a,b@^0.5",
    "buckets": '--mixture=own.json with {"mixture": "...", "buckets": {...}} names own buckets',
    **dict.fromkeys(("revision", "val_shard"), "open the text with scripts.data and this flag"),
    **dict.fromkeys(("from_tag", "from_step"), "--source=stage:tag:step names tag and step"),
    **dict.fromkeys(("scalar_lr", "muon_momentum"), "it is a constant in nanochat/optim.py"),
    "async_save": "checkpoints are saved asynchronously on GPUs",
}
BOOLEANS = {"1": "True", "0": "False", "true": "True", "false": "False"}


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
    if isinstance(error, MissingInput | UsageError):
        return str(error)
    if isinstance(error, OSError):
        fix = OS_FIXES.get(error.errno or 0, "check the path" if error.filename else "")
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return (message or type(error).__name__) + (fix and f"\n  way out:  {fix}")
    if not isinstance(error, ValueError | RuntimeError):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename)
    own = any(file.is_relative_to(REPOSITORY / name) for name in ("nanochat", "scripts", "tasks"))
    return str(error) if own and (last.line or "").startswith("raise ") else None


def print_traceback(*error: Any) -> None:
    """As Python prints it, but messages may hold text from elsewhere: file names, data."""
    lines = traceback.format_exception(*error)
    print(printable("".join(lines)), end="", file=sys.stderr, flush=True)


def silence_teardown() -> None:
    """Spare the reader the pages of leak warnings that triton prints when a process ends."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def parse(
    default: C, doc: str | None = None, args: Sequence[str] | None = None, retired: Mapping = {}
) -> C:
    """
    Fill a config dataclass from `args` (default: the command line).

    `retired` maps the name of a flag that is not here to a sentence naming what is.
    Exits with status 2 and a message naming the nearest flag when one is unknown.
    """
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["--"]:
        args = args[1:]
    known = {f.name: annotation for f, annotation, _ in leaves(default)}
    letters = {a: f"--{f.name}" for f, *_ in leaves(default) for a in f.metadata.get("aliases", ())}
    retired = {**REMOVED, **retired}
    for arg in args:
        if any("\ud800" <= char <= "\udfff" for char in arg):
            refuse(f"{arg!r} is not valid UTF-8; write it in UTF-8")
        name = arg.removeprefix("--").split("=")[0].replace("-", "_")
        if arg.startswith("--") and name in retired and name not in known:
            refuse(f"there is no --{name} here: {retired[name]}")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    filled = tyro.cli(
        with_help(default),
        args=normalize(args, known, letters),
        prog=f"python -m {spec.name}" if spec else None,
        description=(doc or "").replace("\nWrites ", "\n\nWrites "),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
    )
    return fill(default, filled)


def short(letter: str, default: Any) -> Any:
    """A setting that can also be given by one letter: `temperature: float = short("t", 0.0)`."""
    return dataclasses.field(default=default, metadata={"aliases": [f"-{letter}"]})


def leaves(cfg: Any) -> Iterator[tuple[dataclasses.Field, Any, Any]]:
    """Field, annotation and value of every setting, nested dataclasses included."""
    hints = typing.get_type_hints(type(cfg))
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value)
        else:
            yield f, hints[f.name], value


def field_docs(cls: type) -> dict[str, str]:
    """Name -> the string below a setting, its lines joined to one; inherited ones included."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = field_docs(cls.__bases__[0]) if dataclasses.is_dataclass(cls.__bases__[0]) else {}
    for pair in pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = " ".join(text.split())
    return docs


def with_help(cfg: Any) -> type:
    """A twin of a config's class: its values are defaults, its help is where tyro looks for it."""
    hints, docs = typing.get_type_hints(type(cfg)), field_docs(type(cfg))
    fields: list[Any] = []
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            twin = with_help(value)
            fields.append((f.name, twin, dataclasses.field(default_factory=twin)))
            continue
        aliases = f.metadata.get("aliases")
        hint = "" if value is None else None  # its help says what None means
        shown = tyro.conf.arg(help=docs.get(f.name), help_behavior_hint=hint, aliases=aliases)
        fields.append((f.name, typing.Annotated[hints[f.name], shown], value))
    return dataclasses.make_dataclass(type(cfg).__name__, fields)


def fill(cfg: C, twin: Any) -> C:
    """A config with the values of its twin."""
    values = {name: getattr(twin, name) for name in vars(cfg)}
    nested = {n: fill(v, values[n]) for n, v in vars(cfg).items() if dataclasses.is_dataclass(v)}
    return dataclasses.replace(cfg, **values | nested)  # type: ignore


def options(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; any other annotation alone."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def normalize(args: list[str], known: Mapping[str, Any], letters: Mapping[str, str]) -> list[str]:
    """
    Translate the forms of a boolean to `--flag True`, those of a list to `--flag a b`, letters to
    flags, and `-1` to None for settings that may be it.

    Exits with status 2 on a flag that is not `known`, naming the nearest one.
    """
    result: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = letters.get(flag, flag)
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        kinds = options(known.get(name))
        none_follows = not equals and rest[:1] in (["-1"], ["-1.0"])
        if not flag.startswith("--") or name == "help":
            result.append(flag + equals + value)
        elif bool in options(known.get(positive)) and not equals and not none_follows:
            result += [f"--{positive}", str(positive == name)]
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            refuse(f"unknown flag {flag}" + (f"; did you mean --{near[0]}?" if near else ""))
        elif types.NoneType in kinds and (none_follows or value in ("-1", "-1.0")):
            result += [flag, "None"]
            rest = rest[none_follows:]
        elif any(typing.get_origin(kind) is tuple for kind in kinds):
            while not equals and rest and not rest[0].startswith("-"):
                value += f",{rest.pop(0)}"
            lists.setdefault(name, []).extend(filter(None, map(str.strip, value.split(","))))
        elif bool in kinds and value:
            result += [flag, BOOLEANS.get(value.lower(), value)]
        else:
            result.append(flag + equals + value)
    for name, values in lists.items():
        result += [f"--{name}", *values]
    return result


def refuse(message: str) -> typing.NoReturn:
    """End the program the way a command line does: message on stderr, status 2."""
    print(f"error: {printable(message)}; see --help", file=sys.stderr)
    raise SystemExit(2)


def require_at_least(cfg: Any, **least: float) -> None:
    """Raise ValueError for a setting below its least value; None is allowed."""
    for name, bound in least.items():
        value = getattr(cfg, name)
        if value is not None and value < bound:
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def settings(cfg: Any) -> dict[str, Any]:
    """
    Every setting as a flat JSON-ready dict, in declaration order.

    None ("decide for me") becomes -1, -1.0 or "" by the setting's type, as the report prints it.
    """
    flat: dict[str, Any] = {}
    for f, annotation, value in leaves(cfg):
        if value is None:
            kinds = options(annotation)
            value = -1 if int in kinds else -1.0 if float in kinds else ""
        flat[f.name] = list(value) if isinstance(value, tuple) else value
    return flat
