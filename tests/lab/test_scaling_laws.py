"""Scaling laws: planted laws are recovered, intervals cover them, plans repeat no text."""

import numpy as np
import pytest

from nanochat.common import read_json
from scripts.lab.scaling_laws import best_sizes, fit_law, losses

E, A, ALPHA, B, BETA = 1.0, 60.0, 0.35, 200.0, 0.4
LAW = np.array([[E, A, ALPHA, B, BETA]])
BUDGETS = (3e13, 1e14, 3e14, 1e15)


def planted(noise=0.0, seed=0):
    """Sizes, tokens and losses around the best size of each budget, with relative noise."""
    n = np.concatenate([best_sizes(LAW, x)[0] * np.geomspace(1 / 3, 3, 5) for x in BUDGETS])
    tokens = np.repeat(BUDGETS, 5) / 6 / n
    exact = E + A * n**-ALPHA + B * tokens**-BETA
    return n, tokens, exact * (1 + noise * np.random.default_rng(seed).normal(size=20))


def test_planted_law_and_best_sizes_are_recovered():
    law = fit_law(*planted())
    assert law[0, [0, 2, 4]] == pytest.approx(LAW[0, [0, 2, 4]], rel=0.05)
    # two orders of magnitude beyond
    assert losses(law, 1e9, 1e10)[0] == pytest.approx(losses(LAW, 1e9, 1e10)[0], rel=0.01)
    n, loss = best_sizes(LAW, 1e14)
    for other in (0.8 * n, 1.25 * n):
        assert losses(LAW, other, 1e14 / 6 / other) > loss


# ---- The command ---------------------------------------------------------------------------------

SERIES = "lab.scaling_laws --max_seq_len=32 --devices=2 --depths 1 2 3 4".split()


def test_series_trains_its_plan_and_recovers_the_planted_losses(planted_runs, base, command):
    arms, budgets = "--arms=default|--matrix_lr=0.01", "--budgets 1e11 2e11 5e11".split()
    command.works(*SERIES, arms, *budgets, "--project=6")
    record = read_json(base / "report" / "scaling-laws.json")
    tables = {table["title"].split(":")[0]: table["rows"] for table in record["tables"]}
    runs = tables["Runs"]
    plans = [[(row[1], row[2]) for row in runs if row[0] == arm] for arm in arms[7:].split("|")]
    assert plans[0] == plans[1] and 8 <= len(plans[0]) < 12  # some would repeat text
    for row in runs:
        n, tokens, loss = map(float, row[3:])
        assert loss == pytest.approx(losses(LAW, n, tokens)[0], abs=1e-3)
    sizes = tables["Best size by FLOPs"]
    assert all(row[4].startswith("0 ") for row in sizes)  # both arms have the same law
    assert {"Law", "Device time", "Projections"} < tables.keys()
    assert "done, 0 to go" in command.works(*SERIES, arms, *budgets)
