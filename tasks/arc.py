"""
ARC: grade-school science questions with three to five options, an easy and a challenge set.

Source: Clark et al., "Think you have Solved Question Answering? Try ARC", arXiv:1803.05457.
"""

from tasks.base import MCQuestion, Tags
from tasks.hub import HubQuestions, TaskRow, make_question


class ARCEasy(HubQuestions):
    """Questions that simple methods can answer; lettered by position, also if a row has numbers."""

    name, baseline = "ARC-Easy", 0.25
    tags = Tags("science", "en", "native", "CC BY-SA 4.0", "letter", "arc")
    repo = "allenai/ai2_arc"
    splits = {"train": "ARC-Easy/train", "val": "ARC-Easy/validation", "test": "ARC-Easy/test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        choices = row["choices"]
        right = choices["label"].index(row["answerKey"])
        return make_question(row["question"], choices["text"], right)


class ARCChallenge(ARCEasy):
    """Questions that both a retrieval and a co-occurrence method answered incorrectly."""

    name = "ARC-Challenge"
    splits = {split: stem.replace("Easy", "Challenge") for split, stem in ARCEasy.splits.items()}
