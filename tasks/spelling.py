"""
Spelling: count the occurrences of a letter in a word, or spell the word.

    word list -> split by a hash of the word -> a question drawn by split and index

A tokenizer hides the letters of a word from the model. These tasks teach them. The words are
frequent ones in the text that the tokenizer was trained on; scripts.tok_train writes them.
"""

from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, cast

from nanochat.common import MissingInput, base_dir, fingerprint
from tasks.base import Conversation, NumberTask, Tags, Task, assistant, text, tool_call, user
from tasks.world.drills import letter_questions, spelled
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


def read_words(source: str | None, split: Split) -> tuple[str, ...]:
    """
    The words of a split in lower case, from a file with one word per line; by default those of the
    main tokenizer's training text.

    Words with characters other than ASCII letters, or shorter than MIN_LETTERS, are skipped. Raises
    MissingInput without a file, ValueError if no words are left.
    """
    path = Path(source or base_dir() / "tokenizer" / "main" / "words.txt").expanduser()
    if not path.exists():
        more = "or use spelling:<file with one word per line>"
        raise MissingInput(f"no word list {path}", f"python -m scripts.tok_train; {more}")
    every = path.read_text("utf-8").lower().split()
    plain = (w for w in every if w.isascii() and w.isalpha() and len(w) >= MIN_LETTERS)
    words = tuple(word for word in plain if split_of("word", word) == split)
    if not words:
        raise ValueError(
            f"no words for split {split} in {path}; use one alphabetic word per line, or leave "
            "spelling out of --mixture"
        )
    return words


@cache
def counted_elsewhere(split: Split) -> set[tuple[str, str]]:
    """(word, letter) of the letter counts in the other splits of the embedded world."""
    others = [cast(Split, other) for other in SIZES if other != split]
    counts = [count for other in others for count in letter_questions(other)]
    return {(word.lower(), letter) for word, letter, _ in counts}


class WordTask(Task):
    """Questions about words. `source`: word file. Default: that of the main tokenizer."""

    splits = tuple(SIZES)
    split: Split
    tags = Tags("spelling", "en", "synthetic", answer_format="free", parent="spelling")

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split)
        self.source = source

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words that are asked about."""
        return read_words(self.source, self.split)

    @property
    def origin(self) -> dict[str, Any]:
        return {"words": fingerprint(self.words)}

    def __len__(self) -> int:
        return SIZES[self.split]

    def generator(self, i: int) -> Random:
        """Random generator of conversation i; the split is part of the seed."""
        return Random(f"{self.name}-{self.split}-{i}")


class SpellingBee(WordTask, NumberTask):
    """Count a letter in a word, letter by letter, and check the count with the tool."""

    name, tags = "SpellingBee", replace(WordTask.tags, answer_format="number")

    def draw(self, rng: Random) -> tuple[str, str]:
        """A word and a letter, which is in the word with probability 0.8."""
        taken = counted_elsewhere(self.split)
        while True:
            word, inside = pick(rng, self.words), rng.random() < 0.8
            letters = [c for c in ascii_lowercase if (c in word) == inside]
            if letters := [c for c in letters if (word, c) not in taken]:
                return word, pick(rng, letters)

    def conversation(self, i: int) -> Conversation:
        rng = self.generator(i)
        word, letter = self.draw(rng)
        counted, lines = 0, [spelled(word)]
        for each in word:
            counted += each == letter
            lines.append(f"{each} {counted}" if each == letter else each)
        lines.append(f"That makes {counted}. Checked: ")
        call = tool_call(f'"{word}".count("{letter}")', str(counted))
        answer = [text("\n".join(lines)), *call, text(f"{counted}\n#### {counted}")]
        question = pick(rng, COUNT_QUESTIONS).format(word=word, letter=letter)
        return [user(question), assistant(answer)]


class SimpleSpelling(WordTask):
    """Spell a word."""

    name, kind = "SimpleSpelling", "generate"

    def conversation(self, i: int) -> Conversation:
        rng = self.generator(i)
        word = pick(rng, self.words)
        return [user(pick(rng, SPELL_QUESTIONS).format(word=word)), assistant(spelled(word))]
