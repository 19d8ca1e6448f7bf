"""
LiveCodeBench: problems of programming contests, scored by running their tests in the sandbox.

    answer -> code -> a function of stdin, or a method of the class Solution -> tests -> 0 or 1

Source: Jain et al., "LiveCodeBench: Holistic and Contamination Free Evaluation of Large Language
Models for Code", arXiv:2403.07974.
"""

import base64
import io
import json
import pickle
import zlib
from typing import Any, NoReturn

from nanochat.sandbox import Limits
from tasks.base import Conversation, Tags, assistant, user, visible
from tasks.hub import TaskRow
from tasks.humaneval import CodeTask, final_code, run_test

COLUMNS = "question_content starter_code metadata public_test_cases private_test_cases".split()
ENTRY = "solve"  # function that the tests call
SECONDS = 5.0  # per test, on average over those of a sandboxed program
PROGRAM_TESTS = 12  # at most: a program that never ends costs a minute
READ = "Write a Python program that reads stdin and prints to stdout."
COMPLETE = "Complete this Python class:\n\n```python\n{starter}\n```"
INSTRUCTION = "Answer with the whole program in a block of Python code."
# Names that contest sites import for an answer. builtins last: math has another pow
MODULES = (
    "bisect collections copy datetime functools heapq io itertools json math operator random re "
    "statistics string sys time typing builtins"
).split()
IMPORTS = "\n".join(f"from {name} import *" for name in MODULES)
IMPORTS += f"\nimport {', '.join(MODULES)}\nsys.setrecursionlimit(50_000)"
STDIN_PROGRAM = """
import contextlib, io, sys
def {entry}(text, source={source!r}, imports={imports!r}):
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    printed = io.TextIOWrapper(io.BytesIO())
    def open_file(file, mode="r", *rest, **options):
        if file in (0, "/dev/stdin"):
            return sys.stdin.buffer if "b" in mode else sys.stdin
        return open(file, mode, *rest, **options)
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        names = {{"__name__": "__main__"}}
        exec(imports, names)
        names.update(exit=sys.exit, quit=sys.exit, open=open_file)
        exec(compile(source, "program", "exec"), names)
    printed.flush()
    return printed.buffer.getvalue().decode()
"""
METHOD_PROGRAM = """
names = {{}}
exec({imports!r}, names)
exec(compile({source!r}, "program", "exec"), names)
def {entry}(*arguments):
    return names["Solution"]().{method}(*arguments)
"""
COMPARE = """
import decimal
def same_text(found, right):
    return type(found) is str and list(map(value, found.split())) == list(map(value, right.split()))
def value(word):
    try:
        number = decimal.Decimal(word)
    except decimal.InvalidOperation:
        return word
    return number if number.is_finite() else word
def same(found, right):
    if isinstance(right, list):
        return isinstance(found, list | tuple) and len(found) == len(right) and all(
            map(same, found, right))
    return found == right
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

    def parse(self, row: TaskRow) -> TaskRow:
        """Checks the public tests only: hidden ones are large, so they are read when scored."""
        if not all(isinstance(row[name], str) for name in COLUMNS):
            raise ValueError("a column is not text")
        for test in json.loads(row["public_test_cases"]):
            describe_test(test, method_of(row))
        return row

    def conversation(self, i: int) -> Conversation:
        row = self.items[i]
        starter = row["starter_code"].strip()
        task = COMPLETE.format(starter=starter) if starter else READ
        asked = f"{row['question_content'].strip()}\n\n{task}\n\n{INSTRUCTION}"
        return [user(asked), assistant("```python\n```")]

    def material(self, i: int) -> str:
        return self.items[i]["question_content"]

    def score(self, conversation: Conversation, answer: str) -> float:
        row = self.row_of(conversation)
        method = method_of(row)
        form = METHOD_PROGRAM if method else STDIN_PROGRAM
        source = final_code(visible(answer), method)
        program = form.format(entry=ENTRY, source=source, method=method, imports=IMPORTS)
        tests = [*json.loads(row["public_test_cases"]), *read_private(row["private_test_cases"])]
        lines = [f"assert {describe_test(test, method)}" for test in tests]
        for n in range(0, len(lines), PROGRAM_TESTS):
            test = "\n".join([COMPARE, *lines[n : n + PROGRAM_TESTS]])
            memory = 2**29 + 64 * len(test)  # tests are code
            limits = Limits(SECONDS * PROGRAM_TESTS, memory_bytes=memory)
            if not run_test(program, test, ENTRY, unsafe=self.unsafe, limits=limits):
                return 0.0
        return 1.0


def method_of(row: TaskRow) -> str | None:
    """The method to complete; None for a program that reads stdin."""
    return json.loads(row["metadata"]).get("func_name")


def describe_test(test: dict[str, str], method: str | None) -> str:
    """Condition of a test: arguments and result are JSON for a method, else stdin and stdout."""
    if method is None:
        return f"same_text({ENTRY}({test['input']!r}), {test['output']!r})"
    arguments = ", ".join(repr(json.loads(line)) for line in test["input"].splitlines())
    return f"same({ENTRY}({arguments}), {json.loads(test['output'])!r})"


class TextUnpickler(pickle.Unpickler):
    """Reads text and plain containers; loads no class or function, so it runs no code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"unexpected {module}.{name} in test cases")


def read_private(encoded: str) -> list[dict[str, Any]]:
    """
    Hidden test cases: JSON, or JSON that was pickled, compressed and encoded in base 64. Raises
    ValueError if they are neither.
    """
    try:
        if encoded.startswith("["):
            return json.loads(encoded)
        pickled = zlib.decompress(base64.b64decode(encoded))
        return json.loads(TextUnpickler(io.BytesIO(pickled)).load())
    except Exception as error:  # a damaged pickle may raise almost anything
        raise ValueError(f"cannot read hidden tests {encoded[:40]!r}...: {error}") from error
