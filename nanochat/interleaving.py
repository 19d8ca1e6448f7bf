"""
Several sequences as one, in which any stretch holds nearly the right share of each.

    sizes of the items of each bucket -> Places: which bucket comes when, and which of its items

An item stands at a random place of the part of the whole that it would take up by its size, were
its bucket spread out evenly. Pure functions of sizes and seed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Places(NamedTuple):
    """Where the items of a sequence come from, by their place in it."""

    bucket: np.ndarray  # (n,) its index
    number: np.ndarray  # (n,) which item of the bucket, in their order


def interleave(sizes: Sequence[np.ndarray], seed: int, part: int = 0) -> Places:
    """
    The order of all items; `part` gives another one of the same seed.

    Raw words of PCG64, as in `rows.permutation`: their stream never changes with numpy.
    """
    raw = np.random.PCG64([seed, part, len(sizes)]).random_raw(sum(map(len, sizes)))
    jitter = (raw >> np.uint64(11)) * 2.0**-53  # [0, 1)
    when, first = [], 0
    for each in sizes:
        ends = np.cumsum(each)
        spread = ends - each + each * jitter[first : first + len(each)]
        when.append(spread / ends[-1] if len(each) else spread)
        first += len(each)
    order = np.argsort(np.concatenate(when), kind="stable")
    bucket = np.repeat(np.arange(len(sizes)), [len(each) for each in sizes])
    number = np.concatenate([np.arange(len(each)) for each in sizes])
    return Places(bucket[order], number[order])
