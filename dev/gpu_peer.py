"""
Ours side by side with karpathy/nanochat ("upstream") on one GPU or a CPU: a table row a result.

    python -m scripts.tok_train --tokenizer_tag=peer --dataset=karpathy/climbmix-400b-shuffle \
        --num_shards=2 --vocab_size=32768 --max_chars=500000000
    python -m scripts.data --tokenizer_tag=peer --num_shards=2 --max_seq_len=2048
    python -m dev.gpu_peer pack --clone=<clone of upstream>   # packs what travels into out/peer/
    python -m dev.gpu_peer 1    # learning: depth 12, 180 steps of 131,072 tokens, held-out rows
    python -m dev.gpu_peer 2    # training speed: depth 16, bf16 and fp8
    python -m dev.gpu_peer 3    # decoding: depths 12 and 24, batches of 1 and 64

    python -m dev.gpu_peer cpu --clone=<clone of upstream>    # speeds at depth 4, without a GPU

A part takes at most 4 minutes and needs no network, only PyTorch, NumPy and out/peer/ (under 64
MiB): `pack` copies upstream's code and the other packages, for the same or a later Python on the
same platform. Each side runs in a process of its own, for both packages are called nanochat; the
parent sends them commands in turn. Each side uses its default dtype (on these GPUs bfloat16), the
same micro-batches and synchronized timing after a warm-up, in which they compile at the same time;
the optimizers compile in the first step. `--small` shrinks everything, to try it on a CPU.
"""

import argparse
import gc
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

IGNORE = -1  # target without loss, on both sides
T, V = 2048, 32768
STEPS, BATCH_ROWS = 180, 64  # part 1: 131,072 tokens per step
CHUNK = 30  # steps of one side until the other's turn
MICRO_ROWS = 16
HELD_OUT_ROWS = 128
REPEATS = 6
CPU_T, CPU_V = (512, 256), 8192  # part cpu
PROMPT, NEW_TOKENS, TOP_K = 128, 128, 50
PACKAGES = ("tyro", "docstring_parser", "typeguard", "typing_inspection", "psutil", "rustbpe")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Job:
    """Model and kernels of one side."""

    side: Literal["ours", "upstream"]
    folder: Path
    depth: int
    windows: str = "SSSL"
    fp8: bool = False
    T: int = T
    vocab_size: int = V
    steps: int = STEPS
    batch_rows: int = BATCH_ROWS
    micro_rows: int = MICRO_ROWS
    decode_tokens: int = 0
    """Tokens to generate; 0 = train."""


class Parts(NamedTuple):
    """One side's model and how to train it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    """Tokens and targets (B, T) -> mean nats."""
    schedule: Callable[[int], None]
    """Sets learning rates, momentum and weight decay of a step."""


# ---- The two sides -------------------------------------------------------------------------------


def build_ours(job: Job) -> Any:
    """Our untrained model."""
    from nanochat.checkpoint import build_model
    from nanochat.dist import init_dist
    from nanochat.scaling import shape_for_depth

    shape = shape_for_depth(job.depth, job.vocab_size, job.T, "default", job.windows)
    return build_model(shape, DEVICE, init_dist().dtype, seed=0)


def prepare_ours(job: Job) -> Parts:
    """Our model and its optimizer with the rules and schedules of scripts.base_train."""
    from nanochat import optim
    from nanochat.dist import DistContext
    from nanochat.fp8 import enable_fp8
    from nanochat.scaling import Horizon, scaled_rules

    model = build_ours(job)
    dist = DistContext(0, 0, 1, DEVICE, model.dtype)
    if job.fp8 and DEVICE.type == "cuda":
        enable_fp8(model, DEVICE)
    model.backend = "flex" if DEVICE.type == "cuda" else "sdpa"
    model.compile()
    horizon = Horizon(job.steps, job.batch_rows * job.T)
    rules = scaled_rules(optim.OptimConfig(), horizon, model.cfg.d_model)
    optimizer, cfg = optim.MuonAdamW(model, rules, dist), optim.ScheduleConfig()
    optimizer.compiled = DEVICE.type == "cuda"

    def schedule(step: int) -> None:
        factor = optim.lr_factor(step, job.steps, cfg)
        momentum = optim.muon_momentum(step, job.steps, cfg)
        optim.set_schedule(optimizer, factor, momentum, optim.decay_factor(step, job.steps))

    return Parts(model, optimizer, lambda x, y: model.loss(x, y) / (y != IGNORE).sum(), schedule)


def build_upstream(job: Job) -> Any:
    """Upstream's untrained model."""
    from nanochat.gpt import GPT, GPTConfig  # upstream's: `worker` has put it first in sys.path

    width = 64 * job.depth
    heads: Any = dict.fromkeys(("n_head", "n_kv_head"), width // (128 if width >= 512 else 64))
    sizes: Any = {"sequence_len": job.T, "vocab_size": job.vocab_size, "n_layer": job.depth}
    sizes["n_embd"] = width
    with torch.device("meta"):
        model: Any = GPT(GPTConfig(**sizes, **heads, window_pattern=job.windows))
    model.to_empty(device=DEVICE)
    model.init_weights()
    return model


def prepare_upstream(job: Job) -> Parts:
    """Upstream's model and optimizer with the settings of its scripts/base_train.py at depth 12."""
    model = build_upstream(job)
    if job.fp8 and DEVICE.type == "cuda":
        from nanochat.fp8 import convert_to_float8_training  # type: ignore

        def large(layer: nn.Linear, name: str) -> bool:
            shape = layer.weight.shape
            return min(shape) >= 128 and not any(n % 16 for n in shape)

        convert_to_float8_training(model, module_filter_fn=large)
    scale, n = (job.batch_rows * job.T / 2**19) ** 0.5, job.steps
    peaks = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02}
    peaks["weight_decay"] = 0.28  # times the reference's tokens over the run's, equal at depth 12
    optimizer = model.setup_optimizer(**{name: scale * x for name, x in peaks.items()})
    compiled: Any = torch.compile(model, dynamic=False)
    warmdown = round(0.65 * n)

    def schedule(step: int) -> None:
        left = min(1.0, (n - step) / warmdown)
        factor = (step + 1) / 40 if step < 40 else 0.05 + 0.95 * left
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.90 + 0.07 * left
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = 0.14 * scale * (1 + math.cos(math.pi * step / n))

    return Parts(model, optimizer, lambda x, y: compiled(x, y), schedule)


# ---- Work of a process ---------------------------------------------------------------------------


def synchronize() -> float:
    """Wait for the device; returns the time."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def read_rows(job: Job, name: str, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (rows, job.T) on the device; padding, a BOS after a BOS, has no loss."""
    stored = np.memmap(job.folder / f"{name}.bin", np.uint16, "r").reshape(-1, T + 1)
    rows = torch.from_numpy(stored[first:last, : job.T + 1].astype(np.int64)).to(DEVICE)
    is_bos = rows == rows[:, :1]
    targets = rows[:, 1:].masked_fill(is_bos[:, 1:] & is_bos[:, :-1], IGNORE)
    return rows[:, :-1].contiguous(), targets


class Trainer:
    """Trains and scores one side's model."""

    def __init__(self, job: Job):
        self.job = job
        self.parts = prepare_upstream(job) if job.side == "upstream" else prepare_ours(job)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One optimizer step on a batch in micro-batches; returns its mean loss on the device."""
        _, optimizer, loss_of, _ = self.parts
        total, n = torch.zeros((), device=DEVICE), len(x) // self.job.micro_rows
        for tokens, targets in zip(x.chunk(n), y.chunk(n), strict=True):
            loss = loss_of(tokens, targets) / n
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def warm_up(self) -> str:
        """Compile the model; returns the seconds and its size."""
        started = synchronize()
        x, y = read_rows(self.job, "train", 0, self.job.micro_rows)
        self.parts.loss(x, y).backward()
        self.parts.optimizer.zero_grad(set_to_none=True)
        seconds = synchronize() - started
        gc.freeze()
        gc.disable()  # as in both training loops
        torch.cuda.empty_cache()  # for the other side
        size = sum(p.numel() for p in self.parts.model.parameters())
        return f"compiled in {seconds:.0f} s, {size:,} parameters"

    def train(self, first: int, last: int) -> tuple[float, float]:
        """Train steps `first` to `last`, exclusive; returns mean loss and tokens per second."""
        rows = self.job.batch_rows
        x, y = read_rows(self.job, "train", first * rows, last * rows)
        losses, started = [], synchronize()
        for i, step in enumerate(range(first, last)):
            self.parts.schedule(step)
            part = slice(i * rows, (i + 1) * rows)
            losses.append(self.step(x[part], y[part]))
        rate = x.numel() / (synchronize() - started)
        return float(torch.stack(losses).mean()), rate

    def measure(self) -> float:
        """Tokens per second of a step after an untimed one."""
        x, y = read_rows(self.job, "train", 0, self.job.batch_rows)
        self.step(x, y)
        started = synchronize()
        self.step(x, y)
        seconds = synchronize() - started
        torch.cuda.empty_cache()
        return x.numel() / seconds

    @torch.no_grad()
    def score(self) -> float:
        """Mean loss of the held-out rows, without compiled code."""
        self.parts.model.backend = "sdpa"  # of ours; FlexAttention would have to be compiled
        rows = range(0, HELD_OUT_ROWS, 4)
        with torch.compiler.set_stance("force_eager"):
            losses = [self.parts.loss(*read_rows(self.job, "held_out", i, i + 4)) for i in rows]
        return float(torch.stack(losses).mean())


class Decoder:
    """Generates with one side's engine and an untrained model; speed does not depend on weights."""

    def __init__(self, job: Job):
        self.job, self.engines = job, {}
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(1000, 8000, (PROMPT,), generator=generator).tolist()
        if job.side == "upstream":
            # its engine imports the loader of checkpoints, which needs packages that are not here
            sys.modules["nanochat.checkpoint_manager"] = stub = ModuleType("stub")
            stub.load_model = None  # type: ignore
            self.model = build_upstream(job)
        else:
            from nanochat.gpt import inference_copy

            self.model = inference_copy(build_ours(job))

    def warm_up(self, batch: int) -> str:
        """Generate once; returns the seconds, which include compiling."""
        started = synchronize()
        self.measure(batch)
        return f"batch {batch}, first run with compilation {synchronize() - started:.0f} s"

    def measure(self, batch: int) -> float:
        """Tokens per second of `batch` samples of one prompt, after their first tokens."""
        steps = self.decode_upstream if self.job.side == "upstream" else self.decode_ours
        tokens = steps(batch)
        next(tokens)  # prefill
        started, n = synchronize(), self.job.decode_tokens - 1
        for _ in range(n):
            next(tokens)
        return batch * n / (synchronize() - started)

    def decode_ours(self, batch: int) -> Iterator[Any]:
        """Yield after each step of our engine."""
        from nanochat.engine import Engine, Sampling
        from nanochat.tokenizer import Tokenizer

        if batch not in self.engines:
            tokenizer, capacity = Tokenizer.train(["noise"], 265), PROMPT + self.job.decode_tokens
            made = Engine(self.model, tokenizer, batch, capacity, compiled=True)
            made.ends = set()  # no sample stops early
            self.engines[batch] = made
        engine = self.engines[batch]
        engine.submit(self.prompt, Sampling(self.job.decode_tokens, top_k=TOP_K), batch)
        while engine.busy:
            yield engine.step()

    def decode_upstream(self, batch: int) -> Iterator[Any]:
        """Yield after each step of upstream's engine."""
        from nanochat.engine import Engine

        specials: Any = SimpleNamespace(encode_special=lambda s: -1, get_bos_token_id=lambda: -1)
        options: Any = {"num_samples": batch, "max_tokens": self.job.decode_tokens}
        engine: Any = Engine(self.model, specials)
        return engine.generate(self.prompt, temperature=1.0, top_k=TOP_K, **options)


@lru_cache
def worker(job: Job) -> Any:
    """The model of this process."""
    if job.side == "upstream":
        sys.path.insert(0, str(job.folder))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    return Decoder(job) if job.decode_tokens else Trainer(job)


def work(job: Job, method: str, *args: Any) -> Any:
    """In a side's process: call a method of its worker."""
    try:
        return getattr(worker(job), method)(*args)
    except Exception:  # many of the compiler's cannot be sent to the parent
        raise RuntimeError(traceback.format_exc(limit=-3)) from None


# ---- The parts -----------------------------------------------------------------------------------


class Side:
    """A side's process, seen from the parent."""

    def __init__(self, job: Job):
        self.job = job
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def start(self, method: str, *args: Any) -> Future[Any]:
        """Start a method of `Trainer` or `Decoder`."""
        return self.pool.submit(work, self.job, method, *args)


@contextmanager
def run_sides(*jobs: Job) -> Iterator[list[Side]]:
    """Processes of jobs. Their errors are printed and end the block, not the part."""
    sides = [Side(job) for job in jobs]
    try:
        yield sides
    except RuntimeError as error:  # also of a process that crashed
        print(f"failed: {error}", flush=True)
    for side in sides:
        side.pool.shutdown()


def warm_up(sides: Sequence[Side], *args: Any) -> None:
    """Warm up all sides at once; prints notes."""
    found = [side.start("warm_up", *args) for side in sides]
    for side, answer in zip(sides, found, strict=True):
        about = f"{side.job.side} d{side.job.depth}, {'fp8, ' * side.job.fp8}"
        print(f"{about}windows {side.job.windows}: {answer.result()}", flush=True)


def in_turn(sides: Sequence[Side], method: str, *args: Any) -> list[Any]:
    """Results of a method of each side, one after the other."""
    return [side.start(method, *args).result() for side in sides]


def medians(sides: Sequence[Side], *args: Any, repeats: int = REPEATS) -> list[float]:
    """Median of `measure` of each side; the sides alternate."""
    rounds = [in_turn(sides, "measure", *args) for _ in range(repeats)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def print_origin(folder: Path) -> None:
    """Print commits, versions and the head of the table."""
    ours, upstream = describe_commit(Path.cwd()), (folder / "COMMIT").read_text()
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"ours {ours}, upstream {upstream}, torch {torch.__version__}, {card}\n")
    print("| measured | ours | upstream | ratio |\n|---|---|---|---|", flush=True)


def print_row(what: str, ours: float, theirs: float) -> None:
    """Print a table row, losses or whole tokens per second, so that a stopped run leaves it."""
    cells = [f"{x:,.0f}" if x > 100 else f"{x:.4f}" for x in (ours, theirs)]
    print("|", " | ".join((what, *cells, f"{ours / theirs:.3f}")), "|", flush=True)


def compare_learning(ours: Job) -> None:
    """Part 1: loss on the same rows in the same order, and of the same held-out rows."""
    name = f"d{ours.depth}"
    with run_sides(ours, replace(ours, side="upstream")) as sides:
        warm_up(sides)
        for first in range(0, ours.steps, CHUNK):
            last = min(first + CHUNK, ours.steps)
            losses, rates = zip(*in_turn(sides, "train", first, last), strict=True)
            print_row(f"{name}, loss of steps {first} to {last - 1}", *losses)
            print_row(f"{name}, tokens/s of these steps", *rates)
        print_row(f"{name}, held-out loss", *in_turn(sides, "score"))


def compare_training(ours: Job) -> None:
    """
    Part 2: tokens per second of a step of two micro-batches. Windows are full, as upstream
    recommends without FlashAttention 3.
    """
    case = f"d{ours.depth}, {ours.batch_rows} rows, tokens/s"
    for fp8 in (False, True):
        pair = replace(ours, windows="L", fp8=fp8)
        with run_sides(pair, replace(pair, side="upstream")) as sides:
            warm_up(sides)
            print_row(f"{case}, {'fp8' if fp8 else 'bf16'}, windows L", *medians(sides))


def compare_decoding(ours: Job) -> None:
    """Part 3: tokens per second after the first token, by depth and batch size."""
    for depth in (ours.depth, 2 * ours.depth):
        decode_batches(replace(ours, depth=depth), (1, 64))


def decode_batches(ours: Job, batches: Sequence[int]) -> None:
    """Rows of the decoding speed of both sides, by batch size."""
    with run_sides(ours, replace(ours, side="upstream")) as sides:
        for batch in batches:
            warm_up(sides, batch)
            rates = medians(sides, batch, repeats=3)
            print_row(f"d{ours.depth}, batch {batch}, generated tokens/s", *rates)


def compare_on_cpu(ours: Job, clone: Path) -> None:
    """Part cpu: a training step by row length, and decoding by batch size, on random tokens."""
    with tempfile.TemporaryDirectory() as folder:
        job = replace(ours, folder=Path(folder), windows="L")
        copy_upstream(clone, job.folder)
        rows = np.random.default_rng(0).integers(CPU_V, size=(job.batch_rows, T + 1))
        rows.astype("<u2").tofile(job.folder / "train.bin")
        print_origin(job.folder)
        for length in CPU_T:
            each = replace(job, T=length)
            with run_sides(each, replace(each, side="upstream")) as sides:
                warm_up(sides)
                case = f"d{job.depth}, {job.batch_rows} rows of {length}, tokens/s"
                print_row(case, *medians(sides, repeats=2 * REPEATS))
        decode_batches(replace(job, T=CPU_T[0], decode_tokens=NEW_TOKENS), (1, 8, 64))


# ---- Preparation ---------------------------------------------------------------------------------


def describe_commit(clone: Path) -> str:
    """Short hash of the commit of a clone, "-dirty" if its files differ."""
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def copy_upstream(clone: Path, folder: Path) -> None:
    """Copy upstream's package, and write the commit of the clone."""
    shutil.copytree(clone / "nanochat", folder / "nanochat")
    (folder / "COMMIT").write_text(describe_commit(clone))


def pack(clone: Path, folder: Path) -> None:
    """
    Write upstream's package, the rows of scripts.data for the tokenizer `peer` in training order,
    and packages.
    """
    from nanochat.dataset import DataConfig, load_last_source
    from nanochat.rows import open_rows
    from nanochat.tokenizer import Tokenizer
    from tasks.world.write import open_text

    tokenizer = Tokenizer.load("peer")
    text = open_text(DataConfig(), load_last_source("peer"))
    rows = open_rows(text, tokenizer, T)
    shutil.rmtree(folder, ignore_errors=True)
    copy_upstream(clone, folder)
    with (folder / "train.bin").open("wb") as file:
        for step in range(STEPS):
            rows.read(rows.row_ids(step * BATCH_ROWS, BATCH_ROWS, 0)).astype("<u2").tofile(file)
    with (folder / "held_out.bin").open("wb") as file:
        for some in rows.val_batches(MICRO_ROWS, HELD_OUT_ROWS):
            some.astype("<u2").tofile(file)
    for name in PACKAGES:
        [found] = find_spec(name).submodule_search_locations  # type: ignore
        kept = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(found, folder / "packages" / name, ignore=kept)
    print(f"{folder}: {STEPS} steps of {BATCH_ROWS} rows of {text.name}, of {rows.num_rows:,}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["pack", "1", "2", "3", "cpu"])
    parser.add_argument("--clone", type=Path, help="pack, cpu: a clone of upstream")
    parser.add_argument("--folder", type=Path, default=Path("out/peer"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    job = Job("ours", args.folder.resolve(), depth=12)
    if args.part == "2":
        job = replace(job, depth=16, batch_rows=2 * MICRO_ROWS)
    if args.part == "3":
        job = replace(job, decode_tokens=8 if args.small else NEW_TOKENS)
    if args.small:
        job = replace(job, depth=2, T=64, steps=4, batch_rows=2, micro_rows=1)
    if args.part in ("pack", "cpu") and not args.clone:
        parser.error(f"{args.part} needs --clone")
    if args.part == "pack":
        return pack(args.clone, job.folder)
    if args.part == "cpu":
        job = replace(job, depth=4, vocab_size=CPU_V, batch_rows=MICRO_ROWS)
        return compare_on_cpu(job, args.clone)
    sys.path.append(str(job.folder / "packages"))  # of the processes, too; installed ones go first
    os.environ["HF_HUB_OFFLINE"] = "1"  # no retries
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as upstream sets it
    print_origin(job.folder)
    {"1": compare_learning, "2": compare_training, "3": compare_decoding}[args.part](job)


if __name__ == "__main__":
    main()
