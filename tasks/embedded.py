"""
The embedded world as tasks: conversations, facts, choices, word problems, letters.

    world_talk, world_tasks -> WorldChat, WorldFacts, WorldChoice, WorldProblems, WorldSpelling

What is held out is held out by construction: no question, calculation or letter of the splits val
and test comes in a training document or conversation. World-Problems is what RL practises: its
answers are right or wrong, a small model gets some right after fine-tuning, and what it gets wrong
is mostly the choice of the calculation, which another sample may get right.
"""

import re
from typing import Any, Literal, cast

from nanochat.world import WORLD_VERSION
from nanochat.world_facts import Split
from nanochat.world_talk import TALK_VERSION, conversation
from nanochat.world_tasks import (
    TASKS_VERSION,
    Asked,
    choice,
    fact_questions,
    generator,
    letter_count,
    problem,
    sentence,
)
from tasks.base import (
    LETTERS,
    ChoiceTask,
    Conversation,
    NumberTask,
    Task,
    assistant,
    choice_question,
    spoken,
    text,
    tool_call,
    user,
)

SIZES = {"train": 20_000, "val": 500, "test": 500}
ARTICLE = re.compile(r"^(at the|a|an|the|to) ")


class WorldTask(Task):
    """A task of the embedded world: made up as it is asked for, the same on every machine."""

    splits = ("train", "val", "test")

    @property
    def origin(self) -> dict[str, Any]:
        return {"world": [WORLD_VERSION, TASKS_VERSION, TALK_VERSION]}

    @property
    def part(self) -> Split:
        """The split, for the world's own rule of what is held out."""
        return cast(Split, self.split)

    def __len__(self) -> int:
        return SIZES[self.split]


class WorldChat(WorldTask):
    """Small talk about everything in the world; only for training."""

    name, kind = "World-Chat", "talk"
    splits = ("train", "val")

    def conversation(self, i: int) -> Conversation:
        turns = conversation(cast(Literal["train", "val"], self.split), i)
        return [m for asked, answer in turns for m in (user(asked), assistant(answer))]


class WorldFacts(WorldTask):
    """Questions about facts, answered in a sentence: right with the right words and no rival's."""

    name, kind = "World-Facts", "generate"

    def asked(self, i: int) -> Asked:
        """The question behind conversation i."""
        known = fact_questions(self.part)
        return known[i % len(known)]

    def conversation(self, i: int) -> Conversation:
        asked = self.asked(i)
        answer = sentence(generator("answer", self.part, i), asked)
        return [user(asked.question.text), assistant(answer)]

    def score(self, conversation: Conversation, answer: str) -> float:
        question = conversation[0]["content"]
        asked = next(a for a in fact_questions(self.part) if a.question.text == question)
        said, right = spoken(answer), bare(asked.question.answer)
        if not holds(said, right):
            return 0.0
        rest = re.sub(whole_words(right), "", f"{said}", flags=re.IGNORECASE)
        wrong = {bare(rival) for rival in asked.rivals}
        return float(not any(holds(rest, w) and not holds(question, w) for w in wrong))


class WorldChoice(WorldTask, ChoiceTask):
    """Questions about facts with four options, in the form of ARC."""

    name, baseline = "World-Choice", 0.25

    def conversation(self, i: int) -> Conversation:
        asked = choice(self.part, i)
        question = choice_question(asked.question, asked.options, self.letters(i))
        return [user(question), assistant(LETTERS[asked.gold])]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[:4]


class WorldProblems(WorldTask, NumberTask):
    """Word problems solved step by step with the calculator, in the form of GSM8K."""

    name = "World-Problems"

    def conversation(self, i: int) -> Conversation:
        asked = problem(self.part, i)
        parts = []
        for step in asked.steps:
            before, after = step.text.split("{}")
            gap = " " if parts else ""
            parts.append(text(f"{gap}{before}{step.expression} = "))
            parts += tool_call(step.expression, str(step.result))
            parts.append(text(f"{step.result}{after}"))
        parts.append(text(f"\n#### {asked.answer}"))
        return [user(f"{asked.story} {asked.question}"), assistant(parts)]


class WorldSpelling(WorldTask, NumberTask):
    """How often a letter is found in three words, worked out letter by letter."""

    name = "World-Spelling"

    def conversation(self, i: int) -> Conversation:
        asked = letter_count(self.part, i)
        words = f"{', '.join(asked.words[:-1])} and {asked.words[-1]}"
        question = f"How many times is the letter {asked.letter} found in {words}?"
        return [user(question), assistant(f"{asked.worked}\n#### {asked.count}")]


def bare(answer: str) -> str:
    """An answer without the article or preposition in front."""
    return ARTICLE.sub("", answer)


def whole_words(words: str) -> str:
    """A pattern that finds words where they do not continue to the left or right."""
    return rf"(?<!\w){re.escape(words)}(?!\w)"


def holds(where: str, words: str) -> bool:
    """Whether a text has these words in it."""
    return re.search(whole_words(words), where, re.IGNORECASE) is not None
