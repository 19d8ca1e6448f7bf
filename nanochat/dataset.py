"""
Text to train on: a data set on the hub, a local folder, or one that a program of ours wrote.

    DataConfig -> open_source -> Source: ordered shards -> documents(shard) -> lists of texts

The first use of a source writes a manifest under the base directory: commit, list of files,
validation shard, SHA-256 of every file as it comes in. From then on it is enforced: a later run
reads the very same text or is rejected. Only a hub source uses the network.
"""

import itertools
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from nanochat.text_files import SUFFIXES, check_file, file_texts, in_batches

# ---- Sources of text: ordered, frozen shards with a fingerprint ----------------------------------


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
    revision: str | None = None
    """Branch, tag or commit of the repository. Default: main at first use, pinned from then on."""
    val_shard: str | None = None
    """File kept for validation. Default: the last one in the order of names; of a single file, its
    last documents (about 1% of the text)."""
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
class Source(ABC):
    """An ordered, frozen list of training shards and one validation shard."""

    name: str
    train_shards: list[str]
    val_shard: str

    @property
    def fingerprint(self) -> str:
        """Names the text: the data and the ordered list of shards taken from it."""
        return fingerprint(
            {
                "identity": self.identity,
                "train_shards": self.train_shards,
                "val_shard": self.val_shard,
            }
        )

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the text in a shard of a given name; not which shards are taken."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON-ready; `open_source(DataConfig(), recorded)` opens the very same source from it."""

    @abstractmethod
    def shard_sizes(self) -> dict[str, int]:
        """Bytes of each shard as it is stored."""

    def missing_bytes(self, shards: Iterable[str]) -> int:
        """How much would have to be downloaded to read these shards."""
        return 0

    def fetch(self, shard: str) -> Path | None:
        """Make a shard readable: download what is missing, verify what is there."""
        return None

    @abstractmethod
    def documents(self, shard: str, skipped: Counter | None = None) -> Iterator[list[str]]:
        """
        The texts of a shard, in order, in lists of about BATCH_CHARS characters.

        Null, empty and undecodable texts are left out, and counted in `skipped` under `null`,
        `empty` and `undecodable`. Raises ValueError naming a file that cannot be read.
        """

    def texts(self, shard: str, most: int | None = None) -> Iterator[str]:
        """The texts of a shard one by one, at most so many from the first."""
        return itertools.islice(itertools.chain.from_iterable(self.documents(shard)), most)

    def shards(self) -> list[str]:
        """All shards, the validation shard last."""
        return [*self.train_shards, self.val_shard]


@dataclass(frozen=True)
class FileSource(Source):
    """
    A source whose shards are files, described by the manifest in `folder`.

    A single file is two shards: its documents before number `tail_start`, and those from there on.
    """

    folder: Path
    tail_start: int | None
    """None where training and validation have files of their own."""

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def tail(self) -> dict[str, int]:
        """What `identity` and `describe` say of a single file."""
        return {} if self.tail_start is None else {"tail_start": self.tail_start}

    @property
    @abstractmethod
    def origin(self) -> dict[str, str]:
        """The settings that open the source again."""

    def describe(self) -> dict[str, Any]:
        return {
            **self.origin,
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
            **self.tail,
        }

    @abstractmethod
    def fetch(self, shard: str) -> Path: ...

    def shard_sizes(self) -> dict[str, int]:
        manifest = read_json(self.manifest)
        sizes = {shard: manifest["files"][file_of(shard)]["bytes"] for shard in self.shards()}
        if self.tail_start is not None:
            tail = manifest["tail"]
            share = (tail["documents"] - tail["tail_start"]) / tail["documents"]
            sizes[self.val_shard] = int(sizes[self.val_shard] * share)
        return sizes

    def documents(self, shard: str, skipped: Counter | None = None) -> Iterator[list[str]]:
        path, skips = self.fetch(shard), Counter()
        texts = file_texts(path, skips)
        if shard.startswith(TAIL):
            deque(itertools.islice(texts, self.tail_start), maxlen=0)
            skips.clear()  # counted with the training part
        else:
            texts = itertools.islice(texts, self.tail_start)
        batch = None
        for batch in in_batches(texts):
            yield batch
        if skipped is not None:
            skipped.update(skips)
        if batch is None:
            raise ValueError(f"{path} holds no text; {self.fix}")

    @property
    @abstractmethod
    def fix(self) -> str:
        """How to go on without a file that cannot be used."""


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


def choose_shards(cfg: DataConfig, where: str, names: Sequence[str], val_shard: str) -> list[str]:
    """The training shards: all but the validation shard, as many as asked for."""
    train = [name for name in names if name != val_shard]
    if not train:
        raise ValueError(
            f"{val_shard} is recorded as validation shard and is the only file of {where}, so none "
            f"is left for training; delete its folder below {base_dir() / 'data'} to start over"
        )
    if cfg.num_shards is not None and cfg.num_shards > len(train):
        raise ValueError(
            f"--num_shards={cfg.num_shards}, but {where} has {len(train)} training shards; use "
            f"--num_shards={len(train)}, or leave it out for all of them"
        )
    return train[: cfg.num_shards]


def choose_val_shard(cfg: DataConfig, where: str, names: Sequence[str]) -> str:
    """The validation shard of a source that is opened for the first time."""
    options = names if len(names) > 1 else [TAIL + names[0]]
    if cfg.val_shard in (None, *options):
        return cfg.val_shard or options[-1]
    what = "needs it for training" if cfg.val_shard in names else "has no such file"
    fix = "leave --val_shard out to hold out the last documents of its only file"
    if len(names) > 1:
        fix = f"its {len(names)} files are {names[0]} to {names[-1]}"
    raise ValueError(f"--val_shard={cfg.val_shard}: {where} {what}; {fix}")


def check_val_shard(cfg: DataConfig, manifest: dict[str, Any], path: Path, delete: Path) -> None:
    """Raise ValueError when another validation shard is asked for than the recorded one."""
    if cfg.val_shard not in (None, manifest["val_shard"]):
        raise ValueError(
            f"--val_shard={cfg.val_shard}, but {path} names {manifest['val_shard']}, and earlier "
            f"stages may have trained on {cfg.val_shard}; delete {delete} to start over"
        )


# ---- A local folder ------------------------------------------------------------------------------
# Its manifest, with the SHA-256 of every file, is under the base directory; the folder is only
# read.


LARGE_BYTES = 1 << 28  # reading more than that is announced


@dataclass(frozen=True)
class LocalSource(FileSource):
    """Files in a local folder, which may be read-only; their digests are its identity."""

    data_dir: Path
    digests: dict[str, str]

    @classmethod
    def open(cls, cfg: DataConfig, recorded: str | None = None) -> "LocalSource":
        """
        Open a folder; at first use, after all checks, write its manifest.

        recorded: the fingerprint that the source must have. Raises ValueError naming the fix.
        """
        data_dir = Path(cfg.data_dir or "").expanduser().resolve()
        if cfg.revision is not None:
            raise ValueError(
                f"--revision={cfg.revision} is for data sets of the hub; leave it out with "
                "--data_dir"
            )
        if data_dir.is_file():
            raise ValueError(
                f"--data_dir={cfg.data_dir} is a file; use the folder it is in: "
                f"--data_dir={data_dir.parent}"
            )
        if not data_dir.is_dir():
            raise ValueError(f"--data_dir={cfg.data_dir}: there is no such folder; check the path")
        folder = base_dir() / "data" / f"{data_dir.name}-{fingerprint(str(data_dir))[:8]}"
        path = folder / "manifest.json"
        with locked(folder / ".lock", f"reading {data_dir}"):
            old = read_json(path) if path.exists() else None
            manifest = check_folder(cfg, data_dir, path, old)
            digests = {name: entry["sha256"] for name, entry in manifest["files"].items()}
            val_shard = manifest["val_shard"]
            train = choose_shards(cfg, str(data_dir), list(digests), val_shard)
            start = manifest["tail"]["tail_start"] if "tail" in manifest else None
            source = cls(str(data_dir), train, val_shard, folder, start, data_dir, digests)
            require_recorded(source, recorded)
            if manifest != old:
                write_json(path, manifest)
        return source

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "local", "files": self.digests, **self.tail}

    @property
    def origin(self) -> dict[str, str]:
        return {"data_dir": str(self.data_dir)}

    def fetch(self, shard: str) -> Path:
        path = self.path_of(shard)
        if not path.is_file() or sha256_file(path) != self.digests[file_of(shard)]:
            raise ValueError(changed_file(path, self.manifest))
        return path

    def path_of(self, shard: str) -> Path:
        """The file that holds a shard."""
        return self.data_dir / file_of(shard)

    @property
    def fix(self) -> str:
        return f"remove it, and delete {self.manifest} to start over"


def changed_file(path: Path, manifest: Path) -> str:
    """The refusal of a file that is not what it was."""
    return (
        f"{path} is not the file it was: its SHA-256 differs from {manifest}; "
        "bring the old file back, or delete that manifest to accept the new one"
    )


def find_files(data_dir: Path) -> list[str]:
    """
    The names of the files with text below a folder, sorted; links to folders are followed.

    Raises ValueError for a file that is none and for a link that makes text come twice, OSError
    for a folder that cannot be read.
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
    cfg: DataConfig, data_dir: Path, path: Path, old: dict[str, Any] | None
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
    if old:
        check_val_shard(cfg, old, path, delete=path)
        if changes := sorted(old["files"].keys() ^ set(names)):
            raise ValueError(
                f"{data_dir} has other files than {path} recorded: {', '.join(changes[:5])} "
                "came or went; bring the old state back, or delete that manifest to start over"
            )
    known = old["files"] if old else {}
    val_shard = old["val_shard"] if old else choose_val_shard(cfg, str(data_dir), names)
    files = {name: check_entry(data_dir / name, known.get(name), path) for name in names}
    manifest = {"data_dir": str(data_dir), "val_shard": val_shard, "files": files}
    if val_shard.startswith(TAIL):
        manifest["tail"] = old["tail"] if old else find_tail(data_dir / file_of(val_shard))
    return manifest


def check_entry(file: Path, known: dict[str, Any] | None, manifest: Path) -> dict[str, Any]:
    """What the manifest says of a file: bytes, time of the last change, SHA-256."""
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
class HubSource(FileSource):
    """Parquet files of a data set repository at one commit, fetched when first read."""

    commit: str

    @classmethod
    def open(cls, cfg: DataConfig) -> "HubSource":
        name = cfg.dataset or ""
        if name.count("/") != 1 or not all(name.split("/")):
            raise ValueError(
                f"--dataset={name}: a repository of the hub is <owner>/<name>; "
                "else `embedded`, the built-in data set, or --data_dir for a local folder"
            )

        def choose(files: Sequence[str]) -> dict[str, str]:
            if not files:
                raise ValueError(
                    f"{name} holds no parquet file; --data_dir reads jsonl from a folder"
                )
            val_shard = choose_val_shard(cfg, name, files)
            choose_shards(cfg, name, files, val_shard)  # may refuse, before anything is recorded
            return {"val_shard": val_shard}

        folder = base_dir() / "data" / name.replace("/", "--")
        repo, manifest = open_repo(name, folder, (".parquet",), cfg.revision, choose)
        check_val_shard(cfg, manifest, repo.manifest, delete=folder)
        val_shard = manifest["val_shard"]
        train = choose_shards(cfg, name, list(manifest["files"]), val_shard)
        start = open_tail(repo, val_shard) if val_shard.startswith(TAIL) else None
        return cls(name, train, val_shard, folder, start, repo.commit)

    @property
    def repo(self) -> HubRepo:
        return HubRepo(self.name, self.folder, self.commit)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "hub", "dataset": self.name, "commit": self.commit, **self.tail}

    @property
    def origin(self) -> dict[str, str]:
        return {"dataset": self.name, "revision": self.commit}

    def missing_bytes(self, shards: Iterable[str]) -> int:
        files = self.repo.files()
        missing = {f for f in map(file_of, shards) if not (self.folder / f).exists()}
        return sum(files[file]["bytes"] for file in missing)

    def fetch(self, shard: str) -> Path:
        return self.repo.fetch(file_of(shard), check_file)

    @property
    def fix(self) -> str:
        return f"use fewer --num_shards, or delete {self.folder} and name another --revision"


def open_tail(repo: HubRepo, val_shard: str) -> int:
    """
    The first document of the part of a repository's only file that is for validation.

    Fetches the file at first use. One that cannot be divided is refused, and nothing is recorded.
    """
    file = file_of(val_shard)
    if "tail" not in read_json(repo.manifest):
        path = repo.fetch(file, check_file)
        try:
            tail = find_tail(path)
        except ValueError:
            repo.manifest.unlink()
            path.unlink()
            raise
        with locked(repo.folder / ".lock", "writing the manifest"):
            write_json(repo.manifest, {**read_json(repo.manifest), "tail": tail})
    return read_json(repo.manifest)["tail"]["tail_start"]


# ---- A data set that a program wrote -------------------------------------------------------------
# data/<name>/ under the base directory: text/<shard>.jsonl and a manifest that came with them. The
# program may add shards later; what decides their text is the `identity` in the manifest.


@dataclass(frozen=True)
class GeneratedSource(LocalSource):
    """Files that a program wrote, opened by the name of their data set."""

    written_as: dict[str, Any]
    """The manifest's `identity`."""

    @classmethod
    def open(cls, cfg: DataConfig, recorded: str | None = None) -> "GeneratedSource":
        name = cfg.dataset or ""
        folder = base_dir() / "data" / name
        manifest = read_json(folder / "manifest.json")
        val_shard = manifest["val_shard"]
        if cfg.val_shard not in (None, val_shard) or cfg.revision is not None:
            raise ValueError(
                f"--val_shard={cfg.val_shard}, --revision={cfg.revision}: the data set {name} has "
                f"one revision and one validation shard, {val_shard}; leave both out"
            )
        digests = {shard: entry["sha256"] for shard, entry in manifest["files"].items()}
        train = choose_shards(cfg, name, list(digests), val_shard)
        text, identity = folder / "text", manifest["identity"]
        source = cls(name, train, val_shard, folder, None, text, digests, identity)
        require_recorded(source, recorded)
        return source

    @property
    def identity(self) -> dict[str, Any]:
        return self.written_as

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": self.name,
            "identity": self.identity,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

    def path_of(self, shard: str) -> Path:
        return self.data_dir / f"{shard}.jsonl"


def is_generated(name: str) -> bool:
    """Whether the base directory holds a data set of that name that a program wrote."""
    path = base_dir() / "data" / name / "manifest.json"
    return "/" not in name and path.is_file() and "identity" in read_json(path)


# ---- Opening a source ----------------------------------------------------------------------------


Prepare = Callable[[str, int | None], Any]  # name of a data set, number of shards


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
    must_be = None
    if cfg.dataset is None and cfg.data_dir is None:
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
        must_be = recorded["fingerprint"] if cfg == DataConfig() else None
        cfg = DataConfig(
            dataset=recorded.get("dataset"),
            data_dir=recorded.get("data_dir"),
            revision=cfg.revision or recorded.get("revision"),
            val_shard=cfg.val_shard or recorded.get("val_shard"),
            num_shards=cfg.num_shards or recorded["num_shards"],
        )
    if cfg.data_dir is not None:
        return LocalSource.open(cfg, must_be)
    if prepare:
        prepare(cfg.dataset or "", cfg.num_shards)
    if is_generated(cfg.dataset or ""):
        return GeneratedSource.open(cfg, must_be)
    source = HubSource.open(cfg)
    require_recorded(source, must_be)
    return source


def save_last_source(described: Mapping[str, Any], tokenizer_tag: str) -> None:
    """Record the text a stage used, for later stages with the same tokenizer that name none."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", dict(described))


def load_last_source(tokenizer_tag: str) -> dict[str, Any] | None:
    """What `save_last_source` recorded last, for `open_source`."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None
