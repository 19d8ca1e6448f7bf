"""
Pack conversations into rows whose tokens carry the loss mask.

    conversations -> render -> Encoded, on disk -> Packer -> Rows of int32
    a batch of rows -> signed_inputs_and_targets -> tokens, targets with IGNORE

A token that is trained is stored as its id, any other as ~id, which is negative: the mask is in the
sign. Padding is BOS and not counted. A conversation without a trained token is left out. A bucket
is encoded once, whichever mixtures take from it.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.chat_format import Message, render
from nanochat.common import (
    base_dir,
    fingerprint,
    locked,
    read_sealed,
    sealed,
    sha256_file,
    write_json,
)
from nanochat.dataloader import Rows, interleave, permutation
from nanochat.distributed import DistContext
from nanochat.packing import Packer, follow_parent, lock_path, write_shard
from nanochat.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanochat.tokenizer import Tokenizer

# ---- Encoding and packing one bucket of conversations --------------------------------------------


CHAT_RULE = 3  # part of the fingerprint: raise it when the same conversations give other rows
BATCH = 256  # conversations encoded, or handed to the packer, at a time
POOL_SHARE = 10_000  # conversations for each process: fewer do not repay its start

Conversations = Iterable[Sequence[Message]]
read_tokenizer = lru_cache(maxsize=1)(Tokenizer.read)


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

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each takes in a row, its BOS included."""
        return np.diff(self.ends) + 1

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i] : self.ends[i + 1]]


def encode(
    about: Mapping[str, Any],
    conversations: Conversations,
    tokenizer: Tokenizer,
    max_seq_len: int,
    verify: bool = True,
    report: Callable[[str], None] = lambda progress: None,
) -> Encoded:
    """
    Conversations as tokens, from the disk where that was done before.

    about: JSON-ready, decides which there are, and in which order. Those longer than a row lose
    their end. verify: compare the files with their SHA-256; damaged ones are written again.
    report: called with the progress. Raises ValueError where no conversation is left.
    """
    made_of = recipe(about, tokenizer, max_seq_len)
    folder = base_dir() / "rows" / made_of["fingerprint"]
    record = folder / "encoded.json"
    with locked(folder / ".locks" / "encoding.lock", f"encoding {folder}"):
        if read_record(record, verify) is None:
            write_encoded(folder, conversations, tokenizer, max_seq_len + 1, report)
            write_json(folder / "index.json", made_of)
        counts = read_sealed(record)
    if not counts["conversations"]:
        raise ValueError(f"there is no conversation to train on in {dict(about)}")
    ids = np.memmap(folder / "ids.bin", np.int32, "r")
    ends = np.load(folder / "ends.npy", mmap_mode="r")
    return Encoded(made_of["fingerprint"], ids, ends, counts["trained"])


def read_record(record: Path, verify: bool) -> dict[str, Any] | None:
    """The record of encoded conversations; None where they are damaged, which is printed."""
    try:
        counts = read_sealed(record) if record.exists() else None
        for name, digest in counts["sha256"].items() if counts and verify else ():
            path = record.with_name(name)
            if not path.exists() or sha256_file(path) != digest:
                raise ValueError(f"{path} is damaged: its SHA-256 is not the recorded one")
    except ValueError as error:
        print(f"{error}: encoding these conversations again", flush=True)
        return None
    return counts


def write_encoded(
    folder: Path,
    conversations: Conversations,
    tokenizer: Tokenizer,
    row_length: int,
    report: Callable[[str], None],
) -> None:
    """
    Encode to files; the record comes last, so that half of them is none. Memory holds some batches
    and the length of every conversation, however many there are.
    """
    tokenizer.save(folder)  # for the processes of the pool
    total = f" of {len(conversations):,}" if isinstance(conversations, Sized) else ""
    lengths: list[int] = []
    done = trained = 0
    with (folder / "ids.bin").open("wb") as stream:
        for batch in encode_batches(conversations, folder / TOKENIZER_FILE, row_length):
            kept = [signed for signed in batch if len(signed)]
            stream.write(b"".join(signed.tobytes() for signed in kept))
            lengths += map(len, kept)
            trained += sum(int((signed >= 0).sum()) for signed in kept)
            done += len(batch)
            report(f"{done:,}{total} conversations")
    np.save(folder / "ends.npy", np.cumsum([0, *lengths]))
    skipped = done - len(lengths)  # because nothing in them counts
    counts = {"conversations": len(lengths), "trained": trained, "skipped": skipped}
    digests = {name: sha256_file(folder / name) for name in ("ids.bin", "ends.npy")}
    write_json(folder / "encoded.json", sealed({**counts, "sha256": digests}))


def encode_batches(
    conversations: Conversations, tokenizer_path: Path, row_length: int
) -> Iterator[list[np.ndarray]]:
    """
    What `encode_batch` makes of the conversations, in order, by all cores where there are many.
    """
    job = partial(encode_batch, tokenizer_path, row_length)
    many = len(conversations) // POOL_SHARE if isinstance(conversations, Sized) else 0
    workers = min(many, os.cpu_count() or 1)
    if workers < 2:
        yield from map(job, batched(conversations))
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with CUDA would hang
    pool = ProcessPoolExecutor(workers, context, initializer=follow_parent)
    waiting = deque()
    try:
        for batch in batched(conversations):
            waiting.append(pool.submit(job, batch))
            if len(waiting) > 2 * workers:  # what is read and not yet written stays bounded
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except ValueError as error:  # of a conversation: raised here, so that it is the user's to fix
        raise ValueError(str(error)) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode_batch(
    tokenizer_path: Path, row_length: int, conversations: Sequence[Sequence[Message]]
) -> list[np.ndarray]:
    """The signed ids of some conversations, without BOS; none of one in which nothing counts."""
    tokenizer = read_tokenizer(tokenizer_path)  # once in each process
    every = [signed_ids(*render(tokenizer, each, row_length))[1:] for each in conversations]
    return [signed if (signed >= 0).any() else signed[:0] for signed in every]


def batched(items: Iterable[Any]) -> Iterator[list[Any]]:
    """BATCH items at a time."""
    source = iter(items)
    while batch := list(islice(source, BATCH)):
        yield batch


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
    about: Mapping[str, Any], tokenizer: Tokenizer, max_seq_len: int, verifies: bool = True
) -> Rows:
    """
    The rows of conversations, packed already or not: shard "train", and "val" for validation;
    `verifies` as for `Rows`.
    """
    made_of = recipe(about, tokenizer, max_seq_len)
    folder = base_dir() / "rows" / made_of["fingerprint"]
    if not (folder / "index.json").exists():
        write_json(folder / "index.json", made_of)
    return Rows(folder, ["train"], "val", "int32", tokenizer.vocab_size, made_of, verifies=verifies)


def pack_encoded(
    rows: Rows, shard: str, pieces: Iterable[np.ndarray], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Pack encoded conversations into a shard, unless that has been done; its record."""
    with locked(lock_path(rows, shard), f"packing {shard}"):
        if not rows.is_packed(shard):
            packer = Packer(rows.row_length, ~tokenizer.bos_id, rows.dtype, cut=False)
            batches = map(flatten, batched(pieces))
            write_shard(rows, shard, packer, batches, {"skipped": 0, "text_bytes": 0})
    return rows.counts(shard)


def signed_ids(ids: Sequence[int], mask: Sequence[int]) -> np.ndarray:
    """ids where they count, ~id elsewhere, int32."""
    plain = np.array(ids, np.int32)
    return np.where(np.array(mask, bool), plain, ~plain)


def flatten(pieces: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays as one, and where each begins and ends."""
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


def signed_inputs_and_targets(rows: np.ndarray, ignore: int) -> tuple[np.ndarray, np.ndarray]:
    """Signed rows (B, T + 1) -> tokens and targets (B, T), int64; `ignore` where none counts."""
    ids = np.where(rows < 0, ~rows, rows).astype(np.int64)
    targets = np.where(rows < 0, ignore, rows).astype(np.int64)
    return ids[:, :-1], targets[:, 1:]


# ---- Mixing buckets ------------------------------------------------------------------------------


def mixed_chat_rows(
    buckets: Mapping[str, Encoded],
    tokens: Sequence[int],
    seed: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
    machine: DistContext,
) -> Rows:
    """
    The rows of `tokens` of each bucket; one process of each node packs.

    Which conversations of a bucket are taken, where it is not whole, depends on the seed.
    """
    about = {
        "seed": seed,
        "buckets": [
            {"name": name, "conversations": each.fingerprint, "tokens": count}
            for (name, each), count in zip(buckets.items(), tokens, strict=True)
        ],
    }
    rows = open_chat_rows(about, tokenizer, max_seq_len, verifies=machine.local_rank == 0)
    conversations = mix_conversations(list(buckets.values()), tokens, seed)
    machine.on_node(
        "packing conversations", lambda: pack_encoded(rows, "train", conversations, tokenizer)
    )
    return rows


def mix_conversations(
    buckets: Sequence[Encoded], tokens: Sequence[int], seed: int
) -> Iterator[np.ndarray]:
    """The conversations of a pass, in order."""
    lengths = [bucket.lengths for bucket in buckets]
    taken = [choose_conversations(lengths[b], tokens[b], seed, b) for b in range(len(buckets))]
    sizes = [each[which] for each, which in zip(lengths, taken, strict=True)]
    for bucket, number in zip(*interleave(sizes, seed), strict=True):
        yield buckets[bucket][taken[bucket][number]]


def choose_conversations(lengths: np.ndarray, tokens: int, seed: int, bucket: int) -> np.ndarray:
    """
    Which conversations make up about `tokens` tokens: all of them as often as they fit whole, then
    some more. Every time in another order.
    """
    times = -(-tokens // int(lengths.sum())) if tokens else 0
    order = [permutation(seed, time, bucket, len(lengths)) for time in range(times)]
    every = np.concatenate([np.empty(0, np.int64), *order]).astype(np.int64)
    ends = np.cumsum(lengths[every])
    middles = ends - lengths[every] / 2  # one more is taken where that comes closer
    return every[: int(np.searchsorted(middles, tokens))]
