"""
Compare recursive models with plain models of equal cost: presets x seeds, in one table.

    python -m dev.recursion_arms --presets=share2,aggressive,extreme

The plain model first trains for --steps steps, which sets the FLOP budget. Each preset then has
three runs on the same number of tokens: the recursive model, a deeper plain model, and the plain
model again. The recursive model has as many parameters as the plain one. The recursive and the
deeper model spend the FLOP budget, to within 4%; the plain model spends less. --others=1 adds arms
that are not presets. The runs in dev/LOG.md had one key/value head, an MLP ratio of 3 and a tied LM
head, which now only scripts.golf.base_train supports; commit 484885b reproduces them.

Reads   the tokenizer and rows under the base directory (scripts.tok_train, scripts.data)
Writes  sweeps/recursion/ there, and logs and records in sweeps/runs/. Keep the machine idle
"""

from dataclasses import asdict, dataclass, field

import torch

from nanochat.checkpoint import new_model
from nanochat.common import base_dir
from nanochat.config import start
from nanochat.lab.sweep import Job, Sweep, SweepConfig
from nanochat.logger import read_metrics
from nanochat.recursion.presets import Preset, RecursionConfig, WidthConfig
from nanochat.scaling import shape_for_depth
from nanochat.stats import mean
from nanochat.tokenizer import Tokenizer

BATCH = 4096
T = 512
DEPTH = 4
WIDTH = WidthConfig(d_model=128, head_dim=32)
COMMON = (
    f"--max_seq_len={T} --total_batch_size={BATCH} --compile=1 --eval_every=0 "
    "--eval_tokens=65536 --matrix_lr=0.03 --weight_decay=0.5 --window_pattern=L "
    + " ".join(f"--{name}={value}" for name, value in asdict(WIDTH).items())
)
# Extra arms with the same budget, using the preset's old learning rate
OTHERS = {"aggressive.slow": "--recursion_preset=aggressive --matrix_lr=0.001"}


@dataclass(frozen=True)
class Arms:
    presets: str = "share2,aggressive,extreme"
    """Presets to run, separated by commas."""
    seeds: int = 3
    """Number of seeds per arm."""
    steps: int = 440
    """Optimizer steps of the plain model; its FLOPs are the budget of every run."""
    others: bool = False
    """Also train arms that are not presets."""
    sweep: SweepConfig = field(default_factory=lambda: SweepConfig(devices=2))


def flops(depth: int, preset: Preset = "none") -> float:
    """Training FLOPs per token."""
    plain = WIDTH.apply(shape_for_depth(depth, Tokenizer.load().vocab_size, T))
    with torch.device("meta"):
        shape = RecursionConfig(recursion_preset=preset).apply(plain)
        return new_model(shape).flops_per_token()


def plan(cfg: Arms, presets: list[Preset], seed: int) -> dict[str, str]:
    """Tag -> flags of all runs of a seed."""
    budget = cfg.steps * BATCH * flops(DEPTH)
    runs = {f"plain-{cfg.steps}": f"--depth={DEPTH} --num_iterations={cfg.steps}"}
    for preset in presets:
        each = BATCH * flops(DEPTH, preset)
        steps = round(budget / each)
        depth = min(range(DEPTH, 40), key=lambda d: abs(BATCH * flops(d) - each))
        runs |= {
            f"{preset}-{steps}": f"--depth={DEPTH} --num_iterations={steps} "
            f"--recursion_preset={preset}",
            f"plain-{steps}": f"--depth={DEPTH} --num_iterations={steps}",
            f"deep{depth}-{steps}": f"--depth={depth} --num_iterations={steps}",
        }
    if cfg.others:
        common = f"--depth={DEPTH} --target_flops={budget}"
        runs |= {f"{name}-{cfg.steps}": f"{common} {flags}" for name, flags in OTHERS.items()}
    return {f"{tag}-{seed}": flags for tag, flags in runs.items()}


def training(tag: str, flags: str) -> Job:
    """Training job for a model."""
    seed = tag.rsplit("-", 1)[1]
    words = (
        f"scripts.recursion.base_train {COMMON} {flags} --seed={seed} --model_tag={tag} "
        "--resume=auto"
    )
    return Job(tag, [[*words.split(), "--skip_if_done"]])


def judging(cfg: Arms, preset: Preset, plans: list[dict[str, str]]) -> Job:
    """Evaluation job that compares a preset with the plain runs."""
    tags = [tag for runs in plans for tag in runs]
    mine = [tag for tag in tags if tag.startswith(f"{preset}-")]
    steps = mine[0].split("-")[1]
    plain = [tag for tag in tags if tag.startswith(("plain-", "deep"))]
    others = [tag for tag in plain if tag.split("-")[1] in (steps, str(cfg.steps))]
    words = (
        f"scripts.recursion.evaluate --model_tags={','.join(mine)} --plain_tags={','.join(others)} "
        "--eval_tokens=524288"
    )
    return Job(f"{preset} evaluation", [words.split()])


def show(plans: list[dict[str, str]]) -> None:
    """Print mean and standard error over seeds of each arm's final validation bpb."""
    arms: dict[str, list[float]] = {}
    for tag in (tag for runs in plans for tag in runs):
        lines = read_metrics(base_dir() / "base_checkpoints" / tag / "metrics.jsonl")
        last = [line["val_bpb"] for line in lines if "val_bpb" in line][-1]
        arms.setdefault(tag.rsplit("-", 1)[0], []).append(last)
    for name, found in arms.items():
        value, n, se = mean(found)
        print(f"{name:24} {value:.4f} +- {se:.4f} ({n} seeds)", flush=True)


def main(cfg: Arms) -> None:
    presets: list[Preset] = [name.strip() for name in cfg.presets.split(",")]  # type: ignore
    plans = [plan(cfg, presets, seed) for seed in range(cfg.seeds)]
    with Sweep(cfg.sweep, "recursion") as sweep:
        sweep.run_all([training(*run) for runs in plans for run in runs.items()])
        show(plans)
        judged = sweep.run_all([judging(cfg, preset, plans) for preset in presets])
    for run in judged.values():
        print((run.folder / "log.txt").read_text())


if __name__ == "__main__":
    start(main, Arms(), __doc__)
