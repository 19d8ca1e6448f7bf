"""Benchmarks: measurements add up, missing peers are reported, peers get equal results."""

import importlib.util
import itertools

import pytest
import torch

from nanochat.bench import engine, tokenizer
from nanochat.bench.table import compare, print_table
from nanochat.checkpoint import build_model
from nanochat.dist import DistConfig, init_dist
from nanochat.eval_core import FewShotTask, score_options, tokenize
from nanochat.gpt import inference_copy
from nanochat.scaling import shape_for_depth
from nanochat.tokenizer import Tokenizer
from scripts.bench import Bench, DataConfig, main
from tasks.world.corpus import documents
from tasks.world.suite import suite

CPU = DistConfig("cpu", "float32")
interop = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="dependency group interop is not installed"
)


@pytest.fixture
def read_tables(capsys):
    """Run a benchmark; return its rows by table, each a dictionary by column."""

    def run(*args, **options):
        main(Bench(*args, dist=CPU, compile="off", **options))
        found = {}
        for block in capsys.readouterr().out.split("## ")[1:]:
            lines = [
                line.strip("| ").split(" | ") for line in block.splitlines() if line[:1] == "|"
            ]
            found[block.splitlines()[0]] = [
                dict(zip(lines[0], line, strict=False)) for line in lines[2:]
            ]
        return found

    return run


def test_tokenizer_bench_works_without_peers(monkeypatch, read_tables):
    monkeypatch.setattr(tokenizer.shutil, "which", lambda _: "/no/uv")
    data = DataConfig(dataset="embedded", num_shards=1)
    rows = read_tables("tokenizer", repeats=1, documents=500, vocab_size=400, data=data)
    by_peer = {row["peer"]: row for row in rows["Tokenizer"]}
    for peer in ("rustbpe", "tokenizers", "gigatoken"):
        assert by_peer[peer]["peer (MB/s)"] == "missing"
    assert "**" in by_peer["tiktoken (equal output)"]["ratio, ours / peer"]


def test_training_bench_measures_speed_and_its_parts(read_tables):
    [row] = read_tables("train", depth=1, max_seq_len=16, rows=2, vocab_size=64)["Training"]
    assert row["case"] == "depth 1"
    shares = [int(cell.rstrip("%")) for name, cell in row.items() if "% of step" in name]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=2)
    assert row["tokens per step"] == "32" and float(row["TFLOP/s"]) >= 0


@interop
@pytest.mark.slow
@pytest.mark.parametrize("what", ["engine", "peer"])
def test_generation_and_training_are_compared_with_transformers(monkeypatch, read_tables, what):
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "NEW_TOKENS", 20)
    found = read_tables(what, depth=1, max_seq_len=192, vocab_size=512, repeats=1, rows=1)
    rows = [row for table in found.values() for row in table]
    assert rows and all("**" in row["ratio, ours / peer"] for row in rows)


@interop
def test_few_shot_losses_match_lm_eval():
    """Same token ids, so the same losses up to rounding."""
    from nanochat.bench.peers import make_scorer

    dist = init_dist(CPU)
    words = Tokenizer.train(list(itertools.islice(documents(0, 0, "train"), 200)), 400)
    plain = build_model(shape_for_depth(1, 400, 512, "classic"), dist.device, dist.dtype, seed=0)
    task = FewShotTask(**suite()[0]).shuffled(3)
    questions = [tokenize(task, n, words, 512) for n in range(3)]
    _, theirs = make_scorer(plain, dist)(questions)
    found = score_options(inference_copy(plain), questions)
    ours = {q.number: scores for q, scores in found}
    sums = [
        score.nats * (len(ids) - start)
        for q in questions
        for score, ids, start in zip(ours[q.number], q.options, q.starts, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(sums), torch.tensor(theirs), rtol=1e-3, atol=1e-3)


def test_table_shows_values_ratio_and_missing_peer(capsys):
    print_table("A", "noisy", [compare("d4", "tokens/s", [9000, 12000, 10000])])
    ours = [50, 40, 60]
    peers = [
        compare("x", "MB/s", ours, "rustbpe", [20, 19, 21]),
        compare("x", "MB/s", ours, "gone"),
    ]
    print_table("B", "", peers)
    page = capsys.readouterr().out
    assert "## A\n\nnoisy\n\n| case | ours (tokens/s) |" in page
    assert "| d4 | 10,000 (9,000 to 12,000) |" in page
    assert "| case | ours (MB/s) | peer | peer (MB/s) | ratio, ours / peer |" in page
    assert "| rustbpe | 20.0 (19.0 to 21.0) | **2.50** |" in page
    assert "| gone | missing |  |" in page
