"""Value search: wide grid, tight grid, seeds, and rejection of edge optima."""

import math
import random
from statistics import fmean

import pytest

from nanochat.common import UsageError
from nanochat.lab.search import SearchConfig, inner_grid, log_grid, run_search, show_setting
from nanochat.lab.significance import expected_maximum

CFG = SearchConfig("lr", low=0.01, high=3.0)


def valley(optimum, noise=0.0, sign=1):
    """A mock scoring function with one optimum, and the list of its calls."""
    calls = []

    def tried(values, seeds):
        calls.append((list(values), list(seeds)))
        rng = {(v, s): random.Random(f"{v}-{s}") for v in values for s in seeds}
        return {
            v: [
                sign * (1 + 0.1 * math.log(v / optimum) ** 2) + rng[v, s].gauss(0, noise)
                for s in seeds
            ]
            for v in values
        }

    return tried, calls


def test_search_finds_the_best_value_and_uses_new_seeds():
    tried, calls = valley(0.2)
    found = run_search(CFG, tried, True, 3)
    assert 0.15 < found.chosen < 0.27
    (wide, first), (tight, second), (finals, seeds) = calls
    assert len(wide) == 10 and len(tight) == 4 and len(finals) == 2  # tight: 4 of 5 are new
    assert first == second == [0] and seeds == [1, 2, 3]
    assert min(wide) == 0.01 and max(wide) == 3.0
    assert all(sorted(wide)[3] < value < sorted(wide)[6] for value in tight)
    assert [row[-1] for row in found.table()["rows"]].count("chosen") == 1
    assert set(found.series()) == {"wide", "tight", "mean of seeds"}


def test_search_supports_higher_is_better():
    tried, _ = valley(0.2, sign=-1)
    assert 0.15 < run_search(CFG, tried, False, 3).chosen < 0.27


@pytest.mark.parametrize("optimum, flag", [(0.0001, "--low"), (50.0, "--high"), (0.01, "--low")])
def test_edge_optimum_error_suggests_a_fix(optimum, flag):
    tried, calls = valley(optimum)
    with pytest.raises(UsageError, match=f"may be outside the grid(.|\n)*extend it with {flag}"):
        run_search(CFG, tried, True, 3)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["finalists", "unit"])
def test_settings_below_one_are_rejected(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        SearchConfig("lr", **{name: 0})


def test_broken_runs_rank_last():
    tried, _ = valley(0.2)

    def breaking(values, seeds):
        return {v: [math.nan] if v > 1 else s for v, s in tried(values, seeds).items()}

    found = run_search(CFG, breaking, True, 3)
    assert 0.15 < found.chosen < 0.27
    assert ["broke" in row for row in found.table()["rows"]][-2:] == [True, True]
    with pytest.raises(ValueError, match="every run broke"):
        run_search(CFG, lambda values, seeds: {v: [math.nan] for v in values}, True, 3)


def test_finalist_with_a_broken_seed_is_not_chosen():
    tried, _ = valley(0.2)

    def breaking(values, seeds):
        found = tried(values, seeds)
        best = min(found, key=lambda v: found[v][0])
        return {v: [math.nan, *s[1:]] if v == best and seeds[0] else s for v, s in found.items()}

    found = run_search(CFG, breaking, True, 3)
    notes = [row[-1] for row in found.table()["rows"]]
    assert notes.count("chosen") == 1 and notes.count("1 of 3 broke") == 1
    assert len(found.series()["mean of seeds"]) == 2  # without the broken seed


def test_finalists_that_all_broke_once_are_compared_without_it():
    tried, _ = valley(0.2)

    def breaking(values, seeds):
        return {
            v: [*s[:-1], math.nan] if 0 not in seeds else s for v, s in tried(values, seeds).items()
        }

    found = run_search(CFG, breaking, True, 3)
    assert 0.15 < found.chosen < 0.27 and found.best_seed == 0 and found.inflation == 0
    rows, curve = found.table()["rows"], found.series()["mean of seeds"]
    [chosen] = [row for row in rows if row[-1].startswith("chosen")]
    assert all(chosen[3:6]) and found.chosen in [x for x, _ in curve]
    notes = [row[-1] for row in rows]
    assert notes.count("chosen, 1 of 3 broke") == notes.count("1 of 3 broke") == 1


def test_values_are_formatted_as_flags():
    assert [show_setting(x) for x in (1048576, 2.0, 0.06694)] == ["1048576", "2", "0.06694"]


def test_reported_inflation_matches_the_excess_of_the_best_seed():
    excess, reported = [], []
    for i in range(200):
        rng = random.Random(i)

        def tried(values, seeds, rng=rng):
            return {v: [abs(math.log(v / 0.2)) + rng.gauss(0, 0.05) for _ in seeds] for v in values}

        found = run_search(CFG, tried, True, 3)
        scores = found.finals[found.chosen]
        excess.append(fmean(scores) - scores[found.best_seed])
        reported.append(found.inflation)
    # the sample standard deviation of 3 values is 0.886 sigma on average
    assert fmean(excess) == pytest.approx(0.05 * expected_maximum(3), rel=0.15)
    assert fmean(reported) == pytest.approx(0.886 * fmean(excess), rel=0.15)


def test_grids_are_log_spaced_and_rounded_to_the_unit():
    assert log_grid(0.01, 1.0, 3) == [0.01, 0.1, 1.0]
    assert log_grid(1000, 16000, 5, unit=1024) == [1024, 2048, 4096, 8192, 15360 + 1024]
    assert inner_grid(1.0, 16.0, 3) == [2.0, 4.0, 8.0]
    for wrong in ((1.0, 0.1, 5), (0.0, 1.0, 5), (0.1, 1.0, 2)):
        with pytest.raises(ValueError, match="need n >= 3 and 0 < low < high"):
            log_grid(*wrong)
    with pytest.raises(ValueError, match="not distinct"):
        log_grid(1000, 2000, 5, unit=1024)
