"""
What is known of a token and the one in front of it: a vector for every bigram, found by hash.

    tokens, those in front (B, T) -> Bigrams -> vectors (B, T, C)

There are more bigrams than rows, so several share one. Two hashes look up half a vector each: of
bigrams that share one half, few share the other too. A token in front that is not there counts as
-1.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

HASHES = ((0x9E3779B1, 0x85EBCA77), (0x9E3979B3, 0x85EC18A1))
"""Odd factors of the token and of the one in front, for each half of the vector."""


class Bigrams(nn.Embedding):
    """
    `rows` rows of d_model / 2 numbers, from which every bigram takes two.

    Raises ValueError for a width that has no half. It is zero until trained or loaded.
    """

    def __init__(self, rows: int, d_model: int):
        if d_model % len(HASHES):
            raise ValueError(f"bigram_rows needs a d_model divisible by 2, got {d_model}")
        super().__init__(rows, d_model // len(HASHES))

    def use_sparse_gradient(self) -> None:
        """
        Let the gradient list only the rows that were looked up, which saves time where batches are
        small. Call it when the weight is where it will be trained: moving or loading a model may
        replace the parameter, and a hook does not follow.
        """
        self.sparse = True
        self.weight.register_post_accumulate_grad_hook(bound_gradient)

    def reset_parameters(self) -> None:
        """Nothing; torch's own draws, and on the meta device loads all of torch.compile for it."""

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """tokens and those in front (B, T) -> (B, T, C)."""
        index = bigram_index(tokens, before, self.num_embeddings)
        return F.embedding(index, self.weight, sparse=self.sparse).flatten(-2)


def bound_gradient(weight: Tensor) -> None:
    """
    Make a sparse gradient dense once it lists half as many rows as there are: until it is summed,
    every micro-batch appends all rows that it met.
    """
    if weight.grad is not None and weight.grad.is_sparse:
        if 2 * weight.grad._nnz() > weight.size(0):
            weight.grad = weight.grad.to_dense()


def bigram_index(tokens: Tensor, before: Tensor, rows: int) -> Tensor:
    """Tokens and those in front, -1 where there is none, (B, T) -> their rows (B, T, 2)."""
    mixed = [tokens * factor + (before + 1) * other for factor, other in HASHES]
    mixed = torch.stack(mixed, dim=-1)
    return (mixed ^ (mixed >> 15)) % rows


def preceding(tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """The token in front of each (B, T), -1 where a row or a segment begins."""
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    if segments is None:
        return before
    return before.masked_fill(segments != F.pad(segments[:, :-1], (1, 0), value=-1), -1)
