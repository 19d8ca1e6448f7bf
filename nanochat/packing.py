"""
Pack documents into rows of T + 1 tokens, by best fit, in any number of processes.

    Source + Tokenizer -> open_rows -> Rows -> ensure (here, now) or start_packing (background)

Every row starts with BOS; the remainder of a document that did not fit is used again. Started as a
program (`python -m nanochat.packing <order>`), this module is the background process.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import (
    REPOSITORY,
    base_dir,
    claimed,
    fingerprint,
    fsync,
    locked,
    printable,
    read_json,
    require_free,
    sealed,
    write_atomic,
    write_json,
)
from nanochat.config import user_message
from nanochat.dataloader import Rows, flat
from nanochat.dataset import DataConfig, Source, open_source
from nanochat.tokenizer import Tokenizer

# ---- Best-fit packing of documents into rows -----------------------------------------------------


PACKING_RULE = 2  # part of every fingerprint of rows: raise it when the same input packs otherwise

# More pieces to choose from cut fewer documents. measured 2026-11, rows of 2,049, lognormal lengths
# (mean 820 tokens, 7.7% longer than a row): 256 pieces cut 16% of documents, 1,024 15%, 8,192 11%.
POOL_PIECES = 8192
POOL_TOKENS = 1 << 24  # bounds the memory of the pool where rows are very long
SPARE_TOKENS = 1 << 20  # used-up tokens that may stay in the store before it is compacted
MAX_DROPPED = 0.005  # share of a stream's tokens that may be dropped at its end
BLOCK_TOKENS = 1 << 20  # tokens laid out at a time: bounds the index arrays


@dataclass
class PackCounts:
    """What packing did. `rows * row_length == tokens + bos` always holds."""

    rows: int = 0
    documents: int = 0
    """Documents that came in, empty ones left out."""
    documents_cut: int = 0
    """Documents that lie in more than one piece; those longer than a row cannot but be."""
    tokens: int = 0
    """Tokens of documents that lie in rows, BOS not counted."""
    bos: int = 0
    extra_bos: int = 0
    """BOS that open no document: in front of the rests of cut ones, or padding at a row's end."""
    dropped: int = 0
    """Tokens of documents that lie in no row."""


class Packer:
    """
    Packs one stream of documents into rows of `row_length` tokens. With `cut`, documents are cut
    so that only the last row may be padded with BOS; without it they stay whole.

    Memory: the pool (at most POOL_TOKENS tokens), as much again, and the batch at hand.
    Raises ValueError for a row shorter than two tokens.
    """

    def __init__(
        self,
        row_length: int,
        bos_id: int,
        dtype: Any = np.uint16,
        pool_pieces: int = POOL_PIECES,
        cut: bool = True,
    ):
        if row_length < 2:
            raise ValueError(f"a row holds a BOS and at least one token, not {row_length} in all")
        self.row_length = row_length
        self.bos_id = bos_id
        self.cut = cut
        self.pool_pieces = max(1, min(pool_pieces, POOL_TOKENS // row_length))
        self.counts = PackCounts()
        self.store = np.empty(0, dtype)  # tokens of the pooled pieces, and used-up ones between
        # The pool: by length (BOS included), oldest first, 2 * start in store + (1: a rest)
        self.buckets: dict[int, deque[int]] = defaultdict(deque)
        self.lengths = 0  # bit n is set: there is a piece of length n
        self.pooled_pieces = 0
        self.pooled_tokens = 0  # without BOS
        # The plan: pieces in the order in which they lie in rows
        self.plan: list[tuple[int, int, int]] = []  # start in store, length, (1: opens no document)

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """
        Take documents `ids[offsets[i]:offsets[i + 1]]`; return the rows that are full by now.

        ids: token ids without BOS; offsets: (documents + 1,). Returns (n, row_length), n >= 0.
        """
        base = self.store.size
        self.store = np.concatenate([self.store, ids.astype(self.store.dtype)])
        bounds = (offsets + base).tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            self._take(start, end)
            while self.pooled_pieces > self.pool_pieces and self._can_fill():
                self._fill_row()
        rows = self._lay_out()
        if self.store.size > 2 * self.pooled_tokens + SPARE_TOKENS:
            self._compact()
        return rows

    def finish(self) -> np.ndarray:
        """Empty the pool: the last rows, (n, row_length)."""
        while self.pooled_pieces:
            self._fill_row()
        return self._lay_out()

    def _take(self, start: int, end: int) -> None:
        """Pool the document store[start:end], after the whole rows it gives off by itself."""
        if start == end:
            return
        self.counts.documents += 1
        whole = self.row_length - 1
        rest = 0
        if not self.cut and end - start > whole:
            self.counts.documents_cut += 1
            self.counts.dropped += end - start - whole
            end = start + whole
        while end - start > whole:
            self.plan.append((start, self.row_length, rest))
            start += whole
            rest = 1
        self.counts.documents_cut += rest
        self._put(start, end - start + 1, rest)

    def _put(self, start: int, length: int, rest: int) -> None:
        self.buckets[length].append(2 * start + rest)
        self.lengths |= 1 << length
        self.pooled_pieces += 1
        self.pooled_tokens += length - 1

    def _pop(self, length: int) -> tuple[int, int]:
        """Take the oldest piece of a length out of the pool: its start, and 1 if it is a rest."""
        bucket = self.buckets[length]
        piece = bucket.popleft()
        if not bucket:
            self.lengths ^= 1 << length
        self.pooled_pieces -= 1
        self.pooled_tokens -= length - 1
        return piece >> 1, piece & 1

    def _can_fill(self) -> bool:
        """True when the pool holds a row's worth of tokens."""
        return self.pooled_tokens + self.pooled_pieces >= self.row_length

    def _fill_row(self) -> None:
        """Plan one row. One that the whole pool cannot fill is padded, or dropped."""
        first = len(self.plan)
        gap = self.row_length
        while gap and self.pooled_pieces:
            fitting = self.lengths & ((2 << gap) - 1)
            if fitting:
                length = fitting.bit_length() - 1  # the longest that fits
                start, rest = self._pop(length)
                self.plan.append((start, length, rest))
                gap -= length
            elif gap == 1 or not self.cut:
                break
            else:
                length = (self.lengths & -self.lengths).bit_length() - 1  # the shortest there is
                start, rest = self._pop(length)
                self.plan.append((start, gap, rest))
                self._put(start + gap - 1, length - gap + 1, rest=1)
                self.counts.documents_cut += 1 - rest
                gap = 0
        if gap > 1 and self.cut and self._may_drop(first):
            self.counts.dropped += planned_tokens(self.plan[first:])
            del self.plan[first:]
        else:
            self.plan += [(0, 1, 1)] * gap

    def _may_drop(self, first: int) -> bool:
        """Whether the tokens planned from place `first` on are at most MAX_DROPPED of all."""
        total = self.counts.tokens + self.counts.dropped + planned_tokens(self.plan)
        return planned_tokens(self.plan[first:]) <= MAX_DROPPED * total

    def _lay_out(self) -> np.ndarray:
        """Turn the plan into rows and forget it."""
        plan = np.array(self.plan, dtype=np.int64).reshape(-1, 3)
        self.plan.clear()
        starts, lengths, rests = plan.T
        rows = np.empty((int(lengths.sum()) // self.row_length, self.row_length), self.store.dtype)
        step = max(1, BLOCK_TOKENS // self.row_length)  # pieces at a time
        done = 0
        for i in range(0, len(plan), step):
            part = gather(self.store, starts[i : i + step], lengths[i : i + step], self.bos_id)
            rows.reshape(-1)[done : done + part.size] = part
            done += part.size
        counts = self.counts
        counts.rows += len(rows)
        counts.bos += len(plan)
        counts.extra_bos += int(rests.sum())
        counts.tokens += rows.size - len(plan)
        return rows

    def _compact(self) -> None:
        """Move the pooled pieces to the front of a store that holds nothing else."""
        buckets = {length: bucket for length, bucket in self.buckets.items() if bucket}
        pieces = np.array([p for bucket in buckets.values() for p in bucket], dtype=np.int64)
        sizes = [len(bucket) for bucket in buckets.values()]
        lengths = np.repeat(np.array(list(buckets), dtype=np.int64), sizes) - 1  # without BOS
        moved = np.cumsum(lengths) - lengths
        index = np.arange(lengths.sum()) + np.repeat((pieces >> 1) - moved, lengths)
        self.store = self.store[index]
        fresh = iter((2 * moved + (pieces & 1)).tolist())
        for bucket in buckets.values():
            for i in range(len(bucket)):
                bucket[i] = next(fresh)


def planned_tokens(plan: list[tuple[int, int, int]]) -> int:
    """Tokens of documents in a plan, BOS not counted."""
    return sum(length - 1 for _, length, _ in plan)


def gather(store: np.ndarray, starts: np.ndarray, lengths: np.ndarray, bos_id: int) -> np.ndarray:
    """
    Concatenate pieces: a BOS, then `lengths[i] - 1` tokens of `store` from `starts[i]` on.

    Returns (lengths.sum(),), of the store's dtype.
    """
    ends = np.cumsum(lengths)
    opening = ends - lengths  # where the BOS of each piece lies
    index = np.arange(lengths.sum()) + np.repeat(starts - 1 - opening, lengths)
    index[opening] = 0
    tokens = store[index]
    tokens[opening] = bos_id
    return tokens


def pack(batches: Iterable[tuple[np.ndarray, np.ndarray]], packer: Packer) -> Iterator[np.ndarray]:
    """All rows of a stream of (ids, offsets) batches, in blocks; `packer.counts` tells the rest."""
    for ids, offsets in batches:
        yield packer.add(ids, offsets)
    yield packer.finish()


# ---- Packing a source shard by shard, in several processes ---------------------------------------
# A shard of rows is packed from one file of the source, or from several small ones. It is a pure
# function of shard, tokenizer and row length. Processes share the work by lock files. A shard
# counts as packed when its record exists, which is written last: a crash leaves nothing torn.


# Estimates. A token stands for about 4 bytes of text, a byte of parquet or gzip for about 3.3; a
# little on the safe side.
TOKENS_PER_STORED_BYTE = {".parquet": 1.0, ".gz": 1.0}
TOKENS_PER_BYTE = 0.3
GROUP_ROWS = 512  # about how many rows small files are gathered for: less than a row is left over


def open_rows(
    source: Source,
    tokenizer: Tokenizer,
    max_seq_len: int,
    run_id: str | None = None,
    say: Callable[[str], None] = print,
    verifies: bool = True,
) -> Rows:
    """
    The rows of a source under rows/, whether packed already or not.

    The folder is named by what decides the rows of a shard, so runs over fewer or more shards of a
    source share it. It holds a copy of the tokenizer. run_id goes into index.json; `say` is told
    when a shard is waited for; `verifies` as for `Rows`.
    """
    if max_seq_len < 1:
        raise ValueError(f"--max_seq_len is at least 1, not {max_seq_len}")
    made_of = {
        "tokenizer": tokenizer.fingerprint,
        "max_seq_len": max_seq_len,
        "packing_rule": PACKING_RULE,
    }
    folder = base_dir() / "rows" / fingerprint({"text": source.identity, **made_of})
    groups = group_files(source, max_seq_len + 1)
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(folder)
    rows = Rows(
        folder,
        list(groups),
        source.val_shard,
        max_seq_len,
        "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        tokenizer.vocab_size,
        {
            "fingerprint": fingerprint({"source": source.fingerprint, **made_of}),
            "source": source.describe(),
            **made_of,
        },
        say,
        {**groups, source.val_shard: [source.val_shard]},
        verifies,
    )
    write_index(rows, run_id)
    return rows


def group_files(source: Source, row_length: int) -> dict[str, list[str]]:
    """
    The training shards of rows of a source: name -> files packed into it, in order.

    Each is the shortest run of consecutive files with text for about GROUP_ROWS rows; a shorter one
    at the end joins the one before. A file that is large enough keeps its name. Depends on
    row_length and the ordered files and their sizes only, so that the first shards of a source stay
    the same when more files of it are used.
    """
    sizes, runs, rows = source.shard_sizes(), [[]], 0.0
    for file in source.train_shards:
        if rows >= GROUP_ROWS:
            runs.append([])
            rows = 0.0
        runs[-1].append(file)
        rows += sizes[file] * tokens_per_stored_byte(file) / row_length
    if rows < GROUP_ROWS and len(runs) > 1:
        last = runs.pop()
        runs[-1] += last
    return {
        f"{files[0]}+{len(files) - 1}-{fingerprint(files)[:8]}" if files[1:] else files[0]: files
        for files in runs
    }


def tokens_per_stored_byte(file: str) -> float:
    """About how many tokens a file of this name gives."""
    return TOKENS_PER_STORED_BYTE.get(Path(file).suffix, TOKENS_PER_BYTE)


def write_index(rows: Rows, run_id: str | None = None) -> None:
    """Write index.json: what these rows are, and the packed shards in order. For people."""
    path = rows.folder / "index.json"
    with locked(rows.folder / ".locks" / "index.lock", "writing index.json"):
        if run_id is None and path.exists():
            run_id = read_json(path)["run_id"]
        index = {
            **rows.recipe,
            "run_id": run_id,
            "dtype": rows.dtype.name,
            "val_shard": rows.val_shard,
            "totals": rows.totals(),
            "shards": [{"shard": s, **rows.counts(s)} for s in rows.shards if rows.is_packed(s)],
        }
        write_json(path, index)


def pack_shard(
    source: Source, shard: str, tokenizer: Tokenizer, rows: Rows, num_threads: int | None = None
) -> dict[str, Any]:
    """
    Pack one shard and return its record. Memory stays bounded, whatever the shard's size.

    The rows go to a `.part` file, which is renamed when it is safe on disk; then the record is
    written. The caller holds the shard's lock.
    """
    packer = Packer(rows.row_length, tokenizer.bos_id, rows.dtype)
    skipped: Counter = Counter()
    text_bytes = 0

    def encoded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal text_bytes
        for file in rows.files[shard]:
            for texts in source.documents(file, skipped):
                text_bytes += sum(len(text.encode()) for text in texts)
                yield tokenizer.encode_flat(texts, num_threads=num_threads)

    digest = write_rows(rows, shard, pack(encoded(), packer))
    counts = {
        **asdict(packer.counts),
        "text_bytes": text_bytes,
        "skipped": skipped.total(),
        "skipped_by_kind": dict(skipped),
        "sha256": digest,
    }
    write_json(rows.counts_path(shard), sealed(counts))
    return counts


def write_rows(rows: Rows, shard: str, blocks: Iterable[np.ndarray]) -> str:
    """
    Write a shard's file of rows, complete or not at all; returns its SHA-256.

    Reports where a shard is packed again because its record is damaged.
    """
    try:
        rows.counts(shard)
    except FileNotFoundError:
        pass
    except ValueError as error:
        rows.say(f"{error}: packing {shard} again")
    path = rows.bin_path(shard)
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    try:
        with part.open("wb") as out:
            for block in blocks:
                data = block.tobytes()
                digest.update(data)
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    fsync(rows.folder)
    return digest.hexdigest()


def work_list(rows: Rows) -> list[str]:
    """The order of packing: what the first step needs, what evaluation needs, the rest."""
    return [*rows.train_shards[:1], rows.val_shard, *rows.train_shards[1:]]


def ensure(
    rows: Rows,
    source: Source,
    tokenizer: Tokenizer,
    rows_needed: int | None = None,
    num_threads: int | None = None,
) -> None:
    """
    Pack what is missing, in order, until there are `rows_needed` training rows (None: all shards).

    Shares the work with every other process that does the same, and returns when it is done.
    """
    check_space(rows, source, rows_needed)
    with alive(rows.alive_path):
        while todo := missing_shards(rows, rows_needed):
            for shard in todo:
                with claimed(lock_path(rows, shard)) as mine:
                    if mine and not rows.is_packed(shard):
                        pack_shard(source, shard, tokenizer, rows, num_threads)
                        break
            else:  # others are packing them all: wait for the first
                with locked(lock_path(rows, todo[0]), f"packing {todo[0]}"):
                    pass
    write_index(rows)


def missing_shards(rows: Rows, rows_needed: int | None) -> list[str]:
    """The shards that are to be packed, in order."""
    needs_train = rows_needed is None or rows.packed_train_rows < rows_needed
    needed = work_list(rows) if needs_train else [rows.val_shard]
    return [shard for shard in needed if not rows.is_packed(shard)]


def lock_path(rows: Rows, shard: str) -> Path:
    """The lock file by which a process claims a shard."""
    return rows.folder / ".locks" / f"{flat(shard)}.lock"


def check_space(rows: Rows, source: Source, rows_needed: int | None = None) -> None:
    """Raise Refused naming the numbers unless what is missing fits on the disk."""
    needed, shards = bytes_to_pack(rows, source, rows_needed)
    if shards:
        require_free(
            rows.folder, needed, f"fetching and packing {shards} shards", "lower --num_shards"
        )


def bytes_to_pack(rows: Rows, source: Source, rows_needed: int | None = None) -> tuple[int, int]:
    """About what fetching and packing will write, and of how many shards."""
    sizes = source.shard_sizes()
    row_bytes = rows.row_length * rows.dtype.itemsize
    files, shards, total, have = [], 0, 0, rows.packed_train_rows
    for shard in missing_shards(rows, rows_needed):
        if shard != rows.val_shard and rows_needed is not None and have >= rows_needed:
            break
        estimates = (sizes[f] * tokens_per_stored_byte(f) for f in rows.files[shard])
        size = int(sum(estimates) * rows.dtype.itemsize)
        files += rows.files[shard]
        shards += 1
        total += size
        have += size // row_bytes if shard != rows.val_shard else 0
    return total + (source.missing_bytes(files) if files else 0), shards


# ---------------------------------------------------------------------------------------------
# In the background


class Packing:
    """Background processes at work. They end when the work is done, on close, or with us."""

    def __init__(self, rows: Rows, processes: list[subprocess.Popen]):
        self.rows, self.processes = rows, processes

    def __enter__(self) -> "Packing":
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes; a shard they were at is packed anew next time."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()

    @property
    def running(self) -> bool:
        """True while a process is at work."""
        return any(process.poll() is None for process in self.processes)

    def failure(self) -> str | None:
        """Why a process ended before its work was done, if one did."""
        for process in self.processes:
            if process.poll() not in (None, 0):
                if self.rows.error_path.exists():
                    return self.rows.error_path.read_text()
                return f"a packing process ended with status {process.returncode}"
        return None


def start_packing(
    rows: Rows,
    source: Source,
    rows_needed: int | None = None,
    workers: int = 1,
    say: Callable[[str], None] = lambda line: print(f"[packing] {line}", flush=True),
) -> Packing:
    """
    Have background processes do what `ensure` does; `rows.batch` waits for a shard it lacks.

    One process per machine calls this (local rank 0). The workers run at low priority, hand their
    lines to `say`, and when one fails, `rows` raises its message where it waits.
    """
    check_space(rows, source, rows_needed)
    if not missing_shards(rows, rows_needed):
        return Packing(rows, [])
    rows.error_path.unlink(missing_ok=True)
    order = {
        "source": source.describe(),
        "folder": str(rows.folder),
        "max_seq_len": rows.max_seq_len,
        "rows_needed": rows_needed,
        "parent": os.getpid(),
    }
    environment = {
        **os.environ,
        "NANOCHAT_BASE_DIR": str(base_dir()),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "nanochat.packing", json.dumps(order)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a signal to our group is ours: we save, they end with us
        )
        for _ in range(workers)
    ]
    for process in processes:
        threading.Thread(target=forward, args=(process, say), daemon=True).start()

    packing = Packing(rows, processes)
    rows.packer_failure = packing.failure
    return packing


def forward(process: subprocess.Popen, say: Callable[[str], None]) -> None:
    """Hand on what a process prints, line by line."""
    assert process.stdout is not None
    for line in process.stdout:
        say(printable(line.rstrip()))


@contextmanager
def alive(path: Path) -> Iterator[None]:
    """While inside, touch a file every second: whoever waits sees that someone is at work."""
    done = threading.Event()

    def beat() -> None:
        path.touch()
        while not done.wait(1.0):
            path.touch()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def exit_with(parent: int) -> None:
    """End this process soon after its parent has ended, however it ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """The background process: one JSON argument, as `start_packing` writes it."""
    order = json.loads(sys.argv[1])
    threading.Thread(target=exit_with, args=(order["parent"],), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's business
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: no half file stays
    os.nice(10)
    folder = Path(order["folder"])
    try:
        source = open_source(DataConfig(), order["source"])
        tokenizer = Tokenizer.read(folder / "tokenizer.json")
        rows = open_rows(source, tokenizer, order["max_seq_len"])
        assert rows.folder == folder, f"{rows.folder} is not {folder}"
        ensure(rows, source, tokenizer, order["rows_needed"], num_threads=1)
    except Exception as error:
        message = user_message(error)
        if message is None:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        write_atomic(folder / "packing.error", message)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
