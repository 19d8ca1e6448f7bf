"""
Measure how much scores vary when the same model answers the same questions repeatedly.

    python -m scripts.lab.eval_variance                                  # newest SFT and RL models
    python -m scripts.lab.eval_variance --checkpoints="sft:d4|rl:d4:50" --runs=5 --max_problems=200

Reads   checkpoints as stage[:tag[:step]] and the evaluation splits of the tasks
Writes  the section "Evaluation variance", with the num_samples that each task needs in
        scripts.chat_eval. Tasks scored by logits are skipped: they are deterministic
"""

from dataclasses import dataclass, replace

from nanochat import records, report
from nanochat.checkpoint import Checkpoint, parse_checkpoint_ref
from nanochat.config import start
from nanochat.distributed import DistContext, init_distributed
from nanochat.engine import Sampling
from nanochat.eval_chat import score_by_generation
from nanochat.lab import variance
from scripts.chat_eval import TaskEval, default_tasks, open_engine, open_tasks
from tasks.base import Task
from tasks.held_out import require_access

SECTION = "Evaluation variance"


@dataclass(frozen=True)
class EvalVariance(TaskEval):
    checkpoints: str = "sft|rl"
    """Checkpoints as stage[:tag[:step]], separated by |."""
    runs: int = 3
    """Number of sampled answers per question, at a temperature above 0."""
    sampling: Sampling = replace(TaskEval.sampling, temperature=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runs < 2 or self.sampling.temperature <= 0:
            raise ValueError(
                f"runs must be at least 2 (got {self.runs}) and temperature above 0 (got "
                f"{self.sampling.temperature}); otherwise nothing varies"
            )


def main(cfg: EvalVariance) -> None:
    machine = init_distributed(cfg.machine, cfg.sampling.seed)
    names = cfg.checkpoints.split("|")
    models = machine.on_node(lambda: [parse_checkpoint_ref(name) for name in names])
    every, _ = open_tasks(cfg, default_tasks(models[0].state["source"]), machine)
    tasks = [task for task in every if task.kind == "generate"]
    if not tasks:
        names = ", ".join(task.name for task in every)
        raise ValueError(f"none of {names} is scored by generation; choose other tasks")
    who = {"checkpoint": cfg.checkpoints, "section": SECTION}
    asked = [task.name for task in tasks]
    machine.on_main(lambda: require_access(asked, cfg.final, who))
    scores = [sample_answers(cfg, model, tasks, machine) for model in models]
    found = [
        variance.measure(task.name, [by_task[task.name] for by_task in scores]) for task in tasks
    ]
    table = variance.variance_table(found, names)
    if machine.is_main:
        values = {v.task: f"{100 * v.std:.2f} points, {v.label}" for v in found}
        run_id = models[0].state["provenance"]["run_id"]
        inputs = {name: m.fingerprint for name, m in zip(names, models, strict=True)}
        provenance = records.Provenance(run_id, cfg.sampling.seed, inputs)
        cost = records.Cost.so_far(machine)
        report.append_section(SECTION, cfg, values, provenance, cost, tables=[table])
    machine.close()


def sample_answers(
    cfg: EvalVariance, checkpoint: Checkpoint, tasks: list[Task], machine: DistContext
) -> dict[str, list[list[float]]]:
    """Return scores[item][run] by task name."""
    engine = open_engine(cfg, checkpoint, machine, sum(map(cfg.count, tasks)) * cfg.runs)
    found = {}
    for task in tasks:
        count = cfg.count(task)
        graded = score_by_generation(engine, task, count, cfg.sampling, cfg.runs, machine)
        found[task.name] = graded.outcomes
        machine.print0(f"{checkpoint.folder}: {task.name}, {count} items, {cfg.runs} runs")
    return found


if __name__ == "__main__":
    start(main, EvalVariance(), __doc__)
