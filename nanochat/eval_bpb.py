"""
Bits per byte: cross-entropy per byte of text, comparable between tokenizers.

    (tokens, targets) -> nats and bytes, summed over ranks -> Bpb

Bytes are the raw bytes of each token; special tokens have none and are excluded from both sums.
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
    """Number of scored targets."""

    @property
    def value(self) -> float:
        """Bits per byte. Raises UsageError if nothing was scored: a report never shows NaN."""
        if not self.bytes:
            raise UsageError("the text has no scorable token", "use more validation text")
        return self.nats / math.log(2) / self.bytes


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
    nats = np.zeros(n)
    num_bytes = num_tokens = 0
    stopped = False
    for tokens, targets in batches:
        if stopped := stopping():
            break
        lengths = np.where(targets == IGNORE, 0, token_bytes[targets.clip(min=0)])  # (B, T)
        arrays = (tokens, targets, lengths > 0)
        x, y, counted = (torch.from_numpy(each).to(machine.device) for each in arrays)
        losses = score(x, y).to(torch.float32).reshape(n, *y.shape)
        losses = torch.where(counted, losses, 0.0)
        nats += losses.cpu().double().sum(dim=(1, 2)).numpy()
        num_bytes += int(lengths.sum())
        num_tokens += int((lengths > 0).sum())
    *total, size, count, interrupted = machine.sum(*nats, num_bytes, num_tokens, float(stopped))
    if interrupted:
        raise EvaluationAborted
    if not np.isfinite(total).all():
        raise UsageError(
            f"the loss on {round(count):,} tokens is {sum(total)}: the weights are corrupt",
            "use an earlier checkpoint or retrain with lower learning rates",
        )
    return [Bpb(each, round(size), round(count)) for each in total]
