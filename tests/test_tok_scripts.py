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

# Keys of the section in order, as in the original nanochat report
TRAINING_KEYS = (
    "train_time num_special_tokens token_bytes_min token_bytes_max token_bytes_mean token_bytes_std"
).split()
RIVALS = ("GPT-2", "GPT-4")
CACHED = (  # tiktoken's cache file names: two for gpt2, one for cl100k_base
    "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
)
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
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "" if name == "no_proxy" else f"http://127.0.0.1:{port}")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))


def test_P6_training_reads_exactly_its_text_and_is_repeatable(base, command, train):
    text = command.works(*train)
    assert "--doc_cap=100: truncated 50 of 54 documents, dropping 2,500 characters" in text
    assert "next: python -m scripts.base_train" in text
    tokenizer, found = Tokenizer.load(), record(base, "tokenizer-training")
    assert list(found["settings"])[:3] == ["max_chars", "doc_cap", "vocab_size"]
    values, lengths = found["values"], tokenizer.token_bytes()[: -len(SPECIAL_TOKENS)]
    assert list(values)[: len(TRAINING_KEYS)] == TRAINING_KEYS
    assert values["num_special_tokens"] == 9 and values["token_bytes_min"] == 1
    assert values["token_bytes_max"] == lengths.max()
    assert values["token_bytes_mean"] == pytest.approx(lengths.mean())
    assert values["token_bytes_std"] == pytest.approx(lengths.std())
    counted = {"documents": 54, "characters": 5038, "text_bytes": 5038, "shards_read": 2}
    counted |= {"documents_cut": 50, "characters_cut": 2500}
    assert counted.items() <= values.items()
    assert found["provenance"]["outputs"] == {"tokenizer": tokenizer.fingerprint}
    assert "## Tokenizer training" in (base / "report.md").read_text()
    words = (base / "tokenizer/main/words.txt").read_text().split()
    assert {"the", "water", "zzzzzzzzzz"} < set(words) and words[0] in WORDS
    # never on the validation file
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.bos_id)]
    assert " cat" in tokens and not any("uo" in token for token in tokens)
    assert "reading c.jsonl" not in text
    command.works(*train, "--tokenizer_tag=again")
    one, other = (base / "tokenizer" / tag / "tokenizer.json" for tag in ("main", "again"))
    assert one.read_bytes() == other.read_bytes()
    assert "reading b.jsonl" not in command.works(*train, "--max_chars=5000")


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
    found, trained = record(base, "tokenizer-evaluation"), record(base, "tokenizer-training")
    assert found["provenance"]["run_id"] == trained["provenance"]["run_id"]
    assert found["provenance"]["inputs"]["tokenizer"] == Tokenizer.load().fingerprint
    assert found["tables"] == []
    values = found["values"]
    assert all(values[f"Comparison with {name}"].startswith("skipped: ") for name in RIVALS)
    assert "Comparison with GPT-2: skipped" in (base / "report.md").read_text()
    kinds = "news korean code math science fwe-train fwe-val".split()
    assert all(values[f"bytes per token, {kind}"] >= 1 for kind in kinds)
    text = "quokka " * 500
    ratio = len(text) / len(Tokenizer.load().encode(text))
    assert values["bytes per token, fwe-val"] == pytest.approx(ratio)
    assert "finished already" in command.works("tok_eval", "--skip_if_done")


def test_B17_hanging_vocabulary_download_times_out(monkeypatch, tmp_path):
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # never responds
        redirect_downloads(monkeypatch, tmp_path, server.getsockname()[1])
        found = tok_eval.rival_counts(["a text"])
    why = "skipped: no vocabulary within 1 s (TimeoutError)"
    assert found == dict.fromkeys(RIVALS, why)


def test_comparison_table_equals_the_original_report():
    texts = {"news": "n" * 1819, "korean": "k" * 893}
    table = tok_eval.compare_tokenizers("GPT-4", texts, [387, 364], {"news": 371, "korean": 723})
    names = "Text Type,Bytes,GPT-4 Tokens,GPT-4 Ratio,Ours Tokens,Ours Ratio,Relative Diff %"
    news = ["news", 1819, 387, "4.70", 371, "4.90", "+4.1%"]
    korean = ["korean", 893, 364, "2.45", 723, "1.24", "-98.6%"]
    columns, rows = names.split(","), [news, korean]
    assert table == {"title": "Comparison with GPT-4", "columns": columns, "rows": rows}


def test_rival_counts_match_gpt2_and_gpt4(monkeypatch):
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 60.0)
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "/nowhere")
    if not all((cache / name).exists() for name in CACHED):
        pytest.skip("TIKTOKEN_CACHE_DIR holds no vocabularies")
    # " SolidGoldMagikarp" is famously one token in GPT-2, but not in GPT-4
    assert tok_eval.rival_counts([" SolidGoldMagikarp"]) == {"GPT-2": [1], "GPT-4": [5]}


def test_damaged_record_of_the_text_is_named_and_repaired(base, command, train):
    command.works(*train)
    path = base / "data" / "used_with_main.json"
    whole = read_json(path)
    path.write_text(json.dumps({"dataset": whole["dataset"]}))
    assert str(path) in command.rejects("tok_eval")
    command.works(*train)
    assert read_json(path) == whole
