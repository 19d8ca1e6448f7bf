"""
Train many variants with the standard scripts and test which differ by more than noise.

    python -m scripts.lab.sweep --bases="d4|d6" --num_iterations=200 --total_batch_size=4096 \
        --mixture="smoltalk=60000t,gsm8k=40000t" --arms="only:gsm8k|drop:gsm8k"    # data
    python -m scripts.lab.sweep --grid="init_lr_frac=0.3,1;weight_decay=0,0.1" ...  # combinations
    python -m scripts.lab.sweep --search=init_lr_frac --low=0.01 --high=3 ...      # the best value
    python -m scripts.lab.sweep --stage=rl --grid="task=gsm8k|gsm8k,aqua" \
        --flags="--eval_task=gsm8k,aqua" ...                                       # tasks of RL

All runs train on the same number of tokens. Every variant (ablation arm, "arm") has its own seeds:
a mixture with other proportions has another data order for the same seed, so there is nothing to
pair. A search tries a wide grid with one seed, then a tight grid around the best value, then the
best few with new seeds. An arm or value with a run that fails is left out, and named. Finished runs
are kept: if a sweep is interrupted, rerun the same command.

Reads   checkpoints to start from, and the inputs of the scripts
Writes  sweeps/<name>/ under the base directory (ledger, CSV), sweeps/runs/, and the section "Sweep
        <name>"
"""

import csv
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from nanochat import report
from nanochat.checkpoint import SCRIPTS, find_checkpoint
from nanochat.common import UsageError, fingerprint
from nanochat.config import require_at_least, start
from nanochat.dataset import load_last_source
from nanochat.lab.ablation import CONTROL, Arms, data_arms
from nanochat.lab.significance import compare_arms, comparison_table, over_seeds
from nanochat.lab.sweep import Job, Sweep, SweepConfig, ledger_table
from nanochat.tokenizer import Tokenizer
from tasks.buckets import chat_mixture

SEEDS_OF_ARM = 100  # the seeds of arm n start at n times this


@dataclass(frozen=True)
class SweepScript:
    name: str = "sweep"
    """Folder under sweeps/; each name has its own ledger."""
    stage: Literal["base", "mid", "sft", "rl"] = "sft"
    """Training stage to study."""
    bases: str = "d4"
    """Base models, separated by |: checkpoint tags; for --stage=base, depths such as d4|d6."""
    source: Literal["base", "mid", "sft"] | None = None
    """Stage of the checkpoints to start from. Default: mid for SFT, sft for RL."""
    arms: str = ""
    """Data ablations, separated by |; each has as many total tokens as the control, in other
    proportions: copy:name, only:x, drop:x, swap:a->b, scale:x*2, ratio:language ko:en=1:4, or two
    of these as in drop:x then scale:y*2. A bucket that is used only by arms must be listed in
    --mixture, with =0t."""
    arm_floor: str = ""
    """Minimum shares of other buckets in every `only` arm, as in arc_easy=5%, so that
    models still learn to answer in the format that evaluations parse."""
    grid: str = ""
    """Flag values to combine, as in init_lr_frac=0.3,1;weight_decay=0,0.1; the first combination
    is the control. Values with commas are separated by |, as in task=gsm8k|gsm8k,aqua."""
    search: str = ""
    """Flag whose best value is searched: wide grid, tight grid, then several seeds."""
    low: float = 0.01
    """Smallest value of the wide grid."""
    high: float = 3.0
    """Largest value of the wide grid."""
    wide: int = 10
    """Size of the wide grid, evenly spaced on a log scale."""
    tight: int = 5
    """Size of the tight grid around the best value."""
    finalists: int = 2
    """Number of values to rerun with several new seeds."""
    seeds: int = 3
    """Number of seeds for the control and for each search finalist; at least 3."""
    arm_seeds: int = 2
    """Number of seeds for each other arm; at least 2."""
    mixture: str = ""
    """Mixture of the control, as in mid_train. For --arms, it sets tokens: gsm8k=40000t."""
    task: str = ""
    """Task or mixture of tasks that RL trains on. Default: that of scripts.chat_rl."""
    num_iterations: int = 100
    """Training steps per run."""
    total_batch_size: int = 4096
    """Tokens per step; unused in RL."""
    flags: str = ""
    """Extra flags for every training run."""
    tasks: str = ""
    """Tasks to evaluate every model on, separated by |. Default: none."""
    eval_flags: str = ""
    """Extra flags for scripts.chat_eval."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def metric(self) -> str:
        """Metric that a search optimizes and that is listed first."""
        return "pass@1 after" if self.stage == "rl" else "Final validation bpb"

    def __post_init__(self) -> None:
        require_at_least(self, seeds=3, arm_seeds=2, finalists=1, wide=3, tight=1)
        if self.arms and not self.mixture:
            raise ValueError(
                "--arms changes the proportions of --mixture: set that; RL has no mixture, use "
                '--grid="task=a|b"'
            )
        for flag, stages in (("mixture", "mid and sft"), ("task", "rl")):
            if getattr(self, flag) and self.stage not in stages:
                raise ValueError(f"--{flag} is for --stage={stages}; leave it out")
        for flag, held_out in (("mixture", "val_mixture"), ("task", "eval_task")):
            if re.search(rf"\b{flag}=", self.grid) and f"{held_out}=" not in self.flags:
                raise ValueError(
                    f"--grid={self.grid!r}: each {flag} would be measured on its own held-out "
                    f"data; add --{held_out}=... to --flags"
                )
        if self.search and ("|" in self.bases or not 0 < self.low < self.high):
            raise ValueError(
                f"--search needs one base and 0 < low < high, got --bases={self.bases}, "
                f"--low={self.low:g}, --high={self.high:g}"
            )


Inputs = Mapping[str, Mapping[str, str]]
"""Base -> fingerprints of what its runs start from."""


def main(cfg: SweepScript) -> None:
    if sum(map(bool, [cfg.arms, cfg.grid, cfg.search])) != 1:
        raise ValueError("set exactly one of --arms, --grid and --search")
    sweep = Sweep(cfg.sweep, cfg.name)
    inputs = find_inputs(cfg)
    values, table = (search if cfg.search else compare)(cfg, inputs, sweep)
    with (sweep.folder / f"{table['title'].lower()}.csv").open("w") as out:
        csv.writer(out).writerows([table["columns"], *table["rows"]])
    section = f"Sweep {cfg.name}".removesuffix(" sweep")
    tables = [table, ledger_table(sweep.ledger())]
    report.append_section(
        section, cfg, values, {"bases": fingerprint(inputs)}, sweep.cost(), tables=tables
    )


def find_inputs(cfg: SweepScript) -> Inputs:
    """
    Fingerprints of the bases, and of the data of all mixtures in the flags and the grid, whose
    names do not identify it. Raises MissingInput if a base does not exist.
    """
    bases = cfg.bases.split("|")
    if cfg.stage == "base":
        text = load_last_source("main") or {"fingerprint": ""}
        found = {"tokenizer": Tokenizer.load().fingerprint, "data": text["fingerprint"]}
        return dict.fromkeys(bases, found)
    named = re.findall(r"mixture=([^\s;]+)", f"{cfg.flags} {cfg.grid}")
    specs = [spec for words in named for spec in words.split("|")]
    specs += [cfg.mixture] if cfg.mixture else []
    # a spec without --mixture may be one to train or to validate on: both of its splits count
    data = fingerprint([chat_mixture(cfg.mixture or spec, spec).description for spec in specs])
    stage = parent_stage(cfg)
    return {base: {stage: find_checkpoint(stage, base).fingerprint, "data": data} for base in bases}


def parent_stage(cfg: SweepScript) -> str:
    """Stage of the checkpoints to start from."""
    return cfg.source or {"mid": "base", "sft": "mid", "rl": "sft"}[cfg.stage]


def make_job(
    cfg: SweepScript, inputs: Inputs, base: str, arm: str, flags: Sequence[str], seed: int
) -> Job:
    """
    One run: training, then evaluation on tasks. Arms with another batch size take more or fewer
    steps, for equal tokens. Raises ValueError for an arm that sets num_iterations.
    """
    own = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    if "num_iterations" in own:
        raise ValueError(f"{arm}: all runs must be equally long; set --num_iterations")
    batch = int(own.get("total_batch_size", cfg.total_batch_size))
    steps = max(1, round(cfg.num_iterations * cfg.total_batch_size / batch))
    words = [f"scripts.{SCRIPTS[cfg.stage]}", f"--num_iterations={steps}", f"--seed={seed}"]
    words += "--model_tag={tag} --eval_every=0 --keep=1 --resume=auto --skip_if_done".split()
    is_base = cfg.stage == "base"
    depth = f"--depth={base.removeprefix('d')}"
    words.append(depth if is_base else f"--source={parent_stage(cfg)}:{base}")
    words += [f"--total_batch_size={cfg.total_batch_size}"] if cfg.stage != "rl" else []
    words += [f"--mixture={cfg.mixture}"] if cfg.mixture else []
    words += [f"--task={cfg.task}"] if cfg.task else []
    commands = [[*words, *cfg.flags.split(), *flags]]
    if cfg.tasks:
        scored = ["scripts.chat_eval", f"--source={cfg.stage}", "--model_tag={tag}"]
        scored += ["--skip_if_done", f"--task_name={cfg.tasks}", *cfg.eval_flags.split()]
        commands.append(scored)
    return Job(f"{base} {arm} seed {seed}", commands, inputs[base])


# ---- Arms compared with a control ----------------------------------------------------------------


def compare(cfg: SweepScript, inputs: Inputs, sweep: Sweep) -> tuple[dict, dict]:
    """Train all arms and compare each with the control: values and a table to record."""
    arms = from_grid(cfg.grid) if cfg.grid else data_arms(cfg.mixture, cfg.arms, cfg.arm_floor)
    jobs = {  # arm by arm with the control first, so that an early stop leaves complete arms
        (base, arm, i): make_job(cfg, inputs, base, arm, flags, SEEDS_OF_ARM * number + i)
        for base in inputs
        for number, (arm, flags) in enumerate(arms.items())
        for i in range(cfg.arm_seeds if number else cfg.seeds)
    }
    sweep.run_all([*jobs.values()])
    failed = {key[:2] for key, job in jobs.items() if not job.done.exists()}
    runs = {base: {arm: [] for arm in arms if (base, arm) not in failed} for base in inputs}
    if not all(CONTROL in kept for kept in runs.values()):
        raise UsageError("a run of the control failed", "rerun the same command")
    for (base, arm, _), job in jobs.items():
        if arm in runs[base]:
            runs[base][arm].append(job.recorded())
    found = compare_arms(runs, cfg.metric)
    values = {
        "Left out": sweep.left_out,
        "Comparisons": len(found),
        "Beyond noise": sum(c.verdict != "within noise" for c in found),
    }
    return values, comparison_table(found)


def from_grid(spec: str) -> Arms:
    """
    All combinations of flag values, from flag=a,b;flag=c,d; the first is the control. Values with
    commas are separated by |, as in task=a,b|c.
    """
    axes = []
    for words in spec.split(";"):
        flag, _, values = words.strip().removeprefix("--").partition("=")
        if not values:
            raise ValueError(f"{words!r} in --grid={spec!r} is not flag=value,value")
        separator = "|" if "|" in values else ","
        axes.append([f"{flag.replace('-', '_')}={value}" for value in values.split(separator)])
    control, *others = itertools.product(*axes)
    found = {CONTROL: control} | {", ".join(each): each for each in others}
    return {name: [f"--{flag}" for flag in each] for name, each in found.items()}


# ---- The search for the best value of a flag -----------------------------------------------------


def search(cfg: SweepScript, inputs: Inputs, sweep: Sweep) -> tuple[dict, dict]:
    """
    Search the best value of a flag, and train the best few values with new seeds.

    Raises UsageError for an optimum at the edge of the wide grid.
    """
    wide = [grid_value(cfg, i) for i in range(cfg.wide)]
    i = wide.index(next(iter(train_values(cfg, inputs, sweep, wide, [0]))))
    if i in (0, cfg.wide - 1):
        raise UsageError(
            f"the best {cfg.search} is at the edge of the wide grid, {wide[i]:g}: the optimum may "
            "be outside the grid",
            f"extend it with {'--high' if i else '--low'} and rerun",
        )
    tight = [grid_value(cfg, i - 1 + 2 * k / (cfg.tight + 1)) for k in range(1, cfg.tight + 1)]
    first = train_values(cfg, inputs, sweep, [*wide, *tight], [0])
    best, seeds = [*first][: cfg.finalists], range(1, 1 + cfg.seeds)
    final = train_values(cfg, inputs, sweep, best, seeds)

    chosen, jobs = next(iter(final.items()))
    mean = over_seeds([job.metric(cfg.metric) for job in jobs])
    values = {
        f"Chosen {cfg.search}": chosen,
        f"{cfg.metric}, mean of {cfg.seeds} seeds": mean,
        "Left out": sweep.left_out,
    }
    every = [job for each in (*first.values(), *final.values()) for job in each]
    rows = [[job.name, job.metric(cfg.metric)] for job in every]
    return values, {"title": "Search", "columns": ["Run", cfg.metric], "rows": rows}


def grid_value(cfg: SweepScript, i: float) -> float:
    """Value at a position of the wide grid, to four digits; between its values for a fraction."""
    return float(f"{cfg.low * (cfg.high / cfg.low) ** (i / (cfg.wide - 1)):.4g}")


def train_values(
    cfg: SweepScript, inputs: Inputs, sweep: Sweep, values: Sequence[float], seeds: Sequence[int]
) -> dict[float, list[Job]]:
    """Train every value with every seed. Returns the runs of each value, the best mean first."""
    [base], jobs = inputs, {}
    for value in values:
        setting = f"{cfg.search}={value:g}"
        jobs[value] = [
            make_job(cfg, inputs, base, setting, [f"--{setting}"], seed) for seed in seeds
        ]
    sweep.run_all(sum(jobs.values(), []))
    good = {v: each for v, each in jobs.items() if all(job.done.exists() for job in each)}
    if not good:
        raise UsageError(f"every value of {cfg.search} had a run that failed", "see the log files")
    means = {v: fmean(job.metric(cfg.metric) for job in each) for v, each in good.items()}
    order = sorted(means, key=lambda value: means[value], reverse=cfg.stage == "rl")
    return {value: jobs[value] for value in order}


if __name__ == "__main__":
    start(main, SweepScript(), __doc__)
