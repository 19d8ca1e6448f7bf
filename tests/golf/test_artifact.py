"""Artifacts: exact roundtrip of weights, tokenizer and score; size accounting; limit; export."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanochat.checkpoint import (
    build_model,
    find_checkpoint,
    load_model,
    save_checkpoint,
    stage_folder,
)
from nanochat.common import REPOSITORY, UsageError, read_json
from nanochat.distributed import DistConfig
from nanochat.golf.artifact import (
    COMPRESSORS,
    CONTAINERS,
    pack_levels,
    quantize_tensors,
    read_artifact,
    unpack_levels,
)
from nanochat.golf.documents import document_bpb
from nanochat.golf.qat import LateQuantization
from nanochat.golf.quantize import QuantConfig
from nanochat.golf.size import choose_smallest, code_bytes, format_sizes, require_size_limit
from nanochat.tokenizer import Tokenizer
from scripts import export
from scripts.golf import evaluate
from tasks.world.corpus import documents
from tests.conftest import GOLF_CHANGES, RECURSIVE_CHANGES, TINY, lively, shaped

GOLF = shaped(TINY, **GOLF_CHANGES)
MIXED = QuantConfig("embed.*=int8,*.mlp.up.*=int5,*.mlp.*=int6,*.q.*=fp16,*=int6")
TEXTS = [text for _, text in zip(range(12), documents(0, 0, "val"), strict=False)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(documents(0, 0, "train"), 300)


def model_for(tokenizer, cfg=GOLF):
    cfg = replace(cfg, vocab_size=tokenizer.vocab_size, max_seq_len=32)
    return lively(build_model(cfg, CPU, torch.float32, seed=0))


@given(st.sampled_from([5, 6, 8]), st.lists(st.integers(-(2**31), 2**31), max_size=70))
def test_packed_levels_roundtrip(bits, numbers):
    top = 2 ** (bits - 1) - 1
    levels = np.array([n % (2 * top + 1) - top for n in numbers], np.int8)
    data = pack_levels(levels, bits)
    assert len(data) == -(-len(levels) * bits // 8)
    np.testing.assert_array_equal(unpack_levels(data, bits, len(levels)), levels)


@pytest.mark.parametrize(
    "container,compressor,cfg",
    [
        *((container, compressor, GOLF) for container in CONTAINERS for compressor in COMPRESSORS),
        ("bytes", "zstd", shaped(TINY, **RECURSIVE_CHANGES)),
        ("bytes", "zstd", TINY),
    ],
)
def test_artifact_restores_quantization_aware_weights(
    container, compressor, cfg, tokenizer, tmp_path, machine
):
    model = model_for(tokenizer, cfg)
    stored = quantize_tensors(model.state_dict(), MIXED)
    written = choose_smallest(stored, model.cfg, tokenizer, {"seed": 7}, container, compressor)
    (tmp_path / "model.golf").write_bytes(written.data)
    found = read_artifact(tmp_path / "model.golf")
    assert (found.cfg, found.origin) == (model.cfg, {"seed": 7})
    assert found.tokenizer.fingerprint == tokenizer.fingerprint
    with LateQuantization(model, MIXED, start=0.0).forward_context(0.5):
        for name, p in model.named_parameters():
            assert torch.equal(found.weights[name], p.detach()), name
    assert found.formats["blocks.0.mlp.up.weight"] == "int5"
    built = found.build(machine)
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(built(tokens), model(tokens))
    model.load_state_dict(found.weights)
    assert torch.equal(built(tokens), model(tokens))


def test_smallest_file_is_chosen(tokenizer):
    model = model_for(tokenizer)
    stored = quantize_tensors(model.state_dict(), MIXED)
    best = choose_smallest(stored, model.cfg, tokenizer, {})
    assert len(best.tried) == 6
    assert len(best.data) == min(best.tried.values()) == best.tried[best.container, best.compressor]
    for (container, compressor), size in best.tried.items():
        alone = choose_smallest(stored, model.cfg, tokenizer, {}, container, compressor)
        assert len(alone.data) == size
    assert "<- chosen" in format_sizes(best, 10**6, True)


def test_artifact_sizes_add_up(tokenizer):
    """int8: one byte per weight plus two per row; vectors stay fp32."""
    model = model_for(tokenizer)
    written = choose_smallest(
        quantize_tensors(model.state_dict(), QuantConfig("*=int8")),
        model.cfg,
        tokenizer,
        {},
        "bytes",
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    want = sum(p.numel() + 2 * p.size(0) for p in matrices) + 4 * vectors
    assert sum(t.payload for t in written.tensors) == want
    assert sum(t.raw for t in written.tensors) == 4 * model.num_params()
    assert written.total_bytes(count_code=False) == len(written.data)
    assert written.total_bytes(count_code=True) == len(written.data) + sum(code_bytes().values())
    packed = choose_smallest(
        quantize_tensors(model.state_dict(), QuantConfig("*=int6")),
        model.cfg,
        tokenizer,
        {},
        "packed",
    )
    want = sum(-(-p.numel() * 6 // 8) + 2 * p.size(0) for p in matrices) + 4 * vectors
    assert sum(t.payload for t in packed.tensors) == want


def test_oversized_artifact_error_lists_largest_tensors(tokenizer):
    model = model_for(tokenizer)
    written = choose_smallest(quantize_tensors(model.state_dict(), MIXED), model.cfg, tokenizer, {})
    size = len(written.data)
    require_size_limit(written, size, count_code=False)
    with pytest.raises(UsageError, match="by 1;") as error:
        require_size_limit(written, size - 1, count_code=False)
    costliest = max(written.tensors, key=lambda t: t.compressed)
    assert f"largest tensors: {costliest.name} " in str(error.value)
    require_size_limit(written, size + written.code_bytes, count_code=True)
    with pytest.raises(UsageError, match="of them code"):
        require_size_limit(written, size + written.code_bytes - 1, count_code=True)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_corrupt_artifact_is_rejected(compressor, tokenizer, tmp_path):
    model = model_for(tokenizer)
    stored = quantize_tensors(model.state_dict(), MIXED)
    data = choose_smallest(stored, model.cfg, tokenizer, {}, "bytes", compressor).data
    path = tmp_path / "bad.golf"
    rng = np.random.default_rng(0)
    offsets = [0, 8, 9, 12, 14, len(data) - 1, *rng.integers(0, len(data), 40)]
    flipped = [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in map(int, offsets)]
    for content in [*flipped, b"", data[:5], data[:100], data[:-1], b"PK" + data]:
        path.write_bytes(content)
        try:
            found = read_artifact(path)
        except ValueError as error:
            assert "bad.golf is not a valid artifact" in str(error)
        else:  # the flipped bit has no effect
            assert found.formats and content not in (b"", data[:5], data[:100])
            path.write_bytes(data)
            good = read_artifact(path).weights
            assert all(torch.equal(w, good[n]) for n, w in found.weights.items())


PROGRAM = """
import json, sys, torch
from pathlib import Path
from nanochat.golf.artifact import read_artifact
from nanochat.golf.documents import document_bpb
from nanochat.distributed import DistContext
machine = DistContext(0, 0, 1, torch.device("cpu"), torch.float32)
found = read_artifact(Path("model.golf"))
texts = json.loads(Path("texts.json").read_text())
bpb = document_bpb(found.build(machine), texts, found.tokenizer, 8, 4, machine)
where = Path(sys.modules["nanochat"].__path__[0]).resolve().parent
files = [name for name, module in sys.modules.items() if not hasattr(module, "__path__")]
ours = [name for name in files if name.startswith(("nanochat.", "rustbpe.", "tasks", "scripts"))]
print(json.dumps({"bpb": bpb.value, "where": str(where), "ours": ours}))
"""


def test_counted_code_is_exactly_what_scoring_an_artifact_loads(tokenizer, tmp_path, machine):
    model = model_for(tokenizer)
    written = choose_smallest(quantize_tensors(model.state_dict(), MIXED), model.cfg, tokenizer, {})
    folder = tmp_path / "empty"
    (folder / "nanochat").mkdir(parents=True)
    (folder / "model.golf").write_bytes(written.data)
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    for name in code_bytes().keys() - {"rustbpe"}:
        path = Path("nanochat", *name.split(".")).with_suffix(".py")
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / path, folder / path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = json.loads(done.stdout)
    assert printed["where"] == str(folder.resolve())
    ours = {name.removeprefix("nanochat.").removeprefix("rustbpe.") for name in printed["ours"]}
    assert ours == code_bytes().keys()
    found = read_artifact(folder / "model.golf")
    want = document_bpb(found.build(machine), TEXTS, tokenizer, 8, 4, machine)
    assert printed["bpb"] == pytest.approx(want.value, abs=1e-6)


def save(tokenizer, tag="golf", seed=0, **settings):
    """Save a base checkpoint as training does."""
    model = lively(
        build_model(replace(GOLF, vocab_size=tokenizer.vocab_size), CPU, torch.float32, seed)
    )
    state = {
        "stage": "base",
        "settings": settings,
        "source": {"dataset": "embedded", "num_shards": 1, "fingerprint": "-"},
        "provenance": {"run_id": "r", "seed": seed, "inputs": {}},
        "progress": {"step": 3, "clock_seconds": 9.5},
        "identity": {"batch_tokens": 64},
    }
    save_checkpoint(stage_folder("base") / tag, 3, model, None, tokenizer, state)


def export_artifact(**settings):
    export.main(export.Export(format="artifact", source="base", **settings))


def test_export_and_scoring_write_report_section(base, tokenizer, machine, capsys):
    for seed in (0, 1):
        save(tokenizer, f"golf-{seed}", seed, quantize="embed.*=int8,*=int6", row_clip="max")
        export_artifact(model_tag=f"golf-{seed}")
    table = capsys.readouterr().out
    assert "embed.weight" in table and "int8" in table and "int6" in table  # formats from training
    with pytest.raises(ValueError, match="row_clip_std must be positive"):
        export_artifact(model_tag="golf-1", row_clip="std", row_clip_std=0.0)
    data = {"dataset": "embedded", "num_shards": 1}
    on_cpu = DistConfig("cpu", "float32")
    cfg = evaluate.GolfEval(max_documents=6, eval_stride=4, machine=on_cpu)
    evaluate.main(replace(cfg, data=evaluate.DataConfig(**data)))
    values = read_json(base / "report" / "parameter-golf.json")["values"]
    assert values["Seeds"] == 2 and values["Roundtrip bpb"]["n"] == 2
    checkpoint = find_checkpoint("base", "golf-1", None)
    whole = load_model(checkpoint, machine)
    texts = list(evaluate.open_source(evaluate.DataConfig(**data)).texts("world_val", 6))
    before = document_bpb(whole, texts, tokenizer, 16, 8, machine)
    artifact = read_artifact(base / "export" / "base-golf-1.golf")
    after = document_bpb(artifact.build(machine), texts, tokenizer, 16, 3, machine)
    sliding = document_bpb(artifact.build(machine), texts, tokenizer, 4, 5, machine)
    assert values["Bytes scored"] == sum(len(text.encode()) for text in texts) == before.bytes
    summary = values["base-golf-1"]
    for found, name in ((before, "before"), (after, "roundtrip"), (sliding, "sliding")):
        assert f"{name} {found.value:.4f}" in summary
    assert values["Quantization gap bpb"]["value"] == pytest.approx(
        values["Roundtrip bpb"]["value"] - values["Pre-quantization bpb"]["value"]
    )
    assert values["Within the limit"] is True
    assert "Parameter golf" in (base / "report.md").read_text()


def test_artifact_without_checkpoint_is_scored(base, tokenizer, tmp_path):
    save(tokenizer)
    export_artifact(out=str(tmp_path / "kept.golf"), quantize="*=int5")
    shutil.rmtree(stage_folder("base"))
    cfg = evaluate.GolfEval(
        artifacts=(tmp_path / "kept.golf",),
        max_documents=3,
        eval_stride=0,
        data=evaluate.DataConfig(dataset="embedded", num_shards=1),
        machine=DistConfig("cpu", "float32"),
    )
    evaluate.main(cfg)
    values = read_json(base / "report" / "parameter-golf.json")["values"]
    assert values["Roundtrip bpb"] > 0
    assert "Pre-quantization bpb" not in values and "Roundtrip sliding bpb" not in values


def test_artifacts_of_the_same_name_are_rejected(base, tokenizer, tmp_path):
    paths = [tmp_path / seed / "model.golf" for seed in "01"]
    for path in paths:
        save(tokenizer, "golf", int(path.parent.name))
        export_artifact(out=str(path))
    data = evaluate.DataConfig(dataset="embedded", num_shards=1)
    cfg = evaluate.GolfEval(tuple(paths), max_documents=1, eval_stride=0, data=data)
    with pytest.raises(ValueError, match="two have the same"):
        evaluate.main(cfg)


@pytest.mark.parametrize(
    ("seed", "form", "problem"),
    [(1, "int5", "not seeds of one recipe"), (0, "int8", "the same seed, 0")],
)
def test_artifacts_that_are_not_seeds_of_one_recipe_are_rejected(
    seed, form, problem, base, tokenizer, tmp_path
):
    paths = tmp_path / "a.golf", tmp_path / "b.golf"
    for path, own, quantize in zip(paths, (0, seed), ("int8", form), strict=True):
        save(tokenizer, path.stem, own)
        export_artifact(model_tag=path.stem, out=str(path), quantize=f"*={quantize}")
    data = evaluate.DataConfig(dataset="embedded", num_shards=1)
    on_cpu = DistConfig("cpu", "float32")
    cfg = evaluate.GolfEval(paths, eval_stride=0, max_documents=1, data=data, machine=on_cpu)
    with pytest.raises(UsageError, match=f"b.golf and .*a.golf .*{problem}(.|\n)*--artifacts"):
        evaluate.main(cfg)


def test_oversized_artifact_is_not_written(base, tokenizer, capsys):
    save(tokenizer)
    with pytest.raises(UsageError, match="exceed the limit of 40,000"):
        export_artifact(limit_bytes=40_000)
    assert "embed.weight" in capsys.readouterr().out  # the size table is still printed
    assert not list((base / "export").glob("*"))
    export_artifact(limit_bytes=40_000, count_code=False)
    assert (base / "export" / "base-golf.golf").stat().st_size <= 40_000
