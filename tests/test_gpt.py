"""The GPT model against its formulas: logits, causality, losses, initialization, counts."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanochat.checkpoint import build_model
from nanochat.gpt import GPT, copy_weights, inference_copy
from nanochat.loss import IGNORE
from tests.conftest import TINY, lively

FOUR = replace(TINY, n_layer=4)
VARIANTS = {  # config, keys seen by each layer, layers with value embeddings
    "default": (FOUR, [16] * 4, [1, 3]),
    "classic": (FOUR.classic(), [16] * 4, []),
    "windows": (
        replace(FOUR, window_pattern="SSLS", max_seq_len=200),
        [128, 128, 200, 200],
        [1, 3],
    ),
    "one layer": (replace(TINY, n_layer=1), [16], [0]),
    "no GQA": (replace(FOUR, n_kv_head=4, value_every=1, smear=False), [16] * 4, [0, 1, 2, 3]),
}


def seeded():
    return torch.Generator().manual_seed(0)


TOKENS = torch.randint(64, (3, 16), generator=seeded())
LONG = torch.randint(64, (2, 200), generator=seeded())


def build(cfg=TINY, dtype=torch.float32):
    return lively(build_model(cfg, torch.device("cpu"), dtype, 0))


def rms_norm(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def reference_logits(model, ids, windows, value_layers):
    """Logits (T, V) of one sequence in float64, without any code of the model."""
    cfg, T = model.cfg, len(ids)
    weights = {name.removesuffix(".weight"): x.double() for name, x in model.state_dict().items()}
    x = rms_norm(weights["embed"][ids])
    if cfg.smear:
        gate = torch.sigmoid(x[1:, :24] @ weights["smear_gate"].T)
        x = torch.cat((x[:1], x[1:] + weights["smear"] * gate * x[:-1]))
    x0, t, D = x, torch.arange(T)[:, None], cfg.head_dim
    # Channels i and i + D/2 at position t are a complex number, turned back by t theta^(-2i/D)
    turn = torch.exp(-1j * t[..., None] * cfg.rope_theta ** (-torch.arange(0, D, 2).double() / D))
    for layer in range(cfg.n_layer):
        start = f"blocks.{layer}."
        own = {n.removeprefix(start): w.T for n, w in weights.items() if n.startswith(start)}
        if cfg.residual_scalars:
            x = weights["residual"][layer] * x + weights["skip"][layer] * x0
        h = rms_norm(x)
        q, k, v = ((h @ own[f"attention.{n}"]).view(T, -1, D) for n in "qkv")
        if layer in value_layers:
            values = weights["value_embeds"][ids].view(T, len(value_layers), *v.shape[1:])
            gate = torch.sigmoid(h[:, :12] @ own["attention.gate"])[..., None]
            v = v + 3 * gate * values[:, value_layers.index(layer)]
        k, v = (each.repeat_interleave(cfg.n_head // cfg.n_kv_head, 1) for each in (k, v))
        q, k = (cfg.qk_gain * turn * torch.complex(*rms_norm(x).chunk(2, -1)) for x in (q, k))
        scores = torch.einsum("ihd,jhd->hij", q, k.conj()).real / math.sqrt(D)
        unseen = (t < t.T) | (t - t.T > windows[layer])
        attention = scores.masked_fill(unseen, -math.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", attention, v).flatten(1) @ own["attention.out"]
        x = x + (rms_norm(x) @ own["mlp.up"]).relu().square() @ own["mlp.down"]
        if layer == cfg.n_layer // 2:
            middle = x
    if cfg.backout:
        x = x - weights["backout"] * middle
    return 15 * torch.tanh(rms_norm(x) @ weights["head"].T / 15)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_the_formulas(name):
    cfg, *layout = VARIANTS[name]
    model, tokens = build(cfg), LONG[:, : cfg.max_seq_len]
    want = torch.stack([reference_logits(model, ids, *layout) for ids in tokens])
    torch.testing.assert_close(model(tokens).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_token_changes_its_own_and_later_logits_only(name):
    model, tokens = build(VARIANTS[name][0]), TOKENS[:1].expand(16, -1)
    changed = (tokens + torch.eye(16, dtype=torch.int64)) % 64  # row i differs at position i
    differs = (model(tokens) - model(changed)).abs().amax(-1) > 1e-6
    assert torch.equal(differs, torch.ones(16, 16).triu().bool())


@pytest.mark.parametrize(
    ("name", "compiled"), [*((n, False) for n in VARIANTS), ("one layer", True)]
)
def test_loss_and_gradients_are_those_of_cross_entropy(name, compiled):
    model, targets = build(VARIANTS[name][0]), TOKENS.roll(-1, 1)
    targets[:, -1] = IGNORE
    weights = torch.rand(TOKENS.shape, generator=seeded())
    nats = F.cross_entropy(model(TOKENS).mT, targets, ignore_index=IGNORE, reduction="none")
    wanted = torch.autograd.grad((nats * weights).sum(), tuple(model.parameters()))
    if compiled:
        model.compile()
    torch.testing.assert_close(model.token_losses(TOKENS, targets), nats, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.loss(TOKENS, targets), nats.sum(), rtol=1e-5, atol=1e-4)
    model.loss(TOKENS, targets, tensors=(weights,)).backward()
    for (name, p), want in zip(model.named_parameters(), wanted, strict=True):
        assert want.any(), name
        torch.testing.assert_close(p.grad, want, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_residual_scalars_are_not_rounded():
    """bfloat16 has steps of 0.0078 near 1: too coarse for a learning rate of 0.005."""
    model = build_model(TINY, torch.device("cpu"), torch.bfloat16, 0)  # its layers add nothing yet
    seen = []
    model.residual.fill_(1.003)
    model.blocks[0].register_forward_hook(lambda _, args, y: seen.extend((args[1], y)))
    model(TOKENS)
    assert torch.equal(seen[1], (1.203 * seen[0].float()).bfloat16())


def test_B15_rope_is_correct_after_meta_device_loading(tiny_gpt):
    with torch.device("meta"):
        loaded = GPT(TINY)
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(tiny_gpt.state_dict())
    assert torch.equal(loaded(TOKENS), tiny_gpt(TOKENS))


@torch.no_grad()
def test_inference_copy_gives_equal_logits_and_takes_new_weights():
    model = build(FOUR, torch.bfloat16)
    twin = inference_copy(model)
    addresses = {weight.data_ptr() for weight in twin.parameters()}
    for factor in (1.0, 1.25):
        for weight in model.parameters():
            weight.mul_(factor)
        copy_weights(twin, model)
        assert torch.equal(model(TOKENS), twin(TOKENS))
    assert addresses == {weight.data_ptr() for weight in twin.parameters()}
    assert {w.dtype for w in twin.parameters() if w.ndim > 1} == {torch.bfloat16}


@pytest.mark.parametrize("change", [{"n_kv_head": 3}, {"window_pattern": "SX"}])
def test_invalid_config_is_rejected_with_its_value(change):
    [value] = change.values()
    with pytest.raises(ValueError, match=str(value)):
        replace(TINY, **change)
