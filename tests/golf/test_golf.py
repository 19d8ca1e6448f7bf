"""Parameter golf by its commands: train, quantize, write an artifact, score it from the file."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.common import read_json
from nanochat.golf.artifact import (
    COMPRESSORS,
    make_body,
    quantize_tensors,
    read_artifact,
    write_body,
)
from nanochat.golf.model import GolfConfig, GolfGPT
from nanochat.golf.quantize import QuantConfig, quantize_dequantize
from nanochat.golf.size import choose_smallest, code_bytes
from nanochat.tokenizer import Tokenizer
from tests.conftest import GOLF_CHANGES, TINY, lively
from tests.training_runs import all_ranks, begin_anew, curve, rest_of, weights

CPU = ["--dtype=float32", "--device_type=cpu"]
TRAIN = [
    "golf.base_train", *CPU,
    *"--depth=2 --max_seq_len=32 --d_model=32 --head_dim=16 --n_kv_head=1 --mlp_ratio=3".split(),
    *"--tie_embeddings --rope_dims=8 --xsa_last_n=1 --qk_gain_init=1.5".split(),
    *"--total_batch_size=512 --num_iterations=6 --eval_every=0 --eval_tokens=1024".split(),
    *"--save_every=1 --keep=9 --quantize=embed.*=int8,*.mlp.*=int5,*=int6".split(),
]  # fmt: skip
EXPORT = ["export", "--format=artifact", "--source=base"]
SCORE = ["golf.evaluate", *CPU, "--max_documents=6", "--eval_stride=4"]

# Scores an artifact with nothing but what that needs, and prints our modules that were loaded
SCORE_FROM_FILE = """
import sys, torch
from pathlib import Path
from nanochat.dist import DistContext
from nanochat.eval_bpb import document_bpb
from nanochat.golf.artifact import read_artifact
dist = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
artifact = read_artifact(Path(sys.argv[1]))
document_bpb(artifact.build(dist), ["Tom is here.", "a"], artifact.tokenizer, 8, 4, dist)
for name, module in sys.modules.items():
    package, _, rest = name.partition(".")
    if package in ("nanochat", "rustbpe", "tasks") and not hasattr(module, "__path__"):
        print(rest)
"""


def scores(base: Path) -> dict:
    return read_json(base / "report" / "parameter-golf.json")["values"]


# ---- Training ------------------------------------------------------------------------------------


def test_training_quantizes_late_and_averages(trained, command):
    command.works(*TRAIN, "--model_tag=plain")
    command.works(*TRAIN, "--model_tag=still", "--matrix_lr=0", "--tied_lr=0")
    golf = [*TRAIN, "--model_tag=golf", "--ema_decay=0.25", "--qat_start=0.5"]
    command.works(*golf)
    plain, late = (curve(trained / "base_checkpoints" / tag, "loss") for tag in ("plain", "golf"))
    assert plain[:3] == late[:3] and plain[3] != late[3]
    command.works(*TRAIN, "--model_tag=ema", "--ema_decay=0.25")
    for name in ("embed.weight", "blocks.0.mlp.up.weight"):
        average = weights(trained, "still", 6)[name]
        for step in range(1, 7):
            keep = min(0.25, (1 + step) / (10 + step))  # lower at first: the first weights are bad
            average = keep * average + (1 - keep) * weights(trained, "plain", step)[name]
        torch.testing.assert_close(weights(trained, "ema", 6)[name], average, rtol=1e-4, atol=1e-6)


# ---- Artifacts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["what is it"], 265)


def model_for(tokenizer: Tokenizer) -> Any:
    cfg = GolfConfig(**{**asdict(TINY), **GOLF_CHANGES})
    model: Any = GolfGPT(replace(cfg, vocab_size=tokenizer.vocab_size))
    model.init_weights(torch.Generator().manual_seed(0))
    return lively(model)


def test_every_file_restores_the_weights_and_the_smallest_is_kept(tokenizer, tmp_path):
    model, cfg = model_for(tokenizer), QuantConfig("embed.*=int8,*.mlp.*=int5,*.q.*=fp16,*=int6")
    stored = quantize_tensors(model.state_dict(), cfg)
    best = choose_smallest(stored, model.cfg, tokenizer, {})
    assert len(best.data) == min(best.tried.values()) and len(best.tried) == 2
    formats = cfg.formats(dict(model.named_parameters()))
    body = make_body(stored, model.cfg, tokenizer, {"seed": 7})
    for compressor in COMPRESSORS:
        (tmp_path / "model.golf").write_bytes(write_body(body, compressor))
        found = read_artifact(tmp_path / "model.golf")
        assert (found.cfg, found.formats, found.origin) == (model.cfg, formats, {"seed": 7})
        assert found.tokenizer.fingerprint == tokenizer.fingerprint
        for name, p in model.named_parameters():
            assert torch.equal(found.weights[name], quantize_dequantize(p, formats[name], cfg))


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_corrupt_artifact_is_rejected(compressor, tokenizer, tmp_path):
    model, path = model_for(tokenizer), tmp_path / "bad.golf"
    stored = quantize_tensors(model.state_dict(), QuantConfig())
    data = write_body(make_body(stored, model.cfg, tokenizer, {}), compressor)
    middle = len(data) // 2
    flipped = [data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :] for i in (0, 8, 9, 12, 14, middle)]
    for content in (*flipped, b"", data[:100], data[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="bad.golf is not a valid artifact"):
            read_artifact(path)


def test_score_from_the_file_alone_is_the_reported_one(trained, tmp_path, command):
    for seed in (0, 1):
        flags = [f"--seed={seed}", "--ema_decay=0.5", "--qat_start=0.5"]
        command.works(*TRAIN, f"--model_tag=golf-{seed}", *flags)
        out = command.works(*EXPORT, f"--model_tag=golf-{seed}")
        assert "int5" in out and "<- chosen" in out  # the formats of the training
    command.works(*SCORE)
    both = scores(trained)
    assert both["Roundtrip bpb"]["n"] == 2 and both["Within the limit"] is True
    gap = both["Roundtrip bpb"]["value"] - both["Pre-quantization bpb"]["value"]
    assert both["Quantization gap bpb"]["value"] == pytest.approx(gap) and abs(gap) < 0.05
    assert both["Total bytes"] == both["Model bytes"] + sum(code_bytes().values())
    first, kept = trained / "export" / "base-golf-1.golf", tmp_path / "kept.golf"
    shutil.copy(first, kept)
    command.works(*SCORE, f"--artifacts={kept}")
    found, alone = scores(trained), tmp_path / "empty"
    words = ["-m", f"scripts.{SCORE[0]}", *SCORE[1:], f"--artifacts={kept}"]
    all_ranks(alone, *words, "--dataset=embedded", "--num_shards=1")
    for name in ("Roundtrip bpb", "Roundtrip sliding bpb"):
        assert scores(alone)[name] == pytest.approx(found[name], abs=1e-6)
    assert "the same seed, 1" in command.rejects(*SCORE, "--artifacts", first, kept)
    command.works(*EXPORT, "--model_tag=golf-0", "--quantize=*=int8", f"--out={alone}.golf")
    rejected = command.rejects(*SCORE, "--artifacts", kept, f"{alone}.golf")
    assert "not seeds of one recipe" in rejected


def test_artifact_above_the_limit_is_not_written(trained, command):
    command.works(*TRAIN, "--model_tag=golf")
    path = trained / "export" / "base-golf.golf"
    out = command.rejects(*EXPORT, "--limit_bytes=40_000")
    assert "exceed the limit of 40,000" in out and "embed.weight" in out
    assert not path.exists()
    command.works(*EXPORT)
    most = path.stat().st_size + sum(code_bytes().values())
    command.works(*EXPORT, f"--limit_bytes={most}")
    assert "by 1;" in command.rejects(*EXPORT, f"--limit_bytes={most - 1}")


def test_counted_code_is_exactly_what_scoring_loads(tokenizer, tmp_path):
    model, path = model_for(tokenizer), tmp_path / "model.golf"
    stored = quantize_tensors(model.state_dict(), QuantConfig())
    path.write_bytes(choose_smallest(stored, model.cfg, tokenizer, {}).data)
    loaded = rest_of(begin_anew(tmp_path, "-c", SCORE_FROM_FILE, str(path))).split()
    assert set(loaded) == code_bytes().keys()
