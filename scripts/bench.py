"""
Measure speed against others, in one run on one machine.

    python -m scripts.bench --what=tokenizer --dataset=embedded --num_shards=8
    python -m scripts.bench --what=tokenizer --data_dir=<folder of parquet files>

tokenizer   training with our crate against the PyPI package rustbpe and Hugging Face tokenizers;
            encoding with it against tiktoken and gigatoken, one vocabulary for all, first pass

Reads   training shards of the text
Writes  nothing: it prints tables of median, range and ratio
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from nanochat.config import start
from nanochat.dataset import DataConfig, open_source, remembered
from nanochat.tokenizer_bench import bench_tokenizer


@dataclass(frozen=True)
class Bench:
    what: Literal["tokenizer"] = "tokenizer"
    """What to measure."""
    repeats: int = 3
    """Measurements of each thing; they take turns, so that a slow minute hits all alike."""
    max_megabytes: float = 110.0
    """Text to measure on, from the first training shards."""
    vocab_sizes: tuple[int, ...] = (8192, 32768)
    """Sizes of vocabulary to train. Encoding uses the last."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads to encode with. Training uses the last."""
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats is at least 1, not {self.repeats}")
        if not self.vocab_sizes or not self.threads:
            raise ValueError("give --vocab_sizes and --threads at least one number each")


def main(cfg: Bench) -> None:
    benches: dict[str, Callable[[Bench], None]] = {"tokenizer": tokenizer}
    benches[cfg.what](cfg)


def tokenizer(cfg: Bench) -> None:
    """Training and encoding on the first documents of the source."""
    bench_tokenizer(read_texts(cfg), cfg.vocab_sizes, cfg.threads, cfg.repeats)


def read_texts(cfg: Bench) -> list[str]:
    """About `max_megabytes` of text."""
    source = open_source(cfg.data, remembered("main"))
    texts: list[str] = []
    left = cfg.max_megabytes * 1e6
    for shard in source.train_shards:
        for batch in source.documents(shard):
            texts += batch
            left -= sum(len(text.encode()) for text in batch)
            if left <= 0:
                return texts
    return texts


if __name__ == "__main__":
    start(main, Bench(), __doc__)
