"""
Text to train on: files of a hub data set, of a local folder, or that a program wrote.

    file -> check_file -> file_texts -> in_batches -> lists of texts
    DataConfig -> open_source -> Source: ordered shards -> documents(shard) -> lists of texts

The first use of a source writes a manifest under the base directory: commit, list of files,
validation shard, SHA-256 of every file as it comes in. From then on it is enforced: a later run
reads the very same text or is rejected. Only a hub source uses the network.
"""

import gzip
import itertools
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from nanochat.common import (
    base_dir,
    fingerprint,
    locked,
    printable,
    read_json,
    sha256_file,
    write_json,
)
from nanochat.hub import HubRepo, open_repo

# ---- The texts in a file -------------------------------------------------------------------------
# Parquet with a column `text`, or one JSON object with a `text` per line. Memory stays bounded by
# READ_ROWS rows, whatever the size of the file.


SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
READ_ROWS = 256  # parquet rows decoded at a time
BATCH_CHARS = 1 << 22
CSV_FORMAT = csv.ParseOptions(newlines_in_values=True)
TEXT_TYPES = {
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
}


def find_damage(path: Path, whole: bool = False) -> str | None:
    """
    Why a file cannot be read, or None.

    Opens parquet files; with `whole`, decodes all content of parquet, JSON lines and CSV, which
    finds damage where no digest is known.
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
    """Raise ValueError for an empty file, and for parquet without a column `text` of strings."""
    problem = "it is empty" if path.stat().st_size == 0 else find_damage(path)
    if problem is None and path.suffix == ".parquet":
        schema = pq.read_schema(path)
        column = schema.field("text").type if "text" in schema.names else None
        if column is None:
            problem = f"it has no column `text`; its columns are {', '.join(schema.names)}"
        elif (column.value_type if pa.types.is_dictionary(column) else column) not in TEXT_TYPES:
            problem = f"its column `text` holds {column}, not strings"
    if problem:
        raise ValueError(f"{path}: {problem}; replace it or leave it out")


def file_texts(path: Path, skipped: Counter) -> Iterator[str]:
    """
    The texts of a file, in order. Raises ValueError naming a file that cannot be read.

    Texts that are left out are counted in `skipped`, under `null`, `empty` and `undecodable`.
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
                f"{path}, line {number}: not a JSON object with a string `text` but "
                f"with {', '.join(fields)[:200] or 'no fields'}; correct the line or leave the "
                "file out"
            )
        # Half a surrogate pair becomes bytes that are no UTF-8
        yield None if text is None else text.encode(errors="surrogatepass")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each line of JSON in a file. Raises ValueError naming file and line."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
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


# ---- Sources of text: ordered, frozen shards with a fingerprint ----------------------------------
# A single file is two shards: its documents before number `tail_start`, and those from there on.


TAIL = "tail-of-"  # and the name of the only file: the shard of its last documents
TAIL_SHARE = 0.01  # of the characters of the file; of a short one TAIL_CHARS, but at most a tenth
TAIL_CHARS = 8192  # about one row of 2,048 tokens


@dataclass(frozen=True)
class DataConfig:
    dataset: str | None = None
    """Where text comes from: a data set repository on the hub with parquet files that have a
    column `text`, such as karpathy/climbmix-400b-shuffle; or `embedded`, the built-in data set,
    which needs no network. Default: what the earlier stages used."""
    data_dir: str | None = None
    """A local folder of text instead: .parquet, .jsonl or .jsonl.gz files with a field `text`."""
    num_shards: int | None = None
    """Number of training shards to use, counted from the first. Default: all; they are downloaded
    only as they are needed."""

    def __post_init__(self):
        if self.dataset and self.data_dir:
            raise ValueError(
                f"give --dataset or --data_dir, not both ({self.dataset!r}, {self.data_dir!r})"
            )
        if self.data_dir == "":
            raise ValueError("--data_dir= names no folder; use --data_dir=. for the current one")
        if self.num_shards is not None and self.num_shards < 1:
            raise ValueError(f"--num_shards is at least 1, not {self.num_shards}")


@dataclass(frozen=True)
class FirstUseConfig(DataConfig):
    """Also the settings that the first use of a source decides for all later ones."""

    revision: str | None = None
    """Branch, tag or commit of the repository. Default: main at first use, pinned from then on."""
    val_shard: str | None = None
    """File kept for validation. Default: the last one in the order of names; of a single file, its
    last documents (about 1% of the text)."""


@dataclass(frozen=True)
class Source(ABC):
    """An ordered, frozen list of training shards and one validation shard, all of them files."""

    name: str
    train_shards: list[str]
    val_shard: str
    identity: dict[str, Any]
    """Decides the text in a shard of a given name; not which shards are taken."""
    origin: dict[str, Any]
    """The settings that open the source again, as `describe` has them."""
    manifest: Path
    files: dict[str, dict[str, Any]] = field(compare=False)
    """File -> bytes and sha256, from the manifest."""
    tail: dict[str, int]
    """Of a single file: `tail_start`, the first document for validation, of all `documents`."""

    @property
    def fingerprint(self) -> str:
        """Names the text: the data and the ordered list of shards taken from it."""
        shards = {"train_shards": self.train_shards, "val_shard": self.val_shard}
        return fingerprint({"identity": self.identity, **shards})

    def describe(self) -> dict[str, Any]:
        """JSON-ready; `open_source(DataConfig(), recorded)` opens the very same source from it."""
        num_shards = len(self.train_shards)
        return {**self.origin, "num_shards": num_shards, "fingerprint": self.fingerprint}

    def shards(self) -> list[str]:
        """All shards, the validation shard last."""
        return [*self.train_shards, self.val_shard]

    def shard_sizes(self) -> dict[str, int]:
        """Bytes of each shard as it is stored."""
        sizes = {shard: self.files[file_of(shard)]["bytes"] for shard in self.shards()}
        if self.tail:
            share = 1 - self.tail["tail_start"] / self.tail["documents"]
            sizes[self.val_shard] = int(sizes[self.val_shard] * share)
        return sizes

    def missing_bytes(self, shards: Iterable[str]) -> int:
        """How much would have to be downloaded to read these shards."""
        return 0

    @abstractmethod
    def fetch(self, shard: str) -> Path:
        """Make a shard readable: download what is missing, verify what is there."""

    def documents(self, shard: str, skipped: Counter | None = None) -> Iterator[list[str]]:
        """
        The texts of a shard, in order, in lists of about BATCH_CHARS characters.

        Null, empty and undecodable texts are left out, and counted in `skipped` under `null`,
        `empty` and `undecodable`. Raises ValueError naming a file that cannot be read.
        """
        path, skips, start = self.fetch(shard), Counter(), self.tail.get("tail_start")
        texts = file_texts(path, skips)
        if shard.startswith(TAIL):
            deque(itertools.islice(texts, start), maxlen=0)
            skips.clear()  # counted with the training part
        else:
            texts = itertools.islice(texts, start)
        batch = None
        for batch in in_batches(texts):
            yield batch
        if skipped is not None:
            skipped.update(skips)
        if batch is None:
            raise ValueError(
                f"{path} holds no text; use fewer --num_shards, or delete {self.manifest} to start "
                "over with other files"
            )

    def texts(self, shard: str, most: int | None = None) -> Iterator[str]:
        """The texts of a shard one by one, at most so many from the first."""
        return itertools.islice(itertools.chain.from_iterable(self.documents(shard)), most)


def file_of(shard: str) -> str:
    """The name of the file that holds a shard."""
    return shard.removeprefix(TAIL)


def find_tail(path: Path) -> dict[str, int]:
    """
    Which documents of a source's only file are for validation: number `tail_start` and later ones.

    They are the fewest of the last that hold TAIL_SHARE of the characters, or TAIL_CHARS of a short
    text; at most half of the documents, and at most half of the characters unless the last
    document alone has more. Raises ValueError for a file with a single document.
    """
    tail: deque[int] = deque()  # lengths
    documents = chars = tail_chars = 0
    for text in file_texts(path, Counter()):
        documents += 1
        chars += len(text)
        tail.append(len(text))
        tail_chars += len(text)
        wanted = min(chars / 10, max(TAIL_SHARE * chars, TAIL_CHARS))
        while tail_chars - tail[0] >= wanted:
            tail_chars -= tail.popleft()
    if documents < 2:
        raise ValueError(
            f"{path} is the only file and holds {documents} documents with text, but training and "
            "validation need one each; divide it into documents, or add a file with validation text"
        )
    while len(tail) > 1 and (2 * len(tail) > documents or 2 * tail_chars > chars):
        tail_chars -= tail.popleft()
    print(
        f"{path} is the only file: the last {len(tail):,} of its {documents:,} documents "
        f"({tail_chars / chars:.1%} of the text) are held out for validation",
        flush=True,
    )
    return {"tail_start": documents - len(tail), "documents": documents}


def require_recorded(source: Source, recorded: str | None) -> None:
    """Raise ValueError unless the source has the `recorded` fingerprint, where there is one."""
    if recorded not in (None, source.fingerprint):
        raise ValueError(
            f"{source.name} is not the text that was recorded: fingerprint "
            f"{source.fingerprint}, recorded {recorded}; bring the old files "
            "back, or name --dataset or --data_dir to accept the new ones"
        )


def choose_shards(cfg: DataConfig, where: str, names: Iterable[str], val_shard: str) -> list[str]:
    """The training shards: all but the validation shard, as many as asked for."""
    train = [name for name in names if name != val_shard]
    if cfg.num_shards is not None and cfg.num_shards > len(train):
        raise ValueError(
            f"--num_shards={cfg.num_shards}, but {where} has {len(train)} training shards; use "
            f"--num_shards={len(train)}, or leave it out for all of them"
        )
    return train[: cfg.num_shards]


def choose_val_shard(
    cfg: FirstUseConfig, where: str, names: Sequence[str], recorded: str | None, delete: Path
) -> str:
    """The validation shard: the recorded one; at first use the one asked for, or the last."""
    options = [recorded] if recorded else names if len(names) > 1 else [TAIL + names[0]]
    if cfg.val_shard in (None, *options):
        return cfg.val_shard or options[-1]
    problem = "needs it for training" if cfg.val_shard in names else "has no such file"
    fix = "leave --val_shard out to hold out the last documents of its only file"
    if recorded:
        problem = f"names {recorded}, and earlier stages may have trained on {cfg.val_shard}"
        fix = f"delete {delete} to start over"
    elif len(names) > 1:
        fix = f"its {len(names)} files are {names[0]} to {names[-1]}"
    raise ValueError(f"--val_shard={cfg.val_shard}: {where} {problem}; {fix}")


# ---- A local folder ------------------------------------------------------------------------------
# Its manifest, with the SHA-256 of every file, is under the base directory; the folder is only
# read.


LARGE_BYTES = 1 << 28  # reading more than that is announced


@dataclass(frozen=True)
class LocalSource(Source):
    """Files in a local folder, which may be read-only."""

    data_dir: Path
    suffix: str = ""
    """Behind the name of a shard in that of its file."""

    def fetch(self, shard: str) -> Path:
        file = file_of(shard)
        path = self.data_dir / f"{file}{self.suffix}"
        if not path.is_file() or sha256_file(path) != self.files[file]["sha256"]:
            raise ValueError(changed_file(path, self.manifest))
        return path


def open_folder(cfg: FirstUseConfig, recorded: str | None) -> LocalSource:
    """
    Open a folder; at first use, after all checks, write its manifest.

    recorded: the fingerprint that the source must have. Raises ValueError naming the fix.
    """
    data_dir = Path(cfg.data_dir or "").expanduser().resolve()
    if cfg.revision is not None:
        raise ValueError(
            f"--revision={cfg.revision} is for data sets of the hub; leave it out with --data_dir"
        )
    if not data_dir.is_dir():
        is_file, parent = data_dir.is_file(), data_dir.parent
        fix = f"use the folder it is in: --data_dir={parent}" if is_file else "check the path"
        raise ValueError(f"--data_dir={cfg.data_dir}: there is no such folder; {fix}")
    name = str(data_dir)
    path = base_dir() / "data" / f"{data_dir.name}-{fingerprint(name)[:8]}" / "manifest.json"
    with locked(path.parent / ".lock", f"reading {data_dir}"):
        old = read_json(path) if path.exists() else None
        manifest = check_folder(cfg, data_dir, path, old)
        files, val_shard, tail = manifest["files"], manifest["val_shard"], manifest.get("tail", {})
        split = {"tail_start": tail["tail_start"]} if tail else {}
        source = LocalSource(
            name,
            choose_shards(cfg, name, files, val_shard),
            val_shard,
            {"kind": "local", "files": {f: files[f]["sha256"] for f in files}, **split},
            {"data_dir": name, "val_shard": val_shard, **split},
            path,
            files,
            tail,
            data_dir,
        )
        require_recorded(source, recorded)
        if manifest != old:
            write_json(path, manifest)
    return source


def changed_file(path: Path, manifest: Path) -> str:
    """The error for a file that differs from its record."""
    return (
        f"{path} is not the file it was: its SHA-256 differs from {manifest}; "
        "bring the old file back, or delete that manifest to accept the new one"
    )


def find_files(data_dir: Path) -> list[str]:
    """
    The names of the files with text below a folder, sorted; links to folders are followed.

    Raises ValueError for an entry that is no regular file and for a link that makes text come
    twice, OSError for a folder that cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    names, folders = [], {}
    for folder, _, files in os.walk(data_dir, onerror=stop, followlinks=True):
        real = Path(folder).resolve()
        if real in folders or (folders and data_dir.is_relative_to(real)):
            raise ValueError(
                f"{folder} leads to {real}, which is read as {folders.get(real, data_dir)} too; "
                "remove one of them, so that no text comes twice"
            )
        folders[real] = folder
        for file in files:
            if not file.endswith(SUFFIXES) or file.startswith("."):
                continue
            path = Path(folder, file)
            if not path.is_file():
                raise ValueError(f"{path} is a broken link or no regular file; remove it")
            names.append(path.relative_to(data_dir).as_posix())
    return sorted(names)


def check_folder(
    cfg: FirstUseConfig, data_dir: Path, path: Path, old: dict[str, Any] | None
) -> dict[str, Any]:
    """
    The manifest of a folder; writes nothing. `old` is the one recorded in `path`, if there is one.

    A file is hashed when it is new or its size or time changed; a new one is read to its end.
    Raises ValueError naming files that came, went, changed or cannot be read.
    """
    names = find_files(data_dir)
    if not names:
        raise ValueError(
            f"{data_dir} holds no {', '.join(SUFFIXES)} file; add one whose rows or lines have a "
            "field `text`"
        )
    recorded = old["val_shard"] if old else None
    val_shard = choose_val_shard(cfg, str(data_dir), names, recorded, delete=path)
    known = old["files"] if old else dict.fromkeys(names)
    if changes := sorted(known.keys() ^ set(names)):
        raise ValueError(
            f"{data_dir} has other files than {path} recorded: {', '.join(changes[:5])} "
            "came or went; bring the old state back, or delete that manifest to start over"
        )
    files = {name: check_entry(data_dir / name, known[name], path) for name in names}
    manifest = {"data_dir": str(data_dir), "val_shard": val_shard, "files": files}
    if val_shard.startswith(TAIL):
        manifest["tail"] = old["tail"] if old else find_tail(data_dir / file_of(val_shard))
    return manifest


def check_entry(file: Path, known: dict[str, Any] | None, manifest: Path) -> dict[str, Any]:
    """The manifest's entry of a file: bytes, time of the last change, SHA-256."""
    stat = file.stat()
    entry: dict[str, Any] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if known and entry.items() <= known.items():
        return known
    if stat.st_size > LARGE_BYTES:
        print(printable(f"reading {file} ({stat.st_size / 1e9:.1f} GB)"), flush=True)
    if not known:
        check_file(file)
        if not deque(file_texts(file, Counter()), maxlen=1):  # read to the end
            raise ValueError(f"{file} holds no text; remove it or leave it out")
    entry["sha256"] = sha256_file(file)
    if known and entry["sha256"] != known["sha256"]:
        raise ValueError(changed_file(file, manifest))
    return entry


# ---- A data set on the hub -----------------------------------------------------------------------
# Pinned to the commit of its first use. A file is downloaded when it is first read.


@dataclass(frozen=True)
class HubSource(Source):
    """Parquet files of a data set repository at one commit, fetched when first read."""

    repo: HubRepo

    def missing_bytes(self, shards: Iterable[str]) -> int:
        missing = {f for f in map(file_of, shards) if not (self.repo.folder / f).exists()}
        return sum(self.files[file]["bytes"] for file in missing)

    def fetch(self, shard: str) -> Path:
        return self.repo.fetch(file_of(shard))


def open_hub(cfg: FirstUseConfig) -> HubSource:
    """Open a repository of the hub; its manifest is written once the settings are checked."""
    name = cfg.dataset or ""
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(
            f"--dataset={name}: a repository of the hub is <owner>/<name>; "
            "else `embedded`, the built-in data set, or --data_dir for a local folder"
        )
    folder = base_dir() / "data" / name.replace("/", "--")

    def choose(files: Sequence[str]) -> dict[str, str]:
        if not files:
            raise ValueError(f"{name} holds no parquet file; --data_dir reads jsonl from a folder")
        val_shard = choose_val_shard(cfg, name, files, None, folder)
        choose_shards(cfg, name, files, val_shard)  # may reject: then nothing is recorded
        return {"val_shard": val_shard}

    repo, manifest = open_repo(
        name, folder, (".parquet",), find_damage, check_file, cfg.revision, choose
    )
    files = manifest["files"]
    val_shard = choose_val_shard(cfg, name, list(files), manifest["val_shard"], folder)
    train = choose_shards(cfg, name, files, val_shard)
    tail = open_tail(repo, val_shard) if val_shard.startswith(TAIL) else {}
    split = {"tail_start": tail["tail_start"]} if tail else {}
    identity = {"kind": "hub", "dataset": name, "commit": repo.commit, **split}
    origin = {"dataset": name, "revision": repo.commit, "val_shard": val_shard, **split}
    return HubSource(name, train, val_shard, identity, origin, repo.manifest, files, tail, repo)


def open_tail(repo: HubRepo, val_shard: str) -> dict[str, int]:
    """
    The tail of a repository's only file, which is fetched at first use. Nothing is recorded of a
    file that cannot be divided.
    """
    manifest = read_json(repo.manifest)
    if "tail" not in manifest:
        path = repo.fetch(file_of(val_shard))
        try:
            tail = find_tail(path)
        except ValueError:
            repo.forget(path)
            raise
        manifest = repo.record(lambda manifest: manifest | {"tail": tail})
    return manifest["tail"]


# ---- Opening a source ----------------------------------------------------------------------------


Prepare = Callable[[str, int | None], Any]  # name of a data set, number of shards


def open_generated(cfg: FirstUseConfig, manifest: Path) -> LocalSource:
    """
    Open data/<name>/ under the base directory, which a program wrote: text/<shard>.jsonl and a
    manifest. Shards may be added later; `identity` in the manifest decides their text.
    """
    name, written = cfg.dataset or "", read_json(manifest)
    files, val_shard, identity = (written[key] for key in ("files", "val_shard", "identity"))
    if cfg.val_shard not in (None, val_shard) or cfg.revision is not None:
        raise ValueError(
            f"--val_shard={cfg.val_shard}, --revision={cfg.revision}: the data set {name} has "
            f"one revision and one validation shard, {val_shard}; leave both out"
        )
    train = choose_shards(cfg, name, files, val_shard)
    origin, text = {"dataset": name, "identity": identity}, manifest.with_name("text")
    return LocalSource(
        name, train, val_shard, identity, origin, manifest, files, {}, text, suffix=".jsonl"
    )


def open_source(
    cfg: DataConfig, recorded: dict[str, Any] | None = None, prepare: Prepare | None = None
) -> Source:
    """
    The source that `cfg` names; or, where it names none, the one an earlier stage `recorded`.

    recorded: `Source.describe()` of then. Settings given in `cfg` beside it still apply.
    prepare: called before a data set is opened, to write one that a program generates.
    Raises ValueError, naming the fix, when there is nothing to open or it is not what it was; then
    nothing is recorded.
    """
    wanted, must_be = FirstUseConfig(**asdict(cfg)), None
    if wanted.dataset is None and wanted.data_dir is None:
        if recorded is None:
            raise ValueError(
                "nothing says where text comes from: give --dataset=<owner>/<name>, "
                "--dataset=embedded or --data_dir=<folder>"
            )
        if "mixture" in recorded:
            raise ValueError(
                f"the text was a mixture, {recorded['mixture']}: name one of its texts by "
                "--dataset or --data_dir"
            )
        must_be = recorded["fingerprint"] if wanted == FirstUseConfig() else None
        wanted = FirstUseConfig(
            dataset=recorded.get("dataset"),
            data_dir=recorded.get("data_dir"),
            num_shards=wanted.num_shards or recorded["num_shards"],
            revision=wanted.revision or recorded.get("revision"),
            val_shard=wanted.val_shard or recorded.get("val_shard"),
        )
    if wanted.data_dir is not None:
        return open_folder(wanted, must_be)
    name = wanted.dataset or ""
    if prepare:
        prepare(name, wanted.num_shards)
    manifest = base_dir() / "data" / name / "manifest.json"
    is_generated = "/" not in name and manifest.is_file() and "identity" in read_json(manifest)
    source = open_generated(wanted, manifest) if is_generated else open_hub(wanted)
    require_recorded(source, must_be)
    return source


def save_last_source(described: Mapping[str, Any], tokenizer_tag: str) -> None:
    """Record the text a stage used, for later stages with the same tokenizer that name none."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", dict(described))


def load_last_source(tokenizer_tag: str) -> dict[str, Any] | None:
    """What `save_last_source` recorded last, for `open_source`."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None
