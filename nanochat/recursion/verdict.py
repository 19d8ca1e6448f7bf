"""
Does recursion pay off? Compares recursive runs with plain runs of equal cost.

    LoopArm per set of seeds, recursive and plain -> Criteria with explanations

A plain arm counts as equal in FLOPs, tokens or parameters if within 5%. Below the criteria: the
metrics of a recursive model by loop.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanochat.common import StopRequest
from nanochat.dist import DistContext
from nanochat.eval_bpb import Batch, Validation
from nanochat.recursion.model import RecursiveGPT
from nanochat.stats import NOISE

COST_TOLERANCE = 0.05  # relative tolerance for equal cost
FEWER_PARAMS_RATIO = 0.8  # parameter ratio that counts as clearly fewer
TOLERANCE = 0.02  # bpb by which the first loop may be worse than a plain model of the same layers


class LoopArm(NamedTuple):
    """Ablation arm: runs of one recipe with different seeds."""

    name: str
    bpb: list[float]
    """Validation bits per byte of the last loop, by seed."""
    n_layer: int
    d_model: int
    params: int
    tokens: float
    flops: float
    """Training FLOPs."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.bpb)

    @property
    def sd(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        return statistics.stdev(self.bpb) if len(self.bpb) > 1 else None


class Criterion(NamedTuple):
    """Requirement for recursive runs; `met` is None if inconclusive."""

    name: str
    met: bool | None
    why: str

    @property
    def summary(self) -> str:
        """Result and explanation as text."""
        words = {True: "met", False: "NOT MET", None: "inconclusive"}
        return f"{words[self.met]} ({self.why})"


def is_close(one: float, other: float) -> bool:
    """Whether two values count as equal."""
    return abs(one - other) <= COST_TOLERANCE * other


def show_gap(arm: LoopArm, recursive: LoopArm) -> str:
    """Format the bpb difference from the recursive arm, and say which costs are equal."""
    costs = ("params", "tokens", "flops")
    same = [cost for cost in costs if is_close(getattr(arm, cost), getattr(recursive, cost))]
    equal = f"equal {', '.join(same)}" if same else "no equal cost"
    return f"{arm.mean - recursive.mean:+.4f} ({equal})"


def seed_spread(one: LoopArm, other: LoopArm) -> float | None:
    """Larger of two arms' standard deviations; None unless both have several seeds."""
    return None if one.sd is None or other.sd is None else max(one.sd, other.sd)


def check_equal_flops(recursive: LoopArm, plain: Sequence[LoopArm]) -> Criterion:
    """
    Criterion: better than every plain arm of equal FLOPs.

    Also met if the best of these plain arms is clearly larger than the recursive arm, and the
    recursive arm is as good as the best one and better than all those that are not clearly larger.
    """
    name = "Pays off at equal FLOPs"
    rivals = [arm for arm in plain if is_close(arm.flops, recursive.flops)]
    if not rivals:
        return Criterion(name, None, "no plain run with equal FLOPs was given")
    best = min(rivals, key=lambda arm: arm.mean)
    difference, sd = recursive.mean - best.mean, seed_spread(recursive, best)
    detail = f"{difference:+.4f} bpb against {best.name}"
    larger = [arm for arm in rivals if recursive.params <= FEWER_PARAMS_RATIO * arm.params]
    if sd is None or any(seed_spread(recursive, arm) is None for arm in rivals):
        hopeless = difference >= 0 and best not in larger
        return Criterion(name, False if hopeless else None, f"{detail}; more seeds are needed")
    detail += f", spread over seeds {sd:.4f}"
    if all(better(recursive, arm) for arm in rivals):
        return Criterion(name, True, detail)
    as_good = difference <= NOISE * sd and best in larger
    if as_good and all(arm in larger or better(recursive, arm) for arm in rivals):
        share = recursive.params / best.params
        return Criterion(name, True, f"{detail}: as good with {share:.0%} of the parameters")
    return Criterion(name, False, detail)


def better(one: LoopArm, other: LoopArm) -> bool:
    """Whether an arm is better by more than NOISE standard deviations over seeds."""
    sd = seed_spread(one, other)
    return sd is not None and one.mean - other.mean < -NOISE * sd


def check_first_loop(
    recursive: LoopArm, first_loop: Sequence[float], plain: Sequence[LoopArm], trained: bool
) -> Criterion:
    """
    Criterion: the first loop, if `trained`, is no worse than the same layers applied once.
    If it is worse, the last loop only looks better by comparison.
    """
    name, size = "First loop unharmed", (recursive.n_layer, recursive.d_model)
    if not trained:
        return Criterion(name, None, "the first loop has no training loss")
    same = [arm for arm in plain if (arm.n_layer, arm.d_model) == size]
    same = [arm for arm in same if is_close(arm.tokens, recursive.tokens)]
    if not same:
        return Criterion(name, None, "no plain run with the same layers and tokens was given")
    other = same[0]
    difference = statistics.mean(first_loop) - other.mean
    detail = f"{difference:+.4f} bpb against {other.name}, at most {TOLERANCE:+.2f} allowed"
    return Criterion(name, difference <= TOLERANCE, detail)


def check_loop_order(by_loop: Sequence[Sequence[float]]) -> Criterion:
    """Criterion: no loop is worse than the previous one; by_loop[k][s] is loop k + 1 of seed s."""
    means = [statistics.mean(loop) for loop in by_loop]
    detail = ", ".join(f"{m:.5f}" for m in means)
    falls = all(after <= before for before, after in itertools.pairwise(means))
    return Criterion("Each loop at least as good as the one before", falls, detail)


def check_gradients_finite(norms: Sequence[float], bad_steps: int) -> Criterion:
    """Criterion: every gradient was finite. `norms` covers all steps of all seeds."""
    if not norms:
        return Criterion("Gradients finite", None, "no step was logged")
    detail = f"largest norm {max(norms):.3g}, {bad_steps} steps skipped, {len(norms):,} steps"
    return Criterion("Gradients finite", bad_steps == 0, detail)


def check_loss_falling(losses: Sequence[Sequence[float]]) -> Criterion:
    """
    Criterion: the loss of every seed is lower in the last tenth of steps than in the first. Skipped
    steps, whose loss is not finite, are left out.
    """
    losses = [list(filter(math.isfinite, curve)) for curve in losses]
    if not all(losses):
        return Criterion("Loss falling", None, "no step was logged")
    tenths = [(curve, max(1, len(curve) // 10)) for curve in losses]
    ends = [(statistics.mean(c[:n]), statistics.mean(c[-n:])) for c, n in tenths]
    detail = ", ".join(f"{first:.3f} to {last:.3f}" for first, last in ends)
    return Criterion("Loss falling", all(last < first for first, last in ends), detail)


def validation_metrics(
    model: RecursiveGPT, validation: Validation, device_rows: int, stop: StopRequest
) -> dict[str, float]:
    """Validation metrics of the last loop, those of every loop, and those of the states."""
    by_loop, metrics = [], {}
    for loops in range(1, model.cfg.n_loops + 1):
        metrics = validation.score(partial(model.losses_after, loops), device_rows, stop)
        by_loop.append(metrics["val_bpb"])
    batches = (validation.batches(name, device_rows) for name in validation.rows)
    return {
        **metrics,
        **{f"bpb_loop_{k}": value for k, value in enumerate(by_loop, start=1)},
        **state_metrics(model, itertools.chain.from_iterable(batches)),
    }


def step_metrics(model: RecursiveGPT, dist: DistContext) -> dict[str, float]:
    """
    Return the loss of each supervised loop and the total loss, in nats per token over all ranks.
    Every rank must call this.
    """
    sums = dist.sum(*map(float, model.noted.values()))
    found = dict(zip(model.noted, sums, strict=True))
    counted = found.pop("counted")
    return {name: nats / counted if counted else 0.0 for name, nats in found.items()}


@torch.no_grad()
def state_metrics(model: RecursiveGPT, batches: Iterable[Batch]) -> dict[str, float]:
    """State RMS after each loop and cosine similarity to the previous state, on the first batch."""
    first = next(iter(batches), None)
    if first is None:  # rank without validation data
        return {}
    inputs = model.begin(torch.from_numpy(first[0]).to(model.device))
    states = [state.float() for state in model.states(inputs, model.cfg.n_loops)]
    rms = [float(state.square().mean().sqrt()) for state in states]
    found = {f"state_rms_{k}": value for k, value in enumerate(rms, start=1)}
    for k, pair in enumerate(itertools.pairwise(states), start=2):
        found[f"state_cosine_{k}"] = float(F.cosine_similarity(*pair, dim=-1).mean())
    return found
