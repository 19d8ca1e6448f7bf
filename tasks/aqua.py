"""
AQuA: algebraic word problems with five options and a rationale.

    AQuA: reason, then end with `Answer: X`; AQuALetter: answer with the letter only

Source: Ling et al., "Program Induction by Rationale Generation", arXiv:1705.04146.
"""

import re

from tasks.base import (
    LETTERS,
    Conversation,
    MCQuestion,
    answer_text,
    assistant,
    choice_question,
    user,
    visible,
)
from tasks.hub import HubQuestions, TaskRow

NUM_OPTIONS = 5
INSTRUCTION = "Reason step by step, then end with a line that says Answer: and the letter."
MARKER = re.compile(r"Answer: ([A-E])\b")


class AQuALetter(HubQuestions):
    """Algebraic word problems, answered with the letter only and scored by logits."""

    name = "AQUA-Letter"
    baseline = 0.2
    repo = "deepmind/aqua_rat"
    stems = {"train": "raw/train", "val": "raw/validation", "test": "raw/test"}
    columns = ("question", "options", "rationale", "correct")

    def parse(self, row: TaskRow) -> MCQuestion:
        options = tuple(option.partition(")")[2].strip() for option in row["options"])  # no `A)`
        if len(options) != NUM_OPTIONS:
            raise ValueError(f"not {NUM_OPTIONS} options")
        return MCQuestion(row["question"], options, LETTERS.index(row["correct"]))


class AQuA(AQuALetter):
    """
    Generative form: a rationale, then `Answer: X`. Scored by the last one (case-sensitive); a bare
    letter is wrong. `letters` are those that may follow `Answer: `.
    """

    name = "AQUA"
    kind = "generate"

    def conversation(self, i: int) -> Conversation:
        text, options, right = self.question(i)
        asked = choice_question(text, options, self.letters(i), INSTRUCTION)
        rationale = self.row(i)["rationale"].strip()
        return [user(asked), assistant(f"{rationale}\nAnswer: {LETTERS[right]}")]

    def score(self, conversation: Conversation, answer: str) -> float:
        right = MARKER.findall(answer_text(conversation[-1]))[-1:]
        return float(MARKER.findall(visible(answer))[-1:] == right)

    def answered(self, answer: str) -> bool:
        return MARKER.search(visible(answer)) is not None
