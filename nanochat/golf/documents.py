"""
Bits per byte of whole documents, each starting with BOS, in windows that may overlap.

    documents -> windows of max_seq_len tokens -> nats and bytes, summed over ranks -> Bpb
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from nanochat.distributed import DistContext
from nanochat.eval_bpb import Batch, Bpb, bits_per_byte
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer


def make_windows(ids: np.ndarray, T: int, stride: int) -> Iterator[Batch]:
    """
    Cut one document, ids (n + 1,) starting with BOS, into padded (tokens, targets) of length T.

    The first window scores all its targets, later ones their last `stride`, and the last window
    what remains. All other targets are IGNORE. Every token is scored exactly once; tokens after
    the first window have T - stride + 1 to T tokens of context. stride = T: no overlap.
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
    """Group windows of length T into batches of exactly `rows`, to avoid recompilation."""
    while batch := list(itertools.islice(pieces, rows)):
        blank = (batch[0][0], np.full(T, IGNORE, dtype=np.int64))
        batch += [blank] * (rows - len(batch))
        tokens, targets = map(np.stack, zip(*batch, strict=True))
        yield tokens, targets


def document_bpb(
    model: GPT,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    stride: int,
    rows: int,
    machine: DistContext,
) -> Bpb:
    """
    Score documents separately, in windows of max_seq_len tokens that advance by `stride`; `rows`
    windows per forward pass. `bytes` counts the UTF-8 bytes of the texts, for any tokenizer.

    Every rank must pass all texts. Raises ValueError for strides outside 1..max_seq_len
    and AssertionError unless every byte is scored exactly once.
    """
    T = model.cfg.max_seq_len
    if not 1 <= stride <= T:
        raise ValueError(f"stride must be in 1..{T}, got {stride}")
    documents = (np.array([tokenizer.bos_id, *tokenizer.encode(text)]) for text in texts)
    pieces = itertools.chain.from_iterable(make_windows(ids, T, stride) for ids in documents)
    mine = itertools.islice(pieces, machine.rank, None, machine.world_size)
    batches = window_batches(mine, T, rows)
    [found] = bits_per_byte(model.token_losses, batches, tokenizer.token_bytes(), machine)
    num_bytes = sum(len(text.encode()) for text in texts)
    assert found.bytes == num_bytes, f"scored {found.bytes} bytes, but the texts have {num_bytes}"
    return found
