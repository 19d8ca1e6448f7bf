"""
Midtraining: teach a base model the formats of conversations, tool calls and multiple choice.

    python -m scripts.mid_train                                    # newest base checkpoint
    torchrun --nproc_per_node=8 -m scripts.mid_train -- --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nanochat.common import fingerprint
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
from nanochat.lab.canaries import CanaryConfig, monitor_finetuning
from nanochat.lab.held_out import check_finetuning_buckets
from nanochat.mixture import MixConfig, read_mixture
from nanochat.optim import OptimConfig
from nanochat.train import TrainConfig, skip_if_finished, train, write_section
from tasks.buckets import buckets

SECTION = "Midtraining"
MIXTURE = "smoltalk,mmlu,gsm8k,spelling=20000,simple_spelling=10000"
BUILTIN_MIXTURES = {  # dataset that the base model was trained on -> default mixture
    "embedded": "world_chat=3000,world_choice=3600,world_problems=1000,world_spelling=2500"
}
RETIRED = {"dry_run": "use --num_iterations=1 for a test run; --run=dummy disables tracking"}


@dataclass(frozen=True)
class MidTrain:
    source: str = "base"
    """Checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    mix: MixConfig = field(default_factory=MixConfig)
    tuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    canaries: CanaryConfig = CanaryConfig("off")
    train: TrainConfig = TrainConfig(eval_every=150, optim=OptimConfig(weight_decay=0.0))


def main(cfg: MidTrain) -> None:
    first = {"dry_run": 0}
    fine_tune(cfg, "mid", ("base",), SECTION, MIXTURE, BUILTIN_MIXTURES, lambda _: first)


def fine_tune(
    cfg: MidTrain,
    kind: Literal["mid", "sft"],
    stages: tuple[str, ...],
    section: str,
    mixture: str,
    builtin_mixtures: Mapping[str, str],
    summarize: Callable[[FineTuning], dict[str, Any]],
) -> None:
    """
    Fine-tune a checkpoint of one of `stages` on conversations and write the record.

    mixture: default mixture; builtin_mixtures: built-in pretraining dataset -> default mixture;
    summarize: returns the first values of the report section.
    """
    machine = init_distributed(cfg.train.machine, cfg.train.seed)
    parent = open_parent(cfg.source, stages, cfg.train, machine)

    # Data: training and validation conversations
    with machine.working("loading conversations"):
        default = builtin_mixtures.get(parent.state["source"].get("dataset"), mixture)
        spec, own = read_mixture(cfg.mix.mixture or default)
        val_buckets = buckets(cfg.tuning.val_mixture or spec, own)
        chats = ChatMixture(spec, own, buckets(spec, own), val_buckets)
    check_finetuning_buckets(chats.train_buckets, chats.val_buckets)
    eval_tokens = cfg.tuning.validation.tokens(machine)
    resolved = {**settings(cfg), "mixture": spec, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": fingerprint(chats.description)}
    if skip_if_finished(section, resolved, inputs, cfg.train, machine):
        return machine.close()

    # Model, optimizer, rows, validation loss and canaries
    tuning = open_fine_tuning(kind, parent, chats, cfg.tuning, cfg.train, resolved, inputs, machine)
    tuning.run.callbacks = [tuning.loss, *monitor_finetuning(cfg.canaries, tuning)]
    train(tuning.run)
    progress = tuning.run.progress
    values = {
        **summarize(tuning),
        "Number of iterations": tuning.run.num_steps,
        "DDP world size": tuning.run.machine.world_size,
        "Minimum validation bpb": progress.min_val,
        "Final validation bpb": progress.last_val,
        "Validation loss": tuning.loss.loss,
        **tuning.loss.by_bucket,
    }
    write_section(section, tuning.run, values, tuning.resolution.tables())


if __name__ == "__main__":
    start(main, MidTrain(), __doc__, RETIRED)
