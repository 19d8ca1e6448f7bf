"""
Judge a recursive model: bits per byte after every loop, against plain models of equal cost.

    python -m scripts.recursion.evaluate                               # the newest checkpoint
    python -m scripts.recursion.evaluate --model_tags=r-0,r-1 --plain_tags=p-0,p-1,q-0,q-1

Reads   base_checkpoints/<tag>/ with their metrics.jsonl, and the text that they name; tags that
        differ in nothing but the seed are one arm
Writes  the section "Recursion"
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanochat import records, report, stats
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model
from nanochat.common import Refused
from nanochat.config import settings, start
from nanochat.dataset import DataConfig, open_source
from nanochat.distributed import Machine, MachineConfig, init_machine
from nanochat.eval_bpb import bits_per_byte, row_batches
from nanochat.gpt import GPT
from nanochat.logger import METRICS_FILE, read_metrics
from nanochat.packing import open_rows
from nanochat.preflight import CPU_TOKENS, KernelConfig, estimate_seconds, set_kernels
from nanochat.recursion import verdict
from nanochat.recursion.metrics import bpb_by_loop, refinement, state_figures
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT
from nanochat.recursion.verdict import Arm, Criterion
from nanochat.tokenizer import Tokenizer
from tasks.builtin import ensure_written

SECTION = "Recursion"
GPU_ROWS = 16  # rows per forward pass on a GPU
SHOWN = ("loss_loop_", "total_loss", "grad_norm_")  # of the metrics of the last steps


@dataclass(frozen=True)
class RecursionEval:
    model_tags: str | None = None
    """Folders under base_checkpoints/ of recursive models, separated by commas: seeds of one
    recipe. Default: the one written last."""
    plain_tags: str | None = None
    """Folders of plain models to compare with. What each is equal in, FLOPs, tokens or parameters,
    is found out."""
    eval_tokens: int | None = None
    """Validation tokens to score. Default: 10,485,760, on a CPU 262,144."""
    device_batch_size: int | None = None
    """Rows per forward pass; never changes the result. Default: what suits the device."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    data: DataConfig = field(default_factory=DataConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)


class Scored(NamedTuple):
    """One checkpoint and what was found."""

    checkpoint: Checkpoint
    model: GPT
    by_loop: dict[int, float]
    """Bits per byte after so many loops; of a plain model after one."""
    states: dict[str, float]
    losses: list[float]
    norms: list[float]
    late: dict[str, float]
    """Losses by loop and gradient norms by part, the means of the last tenth of the steps."""

    @property
    def tag(self) -> str:
        return self.checkpoint.folder.parent.name

    @property
    def tokens(self) -> int:
        return self.checkpoint.step * self.checkpoint.state["identity"]["batch_tokens"]

    @property
    def recipe(self) -> str:
        """What all seeds of an arm have in common."""
        identity = {**self.checkpoint.state["identity"], "seed": None}
        by_clock = "max_wallclock_seconds" in identity
        return json.dumps([identity, None if by_clock else self.checkpoint.step], sort_keys=True)


def main(cfg: RecursionEval) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine)

    def find(tags: str | None) -> list[Checkpoint]:
        return [find_checkpoint("base", tag, None, machine.print0) for tag in names(tags)]

    found = machine.on_node("verifying checkpoints", lambda: find(cfg.model_tags))
    plain = machine.on_node(
        "verifying checkpoints", lambda: find(cfg.plain_tags) if cfg.plain_tags else []
    )
    require_alike([*found, *plain])
    recursive = [score(cfg, checkpoint, machine) for checkpoint in found]
    for s in recursive:
        if not isinstance(s.model, RecursiveGPT):
            raise Refused(f"{s.tag} is not recursive", "name it with --plain_tags")
        if s.recipe != recursive[0].recipe:
            raise Refused(
                f"{s.tag} and {recursive[0].tag} are not seeds of one recipe", "judge them apart"
            )
    others = [score(cfg, checkpoint, machine) for checkpoint in plain]
    for s in others:
        if isinstance(s.model, RecursiveGPT):
            raise Refused(f"{s.tag} is recursive", "name it with --model_tags, alone")
    criteria = judge(recursive, others)
    for criterion in criteria:
        machine.print0(f"{criterion.name}: {criterion.told}")
    if machine.is_main:
        with machine.working("writing the report"):
            write_section(cfg, machine, recursive, others, criteria, started)
    machine.close()


def names(tags: str | None) -> list[str | None]:
    """Tags of a comma-separated list; None, the one written last, where nobody named any."""
    if not tags:
        return [None]
    found = [tag.strip() for tag in tags.split(",")]
    if "" in found or len(set(found)) < len(found):
        raise ValueError(f"tags must be named once each, got {tags!r}")
    return list(found)


def require_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises Refused where a comparison would be one of different text or tokens, or unequal."""
    for checkpoint in checkpoints:
        if "flops" not in checkpoint.state["progress"]:
            raise Refused(
                f"{checkpoint.folder} does not say how many FLOPs it took", "train it anew"
            )
    first = checkpoints[0]
    for other in checkpoints[1:]:
        ours, theirs = (c.state["provenance"]["inputs"] for c in (first, other))
        for what in ("data", "tokenizer", "rows"):
            if ours[what] != theirs[what]:
                raise Refused(
                    f"{other.folder} and {first.folder} were trained on different {what}",
                    "compare what read the same",
                )


def score(cfg: RecursionEval, checkpoint: Checkpoint, machine: Machine) -> Scored:
    """Bits per byte of a checkpoint, of a recursive one after every number of loops."""
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = load_model(checkpoint, machine)
    T, on_cpu = model.cfg.max_seq_len, machine.device.type == "cpu"
    source = open_source(cfg.data, checkpoint.state["source"], ensure_written)
    rows = open_rows(source, tokenizer, T, verifies=machine.local_rank == 0)
    size = cfg.device_batch_size or (max(1, CPU_TOKENS // T) if on_cpu else GPU_ROWS)
    tokens = cfg.eval_tokens or (262_144 if on_cpu else 20 * 524_288)
    set_kernels(cfg.kernels, model, machine, estimate_seconds(model, 2 * tokens, machine) / 3)

    def batches():
        mine = rows.val_batches(size, max(1, tokens // T), machine.rank, machine.world_size)
        return row_batches(mine, size)

    states: dict[str, float] = {}
    if isinstance(model, RecursiveGPT):
        loops = range(1, 2 * model.cfg.n_loops + 1)
        token_bytes = tokenizer.token_bytes()
        bpb = bpb_by_loop(model, loops, batches(), token_bytes, machine)
        by_loop = {k: one.value for k, one in zip(loops, bpb, strict=True)}
        states = state_figures(model, batches())
    else:
        by_loop = {1: bits_per_byte(model, batches(), tokenizer.token_bytes(), machine).value}
    steps = [
        line for line in read_metrics(checkpoint.folder.parent / METRICS_FILE) if "loss" in line
    ]
    late = steps[-max(1, len(steps) // 10) :]
    shown = {name: None for step in late for name in step if name.startswith(SHOWN)}
    scored = Scored(
        checkpoint,
        model,
        by_loop,
        states,
        [step["loss"] for step in steps],
        [step["grad_norm"] for step in steps],
        {name: statistics.mean(s[name] for s in late if name in s) for name in shown},
    )
    told = ", ".join(f"{value:.4f}" for value in by_loop.values())
    machine.print0(f"{scored.tag}: bpb {told}")
    return scored


def judge(recursive: Sequence[Scored], plain: Sequence[Scored]) -> list[Criterion]:
    """What the runs should satisfy, and whether they do."""
    arm, others = arm_of(recursive), arms_of(plain)
    trained = range(1, config_of(recursive[0]).n_loops + 1)
    by_loop = [[s.by_loop[k] for s in recursive] for k in trained]
    norms = [norm for s in recursive for norm in s.norms if math.isfinite(norm)]
    bad = sum(s.checkpoint.state["progress"]["health"]["bad_steps"] for s in recursive)
    return [
        verdict.healthy(norms, bad),
        verdict.falling([s.losses for s in recursive]),
        verdict.ordered(by_loop),
        verdict.not_held_back(
            arm, by_loop[0], others, config_of(recursive[0]).sampled_chance(1) > 0
        ),
        verdict.pays(arm, others),
    ]


def config_of(scored: Scored) -> RecursiveConfig:
    """The shape of a recursive model."""
    cfg = scored.model.cfg
    assert isinstance(cfg, RecursiveConfig)
    return cfg


def arm_of(seeds: Sequence[Scored]) -> Arm:
    """Seeds of one recipe, with what a run of it cost."""
    first = seeds[0]
    cfg, model = first.model.cfg, first.model
    last = config_of(first).n_loops if isinstance(model, RecursiveGPT) else 1
    visits = len(cfg.order)
    shape = f"{cfg.n_layer} layers" + (f" in {visits} visits" if visits > cfg.n_layer else "")
    if len({s.checkpoint.state["identity"]["seed"] for s in seeds}) < len(seeds):
        raise Refused(
            f"{', '.join(s.tag for s in seeds)} are one recipe, but not of different seeds",
            "name one of each seed",
        )
    tokens = statistics.mean(s.tokens for s in seeds)
    return Arm(
        f"{shape}, width {cfg.d_model}, {tokens:,.0f} tokens",
        [s.by_loop[last] for s in seeds],
        cfg.n_layer,
        cfg.d_model,
        visits,
        model.num_params(),
        model.num_used_params(),
        tokens,
        statistics.mean(s.checkpoint.state["progress"]["flops"] for s in seeds),
    )


def arms_of(plain: Sequence[Scored]) -> list[Arm]:
    """The plain arms in the order in which they were named."""
    groups: dict[str, list[Scored]] = {}
    for scored in plain:
        groups.setdefault(scored.recipe, []).append(scored)
    return [arm_of(seeds) for seeds in groups.values()]


def show(values: Sequence[float]) -> str:
    """Mean and standard error in a cell."""
    found = stats.mean(values)
    return f"{found.value:.4f}" + ("" if math.isnan(found.se) else f" +- {found.se:.4f}")


def write_section(
    cfg: RecursionEval,
    machine: Machine,
    recursive: Sequence[Scored],
    plain: Sequence[Scored],
    criteria: Sequence[Criterion],
    started: float,
) -> None:
    """The record and the report."""
    arm, others, shape = arm_of(recursive), arms_of(plain), config_of(recursive[0])
    r = shape.n_loops
    trained = [statistics.mean(s.by_loop[k] for s in recursive) for k in range(1, r + 1)]
    values: dict[str, Any] = {
        "Final bpb": records.over_seeds(arm.bpb),
        **({"Spread over seeds (std)": arm.sd} if arm.sd is not None else {}),
        **{criterion.name: criterion.told for criterion in reversed(criteria)},
        "Seeds": len(recursive),
        "Layers": f"{shape.n_prelude} + {r} x {shape.n_core} + {shape.n_coda}",
        "Supervised": f"{shape.supervise}, base {shape.supervision_base:g}, bonus "
        f"{shape.improvement_bonus:g}",
        "Number of parameters": arm.params,
        "Parameters by use": arm.used_params,
        "Number of training tokens": arm.tokens,
        "Total training flops": f"{arm.flops:e}",
        "Refinement % (a bad first loop makes it large)": refinement(trained),
        **{f"Last steps, {name}": value for name, value in late_figures(recursive).items()},
        "Runs": ", ".join(f"{s.tag} ({run_id(s)})" for s in (*recursive, *plain)),
    }
    loops = [
        [
            f"{k}" + (" (trained)" if k == r else ""),
            show([s.by_loop[k] for s in recursive]),
            *(mean_state(recursive, name, k) for name in ("state_rms", "state_cosine")),
        ]
        for k in recursive[0].by_loop
    ]
    rows = [
        [
            a.name,
            f"{a.params:,}",
            f"{a.used_params:,}",
            f"{a.flops:.3e}",
            show(a.bpb),
            "" if a is arm else verdict.apart(a, arm),
        ]
        for a in (arm, *others)
    ]
    columns = ["Arm", "Parameters", "By use", "FLOPs", "bpb", "Minus recursive"]
    by_loop = ["Loops", "bpb", "State RMS", "Cosine to the loop before"]
    first, last = min(recursive[0].by_loop), max(recursive[0].by_loop)
    curve = [[k, statistics.mean(s.by_loop[k] for s in recursive)] for k in recursive[0].by_loop]
    origin = recursive[0].checkpoint.state["provenance"]
    records.write_record(
        SECTION,
        settings(cfg),
        values,
        records.Provenance(origin["run_id"], origin["seed"], origin["inputs"]),
        records.Cost.since(started, machine),
        cfg.report_dir,
        tables=[
            {"title": "Equal cost", "columns": columns, "rows": rows},
            {"title": "By number of loops", "columns": by_loop, "rows": loops},
        ],
        series={
            "recursive, by loops": curve,
            **{f"{i}: {a.name}": [[first, a.mean], [last, a.mean]] for i, a in enumerate(others)},
        },
    )
    report.update(cfg.report_dir)


def late_figures(recursive: Sequence[Scored]) -> dict[str, float]:
    """Means over the seeds; a loop that is drawn by chance may be missing in some."""
    names = {name: None for s in recursive for name in s.late}
    return {
        name: statistics.mean(s.late[name] for s in recursive if name in s.late) for name in names
    }


def run_id(scored: Scored) -> str:
    """The run that a checkpoint belongs to."""
    return scored.checkpoint.state["provenance"]["run_id"]


def mean_state(recursive: Sequence[Scored], name: str, loop: int) -> str:
    """A figure of the state after a loop, the mean of the seeds; nothing beyond those trained."""
    found = [s.states[f"{name}_{loop}"] for s in recursive if f"{name}_{loop}" in s.states]
    return f"{statistics.mean(found):.3f}" if found else "-"


if __name__ == "__main__":
    start(main, RecursionEval(), __doc__)
