"""
Merge models of one shape weight by weight, and measure the straight line between the parents.

    tensors of each model, of their common base where there is one -> merged tensors, float32
    tensors, a scorer -> shares of a greedy soup; bits per byte between two models
    model, batches of (tokens, targets) -> ByRow: nats and bytes of each row -> Comparison

A task vector is the difference of a model to the base. Matrices of blocks are merged by the method;
embeddings, head and scalars always linearly. Two models whose straight line rises lie in different
basins of the loss: their mean lies in none.

Sources: model soups, Wortsman et al., arXiv:2203.05482; SLERP, Shoemake, "Animating Rotation with
Quaternion Curves", 1985; task arithmetic, Ilharco et al., arXiv:2212.04089; TIES, Yadav et al.,
arXiv:2306.01708; DARE, Yu et al., arXiv:2311.03099.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nanochat.eval_bpb import Batch
from nanochat.loss import IGNORE, Trainable
from nanochat.stats import NOISE, Comparison, compare

Tensors = Mapping[str, Tensor]

Line = list[list[float]]
"""Positions between two models and bits per byte."""
Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"]
NEEDS_BASE = ("task_arithmetic", "ties", "dare", "dare_ties")
PARALLEL = 0.9995  # cosine above which slerp is linear
PATH = (0.25, 0.5, 0.75)  # positions between two parents
MAX_RISE = 0.01  # of the bits per byte: a larger rise is not noise


@dataclass(frozen=True)
class ByRow:
    """What a model spends on each of some rows, so that another can be compared on the same."""

    nats: np.ndarray  # (n,)
    bytes: np.ndarray  # (n,)

    @property
    def value(self) -> float:
        """Bits per byte of all rows."""
        return float(self.nats.sum()) / math.log(2) / max(1, int(self.bytes.sum()))

    def against(self, other: "ByRow") -> Comparison:
        """The difference to `other`, in bits per byte, row by row."""
        each = math.log(2) * self.bytes.mean()
        return compare((other.nats / each).tolist(), (self.nats / each).tolist())


@torch.no_grad()
def bits_by_row(
    model: Trainable, batches: Iterable[Batch], token_bytes: np.ndarray, device: torch.device
) -> ByRow:
    """Score batches of this process row by row; rows in which no byte counts are left out."""
    sizes = torch.from_numpy(token_bytes.astype(np.int64)).to(device)
    nats, lengths = [], []
    for tokens, targets in batches:
        x, y = (torch.from_numpy(each).to(device) for each in (tokens, targets))
        length = torch.where(y == IGNORE, 0, sizes[y.clamp(min=0)])  # (B, T)
        losses = torch.where(length > 0, model.token_losses(x, y).float(), 0.0)
        nats.append(losses.double().sum(dim=1).cpu().numpy())
        lengths.append(length.sum(dim=1).cpu().numpy())
    every, size = np.concatenate(nats), np.concatenate(lengths)
    return ByRow(every[size > 0], size[size > 0])


Score = Callable[[Tensors], ByRow]


@dataclass(frozen=True)
class MergeConfig:
    method: Method = "linear"
    """linear: weighted mean (a soup). slerp: along the arc between two. task_arithmetic: the base
    plus the mean task vector. ties: the largest entries of task vectors, where most agree on the
    sign. dare: a random part of them, rescaled; dare_ties: with the signs of ties."""
    weights: str = ""
    """Of each model, with commas between them; only their proportions count. Default: all alike."""
    t: float = 0.5
    """slerp: how far from the first to the second."""
    scale: float = 1.0
    """With a base: how far to go from it; 1 = as far as the models went."""
    density: float = 0.5
    """ties: share of each task vector that is kept, the largest. dare: chance to be kept."""
    merge_seed: int = 0
    """dare: seed of the entries that are kept."""

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
        if len(found) != count or min(found) < 0 or not sum(found):
            needed = f"{count} models have {count} weights, none below 0 and not all 0"
            raise ValueError(f"--weights={self.weights}: {needed}")
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
    every = models if base is None else [*models, base]
    for other in every[1:]:
        for name in sorted(models[0].keys() | other.keys()):
            a, b = (tuple(m[name].shape) if name in m else None for m in (models[0], other))
            if a != b:
                raise ValueError(f"{name} is {a} in one model and {b} in another")
    if cfg.method in NEEDS_BASE and base is None:
        raise ValueError(f"{cfg.method} adds task vectors to a base: name it")
    shares = cfg.shares(len(models))
    generator = torch.Generator().manual_seed(cfg.merge_seed)
    found = {}
    for name in models[0]:
        tensors = [model[name].float() for model in models]
        by_method = name in matrices
        if cfg.method == "slerp" and by_method:
            found[name] = slerp(tensors[0], tensors[1], cfg.t)
        elif base is None or cfg.method in ("linear", "slerp"):
            found[name] = mean(tensors, shares)
        else:
            origin = base[name].float()
            moved = [tensor - origin for tensor in tensors]
            step = combine(moved, shares, cfg, generator) if by_method else mean(moved, shares)
            found[name] = origin + cfg.scale * step
    return found


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean; a weight of 1 gives its tensor back bit for bit."""
    if 1 in shares:
        return tensors[list(shares).index(1)].clone()
    total = sum(share * x.double() for share, x in zip(shares, tensors, strict=True))
    return torch.as_tensor(total).float()


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


def combine(
    moved: Sequence[Tensor], shares: Sequence[float], cfg: MergeConfig, generator: torch.Generator
) -> Tensor:
    """Task vectors of a matrix as one."""
    if cfg.method == "ties":
        moved = [largest(x, cfg.density) for x in moved]
    elif cfg.method in ("dare", "dare_ties"):
        moved = [drop(x, cfg.density, generator) for x in moved]
    return elect_signs(moved, shares) if "ties" in cfg.method else mean(moved, shares)


def largest(x: Tensor, density: float) -> Tensor:
    """`x` with all but the largest `density` of its entries 0; at least one stays."""
    count = max(1, round(density * x.numel()))
    flat = x.flatten()
    keep = flat.abs().topk(count).indices
    return torch.zeros_like(flat).scatter(0, keep, flat[keep]).view_as(x)


def drop(x: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """`x` with each entry kept with chance `density` and divided by it."""
    return x * (torch.rand(x.shape, generator=generator) < density) / density


def elect_signs(moved: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Per entry, the weighted mean of the values with the sign of the weighted sum."""
    total = sum(share * x.double() for share, x in zip(shares, moved, strict=True))
    sign = torch.sign(torch.as_tensor(total))
    values, weights = torch.zeros_like(sign), torch.zeros_like(sign)
    for share, x in zip(shares, moved, strict=True):
        agrees = (torch.sign(x.double()) == sign) & (x != 0)
        values += share * x.double() * agrees
        weights += share * agrees
    return torch.where(weights > 0, values / weights.clamp(min=1e-12), 0.0).float()


# ---- what a merge is worth -----------------------------------------------------------------------


def mean_of(models: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of models."""
    return {name: mean([model[name].float() for model in models], shares) for name in models[0]}


def greedy(models: Sequence[Tensors], scores: Sequence[ByRow], score: Score) -> list[float]:
    """
    Shares of a soup: the models, best first, that improve the mean by more than noise.
    """
    first, *others = sorted(range(len(scores)), key=lambda i: scores[i].value)
    chosen, best = [first], scores[first]
    for i in others:
        more = [*chosen, i]
        tried = score(mean_of([models[j] for j in more], [1 / len(more)] * len(more)))
        change = tried.against(best)
        if change.difference < -NOISE * change.se:  # fewer bits
            chosen, best = more, tried
    return [1 / len(chosen) if i in chosen else 0.0 for i in range(len(scores))]


def paths(
    names: Sequence[str], models: Sequence[Tensors], scores: Sequence[ByRow], score: Score
) -> dict[str, Line]:
    """From the first model to each other one, on the straight line."""
    found = {}
    for name, other, end in zip(names[1:], models[1:], scores[1:], strict=True):
        inner = [[t, score(mean_of([models[0], other], [1 - t, t])).value] for t in PATH]
        found[f"{names[0]} to {name}"] = [[0.0, scores[0].value], *inner, [1.0, end.value]]
    return found


def rise(line: Line) -> float:
    """How far a line rises above the straight one between its ends; negative where it falls."""
    (_, first), *inner, (_, last) = line
    return max(y - ((1 - t) * first + t * last) for t, y in inner)


def warnings(lines: Mapping[str, Line]) -> list[str]:
    """A sentence for every line that rises."""
    return [
        f"warning: the line from {name} rises {rise(line):.4f} above its ends: the models lie in "
        "different basins, and their mean in none"
        for name, line in lines.items()
        if rise(line) > MAX_RISE * line[0][1]
    ]
