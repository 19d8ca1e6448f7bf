"""
Checkpoints: atomic writes with verification, and the checkpoints of one run.

    model, optimizer, state -> write_checkpoint -> <stage>_checkpoints/<tag>/step_<n>/ -> load_model
    lock -> resume or move old checkpoints -> save ... save -> wait for the last one -> unlock

A folder gets its final name once everything in it is on disk. Files have SHA-256 digests; a
checkpoint that fails verification is skipped in favor of the previous good one.
"""

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat import common
from nanochat.common import MissingInput, RunLock, UsageError, base_dir, printable
from nanochat.config import require_at_least, short
from nanochat.distributed import DistContext
from nanochat.gpt import GPT, GPTConfig, inference_copy
from nanochat.optim import full_state, load_full_state
from nanochat.records import ADDED_COSTS, STARTED, new_run_id
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
        files = {path.name: describe_file(path)}
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
        common.write_json(temporary / "state.json", {**record, "seal": seal_of(record)})
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
    Write a safetensors file and flush it to disk. Returns its `bytes` and `sha256`. Raises OSError
    if the disk is full or fails.
    """
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found[1]) if found else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    common.fsync(path)
    return describe_file(path)


def describe_file(path: Path) -> dict[str, Any]:
    """Size and digest of a file."""
    return {"bytes": path.stat().st_size, "sha256": common.sha256_file(path)}


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
    if state.pop("seal", None) != seal_of(state):
        raise ValueError(f"{path} is damaged: it does not match its seal")
    return state


def seal_of(state: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a state.json, which has the digests of the other files."""
    return hashlib.sha256(common.json_text(state).encode()).hexdigest()


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
        states = {path.parent.name: newest_state(path.parent) for path in root.glob("*/latest")}
        saved = {name: state["saved_at"] for name, state in states.items() if state}
        if not states:
            raise MissingInput(f"no checkpoint in {root}", command)
        tag = max(saved or states, key=lambda name: (saved.get(name, ""), name))
    found = open_checkpoint(root / tag, step)
    if found is None:
        raise MissingInput(f"no checkpoint in {root / tag}", f"{command} --model_tag={tag}")
    return found


def find_checkpoint_on_node(
    machine: DistContext, stage: str, tag: str | None, step: int | None
) -> Checkpoint:
    """`find_checkpoint`, called once per node for all its ranks."""
    return machine.on_node(lambda: find_checkpoint(stage, tag, step))


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

    source: Annotated[Stage | None, short("i")] = None
    """Stage of the model. Default: the last stage that has a checkpoint."""
    model_tag: Annotated[str | None, short("g")] = None
    """Folder of the checkpoint. Default: the newest."""
    step: Annotated[int | None, short("s")] = None
    """Step of the checkpoint. Default: the latest intact one."""

    def find(self) -> tuple[str, Checkpoint]:
        """The stage and the checkpoint. Raises MissingInput if there is none."""
        stage = self.source or newest_stage()
        return stage, find_checkpoint(stage, self.model_tag, self.step)


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


def load_model(checkpoint: Checkpoint, machine: DistContext, max_seq_len: int | None = None) -> GPT:
    """
    Rebuild the model of a checkpoint on the machine's device, from its saved config. `max_seq_len`
    overrides its row length. Raises UsageError for a model with options that GPT does not have.
    """
    saved, known = checkpoint.state["model"], {each.name for each in fields(GPTConfig)}
    if other := sorted(saved.keys() - known):
        raise UsageError(
            f"{checkpoint.folder} is not a plain model: it has {', '.join(other)}",
            "evaluate it with scripts.golf.evaluate or scripts.recursion.evaluate; later stages "
            "train models of scripts.base_train only",
        )
    cfg = GPTConfig(**saved)
    with torch.device("meta"):
        model = GPT(replace(cfg, max_seq_len=max_seq_len or cfg.max_seq_len), machine.dtype)
    return load_weights(model, checkpoint, machine)


def load_weights(model: Model, checkpoint: Checkpoint, machine: DistContext) -> Model:
    """Fill a model on the meta device with the weights of a checkpoint; returns it."""
    model.to_empty(device=machine.device)
    model.load_state_dict(checkpoint.model_tensors())
    return model


def load_inference(checkpoint: Checkpoint, machine: DistContext) -> tuple[GPT, Tokenizer]:
    """Return the `inference_copy` of a checkpoint's model, and its tokenizer."""
    tokenizer = checkpoint.tokenizer()
    return inference_copy(load_model(checkpoint, machine)), tokenizer


# ---- Weights that must not be saved --------------------------------------------------------------


class NonFiniteError(RuntimeError):
    """The loss, gradients or weights are not finite, and the run cannot continue."""


class RankMismatchError(RuntimeError):
    """Weights differ between ranks."""


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a NaN or infinity, or None."""
    floats = {name: x for name, x in named.items() if x.is_floating_point()}
    finite = torch.stack([x.detach().isfinite().all() for x in floats.values()]).tolist()
    return next((name for name, good in zip(floats, finite, strict=True) if not good), None)


def require_equal_ranks(named: Mapping[str, Tensor], machine: DistContext, step: int) -> None:
    """
    Raise RankMismatchError on every rank, naming the first parameter that differs.

    named: float32 or bfloat16 tensors. Compares sums of their bits, so it detects a single flipped
    bit.
    """
    if machine.world_size == 1:
        return
    bits = {2: torch.int16, 4: torch.int32}
    sums = [x.detach().view(bits[x.element_size()]).sum(dtype=torch.int64) for x in named.values()]
    mine = torch.stack(sums).tolist()
    found = machine.gather(mine)
    for i, name in enumerate(named):
        values = [sums[i] for sums in found]
        common = max(values, key=values.count)  # rank 0 wins ties
        if others := [rank for rank, value in enumerate(values) if value != common]:
            raise RankMismatchError(
                f"weights differ between ranks before step {step}: {name} differs on rank "
                f"{', '.join(map(str, others))} of {machine.world_size}; check that device and "
                "its links, and restart with --resume=auto, preferably without that device"
            )


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
    bad_steps: int = 0
    """Number of steps skipped as non-finite."""
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
        for name in self.state_dict():
            setattr(self, name, state[name])

    def add_step(self, loss: float | None, flops: float, seconds: float, timed: bool) -> None:
        """Count a step. `loss` is None for a bad step; throughput counts `timed` steps."""
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
        if self.optimizer_missing:
            raise UsageError(
                f"the run ended after step {self.step} without optimizer state (or with averaged "
                "weights) and cannot be extended",
                "retrain all steps with --resume=never, with --save_optimizer or without "
                "--ema_decay",
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

    def __post_init__(self) -> None:
        self.replaces = False
        """Whether an earlier run's checkpoints are in the way of this one's."""
        self.resumed: Checkpoint | None = None
        """Checkpoint from which the run goes on."""
        self.lock = RunLock(self.folder.parent / f".{self.folder.name}.lock")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Self:
        """Lock the folder. Raises UsageError, on every rank, if another run is using it."""

        def take_lock() -> None:
            self.lock.acquire(self.machine.launch)
            recover_interrupted_saves(self.folder)

        self.machine.on_main(take_lock)
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
        Save the state of all ranks: on a GPU, a thread writes a copy while training goes on;
        `final` waits until it is on disk. Call on every rank.

        Raises NonFiniteError naming the first non-finite tensor, RankMismatchError if the weights
        differ between ranks, and OSError if the disk fails (unless `on_save_error` allows it).
        """
        self.require_finite(model, optimizer)
        require_equal_ranks(dict(model.named_parameters()), self.machine, progress.step)
        problem = self.machine.broadcast(self.wait())  # of the previous save; one runs at a time
        without_optimizer = not self.keep_optimizer or progress.optimizer_missing
        optim_tensors = None
        if not (progress.finished and without_optimizer):  # all ranks gather, the main rank copies
            gathered = full_state(optimizer)
            optim_tensors = {n: to_host(x) for n, x in gathered if self.machine.is_main}
        if self.machine.is_main:
            progress.add_cost(self.machine.world_size)
            state = {**state, "launch": self.machine.launch, "progress": progress.state_dict()}
            weights = {name: to_host(x) for name, x in model.state_dict().items()}
            job = (self.folder, progress.step, model, optim_tensors, tokenizer, state)
            future = self.writer.submit(save_checkpoint, *job, self.cfg.keep, weights)
            self.pending = progress.step, future
        if final or self.machine.device.type == "cpu":  # where training would slow down, too
            if problem:
                self.machine.print0(problem)
            problem = self.machine.broadcast(self.wait())
        if problem and (final or self.cfg.on_save_error == "stop"):
            raise OSError(problem)
        if problem:
            self.machine.print0(f"{problem}; continuing")

    def wait(self) -> str | None:
        """Wait for the pending save. Returns an error message if the disk failed."""
        if self.pending is None:
            return None
        (step, future), self.pending = self.pending, None
        try:
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
        failure; otherwise, the run starts at step 0 and replaces an earlier one (`move_aside`).

        Raises CorruptCheckpoint if all are corrupt, and ValueError listing the differences if the
        checkpoint has a different `identity` (model, batch, seed, rows). Rows alone may differ if
        `allow_data_change` is set.
        """
        progress = Progress()
        if self.cfg.resume == "never" and not self.was_restarted(num_steps):
            self.replaces = True
            return progress
        found = self.newest()
        if found is None:
            return progress
        changed = list_changes(found.state["identity"], identity)
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
        self.resumed = found
        return progress

    def move_aside(self) -> None:
        """Rename the folder if it has checkpoints of an earlier run that this one replaces."""
        if self.replaces and step_folders(self.folder):
            aside = self.folder.rename(f"{self.folder}.before-{new_run_id()}")
            self.machine.print0(f"moved the checkpoints of an earlier run to {aside}")
        self.replaces = False

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

        return self.machine.on_main(saved_before)

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

        found = self.machine.on_node(open_newest)
        name = f"step {found.step} ({found.fingerprint})" if found else "no checkpoint"
        names = self.machine.gather(name)
        for rank, other in enumerate(names):
            if other != names[0]:
                message = f"rank {rank} finds {other} in {self.folder}, rank 0 {names[0]}"
                raise CorruptCheckpoint(f"{message}; all nodes need a shared disk")
        return found


def list_changes(was: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """
    Differences between two identities of a run, one line per setting. Parts with the same
    fingerprint are equal, even if the text is in another folder.
    """
    lines = []
    for name in sorted(was.keys() | now.keys()):
        old, new = was.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if "fingerprint" not in old or old["fingerprint"] != new.get("fingerprint"):
                lines += list_changes(old, new, f"{at}{name}.")
        elif old != new:
            lines.append(f"{at}{name}: was {old!r}, now {new!r}")
    return lines


def to_host(x: Tensor) -> Tensor:
    """Copy of a tensor in host memory, which later updates do not change."""
    return x.detach().to("cpu", copy=True)
