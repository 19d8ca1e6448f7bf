"""The benchmark: that it measures ours, says who is missing, and sees equal results as equal."""

from nanochat import tokenizer_bench
from nanochat.kernels import KernelConfig
from scripts.bench import Bench, DataConfig, main


def test_the_tokenizer_bench_goes_on_without_peers(monkeypatch, capsys):
    monkeypatch.setattr(tokenizer_bench.shutil, "which", lambda _: None)
    data = DataConfig(dataset="embedded", num_shards=1)
    main(
        Bench(
            "tokenizer", repeats=1, max_megabytes=0.1, vocab_sizes=(400,), threads=(2,), data=data
        )
    )
    lines = capsys.readouterr().out.splitlines()
    for peer in ("rustbpe", "tokenizers", "gigatoken"):
        assert f"{peer} is missing: uv is not installed" in lines
    train, encode, reference = [line for line in lines if "x our time" in line]
    assert "ours" in train and "400 ids" in train and "1.00 x our time" in train
    assert "ours" in encode
    assert "tiktoken" in reference and "same result" in reference


def test_the_training_bench_adds_up(capsys):
    main(Bench("train", depth=1, max_seq_len=16, rows=2, vocab_size=64, steps=2,
               kernels=KernelConfig(compile=False)))  # fmt: skip
    text = capsys.readouterr().out
    for word in ("ceiling", "first step", "forward and loss", "tokens/s", "MiB"):
        assert word in text
