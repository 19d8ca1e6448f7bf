"""
Download, verify and pack text ahead of training.

    python -m scripts.data --dataset=karpathy/climbmix-400b-shuffle --num_shards=8 --download_only
    python -m scripts.data --dataset=my/texts --max_seq_len=512

Optional: base training packs the rows that it needs. Finished work is kept; machines that share
the base directory can run this together.

Reads   the text, and tokenizer/<tag>/ under the base directory (scripts.tok_train)
Writes  data/ (downloads, manifest, source for later stages) and rows/<fingerprint>/ there
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path

from nanochat.common import UsageError, printable
from nanochat.config import Console, require_at_least, start
from nanochat.dataset import FirstUseConfig, Source, load_last_source, save_last_source
from nanochat.rows import Rows, missing_shards, open_rows, pack_text
from nanochat.tokenizer import Tokenizer
from tasks.builtin import open_text


@dataclass(frozen=True)
class Data:
    max_seq_len: int = 2048
    """Tokens per packed sequence ("row"); must match training."""
    tokenizer_tag: str = "main"
    """Tokenizer to use, a folder under tokenizer/."""
    workers: int | None = None
    """Number of packing processes, each using under 1 GiB of memory. Default: one per core."""
    download_only: bool = False
    """Only download and verify; needs no tokenizer."""
    verify: bool = False
    """Check the SHA-256 of existing rows and pack damaged shards again."""
    data: FirstUseConfig = field(default_factory=FirstUseConfig)

    def __post_init__(self) -> None:
        require_at_least(self, max_seq_len=1, workers=1)


def main(cfg: Data) -> None:
    workers = cfg.workers or os.cpu_count() or 1
    tokenizer = None if cfg.download_only else Tokenizer.load(cfg.tokenizer_tag)
    source = open_text(cfg.data, load_last_source(cfg.tokenizer_tag))
    if tokenizer is None:
        with ThreadPoolExecutor(workers) as pool:
            count = len(list(pool.map(source.fetch, source.shards())))
        return print(printable(f"{source.name}: {count} shards present and verified"))

    rows, started = open_rows(source, tokenizer, cfg.max_seq_len), time.monotonic()
    if cfg.verify:
        discard_damaged(rows)
    before = rows.totals()["text_bytes"]
    pack_in_processes(rows, source, tokenizer, min(workers, len(missing_shards(rows))))
    seconds = time.monotonic() - started
    speed = (rows.totals()["text_bytes"] - before) / 1e6 / seconds
    print(summary(rows))
    if empty := rows.totals()["empty_files"]:
        print(f"{empty} of the training files without text")
    print(printable(f"{rows.folder}: {seconds:.1f} s, {speed:.1f} MB of text per second"))
    save_last_source(source.describe(), cfg.tokenizer_tag)


def pack_in_processes(rows: Rows, source: Source, tokenizer: Tokenizer, workers: int) -> None:
    """Run `pack_text` in processes, which end if this one does. Raises UsageError if one fails."""
    spawn = multiprocessing.get_context("spawn")
    job = partial(pack_alone, source, rows.folder / "tokenizer.json", rows.max_seq_len)
    processes = [spawn.Process(target=job, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    while running := [each.sentinel for each in processes if each.is_alive()]:
        if any(each.exitcode for each in processes):
            break
        connection.wait(running)
    if any(each.exitcode for each in processes):
        raise UsageError("packing failed", "see the error above; the same command packs the rest")


def pack_alone(source: Source, tokenizer: Path, max_seq_len: int) -> None:
    """One of the processes. Prints its error."""
    sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=exit_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = "1"  # one core each
    loaded = Tokenizer.read(tokenizer)
    try:
        pack_text(open_rows(source, loaded, max_seq_len), source, loaded)
    except (OSError, ValueError, UsageError) as error:
        raise SystemExit(f"error: packing failed: {printable(error)}") from error


def exit_with_parent() -> None:
    """End this process when its parent has ended, also by a signal."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def discard_damaged(rows: Rows) -> None:
    """Open all packed shards, which checks them."""
    for shard in filter(rows.is_packed, [*rows.train_shards, rows.val_shard]):
        try:
            rows.open(shard)
        except UsageError as error:
            print(printable(error.args[0]), flush=True)


def summary(rows: Rows) -> str:
    """Table of counts for the training and the validation rows."""
    totals = rows.totals(), rows.totals([rows.val_shard])
    lines: list[tuple[str, ...]] = [
        (f"rows of {rows.max_seq_len + 1:,} tokens", "train", "validation")
    ]
    for name in ("shards", "documents", "rows", "tokens", "text_bytes", "skipped", "dropped"):
        lines.append((name.replace("_", " "), *(f"{t[name]:,}" for t in totals)))
    cut = (f"{t['documents_cut'] / max(1, t['documents']):.1%}" for t in totals)
    lines.append(("documents cut", *cut))
    return "\n".join("{:<24}{:>18}{:>18}".format(*line) for line in lines)


if __name__ == "__main__":
    start(main, Data(), __doc__)
