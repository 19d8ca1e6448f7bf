"""
Best-fit packing: token sequences of any length into rows of one length.

    documents -> pieces (BOS + tokens) -> pool -> rows (n, row_length)

A document is a piece; one longer than a row first gives off whole rows, and its tail is a piece.
Pieces wait in a bounded pool. A row takes the longest piece that fits what is left of it, again
and again. Where none fits, the shortest one is cut: its front fills the row, its rest returns to
the pool as a piece with a BOS of its own. Nothing is too short to be kept, because the shortest
pieces fill the smallest gaps. A gap of one place takes a lone BOS. Only the end of a stream may
leave a row unfilled: its tokens are dropped where they are at most MAX_DROPPED of all, else the row
is padded with BOS. Two BOS in a row are therefore padding, and nothing else.

Pieces that must not be cut (conversations) need only other answers: where none fits, the row is
filled up with lone BOS, and what is longer than a row loses its end.

Pure integers: knows no text, files or ranks. The rows depend on the sequence of documents alone,
not on how it was cut into batches.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

PACKING_RULE = 2  # part of every fingerprint of rows: raise it when the same input packs otherwise

# More pieces to choose from cut fewer documents. measured 2026-11, rows of 2,049, lognormal lengths
# (mean 820 tokens, 7.7% longer than a row): 256 pieces cut 16% of documents, 1,024 15%, 8,192 11%.
POOL_PIECES = 8192
POOL_TOKENS = 1 << 24  # bounds the memory of the pool where rows are very long
SPARE_TOKENS = 1 << 20  # used-up tokens that may stay in the store before it is compacted
MAX_DROPPED = 0.005  # share of a stream's tokens that may be dropped at its end
BLOCK_TOKENS = 1 << 20  # tokens laid out at a time: bounds the index arrays


@dataclass
class PackCounts:
    """What packing did. `rows * row_length == tokens + bos` always holds."""

    rows: int = 0
    documents: int = 0
    """Documents that came in, empty ones left out."""
    documents_cut: int = 0
    """Documents that lie in more than one piece; those longer than a row cannot but be."""
    tokens: int = 0
    """Tokens of documents that lie in rows, BOS not counted."""
    bos: int = 0
    extra_bos: int = 0
    """BOS that open no document: in front of the rests of cut ones, or padding at a row's end."""
    dropped: int = 0
    """Tokens of documents that lie in no row."""


class Packer:
    """
    Packs one stream of documents into rows of `row_length` tokens. With `cut`, documents are cut
    so that only the last row may be padded with BOS; without it they stay whole.

    Memory: the pool (at most POOL_TOKENS tokens), as much again, and the batch at hand.
    Raises ValueError for a row shorter than two tokens.
    """

    def __init__(
        self,
        row_length: int,
        bos_id: int,
        dtype: Any = np.uint16,
        pool_pieces: int = POOL_PIECES,
        cut: bool = True,
    ):
        if row_length < 2:
            raise ValueError(f"a row holds a BOS and at least one token, not {row_length} in all")
        self.row_length = row_length
        self.bos_id = bos_id
        self.cut = cut
        self.pool_pieces = max(1, min(pool_pieces, POOL_TOKENS // row_length))
        self.counts = PackCounts()
        self.store = np.empty(0, dtype)  # tokens of the pooled pieces, and used-up ones between
        # The pool: by length (BOS included), oldest first, 2 * start in store + (1: a rest)
        self.buckets: dict[int, deque[int]] = defaultdict(deque)
        self.lengths = 0  # bit n is set: there is a piece of length n
        self.pooled_pieces = 0
        self.pooled_tokens = 0  # without BOS
        # The plan: pieces in the order in which they lie in rows
        self.plan: list[tuple[int, int, int]] = []  # start in store, length, (1: opens no document)

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """
        Take documents `ids[offsets[i]:offsets[i + 1]]`; return the rows that are full by now.

        ids: token ids without BOS; offsets: (documents + 1,). Returns (n, row_length), n >= 0.
        """
        base = self.store.size
        self.store = np.concatenate([self.store, ids.astype(self.store.dtype)])
        bounds = (offsets + base).tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            self._take(start, end)
            while self.pooled_pieces > self.pool_pieces and self._can_fill():
                self._fill_row()
        rows = self._lay_out()
        if self.store.size > 2 * self.pooled_tokens + SPARE_TOKENS:
            self._compact()
        return rows

    def finish(self) -> np.ndarray:
        """Empty the pool: the last rows, (n, row_length)."""
        while self.pooled_pieces:
            self._fill_row()
        return self._lay_out()

    def _take(self, start: int, end: int) -> None:
        """Pool the document store[start:end], after the whole rows it gives off by itself."""
        if start == end:
            return
        self.counts.documents += 1
        whole = self.row_length - 1
        rest = 0
        if not self.cut and end - start > whole:
            self.counts.documents_cut += 1
            self.counts.dropped += end - start - whole
            end = start + whole
        while end - start > whole:
            self.plan.append((start, self.row_length, rest))
            start += whole
            rest = 1
        self.counts.documents_cut += rest
        self._put(start, end - start + 1, rest)

    def _put(self, start: int, length: int, rest: int) -> None:
        self.buckets[length].append(2 * start + rest)
        self.lengths |= 1 << length
        self.pooled_pieces += 1
        self.pooled_tokens += length - 1

    def _pop(self, length: int) -> tuple[int, int]:
        """Take the oldest piece of a length out of the pool: its start, and 1 if it is a rest."""
        bucket = self.buckets[length]
        piece = bucket.popleft()
        if not bucket:
            self.lengths ^= 1 << length
        self.pooled_pieces -= 1
        self.pooled_tokens -= length - 1
        return piece >> 1, piece & 1

    def _can_fill(self) -> bool:
        """True when the pool holds a row's worth of tokens."""
        return self.pooled_tokens + self.pooled_pieces >= self.row_length

    def _fill_row(self) -> None:
        """Plan one row. One that the whole pool cannot fill is padded, or dropped."""
        first = len(self.plan)
        gap = self.row_length
        while gap and self.pooled_pieces:
            fitting = self.lengths & ((2 << gap) - 1)
            if fitting:
                length = fitting.bit_length() - 1  # the longest that fits
                start, rest = self._pop(length)
                self.plan.append((start, length, rest))
                gap -= length
            elif gap == 1 or not self.cut:
                break
            else:
                length = (self.lengths & -self.lengths).bit_length() - 1  # the shortest there is
                start, rest = self._pop(length)
                self.plan.append((start, gap, rest))
                self._put(start + gap - 1, length - gap + 1, rest=1)
                self.counts.documents_cut += 1 - rest
                gap = 0
        if gap > 1 and self.cut and self._may_drop(first):
            self.counts.dropped += planned_tokens(self.plan[first:])
            del self.plan[first:]
        else:
            self.plan += [(0, 1, 1)] * gap

    def _may_drop(self, first: int) -> bool:
        """Whether the tokens planned from place `first` on are at most MAX_DROPPED of all."""
        total = self.counts.tokens + self.counts.dropped + planned_tokens(self.plan)
        return planned_tokens(self.plan[first:]) <= MAX_DROPPED * total

    def _lay_out(self) -> np.ndarray:
        """Turn the plan into rows and forget it."""
        plan = np.array(self.plan, dtype=np.int64).reshape(-1, 3)
        self.plan.clear()
        starts, lengths, rests = plan.T
        rows = np.empty((int(lengths.sum()) // self.row_length, self.row_length), self.store.dtype)
        step = max(1, BLOCK_TOKENS // self.row_length)  # pieces at a time
        done = 0
        for i in range(0, len(plan), step):
            part = gather(self.store, starts[i : i + step], lengths[i : i + step], self.bos_id)
            rows.reshape(-1)[done : done + part.size] = part
            done += part.size
        counts = self.counts
        counts.rows += len(rows)
        counts.bos += len(plan)
        counts.extra_bos += int(rests.sum())
        counts.tokens += rows.size - len(plan)
        return rows

    def _compact(self) -> None:
        """Move the pooled pieces to the front of a store that holds nothing else."""
        buckets = {length: bucket for length, bucket in self.buckets.items() if bucket}
        pieces = np.array([p for bucket in buckets.values() for p in bucket], dtype=np.int64)
        sizes = [len(bucket) for bucket in buckets.values()]
        lengths = np.repeat(np.array(list(buckets), dtype=np.int64), sizes) - 1  # without BOS
        moved = np.cumsum(lengths) - lengths
        index = np.arange(lengths.sum()) + np.repeat((pieces >> 1) - moved, lengths)
        self.store = self.store[index]
        fresh = iter((2 * moved + (pieces & 1)).tolist())
        for bucket in buckets.values():
            for i in range(len(bucket)):
                bucket[i] = next(fresh)


def planned_tokens(plan: list[tuple[int, int, int]]) -> int:
    """Tokens of documents in a plan, BOS not counted."""
    return sum(length - 1 for _, length, _ in plan)


def gather(store: np.ndarray, starts: np.ndarray, lengths: np.ndarray, bos_id: int) -> np.ndarray:
    """
    Concatenate pieces: a BOS, then `lengths[i] - 1` tokens of `store` from `starts[i]` on.

    Returns (lengths.sum(),), of the store's dtype.
    """
    ends = np.cumsum(lengths)
    opening = ends - lengths  # where the BOS of each piece lies
    index = np.arange(lengths.sum()) + np.repeat(starts - 1 - opening, lengths)
    index[opening] = 0
    tokens = store[index]
    tokens[opening] = bos_id
    return tokens


def pack(batches: Iterable[tuple[np.ndarray, np.ndarray]], packer: Packer) -> Iterator[np.ndarray]:
    """All rows of a stream of (ids, offsets) batches, in blocks; `packer.counts` tells the rest."""
    for ids, offsets in batches:
        yield packer.add(ids, offsets)
    yield packer.finish()
