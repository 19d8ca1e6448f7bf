"""What other modules rely on: causality, initial values, counts, and a model that can learn."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import loss as loss_module
from nanochat.common import REPOSITORY
from nanochat.gpt import GPT, GPTConfig, build_model, rotary, rotate
from nanochat.loss import IGNORE
from tests.conftest import TINY, lively

CPU = torch.device("cpu")
VARIANTS = {
    "default": TINY,
    "classic": TINY.classic(),
    "windows": replace(TINY, window_pattern="SSL", max_seq_len=600),
    "one layer": replace(TINY, n_layer=1),
    "no groups": replace(TINY, n_kv_head=4),
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
def test_loss_is_the_cross_entropy_of_the_logits(name):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    logits = model(tokens).flatten(0, 1)
    want = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(model.loss(tokens, targets), want.sum(), rtol=1e-5, atol=1e-4)
    got = model.token_losses(tokens, targets).flatten()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_new_model_guesses_uniformly():
    model = build_model(TINY, CPU, torch.float32, seed=0)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert model.loss(tokens, tokens).item() / 32 == pytest.approx(math.log(64), rel=0.01)


def test_weights_follow_from_the_seed_alone():
    first, again, other = (build_model(TINY, CPU, torch.float32, seed=s) for s in (3, 3, 4))
    torch.rand(5)  # the global generator plays no part
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_has_a_role_and_gets_a_gradient(name):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    assert set(model.param_roles()) == {n for n, _ in model.named_parameters()}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens.roll(1, 1)).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, parameter_name


def test_activation_checkpointing_changes_no_gradient(tiny_gpt):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    plain = {n: p.grad.clone() for n, p in tiny_gpt.named_parameters()}
    tiny_gpt.zero_grad()
    tiny_gpt.checkpoint_activations = True
    tiny_gpt.loss(tokens, tokens).backward()
    for name, p in tiny_gpt.named_parameters():
        torch.testing.assert_close(p.grad, plain[name])


def test_compiled_and_eager_agree(tiny_gpt):
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
    """Remembers the most elements any operation produced."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch):
    cfg = replace(TINY, vocab_size=1000, max_seq_len=64)
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 1 << 15)
    model = build_model(cfg, CPU, torch.float32, seed=0)
    tokens = torch.randint(1000, (4, 64), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as training:
        model.loss(tokens, tokens).backward()
    with LargestTensor() as scoring:
        model.token_losses(tokens, tokens)
    assert scoring.elements <= training.elements < 4 * 64 * 1000 / 4


def test_rotation_makes_scores_depend_on_distance_only():
    cos, sin = rotary(torch.arange(12), 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    turned_q = rotate(q.expand(1, 12, 1, 8), cos, sin)[0, :, 0]
    turned_k = rotate(k.expand(1, 12, 1, 8), cos, sin)[0, :, 0]
    scores = turned_q @ turned_k.T  # (12, 12)
    for distance in range(12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_B15_rotary_tables_are_right_after_loading_on_the_meta_device(tiny_gpt):
    with torch.device("meta"):
        loaded = GPT(TINY)
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(tiny_gpt.state_dict())
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens), tiny_gpt(tokens))


def test_building_a_model_does_not_load_the_compiler():
    """It takes longer than the rest of what a model needs to answer its first question."""
    program = (
        "import sys, torch\n"
        "from nanochat.gpt import GPT\n"
        "from tests.conftest import TINY\n"
        "with torch.device('meta'): GPT(TINY)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


def test_flops_of_the_seed_shape_are_those_of_the_seed_report():
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
        ({"softcap": 0.0}, "0.0"),
        ({"softcap": 50.0}, "50.0"),
        ({"window_pattern": "SX"}, "'SX'"),
        ({"n_layer": 0}, "n_layer"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        replace(TINY, **change)
