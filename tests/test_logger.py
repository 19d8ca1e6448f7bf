"""Run log: metrics file, console output, and isolation from tracker failures."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from nanochat import logger
from nanochat.logger import RunLog, Tracker, read_metrics


class FakeRun:
    """A tracker run that records entries and calls hooks, which may raise or hang."""

    def __init__(self, on_log=lambda: None, on_finish=lambda: None):
        self.entries, self.on_log, self.on_finish = [], on_log, on_finish

    def log(self, values, step):
        self.on_log()
        self.entries.append((step, values))

    def finish(self):
        self.on_finish()


def fail():
    raise ConnectionError("the network is gone")


def log_steps(folder, steps, out=None, **more):
    """Log the given steps. Returns the console output."""
    out = out or io.StringIO()
    with contextlib.redirect_stdout(out), RunLog(folder, **more) as log:
        for step in steps:
            log.log(step, {"loss": 5.0 - step / 100, "lr": 0.5})
    return out.getvalue()


def test_every_step_is_written_immediately(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(3):
            log.log(step, {"loss": 1.0})
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step + 1


def test_non_finite_numbers_round_trip_as_valid_json(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(0, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})

    def reject(word):
        raise AssertionError(f"{word} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=reject)["loss"] == "nan"
    entry = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(entry["loss"])
    assert (entry["grad_norm"], entry["lr"]) == (math.inf, -math.inf)


def test_resumed_run_replaces_later_steps(tmp_path):
    log_steps(tmp_path, range(10))
    with RunLog(tmp_path, first_step=4) as log:
        log.log(4, {"loss": 40.0})
        log.log(5, {"loss": 50.0})
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4, 5]
    assert [entry["loss"] for entry in entries[3:]] == [5.0 - 0.03, 40.0, 50.0]


def test_evaluation_at_the_resumed_step_is_kept(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(3, {"loss": 3.0})
        log.log(4, {"val_bpb": 1.5})
    log_steps(tmp_path, [4, 5], first_step=4)
    entries = {entry["step"]: entry for entry in read_metrics(tmp_path / "metrics.jsonl")}
    assert entries[4] == {"step": 4, "val_bpb": 1.5, "loss": 4.96, "lr": 0.5}


def test_restarted_run_replaces_all_steps(tmp_path):
    log_steps(tmp_path, range(10))
    log_steps(tmp_path, range(2))
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


def test_truncated_line_does_not_affect_other_lines(tmp_path):
    log_steps(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    log_steps(tmp_path, range(3, 5), first_step=3)
    steps = [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4]


def test_pipe_gets_one_plain_line_per_step(tmp_path):
    lines = log_steps(tmp_path, range(11), total_steps=11).splitlines()
    assert len(lines) == 11
    assert lines[7].startswith("step     7/11 | loss 4.9300 | lr x0.500 | ")
    assert lines[7].endswith(" left")
    assert all(line.isascii() and "\x1b" not in line for line in lines)


def test_evaluation_line_shows_all_metrics(tmp_path, capsys):
    with RunLog(tmp_path) as log:
        log.log(7, {"loss": 1.0, "core": 0.5})
        log.log(7, {"val_bpb": 1.23456, "core": 0.012345678})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["step     7 | loss 1.0000", "step     7 | val bpb 1.2346 | core 0.01235"]


def test_terminal_shows_progress_bar_and_evaluation_lines(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with contextlib.redirect_stdout(out), RunLog(tmp_path, total_steps=5) as log:
        for step in range(5):
            log.log(step, {"loss": 5.0 - step / 100})
        log.log(5, {"val_bpb": 1.5})
    shown = out.getvalue()
    assert "\x1b" in shown and "5/5" in shown and "loss 4.9600" in shown
    assert shown.count("step     5/5 | val bpb 1.5000") == 1 and "step     4/5" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.4, "42s"), (59.6, "1m00s"), (190, "3m10s"), (7500, "2h05m")]
)
def test_durations_are_human_readable(seconds, text):
    assert logger.duration(seconds) == text


# ------------------------------------------------------------------------------------------------
# Tracker


def tracked(monkeypatch, tmp_path, open_run, steps, finish_seconds=0.5):
    """Log with a tracker. Returns loop seconds, `finish` seconds, and the message."""
    monkeypatch.setattr(logger, "open_wandb", lambda *args: open_run())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        log = RunLog(tmp_path, run="named")
        begun = time.monotonic()
        for step in range(steps):
            log.log(step, {"loss": 1.0})
        looped = time.monotonic()
        log.finish(finish_seconds)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == steps
    return looped - begun, time.monotonic() - looped, out.getvalue().partition("tracker: ")[2]


def test_tracker_gets_every_entry_in_order(monkeypatch, tmp_path):
    run = FakeRun()
    *_, text = tracked(monkeypatch, tmp_path, lambda: run, 200, finish_seconds=10)
    assert run.entries == [(step, {"loss": 1.0}) for step in range(200)]
    assert text == ""


@pytest.mark.parametrize("broken", ["open", "log", "finish"])
def test_R21_raising_tracker_does_not_stop_the_loop(monkeypatch, tmp_path, capsys, broken):
    run = FakeRun(
        on_log=fail if broken == "log" else lambda: None,
        on_finish=fail if broken == "finish" else lambda: None,
    )
    open_run = fail if broken == "open" else lambda: run
    *_, text = tracked(monkeypatch, tmp_path, open_run, 100, finish_seconds=10)
    assert "the network is gone" in capsys.readouterr().err
    lost = 0 if broken == "finish" else 100
    assert text.startswith(f"{lost} of 100 entries were dropped (ConnectionError")
    assert str(tmp_path / "metrics.jsonl") in text


@pytest.mark.parametrize("hanging", ["open", "log", "finish"])
def test_R21_hanging_tracker_does_not_slow_the_loop(monkeypatch, tmp_path, hanging):
    release = threading.Event()

    def hang():
        release.wait(60)

    def open_run():
        if hanging == "open":
            hang()
        return FakeRun(
            on_log=hang if hanging == "log" else lambda: None,
            on_finish=hang if hanging == "finish" else lambda: None,
        )

    steps = 3 * logger.QUEUE_ENTRIES if hanging != "finish" else 50
    loop, end, text = tracked(monkeypatch, tmp_path, open_run, steps)
    release.set()
    assert loop < 30, "logging waited for the tracker"
    assert end < 30, "`finish` exceeded its timeout"
    assert "no answer within 0.5 s" in text
    if hanging != "finish":
        assert f"{steps} of {steps} entries were dropped" in text


def test_R21_queue_is_bounded_and_drops_are_counted():
    release = threading.Event()
    run = FakeRun(on_log=lambda: release.wait(60))
    tracker = Tracker(lambda: run, capacity=10)
    for step in range(500):
        tracker.put(step, {})
    assert tracker.entries.qsize() <= 10
    release.set()
    text = tracker.finish(10)
    assert 10 <= len(run.entries) <= 11
    assert text == f"tracker: {500 - len(run.entries)} of 500 entries were dropped"


def test_dummy_run_does_not_import_wandb(tmp_path):
    code = f"""
import sys
from pathlib import Path
from nanochat.logger import RunLog
with RunLog(Path({str(tmp_path)!r})) as log:
    log.log(0, {{"loss": 1.0}})
assert "wandb" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_wandb_offline_works_without_network(tmp_path):
    code = f"""
from pathlib import Path
from nanochat.logger import RunLog
with RunLog(Path({str(tmp_path)!r}), "named", "r1", {{"depth": 4}}) as log:
    for step in range(5):
        log.log(step, {{"loss": 5.0 - step, "bad": float("nan")}})
"""
    # A proxy that refuses connections, so that any network access fails
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean_environment(), **nowhere, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "dropped" not in done.stdout and "stopped" not in done.stderr
    runs = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    written = runs[0].read_bytes()
    assert b"loss" in written and b"depth" in written and b"named" in written
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def clean_environment():
    """The environment without the tracker's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
