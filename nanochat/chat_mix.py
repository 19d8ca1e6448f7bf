"""
Conversations of several buckets packed together, in the proportions of a mixture.

    {bucket: Encoded}, tokens of each -> chosen, interleaved -> one shard of packed rows

A row holds conversations of several buckets, so that the short ones of one fill the gaps that the
long ones of another leave: packed by themselves, buckets of like lengths would waste a sixth of
their rows (measured: embedded world, rows of 256 tokens). One pass through the mixture is one epoch
of the rows.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from nanochat.chat_rows import Encoded, open_chat_rows, pack_encoded
from nanochat.interleaving import interleave
from nanochat.machine import Machine
from nanochat.rows import Rows, permutation
from nanochat.tokenizer import Tokenizer


def mixed_chat_rows(
    buckets: Mapping[str, Encoded],
    tokens: Sequence[int],
    seed: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
    machine: Machine,
) -> Rows:
    """
    The rows of `tokens` of each bucket; one process of each node packs.

    Which conversations of a bucket are taken, where it is not whole, depends on the seed.
    """
    about = {
        "seed": seed,
        "buckets": [
            {"name": name, "conversations": each.fingerprint, "tokens": count}
            for (name, each), count in zip(buckets.items(), tokens, strict=True)
        ],
    }
    verifies = machine.local_rank == 0
    rows = open_chat_rows(about, tokenizer, max_seq_len, "train", machine.print0, verifies)
    machine.on_node(
        "packing conversations",
        lambda: pack_encoded(rows, "train", mixed(list(buckets.values()), tokens, seed), tokenizer),
    )
    return rows


def mixed(buckets: Sequence[Encoded], tokens: Sequence[int], seed: int) -> Iterator[np.ndarray]:
    """The conversations of a pass, in order."""
    taken = [
        chosen(bucket.lengths, count, seed, number)
        for number, (bucket, count) in enumerate(zip(buckets, tokens, strict=True))
    ]
    sizes = [bucket.lengths[which] for bucket, which in zip(buckets, taken, strict=True)]
    places = interleave(sizes, seed)
    for bucket, number in zip(places.bucket.tolist(), places.number.tolist(), strict=True):
        yield buckets[bucket][taken[bucket][number]]


def chosen(lengths: np.ndarray, tokens: int, seed: int, bucket: int) -> np.ndarray:
    """
    Which conversations make up about `tokens` tokens: all of them as often as they fit whole, then
    some more. Every time in another order.
    """
    times = -(-tokens // int(lengths.sum())) if tokens else 0
    order = [permutation(seed, time, bucket, len(lengths)) for time in range(times)]
    every = np.concatenate([np.empty(0, np.int64), *order]).astype(np.int64)
    ends = np.cumsum(lengths[every])
    middles = ends - lengths[every] / 2  # one more is taken where that comes closer
    return every[: int(np.searchsorted(middles, tokens))]
