"""
Test that a sweep detects a known effect and reports no false ones, on the embedded dataset.

    python -m dev.planted --base=d4

The control trains on multiple choice and word problems. One ablation arm has half of the answer
letters randomized and must be reported as worse. Ten arms are copies of the control; at
most one of them may be reported as different.

Reads   mid_checkpoints/<base>/ under the base directory
Writes  planted/*.jsonl there, and report section "Sweep planted"
"""

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import REPOSITORY, base_dir, read_json
from nanochat.config import start
from tasks.base import LETTERS, Conversation
from tasks.world.task import WorldChoice

COPIES = 10


@dataclass(frozen=True)
class Planted:
    base: str = "d4"
    """Tag of the midtrained checkpoint to start from."""
    conversations: int = 1500
    """Number of multiple-choice conversations."""
    num_iterations: int = 30
    """Optimizer steps per run."""
    devices: int = 2
    """Number of parallel runs."""


def main(cfg: Planted) -> None:
    folder = base_dir() / "planted"
    folder.mkdir(parents=True, exist_ok=True)
    clean = [WorldChoice("train")[i] for i in range(cfg.conversations)]
    write(folder / "clean.jsonl", clean)
    write(folder / "shuffled.jsonl", shuffled(clean))
    declared = {
        name: {"task": "jsonl", "source": str(folder / f"{name}.jsonl"), "answer_format": "letter"}
        for name in ("clean", "shuffled")
    }
    mixture = {"mixture": "clean=70%,world_problems=30%,shuffled=0%", "buckets": declared}
    (folder / "mixture.json").write_text(json.dumps(mixture))
    arms = ["swap:clean->shuffled", *(f"copy:{n}" for n in range(COPIES))]
    words = [
        *("scripts.lab.sweep", "--name=planted", f"--bases={cfg.base}"),
        *(f"--num_iterations={cfg.num_iterations}", "--total_batch_size=2048"),
        *(f"--devices={cfg.devices}", f"--mixture={folder / 'mixture.json'}"),
        f"--arms={'|'.join(arms)}",
        "--flags=--val_mixture=world_choice,world_problems --eval_tokens=32768",
    ]
    subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, check=True)
    table = read_json(base_dir() / "report" / "sweep-planted.json")["tables"][0]["rows"]
    verdicts = {row[2]: row[7] for row in table if row[0] == "val_bpb:world_choice"}
    false = [arm for arm, v in verdicts.items() if arm.startswith("copy") and v != "within noise"]
    found = verdicts["swap:clean->shuffled"]
    print(f"planted effect: {found} | {len(false)} of {COPIES} copies differ by more than noise")
    if found != "worse" or len(false) > 1:
        raise SystemExit(1)


def write(path: Path, conversations: list[Conversation]) -> None:
    """Write one conversation per line, as JSON."""
    path.write_text("".join(json.dumps(each) + "\n" for each in conversations))


def shuffled(clean: list[Conversation]) -> list[Conversation]:
    """Replace about half of the answer letters with random ones."""
    rng = random.Random(0)
    return [
        [
            {**message, "content": rng.choice(LETTERS[:4])}
            if message["role"] == "assistant" and rng.random() < 0.5
            else message
            for message in conversation
        ]
        for conversation in clean
    ]


if __name__ == "__main__":
    start(main, Planted(), __doc__)
