"""Golf model and optimizer: options, tied embeddings, weight decay, average of the weights."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from nanochat.checkpoint import build_model, new_model, read_config
from nanochat.golf.model import GolfConfig, exclude_self
from nanochat.golf.qat import AveragingMuonAdamW
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.optim import OptimConfig, set_schedule
from nanochat.scaling import Horizon
from scripts.golf.base_train import GolfShape, GolfTrain
from tests.conftest import GOLF_CHANGES, TINY, lively, shaped

GOLF = shaped(TINY, **GOLF_CHANGES)
CPU, HORIZON = torch.device("cpu"), Horizon(100, 4096)
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return lively(build_model(GOLF, CPU, torch.float32, seed=0))


def rules_for(**settings):
    cfg = GolfTrain(golf_shape=GolfShape(tie_embeddings=True), **settings)
    return cfg.rules(OptimConfig(weight_decay=0.1), HORIZON, GOLF.d_model)


def test_config_is_rebuilt_from_its_values():
    assert read_config(asdict(GOLF)) == GOLF and type(GOLF) is GolfConfig


def test_golf_model_matches_record_parameter_count():
    """The record has 19,417,152 parameters; 18,432 are per-channel scales that this model lacks."""
    plain = GPTConfig(1024, 8, 512, 8, 4, 64, 2048, mlp_ratio=3, value_every=0, smear=False)
    options = GolfShape(tie_embeddings=True, rope_dims=32, xsa_last_n=2, qk_gain_init=1.5)
    with torch.device("meta"):
        count = new_model(options.apply(replace(plain, backout=False))).num_params()
    assert count == 19_417_152 - 18_432 + 2 * 8


@pytest.mark.parametrize("position", [0, 7, 15])
def test_a_token_cannot_change_earlier_logits(model, position):
    changed = TOKENS.clone()
    changed[:, position] = (changed[:, position] + 1) % 64
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, position], after[:, position])


def test_cached_logits_of_the_inference_copy_match_the_forward_pass(model):
    twin = inference_copy(model)
    cache, found = twin.new_cache(2), []
    for first, last in ((0, 5), (5, 6), (6, 16)):
        view = cache.view([0, 1], last - first)
        found.append(twin.logits(twin.hidden(TOKENS[:, first:last], view)))
        cache.lengths = [last, last]
    torch.testing.assert_close(torch.cat(found, dim=1), model(TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rope_dims", "xsa_last_n", "qk_gain_init", "tie_embeddings"])
def test_each_option_changes_the_logits(model, name):
    other = new_model(replace(GOLF, **{name: GolfConfig.__dataclass_fields__[name].default}))
    other.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(other(TOKENS), model(TOKENS), atol=1e-4)


def test_tied_embeddings_are_one_parameter_with_both_gradients(model):
    assert "head.weight" not in model.state_dict()
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
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


@pytest.mark.parametrize("adam_wd", [None, 0.04])
@pytest.mark.parametrize("rule", ["cautious", "decoupled"])
def test_weight_decay_without_gradient(model, machine, rule, adam_wd):
    """Decoupled decay does not depend on the update and does not fade (decay_factor 0.5)."""
    rules = rules_for(decay_rule=rule, adam_wd=adam_wd)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = AveragingMuonAdamW(model, rules, machine, decoupled=rule == "decoupled")
    set_schedule(optimizer, 0.5, momentum=0.9, decay_factor=0.5)
    optimizer.step()
    for name, p in model.named_parameters():
        own = rules[name.split(".")[0]]
        decay = own.weight_decay * (own.kind == "adamw" or rule == "decoupled")
        assert adam_wd is None or own.kind == "muon" or decay == adam_wd
        want = before[name] * (1 - 0.5 * own.lr * decay)
        torch.testing.assert_close(p.detach(), want, rtol=1e-6, atol=0)


def test_average_is_updated_saved_restored_and_applied(model, machine):
    optimizer = AveragingMuonAdamW(model, rules_for(), machine, ema_decay=0.25)
    named = dict(model.named_parameters())
    want = {name: p.detach().clone() for name, p in named.items()}
    for step in (1, 2, 3):
        model.loss(TOKENS, TOKENS).backward()
        optimizer.step()
        keep = min(0.25, (1 + step) / (10 + step))  # lower at first, to forget the initial weights
        want = {n: keep * w + (1 - keep) * named[n].detach() for n, w in want.items()}
    other = build_model(GOLF, CPU, torch.float32, seed=1)
    resumed = AveragingMuonAdamW(other, rules_for(), machine, ema_decay=0.25)
    resumed.load_full_state(dict(optimizer.full_state()))
    assert resumed.take_average()
    for name, p in other.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=1e-5, atol=1e-6)


def test_without_decay_there_is_no_average(model, machine):
    optimizer = AveragingMuonAdamW(model, rules_for(), machine)
    before = model.embed.weight.detach().clone()
    assert not optimizer.take_average() and torch.equal(model.embed.weight, before)
    assert not any(name.endswith(".average") for name, _ in optimizer.full_state())


def test_tied_embedding_and_gains_have_rules_of_their_own():
    rules = rules_for(tied_lr=0.03)
    assert rules["embed"].lr == pytest.approx(0.03 * (GOLF.d_model / 768) ** -0.5)
    assert rules["gains"].kind == "adamw"
    untied = GolfTrain().rules(OptimConfig(), HORIZON, GOLF.d_model)
    assert untied["embed"].lr > 5 * rules["embed"].lr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_dims": 3}, "got 3"),
        ({"rope_dims": 10}, "head_dim 8, got 10"),
        ({"xsa_last_n": 3}, "0 to 2, got 3"),
        ({"qk_gain_init": 0.0}, "got 0.0"),
    ],
)
def test_invalid_option_is_rejected_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        replace(GOLF, **change)
