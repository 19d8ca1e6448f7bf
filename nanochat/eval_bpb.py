"""
Bits per byte: cross-entropy per byte of text, comparable between tokenizers; and samples.

    packed validation rows, or whole documents -> (tokens, targets) -> nats, bytes over ranks -> Bpb
    seven fixed prompts -> greedy continuations

Bytes are the raw bytes of each token; special tokens have none and are excluded from both sums, but
not from the mean loss.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.common import IGNORE, StopRequest, StopRequested, UsageError
from nanochat.config import require_at_least
from nanochat.dist import DistContext
from nanochat.gpt import GPT, inference_copy
from nanochat.rows import Rows, Shards, inputs_and_targets
from nanochat.tokenizer import Tokenizer


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
        """Mean nats per target, like the training loss."""
        return self.all_nats / self.all_tokens


Batch = tuple[np.ndarray, np.ndarray]


def bits_per_byte(
    score: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    dist: DistContext,
    stop: StopRequest | None = None,
) -> Bpb:
    """
    Score this rank's `batches` of (tokens, targets), both (B, T) int64, and sum over ranks.

    score: for example `model.token_losses`; returns the nats of each target, (B, T).
    token_bytes: (V,) length of each token in bytes, 0 for special tokens.
    Sums are accumulated in float64, so the result does not depend on batch size or number of ranks.
    Raises StopRequested on every rank if `stop` is asked on any rank, and UsageError if a sum is
    not finite.
    """
    sums = np.zeros(5)  # nats and number of targets with bytes, the same of all targets, bytes
    stopped = False
    for tokens, targets in batches:
        if stopped := stop is not None and stop.asked:
            break
        lengths = np.where(targets == IGNORE, 0, token_bytes[targets.clip(min=0)])  # (B, T)
        x, y = (torch.from_numpy(each).to(dist.device) for each in (tokens, targets))
        losses = score(x, y).cpu().double().numpy()
        masks = lengths > 0, targets != IGNORE
        parts = [(np.where(mask, losses, 0.0).sum(), mask.sum()) for mask in masks]
        sums += [*parts[0], *parts[1], lengths.sum()]
    if dist.any(stopped):
        raise StopRequested
    nats, tokens, all_nats, all_tokens, num_bytes = dist.sum(*sums)
    if not math.isfinite(all_nats):
        raise UsageError(
            f"the loss on {all_tokens:,.0f} tokens is {all_nats}: the weights are corrupt",
            "use an earlier checkpoint or retrain with lower learning rates",
        )
    return Bpb(nats, round(num_bytes), round(tokens), all_nats, round(all_tokens))


# ---- Validation rows -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidationConfig:
    eval_tokens: int | None = None
    """Validation tokens per evaluation. Default: 10,485,760, or 131,072 on a CPU."""

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)

    def tokens(self, dist: DistContext) -> int:
        """Validation tokens per evaluation, with the default filled in."""
        return self.eval_tokens or (131_072 if dist.device.type == "cpu" else 10_485_760)


def fill_batch(tokens: np.ndarray, targets: np.ndarray, rows: int) -> Batch:
    """
    Repeat tokens and targets, (B, T) each, up to `rows` rows; the added targets are IGNORE. So a
    compiled model sees a single shape.
    """
    shape = rows, tokens.shape[1]
    filled = np.resize(targets, shape)
    filled[len(targets) :] = IGNORE
    return np.resize(tokens, shape), filled


def row_batches(batches: Iterable[np.ndarray], rows: int) -> Iterator[Batch]:
    """Yield tokens and targets of exactly `rows` rows for each batch of stored rows."""
    for batch in batches:
        yield fill_batch(*inputs_and_targets(batch), rows)


class Validation:
    """
    Validation rows of one or, in a mixture, several buckets: `num_rows` of each, by default the
    same number or, if it has fewer, all. Raises UsageError if they are damaged.
    """

    def __init__(
        self,
        cfg: ValidationConfig,
        rows: Mapping[str, Shards],
        tokenizer: Tokenizer,
        dist: DistContext,
        num_rows: Mapping[str, int] | None = None,
    ):
        self.rows, self.dist = rows, dist
        self.token_bytes = tokenizer.token_bytes()
        T = next(iter(rows.values())).max_seq_len
        each = max(1, cfg.tokens(dist) // T // len(rows))
        self.num_rows = num_rows or dict.fromkeys(rows, each)
        for part in rows.values():
            part.open(part.val_shard)

    def batches(self, bucket: str, device_rows: int) -> Iterator[Batch]:
        """Yield this rank's batches of a bucket, of `device_rows` rows."""
        share = self.num_rows[bucket], self.dist.rank, self.dist.world_size
        return row_batches(self.rows[bucket].val_batches(device_rows, *share), device_rows)

    def score(
        self,
        score: Callable[[Tensor, Tensor], Tensor],
        device_rows: int,
        stop: StopRequest | None = None,
    ) -> dict[str, float]:
        """
        Metrics by name: `val_bpb`, `val_loss` (nats per target), and `val_bpb:<bucket>` if there
        are several. `score` and errors as in `bits_per_byte`.
        """
        found = {
            name: bits_per_byte(
                score, self.batches(name, device_rows), self.token_bytes, self.dist, stop
            )
            for name in self.rows
        }
        whole = Bpb(*map(sum, zip(*found.values(), strict=True)))
        metrics = {"val_bpb": whole.value, "val_loss": whole.loss}
        if len(found) > 1:
            metrics |= {f"val_bpb:{name}": bpb.value for name, bpb in found.items()}
        return metrics


def validate_text(
    cfg: ValidationConfig, rows: Rows, tokenizer: Tokenizer, dist: DistContext
) -> Validation:
    """Validation on the text of a run; of several sources, in proportion to their shares."""
    asked = cfg.tokens(dist) // rows.max_seq_len
    num_rows = rows.val_rows(asked)
    if (found := sum(num_rows.values())) < asked / 2:
        why = "as many as the validation text and the shares allow"
        dist.print0(f"validation on {found:,} rows, not {asked:,}: {why}")
    return Validation(cfg, rows.parts, tokenizer, dist, num_rows)


# ---- Whole documents -----------------------------------------------------------------------------
# Each starts with BOS and is scored in windows: comparable between tokenizers and ways of packing.


def make_windows(ids: np.ndarray, T: int, stride: int) -> Iterator[Batch]:
    """
    Cut one document, ids (n + 1,) starting with BOS, into padded (tokens, targets) of length T.

    The first window scores all its targets, later ones their last `stride`, and the last window
    what remains. All other targets are IGNORE. Every token is scored exactly once; tokens after
    the first window have T - stride + 1 to T tokens of context. stride = T: no overlap.
    """
    for begin in range(0, max(1, len(ids) - 1 - T + stride), stride):
        window = ids[begin : begin + T + 1]
        n, first = len(window) - 1, T - stride if begin else 0
        tokens, targets = np.full(T, ids[0]), np.full(T, IGNORE)
        tokens[:n] = window[:-1]
        targets[first:n] = window[first + 1 :]
        yield tokens, targets


def document_bpb(
    model: GPT,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    stride: int,
    rows: int,
    dist: DistContext,
) -> Bpb:
    """
    Score documents separately, in windows of max_seq_len tokens that advance by `stride`; `rows`
    windows per forward pass. `bytes` counts the UTF-8 bytes of the texts, for any tokenizer.

    Every rank must pass all texts. Every byte is scored exactly once. Raises ValueError for strides
    outside 1..max_seq_len.
    """
    T = model.cfg.max_seq_len
    if not 1 <= stride <= T:
        raise ValueError(f"stride must be in 1..{T}, got {stride}")
    documents = (np.array([tokenizer.bos_id, *tokenizer.encode(text)]) for text in texts)
    pieces = itertools.chain.from_iterable(make_windows(ids, T, stride) for ids in documents)
    mine = itertools.islice(pieces, dist.rank, None, dist.world_size)
    grouped = iter(lambda: list(itertools.islice(mine, rows)), [])  # until none is left
    batches = (fill_batch(*np.stack(group, axis=1), rows=rows) for group in grouped)
    return bits_per_byte(model.token_losses, batches, tokenizer.token_bytes(), dist)


# ---- Samples from fixed prompts ------------------------------------------------------------------
# Fixed prompts, so that reports can be compared side by side.


PROMPTS = (
    "The capital of France is | The chemical symbol of gold is | If yesterday was Friday, then "
    "tomorrow will be | The opposite of hot is | The planets of the solar system are: | My "
    "favorite color is | If 5*x + 3 = 13, then x is"
).split(" | ")
NEW_TOKENS = 16


@torch.no_grad()
def generate_samples(model: GPT, tokenizer: Tokenizer) -> dict[str, str]:
    """
    Greedy continuations of PROMPTS, by report key: `sample 0` to `sample 6`. Generated by the
    inference copy, because a compiled model would recompile for each length.
    """
    model, found = inference_copy(model), {}
    for i, prompt in enumerate(PROMPTS):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for _ in range(NEW_TOKENS):
            window = torch.tensor([ids[-model.cfg.max_seq_len :]], device=model.device)
            ids.append(int(model(window)[0, -1].argmax()))
        found[f"sample {i}"] = tokenizer.decode(ids)
    return found
