"""
Merge the weights of models of the same shape, and measure linear interpolation between the parents.

    tensors of each model and, if needed, of their common base -> merged tensors, float32
    tensors, scorer -> weights of a greedy soup; bits per byte along the line between two models
    model, batches of (tokens, targets) -> RowBits: nats and bytes per row -> Comparison

A task vector is the difference between a model and the base. Matrices in blocks are merged by the
chosen method; embeddings, LM head and scalars linearly. If the loss rises along the line between
two models, they lie in different basins, and their mean lies in neither.

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
from nanochat.loss import IGNORE
from nanochat.stats import NOISE, Comparison, compare

Tensors = Mapping[str, Tensor]

WeightPath = list[list[float]]
"""[position between two models (0 to 1), bits per byte] pairs."""
Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"]
NEEDS_BASE = ("task_arithmetic", "ties", "dare", "dare_ties")
PARALLEL = 0.9995  # slerp is linear above this cosine
PATH_POINTS = (0.25, 0.5, 0.75)  # interpolation points between two parents
MAX_RISE = 0.01  # relative rise in bits per byte that may be noise


@dataclass(frozen=True)
class RowBits:
    """Loss of a model on each packed sequence ("row"), for paired comparison."""

    nats: np.ndarray  # (n,)
    bytes: np.ndarray  # (n,)

    @property
    def value(self) -> float:
        """Bits per byte over all rows."""
        return float(self.nats.sum()) / math.log(2) / max(1, int(self.bytes.sum()))

    def against(self, other: "RowBits") -> Comparison:
        """Paired comparison with `other` over rows, in bits per byte."""
        each = math.log(2) * self.bytes.mean()
        return compare((other.nats / each).tolist(), (self.nats / each).tolist())


@torch.no_grad()
def bits_by_row(
    score: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    device: torch.device,
) -> RowBits:
    """Score each row of the batches of this process; skip rows without target bytes."""
    sizes = torch.from_numpy(token_bytes.astype(np.int64)).to(device)
    nats, lengths = [], []
    for tokens, targets in batches:
        x, y = (torch.from_numpy(each).to(device) for each in (tokens, targets))
        length = torch.where(y == IGNORE, 0, sizes[y.clamp(min=0)])  # (B, T)
        losses = torch.where(length > 0, score(x, y).float(), 0.0)
        nats.append(losses.cpu().double().sum(dim=1).numpy())
        lengths.append(length.sum(dim=1).cpu().numpy())
    every, size = np.concatenate(nats), np.concatenate(lengths)
    return RowBits(every[size > 0], size[size > 0])


ScoreFn = Callable[[Tensors], RowBits]


@dataclass(frozen=True)
class MergeConfig:
    method: Method = "linear"
    """linear: weighted mean (model soup). slerp: spherical interpolation of two models.
    task_arithmetic: base plus mean task vector. ties: largest entries of the task vectors, with
    sign election. dare: random entries, rescaled. dare_ties: dare with sign election."""
    weights: str = ""
    """Comma-separated weight of each model, normalized to sum to 1. Default: equal."""
    t: float = 0.5
    """slerp: position between the two models; 0 = first, 1 = second."""
    scale: float = 1.0
    """Methods that need a base: factor on the merged task vector."""
    density: float = 0.5
    """ties: fraction of entries to keep, largest first. dare: probability of keeping an entry."""
    merge_seed: int = 0
    """dare: random seed for dropping entries."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if not 0 <= self.t <= 1:
            raise ValueError(f"t must be in [0, 1], got {self.t}")

    def shares(self, count: int) -> list[float]:
        """Weights of `count` models, which sum to 1. Raises ValueError for a wrong number."""
        if self.method == "slerp":
            if self.weights or count != 2:
                raise ValueError(f"slerp merges two models, weighted by --t; got {count}")
            return [1 - self.t, self.t]
        if not self.weights:
            return [1 / count] * count
        try:
            found = [float(words) for words in self.weights.split(",")]
        except ValueError:
            found = []
        if len(found) != count or min(found) < 0 or not sum(found):
            needed = f"{count} models need {count} weights, none negative and not all 0"
            raise ValueError(f"--weights={self.weights}: {needed}")
        return [weight / sum(found) for weight in found]


def merge(
    models: Sequence[Tensors],
    cfg: MergeConfig,
    base: Tensors | None = None,
    matrices: Collection[str] = (),
) -> dict[str, Tensor]:
    """
    Return the merged tensors, float32. Tensors named in `matrices` are merged by the method, all
    others linearly. The models have the same names and shapes.

    Raises ValueError for a wrong number of models or a missing base.
    """
    if cfg.method in NEEDS_BASE and base is None:
        raise ValueError(f"{cfg.method} adds task vectors to a base model; set --base")
    shares = cfg.shares(len(models))
    generator = torch.Generator().manual_seed(cfg.merge_seed)
    found = {}
    for name in models[0]:
        tensors = [model[name].float() for model in models]
        by_method = name in matrices
        if cfg.method == "slerp" and by_method:
            found[name] = slerp(tensors[0], tensors[1], cfg.t)
        elif base is None or cfg.method in ("linear", "slerp"):
            found[name] = mix(tensors, shares)
        else:
            origin = base[name].float()
            moved = [tensor - origin for tensor in tensors]
            step = blend(moved, shares, cfg, generator) if by_method else mix(moved, shares)
            found[name] = origin + cfg.scale * step
    return found


def mix(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Weighted mean; a weight of 1 returns its tensor bit for bit."""
    if 1 in shares:
        return tensors[list(shares).index(1)].clone()
    total = sum(share * x.double() for share, x in zip(shares, tensors, strict=True))
    return torch.as_tensor(total).float()


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Spherical interpolation of two tensors as flat vectors; linear if nearly parallel."""
    if t in (0, 1):
        return (b if t else a).clone()
    x, y = a.double().flatten(), b.double().flatten()
    norms = x.norm() * y.norm()
    cos = float(x @ y / norms) if norms else 1.0
    if abs(cos) > PARALLEL:
        return mix([a, b], [1 - t, t])
    angle = torch.arccos(torch.tensor(cos, dtype=torch.float64))
    mixed = (torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)
    return mixed.view_as(a).float()


def blend(
    moved: Sequence[Tensor], shares: Sequence[float], cfg: MergeConfig, generator: torch.Generator
) -> Tensor:
    """Combine the task vectors of one matrix."""
    if cfg.method == "ties":
        moved = [keep_largest(x, cfg.density) for x in moved]
    elif cfg.method in ("dare", "dare_ties"):
        moved = [drop_entries(x, cfg.density, generator) for x in moved]
    return elect_signs(moved, shares) if "ties" in cfg.method else mix(moved, shares)


def keep_largest(x: Tensor, density: float) -> Tensor:
    """Zero all but the largest fraction `density` of entries of `x`; keep at least one."""
    count = max(1, round(density * x.numel()))
    flat = x.flatten()
    keep = flat.abs().topk(count).indices
    return torch.zeros_like(flat).scatter(0, keep, flat[keep]).view_as(x)


def drop_entries(x: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Keep each entry of `x` with probability `density` and divide it by `density`."""
    return x * (torch.rand(x.shape, generator=generator) < density) / density


def elect_signs(moved: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Per entry, the weighted mean of the values that share the sign of the weighted sum."""
    total = sum(share * x.double() for share, x in zip(shares, moved, strict=True))
    sign = torch.sign(torch.as_tensor(total))
    values, weights = torch.zeros_like(sign), torch.zeros_like(sign)
    for share, x in zip(shares, moved, strict=True):
        agrees = (torch.sign(x.double()) == sign) & (x != 0)
        values += share * x.double() * agrees
        weights += share * agrees
    return torch.where(weights > 0, values / weights.clamp(min=1e-12), 0.0).float()


# ---- soups and interpolation ---------------------------------------------------------------------


def average(models: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of whole models."""
    return {name: mix([model[name].float() for model in models], shares) for name in models[0]}


def greedy(models: Sequence[Tensors], scores: Sequence[RowBits], score: ScoreFn) -> list[float]:
    """Weights of a greedy soup: try models from best to worst; keep any that help beyond noise."""
    first, *others = sorted(range(len(scores)), key=lambda i: scores[i].value)
    chosen, best = [first], scores[first]
    for i in others:
        more = [*chosen, i]
        tried = score(average([models[j] for j in more], [1 / len(more)] * len(more)))
        change = tried.against(best)
        if change.difference < -NOISE * change.se:  # fewer bits
            chosen, best = more, tried
    return [1 / len(chosen) if i in chosen else 0.0 for i in range(len(scores))]


def interpolate(
    names: Sequence[str], models: Sequence[Tensors], scores: Sequence[RowBits], score: ScoreFn
) -> dict[str, WeightPath]:
    """Score the straight lines from the first model to the others: "A to B" -> path."""
    found = {}
    for name, other, end in zip(names[1:], models[1:], scores[1:], strict=True):
        inner = [[t, score(average([models[0], other], [1 - t, t])).value] for t in PATH_POINTS]
        found[f"{names[0]} to {name}"] = [[0.0, scores[0].value], *inner, [1.0, end.value]]
    return found


def loss_barrier(line: WeightPath) -> float:
    """Maximum height above the chord between the ends; negative if all points lie below it."""
    (_, first), *inner, (_, last) = line
    return max(y - ((1 - t) * first + t * last) for t, y in inner)


def warnings(lines: Mapping[str, WeightPath]) -> list[str]:
    """One warning for each line that rises beyond noise."""
    return [
        f"warning: loss on the line from {name} rises {loss_barrier(line):.4f} bpb above its ends: "
        "the models lie in different basins, and their mean lies in neither"
        for name, line in lines.items()
        if loss_barrier(line) > MAX_RISE * line[0][1]
    ]
