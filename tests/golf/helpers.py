"""Dry runs of shell scripts, and decoding step by step; also used by tests/recursion."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from nanochat.common import REPOSITORY

# every golf option
GOLF_CHANGES: dict[str, Any] = {
    "mlp_ratio": 3,
    "tie_embeddings": True,
    "rope_dims": 4,
    "xsa_last_n": 1,
    "qk_gain_init": 1.5,
    "init": "orthogonal",
    "projection_init": "scaled",
}

FAKES = r"""
python() {
    if [ "$1" = -c ]; then echo 8; return; fi # the number of GPUs, or FLOPs of a record
    printf '%s\t' "$@"; echo
}
torchrun() { python "$@"; }
"""


def commands_of(script: str, folder: Path, **variables: str) -> list[tuple[str, list[str]]]:
    """(script, flags) of what a shell script would run; it runs in a copy, `folder`."""
    for name in ("scripts", "dev"):
        shutil.copytree(REPOSITORY / name, folder / name, dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "speedrun.sh", folder)
    for name in ("dev/setup.sh", ".venv/bin/activate"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(FAKES)
    env = {**os.environ, **variables}
    done = subprocess.run(["bash", script], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip("\t").split("\t") for line in done.stdout.splitlines()]
    found = [words[words.index("-m") + 1 :] for words in lines if "-m" in words]
    return [
        (name.removeprefix("scripts."), [f for f in flags if f != "--"]) for name, *flags in found
    ]


def decode(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of two rows (2, 16), computed in four parts with a KV cache."""
    cache, found = model.new_cache(2), []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 16)):
        view = cache.view([0, 1], last - first)
        found.append(model.logits(model.hidden(tokens[:, first:last], view)))
        cache.lengths = [last, last]
    return torch.cat(found, dim=1)
