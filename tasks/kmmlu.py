"""
KMMLU: questions with four options from Korean exams in 45 subjects.

Source: Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean",
arXiv:2402.11548.
"""

from tasks.base import MCQuestion
from tasks.hub import HubQuestions, TaskRow


class KMMLU(HubQuestions):
    """All subjects, each with one file per split."""

    name = "KMMLU"
    baseline = 0.25
    repo = "HAERAE-HUB/KMMLU"
    stems = {"train": "data/*-train", "val": "data/*-dev", "test": "data/*-test"}
    columns = ("question", "answer", "A", "B", "C", "D")

    def parse(self, row: TaskRow) -> MCQuestion:
        options = tuple(row[letter] for letter in "ABCD")
        return MCQuestion(row["question"].strip(), options, int(row["answer"]) - 1)
