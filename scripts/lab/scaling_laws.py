"""
Train models of several depths at several FLOP budgets and fit a scaling law to each variant.

    python -m scripts.lab.scaling_laws --hours=6                         # the default recipe
    python -m scripts.lab.scaling_laws --name=windows --arms="default|--window_pattern=SL"

No run repeats training text. Every run uses the recipe of its depth and number of tokens; an
ablation arm ("arm") adds flags of base_train. Finished runs are kept: if a series is interrupted,
rerun the same command.

Reads   the tokenizer and text (scripts.tok_train, scripts.data)
Writes  sweeps/<name>/ under the base directory (points.csv, scaling-laws.svg, ledger),
        sweeps/runs/, and the section "Scaling laws <name>"; deletes the checkpoints of its runs
"""

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from nanochat import records, report
from nanochat.checkpoint import stage_folder
from nanochat.common import UsageError, read_json, write_atomic, write_json
from nanochat.config import parse, require_at_least, require_positive, settings, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.gpt import GPT
from nanochat.hardware import training_rate
from nanochat.lab.scaling_law import (
    EXPONENTS,
    Law,
    Minimum,
    Point,
    Projection,
    best_by_budget,
    fit_law,
    fit_minima,
    scaling_figure,
)
from nanochat.lab.study import as_csv, split_arms
from nanochat.lab.sweep import DoneRun, Job, Sweep, SweepConfig, ledger_table
from nanochat.mixture import Corpus
from nanochat.scaling import plan_horizon
from scripts.base_train import BaseTrain, open_text

SECTION = "Scaling laws"
METRIC = "Final validation bpb"
NUM_BUDGETS, BUDGET_STEP = 4, 10**0.5  # each FLOP budget is this many times the one before
USED_SHARE = 0.6  # of the hours that planned FLOPs may take: evaluation and start take the rest
TOKENS_PER_N = 5.0  # depths whose tokens per parameter are closest to this are trained
ROWS_PER_RUN = 256  # fewest rows of text that a run may train on
# Flags that the plan sets, and flags that must be equal in all arms
PLANNED = ("depth", "seed", "num_iterations", "target_flops", "model_tag", "report_dir", "resume")
PLANNED += ("eval_tokens", "skip_if_done", "target_param_data_ratio")
SHARED = ("max_seq_len", "dataset", "mixture", "tokenizer_tag", "num_shards", "eval_half")


@dataclass(frozen=True)
class ScalingLaws:
    name: str = "scaling"
    """Folder under sweeps/; each name has its own plan and ledger."""
    arms: str = "default"
    """Ablation arms, separated by |: default, or flags of base_train, as in --a=1 --b=2. The first
    is the control."""
    hours: float = 6.0
    """Approximate hours of training, which set the FLOP budgets. No run starts beyond them."""
    budgets: tuple[float, ...] = ()
    """FLOP budgets, as in 1e13,3e13. Default: four that fit into the hours, fewer on a slow
    machine."""
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    """Depths to choose from."""
    depths_per_budget: int = 5
    """Maximum number of depths at each budget; at least 3."""
    project: tuple[int, ...] = (12, 20, 24)
    """Depths to predict the loss of at their default number of tokens."""
    seeds: int = 1
    """Number of seeds of each run."""
    flags: str = "--max_seq_len=512"
    """Flags of base_train for all runs; replaces the default."""
    eval_tokens: int = 262_144
    """Validation tokens to score at the end of each run."""
    report_dir: str | None = None
    """Folder of the record. Default: report/ under the base directory."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        require_at_least(self, depths_per_budget=3, seeds=1, eval_tokens=1)
        require_positive(self, "hours")
        for name in ("budgets", "depths", "project"):
            if not all(0 < each < math.inf for each in getattr(self, name)):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        arms = split_arms(self.arms)
        for flags, rejected in [(self.flags, PLANNED), *((arm, PLANNED + SHARED) for arm in arms)]:
            for flag in re.findall(r"--([\w-]+)", flags):
                name = flag.replace("-", "_")
                if name in rejected:
                    where = "is set by the series" if name in PLANNED else "belongs in --flags"
                    raise ValueError(f"--{flag} in {flags!r} {where}; remove it")


class Planned(NamedTuple):
    """One run: the model of an arm and depth at a FLOP budget."""

    arm: str
    budget: float
    depth: int
    seed: int


def main(cfg: ScalingLaws) -> None:
    arms, problem = split_arms(cfg.arms), None
    first = [arm_config(cfg, arm, 1) for arm in arms][0]  # exits for an unknown flag
    machine = init_distributed(first.train.machine)
    corpus, inputs = open_text(first, machine)
    limit = replace(cfg.sweep, cap_hours=cfg.sweep.cap_hours or cfg.hours * cfg.sweep.devices)

    # Train every arm, smallest budgets first; if that ends early, use what there is
    found: dict[Planned, DoneRun] = {}
    with Sweep(limit, cfg.name) as sweep:
        budgets = choose_budgets(cfg, sweep, corpus, machine)
        planned = plan_runs(cfg, budgets, corpus, machine)
        for budget in budgets:
            jobs = {run: make_job(cfg, run, inputs) for run in planned if run.budget == budget}
            try:
                sweep.run_all(list(jobs.values()))
            except UsageError as error:  # the cap, or a failed run
                problem = error
            done = {run: sweep.finished(job) for run, job in jobs.items()}
            found |= {run: each for run, each in done.items() if each}
            for each in found.values():
                shutil.rmtree(stage_folder("base") / each.tag, ignore_errors=True)
            if problem:
                break

        # Fit, project and write
        points = {arm: measured_points(found, arm) for arm in arms}
        if problem and not all(points.values()):
            raise problem
        minima = {arm: fit_minima(points[arm]) for arm in arms}
        laws = {arm: law for arm in arms if (law := fit_law(points[arm]))}
        largest = max(point.budget for mine in points.values() for point in mine)
        projections = [
            project(arm, law, depth, meta_model(cfg, arm, depth, corpus, machine), largest)
            for arm, law in laws.items()
            for depth in cfg.project
        ]
        tables = make_tables(points, minima, laws, projections)
        tables.append(ledger_table(sweep.ledger()))
        write_atomic(sweep.folder / "points.csv", as_csv(tables[0]))
        figure = scaling_figure(points, minima, projections)
        write_atomic(sweep.folder / "scaling-laws.svg", figure)
    print(f"{len(found)} of {len(planned)} runs; figure: {sweep.folder / 'scaling-laws.svg'}")
    values = {"Planned runs": len(planned), "Runs": sum(map(len, points.values()))}
    provenance = records.Provenance(records.inherited_run_id(inputs), 0, inputs)
    section = SECTION if cfg.name == "scaling" else f"{SECTION} {cfg.name}"
    report.append_section(section, cfg, values, provenance, sweep.cost(), tables=tables)
    machine.close()
    if problem:
        raise problem


# ---- The plan ------------------------------------------------------------------------------------


def arm_flags(cfg: ScalingLaws, arm: str) -> list[str]:
    """Flags of base_train that all runs of an arm share."""
    return [*cfg.flags.split(), *(() if arm == "default" else arm.split())]


def arm_config(cfg: ScalingLaws, arm: str, depth: int) -> BaseTrain:
    """Settings of an arm's runs of one depth."""
    return parse(BaseTrain(), args=[*arm_flags(cfg, arm), f"--depth={depth}"])


def meta_model(cfg: ScalingLaws, arm: str, depth: int, corpus: Corpus, machine: DistContext) -> GPT:
    """The model of a run without weights, to count parameters and FLOPs."""
    run = arm_config(cfg, arm, depth)
    with torch.device("meta"):
        return GPT(run.model_config(corpus.tokenizer.vocab_size, machine.device.type))


def choose_budgets(
    cfg: ScalingLaws, sweep: Sweep, corpus: Corpus, machine: DistContext
) -> list[float]:
    """
    FLOP budgets in order: those of --budgets, those of an earlier call with the same settings, or
    four that fit into the hours at an estimated throughput: on a CPU measured on matmuls, on a
    known GPU a share of its peak, which small models do not reach. Three or two larger ones where
    the smallest of four would be too small for three depths. Raises like `plan_runs`.
    """
    if cfg.budgets:
        return sorted(set(cfg.budgets))
    path = sweep.folder / "plan.json"
    names = "hours arms seeds depths depths_per_budget flags devices".split()
    wanted = {name: settings(cfg)[name] for name in names}
    saved = read_json(path) if path.exists() else {}
    if saved.get("wanted") == wanted:
        return saved["budgets"]
    arms, middle = split_arms(cfg.arms), sorted(cfg.depths)[len(cfg.depths) // 2]
    model = meta_model(cfg, arms[0], middle, corpus, machine)
    rate = training_rate(machine.device, machine.dtype, model.cfg.d_model)
    devices = cfg.sweep.devices if machine.device.type == "cuda" else 1
    flops = USED_SHARE * 3600 * cfg.hours * rate * devices / (len(arms) * cfg.seeds)
    problems = []
    for count in range(NUM_BUDGETS, 1, -1):
        shares = [BUDGET_STEP**-i for i in range(count)]
        largest = float(f"{flops / (cfg.depths_per_budget * sum(shares)):.1g}")
        budgets = sorted(float(f"{largest * share:.2g}") for share in shares)
        try:
            plan_runs(cfg, budgets, corpus, machine)
        except UsageError as error:
            problems.append(error)
            continue
        write_json(path, {"wanted": wanted, "budgets": budgets})
        return budgets
    raise problems[0]


def plan_runs(
    cfg: ScalingLaws, budgets: Sequence[float], corpus: Corpus, machine: DistContext
) -> list[Planned]:
    """
    The runs of all arms. At each budget, the depths whose tokens per parameter are closest to
    TOKENS_PER_N, of those that neither repeat text nor train on fewer than ROWS_PER_RUN rows.

    Raises UsageError if a budget has fewer than three such depths.
    """
    arms, planned = split_arms(cfg.arms), []
    T = next(iter(corpus.rows.values())).max_seq_len
    for budget in budgets:
        most_tokens = {}
        for depth in cfg.depths:
            models = [meta_model(cfg, arm, depth, corpus, machine) for arm in arms]
            most_tokens[depth] = max(budget / model.flops_per_token() for model in models)
        distance = {  # tokens / N, where N = budget / (6 tokens)
            d: abs(math.log(6 * tokens**2 / budget / TOKENS_PER_N))
            for d, tokens in most_tokens.items()
        }
        chosen, reasons = [], []
        for depth in sorted(distance, key=lambda d: distance[d]):
            rows = math.ceil(most_tokens[depth] / T)
            if rows < ROWS_PER_RUN:
                reasons.append(
                    f"depth {depth} would train on {rows} rows, fewer than {ROWS_PER_RUN}"
                )
            elif len(chosen) < cfg.depths_per_budget:
                if repeats_text(corpus, rows, machine):
                    reasons.append(f"depth {depth} would repeat the text")
                else:
                    chosen.append(depth)
        if len(chosen) < 3:
            raise UsageError(
                f"{len(chosen)} depths can train at {budget:.1e} FLOPs, but a parabola needs three"
                + "".join(f"; {reason}" for reason in reasons),
                "use other --budgets or --hours, more --depths or, if text would be repeated, more "
                "text (scripts.tok_train --num_shards)",
            )
        planned += [
            Planned(arm, budget, depth, number * 100 + i)
            for depth in sorted(chosen)
            for number, arm in enumerate(arms)
            for i in range(cfg.seeds)
        ]
    return planned


def repeats_text(corpus: Corpus, rows: int, machine: DistContext) -> bool:
    """Whether a run over this many rows would repeat text; packs rows until that is known."""
    _, needed = corpus.resolve_amounts(rows, machine)
    corpus.pack(needed, machine)
    return any((corpus.rows[name].epochs_for(n) or 0) > 1 for name, n in needed.items())


def make_job(cfg: ScalingLaws, run: Planned, inputs: Mapping[str, str]) -> Job:
    """The training job of a run."""
    words = ["scripts.base_train", "--eval_every=0", "--keep=1", "--resume=auto", "--skip_if_done"]
    words += [f"--eval_tokens={cfg.eval_tokens}", *arm_flags(cfg, run.arm)]
    words += [f"--depth={run.depth}", f"--target_flops={run.budget:g}", f"--seed={run.seed}"]
    name = f"{run.arm}, {run.budget:.1e} FLOPs, depth {run.depth}, seed {run.seed}"
    return Job(name, [[*words, "--model_tag={tag}"]], inputs)


# ---- Results -------------------------------------------------------------------------------------


def measured_points(found: Mapping[Planned, DoneRun], arm: str) -> list[Point]:
    """The runs of an arm, each the mean of its seeds."""
    seeds: dict[tuple[float, int], list[DoneRun]] = {}
    for run, done in found.items():
        if run.arm == arm and not done.is_broken:
            seeds.setdefault((run.budget, run.depth), []).append(done)
    points = []
    for (budget, depth), runs in sorted(seeds.items()):
        n = runs[0].metric("Number of FLOPs per token") / 6
        tokens = runs[0].metric("Number of training tokens")
        points.append(Point(budget, depth, n, tokens, fmean(run.metric(METRIC) for run in runs)))
    return points


def project(arm: str, law: Law, depth: int, model: GPT, largest: float) -> Projection:
    """
    Predicted loss of a depth at its default number of tokens, on the same text and context length.
    largest: FLOPs of the largest measured budget.
    """
    horizon, each = plan_horizon(model), model.flops_per_token()
    tokens = horizon.num_steps * horizon.batch_tokens
    loss = law.loss(each / 6, tokens)
    return Projection(arm, depth, each * tokens, loss, math.log10(each * tokens / largest))


def make_tables(
    points: Mapping[str, Sequence[Point]],
    minima: Mapping[str, Sequence[Minimum]],
    laws: Mapping[str, Law],
    projections: Sequence[Projection],
) -> list[dict[str, Any]]:
    """Tables of runs, minima, laws and projections."""
    runs = [
        [arm, f"{p.budget:.1e}", p.depth, f"{p.n:.4g}", f"{p.tokens:.4g}", f"{p.loss:.4f}"]
        for arm, mine in points.items()
        for p in mine
    ]
    columns = ["Arm", "FLOPs", "Depth", "FLOPs per token / 6", "Tokens", METRIC]
    tables: list[dict[str, Any]] = [{"title": "Runs", "columns": columns, "rows": runs}]
    control = next(iter(points))
    lowest = {arm: best_by_budget(mine) for arm, mine in points.items()}
    rows = []
    for arm, mine in minima.items():
        for each in mine:
            gain = "-"
            if arm != control and each.budget in lowest[control]:
                gain = f"{lowest[arm][each.budget] - lowest[control][each.budget]:+.4f}"
                if {arm, control} <= laws.keys():  # the noise of two runs
                    noise = math.hypot(laws[arm].residual, laws[control].residual)
                    gain += f" +- {noise * lowest[control][each.budget]:.4f}"
            n, loss = (str(each.n), str(each.loss)) if each.inside else ("outside", "-")
            measured = f"{lowest[arm][each.budget]:.4f}"
            rows.append([arm, f"{each.budget:.1e}", n, loss, measured, gain])
    columns = ["Arm", "FLOPs", "Best N", "Loss there", "Lowest measured", "Minus the control"]
    tables.append({"title": "Best size by FLOPs", "columns": columns, "rows": rows})
    if laws:
        names = list(next(iter(laws.values())).parameters())
        rows = [
            [arm, *map(str, law.parameters().values()), f"{100 * law.residual:.2f}%"]
            for arm, law in laws.items()
        ]
        columns = ["Arm", *names, "Residual"]
        limits = f"alpha and beta from {EXPONENTS[0]:.3g} to {EXPONENTS[-1]:.3g}"
        title = f"Fitted law: loss = E + A N^-alpha + B D^-beta, {limits}"
        tables.append({"title": title, "columns": columns, "rows": rows})
        rows = [
            [p.arm, p.depth, f"{p.flops:.2e}", str(p.loss), f"{p.magnitudes:.1f}"]
            for p in projections
        ]
        columns = ["Arm", "Depth", "FLOPs", "Predicted loss", "Orders of magnitude beyond the runs"]
        tables.append({"title": "Projections", "columns": columns, "rows": rows})
    return tables


if __name__ == "__main__":
    start(main, ScalingLaws(), __doc__)
