"""
Download, verify and pack text ahead of training.

    python -m scripts.data --dataset=karpathy/climbmix-400b-shuffle --num_shards=8 --download_only
    python -m scripts.data --dataset=my/texts --max_seq_len=512

Optional: base training packs the rows that it needs. Finished work is kept; machines that share
the base directory can run this together.

Reads   the text, and tokenizer/<tag>/ under the base directory (scripts.tok_train)
Writes  data/ (downloads, manifest) and rows/<hash of text, tokenizer, row length and code>/ there;
        unless --download_only, also the source for later stages
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nanochat.common import printable
from nanochat.config import require_at_least, start
from nanochat.dataset import FirstUseConfig, load_last_source, save_last_source
from nanochat.rows import Shards, open_rows, pack_rows
from nanochat.tokenizer import Tokenizer
from tasks.world.write import open_text


@dataclass(frozen=True)
class Data:
    max_seq_len: int = 2048
    """Tokens per packed sequence ("row"); must match training."""
    tokenizer_tag: str = "main"
    """Tokenizer to use, a folder under tokenizer/."""
    workers: int | None = None
    """Number of packing processes. Default: one per core and per free GiB of memory."""
    download_only: bool = False
    """Only download and verify; needs no tokenizer."""
    data: FirstUseConfig = field(default_factory=FirstUseConfig)

    def __post_init__(self) -> None:
        require_at_least(self, max_seq_len=1, workers=1)


def main(cfg: Data) -> None:
    tokenizer = None if cfg.download_only else Tokenizer.load(cfg.tokenizer_tag)
    text = open_text(cfg.data, load_last_source(cfg.tokenizer_tag))
    if tokenizer is None:
        for source in text.sources:
            with ThreadPoolExecutor(cfg.workers) as pool:
                count = len(list(pool.map(source.fetch, source.shards())))
            print(printable(f"{source.name}: {count} shards present and verified"))
        return

    packed = open_rows(text, tokenizer, cfg.max_seq_len)
    pack_rows(packed, text, tokenizer, workers=cfg.workers)
    for shards in packed.parts.values():
        print(summary(shards))
        if empty := shards.totals()["empty_files"]:
            print(f"{empty} of the training files without text")
        print(printable(shards.folder))
    save_last_source(text.describe(), cfg.tokenizer_tag)
    num = sum(len(source.train_shards) for source in text.sources)
    print(f"base training reads these {num} training shards, unless it has --num_shards")


def summary(shards: Shards) -> str:
    """Table of counts for the training and the validation rows."""
    totals = shards.totals(), shards.totals([shards.val_shard])
    lines: list[tuple[str, ...]] = [
        (f"rows of {shards.max_seq_len + 1:,} tokens", "train", "validation")
    ]
    for name in ("shards", "documents", "rows", "tokens", "text_bytes", "skipped", "dropped"):
        lines.append((name.replace("_", " "), *(f"{t[name]:,}" for t in totals)))
    cut = (f"{t['documents_cut'] / max(1, t['documents']):.1%}" for t in totals)
    lines.append(("documents cut", *cut))
    return "\n".join("{:<24}{:>18}{:>18}".format(*line) for line in lines)


if __name__ == "__main__":
    start(main, Data(), __doc__)
