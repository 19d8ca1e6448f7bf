"""
LiveCodeBench: problems of programming contests, scored by running their tests in the sandbox.

    answer -> code -> a function of stdin, or a method of the class Solution -> tests -> 0 or 1

Source: Jain et al., "LiveCodeBench: Holistic and Contamination Free Evaluation of Large Language
Models for Code", arXiv:2403.07974.
"""

import base64
import json
import pickletools
import zlib

from nanochat.sandbox import Limits
from tasks.base import Conversation, Tags, assistant, user, visible
from tasks.humaneval import CodeTask, final_code, run_test

SECONDS = 5.0  # per test, on average over those of a sandboxed program
PROGRAM_TESTS = 12  # at most: a program that never ends costs a minute
READ = "Write a Python program that reads stdin and prints to stdout."
INSTRUCTION = "Answer with the whole program in a block of Python code."
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
    tags = Tags("code", "en", "native", "", "code", "livecodebench")
    repo = "livecodebench/code_generation_lite"
    splits = {"test": "test*"}

    def conversation(self, i: int) -> Conversation:
        starter = self.items[i]["starter_code"].strip()
        complete = f"Complete this Python class:\n\n```python\n{starter}\n```"
        asked = [self.material(i).strip(), complete if starter else READ, INSTRUCTION]
        return [user("\n\n".join(asked)) | {"row": i}, assistant("```python\n```")]

    def material(self, i: int) -> str:
        return self.items[i]["question_content"]

    def score(self, conversation: Conversation, answer: str) -> float:
        row = self.items[conversation[0]["row"]]
        method = json.loads(row["metadata"]).get("func_name")  # None: a program that reads stdin
        source = final_code(visible(answer), method)
        form = METHOD_PROGRAM if method else STDIN_PROGRAM
        program = IMPORTS + form.format(source=source, method=method)
        tests = [*json.loads(row["public_test_cases"]), *read_private(row["private_test_cases"])]
        checks = [describe_test(test, method) for test in tests]
        for n in range(0, len(checks), PROGRAM_TESTS):
            test = "\n".join([COMPARE, *checks[n : n + PROGRAM_TESTS]])
            limits = Limits(SECONDS * PROGRAM_TESTS, memory_bytes=2**29 + 64 * len(test))
            if not run_test(program, test, "run_case", unsafe=self.unsafe, limits=limits):
                return 0.0
        return 1.0


def describe_test(test: dict[str, str], method: str | None) -> str:
    """Code of a test: arguments and result are JSON for a method, else stdin and stdout."""
    if method is None:
        return f"assert same_text(run_case({test['input']!r}), {test['output']!r})"
    arguments = ", ".join(repr(json.loads(line)) for line in test["input"].splitlines())
    result = f"json.loads(json.dumps(run_case({arguments})))"  # tuples become lists
    return f"assert {result} == {json.loads(test['output'])!r}"


def read_private(encoded: str) -> list[dict[str, str]]:
    """Hidden test cases: JSON, or JSON that was pickled, compressed and encoded in base 64."""
    if not encoded.startswith("["):
        pickled = zlib.decompress(base64.b64decode(encoded))
        arguments = (argument for _, argument, _ in pickletools.genops(pickled))  # runs no code
        encoded = next(found for found in arguments if isinstance(found, str))
    return json.loads(encoded)
