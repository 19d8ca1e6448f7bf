"""
Train models of several depths at several FLOP budgets and fit a scaling law to each variant.

    python -m scripts.lab.scaling_laws --hours=6                       # the default recipe
    python -m scripts.lab.scaling_laws --arms="default|--bigram_rows=0|--value_every=2"  # compare

No run repeats training text. Every run uses the recipe of its depth and number of tokens; an
ablation arm ("arm") adds flags of base_train. Finished runs are kept: if a series is interrupted,
rerun the same command.

Reads   the tokenizer and text (scripts.tok_train, scripts.data)
Writes  sweeps/<name>/ under the base directory (points.csv, scaling-laws.svg, ledger),
        sweeps/runs/, and the section "Scaling laws"; deletes the checkpoints of its runs
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from nanochat import records, report
from nanochat.checkpoint import build_model, new_model, stage_folder
from nanochat.common import UsageError, read_json, write_atomic, write_json
from nanochat.config import parse, require_at_least, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.gpt import GPT
from nanochat.lab.scaling_law import (
    MIN_POINTS,
    Interval,
    Law,
    Minimum,
    Point,
    Projection,
    fit_law,
    fit_minima,
    growth,
    scaling_figure,
)
from nanochat.lab.study import as_csv
from nanochat.lab.sweep import DoneRun, Job, Sweep, SweepConfig, ledger_table
from nanochat.mixture import Corpus
from nanochat.preflight import estimate_seconds
from nanochat.scaling import default_windows, plan_horizon, shape_for_depth
from scripts.base_train import BaseTrain, open_text

SECTION = "Scaling laws"
METRIC = "Final validation bpb"
NUM_BUDGETS, BUDGET_STEP = 4, 10**0.5  # each FLOP budget is this many times the one before
USED_SHARE = 0.6  # of the hours that planned FLOPs may take: evaluation and start take the rest
TOKENS_PER_N = 5.0  # depths whose tokens per parameter are closest to this are trained
ROWS_PER_RUN = 256  # fewest rows of text that a run may train on


@dataclass(frozen=True)
class ScalingLaws:
    name: str = "scaling"
    """Folder under sweeps/; each name has its own plan and ledger."""
    arms: str = "default"
    """Ablation arms, separated by |: default, or flags of base_train. The first is the control."""
    hours: float = 6.0
    """Hours that the whole series may take; sets the FLOP budgets."""
    budgets: str = ""
    """FLOP budgets, separated by commas, as in 1e13,3e13. Default: four that fit into the hours."""
    depths: str = "1|2|3|4|5|6|8"
    """Depths to choose from, separated by |."""
    depths_per_budget: int = 5
    """Maximum number of depths at each budget."""
    project: str = "12|20|24"
    """Depths to predict the loss of, separated by |."""
    seeds: int = 1
    """Number of seeds of each run."""
    flags: str = "--max_seq_len=512"
    """Flags of base_train for all runs."""
    eval_tokens: int = 262_144
    """Validation tokens to score at the end of each run."""
    report_dir: str | None = None
    """Folder of the record. Default: report/ under the base directory."""
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        require_at_least(self, depths_per_budget=1, seeds=1, eval_tokens=1)
        if not self.hours > 0:
            raise ValueError(f"hours must be positive, got {self.hours}")
        for depth in [*self.depths.split("|"), *self.project.split("|")]:
            if not depth.strip().isdigit():
                raise ValueError(f"depths are integers separated by |, got {depth!r}")


class Planned(NamedTuple):
    """One run: the model of an arm and depth at a FLOP budget."""

    arm: str
    budget: float
    depth: int
    seed: int


def main(cfg: ScalingLaws) -> None:
    started = time.perf_counter()
    machine = init_distributed()
    corpus, inputs = open_text(arm_config(cfg, "default", 1), machine)
    arms = [arm.strip() for arm in cfg.arms.split("|")]
    if len(set(arms)) < len(arms):
        raise ValueError(f"--arms={cfg.arms!r} lists an arm twice")
    limit = replace(cfg.sweep, cap_hours=cfg.sweep.cap_hours or cfg.hours * cfg.sweep.devices)

    # Train every arm, smallest budgets first
    found: dict[Planned, DoneRun] = {}
    with Sweep(limit, cfg.name) as sweep:
        budgets = choose_budgets(cfg, sweep, len(arms), corpus, machine)
        planned = plan_runs(cfg, arms, budgets, corpus, machine)
        for budget in budgets:
            jobs = {run: make_job(cfg, run, inputs) for run in planned if run.budget == budget}
            done = sweep.run_all(list(jobs.values()))
            found |= {run: done[job.name] for run, job in jobs.items()}
            for run in done.values():
                shutil.rmtree(stage_folder("base") / run.tag, ignore_errors=True)

        # Fit, project and write
        points = {arm: measured_points(found, arm) for arm in arms}
        minima = {arm: fit_minima(points[arm]) for arm in arms}
        laws = {arm: fit_law(points[arm]) for arm in arms if enough(points[arm])}
        projections = [
            project(cfg, arm, law, depth, budgets[-1], corpus)
            for arm, law in laws.items()
            for depth in map(int, cfg.project.split("|"))
        ]
        tables = make_tables(points, minima, laws, projections)
        rate = records.default_rate(report.hardware()["gpus"])
        tables.append(ledger_table(sweep.ledger(), rate))
        write_atomic(sweep.folder / "points.csv", as_csv(tables[0]))
        figure = scaling_figure(points, minima, projections, "validation bpb")
        write_atomic(sweep.folder / "scaling-laws.svg", figure)
    for table in tables:
        print(report.render_table(table), flush=True)
    print(f"figure: {sweep.folder / 'scaling-laws.svg'}")
    values = summarize(points, minima, laws)
    provenance = records.Provenance(records.inherited_run_id(inputs), 0, inputs)
    cost = records.Cost(time.perf_counter() - started, cfg.sweep.devices, device_seconds=0.0)
    report.append_section(SECTION, cfg, values, provenance, cost, tables=tables)
    machine.close()


# ---- The plan ------------------------------------------------------------------------------------


def arm_flags(cfg: ScalingLaws, arm: str) -> list[str]:
    """Flags of base_train that all runs of an arm share."""
    return [*cfg.flags.split(), *(() if arm == "default" else arm.split())]


def arm_config(cfg: ScalingLaws, arm: str, depth: int) -> BaseTrain:
    """Settings of an arm's runs of one depth."""
    return parse(BaseTrain(), args=[*arm_flags(cfg, arm), f"--depth={depth}"])


def meta_model(cfg: BaseTrain, vocab_size: int, device_type: str) -> GPT:
    """The model of a run without weights, to count parameters and FLOPs."""
    windows = cfg.window_pattern or default_windows(cfg.depth, device_type)
    shape = shape_for_depth(cfg.depth, vocab_size, cfg.max_seq_len, cfg.arch, windows, cfg.shape)
    with torch.device("meta"):
        return new_model(shape)


def choose_budgets(
    cfg: ScalingLaws, sweep: Sweep, num_arms: int, corpus: Corpus, machine: DistContext
) -> list[float]:
    """
    FLOP budgets in order: those of --budgets, those of an earlier call with the same hours, or four
    that fit into the hours at the throughput that this machine reaches on its matmuls.
    """
    if cfg.budgets:
        return sorted(float(each) for each in cfg.budgets.split(","))
    path = sweep.folder / "plan.json"
    wanted = {"hours": cfg.hours, "arms": num_arms, "seeds": cfg.seeds}
    saved = read_json(path) if path.exists() else {}
    if saved.get("wanted") == wanted:
        return saved["budgets"]
    depths = sorted(map(int, cfg.depths.split("|")))
    middle = arm_config(cfg, "default", depths[len(depths) // 2])
    shape = meta_model(middle, corpus.tokenizer.vocab_size, machine.device.type).cfg
    model = build_model(shape, machine.device, machine.dtype, seed=0)
    rate = model.flops_per_token() / estimate_seconds(model, 1, machine)
    devices = cfg.sweep.devices if machine.device.type == "cuda" else 1
    flops = USED_SHARE * 3600 * cfg.hours * rate * devices / (num_arms * cfg.seeds)
    shares = [BUDGET_STEP**-i for i in range(NUM_BUDGETS)]
    largest = float(f"{flops / (cfg.depths_per_budget * sum(shares)):.1g}")
    budgets = sorted(float(f"{largest * share:.2g}") for share in shares)
    write_json(path, {"wanted": wanted, "budgets": budgets})
    return budgets


def plan_runs(
    cfg: ScalingLaws,
    arms: Sequence[str],
    budgets: Sequence[float],
    corpus: Corpus,
    machine: DistContext,
) -> list[Planned]:
    """
    The runs of all arms. At each budget, the depths whose tokens per parameter are closest to
    TOKENS_PER_N, of those that neither repeat text nor train on fewer than ROWS_PER_RUN rows.

    Raises UsageError if a budget has fewer than three such depths.
    """
    vocab_size, planned = corpus.tokenizer.vocab_size, []
    for budget in budgets:
        distance, too_long = {}, []
        for depth in map(int, cfg.depths.split("|")):
            longest = max(
                budget
                / meta_model(arm_config(cfg, arm, depth), vocab_size, "cpu").flops_per_token()
                for arm in arms
            )
            rows = math.ceil(longest / next(iter(corpus.rows.values())).max_seq_len)
            if repeats_text(corpus, rows, machine):
                too_long.append(depth)
            elif rows >= ROWS_PER_RUN:
                n = budget / (6 * longest)
                distance[depth] = abs(math.log(longest / n / TOKENS_PER_N))
        chosen = sorted(sorted(distance, key=lambda d: distance[d])[: cfg.depths_per_budget])
        if len(chosen) < 3:
            text = f"depths {too_long} would repeat the text; " if too_long else ""
            raise UsageError(
                f"only depths {chosen} can train at {budget:.1e} FLOPs: {text}others would train "
                f"on fewer than {ROWS_PER_RUN} rows",
                "use other --budgets, more text (scripts.tok_train --num_shards) or more --depths",
            )
        planned += [
            Planned(arm, budget, depth, number * 100 + i)
            for depth in chosen
            for number, arm in enumerate(arms)
            for i in range(cfg.seeds)
        ]
    return planned


def repeats_text(corpus: Corpus, rows: int, machine: DistContext) -> bool:
    """Whether a run over this many rows would repeat text; packs rows until that is known."""
    corpus.pack(dict.fromkeys(corpus.rows, rows), machine)
    return any((each.epochs_for(rows) or 0) > 1 for each in corpus.rows.values())


def make_job(cfg: ScalingLaws, run: Planned, inputs: Mapping[str, str]) -> Job:
    """The training job of a run."""
    words = ["scripts.base_train", "--eval_every=0", "--keep=1", "--resume=auto", "--skip_if_done"]
    words += [f"--eval_tokens={cfg.eval_tokens}", *arm_flags(cfg, run.arm)]
    words += [f"--depth={run.depth}", f"--target_flops={run.budget:g}", f"--seed={run.seed}"]
    name = f"{run.arm}, {run.budget:.1e} FLOPs, depth {run.depth}, seed {run.seed}"
    return Job(name, [[*words, "--model_tag={tag}"]], inputs)


# ---- Results -------------------------------------------------------------------------------------


def enough(points: Sequence[Point]) -> bool:
    """Whether a law can be fitted to the points."""
    return len(points) >= MIN_POINTS and len({point.budget for point in points}) > 1


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


def project(
    cfg: ScalingLaws, arm: str, law: Law, depth: int, largest: float, corpus: Corpus
) -> Projection:
    """
    Predicted loss of a depth at its default horizon, on the same kind of text. largest: FLOPs of
    the largest measured budget.
    """
    settings = arm_config(cfg, arm, depth)
    model = meta_model(settings, corpus.tokenizer.vocab_size, "cpu")
    horizon = plan_horizon(model, target_param_data_ratio=settings.target_param_data_ratio)
    tokens, each = horizon.num_steps * horizon.batch_tokens, model.flops_per_token()
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
            gain = lowest[arm][each.budget] - lowest[control][each.budget]
            n, loss = (str(each.n), str(each.loss)) if each.inside else ("outside", "-")
            cells = [f"{lowest[arm][each.budget]:.4f}", "-" if arm == control else f"{gain:+.4f}"]
            rows.append([arm, f"{each.budget:.1e}", n, loss, *cells])
    columns = ["Arm", "FLOPs", "Best N", "Loss there", "Lowest measured", "Minus the control"]
    tables.append({"title": "Best size by FLOPs", "columns": columns, "rows": rows})
    if laws:
        names = list(next(iter(laws.values())).parameters())
        rows = [
            [arm, *map(str, law.parameters().values()), f"{100 * law.residual:.2f}%"]
            for arm, law in laws.items()
        ]
        columns = ["Arm", *names, "Residual"]
        title = "Fitted law: loss = E + A N^-alpha + B D^-beta"
        tables.append({"title": title, "columns": columns, "rows": rows})
        rows = [
            [p.arm, p.depth, f"{p.flops:.2e}", show(p.loss), f"{p.magnitudes:.1f}"]
            for p in projections
        ]
        columns = ["Arm", "Depth", "FLOPs", "Predicted loss", "Orders of magnitude beyond the runs"]
        tables.append({"title": "Projections", "columns": columns, "rows": rows})
    return tables


def best_by_budget(points: Sequence[Point]) -> dict[float, float]:
    """Lowest measured loss of each budget."""
    ordered = sorted(points, key=lambda point: -point.loss)
    return {point.budget: point.loss for point in ordered}


def show(found: Interval) -> str:
    """A loss with its interval."""
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def summarize(
    points: Mapping[str, Sequence[Point]],
    minima: Mapping[str, Sequence[Minimum]],
    laws: Mapping[str, Law],
) -> dict[str, Any]:
    """Values of the record."""
    values: dict[str, Any] = {"Runs": sum(map(len, points.values()))}
    for arm, mine in points.items():
        values[f"{arm}: lowest loss"] = min(point.loss for point in mine)
        exponent = growth(minima[arm])
        values[f"{arm}: exponent of the best N"] = "-" if exponent is None else exponent
        if arm in laws:
            values[f"{arm}: irreducible loss E"] = str(laws[arm].parameters()["E"])
    return values


if __name__ == "__main__":
    start(main, ScalingLaws(), __doc__)
