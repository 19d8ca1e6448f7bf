"""
Processes of a run: rendezvous, heartbeats, device, dtype and collectives.

    torchrun's environment -> init_distributed -> DistContext: rank, world_size, device, dtype, sum,
    gather

A single process is a world of one. A rank that waits for others reads their heartbeats: one that
hangs ends the run with a message that names it, one that does long work is waited for.
"""

import datetime
import json
import os
import pickle
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
from torch.distributed import Store  # pyright: ignore

from nanochat.common import HUNG, cpu_info, printable
from nanochat.config import short
from nanochat.hardware import device_name, keep_freed_memory

# ---- Rendezvous: a store for this attempt alone --------------------------------------------------
# torchrun keeps one store for all attempts of a launch, still with the addresses of dead ranks; a
# rank that reads one of those waits for a dead process (pytorch#135712; seen with torch 2.15 at the
# second restart). Counting attempts does not help: a node that joins later counts from zero. So
# each rank greets with a unique word, and trusts only an answer that repeats it.


POLL_SECONDS = 0.02


def name_attempt(store: Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """
    A name for this attempt, new and the same on every rank; returns when all ranks have it.

    Raises, on rank 0, TimeoutError naming the ranks that did not come; on others, what the store
    raises when nobody answers in time.
    """
    word, patience = uuid.uuid4().hex, datetime.timedelta(seconds=timeout_seconds)
    if rank:
        store.set(f"greeting/{rank}", word)
        store.wait([word], patience)
        name = store.get(word).decode()
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/complete"], patience)
        return name
    missing, deadline = list(range(1, world_size)), time.monotonic() + timeout_seconds
    while missing:
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise TimeoutError(f"rank {ranks} of {world_size} did not join the process group")
        for each in missing:  # answers the words of dead ranks too
            if store.check([f"greeting/{each}"]):
                store.set(store.get(f"greeting/{each}").decode(), word)
        time.sleep(POLL_SECONDS)
        missing = [each for each in missing if not store.check([f"{word}/{each}"])]
    store.set(f"{word}/complete", "")
    return word


# ---- Heartbeats of the ranks ---------------------------------------------------------------------
# A thread of each rank reports every second that it is running, and whether it waits for others,
# does long work that it names (`working`), or neither. A waiting rank reads the heartbeats of the
# others and keeps waiting while one of them names its work. The process exits, with a message that
# names every other rank, when for the whole timeout one of them sent none, or did something it did
# not name, or when all of them wait.


BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a beat: something is wrong with that process or its machine


class Activity(NamedTuple):
    """What a rank does, and since when."""

    kind: Literal["waiting", "working", "unnamed"]
    what: str
    since: float


class Beat(NamedTuple):
    """
    The last heartbeat of a rank. Times are seconds after the common start: clocks of several
    machines differ, these do not.
    """

    at: float = 0.0
    named: float = 0.0
    """When it last waited, or did work that it named."""
    worked: float = 0.0
    """When it last did work that it named."""
    text: str = "nothing heard of it"


class RankHeartbeat:
    """
    Heartbeats of one rank, made by all of them at the same moment. `doing` wraps whatever waits for
    other ranks, and long work that they wait for. When waiting exceeds `timeout_seconds` without a
    reason, the process exits with status HUNG. Setting `closed` ends the thread.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float):
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self.others = {r: Beat() for r in range(world_size) if r != rank}
        self.started, self.worked = time.monotonic(), 0.0
        self.activity = Activity("unnamed", "at work by itself", self.started)
        self.closed = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    @contextmanager
    def doing(self, kind: Literal["waiting", "working"], what: str) -> Iterator[None]:
        """While inside, beats say that this rank waits for others, or does work they wait for."""
        before, self.activity = self.activity, Activity(kind, what, time.monotonic())
        try:
            yield
        finally:
            self.activity = before._replace(since=time.monotonic())

    def run(self) -> None:
        """The thread: send a beat, and check the others when they are waited for too long."""
        while not self.closed.is_set():
            try:
                self.beat()
            except Exception as error:  # the store is gone: the launcher, or its machine, died
                lost = f"the launcher does not answer: {type(error).__name__}"
                self.others = {r: beat._replace(text=lost) for r, beat in self.others.items()}
            self.check()
            began = time.monotonic()
            self.closed.wait(BEAT_SECONDS)
            suspended = time.monotonic() - began - BEAT_SECONDS  # this process was stopped itself
            if suspended > self.silent_seconds:
                self.activity = self.activity._replace(since=self.activity.since + suspended)

    def beat(self) -> None:
        """Tell the others what this rank does; read what they do when it waits for long."""
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
        End this process when waiting can no longer succeed: for the timeout a rank sent no beat or
        named no work, or none named work.
        """
        (kind, what, since), now = self.activity, time.monotonic()
        oldest, beats = now - self.started - self.timeout_seconds, self.others.values()
        stuck = min(b.named for b in beats) < oldest or max(b.worked for b in beats) < oldest
        if kind != "waiting" or now - since <= self.timeout_seconds or not stuck:
            return
        silence = {rank: now - self.started - beat.at for rank, beat in self.others.items()}
        states = []
        for rank in sorted(silence, key=silence.__getitem__, reverse=True):
            quiet = silence[rank] > self.silent_seconds
            state = f"no sign of life for {silence[rank]:.0f} s" if quiet else "alive"
            states.append(f"rank {rank}: {state} ({self.others[rank].text})")
        message = (
            f"rank {self.rank} has waited {now - since:.0f} s in {what}, longer than "
            f"--collective_timeout_minutes allows: {'; '.join(states)}. "
            "Stopping; --resume=auto goes on from the last checkpoint"
        )
        print(printable(message), flush=True)
        os._exit(HUNG)


# ---- Ranks, devices and dtypes -------------------------------------------------------------------


T = TypeVar("T")
REPORT_SECONDS = 15.0  # between two lines on the progress of long work
GROUP_TIMEOUT = datetime.timedelta(days=7)  # of torch's own collectives: heartbeats end hangs


@dataclass(frozen=True)
class DistConfig:
    device_type: Literal["cuda", "cpu", "mps"] | None = None
    """Where to compute. Default: cuda where there is one, else mps, else cpu."""
    dtype: Literal["bfloat16", "float32"] | None = short("d", None)
    """Number format of activations and matrix products; weights stay float32. Default: bfloat16
    where the hardware multiplies it natively (CPUs with AVX512-BF16 or AMX too), else float32."""
    deterministic: bool = False
    """Use only operations that give the same bits in every run; on a GPU it costs speed."""
    collective_timeout_minutes: float = 10.0
    """How long ranks wait for one that sends no heartbeat, or does not say what it does, before the
    run stops and names it. A rank that reports its work is waited for without limit."""


@dataclass(frozen=True)
class DistContext:
    """One process among `world_size`. `dtype` is the compute dtype; `device` this rank's own."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    launch: str = ""
    """Names what torchrun started: the same when it starts the ranks again after a failure."""
    restarts: int = 0
    """How often it has done so."""
    local_size: int = 1
    """How many of the processes are on this host."""
    heartbeat: RankHeartbeat | None = None

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints, logs and writes."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The accelerator's name as its driver gives it; `cpu` or `mps` elsewhere."""
        return device_name(self.device)

    def print0(self, *words: Any) -> None:
        """Print once, on the main rank."""
        if self.is_main:
            print(*map(printable, words), flush=True)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks, in float64."""
        if self.world_size == 1:
            return [float(v) for v in values]
        with self.waiting("a sum"):
            total = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(total)
            return total.tolist()

    def any(self, flag: bool) -> bool:
        """True when the flag is set on some rank."""
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: Any) -> Any:
        """The main rank's value, on every rank. It must be picklable."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.waiting("a broadcast"):
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        with self.waiting("a gathering of values"):
            dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            with self.waiting("a barrier"):
                dist.barrier()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """While inside, this rank waits for others: for too long, and the run is stopped."""
        return self.heartbeat.doing("waiting", what) if self.heartbeat else nullcontext()

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """
        While inside, this rank does long work that others may wait for, without limit as long as
        its heartbeat goes on. Yields a function that is given the progress of the work: others are
        told so, and now and then it is printed.
        """
        printed, beat = time.monotonic(), self.heartbeat

        def report(progress: str) -> None:
            nonlocal printed
            text = f"{what}: {progress}"
            if beat:
                beat.activity = beat.activity._replace(what=text)
            if time.monotonic() - printed > REPORT_SECONDS:
                print(text, flush=True)
                printed = time.monotonic()

        with beat.doing("working", what) if beat else nullcontext():
            yield report

    def on_main(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns on the main rank, on every rank; what it raises, too."""
        result, error = self.broadcast(self.attempt(what, work) if self.is_main else None)
        if error:
            raise error
        return result

    def on_node(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank of this node, on all its ranks; what it raises,
        too, on the ranks of all nodes."""
        mine = self.attempt(what, work) if self.local_rank == 0 else (None, None)
        every = self.gather(mine)
        for _, error in (mine, *every):  # this rank's own first: it has the traceback
            if error:
                raise error
        return every[self.rank - self.local_rank][0]

    def attempt(self, what: str, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """What `work` returned or raised; meanwhile the other ranks are told that it goes on."""
        with self.working(what):
            try:
                return work(), None
            except Exception as error:
                if self.world_size == 1:
                    raise
                return None, portable(error)

    def synchronize(self) -> None:
        """Wait for the device's queue, so that a clock read next is true."""
        if self.device.type == "cuda":
            with self.waiting("the device's queue"):  # collectives are in it
                torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Leave the process group, all ranks at once: none is torn down while another works."""
        if dist.is_initialized():
            self.barrier()
            if self.heartbeat:
                self.heartbeat.closed.set()
            dist.destroy_process_group()


def portable(error: Exception) -> Exception:
    """An error that other ranks can receive: one that pickle cannot carry as a RuntimeError."""
    with suppress(Exception):  # whatever a class of errors does when it is copied
        copy = pickle.loads(pickle.dumps(error))
        if (type(copy), str(copy)) == (type(error), str(error)):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def visible_gpus() -> list[str]:
    """The GPUs that are ours to use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")][:count]


def init_distributed(
    cfg: DistConfig = DistConfig(), seed: int = 0, steady: bool = True
) -> DistContext:
    """
    Join the process group (under torchrun), pick device and dtype, seed torch's global generator.

    `steady`: the process does the same again and again, as training and evaluations do; on a CPU it
    keeps what it frees for the next time.

    Raises ValueError when the asked-for device is not there.
    """
    env = os.environ
    rank, local_rank = int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0))
    world_size = int(env.get("WORLD_SIZE", 1))
    mps = torch.backends.mps.is_available()
    present = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    kind = cfg.device_type or next(kind for kind in present if present[kind])
    if not present[kind]:
        raise ValueError(f"--device_type={kind}, but PyTorch sees no such device; try cpu")
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # the few fp32 products may use TF32
    if kind == "cpu" and steady:
        keep_freed_memory()
    heartbeat = None
    if world_size > 1 and not dist.is_initialized():
        heartbeat = join(device, rank, world_size, 60 * cfg.collective_timeout_minutes)
    if cfg.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    dtype = getattr(torch, cfg.dtype) if cfg.dtype else default_dtype(device)
    launch = env.get("TORCHELASTIC_RUN_ID", "")
    if launch == "none":  # torchrun has no name for it: that of the process that launched us
        launch = f"{socket.gethostname()}-{os.getppid()}"
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    local_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    return DistContext(
        rank, local_rank, world_size, device, dtype, launch, restarts, local_size, heartbeat
    )


def join(device: torch.device, rank: int, world_size: int, timeout_seconds: float) -> RankHeartbeat:
    """Join the process group of this attempt, and start this rank's heartbeat."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience = datetime.timedelta(seconds=timeout_seconds)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = rank == 0 and not hosted
    store = dist.TCPStore(address, port, is_master=master, timeout=patience)  # pyright: ignore
    attempt = name_attempt(store, rank, world_size, timeout_seconds)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(attempt, store),  # pyright: ignore
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    dist.barrier()  # from here on the ranks' clocks run together
    beats = dist.PrefixStore(f"{attempt}/beats", store.clone())  # pyright: ignore
    return RankHeartbeat(beats, rank, world_size, timeout_seconds)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where matrix products in it are native, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        flags = cpu_info("flags").split() if device.type == "cpu" else []
        native = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if native else torch.float32
