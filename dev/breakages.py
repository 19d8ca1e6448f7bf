"""
Test that canaries stop broken runs early and do not stop healthy ones.

    python -m dev.breakages --base=d4

Healthy: ten SFT and two RL runs on the embedded dataset with different seeds, learning rates,
batch sizes and mixtures. Broken: a wrong chat template, an inverted loss mask, and 30 times the
learning rate; each must be stopped within the first tenth of its steps.

Reads   {base,mid,chatsft}_checkpoints/<base>/ under the base directory
Writes  sweeps/breakages/ there, with verdicts.csv
"""

import re
from dataclasses import dataclass, field

from nanochat.checkpoint import find_checkpoint
from nanochat.common import write_atomic
from nanochat.config import start
from nanochat.lab.study import as_csv
from nanochat.lab.sweep import DoneRun, Job, Sweep, SweepConfig
from nanochat.report import render_table

STEPS = {"mid": 80, "base": 160, "sft": 50}
RATE = {"mid": 0.3, "base": 0.7, "sft": 0.06}  # init_lr_frac, as in speedrun.sh
SFT = "--eval_every=0 --eval_tokens=16384 --total_batch_size=2048"
SCRIPTS = {
    "mid": f"scripts.chat_sft {SFT}",
    "base": f"scripts.chat_sft {SFT}",
    "sft": "scripts.chat_rl --resample_zero_signal=1 --num_samples=8 "
    "--max_new_tokens=32 --eval_examples=50 --eval_every=0",
}
HEALTHY = {
    "default": ("mid", ""),
    "seed 1": ("mid", "--seed=1"),
    "seed 2": ("mid", "--seed=2"),
    "1/3 learning rate": ("mid", "--init_lr_frac=0.1"),
    "3x learning rate": ("mid", "--init_lr_frac=0.9"),
    "2x batch size": ("mid", "--total_batch_size=4096"),
    "chat only": ("mid", "--mixture=world_chat"),
    "multiple choice only": ("mid", "--mixture=world_choice"),
    "from base": ("base", ""),
    "from base, seed 1": ("base", "--seed=1"),
    "RL": ("sft", ""),
    "RL, seed 1": ("sft", "--seed=1"),
}
LINE = re.compile(r"canary (\w+) at step (\d+): .* \((\w+) ")


@dataclass(frozen=True)
class Breakages:
    base: str = "d4"
    """Tag of the checkpoints to start from."""
    only: str = ""
    """Run only jobs whose name contains this; empty = all."""
    sweep: SweepConfig = field(default_factory=lambda: SweepConfig(devices=2))


def job(base: str, name: str, source: str, flags: str, plant: str = "") -> Job:
    """A training run from a checkpoint of stage `source`. plant: a bug from dev.plant."""
    rate = "" if "init_lr_frac" in flags else f"--init_lr_frac={RATE[source]}"
    words = f"{SCRIPTS[source]} --source={source}:{base} {rate} {flags}"
    common = "--keep=1 --model_tag={tag} --canaries=stop"
    common += f" --num_iterations={STEPS[source]}"
    before = ["dev.plant", plant] if plant else []
    start = {source: find_checkpoint(source, base).fingerprint}
    return Job(name, [[*before, *words.split(), *common.split()]], start)


def jobs(base: str) -> dict[str, tuple[str, Job]]:
    """Run name -> parent stage and job, healthy runs first."""
    found = {name: (how[0], job(base, name, *how)) for name, how in HEALTHY.items()}
    for source, rate in RATE.items():
        name = f"30x learning rate, from {source}"
        found[name] = source, job(base, name, source, f"--init_lr_frac={30 * rate:g}")
        for plant in ("template", "mask") if source != "sft" else ():
            name = f"broken {plant}, from {source}"
            found[name] = source, job(base, name, source, "", plant)
    return found


def findings(run: DoneRun) -> list[tuple[str, int, str]]:
    """(level, step, canary) of every finding in a run's log."""
    lines = LINE.findall((run.folder / "log.txt").read_text())
    return [(level, int(step), name) for level, step, name in lines]


def main(cfg: Breakages) -> None:
    todo = {name: run for name, run in jobs(cfg.base).items() if cfg.only in name}
    with Sweep(cfg.sweep, "breakages") as sweep:
        done = sweep.run_all([each for _, each in todo.values()])
    rows, wrong = [], []
    for name, (source, _) in todo.items():
        found = findings(done[name])
        broken = [(step, canary) for level, step, canary in found if level == "broken"]
        step = min((step for step, _ in broken), default=0)
        by = ", ".join(dict.fromkeys(canary for _, canary in broken))
        warned = ", ".join(dict.fromkeys(c for level, _, c in found if level == "warn"))
        rows.append([name, f"{step} of {STEPS[source]}" if step else "-", by, warned])
        if done[name].is_broken == (name in HEALTHY) or step > STEPS[source] / 10:
            wrong.append(name)
    columns = ["Run", "Called broken at step", "By", "Warned of"]
    table = {"title": "Verdicts", "columns": columns, "rows": rows}
    write_atomic(sweep.folder / "verdicts.csv", as_csv(table))
    print(render_table(table))
    print(f"{len(wrong)} of {len(todo)} runs misclassified: {', '.join(wrong) or 'none'}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    start(main, Breakages(), __doc__)
