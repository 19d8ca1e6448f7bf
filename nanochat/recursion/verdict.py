"""
Whether recursion pays: recursive runs against plain ones, by what each of them cost.

    Arm of recursive seeds, Arms of plain seeds -> Criteria, a verdict in words

A plain arm is compared as what it is: with as many FLOPs, tokens or parameters, each within 5%.
Pure functions of numbers.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from nanochat.recursion.metrics import in_order
from nanochat.stats import NOISE

ALIKE = 0.05  # of a figure, by which two that are said to be equal may differ
FEWER = 0.8  # of the parameters, for them to be clearly fewer
SANDBAG = 0.02  # bpb by which the first loop may be worse than a plain model of the same layers


class Arm(NamedTuple):
    """Runs of one recipe that differ in their seed."""

    name: str
    bpb: list[float]
    """Of validation text, the last loop's, by seed."""
    n_layer: int
    d_model: int
    visits: int
    """How many layers a token passes."""
    params: int
    used_params: int
    """Those that multiply a token, each as often as it does."""
    tokens: float
    flops: float
    """Of the training."""

    @property
    def mean(self) -> float:
        return statistics.mean(self.bpb)

    @property
    def sd(self) -> float | None:
        """Spread over the seeds; None of a single one."""
        return statistics.stdev(self.bpb) if len(self.bpb) > 1 else None


class Criterion(NamedTuple):
    """What a recursive run should satisfy; `met` is None where it could not be judged."""

    name: str
    met: bool | None
    why: str

    @property
    def summary(self) -> str:
        """Whether it is met, and why, in words."""
        words = {True: "met", False: "NOT MET", None: "not judged"}
        return f"{words[self.met]} ({self.why})"


def alike(one: float, other: float) -> bool:
    """Whether two figures count as equal."""
    return abs(one - other) <= ALIKE * other


def apart(arm: Arm, recursive: Arm) -> str:
    """How much worse an arm is than the recursive one, and what both are equal in."""
    costs = ("params", "tokens", "flops")
    same = [what for what in costs if alike(getattr(arm, what), getattr(recursive, what))]
    return f"{arm.mean - recursive.mean:+.4f} (equal {', '.join(same) or 'nothing'})"


def spread(one: Arm, other: Arm) -> float | None:
    """The larger spread over the seeds of two arms; None unless both have several."""
    return None if one.sd is None or other.sd is None else max(one.sd, other.sd)


def twin(recursive: Arm, plain: Sequence[Arm]) -> Arm | None:
    """The plain arm of the same layers, each passed once, and as many tokens."""
    once = (recursive.n_layer, recursive.d_model, recursive.n_layer)
    same = (arm for arm in plain if (arm.n_layer, arm.d_model, arm.visits) == once)
    return next((arm for arm in same if alike(arm.tokens, recursive.tokens)), None)


def pays(recursive: Arm, plain: Sequence[Arm]) -> Criterion:
    """
    Better than every plain arm of equal FLOPs; or as good as the best of them with clearly fewer
    parameters, and better than those that have as few.
    """
    name = "Pays at equal FLOPs"
    rivals = [arm for arm in plain if alike(arm.flops, recursive.flops)]
    if not rivals:
        return Criterion(name, None, "no plain run of equal FLOPs was given")
    best = min(rivals, key=lambda arm: arm.mean)
    difference, sd = recursive.mean - best.mean, spread(recursive, best)
    detail = f"{difference:+.4f} bpb against {best.name}"
    larger = [arm for arm in rivals if recursive.params <= FEWER * arm.params]
    if sd is None:
        hopeless = difference >= 0 and best not in larger
        return Criterion(name, False if hopeless else None, f"{detail}; one seed has no spread")
    detail += f", spread over seeds {sd:.4f}"
    if all(better(recursive, arm) for arm in rivals):
        return Criterion(name, True, detail)
    as_good = difference <= NOISE * sd and best in larger
    if as_good and all(arm in larger or better(recursive, arm) for arm in rivals):
        share = recursive.params / best.params
        return Criterion(name, True, f"{detail}: as good with {share:.0%} of the parameters")
    return Criterion(name, False, detail)


def better(one: Arm, other: Arm) -> bool:
    """Whether an arm is better than another by more than two spreads over the seeds."""
    sd = spread(one, other)
    return sd is not None and one.mean - other.mean < -NOISE * sd


def not_held_back(
    recursive: Arm, first_loop: Sequence[float], plain: Sequence[Arm], trained: bool
) -> Criterion:
    """
    The first loop, where it is `trained` to predict, is no worse than the same layers passed once:
    else the last only looks better.
    """
    name, other = "First loop not held back", twin(recursive, plain)
    if not trained:
        return Criterion(name, None, "the first loop was not trained to predict")
    if other is None:
        return Criterion(name, None, "no plain run of the same layers and tokens was given")
    difference = statistics.mean(first_loop) - other.mean
    detail = f"{difference:+.4f} bpb against {other.name}, allowed {SANDBAG:+.2f}"
    return Criterion(name, difference <= SANDBAG, detail)


def ordered(by_loop: Sequence[Sequence[float]]) -> Criterion:
    """No loop is worse than the one before; by_loop[k][s] is loop k + 1 of seed s."""
    means = [statistics.mean(loop) for loop in by_loop]
    detail = ", ".join(f"{m:.5f}" for m in means)
    return Criterion("Each loop at least as good as the one before", in_order(means), detail)


def healthy(norms: Sequence[float], bad_steps: int) -> Criterion:
    """Every gradient was finite; norms of all steps of all seeds."""
    if not norms:
        return Criterion("Gradients finite", None, "no step was logged")
    detail = f"largest norm {max(norms):.3g}, {bad_steps} steps left out, {len(norms):,} steps"
    return Criterion("Gradients finite", bad_steps == 0, detail)


def falling(losses: Sequence[Sequence[float]]) -> Criterion:
    """The loss of every seed ended lower than it began: its last tenth against its first."""
    if not all(losses):
        return Criterion("Loss falling", None, "no step was logged")
    tenths = [(curve, max(1, len(curve) // 10)) for curve in losses]
    ends = [(statistics.mean(c[:n]), statistics.mean(c[-n:])) for c, n in tenths]
    detail = ", ".join(f"{first:.3f} to {last:.3f}" for first, last in ends)
    return Criterion("Loss falling", all(last < first for first, last in ends), detail)
