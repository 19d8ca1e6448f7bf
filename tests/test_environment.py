"""Code and hardware facts in the header of a report; settings of threads."""

import os
import re
import subprocess
import sys

import pytest

from nanochat import records, report
from nanochat.common import REPOSITORY

AUTHOR = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false".split()
FILES = {"a.py": "x = 1\ny = 2\n", "b.rs": "fn f() {}\n", "notes.txt": "not code\n"}
FILES |= {"report.md": "generated\n", "uv.lock": "one\ntwo\nthree\n"}


def test_code_size_and_git_state_are_those_of_tracked_code(tmp_path):
    assert records.git_state(tmp_path)["commit"] == "unknown"
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for words in ("init -q -b main", "add .", "commit -qm First"):
        subprocess.run(["git", *AUTHOR, *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "report.md").write_text("generated again, which is not a change of the code\n")
    state = records.git_state(tmp_path)
    assert (state["branch"], state["dirty"], state["message"]) == ("main", False, "First")
    assert re.fullmatch("[0-9a-f]{7}", state["commit"])
    (tmp_path / "untracked.py").write_text("z = 3\n")
    assert records.git_state(tmp_path)["dirty"]
    assert list(report.code_size(tmp_path).values()) == [22, 3, 2, 5, 3]


def test_hardware_describes_this_machine():
    found = report.hardware()
    assert re.fullmatch(r"[1-9]\d* cores \([1-9]\d* logical\)", found["CPUs"])
    assert re.fullmatch(r"\d+\.\d GB", found["Memory"]) and found["CPU Model"] and found["Platform"]


def test_default_hourly_rate_is_the_sum_over_gpus():
    gpus = ["NVIDIA H100 80GB HBM3"] * 8
    assert [records.default_rate(each) for each in ([], gpus, ["X"])] == [0, 24, 2]


@pytest.mark.parametrize("given", [None, "7"])
def test_R39_threads_wait_with_a_limit_on_spinning(given):
    env = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {"OMP_DISPLAY_ENV": "verbose"} | ({"GOMP_SPINCOUNT": given} if given else {})
    words = [sys.executable, "-m", "scripts.base_train", "--help"]
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{given or 30000}'" in done.stderr
