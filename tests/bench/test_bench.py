"""Benchmarks: measurements add up, missing peers are reported, peers get equal inputs."""

import importlib.util
import re

import pytest

from nanochat.bench import engine, tokenizer
from nanochat.dist import DistConfig
from scripts.bench import Bench, DataConfig, main

CPU = DistConfig("cpu", "float32")
interop = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="dependency group interop is not installed"
)


@pytest.fixture
def read_rows(capsys):
    """Run a benchmark; return the rows of its tables, each a dictionary by column."""

    def run(*args, **options):
        main(Bench(*args, dist=CPU, compile="off", **options))
        found = []
        for table in capsys.readouterr().out.split("## ")[1:]:
            head, _, *rows = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
            found += [dict(zip(head.split(" | "), row.split(" | "), strict=True)) for row in rows]
        return found

    return run


def test_tokenizer_bench_works_without_peers(monkeypatch, read_rows):
    monkeypatch.setattr(tokenizer.shutil, "which", lambda _: "/no/uv")
    data = DataConfig(dataset="embedded", num_shards=1)
    rows = read_rows("tokenizer", repeats=1, documents=500, vocab_size=400, data=data)
    by_peer = {row["peer"]: row for row in rows}
    for peer in ("rustbpe", "gigatoken"):
        assert by_peer[peer]["peer (MB/s)"] == "missing"
    assert "**" in by_peer["tiktoken (equal output)"]["ratio, ours / peer"]


def test_training_bench_measures_speed_and_its_parts(read_rows):
    [row] = read_rows("train", depth=1, max_seq_len=16, rows=2, vocab_size=64)
    shares = [int(cell.rstrip("%")) for cell in row["forward, backward, update"].split(", ")]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=2)
    assert row["tokens per step"] == "32"


@interop
@pytest.mark.slow
@pytest.mark.parametrize("what", ["engine", "peer"])
def test_generation_and_training_are_compared_with_transformers(monkeypatch, read_rows, what):
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "NEW_TOKENS", 20)
    rows = read_rows(what, depth=1, max_seq_len=192, vocab_size=512, repeats=1, rows=1)
    assert rows and all("**" in row["ratio, ours / peer"] for row in rows)
