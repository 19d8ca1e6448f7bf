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
    QuestionTask,
    answer_text,
    assistant,
    choice_question,
    user,
    visible,
)
from tasks.hub import HubTask, TaskRow

NUM_OPTIONS = 5
INSTRUCTION = "Reason step by step, then end with a line that says Answer: and the letter."
MARKER = re.compile(r"Answer: ([A-E])\b")


class AQuA(HubTask):
    """
    Generative form, scored by the last `Answer: X` (case-sensitive); a bare letter is wrong.

    `letters` are those that may follow `Answer: `. To score by logits right after
    <|assistant_start|>, use AQuALetter.
    """

    name = "AQUA"
    kind = "generate"
    baseline = 0.2
    splits = ("train", "val", "test")
    repo = "deepmind/aqua_rat"
    stems = {"train": "raw/train", "val": "raw/validation", "test": "raw/test"}
    columns = ("question", "options", "rationale", "correct")

    def find_problem(self, row: TaskRow) -> str | None:
        letters = LETTERS[:NUM_OPTIONS]
        valid = len(row["options"]) == NUM_OPTIONS and row["correct"] in letters
        return None if valid else f"not {NUM_OPTIONS} options, or no valid answer"

    def options(self, i: int) -> list[str]:
        """The options without their `A)` prefixes."""
        return [option.partition(")")[2].strip() for option in self.row(i)["options"]]

    def conversation(self, i: int) -> Conversation:
        row = self.row(i)
        question = choice_question(row["question"], self.options(i), self.letters(i), INSTRUCTION)
        return [user(question), assistant(f"{row['rationale'].strip()}\nAnswer: {row['correct']}")]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[:NUM_OPTIONS]

    def material(self, i: int) -> str:
        return "\n".join([self.row(i)["question"], *self.options(i)])

    def asked(self, i: int) -> str:
        return self.row(i)["question"]

    def score(self, conversation: Conversation, answer: str) -> float:
        right, given = (
            MARKER.findall(text)[-1:] for text in (answer_text(conversation[-1]), visible(answer))
        )
        return float(given == right)

    def answered(self, answer: str) -> bool:
        return MARKER.search(visible(answer)) is not None


class AQuALetter(QuestionTask, AQuA):
    """The same questions, answered with the letter only."""

    name = "AQUA-Letter"

    def question(self, i: int) -> MCQuestion:
        row = self.row(i)
        return MCQuestion(row["question"], tuple(self.options(i)), LETTERS.index(row["correct"]))
