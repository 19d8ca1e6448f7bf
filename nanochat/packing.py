"""
Best-fit packing of documents into packed sequences (rows) of T + 1 tokens, in several processes.

    Source + Tokenizer -> open_rows -> Rows -> ensure_packed (blocking), start_packing (background)
    batches of (ids, offsets) -> Packer -> write_shard -> rows on disk, record

Every row starts with BOS. The remainder of a cut document goes into a later row, after a BOS.
`python -m nanochat.packing <JSON>` is the background process.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nanochat import common
from nanochat.config import user_message
from nanochat.dataloader import Rows, shard_file_name
from nanochat.dataset import DataConfig, Source, open_source
from nanochat.tokenizer import Tokenizer

# ---- Best-fit packing of documents into rows -----------------------------------------------------


PACKING_RULE = 2  # part of row fingerprints: increment it when the same input packs differently

# A larger pool cuts fewer documents. Measured: 2026-11, rows of 2,049, lognormal lengths
# (mean 820 tokens; 7.7% of documents are longer than a row): 256 pieces cut 16%, 1,024 cut 15%,
# 8,192 cut 11%.
POOL_PIECES = 8192
POOL_TOKENS = 1 << 24  # limits the pool's memory for very long rows
MAX_DROPPED = 0.005  # maximum fraction of a stream's tokens dropped at its end


@dataclass
class PackCounts:
    """Packing statistics. Invariant: `rows * row_length == tokens + bos`."""

    rows: int = 0
    documents: int = 0
    """Non-empty documents added."""
    documents_cut: int = 0
    """Documents split into several pieces; unavoidable for those longer than a row."""
    tokens: int = 0
    """Document tokens in rows, without BOS."""
    bos: int = 0
    extra_bos: int = 0
    """BOS tokens that start no document: they precede the rest of a cut document or are padding."""
    dropped: int = 0
    """Document tokens in no row."""


class Packer:
    """
    Packs a stream of documents into rows of `row_length` tokens, at least 2.

    With `cut`, documents are split so that only the last row may be padded with more than one BOS;
    without it, they stay whole and must not be longer than a row. Memory: the pool (at most
    POOL_TOKENS tokens) and twice the current batch.
    """

    def __init__(self, row_length: int, bos_id: int, dtype: Any = np.uint16, cut: bool = True):
        self.row_length = row_length
        self.bos = np.array([bos_id], dtype)
        self.cut = cut
        self.pool_pieces = max(1, min(POOL_PIECES, POOL_TOKENS // row_length))
        self.counts = PackCounts()
        # Pool of pieces by length, oldest first: (tokens with BOS, rest of a cut document?)
        self.buckets: dict[int, deque[tuple[np.ndarray, bool]]] = defaultdict(deque)
        self.lengths = 0  # bit n is set if the pool has a piece of length n
        self.pooled_pieces = 0
        self.pooled_tokens = 0  # without BOS
        self.placed: list[np.ndarray] = []  # pieces of completed rows, in order

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """
        Add documents `ids[offsets[i]:offsets[i + 1]]` and return the rows completed so far.

        ids: token ids without BOS; offsets: (documents + 1,). Returns (n, row_length), n >= 0.
        """
        tokens = np.insert(ids.astype(self.bos.dtype), offsets[:-1], self.bos[0])
        bounds = (offsets + np.arange(len(offsets))).tolist()
        self.counts.documents += int(np.count_nonzero(np.diff(offsets)))
        for start, end in pairwise(bounds):
            if end - start > self.row_length:
                self._put(*self._cut(tokens[start:end]))
            elif end - start > 1:
                self._put(tokens[start:end], False)
            while (
                self.pooled_pieces > self.pool_pieces
                and self.pooled_tokens + self.pooled_pieces >= self.row_length
            ):
                self._fill_row()
        return self._lay_out()

    def finish(self) -> np.ndarray:
        """Empty the pool and return the last rows, (n, row_length)."""
        while self.pooled_pieces:
            self._fill_row()
        return self._lay_out()

    def _cut(self, document: np.ndarray) -> tuple[np.ndarray, bool]:
        """Place the full rows of a long document (with BOS); return the remainder and True."""
        counts, whole = self.counts, self.row_length - 1
        counts.documents_cut += 1
        n = (len(document) - 2) // whole  # leaves at least one token
        rows = np.full((n, self.row_length), self.bos)
        rows[:, 1:] = document[1 : 1 + n * whole].reshape(n, whole)
        self.placed.append(rows.reshape(-1))
        counts.tokens += n * whole
        counts.bos += n
        counts.extra_bos += n - 1
        return np.concatenate([self.bos, document[1 + n * whole :]]), True

    def _put(self, piece: np.ndarray, is_rest: bool) -> None:
        """Add a copy of a piece to the pool; a view would keep its batch in memory."""
        length = len(piece)
        self.buckets[length].append((piece.copy(), is_rest))
        self.lengths |= 1 << length
        self.pooled_pieces += 1
        self.pooled_tokens += length - 1

    def _pop(self, length: int) -> tuple[np.ndarray, bool]:
        """Remove the oldest piece of a length; return it and whether it is a remainder."""
        bucket = self.buckets[length]
        if len(bucket) == 1:
            self.lengths ^= 1 << length
        self.pooled_pieces -= 1
        self.pooled_tokens -= length - 1
        return bucket.popleft()

    def _fill_row(self) -> None:
        """Fill one row. If the pool runs out, pad the row, or drop it if it has few tokens."""
        counts, pieces, num_rests, gap = self.counts, [], 0, self.row_length
        while gap and self.pooled_pieces:
            if fitting := self.lengths & ((2 << gap) - 1):
                piece, is_rest = self._pop(fitting.bit_length() - 1)  # the longest that fits
            elif gap == 1 or not self.cut:
                break
            else:  # cut the shortest piece
                piece, is_rest = self._pop((self.lengths & -self.lengths).bit_length() - 1)
                self._put(np.concatenate([self.bos, piece[gap:]]), is_rest=True)
                counts.documents_cut += not is_rest
                piece = piece[:gap]
            pieces.append(piece)
            num_rests += is_rest
            gap -= len(piece)
        tokens = self.row_length - gap - len(pieces)
        max_dropped = MAX_DROPPED * (counts.tokens + counts.dropped + tokens)
        if gap > 1 and self.cut and tokens <= max_dropped:
            counts.dropped += tokens
            return
        counts.tokens += tokens
        counts.bos += len(pieces) + gap
        counts.extra_bos += num_rests + gap
        self.placed += [*pieces, self.bos.repeat(gap)]

    def _lay_out(self) -> np.ndarray:
        """Return the placed pieces as rows, (n, row_length), and clear them."""
        rows = np.concatenate([self.bos[:0], *self.placed]).reshape(-1, self.row_length)
        self.placed.clear()
        self.counts.rows += len(rows)
        return rows


Batches = Iterable[tuple[np.ndarray, np.ndarray]]  # ids and offsets, as `Packer.add` takes them


# ---- Packing a source shard by shard, in several processes ---------------------------------------
# A shard of rows is packed from one file of the source, or from several small ones. It depends only
# on these, the tokenizer and the row length. Processes share the work through lock files. A shard's
# record is written last and marks it as complete, so a crash leaves no partial shard.


# Estimates, slightly high: a token is about 4 bytes of text; a byte of parquet or gzip holds about
# 3.3 bytes of text.
TOKENS_PER_STORED_BYTE = {".parquet": 1.0, ".gz": 1.0}
TOKENS_PER_BYTE = 0.3
GROUP_ROWS = 512  # small files are combined into shards of about this many rows


def open_rows(source: Source, tokenizer: Tokenizer, max_seq_len: int) -> Rows:
    """
    Open the rows of a source under rows/; they need not be packed yet.

    The folder name is a hash of everything that determines the rows of a shard, so runs with more
    or fewer shards share it. It holds a copy of the tokenizer and, for reference only, the recipe
    (index.json).
    """
    made_of = {"tokenizer": tokenizer.fingerprint, "max_seq_len": max_seq_len}
    made_of["packing_rule"] = PACKING_RULE
    folder = common.base_dir() / "rows" / common.fingerprint({"text": source.identity, **made_of})
    name = common.fingerprint({"source": source.fingerprint, **made_of})
    recipe = {"fingerprint": name, "source": source.describe(), **made_of}
    groups = group_files(source, max_seq_len + 1)
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(folder)
    common.write_json(folder / "index.json", recipe)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    files = {**groups, source.val_shard: [source.val_shard]}
    return Rows(folder, list(groups), source.val_shard, dtype, tokenizer.vocab_size, recipe, files)


def group_files(source: Source, row_length: int) -> dict[str, list[str]]:
    """
    Group the training files of a source into shards of rows: name -> files, in order.

    Each group is the shortest run of consecutive files with about GROUP_ROWS rows of text; a
    smaller one at the end joins the previous group. A group of one file keeps its name. Depends
    only on row_length and on the ordered files and their sizes, so the first groups do not change
    when more files are used.
    """
    tokens, runs, rows = estimate_tokens(source), [[]], 0.0
    for file in source.train_shards:
        if rows >= GROUP_ROWS:
            runs.append([])
            rows = 0.0
        runs[-1].append(file)
        rows += tokens[file] / row_length
    if rows < GROUP_ROWS and len(runs) > 1:
        runs[-2:] = [runs[-2] + runs[-1]]
    names = [run[0] for run in runs]
    for i, run in enumerate(runs):
        if len(run) > 1:
            names[i] += f"+{len(run) - 1}-{common.fingerprint(run)[:8]}"
    return dict(zip(names, runs, strict=True))


def estimate_tokens(source: Source) -> dict[str, float]:
    """Estimated number of tokens of each shard of a source."""
    return {
        shard: size * TOKENS_PER_STORED_BYTE.get(Path(shard).suffix, TOKENS_PER_BYTE)
        for shard, size in source.shard_sizes().items()
    }


def pack_shard(source: Source, shard: str, tokenizer: Tokenizer, rows: Rows) -> None:
    """Pack one shard, in bounded memory. The caller must hold the shard's lock."""
    skipped, counts = Counter(), dict[str, Any](text_bytes=0)

    def encoded() -> Batches:
        for file in rows.files[shard]:
            for texts in source.documents(file, skipped):
                counts["text_bytes"] += sum(len(text.encode()) for text in texts)
                yield tokenizer.encode_flat(texts)
        counts.update(skipped=skipped.total(), skipped_by_kind=dict(skipped))

    packer = Packer(rows.row_length, tokenizer.bos_id, rows.dtype)
    write_shard(rows, shard, packer, encoded(), counts)


def write_shard(
    rows: Rows, shard: str, packer: Packer, batches: Batches, counts: Mapping[str, Any]
) -> None:
    """
    Pack batches into a shard, atomically.

    counts: extra entries for the shard's record; `batches` may add to it while being consumed.
    """
    path, record = rows.bin_path(shard), rows.counts_path(shard)
    if record.exists():
        print(f"{record} does not match {path}: packing {shard} again", flush=True)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as out:
            for ids, offsets in batches:
                out.write(packer.add(ids, offsets).tobytes())
            out.write(packer.finish().tobytes())
        common.fsync(part)
        digest = common.sha256_file(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    common.fsync(rows.folder)
    common.write_json(record, common.seal({**asdict(packer.counts), **counts, "sha256": digest}))


def ensure_packed(
    rows: Rows, source: Source, tokenizer: Tokenizer, rows_needed: int | None = None
) -> None:
    """
    Pack missing shards in order until there are `rows_needed` training rows (None: all shards).

    Shares the work with other processes that call it, and returns when all of it is done. Raises
    UsageError if there is not enough disk space.
    """
    if needed := bytes_to_pack(rows, source, rows_needed):
        common.require_free(
            rows.folder, needed, "downloading and packing the text", "lower --num_shards"
        )
    with heartbeat(rows.alive_path):
        while todo := missing_shards(rows, rows_needed):
            for shard in todo:
                with common.try_lock(lock_path(rows, shard)) as mine:
                    if mine and not rows.is_packed(shard):
                        pack_shard(source, shard, tokenizer, rows)
                        break
            else:  # other processes are packing all of them: wait for the first
                with common.hold_lock(lock_path(rows, todo[0]), f"packing {todo[0]}"):
                    pass


def missing_shards(rows: Rows, rows_needed: int | None) -> list[str]:
    """Shards still to pack, by urgency: first training shard, validation shard, the others."""
    shards = [rows.val_shard]
    if rows_needed is None or rows.packed_train_rows < rows_needed:
        shards = [*rows.train_shards[:1], *shards, *rows.train_shards[1:]]
    return [shard for shard in shards if not rows.is_packed(shard)]


def lock_path(rows: Rows, shard: str) -> Path:
    """Lock file that a process holds while it packs a shard."""
    return rows.folder / ".locks" / f"{shard_file_name(shard)}.lock"


def bytes_to_pack(rows: Rows, source: Source, rows_needed: int | None = None) -> int:
    """Estimated bytes that downloading and packing will write."""
    tokens = estimate_tokens(source)
    files, num_rows, enough = [], 0.0, math.inf if rows_needed is None else rows_needed
    have = rows.packed_train_rows
    for shard in missing_shards(rows, rows_needed):
        estimate = sum(tokens[file] for file in rows.files[shard]) / rows.row_length
        if shard != rows.val_shard:
            if have >= enough:
                break
            have += estimate
        files += rows.files[shard]
        num_rows += estimate
    return int(num_rows * rows.row_length * rows.dtype.itemsize) + source.missing_bytes(files)


# ---- In the background ---------------------------------------------------------------------------


@contextmanager
def start_packing(
    rows: Rows, source: Source, rows_needed: int | None = None, workers: int = 1
) -> Iterator[list[subprocess.Popen]]:
    """
    Run `ensure_packed` in background processes; meanwhile `rows.batch` waits for missing shards.

    Call it in one process per machine (local rank 0). The workers run at low priority; if one
    fails, `rows.batch` raises its error message. On exit all are terminated; an unfinished shard is
    packed again next time.
    """
    rows.error_path.unlink(missing_ok=True)
    order = json.dumps(
        [os.getpid(), source.describe(), str(rows.folder), rows.max_seq_len, rows_needed]
    )
    command = [sys.executable, "-m", "nanochat.packing", order]
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(common.base_dir()), "RAYON_NUM_THREADS": "1"}
    processes = [
        # New session, so that signals to our process group do not reach the workers
        subprocess.Popen(command, cwd=common.REPOSITORY, env=env, start_new_session=True)
        for _ in range(workers if missing_shards(rows, rows_needed) else 0)
    ]
    for process in processes:
        threading.Thread(target=record_worker_exit, args=(process, rows), daemon=True).start()
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def record_worker_exit(process: subprocess.Popen, rows: Rows) -> None:
    """Record that a worker failed without an error message of its own, for example when killed."""
    status = process.wait()
    if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM) and not rows.error_path.exists():
        common.write_atomic(rows.error_path, f"a packing process exited with status {status}")


@contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Touch a file every second, so that waiting processes see that packing is in progress."""
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            with suppress(OSError):  # for example a short fault of a network drive
                path.touch()
            done.wait(1.0)

    # A daemon, as SIGTERM can raise SystemExit before `done` is set: joining it would never end
    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def follow(parent: int) -> None:
    """Exit soon after the parent process exits, even if it is killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Entry point of the background process; takes the JSON argument of `start_packing`."""
    parent, described, folder, max_seq_len, rows_needed = json.loads(sys.argv[1])
    follow(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # sys.exit unwinds the stack, which removes partial files
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.nice(10)
    try:
        source = open_source(DataConfig(), described)
        tokenizer = Tokenizer.read(Path(folder, "tokenizer.json"))
        rows = open_rows(source, tokenizer, max_seq_len)
        ensure_packed(rows, source, tokenizer, rows_needed)
    except Exception as error:
        common.write_atomic(
            Path(folder, "packing.error"), user_message(error) or traceback.format_exc()
        )
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
