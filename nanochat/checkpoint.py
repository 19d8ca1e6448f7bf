"""
Checkpoints: saved steps, written atomically and verified when they are opened.

    model, optimizer, tokenizer, state -> save_checkpoint -> <stage>_checkpoints/<tag>/step_<n>/
    stage:tag:step -> find_checkpoint -> Checkpoint -> load_model

A folder gets its final name once everything in it is on disk. Files have SHA-256 digests; a
checkpoint that fails verification is skipped in favor of the previous good one.
"""

import contextlib
import errno
import hashlib
import importlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat import common, recipe
from nanochat.common import MissingInput, UsageError, base_dir, printable
from nanochat.config import short
from nanochat.dist import DistContext
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanochat.tokenizer import Tokenizer

MODEL_FILE, OPTIM_FILE = "model.safetensors", "optim.safetensors"
Stage = Literal["base", "mid", "sft", "dpo", "rl"]
SCRIPTS = {
    "base": "base_train",
    "mid": "mid_train",
    "sft": "chat_sft",
    "dpo": "chat_dpo",  # optional
    "rl": "chat_rl",
}
# stage -> name of its folder, before "_checkpoints"
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "dpo": "chatdpo", "rl": "chatrl"}
CHANGED = "Model code changed since"  # in records
ASIDE = ".before-"  # in the folder name of a run that was replaced
CHECKPOINT_REF = re.compile(r"(?P<stage>\w+)(:(?P<tag>[^:]+)(:(?P<step>\d+))?)?")


class CorruptCheckpoint(ValueError):
    """A checkpoint whose files do not match its state.json."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved step. `state` is the content of state.json; tensors are loaded on demand."""

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Identifies the content: model, optimizer and tokenizer."""
        return common.fingerprint(self.state["files"])

    def model_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL_FILE)

    def optim_tensors(self) -> dict[str, Tensor]:
        """State of the optimizer, which imported and merged models do not have."""
        return load_file(self.folder / OPTIM_FILE)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.folder / TOKENIZER_FILE)


# ---- Writing and reading one checkpoint ----------------------------------------------------------


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
    Write `folder`/step_<step>. Keeps it and the `keep` - 1 steps before it; later ones exist only
    if a resume found them corrupt. weights: those of the model to save. Default: the current ones.

    Old checkpoints stay untouched until the new one is complete. If writing fails, the partial one
    is removed and the error is raised, an OSError for disk errors. Only one process at a time may
    call this.
    """
    final, temporary = folder / f"step_{step:06d}", folder / f".saving_{step:06d}"
    replaced = folder / f".saving_replaced_{step:06d}"
    for interrupted in folder.glob(".saving_*"):
        shutil.rmtree(interrupted)
    temporary.mkdir(parents=True)
    try:
        files = {TOKENIZER_FILE: common.sha256_file(tokenizer.save(temporary))}
        weights = weights or model.state_dict()
        files[MODEL_FILE] = save_tensors(weights, temporary / MODEL_FILE)
        if optim_tensors is not None:
            files[OPTIM_FILE] = save_tensors(optim_tensors, temporary / OPTIM_FILE)
        record = {
            **state,
            "step": step,
            **describe_model(model),
            "files": files,
            "saved_at": time.time(),
        }
        common.write_json(temporary / "state.json", {**record, "seal": seal_of(record)})
        if final.exists():  # the same step, saved again
            final.rename(replaced)
        temporary.rename(final)
        common.fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    saved = step_folders(folder)
    kept = [each for each in saved if each <= step][-keep:]
    for old in saved.keys() - kept:
        shutil.rmtree(saved[old], ignore_errors=True)
    return Checkpoint(final, step, read_state(final))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """
    Write a safetensors file and flush it to disk. Returns its SHA-256. Raises OSError if the disk
    is full or fails.
    """
    found, seen = {}, set()
    for name, x in tensors.items():
        x = x.cpu().contiguous()
        tied = x.data_ptr() in seen  # the format has no ties
        found[name] = x.clone() if tied else x
        seen.add(x.data_ptr())
    try:
        save_file(found, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    common.fsync(path)
    return common.sha256_file(path)


def seal_of(state: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a state.json, which has the digests of the other files."""
    return hashlib.sha256(common.json_text(state).encode()).hexdigest()


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state.json of a saved step. Raises CorruptCheckpoint if it is missing or damaged."""
    state = None
    with contextlib.suppress(FileNotFoundError, ValueError):
        state = common.read_json(folder / "state.json")
    if not isinstance(state, dict) or state.pop("seal", None) != seal_of(state):
        raise CorruptCheckpoint(f"{folder}/state.json is missing, or does not match its seal")
    return upgrade(state)


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """Add what states before 2026-12 lack: times in seconds, batch size, peak learning rates."""
    if isinstance(saved_at := state.get("saved_at"), str):
        state["saved_at"] = time.mktime(time.strptime(saved_at, "%Y-%m-%d %H:%M:%S"))
    if identity := state.get("identity"):
        state.setdefault("batch_tokens", identity["batch_tokens"])
        if "optim" in identity:
            state.setdefault("learning_rates", identity["optim"])
    return state


def read_checkpoint(folder: Path, optimizer: bool = False) -> Checkpoint:
    """
    Read and verify a saved step, with its optimizer state if that will be loaded. Raises
    CorruptCheckpoint naming the first damaged file.
    """
    state = read_state(folder)
    for name, digest in state["files"].items():
        path = folder / name
        if name == OPTIM_FILE and not optimizer:
            continue
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing")
        if common.sha256_file(path) != digest:
            raise CorruptCheckpoint(f"{path} does not match its SHA-256")
    return Checkpoint(folder, state["step"], state)


# ---- Finding checkpoints -------------------------------------------------------------------------


def stage_folder(stage: str) -> Path:
    """Checkpoint folder of a stage (base, mid, sft, dpo, rl). Raises ValueError for other names."""
    if stage not in FOLDERS:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(FOLDERS)}")
    return base_dir() / f"{FOLDERS[stage]}_checkpoints"


def step_folders(folder: Path) -> dict[int, Path]:
    """Saved steps of a folder and their paths, in numeric order."""
    found = {int(path.name[5:]): path for path in folder.glob("step_*") if path.name[5:].isdigit()}
    return dict(sorted(found.items()))


def saved_tags(stage: str) -> list[str]:
    """
    Tags of a stage that have a checkpoint, the most recently saved first; without runs that a later
    one has moved aside.
    """
    saved = {}
    for folder in {path.parent for path in stage_folder(stage).glob("*/step_*")}:
        if ASIDE not in folder.name:
            state = saved_state(folder)
            saved[folder.name] = state["saved_at"] if state else 0.0
    return sorted(saved, key=lambda tag: (saved[tag], tag), reverse=True)


def saved_state(folder: Path, step: int | None = None) -> dict[str, Any] | None:
    """
    The newest readable state of a folder, or that of `step`; None if there is none. Its other files
    are not verified.
    """
    for saved, path in reversed(step_folders(folder).items()):
        with contextlib.suppress(OSError, ValueError):
            if step in (None, saved):
                return read_state(path)
    return None


def intact_checkpoints(folder: Path, optimizer: bool = False) -> Iterator[Checkpoint]:
    """The good checkpoints of a folder, newest first; corrupt ones are reported and skipped."""
    for path in reversed(step_folders(folder).values()):
        try:
            yield read_checkpoint(path, optimizer)
        except (FileNotFoundError, ValueError) as error:  # not those of the disk
            print(printable(f"skipping corrupt checkpoint: {error}"), flush=True)


def newest_checkpoint(folder: Path, optimizer: bool = False) -> Checkpoint | None:
    """
    The newest good checkpoint of a folder; None if there is none. optimizer: its optimizer state
    will be loaded, too. Raises CorruptCheckpoint if all are corrupt.
    """
    listed = step_folders(folder)
    found = next(intact_checkpoints(folder, optimizer), None)
    if found is None and step_folders(folder) != listed:  # a run has replaced them meanwhile
        return newest_checkpoint(folder, optimizer)
    if found is None and listed:
        problem = f"all checkpoints in {folder} are corrupt"
        raise CorruptCheckpoint(f"{problem}; rename it and train that stage again")
    return found


def find_checkpoint(ref: str, tag: str | None = None, step: int | None = None) -> Checkpoint:
    """
    Return a checkpoint by reference: stage[:tag[:step]], as in sft, base:d4 or base:d4:400.

    tag, step: used where `ref` has none. Default: the most recently saved tag, its last good step.

    Raises ValueError if the reference is malformed, CorruptCheckpoint, FileNotFoundError for a
    missing step, and MissingInput with the script that creates a checkpoint.
    """
    parts = CHECKPOINT_REF.fullmatch(ref)
    if not parts or parts["stage"] not in FOLDERS:
        raise ValueError(f"invalid checkpoint {ref!r}; use stage[:tag[:step]], as in base:d4:400")
    stage, tag = parts["stage"], parts["tag"] or tag or None
    step = int(parts["step"]) if parts["step"] else step
    root, command = stage_folder(stage), f"python -m scripts.{SCRIPTS[stage]}"
    if stage == "base":  # the default depth would take weeks on a CPU
        named = re.fullmatch(r"d(\d+)", tag or "")
        command += f" --depth={named[1] if named else 4}"
    if tag is None:
        tag = next(iter(saved_tags(stage)), None)
    if tag is None:
        raise MissingInput(f"no checkpoint in {root}", command)
    folder = root / tag
    folders = step_folders(folder)
    if step is not None:
        if step not in folders:
            raise FileNotFoundError(f"no step {step} in {folder}; available: {list(folders)}")
        return read_checkpoint(folders[step])
    found = newest_checkpoint(folder)
    if found is None:
        known = ", ".join(f"{stage}:{each}" for each in saved_tags(stage)) or "none"
        fix = f"{command} --model_tag={tag}"
        raise MissingInput(f"no checkpoint in {folder}; there are: {known}", fix)
    return found


@dataclass(frozen=True)
class CheckpointChoice:
    """Flags that choose a checkpoint of any stage."""

    source: Annotated[Stage | None, short("i")] = None
    """Stage of the model. Default: the last stage that has a checkpoint."""
    model_tag: Annotated[str | None, short("g")] = None
    """Folder of the checkpoint. Default: the newest."""
    step: Annotated[int | None, short("s")] = None
    """Step of the checkpoint. Default: the latest intact one."""

    def find(self) -> tuple[str, Checkpoint]:
        """The stage and the checkpoint. Raises MissingInput if there is none."""
        tag = self.model_tag
        stages = [x for x in FOLDERS if (saved_tags(x) if tag is None else tag in saved_tags(x))]
        if not self.source and not stages:
            name = f"model {tag}" if tag else "model"
            raise MissingInput(f"no {name} in {base_dir()}", "bash speedrun.sh")
        stage = self.source or stages[-1]
        return stage, find_checkpoint(stage, self.model_tag, self.step)


def lineage(state: Mapping[str, Any]) -> dict[str, Any]:
    """
    State to carry over when the model is saved elsewhere: its source, provenance, peak learning
    rates and batch size in tokens.
    """
    kept = ("source", "provenance", "learning_rates", "batch_tokens")
    return {name: state[name] for name in kept if name in state}


# ---- Models --------------------------------------------------------------------------------------


Model = TypeVar("Model", bound=GPT)


def build_model(
    cfg: GPTConfig, device: torch.device, dtype: torch.dtype, seed: int, kind: type[Model] = GPT
) -> Model:
    """
    Create a model on `device` and draw its weights there. They depend on the seed and the kind of
    device, not on the number of ranks: a CPU and a GPU, or two GPU models, start from different
    weights of the same distribution. To compare them, load a checkpoint.
    """
    with device:
        model = kind(cfg, dtype)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model


def load_model(checkpoint: Checkpoint, dist: DistContext, max_seq_len: int | None = None) -> GPT:
    """
    Rebuild the model of a checkpoint on the device, from its saved class and config. `max_seq_len`
    overrides its row length. Raises UsageError as `model_class`.
    """
    if changed := changed_model_code(checkpoint):
        dist.print0(printable(f"{checkpoint.folder} was trained by other code: {changed} changed"))
    kind, config = model_class(checkpoint.state)
    cfg = config(**checkpoint.state["model"])
    with dist.device:
        model = kind(replace(cfg, max_seq_len=max_seq_len or cfg.max_seq_len), dist.dtype)
    model.load_state_dict(checkpoint.model_tensors())
    return model


def changed_model_code(checkpoint: Checkpoint) -> str | None:
    """Files of the model's class that have changed since the checkpoint was saved, or None."""
    kind, _ = model_class(checkpoint.state)
    file = Path(sys.modules[kind.__module__].__file__ or "")
    recipe.add_code(file)
    changed = recipe.changed_code(checkpoint.state.get("code", {}))
    return ", ".join(sorted(recipe.imported_files(file).keys() & changed)) or None


def describe_model(model: GPT) -> dict[str, Any]:
    """What `model_class` and `load_model` need of a model: its class and its configuration."""
    kind = type(model)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "model": asdict(model.cfg)}


def model_class(state: Mapping[str, Any]) -> tuple[type[GPT], type[GPTConfig]]:
    """
    The class of a saved model and that of its configuration, which annotates its `cfg`. Raises
    UsageError if it is no subclass of GPT in this package, or lacks saved options.
    """
    path = state.get("class", f"{GPT.__module__}.{GPT.__qualname__}")  # older ones name no class
    module, _, name = path.rpartition(".")
    kind: Any = None
    if module.startswith("nanochat."):
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or ""):  # a package that its file imports
                raise
    if not (isinstance(kind, type) and issubclass(kind, GPT)):
        problem = f"the model has the class {path}, which nanochat/ does not define"
        raise UsageError(problem, "use the code that trained it, or another checkpoint")
    config = get_type_hints(kind)["cfg"]
    if unknown := sorted(state["model"].keys() - {each.name for each in fields(config)}):
        problem = f"the model has {', '.join(unknown)}, which {config.__name__} does not have"
        raise UsageError(problem, "use the code that trained it, or another checkpoint")
    return kind, config


def load_inference(checkpoint: Checkpoint, dist: DistContext) -> tuple[GPT, Tokenizer]:
    """Return the `inference_copy` of a checkpoint's model, and its tokenizer."""
    return inference_copy(load_model(checkpoint, dist)), checkpoint.tokenizer()
