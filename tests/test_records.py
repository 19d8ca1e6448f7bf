"""Stage records, when a stage counts as finished, facts in the header of a report."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np

from nanochat import records, report
from nanochat.common import REPOSITORY
from nanochat.recipe import Recipe
from nanochat.records import Cost, write_record

SECTION = "Base model training"
SETTINGS = {"depth": 4, "run": "dummy", "model_tag": ""}
INPUTS = {"tokenizer": "aaaa", "data": "bbbb"}


def write(values=None, **more):
    values = values or {"loss": 1.0}
    return write_record(SECTION, SETTINGS, values, INPUTS, Cost(60.0, 8, "H100"), **more)


def test_record_on_disk_has_values_in_order(base):
    values = {
        "zeta": np.float32(0.5),
        "alpha": {"value": 0.25, "n": 100, "se": 0.04},
        "ids": np.int64(7),
    }
    values |= {"nan": math.nan, "inf": -math.inf}
    path = write(values=values)
    assert path == base / "report" / "base-model-training.json"
    wanted = {"zeta": 0.5, "alpha": values["alpha"], "ids": 7, "nan": "nan", "inf": "-inf"}
    record = json.loads(path.read_text(), parse_constant=lambda word: 1 / 0)  # no NaN
    assert list(record["values"].items()) == list(wanted.items())


def test_rerun_replaces_the_record_and_history_keeps_both(base):
    for loss in (3.0, 2.0):
        write(values={"loss": loss})
        with (base / "report" / "records.jsonl").open("a") as stream:
            stream.write('{"section": "Base mo')  # of a killed process
    assert [record["values"]["loss"] for record in records.read_records()] == [2.0]
    assert [record["values"]["loss"] for record in records.read_history()] == [3.0, 2.0]
    (base / "report" / "records.jsonl").unlink()  # on a full disk, a record may miss there
    assert [record["values"]["loss"] for record in records.read_history()] == [2.0]


def finished(section=SECTION):
    return records.find_finished(section, Recipe(SETTINGS, INPUTS, SETTINGS)) is not None


def test_R18_stage_is_finished_while_its_outputs_are_intact(base, monkeypatch):
    assert not finished()
    folder = base / "base_checkpoints" / "d4"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    write(outputs={"base": "b1"}, files=[folder])
    assert finished() and not finished("Midtraining")
    weights.write_bytes(b"damaged")
    assert not finished()
    weights.unlink()
    assert not finished()
    weights.write_bytes(b"weights")
    moved = base.rename(base.parent / "moved")
    assert not finished()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(moved))
    assert finished()
    write(values={"loss": 2.0}, outputs={"base": "b1"})
    assert not finished()  # outputs without recorded files cannot be checked
    write()
    assert finished()  # a stage without outputs has nothing to check


# ---- Facts in the header of a report -------------------------------------------------------------

AUTHOR = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false".split()
FILES = {"a.py": "x = 1\ny = 2\n", "b.rs": "fn f() {}\n", "notes.txt": "not code\n"}
FILES |= {"report.md": "generated\n", "uv.lock": "one\ntwo\nthree\n"}


def test_code_size_and_git_state_are_those_of_tracked_code(tmp_path):
    assert records.git_state(tmp_path)["Commit"] == "unknown"  # not called clean
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for words in ("init -q -b main", "add .", "commit -qm First"):
        subprocess.run(["git", *AUTHOR, *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "report.md").write_text("generated again, which is not a change of the code\n")
    state = records.git_state(tmp_path)
    assert (state["Branch"], state["Message"]) == ("main", "First")
    assert re.fullmatch(r"[0-9a-f]{7} \(clean\)", state["Commit"])
    (tmp_path / "pyproject.toml").write_text("")
    assert records.git_state(tmp_path)["Commit"].endswith(" (dirty)")
    assert list(report.code_size(tmp_path).values()) == [22, 3, 2, 5, 3]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.py").touch()  # without .git, inside of another repository
    assert records.git_state(tmp_path / "copy")["Commit"] == "unknown"


def test_R39_threads_wait_with_a_limit_on_spinning():
    env = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env["OMP_DISPLAY_ENV"] = "verbose"
    words = [sys.executable, "-m", "scripts.base_train", "--help"]
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert "GOMP_SPINCOUNT = '30000'" in done.stderr
