"""
Measure how training threads should wait for each other on a CPU, idle and busy.

    python -m dev.thread_waits --spin_counts=300000,30000,1000

GNU OpenMP's threads spin at the end of each parallel region before they sleep, which is fastest on
an idle machine and slow if other processes need the cores. GOMP_SPINCOUNT limits the spinning; its
default is 300,000. Prints the throughput of a training step with each setting, alternated, and
medians: idle, and with one endless loop per core. Finish everything else first.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from nanochat.config import start

LOOP = "while True: pass"
BENCH = "scripts.bench --what=train --max_seq_len=256 --rows=16 --vocab_size=4096 --compile=off"


@dataclass(frozen=True)
class ThreadWaits:
    spin_counts: str = "300000,30000"
    """Values of GOMP_SPINCOUNT to compare."""
    rounds: int = 5
    """Runs with each value."""


def run(spin_count: str) -> float:
    """Tokens per second of the benchmark in a process of its own, from its table."""
    env = {**os.environ, "GOMP_SPINCOUNT": spin_count}
    words = [sys.executable, "-m", *BENCH.split()]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    [row] = [line for line in done.stdout.splitlines() if line.startswith("| depth")]
    return float(row.split("|")[2].split()[0].replace(",", ""))


def main(cfg: ThreadWaits) -> None:
    for state, num_loops in (("idle", 0), ("busy", os.cpu_count() or 1)):
        loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(num_loops)]
        found: dict[str, list[float]] = {each: [] for each in cfg.spin_counts.split(",")}
        try:
            for _ in range(cfg.rounds):
                for spin_count, speeds in found.items():
                    speeds.append(run(spin_count))
        finally:
            for loop in loops:
                loop.kill()
        for spin_count, speeds in found.items():
            every = " ".join(f"{speed:,.0f}" for speed in speeds)
            median = statistics.median(speeds)
            print(f"{state} {spin_count:<8} {median:,.0f} tok/s: {every}", flush=True)


if __name__ == "__main__":
    start(main, ThreadWaits(), __doc__)
