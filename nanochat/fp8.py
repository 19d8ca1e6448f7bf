"""
Training matmuls in fp8: one scale per tensor, results in the compute dtype.

    x (N, K), weight (M, K) -> quantize -> torch._scaled_mm -> (N, M); likewise both gradients

Weights and activations are e4m3, gradients e5m2, which trades precision for range. Source:
Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat.common import UsageError
from nanochat.distributed import DistContext
from nanochat.gpt import GPT, Linear

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
    """Transposed view (K, N) of a matrix (N, K)."""
    return x[0].t(), x[1]


def row_major(x: Scaled) -> Scaled:
    """The same matrix, copied to row-major order if needed."""
    return x[0].contiguous(), x[1]


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """
    a (N, K) times b (K, M) -> (N, M) in `dtype`. GPUs need a row-major and b column-major. `fast`
    adds up with fewer bits on Hopper GPUs.
    """
    factors = {"scale_a": a[1], "scale_b": b[1]}
    scaled_mm: Any = torch._scaled_mm  # type: ignore
    return scaled_mm(a[0], b[0], **factors, out_dtype=dtype, use_fast_accum=fast)


class Fp8Matmul(torch.autograd.Function):
    """x (N, K), weight (M, K) -> (N, M) in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        inputs, matrix = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(*inputs, *matrix)
        ctx.dtypes = x.dtype, weight.dtype
        return multiply(inputs, transpose(matrix), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Any:  # type: ignore[override]
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        out = quantize(grad, E5M2)
        columns, of_weight, of_x = (
            row_major(transpose(each)) for each in (out, (weight, weight_factor), (x, x_factor))
        )
        d_x = multiply(out, transpose(of_weight), x_dtype)
        return d_x, multiply(columns, transpose(of_x), weight_dtype)


class Fp8Linear(Linear):
    """A Linear layer whose training matmuls are in fp8; without gradients it is unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        y: Any = Fp8Matmul.apply(x.flatten(0, -2), self.weight)
        return y.view(*x.shape[:-1], -1)


def enable_fp8(model: GPT, machine: DistContext) -> None:
    """
    Train the matrices inside the layers in fp8. Embeddings, LM head, gates and attention are
    unchanged. Raises UsageError if fp8 does not work for this model on every rank's device.
    """
    roles = model.param_roles()
    layers = [
        layer
        for name, layer in model.named_modules()
        if type(layer) is Linear and roles[f"{name}.weight"] == "matrix"
    ]
    fault = None
    try:
        for shape in {tuple(layer.weight.shape) for layer in layers}:
            weight = torch.zeros(shape, device=machine.device, requires_grad=True)
            x = torch.zeros(model.cfg.max_seq_len, shape[1], device=machine.device)
            y: Any = Fp8Matmul.apply(x.to(machine.dtype).requires_grad_(), weight)
            y.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        fault = str(error).splitlines()[0]
    if faults := [each for each in machine.gather(fault) if each]:
        raise UsageError(f"--fp8 does not work on {machine.device_name}: {faults[0]}", "omit --fp8")
    for layer in layers:
        layer.__class__ = Fp8Linear
