"""
Picking the next token: temperature, top-k, top-p, min-p, each row with settings of its own.

    logits (B, V), settings and a uniform number per row -> token ids (B,)

A row's numbers come from its own generator, so what it says does not depend on its neighbours.
How likely a token was is told by `likelihoods`, whatever the settings are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLDEST = 2.0**-126  # temperatures below lose digits in float32, or are 0 there


@dataclass(frozen=True)
class Sampling:
    """How a sequence is continued. Raises ValueError for settings that make no sense."""

    max_new_tokens: int = 256
    """Tokens after which it stops at the latest, tool output included."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Only among so many of the likeliest tokens."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability."""
    seed: int = 0
    """Sample i of a prompt draws from (seed, i)."""
    logprobs: int | None = None
    """Note how likely each token was, and so many of the likeliest ones beside it."""
    prompt_logprobs: bool = False
    """Note them for the prompt too."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be zero or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be zero or positive, got {self.logprobs}")
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs needs logprobs, the number of alternatives to note")


def sample(logits: Tensor, settings: Sequence[Sampling], uniform: Sequence[float]) -> list[int]:
    """
    The next token of every row. logits (B, V) float32; `uniform` numbers in [0, 1).

    The filters apply in the order top-k, min-p, top-p, to the probabilities at the temperature.
    Of equally likely tokens top-k keeps as many as fit, top-p all.
    """
    V = logits.size(1)
    groups: dict[int, list[int]] = {}  # rows by how many tokens they choose from
    for row, s in enumerate(settings):
        groups.setdefault(1 if s.temperature < COLDEST else min(s.top_k or V, V), []).append(row)
    picked = [0] * len(settings)
    for k, rows in groups.items():
        of_group = logits if len(rows) == len(settings) else logits[rows]
        if k == 1:
            found = of_group.argmax(dim=-1)
        else:
            found = draw(of_group, k, [settings[r] for r in rows], [uniform[r] for r in rows])
        for row, token in zip(rows, found.tolist(), strict=True):
            picked[row] = token
    return picked


def draw(logits: Tensor, k: int, settings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """A token of each row (B,), from the `k` likeliest: logits (B, V), temperatures above 0."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    ids, falling = None, k < logits.size(1)
    if falling:
        logits, ids = logits.topk(k, dim=-1)  # (B, k), falling
    behind = logits - logits.amax(dim=-1, keepdim=True)
    # shares of the likeliest one's
    weights = (behind / column(s.temperature for s in settings)).exp()
    if any(s.min_p > 0 for s in settings):
        weights = weights * (weights >= column(s.min_p for s in settings))
    if any(s.top_p < 1 for s in settings):
        ordered = weights if falling else weights.sort(dim=-1, descending=True).values
        mass = column(s.top_p for s in settings) * ordered.sum(dim=-1, keepdim=True)
        inside = running_sum(ordered) - ordered < mass
        last = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
        weights = weights * ((weights >= last) | (column(s.top_p for s in settings) == 1))
    total = running_sum(weights)
    mark = column(uniform).clamp(max=1 - 2**-24) * total[:, -1:]  # below the total in float32 too
    place = (total <= mark).sum(dim=-1)
    return place if ids is None else ids.gather(1, place[:, None])[:, 0]


def running_sum(weights: Tensor) -> Tensor:
    """
    Sums along the last dimension of numbers in [0, 1], float32 of the same shape.

    In deterministic mode PyTorch has no cumsum of floats on CUDA: there it is that of whole
    multiples of 2^-40, which is exact in any order.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(dim=-1)
    return (weights * 2.0**40).long().cumsum(dim=-1).float() * 2.0**-40


class TokenLogprob(NamedTuple):
    """
    A token, the logarithm (nats) of its probability, and the likeliest ones with theirs; None and
    nothing where no token came before.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def likelihoods(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """
    How likely the model found each token: logits (B, V) float32, one token and one number of
    alternatives per row. Of the model itself: temperature and filters do not count.
    """
    logprobs = logits.log_softmax(dim=-1)
    said = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(top), logits.size(1)), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, said[row], list(zip(ids[row][:k], values[row][:k], strict=True)))
        for row, (token, k) in enumerate(zip(tokens, top, strict=True))
    ]
