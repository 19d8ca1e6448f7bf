"""Run log: metrics file, console output, and isolation from tracker failures."""

import json
import math
import multiprocessing
import resource
import sys
from unittest.mock import MagicMock

import pytest

from nanochat.records import RunLog, read_metrics


def log_steps(folder, steps, **more):
    """Log the given steps and an evaluation after them."""
    with RunLog(folder, **more) as log:
        for step in steps:
            log.log(step, {"loss": 5.0 - step / 100, "lr": 0.5})
            assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == step  # written at once
        log.log(steps[-1] + 1, {"val_bpb": 1.23456, "core": 0.012345678})


def track(folder):
    """A run in a process of its own."""
    with RunLog(folder, "named", "r1", {"depth": 4}) as log:
        log.log(0, {"loss": 5.0, "bad": math.nan})


def losses(folder):
    return {entry["step"]: entry.get("loss") for entry in read_metrics(folder / "metrics.jsonl")}


def test_non_finite_numbers_round_trip_as_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path) as log:
        log.log(0, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    assert json.loads(path.read_text(), parse_constant=lambda word: 1 / 0)["loss"] == "nan"
    assert str(read_metrics(path)) == "[{'step': 0, 'loss': nan, 'grad_norm': inf, 'lr': -inf}]"


def test_resumed_run_replaces_later_steps_and_skips_torn_lines(tmp_path):
    log_steps(tmp_path, range(10))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 11, "lo')  # of a killed process
    with RunLog(tmp_path, first_step=4) as log:
        log.log(4, {"loss": 40.0})
        log.log(5, {"loss": 50.0})
    assert losses(tmp_path) == {0: 5.0, 1: 4.99, 2: 4.98, 3: 4.97, 4: 40.0, 5: 50.0}
    with RunLog(tmp_path, first_step=5) as log:
        log.log(5, {"val_bpb": 1.5})
    assert read_metrics(tmp_path / "metrics.jsonl")[5] == {"step": 5, "loss": 50.0, "val_bpb": 1.5}
    log_steps(tmp_path, range(2))
    assert losses(tmp_path) == {0: 5.0, 1: 4.99, 2: None}


def test_console_gets_a_line_of_each_step_and_evaluation(tmp_path, capsys):
    log_steps(tmp_path, range(11), total_steps=11)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and lines[7].endswith(" s left")
    assert lines[7].startswith("step     7/11 | loss 4.9300 | lr x0.500 | ")
    assert last.startswith("step    11/11 | val bpb 1.2346 | core 0.01235")


def test_entries_of_a_full_disk_are_written_later(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(tmp_path) as log:
        for step in range(6):
            full = 10 if step in (2, 3) else limits[0]  # bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
            log.log(step, {"loss": 1.0})
    assert list(losses(tmp_path)) == list(range(6))
    assert capsys.readouterr().out.count("cannot be written") == 1


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_R21_failing_tracker_does_not_stop_the_run(monkeypatch, tmp_path, capsys, call):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    method = getattr(wandb if call == "init" else wandb.init.return_value, call)
    method.side_effect = ConnectionError("gone")
    with RunLog(tmp_path, "named") as log:
        for step in range(5):
            log.log(step, {"loss": 1.0})
    assert len(losses(tmp_path)) == 5
    assert "".join(capsys.readouterr()).count("continues (ConnectionError: gone)") == 1


def test_wandb_records_a_named_run_offline(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    child = multiprocessing.get_context("spawn").Process(target=track, args=(tmp_path,))
    child.start()
    child.join()
    printed = "".join(capfd.readouterr())
    assert "dropped" not in printed and "stopped" not in printed
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert all(word in run.read_bytes() for word in (b"loss", b"depth", b"named"))
