"""
Midtraining: a base model learns the form of conversations, of tools and of questions.

    python -m scripts.mid_train                                    # the base model written last
    torchrun --nproc_per_node=8 -m scripts.mid_train -- --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nanochat.checkpoint import Checkpoint
from nanochat.config import settings, start
from nanochat.finetune import (
    AnswerLoss,
    Lesson,
    Plan,
    Talk,
    fine_tune,
)
from nanochat.lab.canaries import RETIRED_FLAGS, CanaryConfig, monitor_finetuning
from nanochat.lab.held_out import require_fair
from nanochat.mixture import MixConfig, Resolution, read_buckets
from nanochat.optim import OptimConfig, ScheduleConfig
from nanochat.stage import Outcome, StageConfig
from nanochat.train import LoopConfig
from tasks.buckets import buckets
from tasks.defaults import defaults

SECTION = "Midtraining"
RETIRED = {
    "dry_run": "--num_iterations=1 tries everything, --run=dummy logs nowhere",
    "arm": "scripts.lab.sweep --arms=... trains the arms of a data ablation",
    "arm_floor": "it is a flag of scripts.lab.sweep",
}


def stage_config() -> StageConfig:
    """Rates stay at their peak for most of the way, then fall to 0."""
    return StageConfig(
        optim=OptimConfig(weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0, warmdown_ratio=0.5, final_lr_frac=0.0),
        loop=LoopConfig(eval_every=150),
    )


@dataclass(frozen=True)
class MidTrain:
    mix: MixConfig = field(default_factory=MixConfig)
    plan: Plan = field(default_factory=Plan)
    waive_families: str = ""
    """Data sets, with commas between them, that may be trained on although a final benchmark was
    made of them too (scripts.lab.hold_out)."""
    canaries: CanaryConfig = field(default_factory=lambda: CanaryConfig(canary_every=0))
    stage: StageConfig = field(default_factory=stage_config)


def main(cfg: MidTrain) -> None:
    def talk(parent: Checkpoint) -> Talk:
        mix = cfg.mix.otherwise(defaults(parent.state["source"]).mid)
        measured, own = cfg.plan.val_mixture or mix.mixture, read_buckets(mix.buckets)
        return Talk(mix, buckets(mix.mixture, own), buckets(measured, own))

    lesson = Lesson(
        SECTION,
        "mid",
        "base",
        talk,
        figures,
        check=lambda talk: require_fair(talk.learned, talk.measured, cfg.waive_families),
        callbacks=partial(monitor_finetuning, cfg.canaries),
    )
    fine_tune(lesson, cfg.plan, cfg.stage, settings(cfg))


def figures(outcome: Outcome, answers: AnswerLoss, mixed: Resolution) -> dict[str, Any]:
    """What the section shows."""
    return {
        "Number of iterations": outcome.run.num_steps,
        "DDP world size": outcome.run.machine.world_size,
        "Minimum validation bpb": outcome.progress.min_val,
        "Final validation bpb": outcome.progress.last_val,
        "Validation loss": answers.loss,
        **answers.by_bucket,
    }


if __name__ == "__main__":
    start(main, MidTrain(), __doc__, RETIRED | RETIRED_FLAGS)
