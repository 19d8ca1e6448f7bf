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
from dataclasses import dataclass
from typing import Any

from nanochat.common import printable
from nanochat.sandbox import Limits, choose_layer, run_python

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


@dataclass(frozen=True)
class Tools:
    """
    Answers a model's calls: `Engine(..., tool=Tools())`.

    Raises SandboxUnavailable at once if Python is allowed and nothing here confines it.
    """

    python: bool = False
    """Let the sandbox run what is no arithmetic; what it prints is the answer."""
    limits: Limits = Limits(seconds=3.0, output_bytes=2000)
    unsafe: bool = False
    """Run it unconfined where nothing confines it."""

    def __post_init__(self) -> None:
        if self.python:
            choose_layer(self.unsafe)

    def __call__(self, code: str) -> str | None:
        """The answer to one call; None where there is none."""
        answer = calculate(code)
        if answer is None and self.python:
            result = run_python(code, self.limits, unsafe=self.unsafe)
            answer = result.stdout.strip() if result.ok else None
        return answer or None


class BackgroundTools:
    """
    The same tools where many wait: a sum is worked out at once, Python runs beside the engine.

    Calls give what `Engine` takes: an answer, or a future of one.
    """

    def __init__(self, tools: Tools, threads: int = 4):
        self.tools = tools
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="tools")

    def __call__(self, code: str) -> str | None | Future[str | None]:
        """The answer to one call, or where it will be."""
        answer = calculate(code)
        if answer is not None or not self.tools.python:
            return answer
        return self.pool.submit(self.run, code)

    def run(self, code: str) -> str | None:
        """The answer; none, which is printed, where this machine could not run the code."""
        try:
            return self.tools(code)
        except (OSError, RuntimeError) as error:
            print(f"a call of the tool failed: {printable(error)}", flush=True)
            return None


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
