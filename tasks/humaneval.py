"""
HumanEval: functions to write from their signature and docstring, judged by running tests.

    answer -> the program in it -> sandbox.passes: it and the tests, each in a child of its own

Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
"""

import re
from functools import cached_property

from nanochat.sandbox import passes
from tasks.base import Conversation, assistant, spoken, user
from tasks.hub import HubTask, Row

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|$)", re.DOTALL)
INSTRUCTION = "Complete this function. Answer with the whole function in a block of Python code."


class HumanEval(HubTask):
    """
    Only for evaluation.

    `unsafe` lets programs run without a sandbox where the machine has none; without it, scoring
    there raises SandboxUnavailable.
    """

    name = "HumanEval"
    kind = "generate"
    splits = ("test",)
    repo = "openai/openai_humaneval"
    stems = {"test": "openai_humaneval/test"}
    columns = ("prompt", "canonical_solution", "test", "entry_point")

    def __init__(self, split: str, unsafe: bool = False):
        super().__init__(split)
        self.unsafe = unsafe

    def conversation(self, i: int) -> Conversation:
        return [user(question(self.row(i))), assistant(f"```python\n{self.material(i)}```")]

    def material(self, i: int) -> str:
        row = self.row(i)
        return row["prompt"] + row["canonical_solution"]

    @cached_property
    def by_question(self) -> dict[str, Row]:
        """The row behind what the user says."""
        return {question(row): row for row in self.data.rows}

    def score(self, conversation: Conversation, answer: str) -> float:
        row = self.by_question[conversation[0]["content"]]
        entry, prompt = row["entry_point"], row["prompt"]
        program = prompt + "\n" + code_in(spoken(answer), entry)
        test = f"{row['test']}\ncheck({entry})"
        return float(passes(program, test, entry, setup=prompt, unsafe=self.unsafe))


def question(row: Row) -> str:
    """What the user says."""
    return f"{INSTRUCTION}\n\n```python\n{row['prompt']}```"


def code_in(answer: str, entry: str) -> str:
    """
    The block of code that defines `entry`, else the first one, else all of the answer.

    It runs after the prompt, whose function has no body yet. So imports and helpers are there, a
    whole function takes the place of the prompt's, and a body alone continues it.
    """
    blocks = BLOCK.findall(answer) or [answer]
    return next((block for block in blocks if f"def {entry}(" in block), blocks[0])
