"""
Score a base model on a suite of few-shot tasks: the centred score of each, and their mean, CORE.

    python -m scripts.base_eval                                    # the checkpoint written last
    torchrun --nproc_per_node=8 -m scripts.base_eval --model_tag=d24 --max_per_task=500

Reads   base_checkpoints/<tag>/; the suite of the embedded world is generated
Writes  the section "Base model evaluation"
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nanochat import records, report, world_suite
from nanochat.checkpoint import Checkpoint, find_checkpoint, load_model
from nanochat.common import fingerprint
from nanochat.config import settings, start
from nanochat.eval_core import FewShotTask, TaskScore, core, examine, subject_of
from nanochat.gpt import for_inference
from nanochat.machine import Machine, MachineConfig, init_machine
from nanochat.tokenizer import Tokenizer

SECTION = "Base model evaluation"


@dataclass(frozen=True)
class BaseEval:
    model_tag: str | None = None
    """Folder under base_checkpoints/. Default: the one written last."""
    model_step: int | None = None
    """Step of the checkpoint. Default: the last good one."""
    max_per_task: int | None = None
    """Items to score of each task. Default: all."""
    suite: Literal["embedded", "dclm"] | None = None
    """Which tasks. Default: those of the embedded world for a model that was trained on it."""
    once: bool = False
    """Do nothing when this checkpoint was scored with these settings before."""
    report_dir: str | None = None
    """Folder of records. Default: report/ under the base directory."""
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        if self.max_per_task is not None and self.max_per_task < 1:
            raise ValueError(f"max_per_task must be at least 1, got {self.max_per_task}")


def main(cfg: BaseEval) -> None:
    started = time.perf_counter()
    machine = init_machine(cfg.machine)
    checkpoint = find_checkpoint("base", cfg.model_tag, cfg.model_step, machine.print0)
    suite = open_suite(cfg.suite, checkpoint)
    inputs = {
        "base": checkpoint.fingerprint,
        "suite": fingerprint([asdict(task) for task in suite]),
        **checkpoint.state["provenance"]["inputs"],
    }
    key = records.stage_key(settings(cfg), inputs)
    if cfg.once and machine.broadcast(records.finished(SECTION, key, cfg.report_dir) is not None):
        machine.print0(f"{SECTION}: finished already, skipped")
        return machine.close()

    tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
    subject = subject_of(for_inference(load_model(checkpoint, machine)), tokenizer)
    scores = []
    for task in suite:
        begun = time.perf_counter()
        score = examine(subject, task, machine, cfg.max_per_task)
        machine.print0(f"{describe(score)}, {time.perf_counter() - begun:.1f} s")
        scores.append(score)
    machine.print0(f"CORE {core(scores).value:.4f} +- {core(scores).se:.4f}")

    if machine.is_main:
        write_section(cfg, machine, checkpoint, scores, inputs, started)
    machine.close()


def open_suite(name: str | None, checkpoint: Checkpoint) -> list[FewShotTask]:
    """The tasks asked for, or those that suit the model. Raises ValueError naming the way out."""
    text = checkpoint.state["source"].get("dataset") or "local files"
    if name == "dclm" or (name is None and text != "embedded"):
        raise ValueError(
            f"{checkpoint.folder} was trained on {text}; the tasks of DCLM cannot be read yet, "
            "only those of the embedded world: --suite=embedded"
        )
    return [FewShotTask(**task) for task in world_suite.suite()]


def describe(score: TaskScore) -> str:
    """A line about a task."""
    accuracy, centred = score.accuracy, score.centred
    cropped = f", {score.num_cropped} cropped" if score.num_cropped else ""
    return (
        f"{score.task.name}: {accuracy.value:.4f} right, centred {centred.value:.4f} "
        f"+- {centred.se:.4f} ({accuracy.n} items{cropped})"
    )


def write_section(
    cfg: BaseEval,
    machine: Machine,
    checkpoint: Checkpoint,
    scores: Sequence[TaskScore],
    inputs: dict[str, str],
    started: float,
) -> None:
    """The record and the report."""
    origin = checkpoint.state["provenance"]
    values: dict[str, Any] = {
        "Model": f"base_model (step {checkpoint.step})",
        "CORE metric": records.estimate(*core(scores)),
        **{score.task.name: records.estimate(*score.centred) for score in scores},
        "Cropped items": sum(score.num_cropped for score in scores),
    }
    records.write_record(
        SECTION,
        settings(cfg),
        values,
        records.Provenance(origin["run_id"], origin["seed"], inputs),
        records.Cost.since(started, machine),
        cfg.report_dir,
        items=item_scores(scores),
    )
    report.update(cfg.report_dir)


def item_scores(scores: Sequence[TaskScore]) -> dict[str, dict[str, Any]]:
    """What every item scored, and how CORE is made of it, for comparisons with other models."""
    found = {
        score.task.name: records.item_scores(
            (score.task.items[n] for n in score.numbers), score.outcomes
        )
        for score in scores
    }
    weights = {s.task.name: 1 / len(scores) / (1 - s.task.random_baseline) for s in scores}
    return {**found, "CORE metric": records.weighted_scores(weights)}


if __name__ == "__main__":
    start(main, BaseEval(), __doc__)
