"""
Contamination check: evaluation items that share 13 consecutive words with training data.

    held-out tasks -> Ngrams; training tasks, streamed -> overlaps: shared items per pair of tasks

Words are runs of letters and digits, ignoring case and option letters; n-grams do not cross items.
Items of 6 to 12 words are searched for as a whole. So is the question text alone, without the
options, if it has 8 to 12 words. Shorter texts are not checked. Paraphrases are not found, so
finding no overlap does not prove that there is none.

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
LEAST = 6  # minimum length, in words, of items that are searched for in full
LENGTHS = range(LEAST, RUN + 1)
LEAST_ASKED = 8  # the same for a question without its options
BATCH = 4096  # training items per batch
WORD = re.compile(r"[^\W_]+")
LABEL = re.compile(r"=[A-Z]$", re.MULTILINE)  # option label in `base.choice_question`


class Overlap(NamedTuple):
    """Items that a held-out task shares with a training task."""

    train: str
    held_out: str
    items: int
    """Number of items in the held-out task."""
    checked: int
    """Number of items long enough to check."""
    shared: tuple[int, ...]
    """Indices of items with an n-gram in the training task."""
    whole: tuple[int, ...] = ()
    """Indices of other items whose shorter text was found in full."""


class Ngrams(NamedTuple):
    """Word n-grams as 64-bit hashes, with the item of each."""

    hashes: np.ndarray  # (n,) uint64
    items: np.ndarray  # (n,) int64


@cache
def word_hash(word: str) -> int:
    """64-bit hash of a word, the same in every process."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


def ngrams_by_length(texts: Iterable[str], runs: Sequence[int] = LENGTHS) -> dict[int, Ngrams]:
    """All n-grams of several lengths. Hashes are sums, each extending that of a shorter n-gram."""
    words: list[int] = []
    ends = []
    for text in texts:
        words += map(word_hash, WORD.findall(LABEL.sub("", text).lower()))
        ends.append(len(words))
    ids, bounds = np.array(words, np.uint64), np.array(ends, np.int64)
    rng = np.random.default_rng(0)
    multipliers = 2 * rng.integers(1 << 63, size=max(runs), dtype=np.uint64) + 1
    item = np.searchsorted(bounds, np.arange(len(words)), side="right")  # item index of each word
    hashes = np.zeros(len(words), np.uint64)
    found = {}
    for offset, multiplier in enumerate(multipliers):  # sums modulo 2^64
        run = offset + 1
        starts = np.arange(max(0, len(words) - offset))
        hashes[: len(starts)] += ids[offset:] * multiplier
        if run in runs:
            inside = starts + run <= bounds[item[starts]]
            found[run] = Ngrams(hashes[starts[inside]], item[starts[inside]])
    return found


def overlaps(train: Sequence[Task], held_out: Sequence[Task]) -> list[Overlap]:
    """Compare every training task with every held-out task by word n-grams of all LENGTHS."""
    sought = [query_ngrams(task) for task in held_out]
    tables = {n: np.sort(np.concatenate([each[n].hashes for each in sought])) for n in LENGTHS}
    found = []
    for source in train:
        hits = {n: [table[:0]] for n, table in tables.items()}
        texts = materials(source)
        while batch := list(islice(texts, BATCH)):
            for n, theirs in ngrams_by_length(batch).items():
                hashes = np.unique(theirs.hashes)  # sorted queries are faster
                hits[n].append(hashes[is_in(hashes, tables[n])])
        found_in = {n: np.unique(np.concatenate(hits[n])) for n in LENGTHS}
        for task, grams in zip(held_out, sought, strict=True):
            checked = np.unique(np.concatenate([each.items for each in grams.values()]))
            shared = {n: g.items[is_in(g.hashes, found_in[n])].tolist() for n, g in grams.items()}
            long = set(shared[RUN])
            short = {i for n in LENGTHS[:-1] for i in shared[n]} - long
            sizes = (source.name, task.name, len(task), len(checked))
            found.append(Overlap(*sizes, tuple(sorted(long)), tuple(sorted(short))))
    return found


def query_ngrams(task: Task) -> dict[int, Ngrams]:
    """N-grams to search for: all of the longest length, and shorter ones that are whole items."""
    found = ngrams_by_length(materials(task))
    located = map(task.locate, range(len(task)))
    alone = ngrams_by_length((owner.asked(number) for owner, number in located))
    for n in LENGTHS[:-1]:
        pieces = [whole(found, n), *([whole(alone, n)] if n >= LEAST_ASKED else [])]
        found[n] = Ngrams(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    return found


def whole(grams: dict[int, Ngrams], n: int) -> Ngrams:
    """N-grams that are whole items: such an item has one n-gram of n words and none of n + 1."""
    once, counts = np.unique(grams[n].items, return_counts=True)
    all_of_it = np.isin(grams[n].items, np.setdiff1d(once[counts == 1], grams[n + 1].items))
    return Ngrams(grams[n].hashes[all_of_it], grams[n].items[all_of_it])


def is_in(hashes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Whether each hash is in a sorted table, (n,) bool."""
    return np.searchsorted(table, hashes) < np.searchsorted(table, hashes, "right")


def materials(task: Task) -> Iterator[str]:
    """The material of each conversation of a task, in order."""
    return (owner.material(number) for owner, number in map(task.locate, range(len(task))))
