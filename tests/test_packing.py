"""Best-fit packing: token conservation, row layout, independence of batching, bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import packing
from nanochat.packing import Packer

BOS = 0

documents = st.lists(st.integers(0, 60), max_size=60) | st.lists(st.integers(0, 900), max_size=9)
row_lengths = st.integers(2, 24)
pools = st.integers(1, 12)


def stream(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents of the given lengths with unique tokens other than BOS."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return np.arange(1, offsets[-1] + 1, dtype=np.uint32), offsets


def batches(ids: np.ndarray, offsets: np.ndarray, size: int):
    """Yield the stream in batches of `size` documents."""
    for i in range(0, len(offsets) - 1, size):
        part = offsets[i : i + size + 1]
        yield ids[part[0] : part[-1]], part - part[0]


def packed(lengths, row_length, pool=8, size=1000, dtype=np.uint32) -> tuple[np.ndarray, Packer]:
    packer = Packer(row_length, BOS, dtype)
    packer.pool_pieces = pool
    blocks = [*(packer.add(*batch) for batch in batches(*stream(lengths), size)), packer.finish()]
    return np.concatenate([np.empty((0, row_length), dtype), *blocks]), packer


def simple_rows(lengths: list[int], row_length: int, pool_pieces: int) -> list[list[int]]:
    """Reference implementation of the packing rule with lists and linear search."""
    ids, offsets = stream(lengths)
    rows: list[list[int]] = []
    pool: list[list[int]] = []

    def fill_row() -> None:
        row: list[int] = []
        while len(row) < row_length and pool:
            gap = row_length - len(row)
            fitting = [piece for piece in pool if len(piece) <= gap]
            if fitting:
                longest = max(fitting, key=len)  # the first one, i.e. the oldest
                pool.remove(longest)
                row += longest
            elif gap == 1:
                row.append(BOS)
            else:
                shortest = min(pool, key=len)
                pool.remove(shortest)
                row += shortest[:gap]
                pool.append([BOS, *shortest[gap:]])
        left = [token for token in row if token != BOS]
        if len(row) == row_length - 1 or len(left) > packing.MAX_DROPPED * len(ids):
            row += [BOS] * (row_length - len(row))
        if len(row) == row_length:
            rows.append(row)

    for start, end in zip(offsets, offsets[1:], strict=False):
        text = ids[start:end].tolist()
        while len(text) > row_length - 1:
            rows.append([BOS, *text[: row_length - 1]])
            text = text[row_length - 1 :]
        if text:
            pool.append([BOS, *text])
        while len(pool) > pool_pieces and sum(map(len, pool)) >= row_length:
            fill_row()
    while pool:
        fill_row()
    return rows


@given(documents, row_lengths, pools)
@settings(max_examples=300)
def test_packer_matches_reference_implementation(lengths, row_length, pool):
    rows, _ = packed(lengths, row_length, pool)
    assert rows.tolist() == simple_rows(lengths, row_length, pool)


@given(documents, row_lengths, pools)
@settings(max_examples=300)
def test_P7_rows_start_with_bos_and_conserve_tokens(lengths, row_length, pool):
    rows, packer = packed(lengths, row_length, pool)
    counts = packer.counts
    assert (rows[:, 0] == BOS).all()
    placed = rows[rows != BOS]
    assert len(np.unique(placed)) == len(placed)  # no token twice
    assert set(placed.tolist()) <= set(range(1, sum(lengths) + 1))
    assert counts.tokens == len(placed)
    assert counts.tokens + counts.dropped == sum(lengths)
    assert counts.rows * row_length == rows.size == counts.tokens + counts.bos
    assert counts.documents == sum(length > 0 for length in lengths)
    assert counts.dropped < row_length  # less than one row, at the end
    assert counts.dropped <= packing.MAX_DROPPED * sum(lengths)


@given(documents, row_lengths, pools)
@settings(max_examples=200)
def test_P7_pieces_are_ordered_and_from_one_document(lengths, row_length, pool):
    rows, packer = packed(lengths, row_length, pool)
    document = np.repeat(np.arange(len(lengths)), lengths)  # at i: document of token i + 1
    pieces_of: dict[int, int] = {}
    lone = 0
    for row in rows:
        for piece in np.split(row, np.flatnonzero(row == BOS))[1:]:
            tokens = piece[1:].astype(np.int64)
            lone += len(tokens) == 0
            if len(tokens):
                assert (np.diff(tokens) == 1).all()
                assert len(set(document[tokens - 1].tolist())) == 1
                origin = int(document[tokens[0] - 1])
                pieces_of[origin] = pieces_of.get(origin, 0) + 1
    if packer.counts.dropped == 0:
        counts = packer.counts
        assert counts.documents_cut == sum(n > 1 for n in pieces_of.values())
        assert counts.extra_bos == sum(n - 1 for n in pieces_of.values()) + lone


@given(documents, row_lengths, pools, st.integers(1, 7))
@settings(max_examples=200)
def test_R5_rows_do_not_depend_on_batching_of_documents(lengths, row_length, pool, size):
    whole, _ = packed(lengths, row_length, pool)
    pieces, _ = packed(lengths, row_length, pool, size)
    assert whole.tobytes() == pieces.tobytes()


def test_B2_very_long_document_is_emitted_immediately():
    packer = Packer(16, BOS, np.uint32)
    packer.pool_pieces = 4
    ids, offsets = stream([15 * 1000 + 3])
    rows = packer.add(ids, offsets)
    assert len(rows) == 1000
    assert packer.pooled_tokens == 3
    assert (rows[:, 1:].reshape(-1) == ids[: 15 * 1000]).all()
    later = packer.add(*stream([7] * 50))
    assert len(later) > 15


@pytest.mark.parametrize("row_length", [513, 2049])
def test_P7_few_documents_are_cut_unnecessarily(row_length):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.2, 1.0, 30_000).astype(int) + 1  # like web text
    rows, packer = packed(lengths.tolist(), row_length, packing.POOL_PIECES)
    counts = packer.counts
    too_long = int((lengths > row_length - 1).sum())
    assert too_long <= counts.documents_cut < too_long + 0.06 * len(lengths)
    assert counts.extra_bos < 0.002 * rows.size
    assert counts.dropped < row_length


def test_uint32_rows_keep_ids_above_65535():
    ids = np.array([70_000, 3, 99_999], np.uint32)
    packer = Packer(4, 65_536, np.uint32)
    packer.add(ids, np.array([0, 3]))
    assert packer.finish().tolist() == [[65_536, 70_000, 3, 99_999]]


def test_pool_smaller_than_a_row_is_not_dropped():
    rows, packer = packed([1] * 100, row_length=20, pool=2)
    assert packer.counts.dropped < 20
    assert len(rows) == 10


@pytest.mark.parametrize("mean, documents", [(6, 6000), (1500, 2000)])
def test_memory_is_independent_of_stream_length(mean, documents):
    rng = np.random.default_rng(0)
    packer = Packer(2049, BOS)
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(3):
            tracemalloc.reset_peak()
            for _ in range(6):
                lengths = rng.geometric(1 / mean, documents)
                ids = np.ones(lengths.sum(), np.uint32)
                packer.add(ids, np.concatenate([[0], np.cumsum(lengths)]))
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert max(peaks) < 150 << 20  # including the rows and index arrays of the batch
    assert peaks[2] < 1.1 * peaks[1]  # the first third fills the pool
