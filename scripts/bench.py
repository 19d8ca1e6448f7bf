"""
Measure speed against others and against the machine's own limits, in one run.

    python -m scripts.bench --what=train --depth=4 --max_seq_len=512 --vocab_size=8192
    python -m scripts.bench --what=engine --depth=4
    python -m scripts.bench --what=tokenizer --dataset=embedded --num_shards=8

train       a training step: forward, backward, update; tokens/s; share of the measured ceiling

engine      generation: tokens/s of reading prompts and of writing, at batch 1, 8 and 64; memory

tokenizer   training with our crate against the PyPI package rustbpe and Hugging Face tokenizers;
            encoding with it against tiktoken and gigatoken, one vocabulary for all, first pass

Reads   for the tokenizer, training shards of the text
Writes  nothing: it prints tables
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from nanochat.config import start
from nanochat.dataset import open_source, remembered
from nanochat.engine_bench import bench_engine
from nanochat.kernels import KernelConfig
from nanochat.machine import MachineConfig, init_machine
from nanochat.scaling import shape_for_depth
from nanochat.source import DataConfig
from nanochat.tokenizer_bench import bench_tokenizer
from nanochat.train_bench import bench_training


@dataclass(frozen=True)
class Bench:
    what: Literal["train", "engine", "tokenizer"] = "train"
    """What to measure."""
    depth: int = 4
    """train, engine: depth of the model."""
    max_seq_len: int = 512
    """train: tokens in a row."""
    rows: int = 8
    """train: rows per step on this device."""
    vocab_size: int = 8192
    """train, engine: size of the vocabulary."""
    steps: int = 10
    """train: steps to time."""
    repeats: int = 3
    """engine, tokenizer: measurements of each thing; of tokenizers in turn, so that a slow minute
    hits all alike."""
    max_megabytes: float = 110.0
    """tokenizer: text to measure on, from the first training shards."""
    vocab_sizes: tuple[int, ...] = (8192, 32768)
    """tokenizer: sizes of vocabulary to train. Encoding uses the last."""
    threads: tuple[int, ...] = (1, 2)
    """tokenizer: numbers of threads to encode with. Training uses the last."""
    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        for name in ("repeats", "rows", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is at least 1, not {getattr(self, name)}")
        if not self.vocab_sizes or not self.threads:
            raise ValueError("give --vocab_sizes and --threads at least one number each")


def main(cfg: Bench) -> None:
    benches: dict[str, Callable[[Bench], None]] = {
        "train": train,
        "engine": engine,
        "tokenizer": tokenizer,
    }
    benches[cfg.what](cfg)


def train(cfg: Bench) -> None:
    """Steps of one model, on noise."""
    machine = init_machine(cfg.machine)
    shape = shape_for_depth(cfg.depth, cfg.vocab_size, cfg.max_seq_len)
    bench_training(shape, cfg.rows, machine, cfg.kernels, cfg.steps)
    machine.close()


def engine(cfg: Bench) -> None:
    """Generation by an untrained model."""
    machine = init_machine(cfg.machine)
    bench_engine(shape_for_depth(cfg.depth, cfg.vocab_size, cfg.max_seq_len), machine, cfg.repeats)


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
