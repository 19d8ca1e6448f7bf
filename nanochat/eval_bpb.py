"""
Bits per byte: cross-entropy per byte of text, comparable between tokenizers.

    (tokens, targets) -> nats and bytes, summed over ranks -> Bpb

Bytes are the raw bytes of each token; special tokens have none and are excluded from both sums, but
not from the mean loss.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.common import EvaluationAborted, UsageError
from nanochat.distributed import DistContext
from nanochat.loss import IGNORE


class Bpb(NamedTuple):
    """Bits per byte, as sums over a text."""

    nats: float
    bytes: int
    tokens: int
    """Number of targets with bytes."""
    all_nats: float
    all_tokens: int
    """The same for all targets, special tokens included."""

    @property
    def value(self) -> float:
        """Bits per byte. Raises UsageError if nothing was scored: a report never shows NaN."""
        if not self.bytes:
            raise UsageError("the text has no scorable token", "use more validation text")
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Mean nats per target, like the training loss; NaN if there are no targets."""
        return self.all_nats / self.all_tokens if self.all_tokens else math.nan


Batch = tuple[np.ndarray, np.ndarray]


def pool(parts: Iterable[Bpb]) -> Bpb:
    """Combine the results of several texts."""
    return Bpb(*map(sum, zip(*parts, strict=True)))


def bucket_metrics(found: Mapping[str, Bpb]) -> dict[str, float]:
    """Metrics of the buckets of a mixture, by name; empty for a single bucket."""
    return {f"val_bpb:{name}": bpb.value for name, bpb in found.items()} if len(found) > 1 else {}


def bits_per_byte(
    score: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    machine: DistContext,
    stopping: Callable[[], bool] = lambda: False,
    n: int = 1,
) -> list[Bpb]:
    """
    Score this rank's `batches` of (tokens, targets), both (B, T) int64, and sum over ranks.

    score: for example `model.token_losses`; returns the nats of each target, (B, T) for one model
    or (n, B, T) for `n` models.
    token_bytes: (V,) length of each token in bytes, 0 for special tokens.
    Sums are accumulated in float64, so the result does not depend on batch size or number of ranks.
    Raises EvaluationAborted on every rank if `stopping()` is true on any rank, and UsageError if a
    sum is not finite.
    """
    nats, counts = np.zeros((2, n)), np.zeros(2, dtype=np.int64)  # with bytes, and of all targets
    num_bytes, stopped = 0, False
    for tokens, targets in batches:
        if stopped := stopping():
            break
        lengths = np.where(targets == IGNORE, 0, token_bytes[targets.clip(min=0)])  # (B, T)
        x, y = (torch.from_numpy(each).to(machine.device) for each in (tokens, targets))
        losses = score(x, y).to(torch.float32).reshape(n, *y.shape).cpu().double().numpy()
        for i, counted in enumerate((lengths > 0, targets != IGNORE)):
            nats[i] += np.where(counted, losses, 0.0).sum(axis=(1, 2))
            counts[i] += counted.sum()
        num_bytes += int(lengths.sum())
    sums = machine.sum(*nats.flat, *counts.tolist(), num_bytes, float(stopped))
    if sums.pop():
        raise EvaluationAborted
    *total, count, every, size = sums
    if not np.isfinite(total).all():
        raise UsageError(
            f"the loss on {round(every):,} tokens is {sum(total[n:])}: the weights are corrupt",
            "use an earlier checkpoint or retrain with lower learning rates",
        )
    own, whole = total[:n], total[n:]
    return [
        Bpb(nats, round(size), round(count), all_nats, round(every))
        for nats, all_nats in zip(own, whole, strict=True)
    ]
