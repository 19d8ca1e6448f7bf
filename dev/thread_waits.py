"""
Measure how training threads should wait for each other on a CPU, idle and busy.

    python -m dev.thread_waits --spin_counts=default,1000

GNU OpenMP's threads spin at the end of each parallel region before they sleep, which is fastest on
an idle machine and slow if other processes need the cores. GOMP_SPINCOUNT limits the spinning.
Prints the throughput with each setting, alternated, and medians: idle, and with one endless loop
per core. Finish everything else first.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from nanochat.checkpoint import build_model
from nanochat.config import start
from nanochat.dist import init_dist
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.scaling import make_rules, shape_for_depth

LOOP = "while True: pass"


@dataclass(frozen=True)
class ThreadWaits:
    spin_counts: str = "default,1000"
    """Values of GOMP_SPINCOUNT to compare."""
    rounds: int = 5
    """Runs with each value."""
    steps: int = 8
    """Training steps of a run: depth 4, 16 rows of 256 tokens."""
    child: bool = False
    """Do one run in this process and print its tokens per second."""


def train(steps: int) -> float:
    """Median tokens per second of training steps, after one that is not counted."""
    dist = init_dist()
    shape = shape_for_depth(4, 4096, 256)
    model = build_model(shape, dist.device, dist.dtype, 0)
    optimizer = MuonAdamW(model, make_rules(OptimConfig(), shape.d_model), dist)
    ids = torch.randint(4096, (16, 257))
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        (model.loss(ids[:, :-1], ids[:, 1:]) / 4096).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return 4096 / statistics.median(seconds[1:])


def run(spin_count: str, steps: int) -> float:
    """Tokens per second of a run in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {} if spin_count == "default" else {"GOMP_SPINCOUNT": spin_count}
    words = [sys.executable, "-m", "dev.thread_waits", "--child", f"--steps={steps}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main(cfg: ThreadWaits) -> None:
    if cfg.child:
        return print(train(cfg.steps))
    for busy in (False, True):
        loops = [
            subprocess.Popen([sys.executable, "-c", LOOP])
            for _ in range(os.cpu_count() or 1 if busy else 0)
        ]
        found: dict[str, list[float]] = {each: [] for each in cfg.spin_counts.split(",")}
        for _ in range(cfg.rounds):
            for spin_count, speeds in found.items():
                speeds.append(run(spin_count, cfg.steps))
        for loop in loops:
            loop.kill()
        for spin_count, speeds in found.items():
            every = " ".join(f"{speed:,.0f}" for speed in speeds)
            median = statistics.median(speeds)
            state = "busy" if busy else "idle"
            print(f"{state} {spin_count:<8} {median:,.0f} tok/s: {every}", flush=True)


if __name__ == "__main__":
    start(main, ThreadWaits(), __doc__)
