"""
Distributed runs: rendezvous, heartbeats, device, dtype and collectives.

    torchrun's environment -> init_distributed -> DistContext: rank, world_size, device, dtype, sum,
    gather

A single process has world size 1. A waiting rank checks the heartbeats of the others: it keeps
waiting for a rank that reports long work; if one hangs, the run ends with an error naming it.
"""

import datetime
import json
import os
import pickle
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore

from nanochat.common import HUNG, cpu_info, printable
from nanochat.config import require_positive, short
from nanochat.hardware import device_name, keep_freed_memory, peak_flops

# ---- Rendezvous: a separate store for each attempt -----------------------------------------------
# torchrun keeps one store for all attempts of a launch. A rank that finds the address of a
# dead rank in that store waits for the dead process (pytorch#135712; seen with torch 2.15 at the
# second restart). An attempt counter does not help: a node that joins later starts at zero.
# Instead, each rank sends a unique token and accepts only a reply to this token.


POLL_SECONDS = 0.02


def name_attempt(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """
    Agree on a unique name for this attempt. Returns it once all ranks have it.

    On timeout, rank 0 raises TimeoutError naming the missing ranks, and the others raise the
    store's timeout error.
    """
    token, timeout = uuid.uuid4().hex, datetime.timedelta(seconds=timeout_seconds)
    if rank:
        store.set(f"greeting/{rank}", token)
        store.wait([token], timeout)
        name = store.get(token).decode()
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/complete"], timeout)
        return name
    missing, deadline = list(range(1, world_size)), time.monotonic() + timeout_seconds
    while missing:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise TimeoutError(f"rank {ranks} of {world_size} did not join the process group")
        for each in missing:  # also replies to tokens of dead ranks
            if store.check([f"greeting/{each}"]):
                store.set(store.get(f"greeting/{each}").decode(), token)
        time.sleep(POLL_SECONDS)
        missing = [each for each in missing if not store.check([f"{token}/{each}"])]
    store.set(f"{token}/complete", "")
    return token


# ---- Heartbeats of the ranks ---------------------------------------------------------------------
# A thread on each rank sends a heartbeat every second. It reports whether the rank is waiting for
# others, doing long work (`working`), or neither. A waiting rank reads the heartbeats of the other
# ranks. It exits and lists their states in two cases: one of them reported neither waiting nor work
# for the whole timeout (or sent no heartbeat at all), or none of them reported work in that time.


BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # a rank without a heartbeat for this long counts as silent


class Activity(NamedTuple):
    """Current activity of a rank and its start time."""

    kind: Literal["waiting", "working", "unnamed"]
    what: str
    since: float


class Beat(NamedTuple):
    """
    Last heartbeat of a rank. Times are seconds since the common start, because clocks differ
    between machines.
    """

    at: float = 0.0
    named: float = 0.0
    """Last time the rank waited or reported work."""
    worked: float = 0.0
    """Last time the rank reported work."""
    text: str = "no heartbeat received"


class RankHeartbeat:
    """
    Sends the heartbeats of one rank and checks the others. All ranks create it at the same time.

    Use `doing` around waits for other ranks and around long work that they wait for. If a wait
    exceeds `timeout_seconds` without reported work, the process exits with status HUNG. Set
    `closed` to end the thread.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float):
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self.others = {r: Beat() for r in range(world_size) if r != rank}
        self.started, self.worked = time.monotonic(), 0.0
        self.activity = Activity("unnamed", "unreported work", self.started)
        self.closed = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    @contextmanager
    def doing(self, kind: Literal["waiting", "working"], what: str) -> Iterator[None]:
        """While inside, report that this rank waits for others or does work they wait for."""
        before, self.activity = self.activity, Activity(kind, what, time.monotonic())
        try:
            yield
        finally:
            self.activity = before._replace(since=time.monotonic())

    def run(self) -> None:
        """Thread loop: send heartbeats, and check the other ranks during long waits."""
        while not self.closed.is_set():
            try:
                self.beat()
            except Exception as error:  # the store is gone: the launcher or its host died
                lost = f"launcher unreachable: {type(error).__name__}"
                self.others = {r: beat._replace(text=lost) for r, beat in self.others.items()}
            self.check()
            began = time.monotonic()
            self.closed.wait(BEAT_SECONDS)
            suspended = time.monotonic() - began - BEAT_SECONDS  # this process itself was stopped
            if suspended > self.silent_seconds:
                self.activity = self.activity._replace(since=self.activity.since + suspended)

    def beat(self) -> None:
        """Send this rank's heartbeat; during a long wait, read the other ranks'."""
        (kind, what, since), now = self.activity, time.monotonic()
        doing = f"in {what}" if kind == "waiting" else what
        text = f"process {os.getpid()} on {socket.gethostname()}, {doing} for {now - since:.0f} s"
        at = now - self.started
        named = since - self.started if kind == "unnamed" else at
        self.worked = at if kind == "working" else self.worked
        self.store.set(f"beat/{self.rank}", json.dumps(Beat(at, named, self.worked, text)))
        if kind == "waiting" and now - since > self.silent_seconds:
            beats = self.store.multi_get([f"beat/{rank}" for rank in self.others])
            self.others = dict(zip(self.others, (Beat(*json.loads(b)) for b in beats), strict=True))

    def check(self) -> None:
        """
        Exit if this rank waited for the whole timeout and, in that time, either no rank reported
        work, or some rank never reported that it was waiting or working (perhaps because it sent no
        heartbeat).
        """
        (kind, what, since), now = self.activity, time.monotonic()
        oldest, beats = now - self.started - self.timeout_seconds, self.others.values()
        stuck = min(b.named for b in beats) < oldest or max(b.worked for b in beats) < oldest
        if kind != "waiting" or now - since <= self.timeout_seconds or not stuck:
            return
        states = []
        for rank, beat in sorted(self.others.items(), key=lambda other: other[1].at):
            silence = now - self.started - beat.at
            quiet = f"no heartbeat for {silence:.0f} s"
            state = quiet if silence > self.silent_seconds else "alive"
            states.append(f"rank {rank}: {state} ({beat.text})")
        message = (
            f"rank {self.rank} has waited {now - since:.0f} s in {what}, longer than "
            f"--collective_timeout_minutes allows: {'; '.join(states)}. "
            "Exiting; restart with --resume=auto to resume from the last checkpoint"
        )
        print(printable(message), flush=True)
        os._exit(HUNG)


# ---- Ranks, devices and dtypes -------------------------------------------------------------------


T = TypeVar("T")
GROUP_TIMEOUT = datetime.timedelta(days=7)  # for torch collectives; hangs are ended by heartbeats


@dataclass(frozen=True)
class DistConfig:
    device_type: Literal["cuda", "cpu", "mps"] | None = None
    """Device to compute on. Default: cuda if available, else mps, else cpu."""
    dtype: Literal["bfloat16", "float16", "float32", "fp8"] | None = short("d", None)
    """Dtype of activations and matmuls; master weights are float32. fp8: bfloat16 with fp8 matmuls
    in training (Ada, Hopper and later GPUs). float16: for GPUs before Ampere; training scales the
    loss. Default: bfloat16 if the hardware supports it natively (including CPUs with AVX512-BF16 or
    AMX), else float32; in base training from depth 20 on Hopper: fp8."""
    deterministic: bool = False
    """Use only deterministic algorithms, for bit-identical runs; slower on a GPU."""
    collective_timeout_minutes: float = 10.0
    """Exit after waiting this many minutes for a rank that sends no heartbeat or reports no work;
    a rank that reports its work has no limit."""

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
    heartbeat: RankHeartbeat | None = None
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
        with self.waiting("all-reduce"):
            return self.sum_on_device(*values).tolist()

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
            with self.waiting("all-reduce"):
                dist.all_reduce(total)
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
        with self.waiting("broadcast"):
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self.waiting("all-gather"):
            dist.all_gather_object(box, value)
        return box

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Context manager for waiting on other ranks; the run exits if it takes too long."""
        return self.heartbeat.doing("waiting", what) if self.heartbeat else nullcontext()

    def working(self, what: str) -> AbstractContextManager[None]:
        """Context manager for long work: other ranks wait without limit while heartbeats arrive."""
        return self.heartbeat.doing("working", what) if self.heartbeat else nullcontext()

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; every rank returns its result or raises its error."""
        result, error = self.broadcast(self.attempt(what, work) if self.is_main else None)
        if error:
            raise error
        return result

    def on_node(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of each node; all ranks of the node return its result. An
        error on any node is raised on all ranks."""
        mine = self.attempt(what, work) if self.local_rank == 0 else (None, None)
        every = self.gather(mine)
        for _, error in (mine, *every):  # own error first: it has the traceback
            if error:
                raise error
        return every[self.rank - self.local_rank][0]

    def attempt(self, what: str, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """Run `work` while heartbeats reach the other ranks; return its result and its error."""
        with self.working(what):
            try:
                return work(), None
            except Exception as error:
                if self.world_size == 1:
                    raise
                return None, as_picklable(error)

    def synchronize(self) -> None:
        """Wait until the device has finished queued work, for correct timings."""
        if self.device.type == "cuda":
            with self.waiting("device synchronization"):  # includes collectives
                torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Leave the process group after a barrier, so no rank exits while another works."""
        if dist.is_initialized():
            with self.waiting("barrier"):
                dist.barrier()
            if self.heartbeat:
                self.heartbeat.closed.set()
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
    heartbeat = None
    if world_size > 1 and not dist.is_initialized():
        heartbeat = join(device, rank, world_size, 60 * cfg.collective_timeout_minutes)
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
        rank, local_rank, world_size, device, dtype, launch, restarts, local_size, heartbeat, fp8
    )


def join(device: torch.device, rank: int, world_size: int, timeout_seconds: float) -> RankHeartbeat:
    """Join the process group of this attempt and start the heartbeats of this rank."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=timeout_seconds)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = rank == 0 and not hosted
    store = dist.TCPStore(address, port, is_master=master, timeout=timeout)  # pyright: ignore
    attempt = name_attempt(store, rank, world_size, timeout_seconds)
    beats = dist.PrefixStore(f"{attempt}/beats", store.clone())  # pyright: ignore
    heartbeat = RankHeartbeat(beats, rank, world_size, timeout_seconds)
    with heartbeat.doing("waiting", "process group initialization"):  # NCCL opens its connections
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(attempt, store),  # pyright: ignore
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        dist.barrier()
    if device.type == "cuda":  # Python's handler would not run during NCCL's waits
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return heartbeat


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if the device has native bfloat16 matmuls, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        flags = cpu_info("flags").split() if device.type == "cpu" else []
        native = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if native else torch.float32
