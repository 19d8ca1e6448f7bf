"""
What a run stands on: the commit, the machine, the software, the size of the code.

    git, psutil, torch, the files of the repository -> dicts ready for a record or a report's header

Each function asks one question and answers with plain values; "unknown", "none" or an empty
dict where the machine cannot say. Knows nothing of stages, records or how a report looks.
"""

import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from nanochat.common import REPOSITORY

GIB = 1024**3
CODE_SUFFIXES = (".py", ".md", ".rs", ".html", ".toml", ".sh")
GENERATED = ("report.md", "dev/report")  # a report that was just written makes no commit dirty
DOLLARS_PER_GPU_HOUR = {"H100": 3.00, "A100": 1.79, "V100": 0.55}  # on demand, October 2025
OTHER_DOLLARS_PER_GPU_HOUR = 2.00
NOT_CODE = {"out", "target", "build", "dist", "node_modules", "__pycache__"}


def git(*words: str, repository: Path = REPOSITORY) -> str | None:
    """The output of a git command in the repository, or None where git has no answer."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *words], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def git_state(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Branch, short commit, whether files differ from it, and the first line of its message."""
    if git("rev-parse", "--is-inside-work-tree", repository=repository) != "true":
        return {"branch": "unknown", "commit": "unknown", "dirty": False, "message": ""}
    others = [f":(exclude){path}" for path in GENERATED]
    changes = git("status", "--porcelain", "--", ".", *others, repository=repository)
    return {
        "branch": git("rev-parse", "--abbrev-ref", "HEAD", repository=repository) or "unknown",
        "commit": git("rev-parse", "--short=7", "HEAD", repository=repository) or "unknown",
        "dirty": bool(changes),
        "message": git("log", "-1", "--format=%s", repository=repository) or "",
    }


def hardware() -> dict[str, Any]:
    """Operating system, processors, memory, and the accelerators PyTorch sees."""
    return {
        "platform": platform.system(),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "logical_cores": psutil.cpu_count() or 1,
        "memory_gib": psutil.virtual_memory().total / GIB,
        **accelerators(),
    }


def accelerators() -> dict[str, Any]:
    """`gpus` (their names, in order), `gpu_memory_gib` in total, `cuda`; empty without any."""
    import torch  # slow to import, and a report of a machine without GPUs is still a report

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return {
            "gpus": [card.name for card in cards],
            "gpu_memory_gib": sum(card.total_memory for card in cards) / GIB,
            "cuda": torch.version.cuda or "unknown",
        }
    return {"gpus": []}


def default_rate(gpus: Sequence[str]) -> float:
    """What a machine with these accelerators costs to rent, in dollars per hour; 0 without any."""
    rates = DOLLARS_PER_GPU_HOUR
    known = [next((rates[kind] for kind in rates if kind in name), None) for name in gpus]
    return sum(OTHER_DOLLARS_PER_GPU_HOUR if rate is None else rate for rate in known)


def cpu_name() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            named = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()


def software() -> dict[str, str]:
    """Versions of Python and PyTorch."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "unknown"
    return {"python": platform.python_version(), "torch": torch_version}


def bloat(repository: Path = REPOSITORY) -> dict[str, int]:
    """
    The size of the code: characters, lines, files, tokens (characters // 4), lines of uv.lock.

    Counts the py, md, rs, html, toml and sh files git tracks, generated reports left out; where
    git tracks none, those outside hidden and build folders. `lock_lines` is 0 without uv.lock.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in code_files(repository)]
    characters = sum(len(text) for text in texts)
    lock = repository / "uv.lock"
    return {
        "characters": characters,
        "lines": sum(len(text.splitlines()) for text in texts),
        "files": len(texts),
        "tokens": characters // 4,
        "lock_lines": len(lock.read_text(encoding="utf-8").splitlines()) if lock.exists() else 0,
    }


def code_files(repository: Path) -> list[Path]:
    """The files that `bloat` counts, sorted."""
    tracked = git("ls-files", "-z", repository=repository)
    names = tracked.split("\0") if tracked else walk(repository)
    return sorted(
        repository / name
        for name in names
        if name.endswith(CODE_SUFFIXES)
        and not name.startswith(GENERATED)
        and (repository / name).is_file()
    )


def walk(repository: Path) -> Iterator[str]:
    """Relative names of all files, hidden and build folders left out."""
    for folder, subfolders, files in os.walk(repository):
        subfolders[:] = [d for d in subfolders if d not in NOT_CODE and not d.startswith(".")]
        for name in files:
            yield str((Path(folder) / name).relative_to(repository))
