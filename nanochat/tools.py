"""
What a model may call in the middle of an answer: a calculator, and Python where that is allowed.

    code -> calculate, else (if allowed) run_python -> the text that is put in, or None

The calculator never lets Python evaluate what a model wrote: it walks a syntax tree of numbers and
operators and refuses the rest, what would be slow, and what would be large. Knows nothing of
tokens.
"""

import ast
import operator
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nanochat.sandbox import Limits, choose_layer, run_python

PYTHON_LIMITS = Limits(seconds=3.0, output_bytes=2000)
MAX_CHARACTERS = 256  # of an expression
LARGEST = 10**30  # of all values on the way
LARGEST_EXPONENT = 256
DECIMALS = 6  # with 3 or more, as many results of GSM8K's annotations come out as they stand there
ARITHMETIC = re.compile(r"[0-9.,+*/%()\s-]+")
QUOTED = r"\"[^\"\\\n]*\"|'[^'\\\n]*'"
COUNT = re.compile(rf"({QUOTED})\.count\(({QUOTED})\)")
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Tools:
    """
    Answers a model's calls: `Engine(..., tool=Tools())`.

    python: let the sandbox run what is no arithmetic; what it prints is the answer. unsafe: run it
    unconfined where nothing confines it. threads: run up to so many programs alongside the engine;
    their answers are then futures. Raises SandboxUnavailable if Python is allowed and nothing
    here confines it.
    """

    def __init__(self, python: bool = False, unsafe: bool = False, threads: int = 0):
        if python:
            choose_layer(unsafe)
        self.python, self.unsafe = python, unsafe
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="tools") if threads else None

    def __call__(self, code: str) -> str | None | Future[str | None]:
        """The answer to one call, or its future; None where there is none."""
        answer = calculate(code)
        if answer is not None or not self.python:
            return answer
        return self.pool.submit(self.run, code) if self.pool else self.run(code)

    def run(self, code: str) -> str | None:
        """What a program prints; None where it prints nothing, or fails."""
        result = run_python(code, PYTHON_LIMITS, unsafe=self.unsafe)
        return result.stdout.strip() or None if result.ok else None


def calculate(expression: str) -> str | None:
    """
    The value of `12*(3+4)/7`, or of `"strawberry".count("r")`; None for anything else.

    Numbers, + - * / // % **, signs and parentheses; commas are dropped. Whole numbers come out
    without a decimal point, others rounded to DECIMALS.
    """
    expression = expression.strip()
    if len(expression) > MAX_CHARACTERS:
        return None
    counted = COUNT.fullmatch(expression)
    if counted:
        text, part = (quoted[1:-1] for quoted in counted.groups())
        return str(text.count(part))
    if not ARITHMETIC.fullmatch(expression):
        return None
    try:
        value = evaluate(ast.parse(expression.replace(",", ""), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    rounded = round(value, DECIMALS)
    return str(int(rounded)) if rounded == int(rounded) else f"{value:.{DECIMALS}f}".rstrip("0")


def evaluate(node: ast.AST) -> int | float:
    """The value of a syntax tree. Raises ValueError or ArithmeticError where it has none for us."""
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.UnaryOp(op=sign, operand=operand):
            value = OPERATORS[type(sign)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = evaluate(left), evaluate(right)
            if isinstance(op, ast.Pow) and abs(b) > LARGEST_EXPONENT:
                raise ValueError("too large an exponent")
            value = OPERATORS[type(op)](a, b)
        case _:
            raise ValueError("no arithmetic")
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("too large, or no real number")
    return value
