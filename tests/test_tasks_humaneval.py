"""HumanEval: code extraction and scoring."""

import itertools

import pytest

from nanochat.sandbox import SandboxUnavailable, is_confined
from tasks.humaneval import HumanEval, final_code, run_test
from tests.hub_server import hub_served
from tests.published import publish

ROW = {
    "prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n',
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n"
    "    assert abs(candidate(1) - 3.14159) < 1e-4\n"
    "    assert abs(area(2) - 12.56637) < 1e-4\n",
    "entry_point": "area",
}


@pytest.fixture
def sandbox() -> None:
    """Skip if no sandbox can run programs."""
    try:
        is_confined()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


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
        "Here it is:\n```python\ndef area(r):\n    return math.pi * r ** 2\n```\nDone.",
        "Used so:\n```\narea(2)\n```\n```py\ndef area(r):\n    return math.pi * r ** 2\n",
        "```python\nfrom math import *\ndef area(r):\n    return pi * r * r\n```<|assistant_end|>",
    ],
)
def test_correct_function_is_found_in_any_format(task, answer):
    assert task.score(task[0], answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "    return 3 * r * r",
        "def volume(r):\n    return 1",
        "```python\nimport sys\nprint('passed')\nsys.exit(0)\n```",
        "```python\nimport os\nos._exit(0)\n```",
        "    import os\n    os._exit(0)",
        "class Any(float):\n    def __sub__(self, other): return self\n"
        "    def __abs__(self): return self\n    def __lt__(self, other): return True\n\n"
        "def area(r):\n    return Any()",
        "def check(candidate):\n    pass",
        "import builtins\nbuiltins.abs = lambda x: 0\n\ndef area(r):\n    return 0",
    ],
)
def test_S8_only_correct_return_values_pass(task, answer):
    assert task.score(task[0], answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "entry", "code"),
    [
        ("```python\nf(1)\n```\nand\n```python\ndef f(x):\n```", "f", "def f(x):\n"),
        ("    return 1", "f", "    return 1"),
        ("Here: ```python\ndef f():\n    1```\nDone ``` so.\n", "f", "def f():\n    1"),
        ("```py\ndef f():\n    1\n```\n```py\ndef f():\n```\n```py\nf()\n```", "f", "def f():\n"),
        ("```python\na\n```\nBetter:\n```python\nb\n```\nIt prints:\n```\n3\n```", None, "b\n"),
        ("First:\n```cpp\nx\n```\n```cpp\ny\n```\n```python3\na\n```", None, "a\n"),
        ("```python\na\nb", None, "a\nb"),
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
        for conversation in itertools.islice(task, count):
            asked, solution = (message["content"] for message in conversation)
            assert task.score(conversation, solution) == 1.0, solution
            assert task.score(conversation, asked) == 0.0, asked  # a function without a body
