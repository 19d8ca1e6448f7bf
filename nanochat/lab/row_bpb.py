"""
Bits per byte row by row, so that two models can be compared on the same rows.

    model, batches of (tokens, targets) -> ByRow: nats and bytes of each row -> Comparison
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from nanochat.eval_bpb import Batch
from nanochat.loss import IGNORE, Trainable
from nanochat.stats import Comparison, compare


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
    model: Trainable, batches: Iterable[Batch], token_bytes: np.ndarray, device: torch.device
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
