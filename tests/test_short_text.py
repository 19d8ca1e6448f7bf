"""Short validation text on the command line: no NaN, no traceback."""

import re

from nanochat.logger import read_metrics
from nanochat.records import read_records
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from tests.test_rows import write


def test_R34_short_validation_text_gives_no_nan(tmp_path, base, command):
    texts = [f"boat {i} sails to the north wind and back again. " * 9 for i in range(60)]
    folder = write(tmp_path / "own", a=texts, b=["boat"])
    Tokenizer.train(texts, 300).save(tokenizer_dir("main"))
    flags = "--depth=1 --max_seq_len=256 --total_batch_size=1024 --num_iterations=2"
    small = ["base_train", *flags.split(), "--dtype=float32", f"--dataset={folder}"]
    output = command.works(*small) + command.works("base_loss")
    metrics = read_metrics(base / "base_checkpoints/d1/metrics.jsonl")
    assert 0 < metrics[-1]["val_bpb"] < 20
    files = [path for kind in ("jsonl", "json", "md") for path in base.rglob(f"*.{kind}")]
    written = "\n".join([output, *(path.read_text() for path in files)])
    assert "Minimum validation bpb" in written and not re.search(r"(?i)\bnan\b", written)
    values = next(r["values"] for r in read_records() if r["section"] == "Base model loss")
    assert 1024 < values["train tokens scored"] <= 2048  # of the two steps; the text has more
    assert "is empty: b.jsonl" in command.rejects(*small, "--eval_half=2", "--model_tag=half")
