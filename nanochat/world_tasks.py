"""
What the embedded world asks of a model: facts, choices between options, letters to count, problems.

    split, number -> Asked, Choice, LetterCount, Problem (items without any form of conversation)

Each is a pure function of split and number and uses only what `split_of` gives to its split, so no
item of "val" or "test" is asked, computed or counted in a training document or conversation.
Problems are those of world_drills. Knows no messages, tokens or scores.
"""

import re
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase

from nanochat.world import full_answers
from nanochat.world_drills import Problem, draw_problem, spelling_words
from nanochat.world_facts import (
    LAND,
    Fact,
    Question,
    Split,
    between,
    facts,
    pick,
    sample,
    split_of,
    subjects,
    upper_first,
)

TASKS_VERSION = 2  # goes up whenever any item changes


def generator(what: str, split: Split, i: int) -> Random:
    """Where the chance behind one item comes from."""
    return Random(f"{LAND}-{what}-{TASKS_VERSION}-{split}-{i}")


# ------------------------------------------------------------------------------------------------
# Facts

ARTICLE = re.compile(r"^(at the|a|an|the|to) ")


@dataclass(frozen=True)
class Asked:
    """A question about a fact."""

    fact: Fact
    question: Question

    @property
    def rivals(self) -> tuple[str, ...]:
        """What the answer is for other subjects, each as often as it occurs among them."""
        values = field_values(self.fact.kind, self.question.field)
        return tuple(value for value in values if value != self.question.answer)

    @property
    def fair_rivals(self) -> tuple[str, ...]:
        """
        The rivals that are the answer to a question on the same side of the split.

        What is asked in training is written more often than what is not: were both among the
        options of a question, that alone would tell them apart.
        """
        fact, field = self.fact, self.question.field
        answers = side_answers(fact.kind, fact.relation, field, fact.split == "train")
        return tuple(value for value in answers if value != self.question.answer)


@cache
def field_values(kind: str, field: str) -> tuple[str, ...]:
    """The field of every subject of a kind."""
    return tuple(str(fields[field]) for fields in subjects()[kind][1])


@cache
def side_answers(kind: str, relation: str, field: str, trained: bool) -> tuple[str, ...]:
    """The answers to one kind of question, as far as training asks it, or does not."""
    return tuple(
        q.answer
        for f in facts()
        if (f.kind, f.relation, f.split == "train") == (kind, relation, trained)
        for q in f.questions
        if q.field == field
    )


@cache
def fact_questions(split: Split) -> tuple[Asked, ...]:
    """Every question about a fact that a split may ask, in an order that mixes subjects."""
    rng = Random(f"{LAND}-questions-{split}")
    found = [Asked(f, q) for f in facts() if f.split == split for q in f.questions]
    return tuple(sample(rng, found, len(found)))


def bare(answer: str) -> str:
    """An answer without the article or preposition in front."""
    return ARTICLE.sub("", answer)


@cache
def whole_words(words: str) -> re.Pattern[str]:
    """Finds words, in capitals or not, where they do not go on to the left or right."""
    return re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)


def sentences(known: Fact, asked: Question) -> list[str]:
    """The sentences of a fact that answer the question; where it has none, the answer alone."""
    answer = whole_words(bare(asked.answer))
    found = [text for text in full_answers(known, asked) if answer.search(text)]
    return found or [upper_first(asked.answer) + "."]


# ------------------------------------------------------------------------------------------------
# Choices

NUM_OPTIONS = 4


@dataclass(frozen=True)
class Choice:
    """A question and its options, of which number `gold` is right."""

    question: str
    options: tuple[str, ...]
    gold: int


@cache
def choice_questions(split: Split) -> tuple[Asked, ...]:
    """The questions that have enough rivals."""
    return tuple(a for a in fact_questions(split) if len(set(a.fair_rivals)) >= NUM_OPTIONS - 1)


def choice(split: Split, i: int) -> Choice:
    """The questions of a split in turn, over and over, each time with other rivals."""
    asked = choice_questions(split)[i % len(choice_questions(split))]
    options = draw_options(generator("choice", split, i), asked)
    return Choice(asked.question.text, options, options.index(asked.question.answer))


def draw_options(rng: Random, asked: Asked) -> tuple[str, ...]:
    """
    The answer and its fair rivals in random order.

    They are drawn as often as they are the answer for other subjects: neither is likelier.
    """
    found = [asked.question.answer]
    while len(found) < NUM_OPTIONS:
        rival = pick(rng, asked.fair_rivals)
        found += [rival] if rival not in found else []
    return tuple(sample(rng, found, NUM_OPTIONS))


# ------------------------------------------------------------------------------------------------
# Problems and letters

NUM_WORDS = 3
MOST_LETTERS = 4
ENOUGH_WORDS = 5  # that have a letter, to make many questions of


def problem(split: Split, i: int) -> Problem:
    """Word problem number i of an endless supply."""
    return draw_problem(generator("problem", split, i), split)


@dataclass(frozen=True)
class LetterCount:
    """How often a letter is found in some words, taken together."""

    letter: str
    words: tuple[str, ...]

    @property
    def count(self) -> int:
        return sum(word.count(self.letter) for word in self.words)

    @property
    def worked(self) -> str:
        """'a-p1-p2-l-e': the words letter by letter, every find with its number."""
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
    """The words in which a split may count a letter: those that have it, or those that do not."""
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
    """Letter question number i of an endless supply; every answer from 1 to 4 is as likely."""
    rng = generator("letters", split, i)
    wanted = between(rng, 1, MOST_LETTERS)
    while True:
        letter = pick(rng, letters(split))
        with_it = between(rng, 1, NUM_WORDS)
        words = sample(rng, countable(split, letter, True), with_it)
        words += sample(rng, countable(split, letter, False), NUM_WORDS - with_it)
        item = LetterCount(letter, tuple(sample(rng, words, NUM_WORDS)))
        if item.count == wanted:
            return item
