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

    The filters apply in the order top-k, min-p, top-p, to the probabilities at the temperature;
    tokens as likely as the last one kept are kept too.
    """
    likeliest = logits.argmax(dim=-1)
    if all(s.temperature == 0 for s in settings):
        return likeliest.tolist()

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    scaled = logits / column(s.temperature or 1.0 for s in settings)
    V = logits.size(1)
    kept = [min(s.top_k or V, V) for s in settings]
    if most := max((k for k in kept if k < V), default=0):
        best = scaled.topk(most, dim=-1).values  # (B, most), falling
        last = best.gather(1, column(min(k, most) - 1 for k in kept).long())
        open_end = column(k == V for k in kept) > 0
        scaled = scaled.masked_fill((scaled < last) & ~open_end, -torch.inf)
    probs = scaled.softmax(dim=-1)  # (B, V)
    probs = probs * (probs >= column(s.min_p for s in settings) * probs.amax(dim=-1, keepdim=True))
    if any(s.top_p < 1 for s in settings):
        falling = (probs / probs.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True).values
        mass = column(s.top_p for s in settings)
        inside = (falling.cumsum(dim=-1) - falling < mass) | (mass == 1)
        last = torch.where(inside, falling, 1.0).amin(dim=-1, keepdim=True)
        probs = probs * (probs / probs.sum(dim=-1, keepdim=True) >= last)
    total = probs.cumsum(dim=-1)
    mark = column(uniform).clamp(max=1 - 2**-24) * total[:, -1:]  # below the total in float32 too
    picked = (total <= mark).sum(dim=-1)
    greedy = column(s.temperature == 0 for s in settings).squeeze(1) > 0
    return torch.where(greedy, likeliest, picked).tolist()


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
