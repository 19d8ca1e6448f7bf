"""Benchmarks: measurements add up, missing peers are reported, peers get equal results."""

import importlib.util

import pytest
import torch

from nanochat.bench import engine, evals, tokenizer
from nanochat.bench.table import BenchLog, Detail, Note, TableLine, render_findings
from nanochat.distributed import DistConfig, init_distributed
from nanochat.scaling import shape_for_depth
from nanochat.train import KernelConfig
from scripts.bench import Bench, DataConfig, main

CPU = DistConfig("cpu", "float32")
interop = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="dependency group interop is not installed"
)


def test_tokenizer_bench_works_without_peers(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tokenizer.shutil, "which", lambda _: None)
    data = DataConfig(dataset="embedded", num_shards=1)
    path = tmp_path / "found.json"
    main(
        Bench(
            "tokenizer", repeats=1, max_megabytes=0.3, vocab_sizes=(400,), threads=(1, 2),
            data=data, findings=path,
        )
    )  # fmt: skip
    text = capsys.readouterr().out
    for peer in ("rustbpe", "tokenizers", "gigatoken"):
        assert f"{peer} is missing: uv is not installed" in text
    found = BenchLog.read(path)
    by_peer = {(line.table, line.case, line.peer): line for line in found.lines}
    assert by_peer["Tokenizer training", "vocabulary 400, 2 threads", "rustbpe"].theirs == []
    case = ("Tokenizer encoding", "vocabulary 400, 1 thread", "tiktoken (equal output)")
    reference = by_peer[case]
    assert reference.ratio is not None and min(reference.ours) > 0


def test_training_bench_measures_speed_and_its_parts(capsys, tmp_path):
    path = tmp_path / "found.json"
    main(Bench("train", depth=1, max_seq_len=16, rows=2, vocab_size=64, steps=2, machine=CPU,
               kernels=KernelConfig(compile=False), findings=path))  # fmt: skip
    assert "TFLOP/s" in capsys.readouterr().out
    found = BenchLog.read(path)
    (line,), (detail,) = found.lines, found.details
    assert line.unit == "tokens/s" and min(line.ours) > 0 and 0 < line.roofline < 1
    shares = [int(v.removesuffix("%")) for k, v in detail.cells.items() if "% of step" in k]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=2)
    assert detail.cells["tokens per step"] == "32"


@interop
@pytest.mark.slow
def test_generation_and_training_are_compared_with_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "NEW_TOKENS", 20)
    common = {"depth": 1, "max_seq_len": 192, "vocab_size": 512, "repeats": 1, "machine": CPU}
    for what in ("engine", "peer"):
        path = tmp_path / f"{what}.json"
        kernels = KernelConfig(compile=False)
        main(Bench(what, rows=1, kernels=kernels, findings=path, **common))
        lines = BenchLog.read(path).lines
        assert lines and all(line.ratio is not None for line in lines)


@interop
def test_few_shot_losses_match_lm_eval(monkeypatch):
    """Same token ids, so the same losses up to rounding."""
    from nanochat.bench import peers

    monkeypatch.setattr(evals, "ITEMS", 3)
    machine, models, seen = init_distributed(CPU), [], []

    def watched(model, *args):
        score = peers.make_scorer(model, *args)
        models.append(evals.inference_copy(model))

        def noted(questions):
            seconds, nats = score(questions)
            seen.append((questions, nats))
            return seconds, nats

        return noted

    found = BenchLog()
    shape = shape_for_depth(1, 400, 512, "classic")
    evals.bench_evaluation(shape, machine, 1, found, watched)
    assert {line.peer for line in found.lines} == {"lm-eval"} and len(found.lines) == 3
    questions, theirs = seen[-1]
    ours = {q.number: scores for q, scores in evals.score_options(models[0], questions)}
    for q, nats in zip(questions, theirs, strict=True):
        readings = ours[q.number]
        lengths = [len(ids) - start for ids, start in zip(q.options, q.starts, strict=True)]
        sums = [r.nats * n for r, n in zip(readings, lengths, strict=True)]
        torch.testing.assert_close(torch.tensor(sums), torch.tensor(nats), rtol=1e-3, atol=1e-3)


def test_findings_round_trip_through_a_file(tmp_path):
    found = BenchLog()
    found.line(
        TableLine("Training", "depth 4", "tokens/s", [3.0, 2.0, 4.0], "peer", [2.0, 1.0, 3.0])
    )
    found.line(TableLine("Training", "depth 8", "tokens/s", [1.0], theirs=[], roofline=0.5))
    found.note("Training", "a noisy machine")
    found.detail(Detail("Training", "Parts", {"step (ms)": "3", "case": "depth 4"}))
    found.write(tmp_path / "found.json")
    again = BenchLog.read(tmp_path / "found.json")
    assert again == found and again.lines[0].ratio == 1.5
    assert [*again.details[0].cells] == ["step (ms)", "case"]  # the order of the columns
    again.add(found)
    assert len(again.lines) == 4


def test_page_shows_values_ratio_roofline_and_missing_peer():
    lines = [
        TableLine("Training", "depth 4", "tokens/s", [9000, 12000, 10000], roofline=0.615),
        TableLine("Tokenizer", "trained", "MB/s", [50, 40, 60], "rustbpe", [20, 19, 21]),
        TableLine("Tokenizer", "trained", "MB/s", [50, 40, 60], "gone"),
    ]
    notes = [Note("Training", "noisy"), Note("Training", "noisy"), Note("", "Failed: x")]
    page = render_findings(BenchLog(lines, notes), "python -m scripts.bench", "a machine", 12.4)
    assert "| case | ours (tokens/s) | % of roofline |" in page
    assert "| depth 4 | 10,000 (9,000 to 12,000) | 62% |" in page
    assert "| case | ours (MB/s) | peer | peer (MB/s) | ratio, ours / peer |" in page
    assert "| rustbpe | 20.0 (19.0 to 21.0) | **2.50** |" in page
    assert "| gone | missing |  |" in page
    assert page.count("## Training\n\nnoisy\n\n| case") == 1
    assert page.index("- Failed: x") < page.index("## Training") > page.index("## Method")
    assert "12 minutes" in page
