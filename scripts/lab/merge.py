"""
Merge models of the same shape and compare the result with its parents.

    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c"                  # a soup: the mean
    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c" --method=greedy  # only those that help
    python -m scripts.lab.merge --models="sft:math|rl:d4" --method=ties --base=mid:d4

Reads   checkpoints as stage[:tag[:step]] and validation rows from their training data
Writes  a checkpoint under --tag in the first model's stage, recording parents and weights, and
        the section "Merge": scores of parents and merge, and losses on the lines between parents
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from nanochat import records, report
from nanochat.checkpoint import (
    Checkpoint,
    lineage,
    load_model,
    parse_checkpoint_ref,
    save_checkpoint,
    stage_folder,
)
from nanochat.common import UsageError, require_name
from nanochat.config import require_at_least, settings, start
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.finetune import packed_chats
from nanochat.lab.canaries import open_pretraining_rows
from nanochat.lab.merge import MergeConfig, Tensors, merge
from nanochat.loss import IGNORE
from nanochat.rows import ChatPart, Rows, inputs_and_targets
from nanochat.stats import compare
from nanochat.train import document_segments
from tasks.buckets import buckets, read_mixture
from tasks.held_out import require_access

NO_PARENTS = ("data", "rows", "tokenizer", "mixture", "pairs")  # inputs that are not models
PATH = (0.25, 0.5, 0.75)  # between two parents
MAX_RISE = 0.01  # relative rise in bits per byte that may be noise


@dataclass(frozen=True)
class MergeScript:
    models: str = ""
    """Parent checkpoints as stage[:tag[:step]], separated by |."""
    unrelated: bool = False
    """Merge models without a recorded common ancestor."""
    tag: str = "merged"
    """Tag of the output checkpoint."""
    val_mixture: str = ""
    """Validation buckets. Default: those of the first model's training run."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    merging: MergeConfig = field(default_factory=MergeConfig)
    dist: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)


class RowScorer:
    """Scores weights on fixed packed validation sequences ("rows")."""

    def __init__(self, cfg: MergeScript, first: Checkpoint, dist: DistContext):
        self.model, self.tokenizer = load_model(first, dist), first.tokenizer()
        self.is_text = first.state["stage"] == "base" and not cfg.val_mixture
        if self.is_text:
            opened = {"text": open_pretraining_rows(first, dist)}
        else:
            opened = open_chat_rows(cfg, first, dist)
        count = max(1, cfg.eval_tokens // self.model.cfg.max_seq_len // len(opened))
        self.batches = [
            [torch.from_numpy(x).to(dist.device) for x in inputs_and_targets(batch)]
            for rows in opened.values()
            for batch in rows.val_batches(8, count)
        ]
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes()).to(dist.device)

    def score(self, tensors: Tensors) -> list[float]:
        """Bits of each row over the mean bytes of a row; their mean is the bits per byte."""
        self.model.load_state_dict(tensors)
        nats, sizes = [], []
        for x, y in self.batches:
            lengths = torch.where(y == IGNORE, 0, self.token_bytes[y.clamp(min=0)])  # (B, T)
            segments = None if self.is_text else document_segments(x, self.tokenizer.bos_id)
            losses = self.model.token_losses(x, y, segments)
            nats += (losses * (lengths > 0)).sum(dim=1).tolist()
            sizes += lengths.sum(dim=1).tolist()
        return [each / math.log(2) / fmean(sizes) for each in nats]


def open_chat_rows(cfg: MergeScript, first: Checkpoint, dist: DistContext) -> dict[str, Rows]:
    """Held-out conversations of --val_mixture, or of the first model's training run, as rows."""
    state = first.state
    if not (cfg.val_mixture or "declared" in state):
        raise ValueError(f"{first.folder} was not trained on a mixture; set --val_mixture")
    spec, declared = read_mixture(cfg.val_mixture or state["settings"]["mixture"])
    found = buckets(spec, declared or state.get("declared", {}))
    require_access((bucket.benchmark for bucket in found if bucket.benchmark), False, {})
    tokenizer, T = first.tokenizer(), state["model"]["max_seq_len"]
    parts = {bucket.name: ChatPart(bucket.val, bucket.val.identity) for bucket in found}
    return {n: packed_chats({n: part}, 0, tokenizer, T, dist) for n, part in parts.items()}


def main(cfg: MergeScript) -> None:
    dist = init_distributed(cfg.dist, steady=False)
    names = cfg.models.split("|")
    parents = [parse_checkpoint_ref(name) for name in names]
    base = parse_checkpoint_ref(cfg.merging.base) if cfg.merging.base else None
    require_related([*parents, base] if base else parents, cfg)
    first, shares = parents[0], cfg.merging.shares(len(parents))
    folder = stage_folder(first.state["stage"]) / require_name("tag", cfg.tag)
    if folder.exists():
        raise UsageError(f"{folder} exists", "choose another --tag, or delete the folder")

    # Score every parent, the lines from the first to the others, and the merge
    scorer = RowScorer(cfg, first, dist)
    tensors = [parent.model_tensors() for parent in parents]
    scores = [scorer.score(each) for each in tensors]
    lines, rises = {}, {}
    for name, other, end in zip(names[1:], tensors[1:], scores[1:], strict=True):
        line = [(t, fmean(scorer.score(merge([tensors[0], other], [1 - t, t])))) for t in PATH]
        low, high = fmean(scores[0]), fmean(end)
        rise = max(y - (1 - t) * low - t * high for t, y in line)
        lines[f"{names[0]} to {name}"] = [(0, low), *line, (1, high)]
        rises[f"Rise from {names[0]} to {name}"] = f"{rise:+.4f}"
        if rise > MAX_RISE * low:
            dist.print0(
                f"warning: loss on the line from {names[0]} to {name} rises {rise:.4f} bpb above "
                "its ends: the models lie in different basins, and their mean lies in neither"
            )
    if cfg.merging.method == "greedy":
        shares = choose_greedily(tensors, scores, scorer)
    matrices = {name for name in tensors[0] if name.startswith("blocks.")}
    origin = base.model_tensors() if base else None
    score = scorer.score(merge(tensors, shares, cfg.merging, origin, matrices))

    # Save it as an ordinary checkpoint, and compare it with the parents
    saved = save_merge(cfg, folder, parents, shares, scorer)
    dist.print0(f"wrote {saved.folder}")
    change = compare(score, min(scores, key=fmean))  # the bits that the merge saves
    rows = [
        [n, f"{w:.3f}", f"{fmean(x):.4f}"] for n, w, x in zip(names, shares, scores, strict=True)
    ]
    rows.append(["merged", "", f"{fmean(score):.4f}"])
    table = {"title": "Parents and merge", "columns": ["Model", "Weight", "bpb"], "rows": rows}
    values = {
        "Merged bpb": fmean(score),
        "Best parent's bpb": min(map(fmean, scores)),
        "Mean of the parents' bpb": fmean(map(fmean, scores)),
        "Merged minus best": records.estimate(-change.difference, change.n, change.se),
        "Verdict": change.verdict,
        **rises,
    }
    made = records.Provenance(
        **saved.state["provenance"], outputs={saved.state["stage"]: saved.fingerprint}
    )
    shown = {"tables": [table], "series": lines, "files": [saved.folder]}
    report.append_section("Merge", cfg, values, made, **shown)


def save_merge(
    cfg: MergeScript,
    folder: Path,
    parents: Sequence[Checkpoint],
    shares: Sequence[float],
    scorer: RowScorer,
) -> Checkpoint:
    """Save the weights that were scored last, without optimizer state."""
    first, origin = parents[0], parents[0].state["provenance"]
    made = [
        {"name": name, "fingerprint": parent.fingerprint, "weight": share}
        for name, parent, share in zip(cfg.models.split("|"), parents, shares, strict=True)
    ]
    inputs = {f"parent {n}": parent.fingerprint for n, parent in enumerate(parents, 1)}
    state = {
        **lineage(first.state),
        "stage": first.state["stage"],
        # Training settings and declared buckets define the validation rows
        **{k: first.state[k] for k in ("settings", "declared") if k in first.state},
        "provenance": {**origin, "inputs": {**origin["inputs"], **inputs}},
        "merge": {**settings(cfg.merging), "parents": made},
    }
    return save_checkpoint(folder, first.step, scorer.model, None, scorer.tokenizer, state)


def require_related(models: Sequence[Checkpoint], cfg: MergeScript) -> None:
    """
    Raise UsageError for models of different shapes or tokenizers, or without a common ancestor,
    which may be one of them.
    """
    kinds = [
        ({**m.state["model"], "max_seq_len": 0}, m.state["files"]["tokenizer.json"]) for m in models
    ]
    for model, kind in zip(models, kinds, strict=True):
        if kind != kinds[0]:
            message = f"{model.folder} has another shape or tokenizer than {models[0].folder}"
            raise UsageError(message, "merge models with the same shape and tokenizer")
    made = {
        output: record["provenance"]["inputs"]
        for record in records.read_history(cfg.report_dir)
        for output in record["provenance"]["outputs"].values()
    }
    made |= {model.fingerprint: model.state["provenance"]["inputs"] for model in models}
    common = set.intersection(*(ancestors(model.fingerprint, made) for model in models))
    if not common and not cfg.unrelated:
        message = f"no record that {cfg.models} come from {cfg.merging.base or 'one checkpoint'}"
        raise UsageError(f"{message}: merging would give noise", "--unrelated merges anyway")


def ancestors(model: str, made: Mapping[str, Mapping[str, str]]) -> set[str]:
    """A model and all its recorded ancestors. made: fingerprint of an output -> its inputs."""
    inputs = made.get(model, {}).items()
    parents = (ancestors(parent, made) for name, parent in inputs if name not in NO_PARENTS)
    return {model}.union(*parents)


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


if __name__ == "__main__":
    start(main, MergeScript(), __doc__)
