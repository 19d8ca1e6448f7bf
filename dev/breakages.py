"""
Do canaries call broken what was broken on purpose, early, and nothing else?

    python -m dev.breakages --base=d4

Ten healthy fine-tunings and two practices of the embedded world, with other seeds, rates, batches
and mixtures: none may be called broken. And conversations of another template, an inverted mask,
and thirty times the rate: each must be stopped before a tenth of its steps is over.

Reads   base_checkpoints/<base>/, mid_ and chatsft_checkpoints/ under the base directory
Writes  sweeps/breakages/ there: verdicts.csv beside the ledger
"""

import re
from dataclasses import dataclass, field

from nanochat.checkpoint import find_checkpoint
from nanochat.common import write_atomic
from nanochat.config import start
from nanochat.lab.study import as_csv
from nanochat.lab.sweep import (
    Done,
    Job,
    Sweep,
    SweepConfig,
)
from nanochat.report import render_table

STEPS = {"mid": 80, "base": 160, "sft": 50}
RATE = {"mid": 0.3, "base": 0.7, "sft": 0.06}  # of pretraining's, as the speedrun has them
SFT = "--eval_every=0 --eval_tokens=16384 --total_batch_size=2048"
SCRIPTS = {
    "mid": f"scripts.chat_sft {SFT}",
    "base": f"scripts.chat_sft {SFT}",
    "sft": "scripts.chat_rl --resample_zero_signal=1 --num_samples=8 "
    "--max_new_tokens=32 --eval_examples=50 --eval_every=0",
}
HEALTHY = {
    "as recommended": ("mid", ""),
    "another seed": ("mid", "--seed=1"),
    "a third seed": ("mid", "--seed=2"),
    "a third of the rate": ("mid", "--init_lr_frac=0.1"),
    "three times the rate": ("mid", "--init_lr_frac=0.9"),
    "twice the batch": ("mid", "--total_batch_size=4096"),
    "talk only": ("mid", "--mixture=world_chat"),
    "choices only": ("mid", "--mixture=world_choice"),
    "from the base": ("base", ""),
    "another seed, from the base": ("base", "--seed=1"),
    "practice": ("sft", ""),
    "practice, another seed": ("sft", "--seed=1"),
}
LINE = re.compile(r"canary (\w+) at step (\d+): .* \((\w+) ")


@dataclass(frozen=True)
class Breakages:
    base: str = "d4"
    """Tag of the checkpoints to start from."""
    only: str = ""
    """Only the runs whose names hold this."""
    sweep: SweepConfig = field(default_factory=lambda: SweepConfig(devices=2))


def job(base: str, name: str, source: str, flags: str, plant: str = "") -> Job:
    """One training, from a checkpoint of the stage `source`."""
    rate = "" if "init_lr_frac" in flags else f"--init_lr_frac={RATE[source]}"
    words = f"{SCRIPTS[source]} --source={source}:{base} {rate} {flags}"
    common = "--keep=1 --model_tag={tag} --canaries=stop"
    common += f" --num_iterations={STEPS[source]}"
    before = ["dev.plant", plant] if plant else []
    start = {source: find_checkpoint(source, base).fingerprint}
    return Job(name, [[*before, *words.split(), *common.split()]], start)


def jobs(base: str) -> dict[str, tuple[str, Job]]:
    """Name -> where it starts, and the run: the healthy ones first."""
    found = {name: (how[0], job(base, name, *how)) for name, how in HEALTHY.items()}
    for source, rate in RATE.items():
        name = f"thirty times the rate, from {source}"
        found[name] = source, job(base, name, source, f"--init_lr_frac={30 * rate:g}")
        for plant in ("template", "mask") if source != "sft" else ():
            name = f"planted {plant}, from {source}"
            found[name] = source, job(base, name, source, "", plant)
    return found


def findings(run: Done) -> list[tuple[str, int, str]]:
    """(level, step, canary) of everything that was told of in its log."""
    lines = LINE.findall((run.folder / "log.txt").read_text())
    return [(level, int(step), name) for level, step, name in lines]


def main(cfg: Breakages) -> None:
    todo = {name: run for name, run in jobs(cfg.base).items() if cfg.only in name}
    with Sweep(cfg.sweep, "breakages") as sweep:
        done = sweep.run_all([each for _, each in todo.values()])
    rows, wrong = [], []
    for name, (source, _) in todo.items():
        told = findings(done[name])
        broken = [(step, canary) for level, step, canary in told if level == "broken"]
        step = min((step for step, _ in broken), default=0)
        by = ", ".join(dict.fromkeys(canary for _, canary in broken))
        warned = ", ".join(dict.fromkeys(name for level, _, name in told if level == "warn"))
        rows.append([name, f"{step} of {STEPS[source]}" if step else "-", by, warned])
        if done[name].is_broken == (name in HEALTHY) or step > STEPS[source] / 10:
            wrong.append(name)
    columns = ["Run", "Called broken at step", "By", "Warned of"]
    table = {"title": "Verdicts", "columns": columns, "rows": rows}
    write_atomic(sweep.folder / "verdicts.csv", as_csv(table))
    print(render_table(table))
    print(f"{len(wrong)} of {len(todo)} runs were judged wrongly: {', '.join(wrong) or 'none'}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main, Breakages(), __doc__)
