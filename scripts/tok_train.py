"""
Train a tokenizer.

    python -m scripts.tok_train --dataset=embedded --vocab_size=4096        # seconds, no network
    python -m scripts.tok_train --dataset=karpathy/climbmix-400b-shuffle    # minutes

Reads   training shards, until --max_chars is reached; never the validation shard
Writes  tokenizer/<tag>/ under the base directory (with frequent words for tasks/spelling.py), data/
        (manifest, and the source that later stages use), and the section "Tokenizer training"
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from nanochat import records, report
from nanochat.common import printable, require_name, write_atomic
from nanochat.config import require_at_least, start
from nanochat.dataset import FirstUseConfig, Text, load_last_source, save_last_source
from nanochat.recipe import make_recipe
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer, tokenizer_dir
from tasks.world.write import open_text

SECTION = "Tokenizer training"
WORD = re.compile(r"\b[a-z]{3,}\b")
WORD_CHARS = 20_000_000  # characters whose words are counted
PROGRESS_SECONDS = 10  # between lines that say how much was read
MAX_WORDS = 20_000  # words kept for tasks/spelling.py


@dataclass(frozen=True)
class TokTrain:
    NOT_IN_RECIPE: ClassVar[str] = "tokenizer_tag skip_if_done"

    max_chars: int = 10_000_000_000
    """Maximum number of characters to train on."""
    doc_cap: int = 10_000
    """Maximum number of characters per document, so that a few long ones do not dominate."""
    vocab_size: int = 65_536
    """Vocabulary size, including the nine special tokens."""
    tokenizer_tag: str = "main"
    """Name of the tokenizer's folder under tokenizer/."""
    skip_if_done: bool = False
    """Do nothing if the same training has already finished and its tokenizer still exists."""
    data: FirstUseConfig = field(default_factory=FirstUseConfig)

    def __post_init__(self) -> None:
        require_name("tokenizer_tag", self.tokenizer_tag)
        require_at_least(self, max_chars=1, doc_cap=1)


def read_documents(
    text: Text, max_chars: int, doc_cap: int, counts: Counter[str], words: Counter[str]
) -> Iterator[str]:
    """
    Yield the documents of a text up to `max_chars` characters, each truncated to `doc_cap`. Counts
    what it reads in `counts`, and the ASCII words of the first WORD_CHARS characters in `words`.
    """
    shown, shards = time.monotonic(), set()
    for shard, document in text.documents():
        if time.monotonic() - shown > PROGRESS_SECONDS:
            progress = f"reading {shard} | {counts['characters']:,} characters so far"
            print(printable(progress), flush=True)
            shown = time.monotonic()
        shards.add(shard)
        counts["shards_read"] = len(shards)
        counts["documents_cut"] += len(document) > doc_cap
        counts["characters_cut"] += max(0, len(document) - doc_cap)
        document = document[: min(doc_cap, max_chars - counts["characters"])]
        counts["documents"] += 1
        counts["characters"] += len(document)
        counts["text_bytes"] += len(document.encode())
        if counts["characters"] <= WORD_CHARS:
            words.update(WORD.findall(document.lower()))
        yield document
        if counts["characters"] == max_chars:
            return


def main(cfg: TokTrain) -> None:
    text = open_text(cfg.data, load_last_source(cfg.tokenizer_tag))
    inputs = {"data": text.fingerprint}
    if cfg.skip_if_done and records.find_finished(SECTION, make_recipe(cfg, inputs)):
        save_last_source(text.describe(), cfg.tokenizer_tag)
        return print(f"{SECTION}: finished already, skipped")
    records.require_writable()

    started = time.perf_counter()
    names = "documents characters text_bytes shards_read documents_cut characters_cut".split()
    counts, words = Counter[str](dict.fromkeys(names, 0)), Counter[str]()
    documents = read_documents(text, cfg.max_chars, cfg.doc_cap, counts, words)
    tokenizer = Tokenizer.train(documents, cfg.vocab_size)
    train_seconds = time.perf_counter() - started

    if counts["documents_cut"]:
        print(
            f"--doc_cap={cfg.doc_cap}: truncated {counts['documents_cut']:,} of "
            f"{counts['documents']:,} documents, dropping {counts['characters_cut']:,} characters"
        )

    folder = tokenizer_dir(cfg.tokenizer_tag)
    tokenizer.save(folder)
    frequent = "".join(f"{word}\n" for word, _ in words.most_common(MAX_WORDS))
    write_atomic(folder / "words.txt", frequent)
    save_last_source(text.describe(), cfg.tokenizer_tag)
    lengths = tokenizer.token_bytes()
    lengths = lengths[lengths > 0]  # special tokens have no bytes
    values = {
        "train_time": train_seconds,
        "num_special_tokens": len(SPECIAL_TOKENS),
        "token_bytes_min": int(lengths.min()),
        "token_bytes_max": int(lengths.max()),
        "token_bytes_mean": float(lengths.mean()),
        "token_bytes_std": float(lengths.std()),
        **counts,
        "MB of text per second": counts["text_bytes"] / 1e6 / train_seconds,
    }
    outputs = {"tokenizer": tokenizer.fingerprint}
    report.append_section(SECTION, cfg, values, inputs, outputs=outputs, files=[folder])
    size = f"vocabulary size {tokenizer.vocab_size:,}, {counts['text_bytes'] / 1e6:,.1f} MB of text"
    print(f"{folder}: {size}, {train_seconds:.1f} s")
    tag = "" if cfg.tokenizer_tag == "main" else f" --tokenizer_tag={cfg.tokenizer_tag}"
    # by default depth 4 sees 50 million tokens, hours on a CPU; on the built-in text as speedrun.sh
    short = " --max_seq_len=256 --num_iterations=320 --total_batch_size=4096"
    flags = f"{tag}{short if text.name == 'embedded' else ''}"
    print(f"next: python -m scripts.base_train --depth=4{flags}")


if __name__ == "__main__":
    start(main, TokTrain(), __doc__)
