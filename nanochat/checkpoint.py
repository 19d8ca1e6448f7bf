"""
Checkpoints: files that are written whole and verified, and the checkpoints of one run.

    model, optimizer, state -> write_checkpoint -> <stage>_checkpoints/<tag>/step_<n>/ -> load_model
    lock -> resume or make room -> save ... save -> the last one safe on disk -> unlock

A folder appears under its name when everything in it is on disk. Files have digests; a checkpoint
that fails them is skipped, and the previous good one is used.
"""

import contextlib
import importlib
import math
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat import common
from nanochat.anomaly import AnomalyState, NotFinite, first_not_finite, require_equal_ranks
from nanochat.common import MissingInput, RunLock, UsageError, base_dir, printable
from nanochat.config import require_at_least
from nanochat.dataloader import differences
from nanochat.distributed import DistContext
from nanochat.gpt import GPT, GPTConfig, config_from
from nanochat.optim import OLD_SETTINGS, MuonAdamW, state_bytes
from nanochat.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanochat.tokenizer import Tokenizer

# ---- Reading and writing one checkpoint ----------------------------------------------------------


FORMAT = 2
MODEL_FILE, OPTIM_FILE = "model.safetensors", "optim.safetensors"
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}  # + _checkpoints
SCRIPTS = {"base": "base_train", "mid": "mid_train", "sft": "chat_sft", "rl": "chat_rl"}
# .replaced: the same step was being saved again when the process died
STEP_FOLDER = re.compile(r"(?:step|\.replaced)_(\d+)")
CHECKPOINT_REF = re.compile(r"(?P<stage>\w+)(:(?P<tag>[^:]+)(:(?P<step>\d+))?)?")


class CorruptCheckpoint(ValueError):
    """A checkpoint whose files are not what its state.json says."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved step. `state` is the content of state.json; tensors are read on demand."""

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Names the content: model, optimizer and tokenizer."""
        return common.fingerprint({n: f["sha256"] for n, f in self.state["files"].items()})

    def model_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL_FILE)

    @property
    def has_optimizer(self) -> bool:
        return OPTIM_FILE in self.state["files"]

    def optim_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / OPTIM_FILE)

    def next_commands(self, machine: DistContext) -> str:
        """What a training prints last: where its checkpoint is, and the next command."""
        stage, tag = self.state["stage"], self.folder.parent.name
        many = f"torchrun --nproc_per_node={machine.local_size} -m scripts.{{}} --"
        run = many if machine.world_size > 1 else "python -m scripts.{}"
        lines = [f"checkpoint: {self.folder}"]
        if following := dict(pairwise(SCRIPTS)).get(stage):
            lines.append(f"next: {run.format(SCRIPTS[following])} --model_tag={tag}")
        if stage in ("sft", "rl"):
            lines.append(f"chat: python -m scripts.chat_cli --source={stage} --model_tag={tag}")
        return "\n".join(lines)


def stage_folder(stage: str) -> Path:
    """Where the checkpoints of a stage (base, mid, sft, rl) live. Raises ValueError for others."""
    if stage not in FOLDERS:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(FOLDERS)}")
    return base_dir() / f"{FOLDERS[stage]}_checkpoints"


def save_checkpoint(
    folder: Path,
    step: int,
    model: GPT,
    optim_tensors: Mapping[str, Tensor] | None,
    tokenizer: Tokenizer,
    state: Mapping[str, Any],
    keep: int = 2,
    weights: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """
    Write `folder`/step_<step>, then point `latest` at it and drop all but the newest `keep`.
    weights: those of the model, by default as they are now.

    The old checkpoints stay untouched until the new one is complete; when writing fails, what
    was begun is removed and the error, an OSError where the disk is at fault, is raised. One
    process at a time may call this (`RunLock`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    final, temporary = folder / f"step_{step:06d}", folder / f".saving_{step:06d}"
    temporary.mkdir()
    try:
        tokenizer.save(temporary)
        save_tensors(weights or weights_on_host(model), temporary / MODEL_FILE)
        if optim_tensors is not None:
            save_tensors(optim_tensors, temporary / OPTIM_FILE)
        files = {}
        for path in sorted(temporary.iterdir()):
            common.fsync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": common.sha256_file(path)}
        record = {
            **state,
            "format": FORMAT,
            "step": step,
            "model": asdict(model.cfg),
            "files": files,
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        common.write_json(temporary / "state.json", common.sealed(record))
        if final.exists():  # the same step, saved again
            final.rename(folder / f".replaced_{step:06d}")
        temporary.rename(final)
        common.fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # it is committed: the rest can wait for the next save
        (folder / "latest").write_text(final.name + "\n")
        sweep(folder)
    for old, path in list(step_folders(folder).items())[:-keep]:
        if old != step:
            shutil.rmtree(path, ignore_errors=True)
    return Checkpoint(final, step, read_state(final / "state.json"))


def weights_on_host(model: GPT, copy: bool = False) -> dict[str, Tensor]:
    """The weights as a file wants them; those of a model on the CPU are only copied if asked to."""
    weights = model.state_dict().items()
    return {name: p.detach().to("cpu", copy=copy).contiguous() for name, p in weights}


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError where the disk is full or broken."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def sweep(folder: Path) -> None:
    """
    Remove what an interrupted save left behind; put back what it was about to replace.

    For the one process that writes: to another, a save under way looks like an interrupted one.
    """
    for path in folder.glob(".replaced_*"):
        original = folder / path.name.replace(".replaced_", "step_")
        shutil.rmtree(path) if original.exists() else path.rename(original)
    for path in folder.glob(".saving_*"):
        shutil.rmtree(path)


def read_state(path: Path) -> dict[str, Any]:
    """The content of a state.json. Raises CorruptCheckpoint unless it is what was written."""
    state = common.read_json(path)
    was = state.get("format") if isinstance(state, dict) else None
    if was != FORMAT:
        raise CorruptCheckpoint(f"{path} has format {was}, not {FORMAT}")
    return common.read_sealed(path)


def step_folders(folder: Path) -> dict[int, Path]:
    """The committed steps of a folder in numeric order, and where they are."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # step_ comes after .replaced_
    found = {int(m[1]): path for path in paths if (m := STEP_FOLDER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """
    A saved step. Raises CorruptCheckpoint naming the first file that differs from its digest, and
    where the folder or the list of files is not that of this step.
    """
    state = read_state(folder / "state.json")
    try:
        names = [MODEL_FILE, TOKENIZER_FILE, *state["files"]]
        files = {n: (state["files"][n]["bytes"], state["files"][n]["sha256"]) for n in names}
        saved = f"step_{state['step']:06d}"
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder}/state.json does not list files ({error!r})") from error
    if state["step"] != step:
        raise CorruptCheckpoint(
            f"{folder} was renamed: its state.json is that of step {state['step']}; rename the "
            f"folder to {saved}"
        )
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing")
        if path.stat().st_size != size or common.sha256_file(path) != digest:
            raise CorruptCheckpoint(f"{path} does not match its SHA-256")
    return Checkpoint(folder, step, state)


def open_checkpoint(folder: Path, step: int | None = None) -> Checkpoint | None:
    """
    The newest good checkpoint of a folder, or exactly `step`; None where there is none.

    Damaged checkpoints are reported and skipped. Raises CorruptCheckpoint when the step asked
    for is damaged, or when there are checkpoints and all are.
    """
    folders = step_folders(folder)
    if step is not None and step not in folders:
        raise FileNotFoundError(f"no step {step} in {folder}; there are {list(folders)}")
    if step is not None:
        return read_checkpoint(folders[step], step)
    for number, path in reversed(folders.items()):
        try:
            return read_checkpoint(path, number)
        except (OSError, ValueError) as error:
            print(printable(f"skipping a damaged checkpoint: {error}"), flush=True)
    if folders:
        raise CorruptCheckpoint(f"no good checkpoint is left in {folder}")
    return None


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state of a folder that can be read; its files are not verified."""
    for path in reversed(step_folders(folder).values()):
        with contextlib.suppress(OSError, ValueError):
            return read_state(path / "state.json")
    return None


def find_checkpoint(stage: str, tag: str | None = None, step: int | None = None) -> Checkpoint:
    """
    The checkpoint of a stage: tag and step where given, else the tag written last, its last step.

    Raises MissingInput naming the script that makes one.
    """
    root, command = stage_folder(stage), f"python -m scripts.{SCRIPTS[stage]}"
    if tag is None:
        tags = list(root.glob("*/latest"))
        if not tags:
            raise MissingInput(f"no checkpoint in {root}", command)
        tag = max(tags, key=lambda p: p.stat().st_mtime).parent.name
    found = open_checkpoint(root / tag, step)
    if found is None:
        raise MissingInput(f"no checkpoint in {root / tag}", f"{command} --model_tag={tag}")
    return found


def parse_checkpoint_ref(name: str) -> Checkpoint:
    """
    The checkpoint that stage[:tag[:step]] names, as in sft, base:d4 or base:d4:400.

    Raises ValueError for another form, MissingInput where there is no such checkpoint.
    """
    found = CHECKPOINT_REF.fullmatch(name)
    if not found or found["stage"] not in FOLDERS:
        raise ValueError(f"{name!r} names no checkpoint: stage[:tag[:step]], as in base:d4:400")
    step = int(found["step"]) if found["step"] else None
    return find_checkpoint(found["stage"], found["tag"], step)


def lineage(state: Mapping[str, Any]) -> dict[str, Any]:
    """
    What of a checkpoint's state says where its model comes from, wherever it is taken; with the
    tokens of its batches where it has any (RL has none).
    """
    batch = {k: v for k, v in state["identity"].items() if k == "batch_tokens"}
    return {"source": state["source"], "provenance": state["provenance"], "identity": batch}


def newest_stage() -> str:
    """The last of base, mid, sft, rl that has a checkpoint. Raises MissingInput where none has."""
    for stage in reversed(FOLDERS):
        if next(stage_folder(stage).glob("*/latest"), None):
            return stage
    raise MissingInput(f"there is no model in {base_dir()}", "bash speedrun.sh")


# Other models than GPT: a field that only their configuration has -> a module with `read_config`,
# `new_model` and `callbacks`
ARCHITECTURES = {"xsa_last_n": "nanochat.golf.model", "n_loops": "nanochat.recursion.metrics"}


def architecture_of(cfg: GPTConfig | Mapping[str, Any]) -> Any:
    """The module of a configuration, or of its values; None for a plain GPT."""
    values = cfg if isinstance(cfg, Mapping) else vars(cfg)
    names = (module for name, module in ARCHITECTURES.items() if name in values)
    return next(map(importlib.import_module, names), None)


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """The model configuration that a checkpoint holds. Raises ValueError for a deleted option."""
    module = architecture_of(values)
    return module.read_config(values) if module else config_from(GPTConfig, values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model of a configuration, its weights not drawn yet."""
    module = architecture_of(cfg)
    return module.new_model(cfg, dtype) if module else GPT(cfg, dtype)


def upgrade_identity(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The identity that an earlier commit gave a run, as this one has it."""
    upgraded = dict(recorded)
    for name in {"optim", "schedule", "rl"} & recorded.keys():
        kept = (item for item in recorded[name].items() if item not in OLD_SETTINGS.items())
        upgraded[name] = dict(kept)
    if "value_embeddings" in recorded.get("model", ()):
        upgraded["model"] = asdict(read_config(recorded["model"]))
    return upgraded


def build_model(cfg: GPTConfig, device: torch.device, dtype: torch.dtype, seed: int) -> GPT:
    """
    A new model on `device`. Its weights follow from the seed alone: a CPU draws them, one parameter
    at a time, so that a process needs host memory for the largest of them only.
    """
    with device:
        model = new_model(cfg, dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def load_model(checkpoint: Checkpoint, machine: DistContext, max_seq_len: int | None = None) -> GPT:
    """
    Rebuild the model of a checkpoint on the machine's device, from its saved config; for rows of
    another length where `max_seq_len` says so.
    """
    cfg = read_config(checkpoint.state["model"])
    with torch.device("meta"):
        model = new_model(replace(cfg, max_seq_len=max_seq_len or cfg.max_seq_len), machine.dtype)
    model.to_empty(device=machine.device)
    model.load_state_dict(checkpoint.model_tensors())
    return model


# ---- The checkpoints of one run: lock, resume, save, prune ---------------------------------------
# One run writes to a folder at a time. Weights that are not finite are never saved, so they never
# push a good checkpoint out. A save may run asynchronously; the next one waits for it.


LOSS_BETA = 0.9  # of the moving average of the training loss


@dataclass
class Progress:
    """Everything about a run that is neither weight nor setting; saved with each checkpoint."""

    step: int = 0
    """Steps done."""
    loss_average: float = 0.0
    """Moving average of the training loss, biased towards 0 (see `smooth_loss`)."""
    train_seconds: float = 0.0
    """Time spent in timed steps, by all attempts together."""
    flops: float = 0.0
    """Spent on all steps, forward and backward."""
    clock_seconds: float = 0.0
    """Time spent in all steps, the mean of the ranks; compared with a budget of seconds."""
    averaged: bool = False
    """The weights are the average that the run ended with: it cannot be made longer."""
    finished: bool = False
    """All steps are done, as far as this run was planned."""
    optimizer_missing: bool = False
    """The checkpoint that was loaded holds no optimizer state: it cannot be made longer."""
    health: AnomalyState = field(default_factory=AnomalyState)
    min_val: float | None = None
    last_val: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    """The latest steps, for a median; not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {name: x for name, x in asdict(self).items() if name != "step_seconds"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved; earlier commits saved more."""
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])
        known = {k: v for k, v in state["health"].items() if hasattr(AnomalyState(), k)}
        self.health = AnomalyState(**known)

    def add_step(self, loss: float | None, flops: float, seconds: float, timed: bool) -> None:
        """Count a step; `loss` is None where it was no good one, `timed` for the throughput."""
        if loss is None:
            loss = self.smooth_loss if self.step else 0.0
        self.loss_average = LOSS_BETA * self.loss_average + (1 - LOSS_BETA) * loss
        self.step += 1
        self.flops += flops
        self.clock_seconds += seconds
        if timed:
            self.train_seconds += seconds
            self.step_seconds = [*self.step_seconds[-999:], seconds]

    @property
    def smooth_loss(self) -> float:
        """The moving average without its bias towards 0; NaN before the first step."""
        return self.loss_average / (1 - LOSS_BETA**self.step) if self.step else math.nan

    def require_resumable(self) -> None:
        """Raise UsageError where training cannot go on; call it where steps are left to train."""
        self.finished = False
        if self.averaged or self.optimizer_missing:
            why = "averaged weights" if self.averaged else "no optimizer state"
            raise UsageError(
                f"the run ended after step {self.step} and holds {why}: it cannot be made longer",
                "train all steps anew with --resume=never, and with --save_optimizer, which keeps "
                "the optimizer state, or without --ema_decay",
            )


@dataclass(frozen=True)
class SavingConfig:
    resume: Literal["never", "auto"] = "never"
    """auto: continue from the newest checkpoint of this tag, where there is one. What torchrun
    restarts after a failure continues in any case."""
    keep: int = 2
    """Checkpoints to keep; older ones are deleted."""
    allow_data_change: bool = False
    """Continue although text, tokenizer or rows are not those the checkpoint was trained on."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a full or broken disk does to a run: stop it, or cost it that checkpoint. That the last
    save fails is always an error."""

    def __post_init__(self) -> None:
        require_at_least(self, keep=1)


@dataclass(eq=False)
class Checkpoints:
    """
    The checkpoints of one run: `folder` holds step_<n>/ and `latest`. Every rank has one.

    A context manager: inside, only this run may write there.
    """

    folder: Path
    machine: DistContext
    cfg: SavingConfig = SavingConfig()
    keep_optimizer: bool = True
    """Whether the checkpoint of the finished run holds the optimizer state; all others do."""
    saved: Checkpoint | None = None
    """The newest one that this process wrote, on the main rank."""
    pending: tuple[int, Future[Checkpoint]] | None = None
    """Step that is being saved."""

    def __post_init__(self) -> None:
        self.asynchronous = self.machine.device.type == "cuda"
        """Return from `save` once the state is on the host, where a synchronous save has it too."""
        self.lock = RunLock(self.folder.parent / f".{self.folder.name}.lock")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Self:
        """Raises UsageError, on every rank, where another run writes to the folder."""

        def take_lock() -> None:
            self.lock.acquire(self.machine.launch)
            sweep(self.folder)

        self.machine.on_main(f"taking the lock of {self.folder}", take_lock)
        return self

    def __exit__(self, *error: object) -> None:
        if problem := self.wait():
            print(printable(problem), flush=True)
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
        require_equal_ranks(dict(model.named_parameters()), self.machine, progress.step)
        problem = self.wait()  # the one before: a disk has one writer, and memory room for one
        without_optimizer = not self.keep_optimizer or progress.optimizer_missing
        dropped = progress.finished and without_optimizer
        optim_tensors = None if dropped else optimizer.state_dict()
        if self.machine.is_main:
            state = {**state, "launch": self.machine.launch, "progress": progress.state_dict()}
            waits = final or not self.asynchronous
            weights = weights_on_host(model, copy=not waits)
            write = partial(save_checkpoint, self.folder, progress.step, model, optim_tensors)
            future = self.writer.submit(write, tokenizer, state, self.cfg.keep, weights)
            self.pending = (progress.step, future)
            if waits:
                if problem:
                    print(printable(problem), flush=True)
                problem = self.wait()
        problem = self.machine.broadcast(problem)
        if problem and (final or self.cfg.on_save_error == "stop"):
            raise OSError(problem)
        if problem:
            self.machine.print0(f"{problem}; the training goes on")

    def wait(self) -> str | None:
        """Wait for the save under way; the error message where the disk failed it."""
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
            last = max(step_folders(self.folder), default="none is saved")
            fix = f"--resume=auto goes on from the last good step: {last}"
            raise NotFinite(f"{found[0]} holds numbers that are not finite, not saved; {fix}")

    # ---- beginning ---------------------------------------------------------------------------

    def begin(
        self, identity: Mapping[str, Any], model: GPT, optimizer: MuonAdamW, num_steps: int
    ) -> Progress:
        """
        Load the newest good checkpoint where that was asked for, or where torchrun restarted this
        run after a failure; else move what an earlier run of this name left out of the way.

        Raises CorruptCheckpoint where none is good, ValueError naming what differs when it belongs
        to another `identity` (model, batch, seed, rows), unless only rows differ and
        `allow_data_change` is set.
        """
        progress = Progress()
        if self.cfg.resume == "never" and not self.was_restarted(num_steps):
            if self.machine.is_main and step_folders(self.folder):
                when = time.strftime("%y%m%d-%H%M%S")
                aside = self.folder.rename(f"{self.folder}.before-{when}")
                self.machine.print0(f"the checkpoints of an earlier run are now in {aside}")
            self.machine.barrier()
            return progress
        found = self.newest()
        if found is None:
            return progress
        recorded = upgrade_identity(found.state["identity"])
        if "init_lr_frac" in identity:  # which earlier commits did not record
            recorded.setdefault("init_lr_frac", identity["init_lr_frac"])
        changed = differences(recorded, identity)
        rows_only = all(line.startswith("rows.") for line in changed)
        if changed and not (self.cfg.allow_data_change and rows_only):
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
        return progress

    def was_restarted(self, num_steps: int) -> bool:
        """
        Whether an earlier attempt of this very launch has saved something.

        A node that came later does not know of restarts, so an unfinished run is enough.
        """
        restarted, launch = self.machine.any(self.machine.restarts > 0), self.machine.launch

        def saved_before() -> bool:
            newest = newest_state(self.folder) or {}
            is_mine = bool(launch) and newest.get("launch") == launch
            return is_mine and (restarted or newest["step"] < num_steps)

        return self.machine.on_main("reading checkpoints", saved_before)

    def newest(self) -> Checkpoint | None:
        """
        The newest good checkpoint, verified by one rank of each node; None where there is none.

        Raises CorruptCheckpoint, on every rank, where all are damaged, or where nodes differ.
        """

        def open_newest() -> Checkpoint | None:
            try:
                return open_checkpoint(self.folder)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(f"{error}; --resume=never moves all aside") from error

        found = self.machine.on_node("verifying checkpoints", open_newest)
        name = f"step {found.step} ({found.fingerprint})" if found else "no checkpoint"
        names = self.machine.gather(name)
        for rank, other in enumerate(names):
            if other != names[0]:
                message = f"rank {rank} finds {other} in {self.folder}, rank 0 {names[0]}"
                raise CorruptCheckpoint(f"{message}; all nodes need the same files: a shared disk")
        return found

    def disk_bytes(self, model: GPT, saves: int) -> int:
        """
        Bytes that `saves` more saves take on the disk, the last of them that of the finished run:
        those to keep and the one being written, at most.
        """
        there = sum(p.stat().st_size for p in self.folder.glob("step_*/*") if p.is_file())
        sizes = [checkpoint_bytes(model)] * (saves - 1)
        sizes.append(checkpoint_bytes(model, optimizer=self.keep_optimizer))
        return min(sum(sizes), max(max(sizes), (self.cfg.keep + 1) * max(sizes) - there))


def checkpoint_bytes(model: GPT, optimizer: bool = True) -> int:
    """Estimated size of one checkpoint, with its optimizer state or without."""
    state = state_bytes(model)
    return 4 * model.num_params() + (state if optimizer else 0)
