"""
Checkpoints: files that are written whole and verified, and the checkpoints of one run.

    model, optimizer, state -> write_checkpoint -> <stage>_checkpoints/<tag>/step_<n>/ -> load_model
    lock -> resume or make room -> save ... save -> the last one safe on disk -> unlock

A folder appears under its name when everything in it is on disk. Files have digests; a checkpoint
that fails them is skipped, and the previous good one is used.
"""

import contextlib
import importlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.common import (
    MissingInput,
    Refused,
    RunLock,
    base_dir,
    fingerprint,
    fsync,
    json_text,
    printable,
    read_json,
    sealed,
    sha256_file,
    unseal,
    write_atomic,
)
from nanochat.dataloader import differences
from nanochat.distributed import Machine
from nanochat.gpt import GPT, GPTConfig, config_from
from nanochat.optim import OLD_SETTINGS, MuonAdamW, state_bytes
from nanochat.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, NotFinite, Progress, first_not_finite, require_equal_ranks

# ---- Reading and writing one checkpoint ----------------------------------------------------------


FORMAT = 2
MODEL_FILE, OPTIM_FILE = "model.safetensors", "optim.safetensors"
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}  # + _checkpoints
# .replaced: the same step was being saved again when the process died
STEP_FOLDER = re.compile(r"(?:step|\.replaced)_(\d+)")


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
        return fingerprint({n: f["sha256"] for n, f in self.state["files"].items()})

    def model_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL_FILE)

    @property
    def has_optimizer(self) -> bool:
        """Whether the optimizer state was kept."""
        return OPTIM_FILE in self.state["files"]

    def optim_tensors(self) -> dict[str, Tensor]:
        """Raises Refused where the optimizer state was not kept."""
        if not self.has_optimizer:
            raise Refused(
                f"{self.folder} holds no optimizer state",
                "leave out --warm_start, or train that checkpoint anew with --save_optimizer",
            )
        return load_file(self.folder / OPTIM_FILE)

    def verify(self) -> None:
        """
        Raises CorruptCheckpoint naming the first file that differs from its digest, and where the
        folder or the list of files is not that of a saved step.
        """
        for name in (MODEL_FILE, TOKENIZER_FILE):
            if name not in self.state["files"]:
                raise CorruptCheckpoint(f"{self.folder}: its state.json lists no {name}")
        if self.state["step"] != self.step:
            raise CorruptCheckpoint(
                f"{self.folder} was renamed: its state.json is that of step {self.state['step']}; "
                f"rename the folder to step_{self.state['step']:06d}"
            )
        for name, was in self.state["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise CorruptCheckpoint(f"{path} is missing")
            if path.stat().st_size != was["bytes"] or sha256_file(path) != was["sha256"]:
                raise CorruptCheckpoint(f"{path} does not match its SHA-256")


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
) -> Checkpoint:
    """`write_checkpoint` of a model as it is now."""
    weights = weights_on_host(model)
    return write_checkpoint(folder, step, weights, model.cfg, optim_tensors, tokenizer, state, keep)


def write_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    cfg: GPTConfig,
    optim_tensors: Mapping[str, Tensor] | None,
    tokenizer: Tokenizer,
    state: Mapping[str, Any],
    keep: int = 2,
) -> Checkpoint:
    """
    Write `folder`/step_<step>, then point `latest` at it and drop all but the newest `keep`.

    The old checkpoints stay untouched until the new one is complete; when writing fails, what
    was begun is removed and the error, an OSError where the disk is at fault, is raised. One
    process at a time may call this (`disk.RunLock`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    final, temporary = folder / f"step_{step:06d}", folder / f".saving_{step:06d}"
    temporary.mkdir()
    try:
        tokenizer.save(temporary)
        save_tensors(weights, temporary / MODEL_FILE)
        if optim_tensors is not None:
            save_tensors(optim_tensors, temporary / OPTIM_FILE)
        files = {}
        for path in sorted(temporary.iterdir()):
            fsync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        record = {
            **state,
            "format": FORMAT,
            "step": step,
            "model": asdict(cfg),
            "files": files,
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        record = json.loads(json_text(record))  # as it will be read
        write_atomic(temporary / "state.json", json_text(sealed(record)))
        if final.exists():  # the same step, saved again
            final.rename(folder / f".replaced_{step:06d}")
        temporary.rename(final)
        fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # it is committed: the rest can wait for the next save
        write_atomic(folder / "latest", final.name + "\n")
        sweep(folder)
    for old in list_steps(folder)[:-keep]:
        if old != step:
            shutil.rmtree(step_folder(folder, old), ignore_errors=True)
    return Checkpoint(final, step, record)


def weights_on_host(model: GPT, copy: bool = False) -> dict[str, Tensor]:
    """The weights as a file wants them; those of a model on the CPU are only copied if asked to."""
    weights = {n: p.detach().to("cpu").contiguous() for n, p in model.state_dict().items()}
    if copy and next(model.parameters()).device.type == "cpu":
        weights = {n: p.clone() for n, p in weights.items()}
    return weights


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
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in folder.glob(".saving_*"):
        shutil.rmtree(path)


def read_state(path: Path) -> dict[str, Any]:
    """The content of a state.json. Raises CorruptCheckpoint unless it is what was written."""
    state = read_json(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        was = state.get("format") if isinstance(state, dict) else None
        raise CorruptCheckpoint(f"{path} has format {was}, not {FORMAT}")
    try:
        rest = unseal(path.read_text(encoding="utf-8"), json_text)
    except ValueError as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
    files = rest.get("files")
    listed = isinstance(files, dict) and all(
        isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values()
    )
    if not listed or "step" not in rest:
        raise CorruptCheckpoint(f"{path} does not say which files of which step it is about")
    return rest


def list_steps(folder: Path) -> list[int]:
    """The committed steps of a folder in numeric order."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir())
    return sorted({int(m[1]) for m in names if m})


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step, however many digits its name has."""
    names = {p: STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir()}
    found = [p for p, m in names.items() if m and int(m[1]) == step]
    if not found:
        raise FileNotFoundError(f"no step {step} in {folder}; there are {list_steps(folder)}")
    return max(found)  # step_ before .replaced_


def open_checkpoint(
    folder: Path, step: int | None = None, say: Callable[[str], None] = print
) -> Checkpoint | None:
    """
    The newest good checkpoint of a folder, or exactly `step`; None where there is none.

    Damaged checkpoints are named and passed over. Raises CorruptCheckpoint when the step asked
    for is damaged, or when there are checkpoints and all are.
    """
    wanted = list_steps(folder)[::-1] if step is None else [step]
    last_error: Exception | None = None
    for number in wanted:
        try:
            path = step_folder(folder, number)
            checkpoint = Checkpoint(path, number, read_state(path / "state.json"))
            checkpoint.verify()
            return checkpoint
        except (OSError, ValueError) as error:
            if step is not None:
                raise
            last_error = error
            say(f"checkpoint passed over: {error}")
    if last_error is not None:
        raise CorruptCheckpoint(f"no good checkpoint is left in {folder}") from last_error
    return None


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state of a folder that can be read; its files are not verified."""
    for step in list_steps(folder)[::-1]:
        with contextlib.suppress(OSError, ValueError):
            return read_state(step_folder(folder, step) / "state.json")
    return None


def find_checkpoint(
    stage: str, tag: str | None = None, step: int | None = None, say: Callable[[str], None] = print
) -> Checkpoint:
    """
    The checkpoint of a stage: tag and step where given, else the tag written last, its last step.

    Raises MissingInput naming the script that makes one.
    """
    root = stage_folder(stage)
    if tag is None:
        tags = list(root.glob("*/latest"))
        if not tags:
            raise MissingInput(f"no checkpoint in {root}", f"python -m {maker(stage)}")
        tag = max(tags, key=lambda p: p.stat().st_mtime).parent.name
    found = open_checkpoint(root / tag, step, say)
    if found is None:
        raise MissingInput(
            f"no checkpoint in {root / tag}", f"python -m {maker(stage)} --model_tag={tag}"
        )
    return found


def referred(name: str, say: Callable[[str], None] = print) -> Checkpoint:
    """
    The checkpoint that stage[:tag[:step]] names, as in sft, base:d4 or base:d4:400.

    Raises ValueError for another form, MissingInput where there is no such checkpoint.
    """
    parts = name.split(":")
    if not 1 <= len(parts) <= 3 or parts[0] not in FOLDERS or not (parts[2:] or ["0"])[0].isdigit():
        raise ValueError(f"{name!r} names no checkpoint: stage[:tag[:step]], as in base:d4:400")
    step = int(parts[2]) if len(parts) == 3 else None
    return find_checkpoint(parts[0], parts[1] if len(parts) > 1 else None, step, say)


def carried(state: Mapping[str, Any]) -> dict[str, Any]:
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


def maker(stage: str) -> str:
    """The script that writes the checkpoints of a stage."""
    scripts = {"base": "base_train", "mid": "mid_train", "sft": "chat_sft", "rl": "chat_rl"}
    return f"scripts.{scripts[stage]}"


def closing_lines(folder: Path, machine: Machine) -> str:
    """What a training prints last: where its checkpoint is, and the next command."""
    stage = next(s for s, name in FOLDERS.items() if folder.parts[-3] == f"{name}_checkpoints")
    tag = folder.parent.name
    run = "python" if machine.world_size == 1 else f"torchrun --nproc_per_node={machine.local_size}"
    last = "" if machine.world_size == 1 else " --"
    following = {"base": "mid", "mid": "sft", "sft": "rl"}.get(stage)
    lines = [f"checkpoint: {folder}"]
    if following:
        lines += [f"next: {run} -m {maker(following)}{last} --model_tag={tag}"]
    if stage in ("sft", "rl"):
        lines += [f"chat: python -m scripts.chat_cli --source={stage} --model_tag={tag}"]
    return "\n".join(lines)


# Other models than GPT: a field that only their configuration has -> a module with `read_config`,
# `new_model` and `callbacks`
ARCHITECTURES = {"xsa_last_n": "nanochat.golf.model", "n_loops": "nanochat.recursion.metrics"}


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """The model configuration that a checkpoint holds. Raises ValueError for a deleted option."""
    for field, module in ARCHITECTURES.items():
        if field in values:
            return importlib.import_module(module).read_config(values)
    return config_from(GPTConfig, values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """A model of a configuration, its weights not drawn yet."""
    for field, module in ARCHITECTURES.items():
        if hasattr(cfg, field):
            return importlib.import_module(module).new_model(cfg, dtype)
    return GPT(cfg, dtype)


def upgrade_identity(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The identity that an earlier commit gave a run, as this one has it."""
    upgraded = dict(recorded)
    for name in {"optim", "schedule"} & recorded.keys():
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


def model_callbacks(model: GPT, optimizer: MuonAdamW, seed: int) -> list[Callback]:
    """The callbacks that every training of this kind of model needs."""
    found = [module for field, module in ARCHITECTURES.items() if hasattr(model.cfg, field)]
    modules = map(importlib.import_module, found)
    return [each for module in modules for each in module.callbacks(model, optimizer, seed)]


def load_model(checkpoint: Checkpoint, machine: Machine, max_seq_len: int | None = None) -> GPT:
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
        changed = differences(upgrade_identity(found.state["identity"]), identity)
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
