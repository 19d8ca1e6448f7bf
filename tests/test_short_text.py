"""Short and damaged text on the command line: no NaN, no traceback, no training on damaged rows."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanochat.dataset import DataConfig
from nanochat.distributed import DistContext
from nanochat.logger import read_metrics
from nanochat.mixture import open_texts
from nanochat.packing import ensure_packed, open_rows
from nanochat.records import read_records
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from scripts.base_loss import count_trained_rows, train_batches

SMALL = (
    "base_train --depth=1 --max_seq_len=256 --total_batch_size=1024 --num_iterations=2 "
    "--dtype=float32"
).split()
WORDS = "the boat sails to a north wind and back again over cold water".split()


@pytest.fixture
def text(tmp_path: Path, base: Path) -> Path:
    """A tokenizer, and a folder with a training file and five words of validation text."""
    folder, rng = tmp_path / "own", random.Random(0)
    folder.mkdir()
    texts = [" ".join(rng.choice(WORDS) for _ in range(90)) for _ in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "b.jsonl").write_text(json.dumps({"text": " ".join(WORDS[:5])}) + "\n")
    Tokenizer.train(texts, 300).save(tokenizer_dir("main"))
    return folder


def test_R34_validation_text_shorter_than_a_row_does_not_give_nan(text, base, command):
    output = command.works(*SMALL, f"--dataset={text}") + command.works("base_loss")
    metrics = read_metrics(base / "base_checkpoints/d1/metrics.jsonl")
    bpb = [each["val_bpb"] for each in metrics if "val_bpb" in each]
    assert bpb and 0 < bpb[-1] < 20
    written = [output, *(p.read_text() for p in base.rglob("*.jsonl"))]
    written += [
        p.read_text() for p in (base / "report").rglob("*.*") if p.suffix in (".md", ".json")
    ]
    assert len(written) > 3 and "Minimum validation bpb" in "".join(written)
    assert not re.findall(r"(?i).*\bnan\b.*", "\n".join(written))


def on_cpu() -> DistContext:
    return DistContext(0, 0, 1, torch.device("cpu"), torch.float32)


def test_train_bpb_is_of_rows_that_the_run_was_trained_on(text, base, command):
    command.works(*SMALL, f"--dataset={text}", "--seed=3")
    command.works("base_loss")
    (values,) = (r["values"] for r in read_records() if r["section"] == "Base model loss")
    assert 1024 < values["train tokens scored"] <= 2 * 1024  # two steps; the text has more
    source, tokenizer = open_texts(DataConfig(dataset=str(text))).only, Tokenizer.load("main")
    rows, machine = open_rows(source, tokenizer, 256), on_cpu()
    assert rows.totals()["rows"] > 8
    trained = np.concatenate([rows.batch(step, 4, seed=3) for step in range(2)])
    scored = np.concatenate(list(train_batches(rows, 8, 3, 3, machine)))
    assert np.array_equal(scored, trained)


def test_trained_rows_of_buckets_follow_their_tokens():
    state = {"identity": {"batch_tokens": 2048}, "model": {"max_seq_len": 256}}
    corpus: Any = SimpleNamespace(rows={"a": None, "b": None})
    found: Any = SimpleNamespace(step=5, state=state)
    assert count_trained_rows(found, corpus) == {"a": 40, "b": 40}
    found.state["mixture"] = {"buckets": [{"name": "a", "tokens": 1}, {"name": "b", "tokens": 3}]}
    assert count_trained_rows(found, corpus) == {"a": 10, "b": 30}


def test_R34_half_of_one_validation_row_is_rejected(text, command):
    found = command.rejects(*SMALL, f"--dataset={text}", "--eval_half=2")
    assert "--eval_half=2 is empty: b.jsonl has 1 validation rows" in found
    assert "\nstep " not in found


def test_R28_damaged_rows_stop_a_run_and_are_packed_again(text, command):
    source = open_texts(DataConfig(dataset=str(text))).only
    tokenizer = Tokenizer.load("main")
    rows = open_rows(source, tokenizer, 256)
    ensure_packed(rows, source, tokenizer)
    path = rows.bin_path("a.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:5001] + b"\xff" + whole[5002:])  # an id outside the vocabulary
    found = command.rejects(*SMALL, f"--dataset={text}")
    assert f"{path} is damaged" in found and "same command again" in found
    assert "\nstep " not in found
    command.works(*SMALL, f"--dataset={text}")
    assert path.read_bytes() == whole
