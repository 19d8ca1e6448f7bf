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
from nanochat.gpt import GPT
from nanochat.optim import SCALAR_LR, OptimConfig, Rule, state_bytes
from nanochat.scaling import (
    BATCH_EXPONENT,
    BIGRAM_DEPTH,
    BIGRAM_ROWS,
    BIGRAM_ROWS_PER_TOKEN,
    MIN_STEPS,
    REFERENCE_BATCH,
    WIDTH_PER_LAYER,
    Horizon,
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
`--max_seq_len={seq_len}`, one device and no other flag. M is 10^6; B and GB are 10^9. For other settings, read what
a run prints before its first step (here of 20 steps), or the plan of all stages:

```bash
python -m scripts.base_train --depth=4 --max_seq_len=256 --num_iterations=20
bash speedrun.sh --plan     # time, cost and disk; trains nothing
```

## Shape and parameters

- Width: {width} x depth.
- Heads: 128 dimensions if the width is at least 512 and divisible by 128, else 64. Each head has its own keys and
  values.
- MLP: four times as wide as the model.
- Value embeddings: one in every layer, as large as the token embedding.
- Hash-bigram embedding, up to depth {bigram_depth}: {bigram_each} rows per token of the vocabulary, at most
  {bigram_rows:,}. A row is half as wide as the model, and a bigram uses two rows.
- Residual scalars: the input of each layer is a x + b x0, where x0 is the embedded token and a and b are learned.
- Token embedding and LM head share no weights.

Parameters, in M:

{shapes}

The total includes gates and residual scalars, fewer than {small:,} parameters at each depth. At each depth more
than half of all parameters are value and hash-bigram embeddings: they take memory, but few FLOPs.

## Horizon and batch size

The horizon is {ratio:g} tokens per matmul parameter (layer matrices, gates and LM head). The batch is
{reference_batch:,} tokens x (horizon / 1.32B tokens)^{exponent}, but at most horizon / {min_steps}, so that short
runs take about {min_steps} steps; then it is rounded to a power of two of rows. FLOPs count forward and backward: 6
per matmul parameter, and attention over the full context.

{horizons}

`speedrun.sh` sets `--target_param_data_ratio=8` on 8 GPUs: two thirds of these tokens. On 2, 4 or 8 devices the
batch is the same; on other numbers it is rounded to whole rows per device.

## Memory and disk

Weights, gradients and optimizer state are float32. Muon and the hash-bigram embedding keep one moment, AdamW two.

{memory}

Several devices share the optimizer state. Activations come on top. Their memory depends on kernels and on
`--device_batch_size`, and no function estimates it without a device: a run measures it on a real step before it
starts and takes the largest micro-batch that fits. With a stub CUDA driver that computes nothing, depth 24 took
72.7 GiB in all at 16 rows per micro-batch (`dev/LOG.md`, 2026-11-22). The size of the micro-batch changes results by
rounding only.

A checkpoint holds weights, optimizer state, and a few MB of tokenizer and records; `--keep=2` keeps the newest two.
A finished mid, SFT or RL run keeps no optimizer state unless `--save_optimizer` is set.

## Learning rates and weight decay

Peak learning rates, and the weight decay of Muon, at the default horizon:

{rates}

The rules behind it; C is the width, and batch is in tokens:

| parameters | update rule | betas | weight decay | peak learning rate |
|---|---|---|---|---|
{rules}

- Scalars: in small batches their gradients are mostly noise, so their learning rates scale with the square root of
  the batch.
- Muon's weight decay x steps is constant, so that the averaging time of the weights is the same fraction of every
  run; below {min_steps} steps it is that of {min_steps}. During a run it falls linearly to 0.
- Schedule: linear warmup over {warmup} steps, constant, linear decay over the last {warmdown:.0%} of the run to
  {final:.0%} of the peak. A run that is too short for both never reaches the peak.
- Muon's momentum rises from 0.85 to 0.95 over 300 steps, or over a third of a shorter run.

Mid, SFT and RL use the same rules times `--init_lr_frac` (default 1, 0.3 and 0.05), but with scalars as at a batch
of {reference_batch:,}, without warmup, and without Muon's weight decay unless `--weight_decay` is set.

## Which flag overrides what

| flag of `base_train` | replaces | also changes |
|---|---|---|
| `--num_iterations` | the number of steps | weight decay; the batch still follows from the tokens per parameter |
| `--target_flops` | the tokens of the horizon | batch, steps, weight decay, learning rates of scalars |
| `--target_param_data_ratio` | {ratio:g} tokens per matmul parameter | the same |
| `--total_batch_size` | the batch | steps (for the same tokens), weight decay, learning rates of scalars |
| `--max_seq_len` | {seq_len} tokens of context | FLOPs of attention; the batch, which is in whole rows |
| `--window_pattern` | full attention in every layer | FLOPs per token |
| `--value_every`, `--bigram_rows` | value and hash-bigram embeddings | memory, disk |
| `--arch=classic` | the default architecture | no value or hash-bigram embeddings, no residual scalars |
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
| about {min_steps} steps or more; 64 bigram rows per token | measured at depth 4 on a CPU, 2026-11 |

The experiments in `dev/LOG.md` train small models on CPUs. No code here has run on a real GPU: at larger depths these
tables state the rules, not results.
"""  # noqa: E501


class Setup(NamedTuple):
    """Model on the meta device, horizon and update rules of a depth."""

    model: GPT
    horizon: Horizon
    rules: dict[str, Rule]


def derive(depth: int) -> Setup:
    """Everything that follows from a depth."""
    with torch.device("meta"):
        model = GPT(shape_for_depth(depth, VOCAB_SIZE, TRAINING.max_seq_len))
    horizon = plan_horizon(model)
    return Setup(model, horizon, scaled_rules(OptimConfig(), horizon, model.cfg.d_model))


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
    cfg, rules = OptimConfig(), derive(BIGRAM_DEPTH).rules
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
        bigram_depth=BIGRAM_DEPTH,
        bigram_rows=BIGRAM_ROWS,
        bigram_each=BIGRAM_ROWS_PER_TOKEN,
        small=math.ceil(max(others) / 1000) * 1000,
        ratio=TRAINING.target_param_data_ratio,
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
        rates=rate_table(setups),
        rules=rule_rows(),
    )


if __name__ == "__main__":
    PAGE.write_text(hyperparameter_page())
