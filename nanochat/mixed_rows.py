"""
Rows of several buckets as one sequence, in fixed proportions.

    {bucket: Rows, count} -> MixedRows -> batch(step), a pure function of (rows, seed, step)

One pass takes `count` rows of each bucket, interleaved. Each bucket is an endless sequence of its
own epochs (`Rows`), which goes on from pass to pass: a bucket taken 1.5 times comes whole, then
half of it in another order; the next pass begins with the other half. Like `Rows` it has no state.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from nanochat.common import fingerprint
from nanochat.interleaving import Places, interleave
from nanochat.rows import Rows, numbers_of


class MixedRows:
    """The rows of a mixture: `buckets` in order, each with its rows and how many a pass takes."""

    def __init__(self, buckets: Mapping[str, tuple[Rows, int]]):
        self.names = list(buckets)
        self.parts = [rows for rows, _ in buckets.values()]
        self.counts = tuple(count for _, count in buckets.values())
        self.max_seq_len = self.parts[0].max_seq_len
        self.should_stop: Callable[[], bool] = lambda: False
        for rows in self.parts:
            rows.should_stop = lambda: self.should_stop()
        described = {
            name: {"count": count, "fingerprint": rows.fingerprint}
            for name, (rows, count) in buckets.items()
        }
        self.recipe: dict[str, Any] = {
            "fingerprint": fingerprint({"mixture": list(described.items())}),
            "buckets": described,
        }

    @property
    def fingerprint(self) -> str:
        """Names the rows of all buckets and their proportions."""
        return self.recipe["fingerprint"]

    @property
    def rows_per_pass(self) -> int:
        """Rows of one pass through the mixture."""
        return sum(self.counts)

    def batch(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """This rank's rows of a step, as `Rows.batch` gives them; verified as there."""
        if any(rows.verifies for rows in self.parts):
            whole = self.row_ids(step, rows_per_step, seed)
            for bucket, rows in enumerate(self.parts):
                if rows.verifies and (here := whole[:, 0] == bucket).any():
                    rows.verify_train(whole[here, 1])
        ids = self.row_ids(step, rows_per_step, seed, rank, world_size)
        dtype = np.result_type(*(rows.dtype for rows in self.parts))
        out = np.empty((len(ids), self.max_seq_len + 1), dtype)
        for bucket, rows in enumerate(self.parts):
            if (here := ids[:, 0] == bucket).any():
                out[here] = rows.read(ids[here, 1:])
        return out

    def row_ids(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """Which rows `batch` returns: (n, 3), index of the bucket, of its shard, of the row."""
        return np.delete(self.locate(step, rows_per_step, seed, rank, world_size), 1, axis=1)

    def times_seen(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """How often each row of `batch` came before in the run, (n,)."""
        return self.locate(step, rows_per_step, seed, rank, world_size)[:, 1]

    def locate(
        self, step: int, rows_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> np.ndarray:
        """The rows of a step: (n, 4), bucket, how often it was gone through before, shard, row."""
        numbers = numbers_of(step, rows_per_step, rank, world_size)
        passes, places = np.divmod(numbers, self.rows_per_pass)
        out = np.empty((len(numbers), 4), np.int64)
        for gone in np.unique(passes).tolist():
            now = passes == gone
            order = interleaved(self.counts, seed, gone)
            out[now, 0] = order.bucket[places[now]]
            out[now, 1] = order.number[places[now]]  # for the moment
        counts = np.array(self.counts)
        mine = passes * counts[out[:, 0]] + out[:, 1]  # numbers within each bucket's own sequence
        for bucket, rows in enumerate(self.parts):
            if (here := out[:, 0] == bucket).any():
                out[here, 1:] = rows.places(mine[here], seed)
        return out

    def epochs_for(self, rows_needed: int) -> float | None:
        """How many times the mixture is gone through."""
        return rows_needed / self.rows_per_pass

    @property
    def bucket_rows(self) -> dict[str, Rows]:
        """Name -> rows of each bucket."""
        return dict(zip(self.names, self.parts, strict=True))


@lru_cache(maxsize=2)
def interleaved(counts: tuple[int, ...], seed: int, gone: int) -> Places:
    """The order of pass number `gone` through `counts` rows of each bucket."""
    return interleave([np.ones(count, np.int64) for count in counts], seed, gone)
