"""
Training and generation on a null GPU: real devices, dtypes and memory, but no computation.

`NANOCHAT_TEST_NULL_GPU` is its source folder, with `build.sh` and `run.sh`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY
from tests.training_runs import python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OnGPU = Callable[..., str]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> OnGPU:
    """Function that runs a module on the null GPU, built for this environment; returns stdout."""
    sources = os.environ.get("NANOCHAT_TEST_NULL_GPU")
    if not sources or not shutil.which("gcc"):
        pytest.skip("NANOCHAT_TEST_NULL_GPU is not set, or gcc is missing")
    built = str(tmp_path_factory.mktemp("null_gpu"))

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("bash", f"{sources}/build.sh", sys.prefix, built)
    words = ("bash", f"{sources}/run.sh", built, sys.executable, "-m", "tests.on_null_gpu")
    return lambda *what: run(*words, *what)


@pytest.mark.parametrize(
    ("depth", "compiled", "fp8"), [(2, 0, 0), (12, 0, 0), (24, 0, 0), (24, 1, 0), (12, 1, 1)]
)
def test_run_fits_in_memory_and_waits_once_per_step(
    on_gpu: OnGPU, depth: int, compiled: int, fp8: int
):
    flags = f"--depth={depth} --compile={compiled} --fp8={fp8}"
    found = json.loads(on_gpu(*flags.split()).splitlines()[-1])
    assert found["peak"] < 80 * 2**30
    assert found["host_growth"] < 2**27  # weights are drawn on the device
    assert depth < 24 or found["device_rows"] == 16
    assert found["waits"] == 1  # for loss and gradient norm


def test_every_stage_runs_on_gpu(on_gpu: OnGPU, base: Path):
    python(base, "-m", "scripts.tok_train", "--dataset=embedded", "--vocab_size=1024")
    shape = "--depth=2 --max_seq_len=128 --num_iterations=6 --total_batch_size=4096".split()
    text = on_gpu("scripts.base_train", *shape, "--device_batch_size=8", "--eval_tokens=2048")
    assert "NVIDIA H100" in text and "bfloat16" in text and ", compiled" in text

    short = ("--num_iterations=4", "--eval_tokens=1024", "--compile=off")
    on_gpu("scripts.base_eval", "--max_per_task=4")
    on_gpu("scripts.mid_train", "--mixture=world_chat=60,world_choice=20", *short)
    on_gpu("scripts.chat_sft", "--mixture=world_chat=40,world_problems=20", *short)
    on_gpu(
        "scripts.chat_rl", "--num_iterations=2", "--examples_per_step=2", "--num_samples=2",
        "--max_new_tokens=8", "--eval_examples=2", "--eval_samples=2",
    )  # fmt: skip
    answers = ("--source=sft", "--max_problems=3", "--max_new_tokens=8")
    assert "World-Choice" in on_gpu("scripts.chat_eval", *answers)
    on_gpu("scripts.chat_cli", "--prompt=Hello", "--max_new_tokens=8")
