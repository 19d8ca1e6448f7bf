"""
Contamination: which evaluation items share a run of 13 words with something trained on?

    held-out tasks -> Grams; training tasks, streamed -> overlaps: for each pair the items shared

Words are runs of letters and digits, case aside; runs never cross from one item to the next. An
item of fewer than 13 words has no run and is not checked, and a question asked in other words is
not found: no overlap here is no proof of there being none.

Source: the criterion of Brown et al., "Language Models are Few-Shot Learners", arXiv:2005.14165.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from tasks.base import Task

RUN = 13  # words
BATCH = 4096  # training items compared at a time
WORD = re.compile(r"[^\W_]+")


class Overlap(NamedTuple):
    """What a held-out task shares with a training task."""

    train: str
    held_out: str
    items: int
    """Of the held-out task."""
    checked: int
    """Those long enough to hold a run."""
    shared: tuple[int, ...]
    """Numbers of those with a run in the training task."""


class Grams(NamedTuple):
    """Runs of words as 64-bit hashes, and the item that each comes from."""

    hashes: np.ndarray  # (n,) uint64
    items: np.ndarray  # (n,) int64


@cache
def word_hash(word: str) -> int:
    """64 bits that stand for a word, the same in every process."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


def grams(texts: Iterable[str], run: int = RUN) -> Grams:
    """All runs of `run` words in each of the texts."""
    words: list[int] = []
    ends = []
    for text in texts:
        words += map(word_hash, WORD.findall(text.lower()))
        ends.append(len(words))
    starts = np.arange(max(0, len(words) - run + 1))
    item = np.searchsorted(ends, starts, side="right")  # the item that a word belongs to
    inside = starts + run <= np.array(ends, np.int64)[item]
    ids = np.array(words, np.uint64)
    multipliers = 2 * np.random.default_rng(0).integers(1 << 63, size=run, dtype=np.uint64) + 1
    hashes = np.zeros(len(starts), np.uint64)
    for place, multiplier in enumerate(multipliers):  # sums modulo 2^64
        hashes += ids[place : place + len(starts)] * multiplier
    return Grams(hashes[inside], item[inside])


def overlaps(train: Sequence[Task], held_out: Sequence[Task], run: int = RUN) -> list[Overlap]:
    """Every training task against every held-out task."""
    sought = [grams(materials(task), run) for task in held_out]
    hashes = np.concatenate([each.hashes for each in sought])
    order = np.argsort(hashes)
    hashes, back = hashes[order], np.argsort(order)
    ends = np.cumsum([len(each.hashes) for each in sought])
    found = []
    for source in train:
        is_shared = np.zeros(len(hashes), bool)
        texts = materials(source)
        while batch := list(islice(texts, BATCH)):
            theirs = np.sort(grams(batch, run).hashes)  # sorted questions are answered faster
            first, end = (np.searchsorted(hashes, theirs, side) for side in ("left", "right"))
            is_shared[first[first < end]] = True
        # A run that several items hold stands several times: what is true of the first is of all
        is_shared = is_shared[np.searchsorted(hashes, hashes)]
        by_task = np.split(is_shared[back], ends[:-1])
        for task, each, hit in zip(held_out, sought, by_task, strict=True):
            checked, shared = (np.unique(items) for items in (each.items, each.items[hit]))
            found.append(
                Overlap(source.name, task.name, len(task), len(checked), tuple(shared.tolist()))
            )
    return found


def materials(task: Task) -> Iterator[str]:
    """What the conversations of a task are made of, in order."""
    return map(task.material, range(len(task)))
