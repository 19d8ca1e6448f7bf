"""
Predict the time of a training step on H100s and write it into docs/performance.md.

    python -m dev.time_model

Each part of a step is bound by FLOPs, memory or links; the bound divided by the share of it that
one published run reached is the prediction, and other published runs check it. Nothing here was
measured by this project.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nanochat.attention import causal_mask
from nanochat.common import REPOSITORY
from nanochat.gpt import GPT
from nanochat.hardware import PEAK_FLOPS
from nanochat.loss import CHUNK_ELEMENTS
from nanochat.optim import NEWTON_SCHULZ_STEPS
from nanochat.scaling import (
    Horizon,
    HorizonConfig,
    ShapeConfig,
    default_windows,
    plan_horizon,
    shape_for_depth,
)

PAGE = REPOSITORY / "docs" / "performance.md"
MARKS = "<!-- predicted: python -m dev.time_model -->\n", "<!-- end -->\n"

GPUS, VOCAB_SIZE, T, RATIO = 8, 32_768, 2048, 8  # the h100x8 profile of speedrun.sh
FLOPS = PEAK_FLOPS["H100"]  # fp8: twice as many
MEMORY = 3.35e12  # bytes/s: NVIDIA H100 SXM data sheet
LINK = 450e9  # bytes/s in each direction: NVLink, the same sheet
# FLOP/s of a forward pass over 2,048 causal tokens with heads of 128: FlashAttention-3 paper,
# arXiv:2407.08608
TRITON, CUDNN, FLASH3 = 323e12, 484e12, 521e12
# Kernels -> rates with and without a window. FlexAttention is Triton code; without a window,
# PyTorch's own kernel runs, which is cuDNN on an H100.
ATTENTION = {"flex": (TRITON, CUDNN), "fa3": (FLASH3, FLASH3)}
BACKWARD = 2.5  # backward FLOPs of attention per forward FLOP: the same paper
FP8_VECTORS = 32  # to quantize and transpose, in addition to `Implementation.vectors`
LOGIT_BYTES = 10  # per logit: written, read and rewritten by the loss, read by two matmuls
HEAD_BYTES = 10  # per weight of the LM head and chunk of logits: sum of its gradient
ADAMW_BYTES = 30  # per weight: gradient, master and two moments, read and written; rounded copy
CHUNK_TOKENS = CHUNK_ELEMENTS["cuda"] // VOCAB_SIZE
EMBEDDINGS = ("embedding", "value_embedding")
DEVICE_ROWS = 16  # of 2,048 tokens, as at depth 24

# depth, dtype, tokens per step -> tokens/s on 8 H100; the first sets the share, the others check it
PUBLISHED = {
    (26, "bfloat16", 2**20): (630e3, "nanochat's log, 2026-02"),
    (26, "fp8", 2**19): (12_700 * 2**19 / 8_967, "nanochat's pull request 516, 2026-02"),
    (24, "fp8", 2**20): (983e3, "nanochat's leaderboard, 2026-03"),
}
# Milliseconds of forward and backward pass of a micro-batch on one H100, with FlexAttention for
# windows, 2026-11-26: dev/LOG.md
MEASURED = {(8, "bfloat16"): 33, (12, "bfloat16"): 63, (24, "bfloat16"): 315, (24, "fp8"): 273}


class Sums(NamedTuple):
    """Bytes per weight of one micro-batch: the first of a step, and each later one."""

    first: int
    later: int

    def total(self, micro_batches: float) -> float:
        return self.first + self.later * (micro_batches - 1)


# Float32 weights are cast twice (12 bytes) and their gradients once (6); each later micro-batch
# also accumulates them (12). Weights stored in bfloat16 need no casts, and their gradients
# accumulate without one (10). The LM head is cast once (6), its gradient cleared (4) and scaled
# (8). Gradients of embeddings are cleared (2), written (2) and accumulated (6).
FLOAT32_WEIGHT, BFLOAT16_WEIGHT = Sums(18, 30), Sums(6, 10)
HEAD_WEIGHT, EMBEDDING_WEIGHT = Sums(18, 30), Sums(4, 10)


@dataclass(frozen=True)
class Implementation:
    """What depends on how a training step is written."""

    vectors: float
    """What kernels other than matmuls and attention read and write per token and layer, in vectors
    of width C and two bytes each: Inductor's count for compiled code (torch 2.15, depth 24, mean
    over layers; TORCH_LOGS=inductor_metrics prints it), and 1.5 to look up value embeddings."""
    matrix: Sums
    copy_bytes: int
    """Per matrix weight and rank: copies into a stack of gradients and from the gathered stack."""
    matrix_bytes: int
    """Of a gathered matrix weight."""
    overlap: bool
    """Whether gradients are reduced during the backward pass."""
    fp8_head: bool
    """Whether the matmuls of the LM head are in fp8, too, with dtype fp8."""


# The whole model compiled at once, queries and keys rotated before they are normalized
PUBLIC = Implementation(63.4, FLOAT32_WEIGHT, 16, 4, overlap=False, fp8_head=True)
# Layers compiled one by one, rotation last
OURS = Implementation(60.6, BFLOAT16_WEIGHT, 12, 2, overlap=True, fp8_head=False)


@dataclass(frozen=True)
class Step:
    """Bounds of a training step on one of `GPUS` GPUs, in seconds by part."""

    tokens: int
    flops_per_token: float
    vendor: dict[str, float]
    """Parts bound by a vendor's peak; a real run takes longer."""
    measured: dict[str, float]
    """Parts at a measured rate."""

    def seconds(self, share: float) -> float:
        """Duration if the vendor's peaks are reached to this share."""
        return sum(self.vendor.values()) / share + sum(self.measured.values())

    def with_parts(self, parts: Mapping[str, float]) -> "Step":
        """The same step with other bounds of some parts."""
        vendor = {name: parts.get(name, x) for name, x in self.vendor.items()}
        measured = {name: parts.get(name, x) for name, x in self.measured.items()}
        return replace(self, vendor=vendor, measured=measured)

    def rate(self, share: float) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens / self.seconds(share)

    def utilization(self, share: float) -> float:
        return self.rate(share) * self.flops_per_token / (FLOPS * GPUS)


def meta_model(depth: int) -> GPT:
    """The default model of this depth on GPUs, without weights."""
    windows = default_windows(depth, "cuda")
    with torch.device("meta"):
        return GPT(shape_for_depth(depth, VOCAB_SIZE, T, "default", windows, ShapeConfig()))


def attention_seconds(model: GPT, kernel: str) -> float:
    """Seconds of attention per token, forward and backward."""
    cfg, seconds = model.cfg, 0.0
    for window in map(cfg.window, range(cfg.n_layer)):
        pairs = int(causal_mask(T, window, torch.device("cpu")).sum())  # of a query and a key
        flops = (1 + BACKWARD) * 4 * cfg.n_head * cfg.head_dim * pairs / T
        seconds += flops / ATTENTION[kernel][window is None]
    return seconds


def traffic(model: GPT, matrix_bytes: int) -> tuple[float, float]:
    """
    Bytes of gradients that a step reduces, and of weights that it gathers, over 8 GPUs, with
    `matrix_bytes` per gathered matrix weight.
    """
    roles, stacks, reduced, gathered = model.param_roles(), dict[torch.Size, int](), 0.0, 0.0
    for name, p in model.named_parameters():
        if roles[name] == "matrix":
            stacks[p.shape] = stacks.get(p.shape, 0) + 1
        elif p.ndim == 2 and p.size(0) >= 1024:
            size = p.numel() * (2 if roles[name] in EMBEDDINGS else 4)
            reduced, gathered = reduced + size, gathered + size
        else:  # an all-reduce sends twice as much
            reduced += 2 * 4 * p.numel()
    padded = sum(shape.numel() * -(-n // GPUS) * GPUS for shape, n in stacks.items())
    return reduced + 4 * padded, gathered + matrix_bytes * padded


def muon_flops(model: GPT) -> float:
    """FLOPs of Newton-Schulz over all matrices."""
    roles, total = model.param_roles(), 0.0
    for name, p in model.named_parameters():
        if roles[name] == "matrix":
            short, long = sorted(p.shape)
            total += NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
    return total


def predict(
    depth: int, dtype: str, tokens: int, attention: str, code: Implementation = OURS
) -> Step:
    """
    Bounds of a step of `tokens` tokens. Reductions during the backward pass take no time of their
    own.
    """
    model, mine = meta_model(depth), tokens / GPUS
    cfg, roles, fp8 = model.cfg, model.param_roles(), dtype == "fp8"
    sizes = dict.fromkeys(roles.values(), 0)
    for name, p in model.named_parameters():
        sizes[roles[name]] += p.numel()
    rounded = sum(sizes.get(role, 0) for role in EMBEDDINGS)
    micro_batches = max(1.0, mine / (DEVICE_ROWS * T))
    reduced, gathered = traffic(model, code.matrix_bytes)
    exposed = gathered + (0 if code.overlap else reduced)
    layer_bytes = cfg.n_layer * 2 * cfg.d_model * (code.vectors + (FP8_VECTORS if fp8 else 0))
    logit_bytes = LOGIT_BYTES * VOCAB_SIZE + HEAD_BYTES * sizes["head"] / CHUNK_TOKENS
    weight_bytes = sum(
        sums.total(micro_batches) * size
        for sums, size in (
            (code.matrix, sizes["matrix"]),
            (HEAD_WEIGHT, sizes["head"]),
            (EMBEDDING_WEIGHT, rounded),
        )
    )
    head_flops = 6 * sizes["head"] / (2 if fp8 and code.fp8_head else 1)
    adamw = ADAMW_BYTES * (rounded + sizes["head"])
    copies = code.copy_bytes * sizes["matrix"] + 4 * rounded + 8 * sizes["head"]
    vendor = {
        "layer matmuls": 6 * sizes["matrix"] * mine / FLOPS / (2 if fp8 else 1),
        "LM head and loss": mine * (head_flops / FLOPS + logit_bytes / MEMORY),
        "other kernels": layer_bytes * mine / MEMORY,
        "weights and gradients": weight_bytes / MEMORY,
        "update": (muon_flops(model) / FLOPS + adamw / MEMORY) / GPUS + copies / MEMORY,
        "links": exposed * (GPUS - 1) / GPUS / LINK,
    }
    measured = {"attention": attention_seconds(model, attention) * mine}
    return Step(tokens, model.flops_per_token(), vendor, measured)


def reached(tokens_per_second: float, step: Step) -> float:
    """Share of the vendor's peaks that a published run reached."""
    left = step.tokens / tokens_per_second - sum(step.measured.values())
    return sum(step.vendor.values()) / left


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def horizon(depth: int) -> Horizon:
    """Steps and tokens of the speedrun's base model."""
    return plan_horizon(meta_model(depth), HorizonConfig(target_param_data_ratio=RATIO), GPUS)


def savings(step: Step, fp8: Step) -> dict[str, dict[str, float]]:
    """Change -> the parts that it makes shorter, with their new bounds (depth 24)."""
    return {
        "fp8 matmuls": {name: fp8.vendor[name] for name in ("layer matmuls", "other kernels")},
        "half of the traffic of the other kernels, as by norms fused into matmuls": {
            "other kernels": step.vendor["other kernels"] / 2
        },
        "weights gathered during the next forward pass": {"links": 0.0},
    }


def section() -> str:
    """The generated text."""
    runs = {key: predict(*key, "fa3", PUBLIC) for key in PUBLISHED}
    shares = [reached(PUBLISHED[key][0], run) for key, run in runs.items()]
    share, low, high = shares[0], min(shares), max(shares)
    checks = [
        [f"depth {key[0]}, {key[1]}", f"{PUBLISHED[key][0]:,.0f}", f"{run.rate(share):,.0f}",
         f"{run.rate(share) / PUBLISHED[key][0] - 1:+.1%}", PUBLISHED[key][1]]
        for key, run in runs.items()
    ]  # fmt: skip
    micro = []
    for (depth, dtype), found in MEASURED.items():
        step = predict(depth, dtype, GPUS * DEVICE_ROWS * T, "flex")
        expected = 1e3 * step.with_parts({"update": 0.0, "links": 0.0}).seconds(share)
        error = f"{expected / found - 1:+.1%}"
        micro.append([f"depth {depth}, {dtype}", f"{found}", f"{expected:.0f}", error])
    one_gpu = "1 H100: forward and backward pass of 32,768 tokens"
    steps = [predict(d, dtype, horizon(d).batch_tokens, "fa3") for d, dtype in MEASURED]
    parts = [
        [name, *(f"{1e3 * {**s.vendor, **s.measured}[name]:.1f}" for s in steps)]
        for name in (*steps[0].vendor, *steps[0].measured)
    ]
    parts += [
        ["**step**, predicted", *(f"**{1e3 * s.seconds(share):,.0f}**" for s in steps)],
        ["tokens per step", *(f"{s.tokens:,}" for s in steps)],
        ["tokens/s", *(f"{s.rate(share):,.0f}" for s in steps)],
        ["MFU", *(f"{s.utilization(share):.0%}" for s in steps)],
    ]
    bf16, fp8 = steps[2:]
    flex = [predict(24, dtype, bf16.tokens, "flex") for dtype in ("bfloat16", "fp8")]
    plan = horizon(24)

    def hours(step: Step, at: float = share) -> float:
        return plan.num_steps * step.seconds(at) / 3600

    times = [
        [
            name, f"{hours(step):.2f} h", f"{hours(step, high):.2f} to {hours(step, low):.2f} h",
            f"{hours(slower):.2f} h",
        ]
        for name, step, slower in zip(
            ("bfloat16", "`--dtype=fp8`"), (bf16, fp8), flex, strict=True
        )
    ]  # fmt: skip
    changes, everything = savings(bf16, fp8), bf16
    ranked = []
    for name, shorter in changes.items():
        saved = hours(bf16) - hours(bf16.with_parts(shorter))
        ranked.append((saved, [name, f"{60 * saved:.0f} min", f"{saved / hours(bf16):.1%}"]))
        everything = everything.with_parts(shorter)
    halved = {"other kernels": fp8.vendor["other kernels"] / 2}
    together = hours(everything.with_parts(halved))
    ranked.sort(key=lambda item: -item[0])
    tokens = f"{plan.num_steps * plan.batch_tokens / 1e9:.2f}B tokens in {plan.num_steps:,} steps"
    heads = [f"depth {depth}, {dtype}" for depth, dtype in MEASURED]
    return f"""\
## Predicted on 8 H100

No run on 8 GPUs was measured by this project. `dev/time_model.py` adds up lower bounds of time:
FLOPs, memory traffic and link traffic of each part at the vendor's peaks, and attention at the
throughput of the FlashAttention-3 paper. One published run of this architecture sets the share of
the peaks that is reached, {share:.0%}. Two others check it, and our own micro-batches on one H100:

{table(["published, 8 H100", "tokens/s", "model", "error", "source"], checks)}
{table([one_gpu, "ms, measured", "ms, model", "error"], micro)}
Bounds of a step in milliseconds on each GPU, with rows of {T:,} tokens, micro-batches of at most
{DEVICE_ROWS} rows and FlashAttention 3 (`uv sync --group fa3`, as `speedrun.sh` does for Hopper).
Links: weights only, because gradients are reduced during the backward pass; the end of the last
reductions, about 1.5 ms at depth 24, is left out. The prediction divides all but attention by the
share.

{table(["part", *heads], parts)}
Base training of the speedrun (depth 24, ratio {RATIO}) is {tokens}. The range
covers the shares that the published runs reached, {low:.0%} to {high:.0%}. Where FlashAttention 3
cannot be loaded, FlexAttention takes its place:

{table(["dtype", "predicted", "range", "with FlexAttention"], times)}
The other stages of the speedrun are not included; `bash speedrun.sh --plan` prints estimates.

What would save the most of the bfloat16 run, by the same model:

{table(["change", "saves", "share"], [row for _, row in ranked])}
All of them together: {together:.2f} h. For 1.2 h, the model must also learn as much from
{1 - 1.2 / together:.0%} fewer tokens.
"""


def page() -> str:
    """docs/performance.md with a current section."""
    begin, end = MARKS
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: begin + section() + end, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page())
