"""Stage records, and when a stage counts as finished."""

import json
import math
import multiprocessing
import random
import subprocess
import sys

import numpy as np
import pytest

import scripts.report
from nanochat import records
from nanochat.records import Cost, Provenance, estimate, stage_key, write_record

SETTINGS = {"depth": 4, "run": "dummy", "model_tag": ""}
INPUTS = {"tokenizer": "aaaa", "data": "bbbb"}


def write(section="Base model training", values=None, run_id="run-1", outputs=None, **more):
    origin = Provenance(run_id, 0, more.pop("inputs", INPUTS), outputs or {})
    settings = more.pop("settings", SETTINGS)
    return write_record(section, settings, values or {"loss": 1.0}, origin, Cost(60.0), **more)


def test_record_keeps_order_and_provenance(base):
    values = {"zeta": 1, "alpha": estimate(0.25, 100, 0.0433), "Model": "base (step 3)"}
    path = write(values=values, metrics=base / "base" / "metrics.jsonl")
    record = json.loads(path.read_text())
    assert path == base / "report" / "base-model-training.json"
    assert list(record["settings"]) == list(SETTINGS)
    assert list(record["values"]) == ["zeta", "alpha", "Model"]
    assert record["values"]["alpha"] == {"value": 0.25, "n": 100, "se": 0.0433}
    assert record["metrics"] == "base/metrics.jsonl"
    assert record["provenance"]["inputs"] == INPUTS
    assert set(record["provenance"]) >= {"run_id", "seed", "commit", "dirty", "outputs"}
    assert record["cost"]["device_seconds"] == 60.0


def test_device_seconds_sum_over_devices():
    origin = Provenance("run", 0)
    path = write_record("A", {}, {}, origin, Cost(10.0, devices=8, device="H100"))
    assert json.loads(path.read_text())["cost"]["device_seconds"] == 80.0


def test_record_with_non_finite_values_is_valid_json():
    values = {"nan": math.nan, "inf": -math.inf, "numpy": np.float32(0.5), "ids": np.int64(7)}
    text = write(values=values).read_text()

    def reject(word):
        raise AssertionError(f"{word} is not JSON")

    found = json.loads(text, parse_constant=reject)["values"]
    assert found == {"nan": "nan", "inf": "-inf", "numpy": 0.5, "ids": 7}
    with pytest.raises(TypeError, match="not object"):
        write(values={"x": object()})


def test_rerun_replaces_the_record_and_history_keeps_both():
    write(values={"loss": 2.0})
    write(values={"loss": 1.0})
    assert [record["values"]["loss"] for record in records.read_records()] == [1.0]
    assert [record["values"]["loss"] for record in records.read_history()] == [2.0, 1.0]


def test_report_dir_does_not_touch_the_main_report(base):
    write(report_dir=base / "sweep" / "a")
    assert records.read_records() == []
    assert len(records.read_records(base / "sweep" / "a")) == 1


def test_extend_keeps_earlier_scores_of_the_same_model():
    write("Chat evaluation sft", {"GSM8K": 0.1}, inputs={"sft": "m1"})
    write("Chat evaluation sft", {"AQUA": 0.2}, inputs={"sft": "m1"}, extend=True)
    record = records.read_records()[0]
    assert record["values"] == {"GSM8K": 0.1, "AQUA": 0.2}
    assert record["cost"]["wall_seconds"] == 120.0
    write("Chat evaluation sft", {"AQUA": 0.3}, inputs={"sft": "m2"}, extend=True)
    assert records.read_records()[0]["values"] == {"AQUA": 0.3}


def test_extend_deletes_values_of_none_with_their_items():
    items = {"GSM8K": records.item_scores(["q"], [1])}
    for _ in range(2):  # without and with an earlier record
        write("Chat evaluation sft", {"AQUA": 0.2, "GSM8K": None}, items=items, extend=True)
        [record] = records.read_records()
        assert record["values"] == {"AQUA": 0.2} and record["items"] == {}


def test_item_scores_round_trip_with_item_fingerprint():
    scores = [1, 0, 0.125, 1 / 3]
    items = [{"query": f"{i} + {i}?"} for i in range(4)]
    write(items={"GSM8K": records.item_scores(items, scores)})
    found = records.read_records()[0]["items"]["GSM8K"]
    assert records.read_scores(found) == pytest.approx(scores, abs=1e-6)
    assert found["of"] == records.item_scores(iter(items), [0] * 4)["of"]
    assert found["of"] != records.item_scores(items[::-1], scores)["of"]
    assert records.read_clusters(found) is None
    assert "clusters" not in records.item_scores(items, scores, ["a", "b", "c", "d"])
    shared = records.read_clusters(records.item_scores(items, scores, ["b", "a", "b", "a"]))
    assert shared == ["0", "1", "0", "1"]


def test_extend_keeps_item_scores_of_other_tasks():
    for task in ("GSM8K", "AQUA"):
        write(items={task: records.item_scores([task], [1])}, extend=True)
    assert list(records.read_records()[0]["items"]) == ["GSM8K", "AQUA"]


def append_many(report_dir, section):
    for i in range(20):
        write(section, {"i": i, "padding": "x" * 20_000}, report_dir=report_dir)


def test_concurrent_processes_append_whole_lines(base):
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=append_many, args=(str(base / "both"), section))
        for section in ("First", "Second")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    lines = (base / "both" / "records.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 40
    for section in ("First", "Second"):
        order = [record["values"]["i"] for record in found if record["section"] == section]
        assert order == list(range(20))


def test_truncated_line_does_not_affect_other_lines(base):
    write(values={"loss": 3.0})
    with (base / "report" / "records.jsonl").open("a") as stream:
        stream.write('{"section": "Base mo')
    write(values={"loss": 2.0})
    assert [record["values"]["loss"] for record in records.read_history()] == [3.0, 2.0]


def flips(path, count):
    """Yield `count` times, each with one random bit of a file flipped; restore it at the end."""
    original, rng = path.read_bytes(), random.Random(0)
    for _ in range(count):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        yield
    path.write_bytes(original)


def test_R29_bit_flips_in_a_record_are_detected(capsys):
    write("Tokenizer training", {"loss": 0.1 + 0.2})
    path = write(values={"CORE": estimate(0.25, 100, 0.0433)})
    for _ in flips(path, 150):
        damaged = []
        assert [r["section"] for r in records.read_records(damaged=damaged)] == [
            "Tokenizer training"
        ]
        [message] = damaged
        assert str(path) in message and "delete it" in message
        with pytest.raises(ValueError, match="base-model-training.json"):
            records.read_records()
        assert records.find_finished("Base model training", stage_key(SETTINGS, INPUTS)) is None
        assert str(path) in capsys.readouterr().out
    assert len(records.read_records()) == 2


def test_R29_bit_flips_in_the_history_are_detected(base):
    for loss in (3.0, 2.0, 1.0):
        write(values={"loss": loss})
    path = base / "report" / "records.jsonl"
    for _ in flips(path, 150):
        damaged = []
        left = records.read_history(damaged=damaged)
        assert len(left) < 3 and f"{path}, line " in damaged[0]
    assert len(records.read_history()) == 3


def test_R29_report_lists_and_skips_damaged_records(base, capsys):
    write("Tokenizer training", {"loss": 0.5})
    path = write(values={"loss": 1.25})
    path.write_text(path.read_text().replace("1.25", "1.24"))
    scripts.report.main(scripts.report.Report())
    assert f"skipped: {path} is damaged: it does not match its seal" in capsys.readouterr().out
    text = (base / "report.md").read_text()
    assert "## Tokenizer training" in text and "## Base model training" not in text
    assert "Damaged records" in text and f"{path} is damaged" in text and "1.24" not in text


def test_record_without_a_seal_raises(base):
    path = write()
    record = json.loads(path.read_text())
    del record["seal"]
    path.write_text(json.dumps(record, indent=1))
    with pytest.raises(ValueError, match="is damaged: it has no seal; delete it and rerun"):
        records.read_records()


def test_run_ids_sort_by_time_and_are_unique():
    ids = [records.new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert sorted(i[:15] for i in ids) == [i[:15] for i in ids]


def test_stage_inherits_the_run_id_of_its_input():
    write("Tokenizer training", run_id="run-1", inputs={}, outputs={"tokenizer": "t1"})
    write("Base model training", run_id="run-2", inputs={}, outputs={"base": "b1"})
    assert records.inherited_run_id({"tokenizer": "t1"}) == "run-1"
    assert records.inherited_run_id({"base": "b1", "tokenizer": "t1"}) == "run-2"
    assert records.inherited_run_id({"base": "unknown"}) not in ("run-1", "run-2")


# ------------------------------------------------------------------------------------------------
# Finished stages


def finish(base, **more):
    """Write a checkpoint of two files and its record. Returns its folder and the stage key."""
    folder = base / "base_checkpoints" / "d4"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "state.json").write_text('{"step": 3}')
    write(outputs={"base": "b1"}, files=[folder], **more)
    return folder, stage_key(more.get("settings", SETTINGS), INPUTS)


def test_R18_stage_with_intact_outputs_is_finished(base):
    _, key = finish(base)
    record = records.find_finished("Base model training", key)
    assert record is not None and record["values"] == {"loss": 1.0}
    assert records.find_finished("Midtraining", key) is None


def test_R18_stage_with_a_modified_output_is_not_finished(base):
    folder, key = finish(base)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[3] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert records.find_finished("Base model training", key) is None


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_R18_stage_with_missing_or_partial_output_is_unfinished(base, name):
    folder, key = finish(base)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    assert records.find_finished("Base model training", key) is None
    (folder / name).unlink()
    assert records.find_finished("Base model training", key) is None
    (folder / name).write_bytes(whole)
    assert records.find_finished("Base model training", key) is not None


def test_R18_stage_key_depends_on_settings_and_inputs(base):
    _, key = finish(base)
    assert stage_key({**SETTINGS, "depth": 8}, INPUTS) != key
    assert stage_key(SETTINGS, {**INPUTS, "tokenizer": "cccc"}) != key
    assert stage_key({**SETTINGS, "run": "named", "skip_if_done": True}, INPUTS) == key
    assert records.find_finished("Base model training", stage_key({"depth": 8}, INPUTS)) is None


def test_R18_outputs_without_recorded_files_are_not_finished():
    write(outputs={"base": "b1"})
    assert records.find_finished("Base model training", stage_key(SETTINGS, INPUTS)) is None


def test_R18_stage_without_outputs_is_finished_if_key_matches():
    write("Base model loss")
    assert records.find_finished("Base model loss", stage_key(SETTINGS, INPUTS)) is not None


def test_R18_stage_stays_finished_if_base_directory_moves(base, monkeypatch):
    _, key = finish(base)
    moved = base.parent / f"{base.name}-moved"
    base.rename(moved)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(moved))
    assert records.find_finished("Base model training", key) is not None


def test_records_do_not_import_torch():
    code = "import sys, nanochat.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
