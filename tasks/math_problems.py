"""
Math problems with a final answer: GSM8K, and Korean ones (HRM8K, MCLM).

    "... 48/2 = <<48/2=24>>24 clips ... #### 72" -> text, python "48/2", output "24", text ...
    row -> problem and final answer
"""

import re
from dataclasses import replace
from decimal import Decimal
from itertools import cycle

from tasks.base import Conversation, NumberTask, Tags, assistant, final_value, user
from tasks.hub import HubTask, TaskRow

INSTRUCTION = "Solve this problem step by step, then write #### and the final answer."
PART_TYPES = ("text", "python", "python_output")
CALCULATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")


class GSM8K(HubTask, NumberTask):
    """
    Grade-school word problems; a calculation `<<3*4=12>>` of an answer becomes a tool call.

    Source: Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
    """

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


class HRM8K(HubTask):
    """
    Korean math: GSM8K, MATH, Omni-MATH and MMMLU in translation, and KSM, Korean competitions.

    An answer is right if what follows its last `####` is the same number, with or without a unit,
    or the same formula but for spaces.
    Source: Ko et al., "Understand, Solve and Translate", arXiv:2501.02448.
    """

    name, kind = "HRM8K", "generate"
    tags = Tags("math", "ko", "translated", "MIT", "number", "gsm8k+math+omni-math+mmlu+ksm")
    repo = "HAERAE-HUB/HRM8K"
    splits, column = {"test": "HRM8K/*_test"}, "question"

    def parse(self, row: TaskRow) -> Conversation:
        if row["answer"] is None:
            raise ValueError("no answer")
        asked = f"{row[self.column].strip()}\n\n{INSTRUCTION}"
        return [user(asked), assistant(f"#### {row['answer']}")]

    def material(self, i: int) -> str:
        return self.items[i][0]["content"].removesuffix(f"\n\n{INSTRUCTION}")

    def extract(self, answer: str) -> Decimal | str | None:
        return final_value(answer)


class MCLMKorean(HRM8K):
    """
    MT-MATH100 of MCLM: problems of MATH-500, translated into Korean.

    Source: Son et al., "Linguistic Generalizability of Test-Time Scaling", arXiv:2502.17407.
    """

    name = "MCLM-Ko"
    tags = replace(HRM8K.tags, parent="math")
    repo = "amphora/MCLM"
    splits, column = {"test": "mt-math100"}, "ko"
