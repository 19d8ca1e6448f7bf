"""
Spelling: count the occurrences of a letter in a word, or spell the word.

    word list -> split by a hash of the word -> a question drawn by split and index

A tokenizer hides the letters of a word from the model. These tasks teach them. The words are
frequent ones in the text that the tokenizer was trained on; scripts.tok_train writes them.
"""

import re
from functools import cached_property
from random import Random
from string import ascii_lowercase
from typing import Any

from nanochat.common import MissingInput, base_dir, fingerprint
from tasks.base import Conversation, NumberTask, Tags, Task, assistant, text, tool_call, user
from tasks.world.drills import spelled
from tasks.world.facts import Split, pick, split_of

SIZES: dict[Split, int] = {"train": 100_000, "val": 1_000, "test": 1_000}
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


class WordTask(Task):
    """Questions about the frequent words of the main tokenizer's training text."""

    splits = tuple(SIZES)
    split: Split
    tags = Tags("spelling", "en", "synthetic", parent="spelling")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """
        The words of the split in lower case, at least three ASCII letters each. Raises MissingInput
        if there are none.
        """
        path = base_dir() / "tokenizer" / "main" / "words.txt"
        text = path.read_text("utf-8").lower() if path.exists() else ""
        words = re.findall(r"(?<!\S)[a-z]{3,}(?!\S)", text)
        if not (found := tuple(word for word in words if split_of("word", word) == self.split)):
            fix = "python -m scripts.tok_train, or leave out spelling and simple_spelling"
            raise MissingInput(
                f"no word list for {self.split} (words of 3 or more letters a to z) in {path}", fix
            )
        return found

    def require_input(self) -> None:
        len(self.words)

    @property
    def origin(self) -> dict[str, Any]:
        return {"words": fingerprint(self.words)}

    def __len__(self) -> int:
        return SIZES[self.split]


class SpellingBee(WordTask, NumberTask):
    """Count a letter in a word, letter by letter, and check the count with the tool."""

    name = "SpellingBee"

    def __getitem__(self, i: int) -> Conversation:
        rng = Random(f"{self.name}-{self.split}-{i}")
        word, inside = pick(rng, self.words), rng.random() < 0.8
        letter = pick(rng, [c for c in ascii_lowercase if (c in word) == inside])
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

    def __getitem__(self, i: int) -> Conversation:
        rng = Random(f"{self.name}-{self.split}-{i}")
        word = pick(rng, self.words)
        return [user(pick(rng, SPELL_QUESTIONS).format(word=word)), assistant(spelled(word))]
