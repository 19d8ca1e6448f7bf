"""
What a source of text is: ordered, frozen shards with a fingerprint, each a stream of documents.

    DataConfig -> Source: train_shards, val_shard -> documents(shard) -> lists of texts

`FileSource` is what a folder and the hub share: files, described by a manifest. Knows nothing of
where files come from, nor of tokens or rows.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, fingerprint, read_json
from nanochat.text_files import file_texts, in_batches

TAIL = "tail-of-"  # and the name of the only file: the shard of its last documents
TAIL_SHARE = 0.01  # of the characters of the file; of a short one TAIL_CHARS, but at most a tenth
TAIL_CHARS = 8192  # about one row of 2,048 tokens


@dataclass(frozen=True)
class DataConfig:
    dataset: str | None = None
    """Where text comes from: a data set repository on the hub with parquet files that have a
    column `text`, such as karpathy/climbmix-400b-shuffle; or `embedded`, the built-in world, which
    needs no network. Default: what the earlier stages used."""
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
        """Bytes of each shard as it is stored; of a generated one, of its text, roughly."""

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
        some = False
        for batch in in_batches(texts):
            some = True
            yield batch
        if skipped is not None:
            skipped.update(skips)
        if not some:
            raise ValueError(f"{path} holds no text; {self.without_it}")

    @property
    @abstractmethod
    def without_it(self) -> str:
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
    if cfg.val_shard in names:
        raise ValueError(
            f"--val_shard={cfg.val_shard} is the only file of {where}, so none would be left for "
            "training; leave --val_shard out to hold out its last documents, or add a file"
        )
    raise ValueError(
        f"--val_shard={cfg.val_shard}: {where} has no such file; "
        + (f"its {len(names)} files are {names[0]} to {names[-1]}" if names[1:] else "")
        + (f"it has only {names[0]}: leave --val_shard out" if not names[1:] else "")
    )


def check_val_shard(cfg: DataConfig, manifest: dict[str, Any], path: Path, delete: Path) -> None:
    """Raise ValueError when another validation shard is asked for than the recorded one."""
    if cfg.val_shard not in (None, manifest["val_shard"]):
        raise ValueError(
            f"--val_shard={cfg.val_shard}, but {path} names {manifest['val_shard']}, and earlier "
            f"stages may have trained on {cfg.val_shard}; delete {delete} to start over"
        )
