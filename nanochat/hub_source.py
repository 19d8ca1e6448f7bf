"""
Text from a data set repository on the hub, pinned to the commit at which it was first used.

    --dataset=<owner>/<name> -> HubRepo: manifest, files -> HubSource -> verified downloads

A file is fetched when it is first read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import base_dir
from nanochat.hub_repo import HubRepo, open_repo
from nanochat.source import (
    DataConfig,
    FileSource,
    check_val_shard,
    choose_shards,
    choose_val_shard,
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
            return {"val_shard": choose_val_shard(cfg, name, files)}

        folder = base_dir() / "data" / name.replace("/", "--")
        repo, manifest = open_repo(name, folder, (".parquet",), cfg.revision, choose)
        check_val_shard(cfg, manifest, repo.manifest)
        val_shard = manifest["val_shard"]
        train = choose_shards(cfg, name, list(manifest["files"]), val_shard)
        return cls(name, train, val_shard, folder, repo.commit)

    @property
    def repo(self) -> HubRepo:
        return HubRepo(self.name, self.folder, self.commit)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "hub", "dataset": self.name, "commit": self.commit}

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": self.name,
            "revision": self.commit,
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

    def missing_bytes(self, shards: Iterable[str]) -> int:
        files = self.repo.files()
        return sum(files[s]["bytes"] for s in shards if not (self.folder / s).exists())

    def fetch(self, shard: str) -> Path:
        return self.repo.fetch(shard, check_file)
