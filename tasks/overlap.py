"""
Contamination check: evaluation items that share 13 consecutive words with training data.

    held-out tasks -> Index of passages; training tasks -> overlaps: shared items by pair of tasks

Words are runs of letters and digits, ignoring case and option letters; passages do not cross items.
Items of 6 to 12 words are searched for as a whole. So is the question text alone, without the
options, if it has 8 to 12 words. Shorter texts are not checked. Paraphrases are not found, so
finding no overlap does not prove that there is none.

Source: the criterion of Brown et al., "Language Models are Few-Shot Learners", arXiv:2005.14165.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tasks.base import QuestionTask, Task

RUN = 13  # words
LEAST = 6  # minimum length, in words, of items that are searched for in full
LEAST_ASKED = 8  # the same for a question without its options
WORD = re.compile(r"[^\W_]+")
LABEL = re.compile(r"=[A-Z]$", re.MULTILINE)  # option label in `base.choice_question`

Words = tuple[str, ...]
Items = set[tuple[int, int]]  # (task, item)
Index = dict[Words, Items]  # passage -> where it occurs


class Overlap(NamedTuple):
    """Items that a held-out task shares with a training task."""

    train: str
    held_out: str
    items: int
    """Number of items in the held-out task."""
    checked: int
    """Number of items long enough to check."""
    shared: list[int]
    """Indices of items with a run of RUN words in the training task, or shorter and found whole."""


def passages(task: Task, i: int) -> Iterator[Words]:
    """Yield the passages of one item, of RUN words or fewer."""
    words = split_words(task.material(i))
    yield from ngrams(words, RUN)
    if LEAST <= len(words) < RUN:
        yield words
    if isinstance(task, QuestionTask):
        asked = split_words(task.question(i).text)
        if LEAST_ASKED <= len(asked) < RUN:
            yield asked


def split_words(text: str) -> Words:
    """The words of a text in lower case, without option labels."""
    return tuple(WORD.findall(LABEL.sub("", text).lower()))


def ngrams(words: Sequence[str], n: int) -> Iterator[Words]:
    """All runs of n words, in order."""
    return zip(*(words[k:] for k in range(n)), strict=False)


def index_passages(tasks: Sequence[Task]) -> Index:
    """The passages to search for: runs of RUN words, and shorter texts as a whole."""
    index: Index = {}
    for number, task in enumerate(tasks):
        for i in range(len(task)):
            for passage in passages(task, i):
                index.setdefault(passage, set()).add((number, i))
                index.setdefault(passage[:LEAST], set())  # where a search begins
    return index


def find_items(text: str, index: Index) -> Items:
    """The items with a passage that occurs in a text."""
    words, found = split_words(text), set()
    for n, start in enumerate(ngrams(words, LEAST)):
        if start in index:
            for size in range(LEAST, RUN + 1):
                found |= index.get(words[n : n + size], set())
    return found


def overlaps(train: Sequence[Task], held_out: Sequence[Task]) -> list[Overlap]:
    """Compare every training task with every held-out task."""
    index, found = index_passages(held_out), []
    checked = set[tuple[int, int]]().union(*index.values())
    for source in train:
        located = map(source.locate, range(len(source)))
        hits = {item for task, i in located for item in find_items(task.material(i), index)}
        for number, task in enumerate(held_out):
            sizes = len(task), sum(k == number for k, _ in checked)
            shared = sorted(i for k, i in hits if k == number)
            found.append(Overlap(source.name, task.name, *sizes, shared))
    return found
