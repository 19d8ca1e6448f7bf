"""scripts.data from the command line: packing, repeated runs and errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY
from nanochat.dataset import DataConfig, load_last_source, open_source
from nanochat.packing import ensure_packed, open_rows
from nanochat.tokenizer import Tokenizer, tokenizer_dir

TEXTS = [f"The boat number {i} sails to the north wind and back. " * (i % 7 + 1) for i in range(90)]


def data(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "scripts.data", *flags],
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )


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


def test_missing_tokenizer_error_names_the_training_command(folder):
    done = data(f"--dataset={folder}")
    assert done.returncode == 2
    assert "python -m scripts.tok_train" in done.stderr
    assert "Traceback" not in done.stderr


def test_data_packs_each_shard_once_and_prints_a_table(folder, tokenizer):
    first = data("--dataset", str(folder), "--max_seq_len=32", "--workers=2")
    assert first.returncode == 0, first.stderr
    rows = open_rows(open_source(DataConfig(dataset=str(folder))), tokenizer, 32)
    assert all(map(rows.is_packed, rows.shards))
    assert rows.files[rows.train_shards[0]] == ["0.jsonl", "1.jsonl"]  # small files are combined
    rows.verify(rows.shards)
    counted = [line.split() for line in first.stdout.splitlines() if " rows " in line]
    assert f"{rows.packed_train_rows:,}" in counted[-1]
    assert "documents cut" in first.stdout and str(rows.folder) in first.stdout
    assert f"packed {rows.train_shards[0]}: " in first.stdout

    times = {path: path.stat().st_mtime_ns for path in rows.folder.glob("*.bin")}
    assert load_last_source("main") == rows.recipe["source"]
    second = data("--max_seq_len=32", "--verify")  # uses the last source
    assert second.returncode == 0, second.stderr
    assert "packed 0.jsonl" not in second.stdout
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_R28_verify_packs_damaged_rows_again(folder, tokenizer):
    source = open_source(DataConfig(dataset=str(folder)))
    rows = open_rows(source, tokenizer, 32)
    ensure_packed(rows, source, tokenizer)
    path = rows.bin_path(rows.val_shard)
    intact = path.read_bytes()
    path.write_bytes(intact[:100] + b"X" + intact[101:])
    done = data(f"--dataset={folder}", "--max_seq_len=32", "--verify")
    assert done.returncode == 0, done.stderr
    assert f"{path} is damaged" in done.stdout
    assert path.read_bytes() == intact


def write_texts(folder: Path, **files: list[str]) -> Path:
    folder.mkdir()
    for name, texts in files.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("kind", ["many small files", "one giant document", "few tokens"])
def test_R34_text_of_any_form_is_packed_almost_completely(kind, tmp_path, tokenizer):
    text = "The boat number {} sails to the north wind and back. "
    files = {
        "many small files": {f"f{i:03d}": [text.format(i) * 56] for i in range(200)},
        "one giant document": {"a": [text.format(1) * 20_000], "b": [text.format(2) * 9]},
        "few tokens": {"a": ["The boat sails."], "b": ["a"]},
    }[kind]
    done = data(f"--dataset={write_texts(tmp_path / 'own', **files)}", "--max_seq_len=2048")
    assert done.returncode == 0, done.stderr
    source = open_source(DataConfig(dataset=str(tmp_path / "own")))
    rows = open_rows(source, tokenizer, 2048)
    shards = [rows.counts(shard) for shard in rows.shards]
    for part in (rows.totals(), shards[-1]):
        assert part["rows"] and part["tokens"]
        assert part["dropped"] <= 0.005 * (part["dropped"] + part["tokens"])
    tokens = sum(len(tokenizer.encode(t)) for texts in files.values() for t in texts)
    assert tokens == sum(s["tokens"] + s["dropped"] for s in shards)


def test_malformed_shard_exits_with_file_and_line(folder, tokenizer):
    (folder / "1.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    done = data(f"--dataset={folder}", "--max_seq_len=32")
    assert done.returncode != 0
    assert "1.jsonl, line 2" in done.stderr and "Traceback" not in done.stderr


def test_download_needs_no_tokenizer(folder):
    done = data(f"--dataset={folder}", "--download_only")
    assert done.returncode == 0, done.stderr
    assert "3 shards present and verified" in done.stdout


def test_help_has_summary_flags_and_defaults():
    done = data("--help")
    assert done.returncode == 0
    for words in (
        "ahead of training",
        "--dataset",
        "--num-shards",
        "--max-seq-len",
        "(default: 2048",
    ):
        assert words in done.stdout
