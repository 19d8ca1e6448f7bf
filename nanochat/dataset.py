"""
Where text comes from: a data set repository on the hub, a local folder, or the embedded world.

    DataConfig -> open_source -> Source: ordered shards -> documents(shard) -> lists of texts

The first use of a source writes a manifest under the base directory: commit, list of files,
validation shard, SHA-256 of every file as it comes in. From then on it is enforced: a later run
reads the very same text or is refused. Files of the hub are fetched when they are first read.

Knows nothing of tokens or rows, and never probes the network: only a hub source uses it.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import hub, world
from nanochat.common import base_dir, fingerprint, read_json, sha256_file, write_json
from nanochat.disk import locked
from nanochat.text_files import SUFFIXES, check_file, damage, file_texts, in_batches

WORLD_SEED = 0
WORLD_SHARDS = 16  # about 5 million tokens in a vocabulary of 4,096
WORLD_SHARD_BYTES = 1_250_000


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


def open_source(cfg: DataConfig, recorded: dict[str, Any] | None = None) -> "Source":
    """
    The source that `cfg` names; or, where it names none, the one an earlier stage `recorded`.

    recorded: `Source.describe()` of then. Settings given in `cfg` beside it still apply. Raises
    ValueError, naming the way out, when there is nothing to open or it is not what it was.
    """
    if cfg.dataset is None and cfg.data_dir is None:
        if recorded is None:
            raise ValueError(
                "nothing says where text comes from: give --dataset=<owner>/<name>, "
                "--dataset=embedded or --data_dir=<folder>"
            )
        source = open_source(
            DataConfig(
                dataset=recorded.get("dataset"),
                data_dir=recorded.get("data_dir"),
                revision=cfg.revision or recorded.get("revision"),
                val_shard=cfg.val_shard or recorded.get("val_shard"),
                num_shards=cfg.num_shards or recorded["num_shards"],
            )
        )
        if cfg == DataConfig() and source.fingerprint != recorded["fingerprint"]:
            raise ValueError(
                f"{source.name} is not the text that was recorded: fingerprint "
                f"{source.fingerprint}, recorded {recorded['fingerprint']}; bring the old files "
                "back, or name --dataset or --data_dir to accept the new ones"
            )
        return source
    if cfg.data_dir is not None:
        return LocalSource.open(cfg)
    if cfg.dataset == "embedded":
        return WorldSource.open(cfg)
    return HubSource.open(cfg)


def remember(source: "Source", tokenizer_tag: str) -> None:
    """Record the text a stage used, for later stages with the same tokenizer that name none."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", source.describe())


def remembered(tokenizer_tag: str) -> dict[str, Any] | None:
    """What `remember` recorded last, for `open_source`."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None


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

    def shards(self) -> list[str]:
        """All shards, the validation shard last."""
        return [*self.train_shards, self.val_shard]


# ---------------------------------------------------------------------------------------------
# The embedded world


@dataclass(frozen=True)
class WorldSource(Source):
    """Documents of the embedded world: generated, endless, the same on every machine."""

    @classmethod
    def open(cls, cfg: DataConfig) -> "WorldSource":
        if cfg.val_shard not in (None, "world_val") or cfg.revision is not None:
            raise ValueError("the embedded world has one revision and one validation shard")
        count = cfg.num_shards or WORLD_SHARDS
        return cls("embedded", [f"world_{i:05d}" for i in range(count)], "world_val")

    @property
    def identity(self) -> dict[str, Any]:
        return {"kind": "embedded", "version": world.WORLD_VERSION, "seed": WORLD_SEED}

    def describe(self) -> dict[str, Any]:
        return {
            "dataset": "embedded",
            "world_version": world.WORLD_VERSION,
            "num_shards": len(self.train_shards),
            "fingerprint": self.fingerprint,
        }

    def shard_sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.shards(), WORLD_SHARD_BYTES)

    def documents(self, shard: str, skipped: Counter | None = None) -> Iterator[list[str]]:
        if shard == self.val_shard:
            return in_batches(world.documents(WORLD_SEED, 0, "val"))
        return in_batches(world.documents(WORLD_SEED, int(shard.removeprefix("world_")), "train"))


# ---------------------------------------------------------------------------------------------
# Files: what the hub and a local folder share


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


# ---------------------------------------------------------------------------------------------
# A folder on this machine


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


# ---------------------------------------------------------------------------------------------
# A data set repository on the hub


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
