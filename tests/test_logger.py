"""Run log: metrics file, console output, and isolation from tracker failures."""

import contextlib
import io
import json
import math
import multiprocessing
import resource
import sys
import threading
import time
from unittest.mock import MagicMock

import pytest

from nanochat.logger import RunLog, read_metrics


def log_steps(folder, steps, **more):
    """Log the given steps and an evaluation after them. Returns the console output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), RunLog(folder, **more) as log:
        for step in steps:
            log.log(step, {"loss": 5.0 - step / 100, "lr": 0.5})
            assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == step  # written at once
        log.log(steps[-1] + 1, {"val_bpb": 1.23456, "core": 0.012345678})
    return out.getvalue()


def track(folder, name):
    """A run in a process of its own; exits with 1 if it has imported wandb."""
    with RunLog(folder, name, "r1", {"depth": 4}) as log:
        log.log(0, {"loss": 5.0, "bad": math.nan})
    sys.exit("wandb" in sys.modules)


def losses(folder):
    return {entry["step"]: entry.get("loss") for entry in read_metrics(folder / "metrics.jsonl")}


def test_non_finite_numbers_round_trip_as_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path) as log:
        log.log(0, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    assert json.loads(path.read_text(), parse_constant=lambda word: 1 / 0)["loss"] == "nan"
    assert str(read_metrics(path)) == "[{'step': 0, 'loss': nan, 'grad_norm': inf, 'lr': -inf}]"


def test_resumed_run_replaces_later_steps_and_skips_torn_lines(tmp_path):
    log_steps(tmp_path, range(4))
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


def test_console_gets_a_line_of_each_step_and_evaluation(tmp_path):
    *lines, last = log_steps(tmp_path, range(11), total_steps=11).splitlines()
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


@pytest.mark.parametrize("fault", ["none", "raises", "hangs"])
@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_R21_failing_tracker_neither_stops_nor_slows_the_run(
    monkeypatch, tmp_path, capsys, call, fault
):
    release = threading.Event()
    effects = {"none": None, "raises": ConnectionError("gone")}
    effects["hangs"] = lambda *_, **__: release.wait(60)
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = wandb.init.return_value
    (wandb if call == "init" else run).configure_mock(**{f"{call}.side_effect": effects[fault]})
    begun, log = time.monotonic(), RunLog(tmp_path, "named")
    for step in range(50):
        log.log(step, {"loss": 1.0})
    log.finish(20 if fault == "none" else 0.5)
    assert time.monotonic() - begun < 50, "the run waited for the tracker"
    release.set()
    assert len(losses(tmp_path)) == 50
    printed = "".join(capsys.readouterr())
    if fault == "none":
        assert [each.kwargs["step"] for each in run.log.call_args_list] == list(range(50))
        assert "tracker" not in printed
    else:
        assert ("continues (ConnectionError: gone)" in printed) == (fault == "raises")
        assert ("tracker: no answer within 0.5 s; all entries" in printed) == (fault == "hangs")


@pytest.mark.parametrize("name", ["dummy", "named"])
def test_wandb_is_imported_if_named_and_works_offline(monkeypatch, tmp_path, capfd, name):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for proxy in ("HTTPS_PROXY", "HTTP_PROXY"):  # refuses connections
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    child = multiprocessing.get_context("spawn").Process(target=track, args=(tmp_path, name))
    child.start()
    child.join()
    assert child.exitcode == (name == "named")
    printed = "".join(capfd.readouterr())
    assert "dropped" not in printed and "stopped" not in printed
    runs = [path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert len(runs) == child.exitcode
    assert all(word in run for run in runs for word in (b"loss", b"depth", b"named"))
