"""
The texts in a file: parquet with a column `text`, or one JSON object with a `text` per line.

    file -> check_file -> file_texts -> in_batches -> lists of texts

Memory stays bounded by READ_ROWS rows, whatever the size of the file. A text that is null, empty
or no valid UTF-8 is left out and counted; a file that cannot be read is a ValueError naming it.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
READ_ROWS = 256  # parquet rows decoded at a time
BATCH_CHARS = 1 << 22


def damage(path: Path) -> str | None:
    """What keeps a parquet file from being opened, or None."""
    try:
        pq.ParquetFile(path).close()
    except (pa.ArrowException, OSError) as error:
        return f"it is no readable parquet file ({str(error).splitlines()[0]})"
    return None


def check_file(path: Path) -> None:
    """Raise ValueError unless a file looks readable and has a field `text` of strings."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; remove it or leave it out")
    if path.suffix != ".parquet":
        next(jsonl_texts(path, Counter()), None)
        return
    if problem := damage(path):
        raise ValueError(f"{path}: {problem}; replace it or leave it out")
    schema = pq.read_schema(path)
    column = schema.field("text").type if "text" in schema.names else None
    if column is None:
        raise ValueError(f"{path} has no column `text`; its columns are {', '.join(schema.names)}")
    if not (pa.types.is_string(column) or pa.types.is_large_string(column)):
        raise ValueError(f"{path}: the column `text` holds {column}, not strings")


def file_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """
    The texts of a file, in order.

    What is left out is counted in `skipped`, under `null`, `empty` and `undecodable`.
    """
    read = parquet_texts if path.suffix == ".parquet" else jsonl_texts
    return read(path, skipped)


def parquet_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """The texts of a parquet file, a few rows in memory at a time."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(READ_ROWS, columns=["text"], use_threads=False):
                for raw in batch.column(0).cast(pa.large_binary()).to_pylist():
                    yield from kept(raw, skipped)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; replace it or leave it out") from error


def jsonl_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """The texts of a file with one JSON object per line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.isspace():
                    continue
                text = json.loads(line)["text"]
                # Half a surrogate pair becomes bytes that are no UTF-8
                raw = None if text is None else text.encode(errors="surrogatepass")
                yield from kept(raw, skipped)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError) as error:
        raise ValueError(
            f"{path}, line {number}: not a JSON object with a string `text` "
            f"({type(error).__name__}: {error}); mend the file or leave it out"
        ) from error


def kept(raw: bytes | None, skipped: Counter) -> Iterator[str]:
    """The text in UTF-8 bytes, unless there is none: then it is counted."""
    try:
        if raw:
            yield raw.decode()
        else:
            skipped["null" if raw is None else "empty"] += 1
    except UnicodeDecodeError:
        skipped["undecodable"] += 1


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
