"""
Pack conversations into packed sequences (rows) whose tokens carry the loss mask.

    conversations -> render -> Encoded, on disk -> Packer -> Rows of int32
    a batch of rows -> dataloader.inputs_and_targets -> tokens, targets with IGNORE

A trained token is stored as its id, any other as ~id (negative), so the sign is the loss mask.
Padding is untrained BOS. Conversations with no trained token are skipped. A bucket is encoded once,
for all mixtures.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.chat_format import Message, render
from nanochat.common import (
    base_dir,
    fingerprint,
    hold_lock,
    read_sealed,
    seal,
    sha256_file,
    write_json,
)
from nanochat.dataloader import Rows, interleave, permutation
from nanochat.packing import Packer, lock_path, write_shard
from nanochat.tokenizer import Tokenizer

# ---- Encoding and packing one bucket of conversations --------------------------------------------


CHAT_RULE = 3  # part of the fingerprint: increment it when the same conversations pack differently
BATCH = 256  # conversations encoded, or handed to the packer, at a time

Conversations = Iterable[Sequence[Message]]


@dataclass(frozen=True)
class Encoded:
    """The encoded conversations of a bucket, concatenated, without BOS."""

    fingerprint: str
    ids: np.ndarray
    """int32: id if trained, else ~id."""
    ends: np.ndarray
    """Conversation i is `ids[ends[i] : ends[i + 1]]`; (n + 1,) int64."""
    trained: int
    """Number of trained tokens."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation in a row, including its BOS."""
        return np.diff(self.ends) + 1

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i] : self.ends[i + 1]]


def encode(
    about: Mapping[str, Any], conversations: Conversations, tokenizer: Tokenizer, max_seq_len: int
) -> Encoded:
    """
    Encode conversations, or load them from disk if they were encoded before.

    about: JSON-ready; identifies the conversations and their order. Files on disk whose SHA-256
    does not match are written again. Conversations longer than a row are cut, and counted in a
    message. Raises ValueError if no conversation has a trained token.
    """
    rows = open_chat_rows(about, tokenizer, max_seq_len)
    folder = rows.folder
    with hold_lock(folder / ".locks" / "encoding.lock", f"encoding {folder}"):
        counts = read_encoded(folder) or write_encoded(rows, conversations, tokenizer)
    if not counts["conversations"]:
        raise ValueError(f"no conversation to train on in {dict(about)}")
    ids = np.memmap(folder / "ids.bin", np.int32, "r")
    ends = np.load(folder / "ends.npy", mmap_mode="r")
    return Encoded(rows.fingerprint, ids, ends, counts["trained"])


def read_encoded(folder: Path) -> dict[str, Any] | None:
    """Return the record of an encoding; None if missing or damaged (warns)."""
    record = folder / "encoded.json"
    try:
        counts = read_sealed(record) if record.exists() else None
        for name, digest in counts["sha256"].items() if counts else ():
            path = folder / name
            if not path.exists() or sha256_file(path) != digest:
                raise ValueError(f"{path} is damaged: its SHA-256 does not match the record")
    except ValueError as error:
        print(f"{error}: encoding these conversations again", flush=True)
        return None
    return counts


def write_encoded(rows: Rows, conversations: Conversations, tokenizer: Tokenizer) -> dict[str, Any]:
    """
    Encode conversations to files in the folder of `rows`, and return counts. The record is written
    last, so a partial encoding is never used. Memory: a few batches and the length of every
    conversation.
    """
    folder, row_length = rows.folder, rows.row_length
    if isinstance(conversations, Sized):
        print(f"encoding {len(conversations):,} conversations", flush=True)
    lengths: list[int] = []
    done = trained = 0
    with (folder / "ids.bin").open("wb") as stream:
        for chats in iter_batches(conversations):
            batch = [signed_ids(*render(tokenizer, each, row_length))[1:] for each in chats]
            kept = [signed for signed in batch if (signed >= 0).any()]
            stream.write(b"".join(signed.tobytes() for signed in kept))
            lengths += map(len, kept)
            trained += sum(int((signed >= 0).sum()) for signed in kept)
            done += len(batch)
    np.save(folder / "ends.npy", np.cumsum([0, *lengths]))
    cut, skipped = lengths.count(row_length - 1), done - len(lengths)
    if cut or skipped:
        print(
            f"of {done:,} conversations, {cut:,} fill a row of {row_length - 1:,} tokens (what is "
            f"longer is cut) and {skipped:,} have no token to train on there (skipped)",
            flush=True,
        )
    counts = {"conversations": len(lengths), "trained": trained, "skipped": skipped}
    digests = {name: sha256_file(folder / name) for name in ("ids.bin", "ends.npy")}
    write_json(folder / "encoded.json", seal({**counts, "sha256": digests}))
    return counts


def iter_batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of BATCH items."""
    source = iter(items)
    while batch := list(islice(source, BATCH)):
        yield batch


def open_chat_rows(about: Mapping[str, Any], tokenizer: Tokenizer, max_seq_len: int) -> Rows:
    """Open the "train" and "val" shards of conversations, whether packed yet or not."""
    made_of = {
        "conversations": dict(about),
        "tokenizer": tokenizer.fingerprint,
        "max_seq_len": max_seq_len,
        "chat_rule": CHAT_RULE,
    }
    made_of["fingerprint"] = fingerprint(made_of)
    folder = base_dir() / "rows" / made_of["fingerprint"]
    if not (folder / "index.json").exists():
        write_json(folder / "index.json", made_of)
    return Rows(folder, ["train"], "val", "int32", tokenizer.vocab_size, made_of)


def pack_encoded(
    rows: Rows, shard: str, pieces: Iterable[np.ndarray], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Pack encoded conversations into a shard unless done before; return its record."""
    with hold_lock(lock_path(rows, shard), f"packing {shard}"):
        if not rows.is_packed(shard):
            packer = Packer(rows.row_length, ~tokenizer.bos_id, rows.dtype, cut=False)
            batches = map(flatten, iter_batches(pieces))
            write_shard(rows, shard, packer, batches, {"skipped": 0, "text_bytes": 0})
    return rows.counts(shard)


def signed_ids(ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """Return trained ids unchanged and all others as ~id, int32."""
    plain = np.array(ids, np.int32)
    return np.where(np.array(mask, bool), plain, ~plain)


def flatten(pieces: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate arrays; return the result and their offsets, (n + 1,)."""
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


# ---- Mixing buckets ------------------------------------------------------------------------------


def mixed_chat_rows(
    buckets: Mapping[str, Encoded],
    tokens: Sequence[int],
    seed: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
) -> Rows:
    """
    Packed rows with about `tokens[i]` tokens from bucket i. If only part of a bucket is used, the
    seed selects its conversations.
    """
    about = {
        "seed": seed,
        "buckets": [
            {"name": name, "conversations": each.fingerprint, "tokens": count}
            for (name, each), count in zip(buckets.items(), tokens, strict=True)
        ],
    }
    rows = open_chat_rows(about, tokenizer, max_seq_len)
    conversations = mix_conversations(list(buckets.values()), tokens, seed)
    pack_encoded(rows, "train", conversations, tokenizer)
    return rows


def mix_conversations(
    buckets: Sequence[Encoded], tokens: Sequence[int], seed: int
) -> Iterator[np.ndarray]:
    """Yield the conversations of one pass, in order."""
    lengths = [bucket.lengths for bucket in buckets]
    taken = [choose_conversations(lengths[b], tokens[b], seed, b) for b in range(len(buckets))]
    sizes = [each[which] for each, which in zip(lengths, taken, strict=True)]
    for bucket, number in zip(*interleave(sizes, seed), strict=True):
        yield buckets[bucket][taken[bucket][number]]


def choose_conversations(lengths: np.ndarray, tokens: int, seed: int, bucket: int) -> np.ndarray:
    """
    Return the indices of conversations with about `tokens` tokens in total.

    Full repeats of the bucket come first, then part of it, each in a different order.
    """
    times = -(-tokens // int(lengths.sum())) if tokens else 0
    order = [permutation(seed, time, bucket, len(lengths)) for time in range(times)]
    every = np.concatenate([np.empty(0, np.int64), *order]).astype(np.int64)
    ends = np.cumsum(lengths[every])
    middles = ends - lengths[every] / 2  # round to the nearest conversation
    return every[: int(np.searchsorted(middles, tokens))]
