"""
How long it takes to begin: importing the package, and the commands' help.

    a fresh Python per measurement -> seconds, and whether torch was loaded for nothing
"""

import subprocess
import sys
import time

from nanochat.bench.table import Findings, Line
from nanochat.common import REPOSITORY

LIGHT = ("nanochat", "tasks", "nanochat.config", "nanochat.dataset", "nanochat.dataloader")


def bench_start(repeats: int, found: Findings) -> None:
    """Time imports; those of `LIGHT` load no torch. Raises RuntimeError where one does."""
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
        found.line(Line("Start", f"import {name}", "per second", [1 / s for s in seconds[1:]]))
