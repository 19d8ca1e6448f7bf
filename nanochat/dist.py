"""
One process of a run: its rank, device and dtype, sums over ranks, and what the device can do.

    flags, environment of torchrun -> init_dist -> DistContext

Collectives on tensors time out after `collective_timeout_minutes`; those on objects, `broadcast`,
`gather` and `on_main`, wait a day for long work of one rank.
"""

import ctypes
import datetime
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import psutil
import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from nanochat.common import RANK_MISSING, UsageError, printable
from nanochat.config import require_positive, short

T = TypeVar("T")
LONG_WORK = datetime.timedelta(days=1)


class RankMissing(UsageError):
    """A rank did not join in time."""

    status = RANK_MISSING


@dataclass(frozen=True)
class DistConfig:
    NOT_IN_RECIPE: ClassVar[str] = "device_type deterministic collective_timeout_minutes"

    device_type: Literal["cuda", "cpu", "mps"] | None = None
    """Device to compute on. Default: cuda if available, else mps, else cpu."""
    dtype: Annotated[Literal["bfloat16", "float16", "float32", "fp8"] | None, short("d")] = None
    """Dtype of activations and matmuls; master weights are float32. fp8: bfloat16 with fp8 matmuls
    in training (Ada, Hopper and later GPUs). float16: for GPUs before Ampere; training scales the
    loss. Default: that of the checkpoint, if it was trained on this type of device; otherwise on a
    GPU bfloat16 if it is native, on a CPU bfloat16 if it is measured to be faster, else float32;
    scripts.base_train from depth 20 on Hopper: fp8."""
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
    fp8: bool = False
    """Whether training runs the matmuls of the layers and the LM head in fp8."""
    objects: Any = None
    """Process group of collectives on objects."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints, logs and writes files."""
        return self.rank == 0

    @property
    def compute(self) -> dict[str, Any]:
        """Type of the device and compute dtype, as checkpoints store them for `keep_dtype`."""
        name = str(self.dtype).removeprefix("torch.")
        return {"device_type": self.device.type, "dtype": name, "fp8": self.fp8}

    def keep_dtype(self, cfg: DistConfig, compute: Mapping[str, Any] | None) -> "DistContext":
        """
        Return these ranks with the dtype that a checkpoint was trained in, so that results do not
        depend on which machine of a kind goes on with it. compute: of the checkpoint, None if
        unknown. Without effect if --dtype is set or the type of the device differs.
        """
        if cfg.dtype or not compute or compute["device_type"] != self.device.type:
            return self
        own, kept = self.compute["dtype"], compute["dtype"]
        if own != kept:
            self.print0(f"dtype     {kept}, as before; --dtype={own} is the default of this device")
        return replace(self, dtype=getattr(torch, kept))

    @property
    def device_name(self) -> str:
        """Name of the GPU as reported by its driver; otherwise `cpu` or `mps`."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_gpu else self.device.type

    @property
    def num_threads(self) -> int:
        """Number of CPU threads that PyTorch uses in this process."""
        return torch.get_num_threads()

    def describe_dtype(self) -> str:
        """The compute dtype, for a summary."""
        return str(self.dtype).removeprefix("torch.") + (" with fp8 matmuls" if self.fp8 else "")

    def print0(self, *words: Any) -> None:
        """Print on the main rank only."""
        if self.is_main:
            print(*map(printable, words), flush=True)

    # ---- collectives -----------------------------------------------------------------------------

    def sum(self, *values: float) -> list[float]:
        """Sum each value over ranks, in float64 (MPS: float32)."""
        if self.world_size == 1:
            return [float(v) for v in values]
        return self.sum_on_device(*values).tolist()

    def sum_on_device(self, *values: Tensor | float) -> Tensor:
        """
        Sum each value over ranks, in float64 (MPS: float32). Returns (len(values),) on the device,
        without waiting for it.
        """
        widest = torch.float32 if self.device.type == "mps" else torch.float64
        kind: Any = {"device": self.device, "dtype": widest}
        total = torch.stack(  # as_tensor would wait for the device
            [v.to(**kind) if isinstance(v, Tensor) else torch.full((), v, **kind) for v in values]
        )
        if self.world_size > 1:
            distributed.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: Any) -> Any:
        """Return the main rank's value on every rank. It must be picklable."""
        if self.world_size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self.objects)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        box: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            distributed.all_gather_object(box, value, group=self.objects)
        return box

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; every rank returns its result or raises its error."""
        result, error = self.broadcast(self.attempt(work) if self.is_main else None)
        if error:
            raise error
        return result

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Run `work`; return its result and its error. With one process, raise the error."""
        try:
            return work(), None
        except Exception as error:
            if self.world_size == 1:
                raise
            return None, as_picklable(error)

    def synchronize(self) -> None:
        """Wait until the device has finished queued work, for correct timings."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        """Leave the process group after a barrier, so no rank exits while another works."""
        if distributed.is_initialized():
            self.gather(None)
            distributed.destroy_process_group()

    # ---- limits of the device --------------------------------------------------------------------

    def utilization(self, flops_per_second: float) -> float | None:
        """Model FLOPs utilization (MFU) as a fraction of the peak; None if the peak is unknown."""
        peak = peak_flops(self.device_name)
        return flops_per_second / (peak * self.world_size) if peak else None

    def peak_memory_bytes(self) -> int:
        """Peak memory in bytes: of this process's tensors on a GPU, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if sys.platform == "linux":  # getrusage would include memory used before the exec
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return int(found[1]) * 1024 if found else 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def as_picklable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a RuntimeError with the same message."""
    with suppress(Exception):  # pickling may raise anything
        copy = pickle.loads(pickle.dumps(error))
        if (type(copy), str(copy)) == (type(error), str(error)):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


# ---- Joining -------------------------------------------------------------------------------------


def init_dist(cfg: DistConfig = DistConfig(), seed: int = 0, steady: bool = True) -> DistContext:
    """
    Join the process group (under torchrun), pick device and dtype, and seed torch's generator.

    steady: the workload repeats, as in training and evaluation; on a CPU, the process then keeps
    freed memory for reuse.

    Raises ValueError if the requested device is not available.
    """
    env = os.environ
    rank, local_rank = (int(env.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    world_size = int(env.get("WORLD_SIZE", 1))
    mps = torch.backends.mps.is_available()
    present = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    kind = cfg.device_type or next(kind for kind in present if present[kind])
    if not present[kind]:
        raise ValueError(
            f"device_type {kind} is not available to PyTorch; check the driver and the PyTorch "
            "build, or use --device_type=cpu"
        )
    device = torch.device(kind)
    if kind == "cuda":
        if local_rank >= (found := torch.cuda.device_count()):
            raise ValueError(f"--nproc_per_node is above the {found} GPUs of PyTorch; lower it")
        device = torch.device(kind, local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # allow TF32 in the few fp32 matmuls
    if kind == "cpu" and steady:
        keep_freed_memory()
    objects = None
    if world_size > 1:
        minutes = datetime.timedelta(minutes=cfg.collective_timeout_minutes)
        objects = join(device, rank, world_size, minutes)
    if cfg.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed % 2**63)
    fp8 = cfg.dtype == "fp8"
    name = "bfloat16" if fp8 else cfg.dtype
    dtype = getattr(torch, name) if name else default_dtype(device)
    dist = DistContext(rank, local_rank, world_size, device, dtype, fp8, objects)
    return replace(dist, dtype=dist.broadcast(dtype))


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if native on a GPU, or if its matmuls are faster on this CPU; otherwise float32."""
    half, full = torch.bfloat16, torch.float32
    if device.type == "cuda":
        return half if torch.cuda.get_device_capability(device) >= (8, 0) else full
    faster = device.type == "cpu" and matmul_rate(half) >= BFLOAT16_GAIN * matmul_rate(full)
    return half if faster else full


def matmul_rate(dtype: torch.dtype) -> float:
    """
    FLOP/s of one CPU thread: the best of four products of 256 x 256 matrices. Counts the time of
    the thread, which other processes do not lengthen. Takes about 4 ms, or one slow product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, times = torch.ones(256, 256, dtype=dtype), [time.thread_time()]
    while len(times) < 5 and times[-1] < times[0] + 0.02:  # the first one prepares the kernel
        torch.mm(x, x)
        times.append(time.thread_time())
    torch.set_num_threads(threads)
    return 2 * 256**3 / min(b - a for a, b in pairwise(times))


def join(device: torch.device, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """
    Join the process group. Returns the group for objects. Raises RankMissing, naming the ranks, if
    not all join within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun hosts the store
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    else:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        options: Any = {"is_master": rank == 0, "wait_for_workers": False, "timeout": timeout}
        store = distributed.TCPStore(address, port, **options)  # pyright: ignore
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        # On one node, torchrun keeps the store, with addresses of dead ranks, when it restarts them
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(attempt, store)  # pyright: ignore
    store.set(f"joined/{rank}", "")
    missing, deadline = list(range(world_size)), time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < deadline:
        missing = [each for each in missing if not store.check([f"joined/{each}"])]
        time.sleep(0.02)
    if missing:
        names = ", ".join(map(str, missing))
        raise RankMissing(f"rank {names} of {world_size} did not join", "start all processes")
    on_gpu = device.type == "cuda"
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    if on_gpu:  # Python's handler would not run during NCCL's waits
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return distributed.new_group(timeout=LONG_WORK, backend="gloo")


# ---- The device ----------------------------------------------------------------------------------

PEAK_FLOPS = {  # pattern of names -> dense bf16 FLOP/s of the data sheet, most specific first
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,  # GH200 too
    "GB[23]00": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100[DX]?": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# From which rate of bfloat16 matmuls, relative to float32, a CPU trains in bfloat16. No flag of the
# CPU tells: with avx512_bf16, an EPYC (Zen 4) has 2 to 5, a Xeon without AMX 0.5 (2026-11)
BFLOAT16_GAIN = 1.2
COMPILER_ROOM = 64 << 20  # bytes for what torch.compile writes
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of a device by name; None if unknown, as for CPUs."""
    other = r"(?![\dA-Z]| Ti| Laptop)"  # another device whose name begins alike
    known = PEAK_FLOPS.items()
    return next((peak for part, peak in known if re.search(part + other, name)), None)


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of the generation of H100 and H200."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """
    Free and total memory in bytes, of a GPU or else of the host. Memory that PyTorch's allocator
    has cached is free.
    """
    if device.type != "cuda":
        host = psutil.virtual_memory()
        return host.available, host.total
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    return free + cached, total


def compiler_problem() -> UsageError | None:
    """
    Why torch.compile cannot work here, with the fix; None if it can. It needs a C++ compiler with
    Python's headers, and folders with room from which libraries can be loaded.
    """
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not (any(map(shutil.which, ("g++", "c++", "clang++"))) and headers.exists()):
        why, fix = "a C++ compiler and Python's headers", "apt-get install g++ python3-dev"
        return UsageError(f"torch.compile needs {why}", f"{fix}, or use --compile=off")
    temporary = os.environ.get("TMPDIR") or "/tmp"  # of the compiler; Python's would not be full
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary
    why = folder_problem(temporary) or folder_problem(cache, loads=True)
    fix = "set TORCHINDUCTOR_CACHE_DIR and TMPDIR to other folders, or use --compile=off"
    return UsageError(f"torch.compile cannot work: {why}", fix) if why else None


def folder_problem(name: str, loads: bool = False) -> str:
    """Why torch.compile cannot use a folder, to load libraries from it if `loads`; "" if it can."""
    folder = Path(name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    if disk.f_bavail * disk.f_frsize < COMPILER_ROOM:
        return f"{folder} is full"
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written"
    noexec = loads and disk.f_flag & getattr(os, "ST_NOEXEC", 0)
    return f"no library can be loaded from {folder} (noexec)" if noexec else ""


def keep_freed_memory() -> None:
    """
    Keep freed memory in this process for later allocations (glibc only).

    By default, glibc returns large blocks to the system, and every training step faults all its
    pages in again: 48,000 faults per step at depth 4, a tenth of the time (measured, dev/LOG.md).
    Use it for repeated, equal steps, where peak memory grows by up to 5%. In a server, which
    allocates blocks of all sizes, it grows by two thirds.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # no mmapped blocks: they would be unmapped when freed
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never trim
        libc.mallopt(M_TOP_PAD, 1 << 26)
