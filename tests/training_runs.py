"""Training runs as subprocesses, alone or under torchrun, on a shared base directory."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from nanochat.common import REPOSITORY
from nanochat.logger import read_metrics

STEPS = 20
SMALL = (
    "--depth=2 --max_seq_len=32 --total_batch_size=512 --eval_tokens=1024 --dtype=float32 "
    f"--num_iterations={STEPS} --save_every=4 --keep=9"
).split()
TRAIN = ["-m", "scripts.base_train"]


def torchrun(processes: int, *flags: str) -> list[str]:
    """Arguments before `-m module`; none for one process."""
    if processes == 1:
        return []
    alone = ["--standalone", f"--nproc_per_node={processes}"]
    return ["-m", "torch.distributed.run", *alone, *flags]


# for torchrun on several nodes, as in the README and dev/launch/slurm.sh
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def node(port: int, number: int, nodes: str = "2", *flags: str) -> list[str]:
    """torchrun arguments for one of several single-process nodes, with rendezvous on loopback."""
    rendezvous = (
        f"is_host={int(number == 0)},join_timeout=120,last_call_timeout=3,keep_alive_interval=1"
    )
    return [
        "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc_per_node=1",
        "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test",
        f"--rdzv_conf={rendezvous}", "--local_addr=127.0.0.1", *flags,
    ]  # fmt: skip


def environment(base: Path) -> dict[str, str]:
    """Environment with one thread per process, so that results do not depend on the load."""
    return {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}


def python(base: Path, *words: str) -> str:
    """Run Python, which must succeed; return its standard output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY, env=environment(base), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def begin(base: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """Start a process in its own group; stdout and stderr share one pipe."""
    return subprocess.Popen(
        [sys.executable, *words], cwd=REPOSITORY, env={**environment(base), **variables},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def read_until_step(process: subprocess.Popen[str], step: int) -> str:
    """The output of a training run until it has logged `step`."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step:
            return text
    raise AssertionError(f"exited before step {step}:\n{text[-3000:]}")


def free_port() -> int:
    """An unused port on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def folder(base: Path, tag: str) -> Path:
    return base / "base_checkpoints" / tag


def losses(base: Path, tag: str) -> list[float]:
    return curve(folder(base, tag), "loss")


def curve(run: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(run / "metrics.jsonl") if name in entry]


def weights(base: Path, tag: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder(base, tag) / f"step_{step:06d}" / "model.safetensors")


def same_weights(base: Path, one: str, other: str, step: int = STEPS) -> bool:
    a, b = weights(base, one, step), weights(base, other, step)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prepare(base: Path) -> None:
    """Pack rows of the embedded world and train on one process (tag `one`) and two (`two`)."""
    text = ["--dataset=embedded", "--num_shards=1"]
    python(base, "-m", "scripts.tok_train", *text, "--vocab_size=512")
    python(base, "-m", "scripts.data", *text, "--max_seq_len=32")
    train = [*TRAIN, *SMALL, "--device_type=cpu"]
    python(base, *train, "--model_tag=one")
    python(base, *torchrun(2), *train, "--model_tag=two")
