"""scripts.data from the command line: packing, repeated runs and errors."""

import json
from pathlib import Path

import pytest

from nanochat.dataset import DataConfig, load_last_source, open_source
from nanochat.packing import ensure_packed, open_rows
from nanochat.tokenizer import Tokenizer, tokenizer_dir

TEXTS = [f"The boat number {i} sails to the north wind and back. " * (i % 7 + 1) for i in range(90)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": text}) for text in TEXTS[shard::3]]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def tokenizer(base) -> Tokenizer:
    tokenizer = Tokenizer.train(TEXTS, 300)
    tokenizer.save(tokenizer_dir("main"))
    return tokenizer


def test_missing_tokenizer_error_names_the_training_command(folder, command):
    assert "python -m scripts.tok_train" in command.rejects("data", f"--dataset={folder}")


def test_data_packs_each_shard_once_and_prints_a_table(folder, tokenizer, command):
    first = command.works("data", "--dataset", folder, "--max_seq_len=32", "--workers=2")
    rows = open_rows(open_source(DataConfig(dataset=str(folder))), tokenizer, 32)
    assert all(map(rows.is_packed, rows.shards))
    assert rows.files[rows.train_shards[0]] == ["0.jsonl", "1.jsonl"]  # small files are combined
    rows.verify(rows.shards)
    counted = [line.split() for line in first.splitlines() if " rows " in line]
    assert f"{rows.packed_train_rows:,}" in counted[-1]
    assert "documents cut" in first and str(rows.folder) in first
    assert f"packed {rows.train_shards[0]}: " in first

    times = {path: path.stat().st_mtime_ns for path in rows.folder.glob("*.bin")}
    assert load_last_source("main") == rows.recipe["source"]
    second = command.works("data", "--max_seq_len=32", "--verify")  # uses the last source
    assert "packed 0.jsonl" not in second
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_R28_verify_packs_damaged_rows_again(folder, tokenizer, command):
    source = open_source(DataConfig(dataset=str(folder)))
    rows = open_rows(source, tokenizer, 32)
    ensure_packed(rows, source, tokenizer)
    path = rows.bin_path(rows.val_shard)
    intact = path.read_bytes()
    path.write_bytes(intact[:100] + b"X" + intact[101:])
    text = command.works("data", f"--dataset={folder}", "--max_seq_len=32", "--verify")
    assert f"{path} is damaged" in text
    assert path.read_bytes() == intact


def write_texts(folder: Path, **files: list[str]) -> Path:
    folder.mkdir()
    for name, texts in files.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("kind", ["many small files", "one giant document", "few tokens"])
def test_R34_text_of_any_form_is_packed_almost_completely(kind, tmp_path, tokenizer, command):
    text = "The boat number {} sails to the north wind and back. "
    files = {
        "many small files": {f"f{i:03d}": [text.format(i) * 56] for i in range(200)},
        "one giant document": {"a": [text.format(1) * 20_000], "b": [text.format(2) * 9]},
        "few tokens": {"a": ["The boat sails."], "b": ["a"]},
    }[kind]
    own = write_texts(tmp_path / "own", **files)
    command.works("data", f"--dataset={own}", "--max_seq_len=2048")
    source = open_source(DataConfig(dataset=str(own)))
    rows = open_rows(source, tokenizer, 2048)
    shards = [rows.counts(shard) for shard in rows.shards]
    for part in (rows.totals(), shards[-1]):
        assert part["rows"] and part["tokens"]
        assert part["dropped"] <= 0.005 * (part["dropped"] + part["tokens"])
    tokens = sum(len(tokenizer.encode(t)) for texts in files.values() for t in texts)
    assert tokens == sum(s["tokens"] + s["dropped"] for s in shards)


def test_malformed_shard_exits_with_file_and_line(folder, tokenizer, command):
    (folder / "1.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    assert "1.jsonl, line 2" in command.rejects("data", f"--dataset={folder}", "--max_seq_len=32")


def test_download_needs_no_tokenizer(folder, command):
    text = command.works("data", f"--dataset={folder}", "--download_only")
    assert "3 shards present and verified" in text


def test_help_has_summary_flags_and_defaults(command):
    text = command.works("data", "--help")
    for words in (
        "ahead of training",
        "--dataset",
        "--num-shards",
        "--max-seq-len",
        "(default: 2048",
    ):
        assert words in text
