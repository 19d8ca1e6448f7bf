"""
Checkpoints: atomic writes with verification, and the checkpoints of one run.

    model, optimizer, state -> write_checkpoint -> <stage>_checkpoints/<tag>/step_<n>/ -> load_model
    lock -> resume or move old checkpoints -> save ... save -> wait for the last one -> unlock

A folder gets its final name once everything in it is on disk. Files have SHA-256 digests; a
checkpoint that fails verification is skipped in favor of the previous good one.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from nanochat import common
from nanochat.anomaly import AnomalyState, NonFiniteError, first_not_finite, require_equal_ranks
from nanochat.common import MissingInput, RunLock, UsageError, base_dir, printable
from nanochat.config import require_at_least, short
from nanochat.dataloader import diff_recipe
from nanochat.distributed import DistContext
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.optim import full_state, load_full_state, state_bytes
from nanochat.records import ADDED_COSTS, STARTED
from nanochat.tokenizer import FILE_NAME as TOKENIZER_FILE
from nanochat.tokenizer import Tokenizer

# ---- Reading and writing one checkpoint ----------------------------------------------------------


FORMAT = 2
MODEL_FILE, OPTIM_FILE = "model.safetensors", "optim.safetensors"
Stage = Literal["base", "mid", "sft", "dpo", "rl"]
SCRIPTS = {
    "base": "base_train",
    "mid": "mid_train",
    "sft": "chat_sft",
    "dpo": "chat_dpo",  # optional
    "rl": "chat_rl",
}
# + _checkpoints
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "dpo": "chatdpo", "rl": "chatrl"}
DTYPES = {torch.float32: "F32", torch.int64: "I64"}  # of saved tensors, in a safetensors file
# .replaced remains if the process was killed while saving a step that was already saved
STEP_FOLDER = re.compile(r"(?:step|\.replaced)_(\d+)")
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
        return common.fingerprint({n: f["sha256"] for n, f in self.state["files"].items()})

    def model_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / MODEL_FILE)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.folder / TOKENIZER_FILE)

    @property
    def has_optimizer(self) -> bool:
        return OPTIM_FILE in self.state["files"]

    def optim_tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / OPTIM_FILE)

    def next_commands(self, machine: DistContext) -> str:
        """Lines printed after training: the checkpoint folder and the next commands."""
        stage, tag = self.state["stage"], self.folder.parent.name
        many = f"torchrun --nproc_per_node={machine.local_size} -m scripts.{{}} --"
        run = many if machine.world_size > 1 else "python -m scripts.{}"
        lines = [f"checkpoint: {self.folder}"]
        if following := dict(pairwise(s for s in SCRIPTS if s != "dpo")).get(stage):
            lines.append(f"next: {run.format(SCRIPTS[following])} --model_tag={tag}")
        if stage in ("sft", "dpo", "rl"):
            lines.append(f"chat: python -m scripts.chat_cli --source={stage} --model_tag={tag}")
        return "\n".join(lines)


def stage_folder(stage: str) -> Path:
    """Checkpoint folder of a stage (base, mid, sft, dpo, rl). Raises ValueError for other names."""
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
    Write `folder`/step_<step>, point `latest` at it and delete all but the newest `keep`.

    weights: tensors of the model to save, on the CPU. Default: the current ones.
    Old checkpoints stay untouched until the new one is complete. If writing fails, the partial one
    is removed and the error is raised, an OSError for disk errors. Only one process at a time may
    call this (`RunLock`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover_interrupted_saves(folder)
    final, temporary = folder / f"step_{step:06d}", folder / f".saving_{step:06d}"
    temporary.mkdir()
    try:
        path = tokenizer.save(temporary)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": common.sha256_file(path)}}
        weights = weights or {name: x.cpu() for name, x in model.state_dict().items()}
        files[MODEL_FILE] = save_tensors(weights, temporary / MODEL_FILE)
        if optim_tensors is not None:
            files[OPTIM_FILE] = save_tensors(optim_tensors, temporary / OPTIM_FILE)
        record = {
            **state,
            "format": FORMAT,
            "step": step,
            "model": asdict(model.cfg),
            "files": files,
            "saved_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        common.write_json(temporary / "state.json", common.seal(record))
        if final.exists():  # the same step, saved again
            final.rename(folder / f".replaced_{step:06d}")
        temporary.rename(final)
        common.fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with contextlib.suppress(OSError):  # already committed; cleanup can wait for the next save
        (folder / "latest").write_text(final.name + "\n")
        recover_interrupted_saves(folder)
    for old, path in list(step_folders(folder).items())[:-keep]:
        if old != step:
            shutil.rmtree(path, ignore_errors=True)
    return Checkpoint(final, step, read_state(final / "state.json"))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """
    Write a safetensors file and flush it to disk, while a thread computes its SHA-256. Returns both
    its `bytes` and its `sha256`. Raises OSError if the disk is full or fails.

    The same bytes as safetensors' `save_file`, which would have to be read again to be hashed.
    Source: https://huggingface.co/docs/safetensors (format)
    """
    header, size = dict[str, Any](), 0
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    for name, x in tensors.items():
        span, size = [size, size + x.nbytes], size + x.nbytes
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (x.reshape(-1).view(torch.uint8).numpy() for x in tensors.values())
    parts = [len(text).to_bytes(8, "little"), text, *data]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as hasher, path.open("wb") as stream:
        hashed = hasher.map(digest.update, parts)  # in order: there is one thread
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())
        list(hashed)  # raises an error of the thread
    return {"bytes": 8 + len(text) + size, "sha256": digest.hexdigest()}


def recover_interrupted_saves(folder: Path) -> None:
    """
    Remove the files of an interrupted save and restore the checkpoint it was replacing.

    Only for the process that writes: to others, a save in progress looks like an interrupted one.
    """
    for path in folder.glob(".replaced_*"):
        original = folder / path.name.replace(".replaced_", "step_")
        shutil.rmtree(path) if original.exists() else path.rename(original)
    for path in folder.glob(".saving_*"):
        shutil.rmtree(path)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state.json. Raises CorruptCheckpoint for another format, ValueError if damaged."""
    state = common.read_json(path)
    was = state.get("format") if isinstance(state, dict) else None
    if was != FORMAT:
        raise CorruptCheckpoint(f"{path} has checkpoint format {was}, not {FORMAT}")
    return common.read_sealed(path)


def step_folders(folder: Path) -> dict[int, Path]:
    """Saved steps of a folder and their paths, in numeric order."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # step_ sorts after .replaced_
    found = {int(m[1]): path for path in paths if (m := STEP_FOLDER.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """
    Read and verify a saved step. Raises CorruptCheckpoint if a file does not match its digest
    (naming the first such file), or if state.json lists no files or is from another step.
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
            f"{folder} was renamed: its state.json is from step {state['step']}; rename the "
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
    Return the newest good checkpoint of a folder, or exactly `step`; None if there is none.

    Raises FileNotFoundError if `step` does not exist, ValueError if it is corrupt, and
    CorruptCheckpoint if all checkpoints are.
    """
    folders = step_folders(folder)
    if step is not None and step not in folders:
        raise FileNotFoundError(f"no step {step} in {folder}; available: {list(folders)}")
    if step is not None:
        return read_checkpoint(folders[step], step)
    found = next(intact_checkpoints(folder), None)
    if folders and found is None:
        raise CorruptCheckpoint(f"all checkpoints in {folder} are corrupt")
    return found


def intact_checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """The good checkpoints of a folder, newest first; corrupt ones are reported and skipped."""
    for step, path in reversed(step_folders(folder).items()):
        try:
            yield read_checkpoint(path, step)
        except (OSError, ValueError) as error:
            print(printable(f"skipping corrupt checkpoint: {error}"), flush=True)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest readable state of a folder, or None; its files are not verified."""
    for path in reversed(step_folders(folder).values()):
        with contextlib.suppress(OSError, ValueError):
            return read_state(path / "state.json")
    return None


def find_checkpoint(stage: str, tag: str | None = None, step: int | None = None) -> Checkpoint:
    """
    Return a checkpoint of a stage. Default: the last good step of the most recently saved tag.

    Raises MissingInput with the script that creates one.
    """
    root, command = stage_folder(stage), f"python -m scripts.{SCRIPTS[stage]}"
    if stage == "base":  # the default depth would take weeks on a CPU
        named = re.fullmatch(r"d(\d+)", tag or "")
        command += f" --depth={named[1] if named else 4}"
    if tag is None:
        tags = list(root.glob("*/latest"))
        if not tags:
            raise MissingInput(f"no checkpoint in {root}", command)
        tag = max(tags, key=lambda p: p.stat().st_mtime).parent.name
    found = open_checkpoint(root / tag, step)
    if found is None:
        raise MissingInput(f"no checkpoint in {root / tag}", f"{command} --model_tag={tag}")
    return found


def find_checkpoint_on_node(
    machine: DistContext, stage: str, tag: str | None, step: int | None
) -> Checkpoint:
    """`find_checkpoint`, called once per node for all its ranks."""
    return machine.on_node("verifying the checkpoint", lambda: find_checkpoint(stage, tag, step))


def parse_checkpoint_ref(name: str) -> Checkpoint:
    """
    Return the checkpoint of stage[:tag[:step]], as in sft, base:d4 or base:d4:400.

    Raises ValueError if malformed, MissingInput or FileNotFoundError if the checkpoint is missing.
    """
    found = CHECKPOINT_REF.fullmatch(name)
    if not found or found["stage"] not in FOLDERS:
        raise ValueError(f"invalid checkpoint {name!r}; use stage[:tag[:step]], as in base:d4:400")
    step = int(found["step"]) if found["step"] else None
    return find_checkpoint(found["stage"], found["tag"], step)


def lineage(state: Mapping[str, Any]) -> dict[str, Any]:
    """
    State to carry over when the model is saved elsewhere: its source, provenance and batch size in
    tokens (RL has none).
    """
    batch = {k: v for k, v in state["identity"].items() if k == "batch_tokens"}
    return {"source": state["source"], "provenance": state["provenance"], "identity": batch}


def newest_stage() -> str:
    """Last of base, mid, sft, dpo, rl with a checkpoint. Raises MissingInput if none exists."""
    for stage in reversed(FOLDERS):
        if next(stage_folder(stage).glob("*/latest"), None):
            return stage
    raise MissingInput(f"no model in {base_dir()}", "bash speedrun.sh")


@dataclass(frozen=True)
class CheckpointChoice:
    """Flags that choose a checkpoint of any stage."""

    source: Stage | None = short("i", None)
    """Stage of the model. Default: the last stage that has a checkpoint."""
    model_tag: str | None = short("g", None)
    """Folder of the checkpoint. Default: the newest."""
    step: int | None = short("s", None)
    """Step of the checkpoint. Default: the latest intact one."""

    def find(self) -> tuple[str, Checkpoint]:
        """The stage and the checkpoint. Raises MissingInput if there is none."""
        stage = self.source or newest_stage()
        return stage, find_checkpoint(stage, self.model_tag, self.step)


# Models other than GPT: a field of their config -> a module with `read_config`, `new_model` and
# `callbacks`.
MODEL_MODULES = {"xsa_last_n": "nanochat.golf.model", "n_loops": "nanochat.recursion.metrics"}


def architectures_of(cfg: GPTConfig | Mapping[str, Any]) -> list[Any]:
    """Modules for a model config or its values, see `MODEL_MODULES`; none for a plain GPT."""
    values = cfg if isinstance(cfg, Mapping) else vars(cfg)
    names = (module for name, module in MODEL_MODULES.items() if name in values)
    return list(map(importlib.import_module, names))


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """Model config of a checkpoint. Raises ValueError for an option that was removed."""
    modules = architectures_of(values)
    return modules[0].read_config(values) if modules else GPTConfig(**values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Create a model without initializing its weights."""
    modules = architectures_of(cfg)
    return modules[0].new_model(cfg, dtype) if modules else GPT(cfg, dtype)


# Settings that earlier runs recorded, with their defaults
OLD_SETTINGS = {"scalar_lr": 0.5, "tied_lr": 0.05, "decay_rule": "cautious", "muon_momentum": 0.95}
OLD_SETTINGS |= {"overlong": "keep", "format_reward": 0.0, "advantage": "mean"}  # RL


def upgrade_identity(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an identity that was recorded by an earlier version."""
    upgraded = dict(recorded)
    for name in {"optim", "schedule", "rl"} & recorded.keys():
        kept = (item for item in recorded[name].items() if item not in OLD_SETTINGS.items())
        upgraded[name] = dict(kept)
    if "model" in recorded:
        upgraded["model"] = asdict(read_config(recorded["model"]))
    return upgraded


def build_model(cfg: GPTConfig, device: torch.device, dtype: torch.dtype, seed: int) -> GPT:
    """
    Create a model on `device` and draw its weights there. They depend on the seed and the kind of
    device, not on the number of ranks: a CPU and a GPU, or two GPU models, start from different
    weights of the same distribution. To compare them, load a checkpoint.
    """
    with device:
        model = new_model(cfg, dtype)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model


def load_model(checkpoint: Checkpoint, machine: DistContext, max_seq_len: int | None = None) -> GPT:
    """
    Rebuild the model of a checkpoint on the machine's device, from its saved config. `max_seq_len`
    overrides its row length.
    """
    cfg = read_config(checkpoint.state["model"])
    with torch.device("meta"):
        model = new_model(replace(cfg, max_seq_len=max_seq_len or cfg.max_seq_len), machine.dtype)
    model.to_empty(device=machine.device)
    model.load_state_dict(checkpoint.model_tensors())
    return model


def load_inference(checkpoint: Checkpoint, machine: DistContext) -> tuple[GPT, Tokenizer]:
    """Return the `inference_copy` of a checkpoint's model, and its tokenizer."""
    tokenizer = checkpoint.tokenizer()
    return inference_copy(load_model(checkpoint, machine)), tokenizer


# ---- The checkpoints of one run: lock, resume, save, prune ---------------------------------------
# One run writes to a folder at a time. Non-finite weights are never saved, so they never displace a
# good checkpoint. A save may run asynchronously; the next one waits for it.


LOSS_BETA = 0.9  # decay of the moving average of the training loss
FLOAT16_LOSS_SCALE = 2.0**14  # at the start of training
RAISE_SCALE_AFTER = 2000  # finite steps


@dataclass
class Progress:
    """State of a run other than weights and settings; saved with each checkpoint."""

    step: int = 0
    """Completed steps."""
    loss_average: float = 0.0
    """Moving average of the training loss, biased towards 0 (see `smooth_loss`)."""
    train_seconds: float = 0.0
    """Time of all timed steps, over all attempts."""
    flops: float = 0.0
    """FLOPs of all steps, forward and backward."""
    clock_seconds: float = 0.0
    """Time of all steps; under a time budget, the mean over ranks."""
    averaged: bool = False
    """The weights are the final average, so the run cannot be extended."""
    finished: bool = False
    """All planned steps are done."""
    optimizer_missing: bool = False
    """The loaded checkpoint has no optimizer state, so the run cannot be extended."""
    loss_scale: float = 1.0
    """Factor on the loss in the backward pass. Above 1 in float16, whose range is too small for
    most gradients otherwise; see `adjust_loss_scale`."""
    steps_at_scale: int = 0
    """Finite steps since `loss_scale` last changed."""
    compiled: bool | None = None
    """Whether the run is compiled; kept when it resumes, because rounding differs."""
    autotuned: bool | None = None
    """The same for autotuning."""
    health: AnomalyState = field(default_factory=AnomalyState)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """State of callbacks by name, in types of JSON."""
    min_val: float | None = None
    last_val: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    """Times of the latest timed steps, for the median; not saved."""
    wall_seconds: float = 0.0
    """Cost of all attempts until `charged`, from the start of each process; not the time that an
    earlier attempt spent after its last save."""
    device_seconds: float = 0.0
    """`wall_seconds` times the number of devices."""
    charged: float = STARTED
    """Value of `time.perf_counter()`; not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {
            name: x for name, x in asdict(self).items() if name not in ("step_seconds", "charged")
        }

    def add_cost(self, devices: int) -> dict[str, float]:
        """Add the time since the last call to the cost, and return the cost."""
        seconds, self.charged = time.perf_counter() - self.charged, time.perf_counter()
        self.wall_seconds += seconds
        self.device_seconds += seconds * devices
        return {name: getattr(self, name) for name in ADDED_COSTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved values; those that only earlier versions saved are ignored."""
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])
        known = {k: v for k, v in state["health"].items() if hasattr(AnomalyState(), k)}
        self.health = AnomalyState(**known)

    def add_step(self, loss: float | None, flops: float, seconds: float, timed: bool) -> None:
        """Count a step. `loss` is None for a bad step or spike; throughput counts `timed` steps."""
        if loss is None:
            loss = self.smooth_loss if self.step else 0.0
        self.loss_average = LOSS_BETA * self.loss_average + (1 - LOSS_BETA) * loss
        self.step += 1
        self.flops += flops
        self.clock_seconds += seconds
        if timed:
            self.train_seconds += seconds
            self.step_seconds = [*self.step_seconds[-999:], seconds]

    def begin_loss_scale(self, dtype: torch.dtype) -> None:
        """Choose the loss scale of a run; one that resumes keeps its own, if it was above 1."""
        if dtype != torch.float16:
            self.loss_scale = 1.0
        elif self.loss_scale == 1.0:
            self.loss_scale = FLOAT16_LOSS_SCALE

    def adjust_loss_scale(self, dtype: torch.dtype, finite: bool) -> None:
        """In float16, halve the loss scale after a bad step; double it after enough finite ones."""
        if dtype != torch.float16:
            return
        self.steps_at_scale = self.steps_at_scale + 1 if finite else 0
        if not finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self.steps_at_scale == RAISE_SCALE_AFTER:
            self.loss_scale, self.steps_at_scale = self.loss_scale * 2, 0

    @property
    def smooth_loss(self) -> float:
        """Bias-corrected moving average of the loss; NaN before the first step."""
        return self.loss_average / (1 - LOSS_BETA**self.step) if self.step else math.nan

    def require_resumable(self) -> None:
        """Mark the run unfinished; raise UsageError if it cannot be extended."""
        self.finished = False
        if self.averaged or self.optimizer_missing:
            why = "averaged weights" if self.averaged else "no optimizer state"
            raise UsageError(
                f"the run ended after step {self.step} with {why} and cannot be extended",
                "retrain all steps with --resume=never; omit --ema_decay if the weights are "
                "averaged, else add --save_optimizer",
            )


@dataclass(frozen=True)
class SavingConfig:
    resume: Literal["never", "auto"] = "never"
    """auto: resume from the newest checkpoint of this tag, if any. A run that torchrun restarts
    after a failure always resumes."""
    keep: int = 2
    """Number of checkpoints to keep."""
    allow_data_change: bool = False
    """Resume even if text, tokenizer or rows have changed."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """If a save fails: stop, or continue without that checkpoint (the final save must succeed)."""

    def __post_init__(self) -> None:
        require_at_least(self, keep=1)


@dataclass(eq=False)
class CheckpointManager:
    """
    The checkpoints of one run: `folder` holds step_<n>/ and `latest`. Create one on every rank.

    As a context manager, it locks the folder for this run.
    """

    folder: Path
    machine: DistContext
    cfg: SavingConfig = SavingConfig()
    keep_optimizer: bool = True
    """Whether the final checkpoint includes the optimizer state; all others do."""
    saved: Checkpoint | None = None
    """Newest checkpoint saved by this process; main rank only."""
    pending: tuple[int, Future[Checkpoint]] | None = None
    """Step being saved, and its result."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Host copies of all tensors for asynchronous saves, pinned on a GPU; reused by every save."""

    def __post_init__(self) -> None:
        self.asynchronous = self.machine.device.type == "cuda"
        """`save` returns once copies to the host are queued; a thread writes them to disk."""
        self.lock = RunLock(self.folder.parent / f".{self.folder.name}.lock")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Self:
        """Lock the folder. Raises UsageError, on every rank, if another run is using it."""

        def take_lock() -> None:
            self.lock.acquire(self.machine.launch)
            recover_interrupted_saves(self.folder)

        self.machine.on_main(f"locking {self.folder}", take_lock)
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
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        state: Mapping[str, Any],
        progress: Progress,
        final: bool = False,
    ) -> None:
        """
        Save the state of all ranks; `final` waits until it is on disk. Call on every rank.

        Raises NonFiniteError naming the first non-finite tensor, RankMismatchError if the weights
        differ between ranks, and OSError if the disk fails (unless `on_save_error` allows it).
        """
        self.require_finite(model, optimizer)
        require_equal_ranks(dict(model.named_parameters()), self.machine, progress.step)
        problem = self.machine.broadcast(self.wait())  # of the previous save; one runs at a time
        without_optimizer = not self.keep_optimizer or progress.optimizer_missing
        dropped = progress.finished and without_optimizer
        optim_tensors = None
        if not dropped:  # all ranks gather, the main rank keeps copies
            gathered = full_state(optimizer)
            optim_tensors = {n: self.to_host(n, x) for n, x in gathered if self.machine.is_main}
        if self.machine.is_main:
            progress.add_cost(self.machine.world_size)
            state = {**state, "launch": self.machine.launch, "progress": progress.state_dict()}
            weights = {name: self.to_host(name, x) for name, x in model.state_dict().items()}
            arguments = (model, optim_tensors, tokenizer, state, self.cfg.keep, weights)
            step, on_gpu = progress.step, self.machine.device.type == "cuda"
            copied = torch.cuda.current_stream().record_event() if on_gpu else None

            def write_copies() -> Checkpoint:
                if copied:
                    copied.synchronize()
                return save_checkpoint(self.folder, step, *arguments)

            self.pending = (step, self.writer.submit(write_copies))
        if final or not self.asynchronous:
            if problem:
                self.machine.print0(problem)
            problem = self.machine.broadcast(self.wait())
        if problem and (final or self.cfg.on_save_error == "stop"):
            raise OSError(problem)
        if problem:
            self.machine.print0(f"{problem}; continuing")

    def to_host(self, name: str, x: Tensor) -> Tensor:
        """
        A tensor's value in host memory. For an asynchronous save, a copy that on a GPU is valid
        once the current stream has executed it: later kernels wait for it, the host does not.
        """
        if not self.asynchronous:
            return x.cpu()
        if name not in self.buffers:
            self.buffers[name] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return self.buffers[name].copy_(x, non_blocking=True)

    def wait(self) -> str | None:
        """Wait for the pending save. Returns an error message if the disk failed."""
        if self.pending is None:
            return None
        (step, future), self.pending = self.pending, None
        try:
            with self.machine.working(f"saving step {step}"):
                self.saved = future.result()
        except OSError as error:
            return f"saving step {step} failed: {error}"
        return None

    def require_finite(self, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        """Raise NonFiniteError on all ranks, naming the first non-finite tensor of any rank."""
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        named = model.state_dict()
        for param, moments in optimizer.state.items():  # this rank's shards
            named |= {f"{names[param]}.{moment}": x for moment, x in moments.items()}
        with self.machine.waiting("device synchronization"):
            mine = first_not_finite(named)
        if found := [name for name in self.machine.gather(mine) if name]:
            last = max(step_folders(self.folder), default="none")
            fix = f"--resume=auto resumes from the last good step: {last}"
            raise NonFiniteError(f"{found[0]} has non-finite values and was not saved; {fix}")

    # ---- beginning ---------------------------------------------------------------------------

    def begin(
        self,
        identity: Mapping[str, Any],
        model: GPT,
        optimizer: torch.optim.Optimizer,
        num_steps: int,
    ) -> Progress:
        """
        Load the newest good checkpoint if --resume=auto or if torchrun restarted this run after a
        failure; otherwise move aside the checkpoints of an earlier run with this name.

        Raises CorruptCheckpoint if all are corrupt, and ValueError listing the differences if the
        checkpoint has a different `identity` (model, batch, seed, rows). Rows alone may differ if
        `allow_data_change` is set.
        """
        progress = Progress()
        if self.cfg.resume == "never" and not self.was_restarted(num_steps):
            self.machine.on_main("moving earlier checkpoints", self.move_aside)
            return progress
        found = self.newest()
        if found is None:
            return progress
        recorded = upgrade_identity(found.state["identity"])
        if "init_lr_frac" in identity:  # not recorded by earlier versions
            recorded.setdefault("init_lr_frac", identity["init_lr_frac"])
        changed = diff_recipe(recorded, identity)
        rows_only = all(line.startswith("rows.") for line in changed)
        if changed and not (self.cfg.allow_data_change and rows_only):
            raise ValueError(
                f"{found.folder} was trained with different settings:\n  "
                + "\n  ".join(changed)
                + "\nuse another --model_tag, or --allow_data_change if only rows differ; with "
                "speedrun.sh, rename that folder"
            )
        for line in changed:
            self.machine.print0(f"resuming despite {line}")
        model.load_state_dict(found.model_tensors())
        progress.load_state_dict(found.state["progress"])
        progress.optimizer_missing = not found.has_optimizer
        if found.has_optimizer:
            load_full_state(optimizer, found.optim_tensors())
        self.machine.print0(f"resumed {found.folder}")
        return progress

    def move_aside(self) -> None:
        """Rename the folder if it has checkpoints."""
        if step_folders(self.folder):
            when = time.strftime("%y%m%d-%H%M%S")
            aside = self.folder.rename(f"{self.folder}.before-{when}")
            self.machine.print0(f"moved the checkpoints of an earlier run to {aside}")

    def was_restarted(self, num_steps: int) -> bool:
        """
        Whether an earlier attempt of this launch saved a checkpoint.

        The restart count of a node that joins late is 0, so this is also true if this launch saved
        the newest checkpoint and its training is unfinished.
        """
        restarted, launch = self.machine.any(self.machine.restarts > 0), self.machine.launch

        def saved_before() -> bool:
            newest = newest_state(self.folder) or {}
            is_mine = bool(launch) and newest.get("launch") == launch
            return is_mine and (restarted or newest["step"] < num_steps)

        return self.machine.on_main("reading checkpoints", saved_before)

    def newest(self) -> Checkpoint | None:
        """
        Return the newest good checkpoint, verified by one rank per node; None if there is none.

        Raises CorruptCheckpoint, on every rank, if all are corrupt or the nodes' files differ.
        """

        def open_newest() -> Checkpoint | None:
            try:
                return open_checkpoint(self.folder)
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(f"{error}; --resume=never moves them aside") from error

        found = self.machine.on_node("verifying checkpoints", open_newest)
        name = f"step {found.step} ({found.fingerprint})" if found else "no checkpoint"
        names = self.machine.gather(name)
        for rank, other in enumerate(names):
            if other != names[0]:
                message = f"rank {rank} finds {other} in {self.folder}, rank 0 {names[0]}"
                raise CorruptCheckpoint(f"{message}; all nodes need a shared disk")
        return found

    def disk_bytes(self, model: GPT, saves: int) -> int:
        """
        Additional bytes on disk for `saves` more saves, the last of them final. At most the
        checkpoints to keep and the one being written are on disk at once.
        """
        there = sum(p.stat().st_size for p in self.folder.glob("step_*/*") if p.is_file())
        sizes = [checkpoint_bytes(model)] * (saves - 1)
        sizes.append(checkpoint_bytes(model, optimizer=self.keep_optimizer))
        return min(sum(sizes), max(max(sizes), (self.cfg.keep + 1) * max(sizes) - there))


def checkpoint_bytes(model: GPT, optimizer: bool = True) -> int:
    """Estimated size of a checkpoint in bytes, with or without optimizer state."""
    return 4 * model.num_params() + (state_bytes(model) if optimizer else 0)
