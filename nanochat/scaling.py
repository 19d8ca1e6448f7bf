"""
Scaling rules: depth -> shape, horizon, batch size, learning rates and weight decay.

    depth -> shape_for_depth -> GPTConfig -> plan_horizon (steps x batch) -> scaled_rules

All defaults follow from depth; explicit settings override them. The learning rates were tuned at
the reference point: depth 12, vocabulary size 32,768. Up to SMALL_DEPTH, defaults are those that we
measured; deeper models follow the published recipe (docs/hyperparameters.md compares both).
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

from nanochat.config import require_at_least, require_positive
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import SCALAR_LR, OptimConfig, Rule, make_rules

WIDTH_PER_LAYER = 64
SMALL_DEPTH = 6  # deepest model with the options of small models (measured: d2 to d8, 2026-11)
BIGRAM_ROWS_PER_TOKEN, BIGRAM_ROWS = 64, 2**19
WINDOW_DEPTH = 12  # shallowest model with attention windows by default
REFERENCE_PARAMS = 110e6  # matmul parameters of depth 12
REFERENCE_TOKENS = 12 * REFERENCE_PARAMS
REFERENCE_BATCH = 2**19  # tokens per step at the reference point
REFERENCE_DECAY = 0.28  # weight decay at the reference point
BATCH_EXPONENT = 0.383  # best batch ~ tokens ** exponent (nanochat, 2026-02-05)
MIN_STEPS = 960  # shorter runs use smaller batches instead (measured: d4, 2026-11)


@dataclass(frozen=True)
class ShapeConfig:
    value_every: int | None = None
    """Add a gated value embedding to every N-th layer, counting back from the last; 0 = none.
    Default up to depth 6: 1; deeper: 2; classic: 0."""
    bigram_rows: int | None = None
    """Rows of the hash-bigram embedding; 0 = none. Default up to depth 6: 64 x vocabulary size, at
    most 524,288; deeper, or classic: 0."""


def shape_for_depth(
    depth: int,
    vocab_size: int,
    max_seq_len: int,
    arch: Literal["default", "classic"] = "default",
    window_pattern: str = "L",
    shape: ShapeConfig = ShapeConfig(),
) -> GPTConfig:
    """
    Configuration of a model of this depth, 64 x depth channels wide; `shape` overrides defaults.
    """
    width = WIDTH_PER_LAYER * depth
    head_dim = default_head_dim(width)
    heads = width // head_dim
    cfg = GPTConfig(vocab_size, depth, width, heads, heads, head_dim, max_seq_len)
    small = depth <= SMALL_DEPTH
    cfg = replace(cfg, window_pattern=window_pattern, value_every=1 if small else 2)
    if arch == "classic":
        cfg = cfg.classic()
    elif small:
        cfg = replace(cfg, bigram_rows=min(BIGRAM_ROWS, BIGRAM_ROWS_PER_TOKEN * vocab_size))
    return replace(cfg, **{k: v for k, v in asdict(shape).items() if v is not None})


def default_head_dim(d_model: int) -> int:
    """Head width: 128 if it divides `d_model` and `d_model` is at least 512, else 64."""
    return 128 if d_model % 128 == 0 and d_model >= 512 else 64


def default_windows(depth: int, device_type: str) -> str:
    """
    Window pattern of a depth: LP for small models, SSSL where a kernel skips the tokens outside the
    window (GPUs) and attention is a large part of the work, else L.
    """
    if depth <= SMALL_DEPTH:
        return "LP"
    return "SSSL" if device_type == "cuda" and depth >= WINDOW_DEPTH else "L"


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
    tokens, T = cfg.target_param_data_ratio * model.num_used_params(), model.cfg.max_seq_len
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
    unit = max_seq_len * world_size
    batch = default if asked is None else asked
    rows = max(1, round(batch / unit))
    if asked is None and batch % unit and rows > 16:
        rows = 4 * round(rows / 4)
    nearest = rows * unit
    if asked is not None and asked % unit:
        raise ValueError(
            f"total_batch_size {asked} is not a multiple of max_seq_len x world_size ({unit}); "
            f"use --total_batch_size={nearest}"
        )
    return nearest


def batch_lr_factor(batch_tokens: int) -> float:
    """Factor on all learning rates: the square root of the batch over the reference, at least 1."""
    return max(1.0, batch_tokens / REFERENCE_BATCH) ** 0.5


def scaled_rules(cfg: OptimConfig, horizon: Horizon, d_model: int) -> dict[str, Rule]:
    """
    Update rule for each role. The horizon sets the factor on the learning rates and the default
    weight decay.

    Learning rates grow with the square root of the batch above the reference batch. Those of the
    few scalars also fall below it, because in small batches their gradients are mostly noise.
    Learning rate x decay x steps is constant at a given number of tokens per parameter, so the
    weights' averaging time is the same fraction of every run (arXiv:2405.13698), and in proportion
    to that number; runs shorter than MIN_STEPS use the decay of MIN_STEPS.
    """
    lr_frac = batch_lr_factor(horizon.batch_tokens)
    noise = min(1.0, horizon.batch_tokens / REFERENCE_BATCH) ** 0.5
    if cfg.weight_decay is None:
        reference = horizon.tokens_per_param * REFERENCE_PARAMS / REFERENCE_BATCH  # steps
        decay = REFERENCE_DECAY * reference / max(MIN_STEPS, horizon.num_steps) / lr_frac
        cfg = replace(cfg, weight_decay=decay)
    return make_rules(cfg, d_model, lr_frac, SCALAR_LR * noise)
