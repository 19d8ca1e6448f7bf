"""Scaling laws: planted laws are recovered, intervals cover them, plans repeat no text."""

import math

import numpy as np
import pytest

from nanochat.common import read_json
from nanochat.lab.scaling_law import Point, fit_law, fit_minima, interval

E, A, ALPHA, B, BETA = 1.0, 60.0, 0.35, 200.0, 0.4
BUDGETS = (3e13, 1e14, 3e14, 1e15)


def law_of(n, tokens):
    return E + A * n**-ALPHA + B * tokens**-BETA


def best_n(budget):
    """Size with the lowest planted loss: the derivative along the budget is 0."""
    return ((ALPHA * A) / (BETA * B) * (budget / 6) ** BETA) ** (1 / (ALPHA + BETA))


def planted(noise=0.0, seed=0, span=3.0, num_sizes=5):
    """Points of the law around the best size of each budget, with relative noise."""
    rng, points = np.random.default_rng(seed), []
    for budget in BUDGETS:
        sizes = np.geomspace(best_n(budget) / span, best_n(budget) * span, num_sizes)
        for depth, n in enumerate(sizes):
            loss = law_of(n, budget / (6 * n)) * (1 + noise * rng.normal())
            points.append(Point(budget, depth, n, budget / (6 * n), loss))
    return points


def test_planted_law_is_recovered():
    law = fit_law(planted())
    assert law is not None and law.residual < 1e-3
    found = law.parameters()
    for name, value in (("E", E), ("alpha", ALPHA), ("beta", BETA)):
        assert found[name].value == pytest.approx(value, rel=0.05)
    # two orders of magnitude beyond
    assert law.loss(1e9, 1e10).value == pytest.approx(law_of(1e9, 1e10), rel=0.01)
    noisy = fit_law(planted(noise=0.2, seed=3))
    assert noisy is not None and (noisy.samples >= 0).all()


def test_projection_intervals_cover_the_truth():
    n, tokens, inside = best_n(1e17), 1e17 / 6 / best_n(1e17), 0
    for seed in range(10):
        law = fit_law(planted(noise=0.003, seed=seed), seed)
        assert law is not None
        found = law.loss(n, tokens)
        assert found.low < found.value < found.high
        inside += found.low <= law_of(n, tokens) <= found.high
    assert inside >= 8  # 95% of 10, less the noise of so few trials
    assert math.isnan(interval(1.0, np.array([math.nan])).low)


@pytest.mark.parametrize("points", [planted()[:6], [p for p in planted() if p.budget == 1e15] * 2])
def test_too_few_runs_have_no_law(points):
    assert fit_law(points) is None


def test_minima_are_the_planted_ones():
    minima = fit_minima(planted(noise=0.001, span=2.0))
    assert [each.budget for each in minima] == list(BUDGETS) and all(m.inside for m in minima)
    for each in minima:
        assert each.n.value == pytest.approx(best_n(each.budget), rel=0.25)
        assert each.n.low < each.n.value < each.n.high
    half = [p for p in planted(num_sizes=9) if p.n > 1.2 * best_n(p.budget)]
    straight = [p._replace(loss=3 - 0.1 * math.log(p.n)) for p in planted()]
    for points in (half, straight):
        assert not any(each.inside for each in fit_minima(points))
    few = fit_minima(planted(num_sizes=3))[0]
    assert few.inside and "error unknown" in str(few.n)


# ---- The command ---------------------------------------------------------------------------------

SERIES = "lab.scaling_laws --flags=--max_seq_len=32 --devices=2 --depths=1,2,3,4".split()


def test_series_trains_its_plan_and_recovers_the_planted_losses(planted_runs, base, command):
    arms = "--arms=default|--matrix_lr=0.01"
    command.works(*SERIES, arms, "--budgets=1e11,2e11,5e11", "--project=6")
    record = read_json(base / "report" / "scaling-laws.json")
    tables = {table["title"].split(":")[0]: table["rows"] for table in record["tables"]}
    runs = tables["Runs"]
    plans = [[(row[1], row[2]) for row in runs if row[0] == arm] for arm in arms[7:].split("|")]
    assert plans[0] == plans[1] and len(plans[0]) >= 8
    for row in runs:
        assert float(row[5]) == pytest.approx(law_of(float(row[3]), float(row[4])), abs=1e-3)
    assert {"Best size by FLOPs", "Fitted law", "Projections", "Device time"} < tables.keys()
    logs = "".join(path.read_text() for path in base.glob("sweeps/runs/*/log.txt"))
    assert "--seed=0 " in logs and "--seed=100 " in logs and "--matrix_lr=0.01" in logs
    figure = (base / "sweeps/scaling/scaling-laws.svg").read_text()
    for text in ("1e+11", "5e+11", "- -matrix_lr=0.01", "d6"):
        assert f"<!-- {text} -->" in figure or f"<!--  {text} -->" in figure
    assert f"{len(runs)} of {len(runs)} runs" in command.works(
        *SERIES, arms, "--budgets=1e11,2e11,5e11"
    )


def test_budgets_follow_from_the_hours_and_are_kept(planted_runs, base, command, monkeypatch):
    monkeypatch.setattr("nanochat.hardware.training_rate", lambda *device: 1.2e11)  # FLOP/s
    command.works(*SERIES, "--hours=0.01", "--depths_per_budget=3", "--cap_hours=1")
    plan = read_json(base / "sweeps/scaling/plan.json")
    assert plan["budgets"] == sorted(plan["budgets"]) and 2 <= len(plan["budgets"]) <= 4
    command.works(*SERIES, "--hours=0.01", "--depths_per_budget=3", "--cap_hours=1")
    assert read_json(base / "sweeps/scaling/plan.json") == plan


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--budgets=1e15", "would repeat the text"),
        ("--budgets=1e9", "depth 4 would train on"),
        ("--hours=1e-6", "other --budgets or --hours"),
        ("--hours=0", "hours must be positive"),
        ("--depths=4,0", "depths must be positive"),
        ("--budgets=nan", "budgets must be positive"),
        ("--depths_per_budget=2", "depths_per_budget must be at least 3"),
        ("--arms=default|default", "lists an arm twice"),
        ("--arms=default|--num-iterations=20", "is set by the series"),
        ("--flags=--depth=4", "is set by the series"),
        ("--arms=default|--max-seq-len=64", "belongs in --flags"),
    ],
)
def test_unusable_series_is_rejected(trained, command, flags, message):
    assert message in command.rejects(*SERIES, *flags.split())
