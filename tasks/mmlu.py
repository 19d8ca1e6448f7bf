"""
MMLU: questions with four options from exams in 57 subjects; KMMLU: from Korean exams in 45.

Sources: Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300;
Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean", arXiv:2402.11548.
"""

from tasks.base import MCQuestion
from tasks.hub import HubQuestions, TaskRow, make_question


class MMLU(HubQuestions):
    """Train split: `auxiliary_train`, questions from other datasets."""

    name, baseline = "MMLU", 0.25
    repo = "cais/mmlu"
    splits = {"train": "all/auxiliary_train", "val": "all/validation", "test": "all/test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        return make_question(row["question"], row["choices"], row["answer"])


class KMMLU(HubQuestions):
    """All subjects, each with one file per split."""

    name, baseline = "KMMLU", 0.25
    repo = "HAERAE-HUB/KMMLU"
    splits = {"train": "data/*-train", "val": "data/*-dev", "test": "data/*-test"}

    def parse(self, row: TaskRow) -> MCQuestion:
        options = [row[letter] for letter in "ABCD"]
        return make_question(row["question"], options, int(row["answer"]) - 1)
