"""
Matmuls in fp8 for training, on Ada, Hopper and later GPUs.

    float tensor -> quantize -> fp8 values and the factor of their scale -> multiply -> float tensor

One scale per tensor; outputs and gradients have the dtype of what they belong to. Weights and
activations are e4m3; gradients are e5m2, which trades precision for range. Source: Micikevicius et
al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat.common import UsageError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Scaled = tuple[Tensor, Tensor]  # fp8 values, and the float32 factor that restores their scale


def quantize(x: Tensor, dtype: torch.dtype) -> Scaled:
    """
    Round `x` to fp8, scaled so that its largest magnitude becomes the largest of `dtype`.

    The result is row-major. If `x` is not finite, neither is a matmul with it.
    """
    factor = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / factor).to(dtype).contiguous(), factor


def transpose(x: Scaled) -> Scaled:
    """Copy of a matrix (N, K) as (K, N), row-major."""
    return x[0].t().contiguous(), x[1]


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """
    a (N, K) times the transpose of b (M, K) -> (N, M) in `dtype`. Both are row-major, as GPUs need
    it. `fast` adds up with fewer bits on Hopper GPUs.
    """
    factors = {"scale_a": a[1], "scale_b": b[1]}
    scaled_mm: Any = torch._scaled_mm  # type: ignore
    return scaled_mm(a[0], b[0].t(), **factors, out_dtype=dtype, use_fast_accum=fast)


class Fp8Linear(torch.autograd.Function):
    """x (N, K), weight (M, K) -> (N, M) in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        inputs, matrix = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(*inputs, *matrix)
        ctx.dtypes = x.dtype, weight.dtype
        return multiply(inputs, matrix, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Any:  # type: ignore[override]
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        out = quantize(grad, E5M2)
        d_x = multiply(out, transpose((weight, weight_factor)), x_dtype)
        return d_x, multiply(transpose(out), transpose((x, x_factor)), weight_dtype)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K), weight (M, K) -> (..., M) in the dtype of x; all matmuls are in fp8."""
    y: Any = Fp8Linear.apply(x.flatten(0, -2), weight)
    return y.view(*x.shape[:-1], -1)


def enable_fp8(model: Any, device: torch.device) -> None:
    """
    Train the matrices inside the layers of a GPT and its LM head in fp8, which multiplies multiples
    of 16 only. Embeddings, gates and attention are unchanged. Raises UsageError if the GPU has no
    fp8, or if the rows do not have a multiple of 16 tokens.
    """
    if model.cfg.max_seq_len % 16:
        problem = f"fp8 needs a multiple of 16 tokens per row, not {model.cfg.max_seq_len}"
        raise UsageError(problem, "change --max_seq_len, or use --dtype=bfloat16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"fp8 does not work on {name}", "omit --dtype=fp8")
    for layer in model.modules():
        if hasattr(layer, "fp8"):
            layer.fp8 = not any(n % 16 for n in layer.weight.shape)
