"""
Checkpoints: written whole or not at all, verified when read.

    model, optimizer, tokenizer, state -> <stage>_checkpoints/<tag>/step_<n>/ -> the same, anywhere

A folder is written under a temporary name, flushed to disk, renamed, and only then named by
`latest`. Reading checks every file against the digests in state.json and falls back to the
checkpoint before it. Tensors are stored whole, so any number of ranks can load them.
"""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat.common import (
    MissingInput,
    base_dir,
    fingerprint,
    fsync,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from nanochat.disk import require_free
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW
from nanochat.rows import differences
from nanochat.tokenizer import Tokenizer
from nanochat.train import Progress

FORMAT = 1
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}  # + _checkpoints
STEP_FOLDER = re.compile(r"step_(\d+)")


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
        return load_file(self.folder / "model.safetensors")

    def optim_tensors(self) -> dict[str, Tensor]:
        """Raises MissingInput where the optimizer was not kept."""
        path = self.folder / "optim.safetensors"
        if not path.exists():
            raise MissingInput(f"{self.folder} holds no optimizer state", "--resume=never")
        return load_file(path)

    def verify(self) -> None:
        """Raises CorruptCheckpoint naming the first file that differs from its digest."""
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


class Checkpoints:
    """The checkpoints of one run: `folder` holds step_<n>/ and `latest`. Every rank has one."""

    def __init__(self, folder: Path, machine: Machine, keep: int = 2):
        self.folder, self.machine, self.keep = folder, machine, keep
        self.saved: Checkpoint | None = None

    def save(
        self,
        model: GPT,
        optimizer: MuonAdamW,
        tokenizer: Tokenizer,
        state: Mapping[str, Any],
        progress: Progress,
    ) -> None:
        """Collect the optimizer's state from all ranks; the main one writes (`save_checkpoint`)."""
        tensors = optimizer.state_dict()
        if self.machine.is_main:
            state = {**state, "progress": progress.state_dict()}
            self.saved = save_checkpoint(
                self.folder, progress.step, model, tensors, tokenizer, state, self.keep
            )
        self.machine.barrier()

    def resume(
        self,
        identity: Mapping[str, Any],
        allow_change: bool,
        model: GPT,
        optimizer: MuonAdamW,
        progress: Progress,
    ) -> bool:
        """
        Load the newest good checkpoint; False where there is none.

        Raises ValueError naming what differs when it belongs to another `identity` (model, batch,
        seed, rows), unless only rows differ and `allow_change` is set.
        """
        found = open_checkpoint(self.folder, say=self.machine.print0)
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
        optimizer.load_state_dict(found.optim_tensors())
        progress.load_state_dict(found.state["progress"])
        self.machine.print0(f"resumed {found.folder}")
        return True

    def make_room(self) -> None:
        """Move the checkpoints of an earlier run of this name out of the way, deleting nothing."""
        if self.machine.is_main and list_steps(self.folder):
            when = time.strftime("%y%m%d-%H%M%S")
            aside = self.folder.rename(f"{self.folder}.before-{when}")
            self.machine.print0(f"the checkpoints of an earlier run are now in {aside}")
        self.machine.barrier()

    def require_space(self, model: GPT) -> None:
        """Raises OSError naming both numbers when the disk cannot hold what `keep` asks for."""
        needed = (self.keep + 1) * checkpoint_bytes(model)
        require_free(self.folder, needed, f"keeping {self.keep} checkpoints")


def save_checkpoint(
    folder: Path,
    step: int,
    model: GPT,
    optim_tensors: Mapping[str, Tensor] | None,
    tokenizer: Tokenizer,
    state: Mapping[str, Any],
    keep: int = 2,
) -> Checkpoint:
    """
    Write `folder`/step_<step>, then point `latest` at it and drop all but the newest `keep`.

    The old checkpoints stay untouched until the new one is complete; when writing fails, what
    was begun is removed and the error is raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    final, temporary = folder / f"step_{step:06d}", folder / f".saving_{step:06d}"
    temporary.mkdir()
    try:
        tokenizer.save(temporary)
        weights = {n: p.detach().to("cpu").contiguous() for n, p in model.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        if optim_tensors is not None:
            save_file(dict(optim_tensors), temporary / "optim.safetensors")
        files = {}
        for path in sorted(temporary.iterdir()):
            fsync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        record = {
            **state,
            "format": FORMAT,
            "step": step,
            "model": asdict(model.cfg),
            "files": files,
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        write_json(temporary / "state.json", record)
        if final.exists():  # the same step, saved again
            final.rename(folder / f".replaced_{step:06d}")
        temporary.rename(final)
        fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    write_atomic(folder / "latest", final.name + "\n")
    sweep(folder)
    for old in list_steps(folder)[:-keep]:
        if old != step:
            shutil.rmtree(step_folder(folder, old))
    return Checkpoint(final, step, record)


def sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind; put back what it was about to replace."""
    for path in folder.glob(".replaced_*"):
        original = folder / path.name.replace(".replaced_", "step_")
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in folder.glob(".saving_*"):
        shutil.rmtree(path)


def list_steps(folder: Path) -> list[int]:
    """The committed steps of a folder in numeric order."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir())
    return sorted(int(m[1]) for m in names if m)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step, however many digits its name has."""
    names = {p: STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir()}
    found = [p for p, m in names.items() if m and int(m[1]) == step]
    if not found:
        raise FileNotFoundError(f"no step {step} in {folder}; there are {list_steps(folder)}")
    return found[0]


def open_checkpoint(
    folder: Path, step: int | None = None, say: Callable[[str], None] = print
) -> Checkpoint | None:
    """
    The newest good checkpoint of a folder, or exactly `step`; None where there is none.

    Damaged checkpoints are named and passed over. Raises CorruptCheckpoint when the step asked
    for is damaged, or when there are checkpoints and all are.
    """
    sweep(folder)
    wanted = list_steps(folder)[::-1] if step is None else [step]
    last_error: Exception | None = None
    for number in wanted:
        try:
            path = step_folder(folder, number)
            state = read_json(path / "state.json")
            checkpoint = Checkpoint(path, number, state)
            if state.get("format") != FORMAT:
                raise CorruptCheckpoint(f"{path} has format {state.get('format')}, not {FORMAT}")
            checkpoint.verify()
            return checkpoint
        except (CorruptCheckpoint, FileNotFoundError, ValueError, KeyError) as error:
            if step is not None:
                raise
            last_error = error
            say(f"checkpoint passed over: {error}")
    if last_error is not None:
        raise CorruptCheckpoint(f"no good checkpoint is left in {folder}") from last_error
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
    """What of a checkpoint's state says where its model comes from, wherever it is taken."""
    batch = {"batch_tokens": state["identity"]["batch_tokens"]}
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


def load_model(checkpoint: Checkpoint, machine: Machine, max_seq_len: int | None = None) -> GPT:
    """
    Rebuild the model of a checkpoint on the machine's device, from its saved config; for rows of
    another length where `max_seq_len` says so.
    """
    cfg = GPTConfig(**checkpoint.state["model"])
    with torch.device("meta"):
        model = GPT(replace(cfg, max_seq_len=max_seq_len or cfg.max_seq_len), machine.dtype)
    model.to_empty(device=machine.device)
    model.load_state_dict(checkpoint.model_tensors())
    return model


def checkpoint_bytes(model: GPT) -> int:
    """Estimated size of one checkpoint with its optimizer state."""
    roles = model.param_roles()
    return sum(
        p.numel() * 4 * (2 if roles[n] == "matrix" else 3) for n, p in model.named_parameters()
    )
