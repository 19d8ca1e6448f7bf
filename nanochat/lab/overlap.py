"""
Contamination check: evaluation items that share 13 consecutive words with training data.

    held-out tasks -> Index of passages; training task, index -> shared items by held-out task

Words are runs of letters and digits, ignoring case and option letters; passages do not cross items.
Items of 6 to 12 words are searched for as a whole. So is the question text alone, without the
options, if it has 8 to 12 words. Shorter texts are not checked. Paraphrases are not found, so
finding no overlap does not prove that there is none.

Source: the criterion of Brown et al., "Language Models are Few-Shot Learners", arXiv:2005.14165.
"""

from collections.abc import Iterator, Sequence

from tasks.base import QuestionTask, Task, split_words

# Overlap with these is checked by default; the other tasks download much, are gated, have the same
# questions, or are invented here
BENCHMARKS = ("arc_easy", "arc_challenge", "mmlu", "kmmlu", "gsm8k", "aqua", "humaneval")
RUN = 13  # words
LEAST = 6  # minimum length, in words, of items that are searched for in full
LEAST_ASKED = 8  # the same for a question without its options

Words = tuple[str, ...]
Items = set[tuple[int, int]]  # (task, item)
Index = dict[Words, Items]  # passage -> where it occurs


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


def ngrams(words: Sequence[str], n: int) -> Iterator[Words]:
    """All runs of n words, in order."""
    return zip(*(words[k:] for k in range(n)), strict=False)


def index_passages(tasks: Sequence[Task]) -> Index:
    """
    The passages of held-out tasks to search for: runs of RUN words, and shorter texts as a whole.
    The items among the values are those that are long enough to check.
    """
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


def shared_items(train: Task, index: Index) -> Items:
    """The items with a passage that occurs in a training task."""
    located = map(train.locate, range(len(train)))
    return {item for task, i in located for item in find_items(task.material(i), index)}
