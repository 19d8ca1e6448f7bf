"""
Evaluate artifacts from their files alone: validation bits per byte, plain and sliding-window.

    python -m scripts.golf.evaluate                                     # all export/*.golf
    python -m scripts.golf.evaluate --artifacts a.golf b.golf --dataset=embedded --eval_stride=64

Reads   artifacts (scripts.export --format=artifact) and validation text; if an artifact's
        source checkpoint still exists, its unquantized weights are evaluated too
Writes  the section "Parameter golf": mean and spread of the artifacts (seeds of one recipe)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanochat import records, report
from nanochat.checkpoint import Checkpoint, find_checkpoint
from nanochat.common import MissingInput, UsageError, base_dir, sha256_file
from nanochat.config import start
from nanochat.dataset import DataConfig
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.eval_bpb import Bpb, document_bpb
from nanochat.golf.artifact import Artifact, read_artifact
from nanochat.golf.size import code_bytes
from nanochat.lab.significance import over_seeds
from nanochat.train import Compile, prepare_scoring
from tasks.world.write import open_text

SECTION = "Parameter golf"
CHARS_PER_TOKEN = 3  # rough, to estimate the work
GPU_SEQS = 64  # windows per forward pass on a GPU
ONE_AT_A_TIME = "evaluate them one at a time with --artifacts"


@dataclass(frozen=True)
class GolfEval:
    artifacts: tuple[Path, ...] | None = None
    """Artifact files of one recipe, one per seed. Default: all export/*.golf."""
    eval_stride: int | None = None
    """Stride of the sliding-window evaluation in tokens; smaller = more context, slower; 0 = off.
    Default: a quarter of max_seq_len."""
    max_documents: int | None = None
    """Score only the first N validation documents. Default: all."""
    limit_bytes: int = 16_000_000
    """Size limit in bytes of file and code, to check against."""
    data: DataConfig = field(default_factory=DataConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""


class ScoredArtifact(NamedTuple):
    """One artifact and its scores."""

    path: Path
    artifact: Artifact
    baseline: Bpb | None
    """Score of the source checkpoint, if it still exists."""
    plain: Bpb
    sliding: Bpb | None


def main(cfg: GolfEval) -> None:
    dist = init_dist(cfg.dist)
    dist.on_main(records.require_writable)
    paths = cfg.artifacts or sorted((base_dir() / "export").glob("*.golf"))
    if not paths:
        raise MissingInput(
            f"no artifact found in {base_dir() / 'export'}",
            "python -m scripts.export --source=base --format=artifact",
        )
    if len({path.name for path in paths}) < len(paths):  # values and inputs are named by it
        raise ValueError("artifacts are listed by file name, but two have the same; rename one")
    artifacts = {path: read_artifact(path) for path in (each.expanduser() for each in paths)}
    require_one_recipe(artifacts)
    scored = [score_artifact(cfg, path, each, dist) for path, each in artifacts.items()]
    if len({s.plain.bytes for s in scored}) > 1:
        raise UsageError("the artifacts were scored on different text", ONE_AT_A_TIME)
    dist.on_main(lambda: write_scores(cfg, dist, scored))
    dist.close()


def score_artifact(
    cfg: GolfEval, path: Path, artifact: Artifact, dist: DistContext
) -> ScoredArtifact:
    """Score an artifact, then load its source checkpoint into the same model and score it."""
    model = artifact.build(dist)
    parent = find_source_checkpoint(artifact, dist)
    recorded = parent.state["source"] if parent else None
    texts = list(open_text(cfg.data, recorded).val_texts(cfg.max_documents))
    T = model.cfg.max_seq_len
    stride = max(1, T // 4) if cfg.eval_stride is None else cfg.eval_stride
    passes = 2 + (T / stride if stride else 0)
    tokens = sum(map(len, texts)) / CHARS_PER_TOKEN * passes
    windows = prepare_scoring(cfg.compile, model, int(tokens), GPU_SEQS, dist)

    def bpb(stride: int) -> Bpb:
        return document_bpb(model, texts, artifact.tokenizer, stride, windows, dist)

    plain, sliding, baseline = bpb(T), bpb(stride) if stride else None, None
    if parent:
        model.load_state_dict(parent.model_tensors())
        baseline = bpb(T)
    scored = ScoredArtifact(path, artifact, baseline, plain, sliding)
    dist.print0(f"{path}: {format_scores(scored)}")
    return scored


def require_one_recipe(artifacts: Mapping[Path, Artifact]) -> None:
    """Raise UsageError if artifacts differ in shape or formats, or are of the same seed."""
    by_seed: dict[int, Path] = {}
    (first, one), *_ = artifacts.items()
    for path, each in artifacts.items():
        if (each.cfg, each.formats) != (one.cfg, one.formats):
            why = f"{path} and {first} are not seeds of one recipe (other model shape or formats)"
            raise UsageError(why, ONE_AT_A_TIME)
        other = by_seed.setdefault(seed := each.origin["seed"], path)
        if other != path:
            why = f"{path} and {other} have the same seed, {seed}"
            raise UsageError(why, "list only one of them in --artifacts")


def find_source_checkpoint(artifact: Artifact, dist: DistContext) -> Checkpoint | None:
    """Return the source checkpoint of an artifact; None if it is missing or has changed."""
    origin = artifact.origin
    place = origin["stage"], origin["tag"], origin["step"]
    try:
        found = dist.on_main(lambda: find_checkpoint(*place))
    except (FileNotFoundError, ValueError):
        return None
    return found if found.fingerprint == origin["checkpoint"] else None


def write_scores(cfg: GolfEval, dist: DistContext, scored: list[ScoredArtifact]) -> None:
    """Write the record and update the report."""
    plain = np.array([s.plain.value for s in scored])
    sliding = np.array([s.sliding.value for s in scored if s.sliding])
    before = np.array([s.baseline.value for s in scored if s.baseline])
    figures = {"Roundtrip bpb": plain}
    if len(sliding):
        figures |= {"Roundtrip sliding bpb": sliding, "Sliding gain bpb": sliding - plain}
    if len(before) == len(scored):
        figures |= {"Pre-quantization bpb": before, "Quantization gap bpb": plain - before}
    code, largest = sum(code_bytes().values()), max(s.path.stat().st_size for s in scored)
    total = largest + code
    values: dict[str, Any] = {
        **{name: over_seeds(found.tolist()) for name, found in figures.items()},
        "Parameters": sum(w.numel() for w in scored[0].artifact.weights.values()),
        "Model bytes": largest,
        "Code bytes": code,
        "Total bytes": total,
        "Limit": cfg.limit_bytes,
        "Within the limit": total <= cfg.limit_bytes,
        "Bytes scored": scored[0].plain.bytes,
        **{s.path.stem: format_scores(s) for s in scored},
    }
    inputs = {s.path.name: sha256_file(s.path)[:16] for s in scored}
    report.append_section(SECTION, cfg, values, inputs, records.Cost.so_far(dist))


def format_scores(s: ScoredArtifact) -> str:
    """Return a one-line summary of an artifact."""
    origin = s.artifact.origin
    parts = [f"seed {origin['seed']}, {origin['step']} steps"]
    scores = {"before": s.baseline, "roundtrip": s.plain, "sliding": s.sliding}
    parts += [f"{name} {bpb.value:.4f}" for name, bpb in scores.items() if bpb]
    return ", ".join([*parts, f"{s.path.stat().st_size:,} bytes"])


if __name__ == "__main__":
    start(main, GolfEval(), __doc__)
