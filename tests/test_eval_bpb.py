"""Bits per byte: exact byte counts, independent of the batch size."""

import math

import numpy as np
import pytest
import torch

from nanochat.common import UsageError
from nanochat.eval_bpb import bits_per_byte
from nanochat.evaluators import row_batches
from nanochat.loss import IGNORE

TOKEN_BYTES = np.array([0, 1, 2, 3, 4, 0, 6, 7])  # tokens 0 and 5 are special


def uniform(tokens, targets):
    """Losses of ln 2 nats, so that bits equal the number of non-ignored targets."""
    return torch.where(targets == IGNORE, 0.0, math.log(2.0))


def broken(tokens, targets):
    """Non-finite losses."""
    return torch.full(targets.shape, math.nan)


def test_special_tokens_and_ignored_targets_are_excluded(machine):
    targets = np.array([[1, 5, 7, IGNORE, 0, 2]])
    [result] = bits_per_byte(uniform, [(targets * 0, targets)], TOKEN_BYTES, machine)
    assert (result.tokens, result.bytes) == (3, 1 + 7 + 2)
    assert result.value == pytest.approx(3 / 10)
    losses = torch.tensor([[1.0, 2.0, 3.0, 0.0, 4.0, 5.0]])
    [result] = bits_per_byte(lambda x, y: losses, [(targets * 0, targets)], TOKEN_BYTES, machine)
    assert (result.nats, result.loss) == (9.0, 15 / 5)


def test_R34_empty_text_and_non_finite_losses_are_rejected(machine):
    with pytest.raises(UsageError, match="the text has no scorable token"):
        _ = bits_per_byte(uniform, [], TOKEN_BYTES, machine)[0].value
    targets = np.array([[1, 2]])
    with pytest.raises(UsageError, match="loss on 2 tokens is nan"):
        bits_per_byte(broken, [(targets, targets)], TOKEN_BYTES, machine)


def test_R24_B9_bpb_does_not_depend_on_batch_size_or_ranks(machine, tiny_gpt):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 64, (13, 17))
    sizes, losses = rng.integers(0, 5, 64), tiny_gpt.token_losses

    def measure(size, ranks):
        nats = num_bytes = 0.0
        for rank in range(ranks):
            mine = rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]
            pieces = [mine[i : i + size] for i in range(0, len(mine), size)]
            [part] = bits_per_byte(losses, row_batches(pieces, size), sizes, machine)
            nats, num_bytes = nats + part.nats, num_bytes + part.bytes
        return nats / math.log(2) / num_bytes

    reference = measure(1, 1)
    for size in (1, 2, 5, 13):
        for ranks in (1, 2, 4):
            assert measure(size, ranks) == pytest.approx(reference, abs=1e-6)
