"""
Packed sequences ("rows") on disk, and batches as a pure function of (rows, seed, step).

    texts -> tokenizer -> Packer -> rows/<name>/<shard>.bin and .json -> Shards, of each source
    conversations -> ids, or ~ids without loss -> Packer -> the same
    Shards -> Rows.batch(first, count) -> ids (count, T + 1) -> inputs_and_targets

The order of rows: a run reads the first shards that have enough rows for it (`Shards.first`), in an
endless sequence of epochs. An epoch visits these shards in a random order, several at a time (a
window), and the rows of a window in a random order, so that files of one folder mix; both depend on
(seed, epoch). A run that is made longer goes on with further shards. Step s of a run with R rows a
step reads rows s * R to (s + 1) * R - 1 of that sequence; every rank reads its slice. There is no
state: a step gets the same rows after a resume or with a new number of ranks.

A shard is complete once its .json exists, which is written last.
"""

import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import psutil

from nanochat import chat_format, common, dataset
from nanochat.chat_format import Message, Trained, render
from nanochat.common import IGNORE, UsageError
from nanochat.config import Console, user_message
from nanochat.dataset import Source, Text
from nanochat.recipe import digests
from nanochat.tokenizer import Tokenizer

# ---- Rows and their loss mask --------------------------------------------------------------------


def signed_ids(ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """Store a token with loss as its id and any other as ~id, which is negative; int32."""
    plain = np.array(ids, np.int32)
    return np.where(np.array(mask, bool), plain, ~plain)


def inputs_and_targets(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Stored rows (B, T + 1) -> tokens and targets, (B, T) int64 each.

    Every row starts with BOS. Targets are IGNORE for tokens stored as ~id and for padding: a BOS
    after a BOS.
    """
    stored = rows.astype(np.int64)
    ids = np.where(stored < 0, ~stored, stored)
    is_bos = ids == ids[:, :1]
    ignored = (stored[:, 1:] < 0) | (is_bos[:, 1:] & is_bos[:, :-1])
    return ids[:, :-1], np.where(ignored, IGNORE, ids[:, 1:])


# ---- Orders --------------------------------------------------------------------------------------
# `permutation` sorts the raw PCG64 stream, which numpy guarantees will never change (unlike the
# output of Generator.permutation), so a run can be resumed with another numpy version.


ORDER = "random shards"  # change it with the order: older runs are then not resumed in another one
WINDOW_SHARDS = 8  # smallest number of shards of a window, if there are as many
WINDOW_TOKENS = 1 << 25  # and of tokens: files may be small
SHARDS = 1 << 32  # for the order of shards, as windows have the numbers below


@lru_cache(maxsize=16)
def permutation(seed: int, epoch: int, window: int, n: int) -> np.ndarray:
    """Return the order of the `n` rows of a window in an epoch, or of things numbered otherwise."""
    order = np.argsort(np.random.PCG64([seed, epoch, window]).random_raw(n), kind="stable")
    order.setflags(write=False)
    return order


@lru_cache(maxsize=64)
def make_windows(
    tokens: tuple[int, ...], ends: tuple[int, ...], seed: int, epoch: int
) -> list[np.ndarray]:
    """
    Return the shards of each window of an epoch, ascending. tokens: of each shard. ends: numbers of
    shards; those up to the first come first, and so on. A small window at the end joins the one
    before.
    """
    found = []
    for begin, end in pairwise(dict.fromkeys((0, *ends))):
        order = begin + permutation(seed, epoch, SHARDS + begin, end - begin)
        windows, first, size = [], 0, 0
        for last, shard in enumerate(order, 1):
            size += tokens[shard]
            if last - first >= WINDOW_SHARDS and size >= WINDOW_TOKENS:
                windows.append(order[first:last])
                first, size = last, 0
        rest = order[first:]
        found += [*windows[:-1], np.concatenate([windows[-1], rest])] if windows else [rest]
    return [np.sort(window) for window in found]


# ---- Reading -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Shards:
    """The rows of one source: training shards in order, and a validation shard."""

    folder: Path
    """Directory; may contain more shards than this run reads."""
    train_shards: list[str]
    val_shard: str
    dtype: np.dtype
    max_seq_len: int
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Shard -> files of the source packed into it, in order."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """Training shard -> rough number of rows, before it is packed."""
    ends: tuple[int, ...] = ()
    """Numbers of training shards that the run read when it began and after each time that it was
    made longer; () = all."""
    is_cut: bool = False
    """Whether the source has more training shards."""
    opened: dict[str, np.ndarray] = field(default_factory=dict)
    """Rows of each shard that was opened."""

    def first(self, lengths: Sequence[int] | None) -> "Shards":
        """
        The same rows with only those training shards that a run reads: the first ones that have as
        many rows as it needs, by the expected number where they are not packed. lengths: numbers of
        rows, when it began and after each time that it was made longer; None: all shards.
        """
        if lengths is None:
            return self
        found, ends, most = 0.0, [0], list(accumulate(lengths, max))
        for i, shard in enumerate(self.train_shards, 1):
            while len(ends) <= len(most) and found >= most[len(ends) - 1]:
                ends.append(i - 1)
            found += self.record(shard)["rows"] if self.is_packed(shard) else self.expected[shard]
        ends += [len(self.train_shards)] * (len(most) + 1 - len(ends))
        is_cut = self.is_cut or ends[-1] < len(self.train_shards)
        kept = self.train_shards[: ends[-1]]
        return replace(self, train_shards=kept, ends=tuple(ends[1:]), is_cut=is_cut)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of rows of each training shard. Raises UsageError if one is not packed."""
        records = [
            self.record(shard)["rows"] for shard in map(self.require_packed, self.train_shards)
        ]
        return np.array(records, np.int64)

    @property
    def num_rows(self) -> int:
        """Number of training rows. Raises UsageError if a shard is not packed."""
        return int(self.sizes.sum())

    def row_ids(self, first: int, count: int, seed: int) -> np.ndarray:
        """
        Return the ids of the rows number `first` to `first + count` of a run on this source alone,
        (count, 3): epoch, index of the shard, index in the shard. Raises UsageError if a shard is
        not packed, if there are no rows, or fewer than these although the source has more.
        """
        total, last = self.num_rows, first + count
        if not total or (self.is_cut and last > total):
            problem = f"{self.folder} has {total:,} training rows for this run, fewer than {last:,}"
            fix = "pack as many as the run reads (pack_rows)" if self.is_cut else "use more text"
            raise UsageError(problem, fix)
        epochs, numbers = np.divmod(first + np.arange(count, dtype=np.int64), total)
        tokens, ids = tuple(self.sizes * self.max_seq_len), np.empty((count, 3), np.int64)
        ends = self.ends or (len(tokens),)
        for epoch in np.unique(epochs).tolist():
            begin = 0  # of a window, in the epoch
            for window, shards in enumerate(make_windows(tokens, ends, seed, epoch)):
                bounds = np.cumsum(self.sizes[shards])
                size = int(bounds[-1])
                here = (epochs == epoch) & (begin <= numbers) & (numbers < begin + size)
                if here.any():
                    row = permutation(seed, epoch, window, size)[numbers[here] - begin]
                    at = np.searchsorted(bounds, row, side="right")
                    ids[here, 0], ids[here, 1] = epoch, shards[at]
                    ids[here, 2] = row - bounds[at] + self.sizes[shards[at]]
                begin += size
        return ids

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of `ids`, (n, max_seq_len + 1), in the stored dtype."""
        out = np.empty((len(ids), self.max_seq_len + 1), self.dtype)
        for shard in np.unique(ids[:, 1]).tolist():
            here = ids[:, 1] == shard
            out[here] = self.open(self.train_shards[shard])[ids[here, 2]]
        return out

    def batch(self, first: int, count: int, seed: int) -> np.ndarray:
        """
        Return the rows of `row_ids`, (count, max_seq_len + 1), in the stored dtype. Raises
        UsageError if a shard is missing or damaged.
        """
        return self.read(self.row_ids(first, count, seed))

    def val_batches(
        self, rows_per_batch: int, num_rows: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """
        Yield this rank's share of the first `num_rows` validation rows, in a fixed random order.

        The rows do not depend on batch size, ranks or number of training shards. Yields (at most
        rows_per_batch, max_seq_len + 1). Raises like `batch`.
        """
        rows = self.open(self.val_shard)
        order = permutation(0, 0, 0, len(rows))[:num_rows]
        first, last = (len(order) * r // world_size for r in (rank, rank + 1))
        for i in range(first, last, rows_per_batch):
            yield rows[order[i : min(i + rows_per_batch, last)]]

    def open(self, shard: str) -> np.ndarray:
        """
        Return the rows of a shard, memory-mapped, (n, max_seq_len + 1). Its digest is checked when
        a run first opens it; a damaged shard counts as not packed from then on.
        """
        if shard not in self.opened:
            counts, path = self.record(self.require_packed(shard)), self.path(shard, ".bin")
            size = counts["rows"] * (self.max_seq_len + 1) * self.dtype.itemsize
            fits = path.is_file() and path.stat().st_size == size  # and the record is not damaged
            if not fits or common.sha256_file(path) != counts["sha256"]:
                self.path(shard, ".json").unlink(missing_ok=True)  # several ranks may find it
                raise UsageError(
                    f"{path} is damaged: it does not match its record; it was not used",
                    "the same command (training: with --resume=auto) packs it again",
                )
            flat = np.memmap(path, self.dtype, "r") if counts["rows"] else np.empty(0, self.dtype)
            self.opened[shard] = flat.reshape(-1, self.max_seq_len + 1)
        return self.opened[shard]

    def is_packed(self, shard: str) -> bool:
        """Whether the rows of a shard are complete."""
        return self.path(shard, ".json").exists()

    def require_packed(self, shard: str) -> str:
        """Return a shard. Raises UsageError if it is not packed."""
        if not self.is_packed(shard):
            fix = "the same command with --resume=auto packs it"
            raise UsageError(f"{shard} is not packed in {self.folder}", fix)
        return shard

    def record(self, shard: str) -> dict[str, Any]:
        """The record of a packed shard: the counts of its `Packer`, and its SHA-256."""
        return common.read_json(self.path(shard, ".json"))

    def totals(self, shards: Sequence[str] | None = None) -> Counter[str]:
        """Sum the counts of packed shards; default: the training shards."""
        total = Counter[str]()
        for shard in filter(self.is_packed, shards or self.train_shards):
            total.update({k: n for k, n in self.record(shard).items() if isinstance(n, int)})
            total["shards"] += 1
        return total

    def path(self, shard: str, suffix: str) -> Path:
        """File of a shard: .bin has its rows, .json their record, .lock is held while packing."""
        name = shard.replace("%", "%25").replace("/", "%2F")  # injective
        return self.folder / f"{name}{suffix}"


# ---- The rows of a run ---------------------------------------------------------------------------

BLOCK = 10_000  # rows among which each source has exactly its share


class Block(NamedTuple):
    """Which source each row of a block comes from."""

    sources: np.ndarray
    """Index of the source of each row."""
    numbers: np.ndarray
    """Number of each row among those of its source in the block."""


def split_block(shares: Sequence[float]) -> np.ndarray:
    """Rows of each source in a block, in proportion to the shares, by largest remainder."""
    exact = np.array(shares) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: BLOCK - counts.sum()]] += 1
    return counts


@lru_cache(maxsize=64)
def draw_block(shares: tuple[float, ...], seed: int, block: int) -> Block:
    """
    A random order of the sources in a block, in which any run of rows has about the same shares:
    row j of n of a source is at a random point between j / n and (j + 1) / n of the block.
    """
    counts = split_block(shares)
    random = np.random.PCG64([seed, block]).random_raw(BLOCK) / 2.0**64
    numbers = np.concatenate([np.arange(count) for count in counts])
    sources = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort((numbers + random) / counts[sources], kind="stable")
    sources, numbers = sources[order], numbers[order]
    return Block(sources, numbers)


@dataclass(eq=False)
class Rows:
    """
    The rows of a run: those of one source, or of several in proportion to their shares. Which
    source a row comes from depends on (seed, number of the row) only; a source that ends begins
    anew while others go on.
    """

    parts: Mapping[str, Shards]
    """Name of the source -> its rows, which all runs share."""
    shares: tuple[float, ...]
    recipe: Mapping[str, Any]
    """JSON-ready settings that determine the rows, with their fingerprint and `max_seq_len`; saved
    in every checkpoint."""

    def __post_init__(self) -> None:
        self.max_seq_len: int = self.recipe["max_seq_len"]
        self.fingerprint: str = self.recipe["fingerprint"]

    @property
    def only(self) -> Shards:
        """The rows of a single source."""
        [shards] = self.parts.values()
        return shards

    def first(self, lengths: Sequence[int] | None) -> "Rows":
        """As `Shards.first`, of each source."""
        if lengths is None:
            return self
        spread = len(self.parts) + 1  # by which the first rows of a block may exceed its share
        parts, counts = {}, split_block(self.shares).tolist()
        for (name, part), count in zip(self.parts.items(), counts, strict=True):
            parts[name] = part.first([n and math.ceil(n * count / BLOCK) + spread for n in lengths])
        return replace(self, parts=parts)

    @property
    def num_rows(self) -> int:
        """Number of training rows of all sources. Raises UsageError if a shard is not packed."""
        return sum(part.num_rows for part in self.parts.values())

    def place(self, first: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The source of each of the rows number `first` to `first + count` of a run, and its number
        among the rows of that source, (count,) each.
        """
        blocks, within = np.divmod(first + np.arange(count, dtype=np.int64), BLOCK)
        sources, numbers = np.empty_like(within), np.empty_like(within)
        counts = split_block(self.shares)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            drawn = draw_block(self.shares, seed, block)
            sources[here] = drawn.sources[within[here]]
            numbers[here] = block * counts[sources[here]] + drawn.numbers[within[here]]
        return sources, numbers

    def row_ids(self, first: int, count: int, seed: int) -> np.ndarray:
        """
        Return the ids of the rows number `first` to `first + count`, (count, 4): source, and what
        `Shards.row_ids` returns and raises. The numbers of a source's rows ascend, so each is read
        in the order of a run on that source alone.
        """
        sources, numbers = self.place(first, count, seed)
        ids = np.empty((count, 4), np.int64)
        for i, rows in enumerate(self.parts.values()):
            here = np.flatnonzero(sources == i)
            if len(here):
                begin = int(numbers[here].min())
                span = rows.row_ids(begin, int(numbers[here].max()) - begin + 1, seed)
                ids[here, 0], ids[here, 1:] = i, span[numbers[here] - begin]
        return ids

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of `ids`, (n, max_seq_len + 1), in the stored dtype."""
        first, *_ = parts = list(self.parts.values())
        out = np.empty((len(ids), self.max_seq_len + 1), first.dtype)
        for i in np.unique(ids[:, 0]).tolist():
            here = ids[:, 0] == i
            out[here] = parts[i].read(ids[here, 1:])
        return out

    def batch(self, first: int, count: int, seed: int) -> np.ndarray:
        """As `Shards.batch`."""
        return self.read(self.row_ids(first, count, seed))

    def val_rows(self, num_rows: int) -> dict[str, int]:
        """
        How many of at most `num_rows` validation rows each source has, at least one: in proportion
        to the shares, so the source with the least text for its share limits all.
        """
        found = [len(part.open(part.val_shard)) for part in self.parts.values()]
        most = min(n / share for n, share in zip(found, self.shares, strict=True))
        total, pairs = min(num_rows, most), zip(self.parts, self.shares, strict=True)
        return {name: max(1, round(share * total)) for name, share in pairs}

    def val_batches(
        self, rows_per_batch: int, num_rows: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """As `Shards.val_batches`, of one source after another in proportion to the shares."""
        for name, count in self.val_rows(num_rows).items():
            yield from self.parts[name].val_batches(rows_per_batch, count, rank, world_size)

    def table(self, num_rows: int, seed: int) -> dict[str, Any]:
        """Table for a record: what the first `num_rows` rows of a run took of each source."""
        counts, lines = split_block(self.shares) * (num_rows // BLOCK), []
        rest = draw_block(self.shares, seed, num_rows // BLOCK).sources[: num_rows % BLOCK]
        counts = counts + np.bincount(rest, minlength=len(counts))
        for (name, rows), used in zip(self.parts.items(), counts.tolist(), strict=True):
            epochs = "below 1" if rows.is_cut else f"{used / max(1, rows.num_rows):.2f}"
            tokens = f"{used * self.max_seq_len:,}"
            lines.append([name, tokens, epochs, f"{used / max(1, num_rows):.1%}"])
        return {"title": "Text", "columns": ["Source", "Tokens", "Epochs", "Share"], "rows": lines}


# ---- Best-fit packing of documents into rows -----------------------------------------------------
# Every row starts with BOS. The rest of a cut document goes into a later row, after a BOS.

# A larger pool cuts fewer documents. Measured: 2026-11, rows of 2,049, lognormal lengths
# (mean 820 tokens; 7.7% of documents are longer than a row): 256 pieces cut 16%, 1,024 cut 15%,
# 8,192 cut 11%.
POOL_PIECES = 8192
POOL_TOKENS = 1 << 24  # limits the pool's memory for very long rows
MAX_DROPPED = 0.005  # maximum fraction of a stream's tokens dropped at its end


class Packer:
    """
    Packs a stream of documents into rows of `row_length` tokens, at least 2.

    With `cut`, documents are split so that only the last row may be padded with more than one BOS;
    without it, they stay whole and must not be longer than a row. Memory: the pool (at most
    POOL_TOKENS tokens) and twice the current batch.
    """

    def __init__(self, row_length: int, bos_id: int, dtype: Any, cut: bool = True):
        self.row_length = row_length
        self.bos = np.array([bos_id], dtype)
        self.cut = cut
        self.pool_pieces = max(1, min(POOL_PIECES, POOL_TOKENS // row_length))
        names = ("rows", "documents", "documents_cut", "tokens", "dropped")
        self.counts = Counter[str](dict.fromkeys(names, 0))  # tokens without BOS
        # Pool of pieces by length, oldest first: (tokens with BOS, rest of a cut document?)
        self.pool: dict[int, deque[tuple[np.ndarray, bool]]] = defaultdict(deque)
        self.lengths = 0  # bit n is set if the pool has a piece of length n
        self.pooled_pieces = 0
        self.pooled_tokens = 0  # with BOS
        self.placed: list[np.ndarray] = []  # pieces of completed rows, in order

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """
        Add documents `ids[offsets[i]:offsets[i + 1]]` and return the rows completed so far.

        ids: token ids without BOS; offsets: (documents + 1,). Returns (n, row_length), n >= 0.
        """
        tokens = np.insert(ids.astype(self.bos.dtype), offsets[:-1], self.bos[0])
        bounds = (offsets + np.arange(len(offsets))).tolist()
        self.counts["documents"] += int(np.count_nonzero(np.diff(offsets)))
        for start, end in pairwise(bounds):
            if end - start > self.row_length:
                self._put(self._cut_rows(tokens[start:end]), True)
            elif end - start > 1:
                self._put(tokens[start:end], False)
            while self.pooled_pieces > self.pool_pieces and self.pooled_tokens >= self.row_length:
                self._fill_row()
        return self._lay_out()

    def finish(self) -> np.ndarray:
        """Empty the pool and return the last rows, (n, row_length)."""
        while self.pooled_pieces:
            self._fill_row()
        return self._lay_out()

    def _cut_rows(self, document: np.ndarray) -> np.ndarray:
        """Place the full rows of a long document (with BOS); return the rest."""
        whole = self.row_length - 1
        n = (len(document) - 2) // whole  # leaves at least one token
        rows = np.full((n, self.row_length), self.bos)
        rows[:, 1:] = document[1 : 1 + n * whole].reshape(n, whole)
        self.placed.append(rows.reshape(-1))
        self.counts.update(documents_cut=1, tokens=n * whole)
        return np.concatenate([self.bos, document[1 + n * whole :]])

    def _put(self, piece: np.ndarray, is_rest: bool) -> None:
        """Add a copy of a piece to the pool; a view would keep its batch in memory."""
        length = len(piece)
        self.pool[length].append((piece.copy(), is_rest))
        self.lengths |= 1 << length
        self.pooled_pieces += 1
        self.pooled_tokens += length

    def _pop(self, length: int) -> tuple[np.ndarray, bool]:
        """Remove the oldest piece of a length; return it and whether it is a rest."""
        if len(self.pool[length]) == 1:
            self.lengths ^= 1 << length
        self.pooled_pieces -= 1
        self.pooled_tokens -= length
        return self.pool[length].popleft()

    def _fill_row(self) -> None:
        """Fill one row. If the pool runs out, pad the row, or drop it if it has few tokens."""
        counts, pieces, gap = self.counts, [], self.row_length
        while gap and self.pooled_pieces:
            if fitting := self.lengths & ((2 << gap) - 1):  # bits of the lengths up to the gap
                piece, _ = self._pop(fitting.bit_length() - 1)  # the longest that fits
            elif gap == 1 or not self.cut:
                break
            else:  # cut the shortest piece
                piece, is_rest = self._pop((self.lengths & -self.lengths).bit_length() - 1)
                self._put(np.concatenate([self.bos, piece[gap:]]), True)
                counts["documents_cut"] += not is_rest
                piece = piece[:gap]
            pieces.append(piece)
            gap -= len(piece)
        tokens = self.row_length - gap - len(pieces)
        all_tokens = counts["tokens"] + counts["dropped"] + tokens
        if gap > 1 and self.cut and tokens <= MAX_DROPPED * all_tokens:
            counts["dropped"] += tokens
            return
        counts["tokens"] += tokens
        self.placed += [*pieces, self.bos.repeat(gap)]

    def _lay_out(self) -> np.ndarray:
        """Return the placed pieces as rows, (n, row_length), and clear them."""
        rows = np.concatenate([self.bos[:0], *self.placed]).reshape(-1, self.row_length)
        self.placed.clear()
        self.counts["rows"] += len(rows)
        return rows


Batches = Iterable[tuple[np.ndarray, np.ndarray]]  # ids and offsets, as `Packer.add` takes them


def write_all(out: IO[bytes], rows: np.ndarray, path: Path) -> None:
    """Write rows to an unbuffered file; errors name `path`."""
    left = memoryview(rows.tobytes())
    with common.errors_name(path):
        while left:
            left = left[out.write(left) :]


def write_shard(
    rows: Shards, shard: str, packer: Packer, batches: Batches, about: Mapping[str, Any]
) -> None:
    """
    Pack batches into a shard, atomically. `about` joins the shard's record; it may change while
    `batches` is consumed.
    """
    path = rows.path(shard, ".bin")
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    out = part.open("wb", buffering=0)  # so that all errors of writing are those of `write`
    try:
        with out:
            for ids, offsets in batches:
                write_all(out, packer.add(ids, offsets), path)
            write_all(out, packer.finish(), path)
        common.fsync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    record = {**packer.counts, **about, "sha256": common.sha256_file(path)}
    common.write_json(rows.path(shard, ".json"), record)


# ---- Text ----------------------------------------------------------------------------------------
# A shard of rows is packed from one file of the source, or from several small ones. It depends only
# on these, the tokenizer and the row length. Processes share the work through lock files.

BATCH_CHARS = 1 << 22  # of texts encoded at a time
MESSAGE_CHARS = 4000  # of an error: what a pipe takes without a reader
GROUP_ROWS = 512  # small files are combined into shards of about this many rows
# Rough, on the high side: a token is about 4 bytes of text, a byte of parquet or gzip about 3.3;
# `Shards.first` counts the rows of packed shards
TOKENS_PER_STORED_BYTE = {".parquet": 1.0, ".gz": 1.0}
TOKENS_PER_BYTE = 0.3


def open_rows(text: Text, tokenizer: Tokenizer, max_seq_len: int) -> Rows:
    """Open the rows of a text under rows/; they need not be packed yet."""
    parts = {source.name: open_shards(source, tokenizer, max_seq_len) for source in text.sources}
    made_of = {"tokenizer": tokenizer.fingerprint, "max_seq_len": max_seq_len, "order": ORDER}
    of_run = common.fingerprint({"text": text.fingerprint, **made_of})
    recipe = {"fingerprint": of_run, "text": text.describe(), **made_of}
    return Rows(parts, tuple(text.shares), recipe)


def open_shards(source: Source, tokenizer: Tokenizer, max_seq_len: int) -> Shards:
    """
    Open the rows of one source.

    The folder name is a hash of everything that determines the rows of a shard, this file's and
    dataset.py's code included, so runs with more or fewer shards share it.
    """
    code = digests(sys.modules[__name__], dataset)
    made_of = {"tokenizer": tokenizer.fingerprint, "max_seq_len": max_seq_len, "code": code}
    name = common.fingerprint({"text": source.id, **made_of})
    groups = group_files(source, max_seq_len + 1)
    files = {**groups, source.val_shard: [source.val_shard]}
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    expected = {
        name: sum(expected_rows(source, file, max_seq_len + 1) for file in group)
        for name, group in groups.items()
    }
    folder = common.base_dir() / "rows" / name
    return Shards(folder, list(groups), source.val_shard, dtype, max_seq_len, files, expected)


def expected_rows(source: Source, file: str, row_length: int) -> float:
    """Rough number of rows of a file, from its size."""
    tokens = TOKENS_PER_STORED_BYTE.get(Path(file).suffix.lower(), TOKENS_PER_BYTE)
    return source.files[file]["bytes"] * tokens / row_length


def group_files(source: Source, row_length: int) -> dict[str, list[str]]:
    """
    Group the training files of a source into shards of rows: name -> files, in order.

    Each group is the shortest run of consecutive files with about GROUP_ROWS rows of text; a
    smaller one at the end joins the previous group. A group of one file keeps its name. Depends
    only on row_length and on the ordered files and their sizes, so the first groups do not change
    when more files are used.
    """
    runs, rows = [[]], 0.0
    for file in source.train_shards:
        if rows >= GROUP_ROWS:
            runs.append([])
            rows = 0.0
        runs[-1].append(file)
        rows += expected_rows(source, file, row_length)
    if rows < GROUP_ROWS and len(runs) > 1:
        runs[-2:] = [runs[-2] + runs[-1]]
    names = [run[0] for run in runs]
    for i, run in enumerate(runs):
        if len(run) > 1:
            names[i] += f"+{len(run) - 1}-{common.fingerprint(run)[:8]}"
    return dict(zip(names, runs, strict=True))


def missing_shards(
    rows: Rows, text: Text, lengths: Sequence[int] | None = None
) -> list[tuple[Shards, Source, str]]:
    """
    The shards still to pack, with those of their source: for validation, and those that a run of
    these `lengths` reads (`Shards.first`), or all.
    """
    return [
        (part, source, shard)
        for part, source in zip(rows.first(lengths).parts.values(), text.sources, strict=True)
        for shard in (part.val_shard, *part.train_shards)
        if not part.is_packed(shard)
    ]


def pack_text(
    rows: Rows, text: Text, tokenizer: Tokenizer, lengths: Sequence[int] | None = None
) -> Rows:
    """
    Pack missing shards in order until there are enough for a run of these `lengths` (default: all).
    Returns the rows of this run.

    Shares the work with other processes that call it, and returns when all of it is done. Raises
    ValueError for unreadable files.
    """
    while todo := missing_shards(rows, text, lengths):
        for part, source, shard in todo:
            with common.try_lock(part.path(shard, ".lock")) as mine:
                if mine and not part.is_packed(shard):
                    pack_shard(part, shard, source, tokenizer)
                    break
        else:  # other processes are packing all of them: wait for the first
            part, _, shard = todo[0]
            with common.hold_lock(part.path(shard, ".lock"), f"packing {shard}"):
                pass
    return rows.first(lengths)


def pack_shard(rows: Shards, shard: str, source: Source, tokenizer: Tokenizer) -> None:
    """Pack one shard, in bounded memory. The caller must hold the shard's lock."""
    skipped, about = Counter[str](), {"text_bytes": 0, "skipped": 0, "empty_files": 0}

    def encoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for file in rows.files[shard]:
            before = about["text_bytes"]
            for texts in batch_texts(source.texts(file, skipped=skipped)):
                about["text_bytes"] += sum(len(text.encode()) for text in texts)
                yield tokenizer.encode_flat(texts)
            about["empty_files"] += about["text_bytes"] == before
        about["skipped"] = skipped.total()

    packer = Packer(rows.max_seq_len + 1, tokenizer.bos_id, rows.dtype)
    write_shard(rows, shard, packer, encoded(), about)
    print(f"packed {common.printable(shard)}: {packer.counts['rows']:,} rows", flush=True)


def pack_rows(
    rows: Rows,
    text: Text,
    tokenizer: Tokenizer,
    lengths: Sequence[int] | None = None,
    workers: int | None = None,
) -> Rows:
    """
    `pack_text` in up to `workers` processes (default: one per core and per free GiB), which end if
    this one does; if one is killed, this one does the rest. Finished shards are kept. Raises
    ValueError if one fails.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    most = min(cores, psutil.virtual_memory().available >> 30)
    workers = min(workers or most, len(missing_shards(rows, text, lengths)))
    if workers < 2:
        return pack_text(rows, text, tokenizer, lengths)
    spawn = multiprocessing.get_context("spawn")
    folders = [part.folder for part in rows.parts.values()]
    errors, sender = spawn.Pipe(duplex=False)
    args = text, tokenizer.content, rows.max_seq_len, lengths, folders, sender
    processes = [spawn.Process(target=pack_alone, args=args, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    while running := [each.sentinel for each in processes if each.is_alive()]:
        if any(each.exitcode for each in processes):
            break
        wait(running)
    failed = [each.exitcode for each in processes if each.exitcode]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
    if errors.poll():
        raise ValueError(f"packing failed, finished shards are kept: {errors.recv()}")
    if failed:  # killed by a signal
        print("a packing process was killed, probably for lack of memory; one goes on", flush=True)
    return pack_text(rows, text, tokenizer, lengths)


def pack_alone(
    text: Text,
    content: Any,
    max_seq_len: int,
    lengths: Sequence[int] | None,
    folders: Sequence[Path],
    sender: Connection,
) -> None:
    """
    One process of `pack_rows`. content: of the tokenizer. folders: of the rows that the parent
    opened; here they are others if code was edited in between. sender: of the message of an error.
    """
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the unfinished file
    threading.Thread(target=exit_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = "1"  # one core each
    try:
        tokenizer = Tokenizer(content)
        rows = open_rows(text, tokenizer, max_seq_len)
        if [part.folder for part in rows.parts.values()] != folders:
            raise UsageError("rows.py or dataset.py was edited just now", "rerun the command")
        pack_text(rows, text, tokenizer, lengths)
    except Exception as error:
        message = user_message(error) or "".join(traceback.format_exception(error))
        sender.send(message[-MESSAGE_CHARS:])
        sys.exit(1)


def exit_with_parent() -> None:
    """End this process when its parent has ended, also by a signal."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def batch_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into lists of about BATCH_CHARS characters."""
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


# ---- Conversations -------------------------------------------------------------------------------
# Only the answers have loss, by default. A conversation stays in one row; padding is BOS without
# loss. Most conversations continue the one before: users change the topic, data sets have one topic
# a conversation, and a model that only saw those falls apart after a few questions.

CHAT_SHARD = "rows"  # the only one
JOINED = 0.75  # share of the conversations that continue the one before, where both fit in a row


class ChatPart(NamedTuple):
    """Conversations of a mixture."""

    conversations: Iterable[Sequence[Message]]
    identity: Mapping[str, Any]
    """JSON-ready; determines the conversations and their order."""
    repeats: float = 1.0
    """How often each is used in an epoch; 1.5: all once, and a random half again."""
    tokens: int | None = None
    """Tokens used in an epoch, to the nearest conversation, instead of repeats."""


def open_chat_rows(
    parts: Mapping[str, ChatPart],
    seed: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
    trained: Trained = "assistant",
) -> Rows:
    """
    Open the rows of a mixture of conversations, which need not be packed yet. Packing is fast, so
    an edit of this file or of chat_format.py packs them again.
    """
    named = [{"name": n, "amount": list(p[2:]), **p.identity} for n, p in parts.items()]
    made_of = {"buckets": named, "seed": seed, "tokenizer": tokenizer.fingerprint}
    made_of |= {"max_seq_len": max_seq_len, "trained": trained}
    made_of["code"] = digests(sys.modules[__name__], chat_format)
    return reopen_chat_rows({**made_of, "fingerprint": common.fingerprint(made_of)})


def reopen_chat_rows(recipe: Mapping[str, Any]) -> Rows:
    """Open the rows with this `recipe`, as saved in a checkpoint."""
    folder, T = common.base_dir() / "rows" / recipe["fingerprint"], recipe["max_seq_len"]
    shards = Shards(folder, [CHAT_SHARD], CHAT_SHARD, np.dtype("<i4"), T)
    return Rows({"conversations": shards}, (1.0,), recipe)


def pack_chats(rows: Rows, parts: Mapping[str, ChatPart], seed: int, tokenizer: Tokenizer) -> None:
    """
    Pack the rows of `open_chat_rows` unless that was done before. The record of the shard has, by
    bucket, its conversations, their tokens (with BOS) and tokens with loss, and how many
    conversations and tokens are used.

    Raises ValueError if a bucket has no token to train on.
    """
    shards = rows.only
    with common.hold_lock(shards.path(CHAT_SHARD, ".lock"), f"packing {', '.join(parts)}"):
        if shards.is_packed(CHAT_SHARD):
            return
        used, about = [], {}
        for number, (name, part) in enumerate(parts.items()):
            trained = rows.recipe["trained"]
            every = encode_chats(name, part.conversations, tokenizer, rows.max_seq_len, trained)
            order, lengths = choose_chats(every, part, seed, number)
            used += [every[i] for i in order]
            about[name] = {
                "conversations": len(every),
                "used": len(order),
                "tokens": int(lengths.sum()),
                "trained": sum(int((ids >= 0).sum()) for ids in every),
                "used_tokens": int(lengths[order].sum()),
            }
        mixed = (used[i] for i in permutation(seed, 0, len(parts), len(used)))
        packer = Packer(rows.max_seq_len + 1, ~tokenizer.bos_id, shards.dtype, cut=False)
        joined = join_chats(mixed, seed, rows.max_seq_len)
        alone = ((ids, np.array([0, len(ids)])) for ids in joined)
        write_shard(shards, CHAT_SHARD, packer, alone, {"buckets": about})


def encode_chats(
    name: str,
    conversations: Iterable[Sequence[Message]],
    tokenizer: Tokenizer,
    max_seq_len: int,
    trained: Trained,
) -> list[np.ndarray]:
    """
    Encode conversations as `signed_ids` without BOS. What is longer than a row is cut;
    conversations without a token to train on are skipped. Prints the number of both.
    """
    print(f"encoding {name}", flush=True)
    rendered = (render(tokenizer, chat, max_seq_len + 1, trained) for chat in conversations)
    every = [signed_ids(*each)[1:] for each in rendered]
    kept = [ids for ids in every if (ids >= 0).any()]
    cut, skipped = sum(len(ids) == max_seq_len for ids in kept), len(every) - len(kept)
    if cut or skipped:
        print(
            f"{name}: of {len(every):,} conversations, {cut:,} fill a row of {max_seq_len:,} "
            f"tokens (what is longer is cut) and {skipped:,} have no token to train on (skipped)",
            flush=True,
        )
    if not kept:
        fix = "use shorter conversations, or --val_mixture if these are the held-out ones"
        raise ValueError(f"{name} has no token to train on within {max_seq_len:,}; {fix}")
    return kept


def choose_chats(
    every: Sequence[np.ndarray], part: ChatPart, seed: int, bucket: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the indices of the conversations used in an epoch, and the length of each conversation
    with its BOS. Each pass over them has a random order; the last one may end early.
    """
    n, lengths = len(every), np.array([len(ids) + 1 for ids in every])
    repeats = part.repeats if part.tokens is None else part.tokens / lengths.sum()
    passes = [permutation(seed, time, bucket, n) for time in range(math.ceil(repeats))]
    order = np.concatenate([np.empty(0, np.int64), *passes])
    if part.tokens is None:
        return order[: round(repeats * n)], lengths
    middles = np.cumsum(lengths[order]) - lengths[order] / 2  # to the nearest conversation
    return order[: int(np.searchsorted(middles, part.tokens))], lengths


def join_chats(chats: Iterator[np.ndarray], seed: int, longest: int) -> Iterator[np.ndarray]:
    """Yield chats of one or more conversations, up to `longest` tokens if there are several."""
    rng, joined = random.Random(seed), next(chats, None)
    if joined is None:
        return
    for ids in chats:
        if rng.random() < JOINED and len(joined) + len(ids) <= longest:
            joined = np.concatenate([joined, ids])
        else:
            yield joined
            joined = ids
    yield joined
