"""
Measure how much scores vary when the same weights answer the same questions again.

    python -m scripts.lab.eval_variance                                  # newest SFT and RL models
    python -m scripts.lab.eval_variance --checkpoints="sft:d4|rl:d4:50" --runs=5 --max_problems=200

Reads   checkpoints, as stage[:tag[:step]], and the evaluation splits of the tasks
Writes  eval_variance.json under the base directory, which gives scripts.chat_eval its default
        repeats, and the section "Evaluation variance". Tasks that are scored by the logits of
        letters are left out: they are not sampled
"""

import time
from dataclasses import dataclass, field

from nanochat import records, report
from nanochat.checkpoint import Checkpoint, load_model, parse_checkpoint_ref
from nanochat.config import settings, start
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import left_out, score_by_generation
from nanochat.gpt import for_inference
from nanochat.lab import variance
from nanochat.lab.held_out import admitted, require_access
from nanochat.preflight import choose_fused_engine
from nanochat.tokenizer import Tokenizer
from nanochat.tools import Tools
from scripts.chat_eval import default_tasks
from tasks.base import Task
from tasks.registry import exam, why_unavailable

SECTION = "Evaluation variance"


@dataclass(frozen=True)
class EvalVariance:
    checkpoints: str = "sft|rl"
    """Models, as stage[:tag[:step]] with | between them."""
    task_name: str | None = None
    """Tasks by name, with | between them. Default: those of the model's data set that generate."""
    final: bool = False
    """Also score benchmarks that scripts.lab.hold_out declared final, and log the access; without
    it, they are rejected by name and otherwise left out."""
    runs: int = 3
    """Answers to each question."""
    temperature: float = 1.0
    """Sampling temperature; at 0 nothing would vary."""
    top_k: int | None = 50
    """Sample from the k most likely tokens. Default: all."""
    top_p: float = 1.0
    """Only among the likeliest tokens that together reach this probability."""
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    max_problems: int | None = None
    """Questions of each task, counted from the first. Default: all."""
    slots: int = 64
    """Answers written at a time; changes no result."""
    seed: int = 0
    python: bool = False
    """Run python that the model calls, in the sandbox; without it, it only has a calculator."""
    unsafe_exec: bool = False
    """Run what the model wrote with all your rights where this machine has no sandbox."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: DistConfig = field(default_factory=DistConfig)

    def __post_init__(self) -> None:
        if self.runs < 2 or self.temperature <= 0:
            raise ValueError(
                f"runs {self.runs} must be at least 2 and temperature {self.temperature} above 0: "
                "otherwise nothing varies"
            )


def main(cfg: EvalVariance) -> None:
    started = time.perf_counter()
    machine = init_distributed(cfg.machine, cfg.seed)
    names = cfg.checkpoints.split("|")
    models = machine.on_node(
        "verifying checkpoints",
        lambda: [parse_checkpoint_ref(name) for name in names],
    )
    evaluated = default_tasks(models[0].state["source"])
    wanted = admitted(cfg.task_name or None, evaluated, cfg.final, machine.print0)
    reasons = {name: why_unavailable(name, cfg.unsafe_exec) for name in wanted}
    missing = left_out(reasons, bool(cfg.task_name), machine)
    with machine.working("loading the tasks"):
        every = [exam(name, cfg.unsafe_exec) for name in wanted if name not in missing]
    tasks = [task for task in every if task.kind == "generate"]
    if not tasks:
        raise ValueError(f"none of {', '.join(wanted)} is scored by what the model writes")
    if machine.is_main:
        who = {"checkpoint": cfg.checkpoints, "section": SECTION}
        require_access([task.name for task in tasks], cfg.final, who)
    machine.barrier()
    scores = [answers(cfg, model, tasks, machine) for model in models]
    found = [
        variance.measure(task.name, [by_task[task.name] for by_task in scores]) for task in tasks
    ]
    table = variance.table(found, names)
    for row in [table["columns"], *table["rows"]]:
        machine.print0("  ".join(f"{cell!s:>14}" for cell in row))
    if machine.is_main:
        machine.print0(f"wrote {variance.save(found)}")
        with machine.working("writing the report"):
            values = {v.task: f"{100 * v.std:.2f} points, {v.label}" for v in found}
            run_id = models[0].state["provenance"]["run_id"]
            inputs = {model.state["stage"]: model.fingerprint for model in models}
            provenance = records.Provenance(run_id, cfg.seed, inputs)
            cost = records.Cost.since(started, machine)
            records.write_record(
                SECTION, settings(cfg), values, provenance, cost, cfg.report_dir, tables=[table]
            )
            report.update(cfg.report_dir)
    machine.close()


def answers(
    cfg: EvalVariance, checkpoint: Checkpoint, tasks: list[Task], machine: DistContext
) -> dict[str, list[list[float]]]:
    """Task -> the score of every run of every item."""
    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    model = for_inference(load_model(checkpoint, machine))
    tool = Tools(cfg.python, unsafe=cfg.unsafe_exec)
    items = sum(min(len(task), cfg.max_problems or len(task)) for task in tasks)
    fused = choose_fused_engine(None, machine, items * cfg.runs * cfg.max_new_tokens)
    engine = Engine(model, tokenizer, cfg.slots, tool=tool, compiled=fused)
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, seed=cfg.seed)
    found = {}
    for task in tasks:
        count = min(len(task), cfg.max_problems or len(task))
        graded = score_by_generation(engine, task, count, sampling, cfg.runs, machine)
        found[task.name] = graded.outcomes
        machine.print0(f"{checkpoint.folder}: {task.name}, {count} items, {cfg.runs} runs")
    return found


if __name__ == "__main__":
    start(main, EvalVariance(), __doc__)
