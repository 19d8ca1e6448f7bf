"""Sweeps: each job runs once, device time is recorded, and arms are compared."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanochat import report
from nanochat.common import REPOSITORY, UsageError, read_json
from nanochat.lab import study as study_module
from nanochat.lab import sweep
from nanochat.lab.held_out import declare
from nanochat.lab.search import SearchConfig
from nanochat.lab.study import (
    FIRST_HALF,
    Arm,
    Study,
    StudyConfig,
    as_csv,
    compare_arms,
    from_grid,
    split_arms,
)
from nanochat.lab.sweep import DoneRun, Job, Sweep, SweepConfig, collect_scores, ledger_table
from nanochat.mixture import MixConfig
from nanochat.records import append_line, default_rate
from scripts.lab import sweep as sweep_script
from scripts.lab.sweep import SweepScript, data_of


@pytest.fixture(autouse=True)
def fixed_code(monkeypatch):
    """Fix the code fingerprint during a test."""
    monkeypatch.setattr(sweep, "code_fingerprint", lambda: "code")


def job(name, score=1.0, **flags):
    words = [f"--{key}={value}" for key, value in flags.items()]
    return Job(name, [["tests.fake_run", f"--score={score}", "--tag={tag}", *words]])


def calls(done):
    return (done.folder / "report" / "calls.txt").read_text().splitlines()


def test_finished_run_is_shared_between_sweeps():
    jobs = [job("a", 1.0), job("b", 2.0)]
    with Sweep(SweepConfig(), "one") as runner:
        done = runner.run_all(jobs)
        assert [done[name].metric("Final validation bpb") for name in "ab"] == [1.0, 2.0]
        assert len(runner.ledger()) == 2
    with Sweep(SweepConfig(), "two") as runner:
        again = runner.run_all([*jobs, job("c", 3.0)])
        assert len(runner.ledger()) == 1  # only the new job
    assert all(len(calls(again[name])) == 1 for name in "abc")
    assert calls(done["a"])[0].split()[1] == done["a"].tag  # a tag of its own


def test_key_depends_on_commands_inputs_and_code():
    one = job("a")
    assert one.key("x") == Job("other name", one.commands).key("x")
    keys = {
        one.key("x"),
        one.key("y"),
        job("a", 2.0).key("x"),
        Job("a", one.commands, {"base": "123"}).key("x"),
    }
    assert len(keys) == 4


def test_same_code_off_reuses_runs_of_old_code(monkeypatch):
    jobs = [job("a", 1.0), job("b", 2.0)]
    with Sweep(SweepConfig(), "one") as runner:
        first = runner.run_all(jobs)
    monkeypatch.setattr(sweep, "code_fingerprint", lambda: "other code")
    with Sweep(SweepConfig(same_code=False), "one") as runner:
        again = runner.run_all([*jobs, job("c", 3.0)])
        assert len(runner.ledger()) == 3
    assert [again[name].folder for name in "ab"] == [first[name].folder for name in "ab"]
    with Sweep(SweepConfig(), "one") as runner:
        assert runner.run_all(jobs)["a"].folder != first["a"].folder
        assert len(runner.ledger()) == 5


def test_parallel_runs_share_the_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with Sweep(SweepConfig(devices=3), "one") as runner:
        done = runner.run_all([job(f"j{i}", i) for i in range(5)])
    assert {calls(run)[0].split()[0] for run in done.values()} == {"2"}


def test_each_run_gets_one_visible_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [v["CUDA_VISIBLE_DEVICES"] for v in sweep.environments(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [v["CUDA_VISIBLE_DEVICES"] for v in sweep.environments(2)] == ["2", "3"]
    with pytest.raises(ValueError, match="--devices=3, but only 2 GPUs are visible"):
        sweep.environments(3)


def test_cost_includes_the_time_of_earlier_calls():
    runner = Sweep(SweepConfig(devices=2), "one")
    for seconds in (9e6, 1e6):
        append_line(runner.folder / sweep.LEDGER, json.dumps({"seconds": seconds}))
    cost = runner.cost()
    assert (cost.wall_seconds, cost.devices, cost.device_seconds) == (5e6, 2, 0.0)


def test_failed_run_is_reported_and_retried_on_rerun(monkeypatch):
    bad = job("bad", status=3)
    with Sweep(SweepConfig(), "one") as runner:
        with pytest.raises(UsageError, match="1 of 2 runs unfinished: bad failed with status 3"):
            runner.run_all([job("good"), bad])
        with pytest.raises(UsageError):
            runner.run_all([job("good"), bad])
        assert [entry["status"] for entry in runner.ledger()] == [0, 3, 3]
        monkeypatch.setattr(report, "hardware", lambda: {"gpus": ["NVIDIA H100"] * 8})
        table = ledger_table(runner.ledger())
    assert [row[0] for row in table["rows"]] == [
        "Training",
        "Evaluation",
        "Lost to failures",
        "All",
    ]
    lost = sum(entry["seconds"] for entry in runner.ledger() if entry["status"])
    price = default_rate(["NVIDIA H100"])  # of one device
    assert table["rows"][2][1:] == [f"{lost / 3600:.3f}", f"${lost / 3600 * price:.2f}"]


def test_broken_run_is_finished_but_has_no_scores():
    broken = Job("x", [["tests.fake_run", "--status=78"], ["tests.fake_run", "--score=1"]])
    with Sweep(SweepConfig(), "one") as runner:
        done = runner.run_all([broken])["x"]
        assert done.is_broken and len(runner.ledger()) == 1
        assert runner.run_all([broken])["x"].is_broken and len(runner.ledger()) == 1


def test_cap_stops_a_sweep_and_a_higher_cap_continues_it(monkeypatch):
    entries, minute = Sweep.ledger, 1 / 60

    def timed(self):
        return [{**entry, "seconds": 60.0} for entry in entries(self)]

    monkeypatch.setattr(Sweep, "ledger", timed)  # every run takes a minute
    jobs = [job(f"j{i}", i) for i in range(4)]
    with Sweep(SweepConfig(), "one") as runner:
        runner.run_all(jobs[:1])
    with (
        Sweep(SweepConfig(cap_hours=2.9 * minute), "one") as runner,
        pytest.raises(UsageError, match=r"would exceed the cap(.|\n)*--cap_hours raises"),
    ):
        runner.run_all(jobs)
    assert len(runner.ledger()) == 2
    with (
        Sweep(SweepConfig(devices=2, cap_hours=3.9 * minute), "one") as runner,
        pytest.raises(UsageError, match="would exceed the cap"),
    ):
        runner.run_all(jobs)  # runs in progress count too
    assert len(runner.ledger()) == 3
    with Sweep(SweepConfig(), "one") as runner:
        assert len(runner.run_all(jobs)) == 4
        assert len(runner.ledger()) == 4


def test_two_sweeps_with_one_name_cannot_run_concurrently():
    with (
        Sweep(SweepConfig(), "one"),
        pytest.raises(UsageError, match=r"another run is using this folder(.|\n)*another --name"),
        Sweep(SweepConfig(), "one"),
    ):
        pass


SLOW = """
import nanochat.lab.sweep as s
s.code_fingerprint = lambda: "code"
jobs = [s.Job("a", [["tests.fake_run", "--score=1"]]),
        s.Job("b", [["tests.fake_run", "--score=2", "--sleep=60"]])]
with s.Sweep(s.SweepConfig(), "one") as runner:
    runner.run_all(jobs)
"""


@pytest.mark.parametrize("how, status", [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_stopped_sweep_keeps_finished_runs(how, status):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    folder = sweep.sweep_folder() / "runs"
    started = time.monotonic()
    while len(list(folder.glob("*/report/calls.txt"))) < 2:
        assert time.monotonic() < started + 200 and process.poll() is None
        time.sleep(0.1)
    process.send_signal(how)
    assert process.wait(120) == status
    assert not still_running("tests.fake_run")
    assert len(list(folder.glob("*/done.json"))) == 1
    with Sweep(SweepConfig(), "one") as runner:
        assert len(runner.run_all([job_of_slow()])) == 1
        stopped = [entry["status"] for entry in runner.ledger()]
        assert ledger_table(runner.ledger())["rows"][2][1] == "0.000"  # saved, so not lost
    assert stopped == ([0, 75] if how == signal.SIGTERM else [0])


def still_running(words, seconds=20.0):
    """Whether a process with these words in its command still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        if not any(words in line and "--sleep=60" in line for line in found.stdout.splitlines()):
            return False
        time.sleep(0.1)
    return True


def job_of_slow():
    return Job("a", [["tests.fake_run", "--score=1"]])


# ------------------------------------------------------------------------------------------------
# Studies


def test_arms_and_grids_are_parsed():
    assert split_arms("only:a| drop:b") == ["only:a", "drop:b"]
    grid = from_grid("lr=0.1,0.2;--decay=0,1")
    assert [arm.flags for arm in grid] == [
        ("--lr=0.1", "--decay=0"),
        ("--lr=0.1", "--decay=1"),
        ("--lr=0.2", "--decay=0"),
        ("--lr=0.2", "--decay=1"),
    ]
    assert [arm.name for arm in grid][:2] == ["control", "lr=0.1, decay=1"]
    tasks = from_grid("task=a=20,b|c;lr=1")  # values with commas; the same held-out questions
    assert [arm.flags for arm in tasks] == [
        ("--task=a=20,b", "--lr=1", "--eval_task=a=20,b,c"),
        ("--task=c", "--lr=1", "--eval_task=a=20,b,c"),
    ]
    assert tasks[1].name == "task=c, lr=1"
    assert from_grid("total-batch-size=2,4")[1].flags == ("--total_batch_size=4",)
    for wrong in ("lr", "lr=", "=1"):
        with pytest.raises(ValueError, match="is not flag=value,value"):
            from_grid(wrong)
    with pytest.raises(ValueError, match="lists an arm twice"):
        split_arms("only:a|only:a")


@pytest.fixture
def study(monkeypatch):
    """A study of a mock base: 10 steps of 64 tokens."""
    found = SimpleNamespace(fingerprint="0")
    monkeypatch.setattr(study_module, "find_checkpoint", lambda source, tag: found)
    return Study(StudyConfig(num_iterations=10, total_batch_size=64), MixConfig("world_chat"))


def flags_of(job):
    return dict(word.removeprefix("--").split("=", 1) for word in job.commands[0] if "=" in word)


def test_arm_with_different_batch_size_keeps_total_tokens(study):
    flags = flags_of(study.job("d4", Arm("x", ("--total_batch_size=160",)), 0))
    assert (flags["num_iterations"], flags["total_batch_size"]) == ("4", "160")
    with pytest.raises(ValueError, match="all runs must be equally long"):
        study.job("d4", Arm("x", ("--num_iterations=5",)), 0)


def test_rl_jobs_start_from_sft_and_set_no_mixture_or_batch(monkeypatch):
    opened = []
    monkeypatch.setattr(
        study_module,
        "find_checkpoint",
        lambda *ref: opened.append(ref) or SimpleNamespace(fingerprint="0"),
    )
    cfg = StudyConfig("rl", task="gsm8k", num_iterations=10, tasks="GSM8K")
    job = Study(cfg, MixConfig()).job("d4", Arm("x", ("--num_samples=4",)), 7)
    flags = flags_of(job)
    assert job.commands[0][0] == "scripts.chat_rl" and opened == [("sft", "d4")]
    assert flags.keys().isdisjoint(("mixture", "total_batch_size"))
    assert [
        flags[name] for name in ("source", "task", "num_iterations", "seed", "num_samples")
    ] == [*("sft:d4", "gsm8k", "10", "7", "4")]
    assert job.commands[1][:2] == ["scripts.chat_eval", "--source=rl"]
    own = Study(cfg, MixConfig()).job("d4", Arm("x", ("--task=aqua",)), 0)
    assert [word for word in own.commands[0] if "task" in word] == ["--task=aqua"]
    with pytest.raises(ValueError, match="all runs must be equally long"):
        Study(cfg, MixConfig()).job("d4", Arm("x", ("--num_iterations=5",)), 0)
    Study(StudyConfig("rl", source="mid"), MixConfig())
    Study(StudyConfig("sft"), MixConfig())
    assert opened[-2:] == [("mid", "d4"), ("mid", "d4")]
    with pytest.raises(ValueError, match="RL has no --mixture=a,b; set --task"):
        Study(cfg, MixConfig("a,b"))
    with pytest.raises(ValueError, match=r'use --grid="task=a\|b"'):
        sweep_script.main(SweepScript(arms="drop:a", study=cfg))


def test_several_bases_are_no_inconsistency_of_the_report(monkeypatch):
    monkeypatch.setattr(
        study_module, "find_checkpoint", lambda source, tag: SimpleNamespace(fingerprint=tag)
    )
    one, two = (Study(StudyConfig(bases=bases), MixConfig()) for bases in ("d4", "d4|d6"))
    assert one.inputs == {"mid": "d4"} and two.inputs.keys() == {"bases"}
    assert Study(StudyConfig(bases="d4|d8"), MixConfig()).inputs != two.inputs


FLOOR = {"world_choice": 0.05}


def study_of(mixture, stage="sft"):
    cfg = StudyConfig(stage, num_iterations=10, total_batch_size=64)
    return Study(cfg, MixConfig(mixture), "data")


def resolved(monkeypatch, stage="sft", max_seq_len=64, **tokens):
    """A finished control run trained on `tokens` of each bucket."""
    mixture = {"buckets": [{"name": name, "tokens": count} for name, count in tokens.items()]}
    state = {
        "model": {"max_seq_len": max_seq_len},
        "mixture": mixture if stage == "base" else {"resolved": mixture},
    }
    monkeypatch.setattr(study_module, "newest_state", lambda folder: state)
    return [DoneRun(Job("d4 control seed 0", []), Path("runs/key"))]


def test_arm_flags_redistribute_the_tokens_of_the_control(study, monkeypatch):
    found = study_of("world_chat,WorldChoice=300,world_facts*2,world_problems=0%")
    counts = {"world_chat": 500, "world_choice": 300, "world_facts": 200, "world_problems": 0}
    control = resolved(monkeypatch, **counts)
    arms = ["drop:world_choice", "only:world_facts", "swap:world_facts->world_problems", "copy:x"]
    found.check_arms(arms, FLOOR)
    assert found.ablation("d4", control, arms, FLOOR) == [
        Arm("control", ()),
        Arm(arms[0], mixture_flag("714t", "300*0t", "286t", "0%")),
        Arm(arms[1], mixture_flag("0%", "300*50t", "950t", "0%")),
        Arm(arms[2], mixture_flag("500t", "300*300t", "0%", "200t")),
        Arm(arms[3], mixture_flag("500t", "300*300t", "200t", "0%")),
    ]
    job = found.job("d4", Arm("copy:x", ("--mixture=x",)), 0)
    assert [word for word in job.commands[0] if "mixture" in word] == ["--mixture=x"]


def mixture_flag(chat, choice, facts, problems):
    buckets = {"chat": chat, "choice": choice, "facts": facts, "problems": problems}
    return ("--mixture=" + ",".join(f"world_{name}={n}" for name, n in buckets.items()),)


def test_text_arm_uses_whole_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module.Tokenizer, "load", lambda: SimpleNamespace(fingerprint="0"))
    control = resolved(monkeypatch, "base", en=7 * 64, de=2 * 64, ko=0)
    found = study_of("en=75%,de=25%,ko=0%", "base")
    assert found.ablation("d4", control, ["scale:de*2", "drop:de"], {})[1:] == [
        Arm("scale:de*2", (f"--mixture=en={5 * 64}t,de={4 * 64}t,ko=0%",)),
        Arm("drop:de", (f"--mixture=en={9 * 64}t,de=0%,ko=0%",)),
    ]
    with pytest.raises(ValueError, match="set --mixture"):
        study_of("", "base").check_arms(["drop:de"], {})


@pytest.mark.parametrize(
    "arm, message",
    [
        ("without:world_chat", "unknown ablation arm.*use one of: copy:name"),
        ("drop:gsm8k", "bucket 'gsm8k' is not in the mixture .world_chat, world_choice"),
        ("drop:world_facts", "equals the control"),
        ("scale:world_chat*3", "the other buckets cannot compensate"),
    ],
)
def test_arms_are_validated_before_training(study, arm, message):
    found = study_of("world_chat=60%,world_choice=40%,world_facts=0%")
    with pytest.raises(ValueError, match=message):
        found.check_arms(["drop:world_chat", arm], FLOOR)


def test_ablation_needs_the_mixture_of_its_control(study, monkeypatch):
    found, control = study_of("world_chat,world_choice"), resolved(monkeypatch, world_facts=10)
    with pytest.raises(ValueError, match="was trained on world_facts, not on world_chat"):
        found.ablation("d4", control, ["drop:world_chat"], {})
    with pytest.raises(ValueError, match="all control runs of d4 broke"):
        found.ablation("d4", [replace(control[0], is_broken=True)], ["drop:world_chat"], {})
    monkeypatch.setattr(study_module, "newest_state", lambda folder: None)
    with pytest.raises(UsageError, match=r"checkpoints of d4 control seed 0 are gone(.|\n)*delete"):
        found.ablation("d4", control, ["drop:world_chat"], {})


def test_key_depends_on_training_and_validation_data(tmp_path):
    rows = tmp_path / "own.jsonl"
    asked = {"role": "user", "content": "a"}
    talks = [[asked, {"role": "assistant", "content": answer}] for answer in "bcd"]
    prints = []
    for count in (2, 3):
        rows.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks[:count]))
        mixture, flags = MixConfig(f"jsonl:{rows}"), f"--val_mixture=jsonl:{rows}"
        for study in (StudyConfig(), StudyConfig(flags=flags)):
            prints.append(data_of(SweepScript(study=study, mix=mixture)))
        flags = flags.replace("val_mixture", "val-mixture")
        prints.append(data_of(SweepScript(study=StudyConfig(flags=flags))))
    assert prints[:3] == [prints[0]] * 3 and prints[3:] == [prints[3]] * 3
    assert prints[0] != prints[3] and data_of(SweepScript()) == ""


def test_key_depends_on_amounts_and_on_the_mixtures_of_a_grid(tmp_path):
    mixture, rows = tmp_path / "mix.json", tmp_path / "own.jsonl"
    asked = {"role": "user", "content": "a"}
    prints = []
    for count, amounts in ((2, "a=60%,b=40%"), (2, "a=40%,b=60%"), (3, "a=40%,b=60%")):
        talks = [[asked, {"role": "assistant", "content": answer}] for answer in "bcd"[:count]]
        rows.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        declared = dict.fromkeys("ab", {"task": "jsonl", "source": str(rows)})
        mixture.write_text(json.dumps({"mixture": amounts, "buckets": declared}))
        prints.append(data_of(SweepScript(mix=MixConfig(str(mixture)))))
        grid = f"mixture=jsonl:{rows}|world_chat;init_lr_frac=1,2"
        prints.append(data_of(SweepScript(grid=grid)))
    assert len(set(prints[0::2])) == 3
    assert prints[1] == prints[3] != prints[5]


def test_code_fingerprint_depends_on_texts_beside_the_code(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(sweep, "REPOSITORY", tmp_path)
    (tmp_path / "tasks").mkdir()
    prints = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("identity.txt", "1"), ("notes.md", "1")):
        (tmp_path / "tasks" / name).write_text(text)
        prints.append(sweep.code_fingerprint())
    assert len(set(prints)) == 3 and prints[2] == prints[3]


def test_confirmation_uses_the_other_half_of_the_rows(study, tmp_path):
    job = study.job("d4", Arm("x", (FIRST_HALF,)), 0)
    again = study.confirmation(DoneRun(job, tmp_path / "key"))
    assert flags_of(job)["eval_half"] == "1" and flags_of(again)["eval_half"] == "2"
    assert flags_of(again)["model_tag"] == "sweep-key"  # its own checkpoint
    assert "--skip_if_done" in job.commands[0] and "--skip_if_done" not in again.commands[0]


@pytest.fixture
def faked(monkeypatch):
    """Replace training with a mock run that reports --score."""
    call = Sweep.call

    def call_fake(sweep, run, words, variables):
        return call(sweep, run, ["tests.fake_run", *words[1:]], variables)

    monkeypatch.setattr(Sweep, "call", call_fake)
    found = SimpleNamespace(fingerprint="0")
    monkeypatch.setattr(study_module, "find_checkpoint", lambda source, tag: found)


def test_script_compares_a_grid(faked, base, capsys):
    for grid in ("mixture=a|b", "score=1,2;mixture=a|b"):
        with pytest.raises(ValueError, match="own held-out data; use --arms, or add --val_mixture"):
            sweep_script.main(SweepScript(grid=grid))
    sweep_script.main(SweepScript(grid="score=1,2", sweep=SweepConfig(devices=2)))
    record = read_json(base / "report" / "sweep.json")
    assert record["values"]["score=2, d4"] == "+1.0000 (worse)"
    assert record["values"]["Comparisons"] == 2
    assert [table["title"] for table in record["tables"]] == ["Arms", "Device time"]
    assert (base / "sweeps" / "sweep" / "arms.csv").exists()


def test_rl_is_compared_by_scores_after_training(faked, base):
    rl, two = StudyConfig("rl", task="a"), SweepConfig(devices=2)
    sweep_script.main(SweepScript(grid="score=1,2", study=rl, sweep=two))
    record = read_json(base / "report" / "sweep.json")
    assert record["values"]["score=2, d4"] == "+1.0000 (better)"
    rows = record["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["pass@1 after"] * 2 + ["Mean reward after"] * 2
    assert [row[-1] for row in rows if row[2] != "control"] == ["-", "-"]  # per million tokens
    sweep_script.main(SweepScript(grid="score=1;task=a|b", study=rl, sweep=two))
    assert read_json(base / "report" / "sweep.json")["values"]["Comparisons"] == 1  # not the reward


def test_search_for_an_rl_setting_maximizes_the_score(faked, base, monkeypatch):
    monkeypatch.setattr(DoneRun, "metric", lambda run, name: -abs(math.log(score_of(run))))
    search = SearchConfig("score", low=0.1, high=10, wide=3, tight=1, finalists=1)
    rl = StudyConfig("rl", task="a")
    sweep_script.main(SweepScript(searching=search, study=rl, sweep=SweepConfig(devices=2)))
    values = read_json(base / "report" / "sweep.json")["values"]
    assert values["Chosen score"] == 1.0 and "pass@1 after, mean of 3 seeds" in values
    logs = [path.read_text() for path in base.glob("sweeps/runs/*/log.txt")]
    assert logs and not any("eval_half" in log for log in logs)


def test_text_from_a_final_benchmark_family_is_rejected(base, monkeypatch):
    declare({"ARC-Easy": "arc"})
    tokenizer = SimpleNamespace(fingerprint="0")
    monkeypatch.setattr(study_module.Tokenizer, "load", lambda: tokenizer)
    buckets = {"a": {"dataset": "x", "parent": "arc"}, "b": {"dataset": "y"}}
    mixture = base / "mixture.json"
    mixture.write_text(json.dumps({"mixture": "a=50%,b=50%", "buckets": buckets}))
    of_texts = StudyConfig(stage="base")
    script = SweepScript(arms="drop:a", study=of_texts, mix=MixConfig(str(mixture)))
    with pytest.raises(UsageError, match="a is made from arc, as is final benchmark ARC-Easy"):
        sweep_script.main(script)


def test_script_searches_for_a_value_and_re_evaluates_it(faked, base, monkeypatch):
    search = SearchConfig("score", low=0.1, high=10, wide=3, tight=1, finalists=1)
    with pytest.raises(UsageError, match="smallest value tried"):
        sweep_script.main(SweepScript(searching=search, sweep=SweepConfig(devices=2)))
    with pytest.raises(ValueError, match="takes one base, got --bases='d4|d6'"):
        sweep_script.main(SweepScript(searching=search, study=StudyConfig(bases="d4|d6")))
    monkeypatch.setattr(DoneRun, "metric", lambda run, name: abs(math.log(score_of(run))))
    sweep_script.main(SweepScript(searching=search, sweep=SweepConfig(devices=2)))
    values = read_json(base / "report" / "sweep.json")["values"]
    assert values["Chosen score"] == 1.0 and values["The best seed on other validation rows"] == 0.0


def score_of(run):
    return float(flags_of(run.job)["score"])


def test_study_with_only_broken_runs_is_an_error(tmp_path):
    runs = {("d4", "control", i): DoneRun(Job("x", []), tmp_path, True) for i in range(3)}
    with pytest.raises(ValueError, match="all 3 runs broke"):
        compare_arms(runs, 1.0, "Final validation bpb")


def test_arms_are_judged_per_metric_and_base():
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
    runs = {key: done[each.name] for key, each in jobs.items()}
    found, table = compare_arms(runs, 2.0, "Final validation bpb")
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
    assert as_csv(table).splitlines()[0].startswith("Metric,Base,Arm")
    [arc] = collect_scores([runs["d4", "control", 0]], "ARC").tasks
    assert arc.scores == [[1, 1, 1, 1, 0, 0, 0, 0]]


def test_search_re_evaluates_only_seeds_that_did_not_break(faked, base, monkeypatch):
    call = Sweep.call

    def breaking(self, run, words, variables):
        found = call(self, run, words, variables)
        return sweep.BROKEN if "--seed=2" in words else found

    monkeypatch.setattr(Sweep, "call", breaking)
    monkeypatch.setattr(DoneRun, "metric", lambda run, name: abs(math.log(score_of(run))))
    search = SearchConfig("score", low=0.1, high=10, wide=3, tight=1, finalists=1)
    sweep_script.main(SweepScript(searching=search, sweep=SweepConfig(devices=2)))
    values = read_json(base / "report" / "sweep.json")["values"]
    assert values["Final validation bpb, mean of 2 seeds"]["value"] == 0.0
    assert values["Mean of the same seeds on other validation rows"]["n"] == 2
