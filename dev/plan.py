"""
Print the plan of a speedrun: time, cost, and chat evaluations that will be skipped.

    python -m dev.plan --base="--depth=4 --max_seq_len=256 --dataset=embedded"
    bash speedrun.sh --plan      # the plan for this machine

The flags of each stage are passed as one string.
"""

import shlex
from dataclasses import dataclass, replace

import torch

from nanochat.config import parse, start
from nanochat.distributed import DistContext, default_dtype
from nanochat.gpt import GPT
from nanochat.hardware import GPU_EFFICIENCY, MATMUL_EFFICIENCY, peak_flops, training_rate
from nanochat.records import default_rate
from nanochat.scaling import Horizon, plan_horizon
from nanochat.train import describe_dtype
from scripts import chat_eval
from scripts.base_train import BaseTrain
from scripts.tok_train import TokTrain
from tasks.humaneval import CodeTask
from tasks.registry import TASKS, why_unavailable

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

    def __post_init__(self) -> None:
        if len(self.minutes.split()) != len(STAGES):
            raise ValueError(f"minutes must be {len(STAGES)} numbers, got {self.minutes!r}")


def main(cfg: Plan) -> None:
    base = parse(BaseTrain(), args=shlex.split(cfg.base))
    tokenizer = parse(TokTrain(), args=shlex.split(cfg.tokenizer))
    model = meta_model(base, tokenizer.vocab_size, cfg.gpu)
    horizon = plan_horizon(model, base.horizon, cfg.processes)
    print_time(cfg, base, model, horizon)
    embedded = (base.data.dataset or tokenizer.data.dataset) == "embedded"
    for name in chat_eval.default_tasks({"dataset": "embedded"} if embedded else {}):
        if issubclass(TASKS[name], CodeTask) and (why := why_unavailable(name)):
            print(f"  chat evaluations skip {TASKS[name].name}: {why}")


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


if __name__ == "__main__":
    start(main, Plan(), __doc__)
