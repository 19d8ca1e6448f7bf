"""
Packed rows on disk, and the batches of a run as a pure function of (rows, seed, step).

    rows/<name>/<shard>.bin, <shard>.json -> Rows -> batch(step) -> (rows, max_seq_len + 1) ids
    Rows of several sources, in proportion -> MixedRows -> batch(step), the same way

A run reads an endless sequence of epochs. Within an epoch the shards come in their frozen order,
the rows of each permuted by (seed, epoch, shard). Step s of a run with R rows per step takes rows
s * R to (s + 1) * R - 1 of that sequence, and every rank its slice of them. So there is no state:
stopping, resuming, or another number of ranks changes nothing about what a step sees.

A shard is complete when its .json exists, which is written last. Shards may still be packed while a
run reads (packing.py): a step whose shard is missing waits for it. Each shard is compared with its
record once per run, before its first row is returned.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import (
    MissingInput,
    StoppedWaiting,
    UsageError,
    fingerprint,
    read_sealed,
    sha256_file,
)

# ---- Interleaving buckets in proportion ----------------------------------------------------------
# An item has a random position in the stretch that it would take up by its size, were its bucket
# spread out evenly.


def interleave(
    sizes: Sequence[np.ndarray], seed: int, part: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """
    The order of all items, of `sizes` per bucket: for each the index of its bucket, and which one
    of that bucket it is, both (n,). `part` gives another order of the same seed.

    Raw words of PCG64, as in `permutation`: their stream never changes with numpy.
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
SILENCE_SECONDS = 30.0  # a packing process that shows no life for this long is taken for dead
PACK_AGAIN = "run the same command again: it packs these rows anew"


class RowSequence(ABC):
    """An endless sequence of packed rows; every step of a run takes the next ones of it."""

    recipe: Mapping[str, Any]
    """Decides the rows; JSON-ready. Every checkpoint holds it."""

    @property
    def fingerprint(self) -> str:
        """Names the rows: text, shards and their order, tokenizer, length, rule, proportions."""
        return self.recipe["fingerprint"]

    @abstractmethod
    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The `row_ids` of rows by their numbers in the sequence."""

    @abstractmethod
    def read(self, ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """
        The rows of `row_ids`, once all of the shards of `step_ids` were verified in this run.
        """

    def row_ids(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """
        Which rows a batch holds: (n, 3), how often each came before in the run, index of its shard
        and of the row in its file; of a mixture (n, 4), with the index of the bucket after the
        first. Raises ValueError where rows_per_step does not divide among the ranks.
        """
        share, rest = divmod(rows_per_step, world_size)
        if rest or share < 1:
            raise ValueError(
                f"{rows_per_step} rows per step do not divide among {world_size} ranks; "
                f"take {world_size * max(1, share)}"
            )
        first = step * rows_per_step + rank * share
        return self.locate(first + np.arange(share, dtype=np.int64), seed)

    def batch(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """
        This rank's rows of a step, (rows_per_step / world_size, max_seq_len + 1), stored dtype.

        Waits for shards that are being packed. Raises ValueError where rows_per_step does not
        divide, RuntimeError with the packer's message when packing failed, MissingInput when
        nothing packs what is missing, UsageError when a shard of the step, whichever rank reads it,
        is damaged.
        """
        mine = self.row_ids(step, rows_per_step, seed, rank, world_size)
        return self.read(mine, self.row_ids(step, rows_per_step, seed))


@dataclass(eq=False)
class Rows(RowSequence):
    """The rows of one run: the shards of a source, cut by one tokenizer, in rows of one length."""

    folder: Path
    """It may hold more shards than this run reads."""
    train_shards: list[str]
    val_shard: str
    dtype: Any
    vocab_size: int
    recipe: Mapping[str, Any]
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Shard -> files of the source that are packed into it, in order."""
    verifies: bool = True
    """False where another rank of the same node verifies the same shards; only the token ids of the
    rows that are returned are then checked."""
    should_stop: Callable[[], bool] = lambda: False
    """True ends a wait; set by the training stage."""

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype).newbyteorder("<")
        self.shards = [*self.train_shards, self.val_shard]
        self.max_seq_len = self.recipe["max_seq_len"]
        self.row_length = self.max_seq_len + 1
        """Tokens in a row: max_seq_len inputs and one more, the last target."""
        self.alive_path = self.folder / "packing.alive"
        """Touched every second while a process packs."""
        self.error_path = self.folder / "packing.error"
        """Why packing failed, when it did."""
        self._starts = [0]  # index in the epoch of each shard's first row, as far as known
        self._checks: dict[str, Future[str | None]] = {}
        self._checker = ThreadPoolExecutor(1, "rows")
        self._old_error = stamp(self.error_path)

    # -----------------------------------------------------------------------------------------
    # Training

    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The `row_ids` of a single source: (n, 3)."""
        epochs = np.zeros_like(numbers)
        if self._count_rows(until=int(numbers.max())):
            assert self._starts[-1], f"{self.folder} holds no training row"
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
        """
        The number of epochs; None while not all shards are packed and those that are do not
        suffice.
        """
        if not self._count_rows() and self._starts[-1] < rows_needed:
            return None
        return rows_needed / max(1, self._starts[-1])

    @property
    def packed_train_rows(self) -> int:
        """Training rows there are by now, without a gap from the first shard on."""
        self._count_rows()
        return self._starts[-1]

    def _count_rows(self, until: int = -1) -> bool:
        """
        Count the rows of packed shards, in order, and wait for more up to row number `until`.

        Returns whether all shards are counted: then the length of an epoch is known.
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
        This rank's share of the first `num_rows` validation rows, at most all of them; of one
        `half` of these, 1 or 2, where one is given. Raises UsageError where that has no row and
        for damaged rows.

        The rows are the same for any batch size, number of ranks and number of training shards,
        and are drawn from all of the shard. Yields (at most rows_per_batch, max_seq_len + 1).
        """
        total = self.wait(self.val_shard)["rows"]
        if total < max(1, half):
            raise UsageError(
                f"--eval_half={half} has no row: {self.val_shard} holds {total} validation rows",
                "--eval_half=0, or more validation text",
            )
        order = permutation(0, 0, 0, total)
        self.verify([self.val_shard])
        order = (order[half - 1 :: 2] if half else order)[:num_rows]
        first, last = (len(order) * r // world_size for r in (rank, rank + 1))
        for i in range(first, last, rows_per_batch):
            yield self._read_shard(self.val_shard, order[i : min(i + rows_per_batch, last)])

    # -----------------------------------------------------------------------------------------
    # Damage

    def verify(self, shards: Sequence[str], ahead: Iterable[str] = ()) -> None:
        """
        Compare shards with their records, each once, in a thread. Waits for those that are being
        packed, and for the result; for that of the packed ones of `ahead` the next call waits.

        Raises UsageError naming the file of a damaged one. It then counts as not packed.
        """
        if not self.verifies:
            return
        for shard in [*shards, *filter(self.is_packed, ahead)]:
            if shard not in self._checks:
                self.wait(shard)
                self._checks[shard] = self._checker.submit(self.damage, shard)
        for shard in shards:
            if damage := self._checks[shard].result():
                self.discard(shard)
                raise UsageError(f"{damage}; nothing was trained on it", PACK_AGAIN)

    def damage(self, shard: str) -> str | None:
        """The damage of a packed shard; None when its rows are what was packed."""
        path, counts = self.bin_path(shard), self.counts(shard)
        if sha256_file(path) != counts["sha256"]:
            return f"{path} is damaged: its SHA-256 is not the recorded one"
        return self.foreign_id(np.memmap(path, self.dtype, "r"), path) if counts["rows"] else None

    def foreign_id(self, rows: np.ndarray, path: Path) -> str | None:
        """Names a token id in rows that the vocabulary does not have; None without one."""
        largest = max(int(rows.max()), ~int(rows.min()))  # ~id is stored where none counts
        if largest >= self.vocab_size:
            return f"{path} holds token id {largest}, but the vocabulary size is {self.vocab_size}"
        return None

    def discard(self, shard: str) -> None:
        """Forget a shard: it is to be packed again."""
        self.counts_path(shard).unlink(missing_ok=True)
        self._checks.pop(shard, None)

    # -----------------------------------------------------------------------------------------
    # Files

    def bin_path(self, shard: str) -> Path:
        """The rows of a shard."""
        return self.folder / f"{flat(shard)}.bin"

    def counts_path(self, shard: str) -> Path:
        """The record of a shard; its presence says that the rows are complete."""
        return self.folder / f"{flat(shard)}.json"

    def is_packed(self, shard: str) -> bool:
        """True when all rows of a shard are there and its record is sound."""
        try:
            return bool(self.counts(shard))
        except (FileNotFoundError, ValueError):
            return False

    def counts(self, shard: str) -> dict[str, Any]:
        """
        The record of a packed shard. Raises FileNotFoundError where there is none, ValueError where
        it is damaged or does not match the size of the file of rows.
        """
        path, record = self.bin_path(shard), self.counts_path(shard)
        counts = read_sealed(record)
        expected = counts["rows"] * self.row_length * self.dtype.itemsize
        actual = path.stat().st_size if path.exists() else 0
        if actual != expected:
            raise ValueError(f"{path} has {actual} bytes, its record {record} says {expected}")
        return counts

    def totals(self, shards: list[str] | None = None) -> dict[str, int]:
        """Sums of the records of packed shards, by default of the training shards."""
        packed = [self.counts(s) for s in shards or self.train_shards if self.is_packed(s)]
        names = "rows documents documents_cut tokens extra_bos dropped text_bytes skipped".split()
        total = {name: sum(counts[name] for counts in packed) for name in names}
        return {"shards": len(packed), "places": total["rows"] * self.row_length, **total}

    def wait(self, shard: str) -> dict[str, Any]:
        """The record of a shard, once it is packed. Raises as `batch` does."""
        if not self.is_packed(shard):
            print(f"waiting for {shard} to be packed", flush=True)
        beat, heard = stamp(self.alive_path), time.monotonic()
        while not self.is_packed(shard):
            if self.should_stop():
                raise StoppedWaiting(f"asked to stop while {shard} was being packed")
            if stamp(self.error_path) not in (None, self._old_error):
                failure = self.error_path.read_text()
                raise UsageError(f"packing {shard} failed: {failure}", "mend it and run this again")
            if (now := stamp(self.alive_path)) != beat:
                beat, heard = now, time.monotonic()
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise MissingInput(
                    f"the rows of {shard} are not in {self.folder}, and nothing is packing them",
                    f"python -m scripts.data --max_seq_len={self.max_seq_len}",
                )
            time.sleep(POLL_SECONDS)
        return self.counts(shard)

    def read(self, ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        """
        As in `RowSequence`; the shard that follows is verified meanwhile.

        Raises UsageError for damaged rows, and for foreign token ids where another rank verifies.
        """
        indices = np.unique(step_ids[:, 1]).tolist()
        ahead = self.train_shards[indices[-1] + 1 : indices[-1] + 2]
        self.verify([self.train_shards[i] for i in indices], ahead)
        out = np.empty((len(ids), self.row_length), self.dtype)
        for index in np.unique(ids[:, 1]).tolist():
            here = ids[:, 1] == index
            out[here] = self._read_shard(self.train_shards[index], ids[here, 2])
        return out

    def _read_shard(self, shard: str, indices: np.ndarray) -> np.ndarray:
        shape, path = (self.wait(shard)["rows"], self.row_length), self.bin_path(shard)
        rows = np.memmap(path, self.dtype, "r", shape=shape)[indices]
        # The rank that verifies may not be done: a foreign id would end in a device assert
        if not self.verifies and (problem := self.foreign_id(rows, path)):
            raise UsageError(problem, PACK_AGAIN)
        return rows


@lru_cache(maxsize=8)
def permutation(seed: int, epoch: int, shard: int, n: int) -> np.ndarray:
    """
    The order of the `n` rows of a shard in an epoch.

    Sorts raw words of PCG64, a stream that numpy promises never to change, unlike that of
    Generator.permutation: a run can be resumed under another numpy.
    """
    order = np.argsort(np.random.PCG64([seed, epoch, shard]).random_raw(n), kind="stable")
    order.setflags(write=False)
    return order


def require_half(half: int) -> None:
    """Raise ValueError for a half of the validation rows that is none."""
    if half not in (0, 1, 2):
        raise ValueError(f"--eval_half={half}: 1 or 2, or 0 for all validation rows")


def inputs_and_targets(rows: np.ndarray, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Rows (B, T + 1) -> tokens and targets, (B, T) int64 each.

    A target is `ignore` where it is padding: a BOS after a BOS (`packing`). Every row begins with a
    BOS.
    """
    ids = rows.astype(np.int64)
    is_bos = ids == ids[:, :1]
    targets = np.where(is_bos[:, 1:] & is_bos[:, :-1], ignore, ids[:, 1:])
    return ids[:, :-1], targets


def flat(shard: str) -> str:
    """A shard's name as one flat file name; different names never give the same."""
    return shard.replace("%", "%25").replace("/", "%2F")


def stamp(path: Path) -> int | None:
    """When a file last changed, or None while it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any], at: str = "") -> list[str]:
    """
    What differs between two descriptions (`Rows.recipe`, or what holds one), a line per setting.

    A run that resumes compares what its checkpoint says with what is at hand. A description with
    a fingerprint is judged by that: where the same text lies on the disk is no difference.
    """
    was, now = recorded.get("fingerprint"), current.get("fingerprint")
    if was is not None and was == now:
        return []
    lines = []
    for name in sorted((recorded.keys() | current.keys()) - {"fingerprint"}):
        old, new = recorded.get(name), current.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{at}{name}.")
        elif old != new:
            lines.append(f"{at}{name}: was {old!r}, now {new!r}")
    if was is not None and not lines:
        return [f"{at}fingerprint: was {was!r}, now {now!r}"]
    return lines


# ---- Rows of several sources ---------------------------------------------------------------------


COLUMNS = [0, 2, 3]  # those of a mixture's `row_ids` that a bucket's have


class MixedRows(RowSequence):
    """The rows of a mixture: `buckets` in order, each with its rows and how many a pass takes."""

    def __init__(self, buckets: Mapping[str, tuple[Rows, int]]):
        self.parts = [rows for rows, _ in buckets.values()]
        self.counts = tuple(count for _, count in buckets.values())
        self.rows_per_pass = sum(self.counts)
        self.max_seq_len = self.parts[0].max_seq_len
        self.should_stop: Callable[[], bool] = lambda: False
        for rows in self.parts:
            rows.should_stop = lambda: self.should_stop()
        described = {
            name: {"count": count, "fingerprint": rows.fingerprint}
            for name, (rows, count) in buckets.items()
        }
        name = fingerprint({"mixture": list(described.items())})
        self.recipe = {"fingerprint": name, "buckets": described}

    def read(self, ids: np.ndarray, step_ids: np.ndarray) -> np.ndarray:
        dtype = np.result_type(*(rows.dtype for rows in self.parts))
        out = np.empty((len(ids), self.max_seq_len + 1), dtype)
        for i in np.unique(step_ids[:, 1]).tolist():
            here, of_step = (each[:, 1] == i for each in (ids, step_ids))
            out[here] = self.parts[i].read(ids[here][:, COLUMNS], step_ids[of_step][:, COLUMNS])
        return out

    def locate(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The `row_ids` of a mixture: (n, 4)."""
        passes, indices = np.divmod(numbers, self.rows_per_pass)
        buckets, own = np.empty_like(numbers), np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            now = passes == number
            bucket, item = order_of_pass(self.counts, seed, number)
            buckets[now], own[now] = bucket[indices[now]], item[indices[now]]
        own += passes * np.array(self.counts)[buckets]  # numbers in each bucket's own sequence
        out = np.empty((len(numbers), 4), np.int64)
        for i in np.unique(buckets).tolist():
            here = buckets == i
            out[here] = np.insert(self.parts[i].locate(own[here], seed), 1, i, axis=1)
        return out

    def epochs_for(self, rows_needed: int) -> float | None:
        """The number of passes through the mixture."""
        return rows_needed / self.rows_per_pass


@lru_cache(maxsize=2)
def order_of_pass(counts: tuple[int, ...], seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The order of a pass through `counts` rows of each bucket."""
    return interleave([np.ones(count, np.int64) for count in counts], seed, number)
