"""Evaluation variance and comparisons by their commands."""

import pytest

from nanochat import stats
from nanochat.common import read_json
from nanochat.lab.significance import Contrast, Recorded, contrasts, holm, t_test
from nanochat.records import item_scores
from scripts.lab.compare import is_shared
from scripts.lab.eval_variance import sampling_std

EVAL = "chat_eval -x 12 --max_new_tokens=6 --dtype=float32".split()


def comparison(base):
    [path] = (base / "report").glob("comparison-of-*.json")
    return {row[0]: row for row in read_json(path)["tables"][0]["rows"]}


def test_sampling_error_is_found_among_items():
    rates = [0.0, 0.5, 0.5, 1.0]  # all outcomes of two answers that are right with probability 0.5
    assert sampling_std(rates, 2) == pytest.approx((0.5 * 0.5 / len(rates)) ** 0.5)


def test_variance_of_sampled_answers_is_measured(tuned, command):
    measure = ["lab.eval_variance", "--checkpoints=sft:s0|sft:s1"]
    assert "chat_eval -i sft -g s0 -s 20" in command.rejects(*measure)
    command.works(*EVAL, "-a", "world_facts", "-g", "s1")  # greedy
    assert "share no task" in command.rejects("lab.eval_variance", "--checkpoints=sft:s1")
    for tag in ("s0", "s1"):
        sampled = [*EVAL, "-a", "world_facts|world_choice", "-g", tag, "-t", "1", "-n", "3"]
        assert "3 answers each" in command.works(*sampled)
    command.works(*measure)
    [row] = read_json(tuned / "report" / "evaluation-variance.json")["tables"][0]["rows"]
    assert row[1:4] == ["World-Facts", 12, 3]  # letters do not vary
    command.works(*EVAL, "-a", "world_facts", "-g", "s0")
    command.works(*measure)
    command.works("lab.compare", "--before=sft:s0", "--after=sft:s1")
    assert "World-Facts" in comparison(tuned)  # of the greedy answers


def test_models_are_compared_on_paired_items(tuned, command):
    pair = ["lab.compare", "--before=base:one:8", "--after=base:one:20"]
    out = command.rejects(*pair)
    assert "scripts.chat_eval -i base -g one -s 8" in out
    core = {}
    for step in (8, 20):
        flags = f"--model_tag=one --model_step={step} --suite=embedded --max_per_task=10"
        command.works("base_eval", *flags.split(), "--dtype=float32")
        values = read_json(tuned / "report" / "base-model-evaluation.json")["values"]
        core[step] = values["World few-shot"]["value"]
        command.works(*EVAL, "-i", "base", "-g", "one", "-s", str(step), "-a", "world_choice")
    command.works(*pair)
    rows = comparison(tuned)
    assert {"World few-shot", "World-Choice", "world_sums"} <= rows.keys()
    assert all("won" in row[5] for row in rows.values())  # paired
    assert float(rows["World few-shot"][2]) == pytest.approx(core[20] - core[8], abs=1e-4)
    command.works(*EVAL, "-i", "sft", "-g", "s0", "-a", "world_facts")
    for before, fix in ("base:one:8", "on the same tasks"), ("sft:s0", "compared with itself"):
        assert fix in command.rejects("lab.compare", f"--before={before}", "--after=sft:s0")


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


def test_scores_on_other_items_are_not_compared():
    one, other = (Recorded({"x": 0.5}, {"x": {"of": items}}) for items in "ab")
    assert is_shared("x", one, one) and not is_shared("x", one, other)


def test_checkpoints_of_runs_are_scored_on_the_static_suite(tuned, command):
    every = "--all=base:one, sft:s0"
    for step in (4, 8, 12, 16):
        (tuned / f"base_checkpoints/one/step_{step:06d}").rename(tuned / f"old_{step}")
    command.works("lab.compare", every)
    rows = read_json(tuned / "report" / "suite.json")["tables"][0]["rows"]
    assert [row[:2] for row in rows] == [["base:one", "20"], ["sft:s0", "20"]]
    assert "+0.000 ± 0.000" in rows[0]
    assert "no checkpoint in" in command.rejects("lab.compare", "--all=sft:none")


# ---- Significance --------------------------------------------------------------------------------


def runs(metric, values, **items):
    """Recorded runs with these values of a metric, and equal item scores."""
    return [Recorded({metric: value}, items) for value in values]


@pytest.mark.parametrize("df, t", [(1, 12.706), (3, 3.182), (30, 2.042), (999, 1.962)])
def test_students_t_matches_published_tables(df, t):
    bar, p = t_test(t, [(1.0, df)])
    assert bar == pytest.approx(t, abs=1e-3) and p == pytest.approx(0.05, abs=1e-4)
    assert t_test(-t, [(1.0, df)])[1] == p
    assert t_test(0.1, [(0.0, df)]) == (0.0, 0.0)


def test_holm_corrects_for_multiple_comparisons():
    def corrected(*ps):
        found = [Contrast("d4", "x", "bpb", 0.0, 0.2, 0.1, p) for p in ps]
        return [(pytest.approx(c.p), c.verdict) for c in holm(found)]

    noise = "within noise"
    assert corrected(0.01, 0.04, 0.03) == [(0.03, "worse"), (0.06, noise), (0.06, noise)]
    assert corrected(0.5, 0.9) == [(1.0, noise)] * 2 and corrected() == []


def test_variance_is_pooled_over_arms():
    values = {"control": [1.0, 3.0], "x": [10.0, 12.0, 14.0], "y": [5.0]}
    found = contrasts("d4", "bpb", {arm: runs("bpb", each) for arm, each in values.items()})
    assert [c.arm for c in found] == ["y", "x"]  # the smallest loss first
    bars = [3.182 * (10 / 3 * (1 / n + 1 / 2)) ** 0.5 for n in (1, 3)]
    assert [c.bar for c in found] == pytest.approx(bars, rel=1e-3)


def test_what_a_seed_does_to_both_arms_is_not_noise_if_paired():
    values = {"control": [1.0, 2.0, 3.0], "x": [1.10, 2.12, 3.11]}
    arms = {arm: runs("bpb", each) for arm, each in values.items()}
    [alone], [paired] = (contrasts("d4", "bpb", arms, each) for each in (False, True))
    assert alone.verdict == "within noise" and paired.verdict == "worse"
    # Student's t at 2 degrees of freedom x the standard error of 0.10, 0.12 and 0.11
    assert paired.bar == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)


def test_paired_items_add_their_variance():
    hard = [float(i % 2) for i in range(200)]
    few = [1.0 if i < 10 else x for i, x in enumerate(hard)]  # 5 more items are correct

    for clusters, n, verdict in ((), 200, "better"), ([*range(20)] * 10, 20, "within noise"):
        clusters = sorted(map(str, clusters))  # all 5 of one cluster
        arms = {
            arm: runs("ARC", [sum(x) / 200] * 2, ARC=item_scores(range(200), x, clusters))
            for arm, x in (("control", hard), ("x", few))
        }
        [found] = contrasts("d4", "ARC", arms)
        assert found.difference == pytest.approx(0.025) and found.verdict == verdict
        se = stats.compare(hard, few, clusters).se
        assert found.bar == pytest.approx(t_test(0.0, [(se**2, n - 1)])[0])
