"""
A stage of training, from an opened model and its rows to checkpoints and the figures of its record.

    model, rows, horizon -> where to start -> what fits -> train -> Outcome

What base, mid and SFT do alike, so that their scripts say only what differs: where rows come from,
how long to train, what to measure. Knows no data set, task or section of the report.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from nanochat import preflight
from nanochat.checkpoint import (
    Checkpoint,
    Checkpoints,
    SavingConfig,
    model_callbacks,
    stage_folder,
)
from nanochat.common import StopRequest, require_name
from nanochat.dataloader import MixedRows, Rows
from nanochat.distributed import Machine, MachineConfig
from nanochat.gpt import GPT
from nanochat.hardware import utilization
from nanochat.logger import RunLog, RunLogConfig
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import KernelConfig, Prepared
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    Callback,
    LoopConfig,
    Progress,
    Run,
    Trainable,
    median_rate,
    train,
)


@dataclass(frozen=True)
class StageConfig:
    device_batch_size: int | None = None
    """Rows per forward pass on one device; never changes the result. Default: what fits."""
    model_tag: str = ""
    """Name of the folder of checkpoints. Default: d<depth>."""
    seed: int = 0
    """Seeds new weights and the order of rows."""
    allow_data_change: bool = False
    """Continue although text, tokenizer or rows are not those the checkpoint was trained on."""
    once: bool = False
    """Do nothing when the same training has ended before and its checkpoint is still there."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    hourly_rate: float | None = None
    """Dollars an hour that all devices together cost, for the estimate. Default: what such GPUs are
    rented for."""
    saving: SavingConfig = field(default_factory=SavingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    log: RunLogConfig = field(default_factory=RunLogConfig)

    def __post_init__(self) -> None:
        require_name("model_tag", self.model_tag)
        if self.device_batch_size is not None and self.device_batch_size < 1:
            raise ValueError(
                f"device_batch_size must be at least 1, got {self.device_batch_size}; leave it out "
                "to use the largest that fits"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


@dataclass(frozen=True)
class Stage:
    """What is trained, on what, for how long."""

    kind: Literal["base", "mid", "sft"]
    model: GPT
    optimizer: MuonAdamW
    tokenizer: Tokenizer
    rows: Rows | MixedRows
    num_steps: int
    batch_tokens: int
    """Tokens per step, all ranks together."""
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Rows as they are stored -> tokens and targets, both (B, T) int64."""
    identity: Mapping[str, Any]
    """What a checkpoint must agree with to be continued, beside rows, model, batch and seed."""
    state: Mapping[str, Any]
    """What else a checkpoint tells its readers."""
    run_id: str
    trainable: Trainable | None = None
    """Gives the loss. Default: the model itself."""
    background: Callable[[], AbstractContextManager] = nullcontext
    """What goes on beside the training."""
    bytes_to_pack: int = 0
    """What that will write to the disk."""
    max_seconds: float | None = None
    """Budget of training time, see train.Run."""
    callbacks: Sequence[Callback] = ()
    """Evaluators among them."""


@dataclass(frozen=True)
class Outcome:
    """What a finished stage leaves for its record."""

    model: GPT
    run: Run
    ready: Prepared
    progress: Progress
    checkpoint: Checkpoint | None
    """The last one; None on the ranks that do not write."""

    def figures(self, memory_at_start: int) -> dict[str, Any]:
        """What every section of training shows in the end."""
        machine, ready = self.run.machine, self.ready
        rate = median_rate(self.run, self.progress)
        return {
            "Tokens per second": "-" if rate is None else f"{rate:,.0f}",
            "Batch tokens": self.run.batch_tokens,
            "Rows per device pass": ready.device_rows,
            "Compute dtype": str(machine.dtype).removeprefix("torch."),
            "Compiled": ready.compiled,
            "Stated memory": f"{ready.memory.total / 2**20:.2f}MiB",
            "Memory after imports": f"{memory_at_start / 2**20:.2f}MiB",
            "Skipped steps": self.progress.health.bad_steps,
            "Loss spikes": self.progress.health.spikes,
            "Gradient norm spikes": self.progress.health.norm_spikes,
        }

    @property
    def utilization(self) -> float | None:
        """Share of the device's peak (MFU) at the median rate, None where one is unknown."""
        rate = median_rate(self.run, self.progress)
        if rate is None:
            return None
        flops = self.progress.flops / (self.progress.step * self.run.batch_tokens)  # of a token
        return utilization(rate * flops, self.run.machine.device, self.run.machine.world_size)


def carry_out(
    cfg: StageConfig, stage: Stage, machine: Machine, asked: Mapping[str, Any]
) -> Outcome | None:
    """
    Train a stage, from the beginning or from where it was interrupted. `asked` are the script's
    settings, for log and checkpoint. None when the run was asked to stop: saved, not finished.

    Raises Refused where the run cannot finish, or where another one writes to its folder.
    """
    model, rows = stage.model, stage.rows
    tag = cfg.model_tag or f"d{model.cfg.n_layer}"
    identity = {
        "rows": rows.recipe,
        "model": asdict(model.cfg),
        "batch_tokens": stage.batch_tokens,
        "seed": cfg.seed,
        "optim": asdict(cfg.optim),
        "schedule": asdict(cfg.schedule),
        **stage.identity,
    }
    progress = Progress()
    saving = cfg.saving.of_stage(stage.kind)
    with Checkpoints(stage_folder(stage.kind) / tag, machine, saving) as checkpoints:
        checkpoints.begin(
            identity, cfg.allow_data_change, model, stage.optimizer, progress, stage.num_steps
        )
        ready = prepare(cfg, stage, machine, checkpoints, progress)
        state = {"stage": stage.kind, "identity": identity, "settings": dict(asked), **stage.state}
        step_rows = stage.batch_tokens // model.cfg.max_seq_len
        stop = StopRequest()
        rows.should_stop = lambda: stop.asked
        log = RunLog(
            cfg.log,
            checkpoints.folder,
            is_main=machine.is_main,
            first_step=progress.step,
            total_steps=stage.num_steps if stage.max_seconds is None else None,
            run_id=stage.run_id,
            settings=dict(asked),
        )

        def step_of(step: int) -> tuple[np.ndarray, np.ndarray]:
            with machine.working("waiting for rows that are being packed"):
                mine = rows.batch(step, step_rows, cfg.seed, machine.rank, machine.world_size)
            return stage.split(mine)

        run = Run(
            model=stage.trainable or model,
            optimizer=stage.optimizer,
            machine=machine,
            num_steps=stage.num_steps,
            batch_tokens=stage.batch_tokens,
            device_rows=ready.device_rows,
            flops_per_token=model.flops_per_token,
            rows=step_of,
            times_seen=lambda step: rows.times_seen(
                step, step_rows, cfg.seed, machine.rank, machine.world_size
            ),
            rows_name=lambda step: str(rows.row_ids(step, step_rows, cfg.seed).tolist()),
            save=lambda progress, final=False: checkpoints.save(
                model, stage.optimizer, stage.tokenizer, state, progress, final
            ),
            log=log.log,
            schedule=cfg.schedule,
            loop=cfg.loop,
            grad_clip=cfg.optim.grad_clip,
            stop=stop,
            max_seconds=stage.max_seconds,
            callbacks=[*stage.callbacks, *model_callbacks(model, stage.optimizer, cfg.seed)],
        )
        with log, stage.background():
            done = train(run, progress)
    return Outcome(model, run, ready, progress, checkpoints.saved) if done else None


def prepare(
    cfg: StageConfig, stage: Stage, machine: Machine, checkpoints: Checkpoints, progress: Progress
) -> Prepared:
    """What works here, what fits, how long it takes: found out, and shown on one screen."""
    model, rows, steps, batch = stage.model, stage.rows, stage.num_steps, stage.batch_tokens
    disk = preflight.require_disk(
        checkpoints.folder,
        machine,
        checkpoints=checkpoints.bytes_to_come(model, saves_to_come(cfg.loop, progress, steps)),
        rows=stage.bytes_to_pack,
    )
    left = (steps - progress.step) * batch
    ready = preflight.prepare(
        cfg.kernels,
        model,
        stage.trainable or model,
        stage.optimizer,
        machine,
        batch,
        left,
        cfg.device_batch_size,
        timed=stage.max_seconds is not None,
    )
    T = model.cfg.max_seq_len
    passes = batch // (T * ready.device_rows * machine.world_size)
    epochs = rows.epochs_for(steps * batch // T)
    repeats = "not all packed yet" if epochs is None else f"gone through {epochs:.2f} times"
    inputs = stage.state["provenance"]["inputs"]
    seconds, most = ready.train_seconds, ""
    if stage.max_seconds is not None:
        seconds = max(0.0, min(seconds, stage.max_seconds - progress.clock_seconds))
        most = f"{stage.max_seconds:g} s of steps, at most "
    preflight.screen(
        {
            **preflight.describe(model, machine, ready.compiled),
            "memory": preflight.describe_memory(ready.memory, ready.device_rows, machine),
            "disk": disk,
            "inputs": ", ".join(f"{name} {print_}" for name, print_ in inputs.items()),
            "rows": f"{rows.fingerprint} of {T:,} tokens, {repeats}",
            "batch": f"{batch:,} tokens: {passes} passes of {ready.device_rows} rows on each of "
            f"{machine.world_size} devices",
            "training": f"{most}{steps:,} steps of {batch:,} tokens = {steps * batch:,}; from step "
            f"{progress.step:,}",
            "estimate": preflight.cost(seconds, cfg.hourly_rate, machine),
        },
        machine,
    )
    return ready


def saves_to_come(loop: LoopConfig, progress: Progress, num_steps: int) -> int:
    """How many checkpoints a run will still write."""
    left = num_steps - progress.step
    return 1 + (left // loop.save_every if loop.save_every else 0)
