"""
KMMLU: questions with four options from Korean exams in 45 subjects.

Source: Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean",
arXiv:2402.11548.
"""

from tasks.base import MCQuestion, QuestionTask
from tasks.hub import HubTask


class KMMLU(HubTask, QuestionTask):
    """All subjects, each with one file per split. Evaluation only."""

    name = "KMMLU"
    baseline = 0.25
    splits = ("test",)
    repo = "HAERAE-HUB/KMMLU"
    stems = {"test": "data/*-test"}
    columns = ("question", "answer", "A", "B", "C", "D")

    def question(self, i: int) -> MCQuestion:
        row = self.row(i)
        options = tuple(str(row[letter]) for letter in "ABCD")
        return MCQuestion(row["question"].strip(), options, int(row["answer"]) - 1)
