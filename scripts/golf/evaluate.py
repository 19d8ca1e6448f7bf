"""
Score artifacts from their files alone: bits per byte of validation documents, plain and sliding.

    python -m scripts.golf.evaluate                                     # all of export/*.golf
    python -m scripts.golf.evaluate --artifacts=a.golf,b.golf --dataset=embedded --eval_stride=64

Reads   artifacts (scripts.export --format=artifact) and validation text; where the checkpoint that
        an artifact was made of is still there, its own weights are scored too
Writes  the section "Parameter golf"; several artifacts are seeds of one recipe: mean and spread
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nanochat import records, report
from nanochat.checkpoint import Checkpoint, find_checkpoint
from nanochat.common import MissingInput, base_dir, sha256_file
from nanochat.config import settings, start
from nanochat.dataset import DataConfig, open_source
from nanochat.distributed import Machine, MachineConfig, init_machine
from nanochat.eval_bpb import Bpb, document_bpb
from nanochat.golf.artifact import Artifact, read_artifact
from nanochat.golf.size import code_bytes
from nanochat.preflight import CPU_TOKENS, KernelConfig, estimate_seconds, set_kernels
from tasks.builtin import ensure_written

SECTION = "Parameter golf"
GPU_SEQS = 64  # windows per forward pass on a GPU
CHARS_PER_TOKEN = 3  # roughly, to estimate the time it will take


@dataclass(frozen=True)
class GolfEval:
    artifacts: str | None = None
    """Files to score, separated by commas: the seeds of one recipe. Default: all export/*.golf."""
    eval_stride: int | None = None
    """Tokens scored per window of the sliding evaluation, which sees at least a row's length less
    that many before each; 0 = no sliding evaluation. Default: a quarter of a row."""
    eval_batch_seqs: int | None = None
    """Windows per forward pass; never changes the result. Default: what suits the device."""
    max_documents: int | None = None
    """Validation documents to score, counted from the first. Default: all."""
    limit_bytes: int = 16_000_000
    """What the artifact was made for."""
    count_code: bool = True
    """Whether the code that scores it counts towards the limit."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"--max_documents is at least 1, got {self.max_documents}")


class Scored(NamedTuple):
    """What one artifact is worth."""

    path: Path
    artifact: Artifact
    parent: Checkpoint | None
    """The checkpoint it was made of, where it is still there."""
    before: Bpb | None
    """Of that checkpoint's weights."""
    plain: Bpb
    sliding: Bpb | None

    @property
    def bytes(self) -> int:
        """Of the file."""
        return self.path.stat().st_size


def main(cfg: GolfEval) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine)
    scored = [score(cfg, path, machine) for path in files(cfg)]
    require_alike(scored)
    if machine.is_main:
        with machine.working("writing the report"):
            write_section(cfg, machine, scored, started)
    machine.close()


def files(cfg: GolfEval) -> list[Path]:
    """The artifacts. Raises MissingInput where there is none."""
    if cfg.artifacts:
        return [Path(name.strip()).expanduser() for name in cfg.artifacts.split(",")]
    found = sorted((base_dir() / "export").glob("*.golf"))
    if not found:
        raise MissingInput(
            f"there is no artifact in {base_dir() / 'export'}",
            "python -m scripts.export --source=base --format=artifact",
        )
    return found


def score(cfg: GolfEval, path: Path, machine: Machine) -> Scored:
    """Read a file and score what is in it; then, in the same model, the weights it was made of."""
    artifact = read_artifact(path)
    model = artifact.build(machine)
    parent = parent_of(artifact, machine)
    recorded = (parent.state["source"] or None) if parent else None
    source = open_source(cfg.data, recorded, ensure_written)
    texts = list(source.texts(source.val_shard, cfg.max_documents))
    T = model.cfg.max_seq_len
    stride = max(1, T // 4) if cfg.eval_stride is None else cfg.eval_stride
    windows = cfg.eval_batch_seqs or default_seqs(T, machine)
    passes = 1 + (T / stride if stride else 0) + (parent is not None)
    tokens = sum(map(len, texts)) / CHARS_PER_TOKEN * passes
    set_kernels(cfg.kernels, model, machine, estimate_seconds(model, int(tokens), machine) / 3)

    def bpb(stride: int) -> Bpb:
        return document_bpb(model, texts, artifact.tokenizer, T, stride, windows, machine)

    plain = bpb(T)
    told = f"{path}: roundtrip {plain.value:.5f} bpb on {plain.bytes:,} bytes"
    sliding = before = None
    if stride:
        sliding = bpb(stride)
        told += f", sliding {sliding.value:.5f} (stride {stride})"
    if parent:
        model.load_state_dict(parent.model_tensors())
        before = bpb(T)
        told += f", before {before.value:.5f}, gap {plain.value - before.value:+.5f}"
    machine.print0(told)
    return Scored(path, artifact, parent, before, plain, sliding)


def require_alike(scored: list[Scored]) -> None:
    """Raises ValueError where a mean would be one of different things."""
    first = scored[0]
    for s in scored[1:]:
        if (s.plain.bytes, s.artifact.cfg) != (first.plain.bytes, first.artifact.cfg):
            raise ValueError(
                f"{s.path} and {first.path} are not seeds of one recipe: other text or another "
                "shape. Score them one by one, with --artifacts"
            )


def default_seqs(T: int, machine: Machine) -> int:
    """Windows per forward pass where nobody says."""
    return max(1, CPU_TOKENS // T) if machine.device.type == "cpu" else GPU_SEQS


def parent_of(artifact: Artifact, machine: Machine) -> Checkpoint | None:
    """The checkpoint an artifact was made of; None where it is not here, or no longer that one."""
    origin = artifact.origin
    try:
        found = machine.on_node(
            "verifying the checkpoint",
            lambda: find_checkpoint(origin["stage"], origin["tag"], origin["step"], machine.print0),
        )
    except (MissingInput, FileNotFoundError, ValueError):
        return None
    return found if found.fingerprint == origin["checkpoint"] else None


def write_section(cfg: GolfEval, machine: Machine, scored: list[Scored], started: float) -> None:
    """The record and the report."""
    plain = [s.plain.value for s in scored]
    sliding = [s.sliding.value for s in scored if s.sliding]
    before = [s.before.value for s in scored if s.before]
    code, largest = sum(code_bytes().values()), max(s.bytes for s in scored)
    total = largest + (code if cfg.count_code else 0)
    values: dict[str, Any] = {"Seeds": len(scored)}
    if len(before) == len(scored):
        gaps = [after - was for after, was in zip(plain, before, strict=True)]
        values["Pre-quantisation bpb"] = records.over_seeds(before)
    values["Roundtrip bpb"] = records.over_seeds(plain)
    if sliding:
        values["Roundtrip sliding bpb"] = records.over_seeds(sliding)
        values["Sliding gain bpb"] = records.over_seeds(
            [s - p for s, p in zip(sliding, plain, strict=True)]
        )
    if len(before) == len(scored):
        values["Quantisation gap bpb"] = records.over_seeds(gaps)
    if len(scored) > 1:
        values["Spread over seeds (std)"] = statistics.stdev(plain)
    values |= {
        "Parameters": sum(w.numel() for w in scored[0].artifact.weights.values()),
        "Model bytes": largest,
        "Code bytes": code,
        "Total bytes": total,
        "Limit": cfg.limit_bytes,
        "Within the limit": total <= cfg.limit_bytes,
        "Bytes scored": scored[0].plain.bytes,
        "Tokens scored": scored[0].plain.tokens,
    }
    for s in scored:
        values[f"{s.path.stem}"] = line(s)
    origin = scored[0].artifact.origin
    inputs = {s.path.name: sha256_file(s.path)[:16] for s in scored}
    records.write_record(
        SECTION,
        settings(cfg),
        values,
        records.Provenance(origin["run_id"], origin["seed"], inputs),
        records.Cost.since(started, machine),
        cfg.report_dir,
    )
    report.update(cfg.report_dir)


def line(s: Scored) -> str:
    """One artifact in a line of the section."""
    parts = [f"seed {s.artifact.origin['seed']}"]
    seconds = s.parent.state.get("progress", {}).get("clock_seconds") if s.parent else None
    if s.parent and seconds:
        parts.append(f"{s.parent.step} steps in {seconds:.0f} s")
    if s.before:
        parts.append(f"before {s.before.value:.4f}")
    parts.append(f"roundtrip {s.plain.value:.4f}")
    if s.sliding:
        parts.append(f"sliding {s.sliding.value:.4f}")
    return ", ".join([*parts, f"{s.bytes:,} bytes"])


if __name__ == "__main__":
    start(main, GolfEval(), __doc__)
