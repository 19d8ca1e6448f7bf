"""
Run a script on a GPU whose kernels compute nothing, or measure the memory of training steps there.

    python -m tests.on_null_gpu scripts.base_train --depth=2
    python -m tests.on_null_gpu --depth=24 --compile=1    # memory, waits, launches of a step: JSON

Sizes, dtypes, devices, memory and compiled graphs are as on a real GPU; all values are garbage.
Code that branches on results is replaced. Measured steps have 64 rows of 2,048 tokens and a
vocabulary of 32,768.
"""

import ctypes
import json
import runpy
import sys
import warnings
from dataclasses import replace

import numpy as np
import torch
import tyro

from nanochat import common, dist, engine, eval_bpb, rl, train
from nanochat import run as run_module
from nanochat.checkpoint import build_model
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.recipe import Recipe
from nanochat.rows import Rows
from nanochat.run import Run
from nanochat.scaling import make_rules, shape_for_depth
from nanochat.tokenizer import Tokenizer
from nanochat.train import TrainConfig
from tests.conftest import TINY

argmax, total = torch.Tensor.argmax, dist.DistContext.sum
reduce = Run.reduce


def reduce_to_good_totals(run: Run) -> train.Totals:
    """Wait for the device as in a real step; its values are garbage, but for a stop."""
    stop, run.stop.asked = run.stop.asked, False
    try:
        totals = reduce(run)
    except common.StopRequested:  # garbage, too
        totals = train.Totals(1.0, 1.0, 4096, 1.0, run.optimizer.gradients)  # type: ignore
    run.failure = None
    if stop:
        raise common.StopRequested
    run.totals = totals._replace(loss=1.0, norm=1.0, tokens=4096, scale=1.0)
    return run.totals


torch.backends.cuda.enable_cudnn_sdp(False)  # avoid asking cuDNN for a plan
torch.exp2 = lambda x: torch.exp(x * 0.6931471805599453)  # exp2 is compiled on first use
run_module.check_weights = lambda *_: None
Run.reduce = reduce_to_good_totals
engine.sample = lambda logits, settings, uniform, *_: [int(logits.size(-1) * u) for u in uniform]
dist.DistContext.sum = lambda one, *x: np.nan_to_num(total(one, *x)).tolist()
eval_bpb.Bpb.value = property(lambda scored: 1.0)
rl.Rollouts.reward = lambda self, i, answer: float(sum(answer.ids) % 2)
torch.Tensor.argmax = lambda x, dim=None: 0 * argmax(x).cpu() if dim is None else argmax(x, dim)

ROWS, T, VOCAB_SIZE = 64, 2048, 32768
CPU = torch.device("cpu")


class RandomRows(Rows):
    """Rows of random tokens."""

    def __init__(self) -> None:
        self.max_seq_len = T

    def row_ids(self, first: int, count: int, seed: int) -> np.ndarray:
        return np.arange(first, first + count)[:, None]

    def read(self, ids: np.ndarray) -> np.ndarray:
        return np.random.default_rng(ids[0, 0]).integers(0, VOCAB_SIZE, (len(ids), T + 1))


def measure(depth: int = 2, compile: int = 0, fp8: int = 0) -> dict[str, float]:
    """Peak bytes of three steps and a save of a new model of this depth, waits and launches."""
    here, driver = replace(dist.init_dist(), fp8=bool(fp8)), ctypes.CDLL(None)
    shape = shape_for_depth(depth, VOCAB_SIZE, T)
    on_host = replace(here, device=CPU)
    build_model(TINY, here.device, here.dtype, seed=0)  # loads libraries
    host = on_host.peak_memory_bytes()
    model = build_model(shape, here.device, here.dtype, seed=0)
    host = on_host.peak_memory_bytes() - host
    optimizer = MuonAdamW(model, make_rules(OptimConfig(), shape.d_model), here)
    tokenizer, recipe = Tokenizer.train(["a"], 265), Recipe({}, {}, {})
    run = Run("base", "memory", recipe, model, optimizer, tokenizer, TrainConfig(), here)
    run.state["settings"] = {}
    rows = RandomRows()
    run_module.save_checkpoint = lambda *args: None  # type: ignore  # copies without writing them
    with run.begin(4, ROWS * T, "on" if compile else "off"):
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            for step in run.steps():
                if step == 0:
                    torch.cuda.reset_peak_memory_stats()
                waits.clear()
                launches = driver.nullgpu_launches()
                torch.cuda.set_sync_debug_mode("warn")
                run.backward(run.load(rows))
                run.update(1.0, 0.95, 1.0)
                torch.cuda.set_sync_debug_mode("default")
                launches = driver.nullgpu_launches() - launches
                if step == 2:
                    break
        run.save(wait=True)
    return {
        "weights": 4 * model.num_params(),
        "host_growth": host,
        "device_rows": run.device_rows,
        "peak": torch.cuda.max_memory_allocated(),
        "waits": len(waits),
        "launches": launches,
    }


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        print(json.dumps(tyro.cli(measure)))
    else:
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
