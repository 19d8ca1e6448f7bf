"""
ARC: grade-school science questions with three to five options, an easy and a challenge set.

Source: Clark et al., "Think you have Solved Question Answering? Try ARC", arXiv:1803.05457.
"""

from tasks.base import MCQuestion, QuestionTask
from tasks.hub import HubTask


def stems_in(folder: str) -> dict[str, str]:
    """Split -> file stem."""
    return {"train": f"{folder}/train", "val": f"{folder}/validation", "test": f"{folder}/test"}


class ARC(HubTask, QuestionTask):
    """Options are lettered by position, although some rows number them."""

    baseline = 0.25
    repo = "allenai/ai2_arc"
    columns = ("question", "choices", "answerKey")

    def question(self, i: int) -> MCQuestion:
        row = self.row(i)
        right = row["choices"]["label"].index(row["answerKey"])
        return MCQuestion(row["question"], tuple(row["choices"]["text"]), right)


class ARCEasy(ARC):
    """Questions that simple methods can answer."""

    name = "ARC-Easy"
    stems = stems_in("ARC-Easy")


class ARCChallenge(ARC):
    """Questions that both a retrieval and a co-occurrence method answered incorrectly."""

    name = "ARC-Challenge"
    stems = stems_in("ARC-Challenge")
