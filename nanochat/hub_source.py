"""
Text from a data set repository on the hub, pinned to the commit at which it was first used.

    --dataset=<owner>/<name> -> HubRepo: manifest, files -> HubSource -> verified downloads

A file is fetched when it is first read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, read_json, write_json
from nanochat.disk import locked
from nanochat.hub_repo import HubRepo, open_repo
from nanochat.source import (
    TAIL,
    DataConfig,
    FileSource,
    check_val_shard,
    choose_shards,
    choose_val_shard,
    file_of,
    find_tail,
)
from nanochat.text_files import check_file


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
                "else `embedded`, or --data_dir for a local folder"
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

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": self.name,
            "revision": self.commit,
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
            **self.tail,
        }

    def missing_bytes(self, shards: Iterable[str]) -> int:
        files = self.repo.files()
        missing = {f for f in map(file_of, shards) if not (self.folder / f).exists()}
        return sum(files[file]["bytes"] for file in missing)

    def fetch(self, shard: str) -> Path:
        return self.repo.fetch(file_of(shard), check_file)

    @property
    def without_it(self) -> str:
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
