"""
Train many variants with the standard scripts and test which differ by more than noise.

    python -m scripts.lab.sweep --bases="d4|d6" --num_iterations=200 --total_batch_size=4096 \
        --mixture="smoltalk=60000t,gsm8k=40000t" --arms="only:gsm8k|drop:gsm8k"    # data
    python -m scripts.lab.sweep --grid="init_lr_frac=0.3,1;weight_decay=0,0.1" ...  # combinations
    python -m scripts.lab.sweep --search=init_lr_frac --low=0.01 --high=3 ...      # the best value
    python -m scripts.lab.sweep --stage=rl --grid="task=gsm8k|gsm8k,aqua" \
        --flags="--eval_task=gsm8k,aqua" ...                                       # tasks of RL

All runs train on the same number of tokens; every variant ("arm") has its own seeds. A search
tries a wide grid with one seed, then a tight grid around the best value, then the best few with new
seeds. Finished runs are kept: if a sweep is interrupted, rerun the same command.

Reads   checkpoints to start from, and the inputs of the scripts
Writes  sweeps/<name>/ under the base directory (ledger, CSV), sweeps/runs/, and the section "Sweep
        <name>"
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from nanochat import records, report
from nanochat.common import UsageError, fingerprint, write_atomic
from nanochat.config import require_at_least, start
from nanochat.lab.significance import expected_maximum, lower_is_better, over_seeds
from nanochat.lab.study import (
    SEEDS_OF_ARM,
    Inputs,
    StudyConfig,
    as_csv,
    compare_arms,
    comparison_table,
    data_arms,
    find_inputs,
    from_grid,
    make_job,
    split_arms,
)
from nanochat.lab.sweep import Job, Sweep, SweepConfig, ledger_table


@dataclass(frozen=True)
class SweepScript(StudyConfig):
    name: str = "sweep"
    """Folder under sweeps/; each name has its own ledger."""
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
    metric: str = ""
    """Metric that a search optimizes and that is listed first. Default: Final validation bpb; for
    RL, pass@1 after."""
    report_dir: str | None = None
    """Folder of the sweep's record. Default: report/ under the base directory."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, seeds=3, arm_seeds=2, finalists=1, wide=3, tight=1)
        if self.arms and (not self.mixture or "--mixture" in self.flags):
            raise ValueError(
                "--arms changes the proportions of --mixture: set that, and not in --flags; RL has "
                'no mixture, use --grid="task=a|b"'
            )
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


Findings = tuple[dict[str, Any], dict[str, Any], dict[str, list[list[float]]]]
"""Values, a table and series of the record."""


def main(cfg: SweepScript) -> None:
    if sum(map(bool, [cfg.arms, cfg.grid, cfg.search])) != 1:
        raise ValueError("set exactly one of --arms, --grid and --search")
    is_rl = cfg.stage == "rl"
    cfg = replace(cfg, metric=cfg.metric or ("pass@1 after" if is_rl else "Final validation bpb"))
    inputs = find_inputs(cfg, cfg.grid)
    with Sweep(cfg.sweep, cfg.name) as sweep:
        findings = search(cfg, inputs, sweep) if cfg.search else compare(cfg, inputs, sweep)
    values, table, series = findings
    tables = [table, ledger_table(sweep.ledger())]
    write_atomic(sweep.folder / f"{records.slug(table['title'])}.csv", as_csv(table))
    first, *others = inputs.values()
    origin = {"bases": fingerprint(inputs)} if others else first
    provenance = records.Provenance(records.inherited_run_id(first), 0, origin)
    section, cost = f"Sweep {cfg.name}".removesuffix(" sweep"), sweep.cost()
    report.append_section(section, cfg, values, provenance, cost, tables=tables, series=series)


def compare(cfg: SweepScript, inputs: Inputs, sweep: Sweep) -> Findings:
    """Train all arms and compare each with the control."""
    arms = from_grid(cfg.grid) if cfg.grid else data_arms(cfg, split_arms(cfg.arms), cfg.arm_floor)
    jobs = [  # arm by arm with the control first, so that an early stop leaves complete arms
        (base, arm, make_job(cfg, inputs, base, arm, flags, SEEDS_OF_ARM * number + i))
        for base in inputs
        for number, (arm, flags) in enumerate(arms.items())
        for i in range(cfg.arm_seeds if number else cfg.seeds)
    ]
    sweep.run_all([job for _, _, job in jobs])
    runs = {base: {arm: [] for arm in arms} for base in inputs}
    for base, arm, job in jobs:
        if not job.is_broken:
            runs[base][arm].append(job.recorded())
    found = compare_arms(runs, cfg.metric)
    million_tokens = None if cfg.stage == "rl" else cfg.num_iterations * cfg.total_batch_size / 1e6
    first = {f"{c.arm}, {c.base}": c for c in found if c.metric == cfg.metric}
    values: dict[str, Any] = {
        name: f"{c.difference:+.4f} ({c.verdict})" for name, c in first.items()
    }
    values["Comparisons"] = len(found)
    values["Beyond noise"] = sum(c.verdict != "within noise" for c in found)
    values["Broken runs"] = ", ".join(job.name for *_, job in jobs if job.is_broken) or None
    series = {name: [[c.difference, c.bar]] for name, c in first.items()}
    return values, comparison_table(found, million_tokens), series


# ---- The search for the best value of a flag -----------------------------------------------------


def search(cfg: SweepScript, inputs: Inputs, sweep: Sweep) -> Findings:
    """
    Search the best value of a flag; evaluate its models on validation rows that did not choose it.

    Raises UsageError for an optimum at the edge of the wide grid.
    """
    wide = [grid_value(cfg, i) for i in range(cfg.wide)]
    runs = train_values(cfg, inputs, sweep, wide, [0])
    i = wide.index(rank(cfg, runs)[0])
    if i in (0, cfg.wide - 1):
        raise UsageError(
            f"the best {cfg.search} is at the edge of the wide grid, {wide[i]:g}: the optimum may "
            "be outside the grid",
            f"extend it with {'--high' if i else '--low'} and rerun; finished runs are reused",
        )
    tight = [grid_value(cfg, i - 1 + 2 * k / (cfg.tight + 1)) for k in range(1, cfg.tight + 1)]
    runs |= train_values(cfg, inputs, sweep, tight, [0])
    finalists, seeds = rank(cfg, runs)[: cfg.finalists], range(1, 1 + cfg.seeds)
    again = train_values(cfg, inputs, sweep, finalists, seeds)
    runs |= again

    chosen = rank(cfg, again)[0]
    mine = {seed: run for (value, seed), run in again.items() if value == chosen}
    scores = {seed: run.metric(cfg.metric) for seed, run in mine.items()}
    best = (min if lower_is_better(cfg.metric) else max)(scores, key=lambda seed: scores[seed])
    found = [*scores.values()]
    spread = stdev(found) if len(found) > 1 else 0.0
    values = {
        f"Chosen {cfg.search}": chosen,
        f"{cfg.metric}, mean of {len(found)} seeds": over_seeds(found),
        "Score of the best seed when it was chosen": scores[best],
        "Expected inflation of the best score": expected_maximum(len(found)) * spread,
    }
    if re.match("Final validation|val_bpb:", cfg.metric):  # measured on rows
        jobs = {seed: confirmation(job) for seed, job in mine.items()}
        sweep.run_all([*jobs.values()])
        anew = {seed: job.metric(cfg.metric) for seed, job in jobs.items()}
        values["Mean of the same seeds on other validation rows"] = over_seeds([*anew.values()])
        values["The best seed on other validation rows"] = anew[best]
    rows = []
    for value in sorted({*wide, *tight}):
        cells = [runs.get((value, seed)) for seed in (0, *seeds)]
        row = [f"{run.metric(cfg.metric):.4f}" if run else "-" for run in cells]
        rows.append([f"{value:g}", *row, "chosen" if value == chosen else ""])
    columns = [cfg.search, *(f"Seed {seed}" for seed in (0, *seeds)), ""]
    curve = [[v, run.metric(cfg.metric)] for (v, seed), run in sorted(runs.items()) if seed == 0]
    table = {"title": "Search", "columns": columns, "rows": rows}
    return values, table, {f"{cfg.metric} by {cfg.search}, seed 0": curve}


def grid_value(cfg: SweepScript, i: float) -> float:
    """Value at a position of the wide grid, to four digits; between its values for a fraction."""
    return float(f"{cfg.low * (cfg.high / cfg.low) ** (i / (cfg.wide - 1)):.4g}")


Runs = dict[tuple[float, int], Job]  # (value, seed) -> finished run, without broken ones


def train_values(
    cfg: SweepScript, inputs: Inputs, sweep: Sweep, values: Iterable[float], seeds: Iterable[int]
) -> Runs:
    """Train every value with every seed."""
    [base], jobs = inputs, {}
    half = [] if cfg.stage == "rl" else ["--eval_half=1"]  # RL has no validation rows
    for value, seed in itertools.product(values, seeds):
        setting = f"{cfg.search}={value:g}"
        jobs[value, seed] = make_job(cfg, inputs, base, setting, [f"--{setting}", *half], seed)
    sweep.run_all([*jobs.values()])
    runs = {key: job for key, job in jobs.items() if not job.is_broken}
    if not runs:
        raise ValueError(f"every run of {cfg.search} broke; use other --low and --high")
    return runs


def rank(cfg: SweepScript, runs: Runs) -> list[float]:
    """Values, the best mean over seeds first, but values with broken seeds last."""
    scores: dict[float, list[float]] = {}
    for (value, _), run in runs.items():
        scores.setdefault(value, []).append(run.metric(cfg.metric))
    sign = 1 if lower_is_better(cfg.metric) else -1
    return sorted(scores, key=lambda value: (-len(scores[value]), sign * fmean(scores[value])))


def confirmation(job: Job) -> Job:
    """Job that evaluates a trained model again, on validation rows that did not choose it."""
    words = [word.replace("{tag}", job.tag) for word in job.commands[0]]
    return Job(f"{job.name}, again", [[*words, "--eval_half=2"]], job.starts_from)


if __name__ == "__main__":
    start(main, SweepScript(), __doc__)
