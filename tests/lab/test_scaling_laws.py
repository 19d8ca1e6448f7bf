"""Scaling laws: planted laws are recovered, intervals cover them, plans repeat no text."""

import math

import numpy as np
import pytest

from nanochat.common import read_json
from nanochat.lab.scaling_law import Point, best_sizes, fit_law, losses, show_interval

E, A, ALPHA, B, BETA = 1.0, 60.0, 0.35, 200.0, 0.4
LAW = np.array([[E, A, ALPHA, B, BETA]])
BUDGETS = (3e13, 1e14, 3e14, 1e15)


def planted(noise=0.0, seed=0):
    """Points of the law around the best size of each budget, with relative noise."""
    rng, points = np.random.default_rng(seed), []
    for budget in BUDGETS:
        for depth, n in enumerate(best_sizes(LAW, budget)[0] * np.geomspace(1 / 3, 3, 5)):
            loss = losses(LAW, n, budget / 6 / n)[0] * (1 + noise * rng.normal())
            points.append(Point(budget, depth, n, budget / 6 / n, loss))
    return points


def test_planted_law_and_best_sizes_are_recovered():
    law = fit_law(planted())
    assert law is not None
    assert law[0, [0, 2, 4]] == pytest.approx(LAW[0, [0, 2, 4]], rel=0.05)
    # two orders of magnitude beyond
    assert losses(law, 1e9, 1e10)[0] == pytest.approx(losses(LAW, 1e9, 1e10)[0], rel=0.01)
    n, loss = best_sizes(LAW, 1e14)
    for other in (0.8 * n, 1.25 * n):
        assert losses(LAW, other, 1e14 / 6 / other) > loss
    noisy = fit_law(planted(noise=0.001))
    assert noisy is not None
    for budget in BUDGETS:
        found = best_sizes(noisy, budget)[0]
        assert found[0] == pytest.approx(best_sizes(LAW, budget)[0][0], rel=0.25)
        assert found[1:].min() < found[0] < found[1:].max()


def test_projection_intervals_cover_the_truth():
    n, inside = best_sizes(LAW, 1e17)[0][0], 0
    tokens = 1e17 / 6 / n
    for seed in range(8):
        law = fit_law(planted(noise=0.003, seed=seed), seed)
        assert law is not None
        low, high = np.percentile(losses(law, n, tokens)[1:], (2.5, 97.5))
        inside += low <= losses(LAW, n, tokens)[0] <= high
    assert inside >= 6  # 95% of 8, less the noise of so few trials
    assert show_interval(np.array([5.0, *range(1001)])) == "5 (25 to 975)"
    assert "error unknown" in show_interval(np.array([1.0, math.nan]))


@pytest.mark.parametrize("points", [planted()[:6], [p for p in planted() if p.budget == 1e15] * 2])
def test_too_few_runs_have_no_law(points):
    assert fit_law(points) is None


# ---- The command ---------------------------------------------------------------------------------

SERIES = "lab.scaling_laws --max_seq_len=32 --devices=2 --depths=1,2,3,4".split()


def test_series_trains_its_plan_and_recovers_the_planted_losses(planted_runs, base, command):
    arms, budgets = "--arms=default|--matrix_lr=0.01", "--budgets=1e11,2e11,5e11"
    command.works(*SERIES, arms, budgets, "--project=6")
    record = read_json(base / "report" / "scaling-laws.json")
    tables = {table["title"].split(":")[0]: table["rows"] for table in record["tables"]}
    runs = tables["Runs"]
    plans = [[(row[1], row[2]) for row in runs if row[0] == arm] for arm in arms[7:].split("|")]
    assert plans[0] == plans[1] and 8 <= len(plans[0]) < 12  # some would repeat text
    for row in runs:
        n, tokens, loss = map(float, row[3:])
        assert loss == pytest.approx(losses(LAW, n, tokens)[0], abs=1e-3)
    sizes, beyond = tables["Best size by FLOPs"], tables["Projections"]
    assert [row[4][0] for row in sizes] == ["-"] * 3 + ["0"] * 3  # both arms have the same law
    assert [row[:2] for row in beyond] == [[arm, 6] for arm in arms[7:].split("|")]
    assert {"Law", "Device time"} < tables.keys()
    assert len((base / "sweeps/scaling/points.csv").read_text().splitlines()) == len(runs) + 1
    logs = "".join(path.read_text() for path in base.glob("sweeps/runs/*/log.txt"))
    assert "--seed=0 " in logs and "--seed=100 " in logs and "--matrix_lr=0.01" in logs
    figure = (base / "sweeps/scaling/scaling-laws.svg").read_text()
    assert "matrix_lr=0.01" in figure and len(figure) < 60_000
    assert command.works(*SERIES, arms, budgets).count("done, 0 to go") == 3


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--budgets=1e15,2e15", "only 0 runs can train on 256 rows or more without repeating"),
        ("--budgets=1e9,2e9", "use other --budgets"),
        ("--budgets=1e11", "a law needs 7 of each arm, at two budgets"),
        ("--depths=4,0", "depths must be positive"),
        ("--budgets=nan", "budgets must be positive"),
        ("--arms=default|default", "lists an arm twice"),
    ],
)
def test_unusable_series_is_rejected(trained, command, flags, message):
    assert message in command.rejects(*SERIES, *flags.split())
