"""
Symmetric weight quantization with one scale per matrix row; formats are chosen by tensor name.

    weight (M, N) -> scale (M,) float16, level (M, N) int8 -> level * scale, same shape

The exporter stores scales and levels. Late quantization-aware training runs the forward pass on
exactly the dequantized values, while the optimizer updates the original weights.
"""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Format = Literal["int8", "int6", "int5", "fp16", "fp32"]
Clip = Literal["max", "quantile", "mse", "std"]
BITS = {"int8": 8, "int6": 6, "int5": 5}
QUANTILE = 0.9999984  # of a row's magnitudes, as in the parameter golf baseline
MSE_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # fractions of the row maximum that "mse" tries


@dataclass(frozen=True)
class QuantConfig:
    quantize: str = "*=int8"
    """Quantization format of each matrix, as <pattern>=<format> rules; the first match applies. For
    example embed.*=int8,*.mlp.*=int5,*=int6. Formats: int8, int6, int5, fp16, fp32. Other tensors
    stay fp32."""
    row_clip: Clip = "max"
    """Clipping range of each row. max: largest magnitude; quantile: 0.9999984 quantile; mse: the
    fraction of the maximum (0.8 to 1) with the least squared error; std: see row_clip_std."""
    row_clip_std: float = 4.0
    """Range of --row_clip=std in standard deviations; larger = smaller files, coarser rounding."""

    def __post_init__(self) -> None:
        if not 0 < self.row_clip_std < math.inf:
            raise ValueError(f"row_clip_std must be positive, got {self.row_clip_std}")
        self.rules()

    def rules(self) -> list[tuple[str, Format]]:
        """Parse the rules of `quantize`, in order. Raises ValueError for an invalid rule."""
        rules: list[tuple[str, Any]] = []
        for rule in self.quantize.split(","):
            pattern, _, form = rule.strip().partition("=")
            if not pattern or form not in get_args(Format):
                raise ValueError(
                    f"quantize: invalid rule {rule!r}; use <pattern>=<format>, e.g. *.mlp.*=int6, "
                    f"with one of the formats {', '.join(get_args(Format))}"
                )
            rules.append((pattern, form))
        return rules

    def formats(self, tensors: Mapping[str, Tensor]) -> dict[str, Format]:
        """
        Return the format of each tensor. Raises ValueError if a matrix matches no rule or a rule
        matches no matrix; otherwise, a typo would silently select another format.
        """
        matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
        found: dict[str, Format] = {}
        for pattern, form in reversed(self.rules()):
            fits = [name for name in matrices if fnmatch.fnmatchcase(name, pattern)]
            if not fits:
                raise ValueError(f"quantize: {pattern!r} matches none of {', '.join(matrices)}")
            found |= dict.fromkeys(fits, form)
        if unmatched := [name for name in matrices if name not in found]:
            raise ValueError(f"quantize: no rule matches {unmatched[0]}; append e.g. *=int8")
        return {name: found.get(name, "fp32") for name in tensors}


def largest_level(form: Format) -> int:
    """Return the largest level: 127, 31 or 15; the smallest is its negative."""
    return 2 ** (BITS[form] - 1) - 1


def clip_range(w: Tensor, form: Format, cfg: QuantConfig) -> Tensor:
    """Return the clipping range of each row: (M, N) float32 -> (M, 1)."""
    largest = w.abs().amax(dim=1, keepdim=True)
    if cfg.row_clip == "std":
        return torch.minimum(largest, cfg.row_clip_std * w.square().mean(1, keepdim=True).sqrt())
    if cfg.row_clip == "quantile":
        return w.abs().quantile(QUANTILE, dim=1, keepdim=True)
    if cfg.row_clip == "mse":
        tried = torch.stack([largest * share for share in MSE_CLIPS])  # (clips, M, 1)
        scales = [scales_for(c, form) for c in tried]
        errors = [(nearest_levels(w, s, form) * s - w).square().sum(1) for s in scales]
        return tried.gather(0, torch.stack(errors).argmin(0)[None, :, None])[0]
    return largest


def scales_for(reached: Tensor, form: Format) -> Tensor:
    """Return float32 scales (M, 1) for a clipping range, rounded to float16."""
    top = torch.full_like(reached, largest_level(form))  # for a scalar, CUDA multiplies by 1 / top
    scale = (reached / top).to(torch.float16).float()
    smallest = torch.finfo(torch.float16).smallest_normal
    return torch.where((scale == 0) & (reached > 0), smallest, scale)


def nearest_levels(w: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Return the nearest level of each weight, integers in float32; 0 if the scale is 0."""
    top = largest_level(form)
    return (w / torch.where(scale == 0, 1.0, scale)).round().clamp(-top, top)


def quantize_rows(w: Tensor, form: Format, cfg: QuantConfig) -> tuple[Tensor, Tensor]:
    """
    Quantize w (M, N) to scale (M,) float16 and levels (M, N) int8. `form` is one of BITS.

    Raises ValueError if a scale overflows float16.
    """
    w = w.float()
    scale = scales_for(clip_range(w, form, cfg), form)
    if not bool(scale.isfinite().all()):
        raise ValueError("a row has weights too large for a float16 scale")
    return scale[:, 0].to(torch.float16), nearest_levels(w, scale, form).to(torch.int8)


def dequantize_rows(scale: Tensor, level: Tensor) -> Tensor:
    """scale (M,) and level (M, N) -> weights (M, N) float32."""
    return level.float() * scale.float()[:, None]


def quantize_dequantize(w: Tensor, form: Format, cfg: QuantConfig) -> Tensor:
    """Return w exactly as an artifact reproduces it, in the dtype of w."""
    if form in BITS:
        scale = scales_for(clip_range(w.float(), form, cfg), form)
        return (nearest_levels(w.float(), scale, form) * scale).to(w.dtype)
    return w.to(torch.float16).to(w.dtype) if form == "fp16" else w
