"""The report's Reliability section: seeds, noise, accesses and cost of all runs."""

from nanochat.lab import reliability
from nanochat.lab.reliability import recipe_table, section_tables, seed_table


def record(section, seconds=60.0, own=None, seed=0, **values):
    return {
        "section": section,
        "values": values,
        "provenance": {"seed": seed},
        "cost": {"device_seconds": seconds, "own_device_seconds": own or seconds},
    }


def titles(records, history):
    return [table["title"] for table in section_tables(records, history, 0.0, [])["Reliability"]]


def test_accesses_to_final_benchmarks_are_listed(monkeypatch):
    records = [record("Chat SFT")]
    assert titles(records, records) == []
    monkeypatch.setattr(
        reliability.held_out, "read_access_log", lambda damaged: [{"benchmark": "x"}]
    )
    monkeypatch.setattr(reliability.held_out, "access_table", lambda: {"title": "Access"})
    assert titles(records, records) == ["Seeds", "Access"]


def test_recipe_compares_the_final_run_with_all_runs():
    base, evaluation = (
        record("Base model training", 600.0),
        record("Chat evaluation sft", 90.0, 30.0),
    )
    history = [base, base, record("Chat evaluation sft", 60.0), evaluation]
    ledger = [
        {"command": "scripts.chat_sft", "seconds": 300.0, "status": 0},
        {"command": "scripts.chat_eval", "seconds": 60.0, "status": 0},
        {"command": "scripts.chat_sft", "seconds": 120.0, "status": 1},
    ]
    rows = {
        row[0]: row[1:] for row in recipe_table([base, evaluation], history, ledger, 6.0)["rows"]
    }
    assert rows["Training"] == ["10.00m", "25.00m", "2.5", "$2.50"]
    assert rows["Evaluation"] == ["1.50m", "2.50m", "1.7", "$0.25"]
    assert rows["Lost to failures"] == ["0.00m", "2.00m", "-", "$0.20"]
    assert rows["All"][:3] == ["11.50m", "29.50m", "2.6"]


def test_only_sections_over_several_seeds_measure_seed_noise():
    one = [record("Evaluation variance"), record("Merge"), record("Recursion", Seeds=1)]
    assert seed_table(one)["rows"][-1] == ["several", "none: seed noise is unknown"]
    several = [record("Parameter golf", Seeds=3), record("Recursion", Seeds=2)]
    assert seed_table([*one, *several])["rows"][-1] == ["several", "Parameter golf, Recursion"]


def test_seeds_and_recipe_tables_are_listed():
    records = [record("Chat SFT"), record("Sweep lr", seed=3)]
    found = seed_table(records)
    assert found["rows"] == [["0", "Chat SFT"], ["3", "Sweep lr"], ["several", "Sweep lr"]]
    assert titles(records, records) == ["Seeds"]
    assert titles(records, [*records, records[0]])[-1] == "Final run against recipe"
    assert titles([], []) == []
