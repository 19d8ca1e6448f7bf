"""
The embedded world as tasks: chat, facts, multiple choice, word problems, letter counts.

    conversations, questions -> WorldChat, WorldFacts, WorldChoice, WorldProblems, WorldSpelling

By construction, no question, calculation or letter count of the val and test splits occurs in a
training document or conversation.

RL trains on the val split. The model has solved nearly all questions of the train split before RL
(mean reward 0.81 on facts, 0.96 to 0.99 on others, at depth 4), because pretraining documents and
conversations contain them, so most groups of answers have equal rewards and no signal. Questions
of the val split are as new to it as those of the test split (dev/LOG.md, 2026-11-23).
"""

from dataclasses import replace
from functools import cache
from typing import Any, Literal, cast

from tasks.base import (
    LETTERS,
    Conversation,
    MCQuestion,
    NumberTask,
    QuestionTask,
    Tags,
    Task,
    assistant,
    choice_question,
    text,
    tool_call,
    user,
    visible,
)
from tasks.world.conversations import TALK_VERSION, conversation
from tasks.world.corpus import WORLD_VERSION
from tasks.world.facts import Split, pick
from tasks.world.questions import (
    MOST_LETTERS,
    NUM_OPTIONS,
    TASKS_VERSION,
    FactQuestion,
    choice,
    choice_questions,
    fact_questions,
    letter_count,
    problem,
    question_rng,
    sentences,
    strip_article,
    whole_words,
)

SIZES = {"train": 20_000, "val": 1_000, "test": 500}


class WorldTask(Task):
    """A task of the embedded world, generated on access and the same on every machine."""

    splits = ("train", "val", "test")
    rl_split = "val"
    tags = Tags("facts", "en", "synthetic", "MIT", "free", "world")
    split: Split

    @property
    def origin(self) -> dict[str, Any]:
        return {"world": [WORLD_VERSION, TASKS_VERSION, TALK_VERSION]}

    def __len__(self) -> int:
        return SIZES[self.split]


class WorldChat(WorldTask):
    """Small talk about the world; training only."""

    name, kind = "World-Chat", "talk"
    tags = replace(WorldTask.tags, domain="chat")
    splits = ("train", "val")

    def conversation(self, i: int) -> Conversation:
        turns = conversation(cast(Literal["train", "val"], self.split), i)
        return [m for asked, answer in turns for m in (user(asked), assistant(answer))]


class WorldFacts(WorldTask):
    """
    Questions about facts, answered in a sentence.

    An answer is correct if it contains the reference answer and no distractor other than those
    in the question.
    """

    name, kind = "World-Facts", "generate"

    def __len__(self) -> int:
        return SIZES["train"] if self.split == "train" else len(fact_questions(self.split))

    def conversation(self, i: int) -> Conversation:
        """Cycle through the questions, with a new answer sentence each time."""
        asked = fact_questions(self.split)[i % len(fact_questions(self.split))]
        rng = question_rng("answer", self.split, i)
        answer = pick(rng, sentences(asked.fact, asked.question))
        return [user(asked.question.text), assistant(answer)]

    def cluster(self, i: int) -> str:
        fact = fact_questions(self.split)[i % len(fact_questions(self.split))].fact
        return f"{fact.kind} {fact.subject} {fact.relation}"

    def score(self, conversation: Conversation, answer: str) -> float:
        question = conversation[0]["content"]
        asked = asked_by(self.split)[question]
        rest, found = whole_words(strip_article(asked.question.answer)).subn("", visible(answer))
        rivals = map(whole_words, set(map(strip_article, asked.rivals)))
        return float(
            found > 0 and not any(r.search(rest) and not r.search(question) for r in rivals)
        )


@cache
def asked_by(split: Split) -> dict[str, FactQuestion]:
    """Question text -> question, for a split."""
    return {asked.question.text: asked for asked in fact_questions(split)}


class WorldChoice(WorldTask, QuestionTask):
    """
    Questions about facts with four options of different kinds, in the form of ARC.

    The model must infer which kind of answer is asked for and find its letter.
    """

    name, baseline = "World-Choice", 1 / NUM_OPTIONS
    tags = replace(WorldTask.tags, answer_format="letter")

    def __len__(self) -> int:
        return SIZES["train"] if self.split == "train" else len(choice_questions(self.split))

    def question(self, i: int) -> MCQuestion:
        given = choice(self.split, i)
        (question, gold), *_ = given.asked
        return MCQuestion(question, tuple(given.options), gold)

    def conversation(self, i: int) -> Conversation:
        """A list of options with one question; in training, more questions about it follow."""
        given = choice(self.split, i)
        messages = []
        for n, (question, gold) in enumerate(given.asked):
            listed = choice_question(question, given.options)
            messages += [user(question if n else listed), assistant(LETTERS[gold])]
        return messages


class WorldProblems(WorldTask, NumberTask):
    """Word problems solved step by step with the calculator, in the form of GSM8K."""

    name = "World-Problems"
    tags = replace(WorldTask.tags, domain="math", answer_format="number")

    def conversation(self, i: int) -> Conversation:
        asked = problem(self.split, i)
        parts = []
        for step in asked.steps:
            before, after = step.text.split("{}")
            gap = " " if parts else ""
            parts.append(text(f"{gap}{before}{step.expression} = "))
            parts += tool_call(step.expression, str(step.result))
            parts.append(text(f"{step.result}{after}"))
        parts.append(text(f"\n#### {asked.answer}"))
        return [user(f"{asked.story} {asked.question}"), assistant(parts)]

    def cluster(self, i: int) -> str:
        return " ".join(sorted(problem(self.split, i).steps[0].expression.split()))


class WorldSpelling(WorldTask, NumberTask):
    """Count a letter in three words, letter by letter."""

    name, baseline = "World-Spelling", 1 / MOST_LETTERS  # constant answer
    tags = replace(WorldProblems.tags, domain="spelling")

    def conversation(self, i: int) -> Conversation:
        asked = letter_count(self.split, i)
        words = f"{', '.join(asked.words[:-1])} and {asked.words[-1]}"
        question = f"How many times is the letter {asked.letter} found in {words}?"
        return [user(question), assistant(f"{asked.worked}\n#### {asked.count}")]

    def cluster(self, i: int) -> str:
        return letter_count(self.split, i).letter
