"""
Write docs/hyperparameters.md: what follows from --depth, computed from models without weights.

    python -m dev.hyperparameters
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanochat.checkpoint import checkpoint_bytes
from nanochat.common import REPOSITORY
from nanochat.gpt import GATE_CHANNELS, GPT
from nanochat.optim import SCALAR_LR, OptimConfig, Rule, state_bytes
from nanochat.scaling import (
    BATCH_EXPONENT,
    BIGRAM_ROWS,
    BIGRAM_ROWS_PER_TOKEN,
    MIN_STEPS,
    REFERENCE_BATCH,
    REFERENCE_TOKENS,
    SMALL_DEPTH,
    WIDTH_PER_LAYER,
    WINDOW_DEPTH,
    Horizon,
    default_windows,
    plan_horizon,
    scaled_rules,
    shape_for_depth,
)
from scripts.base_train import BaseTrain

TRAINING = BaseTrain()  # default flags
PAGE = REPOSITORY / "docs" / "hyperparameters.md"
DEPTHS = (2, 4, 6, 8, 12, 16, 20, 24, 26, 32)
VOCAB_SIZE = 32_768  # of the GPU profiles of speedrun.sh
ROLES = {  # role -> what it is; the columns of the parameter table
    "matrix": "layer matrices",
    "value_embedding": "value embeddings",
    "bigram": "hash-bigram embedding",
    "embedding": "token embedding",
    "head": "LM head",
}
RATES = {  # roles with the same learning rate -> column
    "matrix": "matrices",
    "embedding": "token embedding",
    "value_embedding": "value and bigram embeddings",
    "head": "LM head, gates",
    "residual": "residual scales (a)",
    "skip": "skip scales (b)",
}

TEXT = """\
# Hyperparameters by depth

`--depth` of `scripts.base_train` sets shape, horizon, batch size, learning rates and weight decay. This page lists
what follows from it, and which flag overrides what.

`python -m dev.hyperparameters` computes it from `nanochat/scaling.py`, `nanochat/gpt.py`, `nanochat/optim.py` and
`nanochat/checkpoint.py`; nothing on it is measured. All tables assume a vocabulary of {vocab:,},
`--max_seq_len={seq_len}`, one device and no other flag. M is 10^6; B and GB are 10^9. For other settings, a run
prints parameters, heads and batch before its first step; the learning rates are in its `metrics.jsonl` (`matrix_lr`,
`embedding_lr`, `head_lr`).

## Shape and parameters

- Width: {width} x depth.
- Heads: 128 dimensions if the width is at least 512 and divisible by 128, else 64. Each head has its own keys and
  values.
- MLP: four times as wide as the model.
- Value embeddings, as large as the token embedding: one in every layer up to depth {small_depth}, in every other layer of
  deeper models, the last layer included.
- Hash-bigram embedding, up to depth {small_depth}: {bigram_each} rows per token of the vocabulary, at most
  {bigram_rows:,}. A row is half as wide as the model, and a bigram uses two rows.
- Previous-token keys, up to depth {small_depth}, in every other layer (`--window_pattern=LP`): half of each key comes from
  the embeddings of the previous position, so that one layer finds what followed an earlier occurrence of a token.
- Residual scalars: the input of each layer is a x + b x0, where x0 is the embedded token and a and b are learned.
- Token embedding and LM head share no weights.

Parameters, in M:

{shapes}

The total includes gates and residual scalars, fewer than {small:,} parameters at each depth. Value and hash-bigram
embeddings take memory, but few FLOPs.

`--window_pattern` has a letter per layer, repeated over the layers: L = full context, S = a quarter of it, rounded up
to a multiple of 128, P = full context with previous-token keys. The last layer always has
full context. In LP, layers 1, 3, 5, ... have previous-token keys.

## Horizon and batch size

The horizon is {ratio:g} tokens per matmul parameter (layer matrices, gates and LM head). The batch is
{reference_batch:,} tokens x (horizon / {reference_tokens:.2f}B tokens)^{exponent}, but at most horizon / {min_steps}, so that short
runs take about {min_steps} steps; then it is rounded to a power of two of rows. FLOPs count forward and backward: 6
per matmul parameter, and attention in the windows of a GPU.

{horizons}

`speedrun.sh` sets `--target_param_data_ratio=8` on 8 GPUs: two thirds of these tokens. On 2, 4 or 8 devices the
batch is the same; on other numbers it is rounded to whole rows per device.

## Memory and disk

Weights, gradients and optimizer state in float32; GPUs store most weights in bfloat16
([performance.md](performance.md#number-formats)). Muon and the hash-bigram embedding keep one moment, AdamW two.

{memory}

Several devices share the optimizer state. Activations come on top. Their memory depends on kernels and on
`--device_batch_size`, and no function estimates it without a device: a run measures it on a real step before it
starts and takes the largest micro-batch that fits. The size of the micro-batch changes results by rounding only.

A checkpoint holds weights, optimizer state, and a few MB of tokenizer and records; `--keep=2` keeps the newest two.
A finished mid, SFT, DPO or RL run keeps no optimizer state unless `--save_optimizer` is set.

## Learning rates and weight decay

Peak learning rates, and the weight decay of Muon, at the default horizon:

{rates}

The rules behind it; C is the width, and batch is in tokens:

| parameters | update rule | betas | weight decay | peak learning rate |
|---|---|---|---|---|
{rules}

- All peak learning rates are multiplied by (batch / {reference_batch:,})^0.5 above that batch. Those of the scalars
  also fall with it below, because in small batches their gradients are mostly noise.
- Muon's learning rate x weight decay x steps is constant at a given number of tokens per matmul parameter, and
  proportional to it, so that weight decay forgets old updates over the same fraction of every run; below
  {min_steps} steps the weight decay is that of {min_steps}. During a run it falls linearly to 0.
- Schedule: linear warmup over {warmup} steps, constant, linear decay over the last {warmdown:.0%} of the run to
  {final:.0%} of the peak. A run that is too short for both never reaches the peak.
- Muon's momentum rises from 0.85 to 0.95 over 300 steps, or over a third of a shorter run.

Mid, SFT, DPO and RL use the same rules times `--init_lr_frac` (default 1, 0.3, 0.03 and 0.05), but with scalars as at
a batch of {reference_batch:,}, and without Muon's weight decay unless `--weight_decay` is set. They have no warmup; the
learning rates fall linearly to 0, in mid over the last half of the run, in the others over all of it. DPO and RL do not
scale learning rates with the batch, and RL keeps Muon's momentum at 0.95.

## Compared with the published recipe

This table compares our defaults with the recipe of karpathy/nanochat (July 2026), which was tuned at depth 12 and
confirmed at depth 24. Both use the same number of tokens per parameter. A value in brackets is the published one, where
it differs; windows and FLOPs are those on a GPU.

{published}

Why they differ:

{reasons}

Also published as gains and not adopted, because they did not lower the loss of small models here
([dev/LOG.md](../dev/LOG.md), 2026-11-21 and 26): backout (a learned share of a middle layer's
output, subtracted before the LM head), Polar Express, NorMuon, Muon momentum of 0.97 that falls to 0.90, cosine decay of
the weight decay, 12 instead of {gate_channels} channels for the gates of value embeddings.

## Which flag overrides what

| flag of `base_train` | replaces | also changes |
|---|---|---|
| `--num_iterations` | the number of steps | weight decay; the batch still follows from the tokens per parameter |
| `--target_flops` | the tokens of the horizon | batch, steps, weight decay, learning rates |
| `--target_param_data_ratio` | {ratio:g} tokens per matmul parameter | batch, steps, weight decay, learning rates |
| `--total_batch_size` | the batch | steps (for the same tokens), weight decay, learning rates |
| `--max_seq_len` | {seq_len} tokens of context | FLOPs of attention; the batch, which is in whole rows |
| `--window_pattern` | SSSL on GPUs from depth {window_depth}, LP up to depth {small_depth}, else L | FLOPs per token; P: previous-token keys |
| `--value_every`, `--bigram_rows` | value and hash-bigram embeddings | memory, disk |
| `--arch=classic` | the default architecture | no value or hash-bigram embeddings (unless `--value_every` or `--bigram_rows` is set), no residual scalars, RoPE base 10,000 instead of 100,000, query-key gain 1 instead of 1.2, full context in every layer |
| `--matrix_lr` | {matrix_lr} | |
| `--embedding_lr` | {embedding_lr} at width 768 | value and hash-bigram embeddings: half of it |
| `--unembedding_lr` | {unembedding_lr} at width 768 | gates |
| `--weight_decay` | Muon's weight decay | |
| `--warmup_steps`, `--warmdown_ratio`, `--final_lr_frac` | the schedule | |
| `--device_batch_size` | the micro-batch | memory and speed |

`--num_iterations` takes precedence over `--target_flops`, which takes precedence over `--target_param_data_ratio`.
A `--total_batch_size` that is not a multiple of `max_seq_len` x devices is rejected with one that is. The vocabulary
comes from the tokenizer (`scripts.tok_train --vocab_size`) and changes embeddings, LM head and horizon.
`scripts.golf.base_train` and `scripts.recursion.base_train` also take `--d_model` and `--head_dim`.

## Sources

| rule | source |
|---|---|
| learning rates, betas, weight decay of AdamW, initial weights | nanochat's tuning log, 2026-03, depth 12 on 8 H100 |
| batch exponent | nanochat, 2026-02-05 |
| Muon's weight decay falls to 0 | nanochat, 2026-01-10 |
| weight decay x steps is constant | arXiv:2405.13698 |
| learning rates x (batch / {reference_batch:,})^0.5, weight decay per token, SSSL windows, value embeddings in every other layer | karpathy/nanochat, measured at depth 24 |
| about {min_steps} steps or more; {bigram_each} bigram rows per token; value embeddings in every layer | measured at depth 4 and 6 on a CPU, 2026-11 |
| previous-token keys in every other layer | depths 4 and 6 on a CPU, one seed, 2 million tokens; their present form against the first one: depths 2 to 6, three seeds; on a GPU, three seeds: with the other options 0.012 bpb lower at depth 6 after 10 million tokens, 0.003 higher at depth 4 after 26 million; alone no gain at depth 8 after 29 million |
| these options together, at equal FLOPs | measured at depths 2 to 8, three seeds ([performance.md](performance.md#loss-by-size-and-compute)) |

The experiments in `dev/LOG.md` train models of at most 8 layers on at most 29 million tokens: at larger depths these
tables state the rules, not results.
"""  # noqa: E501


class Setup(NamedTuple):
    """Model on the meta device, horizon and update rules of a depth."""

    model: GPT
    horizon: Horizon
    rules: dict[str, Rule]


def derive(depth: int) -> Setup:
    """Everything that follows from a depth on a GPU."""
    T, windows = TRAINING.max_seq_len, default_windows(depth, "cuda")
    with torch.device("meta"):
        model = GPT(shape_for_depth(depth, VOCAB_SIZE, T, window_pattern=windows))
    horizon = plan_horizon(model)
    return Setup(model, horizon, scaled_rules(OptimConfig(), horizon, model.cfg.d_model))


# ---- The published recipe ------------------------------------------------------------------------

COMPARED_DEPTHS = (8, 12, 20, 24)
REASONS = {  # row of the comparison that differs -> why
    "learning rate of matrices": "below a batch of {batch:,}, ours stay constant. They were "
    "measured at depth 4 with 4,096 tokens, where the square root would divide them by 11.",
    "learning rate of token embedding": "the same.",
    "weight decay": "below that batch it follows from the constant learning rate: the product of "
    "both is the published one.",
    "windows": "at depth 8, attention is a small part of the work, and nothing here has measured "
    "windows.",
}


class Recipe(NamedTuple):
    """What a recipe sets at a depth; the fields are the rows of the comparison."""

    parameters: float
    batch: int
    steps: int
    matrix_lr: float
    embedding_lr: float
    skip_lr: float
    weight_decay: float
    value_embeddings: int
    bigram_rows: int
    windows: str


ROWS = {
    "parameters": "parameters (M)",
    "batch": "batch (tokens)",
    "steps": "steps",
    "matrix_lr": "learning rate of matrices",
    "embedding_lr": "learning rate of token embedding",
    "skip_lr": "learning rate of skip scales",
    "weight_decay": "weight decay",
    "value_embeddings": "value embeddings",
    "bigram_rows": "hash-bigram rows",
    "windows": "windows",
}


def published_recipe(depth: int, ratio: float = 12.0) -> Recipe:
    """Recipe of karpathy/nanochat, July 2026, at a vocabulary of VOCAB_SIZE."""
    width = 64 * depth
    matmul = 12 * depth * width**2 + VOCAB_SIZE * width
    matmul_12 = 12 * 12 * 768**2 + VOCAB_SIZE * 768
    batch = 2 ** round(math.log2(2**19 * (matmul / matmul_12) ** 0.383))
    factor, values = (batch / 2**19) ** 0.5, math.ceil(depth / 2)
    return Recipe(
        parameters=matmul + (1 + values) * VOCAB_SIZE * width,
        batch=batch,
        steps=round(ratio * matmul / batch),
        matrix_lr=0.02 * factor,
        embedding_lr=0.3 * factor * (768 / width) ** 0.5,
        skip_lr=0.5 * factor,
        weight_decay=0.28 * factor * matmul_12 / matmul,
        value_embeddings=values,
        bigram_rows=0,
        windows="SSSL",
    )


def our_recipe(depth: int) -> Recipe:
    """Our recipe at a depth, on a GPU."""
    model, horizon, rules = derive(depth)
    cfg = model.cfg
    return Recipe(
        parameters=model.num_params(),
        batch=horizon.batch_tokens,
        steps=horizon.num_steps,
        matrix_lr=rules["matrix"].lr,
        embedding_lr=rules["embedding"].lr,
        skip_lr=rules["skip"].lr,
        weight_decay=rules["matrix"].weight_decay,
        value_embeddings=sum(map(cfg.has_value_embedding, range(cfg.n_layer))),
        bigram_rows=cfg.bigram_rows,
        windows=cfg.window_pattern,
    )


def differs(ours: float | str, theirs: float | str) -> bool:
    """Whether two values differ by more than rounding (1%)."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours != theirs
    return not math.isclose(ours, theirs, rel_tol=0.01)


def compare_recipes() -> tuple[str, set[str]]:
    """Table of both recipes by depth, and the rows that differ at some depth."""
    ours, theirs = ([f(depth) for depth in COMPARED_DEPTHS] for f in (our_recipe, published_recipe))
    columns, different = [("depth", [str(depth) for depth in COMPARED_DEPTHS])], set()
    for name, title in ROWS.items():
        cells = []
        for a, b in zip(ours, theirs, strict=True):
            mine, other = getattr(a, name), getattr(b, name)
            cell = show_value(name, mine)
            if differs(mine, other):
                cell += f" ({show_value(name, other)})"
                different.add(title)
            cells.append(cell)
        columns.append((title, cells))
    return table(*columns), different


def show_value(name: str, value: float | str) -> str:
    """Cell of the comparison."""
    if isinstance(value, str):
        return value
    if name == "parameters":
        return mega(round(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


# ---- Tables --------------------------------------------------------------------------------------


def count_by_role(model: GPT) -> Counter[str]:
    """Number of parameters of each role."""
    roles, counts = model.param_roles(), Counter[str]()
    for name, p in model.named_parameters():
        counts[roles[name]] += p.numel()
    return counts


def table(*columns: tuple[str, Sequence[str]]) -> str:
    """Markdown table, columns right-aligned."""
    titles, cells = zip(*columns, strict=True)
    rows = [f"| {' | '.join(row)} |" for row in (titles, *zip(*cells, strict=True))]
    return "\n".join([rows[0], "|" + "---:|" * len(titles), *rows[1:]])


def shape_table(setups: Sequence[Setup]) -> str:
    """Width, heads and parameters by kind."""
    configs = [model.cfg for model, _, _ in setups]
    counts = [count_by_role(model) for model, _, _ in setups]
    heads = [f"{cfg.n_head} x {cfg.head_dim}" for cfg in configs]
    by_role = [(name, [mega(c[role]) for c in counts]) for role, name in ROLES.items()]
    return table(
        ("depth", [str(cfg.n_layer) for cfg in configs]),
        ("width", [f"{cfg.d_model:,}" for cfg in configs]),
        ("heads", heads),
        *by_role,
        ("total", [mega(model.num_params()) for model, _, _ in setups]),
    )


def horizon_table(setups: Sequence[Setup]) -> str:
    """Tokens, batch size, steps and FLOPs of the default horizon."""
    tokens = [horizon.num_steps * horizon.batch_tokens for _, horizon, _ in setups]
    flops = [model.flops_per_token() for model, _, _ in setups]
    totals = [f"{each * n:.2e}" for each, n in zip(flops, tokens, strict=True)]
    return table(
        ("depth", [str(model.cfg.n_layer) for model, _, _ in setups]),
        ("matmul parameters (M)", [mega(model.num_used_params()) for model, _, _ in setups]),
        ("tokens (B)", [f"{n / 1e9:.2f}" for n in tokens]),
        ("batch (tokens)", [f"{horizon.batch_tokens:,}" for _, horizon, _ in setups]),
        ("steps", [f"{horizon.num_steps:,}" for _, horizon, _ in setups]),
        ("FLOPs per token", [f"{each:.2e}" for each in flops]),
        ("total FLOPs", totals),
    )


def memory_table(setups: Sequence[Setup]) -> str:
    """Memory of one device without activations, and the size of a checkpoint."""
    models = [model for model, _, _ in setups]
    weights = [4 * model.num_params() for model in models]
    states = [state_bytes(model) for model in models]
    sums = [2 * weight + state for weight, state in zip(weights, states, strict=True)]
    final = [checkpoint_bytes(model, optimizer=False) for model in models]
    columns = {
        "weights (GB)": weights,
        "gradients (GB)": weights,
        "optimizer state (GB)": states,
        "sum, without activations (GB)": sums,
        "checkpoint (GB)": [checkpoint_bytes(model) for model in models],
        "checkpoint without optimizer (GB)": final,
    }
    return table(
        ("depth", [str(model.cfg.n_layer) for model in models]),
        *[(name, [f"{n / 1e9:.2f}" for n in sizes]) for name, sizes in columns.items()],
    )


def rate_table(setups: Sequence[Setup]) -> str:
    """Peak learning rates and Muon's weight decay."""
    decays = [rules["matrix"].weight_decay for _, _, rules in setups]
    return table(
        ("depth", [str(model.cfg.n_layer) for model, _, _ in setups]),
        *[
            (name, [f"{rules[role].lr:.3g}" for *_, rules in setups])
            for role, name in RATES.items()
        ],
        ("weight decay", [f"{decay:.3g}" for decay in decays]),
    )


def rule_rows() -> str:
    """Rows of the table of update rules, whose settings are the same at each depth."""
    cfg, rules = OptimConfig(), derive(SMALL_DEPTH).rules
    width, batch = "(C / 768)^-0.5", f"min(1, batch / {REFERENCE_BATCH:,})^0.5"
    parameters = {
        "matrix": ("layer matrices", "Muon", f"{cfg.matrix_lr}"),
        "embedding": ("token embedding", "AdamW", f"{cfg.embedding_lr} x {width}"),
        "value_embedding": ("value embeddings", "AdamW", f"{cfg.embedding_lr / 2} x {width}"),
        "bigram": (
            "hash-bigram embedding",
            "Adam without first moment, touched rows only",
            f"{cfg.embedding_lr / 2} x {width}",
        ),
        "head": ("LM head", "AdamW", f"{cfg.unembedding_lr} x {width}"),
        "gate": ("gates of value embeddings", "AdamW", f"{cfg.unembedding_lr} x {width}"),
        "residual": ("residual scales a", "AdamW", f"{SCALAR_LR / 100} x {batch}"),
        "skip": ("skip scales b", "AdamW", f"{SCALAR_LR} x {batch}"),
    }
    lines = []
    for role, (name, kind, peak) in parameters.items():
        rule = rules[role]
        betas = ", ".join(map(str, rule.betas)) if rule.kind == "adamw" else str(max(rule.betas))
        decay = (
            "table above, cautious (arXiv:2411.16085)"
            if role == "matrix"
            else f"{rule.weight_decay:g}"
        )
        lines.append(f"| {name} | {kind} | {betas} | {decay} | {peak} |")
    return "\n".join(lines)


def mega(count: int) -> str:
    """A number of parameters in millions."""
    return f"{count / 1e6:,.1f}"


def hyperparameter_page() -> str:
    """Text of docs/hyperparameters.md."""
    setups = [derive(depth) for depth in DEPTHS]
    listed = [sum(count_by_role(model)[role] for role in ROLES) for model, *_ in setups]
    others = [s.model.num_params() - n for s, n in zip(setups, listed, strict=True)]
    cfg, schedule = OptimConfig(), TRAINING.schedule
    return TEXT.format(
        vocab=VOCAB_SIZE,
        seq_len=TRAINING.max_seq_len,
        width=WIDTH_PER_LAYER,
        small_depth=SMALL_DEPTH,
        window_depth=WINDOW_DEPTH,
        gate_channels=GATE_CHANNELS,
        bigram_rows=BIGRAM_ROWS,
        bigram_each=BIGRAM_ROWS_PER_TOKEN,
        small=math.ceil(max(others) / 1000) * 1000,
        ratio=TRAINING.horizon.target_param_data_ratio,
        exponent=BATCH_EXPONENT,
        reference_batch=REFERENCE_BATCH,
        min_steps=MIN_STEPS,
        warmup=schedule.warmup_steps,
        warmdown=schedule.warmdown_ratio,
        final=schedule.final_lr_frac,
        matrix_lr=cfg.matrix_lr,
        embedding_lr=cfg.embedding_lr,
        unembedding_lr=cfg.unembedding_lr,
        shapes=shape_table(setups),
        horizons=horizon_table(setups),
        memory=memory_table(setups),
        reference_tokens=REFERENCE_TOKENS / 1e9,
        rates=rate_table(setups),
        rules=rule_rows(),
        published=compare_recipes()[0],
        reasons="\n".join(
            f"- **{row}**: {why.format(batch=REFERENCE_BATCH)}" for row, why in REASONS.items()
        ),
    )


if __name__ == "__main__":
    PAGE.write_text(hyperparameter_page())
