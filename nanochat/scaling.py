"""
Scaling: depth -> shape, horizon, batch, learning rates and weight decay.

    depth -> shape_for_depth -> GPTConfig -> plan_horizon (steps x batch) -> scaled_rules

Depth is the only dial; what is given explicitly overrides what follows from it. The reference
point, where the learning rates were tuned, is depth 12 with a vocabulary of 32,768.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import SCALAR_LR, OptimConfig, Rule, rules

WIDTH_PER_LAYER = 64
# More rows teach a small model more (d4, 2026-11); others found no gain left at depth 25
BIGRAM_ROWS_PER_TOKEN, BIGRAM_ROWS, BIGRAM_DEPTH = 64, 2**19, 12
REFERENCE_TOKENS = 1.32e9  # depth 12 at 12 tokens per matmul parameter
REFERENCE_BATCH = 2**19  # tokens per step there
REFERENCE_DECAY_STEPS = 0.28 * REFERENCE_TOKENS / REFERENCE_BATCH  # weight decay times steps
BATCH_EXPONENT = 0.383  # growth of the best batch with the horizon (nanochat, 2026-02-05)
MIN_STEPS = 960  # a short run rather takes smaller batches: measured by the peers, d4, 2026-11


@dataclass(frozen=True)
class ShapeConfig:
    value_every: int | None = None
    """Add a gated embedding of the token to the values of every N-th layer, counted back from the
    last; 0 = none. Default: 1, in classic 0."""
    bigram_rows: int | None = None
    """Rows of the hash-bigram embedding, which adds a vector for each token and the one in front of
    it, half a vector in each of two rows; 0 = none. Default: 64 per token of the vocabulary, at
    most 524,288, to depth 12; beyond it, and in classic, none."""


def shape_for_depth(
    depth: int,
    vocab_size: int,
    max_seq_len: int,
    arch: Literal["default", "classic"] = "default",
    window_pattern: str = "L",
    shape: ShapeConfig = ShapeConfig(),
) -> GPTConfig:
    """
    The model of a depth: 64 channels per layer; what `shape` gives replaces what follows from
    depth. Raises ValueError for a depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    width = WIDTH_PER_LAYER * depth
    head_dim = default_head_dim(width)
    heads = width // head_dim
    cfg = GPTConfig(vocab_size, depth, width, heads, heads, head_dim, max_seq_len)
    cfg = replace(cfg, window_pattern=window_pattern, value_every=1)
    if arch == "classic":
        cfg = cfg.classic()
    elif depth <= BIGRAM_DEPTH:
        cfg = replace(cfg, bigram_rows=min(BIGRAM_ROWS, BIGRAM_ROWS_PER_TOKEN * vocab_size))
    return replace(cfg, **{k: v for k, v in asdict(shape).items() if v is not None})


def default_head_dim(d_model: int) -> int:
    """Channels of each head: 128 where they divide a width of at least 512, else 64."""
    return 128 if d_model % 128 == 0 and d_model >= 512 else 64


@dataclass(frozen=True)
class Horizon:
    """How long to train: `num_steps` steps of `batch_tokens` tokens."""

    num_steps: int
    batch_tokens: int


def auto_batch(tokens: float, max_seq_len: int) -> int:
    """
    Tokens per step for a run over `tokens`: a power of two times the row length.

    Grows with the horizon to the power 0.383 from the reference point, but leaves a short run
    at least MIN_STEPS steps, and is never below one row.
    """
    ideal = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** BATCH_EXPONENT
    ideal = min(ideal, tokens / MIN_STEPS)
    rows = 2 ** max(0, round(math.log2(max(ideal, 1) / max_seq_len)))
    return rows * max_seq_len


def plan_horizon(
    model: GPT,
    num_iterations: int | None = None,
    target_flops: float | None = None,
    target_param_data_ratio: float = 12.0,
    total_batch_size: int | None = None,
    world_size: int = 1,
) -> Horizon:
    """
    Steps and batch. Precedence: num_iterations, then target_flops, then tokens per parameter.

    With num_iterations alone the batch is that of the ratio's horizon. A default batch is rounded
    to whole rows on each of `world_size` devices, which changes nothing for 1, 2, 4 or 8 of them
    (unless it has fewer rows). Raises ValueError, naming a value that works, for a given batch that
    does not divide and for settings that are not positive.
    """
    given = {"num_iterations": num_iterations, "target_flops": target_flops}
    given |= {"target_param_data_ratio": target_param_data_ratio}
    for name, value in (given | {"total_batch_size": total_batch_size}).items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    tokens, T = target_param_data_ratio * model.num_used_params(), model.cfg.max_seq_len
    if num_iterations is None and target_flops is not None:
        tokens = target_flops / model.flops_per_token()
    batch = divisible_batch(total_batch_size, auto_batch(tokens, T), T, world_size)
    return Horizon(num_iterations or max(1, round(tokens / batch)), batch)


def divisible_batch(asked: int | None, default: int, max_seq_len: int, world_size: int) -> int:
    """
    Tokens per step: `asked`, or else `default` rounded to whole rows on every device.

    Raises ValueError, naming a value that works, where `asked` does not divide.
    """
    unit = max_seq_len * world_size
    batch = default if asked is None else asked
    nearest = max(1, round(batch / unit)) * unit
    if asked is not None and asked % unit:
        raise ValueError(
            f"total_batch_size {asked} is not a whole number of rows of {max_seq_len} tokens on "
            f"each of {world_size} devices; use --total_batch_size={nearest}"
        )
    return nearest


def scaled_rules(cfg: OptimConfig, horizon: Horizon, d_model: int) -> dict[str, Rule]:
    """
    The update rules of every role for a horizon: the scalars' learning rate follows from it, and
    weight decay where it is not given.

    The few scalars see nothing but gradient noise in small batches, so their learning rate falls
    with the root of the batch. Decay times steps is held constant, so weights forget over the same
    share of every run (arXiv:2405.13698); runs shorter than MIN_STEPS decay no faster than that.
    """
    noise = min(1.0, horizon.batch_tokens / REFERENCE_BATCH) ** 0.5
    if cfg.weight_decay is None:
        decay = REFERENCE_DECAY_STEPS / max(MIN_STEPS, horizon.num_steps)
        cfg = replace(cfg, weight_decay=decay)
    return rules(cfg, d_model, scalar_lr=SCALAR_LR * noise)
