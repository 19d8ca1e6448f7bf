"""Set-up that several files of the lab share."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.training_runs import python

TUNE = (
    "--source=base:one --mixture=world_choice=300,world_facts=60 --num_iterations=20 "
    "--total_batch_size=1024 --max_seq_len=128 --init_lr_frac=1 --eval_tokens=1024 "
    "--dtype=float32"
).split()


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """A Python that runs `planted_run` instead of the pipeline's scripts."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -m tests.lab.planted_run "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def planted_runs(trained: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps start processes with planted results."""
    monkeypatch.setattr(sys, "executable", str(fake_python))


@pytest.fixture(scope="session")
def tuned_base(trained_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small base models, and chat models of two seeds that answer with letters."""
    base = shutil.copytree(trained_base, tmp_path_factory.mktemp("tuned") / "base")
    for seed in (0, 1):
        python(base, "-m", "scripts.chat_sft", *TUNE, f"--seed={seed}", f"--model_tag=s{seed}")
    return base


@pytest.fixture
def tuned(tuned_base: Path, base: Path) -> Path:
    return shutil.copytree(tuned_base, base)
