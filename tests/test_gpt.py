"""The GPT model: causality, initialization, parameter counts, gradients, old configurations."""

import cmath
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import loss as loss_module
from nanochat.attention import rotary, rotate
from nanochat.checkpoint import build_model, new_model, read_config, upgrade_identity
from nanochat.common import REPOSITORY
from nanochat.golf.model import exclude_self, rotate_first
from nanochat.gpt import GPT, GPTConfig, bigram_index, inference_copy, join_keys, previous_tokens
from nanochat.loss import IGNORE
from nanochat.optim import OptimConfig, ScheduleConfig
from nanochat.rl import RLConfig
from tests.conftest import GOLF_CHANGES, RECURSIVE_CHANGES, TINY, lively, shaped

CPU = torch.device("cpu")
GOLF = shaped(TINY, **GOLF_CHANGES)
VARIANTS = {
    "default": TINY,
    "classic": TINY.classic(),
    "windows": replace(TINY, window_pattern="SSL", max_seq_len=600),
    "one layer": replace(TINY, n_layer=1),
    "no GQA": replace(TINY, n_kv_head=4),
    "bigrams": replace(TINY, bigram_rows=97),
    "previous keys": replace(TINY, n_layer=3, window_pattern="LP"),
    "golf": GOLF,
    "tied classic": shaped(TINY.classic(), tie_embeddings=True),
    "recursive": shaped(TINY, **RECURSIVE_CHANGES),
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
def test_every_parameter_has_role_and_gradient(name):
    model = lively(build_model(VARIANTS[name], CPU, torch.float32, seed=0))
    assert set(model.param_roles()) == {n for n, _ in model.named_parameters()}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens.roll(1, 1)).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, parameter_name


def test_activation_checkpointing_keeps_gradients(tiny_gpt):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    plain = {n: p.grad.clone() for n, p in tiny_gpt.named_parameters()}
    tiny_gpt.zero_grad()
    tiny_gpt.checkpoint_activations = True
    tiny_gpt.loss(tokens, tokens).backward()
    for name, p in tiny_gpt.named_parameters():
        torch.testing.assert_close(p.grad, plain[name])


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


def test_partial_rope_rotates_only_first_channels():
    """Reference: channels i and i + R/2 as a complex number, rotated by t * theta^(-2i/R)."""
    R, D, theta = 4, 10, 100.0
    x = torch.randn(1, 7, 2, D, generator=torch.Generator().manual_seed(0))
    got = rotate_first(x, *rotary(torch.arange(7), R, theta))
    assert torch.equal(got[..., R:], x[..., R:])
    for t in range(7):
        for i in range(R // 2):
            number = torch.complex(x[0, t, :, i], x[0, t, :, i + R // 2])
            rotated = number * cmath.exp(-1j * t * theta ** (-2 * i / R))
            want = torch.stack([rotated.real, rotated.imag], dim=-1)
            torch.testing.assert_close(got[0, t][:, [i, i + R // 2]], want)


def test_exclusive_attention_is_orthogonal_to_own_value():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, 5, 6, 8, generator=generator)
    v = torch.randn(2, 5, 3, 8, generator=generator)
    got = exclude_self(y, v)
    for h in range(6):  # two query heads share each value head
        own = v[:, :, h // 2]
        n = own / own.norm(dim=-1, keepdim=True)
        want = y[:, :, h] - (y[:, :, h] * n).sum(-1, keepdim=True) * n
        torch.testing.assert_close(got[:, :, h], want)
        assert (got[:, :, h] * n).sum(-1).abs().max() < 1e-5


def test_last_layers_are_exclusive_and_zero_for_first_token():
    cfg = shaped(TINY, n_layer=3, xsa_last_n=2)
    blocks = build_model(cfg, CPU, torch.float32, seed=0).blocks
    assert [b.attention.exclusive for b in blocks] == [False, True, True]
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    rope = rotary(torch.arange(1), 8, 1e4)
    for block, exclusive in zip(blocks, (False, True, True), strict=True):
        torch.nn.init.eye_(block.attention.out.weight)
        y = block.attention(x, rope, None, None)  # a single token attends only to itself
        assert (y.abs().max() < 1e-5) == exclusive


def test_learned_gain_scales_scores_of_its_head():
    cfg = shaped(TINY, qk_gain_init=1.2**2)
    model, plain = (lively(build_model(c, CPU, torch.float32, seed=0)) for c in (cfg, TINY))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    assert [n for n, r in model.param_roles().items() if r == "gain"] == [
        "blocks.0.attention.gain",
        "blocks.1.attention.gain",
    ]
    with torch.no_grad():
        model.blocks[0].attention.gain[2] = 0.0
    assert not torch.allclose(model(tokens), plain(tokens), atol=1e-3)


def test_norm_eps_is_added_in_every_norm():
    model = lively(build_model(shaped(TINY, norm_eps=0.5), CPU, torch.float32, seed=0))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))

    def normalize(x):
        return x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()

    ctx, block = model.prepare(tokens), model.blocks[0]
    torch.testing.assert_close(ctx.x0, normalize(model.embed(tokens)))
    last = model.run_layers(ctx, ctx.x0, model.cfg.order)
    torch.testing.assert_close(model.hidden(tokens), normalize(last))
    x, queries = torch.randn(2, 16, 32), torch.randn(2, 16, 4, 8)
    after = x + block.attention(normalize(x), ctx.rope, None, None)
    want = after + block.mlp(normalize(after))
    torch.testing.assert_close(block(x, ctx.x0, None, ctx.rope, None, None), want)
    for found in block.attention.normalize(queries, queries, ctx.rope):
        torch.testing.assert_close(found, rotate_first(normalize(queries), *ctx.rope))


def test_tied_embedding_is_also_the_lm_head():
    model = lively(build_model(shaped(TINY, tie_embeddings=True), CPU, torch.float32, seed=0))
    assert "head.weight" not in model.state_dict()
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    want = 15 * torch.tanh(model.hidden(tokens) @ model.embed.weight.T / 15)
    torch.testing.assert_close(model(tokens), want)
    twin = GPT(replace(TINY))  # untied: its two gradients add up to the tied one
    twin.load_state_dict({**model.state_dict(), "head.weight": model.embed.weight.detach()})
    model.loss(tokens, tokens).backward()
    twin.loss(tokens, tokens).backward()
    both = twin.embed.weight.grad + twin.head.weight.grad
    torch.testing.assert_close(model.embed.weight.grad, both)
    assert model.flops_per_token() == twin.flops_per_token()


def test_orthogonal_init_has_same_std_as_uniform():
    cfg = shaped(TINY, d_model=64, n_head=8, mlp_ratio=2, init="orthogonal", n_layer=3)
    drawn = build_model(replace(cfg, projection_init="scaled"), CPU, torch.float32, 0).blocks[0]
    for weight, scale in ((drawn.attention.k.weight, 1.0), (drawn.mlp.up.weight, 0.4)):
        M, N = weight.shape
        short = weight @ weight.T if M < N else weight.T @ weight
        size = scale**2 * max(1.0, M / N)
        torch.testing.assert_close(short, size * torch.eye(min(M, N)), rtol=1e-4, atol=1e-4)
        assert weight.std().item() == pytest.approx(scale * N**-0.5, rel=0.05)
    for projection in (drawn.attention.out.weight, drawn.mlp.down.weight):
        want = projection.size(1) ** -0.5 / math.sqrt(2 * 3)
        assert projection.std().item() == pytest.approx(want, rel=0.05)


def test_bigram_hash_uses_both_tokens_and_is_uniform():
    tokens = torch.arange(64).repeat_interleave(64)[None]
    before = torch.arange(64).repeat(64)[None]
    index, shifted = (bigram_index(tokens, each, 256) for each in (before, before - 1))
    for found, other in zip(*(x.unbind(-1) for x in (index, shifted)), strict=True):
        counts = torch.bincount(found.flatten(), minlength=256)  # 4096 bigrams, 16 per row
        assert counts.min() > 1 and counts.max() < 45
        assert (other != found).float().mean() > 0.9
    pairs = len(index.flatten(0, 1).unique(dim=0))
    assert pairs > 3800  # few collide in both rows: 4096 bigrams, 65,536 pairs
    assert bigram_index(tokens, before, 1).max() == 0
    largest = bigram_index(torch.tensor([[2**18]]), torch.tensor([[2**18]]), 2**18)
    assert 0 <= int(largest.min()) and int(largest.max()) < 2**18


def test_previous_token_is_minus_one_at_row_and_segment_start():
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    assert previous_tokens(tokens).tolist() == [[-1, 5, 6, 7], [-1, 1, 2, 3]]
    segments = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2]])
    assert previous_tokens(tokens, segments).tolist() == [[-1, 5, -1, 7], [-1, -1, 2, 3]]


@pytest.mark.parametrize("bigram_rows", [0, 50])
def test_half_of_each_key_comes_from_the_previous_position(bigram_rows):
    cfg = replace(TINY, window_pattern="P", bigram_rows=bigram_rows)
    model = lively(build_model(cfg, CPU, torch.float32, seed=0))
    attention, (G, D) = model.blocks[1].attention, (TINY.n_kv_head, TINY.head_dim)
    found = []
    attention.normalize = lambda q, k, rope: found.append(k) or (q, k)

    def keys(*tokens: int) -> torch.Tensor:
        """Own and previous part of the last token's keys, (G, D / 2) each."""
        model(torch.tensor([tokens]))
        return found.pop()[0, -1].view(G, 2, 2, D // 4).transpose(1, 2).flatten(2).unbind(1)

    own, previous = keys(1, 2, 3, 4)
    for tokens in (9, 2, 3, 4), (1, 2, 3, 9):
        other, same = keys(*tokens)
        assert torch.equal(same, previous) and not torch.allclose(other, own)
    assert not torch.allclose(keys(1, 2, 9, 4)[1], previous)
    # the hash-bigram embedding of the previous token knows the one before it
    assert torch.equal(keys(1, 9, 3, 4)[1], previous) is (bigram_rows == 0)
    assert not keys(3)[1].any(), "the first token has no previous one"


def test_rotation_keeps_both_parts_of_a_key_apart():
    own, previous = torch.randn(1, 3, 16), torch.zeros(1, 3, 16)
    key = join_keys(own, previous, heads=2).view(1, 3, 2, 16)
    turned = rotate(key, *rotary(torch.tensor([5, 6, 7]), 16, 100.0))
    own_part, previous_part = turned.view(1, 3, 2, 2, 2, 4).unbind(-2)
    assert not previous_part.any() and own_part.norm() == pytest.approx(own.norm().item())


def test_bigram_embedding_starts_at_zero_and_gets_gradient():
    cfg = replace(TINY, bigram_rows=50)
    model, plain = (build_model(each, CPU, torch.float32, 0) for each in (cfg, TINY))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), plain(tokens))
    model = lively(model)
    model.loss(tokens, tokens).backward()
    assert model.bigrams is not None and model.bigrams.weight.grad is not None
    touched = bigram_index(tokens, previous_tokens(tokens), 50).unique()
    assert set(model.bigrams.weight.grad.any(dim=1).nonzero().flatten().tolist()) == set(
        touched.tolist()
    )


def test_sparse_gradient_becomes_dense_after_a_few_micro_batches():
    cfg = replace(TINY, bigram_rows=100)
    sparse, dense = (lively(build_model(cfg, CPU, torch.float32, 0)) for _ in range(2))
    assert sparse.bigrams is not None and dense.bigrams is not None
    sparse.bigrams.sparse = True
    generator, kinds = torch.Generator().manual_seed(0), []
    for _ in range(4):  # micro-batches of 10 tokens, 20 rows
        tokens = torch.randint(64, (1, 10), generator=generator)
        for model in (sparse, dense):
            model.loss(tokens, tokens).backward()
        grad = sparse.bigrams.weight.grad
        assert grad is not None
        kinds.append(grad.is_sparse)
        whole = grad.to_dense() if grad.is_sparse else grad
        torch.testing.assert_close(whole, dense.bigrams.weight.grad)
    assert kinds == [True, True, True, False]


def test_golf_model_matches_record_parameter_count():
    """The record has 19,417,152 parameters; 18,432 are per-channel scales that this model lacks."""
    plain = GPTConfig(1024, 8, 512, 8, 4, 64, 2048, mlp_ratio=3, value_every=0)
    shape = shaped(plain, tie_embeddings=True, rope_dims=32, xsa_last_n=2, qk_gain_init=1.5)
    with torch.device("meta"):
        assert new_model(shape).num_params() == 19_417_152 - 18_432 + 2 * 8


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
        ({"head_dim": 6, "window_pattern": "P"}, "divisible by 4, got 6"),
        ({"value_every": -1}, "value_every must be at least 0, got -1"),
        ({"window_pattern": "SX"}, "'SX'"),
        ({"n_layer": 0}, "n_layer"),
        ({"rope_dims": 3}, "got 3"),
        ({"rope_dims": 10}, "head_dim 8, got 10"),
        ({"xsa_last_n": 3}, "0 to 2, got 3"),
        ({"qk_gain_init": 0.0}, "got 0.0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
    ],
)
def test_invalid_config_is_rejected_with_its_value(change, named):
    with pytest.raises(ValueError, match=named):
        shaped(TINY, **change)


# ---- Checkpoints from earlier commits ------------------------------------------------------------

BEFORE = {  # fields of every old configuration
    "softcap": 15.0, "value_embeddings": True, "tie_embeddings": False, "rope_dims": None,
    "xsa_last_n": 0, "qk_gain_init": None, "init": "uniform", "projection_init": "zero",
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_old_config_loads_as_same_model(name):
    cfg = VARIANTS[name]
    earlier = {**BEFORE, **asdict(cfg), "value_embeddings": cfg.value_every > 0}
    if not cfg.value_every:
        earlier["value_every"] = 2  # has no effect without value embeddings
    assert read_config(earlier) == cfg and type(read_config(earlier)) is type(cfg)
    assert read_config(asdict(cfg)) == cfg
    assert type(new_model(cfg)).__name__ == type(cfg).__name__.replace("GPTConfig", "GPT").replace(
        "Config", "GPT"
    )


def test_old_run_identity_is_upgraded():
    optim, schedule = asdict(OptimConfig(matrix_lr=0.03)), asdict(ScheduleConfig())
    now = {"model": asdict(TINY), "optim": optim, "schedule": schedule, "rl": asdict(RLConfig())}
    deleted = {"scalar_lr": 0.5, "tied_lr": 0.05, "decay_rule": "cautious"}
    before = {
        **now,
        "model": {**BEFORE, **asdict(TINY)},
        "optim": {**optim, **deleted},
        "schedule": {**schedule, "muon_momentum": 0.95},
        "rl": {**now["rl"], "overlong": "keep", "format_reward": 0.0, "advantage": "mean"},
    }
    assert upgrade_identity(before) == now == upgrade_identity(now)
    before["optim"]["scalar_lr"] = 0.25
    assert upgrade_identity(before)["optim"] == {**optim, "scalar_lr": 0.25}
    golf = asdict(GOLF) | {"norm_eps": None}
    older = {name: value for name, value in golf.items() if name != "norm_eps"}
    assert upgrade_identity({"model": older}) == {"model": golf}


def test_deleted_option_error_names_the_commit():
    for change in ({"repeat_layers": "1-2"}, {"softcap": 30.0}):
        with pytest.raises(ValueError, match=f"{list(change)[0]}.*deleted; commit"):
            read_config({**BEFORE, **asdict(TINY), **change})
