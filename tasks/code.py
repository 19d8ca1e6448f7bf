"""
Code: functions (HumanEval) and programs (LiveCodeBench), scored by running tests in the sandbox.

    answer -> extracted program -> run_test: program and test in separate child processes -> 0 or 1

Sources: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374;
Jain et al., "LiveCodeBench: Holistic and Contamination Free Evaluation of Large Language Models for
Code", arXiv:2403.07974.
"""

import base64
import json
import os
import pickletools
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from nanochat import sandbox
from tasks.base import Conversation, Tags, assistant, user, visible
from tasks.hub import HubTask

# A fence begins a line, or names a language: other ones in a line are quotes
BLOCK = re.compile(r"(?:^[ \t]*|(?=```\w))```([\w+-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.S | re.M)
FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.*)", re.M)  # only valid as first lines
INSTRUCTION = "Complete this function. Answer with the whole function in a block of Python code."


class CodeTask(HubTask):
    """A task that runs generated code to score it. Evaluation only."""

    kind, answer_format = "generate", "code"

    def require_input(self) -> None:
        sandbox.is_confined(self.unsafe)


class HumanEval(CodeTask):
    """Functions in Python; the reference answer is the published solution."""

    name = "HumanEval"
    tags = Tags("code", "en", "native", "MIT", "humaneval")
    repo = "openai/openai_humaneval"
    splits = {"test": "openai_humaneval/test"}

    def __getitem__(self, i: int) -> Conversation:
        prompt, solution = self.items[i]["prompt"], self.items[i]["canonical_solution"]
        asked = f"{INSTRUCTION}\n\n```python\n{prompt}```"
        return [user(asked), assistant(f"```python\n{prompt}{solution}```")]

    def score(self, i: int, answer: str) -> float:
        row = self.items[i]
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


def run_test(program: str, test: str, entry: str, setup: str = "", unsafe: bool = False) -> bool:
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
    program = "\n".join([*FUTURE.findall(program), FUTURE.sub("", program)])
    limits = sandbox.Limits(memory_bytes=2**29 + 64 * len(test))  # some tests have megabytes
    calls, replies = os.pipe(), os.pipe()
    ends = (calls[0], replies[1]), (replies[0], calls[1])  # program, test
    held = {"role": "candidate", "code": program, "entry": entry, "channel": ends[0]}
    judge = {"role": "judge", "code": test, "setup": setup, "entry": entry, "channel": ends[1]}
    with ThreadPoolExecutor(1) as other:
        both = Barrier(2)
        candidate = other.submit(sandbox.run, held, limits, confined, ends[0], both)
        verdict = sandbox.run(judge, limits, confined, ends[1], both)
        candidate.result()  # raises if it could not be started
    return verdict.ok


# ---- LiveCodeBench: problems of programming contests ---------------------------------------------

READ = "Write a Python program that reads stdin and prints to stdout."
PROGRAM = "Answer with the whole program in a block of Python code."
# Names that contest sites import for an answer. builtins last: math has another pow
MODULES = (
    "bisect collections copy datetime functools heapq io itertools json math operator random re "
    "statistics string sys time typing builtins"
).split()
IMPORTS = "\n".join(f"from {name} import *" for name in MODULES)
IMPORTS += f"\nimport {', '.join(MODULES)}, contextlib\nsys.setrecursionlimit(50_000)\n"
STDIN_PROGRAM = """
def open_file(file, mode="r", *rest, **options):
    if file in (0, "/dev/stdin"):
        return sys.stdin.buffer if "b" in mode else sys.stdin
    return open(file, mode, *rest, **options)
def run_case(text):
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    printed = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        exec({source!r}, {{**globals(), "__name__": "__main__", "open": open_file}})
    printed.flush()
    return printed.buffer.getvalue().decode()
"""
METHOD_PROGRAM = """{source}
def run_case(*arguments):
    return Solution().{method}(*arguments)
"""
COMPARE = """
import json
from decimal import Decimal
def same_text(found, right):
    pairs = zip(found.split(), right.split(), strict=True)
    return all(a == b or Decimal(a) == Decimal(b) for a, b in pairs)
"""


class LiveCodeBench(CodeTask):
    """
    The data has no reference solutions, so the reference answer is empty code.

    Printed output is compared word by word, numbers by value.
    """

    name = "LiveCodeBench"
    tags = Tags("code", "en", "native", "", "livecodebench")
    repo = "livecodebench/code_generation_lite"
    splits = {"test": "test*"}

    def __getitem__(self, i: int) -> Conversation:
        starter = self.items[i]["starter_code"].strip()
        complete = f"Complete this Python class:\n\n```python\n{starter}\n```"
        asked = [self.items[i]["question_content"].strip(), complete if starter else READ, PROGRAM]
        return [user("\n\n".join(asked)), assistant("```python\n```")]

    def score(self, i: int, answer: str) -> float:
        row = self.items[i]
        method = json.loads(row["metadata"]).get("func_name")  # None: a program that reads stdin
        source = final_code(visible(answer), method)
        form = METHOD_PROGRAM if method else STDIN_PROGRAM
        program = IMPORTS + form.format(source=source, method=method)
        tests = [*json.loads(row["public_test_cases"]), *read_private(row["private_test_cases"])]
        for case in tests:
            check = f"same_text(run_case({case['input']!r}), {case['output']!r})"
            if method:  # arguments and result are JSON, in which tuples become lists
                lines = case["input"].strip().split("\n")
                arguments = ", ".join(repr(json.loads(line)) for line in lines)
                right = json.loads(case["output"])
                check = f"json.loads(json.dumps(run_case({arguments}))) == {right!r}"
            test = f"{COMPARE}assert {check}"
            if not run_test(program, test, "run_case", unsafe=self.unsafe):
                return 0.0
        return 1.0


def read_private(encoded: str) -> list[dict[str, str]]:
    """Hidden test cases: JSON, or JSON that was pickled, compressed and encoded in base 64."""
    if not encoded.startswith("["):
        pickled = zlib.decompress(base64.b64decode(encoded))
        arguments = (argument for _, argument, _ in pickletools.genops(pickled))  # runs no code
        encoded = next(found for found in arguments if isinstance(found, str))
    return json.loads(encoded)
