"""Quantization matches its definition; training uses exactly the weights of the artifact."""

import numpy as np
import pytest
import torch

from nanochat.checkpoint import build_model
from nanochat.golf.qat import LateQuantization
from nanochat.golf.quantize import (
    BITS,
    QuantConfig,
    dequantize_rows,
    quantize_dequantize,
    quantize_rows,
)
from tests.conftest import TINY, lively

CLIPS = ("max", "quantile", "mse", "std")


def draw(rows=9, columns=40):
    """Rows of very different magnitudes, one zero and one tiny."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-3, 1, rows)[:, None]
    w[3], w[4] = 0.0, 1e-9 * w[4]
    return w


def reference(w, bits, cfg):
    """Quantize one row at a time, in numpy."""
    top = 2 ** (bits - 1) - 1
    scales, found = [], []
    for row in w.numpy().astype(np.float32):
        reach = np.abs(row).max()
        if cfg.row_clip == "quantile":
            reach = np.quantile(np.abs(row), np.float32(0.9999984))
        elif cfg.row_clip == "std":
            reach = min(reach, cfg.row_clip_std * np.sqrt((row**2).mean()))
        scale = np.float16(reach / np.float32(top))
        if scale == 0 and reach > 0:
            scale = np.finfo(np.float16).tiny
        scales.append(scale)
        step = np.float32(scale) if scale else np.float32(1)
        found.append(np.clip(np.rint(row / step), -top, top))
    return np.array(scales, np.float16), np.array(found)


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("clip", ["max", "quantile", "std"])
def test_levels_and_scales_match_reference(form, clip):
    w, cfg = draw(), QuantConfig(row_clip=clip, row_clip_std=2.0)
    scale, level = quantize_rows(w, form, cfg)
    want_scale, want_level = reference(w, BITS[form], cfg)
    np.testing.assert_allclose(scale.float(), want_scale.astype(np.float32), rtol=1e-3)
    assert (np.abs(level.numpy() - want_level) <= 1).all()
    assert (level.numpy() == want_level).mean() > 0.99
    assert int(level.abs().max()) <= 2 ** (BITS[form] - 1) - 1


@pytest.mark.parametrize("form", BITS)
def test_unclipped_rounding_error_is_at_most_half_a_step(form):
    w, cfg = draw(), QuantConfig()
    scale, level = quantize_rows(w, form, cfg)
    moved = (dequantize_rows(scale, level) - w).abs()
    # rounding the scale to float16 may put the largest weight just outside the grid
    reach = scale.float()[:, None] * (0.5 + 2**-10 * (2 ** (BITS[form] - 1)))
    assert bool((moved <= reach).all())
    assert bool((dequantize_rows(scale, level)[3] == 0).all())


def test_mse_clip_minimizes_squared_error():
    w = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    w[:, 0] *= 4

    def error(clip):
        return (quantize_dequantize(w, "int5", QuantConfig(row_clip=clip)) - w).square().sum(1)

    assert bool((error("mse") <= error("max") + 1e-6).all())
    assert error("mse").sum() < 0.9 * error("max").sum()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("form", [*BITS, "fp16", "fp32"])
def test_training_weights_equal_stored_weights_bitwise(form, clip):
    w, cfg = draw(), QuantConfig(row_clip=clip)
    if form in BITS:
        want = dequantize_rows(*quantize_rows(w, form, cfg))
    else:
        want = w.half().float() if form == "fp16" else w
    assert torch.equal(quantize_dequantize(w, form, cfg), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("form", BITS)
def test_gpu_and_cpu_quantize_identically(form):
    w = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
    on_gpu = quantize_dequantize(w.cuda(), form, QuantConfig())
    assert torch.equal(on_gpu.cpu(), dequantize_rows(*quantize_rows(w, form, QuantConfig())))


@pytest.mark.parametrize("form", BITS)
def test_quantization_is_idempotent(form):
    once = quantize_dequantize(draw(), form, QuantConfig())
    assert torch.equal(quantize_dequantize(once, form, QuantConfig()), once)


def test_scale_overflow_is_rejected():
    with pytest.raises(ValueError, match="float16"):
        quantize_rows(torch.full((2, 2), 1e8), "int6", QuantConfig())


def test_first_matching_rule_wins_and_vectors_stay_fp32():
    tensors = dict(build_model(TINY, torch.device("cpu"), torch.float32, 0).named_parameters())
    formats = QuantConfig("embed.*=fp16, *.mlp.*=int5,blocks.1.*=int8,*=int6").formats(tensors)
    assert formats["embed.weight"] == "fp16"
    assert formats["blocks.1.mlp.up.weight"] == "int5"
    assert formats["blocks.1.attention.q.weight"] == "int8"
    assert formats["blocks.0.attention.q.weight"] == "int6"
    assert formats["residual"] == formats["skip"] == "fp32"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("*.mlp.fc.*=int6,*=int8", "matches none"),  # a misspelled layer name
        ("*.mlp.*=int6", "no rule matches"),
        ("*=int7", "int7"),
        ("int8", "invalid rule"),
        ("", "invalid rule"),
    ],
)
def test_invalid_quantize_rules_are_rejected(rules, message):
    tensors = dict(build_model(TINY, torch.device("cpu"), torch.float32, 0).named_parameters())
    with pytest.raises(ValueError, match=message):
        QuantConfig(rules).formats(tensors)


@pytest.mark.parametrize(("setting", "value"), [("row_clip", "most"), ("row_clip_std", 0.0)])
def test_invalid_clips_are_rejected(setting, value):
    with pytest.raises(ValueError, match=str(value)):
        QuantConfig(**{setting: value})


def test_late_quantization_does_not_recompile_the_model():
    """An on/off flag in the model would be constant-folded by the compiler."""
    model = lively(build_model(TINY, torch.device("cpu"), torch.float32, seed=0))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    eager = model.loss(tokens, tokens).item()
    named = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in named.items()}
    late = LateQuantization(model, QuantConfig("*.mlp.*=int5,*=int6"), start=0.5)
    model.compile(backend="aot_eager")
    losses, graphs = [], []
    torch._dynamo.utils.counters.clear()
    for done in (0.0, 0.49, 0.5, 0.9, 0.1):
        with late.forward_context(done):
            loss = model.loss(tokens, tokens)
            loss.backward()
            losses.append(loss.item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1
    off, also_off, on, still_on, off_again = losses
    assert off == also_off == off_again == pytest.approx(eager, rel=1e-5)
    assert on == still_on and abs(on - off) > 1e-3
    assert all(torch.equal(p, before[n]) for n, p in named.items())
    stored = {
        n: quantize_dequantize(p.detach(), late.formats[n], late.cfg) for n, p in named.items()
    }
    model.load_state_dict(stored)
    assert model.loss(tokens, tokens).item() == on


def test_weights_are_restored_after_a_failed_step():
    model = build_model(TINY, torch.device("cpu"), torch.float32, seed=0)
    named = dict(model.named_parameters())
    before = {n: p.detach().clone() for n, p in named.items()}
    late = LateQuantization(model, QuantConfig(), 0.0)
    with pytest.raises(torch.OutOfMemoryError), late.forward_context(0.0):
        assert not torch.equal(model.embed.weight, before["embed.weight"])
        raise torch.OutOfMemoryError
    assert all(torch.equal(p, before[n]) for n, p in named.items())
