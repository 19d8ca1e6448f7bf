"""
Where text comes from: a data set repository on the hub, a local folder, or the embedded world.

    DataConfig -> open_source -> Source: ordered shards -> documents(shard) -> lists of texts

The first use of a source writes a manifest under the base directory: commit, list of files,
validation shard, SHA-256 of every file as it comes in. From then on it is enforced: a later run
reads the very same text or is refused. Files of the hub are fetched when they are first read.

Knows nothing of tokens or rows, and never probes the network: only a hub source uses it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanochat import world
from nanochat.common import base_dir, read_json, write_json
from nanochat.local_source import LocalSource
from nanochat.source import DataConfig, Source, require_recorded
from nanochat.text_files import in_batches

WORLD_SEED = 0
WORLD_SHARDS = 16  # about 5 million tokens in a vocabulary of 4,096
WORLD_SHARD_BYTES = 1_250_000


@dataclass(frozen=True)
class WorldSource(Source):
    """Documents of the embedded world: generated, endless, the same on every machine."""

    @classmethod
    def open(cls, cfg: DataConfig) -> "WorldSource":
        if cfg.val_shard not in (None, "world_val") or cfg.revision is not None:
            raise ValueError(
                f"--val_shard={cfg.val_shard}, --revision={cfg.revision}: the embedded world has "
                "one revision and one validation shard; leave both out"
            )
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


def open_source(cfg: DataConfig, recorded: dict[str, Any] | None = None) -> "Source":
    """
    The source that `cfg` names; or, where it names none, the one an earlier stage `recorded`.

    recorded: `Source.describe()` of then. Settings given in `cfg` beside it still apply. Raises
    ValueError, naming the fix, when there is nothing to open or it is not what it was; then
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
    if cfg.dataset == "embedded":
        source = WorldSource.open(cfg)
    else:
        from nanochat.hub_source import HubSource  # slow to import, and --help needs none

        source = HubSource.open(cfg)
    require_recorded(source, must_be)
    return source


def remember(described: Mapping[str, Any], tokenizer_tag: str) -> None:
    """Record the text a stage used, for later stages with the same tokenizer that name none."""
    write_json(base_dir() / "data" / f"used_with_{tokenizer_tag}.json", dict(described))


def remembered(tokenizer_tag: str) -> dict[str, Any] | None:
    """What `remember` recorded last, for `open_source`."""
    path = base_dir() / "data" / f"used_with_{tokenizer_tag}.json"
    return read_json(path) if path.exists() else None
