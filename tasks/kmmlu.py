"""
KMMLU: questions with four options from Korean exams in 45 subjects.

Source: Son et al., "KMMLU: Measuring Massive Multitask Language Understanding in Korean",
arXiv:2402.11548.
"""

from tasks.base import LETTERS, ChoiceTask, Conversation, assistant, choice_question, user
from tasks.hub import HubTask


class KMMLU(HubTask, ChoiceTask):
    """All subjects that the repository holds, each a file per split. Only for evaluation."""

    name = "KMMLU"
    baseline = 0.25
    splits = ("test",)
    repo = "HAERAE-HUB/KMMLU"
    stems = {"test": "data/*-test"}
    columns = ("question", "answer", "A", "B", "C", "D")

    def conversation(self, i: int) -> Conversation:
        row = self.row(i)
        options = [str(row[letter]) for letter in self.letters(i)]
        question = choice_question(row["question"].strip(), options, self.letters(i))
        return [user(question), assistant(LETTERS[int(row["answer"]) - 1])]

    def letters(self, i: int) -> tuple[str, ...]:
        return LETTERS[:4]

    def material(self, i: int) -> str:
        row = self.row(i)
        return "\n".join([row["question"], *(str(row[letter]) for letter in self.letters(i))])
