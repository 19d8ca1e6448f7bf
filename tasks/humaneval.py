"""
HumanEval: complete functions from signature and docstring, scored by running tests.

    answer -> extracted program -> run_test: program and test in separate child processes -> 0 or 1

Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

from nanochat import sandbox
from tasks.base import Conversation, Tags, assistant, user, visible
from tasks.hub import HubTask

LIMITS = sandbox.Limits()
# A fence begins a line, or names a language: other ones in a line are quotes
BLOCK = re.compile(r"(?:^[ \t]*|(?=```\w))```([\w+-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.S | re.M)
INSTRUCTION = "Complete this function. Answer with the whole function in a block of Python code."


class CodeTask(HubTask):
    """
    A task that runs generated code to score it. Evaluation only. User messages have the index of
    their row as "row".
    """

    kind = "generate"
    unsafe = False
    """If the machine has no sandbox, run programs unsandboxed instead of raising
    SandboxUnavailable when scoring."""

    def require_input(self) -> None:
        sandbox.is_confined(self.unsafe)


class HumanEval(CodeTask):
    """Functions in Python; the reference answer is the published solution."""

    name = "HumanEval"
    tags = Tags("code", "en", "native", "MIT", "code", "humaneval")
    repo = "openai/openai_humaneval"
    splits = {"test": "openai_humaneval/test"}

    def conversation(self, i: int) -> Conversation:
        asked = f"{INSTRUCTION}\n\n```python\n{self.items[i]['prompt']}```"
        return [user(asked) | {"row": i}, assistant(f"```python\n{self.material(i)}```")]

    def material(self, i: int) -> str:
        return self.items[i]["prompt"] + self.items[i]["canonical_solution"]

    def score(self, conversation: Conversation, answer: str) -> float:
        row = self.items[conversation[0]["row"]]
        entry, prompt = row["entry_point"], row["prompt"]
        # The prompt has imports, helpers and a function without a body: a whole function replaces
        # that function, and a bare body completes it
        program = prompt + "\n" + final_code(visible(answer), entry)
        test = f"{row['test']}\ncheck({entry})"
        return float(run_test(program, test, entry, setup=prompt, unsafe=self.unsafe))


def final_code(answer: str, entry: str | None) -> str:
    """
    The last block of Python code, one that defines `entry` if there is such; else the last block
    of any kind, else the whole answer.
    """
    blocks = BLOCK.findall(answer)
    python = [code for language, code in blocks if language.lower() in ("python", "python3", "py")]
    found = python or [code for _, code in blocks] or [answer]
    return ([code for code in found if f"def {entry}(" in code] or found)[-1]


def run_test(
    program: str,
    test: str,
    entry: str,
    setup: str = "",
    unsafe: bool = False,
    limits: sandbox.Limits = LIMITS,
) -> bool:
    """
    Whether the function `entry` of a program passes a test that calls it by that name.

    Program and test run in separate sandboxes. In the test's sandbox, `entry` is a proxy that calls
    the program's function. Only plain data crosses: None, numbers, text, bytes, and lists, tuples,
    sets and dicts of these, always as exactly these types. `setup` is trusted code that runs before
    the test; the proxy replaces its `entry`. A test passes if it runs to completion. For HumanEval,
    test=test + "check(<entry>)" and setup=prompt.

    Guaranteed: the result is true only if the program's process answered every call from the test
    within the limits, with values that the test accepts. Neither what the program prints, patches,
    overrides or writes to its pipes, nor how it exits, affects the test's code or the verdict.
    Not guaranteed: that a function computed the values (a program may guess), that the test is
    good, or anything without a sandbox. Limitation: a test sees no changes to its arguments and
    cannot pass functions or objects.
    """
    confined = sandbox.is_confined(unsafe)
    calls, replies = os.pipe(), os.pipe()
    ends = (calls[0], replies[1]), (replies[0], calls[1])  # program, test
    held = {"role": "candidate", "code": program, "entry": entry, "channel": ends[0]}
    judge = {"role": "judge", "code": test, "setup": setup, "entry": entry, "channel": ends[1]}
    with ThreadPoolExecutor(1) as other:
        candidate = other.submit(sandbox.run, held, limits, confined, ends[0])
        verdict = sandbox.run(judge, limits, confined, ends[1])
        candidate.result()  # raises if it could not be started
    return verdict.ok
