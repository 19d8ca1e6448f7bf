"""
Scaling laws: loss as a function of model size and tokens, fitted to finished runs.

    Points (N, D, loss) -> fit_law -> Law: E + A N^-alpha + B D^-beta, with bootstrap samples
    Points of one FLOP budget -> fit_minima -> Minimum: the best N and its loss

N is the training FLOPs per token divided by 6, i.e. matmul parameters plus attention, so that a run
takes 6 N D FLOPs. Source: approaches 2 and 3 of Hoffmann et al., arXiv:2203.15556. Errors are a
bootstrap over residuals, so they contain the noise of runs and the misfit of the curve inside the
measured range, but not a law that changes outside of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanochat.plots import as_svg, draw_curves, set_log_scale

EXPONENTS = np.geomspace(0.05, 1.2, 96)  # values of alpha and beta that a fit tries
BOOTSTRAPS = 200
INTERVAL = (2.5, 97.5)  # percentiles of the bootstrap: a 95% interval
MIN_POINTS = 7  # a law has five parameters


class Point(NamedTuple):
    """A finished run, or the mean of its seeds."""

    budget: float
    """FLOPs that the run was planned for."""
    depth: int
    n: float
    """Training FLOPs per token / 6."""
    tokens: float
    loss: float


class Interval(NamedTuple):
    """A fitted value with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        known = f"{self.low:.4g} to {self.high:.4g}" if math.isfinite(self.low) else "error unknown"
        return f"{self.value:.4g} ({known})"


def interval(value: float, samples: np.ndarray) -> Interval:
    """The value with percentiles of its bootstrap samples; unknown if over 5% of them are NaN."""
    if np.isnan(samples).mean() > 0.05:
        return Interval(value, math.nan, math.nan)
    low, high = np.nanpercentile(samples, INTERVAL)
    return Interval(value, float(low), float(high))


# ---- Loss as a function of N and D ---------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """
    loss = E + A N^-alpha + B D^-beta. Each row of `samples` (1 + BOOTSTRAPS, 5) is E, A, alpha, B,
    beta; row 0 is the fit to the data, the others are fits to bootstrap samples.
    """

    samples: np.ndarray
    residual: float
    """Standard deviation of relative errors, corrected for the five parameters."""

    def parameters(self) -> dict[str, Interval]:
        """Parameters, and the exponent of the compute-optimal N ~ FLOPs^exponent."""
        e, a, alpha, b, beta = self.samples.T
        columns = {"E": e, "A": a, "alpha": alpha, "B": b, "beta": beta}
        columns["optimal N exponent"] = beta / (alpha + beta)
        return {name: interval(float(x[0]), x[1:]) for name, x in columns.items()}

    def loss(self, n: float, tokens: float) -> Interval:
        """Loss of a model of size `n` after `tokens` tokens."""
        found = predict(self.samples.T, n, tokens)
        return interval(float(found[0]), found[1:])


def fit_law(points: Sequence[Point], seed: int = 0) -> Law | None:
    """
    Fit by least squares of relative errors: all pairs of exponents are tried, and E, A and B are
    linear for a given pair; none is negative. `seed` is that of the bootstrap.

    None for fewer than MIN_POINTS points or a single FLOP budget, which cannot separate N from D.
    """
    if len(points) < MIN_POINTS or len({point.budget for point in points}) < 2:
        return None
    n, tokens, loss = np.array([(p.n, p.tokens, p.loss) for p in points]).T
    first = least_squares(n, tokens, loss[:, None], 1 / loss)[0]
    fitted = predict(first, n, tokens)
    errors = (loss - fitted) / loss * math.sqrt(len(loss) / max(1, len(loss) - 5))
    drawn = np.random.default_rng(seed).choice(errors, (len(loss), BOOTSTRAPS))
    again = least_squares(n, tokens, fitted[:, None] * (1 + drawn), 1 / loss)
    return Law(np.vstack([first[None], again]), float(errors.std()))


def predict(
    parameters: np.ndarray, n: np.ndarray | float, tokens: np.ndarray | float
) -> np.ndarray:
    """
    Losses (P,) of the points by parameters (5,), or losses (R,) of one point by each column of
    parameters (5, R).
    """
    e, a, alpha, b, beta = parameters
    return e + a * n**-alpha + b * tokens**-beta


def least_squares(
    n: np.ndarray, tokens: np.ndarray, losses: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """
    Parameters (R, 5) that fit each column of losses (P, R). weights: (P,), on errors.
    """
    runs = losses.shape[1]
    best, found = np.full(runs, np.inf), np.full((runs, 5), np.nan)
    scale_n, scale_tokens = (math.exp(np.log(x).mean()) for x in (n, tokens))
    of_tokens = (tokens / scale_tokens)[None] ** -EXPONENTS[:, None]  # (G, P)
    target, index = losses * weights[:, None], np.arange(runs)
    for alpha in EXPONENTS:
        of_n = np.broadcast_to((n / scale_n) ** -alpha, of_tokens.shape)
        columns = np.stack([np.ones_like(of_tokens), of_n, of_tokens], -1) * weights[:, None]
        for free in ([0, 1, 2], [1, 2]):  # with and without E
            x = columns[..., free]  # (G, P, k)
            solved = np.linalg.pinv(x) @ target  # (G, k, R)
            error = np.square(x @ solved - target).sum(1)  # (G, R)
            error[(solved < 0).any(1)] = np.inf
            g = error.argmin(0)  # (R,)
            better = error[g, index] < best
            best = np.where(better, error[g, index], best)
            coefficients = np.zeros((runs, 3))
            coefficients[:, free] = solved[g, :, index]
            e, a, b = coefficients.T
            beta = EXPONENTS[g]
            row = [e, a * scale_n**alpha, np.full(runs, alpha), b * scale_tokens**beta, beta]
            found[better] = np.stack(row, -1)[better]
    return found


# ---- The best size for a FLOP budget -------------------------------------------------------------


class Minimum(NamedTuple):
    """
    Vertex of a parabola of loss over log N at one FLOP budget. The intervals are unknown if no
    budget has more than three sizes, or if many bootstrap samples have no minimum.
    """

    budget: float
    n: Interval
    loss: Interval
    inside: bool
    """Whether the vertex is a minimum between the smallest and the largest measured N."""
    curve: np.ndarray
    """Coefficients (3,) for numpy.polyval of log N."""


def fit_minima(points: Sequence[Point], seed: int = 0) -> list[Minimum]:
    """The minimum of each FLOP budget with at least three points, smallest budget first."""
    by_budget: dict[float, list[Point]] = {}
    for point in sorted(points):
        by_budget.setdefault(point.budget, []).append(point)
    groups = {budget: each for budget, each in by_budget.items() if len(each) >= 3}
    fits, errors = {}, []
    for budget, each in groups.items():
        x, y = np.log([p.n for p in each]), np.array([p.loss for p in each])
        curve = np.polyfit(x, y, 2)
        fits[budget] = (x, curve)
        if len(each) > 3:  # three points are on their parabola
            scale = math.sqrt(len(each) / (len(each) - 3))
            errors += list(scale * (y - np.polyval(curve, x)) / y)
    pool = np.array(errors)
    rng, minima = np.random.default_rng(seed), []
    for budget, (x, curve) in fits.items():
        center, low = vertex(curve)
        inside = bool(x.min() < center < x.max())
        several = np.full((BOOTSTRAPS, 2), math.nan)
        if errors and inside:
            drawn = rng.choice(pool, (len(x), BOOTSTRAPS))
            again = np.polyval(curve, x)[:, None] * (1 + drawn)
            several = np.array([vertex(c) for c in np.polyfit(x, again, 2).T])
            several[:, 0] = several[:, 0].clip(x.min(), x.max())
        n = interval(math.exp(center) if inside else math.nan, np.exp(several[:, 0]))
        minima.append(Minimum(budget, n, interval(low, several[:, 1]), inside, curve))
    return minima


def vertex(curve: np.ndarray) -> tuple[float, float]:
    """x and y of the vertex of a parabola; NaN without a minimum."""
    if curve[0] <= 0:
        return math.nan, math.nan
    x = -curve[1] / (2 * curve[0])
    return float(x), float(np.polyval(curve, x))


def best_by_budget(points: Sequence[Point]) -> dict[float, float]:
    """Lowest measured loss of each budget."""
    return {p.budget: p.loss for p in sorted(points, key=lambda p: -p.loss)}


# ---- Figure --------------------------------------------------------------------------------------


class Projection(NamedTuple):
    """Loss that a law predicts for a depth at its default horizon."""

    arm: str
    depth: int
    flops: float
    loss: Interval
    magnitudes: float
    """Orders of magnitude in FLOPs from the largest measured budget."""


def scaling_figure(
    arms: Mapping[str, Sequence[Point]],
    minima: Mapping[str, Sequence[Minimum]],
    projections: Sequence[Projection],
) -> bytes:
    """
    SVG. Left: loss over N of the first arm, a parabola for each FLOP budget. Right: lowest measured
    loss over FLOPs of each arm, and projections with their intervals.
    """
    control = next(iter(arms))

    def budgets(axes: Any) -> None:
        curves = {}
        for budget in sorted({point.budget for point in arms[control]}):
            found = sorted((p.n / 1e6, p.loss) for p in arms[control] if p.budget == budget)
            curves[f"{budget:.2g}"] = found
        title = f"Validation bpb by model size, {control}"
        draw_curves(axes, title, curves, "FLOPs per token / 6 (millions)", linestyle="")
        order = sorted({point.budget for point in arms[control]})
        for each in minima[control]:
            n = np.array([p.n for p in arms[control] if p.budget == each.budget])
            x = np.geomspace(n.min(), n.max(), 50)
            color = f"C{order.index(each.budget)}"
            axes.plot(x / 1e6, np.polyval(each.curve, np.log(x)), color=color, linewidth=1)
            if each.inside:
                axes.plot(each.n.value / 1e6, each.loss.value, "*", color=color, markersize=9)
        set_log_scale(axes, "x")

    def frontier(axes: Any) -> None:
        for i, arm in enumerate(arms):
            mine = [each for each in projections if each.arm == arm]
            losses = [each.loss for each in mine]
            below = [max(0.0, x.value - x.low) for x in losses]
            spread = [below, [max(0.0, x.high - x.value) for x in losses]]
            flops = [each.flops * 1.2**i for each in mine]  # arms next to each other
            values = [x.value for x in losses]
            axes.errorbar(flops, values, yerr=spread, fmt="x", color=f"C{i}", capsize=3)
            for each in mine if i == 0 else ():
                axes.annotate(f" d{each.depth}", (each.flops, each.loss.value))
        curves = {arm: sorted(best_by_budget(points).items()) for arm, points in arms.items()}
        draw_curves(axes, "Lowest validation bpb; projections with 95% intervals", curves, "FLOPs")
        set_log_scale(axes, "x")

    return as_svg(budgets, frontier, columns=2, height=3.6)
