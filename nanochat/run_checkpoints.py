"""
The checkpoints of one run: who may write them, when they are safe, where a run goes on.

    lock -> resume or make room -> save ... save -> the last one safe on disk -> unlock

One run writes to a folder at a time. A save is of one state and all of it: what is not finite is
never saved, so that it never pushes a good checkpoint out. A save can be written beside the
training; the next one waits for it. Knows nothing of what is trained.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from nanochat.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    list_steps,
    newest_state,
    open_checkpoint,
    sweep,
    weights_on_host,
    write_checkpoint,
)
from nanochat.common import printable
from nanochat.disk import RunLock
from nanochat.gpt import GPT
from nanochat.guard import NotFinite, first_not_finite, require_equal_ranks
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW, state_bytes
from nanochat.rows import differences
from nanochat.tokenizer import Tokenizer
from nanochat.train import Progress


@dataclass(frozen=True)
class SavingConfig:
    resume: Literal["never", "auto"] = "never"
    """auto: continue from the newest checkpoint of this tag, where there is one. What torchrun
    starts again after a failure continues in any case."""
    keep: int = 2
    """Checkpoints to keep; older ones are deleted."""
    async_save: bool | None = None
    """Save checkpoints asynchronously: training goes on once the state is copied to the host, which
    a synchronous save from a GPU needs as well; on a CPU it takes memory for a copy of the weights.
    The last one is always waited for. Default: on GPUs."""
    save_optimizer: bool | None = None
    """Keep the optimizer state in the checkpoint that a finished run ends with; all others have it.
    Default: in pretraining, whose state --warm_start uses."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a full or broken disk does to a run that cannot save on the way: stop it, or be told
    and go on. That the last save fails is always an error."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def of_stage(self, stage: str) -> "SavingConfig":
        """The same, with the stage's default in place of None for `save_optimizer`."""
        kept = stage == "base" if self.save_optimizer is None else self.save_optimizer
        return replace(self, save_optimizer=kept)


class Checkpoints:
    """
    The checkpoints of one run: `folder` holds step_<n>/ and `latest`. Every rank has one.

    A context manager: inside, this run alone may write there.
    """

    def __init__(self, folder: Path, machine: Machine, cfg: SavingConfig = SavingConfig()):
        self.folder, self.machine, self.cfg = folder, machine, cfg
        self.saved: Checkpoint | None = None
        """The newest one that this process wrote, on the main rank."""
        self.lock = RunLock(folder.parent / f".{folder.name}.lock")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: tuple[int, Future[Checkpoint]] | None = None  # step, and who writes it
        on_gpu = machine.device.type == "cuda"
        self.asynchronous = on_gpu if cfg.async_save is None else cfg.async_save

    def __enter__(self) -> Self:
        """Raises Refused, on every rank, where another run writes to the folder."""

        def take_lock() -> None:
            self.lock.acquire(self.machine.launch)
            sweep(self.folder)

        self.machine.on_main(f"taking the lock of {self.folder}", take_lock)
        return self

    def __exit__(self, *error: object) -> None:
        if missed := self.written():
            print(printable(missed), flush=True)
        self.writer.shutdown()
        self.lock.release()

    # ---- saving ------------------------------------------------------------------------------

    def save(
        self,
        model: GPT,
        optimizer: MuonAdamW,
        tokenizer: Tokenizer,
        state: Mapping[str, Any],
        progress: Progress,
        final: bool = False,
    ) -> None:
        """
        Save the state of all ranks; `final` returns only when it is safe on disk.

        Every rank calls this. Raises NotFinite naming the first tensor that holds a number which
        is not finite, RanksDiffer where the ranks hold other weights, and OSError where the disk
        fails a save that matters (`on_save_error`).
        """
        self.require_finite(model, optimizer)
        require_equal_ranks(optimizer.named_params(), self.machine, progress.step)
        missed = self.written()  # the one before: a disk has one writer, and memory room for one
        optim_tensors = None if self.drops_optimizer(progress) else optimizer.state_dict()
        problem = None
        if self.machine.is_main:
            state = {**state, "launch": self.machine.launch, "progress": progress.state_dict()}
            beside = not final and self.asynchronous
            weights = weights_on_host(model, copy=beside)
            write = partial(
                write_checkpoint, self.folder, progress.step, weights, model.cfg,
                optim_tensors, tokenizer, state, self.cfg.keep,
            )  # fmt: skip
            self.pending = (progress.step, self.writer.submit(write))
            problem = missed if beside else self.written()
            if missed and not beside:
                print(printable(missed), flush=True)
        problem = self.machine.broadcast(problem)
        if problem and (final or self.cfg.on_save_error == "stop"):
            raise OSError(problem)
        if problem:
            self.machine.print0(f"{problem}; the training goes on")

    def drops_optimizer(self, progress: Progress) -> bool:
        """Whether the checkpoint of `progress` is to hold no optimizer state."""
        dropped = self.cfg.save_optimizer is False or progress.optimizer_missing
        return progress.finished and dropped

    def written(self) -> str | None:
        """Wait for the save under way; what the disk had against it, if anything."""
        if self.pending is None:
            return None
        (step, future), self.pending = self.pending, None
        try:
            with self.machine.working(f"saving step {step}"):
                self.saved = future.result()
        except OSError as error:
            return f"no checkpoint of step {step}: {error}"
        return None

    def require_finite(self, model: GPT, optimizer: MuonAdamW) -> None:
        """Raises NotFinite, on every rank, naming the first tensor that is not finite on one."""
        named = {**model.state_dict(), **optimizer.local_state()}
        found = [name for name in self.machine.gather(first_not_finite(named)) if name]
        if found:
            last = list_steps(self.folder)[-1:]
            raise NotFinite(
                f"{found[0]} holds numbers that are not finite: not saved. "
                + (f"--resume=auto goes on from step {last[0]}" if last else "There is none before")
            )

    # ---- beginning ---------------------------------------------------------------------------

    def begin(
        self,
        identity: Mapping[str, Any],
        allow_change: bool,
        model: GPT,
        optimizer: MuonAdamW,
        progress: Progress,
        num_steps: int,
    ) -> None:
        """
        Continue where that was asked for, or where torchrun starts this run again after a failure;
        else move what an earlier run of this name left out of the way.
        """
        if self.cfg.resume == "auto" or self.started_again(num_steps):
            self.resume(identity, allow_change, model, optimizer, progress)
        else:
            self.make_room()

    def started_again(self, num_steps: int) -> bool:
        """
        Whether an earlier attempt of this very launch has saved something.

        A node that came later does not know of restarts, so an unfinished run is enough.
        """
        restarted, launch = self.machine.any(self.machine.restarts > 0), self.machine.launch

        def saved_before() -> bool:
            newest = newest_state(self.folder) if launch else None
            if newest is None or newest.get("launch") != launch:
                return False
            return restarted or newest["step"] < num_steps

        return self.machine.on_main("reading checkpoints", saved_before)

    def resume(
        self,
        identity: Mapping[str, Any],
        allow_change: bool,
        model: GPT,
        optimizer: MuonAdamW,
        progress: Progress,
    ) -> bool:
        """
        Load the newest good checkpoint, the same on every rank; False where there is none.

        Raises CorruptCheckpoint where none is good, ValueError naming what differs when it belongs
        to another `identity` (model, batch, seed, rows), unless only rows differ and
        `allow_change` is set.
        """
        found = self.chosen()
        if found is None:
            return False
        changed = differences(found.state["identity"], identity)
        allowed = allow_change and all(line.startswith("rows.") for line in changed)
        if changed and not allowed:
            raise ValueError(
                f"{found.folder} belongs to another run:\n  "
                + "\n  ".join(changed)
                + "\nuse another --model_tag, or --allow_data_change where only rows differ"
            )
        for line in changed:
            self.machine.print0(f"continuing although {line}")
        model.load_state_dict(found.model_tensors())
        progress.load_state_dict(found.state["progress"])
        progress.optimizer_missing = not found.has_optimizer
        if found.has_optimizer:
            optimizer.load_state_dict(found.optim_tensors())
        self.machine.print0(f"resumed {found.folder}")
        return True

    def chosen(self) -> Checkpoint | None:
        """
        The newest good checkpoint, verified by one rank of each node.

        Raises CorruptCheckpoint, on every rank, where there is none, or where nodes differ.
        """

        def newest() -> Checkpoint | None:
            try:
                return open_checkpoint(self.folder)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(
                    f"{error}; --resume=never starts anew and moves them aside"
                ) from error

        found = self.machine.on_node("verifying checkpoints", newest)
        steps = self.machine.gather((found.step, found.fingerprint) if found else None)
        for rank, other in enumerate(steps):
            if other != steps[0]:
                raise CorruptCheckpoint(
                    f"rank {rank} finds {shown(other)} in {self.folder}, rank 0 {shown(steps[0])}; "
                    "the ranks of all nodes must see the same files: use a shared disk"
                )
        return found

    def make_room(self) -> None:
        """Move the checkpoints of an earlier run of this name out of the way, deleting nothing."""
        if self.machine.is_main and list_steps(self.folder):
            when = time.strftime("%y%m%d-%H%M%S")
            aside = self.folder.rename(f"{self.folder}.before-{when}")
            self.machine.print0(f"the checkpoints of an earlier run are now in {aside}")
        self.machine.barrier()

    def bytes_to_come(self, model: GPT, saves: int) -> int:
        """
        What `saves` saves take on the disk, the last of them that of the finished run: those to
        keep and the one being written, at most.
        """
        there = sum(p.stat().st_size for p in self.folder.glob("step_*/*") if p.is_file())
        full = checkpoint_bytes(model)
        last = checkpoint_bytes(model, optimizer=self.cfg.save_optimizer is not False)
        largest = full if saves > 1 else last
        total = (saves - 1) * full + last
        return min(total, max(largest, (self.cfg.keep + 1) * largest - there))


def shown(found: tuple[int, str] | None) -> str:
    """A checkpoint as a message names it."""
    return f"step {found[0]} ({found[1]})" if found else "no checkpoint"


def checkpoint_bytes(model: GPT, optimizer: bool = True) -> int:
    """Estimated size of one checkpoint, with its optimizer state or without."""
    state = state_bytes(dict(model.named_parameters()), model.param_roles())
    return 4 * model.num_params() + (state if optimizer else 0)
