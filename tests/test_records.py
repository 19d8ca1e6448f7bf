"""Stage records, and when a stage counts as finished."""

import json
import math
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

from nanochat import records
from nanochat.records import Cost, Provenance, estimate, item_scores, stage_key, write_record

SECTION = "Base model training"
CHAT = "Chat evaluation sft"
SETTINGS = {"depth": 4, "run": "dummy", "model_tag": ""}
INPUTS = {"tokenizer": "aaaa", "data": "bbbb"}
KEY = stage_key(SETTINGS, INPUTS)


def write(section=SECTION, values=None, run_id="run-1", inputs=INPUTS, outputs=None, **more):
    origin = Provenance(run_id, 0, inputs, outputs or {})
    return write_record(
        section, SETTINGS, values or {"loss": 1.0}, origin, Cost(60.0, 8, "H100"), **more
    )


def read(path):
    """A record file, which must be valid JSON without NaN."""
    return json.loads(path.read_text(), parse_constant=lambda word: 1 / 0)


def test_record_on_disk_has_values_in_order_origin_and_cost(base):
    values = {"zeta": np.float32(0.5), "alpha": estimate(0.25, 100, 0.04), "ids": np.int64(7)}
    values |= {"nan": math.nan, "inf": -math.inf}
    path = write(values=values, metrics=base / "base" / "metrics.jsonl")
    record = read(path)
    assert path == base / "report" / "base-model-training.json"
    assert list(record["settings"].items()) == list(SETTINGS.items())
    wanted = {"zeta": 0.5, "alpha": values["alpha"], "ids": 7, "nan": "nan", "inf": "-inf"}
    assert list(record["values"].items()) == list(wanted.items())
    assert record["metrics"] == "base/metrics.jsonl"
    assert record["provenance"]["inputs"] == INPUTS and record["provenance"]["commit"]
    assert (record["cost"]["wall_seconds"], record["cost"]["device_seconds"]) == (60.0, 480.0)


def test_rerun_replaces_the_record_and_history_keeps_both(base):
    for loss in (3.0, 2.0):
        write(values={"loss": loss})
        with (base / "report" / "records.jsonl").open("a") as stream:
            stream.write('{"section": "Base mo')  # of a killed process
    write(report_dir=base / "own")
    assert [record["values"]["loss"] for record in records.read_records()] == [2.0]
    assert [record["values"]["loss"] for record in records.read_history()] == [3.0, 2.0]
    assert len(records.read_records(base / "own")) == 1


def test_extend_adds_to_the_record_of_the_same_model_only():
    gsm, aqua = ({name: item_scores([name], [1])} for name in ("GSM8K", "AQUA"))
    m1, m2 = {"sft": "m1"}, {"sft": "m2"}
    write(CHAT, {"GSM8K": 0.1}, inputs=m1, items=gsm)
    both = read(write(CHAT, {"AQUA": 0.2}, inputs=m1, items=aqua, extend=True))
    assert both["values"] == {"GSM8K": 0.1, "AQUA": 0.2} and both["items"] == gsm | aqua
    assert both["cost"]["wall_seconds"] == 120.0
    left = read(write(CHAT, {"GSM8K": None}, inputs=m1, extend=True))
    assert left["values"] == {"AQUA": 0.2} and left["items"] == aqua
    other = read(write(CHAT, {"GSM8K": 0.3}, inputs=m2, extend=True))
    assert (other["values"], other["items"]) == ({"GSM8K": 0.3}, {})
    assert other["cost"]["wall_seconds"] == 60.0


def test_item_scores_round_trip_with_item_fingerprint():
    scores, items = [1, 0, 0.125, 1 / 3], ["a", "b", "c", "d"]
    found = read(write(items={"GSM8K": item_scores(items, scores, "ghgh")}))["items"]["GSM8K"]
    assert records.read_scores(found) == pytest.approx(scores, abs=1e-6)
    assert records.read_clusters(found) == ["0", "1", "0", "1"]
    assert found["of"] == item_scores(iter(items), [0] * 4)["of"]
    assert found["of"] != item_scores(items[::-1], scores)["of"]
    for alone in ((), "ghij"):
        assert records.read_clusters(item_scores(items, scores, alone)) is None


def append_many(report_dir, section):
    for i in range(20):
        write(section, {"i": i, "padding": "x" * 20_000}, report_dir=report_dir)


def test_concurrent_processes_append_whole_lines(base):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=append_many, args=(base, name)) for name in "AB"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = [(record["section"], record["values"]["i"]) for record in records.read_history(base)]
    assert sorted(found) == [(name, i) for name in "AB" for i in range(20)]


def test_stage_inherits_the_run_id_of_its_closest_input():
    write("Tokenizer training", run_id="run-1", inputs={}, outputs={"tokenizer": "t1"})
    write(run_id="run-2", inputs={}, outputs={"base": "b1"})
    assert records.inherited_run_id({"tokenizer": "t1"}) == "run-1"
    assert records.inherited_run_id({"base": "b1", "tokenizer": "t1"}) == "run-2"
    assert len({records.inherited_run_id({"base": "unknown"}) for _ in range(50)}) == 50


def finished(section=SECTION, key=KEY):
    return records.find_finished(section, key) is not None


def test_R18_stage_is_finished_while_its_outputs_are_intact(base, monkeypatch):
    assert not finished()
    folder = base / "base_checkpoints" / "d4"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights" * 1000)
    write(outputs={"base": "b1"}, files=[folder])
    assert finished() and not finished("Midtraining")
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:3] + b"?" + whole[4:]):
        weights.write_bytes(damaged)
        assert not finished()
    weights.unlink()
    assert not finished()
    weights.write_bytes(whole)
    moved = base.rename(base.parent / "moved")
    assert not finished()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(moved))
    assert finished()
    write(values={"loss": 2.0}, outputs={"base": "b1"})
    assert not finished(), "outputs without recorded files cannot be checked"
    write()
    assert finished(), "a stage without outputs has nothing to check"


def test_R18_stage_key_depends_on_what_determines_the_result():
    assert stage_key({**SETTINGS, "run": "named", "skip_if_done": True}, INPUTS) == KEY
    assert stage_key({**SETTINGS, "depth": 8}, INPUTS) != KEY
    assert stage_key(SETTINGS, {**INPUTS, "tokenizer": "cccc"}) != KEY


def test_records_do_not_import_torch():
    code = "import sys, nanochat.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
