"""
Measure the peak GPU memory of training against the estimated memory, for the tests of memory and
of waits for the device.

    python -m tests.on_null_gpu tests.training_memory --depth=24 --compile=1 -> one line of JSON

Sizes of a real run: rows of 2,048 tokens, vocabulary size 32,768, 64 rows per step.
"""

import argparse
import json
import warnings

import numpy as np
import torch

from nanochat.checkpoint import build_model
from nanochat.distributed import DistContext, init_distributed
from nanochat.gpt import GPT
from nanochat.hardware import peak_memory_bytes
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig, make_rules
from nanochat.preflight import KernelConfig, enable_fp8
from nanochat.scaling import ShapeConfig, shape_for_depth
from nanochat.train import TrainConfig, TrainingRun, fit_rows, train_step
from tests.conftest import TINY
from tests.test_train import TOKENIZER, Given

ROWS, T, VOCAB_SIZE = 64, 2048, 32768


def run_of(model: GPT, optimizer: MuonAdamW, machine: DistContext, compiled: bool) -> TrainingRun:
    """A run of three steps on random rows."""
    rng = np.random.default_rng(0)
    loader = Given(lambda step: tuple(rng.integers(0, VOCAB_SIZE, (2, ROWS, T))), device="cuda")
    loader.batch_tokens = ROWS * T
    return TrainingRun(
        kind="base",
        model=model,
        tokenizer=TOKENIZER,
        optimizer=optimizer,
        loader=loader,
        machine=machine,
        cfg=TrainConfig(),
        tag="memory",
        num_steps=3,
        schedule=ScheduleConfig(),
        kernels=KernelConfig(compile=compiled),
    )


def train(run: TrainingRun) -> tuple[int, int]:
    """Train; returns peak allocated bytes, and how often the last step waits for the device."""
    torch.cuda.reset_peak_memory_stats()
    for step in range(run.num_steps - 1):
        train_step(run, step)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        train_step(run, run.num_steps - 1)
    torch.cuda.set_sync_debug_mode("default")
    return torch.cuda.max_memory_allocated(), len(waits)


def measure(depth: int, compiled: bool, preparations: int, fp8: bool) -> dict[str, float]:
    """Estimated, peak, leaked and other bytes for a new model of this depth; waits in a step."""
    machine = init_distributed()
    shape = shape_for_depth(depth, VOCAB_SIZE, T, "default", "L", ShapeConfig())
    tiny, same = (build_model(TINY, d, machine.dtype, 0) for d in (machine.device, CPU))
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
        ready = fit_rows(run, run.num_steps)
        kept.append(torch.cuda.memory_allocated())
    weights, run.device_rows = tiny.state_dict(), ready.device_rows
    peak, waits = train(run)
    return {
        "weights": 4 * model.num_params(),
        "host_growth": host,
        "weights_of_a_cpu": all(
            torch.equal(weights[n].cpu(), w) for n, w in same.named_parameters()
        ),
        "leaked": max(kept) - kept[0],
        "device_rows": ready.device_rows,
        "stated": ready.memory_bytes,
        "peak": peak,
        "waits": waits,
    }


CPU = torch.device("cpu")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("--depth", 2), ("--compile", 0), ("--preparations", 1), ("--fp8", 0)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    print(json.dumps(measure(args.depth, bool(args.compile), args.preparations, bool(args.fp8))))
