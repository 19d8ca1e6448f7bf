"""Short and damaged text on the command line: no NaN, no traceback, no training on damaged rows."""

import json
import random
import re
from pathlib import Path

import pytest

from nanochat.logger import read_metrics
from nanochat.records import read_records
from nanochat.tokenizer import Tokenizer, tokenizer_dir

WORDS = "the boat sails to a north wind and back again over cold water".split()


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A short training run on a file of text, with five words of validation text."""
    folder, rng = tmp_path / "own", random.Random(0)
    folder.mkdir()
    texts = [" ".join(rng.choice(WORDS) for _ in range(90)) for _ in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "b.jsonl").write_text(json.dumps({"text": " ".join(WORDS[:5])}) + "\n")
    Tokenizer.train(texts, 300).save(tokenizer_dir("main"))
    flags = "--depth=1 --max_seq_len=256 --total_batch_size=1024 --num_iterations=2"
    return ["base_train", *flags.split(), "--dtype=float32", f"--dataset={folder}"]


def test_R34_short_validation_text_R28_damaged_rows(small, base, command):
    output = command.works(*small) + command.works("base_loss")
    metrics = read_metrics(base / "base_checkpoints/d1/metrics.jsonl")
    assert 0 < metrics[-1]["val_bpb"] < 20
    files = [path for kind in ("jsonl", "json", "md") for path in base.rglob(f"*.{kind}")]
    written = "\n".join([output, *(path.read_text() for path in files)])
    assert "Minimum validation bpb" in written and not re.search(r"(?i)\bnan\b", written)
    values = next(r["values"] for r in read_records() if r["section"] == "Base model loss")
    assert 1024 < values["train tokens scored"] <= 2048  # of the two steps; the text has more
    assert "is empty: b.jsonl" in command.rejects(*small, "--eval_half=2", "--model_tag=half")

    (path,) = base.rglob("a.jsonl*.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:5001] + b"\xff" + whole[5002:])  # an id outside the vocabulary
    found = command.rejects(*small)
    assert f"{path} is damaged" in found and "same command again" in found
    assert "\nstep " not in found
    command.works(*small)
    assert path.read_bytes() == whole
