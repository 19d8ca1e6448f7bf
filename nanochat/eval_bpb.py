"""
Bits per byte: how many bits a model spends on each byte of a text, whatever its tokenizer.

    (tokens, targets) or documents -> nats and bytes, summed over ranks -> Bpb

Bytes come from the raw bytes of each token; special tokens have none and are outside both sums.
Documents are scored in windows; `document_bpb` asserts that every token of them was, once.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.common import Interrupted, UsageError
from nanochat.distributed import DistContext
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer


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


def row_batches(batches: Iterable[np.ndarray], rows: int) -> Iterator[Batch]:
    """
    Rows of T + 1 ids -> (tokens, targets) of exactly `rows` rows; the last batch is filled up
    with rows in which nothing counts, so that a compiled model sees one shape.
    """
    for batch in batches:
        ids = batch.astype(np.int64)
        if missing := rows - len(ids):
            ids = np.concatenate([ids, np.repeat(ids[:1], missing, axis=0)])
        targets = ids[:, 1:].copy()
        targets[len(batch) :] = IGNORE
        yield ids[:, :-1], targets


def windows(ids: np.ndarray, T: int, stride: int) -> Iterator[Batch]:
    """
    Cut one document, ids (n + 1,) with BOS in front, into (tokens, targets) of T each, padded.

    The first window scores all its targets, each later one its last `stride` (the last window
    its remainder); the others are IGNORE. Every token is scored exactly once, with T - stride
    to T - 1 tokens before it where the document has them. stride = T starts anew in each window.
    """
    num_targets = len(ids) - 1
    scored = 0
    while scored < num_targets:
        begin = max(0, scored + stride - T) if scored else 0
        end = min(begin + T, num_targets)
        tokens = np.full(T, ids[0], dtype=np.int64)
        targets = np.full(T, IGNORE, dtype=np.int64)
        tokens[: end - begin] = ids[begin:end]
        targets[scored - begin : end - begin] = ids[scored + 1 : end + 1]
        yield tokens, targets
        scored = end


def window_batches(pieces: Iterator[Batch], T: int, rows: int) -> Iterator[Batch]:
    """Windows of T as batches of exactly `rows`, one shape for the compiler."""
    while batch := list(itertools.islice(pieces, rows)):
        blank = (batch[0][0], np.full(T, IGNORE, dtype=np.int64))
        batch += [blank] * (rows - len(batch))
        tokens, targets = map(np.stack, zip(*batch, strict=True))
        yield tokens, targets


def document_bpb(
    model: GPT,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    stride: int,
    rows: int,
    machine: DistContext,
) -> Bpb:
    """
    Score documents one by one, each behind a BOS, in `windows` of the model's context that advance
    by `stride`; `rows` windows per forward pass. `bytes` are those of the texts' UTF-8, whatever
    the tokenizer.

    Every rank passes all texts. Raises ValueError for a stride outside 1..context, AssertionError
    unless every token was scored exactly once.
    """
    T = model.cfg.max_seq_len
    if not 1 <= stride <= T:
        raise ValueError(f"stride must lie in 1..{T}, got {stride}")
    num_tokens = num_bytes = 0

    def encoded() -> Iterator[np.ndarray]:
        nonlocal num_tokens, num_bytes
        for text in texts:
            ids = np.array([tokenizer.bos_id, *tokenizer.encode(text)], dtype=np.int64)
            num_tokens += len(ids) - 1
            num_bytes += len(text.encode())
            yield ids

    pieces = itertools.chain.from_iterable(windows(ids, T, stride) for ids in encoded())
    first = (machine.rank - 1) % machine.world_size
    mine = itertools.islice(pieces, first, None, machine.world_size)
    batches = window_batches(mine, T, rows)
    [found] = bits_per_byte(model.token_losses, batches, tokenizer.token_bytes(), machine)
    assert (found.tokens, found.bytes) == (num_tokens, num_bytes), (
        f"scored {found.tokens} tokens of {found.bytes} bytes, "
        f"the texts have {num_tokens} of {num_bytes}"
    )
    return found
