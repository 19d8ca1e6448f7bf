"""
Scaling laws: loss as a function of model size and tokens, fitted to finished runs.

    Points (N, D, loss) -> fit_law -> Law: E + A N^-alpha + B D^-beta, with bootstrap samples
    Law -> losses, best_sizes: samples -> show_interval

N is the training FLOPs per token divided by 6, i.e. matmul parameters plus attention, so that a run
takes 6 N D FLOPs. Source: approach 3 of Hoffmann et al., arXiv:2203.15556. Errors are a bootstrap
over residuals, so they contain the noise of runs and the misfit of the curve inside the measured
range, but not a law that changes outside of it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nanochat.plots import as_svg, new_figure, set_log_scale

EXPONENTS = np.geomspace(0.05, 1.2, 48)  # values of alpha and beta that a fit tries
BOOTSTRAPS = 200
MIN_POINTS = 7  # a law has five parameters

Law = np.ndarray
"""(1 + BOOTSTRAPS, 5), each row E, A, alpha, B, beta. Row 0 is the fit to the data."""


class Point(NamedTuple):
    """A finished run."""

    budget: float
    """FLOPs that the run was planned for."""
    depth: int
    n: float
    """Training FLOPs per token / 6."""
    tokens: float
    loss: float


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


def fit_law(points: Sequence[Point], seed: int = 0) -> Law | None:
    """
    Fit by least squares of relative errors: all pairs of exponents are tried, and E, A and B are
    linear for a given pair; none is negative. `seed` is that of the bootstrap.

    None for fewer than MIN_POINTS points, a single FLOP budget, which cannot separate N from D, or
    losses that no such law describes.
    """
    if len(points) < MIN_POINTS or len({point.budget for point in points}) < 2:
        return None
    n, tokens, loss = np.array([(p.n, p.tokens, p.loss) for p in points]).T
    fit = least_squares(n, tokens, loss[:, None])
    if np.isnan(fit).any():
        return None
    fitted = np.array([losses(fit, *each)[0] for each in zip(n, tokens, strict=True)])
    errors = (loss / fitted - 1) * math.sqrt(len(loss) / (len(loss) - 5))
    drawn = np.random.default_rng(seed).choice(errors, (len(loss), BOOTSTRAPS))
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


def scaling_figure(points: Mapping[str, Sequence[Point]], laws: Mapping[str, Law]) -> bytes:
    """SVG of loss over FLOPs by arm: all runs, and the lowest loss by the law."""
    figure, [[axes]] = new_figure(height=3.6)
    for i, (arm, mine) in enumerate(points.items()):
        x, y = [p.budget for p in mine], [p.loss for p in mine]
        axes.plot(x, y, "o", color=f"C{i}", label=arm)
        if arm in laws:
            x = np.geomspace(min(x), max(x), 30)
            lowest = [best_sizes(laws[arm], flops)[1][0] for flops in x]
            axes.plot(x, lowest, color=f"C{i}")
    axes.set(title="Validation bpb: runs, and lowest by law", xlabel="FLOPs")
    axes.legend()
    set_log_scale(axes.xaxis)
    return as_svg(figure)
