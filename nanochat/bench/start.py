"""
Benchmark startup: import times.

    a new process per measurement -> ms per import; an error if a light module loads torch
"""

import subprocess
import sys
import time

from nanochat.bench.table import BenchLog, TableLine
from nanochat.common import REPOSITORY

TABLE = "Import time"
NOTE = "A new Python process that imports one module, in ms: lower is better. No peer."
LIGHT = ("nanochat", "tasks", "nanochat.config", "nanochat.dataset", "nanochat.dataloader")


def bench_start(repeats: int, found: BenchLog) -> None:
    """Time imports. Raises RuntimeError if a module in `LIGHT` loads torch."""
    found.note(TABLE, NOTE)
    for name in (*LIGHT, "torch", "nanochat.engine", "scripts.base_train"):
        code = f"import {name}, sys; print('torch' in sys.modules)"
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            command = [sys.executable, "-c", code]
            loads = subprocess.check_output(command, cwd=REPOSITORY, text=True).split() != ["False"]
            seconds.append(time.perf_counter() - started)
            if name in LIGHT and loads:
                raise RuntimeError(f"import {name} loads torch")
        found.line(TableLine(TABLE, f"import {name}", "ms", [1e3 * s for s in seconds[1:]]))
