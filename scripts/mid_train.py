"""
Midtraining: a base model learns the form of conversations, of tools and of questions.

    python -m scripts.mid_train                                    # the base model written last
    torchrun --nproc_per_node=8 -m scripts.mid_train --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from dataclasses import dataclass, field
from typing import Any

from nanochat import report
from nanochat.config import settings, start
from nanochat.finetune import AnswerLoss, Plan, Talk, find_parent, fine_tune
from nanochat.machine import init_machine
from nanochat.optim import OptimConfig
from nanochat.schedule import ScheduleConfig
from nanochat.stage import Outcome, StageConfig
from nanochat.train import PREEMPTED, LoopConfig
from tasks.defaults import defaults
from tasks.registry import mixture

SECTION = "Midtraining"
RETIRED = {"dry_run": "--num_iterations=1 tries everything, --run=dummy logs nowhere"}


def stage_config() -> StageConfig:
    """Rates stay at their peak for most of the way, then fall to 0."""
    return StageConfig(
        optim=OptimConfig(weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0, warmdown_ratio=0.5, final_lr_frac=0.0),
        loop=LoopConfig(eval_every=150),
    )


@dataclass(frozen=True)
class MidTrain:
    mixture: str | None = None
    """What is learned: tasks, each with a number of conversations and repeats where wanted, as
    in smoltalk=100000,gsm8k*2. Default: by what the base model was trained on."""
    plan: Plan = field(default_factory=Plan)
    stage: StageConfig = field(default_factory=stage_config)


def main(cfg: MidTrain) -> None:
    machine = init_machine(cfg.stage.machine, cfg.stage.seed)
    parent = find_parent("base", cfg.plan, cfg.stage, machine)
    spec = cfg.mixture or defaults(parent.state["source"]).mid
    train, val = mixture(spec, "train", cfg.stage.seed), mixture(spec, "val", cfg.stage.seed)
    talk = Talk(train, val, {"train": train.identity, "val": val.identity})
    asked = {**settings(cfg), "mixture": spec, "eval_tokens": cfg.plan.num_eval_tokens(machine)}
    done = fine_tune(SECTION, "mid", parent, talk, cfg.plan, cfg.stage, asked, figures, machine)
    if machine.is_main and done:
        report.update(cfg.stage.report_dir)
    machine.close()
    if not done:
        raise SystemExit(PREEMPTED)


def figures(outcome: Outcome, answers: AnswerLoss) -> dict[str, Any]:
    """What the section shows."""
    return {
        "Number of iterations": outcome.run.num_steps,
        "DDP world size": outcome.run.machine.world_size,
        "Minimum validation bpb": outcome.progress.min_val,
        "Validation loss": answers.loss,
    }


if __name__ == "__main__":
    start(main, MidTrain(), __doc__, RETIRED)
