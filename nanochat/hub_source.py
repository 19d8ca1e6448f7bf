"""
Text from a data set repository on the hub, pinned to the commit at which it was first used.

    --dataset=<owner>/<name> -> manifest: commit, files -> HubSource -> verified downloads

A file is fetched when it is first read; its SHA-256 is compared with what the hub promises, noted
in the manifest, and enforced from then on.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import hub
from nanochat.common import base_dir, read_json, sha256_file, write_json
from nanochat.disk import locked
from nanochat.source import (
    DataConfig,
    FileSource,
    check_val_shard,
    choose_shards,
    choose_val_shard,
)
from nanochat.text_files import check_file, damage


@dataclass(frozen=True)
class HubSource(FileSource):
    """Parquet files of a data set repository at one commit, fetched when first read."""

    commit: str

    @classmethod
    def open(cls, cfg: DataConfig) -> "HubSource":
        repo = cfg.dataset or ""
        if repo.count("/") != 1 or not all(repo.split("/")):
            raise ValueError(
                f"--dataset={repo}: a repository of the hub is <owner>/<name>; "
                "else `embedded`, or --data_dir for a local folder"
            )
        folder = base_dir() / "data" / repo.replace("/", "--")
        path = folder / "manifest.json"
        with locked(folder / ".lock", f"resolving {repo}"):
            if not path.exists():
                write_json(path, new_manifest(cfg, repo))
            manifest = read_json(path)
        if cfg.revision not in (None, manifest["revision"], manifest["commit"]):
            raise ValueError(
                f"--revision={cfg.revision}, but {path} pins {repo} to {manifest['revision']} at "
                f"commit {manifest['commit']}; delete {folder} to start over with another"
            )
        check_val_shard(cfg, manifest, path)
        names, val_shard = list(manifest["files"]), manifest["val_shard"]
        train = choose_shards(cfg, repo, names, val_shard)
        return cls(repo, train, val_shard, folder, manifest["commit"])

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
        files = read_json(self.manifest)["files"]
        return sum(files[s]["bytes"] for s in shards if not (self.folder / s).exists())

    def fetch(self, shard: str) -> Path:
        """
        The shard's file, complete and verified. One process fetches it, the others wait.

        A file that is damaged is set aside as `<name>.bad` and fetched anew, once; after that
        ValueError names it.
        """
        path = self.folder / shard
        problem = None
        lock = self.folder / ".locks" / f"{shard.replace('/', '--')}.lock"
        with locked(lock, f"fetching {shard}"):
            for _ in range(2):
                recorded = read_json(self.manifest)["files"][shard].get("sha256")
                problem = self.obtain(shard, recorded)
                if problem is None:
                    return path
                bad = path.with_name(path.name + ".bad")
                os.replace(path, bad)
                print(f"{path}: {problem}; set aside as {bad.name}", flush=True)
        raise ValueError(
            f"{self.name}: {shard} is refused, twice: {problem}; when the hub's file is wrong, "
            "leave it out (--num_shards, --val_shard), or use another --revision in a new base "
            "directory"
        )

    def obtain(self, shard: str, recorded: str | None) -> str | None:
        """Download the file unless it is there, and record its digest; or say what is wrong."""
        path = self.folder / shard
        promised = recorded
        if recorded is None or not path.exists():
            remote = hub.remote_file(self.name, self.commit, shard)
            promised = recorded or remote.sha256
            if not path.exists():
                hub.download(self.name, self.commit, shard, remote.size, self.folder)
        digest = sha256_file(path)
        if promised is not None and promised != digest:
            by = "the manifest" if recorded else "the hub"
            return f"its SHA-256 is {digest[:16]}..., {by} says {promised[:16]}..."
        if recorded is None:
            if problem := damage(path):
                return problem
            check_file(path)
            with locked(self.folder / ".lock", "writing the manifest"):
                manifest = read_json(self.manifest)
                manifest["files"][shard] = {"bytes": path.stat().st_size, "sha256": digest}
                write_json(self.manifest, manifest)
        return None


def new_manifest(cfg: DataConfig, repo: str) -> dict[str, Any]:
    """What the hub says now about a repository's parquet files."""
    revision = cfg.revision or "main"
    commit, sizes = hub.listing(repo, revision)
    files = {name: {"bytes": n} for name, n in sizes.items() if name.endswith(".parquet")}
    if not files:
        raise ValueError(f"{repo} holds no parquet file; --data_dir reads jsonl from a folder")
    return {
        "dataset": repo,
        "revision": revision,
        "commit": commit,
        "val_shard": choose_val_shard(cfg, repo, list(files)),
        "files": files,
    }
