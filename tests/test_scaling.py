"""Depth sets all defaults; explicit settings override them."""

from types import SimpleNamespace

import pytest
import torch

from nanochat.gpt import GPT
from nanochat.optim import OptimConfig
from nanochat.recursion.presets import WidthConfig
from nanochat.scaling import (
    MIN_STEPS,
    Horizon,
    HorizonConfig,
    auto_batch,
    default_windows,
    plan_horizon,
    scaled_rules,
)
from nanochat.scaling import shape_for_depth as shape

D12 = 110_100_480  # matmul parameters at depth 12, vocabulary size 32,768


def plan(world_size=1, **settings):
    model = SimpleNamespace(
        num_matmul_params=lambda: D12,
        flops_per_token=lambda: 1e9,
        cfg=SimpleNamespace(max_seq_len=2048),
    )
    return plan_horizon(model, HorizonConfig(**settings), world_size)


def tokens(horizon):
    return horizon.num_steps * horizon.batch_tokens


@pytest.mark.parametrize(
    ("depth", "width", "heads", "head_dim"),
    [(1, 64, 1, 64), (4, 256, 4, 64), (8, 512, 4, 128), (12, 768, 6, 128), (20, 1280, 10, 128)],
)
def test_depth_determines_shape(depth, width, heads, head_dim):
    cfg = shape(depth, 32_768, 2048)
    assert (cfg.n_layer, cfg.d_model, cfg.n_head, cfg.head_dim) == (depth, width, heads, head_dim)


def test_depth_zero_is_rejected():
    with pytest.raises(ValueError, match="got 0"):
        shape(0, 100, 16)


def test_reference_point_gets_reference_batch():
    assert auto_batch(1.32e9, 2048) == 2**19


@pytest.mark.parametrize("tokens", [1e5, 4e6, 1e8, 1e10, 1e12])
def test_batch_is_power_of_two_rows_with_enough_steps(tokens):
    batch = auto_batch(tokens, 512)
    rows = batch // 512
    assert rows & (rows - 1) == 0 and batch % 512 == 0
    assert batch == 512 or tokens / batch >= MIN_STEPS / 2**0.5


def test_batch_never_shrinks_with_longer_runs():
    batches = [auto_batch(10**e, 2048) for e in range(5, 13)]
    assert batches == sorted(batches)


def test_horizon_precedence_is_iterations_flops_ratio():
    every = {"num_iterations": 7, "target_flops": 1e15, "target_param_data_ratio": 20.0}
    assert plan(**every).num_steps == 7
    del every["num_iterations"]
    assert tokens(plan(**every)) == pytest.approx(1e15 / 1e9, rel=0.5)
    assert tokens(plan(target_param_data_ratio=12.0)) == pytest.approx(12 * D12, rel=0.01)


def test_batch_is_independent_of_world_size():
    assert {plan(world_size=w).batch_tokens for w in (1, 2, 8)} == {2**19}


@pytest.mark.parametrize("world_size", range(1, 10))
def test_default_batch_divides_evenly_over_devices(world_size):
    batch = plan(world_size=world_size).batch_tokens
    assert batch % (2048 * world_size) == 0 and abs(batch / 2**19 - 1) < 0.04
    assert world_size in (1, 2, 4, 8) or batch % (4 * 2048 * world_size) == 0
    assert plan(target_param_data_ratio=0.001, world_size=world_size).batch_tokens == (
        2048 * world_size
    )


def test_B16_error_suggests_batch_size_that_divides():
    with pytest.raises(ValueError, match="--total_batch_size=16384"):
        plan(total_batch_size=17_000, world_size=8)
    assert plan(total_batch_size=16_384, world_size=8).batch_tokens == 16_384


def test_weight_decay_times_steps_is_constant():
    def decay(optim: OptimConfig, steps: int) -> float:
        return scaled_rules(optim, Horizon(steps, 512), 768)["blocks"].weight_decay

    assert decay(OptimConfig(), 1000) * 1000 == pytest.approx(decay(OptimConfig(), 5000) * 5000)
    assert decay(OptimConfig(weight_decay=0.3), 9) == 0.3
    assert decay(OptimConfig(), 2) == decay(OptimConfig(), MIN_STEPS)


def test_learning_rates_scale_with_sqrt_of_batch():
    small, reference, large = (
        scaled_rules(OptimConfig(), Horizon(9, tokens), 768) for tokens in (2**17, 2**19, 2**21)
    )
    assert reference["skip"].lr == 0.5
    scalars, fixed = ("residual", "skip"), ("smear_gate", "smear", "backout")
    for name, rule in reference.items():
        assert large[name].lr == pytest.approx((1 if name in fixed else 2) * rule.lr)
        factor = 0.5 if name in scalars + fixed else 1.0  # below the reference
        assert small[name].lr == pytest.approx(factor * rule.lr)


def test_weight_decay_is_the_published_one():
    """0.28 x sqrt(batch / 2^19) x (reference horizon / horizon), from karpathy/nanochat's log."""
    for ratio, tokens, expected in ((12.0, 5.22e9, 0.100), (8.0, 5.84e9, 0.060)):
        horizon = Horizon(round(tokens / 2**20), 2**20, ratio)
        decay = scaled_rules(OptimConfig(), horizon, 1536)["blocks"].weight_decay
        assert decay == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("depth", "params", "gflops", "batch", "steps"),
    [
        (8, 126, 0.30, 2**18, 1_920),
        (12, 286, 0.76, 2**19, 2_520),
        (20, 897, 2.89, 2**20, 4_980),
        (24, 1_384, 4.78, 2**20, 8_352),
    ],
)
def test_defaults_are_those_of_the_published_recipe(depth, params, gflops, batch, steps):
    with torch.device("meta"):
        model = GPT(shape(depth, 32_768, 2048, window_pattern=default_windows("cuda")))
    assert round(model.num_params() / 1e6) == params
    assert model.flops_per_token() / 1e9 == pytest.approx(gflops, rel=0.02)
    horizon = plan_horizon(model)
    assert horizon.batch_tokens == batch and horizon.num_steps == pytest.approx(steps, rel=0.01)


def test_width_config_overrides_width():
    plain = shape(8, 1024, 2048)
    cfg = WidthConfig(d_model=1024, head_dim=64).apply(plain)
    assert (cfg.d_model, cfg.n_head, cfg.n_kv_head, cfg.head_dim) == (1024, 16, 16, 64)
    assert WidthConfig(d_model=1024).apply(plain).head_dim == 128
    assert WidthConfig().apply(plain) == WidthConfig(d_model=512).apply(plain) == plain


def test_windows_need_a_gpu():
    assert default_windows("cuda") == "SSSL" and default_windows("cpu") == "L"


def test_width_not_divisible_by_head_dim_is_rejected():
    with pytest.raises(ValueError, match="head_dim 64 must divide the width 96"):
        WidthConfig(d_model=96).apply(shape(4, 100, 16))
