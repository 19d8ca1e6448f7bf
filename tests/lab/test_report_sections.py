"""The sections that several records make together: data mix, reliability, what all cost."""

from nanochat.lab import report_sections
from nanochat.lab.report_sections import (
    Around,
    data_mix,
    recipe,
    reliability,
    seeds,
)


def record(section, seconds=60.0, own=None, seed=0, tables=()):
    return {
        "section": section,
        "tables": list(tables),
        "provenance": {"seed": seed},
        "cost": {"device_seconds": seconds, "own_device_seconds": own},
    }


MIXTURE = {"title": "Mixture", "columns": ["Bucket"], "rows": [["a"]]}
SENTINELS = {"title": "Sentinels", "columns": ["Sentinel"], "rows": [["gap"]]}


def test_mixtures_are_gathered_by_stage_with_the_accesses_to_final_benchmarks(monkeypatch):
    records = [record("Midtraining", tables=[MIXTURE]), record("Chat SFT", tables=[MIXTURE])]
    assert [t["title"] for t in data_mix(records, Around())] == [
        "Mixture, Midtraining",
        "Mixture, Chat SFT",
    ]
    monkeypatch.setattr(report_sections.held_out, "access_table", lambda: {"title": "Access"})
    assert data_mix([], Around(accesses=[{"benchmark": "x"}])) == [{"title": "Access"}]
    assert data_mix([record("Chat SFT")], Around()) == []


def test_the_final_run_is_told_against_all_that_was_run_to_find_it():
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
    around = Around(history=history, sweeps={"x": ledger})
    rows = {row[0]: row[1:] for row in recipe([base, evaluation], around, 6.0)["rows"]}
    assert rows["Training"] == ["10.00m", "25.00m", "2.5", "$2.50"]
    assert rows["Evaluation"] == ["1.50m", "2.50m", "1.7", "$0.25"]
    assert rows["Lost to failures"] == ["0.00m", "2.00m", "-", "$0.20"]
    assert rows["All"][:3] == ["11.50m", "29.50m", "2.6"]


def test_reliability_tells_seeds_sentinels_and_what_measured_noise():
    records = [record("Chat SFT", tables=[SENTINELS]), record("Sweep lr", seed=3)]
    found = seeds(records)
    assert found["rows"] == [["0", "Chat SFT"], ["3", "Sweep lr"], ["several", "Sweep lr"]]
    titles = [table["title"] for table in reliability(records, Around(), 0.0)]
    assert titles == ["Seeds", "Sentinels, Chat SFT"]
    again = Around(history=[*records, records[0]])
    assert reliability(records, again, 0.0)[-1]["title"] == "Final run against recipe"
    assert reliability([], Around(), 0.0) == []
