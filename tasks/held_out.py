"""
Final benchmarks: declared once, denied by default, every access logged.

    held_out.json -> require_access -> held_out_access.jsonl -> the report

A benchmark is for development unless declared `final`. Selecting models on a final benchmark
defeats its purpose. A training bucket made from the same dataset as a final benchmark
belongs to its family and is rejected, unless its declaration waives that.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanochat.common import UsageError, base_dir, hold_lock, read_json, write_json
from nanochat.records import append_line, read_lines
from tasks.base import Tags, plain_name

FILE, ACCESS_LOG = "held_out.json", "held_out_access.jsonl"


def final_benchmarks() -> dict[str, str]:
    """
    Final benchmarks: name -> datasets it is made from, separated by +. Raises ValueError if the
    file is damaged.
    """
    path = base_dir() / FILE
    return read_json(path) if path.exists() else {}


def declare(final: Mapping[str, str]) -> Path:
    """Permanently declare benchmarks final. final: name -> dataset it is made from."""
    path = base_dir() / FILE
    with hold_lock(base_dir() / ".lock", "the list of final benchmarks"):
        write_json(path, {**final_benchmarks(), **final})
    return path


def is_final(name: str) -> bool:
    """Whether a benchmark is final."""
    return plain_name(name) in map(plain_name, final_benchmarks())


def require_access(
    names: Iterable[str], allowed: bool = False, who: Mapping[str, Any] = {}
) -> list[dict[str, Any]]:
    """
    Raise UsageError for a final benchmark unless access is `allowed`; log every allowed access.
    Returns the tables for the record: after an access, that of all accesses.

    who: fields that identify the reader in the access log.
    """
    final = [*filter(is_final, names)]
    for name in final:
        if not allowed:
            raise UsageError(
                f"{name} is final: held out until the end and not used for selection",
                "leave it out (from validation: with --val_mixture), or pass --final if the script "
                "has it; every access is logged",
            )
        entry = {"benchmark": name, "when": time.strftime("%Y-%m-%d %H:%M:%S"), **who}
        append_line(base_dir() / ACCESS_LOG, entry)
    return [access_table()] if final else []


def names_in(tag: str) -> set[str]:
    """The normalized names in a tag, separated by +."""
    return {plain_name(name) for name in tag.split("+")} - {""}


def reject_contaminated(buckets: Mapping[str, Tags]) -> None:
    """
    Raise UsageError if a bucket and a final benchmark are made from the same dataset, unless the
    bucket's tag `waived` names the benchmark.
    """
    for bucket, tags in buckets.items():
        for name, parents in final_benchmarks().items():
            is_related = names_in(tags.parent) & names_in(parents)
            if is_related and plain_name(name) not in names_in(tags.waived):
                raise UsageError(
                    f"{bucket} is made from {tags.parent}, as is final benchmark {name} (from "
                    f"{parents}): training on the same source and style would invalidate it",
                    f'leave it out, or (mid, SFT) give it "waived": "{name}" in a mixture file',
                )


def access_table() -> dict[str, Any]:
    """All accesses to final benchmarks, in order, as a table for the record."""
    columns = ["when", "benchmark", "checkpoint", "section"]
    log = read_lines(base_dir() / ACCESS_LOG)
    rows = [[entry.get(column, "") for column in columns] for entry in log]
    return {"title": "Access to final benchmarks", "columns": columns, "rows": rows}
