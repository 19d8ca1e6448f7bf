"""
Recipes: what determines a result, so that a stage is skipped or resumed only if it is the same.

    flags, inputs -> make_recipe -> in the record of a stage, and in the checkpoints of a run
    recipe of then, recipe of now -> list_changes -> skip, resume, train again, or stop
    script -> read_code, when the process starts -> digests of its code -> changed_code

All flags belong to the recipe, except those that their class lists in NOT_IN_RECIPE: an input
stands for them (such as `dataset`), or they change rounding, logs or evaluations, not what is
trained. So a new flag needs nothing more. A flag that an older recipe lacks had the default of now:
the flag itself is no difference, the edited file is.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanochat import common
from nanochat.common import code_digest, to_json_types

# ---- Flags and inputs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Flags by name, and the id of each input, or a tree of values with its "fingerprint"."""

    flags: Mapping[str, Any]
    inputs: Mapping[str, Any]
    defaults: Mapping[str, Any]
    """Of the flags; not saved."""

    @property
    def ids(self) -> dict[str, str]:
        """Name -> id of each input, the closest parent first."""
        return {
            n: x["fingerprint"] if isinstance(x, Mapping) else x for n, x in self.inputs.items()
        }

    def to_json(self) -> dict[str, Any]:
        """What is saved."""
        return to_json_types({"flags": self.flags, "inputs": self.inputs})


def make_recipe(cfg: Any, inputs: Mapping[str, Any], **flags: Any) -> Recipe:
    """
    The recipe of a script: the flags of its config, further `flags`, and its inputs, closest parent
    first.
    """
    return Recipe({**recipe_flags(cfg), **flags}, inputs, recipe_flags(type(cfg)()))


def recipe_flags(cfg: Any) -> dict[str, Any]:
    """Flags of a config and of those nested in it, but for NOT_IN_RECIPE of their classes."""
    found, omitted = {}, getattr(cfg, "NOT_IN_RECIPE", "").split()
    for each in fields(cfg):
        value = getattr(cfg, each.name)
        if is_dataclass(value):
            found |= recipe_flags(value)
        elif each.name not in omitted:
            found[each.name] = value
    return found


def list_changes(was: Mapping[str, Any], now: Recipe) -> list[str]:
    """Differences between a saved recipe and that of now, one line for each flag or input."""
    flags, defaults, inputs = map(to_json_types, (now.flags, now.defaults, now.inputs))
    old = {**defaults, **was["flags"]}
    lines = [
        f"--{name}: was {old[name]!r}, now {value!r}"
        if name in was["flags"]
        else f"--{name}: the earlier code had no such flag, now {value!r}"
        for name, value in flags.items()
        if old.get(name) != value
    ]
    return lines + compare_trees(was["inputs"], inputs)


def data_id(identity: Any) -> str:
    """
    Id of data, from a tree of values that identifies it: their fingerprint without digests of
    "code", which a recipe has on its own.
    """
    return common.fingerprint(without_code(identity))


def without_code(tree: Any) -> Any:
    """A tree of JSON values without the entries named "code"."""
    if isinstance(tree, Mapping):
        return {name: without_code(value) for name, value in tree.items() if name != "code"}
    return list(map(without_code, tree)) if isinstance(tree, list | tuple) else tree


def compare_trees(was: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """
    Differences between two trees of values, one line for each. Parts with the same fingerprint are
    equal, even if the text is in another folder.
    """
    lines = []
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if "fingerprint" not in old or old["fingerprint"] != new.get("fingerprint"):
                lines += compare_trees(old, new, f"{at}{name}.")
        elif old != new:
            lines.append(f"{at}{name}: was {old!r}, now {new!r}")
    return lines


# ---- Code ----------------------------------------------------------------------------------------

CODE = ("nanochat", "tasks", "scripts")
NOT_IN_CODE = frozenset(  # these do not determine results
    f"nanochat/{name}.py" for name in "config hub plots recipe records report".split()
)
code_at_start: dict[str, bytes] = {}
"""Path -> content of each file of code, as `read_code` found it."""
code_of_process: dict[str, str] = {}
"""Path -> digest of each file that this process runs."""
undigested: list[Path] = []
"""Files whose digests, and those of what they import, are not in code_of_process yet."""


def read_code(script: Path) -> None:
    """
    Read the code before a script does any work, as `config.start` does: a file that is edited
    later, while the process runs the old one, is recorded as it was.
    """
    code_of_process.clear()
    code_at_start.clear()
    undigested[:] = [script]
    paths = [path for folder in CODE for path in (common.REPOSITORY / folder).rglob("*.py")]
    for path in [*paths, *rust_files()]:
        with suppress(OSError):  # just removed
            code_at_start[os.path.relpath(path, common.REPOSITORY)] = path.read_bytes()


def add_code(module: Path) -> None:
    """Add a file and all that it imports, such as the class of a saved model."""
    undigested.append(module)


def imported_files(module: Path) -> dict[str, Path]:
    """
    The files of code that determine what a file of the repository does, by their paths in it:
    itself and all that it imports, at its start or in functions, directly or not, and the sources
    of rustbpe; without NOT_IN_CODE.
    """
    found, ahead = {}, [module]
    while ahead:
        path = ahead.pop()
        name = os.path.relpath(path, common.REPOSITORY)
        if name not in found and name.startswith(CODE) and name not in NOT_IN_CODE:
            found[name] = path
            ahead += imports_of(path)
    found |= {os.path.relpath(path, common.REPOSITORY): path for path in rust_files()}
    return dict(sorted(found.items()))


def rust_files() -> list[Path]:
    """The sources of rustbpe."""
    return [*(common.REPOSITORY / "rustbpe" / "src").glob("*.rs")]


def imports_of(path: Path) -> list[Path]:
    """Files of the repository that a file imports."""
    names = frozenset()
    with suppress(SyntaxError, OSError):  # of an edit that is not finished
        names = imported_names(read_file(path).decode())
    inside = [common.REPOSITORY / name.replace(".", "/") for name in names]
    files = [file for at in inside for file in (at.with_suffix(".py"), at / "__init__.py")]
    return [file for file in files if file.is_file()]


@cache
def imported_names(source: str) -> frozenset[str]:
    """Modules of this project, and names in them, that Python code imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in names if name.startswith(CODE))


def read_file(path: Path) -> bytes:
    """A file of code, as it was when this process started."""
    content = code_at_start.get(os.path.relpath(path, common.REPOSITORY))
    return path.read_bytes() if content is None else content


def file_digest(path: Path) -> str:
    """Digest of a file of code; comments, docstrings and help texts of Python do not count."""
    content = read_file(path)
    with suppress(SyntaxError):  # of an edit that is not finished
        if path.suffix == ".py":
            return code_digest(content.decode())
    return hashlib.sha256(content).hexdigest()


def code_digests() -> dict[str, str]:
    """Path -> digest of each file of code that determines what this process does."""
    if not code_of_process and not undigested:  # not started by `config.start`, as in a test
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        undigested.extend(Path(file) for file in files if file)
    while undigested:
        for name, path in imported_files(undigested.pop()).items():
            if name not in code_of_process:
                code_of_process[name] = file_digest(path)
    return dict(code_of_process)


def digests(*modules: Any) -> list[str]:
    """Digests of modules, as this process runs them."""
    files = {os.path.relpath(m.__file__, common.REPOSITORY): Path(m.__file__) for m in modules}
    return [code_of_process.get(name) or file_digest(file) for name, file in files.items()]


def changed_code(recorded: Mapping[str, str]) -> list[str]:
    """Files whose code differs from the `recorded` digest, or that are missing now."""
    now = code_digests()
    for name in recorded.keys() - now.keys():  # of another script
        if (path := common.REPOSITORY / name).exists():
            now[name] = file_digest(path)
    return sorted(name for name, digest in recorded.items() if now.get(name) != digest)


def require_same_code(what: str, changed: Sequence[str], fix: str) -> None:
    """
    Raise UsageError if files of code that `what` was made with have changed, unless the environment
    variable ACCEPT_CODE_CHANGE is 1.
    """
    if changed and os.environ.get("ACCEPT_CODE_CHANGE") != "1":
        problem = f"{what} was made by other code: {', '.join(changed)} changed"
        raise common.UsageError(problem, f"{fix}, or set ACCEPT_CODE_CHANGE=1")
