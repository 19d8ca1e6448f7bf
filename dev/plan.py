"""
Print the plan of a speedrun: time, cost, disk, sandbox. Fails if the disk is too small.

    python -m dev.plan --base="--depth=4 --max_seq_len=256 --dataset=embedded"
    bash speedrun.sh --plan      # the plan for this machine

The flags of each stage are passed as one string.

Reads   output of earlier attempts under the base directory, which a rerun reuses
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.checkpoint import checkpoint_bytes, stage_folder
from nanochat.common import base_dir, free_bytes, require_free
from nanochat.config import parse, start
from nanochat.distributed import DistContext, default_dtype
from nanochat.gpt import GPT
from nanochat.hardware import GPU_EFFICIENCY, MATMUL_EFFICIENCY, peak_flops, training_rate
from nanochat.records import default_rate, read_if_sound, report_folder, slug
from nanochat.scaling import Horizon, plan_horizon
from nanochat.train import TrainConfig, describe_dtype
from scripts import base_train, chat_eval, chat_rl, chat_sft, mid_train
from scripts.base_train import BaseTrain
from scripts.chat_rl import ChatRL
from scripts.tok_train import TokTrain
from tasks.humaneval import CodeTask
from tasks.registry import TASKS, why_unavailable

HUB_BYTES_PER_TOKEN = 1.8  # parquet bytes: about 4.5 bytes of text per token, compressed 2.5x
CHARS_PER_HUB_BYTE = 2.5
HUB_TASK_BYTES = 4e9  # allowance for conversations, tasks, few-shot items and their rows
CUDNN_GPUS = ("H100", "H200", "GH200", "B200", "B300")  # PyTorch selects cuDNN attention on these
STAGES = (
    "tokenizer",
    "tokenizer evaluation",
    "base model loss",
    "base model evaluation",
    "midtraining",
    "chat sft",
    "chat rl",
    "chat evaluations",
)


@dataclass(frozen=True)
class Plan:
    profile: str = ""
    """Profile name, for messages."""
    processes: int = 1
    """Number of training processes, one per GPU."""
    gpu: str = ""
    """GPU name from nvidia-smi; empty = train on CPU."""
    utilization: float = GPU_EFFICIENCY
    """Assumed fraction of the GPU's peak FLOP/s, to estimate base training time."""
    minutes: str = "0 0 0 0 0 0 0 0"
    """Minutes of all stages but base training, in order: tokenizer, its evaluation, base loss, base
    evaluation, mid, SFT, RL, all chat evaluations."""
    minutes_depth: int = 4
    """Depth that `minutes` assumes; the times of stages that run the model scale with its FLOPs."""
    minutes_processes: int = 1
    """Number of processes that `minutes` refers to; the time is inversely proportional to it."""
    minutes_rate: float | None = None
    """Training FLOP/s of the device that `minutes` refers to; the time is inversely proportional to
    it. Default: those of this device."""
    tokenizer: str = ""
    """Flags of scripts.tok_train."""
    base: str = ""
    """Flags of scripts.base_train."""
    mid: str = ""
    """Flags of scripts.mid_train."""
    sft: str = ""
    """Flags of scripts.chat_sft."""
    rl: str = ""
    """Flags of scripts.chat_rl."""

    def __post_init__(self) -> None:
        if len(self.minutes.split()) != len(STAGES):
            raise ValueError(f"minutes must be {len(STAGES)} numbers, got {self.minutes!r}")


class Use(NamedTuple):
    """Disk space of one part of the run, in bytes."""

    name: str
    peak: float
    """Maximum while it runs."""
    left: float
    """Kept after it."""
    there: float
    """Already written by an earlier attempt."""


def main(cfg: Plan) -> None:
    base = parse(BaseTrain(), args=shlex.split(cfg.base))
    tokenizer = parse(TokTrain(), args=shlex.split(cfg.tokenizer))
    model = meta_model(base, tokenizer.vocab_size, cfg.gpu)
    horizon = plan_horizon(model, base.horizon, cfg.processes)
    print_time(cfg, base, model, horizon)
    embedded = (base.data.dataset or tokenizer.data.dataset) == "embedded"
    uses = disk_uses(cfg, base, tokenizer, model, horizon, embedded)
    needed = bytes_needed(uses)
    listed = ", ".join(f"{use.name} {in_bytes(use.peak)}" for use in uses if use.peak)
    print(
        f"  disk                  {in_bytes(needed)} more at peak, "
        f"{in_bytes(free_bytes(base_dir()))} free in {base_dir()}\n"
        f"    parts: {listed}"
    )
    for name in chat_eval.default_tasks({"dataset": "embedded"} if embedded else {}):
        if issubclass(TASKS[name], CodeTask) and (why := why_unavailable(name)):
            print(f"  chat evaluations skip {TASKS[name].name}: {why}")
    require_free(base_dir(), needed, f"this run ({listed})", "use a smaller DEPTH")


def meta_model(base: BaseTrain, vocab_size: int, gpu: str) -> GPT:
    """The base model on the meta device; `gpu` is the name of the GPU that will train it."""
    with torch.device("meta"):
        return GPT(base.model_config(vocab_size, "cuda" if gpu else "cpu"))


# ------------------------------------------------------------------------------------------------
# Time and cost


def print_time(cfg: Plan, base: BaseTrain, model: GPT, horizon: Horizon) -> None:
    """Print the minutes of every stage, their assumptions, and the total cost."""
    flops = model.flops_per_token()
    reference = meta_model(replace(base, depth=cfg.minutes_depth), model.cfg.vocab_size, cfg.gpu)
    scale = flops / reference.flops_per_token() * cfg.minutes_processes / cfg.processes
    rate, assumed = flops_per_second(cfg, model)
    if cfg.minutes_rate and rate:
        scale *= cfg.minutes_rate / rate
    minutes = {
        name: float(n) * (1 if name.startswith("tokenizer") else scale)
        for name, n in zip(STAGES, cfg.minutes.split(), strict=True)
    }
    tokens = horizon.num_steps * horizon.batch_tokens
    total_flops = model.flops_per_token() * tokens
    base_minutes = total_flops / (rate * cfg.processes) / 60 if rate else None
    everything = sum(minutes.values()) + (base_minutes or 0)
    dollars_per_hour = default_rate([cfg.gpu] * cfg.processes if cfg.gpu else [])
    devices = f"{cfg.processes} x {cfg.gpu or 'CPU'}"
    print(f"plan: profile {cfg.profile}, depth {base.depth} on {devices}")
    for name in STAGES:
        if name == "base model loss":
            estimate = "unknown" if base_minutes is None else f"about {base_minutes:.0f} min"
            print(f"  {'base model':<21} {estimate}: {assumed}")
            print(
                f"    {model.num_params():,} parameters, {horizon.num_steps:,} steps of "
                f"{horizon.batch_tokens:,} tokens = {tokens:.3g} tokens, {total_flops:.3g} FLOPs"
            )
        size = f"about {minutes[name]:.0f}" if minutes[name] >= 1 else "under 1"
        print(f"  {name:<21} {size} min")
    precision = "at least" if base_minutes is None else "about"
    print(
        f"  total                 {precision} {everything:.0f} min, "
        f"${everything / 60 * dollars_per_hour:.2f} at ${dollars_per_hour:.2f} an hour"
    )


def flops_per_second(cfg: Plan, model: GPT) -> tuple[float | None, str]:
    """Assumed FLOP/s of one device (None for a GPU of unknown peak) and a text explaining it."""
    if not cfg.gpu:
        device = torch.device("cpu")
        cpu = DistContext(0, 0, 1, device, default_dtype(device))
        efficiency = MATMUL_EFFICIENCY[cpu.dtype]
        return training_rate(device, cpu.dtype, model.cfg.d_model), (
            f"assuming {efficiency:.0%} of this CPU's measured matmul throughput in "
            f"{describe_dtype(cpu)}"
        )
    peak = peak_flops(cfg.gpu)
    if peak is None:
        return None, f"the peak FLOP/s of {cfg.gpu} is unknown"
    cudnn = any(name in cfg.gpu for name in CUDNN_GPUS)
    kernel = "cuDNN attention (torch >= 2.11)" if cudnn else "FlashAttention 2"
    return peak * cfg.utilization, (
        f"assuming {cfg.utilization:.0%} of {peak / 1e12:.0f} TFLOP/s (bf16) per GPU, "
        f"torch.compile and {kernel}"
    )


# ------------------------------------------------------------------------------------------------
# Disk


def disk_uses(
    cfg: Plan, base: BaseTrain, tokenizer: TokTrain, model: GPT, horizon: Horizon, embedded: bool
) -> list[Use]:
    """Disk space of each part of the run, in order."""
    tag = base.train.model_tag or f"d{base.depth}"
    data, trained = base_dir() / "data", finished(base_train.SECTION, "base", tag)
    name = base.data.dataset or tokenizer.data.dataset or ""
    hub = not (embedded or name.startswith((".", "/", "~")) or os.path.exists(name))
    tokens = horizon.num_steps * horizon.batch_tokens
    text = max(tokens * HUB_BYTES_PER_TOKEN, tokenizer.max_chars / CHARS_PER_HUB_BYTE)
    rows = tokens * (2 if tokenizer.vocab_size <= 1 << 16 else 4)
    mid = parse(mid_train.MidTrain(), args=shlex.split(cfg.mid))
    sft = parse(chat_sft.ChatSft(), args=shlex.split(cfg.sft))
    rl = parse(ChatRL(), args=shlex.split(cfg.rl))
    tasks_there = bytes_in(data / "tasks")
    return [
        file_use("text", text * hub * (not trained), bytes_in(data) - tasks_there),
        file_use("rows", rows * (not trained), bytes_in(base_dir() / "rows")),
        file_use("tasks", 0 if embedded else HUB_TASK_BYTES, tasks_there),
        checkpoint_use("base", base_train.SECTION, base.train, horizon.num_steps, model, tag),
        checkpoint_use("mid", mid_train.SECTION, mid.train, mid.tuning.num_iterations, model, tag),
        checkpoint_use("sft", chat_sft.SECTION, sft.train, sft.tuning.num_iterations, model, tag),
        checkpoint_use("rl", chat_rl.SECTION, rl.train, rl.num_iterations, model, tag),
    ]


def file_use(name: str, size: float, there: float) -> Use:
    """Disk space of files that are written once and kept."""
    return Use(name, size, size, there)


def checkpoint_use(
    stage: str, section: str, cfg: TrainConfig, steps: int | None, model: GPT, tag: str
) -> Use:
    """
    Disk space of a stage's checkpoints: `keep` of them and the one being written. The final one of
    mid, SFT and RL has no optimizer state.
    """
    name, there = f"{stage} checkpoints", bytes_in(stage_folder(stage) / tag)
    if finished(section, stage, tag):
        return file_use(name, there, there)
    keep, size = cfg.saving.keep, checkpoint_bytes(model)
    last = checkpoint_bytes(model, optimizer=stage == "base")
    every = cfg.save_every
    earlier = 0 if not every else keep + 1 if steps is None else (steps - 1) // every
    peak = max(size * min(earlier, keep + 1), size * min(earlier, keep) + last)
    return Use(name, peak, size * min(earlier, keep - 1) + last, there)


def finished(section: str, stage: str, tag: str) -> bool:
    """Whether a stage has a record for this tag whose checkpoint files still exist."""
    record = read_if_sound(report_folder() / f"{slug(section)}.json")
    folder = (stage_folder(stage) / tag).relative_to(base_dir())
    files = [Path(name) for name in record["files"]] if record else []
    return bool(files) and all(
        name.is_relative_to(folder) and (base_dir() / name).is_file() for name in files
    )


def bytes_in(folder: Path) -> int:
    """Total size of the files under a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_bytes(size: float) -> str:
    """Format a size, as in 4.50 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def bytes_needed(uses: Sequence[Use]) -> float:
    """Free bytes that the rest of the run needs at its peak; its parts run in the given order."""
    needed = written = 0.0
    for use in uses:
        needed = max(needed, written + use.peak - use.there)
        written += max(0.0, use.left - use.there)
    return needed


if __name__ == "__main__":
    start(main, Plan(), __doc__)
