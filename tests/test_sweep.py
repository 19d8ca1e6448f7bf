"""Sweeps: every run once, whatever happens; what it took; what it says."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nanochat import sweep
from nanochat.common import REPOSITORY, Refused
from nanochat.study import Arm, as_csv, bars, judge, of_arms, of_grid
from nanochat.sweep import Job, Sweep, SweepConfig, gathered, ledger_table


@pytest.fixture(autouse=True)
def fixed_code(monkeypatch):
    """The code does not change while a test runs."""
    monkeypatch.setattr(sweep, "code_print", lambda: "code")


def job(name, score=1.0, **flags):
    words = [f"--{key}={value}" for key, value in flags.items()]
    return Job(name, [["tests.fake_run", f"--score={score}", "--tag={tag}", *words]])


def calls(done):
    return (done.folder / "report" / "calls.txt").read_text().splitlines()


def test_a_run_that_is_done_is_never_repeated_whichever_sweep_asks():
    jobs = [job("a", 1.0), job("b", 2.0)]
    with Sweep(SweepConfig(), "one") as runner:
        done = runner.run_all(jobs)
        assert [done[name].metric("Final validation bpb") for name in "ab"] == [1.0, 2.0]
        assert len(runner.ledger()) == 2
    with Sweep(SweepConfig(), "two") as runner:
        again = runner.run_all([*jobs, job("c", 3.0)])
        assert len(runner.ledger()) == 1  # only what was new
    assert all(len(calls(again[name])) == 1 for name in "abc")
    assert calls(done["a"])[0].split()[1] == done["a"].tag  # its own checkpoints


def test_a_key_changes_with_the_commands_their_inputs_and_the_code():
    one = job("a")
    assert one.key("x") == Job("other name", one.commands).key("x")
    keys = {
        one.key("x"),
        one.key("y"),
        job("a", 2.0).key("x"),
        Job("a", one.commands, {"base": "123"}).key("x"),
    }
    assert len(keys) == 4


def test_several_runs_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with Sweep(SweepConfig(devices=3), "one") as runner:
        done = runner.run_all([job(f"j{i}", i) for i in range(5)])
    assert {calls(run)[0].split()[0] for run in done.values()} == {"2"}


def test_a_run_that_fails_is_told_of_and_tried_again_next_time():
    bad = job("bad", status=3)
    with Sweep(SweepConfig(), "one") as runner:
        with pytest.raises(Refused, match="1 of 2 runs are not done: bad failed with status 3"):
            runner.run_all([job("good"), bad])
        with pytest.raises(Refused):
            runner.run_all([job("good"), bad])
        assert [entry["status"] for entry in runner.ledger()] == [0, 3, 3]
        table = ledger_table(runner.ledger(), 2.0)
    assert [row[0] for row in table["rows"]] == ["Training", "Evaluation", "Lost", "All"]
    lost = sum(entry["seconds"] for entry in runner.ledger() if entry["status"])
    assert table["rows"][2][1] == f"{lost / 3600:.3f}"


def test_a_run_that_its_sentinels_broke_is_an_outcome_and_scores_nothing():
    broken = Job("x", [["tests.fake_run", "--status=78"], ["tests.fake_run", "--score=1"]])
    with Sweep(SweepConfig(), "one") as runner:
        done = runner.run_all([broken])["x"]
        assert done.is_broken and len(runner.ledger()) == 1
        assert runner.run_all([broken])["x"].is_broken and len(runner.ledger()) == 1


def test_a_cap_ends_a_sweep_between_two_runs_and_a_higher_one_goes_on():
    jobs = [job(f"j{i}", i) for i in range(4)]
    with Sweep(SweepConfig(), "one") as runner:
        runner.run_all(jobs[:1])
        each = runner.typical_seconds() / 3600
    with (
        Sweep(SweepConfig(cap_hours=2.9 * each), "one") as runner,
        pytest.raises(Refused, match=r"more than the cap(.|\n)*--cap_hours raises"),
    ):
        runner.run_all(jobs)
    assert 1 <= len(runner.ledger()) <= 3
    with Sweep(SweepConfig(), "one") as runner:
        assert len(runner.run_all(jobs)) == 4
        assert len(runner.ledger()) == 4


def test_two_sweeps_of_a_name_do_not_run_at_once():
    with (
        Sweep(SweepConfig(), "one"),
        pytest.raises(Refused, match="another run writes there"),
        Sweep(SweepConfig(), "one"),
    ):
        pass


SLOW = """
import nanochat.sweep as s
s.code_print = lambda: "code"
jobs = [s.Job("a", [["tests.fake_run", "--score=1"]]),
        s.Job("b", [["tests.fake_run", "--score=2", "--sleep=60"]])]
with s.Sweep(s.SweepConfig(), "one") as runner:
    runner.run_all(jobs)
"""


@pytest.mark.parametrize("how, status", [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_sweep_that_is_stopped_loses_no_run_that_is_done(how, status):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    folder = sweep.sweep_folder() / "runs"
    started = time.monotonic()
    while len(list(folder.glob("*/report/calls.txt"))) < 2:
        assert time.monotonic() < started + 60 and process.poll() is None
        time.sleep(0.1)
    process.send_signal(how)
    assert process.wait(30) == status
    assert len(list(folder.glob("*/done.json"))) == 1
    with Sweep(SweepConfig(), "one") as runner:
        assert len(runner.run_all([job_of_slow()])) == 1
        stopped = [entry["status"] for entry in runner.ledger()]
    assert stopped == ([0, 75] if how == signal.SIGTERM else [0])


def job_of_slow():
    return Job("a", [["tests.fake_run", "--score=1"]])


# ------------------------------------------------------------------------------------------------
# Studies


def test_arms_and_grids_are_read_from_words():
    assert [arm.name for arm in of_arms("only:a|drop:b")] == ["control", "only:a", "drop:b"]
    assert of_arms("only:a")[1] == Arm("only:a", ("--arm=only:a",))
    grid = of_grid("lr=0.1,0.2;--decay=0,1")
    assert [arm.flags for arm in grid] == [
        ("--lr=0.1", "--decay=0"),
        ("--lr=0.1", "--decay=1"),
        ("--lr=0.2", "--decay=0"),
        ("--lr=0.2", "--decay=1"),
    ]
    assert [arm.name for arm in grid][:2] == ["control", "lr=0.1, decay=1"]
    for wrong in ("lr", "lr=", "=1"):
        with pytest.raises(ValueError, match="is not flag=value,value"):
            of_grid(wrong)
    with pytest.raises(ValueError, match="names an arm twice"):
        of_arms("only:a|only:a")


def test_a_study_is_judged_metric_by_metric_and_base_by_base():
    items = {"control": "1,1,1,1,0,0,0,0", "drop:x": "1,0,0,0,0,0,0,0"}
    others = "1,1,1,0,1,0,0,0"
    scores = {
        ("d4", "control"): (1.00, 1.01, 0.99),
        ("d4", "drop:x"): (1.20, 1.22),
        ("d4", "copy:y"): (1.01, 0.99),
        ("d6", "control"): (0.90, 0.91, 0.89),
        ("d6", "drop:x"): (1.10, 1.11),
        ("d6", "copy:y"): (0.90, 0.91),
    }
    jobs = {
        (base, arm, seed): job(f"{base} {arm} {seed}", value, items=items.get(arm, others))
        for (base, arm), values in scores.items()
        for seed, value in enumerate(values)
    }
    with Sweep(SweepConfig(devices=2), "one") as runner:
        done = runner.run_all(list(jobs.values()))
    runs = {place: done[each.name] for place, each in jobs.items()}
    found, table = judge(runs, 2.0, "Final validation bpb")
    verdicts = {(c.base, c.arm, c.metric): c for c in found}
    assert len(found) == 2 * 2 * 3  # bases, arms, metrics
    for base in ("d4", "d6"):
        dropped = verdicts[base, "drop:x", "Final validation bpb"]
        assert dropped.verdict == "worse" and dropped.stands
        assert verdicts[base, "copy:y", "Final validation bpb"].verdict == "within noise"
    by_row = {tuple(row[:3]): row for row in table["rows"]}
    row = by_row["Final validation bpb", "d4", "drop:x"]
    assert row[3:6] == ["1.2100", "2", "+0.2100"] and row[-2:] == ["all worse", "+0.1050"]
    assert by_row["Final validation bpb", "d4", "control"][6] == "std 0.0100"
    assert table["rows"][0][0] == "Final validation bpb"
    assert set(bars(found, "val_bpb:x")) == {
        f"{a}, {b}" for a in ("drop:x", "copy:y") for b in ("d4", "d6")
    }
    assert as_csv(table).splitlines()[0].startswith("Metric,Base,Arm")
    assert gathered([runs["d4", "control", 0]], "ARC").items == [[1, 1, 1, 1, 0, 0, 0, 0]]
