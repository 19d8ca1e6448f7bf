"""
Evaluate a recursive model: bits per byte after each loop, compared with plain models.

    python -m scripts.recursion.evaluate                               # the newest checkpoint
    python -m scripts.recursion.evaluate --model_tags r-0 r-1 --plain_tags p-0 p-1 q-0 q-1

Reads   base_checkpoints/<tag>/ with metrics.jsonl, and the validation text; tags that differ
        only by seed are one arm
Writes  the section "Recursion"
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from nanochat import records, report
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model
from nanochat.common import UsageError
from nanochat.config import require_at_least, start
from nanochat.dist import DistConfig, DistContext, init_dist
from nanochat.eval_bpb import bits_per_byte, row_batches
from nanochat.lab.canaries import open_pretraining_rows
from nanochat.lab.significance import over_seeds
from nanochat.records import METRICS_FILE, read_metrics
from nanochat.recursion import verdict
from nanochat.recursion.model import RecursiveGPT
from nanochat.recursion.verdict import Criterion, LoopArm, state_metrics
from nanochat.train import Compile, prepare_scoring

SECTION = "Recursion"
GPU_ROWS = 16  # rows per forward pass on a GPU


@dataclass(frozen=True)
class RecursionEval:
    model_tags: tuple[str, ...] | None = None
    """Folders under base_checkpoints/ of recursive models that are seeds of one recipe. Default:
    the newest."""
    plain_tags: tuple[str, ...] = ()
    """Folders of plain models to compare at equal cost: FLOPs, tokens or parameters."""
    eval_tokens: int | None = None
    """Validation tokens to score. Default: 10,485,760; 262,144 on a CPU."""
    dist: DistConfig = field(default_factory=DistConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)


class LoopScores(NamedTuple):
    """One checkpoint and its metrics."""

    checkpoint: Checkpoint
    model: Any
    by_loop: dict[int, float]
    """Bits per byte after N loops; a plain model has one entry."""
    states: dict[str, float]
    steps: list[dict[str, float]]
    """Logged metrics of each training step."""

    @property
    def tag(self) -> str:
        return self.checkpoint.folder.parent.name


def main(cfg: RecursionEval) -> None:
    dist = init_dist(cfg.dist)
    dist.on_main(records.require_writable)
    tags = (cfg.model_tags or (None,), cfg.plain_tags)
    recursive, plain = dist.on_main(
        lambda: [[find_checkpoint("base", tag) for tag in group] for group in tags]
    )
    require_comparable([*recursive, *plain])
    require_one_recipe(recursive, plain)
    require_other_seeds([*recursive, *plain])
    recursive = [score_loops(cfg, checkpoint, dist) for checkpoint in recursive]
    plain = [score_loops(cfg, checkpoint, dist) for checkpoint in plain]
    arms = [arm_of(recursive), *arms_of(plain)]
    criteria = find_criteria(recursive, arms)
    for criterion in criteria:
        dist.print0(f"{criterion.name}: {criterion.summary}")
    if dist.is_main:
        write_record(cfg, dist, recursive, arms, criteria)
    dist.close()


def require_comparable(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UsageError if a checkpoint is imported, or if data, tokenizer or rows differ."""
    for checkpoint in checkpoints:
        if "progress" not in checkpoint.state:
            raise UsageError(f"{checkpoint.folder} was not trained here", "evaluate a trained run")
    inputs = [checkpoint.state["provenance"]["inputs"] for checkpoint in checkpoints]
    for checkpoint, theirs in zip(checkpoints, inputs, strict=True):
        for name in ("data", "tokenizer", "rows"):
            if theirs[name] != inputs[0][name]:
                raise UsageError(
                    f"{checkpoint.folder} and {checkpoints[0].folder} were trained on different "
                    f"{name}",
                    f"only compare runs with the same {name}",
                )


def require_one_recipe(recursive: Sequence[Checkpoint], plain: Sequence[Checkpoint]) -> None:
    """Raise UsageError for a model of the wrong kind, or recursive models of several recipes."""
    first = recursive[0]
    for each in recursive:
        if "n_loops" not in each.state["model"]:
            raise UsageError(f"{each.folder} is not recursive", "pass it with --plain_tags")
        if recipe_of(each) != recipe_of(first):
            raise UsageError(
                f"{each.folder} and {first.folder} are not seeds of one recipe",
                "evaluate them separately",
            )
    for each in plain:
        if "n_loops" in each.state["model"]:
            raise UsageError(f"{each.folder} is recursive", "evaluate it alone, with --model_tags")


def require_other_seeds(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise UsageError if two checkpoints have the same recipe and seed."""
    seen: dict[tuple[str, int], str] = {}
    for each in checkpoints:
        key, tag = (recipe_of(each), each.state["provenance"]["seed"]), each.folder.parent.name
        if key in seen:
            problem = f"{seen[key]} and {tag} have the same recipe and seed"
            raise UsageError(problem, "pass one tag per seed")
        seen[key] = tag


def recipe_of(checkpoint: Checkpoint) -> str:
    """Key shared by all seeds of an arm."""
    recipe = checkpoint.state["recipe"]
    return json.dumps([{**recipe["flags"], "seed": None}, recipe["inputs"], checkpoint.step])


def score_loops(cfg: RecursionEval, checkpoint: Checkpoint, dist: DistContext) -> LoopScores:
    """Score a checkpoint; a recursive one after each loop, up to twice n_loops."""
    tokenizer = checkpoint.tokenizer()
    model = load_model(checkpoint, dist)
    T, on_cpu = model.cfg.max_seq_len, dist.device.type == "cpu"
    rows = open_pretraining_rows(checkpoint, dist)
    tokens = cfg.eval_tokens or (262_144 if on_cpu else 20 * 524_288)
    size = prepare_scoring(cfg.compile, model, 2 * tokens, GPU_ROWS, dist)
    token_bytes, states = tokenizer.token_bytes(), {}

    def batches():
        mine = rows.val_batches(size, max(1, tokens // T), dist.rank, dist.world_size)
        return row_batches(mine, size)

    scores: list[Any] = [model.token_losses]
    if isinstance(model, RecursiveGPT):
        scores = [partial(model.losses_after, k) for k in range(1, 2 * model.cfg.n_loops + 1)]
        states = state_metrics(model, batches())
    by_loop = {
        k: bits_per_byte(score, batches(), token_bytes, dist).value
        for k, score in enumerate(scores, start=1)
    }
    metrics = read_metrics(checkpoint.folder.parent / METRICS_FILE)
    steps = [line for line in metrics if "loss" in line]
    scored = LoopScores(checkpoint, model, by_loop, states, steps)
    values = ", ".join(f"{value:.4f}" for value in by_loop.values())
    dist.print0(f"{scored.tag}: bpb {values}")
    return scored


def find_criteria(recursive: Sequence[LoopScores], arms: Sequence[LoopArm]) -> list[Criterion]:
    """Evaluate all criteria; the first arm is the recursive one."""
    (arm, *others), cfg = arms, recursive[0].model.cfg
    by_loop = [[s.by_loop[k] for s in recursive] for k in range(1, cfg.n_loops + 1)]
    norms = [step["grad_norm"] for s in recursive for step in s.steps]
    bad = sum(s.checkpoint.state["progress"]["bad_steps"] for s in recursive)
    return [
        verdict.check_gradients_finite(list(filter(math.isfinite, norms)), bad),
        verdict.check_loss_falling([[step["loss"] for step in s.steps] for s in recursive]),
        verdict.check_loop_order(by_loop),
        verdict.check_first_loop(arm, by_loop[0], others, cfg.sampled_chance(1) > 0),
        verdict.check_equal_flops(arm, others),
    ]


def arm_of(seeds: Sequence[LoopScores]) -> LoopArm:
    """Return the arm of the given seeds, with the mean cost of a run."""
    model, states = seeds[0].model, [s.checkpoint.state for s in seeds]
    cfg, passes = model.cfg, getattr(model.cfg, "n_passes", model.cfg.n_layer)
    shape = f"{cfg.n_layer} layers" + (f" ({passes} with repeats)" if passes > cfg.n_layer else "")
    tokens = mean(s.checkpoint.step * s.checkpoint.state["batch_tokens"] for s in seeds)
    return LoopArm(
        f"{shape}, width {cfg.d_model}, {tokens:,.0f} tokens",
        [s.by_loop[getattr(cfg, "n_loops", 1)] for s in seeds],
        cfg.n_layer,
        cfg.d_model,
        model.num_params(),
        tokens,
        mean(state["progress"]["flops"] for state in states),
    )


def arms_of(plain: Sequence[LoopScores]) -> list[LoopArm]:
    """Group plain runs into arms, in the order given."""
    groups: dict[str, list[LoopScores]] = {}
    for scored in plain:
        groups.setdefault(recipe_of(scored.checkpoint), []).append(scored)
    return [arm_of(seeds) for seeds in groups.values()]


def write_record(
    cfg: RecursionEval,
    dist: DistContext,
    recursive: Sequence[LoopScores],
    arms: Sequence[LoopArm],
    criteria: Sequence[Criterion],
) -> None:
    """Print the tables, write the record and update the report."""
    arm, shape = arms[0], recursive[0].model.cfg
    loops, r = list(recursive[0].by_loop), shape.n_loops
    means = [mean(s.by_loop[k] for s in recursive) for k in loops]
    states = {k: mean(s.states[k] for s in recursive) for k in recursive[0].states}
    values: dict[str, Any] = {
        "Final bpb": over_seeds(arm.bpb),
        **{criterion.name: criterion.summary for criterion in reversed(criteria)},
        "Layers": f"{shape.n_prelude} + {r} x {shape.n_core} + {shape.n_coda}",
        "Refinement % (a bad first loop makes it large)": 100 * (1 - means[r - 1] / means[0]),
    }
    arm_rows = []
    for a in arms:
        cost = f"{a.params:,}", f"{a.flops:.3e}"
        gap = "" if a is arm else verdict.show_gap(a, arm)
        arm_rows.append([a.name, *cost, over_seeds(a.bpb), gap])
    loop_rows = []
    for k in loops:
        found = [states.get(f"{name}_{k}") for name in ("state_rms", "state_cosine")]
        cells = ("-" if value is None else f"{value:.3f}" for value in found)
        trained = " (trained)" if k == r else ""
        loop_rows.append([f"{k}{trained}", over_seeds([s.by_loop[k] for s in recursive]), *cells])
    columns = ["Arm", "Parameters", "FLOPs", "bpb", "Minus recursive"]
    by_loop = ["Loops", "bpb", "State RMS", "Cosine to the previous loop"]
    inputs = recursive[0].checkpoint.state["provenance"]["inputs"]
    tables = [
        {"title": "Equal cost", "columns": columns, "rows": arm_rows},
        {"title": "By number of loops", "columns": by_loop, "rows": loop_rows},
    ]
    cost = records.Cost.so_far(dist)
    report.append_section(SECTION, cfg, values, inputs, cost, tables=tables)


if __name__ == "__main__":
    start(main, RecursionEval(), __doc__)
