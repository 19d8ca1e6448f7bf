"""
Parameter golf ablations: train, export and evaluate each arm and seed; print a table.

    python -m dev.golf_arms --arms="golf,no weight decay" --steps=440       # equal tokens
    python -m dev.golf_arms --arms=golf,plain --seconds=600        # equal time

Reads   the tokenizer and rows under the base directory (scripts.tok_train, scripts.data)
Writes  arms/<arm>-<seed>/ there: log, artifact, records. Finished runs are kept. Runs are
        single-threaded, two at a time; for valid step times, run nothing else
"""

import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nanochat.common import REPOSITORY, base_dir, fingerprint, read_json
from nanochat.config import start
from nanochat.logger import read_metrics
from nanochat.stats import mean

COMMON = (
    "--depth=4 --max_seq_len=512 --total_batch_size=4096 --compile=1 --eval_every=0 "
    "--eval_tokens=4096 --head_dim=32 --tie_embeddings=1 --n_kv_head=1 "
    "--matrix_lr=0.03 --tied_lr=0.02 --window_pattern=L"
)
GOLF = (
    f"{COMMON} --d_model=128 --mlp_ratio=3 "
    "--quantize=*.mlp.*=int5,*=int6 --qat_start=0.85 --weight_decay=0.5"
)
ARMS = {
    "golf": GOLF,
    "plain": f"{COMMON} --d_model=64 --mlp_ratio=4.5 --value_every=0 --quantize=*=fp16 "
    "--weight_decay=0.25",  # half of GOLF's, because this arm takes twice as many steps
    "no late quantization": f"{GOLF} --qat_start=1",
    "XSA in all layers": f"{GOLF} --xsa_last_n=4",
    "partial RoPE (16 of 32)": f"{GOLF} --rope_dims=16",
    "no weight decay": f"{GOLF} --weight_decay=0",
}


@dataclass(frozen=True)
class Arms:
    arms: str = ",".join(ARMS)
    """Ablation arms, separated by commas; the first is the baseline."""
    seeds: int = 3
    """Number of seeds per arm."""
    steps: int | None = None
    """Optimizer steps per run. Set either this or `seconds`."""
    seconds: float | None = None
    """Training seconds per run. Set either this or `steps`."""
    max_documents: int = 150
    """Number of validation documents to score."""
    eval_stride: int = 0
    """Stride of the sliding-window evaluation in tokens; 0 = off."""


@dataclass(frozen=True)
class Result:
    before: float
    roundtrip: float
    sliding: float | None
    bytes: int
    steps: int
    step_seconds: float


def run(cfg: Arms, arm: str, seed: int) -> Result:
    """Train, export and evaluate one arm with one seed."""
    name = re.sub("[^a-z0-9]+", "-", arm.lower()).strip("-")
    tag = f"{name}-{fingerprint(ARMS[arm])[:6]}-{cfg.steps or cfg.seconds}-{seed}"
    folder = base_dir() / "arms" / tag
    folder.mkdir(parents=True, exist_ok=True)
    artifact = folder / "model.golf"
    length = f"--num_iterations={cfg.steps}"
    if cfg.seconds:
        length = f"--num_iterations=100000 --max_wallclock_seconds={cfg.seconds}"
    commands = [
        f"scripts.golf.base_train {ARMS[arm]} {length} --seed={seed} --model_tag={tag} "
        "--resume=auto",
        f"scripts.export --format=artifact --source=base --model_tag={tag} --out={artifact} "
        "--limit_bytes=500000 --no-count_code",
        f"scripts.golf.evaluate --artifacts={artifact} --max_documents={cfg.max_documents} "
        f"--eval_stride={cfg.eval_stride} --limit_bytes=500000 --no-count_code",
    ]
    done = folder / "report" / "parameter-golf.json"
    if not done.exists():
        with (folder / "log.txt").open("w") as log:
            for command in commands:
                words = [sys.executable, "-m", *command.split()]
                if not command.startswith("scripts.export "):
                    words.append(f"--report_dir={folder / 'report'}")
                status = subprocess.run(
                    words, cwd=REPOSITORY, env=one_thread(), stdout=log, stderr=subprocess.STDOUT
                )
                if status.returncode:
                    raise SystemExit(f"{command} failed, see {folder / 'log.txt'}")
    values = read_json(done)["values"]
    steps = read_metrics(base_dir() / "base_checkpoints" / tag / "metrics.jsonl")
    seconds = [line["step_seconds"] for line in steps if "step_seconds" in line]
    result = Result(
        values["Pre-quantization bpb"],
        values["Roundtrip bpb"],
        values.get("Roundtrip sliding bpb"),
        artifact.stat().st_size,
        len(seconds),
        # 10th percentile of step times during late quantization, to exclude interference
        statistics.quantiles(seconds[-len(seconds) // 7 :], n=10)[0],
    )
    print(arm, seed, result, flush=True)
    return result


def one_thread() -> dict[str, str]:
    """Environment of a single-threaded run."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def show(values: list[float], digits: int = 4) -> str:
    """Mean and standard error."""
    found = mean(values)
    return f"{found.value:.{digits}f} +- {found.se:.{digits}f}"


def main(cfg: Arms) -> None:
    if (cfg.steps is None) == (cfg.seconds is None):
        raise ValueError(f"got steps {cfg.steps} and seconds {cfg.seconds}; set exactly one")
    arms = [arm.strip() for arm in cfg.arms.split(",")]
    todo = [(arm, seed) for seed in range(cfg.seeds) for arm in arms]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(todo, pool.map(lambda job: run(cfg, *job), todo), strict=True))
    print("\n| arm | before | roundtrip | gap | vs. first | sliding | bytes | steps | step time |")
    print("|---|---|---|---|---|---|---|---|---|")
    first = [found[arms[0], s] for s in range(cfg.seeds)]
    for arm in arms:
        mine = [found[arm, s] for s in range(cfg.seeds)]
        change = [m.roundtrip - f.roundtrip for m, f in zip(mine, first, strict=True)]
        slower = [m.step_seconds / f.step_seconds for m, f in zip(mine, first, strict=True)]
        sliding = [m.sliding for m in mine if m.sliding is not None]
        cells = [
            arm,
            show([m.before for m in mine]),
            show([m.roundtrip for m in mine]),
            show([m.roundtrip - m.before for m in mine]),
            "" if arm == arms[0] else show(change),
            show(sliding) if sliding else "",
            f"{max(m.bytes for m in mine):,}",
            f"{statistics.mean(m.steps for m in mine):,.0f}",
            show(slower, 2),
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    start(main, Arms(), __doc__)
