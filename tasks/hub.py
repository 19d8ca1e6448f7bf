"""
Tasks whose rows come from a dataset repository on the hub, pinned on first use.

    repository, file stem -> HubRepo: manifest, verified files -> TaskRows -> HubTask
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from nanochat.common import base_dir, hold_lock, is_main_process, read_json, sha256_file, write_json
from nanochat.dataset import read_json_lines
from nanochat.hub import HubRepo, pin_repo
from tasks.base import MCQuestion, QuestionTask, Task, shuffled

SUFFIXES = (".parquet", ".csv", ".jsonl", ".jsonl.gz")
CSV_FORMAT = csv.ParseOptions(newlines_in_values=True)
ROW_ORDER = 0  # shuffle seed: datasets are sorted by subject, so the first n rows are biased
AS_PARQUET = "refs/convert/parquet"  # branch on which the Hub keeps <config>/<split>/<n>.parquet

TaskRow = dict[str, Any]


class TaskRows:
    """The rows of an Arrow table, converted to dicts on access."""

    def __init__(self, table: pa.Table):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __iter__(self) -> Iterator[TaskRow]:
        for batch in self.table.to_batches(max_chunksize=100):
            yield from batch.to_pylist()

    def __getitem__(self, i: int) -> TaskRow:
        return self.table.slice(i, 1).to_pylist()[0]


class TaskData(NamedTuple):
    """The rows of a split, with the commit and digests of their files."""

    rows: TaskRows | list[TaskRow]
    commit: str
    sha256: dict[str, str]


def data_folder(repo: str) -> Path:
    """Folder of the downloaded files of a repository."""
    return base_dir() / "data" / "tasks" / repo.replace("/", "--")


def load_split(
    repo: str, stem: str, columns: Sequence[str], revision: str | None = None
) -> TaskData:
    """
    Load the rows of a split; files are downloaded and pinned on first use.

    repo: <owner>/<name>, plus /<folder> if several folders match the stem. stem: file name without
    part number or suffix: "main/test" for main/test-00000-of-00001.parquet. revision: branch, tag
    or commit; default: main. Raises ValueError if files or columns are missing.
    """
    words = repo.split("/")
    if len(words) < 2 or not all(words):
        raise ValueError(f"invalid hub repository {repo!r}; use <owner>/<name>[/<folder>]")
    repo, where = "/".join(words[:2]), data_folder("/".join(words[:2]))
    path = where / "manifest.json"
    with hold_lock(where / ".lock", f"resolving {repo}"):
        manifest = pin_repo(repo, path, SUFFIXES, revision)
        if not path.exists():
            write_json(path, manifest)
    source = HubRepo(repo, where, manifest["commit"])
    files = match_files("/".join([*words[2:], stem]), list(source.files()), repo)
    paths = [source.fetch(file) for file in files]
    if paths[0].suffix in (".parquet", ".csv"):
        tables = [read_columns(path, columns) for path in paths]
        try:
            table = pa.concat_tables(tables, promote_options="default")  # one may be all null
        except (pa.ArrowException, TypeError) as error:  # ArrowTypeError is a TypeError
            why = f"different types in a column of {', '.join(columns)}"
            raise ValueError(f"{repo}: files {', '.join(files)} have {why} ({error})") from error
        rows = TaskRows(table)
    else:
        rows = [row for path in paths for row in read_json_rows(path, columns)]
    if not len(rows):
        raise ValueError(f"{repo}: no rows in {', '.join(files)}")
    recorded = source.files()
    return TaskData(rows, source.commit, {f: recorded[f]["sha256"] for f in files})


def match_files(stem: str, files: Sequence[str], repo: str) -> list[str]:
    """
    The files of a split: one file named `stem` or its numbered parts, all at the root or in the
    same folder. A * in `stem` matches any part of a name. Raises ValueError for no match,
    several folders or several formats.
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
    if len(kinds := {match[3] for match in found}) > 1:
        raise ValueError(
            f"{repo} has {stem} as {', '.join(sorted(kinds))}; use another repository, "
            f"or with hub: {{revision: {AS_PARQUET}}}"
        )
    return [match[0] for match in found]


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read `columns` of a parquet or CSV file. Raises ValueError if one is missing."""
    try:
        if path.suffix == ".csv":  # as text: columns of numbers in some files would not concatenate
            names = csv.open_csv(path, parse_options=CSV_FORMAT).schema.names
            require_columns(path, columns, names)
            types = dict.fromkeys(columns, pa.string())
            options = csv.ConvertOptions(column_types=types, include_columns=list(columns))
            return csv.read_csv(path, parse_options=CSV_FORMAT, convert_options=options)
        require_columns(path, columns, pq.read_schema(path).names)
        return pq.read_table(path, columns=list(columns)).replace_schema_metadata()
    except (pa.ArrowException, OSError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ValueError(f"{path}: cannot read {', '.join(columns)} ({problem})") from error


def require_columns(path: Path, columns: Sequence[str], names: Iterable[str]) -> None:
    """Raise ValueError if `names` lacks a column."""
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"{path} has no column {', '.join(missing)}, only {', '.join(names)}")


def read_json_rows(path: Path, columns: Sequence[str]) -> list[TaskRow]:
    """`read_columns` of JSON Lines. A line that is not an object becomes a row of nulls."""
    names: dict[str, None] = {}
    rows: list[TaskRow] = []
    for _, line in read_json_lines(path):
        fields = line if isinstance(line, dict) else {}
        names |= dict.fromkeys(fields)
        rows.append({column: fields.get(column) for column in columns})
    require_columns(path, columns, names)
    return rows


class HubTask(Task):
    """
    A task from a dataset on the hub, its rows shuffled with a fixed seed.

    Rows for which `find_problem` returns a reason are skipped, counted and reported.
    """

    repo: str
    revision: str | None = None
    """Branch, tag or commit. Default: main."""
    stems: Mapping[str, str]
    """Split -> file stem in the repository."""
    columns: Sequence[str]
    """Columns to load."""

    def __init_subclass__(cls) -> None:
        """The splits are those with files, unless a class names them."""
        super().__init_subclass__()
        if "stems" in vars(cls) and "splits" not in vars(cls):
            cls.splits = tuple(cls.stems)

    @cached_property
    def data(self) -> TaskData:
        return load_split(self.repo, self.stems[self.split], self.columns, self.revision)

    def selects(self, row: TaskRow) -> bool:
        """Whether a row is of this task; others are dropped without counting as skipped."""
        return True

    def find_problem(self, row: TaskRow) -> str | None:
        """Why a row cannot be used; None if it can."""
        return None

    @cached_property
    def checked(self) -> tuple[Sequence[int], Counter[str]]:
        """Rows that can be used, and the problems of those that cannot."""
        if type(self).find_problem is HubTask.find_problem:
            return range(len(self.data.rows)), Counter()
        rows = enumerate(self.data.rows)
        found = {n: self.find_problem(row) for n, row in rows if self.selects(row)}
        kept = [n for n, problem in found.items() if problem is None]
        return kept, Counter(problem for problem in found.values() if problem is not None)

    @cached_property
    def kept(self) -> Sequence[int]:
        """Indices of the rows that can be used. Raises ValueError if there are none."""
        kept, problems = self.checked
        if problems and is_main_process():
            of = f"{problems.total():,} of {problems.total() + len(kept):,} rows of {self.where}"
            print(f"{self.name}: skipped {of}: {problems.most_common(1)[0][0]}", flush=True)
        if not kept:
            raise ValueError(f"{self.where} has no row that {self.name} can use{self.hint()}")
        return kept

    def hint(self) -> str:
        """How to find rows that can be used, for the error."""
        return ""

    @property
    def left_out(self) -> int:
        """Number of skipped rows."""
        return self.checked[1].total()

    def is_local(self) -> bool:
        """Whether all files of the split are on this machine, so that nothing is downloaded."""
        folder = data_folder(self.repo)
        if not (folder / "manifest.json").exists():
            return False
        files = read_json(folder / "manifest.json")["files"]
        return all(
            (folder / name).exists() and sha256_file(folder / name) == files[name].get("sha256")
            for name in match_files(self.stems[self.split], list(files), self.repo)
        )

    @cached_property
    def order(self) -> Sequence[int]:
        """Conversation -> row."""
        return [self.kept[n] for n in shuffled(len(self.kept), ROW_ORDER)]

    @property
    def where(self) -> str:
        """Name of the data in messages."""
        return f"{self.repo} {self.stems[self.split]}"

    @property
    def origin(self) -> dict[str, Any]:
        found = {"dataset": self.repo, "commit": self.data.commit, "sha256": self.data.sha256}
        return found | ({"left_out": self.left_out} if self.left_out else {})

    def __len__(self) -> int:
        return len(self.order)

    def row(self, i: int) -> TaskRow:
        """The row of conversation i."""
        return self.data.rows[self.order[i]]


class HubQuestions(HubTask, QuestionTask):
    """A multiple-choice task from a dataset on the hub; `parse` reads a row."""

    @abstractmethod
    def parse(self, row: TaskRow) -> MCQuestion:
        """The question of a row. Raises ValueError or TypeError if it is invalid."""

    def find_problem(self, row: TaskRow) -> str | None:
        try:
            text, options, right = self.parse(row)
        except (ValueError, TypeError, LookupError, AttributeError, SyntaxError) as error:
            return f"{type(error).__name__}: {error}"
        if not text or not all(options) or len(options) < 2:
            return "no question, or fewer than two options"
        return None if 0 <= right < len(options) else f"no option {right + 1}"

    def question(self, i: int) -> MCQuestion:
        return self.parse(self.row(i))
