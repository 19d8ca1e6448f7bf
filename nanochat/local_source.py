"""
Text from a folder on this machine, held to what it was when it was first used.

    --data_dir -> manifest: SHA-256 of every file -> LocalSource -> documents

The manifest lies under the base directory; the folder itself is only read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.common import base_dir, fingerprint, read_json, sha256_file, write_json
from nanochat.disk import locked
from nanochat.source import (
    DataConfig,
    FileSource,
    check_val_shard,
    choose_shards,
    choose_val_shard,
)
from nanochat.text_files import SUFFIXES, check_file


@dataclass(frozen=True)
class LocalSource(FileSource):
    """Files in a local folder, which may be read-only; their digests are its identity."""

    data_dir: Path
    digests: dict[str, str]

    @classmethod
    def open(cls, cfg: DataConfig) -> "LocalSource":
        data_dir = Path(cfg.data_dir or "").expanduser().resolve()
        if cfg.revision is not None:
            raise ValueError(f"--revision={cfg.revision} is for data sets of the hub")
        if not data_dir.is_dir():
            raise ValueError(f"--data_dir={cfg.data_dir} is not a folder")
        folder = base_dir() / "data" / f"{data_dir.name}-{fingerprint(str(data_dir))[:8]}"
        with locked(folder / ".lock", f"reading {data_dir}"):
            manifest = update_local_manifest(cfg, data_dir, folder / "manifest.json")
        digests = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        val_shard = manifest["val_shard"]
        train = choose_shards(cfg, str(data_dir), list(digests), val_shard)
        return cls(str(data_dir), train, val_shard, folder, data_dir, digests)

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "local", "files": self.digests}

    def describe(self) -> dict[str, Any]:
        return {
            "data_dir": str(self.data_dir),
            "val_shard": self.val_shard,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

    def fetch(self, shard: str) -> Path:
        path = self.data_dir / shard
        if sha256_file(path) != self.digests[shard]:
            raise ValueError(changed_file(path, self.manifest))
        return path


def changed_file(path: Path, manifest: Path) -> str:
    """The refusal of a file that is not what it was."""
    return (
        f"{path} is not the file it was: its SHA-256 differs from {manifest}; "
        "bring the old file back, or delete that manifest to accept the new one"
    )


def update_local_manifest(cfg: DataConfig, data_dir: Path, path: Path) -> dict[str, Any]:
    """
    Record the files of a folder, or hold them to what was recorded.

    A file is hashed when it is new or its size or time changed. Raises ValueError naming files
    that came, went, changed or cannot be read.
    """
    names = sorted(
        file.relative_to(data_dir).as_posix()
        for file in data_dir.rglob("*")
        if file.name.endswith(SUFFIXES) and not file.name.startswith(".")
    )
    if not names:
        raise ValueError(f"{data_dir} holds no {', '.join(SUFFIXES)} file")
    old = read_json(path) if path.exists() else None
    if old:
        check_val_shard(cfg, old, path)
        if changes := sorted(old["files"].keys() ^ set(names)):
            raise ValueError(
                f"{data_dir} has other files than {path} recorded: {', '.join(changes[:5])} "
                "came or went; bring the old state back, or delete that manifest to start over"
            )
    known = old["files"] if old else {}
    files = {}
    for name in names:
        stat = (data_dir / name).stat()
        entry: dict[str, Any] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        if name not in known:
            check_file(data_dir / name)
        if entry.items() <= known.get(name, {}).items():
            entry = known[name]
        else:
            if stat.st_size > 1 << 30:
                print(f"hashing {data_dir / name} ({stat.st_size / 1e9:.1f} GB)", flush=True)
            entry["sha256"] = sha256_file(data_dir / name)
        if name in known and entry["sha256"] != known[name]["sha256"]:
            raise ValueError(changed_file(data_dir / name, path))
        files[name] = entry
    val_shard = old["val_shard"] if old else choose_val_shard(cfg, str(data_dir), names)
    new = {"data_dir": str(data_dir), "val_shard": val_shard, "files": files}
    if new != old:
        write_json(path, new)
    return new
