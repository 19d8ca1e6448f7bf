"""
Weights on a grid: a few levels and one scale per row of a matrix, by the name of the tensor.

    weight (M, N) -> scale (M,) float16, level (M, N) int8 -> level * scale, the same shape

The exporter stores scales and levels; late quantization-aware training lets the forward pass see
exactly what those give back, while the optimizer goes on moving the weights themselves (a
straight-through estimator, arXiv:1308.3432).
"""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Format = Literal["int8", "int6", "int5", "fp16", "fp32"]
Clip = Literal["max", "quantile", "mse", "std"]
BITS = {"int8": 8, "int6": 6, "int5": 5}
QUANTILE = 0.9999984  # of a row's magnitudes, parameter golf's baseline
MSE_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of the largest magnitude that "mse" tries


@dataclass(frozen=True)
class QuantConfig:
    quantize: str = "*=int8"
    """Format of each matrix, the first pattern that fits its name counts, as in
    embed.*=int8,*.mlp.*=int5,*=int6. There are int8, int6, int5, fp16, fp32; a * fits anything.
    What is no matrix is kept as fp32."""
    row_clip: Clip = "max"
    """Magnitude that the grid of a row reaches. max: its largest weight; quantile: that of all but
    1.6 in a million; mse: of five shares of the largest, what errs least; std: row_clip_std."""
    row_clip_std: float = 4.0
    """Standard deviations that --row_clip=std keeps: more compress better and round coarser."""

    def __post_init__(self) -> None:
        if self.row_clip not in get_args(Clip):
            raise ValueError(f"row_clip is one of {', '.join(get_args(Clip))}, not {self.row_clip}")
        if not 0 < self.row_clip_std < math.inf:
            raise ValueError(f"row_clip_std must be positive, got {self.row_clip_std}")
        self.patterns()

    def patterns(self) -> list[tuple[str, Format]]:
        """The rules in order. Raises ValueError naming the one that is none."""
        rules: list[tuple[str, Format]] = []
        for rule in self.quantize.split(","):
            pattern, _, name = rule.strip().partition("=")
            found: dict[str, Format] = {f: f for f in get_args(Format)}
            if not pattern or name not in found:
                raise ValueError(
                    f"quantize: {rule!r} is no rule; write <pattern>=<format>, as in *.mlp.*=int6, "
                    f"the format one of {', '.join(found)}"
                )
            rules.append((pattern, found[name]))
        return rules

    def formats(self, tensors: Mapping[str, Tensor]) -> dict[str, Format]:
        """
        The format of every tensor. Raises ValueError naming the matrices that no rule fits, or a
        rule that fits no matrix: a misspelt pattern would store everything as something else.
        """
        rules = self.patterns()
        matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
        found: dict[str, Format] = dict.fromkeys(tensors, "fp32")
        for pattern, form in reversed(rules):
            fits = [name for name in matrices if fnmatch.fnmatchcase(name, pattern)]
            if not fits:
                raise ValueError(f"quantize: {pattern!r} fits none of {', '.join(matrices)}")
            found |= dict.fromkeys(fits, form)
        patterns = [pattern for pattern, _ in rules]
        for name in matrices:
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                raise ValueError(f"quantize: no rule fits {name}; end with *=int8, say")
        return found


def largest_level(form: Format) -> int:
    """Levels go from minus this to this: 127, 31 or 15. The grid is symmetric around 0."""
    return 2 ** (BITS[form] - 1) - 1


def reach(w: Tensor, form: Format, cfg: QuantConfig) -> Tensor:
    """The magnitude that each row's grid reaches: (M, N) float32 -> (M, 1)."""
    largest = w.abs().amax(dim=1, keepdim=True)
    if cfg.row_clip == "std":
        return torch.minimum(largest, cfg.row_clip_std * w.square().mean(1, keepdim=True).sqrt())
    if cfg.row_clip == "quantile":
        return w.abs().quantile(QUANTILE, dim=1, keepdim=True)
    if cfg.row_clip == "mse":
        tried = torch.stack([largest * share for share in MSE_CLIPS])  # (clips, M, 1)
        errors = [(on_grid(w, grid_of(c, form), form) - w).square().sum(1) for c in tried]
        return tried.gather(0, torch.stack(errors).argmin(0)[None, :, None])[0]
    return largest


def grid_of(reached: Tensor, form: Format) -> Tensor:
    """Scales (M, 1) of a grid that reaches so far: as float16 has them, back in float32."""
    top = torch.full_like(reached, largest_level(form))  # by a number, CUDA would multiply
    scale = (reached / top).to(torch.float16).float()
    smallest = torch.finfo(torch.float16).smallest_normal
    return torch.where((scale == 0) & (reached > 0), smallest, scale)


def levels(w: Tensor, scale: Tensor, form: Format) -> Tensor:
    """The nearest level of every weight, float32 whole numbers; 0 where the scale is 0."""
    top = largest_level(form)
    return (w / torch.where(scale == 0, 1.0, scale)).round().clamp(-top, top)


def on_grid(w: Tensor, scale: Tensor, form: Format) -> Tensor:
    """w (M, N) moved to the grid of `scale` (M, 1)."""
    return levels(w, scale, form) * scale


def quantize_rows(w: Tensor, form: Format, cfg: QuantConfig) -> tuple[Tensor, Tensor]:
    """
    w (M, N) -> scale (M,) float16, levels (M, N) int8, which `dequantize_rows` multiplies.

    Raises ValueError for a format without levels, and for weights beyond the scales of float16.
    """
    if form not in BITS:
        raise ValueError(f"{form} has no levels; {', '.join(BITS)} have")
    w = w.float()
    scale = grid_of(reach(w, form, cfg), form)
    if not bool(scale.isfinite().all()):
        raise ValueError("a row has weights beyond what a float16 scale can reach")
    return scale[:, 0].to(torch.float16), levels(w, scale, form).to(torch.int8)


def dequantize_rows(scale: Tensor, level: Tensor) -> Tensor:
    """scale (M,) and level (M, N) -> weights (M, N) float32."""
    return level.float() * scale.float()[:, None]


def as_stored(w: Tensor, form: Format, cfg: QuantConfig) -> Tensor:
    """What an artifact gives back for a weight, bit for bit, in the weight's dtype."""
    if form == "fp32":
        return w
    if form == "fp16":
        return w.to(torch.float16).to(w.dtype)
    w32 = w.float()
    return on_grid(w32, grid_of(reach(w32, form, cfg), form), form).to(w.dtype)
