"""
Train models of several depths at several FLOP budgets and fit a scaling law to each variant.

    python -m scripts.lab.scaling_laws                                   # the default recipe
    python -m scripts.lab.scaling_laws --name=windows --arms="default|--window_pattern=SL"

The law is loss = E + A N^-alpha + B D^-beta. N is the training FLOPs per token divided by 6, i.e.
matmul parameters plus attention, so that a run takes 6 N D FLOPs. Source: approach 3 of Hoffmann et
al., arXiv:2203.15556. Errors are a bootstrap over residuals, so they contain the noise of runs and
the misfit of the curve inside the measured range, but not a law that changes outside of it.

No run of the default shape repeats text. Every run uses the recipe of its depth and number of
tokens; an ablation arm ("arm") adds flags of base_train. Finished runs are kept: if a series is
interrupted, rerun the same command.

Reads   the tokenizer and its text (scripts.tok_train)
Writes  sweeps/<name>/ under the base directory (ledger), sweeps/runs/, and the section "Scaling
        laws <name>"; deletes the checkpoints of its runs
"""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanochat import report
from nanochat.checkpoint import stage_folder
from nanochat.common import UsageError
from nanochat.config import require_at_least, start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.dist import init_dist
from nanochat.gpt import GPT
from nanochat.lab.sweep import Job, Sweep, SweepConfig, ledger_table
from nanochat.rows import open_rows, pack_text
from nanochat.scaling import default_windows, plan_horizon, shape_for_depth
from nanochat.tokenizer import Tokenizer
from tasks.world.write import open_text

EXPONENTS = np.geomspace(0.05, 1.2, 48)  # values of alpha and beta that a fit tries
BOOTSTRAPS = 200
MIN_POINTS = 7  # a law has five parameters

Law = np.ndarray
"""(1 + BOOTSTRAPS, 5), each row E, A, alpha, B, beta. Row 0 is the fit to the data."""
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
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        require_at_least(self, seeds=1, max_seq_len=1, eval_tokens=1)


def main(cfg: ScalingLaws) -> None:
    arms, device = cfg.arms.split("|"), init_dist(steady=False).device.type
    tokenizer = Tokenizer.load()
    text = open_text(DataConfig(), load_last_source("main"))
    packed = open_rows(text, tokenizer, cfg.max_seq_len)
    inputs = {"rows": packed.fingerprint, "tokenizer": tokenizer.fingerprint}
    shape = tokenizer.vocab_size, cfg.max_seq_len, "default", default_windows(device)
    with torch.device("meta"):  # to count FLOPs, without weights
        models = {d: GPT(shape_for_depth(d, *shape)) for d in {*cfg.depths, *cfg.project}}

    # Runs on enough text that do not repeat it, smallest budgets first
    jobs: dict[tuple[str, float, int, int], Job] = {}
    for budget, depth in sorted(itertools.product(set(cfg.budgets), set(cfg.depths))):
        rows = math.ceil(budget / models[depth].flops_per_token() / cfg.max_seq_len)
        pack_text(packed, text, tokenizer, [rows])
        parts = zip(packed.parts.values(), packed.shares, strict=True)
        whole = min(part.totals()["rows"] / share for part, share in parts)  # none repeated
        if MIN_ROWS <= rows <= whole:
            for (number, arm), i in itertools.product(enumerate(arms), range(cfg.seeds)):
                run = (arm, budget, depth, 100 * number + i)
                jobs[run] = make_job(cfg, *run, inputs)
    budgets = sorted({budget for _, budget, *_ in jobs})
    points = {run[:3] for run in jobs}  # without seeds
    if len(points) < MIN_POINTS * len(arms) or len(budgets) < 2:
        raise UsageError(
            f"{len(points) // len(arms)} sizes at {len(budgets)} budgets see {MIN_ROWS} rows or "
            f"more, none twice; a law needs {MIN_POINTS} at two",
            "use other --budgets, more --depths, or more text (scripts.tok_train --num_shards)",
        )

    # Train them and fit
    sweep = Sweep(cfg.sweep, cfg.name)
    sweep.run_all([*jobs.values()])
    runs: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for (arm, budget, depth, _), job in jobs.items():
        if job.done.exists():
            flops_per_token, tokens, loss = map(job.metric, MEASURED)
            runs[arm].append([budget, depth, flops_per_token / 6, tokens, loss])
        shutil.rmtree(stage_folder("base") / job.tag, ignore_errors=True)
    for arm, mine in runs.items():
        if len({(budget, depth) for budget, depth, *_ in mine}) < MIN_POINTS:
            raise UsageError(f"too few runs of {arm} succeeded for a law", "rerun the same command")
    laws = {arm: fit_law(*np.array(mine).T[2:]) for arm, mine in runs.items()}

    tables = make_tables(cfg, runs, laws, budgets, models)
    tables.append(ledger_table(sweep.ledger()))
    section = f"Scaling laws {cfg.name}".removesuffix(" scaling")
    values = {"Runs": len(jobs), "Left out": sweep.left_out}
    report.append_section(section, cfg, values, inputs, sweep.cost(), tables=tables)


def make_job(
    cfg: ScalingLaws, arm: str, budget: float, depth: int, seed: int, inputs: Mapping[str, str]
) -> Job:
    """The training job of the model of an arm and depth at a FLOP budget."""
    words = ["scripts.base_train", *cfg.flags.split(), *arm.removeprefix("default").split()]
    words += "--eval_every=0 --keep=1 --resume=auto --skip_if_done".split()  # the last flag wins
    words += [f"--eval_tokens={cfg.eval_tokens}", f"--max_seq_len={cfg.max_seq_len}"]
    words += [f"--depth={depth}", f"--target_flops={budget:g}", f"--seed={seed}"]
    name = f"{arm}, {budget:.1e} FLOPs, depth {depth}, seed {seed}"
    return Job(name, [[*words, "--model_tag={tag}"]], inputs)


def make_tables(
    cfg: ScalingLaws,
    runs: Mapping[str, list[list[float]]],
    laws: Mapping[str, Law],
    budgets: Sequence[float],
    models: Mapping[int, GPT],
) -> list[dict[str, Any]]:
    """Tables of runs, laws, best sizes and projections."""
    sizes, beyond = [], []
    control = next(iter(laws.values()))
    for arm, law in laws.items():
        # An arm may have other FLOPs per token, as with windows
        share = np.mean([6 * n / models[int(d)].flops_per_token() for _, d, n, *_ in runs[arm]])
        for budget in budgets:
            n, lowest = best_sizes(law, budget)
            change = lowest - best_sizes(control, budget)[1]
            sizes.append([arm, f"{budget:.1e}", *map(show_interval, (n, lowest, change))])
        for depth in cfg.project:  # at its default number of tokens, of the same text
            horizon = plan_horizon(models[depth])
            each = share * models[depth].flops_per_token()
            tokens = horizon.num_steps * horizon.batch_tokens
            loss = show_interval(losses(law, each / 6, tokens))
            beyond.append([arm, depth, f"{each * tokens:.2e}", loss])
    numbers = [[arm, *(f"{x:.6g}" for x in run)] for arm, mine in runs.items() for run in mine]
    fits = [[arm, *map(show_interval, law.T)] for arm, law in laws.items()]
    limits = f"alpha and beta from {EXPONENTS[0]:.3g} to {EXPONENTS[-1]:.3g}"
    tables = [
        ("Runs", "Arm|FLOPs|Depth|FLOPs per token / 6|Tokens|Loss", numbers),
        (f"Law: loss = E + A N^-alpha + B D^-beta, {limits}", "Arm|E|A|alpha|B|beta", fits),
        ("Best size by FLOPs", "Arm|FLOPs|Best N|Loss there|Minus the control", sizes),
        ("Projections", "Arm|Depth|FLOPs|Loss", beyond),
    ]
    return [{"title": t, "columns": c.split("|"), "rows": rows} for t, c, rows in tables]


# ---- The law -------------------------------------------------------------------------------------


def show_interval(samples: np.ndarray) -> str:
    """The first sample, and the 95% interval of the others unless some have no fit."""
    low, high = np.percentile(samples[1:], (2.5, 97.5))
    known = f"{low:.4g} to {high:.4g}" if math.isfinite(low) else "error unknown"
    return f"{samples[0]:.4g} ({known})"


def losses(law: Law, n: Any, tokens: Any) -> np.ndarray:
    """Loss of a model of size `n` after `tokens` tokens, by each row of the law."""
    e, a, alpha, b, beta = law.T
    return e + a * n**-alpha + b * tokens**-beta


def best_sizes(law: Law, flops: float) -> tuple[np.ndarray, np.ndarray]:
    """Size with the lowest loss for a budget of `flops`, and its loss, by each row of the law."""
    _, a, alpha, b, beta = law.T
    n = (alpha * a / (beta * b) * (flops / 6) ** beta) ** (1 / (alpha + beta))
    return n, losses(law, n, flops / 6 / n)


def fit_law(n: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> Law:
    """
    Fit by least squares of relative errors: all pairs of exponents are tried, and E, A and B are
    linear for a given pair; none is negative. The runs, (P,) each,
    must have several FLOP budgets, which separate N from D. NaN if no such law describes them.
    """
    fit = least_squares(n, tokens, loss[:, None])
    if np.isnan(fit).any():
        return np.full((1 + BOOTSTRAPS, 5), np.nan)
    fitted = losses(fit, n[:, None], tokens[:, None])[:, 0]
    errors = (loss / fitted - 1) * math.sqrt(len(loss) / (len(loss) - 5))
    drawn = np.random.default_rng(0).choice(errors, (len(loss), BOOTSTRAPS))
    return np.vstack([fit, least_squares(n, tokens, fitted[:, None] * (1 + drawn))])


def least_squares(n: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> Law:
    """Parameters (R, 5) that fit each column of `loss` (P, R); NaN without a law that fits."""
    best, found = np.full(loss.shape[1], np.inf), np.full((loss.shape[1], 5), np.nan)
    weights = 1 / loss.mean(1, keepdims=True)  # for relative errors
    target = loss * weights
    for alpha, beta in itertools.product(EXPONENTS, EXPONENTS):
        x = np.stack([np.ones_like(n), n**-alpha, tokens**-beta], 1) * weights  # (P, 3)
        scale = x.mean(0)
        e, a, b = solved = np.linalg.pinv(x / scale) @ target / scale[:, None]  # (3, R)
        error = np.square(x @ solved - target).sum(0)
        better = (error < best) & (solved >= 0).all(0)
        best[better] = error[better]
        row = np.stack([e, a, np.full_like(e, alpha), b, np.full_like(e, beta)], 1)
        found[better] = row[better]
    return found


if __name__ == "__main__":
    start(main, ScalingLaws(), __doc__)
