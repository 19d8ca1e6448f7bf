"""Code and hardware facts in the header of a report."""

import re
import subprocess

import pytest

from nanochat import records, report


@pytest.fixture
def repository(tmp_path):
    """A git repository with code, other files, and a generated report."""
    folder = tmp_path / "repository"
    folder.mkdir()
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (folder / "a.py").write_text("x = 1\ny = 2\n")
    (folder / "b.rs").write_text("fn f() {}\n")
    (folder / "notes.txt").write_text("not code\n" * 100)
    (folder / "report.md").write_text("generated\n" * 100)
    (folder / "uv.lock").write_text("one\ntwo\nthree\n")
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "First\n\nbody"]):
        subprocess.run(["git", *author, *words], cwd=folder, check=True)
    return folder


EXPECTED_BLOAT = {"characters": 22, "lines": 3, "files": 2, "tokens": 5, "lock_lines": 3}


def test_code_size_counts_only_files_tracked_by_git(repository):
    (repository / "untracked.py").write_text("z = 3\n")
    assert report.code_size(repository) == EXPECTED_BLOAT


def test_git_state_has_branch_commit_and_dirty_flag(repository):
    state = records.git_state(repository)
    assert (state["branch"], state["dirty"], state["message"]) == ("main", False, "First")
    assert re.fullmatch("[0-9a-f]{7}", state["commit"])
    (repository / "report.md").write_text("generated again\n")
    assert not records.git_state(repository)["dirty"], "a report is not a code change"
    (repository / "a.py").write_text("x = 2\n")
    assert records.git_state(repository)["dirty"]


def test_commit_is_unknown_without_git(tmp_path):
    assert records.git_state(tmp_path)["commit"] == "unknown"


def test_hardware_describes_this_machine():
    found = report.hardware()
    assert found["logical_cores"] >= found["cores"] >= 1
    assert found["memory_gib"] > 0.1 and found["cpu"] and found["platform"]
    assert isinstance(found["gpus"], list)
