"""
Measure the peak GPU memory of training, and how often a step waits for the device.

    python -m tests.on_null_gpu tests.training_memory --depth=24 --compile=1 -> one line of JSON

Sizes of a real run: rows of 2,048 tokens, vocabulary size 32,768, 64 rows per step.
"""

import json
import warnings
from dataclasses import replace

import numpy as np
import torch
import tyro

from nanochat import checkpoint
from nanochat.checkpoint import build_model
from nanochat.dist import init_dist
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.rows import Rows
from nanochat.scaling import make_rules, shape_for_depth
from nanochat.tokenizer import Tokenizer
from nanochat.train import Run, TrainConfig
from tests.conftest import TINY

ROWS, T, VOCAB_SIZE = 64, 2048, 32768
CPU = torch.device("cpu")


class RandomRows(Rows):
    """Rows of random tokens."""

    def __init__(self) -> None:
        self.max_seq_len = T

    def row_ids(self, step: int, rows_per_step: int, seed: int) -> np.ndarray:
        return np.arange(step * rows_per_step, (step + 1) * rows_per_step)[:, None]

    def read(self, ids: np.ndarray) -> np.ndarray:
        return np.random.default_rng(ids[0, 0]).integers(0, VOCAB_SIZE, (len(ids), T + 1))


def measure(depth: int = 2, compile: int = 0, fp8: int = 0) -> dict[str, float]:
    """Peak bytes of three steps and a save of a new model of this depth, and waits."""
    dist = replace(init_dist(), fp8=bool(fp8))
    shape = shape_for_depth(depth, VOCAB_SIZE, T)
    on_host = replace(dist, device=CPU)
    build_model(TINY, dist.device, dist.dtype, seed=0)  # loads libraries
    host = on_host.peak_memory_bytes()
    model = build_model(shape, dist.device, dist.dtype, seed=0)
    host = on_host.peak_memory_bytes() - host
    optimizer = MuonAdamW(model, make_rules(OptimConfig(), shape.d_model), dist)
    run = Run(
        *("base", "memory", TrainConfig(), model, optimizer, Tokenizer.train(["a"], 265), dist),
        num_steps=4, batch_tokens=ROWS * T, compile="on" if compile else "off",
        settings={}, inputs={}, identity={}, state={},
    )  # fmt: skip
    rows = RandomRows()
    checkpoint.save_checkpoint = lambda *args: None  # type: ignore  # copies without writing them
    with run:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            for step in run.steps():
                if step == 0:
                    torch.cuda.reset_peak_memory_stats()
                waits.clear()
                torch.cuda.set_sync_debug_mode("warn")
                run.backward(run.load(rows))
                run.update(1.0, 0.95, 1.0)
                torch.cuda.set_sync_debug_mode("default")
                if step == 2:
                    break
        run.save()
    return {
        "weights": 4 * model.num_params(),
        "host_growth": host,
        "device_rows": run.device_rows,
        "peak": torch.cuda.max_memory_allocated(),
        "waits": len(waits),
    }


if __name__ == "__main__":
    print(json.dumps(tyro.cli(measure)))
