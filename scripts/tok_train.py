"""
Train a tokenizer.

    python -m scripts.tok_train --dataset=embedded --vocab_size=4096        # seconds, no network
    python -m scripts.tok_train --dataset=karpathy/climbmix-400b-shuffle    # minutes

Reads   training shards, until --max_chars is reached; never the validation shard
Writes  tokenizer/<tag>/ under the base directory (with frequent words for tasks/spelling.py), and
        the section "Tokenizer training"
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanochat import records, report
from nanochat.common import require_name, write_atomic
from nanochat.config import require_at_least, settings, start
from nanochat.dataset import FirstUseConfig, Source, load_last_source, save_last_source
from nanochat.mixture import MixConfig, TextMixture, open_texts
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer, tokenizer_dir
from tasks.builtin import ensure_written

SECTION = "Tokenizer training"
WORD = re.compile(r"\b[a-z]{3,}\b")
WORD_CHARS = 20_000_000  # characters whose words are counted
MAX_WORDS = 20_000  # words kept for tasks/spelling.py


@dataclass(frozen=True)
class TokTrain:
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
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    data: FirstUseConfig = field(default_factory=FirstUseConfig)
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self) -> None:
        require_name("tokenizer_tag", self.tokenizer_tag)
        require_at_least(self, max_chars=1, doc_cap=1)


@dataclass
class DocumentReader:
    """Iterates over truncated documents and counts what it reads."""

    texts: Sequence[tuple[Source, int]]
    """Sources, each with its maximum number of characters."""
    doc_cap: int
    documents: int = 0
    chars: int = 0
    text_bytes: int = 0
    shards: int = 0
    documents_cut: int = 0
    """Number of documents longer than `doc_cap`."""
    chars_cut: int = 0
    """Number of characters cut from them."""
    words: Counter[str] = field(default_factory=Counter)
    """Frequency of the ASCII words in the first WORD_CHARS characters."""

    def __iter__(self) -> Iterator[str]:
        for source, left in self.texts:
            for text in self.read(source) if left else ():
                text = text[:left]
                left -= len(text)
                self.documents += 1
                self.chars += len(text)
                self.text_bytes += len(text.encode())
                if self.chars <= WORD_CHARS:
                    self.words.update(WORD.findall(text.lower()))
                yield text
                if not left:
                    break

    def read(self, source: Source) -> Iterator[str]:
        """Documents of a source, truncated to `doc_cap` characters."""
        for shard in source.train_shards:
            print(f"reading {shard} | {self.chars:,} characters so far", flush=True)
            self.shards += 1
            for text in source.texts(shard):
                self.documents_cut += len(text) > self.doc_cap
                self.chars_cut += max(0, len(text) - self.doc_cap)
                yield text[: self.doc_cap]


def divide_chars(texts: TextMixture, max_chars: int) -> list[tuple[Source, int]]:
    """Characters to read from each source: its share; sources without one split the rest evenly."""
    if not texts.spec:
        return [(texts.only, max_chars)]
    rest = 1 - sum(part.share or 0 for part in texts.parts)
    without = sum(part.share is None for part in texts.parts)
    return [
        (source, round(max_chars * (rest / without if part.share is None else part.share)))
        for source, part in zip(texts.sources.values(), texts.parts, strict=True)
    ]


def main(cfg: TokTrain) -> None:
    texts = open_texts(cfg.data, cfg.mix, load_last_source(cfg.tokenizer_tag), ensure_written)
    inputs = {"data": texts.fingerprint}
    key = records.stage_key(settings(cfg), inputs)
    if cfg.skip_if_done and records.find_finished(SECTION, key, cfg.report_dir):
        return print(f"{SECTION}: finished already, skipped")

    started = time.perf_counter()
    reading = DocumentReader(divide_chars(texts, cfg.max_chars), cfg.doc_cap)
    tokenizer = Tokenizer.train(reading, cfg.vocab_size)
    train_seconds = time.perf_counter() - started

    if reading.documents_cut:
        print(
            f"--doc_cap={cfg.doc_cap}: truncated {reading.documents_cut:,} of "
            f"{reading.documents:,} documents, dropping {reading.chars_cut:,} characters"
        )

    run_id = records.new_run_id()  # later stages inherit it
    folder = tokenizer_dir(cfg.tokenizer_tag)
    tokenizer.save(folder)
    frequent = "".join(f"{word}\n" for word, _ in reading.words.most_common(MAX_WORDS))
    write_atomic(folder / "words.txt", frequent)
    save_last_source(texts.describe(), cfg.tokenizer_tag)
    values = record_values(tokenizer, reading, train_seconds)
    provenance = records.Provenance(run_id, 0, inputs, {"tokenizer": tokenizer.fingerprint})
    report.append_section(SECTION, cfg, values, provenance, files=[folder])
    size = f"vocabulary size {tokenizer.vocab_size:,}, {reading.text_bytes / 1e6:,.1f} MB of text"
    print(f"{folder}: {size}, {train_seconds:.1f} s")
    tag = "" if cfg.tokenizer_tag == "main" else f" --tokenizer_tag={cfg.tokenizer_tag}"
    # by default depth 4 sees 50 million tokens, hours on a CPU; on the built-in text as speedrun.sh
    short = " --max_seq_len=256 --num_iterations=400 --total_batch_size=4096"
    flags = f"{tag}{short if cfg.data.dataset == 'embedded' else ''}"
    print(f"next: python -m scripts.base_train --depth=4{flags}")


def record_values(
    tokenizer: Tokenizer, reading: DocumentReader, train_seconds: float
) -> dict[str, Any]:
    """Values of the section: time, token lengths in bytes, and amounts of text."""
    lengths = tokenizer.token_bytes()
    lengths = lengths[lengths > 0]  # special tokens have no bytes
    return {
        "train_time": train_seconds,
        "num_special_tokens": len(SPECIAL_TOKENS),
        "token_bytes_min": int(lengths.min()),
        "token_bytes_max": int(lengths.max()),
        "token_bytes_mean": float(lengths.mean()),
        "token_bytes_std": float(lengths.std()),
        "documents": reading.documents,
        "characters": reading.chars,
        "text_bytes": reading.text_bytes,
        "shards_read": reading.shards,
        "documents_cut": reading.documents_cut,
        "characters_cut": reading.chars_cut,
        "MB of text per second": reading.text_bytes / 1e6 / train_seconds,
    }


if __name__ == "__main__":
    start(main, TokTrain(), __doc__)
