"""
GSM8K: grade-school word problems, solved step by step with a calculator.

    "... 48/2 = <<48/2=24>>24 clips ... #### 72" -> text, python "48/2", output "24", text ...

Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

import re
from itertools import cycle

from tasks.base import Conversation, NumberTask, Tags, assistant, user
from tasks.hub import HubTask, TaskRow

PART_TYPES = ("text", "python", "python_output")
CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")


class GSM8K(HubTask, NumberTask):
    """A calculation `<<3*4=12>>` of an answer becomes a tool call."""

    name = "GSM8K"
    tags = Tags("math", "en", "native", "MIT", "number", "gsm8k")
    repo = "openai/gsm8k"
    splits = {"train": "main/train", "test": "main/test"}

    def parse(self, row: TaskRow) -> Conversation:
        pieces = zip(cycle(PART_TYPES), CALCULATION.split(row["answer"]), strict=False)
        parts = [{"type": kind, "text": piece} for kind, piece in pieces if piece]
        return [user(row["question"]), assistant(parts)]

    def material(self, i: int) -> str:
        return self.items[i][0]["content"]
