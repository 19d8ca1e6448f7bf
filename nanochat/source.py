"""
What a source of text is: ordered, frozen shards with a fingerprint, each a stream of documents.

    DataConfig -> Source: train_shards, val_shard -> documents(shard) -> lists of texts

`FileSource` is what a folder and the hub share: files, described by a manifest. Knows nothing of
where files come from, nor of tokens or rows.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import fingerprint, read_json
from nanochat.text_files import file_texts, in_batches


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
    """File kept for validation. Default: the last one in the order of names."""
    num_shards: int | None = None
    """Number of training shards to use, counted from the first. Default: all; they are downloaded
    only as they are needed."""

    def __post_init__(self):
        if self.dataset and self.data_dir:
            raise ValueError(
                f"give --dataset or --data_dir, not both ({self.dataset!r}, {self.data_dir!r})"
            )
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
    """A source whose shards are files, described by the manifest in `folder`."""

    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @abstractmethod
    def fetch(self, shard: str) -> Path: ...

    def shard_sizes(self) -> dict[str, int]:
        files = read_json(self.manifest)["files"]
        return {shard: files[shard]["bytes"] for shard in self.shards()}

    def documents(self, shard: str, skipped: Counter | None = None) -> Iterator[list[str]]:
        path = self.fetch(shard)
        some = False
        for texts in in_batches(file_texts(path, Counter() if skipped is None else skipped)):
            some = True
            yield texts
        if not some:
            raise ValueError(f"{path} holds no text; remove it or leave it out")


def choose_shards(cfg: DataConfig, where: str, names: Sequence[str], val_shard: str) -> list[str]:
    """The training shards: all but the validation shard, as many as asked for."""
    train = [name for name in names if name != val_shard]
    if not train:
        raise ValueError(
            f"{where} holds a single file, {val_shard}: training and validation need one each; "
            "split it, or add a file with validation text and name it with --val_shard"
        )
    if cfg.num_shards is not None and cfg.num_shards > len(train):
        raise ValueError(
            f"--num_shards={cfg.num_shards}, but {where} has {len(train)} training shards"
        )
    return train[: cfg.num_shards]


def choose_val_shard(cfg: DataConfig, where: str, names: Sequence[str]) -> str:
    """The validation shard of a source that is opened for the first time."""
    if cfg.val_shard is not None and cfg.val_shard not in names:
        raise ValueError(
            f"--val_shard={cfg.val_shard}: {where} has no such file; "
            f"its {len(names)} files are {names[0]} to {names[-1]}"
        )
    return cfg.val_shard or names[-1]


def check_val_shard(cfg: DataConfig, manifest: dict[str, Any], path: Path) -> None:
    """Raise ValueError when another validation shard is asked for than the recorded one."""
    if cfg.val_shard not in (None, manifest["val_shard"]):
        raise ValueError(
            f"--val_shard={cfg.val_shard}, but {path} names {manifest['val_shard']}, and earlier "
            f"stages may have trained on {cfg.val_shard}; delete {path} to start over"
        )
