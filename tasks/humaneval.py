"""
HumanEval: functions to write from their signature and docstring, judged by running tests.

    answer -> the program in it -> passes: it and the test, each in a child of its own -> 0 or 1

Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from nanochat import sandbox
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


def passes(program: str, test: str, entry: str, setup: str = "", unsafe: bool = False) -> bool:
    """
    Whether the function `entry` of a program withstands a test that knows it by that name.

    The program and the test run in sandboxes of their own. In the test's, `entry` is a function
    that asks the program's, and nothing but plain data passes between them: None, numbers, text,
    bytes, and lists, tuples, sets and dicts of these, always as exactly these types. `setup` is
    trusted code that the test builds upon; it runs before the test, which replaces its `entry`.
    The test passes by running to its end: for HumanEval, test=test + "check(<entry>)" and
    setup=prompt.

    Guaranteed: true only if, within the limits, the program's process answered every call of the
    test with values that the test accepts. Whatever the program prints, patches, overrides or
    writes into its pipes, and however it ends, it reaches neither the test's code nor the place
    where the verdict is made. Not guaranteed: that a function computed the values (a program may
    guess), that the test is a good one, nor anything where it runs unconfined. The price: a test
    sees no changes to its arguments, and cannot pass functions or objects.
    """
    layer, limits = sandbox.choose_layer(unsafe), sandbox.Limits()
    calls, replies = os.pipe(), os.pipe()
    ends = (calls[0], replies[1]), (replies[0], calls[1])  # the program's, the test's
    held = {"role": "candidate", "code": program, "entry": entry, "channel": ends[0]}
    judge = {"role": "judge", "code": test, "setup": setup, "entry": entry, "channel": ends[1]}
    with ThreadPoolExecutor(1) as other:
        candidate = other.submit(sandbox.run, held, limits, layer, ends[0])
        verdict = sandbox.run(judge, limits, layer, ends[1])
        candidate.result()  # raises if it could not be started
    return verdict.ok
