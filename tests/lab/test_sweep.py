"""Ablation arms; sweeps: each run once, planted effects and laws found, copies within noise."""

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil
import pytest
import torch

from nanochat.common import read_json
from nanochat.lab.ablation import arm_counts
from nanochat.lab.sweep import environments
from nanochat.records import read_lines
from tasks.buckets import Tags
from tests.training_runs import begin

SWEEP = ["lab.sweep", "--source=base", "--bases=one", "--devices=2", "--num_iterations=10"]
GRID = "--grid=init_lr_frac=0.3,1"


def settings(base: Path) -> list[dict]:
    """Settings of every finished process that sweeps started."""
    paths = base.glob("sweeps/runs/*/report/records.jsonl")
    return [record["settings"] for path in paths for record in read_lines(path)]


def ledger(base: Path) -> list[int]:
    """Exit status of every process of the sweep."""
    return [entry["status"] for entry in read_lines(base / "sweeps/sweep/ledger.jsonl")]


def record(base: Path, name: str = "sweep") -> dict:
    return read_json(base / "report" / f"{name}.json")


def break_seed(base: Path, seed: int, fault: object) -> None:
    (base / "faults.json").write_text(json.dumps({str(seed): fault}))


def test_planted_effect_is_found_and_nulls_are_within_noise(planted_runs, base, command):
    nulls = ("0.301", "0.302")
    flags = ["--grid=init_lr_frac=0.3,1," + ",".join(nulls), "--bases=one|two", "--tasks=ARC"]
    command.works(*SWEEP, *flags)
    rows = record(base)["tables"][0]["rows"]
    bpb = {tuple(row[1:3]): row for row in rows if row[0] == "Final validation bpb"}
    for base_tag in ("one", "two"):
        effect = bpb[base_tag, "init_lr_frac=1"]
        assert float(effect[5]) == pytest.approx(0.145, abs=0.02)
        assert float(effect[7]) < 1e-3 and effect[8:] == ["worse", "2 worse"]
        for null in nulls:
            assert bpb[base_tag, f"init_lr_frac={null}"][8] == "within noise"
    assert {row[0] for row in rows} == {"Final validation bpb", "val_bpb:x", "ARC"}
    assert record(base)["values"] == {"Comparisons": 2 * 3 * 3, "Beyond noise": 4}
    seeds = Counter(run["seed"] for run in settings(base) if run["source"] == "base:one")
    assert set(seeds.values()) == {1} and len(seeds) == 3 + 3 * 2  # arms share no seeds


def test_finished_runs_are_kept_until_their_data_changes(planted_runs, base, command, tmp_path):
    rows = tmp_path / "own.jsonl"
    chats = [[{"role": who, "content": x} for who in ("user", "assistant")] for x in "bcd"]
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    flags = [*SWEEP, GRID, f"--mixture=jsonl:{rows}"]
    command.works(*flags)
    assert "5 done, 0 to go" in command.works(*flags, "--name=other")
    assert ledger(base) == [0] * 5
    rows.write_text(rows.read_text().replace('"d"', '"e"'))
    command.works(*flags)
    assert ledger(base) == [0] * 10


def test_rerun_continues_after_a_cap_or_failures(planted_runs, base, command):
    out = command.rejects(*SWEEP, GRID, "--devices=1", "--cap_hours=1e-9")
    assert "the cap is 1e-09" in out and "--cap_hours raises" in out and ledger(base) == [0]
    break_seed(base, 1, 3)
    out = command.rejects(*SWEEP, GRID, "--devices=1")
    assert "failed with status 3" in out and "log.txt" in out and "rerun the same command" in out
    break_seed(base, 1, None)
    command.works(*SWEEP, GRID, "--cap_hours=1")
    assert sorted(ledger(base)) == [0] * 5 + [3]
    break_seed(base, 201, 3)
    assert "init_lr_frac=2 seed 201 failed" in command.works(*SWEEP, f"{GRID},2")
    assert {row[2] for row in record(base)["tables"][0]["rows"]} == {"init_lr_frac=1"}


def test_stopped_sweep_keeps_finished_runs(trained, fake_python, base, command, monkeypatch):
    break_seed(base, 1, "sleep")
    code = "import runpy, sys; sys.executable = sys.argv.pop(1)"
    code += "\nrunpy.run_module('scripts.lab.sweep', run_name='__main__', alter_sys=True)"
    process = begin(base, "-c", code, str(fake_python), *SWEEP[1:], GRID, "--devices=1")
    deadline = time.monotonic() + 200
    while sum("threads" in log.read_text() for log in base.glob("sweeps/runs/*/log.txt")) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    assert "another run is using this folder" in command.rejects(*SWEEP, GRID)
    runs = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(120) == 75
    assert runs and not any(run.is_running() for run in runs)
    monkeypatch.setattr(sys, "executable", str(fake_python))
    break_seed(base, 1, None)
    command.works(*SWEEP, GRID)
    assert sorted(ledger(base)) == [0] * 5 + [75]


def test_each_run_gets_one_visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, want in (("", ["0", "1"]), ("2,3", ["2", "3"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [v["CUDA_VISIBLE_DEVICES"] for v in environments(2)] == want


def test_rl_is_compared_by_its_score_on_the_same_questions(planted_runs, base, command):
    rl = [*SWEEP, "--stage=rl"]
    command.works(*rl, GRID, "--task=a")
    rows = record(base)["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["pass@1 after"] and rows[0][8] == "worse"
    assert "add --eval_task=... to --flags" in command.rejects(*rl, "--grid=task=a=20,b|c")


SEARCH = [*SWEEP, "--search=init_lr_frac", "--low=0.03", "--high=3", "--wide=5", "--tight=3"]


def test_search_finds_the_planted_optimum_on_new_seeds(planted_runs, base, command):
    command.works(*SEARCH)
    values, rows = record(base)["values"], record(base)["tables"][0]["rows"]
    assert values["Chosen init_lr_frac"] == 0.3 and len(rows) == 7 + 2 * 3
    final = [score for name, score in rows if re.search("0.3 seed [123]$", name)]
    assert values["Final validation bpb, mean of 3 seeds"]["value"] == pytest.approx(fmean(final))
    rates = {run["init_lr_frac"] for run in settings(base) if run["seed"] == "0"}
    assert {"0.03", "0.09487", "0.3", "0.9487", "3"} < rates and len(rates) == 7


@pytest.mark.parametrize(
    "flags, message",
    [
        ("", "exactly one of --arms, --grid and --search"),
        ("--grid=mixture=a|b", "own held-out data; add --val_mixture"),
        ("--search=lr --bases=one|two", "one base and 0 < low < high, got --bases=one|two"),
        ("--grid=num_iterations=1,2", "all runs must be equally long"),
        ("--grid=depth=1,2 --task=gsm8k", "--task is for --stage=rl; leave it out"),
        ("--arms=copy:a --mixture=world_chat=20", "--arms needs tokens in --mixture"),
        ("--search=init_lr_frac --low=1 --high=3 --wide=3", "extend it with --low"),
        ("--search=init_lr_frac --low=0.01 --high=0.2 --wide=3", "extend it with --high"),
    ],
)
def test_unusable_sweep_is_rejected(planted_runs, command, flags, message):
    assert message in " ".join(command.rejects(*SWEEP, *flags.split()).split())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_data_ablation_finds_a_planted_effect(trained, command):
    """Real runs: without world_facts, their loss is worse; a copy is within noise."""
    mixture = "world_facts=3072t,world_choice=2048t,world_problems=0t"
    flags = ["--total_batch_size=512", f"--mixture={mixture}", "--name=planted"]
    flags += ["--arms=copy:again|drop:world_facts|swap:world_choice->world_problems"]
    training = "--max_seq_len=128 --eval_tokens=2048 --init_lr_frac=1 --dtype=float32"
    flags += [f"--flags={training} --val_mixture=world_facts,world_choice"]
    command.works(*SWEEP, *flags)
    rows = record(trained, "sweep-planted")["tables"][0]["rows"]
    found = {row[2]: row[8] for row in rows if row[0] == "val_bpb:world_facts"}
    assert found["drop:world_facts"] == "worse" and found["copy:again"] == "within noise"
    mixtures = {run["mixture"] for run in settings(trained)}
    totals = {sum(map(int, re.findall(r"(\d+)t", spec))) for spec in mixtures}
    assert len(mixtures) == 3 and totals == {10 * 512}


def test_series_of_runs_gives_the_planted_scaling_law(planted_runs, base, command):
    series = "lab.scaling_laws --max_seq_len=32 --devices=2 --depths 1 2 3 4".split()
    arms = ("default", "--matrix_lr=0.01")
    series += [f"--arms={'|'.join(arms)}", "--budgets", "1e11", "2e11", "5e11"]
    command.works(*series, "--project=6")
    tables = {t["title"].split(":")[0]: t["rows"] for t in record(base, "scaling-laws")["tables"]}
    own, other = ([row[1:3] for row in tables["Runs"] if row[0] == arm] for arm in arms)
    assert own == other and 8 <= len(own) < 12  # some would repeat text
    for row in tables["Law"]:
        law = [float(cell.split()[0]) for cell in row[1:]]
        assert law == pytest.approx([1.0, 60.0, 0.35, 200.0, 0.4], rel=0.1)
    for _, flops, *cells in tables["Best size by FLOPs"]:
        sizes = np.geomspace(1e4, 1e6, 1000)
        losses = 1 + 60 * sizes**-0.35 + 200 * (float(flops) / 6 / sizes) ** -0.4
        size, loss, difference = (float(cell.split()[0]) for cell in cells)
        assert size == pytest.approx(sizes[losses.argmin()], rel=0.1)
        assert loss == pytest.approx(losses.min(), rel=0.01) and difference == 0
    assert {"Device time", "Projections"} < tables.keys()
    assert "done, 0 to go" in command.works(*series)


# ---- Arms ----------------------------------------------------------------------------------------

COUNTS = {"chat": 500, "chat-korean": 300, "gsm8k": 150, "arc": 50, "spare": 0}
LANGUAGES = ("en", "ko", "en", "en", "de")
TAGS = {name: Tags(language=code) for name, code in zip(COUNTS, LANGUAGES, strict=True)}


@pytest.mark.parametrize(
    "arm, floor, counts",
    [
        ("copy:again", {}, [500, 300, 150, 50, 0]),
        ("only:chat-korean", {"arc": 0.05}, [0, 950, 0, 50, 0]),
        ("drop:chat", {}, [0, 600, 300, 100, 0]),
        ("swap:gsm8k -> spare", {}, [500, 300, 0, 50, 150]),
        ("ratio:language ko:en=1:4", {}, [571, 200, 172, 57, 0]),
        ("drop:chat then scale:arc*2 then drop:chat-korean", {}, [0, 0, 571, 429, 0]),
    ],
)
def test_arm_keeps_the_total_of_the_control(arm, floor, counts):
    found = arm_counts(arm, COUNTS, TAGS, floor)
    assert list(found.values()) == counts and sum(counts) == 1000


@pytest.mark.parametrize(
    "arm, message",
    [
        ("none:x", "use one of: copy:name"),
        ("drop:chat then drop:none", "none is not in the mixture"),
        ("scale:chat*3", "other buckets cannot compensate"),
        ("drop:spare", "changes nothing"),
        ("ratio:language ko:ko=1:4", "use two values of language"),
    ],
)
def test_invalid_arm_error_names_the_fix(arm, message):
    with pytest.raises(ValueError, match=message):
        arm_counts(arm, COUNTS, TAGS, {})
