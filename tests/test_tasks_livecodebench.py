"""LiveCodeBench: hidden tests of both kinds, run in the sandbox."""

import base64
import json
import pickle
import zlib

import pytest

from nanochat.sandbox import SandboxUnavailable, is_confined
from tasks.livecodebench import LiveCodeBench, read_private
from tests.published import publish


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
def task(monkeypatch, tmp_path) -> LiveCodeBench:
    """The task with two rows, in two of its files; skips if no sandbox can run programs."""
    try:
        is_confined()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
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
def test_program_must_pass_public_and_hidden_tests(task, kind, code, score):
    asked = next(c for c in task if kind in c[0]["content"].lower())
    assert task.score(asked, f"Here it is:\n```python\n{code}\n```") == score


def test_many_tests_run_in_several_programs(tmp_path, monkeypatch, task):
    tests = [case(f"1\n{n}\n", f"{n}\n", "stdin") for n in range(30)]
    row = {**ROWS[0], "public_test_cases": json.dumps(tests)}  # its last, hidden one is 0.5
    publish({"many/test.jsonl": [row]}, tmp_path / "many", monkeypatch)
    many = LiveCodeBench("test")
    for code, score in ((SUM.format("float"), 1.0), (SUM.format("int"), 0.0)):
        assert many.score(many[0], f"```python\n{code}\n```") == score


def test_pickled_tests_cannot_run_code():
    class Harmful:
        def __reduce__(self):
            return print, ("harm",)

    harmful = zlib.compress(pickle.dumps(Harmful()))
    with pytest.raises(pickle.UnpicklingError, match="unexpected builtins.print"):
        read_private(base64.b64encode(harmful).decode())
    assert read_private(ROWS[0]["private_test_cases"])[0]["output"] == "0.5\n"
