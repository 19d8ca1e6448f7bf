"""Evaluation variance and comparisons by their commands, and the report on seeds and cost."""

import math

import pytest

from nanochat.common import read_json
from scripts.lab.eval_variance import classify, needed_repeats
from scripts.lab.reliability import recipe_table

EVAL = "chat_eval -x 12 --max_new_tokens=6 --dtype=float32".split()


def scores(base, stage="sft"):
    return read_json(base / "report" / f"chat-evaluation-{stage}.json")["values"]


def comparison(base):
    [path] = (base / "report").glob("comparison-of-*.json")
    rows = read_json(path)["tables"][0]["rows"]
    path.unlink()
    return {row[0]: row for row in rows}


@pytest.mark.parametrize(
    "std, item_se, repeats, label",
    [
        (0.0029, 0.02, 1, "very stable"),
        (0.0031, 0.02, 1, "stable"),
        (0.02, 0.02, 4, "high"),  # so that std / sqrt(4) is half of the item error
        (0.5, 0.02, 16, "high"),
        (0.1, 0.0, 16, "high"),
    ],
)
def test_repeats_keep_sampling_error_below_half_the_item_error(std, item_se, repeats, label):
    assert (needed_repeats(std, item_se), classify(std)) == (repeats, label)


def test_variance_of_sampled_answers_is_measured(tuned, command):
    measure = ["lab.eval_variance", "--checkpoints=sft:s0|sft:s1"]
    assert "chat_eval -i sft -g s0 -s 20" in command.rejects(*measure)
    command.works(*EVAL, "-a", "world_facts", "-g", "s1")  # greedy
    once = scores(tuned)["World-Facts"]
    assert (once["k"], once["repeat_se"], once["item_se"]) == (1, 0.0, once["se"])
    assert "share no task" in command.rejects("lab.eval_variance", "--checkpoints=sft:s1")
    for tag in ("s0", "s1"):
        sampled = [*EVAL, "-a", "world_facts|world_choice", "-g", tag, "-t", "1", "-n", "3"]
        assert "3 answers each" in command.works(*sampled)
    found = scores(tuned)["World-Facts"]
    assert found["se"] == pytest.approx(math.hypot(found["item_se"], found["repeat_se"]))
    command.works(*measure)
    [row] = read_json(tuned / "report" / "evaluation-variance.json")["tables"][0]["rows"]
    assert row[1:4] == ["World-Facts", 12, 3] and len(row) == 9  # letters do not vary
    assert float(row[6]) == pytest.approx(100 * 3**0.5 * found["repeat_se"], abs=0.01)


def test_models_are_compared_on_paired_items(tuned, command):
    pair = ["lab.compare", "--before=base:one:8", "--after=base:one:20"]
    out = command.rejects(*pair)
    assert "scripts.chat_eval -i base -g one -s 8" in out
    core = {}
    for step in (8, 20):
        flags = f"--model_tag=one --model_step={step} --suite=embedded --max_per_task=10"
        command.works("base_eval", *flags.split(), "--dtype=float32")
        values = read_json(tuned / "report" / "base-model-evaluation.json")["values"]
        core[step] = values["CORE metric"]["value"]
        command.works(*EVAL, "-i", "base", "-g", "one", "-s", str(step), "-a", "world_choice")
    command.works(*pair)
    rows = comparison(tuned)
    assert {"World few-shot", "World-Choice", "world_sums"} <= rows.keys()
    assert all("won" in row[5] for row in rows.values())  # paired
    assert {row[4] for row in rows.values()} <= {"better", "worse", "within noise"}
    assert float(rows["World few-shot"][2]) == pytest.approx(core[20] - core[8], abs=1e-4)
    command.works(*EVAL, "-i", "sft", "-g", "s0", "-a", "world_facts")
    out = command.rejects("lab.compare", "--before=base:one:8", "--after=sft:s0")
    assert "on the same tasks" in out
    out = command.rejects("lab.compare", "--before=sft:s0", "--after=sft:s0")
    assert "is compared with itself" in out


def test_settings_are_compared_over_seeds(tuned, command):
    sides = {"base:one": (1.0, 1.01, 0.99), "base:two": (0.8, 0.81, 0.79)}
    for name, bpbs in sides.items():
        log = tuned / "base_checkpoints" / name[5:] / "metrics.jsonl"
        steps = zip((12, 16, 20), bpbs, strict=True)
        log.write_text("".join(f'{{"step": {n}, "val_bpb": {bpb}}}\n' for n, bpb in steps))
    before, after = (",".join(f"{name}:{n}" for n in (12, 16, 20)) for name in sides)
    command.works("lab.compare", f"--before={before}", f"--after={after}")
    # bar: Student's t at 4 degrees of freedom x 0.01 x sqrt(2 / 3)
    row = comparison(tuned)["val_bpb"]
    assert row[1:5] == ["1.0000", "0.8000", "-0.2000", "0.0227"]
    assert row[6] == "better"


def test_checkpoints_of_runs_are_scored_on_the_static_suite(tuned, command):
    every = "--all=base:one, sft:s0"
    for step in (4, 8, 12, 16):
        (tuned / f"base_checkpoints/one/step_{step:06d}").rename(tuned / f"old_{step}")
    command.works("lab.compare", every)
    record = read_json(tuned / "report" / "suite.json")
    rows = [
        dict(zip(record["tables"][0]["columns"], row, strict=True))
        for row in record["tables"][0]["rows"]
    ]
    assert [(row["Run"], row["Step"]) for row in rows] == [("base:one", "20"), ("sft:s0", "20")]
    assert rows[0]["From the first"] == "+0.000 +- 0.000"
    assert "no checkpoint in" in command.rejects("lab.compare", "--all=sft:none")


def test_report_compares_the_final_run_with_all_runs():
    def written(section, seconds, own):
        cost = {"device_seconds": seconds, "own_device_seconds": own}
        return {"section": section, "cost": cost}

    base, evaluation = written("Base", 600.0, 600.0), written("Evaluation", 90.0, 30.0)
    history = [base, base, written("Evaluation", 60.0, 60.0), evaluation]
    rows = recipe_table([base, evaluation], history, [{"seconds": 300.0}, {"seconds": 180.0}])
    assert rows["rows"] == [
        ["Base", "10.00m", "20.00m"],
        ["Evaluation", "1.50m", "1.50m"],
        ["Sweeps", "0.00m", "8.00m"],
        ["All", "11.50m", "29.50m"],
        ["Ratio", "", "2.6 times"],
    ]
