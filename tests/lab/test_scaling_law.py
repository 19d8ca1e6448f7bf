"""Scaling laws: planted laws are recovered, intervals cover them, plans repeat no text."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat.common import UsageError
from nanochat.lab.scaling_law import (
    Point,
    Projection,
    fit_law,
    fit_minima,
    interval,
    scaling_figure,
)
from scripts.lab import scaling_laws
from scripts.lab.scaling_laws import Planned, ScalingLaws, arm_config, make_job, plan_runs

E, A, ALPHA, B, BETA = 1.0, 60.0, 0.35, 200.0, 0.4
BUDGETS = (3e13, 1e14, 3e14, 1e15)


def planted(noise=0.0, seed=0, span=3.0, num_sizes=5):
    """Points of a known law around the best N of each budget, with relative noise."""
    rng, points = np.random.default_rng(seed), []
    for budget in BUDGETS:
        best = best_n(budget)
        for depth, n in enumerate(np.geomspace(best / span, best * span, num_sizes)):
            tokens = budget / (6 * n)
            loss = E + A * n**-ALPHA + B * tokens**-BETA
            points.append(Point(budget, depth, n, tokens, loss * (1 + noise * rng.normal())))
    return points


def best_n(budget):
    """Size with the lowest planted loss: the derivative along the budget is 0."""
    return ((ALPHA * A) / (BETA * B) * (budget / 6) ** BETA) ** (1 / (ALPHA + BETA))


def test_planted_law_is_recovered_without_noise():
    law = fit_law(planted())
    found = law.parameters()
    assert found["alpha"].value == pytest.approx(ALPHA, rel=0.05)
    assert found["beta"].value == pytest.approx(BETA, rel=0.05)
    assert found["E"].value == pytest.approx(E, rel=0.05)
    assert law.residual < 1e-3
    n, tokens = 1e9, 1e10  # two orders of magnitude beyond
    truth = E + A * n**-ALPHA + B * tokens**-BETA
    assert law.loss(n, tokens).value == pytest.approx(truth, rel=0.01)


def test_projection_intervals_cover_the_truth():
    n, tokens = best_n(1e17), 1e17 / 6 / best_n(1e17)
    truth = E + A * n**-ALPHA + B * tokens**-BETA
    inside = 0
    for seed in range(10):
        found = fit_law(planted(noise=0.003, seed=seed), seed).loss(n, tokens)
        assert found.low < found.value < found.high
        inside += found.low <= truth <= found.high
    assert 8 <= inside  # 95% of 10, less the noise of so few trials


def test_minima_are_the_planted_ones_and_their_exponent():
    minima = fit_minima(planted(noise=0.001, span=2.0))
    assert [each.budget for each in minima] == list(BUDGETS) and all(m.inside for m in minima)
    for each in minima:
        assert each.n.value == pytest.approx(best_n(each.budget), rel=0.25)
        assert each.n.low < each.n.value < each.n.high


def test_minimum_outside_of_the_sizes_is_no_minimum():
    half = [p for p in planted(num_sizes=9) if p.n > 1.2 * best_n(p.budget)]
    minima = fit_minima(half)
    assert len(minima) == 4 and not any(each.inside for each in minima)


@pytest.mark.parametrize("points", [planted()[:6], [p for p in planted() if p.budget == 1e15] * 2])
def test_too_few_runs_have_no_law(points):
    assert fit_law(points) is None


def test_fitted_coefficients_are_never_negative():
    noise = planted(noise=0.2, seed=3)
    assert (fit_law(noise).samples >= 0).all()


def test_figure_names_budgets_arms_and_projected_depths():
    arms = {"default": planted(noise=0.002), "--matrix_lr=0.01": planted(noise=0.002, seed=1)}
    minima = {arm: fit_minima(points) for arm, points in arms.items()}
    law = fit_law(arms["default"])
    ahead = Projection("default", 12, 1e18, law.loss(1e8, 1.6e9), 3.0)
    image = scaling_figure(arms, minima, [ahead]).decode()
    drawn = [text.strip() for text in re.findall("<!--(.*?)-->", image)]
    for text in ("3e+13", "1e+15", "- -matrix_lr=0.01", "d12", "1e+18"):
        assert text in drawn, text
    assert "Lowest validation bpb; projections with 95% intervals" in drawn


def test_interval_of_unknown_samples_is_unknown():
    assert math.isnan(interval(1.0, np.array([math.nan])).low)


# ---- The plan ------------------------------------------------------------------------------------


class Text:
    """A corpus of a given number of rows."""

    def __init__(self, rows, vocab_size=512, T=64):
        one = SimpleNamespace(max_seq_len=T, epochs_for=lambda needed: needed / rows)
        self.rows, self.packed = {"text": one}, []
        self.tokenizer = SimpleNamespace(vocab_size=vocab_size)

    def resolve_amounts(self, rows, machine):
        return None, {"text": rows}

    def pack(self, needed, machine):
        self.packed.append(needed["text"])


CFG = ScalingLaws(flags="--max_seq_len=64", depths=(1, 2, 3, 4), depths_per_budget=3)


def test_no_planned_run_repeats_text(machine):
    arms, budgets = ["default", "--matrix_lr=0.01"], [3e11, 1e12]
    cfg = replace(CFG, arms="|".join(arms))
    planned = plan_runs(cfg, budgets, Text(10**6), machine)
    assert [run.budget for run in planned] == sorted(run.budget for run in planned)
    assert {run.arm for run in planned} == set(arms)
    by_arm = [[(r.budget, r.depth) for r in planned if r.arm == arm] for arm in arms]
    assert by_arm[0] == by_arm[1] and len(by_arm[0]) == 6
    seeds = [{run.seed for run in planned if run.arm == arm} for arm in arms]
    assert seeds == [{0}, {100}]  # arms share no seeds
    few = plan_runs(cfg, [1e12], Text(10_000), machine)
    assert {run.depth for run in few} == {2, 3, 4}, "depth 1 would need more rows than there are"


def test_budget_without_enough_depths_names_the_fix(machine):
    with pytest.raises(UsageError, match="would repeat the text"):
        plan_runs(CFG, [1e15], Text(1000), machine)
    with pytest.raises(UsageError, match="depth 4 would train on . rows"):
        plan_runs(CFG, [1e9], Text(1000), machine)


def test_flags_of_an_arm_reach_its_model_and_its_job():
    arm = "--matrix_lr=0.01 --window_pattern=SL"
    settings = arm_config(CFG, arm, 4)
    assert (settings.depth, settings.train.optim.matrix_lr, settings.window_pattern) == (
        4,
        0.01,
        "SL",
    )
    assert arm_config(CFG, "default", 4).window_pattern is None
    job = make_job(CFG, Planned(arm, 1e12, 4, 100), {"rows": "abc"})
    (words,) = job.commands
    assert {"--matrix_lr=0.01", "--window_pattern=SL", "--target_flops=1e+12", "--seed=100"} < set(
        words
    )
    assert job.starts_from == {"rows": "abc"}


def test_budgets_follow_from_hours_and_are_kept(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(scaling_laws, "estimate_seconds", lambda model, tokens, machine: 1e-4)
    sweep, text = SimpleNamespace(folder=tmp_path), Text(10**8)
    six = scaling_laws.choose_budgets(CFG, sweep, text, machine)
    assert len(six) == 4 and six == sorted(six)
    monkeypatch.setattr(scaling_laws, "estimate_seconds", lambda model, tokens, machine: 1e-3)
    assert scaling_laws.choose_budgets(CFG, sweep, text, machine) == six
    one = scaling_laws.choose_budgets(replace(CFG, hours=1), sweep, text, machine)
    assert one[-1] < six[-1] / 30  # a sixth of the hours at a tenth of the speed
    three = scaling_laws.choose_budgets(replace(CFG, hours=0.5), sweep, text, machine)
    few = scaling_laws.choose_budgets(replace(CFG, hours=0.1), sweep, text, machine)
    assert (len(three), len(few)) == (3, 2), (
        "the smallest of four would be too small for three depths"
    )
    with pytest.raises(UsageError, match=r"at 1.3e\+08(.|\n)*other --budgets or --hours"):
        scaling_laws.choose_budgets(replace(CFG, hours=0.001), sweep, text, machine)
    given = replace(CFG, budgets=(3e13, 1e13, 3e13))
    assert scaling_laws.choose_budgets(given, sweep, text, machine) == [1e13, 3e13]


@pytest.mark.parametrize(
    ("name", "value"),
    [("hours", 0), ("depths", (4, 0)), ("project", (-1,)), ("seeds", 0), ("depths_per_budget", 2)]
    + [
        ("budgets", (1e13, 0.0)),
        ("budgets", (math.nan,)),
        ("arms", "default|"),
        ("arms", "default|default"),
    ],
)
def test_wrong_settings_of_a_series_are_rejected(name, value):
    with pytest.raises(ValueError, match=name):
        ScalingLaws(**{name: value})


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"arms": "default|--num_iterations=20"}, "is set by the series"),
        ({"arms": "default|--num-iterations=20"}, "is set by the series"),
        ({"flags": "--depth=4"}, "is set by the series"),
        ({"arms": "default|--max-seq-len=64"}, "belongs in --flags"),
    ],
)
def test_flags_that_the_plan_needs_are_rejected(settings, fix):
    with pytest.raises(ValueError, match=fix):
        ScalingLaws(**settings)


def test_straight_curves_and_few_sizes_have_no_known_minimum():
    n = np.geomspace(1e6, 4e6, 5)
    straight = [Point(1e13, i, x, 1e13 / 6 / x, 3 - 0.1 * math.log(x)) for i, x in enumerate(n)]
    assert not fit_minima(straight)[0].inside
    (minimum, *_) = fit_minima(planted(num_sizes=3))
    assert minimum.inside and "error unknown" in str(minimum.n)
