"""
Questions of the embedded world: facts, multiple choice, letter counts, word problems.

    split, index -> FactQuestion, Choice, LetterCount, Problem (raw items, no conversations)

Each is a pure function of split and index and uses only what `split_of` assigns to its split, so no
training document or conversation contains an item of "val" or "test".
"""

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase

from tasks.world.corpus import full_answers
from tasks.world.drills import Problem, draw_problem, spelling_words
from tasks.world.facts import (
    LAND,
    Fact,
    FieldQuestion,
    Split,
    between,
    facts,
    pick,
    pick_n,
    split_of,
    subjects,
    upper_first,
)

TASKS_VERSION = 3  # bump whenever an item changes


def question_rng(what: str, split: Split, i: int) -> Random:
    """Random generator of one item."""
    return Random(f"{LAND}-{what}-{TASKS_VERSION}-{split}-{i}")


# ------------------------------------------------------------------------------------------------
# Facts

ARTICLE = re.compile(r"^(at the|a|an|the|to) ")


@dataclass(frozen=True)
class FactQuestion:
    """A question about a fact."""

    fact: Fact
    question: FieldQuestion

    @property
    def rivals(self) -> tuple[str, ...]:
        """The answers for other subjects, each repeated as often as it occurs."""
        values = field_values(self.fact.kind, self.question.field)
        return tuple(value for value in values if value != self.question.answer)

    @property
    def fair_rivals(self) -> tuple[str, ...]:
        """
        The rivals that are answers to questions from the same side of the split (trained or held
        out).

        Answers to training questions occur more often in text, so if the options came from both
        sides, their frequency would reveal the right one.
        """
        fact, field = self.fact, self.question.field
        answers = side_answers(fact.kind, fact.relation, field, fact.split == "train")
        return tuple(value for value in answers if value != self.question.answer)


@cache
def field_values(kind: str, field: str) -> tuple[str, ...]:
    """The values of a field for every subject of a kind."""
    return tuple(str(fields[field]) for fields in subjects()[kind])


@cache
def side_answers(kind: str, relation: str, field: str, trained: bool) -> tuple[str, ...]:
    """
    The answers to the questions of one kind: only those asked in training if `trained`, else only
    the others.
    """
    return tuple(
        q.answer
        for f in facts()
        if (f.kind, f.relation, f.split == "train") == (kind, relation, trained)
        for q in f.questions
        if q.field == field
    )


@cache
def fact_questions(split: Split) -> tuple[FactQuestion, ...]:
    """All questions of a split about facts, with shuffled subjects."""
    rng = Random(f"{LAND}-questions-{split}")
    found = [FactQuestion(f, q) for f in facts() if f.split == split for q in f.questions]
    return tuple(pick_n(rng, found, len(found)))


def strip_article(answer: str) -> str:
    """An answer without its leading article or preposition."""
    return ARTICLE.sub("", answer)


@cache
def whole_words(words: str) -> re.Pattern[str]:
    """Case-insensitive pattern that matches `words` at word boundaries."""
    return re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)


def sentences(known: Fact, asked: FieldQuestion) -> list[str]:
    """The sentences of a fact that answer the question, or the bare answer if there are none."""
    answer = whole_words(strip_article(asked.answer))
    found = [text for text in full_answers(known, asked) if answer.search(text)]
    return found or [upper_first(asked.answer) + "."]


# ------------------------------------------------------------------------------------------------
# Choices

NUM_OPTIONS = 4
ROUNDS = 8  # questions per list of options in training
# In training, a question whose kind has rank r (1 = most common) is drawn with weight r ** -SKEW.
# With equal weights, the loss on the letter stays at ln 4 for 300 steps at depth 4; with
# SKEW it falls within 150: the model first learns which options tend to be right and how to find
# their letters, and then learns to use the question (measured 2026-11-20, dev/LOG.md).
SKEW = 1.5

Field = tuple[str, str]  # kind of subject, field


@dataclass(frozen=True)
class Choice:
    """Options, and questions about them with the index of the correct option."""

    options: tuple[str, ...]
    asked: tuple[tuple[str, int], ...]


@cache
def choice_questions(split: Split) -> tuple[FactQuestion, ...]:
    """The questions with enough fair distractors."""
    return tuple(a for a in fact_questions(split) if len(set(a.fair_rivals)) >= NUM_OPTIONS - 1)


@cache
def questions_by_field() -> dict[Field, tuple[FactQuestion, ...]]:
    """The training questions by field, most common first."""
    found: dict[Field, list[FactQuestion]] = {}
    for asked in choice_questions("train"):
        found.setdefault((asked.fact.kind, asked.question.field), []).append(asked)
    order = sorted(found, key=lambda field: (-len(found[field]), field))
    return {field: tuple(found[field]) for field in order}


def choice(split: Split, i: int) -> Choice:
    """
    Four answers of different kinds, such as a town, a trade, a month and a pet.

    List i of a held-out split asks held-out question i; all positions are equally likely to be
    correct. A training list has ROUNDS questions, far more of some kinds than of others (SKEW).
    """
    rng = question_rng("choice", split, i)
    if split != "train":
        first = choice_questions(split)[i % len(choice_questions(split))]
        four = [first]
        while len(four) < NUM_OPTIONS or not are_unambiguous(four):
            four = [first, *(pick(rng, choice_questions(split)) for _ in range(NUM_OPTIONS - 1))]
        four = pick_n(rng, four, NUM_OPTIONS)
        rounds = [four.index(first)]
    else:
        fields = questions_by_field()
        four = []
        while not four or not are_unambiguous(four):
            four = [pick(rng, fields[f]) for f in pick_n(rng, list(fields), NUM_OPTIONS)]
        ranks = {field: rank for rank, field in enumerate(fields, 1)}
        weights = [ranks[a.fact.kind, a.question.field] ** -SKEW for a in four]
        ends = list(itertools.accumulate(weights))
        # of `rng`, only random() draws the same in every version of Python
        rounds = [bisect.bisect(ends, rng.random() * ends[-1]) for _ in range(ROUNDS)]
    return Choice(
        tuple(asked.question.answer for asked in four),
        tuple((four[n].question.text, n) for n in rounds),
    )


def are_unambiguous(questions: Sequence[FactQuestion]) -> bool:
    """Whether each answer is possible only for its own question."""
    answers = [asked.question.answer for asked in questions]
    could = [{*asked.rivals, asked.question.answer} for asked in questions]
    return all(
        a not in could[n] for n in range(len(could)) for m, a in enumerate(answers) if m != n
    )


# ------------------------------------------------------------------------------------------------
# Problems and letters

NUM_WORDS = 3
MOST_LETTERS = 4
ENOUGH_WORDS = 5  # minimum number of words that contain the letter


def problem(split: Split, i: int) -> Problem:
    """Word problem `i` (any i >= 0)."""
    return draw_problem(question_rng("problem", split, i), split)


@dataclass(frozen=True)
class LetterCount:
    """The total count of a letter in several words."""

    letter: str
    words: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(word.count(self.letter) for word in self.words)

    @property
    def worked(self) -> str:
        """'a-p1-p2-l-e': the words letter by letter, with a running count of the letter."""
        found = 0
        lines = []
        for word in self.words:
            marks = []
            for character in word:
                found += character == self.letter
                marks.append(character + str(found) * (character == self.letter))
            lines.append("-".join(marks))
        return " ".join(lines)


@cache
def countable(split: Split, letter: str, inside: bool) -> tuple[str, ...]:
    """The words in which a split may count a letter: those with it if `inside`, else without."""
    return tuple(
        word
        for word in spelling_words()
        if word.islower()
        and (letter in word) == inside
        and split_of("letter", word, letter) == split
    )


@cache
def letters(split: Split) -> tuple[str, ...]:
    """The letters that a split may count in enough words."""
    return tuple(a for a in ascii_lowercase if len(countable(split, a, True)) >= ENOUGH_WORDS)


def letter_count(split: Split, i: int) -> LetterCount:
    """Letter count `i` (any i >= 0); the answers 1 to 4 are equally likely."""
    rng = question_rng("letters", split, i)
    wanted = between(rng, 1, MOST_LETTERS)
    while True:
        letter = pick(rng, letters(split))
        with_it = between(rng, 1, NUM_WORDS)
        words = pick_n(rng, countable(split, letter, True), with_it)
        words += pick_n(rng, countable(split, letter, False), NUM_WORDS - with_it)
        item = LetterCount(letter, tuple(pick_n(rng, words, NUM_WORDS)))
        if item.count == wanted:
            return item
