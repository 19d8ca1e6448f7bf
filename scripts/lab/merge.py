"""
Merge models of the same shape and compare the result with its parents.

    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c"                  # a soup: the mean
    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c" --method=greedy  # only those that help
    python -m scripts.lab.merge --models="sft:math|rl:d4" --method=ties --base=mid:d4

A task vector is the difference between a model and the base. Matrices in blocks are merged by the
chosen method; embeddings, LM head and scalars linearly. Sources: model soups, Wortsman et al.,
arXiv:2203.05482; SLERP, Shoemake, "Animating Rotation with Quaternion Curves", 1985; task
arithmetic, Ilharco et al., arXiv:2212.04089; TIES, Yadav et al., arXiv:2306.01708; DARE, Yu et al.,
arXiv:2311.03099.

Reads   checkpoints as stage[:tag[:step]] and validation rows from their training data
Writes  a checkpoint under --tag in the first model's stage, recording parents and weights, and
        the section "Merge": scores of parents and merge, and losses on the lines between parents
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from nanochat import records, report
from nanochat.checkpoint import (
    Checkpoint,
    find_checkpoint,
    lineage,
    load_model,
    save_checkpoint,
    stage_folder,
)
from nanochat.common import UsageError, require_name
from nanochat.config import require_at_least, settings, start
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.eval_bpb import bits_per_byte
from nanochat.finetune import bucket_rows, chat_losses
from nanochat.lab.canaries import open_pretraining_rows
from nanochat.rows import ChatPart, Rows, Shards, inputs_and_targets
from nanochat.stats import compare
from tasks.buckets import buckets, read_mixture
from tasks.held_out import require_access

Tensors = Mapping[str, Tensor]
NEEDS_BASE = ("task_arithmetic", "ties", "dare")
PARALLEL = 0.9995  # slerp is linear above this cosine
PATH = (0.25, 0.5, 0.75)  # between two parents
MAX_RISE = 0.01  # relative rise in bits per byte that may be noise

BASINS = """\
warning: loss on the line from {} to {} rises {:.4f} bpb above a straight line: they
lie in different basins; merge models that were fine-tuned from one checkpoint"""


@dataclass(frozen=True)
class MergeScript:
    models: str = ""
    """Parent checkpoints as stage[:tag[:step]], separated by |."""
    method: Literal["linear", "greedy", "slerp", "task_arithmetic", "ties", "dare"] = "linear"
    """linear: weighted mean (model soup). greedy: mean of the best model and of each other one that
    improves it by more than noise. slerp: spherical interpolation of two models. task_arithmetic:
    base plus mean task vector. ties: largest entries of the task vectors, with sign election. dare:
    random entries, rescaled."""
    weights: tuple[float, ...] = ()
    """Weight of each model, as in 3 1; normalized to sum to 1. Default: equal. Not for greedy."""
    base: str = ""
    """Common base checkpoint, for the last three methods. Default: none."""
    scale: float = 1.0
    """With a base: factor on the merged task vector."""
    density: float = 0.5
    """ties: fraction of entries to keep, largest first. dare: probability of keeping an entry."""
    tag: str = "merged"
    """Tag of the output checkpoint."""
    val_mixture: str = ""
    """Validation buckets. Default: those of the first model's training run."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation."""
    dist: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if self.method == "greedy" and self.weights:
            raise ValueError("greedy chooses the models itself; omit --weights")
        if self.method in NEEDS_BASE and not self.base:
            raise ValueError(f"{self.method} adds task vectors to a base model; set --base")

    def shares(self, count: int) -> list[float]:
        """Weights of `count` models, which sum to 1. Raises ValueError for a wrong number."""
        if self.method == "slerp" and count != 2:
            raise ValueError(f"slerp merges two models, got {count}")
        weights = self.weights or (1.0,) * count
        if len(weights) != count or min(weights) < 0 or not sum(weights):
            needed = f"{count} models need {count} weights, none negative and not all 0"
            raise ValueError(f"--weights {' '.join(map(str, weights))}: {needed}")
        return [weight / sum(weights) for weight in weights]


def main(cfg: MergeScript) -> None:
    dist = init_dist(cfg.dist, steady=False)
    records.require_writable()
    names = cfg.models.split("|")
    parents = [find_checkpoint(name) for name in names]
    base = find_checkpoint(cfg.base) if cfg.base else None
    require_same_shape(cfg, [*parents, base] if base else parents)
    first, shares = parents[0], cfg.shares(len(parents))
    folder = stage_folder(first.state["stage"]) / require_name("tag", cfg.tag)
    if folder.exists():
        raise UsageError(f"{folder} exists", "choose another --tag, or delete the folder")

    # Score every parent, the lines from the first to the others, and the merge
    scorer = RowScorer(cfg, first, dist)
    tensors = [parent.model_tensors() for parent in parents]
    scores = [scorer.score(each) for each in tensors]
    bpbs, rises = [fmean(each) for each in scores], {}
    for name, other, end in zip(names[1:], tensors[1:], bpbs[1:], strict=True):
        line = [(t, fmean(scorer.score(merge([tensors[0], other], [1 - t, t])))) for t in PATH]
        rise = max(y - (1 - t) * bpbs[0] - t * end for t, y in line)
        rises[f"Rise from {names[0]} to {name}"] = f"{rise:+.4f}"
        if rise > MAX_RISE * bpbs[0]:
            dist.print0(BASINS.format(names[0], name, rise))
    if cfg.method == "greedy":
        shares = choose_greedily(tensors, scores, scorer)
    origin = base.model_tensors() if base else None
    score = scorer.score(merge(tensors, shares, cfg, origin))

    # Save it as an ordinary checkpoint, and compare it with the parents
    origins = first.state["provenance"]["inputs"]
    inputs = {f"parent {n}": parent.fingerprint for n, parent in enumerate(parents, 1)}
    provenance = {**first.state["provenance"], "inputs": {**origins, **inputs}}
    state = {
        **lineage(first.state),
        "stage": first.state["stage"],
        # Training settings and declared buckets define the validation rows
        **{k: first.state[k] for k in ("settings", "declared") if k in first.state},
        "provenance": provenance,
        "merge": {**settings(cfg), "parents": dict(zip(names, shares, strict=True))},
    }
    saved = save_checkpoint(folder, first.step, scorer.model, None, scorer.tokenizer, state)
    dist.print0(f"wrote {saved.folder}")
    change = compare(score, min(scores, key=fmean))  # the bits that the merge saves
    rows = [[n, f"{w:.3f}", f"{bpb:.4f}"] for n, w, bpb in zip(names, shares, bpbs, strict=True)]
    rows.append(["merged", "", f"{fmean(score):.4f}"])
    table = {"title": "Parents and merge", "columns": ["Model", "Weight", "bpb"], "rows": rows}
    values = {
        "Merged bpb": fmean(score),
        "Best parent's bpb": min(bpbs),
        "Mean of the parents' bpb": fmean(bpbs),
        "Merged minus best": {"value": -change.difference, "n": change.n, "se": change.se},
        "Verdict": change.verdict,
        **rises,
    }
    inputs, cost = provenance["inputs"], records.Cost.so_far(dist)
    made: Any = {"files": [saved.folder], "outputs": {first.state["stage"]: saved.fingerprint}}
    report.append_section("Merge", cfg, values, inputs, cost, tables=[table], **made)


def require_same_shape(cfg: MergeScript, models: Sequence[Checkpoint]) -> None:
    """Raise UsageError for models of different shapes or tokenizers."""
    kinds = [
        ({**m.state["model"], "max_seq_len": 0}, m.state["files"]["tokenizer.json"]) for m in models
    ]
    if any(kind != kinds[0] for kind in kinds):
        message = f"{cfg.models} have other shapes or tokenizers than one another or the base"
        raise UsageError(message, "merge models with the same shape and tokenizer")


def open_val_rows(
    cfg: MergeScript, first: Checkpoint, dist: DistContext
) -> list[Rows] | list[Shards]:
    """
    Packed validation sequences ("rows"): held-out conversations of each bucket of --val_mixture or
    of the first model's training run, or pretraining text for base models.
    """
    state = first.state
    if state["stage"] == "base" and state["source"] and not cfg.val_mixture:
        return [open_pretraining_rows(first, dist)]
    if not (cfg.val_mixture or "declared" in state):
        raise ValueError(f"{first.folder} was not trained on a mixture; set --val_mixture")
    spec, declared = read_mixture(cfg.val_mixture or state["settings"]["mixture"])
    found = buckets(spec, declared or state.get("declared", {}))
    require_access(b.task.name for b in found if "val" not in b.task.splits)
    parts = {bucket.name: ChatPart(bucket.val, bucket.val.identity) for bucket in found}
    opened = bucket_rows(parts, first.tokenizer(), state["model"]["max_seq_len"], dist)
    return [*opened.values()]


class RowScorer:
    """Scores weights on validation rows."""

    def __init__(self, cfg: MergeScript, first: Checkpoint, dist: DistContext):
        self.model, self.tokenizer, self.dist = load_model(first, dist), first.tokenizer(), dist
        opened = open_val_rows(cfg, first, dist)
        self.nats = chat_losses(self.model, self.tokenizer.bos_id)
        if isinstance(opened[0], Rows):  # text
            self.nats = self.model.token_losses
        count = max(1, cfg.eval_tokens // self.model.cfg.max_seq_len // len(opened))
        self.rows = [inputs_and_targets(x) for rows in opened for x in rows.val_batches(1, count)]

    def score(self, tensors: Tensors) -> list[float]:
        """Bits of each row over the mean bytes of a row; their mean is the bits per byte."""
        self.model.load_state_dict(tensors)
        sizes = self.tokenizer.token_bytes()
        found = [bits_per_byte(self.nats, [row], sizes, self.dist) for row in self.rows]
        mean_bytes = fmean(row.bytes for row in found)
        return [row.nats / math.log(2) / mean_bytes for row in found]


def choose_greedily(
    models: Sequence[Tensors], scores: Sequence[list[float]], scorer: Any
) -> list[float]:
    """Weights of a greedy soup: try models from best to worst; keep any that help beyond noise."""
    order = sorted(range(len(models)), key=lambda i: fmean(scores[i]))
    chosen, best = order[:1], scores[order[0]]
    for i in order[1:]:
        more = [*chosen, i]
        tried = scorer.score(merge([models[j] for j in more], [1 / len(more)] * len(more)))
        if compare(tried, best).verdict == "better":
            chosen, best = more, tried
    return [1 / len(chosen) if i in chosen else 0.0 for i in range(len(models))]


# ---- Merging tensors -----------------------------------------------------------------------------


def merge(
    models: Sequence[Tensors],
    shares: Sequence[float],
    cfg: MergeScript = MergeScript(),
    base: Tensors | None = None,
) -> dict[str, Tensor]:
    """
    Return the merged tensors, float32. Those in blocks are merged by the method, all others
    linearly. The models have the same names and shapes, and `shares` sum to 1. With a base,
    the task vectors are merged, multiplied by `scale` and added to it.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    for name in models[0]:
        method = cfg.method if name.startswith("blocks.") else "linear"
        origin = base[name].float() if base else 0.0
        moved = [model[name].float() - origin for model in models]
        if method == "slerp":
            step = slerp(moved[0], moved[1], shares[1])
        elif method == "ties":
            step = elect_signs([keep_largest(x, cfg.density) for x in moved], shares)
        elif method == "dare":
            step = mix([drop_entries(x, cfg.density, generator) for x in moved], shares)
        else:
            step = mix(moved, shares)
        found[name] = origin + cfg.scale * step if base else step
    return found


def mix(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Weighted mean; a weight of 1 returns its tensor bit for bit."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for x, share in zip(tensors, shares, strict=True):
        total += share * x
    return total.float()


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Spherical interpolation of two tensors as flat vectors; linear if nearly parallel."""
    x, y = a.double(), b.double()
    norms = x.norm() * y.norm()
    cos = (x * y).sum() / norms
    if not norms or cos.abs() > PARALLEL:
        return mix([a, b], [1 - t, t])
    angle = torch.arccos(cos)
    return ((torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)).float()


def keep_largest(x: Tensor, density: float) -> Tensor:
    """Zero all but the largest fraction `density` of entries of `x`; keep at least one."""
    flat = x.flatten()
    keep = flat.abs().topk(max(1, round(density * len(flat)))).indices
    return torch.zeros_like(flat).scatter(0, keep, flat[keep]).view_as(x)


def drop_entries(x: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Keep each entry of `x` with probability `density` and divide it by `density`."""
    return x * (torch.rand(x.shape, generator=generator) < density) / density


def elect_signs(moved: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Per entry, the weighted mean of the values that share the sign of the weighted sum."""
    sign = torch.sign(mix(moved, shares))
    agreeing = [x * (torch.sign(x) == sign) for x in moved]
    weight = mix([(x != 0).float() for x in agreeing], shares)
    return torch.where(weight > 0, mix(agreeing, shares) / weight, 0.0)


if __name__ == "__main__":
    start(main, MergeScript(), __doc__)
