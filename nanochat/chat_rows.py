"""
Conversations into packed rows whose tokens know whether they count.

    conversations -> chat_format.render -> Packer (nothing is cut) -> Rows of int32
    a batch of rows -> split_rows -> tokens, targets with IGNORE

A token that is trained is stored as its id, any other as ~id, which is negative: the mask rides in
the sign. Padding is BOS and not counted. A conversation in which nothing counts is left out, so a
row without a counted token is never made. Knows nothing of where conversations come from.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from nanochat.chat_format import Message, render
from nanochat.common import base_dir, fingerprint, write_json
from nanochat.disk import locked
from nanochat.packing import Packer, pack
from nanochat.row_writer import lock_path, write_rows
from nanochat.rows import Rows
from nanochat.tokenizer import Tokenizer

CHAT_RULE = 1  # part of the fingerprint: raise it when the same conversations give other rows
BATCH = 256  # conversations rendered at a time

Conversations = Iterable[Sequence[Message]]


def open_chat_rows(
    mixture: Mapping[str, Any],
    tokenizer: Tokenizer,
    max_seq_len: int,
    say: Callable[[str], None] = print,
) -> Rows:
    """
    The rows of a mixture of conversations, packed already or not.

    mixture: JSON-ready, decides which conversations there are, and in which order.
    """
    made_of = {
        "mixture": dict(mixture),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_len": max_seq_len,
        "chat_rule": CHAT_RULE,
    }
    name = fingerprint(made_of)
    recipe = {"fingerprint": name, **made_of}
    folder = base_dir() / "rows" / name
    if not (folder / "index.json").exists():
        write_json(folder / "index.json", recipe)
    return Rows(folder, ["train"], "val", max_seq_len, "int32", recipe, say)


def pack_conversations(
    rows: Rows, shard: str, conversations: Conversations, tokenizer: Tokenizer
) -> dict[str, Any]:
    """
    Pack the conversations of a shard ("train" or "val"), unless that has been done; its record.

    Conversations longer than a row lose their end, which is counted. Raises ValueError when none
    is left, naming the shard.
    """
    with locked(lock_path(rows, shard), f"packing {shard}"):
        if rows.is_packed(shard):
            return rows.counts(shard)
        packer = Packer(rows.row_length, ~tokenizer.bos_id, rows.dtype, cut=False)
        trained = skipped = 0

        def encoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            nonlocal trained, skipped
            batch: list[np.ndarray] = []
            for conversation in conversations:
                signed = signed_ids(*render(tokenizer, conversation, rows.row_length))
                counted = int((signed >= 0).sum())
                trained += counted
                skipped += not counted
                batch += [signed[1:]] if counted else []  # the packer puts the BOS in front
                if len(batch) == BATCH:
                    yield flatten(batch)
                    batch = []
            if batch:
                yield flatten(batch)

        digest = write_rows(rows, shard, pack(encoded(), packer))
        if not packer.counts.rows:
            raise ValueError(f"the {shard} part of the mixture holds no conversation to train on")
        counts = {
            **asdict(packer.counts),
            "trained": trained,
            "skipped": skipped,
            "text_bytes": 0,
            "sha256": digest,
        }
        write_json(rows.counts_path(shard), counts)
    return counts


def signed_ids(ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """ids where they count, ~id elsewhere, int32."""
    plain = np.array(ids, np.int32)
    return np.where(np.array(mask, bool), plain, ~plain)


def flatten(pieces: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays as one, and where each begins and ends."""
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


def split_rows(rows: np.ndarray, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    """Signed rows (B, T + 1) -> tokens and targets (B, T), int64; `ignore` where none counts."""
    ids = np.where(rows < 0, ~rows, rows).astype(np.int64)
    targets = np.where(rows < 0, ignore, rows).astype(np.int64)
    return ids[:, :-1], targets[:, 1:]
