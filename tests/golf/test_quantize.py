"""Quantization against a reference in numpy; what is trained on is what the file stores."""

import numpy as np
import pytest
import torch

from nanochat.golf.quantize import (
    BITS,
    QuantConfig,
    dequantize_rows,
    quantize_dequantize,
    quantize_rows,
)


def draw() -> torch.Tensor:
    """Rows of very different magnitudes, one zero and one tiny, one with an outlier."""
    w = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-3, 1, 9)[:, None]
    w[3], w[4], w[5, 0] = 0.0, 1e-9 * w[4], 4 * w[5].abs().max()
    return w


def reference(w, bits, cfg):
    """Scales and levels, one row at a time."""
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
        found.append(np.clip(np.rint(row / (np.float32(scale) or np.float32(1))), -top, top))
    return np.array(scales, np.float32), np.array(found)


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("clip", ["max", "quantile", "std"])
def test_levels_and_scales_match_the_reference(form, clip):
    w, cfg = draw(), QuantConfig(row_clip=clip, row_clip_std=2.0)
    scale, level = quantize_rows(w, form, cfg)
    want_scale, want_level = reference(w, BITS[form], cfg)
    np.testing.assert_allclose(scale.float(), want_scale, rtol=1e-3)
    assert (np.abs(level.numpy() - want_level) <= 1).all()
    assert (level.numpy() == want_level).mean() > 0.99
    assert int(level.abs().max()) == 2 ** (BITS[form] - 1) - 1


@pytest.mark.parametrize("clip", ["max", "quantile", "mse", "std"])
@pytest.mark.parametrize("form", [*BITS, "fp16", "fp32"])
def test_training_weights_equal_stored_weights_bitwise(form, clip):
    w, cfg = draw(), QuantConfig(row_clip=clip)
    found = quantize_dequantize(w, form, cfg)
    if form in BITS:
        assert torch.equal(found, dequantize_rows(*quantize_rows(w, form, cfg)))
    else:
        assert torch.equal(found, w.half().float() if form == "fp16" else w)
    if clip == "max":
        assert torch.equal(quantize_dequantize(found, form, cfg), found)
    if clip == "mse":
        plain = quantize_dequantize(w, form, QuantConfig())
        errors = [(x - w).square().sum(1) for x in (found, plain)]
        assert bool((errors[0] <= errors[1] + 1e-6).all())
        assert form != "int5" or errors[0].sum() < 0.99 * errors[1].sum()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("form", BITS)
def test_gpu_and_cpu_quantize_identically(form):
    w = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
    on_gpu = quantize_dequantize(w.cuda(), form, QuantConfig())
    assert torch.equal(on_gpu.cpu(), quantize_dequantize(w, form, QuantConfig()))


MATRICES = {
    name: torch.ones(4, 4)
    for name in ("embed.weight", "blocks.0.q.weight", "blocks.1.mlp.up.weight", "blocks.1.q.weight")
}


def test_first_matching_rule_wins_and_vectors_stay_fp32():
    rules = "embed.*=fp16, *.mlp.*=int5,blocks.1.*=int8,*=int6"
    found = QuantConfig(rules).formats({**MATRICES, "gains": torch.ones(4)})
    assert list(found.values()) == ["fp16", "int6", "int5", "int8", "fp32"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("*.mlp.fc.*=int6,*=int8", "matches none"),  # a misspelled layer
        ("*.mlp.*=int6", "no rule matches"),
        ("*=int7", "int7"),
        ("int8", "invalid rule"),
    ],
)
def test_invalid_settings_are_rejected(rules, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(rules).formats(MATRICES)
    with pytest.raises(ValueError, match="row_clip_std must be positive, got 0"):
        QuantConfig(row_clip_std=0.0)
    with pytest.raises(ValueError, match="float16"):
        quantize_rows(torch.full((2, 2), 1e8), "int6", QuantConfig())
