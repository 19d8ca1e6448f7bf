"""Depth sets all defaults; explicit settings override them."""

import pytest
import torch

from nanochat.gpt import GPT
from nanochat.optim import OptimConfig
from nanochat.scaling import (
    MIN_STEPS,
    Horizon,
    HorizonConfig,
    default_windows,
    plan_horizon,
    scaled_rules,
    shape_for_depth,
)


def model_of(depth):
    with torch.device("meta"):
        return GPT(shape_for_depth(depth, 32_768, 2048, window_pattern=default_windows("cuda")))


@pytest.fixture(scope="module")
def d12():
    """The reference model, with 110,100,480 matmul parameters."""
    return model_of(12)


def plan(model, world_size=1, **settings):
    return plan_horizon(model, HorizonConfig(**settings), world_size)


@pytest.mark.parametrize(
    ("depth", "heads", "params", "gflops", "batch", "steps"),
    [
        (8, 4, 126, 0.30, 2**18, 1_920),
        (12, 6, 286, 0.76, 2**19, 2_520),
        (24, 12, 1_384, 4.78, 2**20, 8_352),
    ],
)
def test_defaults_are_those_of_the_published_recipe(depth, heads, params, gflops, batch, steps):
    model = model_of(depth)
    assert (model.cfg.n_head, model.cfg.n_kv_head, model.cfg.head_dim) == (heads, heads, 128)
    assert round(model.num_params() / 1e6) == params
    assert model.flops_per_token() / 1e9 == pytest.approx(gflops, rel=0.02)
    horizon = plan_horizon(model)
    assert horizon.batch_tokens == batch and horizon.num_steps == pytest.approx(steps, rel=0.01)


def test_horizon_precedence_is_iterations_flops_ratio(d12):
    every = {"target_flops": 1e18, "target_param_data_ratio": 20.0}
    assert plan(d12, num_iterations=7, **every).num_steps == 7
    for settings, tokens in (
        (every, 1e18 / d12.flops_per_token()),
        ({"target_param_data_ratio": 6.0}, 6 * 110_100_480),
    ):
        horizon = plan(d12, **settings)
        assert horizon.num_steps * horizon.batch_tokens == pytest.approx(tokens, rel=0.01)
    short = plan(d12, target_param_data_ratio=1.0).num_steps  # has a smaller batch
    assert MIN_STEPS / 2**0.5 <= short <= MIN_STEPS * 2**0.5


@pytest.mark.parametrize("world_size", [1, 3, 7, 8])
def test_default_batch_divides_evenly_over_devices(d12, world_size):
    batch = plan(d12, world_size).batch_tokens
    # a prime number of rows could only be split into micro-batches of one
    assert batch % (4 * 2048 * world_size) == 0 and abs(batch / 2**19 - 1) < 0.04
    assert (batch == 2**19) == (world_size in (1, 8))
    short = plan(d12, world_size, target_param_data_ratio=0.001)
    assert short.batch_tokens == 2048 * world_size


def test_B16_error_suggests_batch_size_that_divides(d12):
    with pytest.raises(ValueError, match="total_batch_size 17000.*--total_batch_size=16384"):
        plan(d12, world_size=8, total_batch_size=17_000)
    assert plan(d12, world_size=8, total_batch_size=16_384).batch_tokens == 16_384


@pytest.mark.parametrize(
    ("name", "lr", "wider", "smaller", "larger"),  # factors for 4 x width, batch / 4, batch x 4
    [
        ("blocks", 0.02, 1, 1, 2),
        ("embed", 0.3, 0.5, 1, 2),
        ("value_embeds", 0.15, 0.5, 1, 2),
        ("head", 0.008, 0.5, 1, 2),
        ("residual", 0.005, 1, 0.5, 2),
        ("skip", 0.5, 1, 0.5, 2),
        ("smear", 0.2, 1, 0.5, 1),
    ],
)
def test_learning_rates_are_the_published_ones(name, lr, wider, smaller, larger):
    cases = {(768, 2**19): 1, (3072, 2**19): wider, (768, 2**17): smaller, (768, 2**21): larger}
    for (width, batch), factor in cases.items():
        rules = scaled_rules(OptimConfig(), Horizon(9, batch), width)
        assert rules[name].lr == pytest.approx(factor * lr)


@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        # 0.28 x sqrt(batch / 2^19) x (reference horizon / horizon), from karpathy/nanochat's log
        (Horizon(4_978, 2**20, 12.0), 0.100),
        (Horizon(2, 2**19, 12.0), 0.28 * 2_518 / MIN_STEPS),  # as if of MIN_STEPS steps
    ],
)
def test_weight_decay_is_the_published_one(horizon, expected):
    decay = scaled_rules(OptimConfig(), horizon, 1536)["blocks"].weight_decay
    assert decay == pytest.approx(expected, rel=0.01)
    assert scaled_rules(OptimConfig(weight_decay=0.3), horizon, 9)["blocks"].weight_decay == 0.3
