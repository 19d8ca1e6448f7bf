"""
Scaling rules: depth -> shape, horizon, batch size, learning rates and weight decay.

    depth -> shape_for_depth -> GPTConfig -> plan_horizon (steps x batch) -> scaled_rules

All defaults follow from depth by one recipe; explicit settings override them. Learning rates were
tuned at the reference point: depth 12, vocabulary size 32,768, 12 tokens per matmul parameter.

| rule | source (upstream: karpathy/nanochat) |
|---|---|
| width 64 x depth; head width 128 at even depths from 8 on, else 64 | upstream, 2025-10 |
| 12 tokens per matmul parameter | upstream, 2026-03 |
| batch ~ tokens^0.383, 2^19 at the reference point | arXiv:2505.13738; upstream, 2026-02 |
| learning rates ~ sqrt(batch) above 2^19 | upstream, 2026-02 |
| constant learning rates below 2^19, but sqrt(batch) for scalars | measured: d4, 2026-11 |
| AdamW of embeddings and head ~ width^-0.5 | upstream, 2025-10 |
| weight decay 0.28 at the reference point | upstream, 2026-03 |
| weight decay ~ 1 / (learning rate x steps) | arXiv:2405.13698 |
| about 960 steps or more | measured: d4, 2026-11 |
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from nanochat.config import require_at_least, require_positive
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import OptimConfig, Rule

WIDTH_PER_LAYER = 64
REFERENCE_PARAMS = 110e6  # matmul parameters of depth 12
REFERENCE_TOKENS = 12 * REFERENCE_PARAMS
REFERENCE_BATCH = 2**19  # tokens per step at the reference point
REFERENCE_DECAY = 0.28  # weight decay at the reference point
BATCH_EXPONENT = 0.383  # best batch ~ tokens ** exponent
MIN_STEPS = 960  # shorter runs use smaller batches instead


def shape_for_depth(
    depth: int,
    vocab_size: int,
    max_seq_len: int,
    arch: Literal["default", "classic"] = "default",
    window_pattern: str = "L",
) -> GPTConfig:
    """Configuration of a model of this depth, 64 x depth channels wide."""
    width = WIDTH_PER_LAYER * depth
    head_dim = default_head_dim(width)
    heads = width // head_dim
    cfg = GPTConfig(vocab_size, depth, width, heads, heads, head_dim, max_seq_len)
    return cfg.classic() if arch == "classic" else replace(cfg, window_pattern=window_pattern)


def default_head_dim(d_model: int) -> int:
    """Head width: 128 if it divides `d_model` and `d_model` is at least 512, else 64."""
    return 128 if d_model % 128 == 0 and d_model >= 512 else 64


def default_windows(device_type: str) -> str:
    """Window pattern: SSSL on GPUs, where a kernel skips the tokens outside the window, else L."""
    return "SSSL" if device_type == "cuda" else "L"


@dataclass(frozen=True)
class HorizonConfig:
    num_iterations: int | None = None
    """Optimizer steps. Default: derived from target_flops or target_param_data_ratio."""
    target_flops: float | None = None
    """Training compute in FLOPs; sets the number of steps. Default: no target."""
    target_param_data_ratio: float = 12.0
    """Training tokens per matmul parameter, if neither num_iterations nor target_flops is set."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: derived from the training length."""

    def __post_init__(self) -> None:
        require_at_least(self, num_iterations=1, total_batch_size=1)
        require_positive(self, "target_flops", "target_param_data_ratio")


@dataclass(frozen=True)
class Horizon:
    """Training length: `num_steps` steps of `batch_tokens` tokens."""

    num_steps: int
    batch_tokens: int
    tokens_per_param: float = 12.0
    """The setting target_param_data_ratio, even if another one sets the number of steps."""


def auto_batch(tokens: float, max_seq_len: int) -> int:
    """
    Tokens per step for a run over `tokens`: max_seq_len times a power of two.

    Scaled from the reference point by tokens ** BATCH_EXPONENT, but small enough that a short run
    has about MIN_STEPS steps; always at least one packed sequence.
    """
    ideal = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** BATCH_EXPONENT
    ideal = min(ideal, tokens / MIN_STEPS)
    rows = 2 ** max(0, round(math.log2(max(ideal, 1) / max_seq_len)))
    return rows * max_seq_len


def plan_horizon(model: GPT, cfg: HorizonConfig = HorizonConfig(), world_size: int = 1) -> Horizon:
    """
    Number of steps and batch size. Precedence: num_iterations, target_flops, tokens per parameter.

    With num_iterations, the batch size still follows the ratio. A default batch is rounded to whole
    rows per device (`divisible_batch`): no change for 1, 2, 4 or 8 devices, unless devices
    outnumber rows. Raises ValueError for a total_batch_size that does not divide evenly, suggesting
    one that does.
    """
    tokens, T = cfg.target_param_data_ratio * model.num_matmul_params(), model.cfg.max_seq_len
    if cfg.num_iterations is None and cfg.target_flops is not None:
        tokens = cfg.target_flops / model.flops_per_token()
    batch = divisible_batch(cfg.total_batch_size, auto_batch(tokens, T), T, world_size)
    num_steps = cfg.num_iterations or max(1, round(tokens / batch))
    return Horizon(num_steps, batch, cfg.target_param_data_ratio)


def divisible_batch(asked: int | None, default: int, max_seq_len: int, world_size: int) -> int:
    """
    Tokens per step: `asked`, or else `default` rounded to whole rows per device, many to a multiple
    of four, because a prime number can only be split into micro-batches of one row.

    Raises ValueError suggesting a multiple if `asked` does not divide evenly.
    """
    unit, batch = max_seq_len * world_size, asked or default
    rows = max(1, round(batch / unit))
    if asked and asked % unit:
        raise ValueError(
            f"total_batch_size {asked} is not a multiple of max_seq_len x world_size ({unit}); "
            f"use --total_batch_size={rows * unit}"
        )
    if batch % unit and rows > 16:
        rows = 4 * round(rows / 4)
    return rows * unit


def batch_lr_factor(batch_tokens: int) -> float:
    """Factor on learning rates: the square root of the batch over the reference, at least 1."""
    return max(1.0, batch_tokens / REFERENCE_BATCH) ** 0.5


def make_rules(
    cfg: OptimConfig, d_model: int, lr_frac: float = 1.0, batch: float = 1.0, noise: float = 1.0
) -> dict[str, Rule]:
    """
    Update rules by the first part of a parameter's name; "scalars": of all others, and of what is
    no matrix in the layers (`optim.choose_rule`).

    lr_frac: factor on all learning rates. batch: on those that grow with the batch
    (`batch_lr_factor`). noise: on those of the few scalars. Source: karpathy/nanochat, 2026-03.
    """
    width = batch * (d_model / 768) ** -0.5
    embedding_lr, head_lr, matrix_lr = cfg.learning_rates().values()
    embedding_lr, head_lr = embedding_lr * width, head_lr * width
    found = {
        "blocks": Rule("muon", matrix_lr * batch, weight_decay=cfg.weight_decay or 0.0),
        "embed": Rule("adamw", embedding_lr, (0.8, 0.995), 0.001),
        "value_embeds": Rule("adamw", embedding_lr / 2, (0.8, 0.995), 0.01),
        "head": Rule("adamw", head_lr, (0.8, 0.96), 0.01),
        "scalars": Rule("adamw", 0.005 * batch * noise),
        "residual": Rule("adamw", 0.005 * batch * noise, (0.8, 0.95), 0.05),
        "skip": Rule("adamw", 0.5 * batch * noise, (0.96, 0.95)),
        "smear_gate": Rule("adamw", 0.2 * noise),
        "smear": Rule("adamw", 0.2 * noise),
        "backout": Rule("adamw", 0.2 * noise),
    }
    return {name: replace(rule, lr=rule.lr * lr_frac) for name, rule in found.items()}


def scaled_rules(cfg: OptimConfig, horizon: Horizon, d_model: int) -> dict[str, Rule]:
    """
    Update rules of a pretraining run. The horizon sets the factor on the learning rates and the
    default weight decay.

    Learning rates grow with the square root of the batch above the reference batch. Those of the
    few scalars also fall below it, because in small batches their gradients are mostly noise.
    Learning rate x decay x steps is proportional to the tokens per parameter, so the weights'
    averaging time is the same fraction of all runs with one such number, and half of it at twice
    the number; runs shorter than MIN_STEPS use the decay of MIN_STEPS.
    """
    batch = batch_lr_factor(horizon.batch_tokens)
    noise = min(1.0, horizon.batch_tokens / REFERENCE_BATCH) ** 0.5
    if cfg.weight_decay is None:
        reference = horizon.tokens_per_param * REFERENCE_PARAMS / REFERENCE_BATCH  # steps
        decay = REFERENCE_DECAY * reference / max(MIN_STEPS, horizon.num_steps) / batch
        cfg = replace(cfg, weight_decay=decay)
    return make_rules(cfg, d_model, batch=batch, noise=noise)
