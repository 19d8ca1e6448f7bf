"""
Midtraining: a base model learns the format of conversations, tools and questions.

    python -m scripts.mid_train                                    # the base model written last
    torchrun --nproc_per_node=8 -m scripts.mid_train -- --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat.common import fingerprint, write_json
from nanochat.config import settings, start
from nanochat.distributed import init_distributed
from nanochat.finetune import (
    ChatMixture,
    FinetuneConfig,
    FineTuning,
    open_fine_tuning,
    open_parent,
    parent_inputs,
)
from nanochat.lab.canaries import RETIRED_FLAGS, CanaryConfig, monitor_finetuning
from nanochat.lab.held_out import require_fair
from nanochat.mixture import MIXTURE_FILE, MixConfig, read_buckets
from nanochat.optim import OptimConfig, ScheduleConfig
from nanochat.train import (
    Stopwatch,
    TrainConfig,
    TrainingResult,
    finished_before,
    train,
    write_section,
)
from tasks.buckets import buckets

SECTION = "Midtraining"
MIXTURE = "smoltalk,mmlu,gsm8k,spelling=20000,simple_spelling=10000"
BUILTIN_MIXTURES = {  # by the data set that the base model was trained on
    "embedded": "world_chat=3000,world_choice=3600,world_problems=1000,world_spelling=2500"
}
RETIRED = {
    **RETIRED_FLAGS,
    "dry_run": "--num_iterations=1 tries everything, --run=dummy logs nowhere",
    "arm": "scripts.lab.sweep --arms=... trains the arms of a data ablation",
    "arm_floor": "it is a flag of scripts.lab.sweep",
}


@dataclass(frozen=True)
class MidTrain:
    source: str = "base"
    """The checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    mix: MixConfig = field(default_factory=MixConfig)
    tuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    waive_families: str = ""
    """Data sets, separated by commas, that may be trained on although a final benchmark was made
    from them too (scripts.lab.hold_out)."""
    canaries: CanaryConfig = field(default_factory=CanaryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


DEFAULTS = MidTrain(
    # learning rates stay at their peak for half of the run, then fall to 0
    tuning=FinetuneConfig(schedule=ScheduleConfig(0, warmdown_ratio=0.5, final_lr_frac=0.0)),
    canaries=CanaryConfig("off"),
    train=TrainConfig(eval_every=150, optim=OptimConfig(weight_decay=0.0)),
)


def main(cfg: MidTrain) -> None:
    fine_tune(cfg, "mid", ("base",), SECTION, MIXTURE, BUILTIN_MIXTURES, summarize)


def fine_tune(
    cfg: MidTrain,
    kind: Literal["mid", "sft"],
    stages: tuple[str, ...],
    section: str,
    mixture: str,
    builtin_mixtures: Mapping[str, str],
    summarize: Callable[[FineTuning, TrainingResult], dict[str, Any]],
) -> None:
    """
    Train a checkpoint of one of `stages` on conversations and record it.

    mixture: the default; builtin_mixtures: that of a model trained on a built-in data set.
    """
    began = Stopwatch.start()
    machine = init_distributed(cfg.train.machine, cfg.train.seed)
    parent = open_parent(cfg.source, stages, cfg.train, machine)

    # Data: the conversations of the mixture, and those that measure the loss
    with machine.working("loading conversations"):
        dataset = parent.state["source"].get("dataset")
        mix = cfg.mix.otherwise(builtin_mixtures.get(dataset, mixture))
        own, measured = read_buckets(mix.buckets), cfg.tuning.val_mixture or mix.mixture
        chats = ChatMixture(mix, buckets(mix.mixture, own), buckets(measured, own))
    require_fair(chats.learned, chats.measured, cfg.waive_families)
    eval_tokens = cfg.tuning.num_eval_tokens(machine)
    asked = {**settings(cfg), "mixture": mix.mixture, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": fingerprint(chats.description)}
    if finished_before(section, asked, inputs, cfg.train, machine):
        return machine.close()

    # Model, optimizer, rows and validation loss; then the canaries
    tuning = open_fine_tuning(kind, parent, chats, cfg.tuning, cfg.train, asked, inputs, machine)
    tuning.run.callbacks = [tuning.answers, *monitor_finetuning(cfg.canaries, tuning)]

    result = train(tuning.run)
    if result.checkpoint:
        path = result.folder / MIXTURE_FILE
        write_json(path, tuning.resolution.state())
    write_section(section, result, summarize(tuning, result), began, tuning.resolution.tables())


def summarize(tuning: FineTuning, result: TrainingResult) -> dict[str, Any]:
    """What the section shows first."""
    return {
        "Number of iterations": result.run.num_steps,
        "DDP world size": result.run.machine.world_size,
        "Minimum validation bpb": result.progress.min_val,
        "Final validation bpb": result.progress.last_val,
        "Validation loss": tuning.answers.loss,
        **tuning.answers.by_bucket,
    }


if __name__ == "__main__":
    start(main, DEFAULTS, __doc__, RETIRED)
