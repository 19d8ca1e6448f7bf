"""The golf model: options, tied embeddings, decoding; bits per byte of documents."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanochat.eval_bpb import document_bpb
from nanochat.golf.model import GolfConfig, GolfGPT, exclude_self
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer
from tests.conftest import TINY, lively
from tests.golf.helpers import GOLF_CHANGES, decode

GOLF = GolfConfig(**{**asdict(TINY), **GOLF_CHANGES})
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def model_of(cfg: GolfConfig) -> Any:
    model: Any = GolfGPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return lively(model)


def test_golf_model_matches_the_record_parameter_count():
    """The record has 19,417,152 parameters; 18,432 are per-channel scales that this model lacks."""
    plain = GPTConfig(
        1024, 8, 512, 8, 4, 64, 2048, mlp_ratio=3, value_every=0, smear=False, backout=False
    )
    options = {"tie_embeddings": True, "rope_dims": 32, "xsa_last_n": 2, "qk_gain_init": 1.5}
    with torch.device("meta"):
        count = GolfGPT(GolfConfig(**{**asdict(plain), **options})).num_params()
    assert count == 19_417_152 - 18_432 + 2 * 8


def test_decoding_is_causal_and_equals_the_forward_pass():
    model, changed = model_of(GOLF), TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7], after[:, 7])
    torch.testing.assert_close(decode(model, TOKENS), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rope_dims", "xsa_last_n", "qk_gain_init", "tie_embeddings"])
def test_each_option_changes_the_logits(name):
    model = model_of(GOLF)
    other = model_of(replace(GOLF, **{name: GolfConfig.__dataclass_fields__[name].default}))
    other.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(other(TOKENS), model(TOKENS), atol=1e-4)


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


def test_exclusive_attention_removes_the_component_along_the_value():
    y, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    out = exclude_self(y, v)
    along = (out * v.repeat_interleave(2, dim=2)).sum(-1)
    torch.testing.assert_close(along, torch.zeros_like(along), rtol=0, atol=1e-5)
    torch.testing.assert_close(exclude_self(out, v), out)


@pytest.mark.parametrize(
    "change", [{"rope_dims": 3}, {"rope_dims": 10}, {"xsa_last_n": 3}, {"qk_gain_init": 0.0}]
)
def test_invalid_option_is_rejected_with_its_value(change):
    with pytest.raises(ValueError, match=f"got {next(iter(change.values()))}"):
        replace(GOLF, **change)


@pytest.mark.parametrize(("stride", "rows"), [(16, 4), (8, 3), (1, 7), (3, 2)])
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
    for wrong in (0, 17):
        with pytest.raises(ValueError, match=str(wrong)):
            document_bpb(model, texts, tokenizer, wrong, rows, dist)
