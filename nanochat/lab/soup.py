"""
What a merge is worth: a soup that takes only what helps, and the lines between its parents.

    weights of models, a judge -> shares of a greedy soup, bits per byte on the way between two

Two models whose straight line rises lie in different basins of the loss: their mean lies in none.
Knows no checkpoints. Source: Wortsman et al., "Model soups", arXiv:2203.05482.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanochat.eval_bpb import Batch
from nanochat.gpt import GPT
from nanochat.lab.merge import mean
from nanochat.loss import IGNORE
from nanochat.stats import NOISE, Comparison, compare

PATH = (0.25, 0.5, 0.75)  # places between two parents
BUMP = 0.01  # of the bits per byte: a rise beyond it is no noise


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
    model: GPT, batches: Iterable[Batch], token_bytes: np.ndarray, device: torch.device
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


Tensors = Mapping[str, Tensor]
Score = Callable[[Tensors], ByRow]
Line = list[list[float]]
"""Places and bits per byte."""


def put(tensors: Tensors, model: GPT) -> None:
    """Give a model other weights."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensors[name])


def mean_of(models: Sequence[Tensors], shares: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of models."""
    return {name: mean([model[name].float() for model in models], shares) for name in models[0]}


def greedy(models: Sequence[Tensors], scores: Sequence[ByRow], score: Score) -> list[float]:
    """
    Shares of a soup: of the models, best first, those that make the mean better by more than noise.
    """
    order = sorted(range(len(scores)), key=lambda i: scores[i].value)
    chosen, best = order[:1], scores[order[0]]
    for i in order[1:]:
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


def bump(line: Line) -> float:
    """How far a line rises above the straight one between its ends; negative where it sinks."""
    (_, first), *inner, (_, last) = line
    return max(y - ((1 - t) * first + t * last) for t, y in inner)


def warnings(lines: Mapping[str, Line]) -> list[str]:
    """A sentence for every line that rises."""
    return [
        f"warning: the line from {name} rises {bump(line):.4f} above its ends: the models lie in "
        "different basins, and their mean in none"
        for name, line in lines.items()
        if bump(line) > BUMP * line[0][1]
    ]
