"""The suite asks the same unseen questions of every checkpoint, without the network."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import hub
from nanochat.common import sha256_file, write_json
from nanochat.lab.canaries import BUILTIN, PUBLISHED, open_suite
from nanochat.lab.held_out import declare
from tasks.hub import data_folder
from tasks.registry import TASKS, make_task


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Fail on any request to the Hub."""
    monkeypatch.setattr(hub, "request", lambda *about: pytest.fail(f"request: {about}"))


def questions_of(task):
    return {task.material(i) for i in range(min(len(task), 2000))}


def names_and_sizes(suite):
    return {task.name: len(task) for task in suite}


def test_items_are_fixed_and_on_no_training_split():
    suite = open_suite("embedded")
    assert [task.identity for task in open_suite("embedded")] == [task.identity for task in suite]
    assert list(names_and_sizes(suite).values()) == list(BUILTIN.values())
    for key, task in zip(BUILTIN, suite, strict=True):
        for split in ("train", TASKS[key].rl_split):
            assert not questions_of(task) & questions_of(make_task(key, split))


def write_arc(split):
    """Files of ARC-Easy as they are after a download."""
    rows = [
        {
            "question": f"{split} {i}?",
            "choices": {"text": list("wxyz"), "label": list("ABCD")},
            "answerKey": "B",
        }
        for i in range(80)
    ]
    path = data_folder("allenai/ai2_arc") / "ARC-Easy" / f"{split}-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return {f"ARC-Easy/{path.name}": {"bytes": path.stat().st_size, "sha256": sha256_file(path)}}


@pytest.fixture
def arc(base):
    """A machine with the validation file of ARC-Easy; other files are only listed."""
    folder = data_folder("allenai/ai2_arc")
    files = write_arc("validation")
    files["ARC-Challenge/validation-00000-of-00001.parquet"] = {"bytes": 10}
    manifest = {"dataset": "allenai/ai2_arc", "revision": "main", "commit": "c", "files": files}
    write_json(folder / "manifest.json", manifest)
    return folder


def test_only_downloaded_validation_files_are_used(arc):
    suite = open_suite("some/text")
    assert names_and_sizes(suite) == {"ARC-Easy": PUBLISHED["arc_easy"]}
    assert all(question.startswith("validation") for question in questions_of(suite[0]))
    assert names_and_sizes(open_suite("embedded")).keys() == {TASKS[key].name for key in BUILTIN}


def test_damaged_file_is_not_downloaded_again(arc):
    [path] = arc.glob("ARC-Easy/*.parquet")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "ARC-Easy" not in names_and_sizes(open_suite("some/text"))


def test_final_benchmarks_are_left_out(arc):
    declare({"ARC-Easy": "arc", "World-Facts": "world"})
    assert not {"ARC-Easy", "World-Facts"} & names_and_sizes(open_suite("some/text")).keys()
    assert "World-Choice" in names_and_sizes(open_suite("some/text"))
