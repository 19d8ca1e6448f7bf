"""
Several models of one shape into one, weight by weight.

    tensors of each model, of their common base where there is one -> merged tensors, float32

Task vectors are what a model moved from the base. Matrices of blocks are merged by the method;
embeddings, head and scalars always linearly. Pure functions of tensors; knows no checkpoints.

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
Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"]
NEEDS_BASE = ("task_arithmetic", "ties", "dare", "dare_ties")
PARALLEL = 0.9995  # cosine from which on two tensors point the same way


@dataclass(frozen=True)
class MergeConfig:
    method: Method = "linear"
    """linear: weighted mean (a soup). slerp: along the arc between two. task_arithmetic: the base
    and the mean of what each moved from it. ties: of that the largest, where most agree on the
    sign. dare: a random part of it, enlarged; dare_ties: with the signs of ties."""
    weights: str = ""
    """Of each model, with commas between them; only their proportions count. Default: all alike."""
    t: float = 0.5
    """slerp: how far from the first to the second."""
    scale: float = 1.0
    """With a base: how far to go from it; 1 = as far as the models went."""
    density: float = 0.5
    """ties: share of each task vector that is kept, the largest. dare: chance to be kept."""
    rescale: Literal["density", "norm"] = "density"
    """dare: what is kept is divided by the density, or enlarged to the sum of magnitudes it had."""
    merge_seed: int = 0
    """dare: of what is kept."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density lies in (0, 1], got {self.density}")
        if not 0 <= self.t <= 1:
            raise ValueError(f"t lies in [0, 1], got {self.t}")

    def shares(self, count: int) -> list[float]:
        """The weights of `count` models, which sum to 1. Raises ValueError for another number."""
        if self.method == "slerp":
            if self.weights or count != 2:
                raise ValueError(f"slerp goes from one model to another by --t; here are {count}")
            return [1 - self.t, self.t]
        if not self.weights:
            return [1 / count] * count
        try:
            found = [float(words) for words in self.weights.split(",")]
        except ValueError:
            found = []
        if len(found) != count or any(w < 0 for w in found) or not sum(found):
            raise ValueError(
                f"--weights={self.weights}: {count} models have {count} weights, none below 0 and "
                "not all 0"
            )
        return [weight / sum(found) for weight in found]


def merge(
    models: Sequence[Tensors],
    cfg: MergeConfig,
    base: Tensors | None = None,
    matrices: Collection[str] = (),
) -> dict[str, Tensor]:
    """
    The merged tensors, float32. `models` and `base` have the same names and shapes; those named in
    `matrices` are merged by the method, the others linearly.

    Raises ValueError for a number of models that the method does not take, a base that is missing,
    or tensors that differ in name or shape.
    """
    require_alike(models if base is None else [*models, base])
    if cfg.method == "slerp" and len(models) != 2:
        raise ValueError(f"slerp merges two models, got {len(models)}")
    if cfg.method in NEEDS_BASE and base is None:
        raise ValueError(f"{cfg.method} goes by what the models moved from a base: name it")
    shares = cfg.shares(len(models))
    generator = torch.Generator().manual_seed(cfg.merge_seed)
    found = {}
    for name in models[0]:
        tensors = [model[name].float() for model in models]
        whole = name in matrices
        if cfg.method == "slerp" and whole:
            found[name] = slerp(tensors[0], tensors[1], cfg.t)
        elif cfg.method == "slerp":
            found[name] = mean(tensors, [1 - cfg.t, cfg.t])
        elif base is None or cfg.method == "linear":
            found[name] = mean(tensors, shares)
        else:
            origin = base[name].float()
            moved = [tensor - origin for tensor in tensors]
            step = joined(moved, shares, cfg, generator) if whole else mean(moved, shares)
            found[name] = origin + cfg.scale * step
    return found


def require_alike(models: Sequence[Tensors]) -> None:
    """Raise ValueError naming the first tensor that not all models have in the same shape."""
    for other in models[1:]:
        for name in sorted(models[0].keys() | other.keys()):
            shapes = [tuple(m[name].shape) if name in m else None for m in (models[0], other)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name} is {shapes[0]} in one model and {shapes[1]} in another")


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean; a weight of 1 gives its tensor back bit for bit."""
    for tensor, share in zip(tensors, shares, strict=True):
        if share == 1:
            return tensor.clone()
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += share * tensor.double()
    return total.float()


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Between two tensors, taken as vectors, at constant angular speed; linearly where parallel."""
    if t in (0, 1):
        return (b if t else a).clone()
    x, y = a.double().flatten(), b.double().flatten()
    norms = x.norm() * y.norm()
    cos = float(x @ y / norms) if norms else 1.0
    if abs(cos) > PARALLEL:
        return mean([a, b], [1 - t, t])
    angle = torch.arccos(torch.tensor(cos, dtype=torch.float64))
    mixed = (torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)
    return mixed.view_as(a).float()


def joined(
    moved: Sequence[Tensor], shares: Sequence[float], cfg: MergeConfig, generator: torch.Generator
) -> Tensor:
    """What several task vectors of a matrix come to."""
    if cfg.method == "task_arithmetic":
        return mean(moved, shares)
    if cfg.method == "ties":
        return agreed([largest(x, cfg.density) for x in moved], shares)
    kept = [dropped(x, cfg, generator) for x in moved]
    return agreed(kept, shares) if cfg.method == "dare_ties" else mean(kept, shares)


def largest(x: Tensor, density: float) -> Tensor:
    """`x` with all but the largest `density` of its entries 0; at least one stays."""
    count = max(1, round(density * x.numel()))
    flat = x.flatten()
    keep = flat.abs().topk(count).indices
    return torch.zeros_like(flat).scatter(0, keep, flat[keep]).view_as(x)


def dropped(x: Tensor, cfg: MergeConfig, generator: torch.Generator) -> Tensor:
    """`x` with each entry kept with chance `density`, enlarged so that it goes as far as before."""
    kept = x * (torch.rand(x.shape, generator=generator) < cfg.density)
    if cfg.rescale == "density":
        return kept / cfg.density
    rest = kept.abs().sum()
    return kept * (x.abs().sum() / rest) if rest else kept


def agreed(moved: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Entry by entry the weighted mean of those that have the sign of the weighted sum."""
    total = sum(share * x.double() for share, x in zip(shares, moved, strict=True))
    sign = torch.sign(torch.as_tensor(total))
    values, weights = torch.zeros_like(sign), torch.zeros_like(sign)
    for share, x in zip(shares, moved, strict=True):
        agrees = (torch.sign(x.double()) == sign) & (x != 0)
        values += share * x.double() * agrees
        weights += share * agrees
    return torch.where(weights > 0, values / weights.clamp(min=1e-12), 0.0).float()
