"""
The texts in a file: parquet with a column `text`, or one JSON object with a `text` per line.

    file -> check_file -> file_texts -> in_batches -> lists of texts

Memory stays bounded by READ_ROWS rows, whatever the size of the file. A text that is null, empty
or no valid UTF-8 is left out and counted; a file that cannot be read is a ValueError naming it.
"""

import gzip
import json
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
READ_ROWS = 256  # parquet rows decoded at a time
BATCH_CHARS = 1 << 22
CSV_FORMAT = csv.ParseOptions(newlines_in_values=True)
TEXT_TYPES = {
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
}


def damage(path: Path, whole: bool = False) -> str | None:
    """
    What keeps a file from being read, or None.

    Opens parquet files; with `whole`, decodes all content of parquet, JSON lines and CSV, which is
    what finds damage where no digest is known.
    """
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                deque(file.iter_batches(READ_ROWS) if whole else (), maxlen=0)
        elif whole and path.suffix == ".csv":
            csv.read_csv(path, parse_options=CSV_FORMAT)
        elif whole:
            deque(json_lines(path), maxlen=0)
    except (pa.ArrowException, OSError) as error:
        kind = path.suffix.removeprefix(".")
        return f"it is no readable {kind} file ({str(error).splitlines()[0]})"
    except ValueError as error:
        return str(error)
    return None


def check_file(path: Path) -> None:
    """Raise ValueError unless a file looks readable and has a field `text` of strings."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; remove it or leave it out")
    if path.suffix != ".parquet":
        next(jsonl_texts(path), None)
        return
    if problem := damage(path):
        raise ValueError(f"{path}: {problem}; replace it or leave it out")
    schema = pq.read_schema(path)
    column = schema.field("text").type if "text" in schema.names else None
    if column is None:
        raise ValueError(
            f"{path} has no column `text`; its columns are {', '.join(schema.names)}; rename the "
            "one that holds the text, or leave the file out"
        )
    values = column.value_type if pa.types.is_dictionary(column) else column
    if values not in TEXT_TYPES:
        raise ValueError(
            f"{path}: the column `text` holds {column}, not strings; convert it or leave the "
            "file out"
        )


def file_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """
    The texts of a file, in order.

    What is left out is counted in `skipped`, under `null`, `empty` and `undecodable`.
    """
    for raw in (parquet_texts if path.suffix == ".parquet" else jsonl_texts)(path):
        try:
            if raw:
                yield raw.decode()
            else:
                skipped["null" if raw is None else "empty"] += 1
        except UnicodeDecodeError:
            skipped["undecodable"] += 1


def parquet_texts(path: Path) -> Iterator[bytes | None]:
    """The texts of a parquet file as UTF-8, a few rows in memory at a time."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(READ_ROWS, columns=["text"], use_threads=False):
                yield from batch.column(0).cast(pa.large_binary()).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; replace it or leave it out") from error


def jsonl_texts(path: Path) -> Iterator[bytes | None]:
    """The texts of a file with one JSON object per line, as UTF-8."""
    for number, value in json_lines(path):
        fields = value if isinstance(value, dict) else {}
        text = fields.get("text", 0)
        if not isinstance(text, str | None):
            raise ValueError(
                f"{path}, line {number}: not a JSON object with a string `text`"
                + (f", but one with {', '.join(fields)[:200]}" if fields else "")
                + "; correct the line or leave the file out"
            )
        # Half a surrogate pair becomes bytes that are no UTF-8
        yield None if text is None else text.encode(errors="surrogatepass")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each line of JSON in a file. Raises ValueError naming file and line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for line in stream:
                number += 1
                if not line.isspace():
                    yield number, json.loads(line)
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path}, line {number}: not JSON ({type(error).__name__}: {error}); "
            "correct the line or leave the file out"
        ) from error


def in_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Gather texts into lists of about BATCH_CHARS characters."""
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
