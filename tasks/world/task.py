"""
The embedded world as tasks: conversations, facts, choices, word problems, letters.

    world_talk, world_tasks -> WorldChat, WorldFacts, WorldChoice, WorldProblems, WorldSpelling

What is held out is held out by construction: no question, calculation or letter of the splits val
and test comes in a training document or conversation.

What RL can improve is what the stages before it leave half solved. A small model then works out
nearly all problems and letters of the split train (mean rewards 0.99 and 0.96 at depth 4, 2026-11):
most groups of answers earn the same, and little is learned. Of the facts it gets 0.8, for lack of
confidence: taking the likeliest words it has 0.97. Practice makes it sure of what it knows, also
where it was never asked.
"""

from functools import cache
from typing import Any, Literal, cast

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
from tasks.world.conversations import TALK_VERSION, conversation
from tasks.world.corpus import WORLD_VERSION
from tasks.world.facts import Split, pick
from tasks.world.questions import (
    MOST_LETTERS,
    NUM_OPTIONS,
    TASKS_VERSION,
    Asked,
    bare,
    choice,
    choice_questions,
    fact_questions,
    generator,
    letter_count,
    problem,
    sentences,
    whole_words,
)

SIZES = {"train": 20_000, "val": 1_000, "test": 500}


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
    """
    Questions about facts, answered in a sentence.

    An answer is right that has the right words in it and none of a rival's, but for those that
    are in the question.
    """

    name, kind = "World-Facts", "generate"

    def __len__(self) -> int:
        return SIZES["train"] if self.split == "train" else len(fact_questions(self.part))

    def conversation(self, i: int) -> Conversation:
        """The questions in turn, over and over, each time with another sentence."""
        asked = fact_questions(self.part)[i % len(fact_questions(self.part))]
        rng = generator("answer", self.part, i)
        answer = pick(rng, sentences(asked.fact, asked.question))
        return [user(asked.question.text), assistant(answer)]

    def score(self, conversation: Conversation, answer: str) -> float:
        question = conversation[0]["content"]
        asked = asked_by(self.part)[question]
        rest, found = whole_words(bare(asked.question.answer)).subn("", spoken(answer))
        rivals = map(whole_words, set(map(bare, asked.rivals)))
        return float(
            found > 0 and not any(r.search(rest) and not r.search(question) for r in rivals)
        )


@cache
def asked_by(split: Split) -> dict[str, Asked]:
    """The questions of a split by their text."""
    return {asked.question.text: asked for asked in fact_questions(split)}


class WorldChoice(WorldTask, ChoiceTask):
    """
    Questions about facts with four options of different sorts, in the form of ARC.

    To be right takes to see what sort of thing is asked for, and to find its letter.
    """

    name, baseline = "World-Choice", 1 / NUM_OPTIONS

    def __len__(self) -> int:
        return SIZES["train"] if self.split == "train" else len(choice_questions(self.part))

    def conversation(self, i: int) -> Conversation:
        """The list with the first question; in training, further questions about it."""
        given = choice(self.part, i)
        messages = []
        for n, (question, gold) in enumerate(given.asked):
            listed = choice_question(question, given.options, self.letters(i))
            messages += [user(question if n else listed), assistant(LETTERS[gold])]
        return messages

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[:NUM_OPTIONS]


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

    name, baseline = "World-Spelling", 1 / MOST_LETTERS  # always saying the same number

    def conversation(self, i: int) -> Conversation:
        asked = letter_count(self.part, i)
        words = f"{', '.join(asked.words[:-1])} and {asked.words[-1]}"
        question = f"How many times is the letter {asked.letter} found in {words}?"
        return [user(question), assistant(f"{asked.worked}\n#### {asked.count}")]
