"""
Tasks whose rows come from a dataset repository on the hub, pinned on first use.

    repository, file stem -> HubRepo: manifest, verified files -> rows -> parse -> items

A multiple-choice dataset is a subclass of HubQuestions that names its repository, files and
columns.
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import mode
from typing import Any

import pyarrow.parquet as pq

from nanochat.common import base_dir, hold_lock, is_main_process, printable, sha256_file, write_json
from nanochat.dataset import read_json_lines
from nanochat.hub import HubRepo, pin_repo
from tasks.base import Conversation, MCQuestion, QuestionTask, Task, shuffled

SUFFIXES = (".parquet", ".csv", ".jsonl", ".jsonl.gz")
AS_PARQUET = "refs/convert/parquet"  # branch on which the Hub keeps <config>/<split>/<n>.parquet
UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, SyntaxError)  # of `parse`

TaskRow = dict[str, Any]


def data_folder(repo: str) -> Path:
    """Folder of the downloaded files of a repository."""
    return base_dir() / "data" / "tasks" / repo.replace("/", "--")


def match_files(stem: str, files: Iterable[str], repo: str) -> list[str]:
    """
    The files of a split: one file named `stem` or its numbered parts, all at the root or in the
    same folder: "main/test" for main/test-00000-of-00001.parquet. A * in `stem` matches any part of
    a name. Raises ValueError for no match, several folders or several formats.
    """
    name = re.escape(stem).replace(r"\*", "[^/]*")
    pattern = re.compile(rf"(.*/)?{name}(-\d+-of-\d+)?(\.parquet|\.csv|\.jsonl|\.jsonl\.gz)")
    found = [match for match in map(pattern.fullmatch, files) if match]
    kinds = sorted({f"{match[1] or ''}*{match[3]}" for match in found})
    if len(kinds) != 1:
        raise ValueError(
            f"{repo} has {stem} as {kinds or 'no file'} among {[*files][:20]}; name one "
            f"(<folder>/{stem}), or another branch (revision: {AS_PARQUET})"
        )
    return [match[0] for match in found]


@lru_cache(maxsize=4)
def read_rows(path: Path) -> list[Any]:
    """The rows of a file, read once for the splits and buckets that share it. CSV holds text."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        with path.open(encoding="utf-8-sig", newline="") as stream:
            return list(csv.DictReader(stream))
    return [row for _, row in read_json_rows(path)]


def read_json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """
    Yield (number, row) of a file of JSON Lines, or of a JSON array of rows on one line or several.
    Raises as `read_json_lines`.
    """
    if path.suffix != ".gz":
        with path.open(encoding="utf-8-sig") as file, suppress(ValueError, RecursionError):
            if file.read(1024).lstrip()[:1] == "[":
                file.seek(0)
                rows = json.load(file)  # an error: lines that are lists
                turns = [isinstance(row, dict) and row.keys() & {"role", "from"} for row in rows]
                yield from enumerate([rows] if turns and all(turns) else rows, 1)
                return
    yield from read_json_lines(path)


class NotSelected(ValueError):
    """A row that is left out on purpose."""


def explain(error: Exception) -> str:
    """What is wrong with a row, from an error of UNUSABLE."""
    if isinstance(error, KeyError):
        return f"there is no field {error}"
    if isinstance(error, UnicodeError):
        return "its text is no valid Unicode"
    return str(error) if isinstance(error, ValueError) else f"a field has another type ({error})"


class HubTask(Task):
    """
    A task from a dataset on the hub, or from a local file, its rows shuffled with a fixed seed.

    Rows of the hub that `parse` rejects are skipped, counted and reported; in a file, they are
    errors.
    """

    repo: str
    revision: str | None = None
    """Branch, tag or commit. Default: main."""
    splits: Mapping[str, str]
    """Split -> file stem in the repository."""
    path: Path | None = None
    """JSON Lines file, instead of a repository."""

    @cached_property
    def data(self) -> tuple[dict[int, Any], dict[str, Any]]:
        """
        The rows of the split by their number, and what determines them: dataset, commit, digests of
        files. Files are downloaded and pinned on first use. Raises ValueError if there are none.
        """
        if self.path:
            return dict(read_json_rows(self.path)), {"sha256": sha256_file(self.path)}
        folder = data_folder(self.repo)
        path = folder / "manifest.json"
        with hold_lock(folder / ".lock", f"resolving {self.repo}"):
            manifest = pin_repo(self.repo, path, SUFFIXES, self.revision)
            names = match_files(self.splits[self.split], manifest["files"], self.repo)
            if not path.exists():
                write_json(path, manifest)
        source = HubRepo(self.repo, folder, manifest["commit"])
        rows = dict(enumerate(row for name in names for row in read_rows(source.fetch(name))))
        recorded = source.files()
        digests = {name: recorded[name]["sha256"] for name in names}
        return rows, {"dataset": self.repo, "commit": source.commit, "sha256": digests}

    def parse(self, row: TaskRow) -> Any:
        """A row as an element of `items`. Raises an error of UNUSABLE if it cannot be used."""
        return row

    def select(self, items: list[Any]) -> list[Any]:
        """The items of the split, if its files have others too."""
        return items

    @cached_property
    def items(self) -> list[Any]:
        """The parsed rows. Raises ValueError if none can be used, or for a line of a file."""
        items, problems, rows = [], [], self.data[0]
        for number, row in rows.items():
            try:
                items.append(self.parse(row))
            except UNUSABLE as error:
                problems.append(explain(error))
                if self.path and not isinstance(error, NotSelected):
                    raise ValueError(f"{self.path}, line {number}: {problems[-1]}") from error
        about = f"{self.name}: skipped {len(problems):,} of {len(rows):,} rows of "
        about += f"{self.path or self.repo}: {mode(problems or ['it is empty'])}"
        if self.path and not rows:
            raise ValueError(f"{self.path} is empty; add conversations")
        if not items:
            columns = map(str, next(iter(rows.values()), ()))
            raise ValueError(f"{about}; it has the columns {', '.join(columns) or '(none)'}")
        if problems and is_main_process():
            print(printable(about), flush=True)
        return shuffled(self.select(items), 0)  # many are sorted by subject

    @property
    def origin(self) -> dict[str, Any]:
        return self.data[1]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Conversation:
        return self.items[i]


class HubQuestions(QuestionTask, HubTask):
    """
    Multiple-choice questions. A subclass names the columns, or has a `parse` of its own if a row
    needs more than that.
    """

    columns: tuple[str | tuple[str, ...], str]
    """Columns of the options (a list, or a column each) and of the answer."""
    labels = "12345"
    """What the answer says for the first option, the second, ...; in lower case."""

    def parse(self, row: TaskRow) -> MCQuestion:
        options, answer = self.columns
        listed = row[options] if isinstance(options, str) else [row[name] for name in options]
        right = [*self.labels].index(str(row[answer]).strip().lower())
        return make_question(row["question"], listed, right)

    def question(self, i: int) -> MCQuestion:
        return self.items[i]


def make_question(text: str, options: Iterable[str], right: int, rationale: str = "") -> MCQuestion:
    """A question without surrounding spaces. Raises ValueError if it is incomplete."""
    listed = tuple(option.strip() for option in options)
    if not text.strip() or not all(listed) or not 0 <= right < len(listed) > 1:
        raise ValueError("no question, fewer than two options, or no right one")
    return MCQuestion(text.strip(), listed, right, rationale.strip())
