"""
Merge the weights of models of the same shape.

    tensors of each model and, if needed, of their common base -> merged tensors, float32

A task vector is the difference between a model and the base. Matrices in blocks are merged by the
chosen method; embeddings, LM head and scalars linearly.

Sources: model soups, Wortsman et al., arXiv:2203.05482; SLERP, Shoemake, "Animating Rotation with
Quaternion Curves", 1985; task arithmetic, Ilharco et al., arXiv:2212.04089; TIES, Yadav et al.,
arXiv:2306.01708; DARE, Yu et al., arXiv:2311.03099.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
NEEDS_BASE = ("task_arithmetic", "ties", "dare")
PARALLEL = 0.9995  # slerp is linear above this cosine


@dataclass(frozen=True)
class MergeConfig:
    method: Literal["linear", "greedy", "slerp", "task_arithmetic", "ties", "dare"] = "linear"
    """linear: weighted mean (model soup). greedy: mean of the best model and of each other one that
    improves it by more than noise. slerp: spherical interpolation of two models. task_arithmetic:
    base plus mean task vector. ties: largest entries of the task vectors, with sign election. dare:
    random entries, rescaled."""
    weights: tuple[float, ...] = ()
    """Weight of each model, as in 3,1; normalized to sum to 1. Default: equal."""
    base: str = ""
    """Common base checkpoint, for the last three methods. Default: none."""
    scale: float = 1.0
    """With a base: factor on the merged task vector."""
    density: float = 0.5
    """ties: fraction of entries to keep, largest first. dare: probability of keeping an entry."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if self.method in NEEDS_BASE and not self.base:
            raise ValueError(f"{self.method} adds task vectors to a base model; set --base")

    def shares(self, count: int) -> list[float]:
        """Weights of `count` models, which sum to 1. Raises ValueError for a wrong number."""
        if self.method == "slerp" and count != 2:
            raise ValueError(f"slerp merges two models, got {count}")
        weights = self.weights or (1.0,) * count
        if len(weights) != count or min(weights) < 0 or not sum(weights):
            needed = f"{count} models need {count} weights, none negative and not all 0"
            raise ValueError(f"--weights={','.join(map(str, weights))}: {needed}")
        return [weight / sum(weights) for weight in weights]


def merge(
    models: Sequence[Tensors],
    shares: Sequence[float],
    cfg: MergeConfig = MergeConfig(),
    base: Tensors | None = None,
    matrices: Collection[str] = (),
) -> dict[str, Tensor]:
    """
    Return the merged tensors, float32. Tensors named in `matrices` are merged by the method, all
    others linearly. The models have the same names and shapes, and `shares` sum to 1. With a base,
    the task vectors are merged, multiplied by `scale` and added to it.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    for name in models[0]:
        method = cfg.method if name in matrices else "linear"
        origin = base[name].float() if base else 0.0
        moved = [model[name].float() - origin for model in models]
        if method == "slerp":
            step = slerp(moved[0], moved[1], shares[1])
        elif method == "ties":
            step = elect_signs([keep_largest(x, cfg.density) for x in moved], shares)
        elif method == "dare":
            step = mix([drop_entries(x, cfg.density, generator) for x in moved], shares)
        else:
            step = mix(moved, shares)
        found[name] = origin + cfg.scale * step if base else step
    return found


def mix(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Weighted mean; a weight of 1 returns its tensor bit for bit."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for x, share in zip(tensors, shares, strict=True):
        total += share * x
    return total.float()


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Spherical interpolation of two tensors as flat vectors; linear if nearly parallel."""
    x, y = a.double(), b.double()
    norms = x.norm() * y.norm()
    cos = (x * y).sum() / norms
    if not norms or cos.abs() > PARALLEL:
        return mix([a, b], [1 - t, t])
    angle = torch.arccos(cos)
    return ((torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)).float()


def keep_largest(x: Tensor, density: float) -> Tensor:
    """Zero all but the largest fraction `density` of entries of `x`; keep at least one."""
    flat = x.flatten()
    keep = flat.abs().topk(max(1, round(density * len(flat)))).indices
    return torch.zeros_like(flat).scatter(0, keep, flat[keep]).view_as(x)


def drop_entries(x: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Keep each entry of `x` with probability `density` and divide it by `density`."""
    return x * (torch.rand(x.shape, generator=generator) < density) / density


def elect_signs(moved: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Per entry, the weighted mean of the values that share the sign of the weighted sum."""
    sign = torch.sign(mix(moved, shares))
    agreeing = [x * (torch.sign(x) == sign) for x in moved]
    weight = mix([(x != 0).float() for x in agreeing], shares)
    return torch.where(weight > 0, mix(agreeing, shares) / weight, 0.0)
