"""
MMLU: questions with four options from exams in 57 subjects.

Source: Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300.
"""

from tasks.base import MCQuestion, QuestionTask
from tasks.hub import HubTask


class MMLU(HubTask, QuestionTask):
    """Train split: `auxiliary_train`, questions from other datasets."""

    name = "MMLU"
    baseline = 0.25
    repo = "cais/mmlu"
    stems = {"train": "all/auxiliary_train", "val": "all/validation", "test": "all/test"}
    columns = ("question", "choices", "answer")

    def question(self, i: int) -> MCQuestion:
        row = self.row(i)
        return MCQuestion(row["question"].strip(), tuple(row["choices"]), row["answer"])
