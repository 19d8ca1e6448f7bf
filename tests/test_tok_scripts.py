"""tok_train and tok_eval end to end, with and without downloaded vocabularies."""

import json
import os
import random
import socket
from pathlib import Path

import pytest

from nanochat.common import read_json
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import tok_eval

WORDS = "the cat sat on a mat and saw cold water".split()


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    """A command that trains on a folder of two files; a third one is for validation."""
    folder, rng = tmp_path / "text", random.Random(0)
    folder.mkdir()
    long = [" ".join(rng.choices(WORDS, k=60))[:150] for _ in range(50)]
    for name, texts in (("a", long), ("b", ["z" * 10] * 99), ("c", ["quokka " * 500])):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    flags = f"--dataset={folder} --vocab_size=300 --doc_cap=100 --max_chars=5038"
    return ["tok_train", *flags.split()]


def record(base: Path, name: str) -> dict:
    return read_json(base / "report" / f"{name}.json")


def redirect_downloads(monkeypatch, tmp_path: Path, port: int) -> None:
    """Redirect tiktoken's downloads to a local port, with an empty cache."""
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")  # wins over HTTPS_PROXY
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))


def test_training_reads_exactly_its_text_and_reports_counts(base, command, train):
    text = command.works(*train)
    assert "--doc_cap=100: truncated 50 of 54 documents, dropping 2,500 characters" in text
    assert "next: python -m scripts.base_train" in text
    tokenizer, values = Tokenizer.load(), record(base, "tokenizer-training")["values"]
    lengths = tokenizer.token_bytes()[: -len(SPECIAL_TOKENS)]
    sizes = [9, 1, lengths.max(), lengths.mean(), lengths.std()]
    names = "num_special_tokens token_bytes_min token_bytes_max token_bytes_mean token_bytes_std"
    assert [values[name] for name in names.split()] == pytest.approx(sizes)
    counted = {"documents": 54, "characters": 5038, "text_bytes": 5038, "shards_read": 2}
    assert counted.items() <= values.items()
    words = (base / "tokenizer/main/words.txt").read_text().split()
    assert {"the", "water", "zzzzzzzzzz"} < set(words) and words[0] in WORDS
    # never on the validation file
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.bos_id)]
    assert " cat" in tokens and not any("uo" in token for token in tokens)


def test_R18_only_an_identical_finished_training_is_skipped(base, command, train):
    def skips(*flags: str) -> bool:
        return "finished already" in command.works(*train, "--skip_if_done", *flags)

    assert not skips() and skips()
    assert not skips("--vocab_size=310") and skips("--vocab_size=310")
    (base / "tokenizer" / "main" / "tokenizer.json").write_text("{}")
    assert not skips("--vocab_size=310")


def test_B17_unreachable_vocabularies_are_skipped(base, command, train, monkeypatch, tmp_path):
    assert "python -m scripts.tok_train" in command.rejects("tok_eval")
    command.works(*train)
    redirect_downloads(monkeypatch, tmp_path, 1)  # refuses connections
    command.works("tok_eval")
    found = record(base, "tokenizer-evaluation")
    assert found["tables"] == []
    assert "Comparison with GPT-2: skipped" in (base / "report.md").read_text()
    text = "quokka " * 500
    ratio = len(text) / len(Tokenizer.load().encode(text))
    assert found["values"]["bytes per token, text-val"] == pytest.approx(ratio)
    again = command.works("tok_eval", "--skip_if_done")
    assert "finished already, skipped (without GPT-2 and GPT-4; python -m scripts.tok_eval" in again


def test_B17_hanging_vocabulary_download_times_out(monkeypatch, tmp_path):
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # never responds
        redirect_downloads(monkeypatch, tmp_path, server.getsockname()[1])
        found = tok_eval.rival_counts(["a text"])
    why = "skipped: no vocabulary within 1 s"
    assert found == {"GPT-2": why, "GPT-4": why}


@pytest.mark.resources
def test_rival_counts_and_table_are_right(monkeypatch):
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 60.0)
    if not os.environ.get("TIKTOKEN_CACHE_DIR"):
        pytest.skip("TIKTOKEN_CACHE_DIR is not set")
    # famously one token in GPT-2, but not in GPT-4
    texts = {"news": " SolidGoldMagikarp"}
    assert tok_eval.rival_counts([*texts.values()]) == {"GPT-2": [1], "GPT-4": [5]}
    table = tok_eval.compare_tokenizers("GPT-4", texts, [5], {"news": 4})
    assert table["rows"] == [["news", 18, 5, "3.60", 4, "4.50", "+20.0%"]]
