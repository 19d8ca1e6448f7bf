"""
Command-line flags from config dataclasses.

    frozen dataclass with docstrings -> flat flags with help -> the same dataclass, filled in

`--device_batch_size=8` and `--device-batch-size 8` are the same flag. Nested dataclasses share one
flat namespace. Booleans accept `--x`, `--no-x`, `--x=1` and `--x=0`; lists accept commas
(`--x=a,b`), spaces and repeated flags. For optional settings, -1 means None ("decide for me"),
which is usually the default. Fields made by `short` also have a one-letter flag: `-x 5`. A leading
bare `--` is dropped. Flags of nanochat of October 2025 and of other programs are rejected with a
hint.
"""

import ast
import atexit
import dataclasses
import difflib
import errno
import gc
import inspect
import io
import os
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from nanochat.common import REPOSITORY, MissingInput, UsageError, printable

C = TypeVar("C")
ROOM = "free some space, or set NANOCHAT_BASE_DIR to a larger disk"
ACCESS = "change its permissions, or use another path (for generated files, set NANOCHAT_BASE_DIR)"
FOLDER = "this must be a folder, but a file with that name exists; use another path"
OS_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), ACCESS),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), FOLDER),
}
GROUPS = {  # title in --help -> flags, most used first; all other flags come before them
    "Model": "depth source model_tag step model_step max_seq_len arch window_pattern value_every",
    "Data": "dataset num_shards mixture val_mixture tokenizer_tag revision val_shard",
    "Optimization": "num_iterations num_epochs target_param_data_ratio target_flops "
    "total_batch_size device_batch_size matrix_lr embedding_lr unembedding_lr init_lr_frac "
    "warmup_steps warmdown_ratio final_lr_frac weight_decay grad_clip seed",
    "Sampling": "temperature top_k top_p max_new_tokens max_tokens",
    "Evaluation": "eval_every eval_tokens eval_half sample_every core_metric_every "
    "core_metric_max_per_task eval_bundle",
    "Checkpoints": "save_every keep resume skip_if_done save_optimizer allow_data_change "
    "on_save_error",
    "Runtime": "run device_type dtype compile autotune deterministic collective_timeout_minutes "
    "report_dir",
}
BOOLEANS = {"1": "True", "0": "False", "true": "True", "false": "False"}


def start(main: Callable[[C], Any], default: C, doc: str | None, retired: Mapping[str, str] = {}):
    """
    Parse the command line and run a script's `main`.

    User errors print a message and exit with status 2 or the error's own `status`; internal errors
    keep their traceback. An interrupt exits with status 130.
    """
    atexit.register(speed_up_exit)  # registered first, so it runs last
    sys.excepthook = print_traceback
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
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


class Console(io.TextIOBase):
    """
    A stream for a console that may be gone, on a full disk, or not UTF-8: what cannot be written is
    escaped or lost, and never an error.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        with suppress(AttributeError, ValueError):  # a replaced stream
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def buffer(self) -> Any:
        """The stream of bytes below."""
        return self.stream.buffer


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


def parse(
    default: C, doc: str | None = None, args: Sequence[str] | None = None, retired: Mapping = {}
) -> C:
    """
    Fill a config dataclass from `args` (default: sys.argv).

    retired: name of a flag of an earlier release or another program -> message that names its
    replacement. Exits with status 2 on an unknown flag, suggesting the closest one.
    """
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["--"]:
        args = args[1:]
    every = list(iter_settings(default))
    known = {f.name: annotation for _, f, annotation, _ in every}
    letters = {a: f"--{f.name}" for _, f, *_ in every for a in f.metadata.get("aliases", ())}
    for arg in args:
        if any("\ud800" <= char <= "\udfff" for char in arg):
            reject(f"{arg!r} is not valid UTF-8; encode it as UTF-8")
        name = arg.removeprefix("--").split("=")[0].replace("-", "_")
        if arg.startswith("--") and name in retired:
            reject(f"unknown flag --{name}: {retired[name]}")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    groups = tyro.cli(
        group_flags(default),
        args=normalize(args, known, letters),
        prog=f"python -m {spec.name}" if spec else None,
        description=(doc or "").strip().replace("\nWrites ", "\n\nWrites "),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
    )
    values = {**vars(groups)}
    for title in GROUPS.keys() & values:
        values |= vars(values[title])
    return fill(default, values)


def short(letter: str, default: Any) -> Any:
    """A field that also has a one-letter flag: `temperature: float = short("t", 0.0)`."""
    return dataclasses.field(default=default, metadata={"aliases": [f"-{letter}"]})


def iter_settings(cfg: Any) -> Iterator[tuple[type, dataclasses.Field, Any, Any]]:
    """Yield class, field, annotation and value of every setting, including nested dataclasses."""
    hints = typing.get_type_hints(type(cfg))
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            yield from iter_settings(value)
        else:
            yield type(cfg), f, hints[f.name], value


@lru_cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> docstring as a single line, including inherited fields."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    inherited = dataclasses.is_dataclass(cls.__bases__[0])
    docs = dict(field_docs(cls.__bases__[0])) if inherited else {}
    for pair in pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = " ".join(text.split())
    return docs


def group_flags(cfg: Any) -> type:
    """Dataclass for tyro with a nested dataclass for each of `GROUPS`; values become defaults."""
    flags: dict[str, Any] = {}
    for owner, f, annotation, value in iter_settings(cfg):
        kinds = [kind for kind in union_types(annotation) if kind is not types.NoneType]
        text, is_auto = field_docs(owner).get(f.name, ""), value in (None, "", ())
        shown = tyro.conf.arg(
            help=text if is_auto else text.split(" Default:")[0],
            help_behavior_hint="" if is_auto else None,
            aliases=f.metadata.get("aliases"),
            metavar=kinds[0].__name__.upper() if kinds[0] in (int, float, str, bool) else None,
        )
        flags[f.name] = (f.name, typing.Annotated[annotation, shown], value)
    nested = []
    for title, names in GROUPS.items():
        if group := [flags.pop(name) for name in names.split() if name in flags]:
            cls = dataclasses.make_dataclass(title, group)
            nested.append((title, cls, dataclasses.field(default_factory=cls)))
    return dataclasses.make_dataclass(type(cfg).__name__, [*flags.values(), *nested])


def fill(cfg: C, values: Mapping[str, Any]) -> C:
    """Replace all settings of a config, including those of nested dataclasses."""
    own = vars(cfg).items()
    new = {k: fill(v, values) if dataclasses.is_dataclass(v) else values[k] for k, v in own}
    return dataclasses.replace(cfg, **new)  # type: ignore


def union_types(annotation: Any) -> tuple[Any, ...]:
    """Types of a union; for any other annotation, the annotation itself."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def normalize(args: list[str], known: Mapping[str, Any], letters: Mapping[str, str]) -> list[str]:
    """
    Normalize booleans to `--flag True`, lists to `--flag a b`, letters to flags, and -1 to None for
    optional settings. Exits with status 2 on an unknown flag, suggesting the closest one.
    """
    result: list[str] = []
    lists: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = letters.get(flag, flag)
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        kinds = union_types(known.get(name))
        none_follows = not equals and rest[:1] in (["-1"], ["-1.0"])
        if not flag.startswith("--") or name == "help":
            result.append(flag + equals + value)
        elif bool in union_types(known.get(positive)) and not equals and not none_follows:
            result += [f"--{positive}", str(positive == name)]
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            reject(f"unknown flag {flag}" + (f"; did you mean --{near[0]}?" if near else ""))
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


def reject(message: str) -> typing.NoReturn:
    """Print an error to stderr and exit with status 2."""
    print(f"error: {printable(message)}; see --help", file=sys.stderr)
    raise SystemExit(2)


def require_at_least(cfg: Any, **minimum: float) -> None:
    """Raise ValueError if a setting is below its minimum; None is allowed."""
    for name, bound in minimum.items():
        value = getattr(cfg, name)
        if value is not None and not value >= bound:  # also rejects NaN
            raise ValueError(f"{name} must be at least {bound}, got {value}")


def require_positive(cfg: Any, *names: str) -> None:
    """Raise ValueError if one of these settings is not above 0; None is allowed."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def settings(cfg: Any) -> dict[str, Any]:
    """
    All settings as a flat JSON-serializable dict, in declaration order.

    None ("decide for me") becomes -1, -1.0 or "", depending on the type.
    """
    flat: dict[str, Any] = {}
    for _, f, annotation, value in iter_settings(cfg):
        if value is None:
            kinds = union_types(annotation)
            value = -1 if int in kinds else -1.0 if float in kinds else ""
        flat[f.name] = list(value) if isinstance(value, tuple) else value
    return flat
