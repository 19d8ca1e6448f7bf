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
from collections.abc import Callable, Iterable, Iterator
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

    Raises TimeoutError naming the ranks that did not come.
    """
    greeting, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    store.set(f"greeting/{rank}", greeting)
    if rank == 0:
        return receive(store, greeting, world_size, deadline)
    while True:
        answer = json.loads(read(store, "answer") or "{}")
        if greeting in answer.get("greetings", ()):
            store.set(f"{answer['name']}/heard/{rank}", "")
            break
        wait(deadline, "rank 0 did not come")
    while not store.check([f"{answer['name']}/complete"]):
        wait(deadline, "not all ranks came")
    return answer["name"]


def receive(store: Store, name: str, world_size: int, deadline: float) -> str:
    """Rank 0: answer greetings, those of the dead too, until every living rank has heard it."""
    answered: list[str] = []
    while True:
        greetings = [read(store, f"greeting/{rank}") for rank in range(1, world_size)]
        if greetings != answered:
            store.set("answer", json.dumps({"name": name, "greetings": greetings}))
            answered = greetings
        missing = [r for r in range(1, world_size) if not store.check([f"{name}/heard/{r}"])]
        if not missing:
            store.set(f"{name}/complete", "")
            return name
        wait(deadline, f"rank {', '.join(map(str, missing))} of {world_size} did not come")


def read(store: Store, key: str) -> str:
    """What is under a key; nothing where it does not exist."""
    return store.get(key).decode() if store.check([key]) else ""


def wait(deadline: float, complaint: str) -> None:
    """Give the others a moment."""
    if time.monotonic() > deadline:
        raise TimeoutError(f"the ranks did not find each other: {complaint}")
    time.sleep(POLL_SECONDS)


# ---- Heartbeats of the ranks ---------------------------------------------------------------------
# A thread of each rank reports every second that it is running, and whether it waits for others,
# does long work that it names (`working`), or neither. A waiting rank reads the heartbeats of the
# others and keeps waiting while one of them names its work. The process exits, with a message that
# names every other rank, when for the whole timeout one of them sent none, or did something it did
# not name, or when all of them wait.


BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a beat: something is wrong with that process or its machine
NOTICE_SECONDS = 30.0  # of waiting, until a silent rank is spoken of


class Activity(NamedTuple):
    """What a rank does, and since when."""

    kind: Literal["waiting", "working", "unnamed"]
    what: str
    since: float


class Beat(NamedTuple):
    """The last heartbeat of a rank."""

    at: float = 0.0
    """Seconds after the common start; clocks of several machines differ, this does not."""
    kind: str = "unnamed"
    seconds: float = 0.0
    """How long it has done this."""
    text: str = "nothing heard of it"


class RankHeartbeat:
    """
    Heartbeats of one rank, made by all of them at the same moment. `doing` wraps whatever waits for
    other ranks, and long work that they wait for. When waiting exceeds `timeout_seconds` without a
    reason, the process exits with status HUNG.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float):
        self.store, self.rank, self.timeout_seconds = store, rank, timeout_seconds
        self.silent_seconds = min(SILENT_SECONDS, timeout_seconds / 2)
        self.notice_seconds = min(NOTICE_SECONDS, timeout_seconds / 2)
        self.others = {r: Beat() for r in range(world_size) if r != rank}
        self.started = time.monotonic()
        self.activity = Activity("unnamed", "at work by itself", self.started)
        self.last_work = 0.0  # the latest beat of a rank that named its work
        self.reported: set[int] = set()
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

    def close(self) -> None:
        """Stop the thread; the other ranks may go on."""
        self.closed.set()

    def run(self) -> None:
        """The thread: send a beat, and check the others when they are waited for too long."""
        while not self.closed.is_set():
            try:
                self.beat()
                if self.waited() > self.notice_seconds / 2:
                    self.listen()
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
        """Tell the others what this rank does."""
        now, (kind, what, since) = time.monotonic(), self.activity
        place = f"process {os.getpid()} on {socket.gethostname()}"
        doing = f"in {what}" if kind == "waiting" else what
        text = f"{place}, {doing} for {now - since:.0f} s"
        beat = Beat(now - self.started, kind, now - since, text)
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def listen(self) -> None:
        """Read the beats of the others."""
        beats = self.store.multi_get([f"beat/{rank}" for rank in self.others])
        self.others = dict(zip(self.others, (Beat(*json.loads(b)) for b in beats), strict=True))
        worked = [beat.at for beat in self.others.values() if beat.kind == "working"]
        self.last_work = max([self.last_work, *worked])

    def waited(self) -> float:
        """Seconds that this rank has waited for others by now."""
        activity = self.activity
        return time.monotonic() - activity.since if activity.kind == "waiting" else 0.0

    def check(self) -> None:
        """Report silent ranks; end this process when waiting can no longer succeed."""
        what, waited = self.activity.what, self.waited()
        silent = {r for r in self.others if self.silence(r) > self.silent_seconds}
        if waited > self.notice_seconds and silent - self.reported:
            self.reported |= silent
            self.say(f"has waited {waited:.0f} s in {what}; {self.describe(silent)}")
        if waited > self.timeout_seconds and self.is_stuck():
            self.say(
                f"has waited {waited:.0f} s in {what}, longer than "
                f"--collective_timeout_minutes allows: {self.describe(self.others)}. "
                "Stopping; --resume=auto goes on from the last checkpoint"
            )
            os._exit(HUNG)

    def is_stuck(self) -> bool:
        """Whether for the timeout a rank sent no beat or named no work, or none named work."""
        timeout = self.timeout_seconds
        lost = any(
            self.silence(rank) > timeout or (beat.kind == "unnamed" and beat.seconds > timeout)
            for rank, beat in self.others.items()
        )
        return lost or time.monotonic() - self.started - self.last_work > timeout

    def silence(self, rank: int) -> float:
        """Seconds without a beat of a rank."""
        return time.monotonic() - self.started - self.others[rank].at

    def describe(self, ranks: Iterable[int]) -> str:
        """What is known of these ranks, the silent ones first."""
        parts = []
        for rank in sorted(ranks, key=self.silence, reverse=True):
            silence = self.silence(rank)
            quiet = silence > self.silent_seconds
            state = f"no sign of life for {silence:.0f} s" if quiet else "alive"
            parts.append(f"rank {rank}: {state} ({self.others[rank].text})")
        return "; ".join(parts)

    def say(self, text: str) -> None:
        """Every rank prints its own messages: the main one may be the one that hangs."""
        print(f"rank {self.rank} {printable(text)}", flush=True)


# ---- Ranks, devices and dtypes -------------------------------------------------------------------


T = TypeVar("T")
REPORT_SECONDS = 15.0  # between two lines on the progress of long work
GROUP_TIMEOUT = datetime.timedelta(days=7)  # of torch's own collectives: heartbeats end hangs
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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

    def __post_init__(self) -> None:
        if not self.collective_timeout_minutes > 0:
            minutes = self.collective_timeout_minutes
            raise ValueError(f"collective_timeout_minutes must be positive, got {minutes}")


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
        return unpack(self.broadcast(self.attempt(self.is_main, what, work)))

    def on_node(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank of this node, on all its ranks; what it raises,
        too, on the ranks of all nodes."""
        mine = self.attempt(self.local_rank == 0, what, work)
        every = self.gather(mine)
        failed = next((each for each in (mine, *every) if each.error), None)
        return unpack(failed or every[self.rank - self.local_rank])

    def attempt(self, mine: bool, what: str, work: Callable[[], Any]) -> "Attempt":
        """Do the work, where it is this rank's, and tell the others so as long as it takes."""
        if not mine:
            return Attempt()
        with self.working(what):
            try:
                return Attempt(work())
            except Exception as error:
                if self.world_size == 1:
                    raise
                return Attempt(error=portable(error))

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
                self.heartbeat.close()
            dist.destroy_process_group()


class Attempt(NamedTuple):
    """What one rank did for others: its result, or why there is none."""

    result: Any = None
    error: Exception | None = None


def portable(error: Exception) -> Exception:
    """An error that other ranks can receive: one that pickle cannot carry as a RuntimeError."""
    with suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    text = f"{type(error).__name__}: {error}"
    return RuntimeError(text).with_traceback(error.__traceback__)


def unpack(attempt: Attempt) -> Any:
    """The result of a rank that worked for all. Raises its error."""
    if attempt.error:
        raise attempt.error
    return attempt.result


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
    dtype = DTYPES[cfg.dtype] if cfg.dtype else default_dtype(device)
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

    def connect(is_master: bool = False) -> Any:
        return dist.TCPStore(address, port, is_master=is_master, timeout=patience)  # pyright: ignore

    store = connect(is_master=rank == 0 and not hosted)
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
    beats = dist.PrefixStore(f"{attempt}/beats", connect())  # pyright: ignore
    return RankHeartbeat(beats, rank, world_size, timeout_seconds)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where matrix products in it are native, else float32."""
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        flags = cpu_info("flags").split() if device.type == "cpu" else []
        native = "avx512_bf16" in flags or "amx_bf16" in flags
    return torch.bfloat16 if native else torch.float32
