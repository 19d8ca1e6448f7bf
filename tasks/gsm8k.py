"""
GSM8K: grade-school word problems, solved step by step with a calculator.

    "... 48/2 = <<48/2=24>>24 clips ... #### 72" -> text, python "48/2", output "24", text ...

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

from tasks.base import Conversation, NumberTask, assistant, user, with_tool_calls
from tasks.hub import HubTask


class GSM8K(HubTask, NumberTask):
    name = "GSM8K"
    repo = "openai/gsm8k"
    stems = {"train": "main/train", "test": "main/test"}
    columns = ("question", "answer")

    def conversation(self, i: int) -> Conversation:
        row = self.row(i)
        return [user(row["question"]), assistant(with_tool_calls(row["answer"]))]

    def material(self, i: int) -> str:
        return self.row(i)["question"]
