"""
The kernels a run uses: each optional one is run once, for real, before it is trusted.

    model shapes, machine -> probe forward and backward -> the fastest that agrees, compiled or not

A kernel that imports may still fail on this device, or compute something else; one that does is
left out with a printed line. Changes nothing about what a run computes but rounding.
"""

import shutil
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nanochat.attention import Backend, attend, attend_plain, segment_mask
from nanochat.gpt import GPT, GPTConfig
from nanochat.machine import Machine

COMPILE_SECONDS = 45.0  # what compiling costs on two CPU cores, measured d4, 2026-11
COMPILE_GAIN = 0.25  # share of the time that it saves there
# Two compilations of the engine's step take 15 s there and save 0.06 ms a token (64 slots, d4)
FUSED_ENGINE_TOKENS = 1_000_000


@dataclass(frozen=True)
class KernelConfig:
    attention: Literal["sdpa", "blocks", "flex", "fa3", "plain"] | None = None
    """Attention kernel. Default: the fastest that passes its probe here."""
    compile: bool | None = None
    """Fuse the model with torch.compile. Default: on a GPU, and on a CPU where the run is long
    enough to earn the compilation back."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


def probe_attention(backend: Backend, cfg: GPTConfig, machine: Machine) -> str | None:
    """
    Run a kernel forward and backward on this model's shapes: as pretraining calls it, with each
    window, and as finetuning does, with a mask of segments. Returns why it failed, or None.
    """
    windows = dict.fromkeys(map(cfg.window, range(cfg.n_layer)))
    B, T = 2, cfg.max_seq_len
    starts = torch.zeros(B, T, dtype=torch.int64)
    for row in range(B):  # segments of two lengths, so that the rows of the mask differ
        starts[row, T // (row + 2)] = 1
    segments = starts.cumsum(1).to(machine.device)
    for window in windows:
        for mask in (None, segment_mask(segments, window)):
            if why := probe_call(backend, cfg, machine, B, window, mask):
                return why + (" under a mask of segments" if mask is not None else "")
    return None


def probe_call(
    backend: Backend,
    cfg: GPTConfig,
    machine: Machine,
    B: int,
    window: int | None,
    mask: Tensor | None,
) -> str | None:
    """Run a kernel on B rows. Returns how it failed or differs from the definition, or None."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        x = torch.randn(B, cfg.max_seq_len, heads, cfg.head_dim, generator=generator)
        return x.to(machine.device, machine.dtype).requires_grad_()

    q, k, v = draw(cfg.n_head), draw(cfg.n_kv_head), draw(cfg.n_kv_head)
    try:
        got = attend(q, k, v, window=window, backend=backend, mask=mask)
        if got.dtype != q.dtype:
            return f"returns {got.dtype} for inputs of {q.dtype}"
        got.float().square().sum().backward()
        machine.synchronize()
        error = difference(got.detach(), q.detach(), k.detach(), v.detach(), window, mask)
    except Exception as error:  # whatever a kernel raises, it does not work here
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not error < tolerance(machine.dtype):
        return f"differs from the definition by {error:.3g}"
    if any(x.grad is None or not bool(x.grad.isfinite().all()) for x in (q, k, v)):
        return "has gradients that are missing or not finite"
    return None


def difference(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None
) -> float:
    """
    The largest absolute error of `got` against the definition in float64, which TF32 does not
    touch. Of the heads of the first and the last group, one at a time: the (T, T) scores of
    several may not fit the memory.
    """
    device = torch.device("cpu") if q.device.type == "mps" else q.device  # MPS has no float64
    got, q, k, v = (x.to(device, torch.float64) for x in (got, q, k, v))
    mask = None if mask is None else mask.to(device)
    G, R = k.size(2), q.size(2) // k.size(2)
    errors = []
    for g in {0, G - 1}:
        group = k[:, :, g : g + 1], v[:, :, g : g + 1]
        for h in range(g * R, (g + 1) * R):
            want = attend_plain(q[:, :, h : h + 1], *group, window, q.size(-1) ** -0.5, mask)
            errors.append(float((got[:, :, h : h + 1] - want).abs().max()))
    return max(errors)


def tolerance(dtype: torch.dtype) -> float:
    """The largest error that rounding alone explains, for inputs of unit variance."""
    if dtype == torch.bfloat16:
        return 0.05
    # TF32 rounds inputs to 2^-11 of their size, and the largest of many normal ones is near 5
    return 1e-3 if torch.get_float32_matmul_precision() == "highest" else 1e-2


def choose_attention(
    cfg: KernelConfig, model: GPTConfig, machine: Machine, compiled: bool = False
) -> Backend:
    """
    The kernel asked for, or the first that works: on CUDA fa3, then flex with windows; on a CPU
    blocks where the model is compiled; sdpa, plain. The ranks agree: it works on all of them.

    Raises ValueError where the one asked for does not.
    """
    if cfg.attention is not None:
        if why := fault(probe_attention(cfg.attention, model, machine), machine):
            raise ValueError(f"--attention={cfg.attention} does not work here: {why}")
        return cfg.attention
    wanted: list[Backend] = []
    if machine.device.type == "cuda":
        wanted.append("fa3")
        if "S" in model.window_pattern:
            wanted.append("flex")
    if machine.device.type == "cpu" and compiled:
        wanted.append("blocks")
    for backend in (*wanted, "sdpa"):
        why = fault(probe_attention(backend, model, machine), machine)
        if why is None:
            return backend
        machine.print0(f"attention kernel {backend} left out: {why}")
    return "plain"


def choose_compile(cfg: KernelConfig, machine: Machine, train_seconds: float) -> bool:
    """
    Compile where asked; by default where it saves more time than it takes and works. The ranks
    agree, by the main one's `train_seconds`.
    """
    if cfg.compile is not None:
        return cfg.compile
    if machine.device.type == "mps":
        return False
    if machine.device.type == "cpu":
        if machine.broadcast(train_seconds) * COMPILE_GAIN < COMPILE_SECONDS:
            return False
    why = fault(probe_compiler(machine), machine)
    if why is not None:
        machine.print0(f"torch.compile left out: {why}")
    return why is None


def probe_compiler(machine: Machine) -> str | None:
    """Compile a trifle. Returns why that failed, or None."""
    if machine.device.type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        return "it needs a C++ compiler (install g++)"
    try:
        torch.compile(lambda x: (x * 2).sum(), dynamic=False)(torch.ones(8, device=machine.device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fault(why: str | None, machine: Machine) -> str | None:
    """Why something does not work on some rank, None where it works on all: the same on all."""
    return next((reason for reason in machine.gather(why) if reason is not None), None)


def choose_fused_engine(wanted: bool | None, machine: Machine, most_tokens: int) -> bool:
    """
    Whether to fuse the step that writes a token: where asked; by default on a GPU, and on a CPU
    where so many tokens may be written that it pays.
    """
    if wanted is None and machine.device.type == "cpu" and most_tokens < FUSED_ENGINE_TOKENS:
        return False
    return choose_compile(KernelConfig(compile=wanted), machine, float("inf"))


def set_kernels(
    cfg: KernelConfig, model: GPT, machine: Machine, seconds: float, optimizer: Any = None
) -> bool:
    """Set the attention kernel, and compile where `seconds` of work earn it. Returns: compiled?"""
    compiled = choose_compile(cfg, machine, seconds)
    backend = choose_attention(cfg, model.cfg, machine, compiled)
    for block in model.blocks:
        block.attention.backend = backend
    if model.bigrams is not None and machine.device.type == "cpu":
        model.bigrams.use_sparse_gradient()
    if compiled:
        model.compile()
    if compiled and optimizer is not None:
        optimizer.compile()
    return compiled
