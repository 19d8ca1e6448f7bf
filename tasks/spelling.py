"""
Spelling: count the occurrences of a letter in a word, or spell the word.

    word list -> split by a hash of the word -> a question drawn by split and index

A tokenizer hides the letters of a word from the model. These tasks teach them. The words are
frequent ones in the text that the tokenizer was trained on; scripts.tok_train writes them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, cast

from nanochat.common import MissingInput, base_dir, sha256_file
from tasks.base import (
    Conversation,
    NumberTask,
    Task,
    answer_text,
    assistant,
    text,
    tool_call,
    user,
    visible,
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


def word_file(path: str | None = None) -> Path:
    """`path`, by default the words of the main tokenizer's training text. Raises MissingInput."""
    if path:
        return Path(path).expanduser()
    default = base_dir() / "tokenizer" / "main" / "words.txt"
    if not default.exists():
        more = "or use spelling:<file with one word per line>"
        raise MissingInput(f"no word list {default}", f"python -m scripts.tok_train; {more}")
    return default


@cache
def english_words(path: Path, split: Split) -> tuple[str, ...]:
    """
    The words of a split, from a file with one word per line.

    Words with characters other than ASCII letters, or shorter than MIN_LETTERS, are skipped. Raises
    ValueError if none are left.
    """
    words = tuple(
        word
        for word in path.read_text("utf-8").split()
        if word.isascii() and word.isalpha() and len(word) >= MIN_LETTERS
        if split_of("word", word.lower()) == split
    )
    if not words:
        raise ValueError(
            f"no words for split {split} in {path}; use one alphabetic word per line, or leave "
            "spelling out of --mixture"
        )
    return words


@cache
def spellings() -> dict[str, set[str]]:
    """Word in lower case -> its forms in the documents of the embedded world."""
    forms: dict[str, set[str]] = {}
    for word in spelling_words():
        forms.setdefault(word.lower(), set()).add(word)
    return forms


class WordTask(Task):
    """Questions about words. `source`: word file. Default: that of the main tokenizer."""

    splits = ("train", "val", "test")

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        self.path = source

    @property
    def origin(self) -> dict[str, Any]:
        return {"words": sha256_file(word_file(self.path))}

    @property
    def words(self) -> Sequence[str]:
        return english_words(word_file(self.path), cast(Split, self.split))

    def __len__(self) -> int:
        return SIZES[self.split]

    def generator(self, i: int) -> Random:
        """Random generator of conversation i; the split is part of the seed."""
        return Random(f"{self.name}-{self.split}-{i}")


class SpellingBee(WordTask, NumberTask):
    """Count a letter in a word, letter by letter, and check the count with the tool."""

    name = "SpellingBee"

    def draw(self, rng: Random) -> tuple[str, str]:
        """
        A word and a letter, which is in the word with probability 0.8.

        Documents of the embedded world also count letters: without a word file, this task
        holds out the same (word, letter) pairs as they do.
        """
        while True:
            word = pick(rng, self.words)
            forms = spellings().get(word.lower(), {word})
            inside = rng.random() < 0.8
            letters = [
                letter
                for letter in ascii_lowercase
                if (letter in word.lower()) == inside
                and (self.path or {split_of("letter", w, letter) for w in forms} == {self.split})
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
    """Spell a word."""

    name = "SimpleSpelling"
    kind = "generate"

    def conversation(self, i: int) -> Conversation:
        rng = self.generator(i)
        word = pick(rng, self.words).lower()
        return [user(pick(rng, SPELL_QUESTIONS).format(word=word)), assistant(spelled(word))]

    def score(self, conversation: Conversation, answer: str) -> float:
        return float(visible(answer).strip() == answer_text(conversation[-1]))
