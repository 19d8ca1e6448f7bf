"""
Merge models of the same shape and compare the result with its parents.

    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c"                  # a soup: the mean
    python -m scripts.lab.merge --models="sft:a|sft:b|sft:c" --greedy         # only those that help
    python -m scripts.lab.merge --models="sft:math|rl:d4" --method=ties --base=mid:d4

Reads   checkpoints as stage[:tag[:step]] and validation rows from their training data
Writes  a checkpoint under --tag in the first model's stage, recording parents and weights, and
        the section "Merge": scores of parents and merge, and interpolation between parents
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from nanochat import records, report
from nanochat.checkpoint import (
    Checkpoint,
    lineage,
    load_model,
    newest_state,
    parse_checkpoint_ref,
    save_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import UsageError, require_name
from nanochat.config import require_at_least, settings, start
from nanochat.dataloader import inputs_and_targets
from nanochat.dataset import DataConfig
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.finetune import pack_val_rows
from nanochat.lab.merge import (
    NEEDS_BASE,
    MergeConfig,
    RowBits,
    Tensors,
    WeightPath,
    average,
    bits_by_row,
    greedy,
    interpolate,
    loss_barrier,
    merge,
    warnings,
)
from nanochat.mixture import open_corpus, open_texts, read_mixture
from nanochat.train import document_segments
from tasks.buckets import Bucket, buckets
from tasks.builtin import ensure_written
from tasks.held_out import require_access

SECTION = "Merge"

NO_PARENTS = ("data", "rows", "tokenizer", "mixture", "pairs")  # inputs that are not models


@dataclass(frozen=True)
class MergeScript:
    models: str = ""
    """Parent checkpoints as stage[:tag[:step]], separated by |."""
    base: str | None = None
    """Common base checkpoint, for methods that need one. Default: none."""
    greedy: bool = False
    """Greedy soup: start from the best parent; add another only if the averaged model improves by
    more than noise."""
    unrelated: bool = False
    """Merge models without a recorded common ancestor."""
    tag: str = "merged"
    """Tag of the output checkpoint."""
    val_mixture: str | None = None
    """Validation buckets. Default: those of the first model's training run."""
    eval_tokens: int = 131_072
    """Validation tokens per evaluation."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    merging: MergeConfig = field(default_factory=MergeConfig)
    machine: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)
        if self.greedy and self.merging != MergeConfig():
            raise ValueError("--greedy uses plain means; remove --method, --weights and --scale")


class MergeScorer:
    """Scores merged weights on fixed packed validation sequences ("rows")."""

    def __init__(self, cfg: MergeScript, first: Checkpoint, machine: DistContext):
        self.model = load_model(first, machine)
        self.tokenizer = first.tokenizer()
        T = self.model.cfg.max_seq_len
        if first.state["stage"] == "base" and not cfg.val_mixture:
            texts = open_texts(DataConfig(), None, first.state["source"], ensure_written)
            corpus = open_corpus(texts, self.tokenizer, T)
            corpus.pack(dict.fromkeys(corpus.rows, 0), machine)
            rows, self.masked = corpus.rows, False
        else:
            rows = pack_val_rows(validation_buckets(cfg, first), self.tokenizer, T, machine)
            self.masked = True
        num_rows = max(1, cfg.eval_tokens // T // len(rows))
        batches = (b for each in rows.values() for b in each.val_batches(8, num_rows))
        self.batches = list(map(inputs_and_targets, batches))

    def score(self, tensors: Tensors) -> RowBits:
        """Per-row loss of these weights."""
        self.model.load_state_dict(tensors)
        sizes = self.tokenizer.token_bytes()

        def score(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            segments = document_segments(x, self.tokenizer.bos_id) if self.masked else None
            return self.model.token_losses(x, y, segments)

        return bits_by_row(score, self.batches, sizes, self.model.device)


def validation_buckets(cfg: MergeScript, first: Checkpoint) -> list[Bucket]:
    """Buckets whose held-out conversations are used for validation."""
    trained = first.state.get("settings", {})  # an imported checkpoint has none
    spec = cfg.val_mixture or trained.get("val_mixture") or trained.get("mixture")
    if not spec:
        raise ValueError(f"{first.folder} records no validation mixture; set --val_mixture")
    spec, declared = read_mixture(spec)
    found = buckets(spec, declared or first.state.get("declared", {}))
    require_access((bucket.benchmark for bucket in found if bucket.benchmark), False, {})
    return found


def main(cfg: MergeScript) -> None:
    machine = init_distributed(cfg.machine, steady=False)
    names = cfg.models.split("|") if cfg.models else []
    if len(names) < (1 if cfg.merging.method in NEEDS_BASE else 2):
        raise ValueError(f"--models={cfg.models!r}: list two or more, separated by |")
    parents = [parse_checkpoint_ref(name) for name in names]
    folder = stage_folder(parents[0].state["stage"]) / require_name("tag", cfg.tag)
    if "merge" not in (newest_state(folder) or {"merge": None}):
        raise UsageError(f"{folder} has checkpoints of a training run", "choose another --tag")
    base = parse_checkpoint_ref(cfg.base) if cfg.base else None
    require_base(parents, base, cfg)

    # Score every parent, then the merge
    judge = MergeScorer(cfg, parents[0], machine)
    tensors = [parent.model_tensors() for parent in parents]
    origin = base.model_tensors() if base else None
    matrices = {name for name, _ in judge.model.named_parameters() if name.startswith("blocks.")}
    scores = [judge.score(each) for each in tensors]
    shares = cfg.merging.shares(len(parents))
    if cfg.greedy:
        shares = greedy(tensors, scores, judge.score)
        merged = average(tensors, shares)
    else:
        merged = merge(tensors, cfg.merging, origin, matrices)
    found = judge.score(merged)
    lines = interpolate(names, tensors, scores, judge.score)
    for warning in warnings(lines):
        machine.print0(warning)

    # Save as an ordinary checkpoint
    judge.model.load_state_dict(merged)
    inputs = {f"parent {n}": parent.fingerprint for n, parent in enumerate(parents, 1)}
    inputs |= {"merge base": base.fingerprint} if base else {}
    checkpoint = save_merge(cfg, parents, shares, judge, inputs)
    machine.print0(f"wrote {checkpoint.folder}")
    values, table = merge_results(scores, found, lines, checkpoint)
    outputs = {checkpoint.state["stage"]: checkpoint.fingerprint}
    run_id = checkpoint.state["provenance"]["run_id"]
    provenance = records.Provenance(run_id, 0, inputs, outputs)
    shown = {"tables": [table], "series": lines, "files": [checkpoint.folder]}
    report.append_section(SECTION, cfg, values, provenance, **shown)
    machine.close()


def require_base(parents: Sequence[Checkpoint], base: Checkpoint | None, cfg: MergeScript) -> None:
    """
    Raise UsageError for different shapes or tokenizers, no common ancestor, or models not derived
    from the base.
    """
    models = [*parents, *([base] if base else [])]
    for what, values in (
        ("model", [{**c.state["model"], "max_seq_len": None} for c in models]),
        ("tokenizer", [c.state["files"]["tokenizer.json"]["sha256"] for c in models]),
    ):
        for other, value in zip(models, values, strict=True):
            if value != values[0]:
                message = f"{other.folder} has a different {what} from {models[0].folder}"
                raise UsageError(message, "merge models with the same shape and tokenizer")
    lines = [
        ancestors(c.fingerprint, c.state["provenance"]["inputs"], cfg.report_dir) for c in parents
    ]
    common = set.intersection(*lines)
    if not (base.fingerprint in common if base else common) and not cfg.unrelated:
        origin = base.folder if base else "one checkpoint"
        message = f"no record that these models come from {origin}: merging would give noise"
        raise UsageError(message, "to merge anyway, set --unrelated")


def ancestors(print_: str, inputs: Mapping[str, str], report_dir: str | None) -> set[str]:
    """
    Return the fingerprints of a checkpoint and all its recorded ancestors.

    inputs: the checkpoint's own inputs; text, rows and tokenizers are ignored.
    """
    made = {
        output: record["provenance"]["inputs"]
        for record in records.read_history(report_dir)
        for output in record["provenance"]["outputs"].values()
    }
    found, waiting = {print_}, [inputs]
    while waiting:
        for name, parent in waiting.pop().items():
            if name not in NO_PARENTS and parent not in found:
                found.add(parent)
                waiting.append(made.get(parent, {}))
    return found


def save_merge(
    cfg: MergeScript,
    parents: Sequence[Checkpoint],
    shares: Sequence[float],
    judge: MergeScorer,
    inputs: Mapping[str, str],
) -> Checkpoint:
    """Save the judge's model as an ordinary checkpoint without optimizer state."""
    first, origin = parents[0], parents[0].state["provenance"]
    named = zip(cfg.models.split("|"), parents, shares, strict=True)
    state = {
        **lineage(first.state),
        "stage": first.state["stage"],
        # Training settings and declared buckets define the validation rows
        **{k: first.state[k] for k in ("settings", "declared") if k in first.state},
        "provenance": {**origin, "inputs": {**origin["inputs"], **inputs}},
        "merge": {
            **settings(cfg.merging),
            "method": "greedy soup" if cfg.greedy else cfg.merging.method,
            "base": inputs.get("merge base"),
            "parents": [
                {"name": name, "fingerprint": parent.fingerprint, "weight": share}
                for name, parent, share in named
            ],
        },
    }
    folder = stage_folder(first.state["stage"]) / cfg.tag
    saved = save_checkpoint(folder, first.step, judge.model, None, judge.tokenizer, state, keep=1)
    for step, path in step_folders(folder).items():
        if step != saved.step:  # an earlier merge
            shutil.rmtree(path)
    return saved


def merge_results(
    scores: Sequence[RowBits],
    merged: RowBits,
    lines: Mapping[str, WeightPath],
    checkpoint: Checkpoint,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Record values and table: merge vs. best parent, mean of parents, interpolation."""
    best = min(scores, key=lambda score: score.value)
    change = merged.against(best)
    # lower bpb is better
    verdict = {"better": "worse", "worse": "better"}.get(change.verdict, change.verdict)
    rows = [
        [parent["name"], f"{parent['weight']:.3f}", f"{score.value:.4f}", ""]
        for parent, score in zip(checkpoint.state["merge"]["parents"], scores, strict=True)
    ]
    rows.append(["merged", "", f"{merged.value:.4f}", f"{change.difference:+.4f}, {verdict}"])
    columns = ["Model", "Weight", "bpb", "Against the best parent"]
    table = {"title": "Parents and merge", "columns": columns, "rows": rows}
    values = {
        "Merged bpb": merged.value,
        "Best parent's bpb": best.value,
        "Mean of the parents' bpb": fmean(score.value for score in scores),
        "Merged minus best": records.estimate(change.difference, change.n, change.se),
        "Verdict": verdict,
        **{f"Rise from {name}": f"{loss_barrier(line):+.4f}" for name, line in lines.items()},
    }
    return values, table


if __name__ == "__main__":
    start(main, MergeScript(), __doc__)
