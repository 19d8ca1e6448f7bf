"""
Packed sequences (rows) on disk, and batches as a pure function of (rows, seed, step).

    rows/<name>/<shard>.bin, <shard>.json -> Rows -> batch(step) -> (rows, max_seq_len + 1) ids
    Rows of several sources, in proportion -> MixedRows -> batch(step), the same way

A run reads an endless sequence of epochs. Within an epoch, shards come in a fixed order and the
rows of each are permuted by (seed, epoch, shard). Step s of a run with R rows per step reads rows
s * R to (s + 1) * R - 1 of that sequence; every rank reads its slice. There is no state: a step
gets the same rows after a resume or with a new number of ranks.

A shard is complete once its .json exists, which is written last. Training can start while shards
are being packed (packing.py): a step waits for a missing shard. Each shard is verified against its
record once per run, before its first row is returned.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import (
    StopRequest,
    StopRequested,
    UsageError,
    fingerprint,
    read_sealed,
    sha256_file,
)
from nanochat.loss import IGNORE

# ---- Interleaving buckets in proportion ----------------------------------------------------------
# The items of each bucket divide [0, 1) in proportion to their sizes. Each item gets a random
# position within its interval; the order is that of the positions.


def interleave(
    sizes: Sequence[np.ndarray], seed: int, part: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return an order of all items: index of the bucket and index within the bucket, both (n,).

    sizes: item sizes of each bucket. part: selects another order for the same seed. Uses the raw
    PCG64 stream, as `permutation` does, because it never changes between numpy versions.
    """
    lengths = [len(each) for each in sizes]
    raw = np.random.PCG64([seed, part, len(sizes)]).random_raw(sum(lengths))
    jitter = (raw >> np.uint64(11)) * 2.0**-53  # [0, 1)
    when = []
    for each, own in zip(sizes, np.split(jitter, np.cumsum(lengths)[:-1]), strict=True):
        ends = np.cumsum(each)
        when.append((ends - each + each * own) / ends[-1:])
    order = np.argsort(np.concatenate(when), kind="stable")
    bucket = np.repeat(np.arange(len(sizes)), lengths)
    number = np.concatenate([np.arange(length) for length in lengths])
    return bucket[order], number[order]


# ---- Packed rows on disk -------------------------------------------------------------------------


POLL_SECONDS = 0.1
SILENCE_SECONDS = 30.0  # packing is considered dead after this long without a heartbeat
PACK_AGAIN = "run the same command again to repack these rows"


class RowSequence(ABC):
    """An endless sequence of packed rows; every training step reads the next ones."""

    recipe: Mapping[str, Any]
    """JSON-ready settings that determine the rows; saved in every checkpoint."""
    max_seq_len: int
    stop: StopRequest
    """Waiting ends when it is asked; set by the training run."""

    @property
    def fingerprint(self) -> str:
        """Hash of text, shards and their order, tokenizer, length, packing rule and proportions."""
        return self.recipe["fingerprint"]

    @abstractmethod
    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """Return the `row_ids` of rows given by their index in the sequence."""

    @abstractmethod
    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of `ids`, after verifying each of their shards once per run."""

    def row_ids(self, step: int, rows_per_step: int, seed: int) -> np.ndarray:
        """
        Return the ids of a step's rows, (rows_per_step, 3): epoch, index of the shard, index in the
        shard. A mixture returns (rows_per_step, 4), with the bucket's index as the second column.
        Waits and raises like `batch`.
        """
        return self.locate(step * rows_per_step + np.arange(rows_per_step, dtype=np.int64), seed)

    def batch(self, step: int, rows_per_step: int, seed: int) -> np.ndarray:
        """
        Return the rows of a step, (rows_per_step, max_seq_len + 1), in the stored dtype. Waits for
        shards that are being packed.

        Raises UsageError if nothing is packing a missing shard, if packing failed, or if a
        shard is damaged, and StopRequested if a stop is requested while waiting.
        """
        return self.read(self.row_ids(step, rows_per_step, seed))


@dataclass(eq=False)
class Rows(RowSequence):
    """The rows of one run: shards of a source, with one tokenizer and one row length."""

    folder: Path
    """Directory; may contain more shards than this run reads."""
    train_shards: list[str]
    val_shard: str
    dtype: Any
    vocab_size: int
    recipe: Mapping[str, Any]
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Shard -> files of the source packed into it, in order."""
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype).newbyteorder("<")
        self.shards = [*self.train_shards, self.val_shard]
        self.max_seq_len = self.recipe["max_seq_len"]
        self.row_length = self.max_seq_len + 1
        """Tokens per row: max_seq_len inputs plus the last target."""
        self.alive_path = self.folder / "packing.alive"
        """Heartbeat file, touched every second while a process packs."""
        self.error_path = self.folder / "packing.error"
        """Error message of a failed packing process."""
        self._starts = [0]  # index within the epoch of each shard's first row, if known
        self._checks: dict[str, Future[str | None]] = {}
        self._checker = ThreadPoolExecutor(1, "rows")
        self._old_error = stamp(self.error_path)

    # -----------------------------------------------------------------------------------------
    # Training

    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """Return the `row_ids` of a single source, (n, 3)."""
        epochs = np.zeros_like(numbers)
        if self._count_rows(until=int(numbers.max())):
            assert self._starts[-1], f"{self.folder} has no training rows"
            epochs, numbers = np.divmod(numbers, self._starts[-1])
        starts = np.array(self._starts)
        shards = np.searchsorted(starts, numbers, side="right") - 1
        rows = numbers - starts[shards]
        for epoch, shard in sorted(set(zip(epochs.tolist(), shards.tolist(), strict=True))):
            here = (epochs == epoch) & (shards == shard)
            count = self._starts[shard + 1] - self._starts[shard]
            rows[here] = permutation(seed, epoch, shard, count)[rows[here]]
        return np.stack([epochs, shards, rows], axis=1)

    def epochs_for(self, rows_needed: int) -> float | None:
        """Return the number of epochs; None if it depends on shards that are not packed yet."""
        return rows_needed / max(1, self._starts[-1]) if self._count_rows() else None

    @property
    def packed_train_rows(self) -> int:
        """Number of training rows in the shards before the first one that is not packed."""
        self._count_rows()
        return self._starts[-1]

    def _count_rows(self, until: int = -1) -> bool:
        """
        Count the rows of packed shards in order; wait for shards up to row `until`.

        Returns whether all shards are counted, i.e. the length of an epoch is known.
        """
        for shard in self.train_shards[len(self._starts) - 1 :]:
            if self._starts[-1] > until and not self.is_packed(shard):
                return False
            self._starts.append(self._starts[-1] + self.wait(shard)["rows"])
        return True

    # -----------------------------------------------------------------------------------------
    # Validation

    def val_batches(
        self, rows_per_batch: int, num_rows: int, rank: int = 0, world_size: int = 1, half: int = 0
    ) -> Iterator[np.ndarray]:
        """
        Yield this rank's share of the first `num_rows` validation rows, in a fixed random order.

        `half` 1 or 2 selects every other row of the shard. The rows do not depend on batch size,
        ranks or number of training shards. Yields (at most rows_per_batch, max_seq_len + 1).
        Raises UsageError if there are no rows or they are damaged.
        """
        total = self.wait(self.val_shard)["rows"]
        if total < max(1, half):
            problem = f"--eval_half={half} is empty: " if half else ""
            raise UsageError(
                f"{problem}{self.val_shard} has {total} validation rows",
                f"use {'--eval_half=0, or ' if half else ''}more validation text",
            )
        order = permutation(0, 0, 0, total)
        self.verify([self.val_shard])
        order = (order[half - 1 :: 2] if half else order)[:num_rows]
        first, last = (len(order) * r // world_size for r in (rank, rank + 1))
        for i in range(first, last, rows_per_batch):
            yield self._read_shard(self.val_shard, order[i : min(i + rows_per_batch, last)])

    # -----------------------------------------------------------------------------------------
    # Verification

    def verify(self, shards: Sequence[str], ahead: Iterable[str] = ()) -> None:
        """
        Verify shards against their records, each once, in a thread. Waits for shards to be packed
        and verified. Packed shards in `ahead` are verified in the background.

        Raises UsageError naming the file of a damaged shard, which then counts as not packed.
        """
        for shard in [*shards, *filter(self.is_packed, ahead)]:
            if shard not in self._checks:
                self.wait(shard)
                self._checks[shard] = self._checker.submit(self.damage, shard)
        for shard in shards:
            if damage := self._checks[shard].result():
                self.discard(shard)
                raise UsageError(f"{damage}; it was not used for training", PACK_AGAIN)

    def damage(self, shard: str) -> str | None:
        """Describe the damage of a packed shard; None if it is intact."""
        path, counts = self.bin_path(shard), self.counts(shard)
        if sha256_file(path) != counts["sha256"]:
            return f"{path} is damaged: its SHA-256 does not match the record"
        if not counts["rows"]:
            return None
        rows = np.memmap(path, self.dtype, "r")
        largest = max(int(rows.max()), ~int(rows.min()))  # untrained tokens are stored as ~id
        if largest >= self.vocab_size:
            return f"{path} has token id {largest}, but the vocabulary size is {self.vocab_size}"
        return None

    def discard(self, shard: str) -> None:
        """Mark a shard as not packed by deleting its record."""
        self.counts_path(shard).unlink(missing_ok=True)
        self._checks.pop(shard, None)

    # -----------------------------------------------------------------------------------------
    # Files

    def bin_path(self, shard: str) -> Path:
        """Path of the rows of a shard."""
        return self.folder / f"{shard_file_name(shard)}.bin"

    def counts_path(self, shard: str) -> Path:
        """Path of the record of a shard; it exists only if the rows are complete."""
        return self.folder / f"{shard_file_name(shard)}.json"

    def is_packed(self, shard: str) -> bool:
        """True if a shard has a valid record and rows of the recorded size."""
        try:
            return bool(self.counts(shard))
        except (FileNotFoundError, ValueError):
            return False

    def counts(self, shard: str) -> dict[str, Any]:
        """
        Return the record of a packed shard.

        Raises FileNotFoundError if there is none, ValueError if it is damaged or does not match the
        size of the rows on disk.
        """
        path, record = self.bin_path(shard), self.counts_path(shard)
        counts = read_sealed(record)
        expected = counts["rows"] * self.row_length * self.dtype.itemsize
        actual = path.stat().st_size if path.exists() else 0
        if actual != expected:
            raise ValueError(f"{path} has {actual} bytes, but its record {record} says {expected}")
        return counts

    def totals(self, shards: list[str] | None = None) -> dict[str, int]:
        """Sum the records of packed shards; default: the training shards."""
        packed = [self.counts(s) for s in shards or self.train_shards if self.is_packed(s)]
        names = "rows documents documents_cut tokens extra_bos dropped text_bytes skipped".split()
        total = {name: sum(counts[name] for counts in packed) for name in names}
        return {"shards": len(packed), "positions": total["rows"] * self.row_length, **total}

    def wait(self, shard: str) -> dict[str, Any]:
        """Return the record of a shard once it is packed. Raises like `batch`."""
        if not self.is_packed(shard):
            print(f"waiting for {shard} to be packed", flush=True)
        beat, beat_time = stamp(self.alive_path), time.monotonic()
        while not self.is_packed(shard):
            if self.stop.asked:
                raise StopRequested(f"stop requested while waiting for {shard}")
            if stamp(self.error_path) not in (None, self._old_error):
                failure = self.error_path.read_text()
                raise UsageError(f"packing {shard} failed: {failure}", "fix the cause and rerun")
            if (now := stamp(self.alive_path)) != beat:
                beat, beat_time = now, time.monotonic()
            if time.monotonic() - beat_time > SILENCE_SECONDS:
                raise UsageError(
                    f"{shard} is not packed in {self.folder}, and no process is packing it",
                    "run the same command again, which packs it",
                )
            time.sleep(POLL_SECONDS)
        return self.counts(shard)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """See `RowSequence`; verifies the following shard in the background."""
        indices = np.unique(ids[:, 1]).tolist()
        ahead = self.train_shards[indices[-1] + 1 : indices[-1] + 2]
        self.verify([self.train_shards[i] for i in indices], ahead)
        out = np.empty((len(ids), self.row_length), self.dtype)
        for index in indices:
            here = ids[:, 1] == index
            out[here] = self._read_shard(self.train_shards[index], ids[here, 2])
        return out

    def _read_shard(self, shard: str, indices: np.ndarray) -> np.ndarray:
        stored = np.memmap(self.bin_path(shard), self.dtype, "r")
        return stored.reshape(-1, self.row_length)[indices]


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Stored rows (B, T + 1) -> tokens and targets, (B, T) int64 each.

    Every row starts with BOS. Targets are IGNORE for tokens stored as ~id, which have no loss
    (chat_packing.py), and for padding: a BOS after a BOS (packing.py).
    """
    stored = rows.astype(np.int64)
    ids = np.where(stored < 0, ~stored, stored)
    is_bos = ids == ids[:, :1]
    ignored = (stored[:, 1:] < 0) | (is_bos[:, 1:] & is_bos[:, :-1])
    return ids[:, :-1], np.where(ignored, IGNORE, ids[:, 1:])


@lru_cache(maxsize=64)  # a step of a mixture reads several shards of each bucket
def permutation(seed: int, epoch: int, shard: int, n: int) -> np.ndarray:
    """
    Return the order of the `n` rows of a shard in an epoch.

    Sorts the raw PCG64 stream, which numpy guarantees will never change (unlike the
    output of Generator.permutation), so a run can be resumed with another numpy version.
    """
    order = np.argsort(np.random.PCG64([seed, epoch, shard]).random_raw(n), kind="stable")
    order.setflags(write=False)
    return order


def shard_file_name(shard: str) -> str:
    """Map a shard's name to a file name without slashes, injectively."""
    return shard.replace("%", "%25").replace("/", "%2F")


def stamp(path: Path) -> int | None:
    """Modification time of a file in ns, or None if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def diff_recipe(recorded: Mapping[str, Any], current: Mapping[str, Any], at: str = "") -> list[str]:
    """
    List the differences between two descriptions that contain a `Rows.recipe`, one per setting.

    A resumed run compares its checkpoint with the current settings. Descriptions with the same
    fingerprint are equal, even if the text is in another folder; a bucket also has a `count`.
    """
    was, now = recorded.get("fingerprint"), current.get("fingerprint")
    if was is not None and was == now and recorded.get("count") == current.get("count"):
        return []
    lines = []
    for name in sorted((recorded.keys() | current.keys()) - {"fingerprint"}):
        old, new = recorded.get(name), current.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += diff_recipe(old, new, f"{at}{name}.")
        elif old != new:
            lines.append(f"{at}{name}: was {old!r}, now {new!r}")
    if was is not None and not lines:
        return [f"{at}fingerprint: was {was!r}, now {now!r}"]
    return lines


# ---- Rows of several sources ---------------------------------------------------------------------


COLUMNS = [0, 2, 3]  # columns of a mixture's `row_ids` that a bucket's `row_ids` have too


class MixedRows(RowSequence):
    """Rows of a mixture. `buckets` maps each name, in order, to (rows, number used per pass)."""

    def __init__(self, buckets: Mapping[str, tuple[Rows, int]]):
        self.parts = [rows for rows, _ in buckets.values()]
        self.counts = tuple(count for _, count in buckets.values())
        self.rows_per_pass = sum(self.counts)
        self.max_seq_len = self.parts[0].max_seq_len
        self.stop = StopRequest()
        described = {
            name: {"count": count, "fingerprint": rows.fingerprint}
            for name, (rows, count) in buckets.items()
        }
        name = fingerprint({"mixture": list(described.items())})
        self.recipe = {"fingerprint": name, "buckets": described}

    def read(self, ids: np.ndarray) -> np.ndarray:
        dtype = np.result_type(*(rows.dtype for rows in self.parts))
        out = np.empty((len(ids), self.max_seq_len + 1), dtype)
        for i in np.unique(ids[:, 1]).tolist():
            here = ids[:, 1] == i
            self.parts[i].stop = self.stop
            out[here] = self.parts[i].read(ids[here][:, COLUMNS])
        return out

    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """Return the `row_ids` of a mixture, (n, 4)."""
        passes, indices = np.divmod(numbers, self.rows_per_pass)
        buckets, own = np.empty_like(numbers), np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            now = passes == number
            bucket, item = order_of_pass(self.counts, seed, number)
            buckets[now], own[now] = bucket[indices[now]], item[indices[now]]
        own += passes * np.array(self.counts)[buckets]  # indices in the sequence of each bucket
        out = np.empty((len(numbers), 4), np.int64)
        for i in np.unique(buckets).tolist():
            here = buckets == i
            self.parts[i].stop = self.stop
            out[here] = np.insert(self.parts[i].locate(own[here], seed), 1, i, axis=1)
        return out

    def epochs_for(self, rows_needed: int) -> float | None:
        """Return the number of passes through the mixture."""
        return rows_needed / self.rows_per_pass


@lru_cache(maxsize=2)
def order_of_pass(counts: tuple[int, ...], seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `interleave` order of a pass through `counts` rows per bucket."""
    return interleave([np.ones(count, np.int64) for count in counts], seed, number)
