"""
How weights move: a rule for every role of parameter, and the update steps that rules name.

    OptimConfig -> rules(...) -> role: Rule    muon_update, adamw_update, rows_update, all in place

Plain functions of tensors; which of them is applied to what part of a model, and on which rank,
is optim.py's.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ROWS_FADE_EVERY = 16  # steps: fading reads a whole table, where an update reads a few of its rows


@dataclass(frozen=True)
class OptimConfig:
    embedding_lr: float = 0.3
    """Peak AdamW rate of the token embedding at width 768; falls with width^-0.5. Value
    embeddings and bigrams get half."""
    unembedding_lr: float = 0.008
    """Peak AdamW rate of the head at width 768; falls with width^-0.5."""
    weight_decay: float | None = None
    """Muon's decay. Default: from the horizon."""
    decay_rule: Literal["cautious", "decoupled"] = "cautious"
    """cautious: decay only where it agrees with the update, fading over the run. decoupled: every
    matrix weight shrinks by rate times decay before its update, to the end; its default is a
    quarter of the other's, which in sum is as much."""
    tied_lr: float = 0.05
    """Peak AdamW rate of a table that is both embedding and head (--tie_embeddings) at width 768;
    falls with width^-0.5."""
    matrix_lr: float = 0.02
    """Peak Muon rate of the matrices inside the layers."""
    grad_clip: float = 0.0
    """Largest gradient norm; longer gradients are scaled down to it. 0 = off."""
    scalar_lr: float = 0.5
    """Peak AdamW rate of the learned scalars at a batch of 524,288 tokens; falls with the root of
    the batch. The residual ones get a hundredth."""

    def __post_init__(self) -> None:
        rates = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "tied_lr")
        for name in (*rates, "grad_clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be zero or positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Rule:
    """How the parameters of one role move. `lr` is the peak; betas[0] is Muon's momentum."""

    kind: Literal["muon", "adamw", "rows"]
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.0
    cautious: bool = True
    """Of Muon: decay only where it agrees with the update."""


def rules(cfg: OptimConfig, d_model: int, lr_frac: float = 1.0) -> dict[str, Rule]:
    """
    The rule of every role, all rates times `lr_frac`.

    Values: nanochat's tuning log, 2026-03 (d12 on 8xH100).
    """
    table = (d_model / 768) ** -0.5
    cautious = cfg.decay_rule == "cautious"
    found = {
        "matrix": Rule("muon", cfg.matrix_lr, (0.95, 0.0), cfg.weight_decay or 0.0, cautious),
        "embedding": Rule("adamw", cfg.embedding_lr * table, (0.8, 0.995), 0.001),
        "bigram": Rule("rows", cfg.embedding_lr * table / 2, (0.0, 0.995), 0.01),
        "value_embedding": Rule("adamw", cfg.embedding_lr * table / 2, (0.8, 0.995), 0.01),
        "head": Rule("adamw", cfg.unembedding_lr * table, (0.8, 0.96), 0.01),
        "tied": Rule("adamw", cfg.tied_lr * table, (0.8, 0.95), 0.01),
        "residual": Rule("adamw", cfg.scalar_lr / 100, (0.8, 0.95)),
        "skip": Rule("adamw", cfg.scalar_lr, (0.96, 0.95)),
        "gate": Rule("adamw", cfg.unembedding_lr * table, (0.8, 0.95)),
        "gain": Rule("adamw", cfg.scalar_lr / 25, (0.8, 0.95)),
    }
    return {role: replace(rule, lr=rule.lr * lr_frac) for role, rule in found.items()}


def orthogonalize(g: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """
    Keep the singular vectors of `g` and push every singular value towards 1.

    g: (..., M, N), float. Returns the same shape and dtype.
    Raises ValueError below two dimensions: a vector has no singular vectors to keep.
    Source: Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/
    """
    if g.ndim < 2:
        raise ValueError(f"orthogonalize needs a matrix, got shape {tuple(g.shape)}")
    a, b, c = NEWTON_SCHULZ
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g  # (..., S, L), short side first
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # largest singular value <= 1
    for _ in range(steps):
        gram = x @ x.mT  # (..., S, S)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    lr: Tensor,
    beta: Tensor,
    decay: Tensor,
    dtype: torch.dtype,
    cautious: bool = True,
) -> None:
    """
    One Muon step in place on stacks (K, M, N); `dtype` is that of the Newton-Schulz products.

    Nesterov momentum, orthogonal direction, rate times sqrt(max(1, M/N)). `cautious` decay shrinks
    only weights that the update shrinks anyway (arXiv:2411.16085); the other kind shrinks all, by
    rate times `decay` (decoupled, arXiv:1711.05101).
    """
    momentum.lerp_(grad, 1 - beta)
    direction = orthogonalize(grad.lerp(momentum, beta).to(dtype)).to(weight.dtype)
    direction = direction * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
    shrunk = weight * ((direction * weight) > 0) if cautious else weight
    weight.sub_(lr * direction + lr * decay * shrunk)


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    decay: Tensor,
    step: Tensor,
) -> None:
    """One AdamW step (arXiv:1711.05101) in place, any shape; `step` counts from 1."""
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad * grad, 1 - beta2)
    scale = (1 - beta2**step).sqrt() / (1 - beta1**step)
    weight.mul_(1 - lr * decay)
    weight.sub_(lr * scale * first / (second.sqrt() + 1e-10))


def rows_update(
    weight: Tensor,
    met: Tensor,
    grad: Tensor,
    second: Tensor,
    lr: float,
    beta2: float,
    decay: float,
    step: int,
) -> None:
    """
    AdamW without first moment, in place, on a table of which a batch meets few rows: their numbers
    (R,) and gradients (R, N). What it does to all rows, to shrink them and their second moment, is
    done at every ROWS_FADE_EVERY-th step for as many; `step` counts from 1.
    """
    if step % ROWS_FADE_EVERY == 0:
        weight.mul_(1 - lr * decay * ROWS_FADE_EVERY)
        second.mul_(beta2**ROWS_FADE_EVERY)
    moment = second[met] + (1 - beta2) * grad * grad
    second[met] = moment
    weight[met] -= lr * (1 - beta2**step) ** 0.5 * grad / (moment.sqrt() + 1e-10)
