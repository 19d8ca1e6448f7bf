"""Shared fixtures: a temporary base directory, a tiny model, a single-rank context."""

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

from nanochat.checkpoint import build_model
from nanochat.common import hold_lock
from nanochat.config import speed_up_exit
from nanochat.dist import DistContext
from nanochat.gpt import GPT, GPTConfig
from nanochat.sandbox import find_problem
from tasks.world.drills import spelling_words
from tests.training_runs import STEPS, prepare, python

atexit.register(speed_up_exit)
# transformers caches remote code by folder name; use a fresh cache
HF_MODULES = tempfile.TemporaryDirectory(prefix="hf_modules_")
os.environ["HF_MODULES_CACHE"] = HF_MODULES.name
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"  # of the tests' servers

settings.register_profile("no deadline", deadline=None)  # a machine may be busy
settings.load_profile("no deadline")
# pytest-xdist workers share the cores: threads that wait for a busy core cost more than they add
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))) > 1:
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)

TINY = GPTConfig(
    vocab_size=64, n_layer=2, d_model=32, n_head=4, n_kv_head=2, head_dim=8, max_seq_len=16
)

# every golf option
GOLF_CHANGES: dict[str, Any] = {
    "mlp_ratio": 3,
    "tie_embeddings": True,
    "rope_dims": 4,
    "xsa_last_n": 1,
    "qk_gain_init": 1.5,
    "init": "orthogonal",
}

TUNE = (
    "--source=base:one --mixture=world_choice=300,world_facts=60 --num_iterations=20 "
    "--total_batch_size=1024 --max_seq_len=128 --init_lr_frac=1 --eval_tokens=1024 "
    "--dtype=float32"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Run the file with the longest test first, so that no worker waits for it at the end. Mark tests
    that need real data.
    """
    items.sort(key=lambda item: item.path.name != "test_speedrun.py")
    for item in items:
        if "hub" in getattr(item, "fixturenames", ()):
            item.add_marker("resources")


class Done(NamedTuple):
    """Exit status and output (stdout, then stderr) of a command."""

    status: int
    text: str


class Command:
    """Runs `python -m scripts.<name> <flags>`, or `dev.<name>`; see the fixture `command`."""

    def __init__(self, patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
        self.patch, self.capfd = patch, capfd

    def __call__(self, script: str, *flags: str) -> Done:
        self.capfd.readouterr()
        status, module = 0, script if script.startswith("dev.") else f"scripts.{script}"
        with self.patch.context() as patch:
            patch.setattr(sys, "argv", [script, *map(str, flags)])
            patch.setenv("COLUMNS", "1000")  # errors on one line
            patch.setattr(os, "sched_getaffinity", lambda _: {0})  # rows are packed in this process
            patch.delitem(sys.modules, module, raising=False)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                status = int(ended.code or 0)
        captured = self.capfd.readouterr()
        return Done(status, captured.out + captured.err)

    def rejects(self, *command: str) -> str:
        """Return the output of a command that must fail with a user error."""
        status, text = self(*command)
        assert status == 2 and "Traceback" not in text, text[-3000:]
        return text

    def works(self, *command: str) -> str:
        """Return the output of a command that must succeed."""
        status, text = self(*command)
        assert status == 0, text[-3000:]
        return text


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test its own base directory."""
    folder = tmp_path / "base"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    return folder


@pytest.fixture
def word_list(base: Path) -> Path:
    """The word file of the main tokenizer, for spelling tasks."""
    path = base / "tokenizer" / "main" / "words.txt"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(spelling_words()).lower())
    return path


@pytest.fixture
def sandbox() -> None:
    """Skip where the sandbox does not work."""
    if problem := find_problem():
        pytest.skip(problem)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Command:
    """Run scripts from command lines."""
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """System Chromium controlled by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"no browser is installed: {', '.join(names)}")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that one pytest-xdist worker makes and all read."""
    root = factory.getbasetemp()
    folder = (root.parent if workers > 1 else root) / name
    done = folder.with_suffix(".done")
    with hold_lock(folder.with_suffix(".lock"), name):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a failed worker
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def trained_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed rows and small finished runs (`training_runs.prepare`)."""
    return make_once(tmp_path_factory, "trained", prepare)


@pytest.fixture
def trained(trained_base: Path, base: Path) -> Path:
    """A base directory with the tokenizer, rows and last checkpoints of `prepare`."""
    earlier = shutil.ignore_patterns(*(f"step_{n:06d}" for n in range(STEPS)))
    return shutil.copytree(trained_base, base, ignore=earlier)


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

    def tune(base: Path) -> None:
        shutil.copytree(trained_base, base)
        for seed in (0, 1):
            python(base, "-m", "scripts.chat_sft", *TUNE, f"--seed={seed}", f"--model_tag=s{seed}")

    return make_once(tmp_path_factory, "tuned", tune)


@pytest.fixture
def tuned(tuned_base: Path, base: Path) -> Path:
    return shutil.copytree(tuned_base, base)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the runs of `trained`: with several threads, rounding may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dist() -> DistContext:
    """A single process on the CPU in float32."""
    return DistContext(0, 0, 1, torch.device("cpu"), torch.float32)


@pytest.fixture
def tiny_gpt() -> GPT:
    """A tiny model without zero-initialized matrices, so that every path affects the output."""
    return lively(build_model(TINY, torch.device("cpu"), torch.float32, seed=0))


def lively(model: GPT) -> GPT:
    """Add small random numbers to all weights, since some are initialized to zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def byte_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model, and without zeros, for a vocabulary of bytes and special tokens."""
    cfg = replace(TINY, **{"vocab_size": 265, "max_seq_len": 48, **changes})
    return lively(build_model(cfg, torch.device("cpu"), dtype, seed))


def decode(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of two rows (2, 16), computed in four parts with a KV cache."""
    cache, found = model.new_cache(2), []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 16)):
        view = cache.view([0, 1], last - first)
        found.append(model.logits(model.hidden(tokens[:, first:last], view)))
        cache.lengths = [last, last]
    return torch.cat(found, dim=1)


@pytest.fixture
def hub() -> Path:
    """Folder of real data from NANOCHAT_TEST_HUB."""
    folder = os.environ.get("NANOCHAT_TEST_HUB")
    if not folder:
        pytest.skip("NANOCHAT_TEST_HUB is not set")
    return Path(folder)
