"""The GPT model: causality, parts of the recipe, initialization, counts, gradients."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import loss as loss_module
from nanochat.attention import rotary, rotate
from nanochat.checkpoint import build_model
from nanochat.common import REPOSITORY
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.loss import IGNORE
from nanochat.optim import OptimConfig
from nanochat.scaling import make_rules
from tests.conftest import TINY, lively

CPU = torch.device("cpu")
VARIANTS = {
    "default": TINY,
    "classic": TINY.classic(),
    "windows": replace(TINY, window_pattern="SSL", max_seq_len=600),
    "one layer": replace(TINY, n_layer=1),
    "no GQA": replace(TINY, n_kv_head=4),
}


@pytest.mark.parametrize("position", [0, 7, 15])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_cannot_change_earlier_logits(name, position):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, position], after[:, position])


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_equals_cross_entropy_of_logits(name):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    logits = model(tokens).flatten(0, 1)
    want = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(model.loss(tokens, targets), want.sum(), rtol=1e-5, atol=1e-4)
    got = model.token_losses(tokens, targets).flatten()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocks"])
@pytest.mark.parametrize("name", VARIANTS)
def test_layers_return_compute_dtype(name, backend):
    model = lively(build_model(VARIANTS[name], CPU, torch.bfloat16, seed=0))
    for block in model.blocks:
        block.attention.backend = backend
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    for each in (model, inference_copy(model)):
        dtypes = []
        for block in each.blocks:
            block.register_forward_hook(lambda _, __, y, seen=dtypes: seen.append(y.dtype))
        with torch.no_grad():
            each.token_losses(tokens, tokens, segments=tokens // 32)
            assert each(tokens).dtype == torch.float32
        assert set(dtypes) == {torch.bfloat16}


def test_initial_loss_is_log_of_vocab_size():
    model = build_model(TINY, CPU, torch.float32, seed=0)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert model.loss(tokens, tokens).item() / 32 == pytest.approx(math.log(64), rel=0.01)


def test_initial_weights_depend_only_on_seed():
    first, again, other = (build_model(TINY, CPU, torch.float32, seed=s) for s in (3, 3, 4))
    torch.rand(5)  # the global generator has no effect
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_has_rule_and_gradient(name):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    rules = make_rules(OptimConfig(), TINY.d_model)
    assert {n.split(".")[0] for n, _ in model.named_parameters()} <= rules.keys()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens.roll(1, 1)).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, parameter_name


def test_compiled_model_matches_eager(tiny_gpt):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    eager = tiny_gpt.loss(tokens, tokens)
    eager.backward()
    plain = {n: p.grad.clone() for n, p in tiny_gpt.named_parameters()}
    tiny_gpt.zero_grad()
    tiny_gpt.compile()
    compiled = tiny_gpt.loss(tokens, tokens)
    compiled.backward()
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-4)
    for name, p in tiny_gpt.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-3, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest output of any operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_full_logits_are_never_materialized(monkeypatch):
    cfg = replace(TINY, vocab_size=1000, max_seq_len=64)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 1 << 15)
    model = build_model(cfg, CPU, torch.float32, seed=0)
    tokens = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as training:
        model.loss(tokens, tokens).backward()
    with LargestTensor() as scoring:
        model.token_losses(tokens, tokens)
    assert scoring.elements <= training.elements < 4 * 64 * 1000 / 4


def test_rope_scores_depend_only_on_distance():
    cos, sin = rotary(torch.arange(12), 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    rotated_q = rotate(q.expand(1, 12, 1, 8), cos, sin)[0, :, 0]
    rotated_k = rotate(k.expand(1, 12, 1, 8), cos, sin)[0, :, 0]
    scores = rotated_q @ rotated_k.T  # (12, 12)
    for distance in range(12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_smear_adds_a_gated_share_of_the_previous_embedding():
    model = lively(build_model(TINY, CPU, torch.float32, seed=0))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    found = model.smear_embeddings(x)
    gate = torch.sigmoid(x[..., :24] @ model.smear_gate.weight[0])
    assert torch.equal(found[:, 0], x[:, 0]), "the first token has no previous one"
    for t in range(1, 5):
        want = x[:, t] + model.smear * gate[:, t, None] * x[:, t - 1]
        torch.testing.assert_close(found[:, t], want)
    segments = torch.tensor([[0, 0, 1, 1, 1]]).expand(2, 5)
    apart = model.smear_embeddings(x, segments=segments)
    assert torch.equal(apart[:, 2], x[:, 2]) and torch.equal(apart[:, 3], found[:, 3])


def test_backout_subtracts_the_output_of_the_middle_layer():
    cfg = replace(TINY, n_layer=3, residual_scalars=False, smear=False)
    model = lively(build_model(cfg, CPU, torch.float32, seed=0))
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, y: outputs.append(y))
    hidden = model.hidden(torch.arange(16)[None])
    want = F.rms_norm(outputs[2] - model.backout * outputs[1], (32,))
    torch.testing.assert_close(hidden, want)


def test_residual_scalars_are_not_rounded():
    """bfloat16 has steps of 0.0078 near 1: too coarse for a learning rate of 0.005."""
    model = lively(build_model(replace(TINY, value_every=0), CPU, torch.bfloat16, seed=0))
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    block, seen = model.blocks[0], []
    block.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rope = rotary(torch.arange(4), 8, 1e4, torch.bfloat16)
    for scale in (1.0, 1.003):
        block(x, x, torch.tensor([scale, 0.5]), rope, None)
    want = F.rms_norm((1.503 * x.float()).bfloat16(), (32,))
    assert torch.equal(seen[1], want)


@pytest.mark.parametrize(
    ("value_every", "layers"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [1, 4])]
)
def test_value_embeddings_count_back_from_the_last_layer(value_every, layers):
    cfg = replace(TINY, n_layer=5, value_every=value_every)
    assert cfg.value_layers == layers
    model = GPT(cfg)
    assert [i for i, block in enumerate(model.blocks) if block.attention.gate] == layers
    assert (model.value_embeds is None) == (not layers)
    if model.value_embeds:
        assert model.value_embeds.weight.shape == (64, len(layers) * 16)


def test_B15_rope_is_correct_after_meta_device_loading(tiny_gpt):
    with torch.device("meta"):
        loaded = GPT(TINY)
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(tiny_gpt.state_dict())
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens), tiny_gpt(tokens))


def test_building_model_does_not_import_compiler():
    """Importing the compiler takes longer than all other work before the first answer."""
    program = (
        "import sys, torch\n"
        "from nanochat.gpt import GPT\n"
        "from tests.conftest import TINY\n"
        "with torch.device('meta'): GPT(TINY)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


def test_params_and_flops_match_reference_report():
    shape = GPTConfig(65_536, 8, 512, 4, 4, 128, 2048).classic()
    with torch.device("meta"):
        model = GPT(shape)
    assert model.num_params() == 92_274_688
    assert model.flops_per_token() == 452_984_832


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_kv_head": 3}, "n_kv_head 3"),
        ({"head_dim": 7}, "7"),
        ({"value_every": -1}, "value_every must be at least 0, got -1"),
        ({"window_pattern": "SX"}, "'SX'"),
        ({"n_layer": 0}, "n_layer"),
    ],
)
def test_invalid_config_is_rejected_with_its_value(change, named):
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)
