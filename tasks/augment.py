"""
More training questions out of those there are: other answer forms, other orders, more options.

    QuestionTask -> Styled, Reordered, MoreOptions -> tasks whose items stand for the same questions

Whatever is drawn is drawn by seed and number, so an item is the same on every machine. What an
augmentation is worth must be measured: more options made by retrieval lowered most benchmarks of
those who tried it, so they are off by default.
"""

import difflib
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tasks.arc import ARCChallenge, ARCEasy
from tasks.base import (
    LETTERS,
    Conversation,
    Question,
    QuestionTask,
    Task,
    assistant,
    choice_question,
    spoken,
    user,
)
from tasks.overlap import WORD

K1, B = 1.2, 0.75  # of BM25: Robertson and Zaragoza, "The Probabilistic Relevance ...", 2009
NEIGHBOURS = 40  # questions whose options are candidates
ALIKE = 0.85  # share of characters in common from which two options say the same
MOST_OPTIONS = 10


class Style(NamedTuple):
    """A form of answer: what asks for it, what it looks like, and how it is read."""

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
    """The letter of an answer in any of the styles; None where it has none of them, or several."""
    said = spoken(answer).strip()
    found = {style.pattern.fullmatch(said)[1] for style in STYLES if style.pattern.fullmatch(said)}  # type: ignore
    if not found:
        found = {m for style in STYLES[1:] for m in style.pattern.findall(said)}
    return found.pop() if len(found) == 1 else None


class Augmented(QuestionTask):
    """Questions of a task, changed."""

    kinds = "augmented"
    splits = ("train", "val", "dev", "test")

    def __init__(self, task: Task, seed: int = 0):
        if not isinstance(task, QuestionTask):
            raise ValueError(
                f"{task.name} has no options to change: only questions can be augmented"
            )
        self.task, self.seed = task, seed
        self.name, self.split = task.name, task.split
        self.baseline = task.baseline

    @property
    def where(self) -> str:
        return f"{self.task.where} ({self.kinds})"

    @property
    def origin(self) -> dict[str, Any]:
        return {"augmented": self.kinds, "seed": self.seed, "of": self.task.identity}

    def __len__(self) -> int:
        return len(self.task)

    def random(self, i: int) -> random.Random:
        """What is drawn for item i."""
        return random.Random(f"{self.kinds}-{self.seed}-{i}")


class Reordered(Augmented):
    """The options in another order, the right one with them."""

    kinds = "reordered"

    def question(self, i: int) -> Question:
        text, options, right = self.task.question(i)
        return reordered(Question(text, options, right), self.random(i))


def reordered(question: Question, rng: random.Random) -> Question:
    """The same question, its options in an order that is drawn."""
    order = sorted(range(len(question.options)), key=lambda _: rng.random())
    options = tuple(question.options[n] for n in order)
    return Question(question.text, options, order.index(question.right))


class Styled(Augmented):
    """Each question asks for one of several forms of answer, and is answered in it."""

    kinds = "styled"

    def style(self, i: int) -> Style:
        """The form that item i asks for."""
        return STYLES[int(self.random(i).random() * len(STYLES))]

    def question(self, i: int) -> Question:
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
    Further options from similar training questions, by BM25: up to `most` in all.

    Only options that are wrong there are taken, and none that says nearly what another one of the
    item says. Training items draw how many they get; `exactly` gives all of them `most`, as far as
    there are candidates.
    """

    kinds = "more options"

    def __init__(self, task: Task, seed: int = 0, most: int = MOST_OPTIONS, exactly: bool = False):
        super().__init__(task, seed)
        self.most, self.exactly = most, exactly
        self.counts: Counter = Counter()
        """added, near_equal: options that were taken, and that were too like another."""

    @property
    def origin(self) -> dict[str, Any]:
        return {**super().origin, "most": self.most, "exactly": self.exactly}

    @cached_property
    def corpus(self) -> "tuple[list[Question], BM25]":
        """The training questions, whatever split is augmented, and their index."""
        train = self.task if self.task.split == "train" else type(self.task)("train")
        questions = [train.question(i) for i in range(len(train))]
        return questions, BM25([question.text for question in questions])

    def question(self, i: int) -> Question:
        text, options, right = self.task.question(i)
        rng = self.random(i)
        wanted = self.most if self.exactly else rng.randint(min(len(options), self.most), self.most)
        every = [*options, *self.candidates(text, options, wanted - len(options))]
        return reordered(Question(text, tuple(every), right), rng)

    def candidates(self, text: str, options: Sequence[str], count: int) -> list[str]:
        """Wrong options of the most similar other questions."""
        questions, index = self.corpus
        found: list[str] = []
        for n in index.search(text, NEIGHBOURS) if count > 0 else ():
            other = questions[n]
            if other.text == text:
                continue
            for place, option in enumerate(other.options):
                if len(found) == count:
                    return found
                if place == other.right:
                    continue
                if any(near_equal(option, known) for known in [*options, *found]):
                    self.counts["near_equal"] += 1
                    continue
                self.counts["added"] += 1
                found.append(option)
        return found


class TenOptions(MoreOptions):
    """The items of a task with ten options each, for evaluation."""

    splits = ("val", "test")
    of: type[QuestionTask]

    def __init__(self, split: str):
        super().__init__(self.of(split), exactly=True)
        self.name, self.baseline = type(self).name, 1 / MOST_OPTIONS


class ARCEasyTen(TenOptions):
    """ARC-Easy with ten options."""

    name, of = "ARC-Easy-10", ARCEasy


class ARCChallengeTen(TenOptions):
    """ARC-Challenge with ten options."""

    name, of = "ARC-Challenge-10", ARCChallenge


AUGMENTERS = {"styles": Styled, "order": Reordered, "options": MoreOptions}


def near_equal(one: str, other: str) -> bool:
    """Whether two options say nearly the same: the same words, some of them, most letters."""
    a, b = (" ".join(WORD.findall(text.lower())) for text in (one, other))
    if a == b or (min(len(a), len(b)) > 3 and (a in b or b in a)):
        return True
    return difflib.SequenceMatcher(None, a, b).ratio() >= ALIKE


class BM25:
    """Which of some texts are most like a query, by the words they share. Okapi BM25."""

    def __init__(self, texts: Sequence[str]):
        bags = [Counter(WORD.findall(text.lower())) for text in texts]
        lengths = [sum(bag.values()) for bag in bags]
        mean = sum(lengths) / max(1, len(lengths))
        self.weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for n, (bag, length) in enumerate(zip(bags, lengths, strict=True)):
            for word, count in bag.items():
                norm = K1 * (1 - B + B * length / mean)
                self.weights[word].append((n, count * (K1 + 1) / (count + norm)))
        self.size = len(texts)

    def search(self, query: str, n: int) -> list[int]:
        """Numbers of the `n` texts most like the query, the best first."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(WORD.findall(query.lower())):
            holding = self.weights.get(word, [])
            rarity = math.log(1 + (self.size - len(holding) + 0.5) / (len(holding) + 0.5))
            for number, weight in holding:
                scores[number] += rarity * weight
        return sorted(scores, key=lambda number: (-scores[number], number))[:n]
