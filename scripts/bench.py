"""
Benchmark speed against other libraries.

    python -m scripts.bench --what=all > bench.md         # everything
    python -m scripts.bench --what=train --depth=4 --max_seq_len=512 --vocab_size=8192
    python -m scripts.bench --what=engine --depth=4

train       a training step: forward, backward, update; tokens/s

peer        a training step of a plain architecture, compared with the transformers model

engine      generation: prefill and decode tokens/s at batch size 1, 8 and 64, compared with
            transformers' generate on the same weights

evaluation  few-shot items per second, compared with EleutherAI's harness on the same model

tokenizer   training with our crate and the PyPI package rustbpe; first-pass encoding with our
            crate, tiktoken and gigatoken on one vocabulary

Reads   training shards of the text, for the tokenizer
Writes  tables in Markdown to standard output
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import islice
from typing import Literal

from nanochat.bench.engine import bench_engine
from nanochat.bench.evals import bench_evaluation
from nanochat.bench.table import METHOD
from nanochat.bench.tokenizer import bench_tokenizer
from nanochat.bench.train import bench_training
from nanochat.config import require_at_least, start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.dist import DistConfig, init_dist
from nanochat.scaling import default_windows, shape_for_depth
from nanochat.train import Compile
from tasks.world.write import open_text

DEPTHS = (4, 8, 12)
EMBEDDED_VOCAB = 2048  # of the tokenizer benchmark: the built-in text has few different words
HINT = "install with:  uv sync --inexact --group interop"


@dataclass(frozen=True)
class Bench:
    what: Literal["all", "train", "peer", "engine", "evaluation", "tokenizer"] = "all"
    """Benchmark to run."""
    depth: int = 4
    """Number of layers; for training, --what=all uses 4, 8 and 12."""
    max_seq_len: int = 512
    """Tokens per packed sequence ("row")."""
    rows: int = 8
    """train, peer: rows per step on this device."""
    vocab_size: int = 8192
    """Vocabulary size of the model or tokenizer; --what=all trains a tokenizer of 32,768, or
    of 2,048 on the built-in text."""
    repeats: int = 3
    """Number of measurements; libraries alternate, so that machine noise affects all alike."""
    documents: int = 50_000
    """tokenizer: number of documents, from the first training shards."""
    data: DataConfig = field(default_factory=DataConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""

    def __post_init__(self) -> None:
        require_at_least(self, depth=1, rows=1, repeats=1)


def main(cfg: Bench) -> None:
    if cfg.what == "all":
        return bench_all(cfg)
    if cfg.what == "tokenizer":
        return tokenizer(cfg)
    dist = init_dist(cfg.dist)
    arch = "default" if cfg.what == "train" else "classic"  # implemented by transformers too
    windows = default_windows(dist.device.type)
    shape = shape_for_depth(cfg.depth, cfg.vocab_size, cfg.max_seq_len, arch, windows)
    try:
        peers = None if cfg.what == "train" else import_module("nanochat.bench.peers")
    except ModuleNotFoundError as error:
        print(f"{error}, skipping the comparison; {HINT}", flush=True)
        peers = None
    if cfg.what == "engine":
        bench_engine(shape, dist, cfg.repeats, peers)
    elif cfg.what == "evaluation":
        bench_evaluation(shape, dist, cfg.repeats, peers)
    else:
        bench_training(shape, cfg.rows, dist, cfg.compile, cfg.repeats, peers)
    dist.close()


def tokenizer(cfg: Bench) -> None:
    """Benchmark the tokenizer on --dataset, else the last used source, else embedded."""
    data, known = cfg.data, load_last_source("main")
    if known is None and data.dataset is None:
        data = replace(data, dataset="embedded")
    text = open_text(data, known)
    texts = [document for _, document in islice(text.documents(), cfg.documents)]
    small = text.name == "embedded"
    vocab_size = min(cfg.vocab_size, EMBEDDED_VOCAB) if small else cfg.vocab_size
    threads = sorted({1, os.cpu_count() or 1})
    bench_tokenizer(texts, vocab_size, threads, cfg.repeats)


# ---- All benchmarks ------------------------------------------------------------------------------


def bench_all(cfg: Bench) -> None:
    """Run each benchmark in its own process, so that none holds memory during another."""
    command = ["-m", "scripts.bench", *sys.argv[1:]]
    name = f"{init_dist(cfg.dist).device_name}, {os.cpu_count()} CPU cores"
    print(f"# Benchmarks on {name}\n\n`{' '.join(['python', *command])}`\n\n{METHOD}\n")
    jobs = [["--what=train", f"--depth={depth}"] for depth in DEPTHS]
    jobs += [[f"--what={what}"] for what in ("peer", "engine", "evaluation")]
    failed = []
    for flags in [*jobs, ["--what=tokenizer", "--vocab_size=32768"]]:
        sys.stdout.flush()
        # the last of duplicate flags wins
        if subprocess.run([sys.executable, *command, *flags]).returncode:
            failed.append(" ".join(flags))
    if failed:
        raise SystemExit(f"error: failed, see above: {'; '.join(failed)}")


if __name__ == "__main__":
    start(main, Bench(), __doc__)
