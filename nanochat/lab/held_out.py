"""
Final benchmarks: declared once, rejected by default, and every access logged.

    held_out.json {final, since} -> require_access -> held_out_access.jsonl -> the report

Both files carry digests of their contents, as records do.

A benchmark is for development unless it was declared `final`. Choosing by a final one defeats its
purpose. Held out by file is not held out by origin: a bucket made of the same data set as a final
benchmark is of its family, and not trained on.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat.common import UsageError, base_dir, locked, read_sealed, sealed, write_json
from nanochat.records import append_line, one_line, read_sealed_lines
from nanochat.records import plain as plain_json

if TYPE_CHECKING:
    from nanochat.mixture import Bucket

FILE, LEDGER = "held_out.json", "held_out_access.jsonl"


def final_benchmarks() -> dict[str, str]:
    """Name -> data set it is made of, of the benchmarks that are final."""
    return declared()["final"]


def declared() -> dict[str, dict[str, str]]:
    """What held_out.json says: `final` and `since`. Raises UsageError where it is damaged."""
    path = base_dir() / FILE
    if not path.exists():
        return {"final": {}, "since": {}}
    try:
        return read_sealed(path)
    except ValueError as error:
        raise UsageError(
            f"{error}; it lists what is held out",
            "restore the file, or delete it and declare again what is final: "
            'python -m scripts.lab.hold_out --final="..."',
        ) from error


def declare(final: Mapping[str, str]) -> Path:
    """Make benchmarks final; name -> the data set each is made of. None is ever made dev again."""
    path, known = base_dir() / FILE, declared()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    new = {name: since for name in final if name not in known["since"]}
    every = {"final": {**known["final"], **final}, "since": {**known["since"], **new}}
    write_json(path, sealed(every))
    return path


def plain(name: str) -> str:
    """The name of a benchmark without case, spaces and punctuation."""
    return re.sub(r"[\W_]", "", name.lower())


def is_final(name: str) -> bool:
    """Whether a benchmark is final."""
    return plain(name) in map(plain, final_benchmarks())


def admitted(
    named: str | None, default: Sequence[str], final: bool, say: Callable[[str], None]
) -> list[str]:
    """Tasks that were named, with | between them, else those of `default` that may be scored."""
    if named:
        return named.split("|")
    left_out = [name for name in default if is_final(name) and not final]
    if left_out:
        say(f"left out, being final: {', '.join(left_out)}; --final looks at them")
    return [name for name in default if name not in left_out]


def require_access(names: Iterable[str], allowed: bool, who: Mapping[str, Any]) -> None:
    """
    Raise UsageError for a final benchmark unless access is `allowed`, and log the access where it
    is. who: what reads the benchmark, for the ledger.
    """
    wanted = [name for name in names if is_final(name)]
    if wanted and not allowed:
        raise UsageError(
            f"{', '.join(wanted)} is final: held out until the end, for nothing to be chosen by it",
            "leave it out; where there is a flag --final, that looks at it, and is written down",
        )
    folder = base_dir()
    for name in wanted:
        entry = {"benchmark": name, "when": time.strftime("%Y-%m-%d %H:%M:%S"), **who}
        with locked(folder / ".lock", "the ledger"):
            append_line(folder / LEDGER, one_line(sealed(plain_json(entry))))


def accesses(damaged: list[str] | None = None) -> list[Mapping[str, Any]]:
    """Every access to a final benchmark, in order; damaged lines are listed in `damaged`."""
    return read_sealed_lines(base_dir() / LEDGER, damaged)


def require_other_families(parents: Mapping[str, str]) -> None:
    """
    Raise UsageError for a bucket whose parent is that of a final benchmark.

    parents: bucket -> the data set that it is made of, empty where unknown.
    """
    families = {plain(parent): name for name, parent in final_benchmarks().items() if parent}
    for bucket, parent in parents.items():
        name = families.get(plain(parent)) if parent else None
        if name:
            raise UsageError(
                f"{bucket} is made of {parent}, as is {name}, which is final: a model that learned "
                "its source and style is not measured by it",
                "leave it out",
            )


def require_fair(learned: Sequence["Bucket"], measured: Sequence["Bucket"]) -> None:
    """
    Raise UsageError for conversations of the family of a final benchmark, or measured by a final
    benchmark.
    """
    require_other_families({bucket.name: bucket.tags.parent for bucket in learned})
    every = [*measured, *learned]  # canaries ask questions of the training data
    require_access((bucket.measures for bucket in every if bucket.measures), False, {})


def access_table() -> dict[str, Any]:
    """The ledger, as a record holds it."""
    rows = [
        [e["when"], e["benchmark"], str(e.get("checkpoint", "")), str(e.get("section", ""))]
        for e in accesses()
    ]
    columns = ["When", "Benchmark", "Checkpoint", "By"]
    return {"title": "Access to final benchmarks", "columns": columns, "rows": rows}
