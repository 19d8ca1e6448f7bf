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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import base_dir, fingerprint, locked, read_json, sha256_file, write_json
from nanochat.config import require_at_least
from nanochat.hub import HubRepo, pin_repo

# ---- The texts in a file -------------------------------------------------------------------------
# Parquet with a column `text`, or one JSON object with a `text` per line. Memory stays bounded by
# READ_ROWS rows, whatever the size of the file.


SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
READ_ROWS = 256  # parquet rows decoded at a time
BATCH_CHARS = 1 << 22


def find_damage(path: Path, whole: bool = False) -> str | None:
    """
    Why a file cannot be read, or None.

    Opens parquet files; with `whole`, decodes all content of parquet and JSON lines, which finds
    damage where no digest is known.
    """
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                deque(file.iter_batches(READ_ROWS) if whole else (), maxlen=0)
        elif whole:
            deque(json_lines(path), maxlen=0)
    except (pa.ArrowException, OSError) as error:
        return f"it is no readable parquet file ({str(error).splitlines()[0]})"
    except ValueError as error:
        return str(error)
    return None


def find_problem(path: Path, whole: bool = False) -> str | None:
    """Why a file is no file of texts, or None: `find_damage`, or no column `text` of strings."""
    problem = "it is empty" if path.stat().st_size == 0 else find_damage(path, whole)
    if problem or path.suffix != ".parquet":
        return problem
    schema = pq.read_schema(path)
    if "text" not in schema.names:
        return f"it has no column `text`; its columns are {', '.join(schema.names)}"
    column = schema.field("text").type
    try:
        pa.array([], column).cast(pa.large_binary())
    except pa.ArrowException:
        return f"its column `text` holds {column}, not strings"
    return None


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
            found = ", ".join(fields)[:200] or "no fields"
            raise line_error(path, number, f"not an object with a string `text` but with {found}")
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
        raise line_error(path, number, f"not JSON ({type(error).__name__}: {error})") from error


def line_error(path: Path, number: int, problem: str) -> ValueError:
    """The error for a line of a file, with the fix."""
    fix = "correct the line or leave the file out"
    return ValueError(f"{path}, line {number}: {problem}; {fix}")


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
    which needs no network; or a local folder with .parquet, .jsonl or .jsonl.gz files that have a
    field `text`: any name that exists on the disk or begins with `.`, `/` or `~`. Default: what the
    earlier stages used."""
    num_shards: int | None = None
    """Number of training shards to use, counted from the first. Default: all; they are downloaded
    only as they are needed."""

    def __post_init__(self) -> None:
        require_at_least(self, num_shards=1)


@dataclass(frozen=True)
class FirstUseConfig(DataConfig):
    """Also the settings that the first use of a source decides for all later ones."""

    revision: str | None = None
    """Branch, tag or commit of the repository. Default: main at first use, pinned from then on."""
    val_shard: str | None = None
    """File kept for validation. Default: the last one in the order of names; of a single file, its
    last documents (about 1% of the text)."""


@dataclass(frozen=True)
class Source:
    """An ordered, frozen list of training shards and one validation shard, all of them files."""

    name: str
    """How --dataset names it: a repository, the path of a folder, or a built-in data set."""
    train_shards: list[str]
    val_shard: str
    identity: dict[str, Any]
    """Decides the text in a shard of a given name; not which shards are taken."""
    files: dict[str, dict[str, Any]] = field(compare=False)
    """File -> bytes and sha256, from the manifest."""
    tail: dict[str, int]
    """Of a single file: `tail_start`, the first document for validation, of all `documents`."""
    manifest: Path
    folder: Path
    """Of the files."""
    repo: HubRepo | None
    """Fetches the files of a hub data set; the other ones are there."""

    @property
    def fingerprint(self) -> str:
        """Names the text: the data and the ordered list of shards taken from it."""
        shards = {"train_shards": self.train_shards, "val_shard": self.val_shard}
        return fingerprint({"identity": self.identity, **shards})

    def describe(self) -> dict[str, Any]:
        """JSON-ready; `open_source(DataConfig(), recorded)` opens the very same source from it."""
        return {
            "dataset": self.name,
            "revision": self.repo and self.repo.commit,
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

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

    def path(self, shard: str) -> Path:
        """Where the file of a shard is, or will be; shards of built-in data sets have no suffix."""
        file = file_of(shard)
        return self.folder / (file if file.endswith(SUFFIXES) else f"{file}.jsonl")

    def missing_bytes(self, shards: Iterable[str]) -> int:
        """How much would have to be downloaded to read these shards."""
        missing = {file_of(shard) for shard in shards if not self.path(shard).exists()}
        return sum(self.files[file]["bytes"] for file in missing)

    def fetch(self, shard: str) -> Path:
        """Make a shard readable: download what is missing, verify what is there."""
        if self.repo:
            return self.repo.fetch(file_of(shard))
        require_unchanged(self.path(shard), self.files[file_of(shard)], self.manifest)
        return self.path(shard)

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
            fix = f"use fewer --num_shards, or delete {self.manifest} to start over"
            raise ValueError(f"{path} holds no text; {fix}")

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
    lengths = np.fromiter(map(len, file_texts(path, Counter())), np.int64)
    documents, chars = len(lengths), int(lengths.sum())
    if documents < 2:
        why = f"holds {documents} documents with text, but training and validation need one each"
        fix = "divide it into documents, or add a file with validation text"
        raise ValueError(f"{path} is the only file and {why}; {fix}")
    from_end = np.cumsum(lengths[::-1])  # characters of the last document, the last two, ...
    wanted = min(chars / 10, max(TAIL_SHARE * chars, TAIL_CHARS))
    fewest = int(np.searchsorted(from_end, wanted)) + 1
    half = int(np.searchsorted(from_end, chars / 2, side="right"))
    tail = max(1, min(fewest, half, documents // 2))
    share = f"{from_end[tail - 1] / chars:.1%} of the text"
    held_out = f"the last {tail:,} of its {documents:,} documents ({share})"
    print(f"{path} is the only file: {held_out} are held out for validation", flush=True)
    return {"tail_start": documents - tail, "documents": documents}


# ---- Opening a source ----------------------------------------------------------------------------
# Its manifest is under the base directory. It is written at first use, after all checks.


Prepare = Callable[[str, int | None], Any]  # name of a data set, number of shards
LARGE_BYTES = 1 << 28  # reading more than that is announced


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
    if wanted.dataset is None:
        if recorded is None or "mixture" in recorded:
            ways = "--dataset=<owner>/<name>, --dataset=embedded or --dataset=<folder>"
            raise ValueError(f"nothing names a single text: give {ways}")
        must_be = recorded["fingerprint"] if wanted == FirstUseConfig() else None
        names = ("num_shards", "revision", "val_shard")
        own = {name: getattr(wanted, name) for name in names}
        settings = {k: recorded.get(k) if own[k] is None else own[k] for k in names}
        # A folder was once named by a flag of its own
        wanted = FirstUseConfig(recorded.get("dataset") or recorded["data_dir"], **settings)
    name = wanted.dataset or ""
    if prepare:
        prepare(name, wanted.num_shards)
    of_hub = wanted.revision is not None  # no other text has revisions
    if not of_hub and name.startswith((".", "/", "~")):
        return open_folder(wanted, must_be)
    home = base_dir() / "data" / name.replace("/", "--")
    path = home / "manifest.json"
    if not of_hub and path.is_file() and "identity" in (manifest := read_json(path)):
        source = make_source(wanted, manifest, path, home / "text")
    elif not of_hub and os.path.exists(name):
        return open_folder(wanted, must_be)
    else:
        source = open_hub(wanted, path)
    require_recorded(source, must_be)
    return source


def make_source(
    cfg: FirstUseConfig, manifest: dict, path: Path, folder: Path, repo: HubRepo | None = None
) -> Source:
    """The source of a `manifest` that is at `path`, its files in `folder`, `repo` fetches them."""
    files, tail = manifest["files"], manifest.get("tail", {})
    train, val_shard = choose_shards(cfg, list(files), manifest["val_shard"], path)
    name, split = str(cfg.dataset), {"tail_start": tail["tail_start"]} if tail else {}
    if repo:
        identity = {"kind": "hub", "dataset": name, "commit": repo.commit, **split}
    else:  # a built-in data set says what decides its texts
        digests = {file: entry["sha256"] for file, entry in files.items()}
        identity = manifest.get("identity") or {"kind": "local", "files": digests, **split}
    return Source(name, train, val_shard, identity, files, tail, path, folder, repo)


def choose_shards(
    cfg: FirstUseConfig, files: list[str], recorded: str | None, path: Path
) -> tuple[list[str], str]:
    """
    The training shards, as many as asked for, and the validation shard: the one that the manifest
    at `path` has recorded; at first use the one asked for, or the last.
    """
    options = [recorded] if recorded else files if len(files) > 1 else [TAIL + files[0]]
    val_shard = cfg.val_shard or options[-1]
    if val_shard not in options:
        why = f"has {len(files)} files, {files[0]} to {files[-1]}; name one of several"
        if recorded:
            why = f"keeps {recorded}, and later stages rely on that: delete {path} to start over"
        raise ValueError(f"--val_shard={val_shard}: {cfg.dataset} {why}, or leave --val_shard out")
    train = [file for file in files if file != val_shard]
    if cfg.num_shards is not None and not 1 <= cfg.num_shards <= len(train):
        raise ValueError(
            f"--num_shards={cfg.num_shards}, but {cfg.dataset} has {len(train)} training shards; "
            f"use --num_shards={len(train)}, or leave it out for all of them"
        )
    return train[: cfg.num_shards], val_shard


def require_recorded(source: Source, recorded: str | None) -> None:
    """Raise ValueError unless the source has the `recorded` fingerprint, where there is one."""
    if recorded not in (None, source.fingerprint):
        raise ValueError(
            f"{source.name} is not the text that was recorded: fingerprint {source.fingerprint}, "
            f"recorded {recorded}; bring the old files back, or accept the new ones by --dataset"
        )


def save_last_source(described: Mapping[str, Any], tokenizer_tag: str) -> None:
    """Record the text a stage used, for later stages with the same tokenizer that name none."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", dict(described))


def load_last_source(tokenizer_tag: str) -> dict[str, Any] | None:
    """What `save_last_source` recorded last, for `open_source`."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None


# ---- A local folder ------------------------------------------------------------------------------
# It is only read. A file is hashed when it is new or its size or time changed.


def open_folder(cfg: FirstUseConfig, recorded: str | None) -> Source:
    """
    The source of a folder, which must have the `recorded` fingerprint.

    Raises ValueError naming files that came, went, changed or cannot be read.
    """
    folder = Path(cfg.dataset or "").expanduser().resolve()
    if not folder.is_dir():
        is_file = folder.is_file()
        fix = f"use the folder it is in: --dataset={folder.parent}" if is_file else "check the path"
        raise ValueError(f"--dataset={cfg.dataset}: there is no such folder; {fix}")
    name = str(folder)
    cfg = replace(cfg, dataset=name)
    path = base_dir() / "data" / f"{folder.name}-{fingerprint(name)[:8]}" / "manifest.json"
    with locked(path.parent / ".lock", f"reading {folder}"):
        old = read_json(path) if path.exists() else {}
        names = find_files(folder)
        if not names:
            fix = "add one whose rows or lines have a field `text`"
            raise ValueError(f"{folder} holds no {', '.join(SUFFIXES)} file; {fix}")
        known = old.get("files", dict.fromkeys(names))
        if changes := sorted(known.keys() ^ set(names)):
            raise ValueError(
                f"{folder} has other files than {path} recorded: {', '.join(changes[:5])} "
                "came or went; bring the old state back, or delete that manifest to start over"
            )
        _, val_shard = choose_shards(cfg, names, old.get("val_shard"), path)
        files = {file: check_entry(folder / file, known[file], path) for file in names}
        manifest = {"data_dir": name, "val_shard": val_shard, "files": files}
        if val_shard.startswith(TAIL):
            manifest["tail"] = old.get("tail") or find_tail(folder / file_of(val_shard))
        source = make_source(cfg, manifest, path, folder)
        require_recorded(source, recorded)
        if manifest != old:
            write_json(path, manifest)
    return source


def require_unchanged(path: Path, known: dict[str, Any], manifest: Path) -> None:
    """Raise ValueError for a file that is not as the `manifest` has it."""
    if not path.is_file() or sha256_file(path) != known["sha256"]:
        fix = "bring the old file back, or delete that manifest to accept the new one"
        raise ValueError(f"{path} is not the file it was by the SHA-256 in {manifest}; {fix}")


def find_files(folder: Path) -> list[str]:
    """
    The names of the files with text below a folder, sorted; links to folders are followed.

    Raises ValueError for an entry that is no regular file and for a link that makes text come
    twice, OSError for a folder that cannot be read.
    """

    def stop(error: OSError) -> None:
        raise error

    names, seen = [], {}
    for below, _, files in os.walk(folder, onerror=stop, followlinks=True):
        real = Path(below).resolve()
        if real in seen or (seen and folder.is_relative_to(real)):
            other = seen.get(real, folder)
            raise ValueError(f"{below} leads to {real}, which is read as {other} too; remove one")
        seen[real] = below
        paths = [Path(below, f) for f in files if f.endswith(SUFFIXES) and not f.startswith(".")]
        if wrong := [path for path in paths if not path.is_file()]:
            raise ValueError(f"{wrong[0]} is a broken link or no regular file; remove it")
        names += [path.relative_to(folder).as_posix() for path in paths]
    return sorted(names)


def check_entry(file: Path, known: dict[str, Any] | None, manifest: Path) -> dict[str, Any]:
    """
    The manifest's entry of a file: bytes, time of the last change, SHA-256. Raises ValueError where
    it is not as `known`; a new file is read to its end.
    """
    stat = file.stat()
    entry: dict[str, Any] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if known and entry.items() <= known.items():
        return known
    if stat.st_size > LARGE_BYTES:
        print(f"reading {str(file)!r} ({stat.st_size / 1e9:.1f} GB)", flush=True)
    if known:
        require_unchanged(file, known, manifest)
        return {**entry, "sha256": known["sha256"]}
    problem = find_problem(file)
    if not problem and not deque(file_texts(file, Counter()), maxlen=1):  # read to the end
        problem = "it holds no text"
    if problem:
        raise ValueError(f"{file}: {problem}; replace it, remove it or leave it out")
    return {**entry, "sha256": sha256_file(file)}


# ---- A data set on the hub -----------------------------------------------------------------------
# Pinned to the commit of its first use. A file is downloaded when it is first read.


def open_hub(cfg: FirstUseConfig, path: Path) -> Source:
    """The source of a repository of the hub; `path` is that of its manifest."""
    name = cfg.dataset or ""
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(
            f"--dataset={name}: a repository of the hub is <owner>/<name>; else name `embedded` or "
            "a local folder, which exists or begins with ., / or ~, and leave --revision out"
        )
    with locked(path.with_name(".lock"), f"resolving {name}"):
        manifest = pin_repo(name, path, (".parquet",), cfg.revision)
        files = list(manifest["files"])
        if not files:
            raise ValueError(f"{name} holds no parquet file; jsonl is read from a local folder")
        _, val_shard = choose_shards(cfg, files, manifest.get("val_shard"), path)
        if not path.exists():
            manifest["val_shard"] = val_shard
            write_json(path, manifest)
    repo = HubRepo(name, path.parent, manifest["commit"], find_problem)
    if val_shard.startswith(TAIL) and "tail" not in manifest:
        file = repo.fetch(file_of(val_shard))
        try:
            manifest["tail"] = find_tail(file)
        except ValueError:
            repo.manifest.unlink()
            file.unlink()
            raise
        repo.record(lambda recorded: {**recorded, "tail": manifest["tail"]})
    return make_source(cfg, manifest, path, repo.folder, repo)
