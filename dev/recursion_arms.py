"""
Recursion against plain models of equal cost: presets x seeds trained, each judged; one table.

    python -m dev.recursion_arms --presets=share2,aggressive,extreme

Every run but the twins spends as many FLOPs as --steps steps of the plain model, within 4%: that
model itself (equal parameters), a deeper one per preset (equal tokens), and the recursive one. The
twins are the
plain model trained on the recursive one's tokens. --others=1 adds arms that are no presets.

Reads   the tokenizer and rows under the base directory (scripts.tok_train, scripts.data)
Writes  arms/<tag>/ under it with logs and records, judged/<preset>/ with the report's section.
        Runs that are there are not repeated. Two at a time, a thread each: run nothing beside them.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.common import REPOSITORY, base_dir
from nanochat.config import start
from nanochat.presets import Preset, RecursionConfig
from nanochat.runlog import read_metrics
from nanochat.scaling import ShapeConfig, shape_for_depth
from nanochat.stats import mean
from nanochat.tokenizer import Tokenizer

BATCH = 4096
T = 512
DEPTH = 4
SHAPE = ShapeConfig(d_model=128, head_dim=32, n_kv_head=1, mlp_ratio=3, tie_embeddings=True)
COMMON = (
    f"--max_seq_len={T} --total_batch_size={BATCH} --compile=1 --eval_every=0 --log_every=50 "
    "--eval_tokens=65536 --matrix_lr=0.03 --tied_lr=0.02 --weight_decay=0.5 "
    + " ".join(f"--{name}={value}" for name, value in SHAPE.given().items())
)
# Also within the budget: plain repetition, from the start and from the middle, and the rates that
# the presets once came with.
OTHERS = {
    "repeat": "--repeat_layers=1-2",
    "repeat.late": "--repeat_layers=1-2 --repeat_from=0.5",
    "aggressive.slow": "--recursion_preset=aggressive --matrix_lr=0.001 --tied_lr=0.01",
}


@dataclass(frozen=True)
class Arms:
    presets: str = "share2,aggressive,extreme"
    """Which, separated by commas."""
    seeds: int = 3
    """Seeds of each arm."""
    steps: int = 440
    """Steps of the plain model, whose FLOPs are the budget of all."""
    others: bool = False
    """Train the arms that are no presets too."""


def flops(depth: int, preset: Preset = "none") -> float:
    """Of a token, in training."""
    plain = shape_for_depth(depth, Tokenizer.load().vocab_size, T, shape=SHAPE)
    with torch.device("meta"):
        return RecursionConfig(recursion_preset=preset).apply(plain).new().flops_per_token()


def plan(cfg: Arms, presets: list[Preset], seed: int) -> dict[str, str]:
    """Tag of every run of a seed -> its flags."""
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
        left = f"--depth={DEPTH} --target_flops={budget}"
        runs |= {f"{name}-{cfg.steps}": f"{left} {flags}" for name, flags in OTHERS.items()}
    return {f"{tag}-{seed}": flags for tag, flags in runs.items()}


def run(tag: str, flags: str) -> None:
    """Train one model, if it is not there."""
    folder = base_dir() / "arms" / tag
    folder.mkdir(parents=True, exist_ok=True)
    seed = tag.rsplit("-", 1)[1]
    call(
        f"scripts.base_train {COMMON} {flags} --seed={seed} --model_tag={tag} "
        f"--resume=auto --once --report_dir={folder / 'report'}",
        folder / "log.txt",
    )
    print(tag, flush=True)


def call(words: str, log: Path) -> None:
    """Run a script with one thread. Raises SystemExit where it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("a") as out:
        command = [sys.executable, "-m", *words.split()]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, stdout=out, stderr=out)
    if done.returncode:
        raise SystemExit(f"{words} failed, see {log}")


def judge(cfg: Arms, preset: Preset, plans: list[dict[str, str]]) -> str:
    """The section of a preset against the plain runs; returns the criteria."""
    folder = base_dir() / "judged" / preset
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").unlink(missing_ok=True)
    tags = [tag for runs in plans for tag in runs]
    mine = [tag for tag in tags if tag.startswith(f"{preset}-")]
    steps = mine[0].split("-")[1]
    plain = [tag for tag in tags if tag.startswith(("plain-", "deep"))]
    others = [tag for tag in plain if tag.split("-")[1] in (steps, str(cfg.steps))]
    call(
        f"scripts.recursion_eval --model_tags={','.join(mine)} --plain_tags={','.join(others)} "
        f"--eval_tokens=524288 --report_dir={folder}",
        folder / "log.txt",
    )
    return (folder / "log.txt").read_text()


def show(plans: list[dict[str, str]]) -> None:
    """Bits per byte of 65,536 validation tokens after every run: mean and standard error."""
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
    with ThreadPoolExecutor(2) as pool:
        jobs = [(tag, flags) for runs in plans for tag, flags in runs.items()]
        list(pool.map(lambda job: run(*job), jobs))
        show(plans)
        for text in pool.map(lambda preset: judge(cfg, preset, plans), presets):
            print(text)


if __name__ == "__main__":
    start(main, Arms(), __doc__)
