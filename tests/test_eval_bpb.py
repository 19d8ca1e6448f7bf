"""Bits per byte: exact byte counts, independent of the batch size and the number of ranks."""

import math

import pytest
import torch

from nanochat.common import UsageError
from nanochat.eval_bpb import bits_per_byte, pool
from nanochat.loss import IGNORE


def test_special_tokens_and_ignored_targets_are_excluded(dist):
    sizes = torch.tensor([0, 1, 2, 3, 4, 0, 6, 7]).numpy()  # tokens 0 and 5 are special
    batch = torch.tensor([[[1] * 6], [[1, 5, 7, IGNORE, 0, 2]]]).numpy()
    nats = torch.tensor([[1.0, 2.0, 3.0, 0.0, 4.0, 5.0]])
    [found] = bits_per_byte(lambda x, y: nats, [tuple(batch)], sizes, dist)
    assert (found.nats, found.bytes, found.tokens) == (9, 10, 3) and found.loss == 15 / 5
    with pytest.raises(UsageError, match="loss on 5 tokens is nan"):
        bits_per_byte(lambda x, y: nats * math.nan, [tuple(batch)], sizes, dist)
    with pytest.raises(UsageError, match="the text has no scorable token"):
        _ = bits_per_byte(lambda x, y: nats, [], sizes, dist)[0].value


def test_R24_B9_bpb_does_not_depend_on_batch_size_or_ranks(dist, tiny_gpt):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (13, 17), generator=generator)
    sizes = torch.randint(5, (64,), generator=generator)
    x, y = tokens[:, :-1], tokens[:, 1:]
    nats = torch.nn.functional.cross_entropy(tiny_gpt(x).mT, y, reduction="none")
    expected = nats[sizes[y] > 0].sum().item() / math.log(2) / sizes[y].sum().item()
    for size in (1, 5, 13):
        pairs = zip(x.split(size), y.split(size), strict=True)
        batches = [(a.numpy(), b.numpy()) for a, b in pairs]
        ranks = [
            bits_per_byte(tiny_gpt.token_losses, mine, sizes.numpy(), dist)[0]
            for mine in (batches[:2], batches[2:])
        ]
        assert pool(ranks).value == pytest.approx(expected, abs=1e-6)
