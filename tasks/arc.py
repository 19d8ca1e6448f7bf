"""
ARC: grade-school science questions with three to five options, easy ones and challenging ones.

Source: Clark et al., "Think you have Solved Question Answering? Try ARC", arXiv:1803.05457.
"""

from tasks.base import Question, QuestionTask
from tasks.hub import HubTask


def stems_in(folder: str) -> dict[str, str]:
    """How the files of each split are named."""
    return {"train": f"{folder}/train", "val": f"{folder}/validation", "test": f"{folder}/test"}


class ARC(HubTask, QuestionTask):
    """Options are lettered by their place; some of the rows number them instead."""

    baseline = 0.25
    splits = ("train", "val", "test")
    repo = "allenai/ai2_arc"
    columns = ("question", "choices", "answerKey")

    def question(self, i: int) -> Question:
        row = self.row(i)
        right = row["choices"]["label"].index(row["answerKey"])
        return Question(row["question"], tuple(row["choices"]["text"]), right)


class ARCEasy(ARC):
    """The questions that simple methods can answer."""

    name = "ARC-Easy"
    stems = stems_in("ARC-Easy")


class ARCChallenge(ARC):
    """The questions that a retrieval and a co-occurrence method both got wrong."""

    name = "ARC-Challenge"
    stems = stems_in("ARC-Challenge")
