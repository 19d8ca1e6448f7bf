"""
Record the results of every stage, to check that a refactor is bit-identical.

    python -m dev.golden float32 > before.json # in the old checkout
    python -m dev.golden float32 before.json   # in the new one; exits with 1 if anything differs

Runs 20 steps of each kind of training (RL: 3) on one thread and records losses, rewards and greedy
answers. They depend on the CPU, so compare on one machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from nanochat.checkpoint import FOLDERS

SMALL = (
    "--depth=4 --max_seq_len=128 --total_batch_size=2048 --eval_tokens=2048 --device_batch_size=8 "
    "--compile=off"  # the default depends on a time estimate
)
CHAT = "--eval_tokens=2048 --device_batch_size=8 --total_batch_size=2048 --compile=off"
GOLF = (
    "--tie_embeddings --mlp_ratio=3 --qat_start=0.5 --xsa_last_n=1 --rope_dims=16 "
    "--value_every=2 --qk_gain_init=1.5 --ema_decay=0.9 "
    "--quantize=embed.*=int8,*=int6"
)
RL = "--examples_per_step=4 --num_samples=4 --max_new_tokens=24 --eval_examples=8 --eval_samples=2"
RUNS = {  # tag -> stage, script and its flags
    "plain": ("base", f"base_train {SMALL}"),
    "classic": ("base", f"base_train {SMALL} --arch=classic"),
    "windows": ("base", f"base_train {SMALL} --window_pattern=SL --max_seq_len=256"),
    "share2": ("base", f"recursion.base_train {SMALL} --recursion_preset=share2"),
    "sampled": ("base", f"recursion.base_train {SMALL} --n_loops=3 --supervise=sampled"),
    "golf": ("base", f"golf.base_train {SMALL} {GOLF}"),
    "mid": ("mid", f"mid_train {CHAT} --source=base:plain --mixture=world_chat=300"),
    "sft": ("sft", f"chat_sft {CHAT} --source=mid:mid --mixture=world_facts=400"),
    "rl": ("rl", f"chat_rl {RL} --source=sft:sft --task=world_facts"),
}
ANSWERED = (("base", "plain"), ("base", "share2"), ("base", "golf"), ("sft", "sft"), ("rl", "rl"))
CURVES = ("loss", "grad_norm", "val_bpb", "reward", "pass_at_1")


def run(base: Path, words: str) -> str:
    """Run a script and return its stdout. Raises CalledProcessError if it fails."""
    name, *flags = words.split()
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"scripts.{name}", *flags]
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def curves(folder: Path) -> dict[str, list[float]]:
    """Metrics of a training run by name, at full precision."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in CURVES}


def record(dtype: str) -> dict[str, object]:
    """Run all stages in a temporary folder; return the results."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        run(base, "tok_train --dataset=embedded --num_shards=1 --vocab_size=512")
        for tag, (stage, words) in RUNS.items():
            steps = 3 if stage == "rl" else 20
            run(base, f"{words} --num_iterations={steps} --model_tag={tag} --dtype={dtype}")
            found[tag] = curves(base / FOLDERS[stage] / tag)
        for stage, tag in ANSWERED:
            chat = f"chat_cli -i {stage} -g {tag} -t 0 -p Who?"
            found[f"answer of {tag}"] = run(base, f"{chat} --dtype={dtype}")
    return found


def main() -> None:
    found = record(sys.argv[1])
    if len(sys.argv) == 2:
        json.dump(found, sys.stdout, indent=1)
        return
    before = json.loads(Path(sys.argv[2]).read_text())
    names = sorted(before.keys() | found.keys())
    differ = [name for name in names if before.get(name) != found.get(name)]
    for name in differ:
        print(f"{name}\n  before {before.get(name)}\n  now    {found.get(name)}")
    print(f"{len(names) - len(differ)} of {len(names)} results are bit-identical")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
