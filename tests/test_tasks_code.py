"""HumanEval and LiveCodeBench: code extraction, and programs scored in the sandbox."""

import base64
import itertools
import json
import pickle
import zlib

import pytest

from tasks.code import HumanEval, LiveCodeBench, final_code, read_private, run_test
from tests.hub_server import hub_served, publish

ROW = {
    "prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n',
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n"
    "    assert abs(candidate(1) - 3.14159) < 1e-4\n"
    "    assert abs(area(2) - 12.56637) < 1e-4\n",
    "entry_point": "area",
}


@pytest.fixture
def task(sandbox, tmp_path, monkeypatch) -> HumanEval:
    """The task with one row."""
    publish({"openai_humaneval/test.parquet": [ROW]}, tmp_path, monkeypatch)
    return HumanEval("test")


@pytest.mark.parametrize(
    "answer",
    [
        "    return math.pi * r * r",
        "def area(r):\n    return math.pi * r ** 2",
        "```python\nfrom math import *\ndef area(r):\n    return pi * r * r\n```<|assistant_end|>",
        "from __future__ import annotations\ndef area(r: Any) -> Any:\n    return math.pi * r**2",
    ],
)
def test_correct_function_is_found_in_any_format(task, answer):
    assert task.score(0, answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["", "    return 3 * r * r", "def volume(r):\n    return 1", "def check(candidate):\n    pass"],
)
def test_S8_only_correct_return_values_pass(task, answer):
    assert task.score(0, answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "entry", "code"),
    [
        ("```python\nf(1)\n```\nand\n```python\ndef f(x):\n```", "f", "def f(x):\n"),
        ("Here: ```python\ndef f():\n    1```\nDone ``` so.\n", "f", "def f():\n    1"),
        ("```py\ndef f():\n    1\n```\n```py\ndef f():\n```\n```py\nf()\n```", "f", "def f():\n"),
        ("```python\na\n```\nBetter:\n```python\nb\n```\nIt prints:\n```\n3\n```", None, "b\n"),
        ("First:\n```cpp\nx\n```\n```cpp\ny\n```\n```python3\na\n```", None, "a\n"),
    ],
)
def test_program_is_the_last_block_that_defines_the_function(answer, entry, code):
    assert final_code(answer, entry) == code


def test_main_guard_of_an_answer_does_not_run(sandbox):
    program = "def f(x):\n    return x\n\nif __name__ == '__main__':\n    print(f(int(input())))\n"
    assert run_test(program, "assert f(2) == 2", "f")


@pytest.mark.parametrize("count", [8, pytest.param(None, marks=pytest.mark.slow)])
def test_reference_solutions_pass_their_tests(sandbox, hub, monkeypatch, count):
    with hub_served(hub, monkeypatch) as start:
        start()
        task = HumanEval("test")
        for i, conversation in enumerate(itertools.islice(task, count)):
            asked, solution = (message["content"] for message in conversation)
            assert task.score(i, solution) == 1.0, solution
            assert task.score(i, asked) == 0.0, asked  # a function without a body


# ---- LiveCodeBench -------------------------------------------------------------------------------


def case(given: str, right: str, kind: str) -> dict[str, str]:
    return {"input": given, "output": right, "testtype": kind}


def hide(tests: list[dict[str, str]]) -> str:
    """Encode tests as the published files do."""
    text = pickle.dumps(json.dumps(tests))
    return base64.b64encode(zlib.compress(text)).decode()


ROWS = [
    {
        "question_content": "Print the sum of n numbers.",
        "starter_code": "",
        "metadata": "{}",
        "public_test_cases": json.dumps([case("2\n1 2\n", "3\n", "stdin")]),
        "private_test_cases": hide([case("1\n0.5\n", "0.5\n", "stdin")]),
    },
    {
        "question_content": "Return the numbers in reverse, without k of them.",
        "starter_code": "class Solution:\n    def cut(self, x: List[int], k: int) -> List[int]:\n",
        "metadata": json.dumps({"func_name": "cut"}),
        "public_test_cases": json.dumps([case("[1, 2, 3]\n1", "[3, 2]", "functional")]),
        "private_test_cases": hide([case("[4, 5]\n0", "[5, 4]", "functional")]),
    },
]
SUM = "n = int(input())\nprint(sum(map({}, input().split())))"
CUT = "class Solution:\n    def cut(self, x: List[int], k: int):\n        return {}"


@pytest.fixture
def contest(sandbox, monkeypatch, tmp_path) -> LiveCodeBench:
    """The task with two rows, in two of its files."""
    publish({"test.jsonl": ROWS[:1], "test2.jsonl": ROWS[1:]}, tmp_path, monkeypatch)
    return LiveCodeBench("test")


@pytest.mark.parametrize(
    ("kind", "code", "score"),
    [
        ("sum", SUM.format("float"), 1.0),  # prints 3.0 for 3
        ("sum", SUM.format("int"), 0.0),  # fails the hidden test
        ("sum", f"{SUM.format('float')}\nexit()", 1.0),
        ("sum", "print(3.0000000000000001)", 0.0),
        ("sum", f"{SUM.format('float')}\nprint('and more')", 0.0),
        ("sum", "print(sum(map(float, open(0).read().split()[1:])))", 1.0),
        ("sum", "print(sum(map(float, open(0, 'rb').read().decode().split()[1:])))", 1.0),
        ("sum", f"def f(n):\n    return n and f(n - 1)\nf(9000)\n{SUM.format('float')}", 1.0),
        ("sum", "n = input()\nprint(reduce(add, map(float, input().split())))", 1.0),
        ("return", CUT.format("x[::-1][: len(x) - k]"), 1.0),
        ("return", CUT.format("[3, 2]"), 0.0),
        ("return", "def cut(x, k):\n    return x[::-1]", 0.0),
    ],
)
def test_program_must_pass_public_and_hidden_tests(contest, kind, code, score):
    [i] = [i for i, chat in enumerate(contest) if kind in chat[0]["content"].lower()]
    assert contest.score(i, f"Here it is:\n```python\n{code}\n```") == score


def test_many_tests_must_all_pass(tmp_path, monkeypatch, contest):
    tests = [case(f"1\n{n}\n", f"{n}\n", "stdin") for n in range(30)]
    row = {**ROWS[0], "public_test_cases": json.dumps(tests)}  # its last, hidden one is 0.5
    publish({"many/test.jsonl": [row]}, tmp_path / "many", monkeypatch)
    many = LiveCodeBench("test")
    for code, score in ((SUM.format("float"), 1.0), (SUM.format("int"), 0.0)):
        assert many.score(0, f"```python\n{code}\n```") == score


def test_pickled_tests_cannot_run_code(capsys):
    class Harmful:
        def __reduce__(self):
            return print, ("harm",)

    harmful = zlib.compress(pickle.dumps(Harmful()))
    with pytest.raises(ValueError):
        read_private(base64.b64encode(harmful).decode())
    assert "harm" not in capsys.readouterr().out
    assert read_private(ROWS[0]["private_test_cases"])[0]["output"] == "0.5\n"
