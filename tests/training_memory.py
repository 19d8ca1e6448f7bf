"""
Measure the peak GPU memory of training and a save against the estimated memory, for the tests of
memory and of waits for the device.

    python -m tests.on_null_gpu tests.training_memory --depth=24 --compile=1 -> one line of JSON

Sizes of a real run: rows of 2,048 tokens, vocabulary size 32,768, 64 rows per step.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from nanochat import checkpoint
from nanochat.checkpoint import CheckpointManager, Progress, build_model, stage_folder
from nanochat.distributed import DistContext, init_distributed
from nanochat.gpt import GPT
from nanochat.hardware import peak_memory_bytes
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import KernelConfig, enable_fp8
from nanochat.scaling import make_rules, shape_for_depth
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    MicroBatch,
    TrainConfig,
    TrainingRun,
    fit_rows,
    split_micro_batches,
    train_step,
)
from tests.conftest import TINY

ROWS, T, VOCAB_SIZE = 64, 2048, 32768


class RandomRows:
    """Loader of random rows."""

    identity, batch_tokens, metrics = {}, ROWS * T, {}

    def micro_batches(self, step: int, device_rows: int, stopping: object) -> list[MicroBatch]:
        tokens, targets = np.random.default_rng(step).integers(0, VOCAB_SIZE, (2, ROWS, T))
        return split_micro_batches(tokens, targets, device_rows, torch.device("cuda"))

    def prefetch(self, step: int, device_rows: int, stopping: object) -> None:
        pass

    def row_names(self, step: int) -> str:
        return f"rows of {step}"


def run_of(model: GPT, optimizer: MuonAdamW, machine: DistContext, compiled: bool) -> TrainingRun:
    """A run of three steps on random rows."""
    return TrainingRun(
        kind="base",
        model=model,
        tokenizer=Tokenizer.train(["a"], 265),
        optimizer=optimizer,
        loader=RandomRows(),  # type: ignore
        machine=machine,
        cfg=TrainConfig(),
        tag="memory",
        num_steps=3,
        schedule=ScheduleConfig(),
        kernels=KernelConfig(compile=compiled),
    )


@contextmanager
def counted_waits() -> Iterator[list[warnings.WarningMessage]]:
    """A list of the operations inside that wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        yield waits
    torch.cuda.set_sync_debug_mode("default")


def train(run: TrainingRun) -> tuple[int, int, int]:
    """
    Train and save. Returns peak allocated bytes, and how often the last step and the save wait for
    the device; the save's check for non-finite values is not counted.
    """
    torch.cuda.reset_peak_memory_stats()
    for step in range(run.num_steps - 1):
        train_step(run, step)
    with counted_waits() as waits:
        train_step(run, run.num_steps - 1)
    checkpoint.save_checkpoint = lambda *args: None  # copies without writing them
    with CheckpointManager(stage_folder("base") / run.tag, run.machine) as checkpoints:
        with counted_waits() as save_waits:
            checkpoints.save(run.model, run.optimizer, run.tokenizer, {}, Progress())
    return torch.cuda.max_memory_allocated(), len(waits), len(save_waits)


def measure(depth: int, compiled: bool, preparations: int, fp8: bool) -> dict[str, float]:
    """Estimated, peak and other bytes for a new model of this depth; waits in a step and a save."""
    machine = init_distributed()
    shape = shape_for_depth(depth, VOCAB_SIZE, T)
    build_model(TINY, machine.device, machine.dtype, seed=0)  # loads libraries
    host = peak_memory_bytes(CPU)
    model = build_model(shape, machine.device, machine.dtype, seed=0)
    host = peak_memory_bytes(CPU) - host
    if fp8:
        enable_fp8(model, machine)
    table = make_rules(OptimConfig(), shape.d_model)
    optimizer = MuonAdamW(model, table, machine)
    run = run_of(model, optimizer, machine, compiled)
    kept = [torch.cuda.memory_allocated()]
    for _ in range(preparations):
        fit_rows(run, run.num_steps)
        kept.append(torch.cuda.memory_allocated())
    peak, waits, save_waits = train(run)
    return {
        "weights": 4 * model.num_params(),
        "host_growth": host,
        "leaked": max(kept) - kept[0],
        "device_rows": run.device_rows,
        "stated": run.memory_bytes,
        "peak": peak,
        "waits": waits,
        "save_waits": save_waits,
    }


CPU = torch.device("cpu")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("--depth", 2), ("--compile", 0), ("--preparations", 1), ("--fp8", 0)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    print(json.dumps(measure(args.depth, bool(args.compile), args.preparations, bool(args.fp8))))
