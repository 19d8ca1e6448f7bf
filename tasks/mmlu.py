"""
MMLU: questions with four options from exams in 57 subjects.

Source: Hendrycks et al., "Measuring Massive Multitask Language Understanding", arXiv:2009.03300.
"""

from tasks.base import LETTERS, ChoiceTask, Conversation, assistant, choice_question, user
from tasks.hub import HubTask


class MMLU(HubTask, ChoiceTask):
    """Trains on `auxiliary_train`, the questions of other data sets."""

    name = "MMLU"
    baseline = 0.25
    splits = ("train", "val", "dev", "test")
    repo = "cais/mmlu"
    stems = {
        "train": "all/auxiliary_train",
        "val": "all/validation",
        "dev": "all/dev",
        "test": "all/test",
    }
    columns = ("question", "choices", "answer")

    def conversation(self, i: int) -> Conversation:
        row = self.row(i)
        question = choice_question(row["question"].strip(), row["choices"], self.letters(i))
        return [user(question), assistant(LETTERS[row["answer"]])]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[:4]

    def material(self, i: int) -> str:
        row = self.row(i)
        return "\n".join([row["question"], *row["choices"]])
