"""
Download, verify and pack text ahead of training.

    python -m scripts.data --dataset=karpathy/climbmix-400b-shuffle --num_shards=8 --download_only
    python -m scripts.data --dataset=my/texts --max_seq_len=512

Optional: training packs missing rows in the background. This script packs them all on all
cores. Finished work is kept; machines that share the base directory can run it together.

Reads   the text, and tokenizer/<tag>/ under the base directory (scripts.tok_train)
Writes  data/ (downloads, manifest, source for later stages) and rows/<fingerprint>/ there
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import rich
from rich.progress import track
from rich.table import Table

from nanochat.common import base_dir, printable, require_free
from nanochat.config import require_at_least, start
from nanochat.dataloader import Rows
from nanochat.dataset import FirstUseConfig, Source, load_last_source, save_last_source
from nanochat.mixture import MixConfig, open_corpus, open_texts
from nanochat.packing import start_packing
from nanochat.tokenizer import Tokenizer
from tasks.builtin import ensure_written


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
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self) -> None:
        require_at_least(self, max_seq_len=1, workers=1)


def main(cfg: Data) -> None:
    workers = cfg.workers or os.cpu_count() or 1
    tokenizer = None if cfg.download_only else Tokenizer.load(cfg.tokenizer_tag)
    texts = open_texts(cfg.data, cfg.mix, load_last_source(cfg.tokenizer_tag), ensure_written)
    if tokenizer is None:
        for source in texts.sources.values():
            download(source, workers)
        return
    corpus = open_corpus(texts, tokenizer, cfg.max_seq_len)
    for name, rows in corpus.rows.items():
        if cfg.verify:
            discard_damaged(rows)
        pack_texts(rows, texts.sources[name], workers)
    save_last_source(texts.describe(), cfg.tokenizer_tag)


def download(source: Source, workers: int) -> None:
    """Download all shards, `workers` at a time."""
    shards = source.shards()
    missing, label = source.missing_bytes(shards), f"downloading {len(shards)} shards"
    require_free(base_dir(), missing, label, "lower --num_shards")
    with ThreadPoolExecutor(workers) as pool:
        fetched = as_completed([pool.submit(source.fetch, shard) for shard in shards])
        try:
            for done in track(fetched, label, len(shards), disable=not sys.stdout.isatty()):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print(printable(f"{source.name}: {len(shards)} shards present and verified"))


def discard_damaged(rows: Rows) -> None:
    """Discard packed shards that do not match their records."""
    for shard in filter(rows.is_packed, rows.shards):
        if damage := rows.damage(shard):
            print(printable(f"{damage}: packing {shard} again"))
            rows.discard(shard)


def pack_texts(rows: Rows, source: Source, workers: int) -> None:
    """Pack all missing shards in `workers` processes and print a summary."""
    began, before = time.monotonic(), rows.totals()["text_bytes"]
    missing = [shard for shard in rows.shards if not rows.is_packed(shard)]
    with start_packing(rows, source, workers=min(workers, len(missing))):
        for shard in track(missing, "packing", disable=not sys.stdout.isatty()):
            print(printable(f"packed {shard}: {rows.wait(shard)['rows']:,} rows"), flush=True)
    seconds = time.monotonic() - began
    speed = (rows.totals()["text_bytes"] - before) / 1e6 / seconds
    rich.print(summary(rows))
    print(printable(f"{rows.folder}: {seconds:.1f} s, {speed:.1f} MB of text per second"))


def summary(rows: Rows) -> Table:
    """Table of counts for the training and the validation rows."""
    totals = rows.totals(), rows.totals([rows.val_shard])
    table = Table("", title=f"Rows of {rows.row_length:,} tokens")
    for column in ("train", "validation"):
        table.add_column(column, justify="right")
    for name in ("shards", "documents", "rows", "tokens", "text_bytes", "skipped", "dropped"):
        table.add_row(name.replace("_", " "), *(f"{t[name]:,}" for t in totals))
    for label, part, whole, form in (
        ("bytes per token", "text_bytes", "tokens", ".2f"),
        ("documents cut", "documents_cut", "documents", ".1%"),
        ("positions lost to extra BOS", "extra_bos", "positions", ".2%"),
    ):
        table.add_row(label, *(format(t[part] / max(1, t[whole]), form) for t in totals))
    return table


if __name__ == "__main__":
    start(main, Data(), __doc__)
