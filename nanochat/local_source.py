"""
Text from a folder on this machine, held to what it was when it was first used.

    --data_dir -> manifest: SHA-256 of every file -> LocalSource -> documents

The manifest lies under the base directory; the folder itself is only read.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, fingerprint, printable, read_json, sha256_file, write_json
from nanochat.disk import locked
from nanochat.source import (
    TAIL,
    DataConfig,
    FileSource,
    check_val_shard,
    choose_shards,
    choose_val_shard,
    file_of,
    find_tail,
    require_recorded,
)
from nanochat.text_files import SUFFIXES, check_file, check_texts

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

    def describe(self) -> dict[str, Any]:
        return {
            "data_dir": str(self.data_dir),
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
            **self.tail,
        }

    def fetch(self, shard: str) -> Path:
        path = self.data_dir / file_of(shard)
        if not path.is_file() or sha256_file(path) != self.digests[file_of(shard)]:
            raise ValueError(changed_file(path, self.manifest))
        return path

    @property
    def without_it(self) -> str:
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
        check_texts(file)
    entry["sha256"] = sha256_file(file)
    if known and entry["sha256"] != known["sha256"]:
        raise ValueError(changed_file(file, manifest))
    return entry
