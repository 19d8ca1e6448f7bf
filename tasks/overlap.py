"""
Contamination: which evaluation items share a run of 13 words with something trained on?

    held-out tasks -> Grams; training tasks, streamed -> overlaps: for each pair the items shared

Words are runs of letters and digits, case aside, without the letters of options; runs never cross
from one item to the next. Of an item of 6 to 12 words all of them in a row are looked for, and of a
question with options also its 8 to 12 words alone; a shorter one is not checked. A question asked
in other words is not found: no overlap here is no proof of there being none.

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
LEAST = 6  # words of a shorter item that is looked for as a whole
LEAST_ASKED = 8  # words of a question that is looked for without its options
BATCH = 4096  # training items compared at a time
WORD = re.compile(r"[^\W_]+")
LABEL = re.compile(r"=[A-Z]$", re.MULTILINE)  # of an option, as `base.choice_question` writes it


class Overlap(NamedTuple):
    """What a held-out task shares with a training task."""

    train: str
    held_out: str
    items: int
    """Of the held-out task."""
    checked: int
    """Those long enough to be looked for."""
    shared: tuple[int, ...]
    """Numbers of those with a run in the training task."""
    whole: tuple[int, ...] = ()
    """Numbers of shorter ones that stand in it as a whole."""


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
    return grams_by_length(texts, [run])[run]


def grams_by_length(texts: Iterable[str], runs: Sequence[int]) -> dict[int, Grams]:
    """All runs of several lengths; the hash of a run is a sum, so a longer one goes on from it."""
    words: list[int] = []
    ends = []
    for text in texts:
        words += map(word_hash, WORD.findall(LABEL.sub("", text).lower()))
        ends.append(len(words))
    most = max(runs)
    ids, bounds = np.array(words, np.uint64), np.array(ends, np.int64)
    multipliers = 2 * np.random.default_rng(0).integers(1 << 63, size=most, dtype=np.uint64) + 1
    item = np.searchsorted(bounds, np.arange(len(words)), side="right")  # that a word belongs to
    hashes = np.zeros(len(words), np.uint64)
    found = {}
    for place, multiplier in enumerate(multipliers):  # sums modulo 2^64
        run = place + 1
        starts = np.arange(max(0, len(words) - place))
        hashes[: len(starts)] += ids[place:] * multiplier
        if run in runs:
            inside = starts + run <= bounds[item[starts]]
            found[run] = Grams(hashes[starts[inside]], item[starts[inside]])
    return found


def overlaps(train: Sequence[Task], held_out: Sequence[Task], run: int = RUN) -> list[Overlap]:
    """Every training task against every held-out task: runs of `run` words, shorter items whole."""
    lengths = range(min(LEAST, run), run + 1)
    sought = [wanted(task, lengths) for task in held_out]
    tables = {n: Table([each[n] for each in sought]) for n in lengths}
    found = []
    for source in train:
        hits = {n: table.none() for n, table in tables.items()}
        texts = materials(source)
        while batch := list(islice(texts, BATCH)):
            for n, theirs in grams_by_length(batch, lengths).items():
                tables[n].mark(theirs.hashes, hits[n])
        shared = {n: table.items_of(hits[n]) for n, table in tables.items()}
        for number, task in enumerate(held_out):
            checked = np.unique(np.concatenate([each.items for each in sought[number].values()]))
            short = [i for n in lengths[:-1] for i in shared[n][number].tolist()]
            found.append(
                Overlap(
                    *(source.name, task.name, len(task), len(checked)),
                    tuple(shared[run][number].tolist()),
                    tuple(sorted(short)),
                )
            )
    return found


def wanted(task: Task, lengths: Sequence[int]) -> dict[int, Grams]:
    """What is looked for of a task: all its longest runs, and of shorter lengths whole items."""
    found = grams_by_length(materials(task), lengths)
    alone = grams_by_length(map(task.asked, range(len(task))), lengths)
    for n in lengths[:-1]:
        pieces = [whole(found, n), *([whole(alone, n)] if n >= LEAST_ASKED else [])]
        found[n] = Grams(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    return found


def whole(grams: dict[int, Grams], n: int) -> Grams:
    """The runs of n words that are all their item has: it has one of these and none of n + 1."""
    once, counts = np.unique(grams[n].items, return_counts=True)
    all_of_it = np.isin(grams[n].items, np.setdiff1d(once[counts == 1], grams[n + 1].items))
    return Grams(grams[n].hashes[all_of_it], grams[n].items[all_of_it])


class Table:
    """The sought runs of several tasks, sorted, so that others can be looked up among them."""

    def __init__(self, sought: Sequence[Grams]):
        self.sought = sought
        hashes = np.concatenate([each.hashes for each in sought])
        order = np.argsort(hashes)
        self.hashes, self.back = hashes[order], np.argsort(order)
        self.ends = np.cumsum([len(each.hashes) for each in sought])

    def none(self) -> np.ndarray:
        """Nothing found yet."""
        return np.zeros(len(self.hashes), bool)

    def mark(self, theirs: np.ndarray, hits: np.ndarray) -> None:
        """Note which runs are among `theirs`."""
        if not len(self.hashes):
            return
        theirs = np.sort(theirs)  # sorted questions are answered faster
        first, end = (np.searchsorted(self.hashes, theirs, side) for side in ("left", "right"))
        hits[first[first < end]] = True

    def items_of(self, hits: np.ndarray) -> list[np.ndarray]:
        """By task the numbers of the items with a run that was found."""
        # A run that several items hold stands several times: what is true of the first is of all
        same = hits[np.searchsorted(self.hashes, self.hashes)] if len(hits) else hits
        by_task = np.split(same[self.back], self.ends[:-1])
        return [np.unique(each.items[hit]) for each, hit in zip(self.sought, by_task, strict=True)]


def materials(task: Task) -> Iterator[str]:
    """What the conversations of a task are made of, in order."""
    return map(task.material, range(len(task)))
