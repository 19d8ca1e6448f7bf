"""
Train models of several depths at several FLOP budgets and fit a scaling law to each variant.

    python -m scripts.lab.scaling_laws                                   # the default recipe
    python -m scripts.lab.scaling_laws --name=windows --arms="default|--window_pattern=SL"

No run repeats training text. Every run uses the recipe of its depth and number of tokens; an
ablation arm ("arm") adds flags of base_train. Finished runs are kept: if a series is interrupted,
rerun the same command.

Reads   the tokenizer and its text (scripts.tok_train)
Writes  sweeps/<name>/ under the base directory (points.csv, scaling-laws.svg, ledger),
        sweeps/runs/, and the section "Scaling laws <name>"; deletes the checkpoints of its runs
"""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nanochat import records, report
from nanochat.checkpoint import stage_folder
from nanochat.common import UsageError, write_atomic
from nanochat.config import require_at_least, start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.dist import init_dist
from nanochat.gpt import GPT
from nanochat.lab.scaling_law import (
    EXPONENTS,
    MIN_POINTS,
    Law,
    Point,
    best_sizes,
    fit_law,
    losses,
    scaling_figure,
    show_interval,
)
from nanochat.lab.study import as_csv, split_arms
from nanochat.lab.sweep import Job, Sweep, SweepConfig, ledger_table
from nanochat.rows import open_rows, pack_text
from nanochat.scaling import default_windows, plan_horizon, shape_for_depth
from nanochat.tokenizer import Tokenizer
from tasks.builtin import open_text

MIN_ROWS = 256  # of text that a run trains on
MEASURED = ("Number of FLOPs per token", "Number of training tokens", "Final validation bpb")


@dataclass(frozen=True)
class ScalingLaws:
    name: str = "scaling"
    """Folder under sweeps/; each name has its own ledger."""
    arms: str = "default"
    """Ablation arms, separated by |: default, or flags of base_train, as in --a=1 --b=2. The first
    is the control."""
    budgets: tuple[float, ...] = (3e12, 1e13, 3e13, 1e14)
    """FLOP budgets. The default takes about five hours on two CPU cores; use larger ones on a
    GPU."""
    depths: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Depths to train at each budget, except those that would see too little text."""
    project: tuple[int, ...] = (12, 20, 24)
    """Depths to predict the loss of at their default number of tokens."""
    seeds: int = 1
    """Number of seeds of each run."""
    max_seq_len: int = 512
    """Context length of all runs."""
    flags: str = ""
    """Further flags of base_train for all runs."""
    eval_tokens: int = 262_144
    """Validation tokens to score at the end of each run."""
    report_dir: str | None = None
    """Folder of the record. Default: report/ under the base directory."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        require_at_least(self, seeds=1, max_seq_len=1, eval_tokens=1)
        for name in ("budgets", "depths", "project"):
            if not all(0 < each < math.inf for each in getattr(self, name)):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class Planned(NamedTuple):
    """One run: the model of an arm and depth at a FLOP budget."""

    arm: str
    budget: float
    depth: int
    seed: int


def main(cfg: ScalingLaws) -> None:
    arms, dist = split_arms(cfg.arms), init_dist(steady=False)
    tokenizer = Tokenizer.load()
    source = open_text(DataConfig(), load_last_source("main"))
    text = open_rows(source, tokenizer, cfg.max_seq_len)
    inputs = {"rows": text.fingerprint, "tokenizer": tokenizer.fingerprint}
    size, windows = (tokenizer.vocab_size, cfg.max_seq_len), default_windows(dist.device.type)
    with torch.device("meta"):  # to count FLOPs, without weights
        every = {*cfg.depths, *cfg.project}
        models = {d: GPT(shape_for_depth(d, *size, "default", windows)) for d in every}

    # Runs on enough text that do not repeat it
    planned = []
    for budget, depth in sorted(itertools.product(set(cfg.budgets), set(cfg.depths))):
        rows = math.ceil(budget / models[depth].flops_per_token() / cfg.max_seq_len)
        pack_text(text, source, tokenizer, rows)
        if MIN_ROWS <= rows <= text.num_rows:  # so that no text is repeated
            planned += [
                Planned(arm, budget, depth, 100 * number + seed)
                for number, arm in enumerate(arms)
                for seed in range(cfg.seeds)
            ]
    if len(planned) < MIN_POINTS * len(arms) or planned[0].budget == planned[-1].budget:
        raise UsageError(
            f"only {len(planned)} runs can train on {MIN_ROWS} rows or more without repeating text;"
            f" a law needs {MIN_POINTS} of each arm, at two budgets",
            "use other --budgets, more --depths, or more text (scripts.tok_train --num_shards)",
        )

    # Train them, smallest budgets first
    found: dict[str, list[Point]] = {arm: [] for arm in arms}
    with Sweep(cfg.sweep, cfg.name) as sweep:
        for budget in sorted(set(cfg.budgets)):
            jobs = {run: make_job(cfg, run, inputs) for run in planned if run.budget == budget}
            sweep.run_all([*jobs.values()])
            for run, job in jobs.items():
                n, tokens, loss = map(job.metric, MEASURED)
                found[run.arm].append(Point(budget, run.depth, n / 6, tokens, loss))
                shutil.rmtree(stage_folder("base") / job.tag, ignore_errors=True)

    # Fit, project and write
    laws = {arm: law for arm in arms if (law := fit_law(found[arm])) is not None}
    beyond = [project(arm, laws[arm], d, models[d]) for arm in laws for d in cfg.project]
    tables = make_tables(found, laws, beyond)
    write_atomic(sweep.folder / "points.csv", as_csv(tables[0]))
    write_atomic(sweep.folder / "scaling-laws.svg", scaling_figure(found, laws))
    print(f"{len(planned)} runs; figure: {sweep.folder / 'scaling-laws.svg'}")
    provenance = records.Provenance(records.inherited_run_id(inputs), 0, inputs)
    section = "Scaling laws" if cfg.name == "scaling" else f"Scaling laws {cfg.name}"
    tables.append(ledger_table(sweep.ledger()))
    values = {"Runs": len(planned)}
    report.append_section(section, cfg, values, provenance, sweep.cost(), tables=tables)


def make_job(cfg: ScalingLaws, run: Planned, inputs: Mapping[str, str]) -> Job:
    """The training job of a run."""
    words = ["scripts.base_train", *cfg.flags.split()]
    words += run.arm.split() if run.arm != "default" else []
    words += "--eval_every=0 --keep=1 --resume=auto --skip_if_done".split()  # the last flag wins
    words += [f"--eval_tokens={cfg.eval_tokens}", f"--max_seq_len={cfg.max_seq_len}"]
    words += [f"--depth={run.depth}", f"--target_flops={run.budget:g}", f"--seed={run.seed}"]
    name = f"{run.arm}, {run.budget:.1e} FLOPs, depth {run.depth}, seed {run.seed}"
    return Job(name, [[*words, "--model_tag={tag}"]], inputs)


def project(arm: str, law: Law, depth: int, model: GPT) -> list[Any]:
    """Row of a table: loss of a depth at its default number of tokens, on the same text."""
    horizon, each = plan_horizon(model), model.flops_per_token()
    tokens = horizon.num_steps * horizon.batch_tokens
    return [arm, depth, f"{each * tokens:.2e}", show_interval(losses(law, each / 6, tokens))]


def make_tables(
    points: Mapping[str, Sequence[Point]], laws: Mapping[str, Law], beyond: Sequence[list[Any]]
) -> list[dict[str, Any]]:
    """Tables of runs, laws, best sizes and projections."""
    runs = [[arm, *(f"{x:.6g}" for x in p)] for arm, mine in points.items() for p in mine]
    fits, sizes, control = [], [], laws.get(next(iter(points)))
    for arm, law in laws.items():
        fits.append([arm, *map(show_interval, law.T)])
        for budget in sorted({p.budget for p in points[arm]}):
            n, lowest = best_sizes(law, budget)
            row = [arm, f"{budget:.1e}", show_interval(n), show_interval(lowest), "-"]
            if control is not None and control is not law:
                row[-1] = show_interval(lowest - best_sizes(control, budget)[1])
            sizes.append(row)
    limits = f"alpha and beta from {EXPONENTS[0]:.3g} to {EXPONENTS[-1]:.3g}"
    tables = [
        ("Runs", "Arm|FLOPs|Depth|FLOPs per token / 6|Tokens|Loss", runs),
        (f"Law: loss = E + A N^-alpha + B D^-beta, {limits}", "Arm|E|A|alpha|B|beta", fits),
        ("Best size by FLOPs", "Arm|FLOPs|Best N|Loss there|Minus the control", sizes),
        ("Projections", "Arm|Depth|FLOPs|Loss", beyond),
    ]
    return [{"title": t, "columns": c.split("|"), "rows": rows} for t, c, rows in tables if rows]


if __name__ == "__main__":
    start(main, ScalingLaws(), __doc__)
