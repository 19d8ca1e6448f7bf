"""
Print the plan of a speedrun: minutes of each stage, and the cost of all.

    bash speedrun.sh --plan
    PROFILE=h100x8 bash speedrun.sh --plan     # on any machine

The total is that of a whole run; a rerun skips finished stages. A stage that is recorded for this
depth and machine takes as long as it did then. The minutes of the others are those of the profile's
reference run (REFERENCE), scaled to this depth and number of processes, and on a CPU to the rate of
its matmuls, which is measured.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanochat.common import write_json
from nanochat.config import start
from nanochat.dist import default_dtype, matmul_rate, peak_flops
from nanochat.gpt import GPT
from nanochat.optim import POLAR_EXPRESS
from nanochat.records import PLAN_FILE, default_rate, read_records, report_folder, seconds
from nanochat.scaling import plan_horizon, shape_for_depth

STAGES = (
    "Tokenizer training", "Tokenizer evaluation", "Base model training", "Base model loss",
    "Base model evaluation", "Chat evaluation base", "Midtraining", "Chat evaluation mid",
    "Chat SFT", "Chat evaluation sft", "Chat RL", "Chat evaluation rl",
)  # fmt: skip


class Reference(NamedTuple):
    """A run of a profile. Training of `cpu` has a fixed number of tokens."""

    gpu: str
    about: str
    depth: int
    processes: int
    minutes: tuple[float, ...]
    """Of each of STAGES."""
    rate: float | None = None
    """FLOP/s of the matmuls of all threads of a CPU."""


# Part of a CPU run's time that is inversely proportional to the matmul rate; fitted to two kinds of
# EPYC with AVX2 only: 28.6 min at about 75 GFLOP/s per thread, 53 to 55 min at 32 (2026-12)
MATMUL_SHARE = 0.6
CPU_BATCH = 4096  # tokens per step of the profile cpu
EARLY = "Tokenizer"  # stages that do not depend on the depth
LONG_MINUTES, SHALLOW = 20, 2  # of a CPU run, for which another depth is suggested


REFERENCE = {
    "h100x8": Reference(
        "H100",
        "base model: from fp8 steps measured on one H100 (2026-11); others estimated",
        *(24, 8, (3, 2, 103, 5, 10, 5, 15, 5, 5, 5, 40, 5)),
    ),
    "gpu": Reference(
        "H100",
        "estimated for one H100 in bfloat16 from published throughput",
        *(12, 1, (3, 2, 43, 5, 10, 7, 20, 7, 10, 8, 40, 8)),
    ),
    "cpu": Reference(
        "",
        "measured on 2 cores of an EPYC with AVX2 only, a busy host (2026-12)",
        *(4, 1, (0.1, 0.1, 8.6, 0.5, 0.3, 0.4, 8.3, 0.5, 2.0, 0.5, 6.2, 0.5)),
        rate=150e9,
    ),
}


@dataclass(frozen=True)
class Plan:
    profile: str = "cpu"
    """Profile of speedrun.sh."""
    depth: int = 4
    """Depth of the model."""
    processes: int = 1
    """Number of training processes, one per GPU."""
    gpu: str = ""
    """Name of the GPUs. Default: those of the reference run."""
    save: bool = False
    """Save the plan for the report, unless this model's base training has run here."""


def flops_of(depth: int, profile: str) -> tuple[float, float]:
    """
    FLOPs of a training token, its share of Muon's included, and of base training with the default
    horizon, of this depth.
    """
    on_gpu = profile in ("gpu", "h100x8")
    vocab_size, max_seq_len = (32768, 2048) if on_gpu else (4096, 256)
    with torch.device("meta"):
        model = GPT(shape_for_depth(depth, vocab_size, max_seq_len))
    horizon = plan_horizon(model)
    each = model.flops_per_token()
    each += muon_flops(model) / (horizon.batch_tokens if on_gpu else CPU_BATCH)
    return each, each * horizon.num_steps * horizon.batch_tokens


def muon_flops(model: GPT) -> float:
    """FLOPs of orthogonalizing the gradients of a step: per iteration, three matmuls a matrix."""
    shapes = [sorted(p.shape) for block in model.blocks for p in block.parameters()]
    return sum(
        len(POLAR_EXPRESS) * 2 * short * short * (2 * long + short) for short, long in shapes
    )


def cpu_speed(reference: Reference) -> tuple[float, str]:
    """
    Time of a run on this CPU as a multiple of the reference's, from the rate of its matmuls in the
    default dtype, and that rate as text.
    """
    dtype = default_dtype(torch.device("cpu"))
    rate, threads = matmul_rate(dtype), torch.get_num_threads()
    assert reference.rate is not None
    factor = 1 - MATMUL_SHARE + MATMUL_SHARE * reference.rate / (rate * threads)
    about = f"{dtype}".removeprefix("torch.")
    return factor, f"{threads} threads, {about} matmuls at {rate / 1e9:.0f} GFLOP/s per thread"


def scale(reference: Reference, profile: str, depth: int, speed: float) -> dict[str, float]:
    """Minutes of each stage at another depth, times `speed`; early ones stay as they are."""
    here, there = (flops_of(d, profile) for d in (depth, reference.depth))
    token, horizon = (a / b for a, b in zip(here, there, strict=True))
    found = {}
    for stage, minutes in zip(STAGES, reference.minutes, strict=True):
        grows = stage == "Base model training" and profile in ("gpu", "h100x8")
        answers = stage.startswith("Chat ") and stage != "Chat SFT"  # no faster with less depth
        factor = horizon if grows else max(1.0, token) if answers else token
        found[stage] = minutes * (1 if stage.startswith(EARLY) else factor * speed)
    return found


def main(cfg: Plan) -> None:
    reference = REFERENCE[cfg.profile]
    gpu = cfg.gpu or reference.gpu
    share, peaks = reference.processes / cfg.processes, [*map(peak_flops, (reference.gpu, gpu))]
    if all(peaks):
        share *= peaks[0] / peaks[1]
    speed, measured = cpu_speed(reference) if reference.rate else (1.0, "")
    speed *= share
    scaled = scale(reference, cfg.profile, cfg.depth, speed)
    records = {record["section"]: record for record in read_records()}
    same, planned = False, {}
    if base := records.get("Base model training"):
        device = (base["cost"]["device"], base["cost"]["devices"])
        same = base["settings"]["depth"] == cfg.depth and device == (gpu or "cpu", cfg.processes)
    where = f"{cfg.processes} x {gpu or 'CPU'}{measured and ': '}{measured}"
    print(f"plan: profile {cfg.profile}, depth {cfg.depth} on {where}")
    for stage, minutes in scaled.items():
        how, known, early = "", records.get(stage), stage.startswith(EARLY)
        if same and known and (early or seconds(known["timestamp"]) >= seconds(base["timestamp"])):
            minutes, how = known["cost"]["wall_seconds"] / 60, "recorded"
        planned[stage] = 60 * minutes
        size = f"about {minutes:.0f}" if minutes >= 1 else "under 1"
        print(f"  {stage:<22} {size} min {how}".rstrip())
    total = sum(planned.values()) / 60
    if cfg.save and not same:
        write_json(report_folder() / PLAN_FILE, planned)
    rate = default_rate([gpu] * cfg.processes if gpu else [])
    cost = f"${total / 60 * rate:.2f} at ${rate:.2f} an hour"
    print(f"  {'whole run':<22} about {total:.0f} min, {cost}")
    print(f"  reference: depth {reference.depth}, {reference.about}")
    if cfg.profile == "cpu" and cfg.depth > SHALLOW and total > LONG_MINUTES:
        less = sum(scale(reference, cfg.profile, SHALLOW, speed).values())
        print(f"  more than {LONG_MINUTES} minutes; DEPTH={SHALLOW} takes about {less:.0f}")


if __name__ == "__main__":
    start(main, Plan(), __doc__)
