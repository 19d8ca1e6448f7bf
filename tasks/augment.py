"""
Question augmentation: other answer formats, shuffled options, extra options.

    task class -> augment("styles", "order" or "options") -> task class with modified questions
    ARC-Easy-10 and such: ten options per question, for evaluation

Items depend only on their index, so they are the same on every machine. Measure the effect of an
augmentation: others found that extra options from retrieval lowered most scores, so they are
off by default.
"""

import difflib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property

from tasks.base import (
    BY_LETTER,
    LETTERS,
    Conversation,
    MCQuestion,
    QuestionTask,
    Task,
    assistant,
    shuffled,
    split_words,
    user,
)

K1, B = 1.2, 0.75  # BM25: Robertson and Zaragoza, "The Probabilistic Relevance ...", 2009
MOST_TEXTS = 2000  # words of more texts say little, and cost the most
NUM_SIMILAR = 40  # similar questions that provide candidate options
SIMILARITY_THRESHOLD = 0.85  # minimum similarity ratio of nearly equal options
MAX_OPTIONS = 10
STYLES = {
    BY_LETTER: "X",
    "Reply with the word Answer and the letter.": "Answer X",
    "Put the letter in a box.": r"\boxed{X}",
    "Give the letter in brackets.": "(X)",
    "Say which option is correct.": "Option X is correct.",
    "Finish with the letter after ####.": "#### X",
}
"""Instruction -> answer, with X for the letter."""


class Augmented(QuestionTask):
    """Modified questions of the task that is the next base class; one per conversation."""

    __getitem__ = QuestionTask.__getitem__


class Reordered(Augmented):
    """Questions with shuffled options."""

    def question(self, i: int) -> MCQuestion:
        return shuffle_options(super().question(i), f"reordered-0-{i}")


def shuffle_options(question: MCQuestion, seed: str) -> MCQuestion:
    """Shuffle the options of a question."""
    order = shuffled(range(len(question.options)), seed)
    options = tuple(question.options[n] for n in order)
    return question._replace(options=options, right=order.index(question.right))


class Styled(Augmented):
    """Questions that each request one of several answer formats, with the answer in that format."""

    def __getitem__(self, i: int) -> Conversation:
        asked = self.question(i)
        instruction = shuffled([*STYLES], f"styled-0-{i}")[0]
        answer = STYLES[instruction].replace("X", LETTERS[asked.right])
        return [user(asked.ask(instruction)), assistant(answer)]


class MoreOptions(Augmented):
    """
    Questions with extra options from similar training questions (BM25), up to MAX_OPTIONS in total.

    Candidates are the wrong options of those questions, except near-duplicates of other options of
    the item. The number of options is random.
    """

    pool: type[QuestionTask]
    """Task whose training questions are searched, whichever split is augmented."""
    fewest = 0
    """Minimum number of options."""

    @cached_property
    def corpus(self) -> "tuple[QuestionTask, BM25]":
        """The training questions and their index."""
        train = self.pool("train")
        return train, BM25([train.question(i).text for i in range(len(train))])

    def question(self, i: int) -> MCQuestion:
        asked, (train, index) = super().question(i), self.corpus
        options, seed = [*asked.options], f"more options-0-{i}"
        sizes = range(max(len(options), self.fewest), MAX_OPTIONS + 1)
        wanted = shuffled(sizes, f"{seed} options")[0]
        for other in map(train.question, index.search(asked.text, NUM_SIMILAR)):
            for n, option in enumerate(other.options):
                is_wrong = n != other.right and other.text != asked.text
                if is_wrong and len(options) < wanted and not is_near(option, options):
                    options.append(option)
        return shuffle_options(asked._replace(options=tuple(options)), seed)


class TenOptions(MoreOptions):
    """Ten options per question."""

    baseline, fewest = 1 / MAX_OPTIONS, MAX_OPTIONS


AUGMENTERS = {"styles": Styled, "order": Reordered, "options": MoreOptions}


def augment(task: type[Task], how: str) -> type[Task]:
    """
    The task with modified questions. Raises ValueError for a task that is not answered with a
    letter, and for an unknown augmentation.
    """
    if how not in AUGMENTERS or task.kind != "choice":
        raise ValueError(
            f"{task.name} is not answered with a letter, or augment {how!r} is not one of "
            f"{', '.join(AUGMENTERS)}"
        )
    return type(task.__name__, (AUGMENTERS[how], task), {"pool": task})


def is_near(option: str, others: Sequence[str]) -> bool:
    """Whether an option and another contain each other or reach SIMILARITY_THRESHOLD."""
    one, *rest = (" ".join(split_words(text)) for text in (option, *others))
    return any(
        (min(len(one), len(other)) > 3 and (one in other or other in one))
        or difflib.SequenceMatcher(None, one, other).ratio() >= SIMILARITY_THRESHOLD
        for other in rest
    )


class BM25:
    """Okapi BM25 index of a list of texts, without words of more than MOST_TEXTS texts."""

    def __init__(self, texts: Sequence[str]):
        bags = [Counter(split_words(text)) for text in texts]
        mean = sum(bag.total() for bag in bags) / len(bags)
        self.weights = defaultdict(dict)  # word -> text -> weight
        for n, bag in enumerate(bags):
            norm = K1 * (1 - B + B * bag.total() / mean)
            for word, count in bag.items():
                self.weights[word][n] = count * (K1 + 1) / (count + norm)
        for found in self.weights.values():
            rarity = math.log(1 + (len(bags) - len(found) + 0.5) / (len(found) + 0.5))
            for text in found:
                found[text] *= rarity

    def search(self, query: str, n: int) -> list[int]:
        """Indices of the `n` texts most similar to the query, best first."""
        scores = Counter[int]()
        for word in sorted({*split_words(query)} & self.weights.keys()):
            if len(self.weights[word]) <= MOST_TEXTS:
                scores.update(self.weights[word])  # adds
        return sorted(scores, key=lambda text: (-scores[text], text))[:n]
