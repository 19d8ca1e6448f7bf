"""
Model soups: is the weight average of three fine-tuned models better than the best of them?

    python -m dev.soups --base=d4

Reads   mid_checkpoints/<base>/ under the base directory
Writes  sweeps/soups/ there, with soups.csv, and merged checkpoints soup-*
"""

from dataclasses import dataclass, field
from typing import Any

from nanochat.checkpoint import find_checkpoint
from nanochat.common import write_atomic
from nanochat.config import start
from nanochat.lab.study import as_csv
from nanochat.lab.sweep import DoneRun, Job, Sweep, SweepConfig
from nanochat.records import plain_value
from nanochat.report import render_table

SEEDS = 3  # per soup


@dataclass(frozen=True)
class Soups:
    base: str = "d4"
    """Tag of the midtrained checkpoint to start from."""
    repeats: int = 3
    """Number of soups, each with its own seeds."""
    num_iterations: int = 80
    """Optimizer steps per fine-tuning run."""
    total_batch_size: int = 2048
    """Tokens per optimizer step."""
    eval_tokens: int = 65536
    """Validation tokens for comparing models."""
    sweep: SweepConfig = field(default_factory=lambda: SweepConfig(devices=2))


def fine_tuning(cfg: Soups, seed: int) -> Job:
    """Fine-tuning job for a seed."""
    words = (
        f"scripts.chat_sft --source=mid:{cfg.base} --num_iterations={cfg.num_iterations} "
        f"--total_batch_size={cfg.total_batch_size} --seed={seed} --eval_every=0 "
        "--eval_tokens=16384 --model_tag={tag}"
    )
    start = {"mid": find_checkpoint("mid", cfg.base).fingerprint}
    return Job(f"seed {seed}", [words.split()], start)


def merging(cfg: Soups, number: int, parents: list[DoneRun], flags: str) -> Job:
    """Job that merges `parents` into a soup."""
    models = "|".join(f"sft:{parent.tag}" for parent in parents)
    words = (
        f"scripts.lab.merge --models={models} --eval_tokens={cfg.eval_tokens} --tag={{tag}} {flags}"
    )
    name = f"soup {number}{flags.replace('--', ', ')}"
    return Job(name, [words.split()], {parent.tag: parent.tag for parent in parents})


def main(cfg: Soups) -> None:
    groups = [range(n * SEEDS, (n + 1) * SEEDS) for n in range(cfg.repeats)]
    with Sweep(cfg.sweep, "soups") as sweep:
        made = sweep.run_all([fine_tuning(cfg, seed) for group in groups for seed in group])
        jobs = {
            (n, flags): merging(cfg, n, [made[f"seed {seed}"] for seed in group], flags)
            for n, group in enumerate(groups)
            for flags in ("", "--greedy")
        }
        done = sweep.run_all(list(jobs.values()))
    rows = [row(n, flags, done[job.name].values()) for (n, flags), job in jobs.items()]
    columns = ["Repeat", "Soup", "Best of 3", "Mean of 3", "Merged", "Merged - best", "Verdict"]
    table = {"title": "Soups", "columns": columns, "rows": rows}
    write_atomic(sweep.folder / "soups.csv", as_csv(table))
    print(render_table(table))


def row(number: int, flags: str, values: dict[str, Any]) -> list[str]:
    """Table row of one soup."""
    names = ("Best parent's bpb", "Mean of the parents' bpb", "Merged bpb")
    change = values["Merged minus best"]
    return [
        *(str(number), flags.removeprefix("--") or "mean"),
        *(f"{plain_value(values[name]):.4f}" for name in names),
        f"{change['value']:+.4f} +- {change['se']:.4f}",
        values["Verdict"],
    ]


if __name__ == "__main__":
    start(main, Soups(), __doc__)
