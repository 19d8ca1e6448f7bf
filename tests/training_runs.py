"""Training runs as subprocesses, alone or under torchrun, and the files that runs write."""

import atexit
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from nanochat.common import REPOSITORY
from nanochat.records import read_metrics
from tests.zygote import ForkedProcess, fork

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


def node(port: int, number: int) -> list[str]:
    """torchrun arguments for one of two single-process nodes, with rendezvous on loopback."""
    rendezvous = (
        f"is_host={int(number == 0)},join_timeout=120,last_call_timeout=3,keep_alive_interval=1"
    )
    return [
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test",
        f"--rdzv_conf={rendezvous}", "--local_addr=127.0.0.1",
    ]  # fmt: skip


def environment(base: Path) -> dict[str, str]:
    """Environment with one thread per process, so that results do not depend on the load."""
    return {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}


def python(base: Path, *words: str) -> str:
    """Run Python, which must succeed; return its output."""
    process = begin(base, *words)
    text = rest_of(process)
    assert process.returncode == 0, text[-6000:]
    return text


def place(rank: int | str, port: int, **more: str) -> dict[str, str]:
    """torchrun's variables for one of two ranks that are started without it."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return {**where, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}


def begin_ranks(base: Path, *words: str, world_size: int = 2) -> list[ForkedProcess]:
    """Start ranks on one machine, without torchrun."""
    port, size = free_port(), str(world_size)
    where = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [begin(base, *words, **place(rank, port, **where)) for rank in range(world_size)]


def all_ranks(base: Path, *words: str, world_size: int = 2) -> str:
    """Output of rank 0; all ranks must succeed."""
    ranks = begin_ranks(base, *words, world_size=world_size)
    texts = [rest_of(rank) for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(texts)[-6000:]
    return texts[0]


def begin(base: Path, *words: str, **variables: str) -> ForkedProcess:
    """Start a process in its own group; stdout and stderr share one pipe."""
    process = fork(words, {**environment(base), **variables})
    atexit.register(end_group, process)  # also if the test fails
    return process


def begin_anew(base: Path, *words: str) -> subprocess.Popen[str]:
    """As `begin`, with a new interpreter, which imports torch."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=REPOSITORY, env=environment(base), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    atexit.register(end_group, process)
    return process


Process = ForkedProcess | subprocess.Popen[str]


def end_group(process: Process) -> None:
    """Kill a process of `begin`, with its children, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def read_until_step(process: Process, step: int) -> str:
    """The output of a training run until it has logged `step`."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step:
            return text
    raise AssertionError(f"exited before step {step}:\n{text[-3000:]}")


def rest_of(process: Process) -> str:
    """The output of a process until it exits."""
    return process.communicate(timeout=240)[0]


def workers(process: Process) -> list[psutil.Process]:
    """The ranks that torchrun started, in order."""
    ranks = {}
    for child in psutil.Process(process.pid).children():
        if "RANK" in (env := child.environ()):
            ranks[int(env["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


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


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run.glob("step_*"))


def copy_code(copy: Path, *names: str) -> None:
    """Copy files and folders of the repository, which may be read-only, into a folder."""
    for name in names:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, copy / name, dirs_exist_ok=True)
        else:
            shutil.copy(REPOSITORY / name, copy / name)
        for path in (copy / name, *(copy / name).rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def copy_until(step: int, run: Path, copy: Path) -> None:
    """Copy a run as if it had been killed right after this step was saved."""

    def later(_: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith("step_") and int(name[5:]) > step]

    shutil.copytree(run, copy, ignore=later)


def tensors(run: Path, step: int = STEPS, file: str = "model") -> dict[str, torch.Tensor]:
    """Saved tensors of a run; file: model or optim."""
    return load_file(run / f"step_{step:06d}" / f"{file}.safetensors")


def weights(base: Path, tag: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    return tensors(folder(base, tag), step)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def gradient(run: Path) -> torch.Tensor:
    """
    Gradient of the first step of a run, each group up to a factor: the optimizer's first moment.
    """
    moments = tensors(run, 1, "optim")
    return torch.cat([moments[name].flatten() for name in sorted(moments) if "first" in name])


def prepare(base: Path) -> None:
    """Pack rows of the embedded world and train on one process (tag `one`) and two (`two`)."""
    text = ["--dataset=embedded", "--num_shards=1"]
    python(base, "-m", "scripts.tok_train", *text, "--vocab_size=512")
    python(base, "-m", "scripts.data", *text, "--max_seq_len=32", "--workers=1")
    train = [*TRAIN, *SMALL, "--device_type=cpu"]
    python(base, *train, "--model_tag=one")
    all_ranks(base, *train, "--model_tag=two")
