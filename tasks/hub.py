"""
Tasks whose rows come from a dataset repository on the hub, pinned on first use.

    repository, file stem -> HubRepo: manifest, verified files -> TaskRows -> HubTask
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from nanochat.common import base_dir, hold_lock, write_json
from nanochat.dataset import find_damage, read_json_lines
from nanochat.hub import HubRepo, pin_repo
from tasks.base import Task, shuffled

SUFFIXES = (".parquet", ".csv", ".jsonl", ".jsonl.gz")
CSV_FORMAT = csv.ParseOptions(newlines_in_values=True)
ROW_ORDER = 0  # shuffle seed: datasets are sorted by subject, so the first n rows are biased

TaskRow = dict[str, Any]


class TaskRows:
    """The rows of an Arrow table, converted to dicts on access."""

    def __init__(self, table: pa.Table):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __iter__(self) -> Iterator[TaskRow]:
        for batch in self.table.to_batches(max_chunksize=1000):
            yield from batch.to_pylist()

    def __getitem__(self, i: int) -> TaskRow:
        return self.table.slice(i, 1).to_pylist()[0]


class TaskData(NamedTuple):
    """The rows of a split, with the commit and digests of their files."""

    rows: TaskRows
    commit: str
    sha256: dict[str, str]


def load_split(repo: str, stem: str, columns: Sequence[str]) -> TaskData:
    """
    Load the rows of a split; files are downloaded and pinned on first use.

    repo: <owner>/<name>, plus /<folder> if several folders match the stem. stem: file name without
    part number or suffix: "main/test" for main/test-00000-of-00001.parquet. Raises ValueError if
    files or columns are missing.
    """
    words = repo.split("/")
    if len(words) < 2 or not all(words):
        raise ValueError(f"invalid hub repository {repo!r}; use <owner>/<name>[/<folder>]")
    repo, where = "/".join(words[:2]), base_dir() / "data" / "tasks" / "--".join(words[:2])
    path = where / "manifest.json"
    with hold_lock(where / ".lock", f"resolving {repo}"):
        manifest = pin_repo(repo, path, SUFFIXES)
        if not path.exists():
            write_json(path, manifest)
    source = HubRepo(repo, where, manifest["commit"], find_file_damage)
    files = match_files("/".join([*words[2:], stem]), list(source.files()), repo)
    paths = [source.fetch(file) for file in files]
    table = pa.concat_tables([read_columns(path, columns) for path in paths])
    if not table.num_rows:
        raise ValueError(f"{repo}: no rows in {', '.join(files)}")
    recorded = source.files()
    return TaskData(TaskRows(table), source.commit, {f: recorded[f]["sha256"] for f in files})


def find_file_damage(path: Path, whole: bool = False) -> str | None:
    """`find_damage` with support for CSV."""
    if path.suffix != ".csv":
        return find_damage(path, whole)
    try:
        csv.read_csv(path, parse_options=CSV_FORMAT)
    except pa.ArrowException as error:
        return f"it is not a readable CSV file ({str(error).splitlines()[0]})"
    return None


def match_files(stem: str, files: Sequence[str], repo: str) -> list[str]:
    """
    The files of a split: one file named `stem` or its numbered parts, all at the root or in the
    same folder. A * in `stem` matches any part of a name. Raises ValueError for no match or
    several folders.
    """
    name = re.escape(stem).replace(r"\*", "[^/]*")
    pattern = re.compile(rf"(.*/)?{name}(-\d+-of-\d+)?\.(parquet|csv|jsonl|jsonl\.gz)")
    found = [match for match in map(pattern.fullmatch, files) if match]
    folders = sorted({match[1] or "" for match in found})
    if not found:
        raise ValueError(f"{repo} has no {stem} among its files {', '.join(files[:20]) or '(0)'}")
    if len(folders) > 1:
        raise ValueError(
            f"{repo} has {stem} in several folders: {', '.join(folders)}; "
            f"append one to the repository: {repo}/{folders[0].strip('/') or '<folder>'}"
        )
    return [match[0] for match in found]


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read `columns` of a parquet, CSV or JSON Lines file."""
    try:
        if path.suffix == ".csv":
            return csv.read_csv(path, parse_options=CSV_FORMAT).select(list(columns))
        if path.suffix != ".parquet":
            rows = [{column: row[column] for column in columns} for _, row in read_json_lines(path)]
            return pa.Table.from_pylist(rows)
        return pq.read_table(path, columns=list(columns)).replace_schema_metadata()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(
            f"{path}: cannot read the columns {', '.join(columns)} "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


class HubTask(Task):
    """A task from a dataset on the hub, its rows shuffled with a fixed seed."""

    repo: str
    stems: Mapping[str, str]
    """Split -> file stem in the repository."""
    columns: Sequence[str]
    """Columns to load."""

    @cached_property
    def data(self) -> TaskData:
        return load_split(self.repo, self.stems[self.split], self.columns)

    @cached_property
    def order(self) -> Sequence[int]:
        """Conversation -> row."""
        return shuffled(len(self.data.rows), ROW_ORDER)

    @property
    def where(self) -> str:
        return f"{self.repo} {self.stems[self.split]}"

    @property
    def origin(self) -> dict[str, Any]:
        return {"dataset": self.repo, "commit": self.data.commit, "sha256": self.data.sha256}

    def __len__(self) -> int:
        return len(self.order)

    def row(self, i: int) -> TaskRow:
        """The row of conversation i."""
        return self.data.rows[self.order[i]]
