"""
Ranks, devices and dtypes of a run.

    torchrun's environment -> init_distributed -> DistContext: rank, world_size, device, dtype, sum,
    gather

A single process has world size 1. Two limits end a run that hangs: sums, which all ranks reach at
about the same time, wait for `collective_timeout_minutes`; ranks that wait for work of another one
(a download, an evaluation, a save), in `broadcast`, `gather`, `on_main` and `on_node`, wait for a
day. The error names the ranks that did not answer.
"""

import datetime
import os
import pickle
import signal
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from nanochat.common import HUNG, UsageError, cpu_info, printable
from nanochat.config import require_positive, short
from nanochat.hardware import device_name, keep_freed_memory, peak_flops

T = TypeVar("T")
LONG_WORK = datetime.timedelta(days=1)
ANSWER_SECONDS = 5.0  # ranks that are alive notice a failed collective within this time


class RankHung(UsageError):
    """A rank did not answer in time."""

    status = HUNG


@dataclass(frozen=True)
class DistConfig:
    device_type: Literal["cuda", "cpu", "mps"] | None = None
    """Device to compute on. Default: cuda if available, else mps, else cpu."""
    dtype: Annotated[Literal["bfloat16", "float16", "float32", "fp8"] | None, short("d")] = None
    """Dtype of activations and matmuls; master weights are float32. fp8: bfloat16 with fp8 matmuls
    in training (Ada, Hopper and later GPUs). float16: for GPUs before Ampere; training scales the
    loss. Default: bfloat16 if the hardware supports it natively (including CPUs with AVX512-BF16 or
    AMX), else float32; in base training from depth 20 on Hopper: fp8."""
    deterministic: bool = False
    """Use only deterministic algorithms, for bit-identical runs; slower on a GPU."""
    collective_timeout_minutes: float = 10.0
    """Exit after waiting this many minutes for other ranks in a training step or at the start."""

    def __post_init__(self) -> None:
        require_positive(self, "collective_timeout_minutes")


@dataclass(frozen=True)
class DistContext:
    """One of `world_size` processes. `device` is this rank's; `dtype` is the compute dtype."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    launch: str = ""
    """Id of the torchrun launch; the same after torchrun restarts the ranks."""
    restarts: int = 0
    """Number of restarts by torchrun."""
    local_size: int = 1
    """Number of processes on this host."""
    store: Any = None
    """Key-value store of the process group."""
    long_group: Any = None
    """Process group of objects, whose collectives may wait for long work."""
    fp8: bool = False
    """Whether training runs the matmuls inside the layers in fp8."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints, logs and writes files."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name of the GPU as reported by its driver; otherwise `cpu` or `mps`."""
        return device_name(self.device)

    def utilization(self, flops_per_second: float) -> float | None:
        """Model FLOPs utilization (MFU) as a fraction of the peak; None if the peak is unknown."""
        peak = peak_flops(self.device_name)
        return flops_per_second / (peak * self.world_size) if peak else None

    def print0(self, *words: Any) -> None:
        """Print on the main rank only."""
        if self.is_main:
            print(*map(printable, words), flush=True)

    def sum(self, *values: float) -> list[float]:
        """Sum each value over ranks, in float64 (MPS: float32)."""
        if self.world_size == 1:
            return [float(v) for v in values]
        return self.wait(lambda: self.sum_on_device(*values).tolist())

    def sum_on_device(self, *values: Tensor | float) -> Tensor:
        """
        Sum each value over ranks, in float64 (MPS: float32). Returns (len(values),) on the device,
        without waiting for it.
        """
        kind: Any = {"device": self.device, "dtype": self.widest_dtype}
        scalars = [
            v.to(**kind) if isinstance(v, Tensor) else torch.full((), v, **kind) for v in values
        ]
        total = torch.stack(scalars)
        if self.world_size > 1:
            self.wait(lambda: dist.all_reduce(total))
        return total

    @property
    def widest_dtype(self) -> torch.dtype:
        """float64, or float32 on devices without it."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: Any) -> Any:
        """Return the main rank's value on every rank. It must be picklable."""
        if self.world_size == 1:
            return value
        box = [value]
        self.wait(lambda: dist.broadcast_object_list(box, src=0, group=self.long_group))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        self.wait(lambda: dist.all_gather_object(box, value, group=self.long_group))
        return box

    def wait(self, work: Callable[[], T]) -> T:
        """
        Run a collective operation or a wait for one. If it fails, raises RankHung, naming the ranks
        that do not answer any more; with no such rank, the error itself.
        """
        try:
            return work()
        except RankHung:
            raise
        except RuntimeError as error:
            if self.store is None or self.world_size == 1:
                raise
            missing = self.ranks_without_answer()
            if not missing:
                raise
            raise RankHung(
                f"rank {', '.join(map(str, missing))} of {self.world_size} did not answer "
                f"({printable(error).splitlines()[0]})",
                "check that process and its device; restart with --resume=auto to resume from the "
                "last checkpoint",
            ) from error

    def ranks_without_answer(self) -> list[int]:
        """Ranks that did not notice, within ANSWER_SECONDS, that a collective operation failed."""
        self.store.set(f"failed/{self.rank}", "")
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + ANSWER_SECONDS
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not self.store.check([f"failed/{rank}"])]
            time.sleep(0.1)
        return others

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; every rank returns its result or raises its error."""
        result, error = self.broadcast(self.attempt(work) if self.is_main else None)
        if error:
            raise error
        return result

    def on_node(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of each node; all ranks of the node return its result. An
        error on any node is raised on all ranks."""
        mine = self.attempt(work) if self.local_rank == 0 else (None, None)
        every = self.gather(mine)
        for _, error in (mine, *every):  # own error first: it has the traceback
            if error:
                raise error
        return every[self.rank - self.local_rank][0]

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Run `work`; return its result and its error. One process raises the error."""
        try:
            return work(), None
        except Exception as error:
            if self.world_size == 1:
                raise
            return None, as_picklable(error)

    def synchronize(self) -> None:
        """Wait until the device has finished queued work, for correct timings."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Leave the process group after a barrier, so no rank exits while another works."""
        if dist.is_initialized():
            self.gather(None)
            dist.destroy_process_group()


def as_picklable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with the same message."""
    with suppress(Exception):  # pickling may raise anything
        copy = pickle.loads(pickle.dumps(error))
        if (type(copy), str(copy)) == (type(error), str(error)):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def visible_gpus() -> list[str]:
    """GPUs of this process, as named in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")][:count]


def init_distributed(
    cfg: DistConfig = DistConfig(), seed: int = 0, steady: bool = True
) -> DistContext:
    """
    Join the process group (under torchrun), pick device and dtype, and seed torch's generator.

    steady: the workload repeats, as in training and evaluation; on a CPU, the process then keeps
    freed memory for reuse.

    Raises ValueError if the requested device is not available.
    """
    env = os.environ
    rank, local_rank = int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0))
    world_size = int(env.get("WORLD_SIZE", 1))
    mps = torch.backends.mps.is_available()
    present = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    kind = cfg.device_type or next(kind for kind in present if present[kind])
    if not present[kind]:
        raise ValueError(
            f"device_type {kind} is not available to PyTorch; check the driver and the PyTorch "
            "build, or use --device_type=cpu"
        )
    if kind == "cuda" and local_rank >= (found := torch.cuda.device_count()):
        raise ValueError(f"--nproc_per_node is above the {found} GPUs that PyTorch finds; lower it")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # allow TF32 in the few fp32 matmuls
    if kind == "cpu" and steady:
        keep_freed_memory()
    store = long_group = None
    if world_size > 1 and not dist.is_initialized():
        minutes = datetime.timedelta(minutes=cfg.collective_timeout_minutes)
        store, long_group = join(device, rank, world_size, minutes)
    if cfg.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    fp8 = cfg.dtype == "fp8"  # preflight enables it
    name = "bfloat16" if fp8 else cfg.dtype
    dtype = getattr(torch, name) if name else default_dtype(device)
    launch = env.get("TORCHELASTIC_RUN_ID", "")
    if launch == "none":  # no run ID: use host, torchrun's process ID and its random log folder
        logs = env.get("TORCHELASTIC_ERROR_FILE", "").split("/attempt_")[0]
        launch = f"{socket.gethostname()}-{os.getppid()}-{logs}"
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    local_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    return DistContext(
        *(rank, local_rank, world_size, device, dtype, launch, restarts, local_size),
        *(store, long_group, fp8),
    )


def name_attempt(store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """
    Agree on a unique name for this attempt. Raises RankHung, on rank 0 naming the missing ranks, if
    not all ranks join within `timeout`.

    torchrun keeps one store for all attempts of a launch, and a rank that finds the address of a
    dead rank there waits for it (pytorch#135712); attempt counters differ, because a node that
    joins late starts at zero. So each rank sends a unique token and accepts only a reply to it.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"greeting/{rank}", token)
        try:
            store.wait([token], timeout)
        except RuntimeError as error:
            raise RankHung("rank 0 did not join", "start all processes") from error
        name = store.get(token).decode()
        store.set(f"{name}/{rank}", "")
        return name
    missing = list(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise RankHung(f"rank {ranks} of {world_size} did not join", "start all processes")
        for each in missing:  # also replies to tokens of dead ranks
            if store.check([f"greeting/{each}"]):
                store.set(store.get(f"greeting/{each}").decode(), token)
        time.sleep(0.02)
        missing = [each for each in missing if not store.check([f"{token}/{each}"])]
    return token


def join(
    device: torch.device, rank: int, world_size: int, timeout: datetime.timedelta
) -> tuple[Any, Any]:
    """
    Join the process group. Returns its store and the group for objects. Raises RankHung, naming
    the ranks that are missing, if not all join within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts the store
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options: Any = {"is_master": rank == 0, "wait_for_workers": False, "timeout": timeout}
        store = dist.TCPStore(address, port, **options)  # pyright: ignore
    attempt = name_attempt(store, rank, world_size, timeout)
    store = dist.PrefixStore(attempt, store)  # pyright: ignore
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    if on_gpu:  # Python's handler would not run during NCCL's waits
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return store, dist.new_group(timeout=LONG_WORK, backend="gloo")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if the device has native bfloat16 matmuls, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        flags = cpu_info("flags").split() if device.type == "cpu" else []
        native = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if native else torch.float32
