"""
AQuA: algebraic word problems with five options and a rationale.

    AQuA: reason, then end with `Answer: X`; AQuALetter: answer with the letter only

Source: Ling et al., "Program Induction by Rationale Generation", arXiv:1705.04146.
"""

import re
from dataclasses import replace

from tasks.base import LETTERS, Conversation, MCQuestion, Tags, assistant, user
from tasks.hub import HubQuestions, TaskRow, make_question

INSTRUCTION = "Reason step by step, then end with a line that says Answer: and the letter."
MARKER = re.compile(r"Answer: ([A-E])\b")


class AQuALetter(HubQuestions):
    """Algebraic word problems, answered with the letter only and scored by logits."""

    name, baseline = "AQUA-Letter", 0.2
    tags = Tags("math", "en", "native", "Apache-2.0", "letter", "aqua")
    repo = "deepmind/aqua_rat"
    splits = {"train": "raw/train", "val": "raw/validation", "test": "raw/test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        options = [option.partition(")")[2] for option in row["options"]]  # without `A)`
        right = LETTERS.index(row["correct"])
        return make_question(row["question"], options, right, row["rationale"])


class AQuA(AQuALetter):
    """
    Generative form: a rationale, then `Answer: X`. Scored by the last one (case-sensitive); a bare
    letter is wrong. `letters` are those that may follow `Answer: `.
    """

    name, kind = "AQUA", "generate"
    tags = replace(AQuALetter.tags, answer_format="marker")

    def conversation(self, i: int) -> Conversation:
        asked = self.question(i)
        answer = f"{asked.rationale}\nAnswer: {LETTERS[asked.right]}"
        return [user(asked.ask(INSTRUCTION)), assistant(answer)]

    def extract(self, answer: str) -> str | None:
        return (MARKER.findall(answer) or [None])[-1]
