"""
Bits per byte: how many bits a model spends on each byte of a text, whatever its tokenizer.

    (tokens, targets) -> nats and bytes, summed over ranks -> Bpb

Bytes come from the raw bytes of each token; special tokens have none and are outside both sums.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.common import Interrupted, UsageError
from nanochat.distributed import DistContext
from nanochat.loss import IGNORE


class Bpb(NamedTuple):
    """Bits per byte with what it was measured on."""

    nats: float
    bytes: int
    tokens: int
    """Targets that were scored."""

    @property
    def value(self) -> float:
        """Bits per byte. Raises UsageError where nothing was scored: a report never shows NaN."""
        if not self.bytes:
            raise UsageError("no token of the text could be scored", "give more validation text")
        return self.nats / math.log(2) / self.bytes


Batch = tuple[np.ndarray, np.ndarray]


def pooled(parts: Iterable[Bpb]) -> Bpb:
    """Several texts as one."""
    return Bpb(*map(sum, zip(*parts, strict=True)))


def bucket_figures(found: Mapping[str, Bpb]) -> dict[str, float]:
    """The figures of the buckets of a mixture, as they are logged; of a single one none."""
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
    Score this rank's `batches` of (tokens, targets), int64 (B, T) each, and sum over the ranks.

    score: the nats of every target, (B, T) of one model or (n, B, T) of `n` models at once, such as
    `model.token_losses`. token_bytes (V,) is the length in bytes of every token, 0 for specials.
    The sums are kept in float64, so the result does not depend on how rows are batched or spread
    over ranks. Raises Interrupted, on every rank, when `stopping` said on one of them to end early,
    and UsageError for a sum that is not finite.
    """
    sizes = torch.from_numpy(token_bytes.astype(np.int64)).to(machine.device)
    nats = np.zeros(n)
    num_bytes = num_tokens = 0
    stopped = False
    for batch in batches:
        if stopped := stopping():
            break
        x, y = (torch.from_numpy(ids).to(machine.device) for ids in batch)
        length = torch.where(y == IGNORE, 0, sizes[y.clamp(min=0)])  # (B, T)
        losses = score(x, y).to(torch.float32).reshape(n, *y.shape)
        losses = torch.where(length > 0, losses, 0.0)
        nats += losses.cpu().double().sum(dim=(1, 2)).numpy()
        num_bytes += int(length.sum())
        num_tokens += int((length > 0).sum())
    *total, size, count, asked = machine.sum(*nats, num_bytes, num_tokens, float(stopped))
    if asked:
        raise Interrupted
    if not np.isfinite(total).all():
        raise UsageError(
            f"the loss on {round(count):,} tokens is {sum(total)}: the weights are broken",
            "take an earlier checkpoint, or train again with lower learning rates",
        )
    return [Bpb(each, round(size), round(count)) for each in total]
