"""
How long it takes to begin: importing the package, and the commands' help.

    a fresh Python per measurement -> seconds, and whether torch was loaded for nothing
"""

import subprocess
import sys
import time

from nanochat.bench.table import Findings, Rate
from nanochat.common import REPOSITORY

LIGHT = ("nanochat", "tasks", "nanochat.config", "nanochat.dataset", "nanochat.dataloader")


def bench_start(repeats: int, found: Findings) -> None:
    """Time imports; those of `LIGHT` load no torch. Raises RuntimeError where one does."""
    for name in (*LIGHT, "torch", "nanochat.engine", "scripts.base_train"):
        code = f"import {name}, sys; print('torch' in sys.modules)"
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            ended = subprocess.run(
                [sys.executable, "-c", code],
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                check=True,
            )
            seconds.append(time.perf_counter() - started)
            if name in LIGHT and ended.stdout.split() != ["False"]:
                raise RuntimeError(f"import {name} loads torch")
        found.line("Start", f"import {name}", "per second", Rate.of(1 / s for s in seconds[1:]))
