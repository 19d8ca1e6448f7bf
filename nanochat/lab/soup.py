"""
What a merge is worth: a soup that takes only what helps, and the lines between its parents.

    weights of models, a judge -> shares of a greedy soup, bits per byte on the way between two

Two models whose straight line rises lie in different basins of the loss: their mean lies in none.
Knows no checkpoints. Source: Wortsman et al., "Model soups", arXiv:2203.05482.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nanochat.gpt import GPT
from nanochat.lab.merge import mean
from nanochat.lab.row_bpb import ByRow
from nanochat.stats import NOISE

PATH = (0.25, 0.5, 0.75)  # places between two parents
BUMP = 0.01  # of the bits per byte: a rise beyond it is no noise

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
