"""
Supervised fine-tuning: the model learns to answer as the best conversations do.

    python -m scripts.chat_sft                                     # the mid checkpoint written last
    torchrun --nproc_per_node=8 -m scripts.chat_sft -- --source=base --mixture="smoltalk,gsm8k*4"

Reads   mid_checkpoints/<tag>/ (or base_) and the training splits of the tasks in the mixture
Writes  chatsft_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Chat SFT"
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

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

SECTION = "Chat SFT"
RETIRED = {
    "target_examples_per_step": "a step has --total_batch_size tokens of packed conversations",
    "aqua_train_examples": "say how many in the mixture: --mixture=aqua=20000,...",
    "aqua_val_examples": "validation takes its share of every task of the --mixture",
    "eval_steps": "--eval_tokens says how much is evaluated",
    "eval_metrics_every": "scripts.chat_eval scores the finished model on tasks",
    "eval_metrics_max_problems": "scripts.chat_eval has --max_problems",
    "arm": "scripts.lab.sweep --arms=... trains the arms of a data ablation",
    "arm_floor": "it is a flag of scripts.lab.sweep",
}


def stage_config() -> StageConfig:
    """Rates fall linearly from their peak to 0."""
    return StageConfig(
        optim=OptimConfig(weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0, warmdown_ratio=1.0, final_lr_frac=0.0),
        loop=LoopConfig(eval_every=100),
    )


@dataclass(frozen=True)
class ChatSft:
    source: Literal["base", "mid"] = "mid"
    """Which stage's checkpoint to start from."""
    mix: MixConfig = field(default_factory=MixConfig)
    plan: Plan = field(default_factory=lambda: Plan(init_lr_frac=0.3))
    waive_families: str = ""
    """Data sets, with commas between them, that may be trained on although a final benchmark was
    made of them too (scripts.lab.hold_out)."""
    canaries: CanaryConfig = field(default_factory=CanaryConfig)
    stage: StageConfig = field(default_factory=stage_config)


def main(cfg: ChatSft) -> None:
    def talk(parent: Checkpoint) -> Talk:
        mix = cfg.mix.otherwise(defaults(parent.state["source"]).sft)
        measured, own = cfg.plan.val_mixture or mix.mixture, read_buckets(mix.buckets)
        return Talk(mix, buckets(mix.mixture, own), buckets(measured, own))

    lesson = Lesson(
        SECTION,
        "sft",
        cfg.source,
        talk,
        figures,
        check=lambda talk: require_fair(talk.learned, talk.measured, cfg.waive_families),
        callbacks=partial(monitor_finetuning, cfg.canaries),
    )
    fine_tune(lesson, cfg.plan, cfg.stage, settings(cfg))


def figures(outcome: Outcome, answers: AnswerLoss, mixed: Resolution) -> dict[str, Any]:
    """What the section shows."""
    return {
        "Training rows": mixed.documents,
        "Number of iterations": outcome.run.num_steps,
        "Training loss": outcome.progress.smooth_loss,
        "Validation loss": answers.loss,
        "DDP world size": outcome.run.machine.world_size,
        "Minimum validation bpb": outcome.progress.min_val,
        "Final validation bpb": outcome.progress.last_val,
        **answers.by_bucket,
    }


if __name__ == "__main__":
    start(main, ChatSft(), __doc__, RETIRED | RETIRED_FLAGS)
