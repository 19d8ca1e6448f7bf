"""
Words letter by letter: how often a letter occurs in one, and how one is spelled.

    word list -> split by a hash of the word -> a question drawn by split and number

A tokenizer hides the letters of a word from the model. These tasks teach them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, cast

from nanochat.common import sha256_file
from tasks.base import (
    Conversation,
    NumberTask,
    Task,
    answer_text,
    assistant,
    spoken,
    text,
    tool_call,
    user,
)
from tasks.world.drills import spelled, spelling_words
from tasks.world.facts import Split, pick, split_of

SIZES = {"train": 100_000, "val": 1_000, "test": 1_000}
MIN_LETTERS = 3
COUNT_QUESTIONS = (
    "How many times does the letter {letter} occur in the word {word}?",
    "How many times is the letter {letter} found in {word}?",
    "How many {letter} are there in {word}?",
    "How often does {letter} appear in {word}?",
    "Count the letter {letter} in {word}.",
    "In {word}, how many letters are {letter}?",
)
SPELL_QUESTIONS = (
    "Spell the word {word}.",
    "How is {word} spelled?",
    "Which letters is the word {word} made of?",
    "Write {word} letter by letter.",
)


@cache
def word_list(path: str | None, split: Split) -> tuple[str, ...]:
    """
    The words of a split, from a file with one word per line, or those of the embedded world.

    Words that are not plain letters, or shorter than MIN_LETTERS, are passed over. Raises
    ValueError where none is left.
    """
    lines = Path(path).expanduser().read_text("utf-8").split() if path else spelling_words()
    words = tuple(
        word
        for word in lines
        if word.isascii() and word.isalpha() and len(word) >= MIN_LETTERS
        if split_of("word", word.lower()) == split
    )
    if not words:
        raise ValueError(f"{path} holds no words for {split}: one word of letters per line")
    return words


class WordTask(Task):
    """Questions about words; `words`: a file of them, by default the embedded world's."""

    splits = ("train", "val", "test")

    def __init__(self, split: str, words: str | None = None):
        super().__init__(split)
        self.path = words

    @property
    def origin(self) -> dict[str, Any]:
        words = sha256_file(Path(self.path).expanduser()) if self.path else "embedded"
        return {"words": words}

    @property
    def words(self) -> Sequence[str]:
        return word_list(self.path, cast(Split, self.split))

    def __len__(self) -> int:
        return SIZES[self.split]

    def generator(self, i: int) -> Random:
        """Where the chance behind conversation i comes from; the split is part of it."""
        return Random(f"{self.name}-{self.split}-{i}")


class SpellingBee(WordTask, NumberTask):
    """How often a letter occurs in a word, worked out letter by letter, checked with the tool."""

    name = "SpellingBee"

    def draw(self, rng: Random) -> tuple[str, str]:
        """
        A word and a letter, four times in five one that is in the word.

        Of the embedded world's words, documents count some letters: what is held out from them is
        held out here, and the other way round.
        """
        while True:
            word = pick(rng, self.words)
            inside = rng.random() < 0.8
            letters = [
                letter
                for letter in ascii_lowercase
                if (letter in word.lower()) == inside
                and (self.path or split_of("letter", word, letter) == self.split)
            ]
            if letters:
                return word.lower(), pick(rng, letters)

    def conversation(self, i: int) -> Conversation:
        rng = self.generator(i)
        word, letter = self.draw(rng)
        counted, lines = 0, []
        for each in word:
            counted += each == letter
            lines.append(f"{each} {counted}" if each == letter else each)
        answer = [
            text(f"{spelled(word)}\n" + "\n".join(lines) + f"\nThat makes {counted}. Checked: "),
            *tool_call(f'"{word}".count("{letter}")', str(counted)),
            text(f"{counted}\n#### {counted}"),
        ]
        question = pick(rng, COUNT_QUESTIONS).format(word=word, letter=letter)
        return [user(question), assistant(answer)]


class SimpleSpelling(WordTask):
    """How a word is spelled."""

    name = "SimpleSpelling"
    kind = "generate"

    def conversation(self, i: int) -> Conversation:
        rng = self.generator(i)
        word = pick(rng, self.words).lower()
        return [user(pick(rng, SPELL_QUESTIONS).format(word=word)), assistant(spelled(word))]

    def score(self, conversation: Conversation, answer: str) -> float:
        return float(spoken(answer).strip() == answer_text(conversation[-1]))
