"""
Benchmark speed against other libraries and against measured hardware limits.

    python -m scripts.bench --what=all                  # everything, to dev/bench-<device>.md
    python -m scripts.bench --what=train --depth=4 --max_seq_len=512 --vocab_size=8192
    python -m scripts.bench --what=engine --depth=4

train       a training step: forward, backward, update; tokens/s; % of roofline

peer        a training step of a plain architecture, compared with the transformers model

engine      generation: prefill and decode tokens/s at batch size 1, 8 and 64, compared with
            transformers' generate on the same weights; memory

evaluation  few-shot items per second, compared with EleutherAI's harness on the same model

tokenizer   training with our crate, the PyPI package rustbpe and Hugging Face tokenizers;
            first-pass encoding with our crate, tiktoken and gigatoken on one vocabulary

Reads   training shards of the text, for the tokenizer
Writes  dev/bench-cpu.md or dev/bench-gpu.md, with --what=all
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from nanochat import report
from nanochat.bench.engine import bench_engine
from nanochat.bench.evals import bench_evaluation
from nanochat.bench.table import FIRST_CHECKS, BenchLog, Note, render_findings
from nanochat.bench.tokenizer import bench_tokenizer
from nanochat.bench.train import bench_against, bench_training
from nanochat.common import REPOSITORY, write_atomic
from nanochat.config import require_at_least, start
from nanochat.dataset import DataConfig, Source, load_last_source
from nanochat.distributed import DistConfig, init_distributed
from nanochat.scaling import default_windows, shape_for_depth
from nanochat.train import KernelConfig
from tasks.builtin import open_text

DEPTHS = {"cpu": (4, 8, 12), "cuda": (4, 12, 20)}
HINT = "install with:  uv sync --inexact --group interop"


@dataclass(frozen=True)
class Bench:
    what: Literal["all", "train", "peer", "engine", "evaluation", "tokenizer"] = "all"
    """Benchmark to run."""
    depth: int = 4
    """Number of layers; --what=all also trains other depths."""
    max_seq_len: int = 512
    """Tokens per packed sequence ("row")."""
    rows: int = 8
    """train, peer: rows per step on this device."""
    vocab_size: int = 8192
    """Vocabulary size of the model."""
    steps: int = 3
    """train: steps per measurement."""
    repeats: int = 3
    """Number of measurements; libraries alternate, so that machine noise affects all alike."""
    max_megabytes: float = 110.0
    """tokenizer: maximum MB of text, from the first training shards."""
    vocab_sizes: tuple[int, ...] | None = None
    """tokenizer: vocabulary sizes to train; encoding uses the last. Default: 8,192 and 32,768, or
    1,024 and 2,048 for the small embedded dataset."""
    threads: tuple[int, ...] = (1, 2)
    """tokenizer: thread counts for encoding; training uses the last."""
    findings: Path | None = None
    """Also write results as JSON; used by --what=all. Default: no file."""
    data: DataConfig = field(default_factory=DataConfig)
    machine: DistConfig = field(default_factory=DistConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        require_at_least(self, depth=1, rows=1, steps=1, repeats=1)


def main(cfg: Bench) -> None:
    if cfg.what == "all":
        return bench_all(cfg)
    found = BenchLog()
    if cfg.what == "tokenizer":
        tokenizer(cfg, found)
    else:
        bench_model(cfg, found)
    if cfg.findings and found.lines:
        found.write(cfg.findings)


def bench_model(cfg: Bench, found: BenchLog) -> None:
    """Benchmark training, generation or evaluation with an untrained model."""
    machine = init_distributed(cfg.machine)
    arch = "default" if cfg.what == "train" else "classic"  # implemented by transformers too
    windows = default_windows(machine.device.type)
    shape = shape_for_depth(cfg.depth, cfg.vocab_size, cfg.max_seq_len, arch, windows)
    peers = None if cfg.what == "train" else find_peers()
    if cfg.what == "train":
        bench_training(shape, cfg.rows, machine, cfg.kernels, cfg.steps, cfg.repeats, found)
    elif cfg.what == "peer":
        theirs = peers and peers.make_train_step
        bench_against(shape, cfg.rows, machine, cfg.kernels, cfg.repeats, found, theirs)
    elif cfg.what == "engine":
        bench_engine(shape, machine, cfg.repeats, found, peers and peers.make_generate)
    else:
        bench_evaluation(shape, machine, cfg.repeats, found, peers and peers.make_scorer)
    machine.close()


def find_peers() -> Any:
    """Import the peers module; print a note and return None if packages are missing."""
    missing = [name for name in ("transformers", "lm_eval") if not importlib.util.find_spec(name)]
    if missing:
        print(f"{', '.join(missing)} not installed, skipping the comparison; {HINT}", flush=True)
        return None
    from nanochat.bench import peers

    return peers


def tokenizer(cfg: Bench, found: BenchLog) -> None:
    """Benchmark the tokenizer on --dataset, else the last used source, else embedded."""
    data, known = cfg.data, load_last_source("main")
    if known is None and data.dataset is None:
        data = replace(data, dataset="embedded")
    source = open_text(data, known)
    sizes = cfg.vocab_sizes or ((1024, 2048) if source.name == "embedded" else (8192, 32768))
    bench_tokenizer(load_texts(source, cfg.max_megabytes), sizes, cfg.threads, cfg.repeats, found)


def load_texts(source: Source, max_megabytes: float) -> list[str]:
    """Return the first `max_megabytes` of text, in whole documents."""
    texts: list[str] = []
    num_bytes = 0
    for text in chain.from_iterable(map(source.texts, source.train_shards)):
        if num_bytes >= max_megabytes * 1e6:
            break
        texts.append(text)
        num_bytes += len(text.encode())
    return texts


# ------------------------------------------------------------------------------------------------
# All benchmarks


def bench_all(cfg: Bench) -> None:
    """Run each benchmark in its own process, so that none holds memory during another."""
    began, machine = time.perf_counter(), init_distributed(cfg.machine)
    kind, argv = machine.device.type, sys.argv[1:]
    found = BenchLog()
    for num_processes, flags in jobs(kind):
        print(f"\n--- {num_processes or ''} {' '.join(flags)}", flush=True)
        found.add(run_bench(num_processes, [*argv, *flags]))  # the last of duplicate flags wins
    if not found.lines:
        raise SystemExit("error: all benchmarks failed, see above")
    minutes = (time.perf_counter() - began) / 60
    page = REPOSITORY / "dev" / f"bench-{'gpu' if kind == 'cuda' else 'cpu'}.md"
    command = " ".join(("python -m scripts.bench", *argv))
    name = report.describe_machine(report.hardware())
    text = render_findings(found, command, name, minutes)
    _, heading, checks = (page.read_text() if page.exists() else "").partition(FIRST_CHECKS)
    write_atomic(page, f"{text}\n{heading}{checks}" if heading else text)
    print(f"\n{page}: {len(found.lines)} lines, {minutes:.1f} minutes")


def jobs(kind: str) -> list[tuple[int, list[str]]]:
    """List (num_processes, flags); 0 = no launcher, else single-threaded torchrun processes."""
    training = [(0, ["--what=train", f"--depth={depth}"]) for depth in DEPTHS.get(kind, (4,))]
    # include one launched process as the scaling baseline
    most = 2 if kind == "cpu" else torch.cuda.device_count() if kind == "cuda" else 1
    ranks = [(n, ["--what=train"]) for n in (1, 2, 4, 8) if n <= most and most > 1]
    others = ("peer", "engine", "evaluation", "tokenizer")
    return [*training, *ranks, *((0, [f"--what={what}"]) for what in others)]


def run_bench(num_processes: int, flags: list[str]) -> BenchLog:
    """Run one benchmark and return its findings; on failure, a note."""
    command, environment = [sys.executable, "-m", "scripts.bench"], dict(os.environ)
    if num_processes:
        environment["OMP_NUM_THREADS"] = "1"
        launcher = f"torch.distributed.run --standalone --nproc_per_node={num_processes} -m"
        command[2:2] = launcher.split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings.json"
        command += [*flags, f"--findings={path}"]
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment)
        if ended.returncode or not path.exists():
            return BenchLog(notes=[Note("", f"Failed: {flags[-1]}, exit code {ended.returncode}")])
        return BenchLog.read(path)


if __name__ == "__main__":
    start(main, Bench(), __doc__)
