"""
Question augmentation: other answer formats, shuffled options, extra options.

    QuestionTask -> Styled, Reordered, MoreOptions -> tasks with the same questions

Items depend only on their index, so they are the same on every machine. Measure the effect of an
augmentation: others found that extra options from retrieval lowered most scores, so they are
off by default.
"""

import difflib
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tasks.arc import ARCChallenge, ARCEasy
from tasks.base import (
    LETTERS,
    Conversation,
    MCQuestion,
    QuestionTask,
    Task,
    assistant,
    choice_question,
    user,
    visible,
)
from tasks.overlap import WORD

SEED = 0  # another seed gives other items
K1, B = 1.2, 0.75  # BM25: Robertson and Zaragoza, "The Probabilistic Relevance ...", 2009
NUM_SIMILAR = 40  # similar questions that provide candidate options
SIMILARITY_THRESHOLD = 0.85  # minimum similarity ratio of nearly equal options
MAX_OPTIONS = 10


class Style(NamedTuple):
    """An answer format: the instruction, the template and the pattern that parses it."""

    instruction: str
    form: str
    pattern: re.Pattern


STYLES = (
    Style("Answer with the letter only.", "{}", re.compile(r"([A-Z])")),
    Style("Reply with the word Answer and the letter.", "Answer {}", re.compile(r"Answer ([A-Z])")),
    Style("Put the letter in a box.", r"\boxed{{{}}}", re.compile(r"\\boxed\{([A-Z])\}")),
    Style("Give the letter in brackets.", "({})", re.compile(r"\(([A-Z])\)")),
    Style(
        "Say which option is correct.",
        "Option {} is correct.",
        re.compile(r"Option ([A-Z]) is correct\.?"),
    ),
    Style("Finish with the letter after ####.", "#### {}", re.compile(r"#### ([A-Z])")),
)


def read_letter(answer: str) -> str | None:
    """The letter of an answer in any style; None if there is none or several."""
    said = visible(answer).strip()
    found = {m[1] for style in STYLES if (m := style.pattern.fullmatch(said))}
    if not found:
        found = {m for style in STYLES[1:] for m in style.pattern.findall(said)}
    return found.pop() if len(found) == 1 else None


class Augmented(QuestionTask):
    """Base class for tasks that modify the questions of another task."""

    augmentation: str
    """Name in the identity and in the seed of an item."""
    splits = ("train", "val", "test")

    def __init__(self, task: Task):
        if not isinstance(task, QuestionTask) or task.kind != "choice":
            fix = "use a multiple-choice task, such as arc_easy"
            raise ValueError(f"{task.name} is not answered with a letter; {fix}")
        self.task = task
        self.name, self.split, self.baseline = task.name, task.split, task.baseline

    @property
    def origin(self) -> dict[str, Any]:
        return {"augmented": self.augmentation, "seed": SEED, "of": self.task.identity}

    def __len__(self) -> int:
        return len(self.task)

    def random(self, i: int) -> random.Random:
        """Random generator of item i."""
        return random.Random(f"{self.augmentation}-{SEED}-{i}")


class Reordered(Augmented):
    """Questions with shuffled options."""

    augmentation = "reordered"

    def question(self, i: int) -> MCQuestion:
        return shuffle_options(self.task.question(i), self.random(i))


def shuffle_options(question: MCQuestion, rng: random.Random) -> MCQuestion:
    """Shuffle the options of a question."""
    order = sorted(range(len(question.options)), key=lambda _: rng.random())
    options = tuple(question.options[n] for n in order)
    return MCQuestion(question.text, options, order.index(question.right))


class Styled(Augmented):
    """Questions that each request one of several answer formats, with the answer in that format."""

    augmentation = "styled"

    def style(self, i: int) -> Style:
        """The answer format of item i."""
        return STYLES[int(self.random(i).random() * len(STYLES))]

    def question(self, i: int) -> MCQuestion:
        return self.task.question(i)

    def conversation(self, i: int) -> Conversation:
        text, options, right = self.question(i)
        style = self.style(i)
        asked = choice_question(text, options, LETTERS[: len(options)], style.instruction)
        return [user(asked), assistant(style.form.format(LETTERS[right]))]

    def score(self, conversation: Conversation, answer: str) -> float:
        return float(read_letter(answer) == read_letter(conversation[-1]["content"]))

    def answered(self, answer: str) -> bool:
        return read_letter(answer) is not None


class MoreOptions(Augmented):
    """
    Questions with extra options from similar training questions (BM25), up to `most` in total.

    Candidates are the wrong options of those questions, except near-duplicates of other options of
    the item. The number of options is random; `exactly` makes it `most` if there are enough
    candidates.
    """

    augmentation = "more options"
    pool: type[QuestionTask] | None = None
    """Task whose training questions are searched. Default: the augmented one."""

    def __init__(self, task: Task, most: int = MAX_OPTIONS, exactly: bool = False):
        super().__init__(task)
        self.most, self.exactly = most, exactly

    @property
    def origin(self) -> dict[str, Any]:
        pool = {"pool": self.searched.origin} if self.pool else {}
        return {**super().origin, "most": self.most, "exactly": self.exactly, **pool}

    @cached_property
    def searched(self) -> QuestionTask:
        """The task whose questions are searched."""
        pool = self.pool or type(self.task)
        own = pool is type(self.task) and self.task.split == "train"
        return self.task if own else pool("train")

    @cached_property
    def corpus(self) -> "tuple[list[MCQuestion], BM25]":
        """The training questions and their index, whichever split is augmented."""
        train = self.searched
        questions = [train.question(i) for i in range(len(train))]
        return questions, BM25([question.text for question in questions])

    def question(self, i: int) -> MCQuestion:
        text, options, right = self.task.question(i)
        rng = self.random(i)
        wanted = self.most if self.exactly else rng.randint(min(len(options), self.most), self.most)
        every = [*options, *self.candidates(text, options, wanted - len(options))]
        return shuffle_options(MCQuestion(text, tuple(every), right), rng)

    def candidates(self, text: str, options: Sequence[str], count: int) -> list[str]:
        """Up to `count` wrong options of the most similar other questions."""
        questions, index = self.corpus
        found: list[str] = []
        for n in index.search(text, NUM_SIMILAR) if count > 0 else ():
            other = questions[n]
            if other.text == text:
                continue
            for position, option in enumerate(other.options):
                if len(found) == count:
                    return found
                known = [*options, *found]
                if position != other.right and not any(near_equal(option, o) for o in known):
                    found.append(option)
        return found


class TenOptions(MoreOptions):
    """A task with ten options per question, for evaluation."""

    splits = ("val", "test")
    of: type[QuestionTask]

    def __init__(self, split: str):
        Task.__init__(self, split)  # rejects "train"
        super().__init__(self.of(split), exactly=True)
        self.name, self.baseline = type(self).name, 1 / MAX_OPTIONS

    def material(self, i: int) -> str:
        """That of the original question: the other options are text of training questions."""
        return self.task.material(i)

    def asked(self, i: int) -> str:
        return self.task.asked(i)


class ARCEasyTen(TenOptions):
    """ARC-Easy with ten options."""

    name, of = "ARC-Easy-10", ARCEasy


class ARCChallengeTen(TenOptions):
    """ARC-Challenge with ten options."""

    name, of = "ARC-Challenge-10", ARCChallenge


AUGMENTERS = {"styles": Styled, "order": Reordered, "options": MoreOptions}


def near_equal(one: str, other: str) -> bool:
    """Whether one option contains the other or their similarity reaches SIMILARITY_THRESHOLD."""
    a, b = (" ".join(WORD.findall(text.lower())) for text in (one, other))
    if a == b or (min(len(a), len(b)) > 3 and (a in b or b in a)):
        return True
    return difflib.SequenceMatcher(None, a, b).ratio() >= SIMILARITY_THRESHOLD


class BM25:
    """Okapi BM25 index of a list of texts."""

    def __init__(self, texts: Sequence[str]):
        bags = [Counter(WORD.findall(text.lower())) for text in texts]
        lengths = [sum(bag.values()) for bag in bags]
        mean = sum(lengths) / max(1, len(lengths))
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for n, (bag, length) in enumerate(zip(bags, lengths, strict=True)):
            for word, count in bag.items():
                norm = K1 * (1 - B + B * length / mean)
                found[word].append((n, count * (K1 + 1) / (count + norm)))
        pairs = {word: tuple(zip(*holding, strict=True)) for word, holding in found.items()}
        self.weights = {word: (np.array(n), np.array(w)) for word, (n, w) in pairs.items()}
        self.size = len(texts)

    def search(self, query: str, n: int) -> list[int]:
        """Indices of the `n` texts most similar to the query, best first."""
        scores = np.zeros(self.size)
        for word in sorted(set(WORD.findall(query.lower())) & self.weights.keys()):
            holding, weights = self.weights[word]
            rarity = math.log(1 + (self.size - len(holding) + 0.5) / (len(holding) + 0.5))
            scores[holding] += rarity * weights
        least = np.partition(scores, -n)[-n] if n < self.size else 0.0
        found = np.flatnonzero((scores >= least) & (scores > 0))
        return found[np.argsort(-scores[found], kind="stable")[:n]].tolist()
