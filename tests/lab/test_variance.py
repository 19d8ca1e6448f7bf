"""Evaluation variance and checkpoint comparison: statistics, storage and scripts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanochat.checkpoint import build_model, parse_checkpoint_ref, save_checkpoint, stage_folder
from nanochat.common import MissingInput, read_json
from nanochat.distributed import DistConfig
from nanochat.engine import Sampling
from nanochat.lab import canaries, variance
from nanochat.lab.variance import Variance, default_repeats, load_variances, measure, save_variances
from nanochat.logger import METRICS_FILE
from nanochat.records import Cost, Provenance, write_record
from nanochat.tokenizer import Tokenizer
from scripts import base_eval, chat_eval
from scripts.lab import compare, eval_variance
from tests.conftest import TINY, lively

CPU = DistConfig("cpu", "float32")


def runs(rng, chances, num_runs):
    """Scores [item][run]; answers are correct with the given probabilities."""
    return (
        (rng.random((len(chances), num_runs)) < np.array(chances)[:, None]).astype(float).tolist()
    )


# ------------------------------------------------------------------------------------------------
# Statistics


def test_sampling_and_item_errors_are_separated():
    rng = np.random.default_rng(0)
    chances = rng.choice([0.1, 0.5, 0.9], 400).tolist()
    found = measure("t", [runs(rng, chances, 40) for _ in range(5)])
    sampling = math.sqrt(sum(p * (1 - p) for p in chances)) / 400
    assert found.std == pytest.approx(sampling, rel=0.2)
    assert found.item_se == pytest.approx(np.std(chances) / math.sqrt(400), rel=0.2)
    assert (found.n, found.num_runs, len(found.stds)) == (400, 40, 5)


@pytest.mark.parametrize(
    ("std", "label"),
    [(0.0, "very stable"), (0.0029, "very stable"), (0.0031, "stable"), (0.007, "high")],
)
def test_variance_class_follows_the_standard_deviation(std, label):
    assert Variance("t", 100, 3, (std, std), 0.02).label == label


@pytest.mark.parametrize(
    ("std", "item_se", "repeats"),
    [
        (0.0, 0.02, 1),
        (0.01, 0.02, 1),
        (0.02, 0.02, 4),
        (0.03, 0.02, 9),
        (0.5, 0.02, 16),
        (0.1, 0.0, 16),
    ],
)
def test_repeats_keep_sampling_error_below_half_item_error(std, item_se, repeats):
    found = Variance("t", 100, 3, (std,), item_se)
    assert found.repeats == repeats
    if item_se and repeats < variance.MAX_REPEATS:
        assert std / math.sqrt(repeats) <= item_se / 2 + 1e-12


def test_checkpoints_must_have_the_same_items_and_runs():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="differ"):
        measure("t", [runs(rng, [0.5] * 9, 3), runs(rng, [0.5] * 8, 3)])
    with pytest.raises(ValueError, match="two repeats"):
        measure("t", [runs(rng, [0.5] * 9, 1)])


def test_saved_variance_sets_default_repeats_for_sampling(base):
    assert default_repeats("t", 1.0) == 1 and load_variances() == {}
    save_variances([Variance("t", 100, 3, (0.02,), 0.02)])
    save_variances([Variance("u", 100, 3, (0.0,), 0.02)])
    assert [default_repeats(name, 1.0) for name in "tuv"] == [4, 1, 1]
    assert default_repeats("t", 0.0) == 1
    assert load_variances()["t"] == Variance("t", 100, 3, (0.02,), 0.02)


def test_table_lists_the_noisiest_task_first():
    found = [
        Variance("calm", 50, 3, (0.001, 0.003), 0.02),
        Variance("loud", 50, 3, (0.02, 0.04), 0.02),
    ]
    table = variance.variance_table(found, ["sft", "rl"])
    assert [row[1] for row in table["rows"]] == ["loud", "calm"]
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["Class"] == "high" and row["Std"] == "3.00" and row["rl"] == "4.00"
    assert row["Repeats"] == 9


# ------------------------------------------------------------------------------------------------
# Scripts


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["ABCD what is the answer 1 2 3 4"], 280)


def save_model(tokenizer, stage, tag, step, seed, **inputs):
    """A checkpoint of an untrained model of the embedded world."""
    cfg = replace(TINY, vocab_size=tokenizer.vocab_size, max_seq_len=192)
    model = lively(build_model(cfg, torch.device("cpu"), torch.float32, seed))
    state = {
        "stage": stage,
        "source": {"dataset": "embedded"},
        "provenance": {"run_id": "run-1", "seed": 0, "inputs": {"tokenizer": "t", **inputs}},
    }
    return save_checkpoint(stage_folder(stage) / tag, step, model, None, tokenizer, state, keep=9)


def evaluate(stage, tag, temperature=0.0, **settings):
    sampling = Sampling(6, temperature, 50)
    chat_eval.main(
        chat_eval.ChatEval(
            source=stage, model_tag=tag, machine=CPU, max_problems=12, sampling=sampling, **settings
        )
    )


def test_chat_eval_uses_the_saved_repeats(base, tokenizer, capsys):
    for stage in ("sft", "rl"):
        save_model(tokenizer, stage, "d2", 5, seed=ord(stage[0]))
    eval_variance.main(
        eval_variance.EvalVariance(
            task_name="world_facts|world_choice",
            max_problems=12,
            sampling=Sampling(6, 1.0, 50),
            machine=CPU,
        )
    )
    record = read_json(base / "report" / "evaluation-variance.json")
    assert (
        list(load_variances()) == ["World-Facts"] and load_variances()["World-Facts"].num_runs == 3
    )
    assert record["tables"][0]["columns"][5:7] == ["sft", "rl"]
    assert record["provenance"]["inputs"].keys() == {"sft", "rl"}
    assert "Evaluation variance (points)" in (base / "report.md").read_text()
    save_variances([Variance("World-Facts", 12, 3, (0.02,), 0.02)])
    evaluate("sft", "d2", task_name="World-Facts", temperature=1.0)
    value = read_json(base / "report" / "chat-evaluation-sft.json")["values"]["World-Facts"]
    assert value["k"] == 4 and value["n"] == 12
    assert "4 answers each" in capsys.readouterr().out


def test_eval_variance_rejects_settings_without_variance():
    for settings in ({"runs": 1}, {"sampling": Sampling(temperature=0.0)}):
        with pytest.raises(ValueError, match="otherwise nothing varies"):
            eval_variance.EvalVariance(**settings)
    with pytest.raises(MissingInput):
        eval_variance.main(eval_variance.EvalVariance(machine=CPU))


def test_metrics_record_items_repeats_and_both_errors(base, tokenizer):
    save_model(tokenizer, "sft", "d2", 5, seed=1)
    names = "world_choice|world_facts"
    path = base / "report" / "chat-evaluation-sft.json"
    evaluate("sft", "d2", task_name=names)
    for value in (read_json(path)["values"][name] for name in ("World-Choice", "World-Facts")):
        assert (value["n"], value["k"], value["repeat_se"]) == (12, 1, 0.0)
        assert value["item_se"] == value["se"]
    evaluate("sft", "d2", task_name="world_facts", temperature=1.0)
    once = read_json(path)["values"]["World-Facts"]
    assert once["k"] == 1 and once["item_se"] is None and once["repeat_se"] is None
    evaluate("sft", "d2", task_name="world_facts", temperature=1.0, num_samples=3)
    thrice = read_json(path)["values"]["World-Facts"]
    assert thrice["k"] == 3
    assert thrice["se"] == pytest.approx(math.hypot(thrice["item_se"], thrice["repeat_se"]))
    assert read_json(path)["values"]["World-Choice"]["k"] == 1  # from the earlier call


def test_checkpoints_are_compared_on_paired_items(base, tokenizer, capsys):
    for step, seed in ((5, 1), (10, 2)):
        save_model(tokenizer, "base", "d2", step, seed)
        base_eval.main(
            base_eval.BaseEval(
                model_tag="d2", model_step=step, suite="embedded", max_per_task=10, machine=CPU
            )
        )
        evaluate("base", "d2", step=step, task_name="world_choice")
    compare.main(compare.Compare("base:d2:5", "base:d2:10"))
    (path,) = (base / "report").glob("comparison-of-*.json")
    record = read_json(path)
    rows = {row[0]: row for row in record["tables"][0]["rows"]}
    assert record["section"] == "Comparison of base:d2:5 and base:d2:10"
    assert {"World few-shot", "World-Choice", "world_sums"} <= rows.keys()
    assert all("won" in row[5] for row in rows.values())  # every metric is paired
    assert {row[4] for row in rows.values()} <= {"better", "worse", "within noise"}
    old, new = (
        [
            r
            for r in records_of(base)
            if r["provenance"]["inputs"].get("base") == print_ and "CORE metric" in r["values"]
        ][0]
        for print_ in (parse_checkpoint_ref(f"base:d2:{step}").fingerprint for step in (5, 10))
    )
    change = new["values"]["CORE metric"]["value"] - old["values"]["CORE metric"]["value"]
    assert float(rows["World few-shot"][2]) == pytest.approx(change, abs=1e-4)
    assert "World-Choice" in capsys.readouterr().out
    assert "Comparison of base:d2:5" in (base / "report.md").read_text()


def test_settings_are_compared_over_seeds(base, tokenizer, capsys):
    for arm, bpbs in {"a": (1.0, 1.01, 0.99), "b": (0.8, 0.81, 0.79)}.items():
        for seed, bpb in enumerate(bpbs):
            save_model(tokenizer, "base", f"{arm}{seed}", 5, seed)
            log = stage_folder("base") / f"{arm}{seed}" / METRICS_FILE
            log.write_text(f'{{"step": 0, "val_bpb": 3.0}}\n{{"step": 5, "val_bpb": {bpb}}}\n')
            evaluate("base", f"{arm}{seed}", task_name="world_choice")
    a, b = (",".join(f"base:{arm}{seed}" for seed in range(3)) for arm in "ab")
    compare.main(compare.Compare(a, b))
    (path,) = (base / "report").glob("comparison-of-*.json")
    rows = {row[0]: row for row in read_json(path)["tables"][0]["rows"]}
    assert rows.keys() == {"val_bpb", "World-Choice"}
    # bar: Student's t at 4 degrees of freedom x 0.01 x sqrt(2 / 3)
    assert rows["val_bpb"][1:5] == ["1.0000 (3 seeds)", "0.8000 (3 seeds)", "-0.2000", "0.0227"]
    assert rows["val_bpb"][6] == "better" and rows["World-Choice"][6] == "within noise"
    assert "val_bpb" in capsys.readouterr().out
    compare.main(compare.Compare(a, a.replace("base:a0,", "")))  # other numbers of seeds
    with pytest.raises(MissingInput, match="model_tag=c0"):
        compare.main(compare.Compare(a, "base:c0"))


def test_checkpoints_of_runs_are_scored_on_the_suite(base, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(canaries, "BUILTIN", {"world_choice": 8, "world_spelling": 3})
    saved = [save_model(tokenizer, "base", "d2", step, step) for step in (5, 10)]
    save_model(tokenizer, "sft", "d2", 7, 1, base=saved[1].fingerprint)
    runs = compare.Compare(all="base:d2, sft:d2")
    compare.main(runs)
    record = read_json(base / "report" / "suite.json")
    [table] = record["tables"]
    assert table["columns"][2:5] == ["World-Choice", "World-Spelling", "All"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [(row["Run"], row["Step"], row["From"]) for row in rows] == [
        *(("base:d2", "5", "-"), ("base:d2", "10", "base:d2:5"), ("sft:d2", "7", "base:d2:10"))
    ]
    assert record["values"]["sft:d2:7"]["n"] == 11
    assert [len(points) for points in record["series"].values()] == [2, 1]
    assert "| sft:d2 | 7" in capsys.readouterr().out and "Suite" in (base / "report.md").read_text()

    compare.main(compare.Compare(all="sft:d2,base:d2"))  # the parent is listed last
    [other] = read_json(base / "report" / "suite.json")["tables"]
    columns = [other["columns"].index(name) for name in ("Run", "From")]
    assert [other["rows"][0][n] for n in columns] == ["sft:d2", "base:d2:10"]

    compare.main(compare.Compare(all="base:d2, sft:d2, sft:d2"))  # a run that is listed twice
    [other] = read_json(base / "report" / "suite.json")["tables"]
    assert other["rows"] == [*table["rows"], table["rows"][-1]]
    with pytest.raises(MissingInput, match="no checkpoint in"):
        compare.main(compare.Compare(all="sft:d3"))


def records_of(base):
    from nanochat.records import read_history

    return read_history(base / "report")


def test_compare_reports_missing_scores_with_the_command(base, tokenizer):
    save_model(tokenizer, "base", "d2", 5, 1)
    save_model(tokenizer, "sft", "d2", 7, 1)
    with pytest.raises(MissingInput, match="scripts.base_eval --model_tag=d2 --model_step=5"):
        compare.main(compare.Compare("base", "sft"))
    evaluate("sft", "d2", task_name="world_choice")
    evaluate("base", "d2", task_name="world_facts")
    with pytest.raises(ValueError, match="World-Facts.*World-Choice.*same tasks"):
        compare.main(compare.Compare("base", "sft"))
    with pytest.raises(MissingInput, match="--hf_path=gpt2"):
        compare.main(compare.Compare("hf:gpt2", "sft"))
    with pytest.raises(ValueError, match="the same"):
        compare.main(compare.Compare("sft", "sft"))


def test_scores_of_a_hub_model_are_of_its_newest_revision(base):
    both = {"CORE metric": 0.1, "val bpb": 1.0}
    for revision, values in (("old", both), ("new", {"val bpb": 0.9})):
        made = Provenance(revision, 0, {"hf": revision})
        write_record("Evaluation of gpt2", {}, values, made, Cost(1.0))
    found = compare.find_run("hf:gpt2", None, with_log=False)
    assert (found.values, found.run_id) == ({"val bpb": 0.9}, "new")


@pytest.mark.parametrize("name", ["d4", "base:d4:x", "sft:a:1:2", ""])
def test_invalid_checkpoint_ref_is_rejected(base, name):
    with pytest.raises(ValueError, match="stage"):
        parse_checkpoint_ref(name)
