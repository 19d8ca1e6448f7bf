"""The golf model: options, tied embeddings, decoding; bits per byte; quantization."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanochat.eval_bpb import document_bpb
from nanochat.golf.model import GolfConfig, GolfGPT
from nanochat.golf.quantize import (
    BITS,
    QuantConfig,
    dequantize_rows,
    quantize_dequantize,
    quantize_rows,
)
from nanochat.tokenizer import Tokenizer
from tests.conftest import GOLF_CHANGES, TINY, decode, lively

GOLF = GolfConfig(**{**asdict(TINY), **GOLF_CHANGES})
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def model_of(cfg: GolfConfig) -> Any:
    model: Any = GolfGPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return lively(model)


def test_decoding_is_causal_and_equals_the_forward_pass():
    model, changed = model_of(GOLF), TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7], after[:, 7])
    torch.testing.assert_close(decode(model, TOKENS), before, rtol=1e-4, atol=1e-5)


def test_tied_embeddings_get_both_gradients():
    model = model_of(GOLF)
    assert not any(name.startswith("head") for name in model.state_dict())
    model.loss(TOKENS, TOKENS).backward()
    both = model.embed.weight.grad.clone()
    free = model.embed.weight.detach().clone().requires_grad_()
    model.zero_grad()
    logits = 15 * torch.tanh(F.linear(model.hidden(TOKENS), free) / 15)
    F.cross_entropy(logits.mT, TOKENS, reduction="sum").backward()
    torch.testing.assert_close(model.embed.weight.grad + free.grad, both, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("stride", "rows"), [(16, 4), (1, 7), (3, 2)])
def test_document_bpb_matches_a_token_by_token_reference(stride, rows, dist):
    """The reference scores each token separately: 16 in the first window, then `stride` in each."""
    texts = ["Zoë walks \N{SNOWMAN} home, slowly, to 1,234 \t letters.\n", "a", "Tom is. " * 4]
    tokenizer, nats = Tokenizer.train(texts, 300), 0.0
    model = model_of(replace(GOLF, vocab_size=tokenizer.vocab_size))
    for text in texts:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        for i in range(1, len(ids)):
            begin = -(-max(0, i - 16) // stride) * stride
            logits = model(torch.tensor([ids[begin:i]]))[0, -1].detach()
            nats -= float(logits.log_softmax(-1)[ids[i]])
    found = document_bpb(model, texts, tokenizer, stride, rows, dist)
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert found.nats == pytest.approx(nats, rel=1e-5)


# ---- Quantization --------------------------------------------------------------------------------


def draw() -> torch.Tensor:
    """Rows of very different magnitudes, one zero and one tiny, one with an outlier."""
    w = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-3, 1, 9)[:, None]
    w[3], w[4], w[5, 0] = 0.0, 1e-9 * w[4], 4 * w[5].abs().max()
    return w


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("clip", ["max", "quantile", "std"])
def test_weights_are_rounded_to_the_nearest_level_of_their_range(form, clip):
    w, top = draw(), 2 ** (BITS[form] - 1) - 1
    scale, level = quantize_rows(w, form, QuantConfig(row_clip=clip, row_clip_std=2.0))
    reach = w.abs().quantile(0.9999984 if clip == "quantile" else 1.0, dim=1)
    if clip == "std":
        reach = reach.minimum(2 * w.square().mean(1).sqrt())
    wanted = reach / top
    wanted[4] = 2.0**-14  # the smallest normal float16
    torch.testing.assert_close(scale.float(), wanted, rtol=1e-2, atol=1e-7)
    ends = scale.float()[:, None] * top
    errors = (dequantize_rows(scale, level) - w.clamp(-ends, ends)).abs()
    assert bool((errors <= 0.5001 * ends / top).all()) and int(level.abs().max()) == top


@pytest.mark.parametrize("clip", ["max", "quantile", "mse", "std"])
@pytest.mark.parametrize("form", BITS)
def test_training_weights_equal_stored_weights_bitwise(form, clip):
    w, cfg = draw(), QuantConfig(row_clip=clip)
    found = quantize_dequantize(w, form, cfg)
    assert torch.equal(found, dequantize_rows(*quantize_rows(w, form, cfg)))
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
    ],
)
def test_invalid_rules_are_rejected(rules, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(rules).formats(MATRICES)
