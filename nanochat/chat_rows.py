"""
Conversations into packed rows whose tokens know whether they count.

    conversations -> render -> Encoded, on disk -> Packer (nothing is cut) -> Rows of int32
    a batch of rows -> split_rows -> tokens, targets with IGNORE

A token that is trained is stored as its id, any other as ~id, which is negative: the mask rides in
the sign. Padding is BOS and not counted. A conversation in which nothing counts is left out, so a
row without a counted token is never made. A bucket of conversations is encoded once, whichever
mixtures take from it. Knows nothing of where conversations come from.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.chat_format import Message, render
from nanochat.common import base_dir, fingerprint, read_json, write_json
from nanochat.disk import locked
from nanochat.packing import Packer, pack
from nanochat.row_writer import lock_path, write_rows
from nanochat.rows import Rows
from nanochat.tokenizer import Tokenizer

CHAT_RULE = 2  # part of the fingerprint: raise it when the same conversations give other rows
BATCH = 256  # conversations handed to the packer at a time

Conversations = Iterable[Sequence[Message]]


@dataclass(frozen=True)
class Encoded:
    """The conversations of a bucket that count, one after the other, without a BOS in front."""

    fingerprint: str
    ids: np.ndarray
    """Signed, int32."""
    ends: np.ndarray
    """Where each begins and ends, (n + 1,) int64."""
    trained: int
    """Tokens that carry loss."""
    skipped: int
    """Conversations left out because nothing in them counts."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each takes in a row, its BOS included."""
        return np.diff(self.ends) + 1

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i] : self.ends[i + 1]]


def encode(
    about: Mapping[str, Any],
    conversations: Conversations,
    tokenizer: Tokenizer,
    max_seq_len: int,
) -> Encoded:
    """
    Conversations as tokens, from the disk where that was done before.

    about: JSON-ready, decides which there are, and in which order. Those longer than a row lose
    their end. Raises ValueError where none is left.
    """
    made_of = recipe(about, tokenizer, max_seq_len)
    folder = base_dir() / "rows" / made_of["fingerprint"]
    with locked(folder / ".locks" / "encoding.lock", f"encoding {folder}"):
        if not (folder / "encoded.json").exists():
            write_encoded(folder, conversations, tokenizer, max_seq_len + 1)
            write_json(folder / "index.json", made_of)
    counts = read_json(folder / "encoded.json")
    if not counts["conversations"]:
        raise ValueError(f"there is no conversation to train on in {dict(about)}")
    ids, ends = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "ends"))
    return Encoded(made_of["fingerprint"], ids, ends, counts["trained"], counts["skipped"])


def write_encoded(
    folder: Path, conversations: Conversations, tokenizer: Tokenizer, row_length: int
) -> None:
    """Encode to files; the record comes last, so that half of them is none."""
    pieces = []
    trained = skipped = 0
    for conversation in conversations:
        signed = signed_ids(*render(tokenizer, conversation, row_length))
        counted = int((signed >= 0).sum())
        trained += counted
        skipped += not counted
        pieces += [signed[1:]] if counted else []  # the packer puts the BOS in front
    ids, ends = flatten(pieces)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "ends.npy", ends)
    counts = {"conversations": len(pieces), "trained": trained, "skipped": skipped}
    write_json(folder / "encoded.json", counts)


def recipe(about: Mapping[str, Any], tokenizer: Tokenizer, max_seq_len: int) -> dict[str, Any]:
    """What decides encoded conversations or their rows, with its fingerprint."""
    made_of = {
        "conversations": dict(about),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_len": max_seq_len,
        "chat_rule": CHAT_RULE,
    }
    return {"fingerprint": fingerprint(made_of), **made_of}


def open_chat_rows(
    about: Mapping[str, Any],
    tokenizer: Tokenizer,
    max_seq_len: int,
    shard: str = "train",
    say: Callable[[str], None] = print,
) -> Rows:
    """The rows of conversations, packed already or not: shard "train", or "val" for validation."""
    made_of = recipe(about, tokenizer, max_seq_len)
    folder = base_dir() / "rows" / made_of["fingerprint"]
    if not (folder / "index.json").exists():
        write_json(folder / "index.json", made_of)
    train = ["train"] if shard == "train" else []
    return Rows(folder, train, "val", max_seq_len, "int32", made_of, say)


def pack_encoded(
    rows: Rows, shard: str, pieces: Iterable[np.ndarray], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Pack encoded conversations into a shard, unless that has been done; its record."""
    with locked(lock_path(rows, shard), f"packing {shard}"):
        if rows.is_packed(shard):
            return rows.counts(shard)
        packer = Packer(rows.row_length, ~tokenizer.bos_id, rows.dtype, cut=False)
        digest = write_rows(rows, shard, pack(in_batches(pieces), packer))
        counts = {**asdict(packer.counts), "skipped": 0, "text_bytes": 0, "sha256": digest}
        write_json(rows.counts_path(shard), counts)
    return counts


def in_batches(pieces: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces as the packer takes them, some at a time."""
    batch: list[np.ndarray] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == BATCH:
            yield flatten(batch)
            batch = []
    if batch:
        yield flatten(batch)


def signed_ids(ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """ids where they count, ~id elsewhere, int32."""
    plain = np.array(ids, np.int32)
    return np.where(np.array(mask, bool), plain, ~plain)


def flatten(pieces: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays as one, and where each begins and ends."""
    if not pieces:
        return np.empty(0, np.int32), np.zeros(1, np.int64)
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


def split_rows(rows: np.ndarray, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    """Signed rows (B, T + 1) -> tokens and targets (B, T), int64; `ignore` where none counts."""
    ids = np.where(rows < 0, ~rows, rows).astype(np.int64)
    targets = np.where(rows < 0, ignore, rows).astype(np.int64)
    return ids[:, :-1], targets[:, 1:]
