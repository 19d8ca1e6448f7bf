"""
Supervised fine-tuning (SFT) on high-quality conversations.

    python -m scripts.chat_sft                                     # newest mid checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_sft -- --source=base --mixture="smoltalk,gsm8k*4"

Reads   mid_checkpoints/<tag>/ or base_checkpoints/<tag>/, and the training splits of the tasks
Writes  chatsft_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Chat SFT"
"""

import math
from dataclasses import dataclass
from typing import Any

from nanochat.config import start
from nanochat.finetune import FinetuneConfig, FineTuning
from nanochat.lab.canaries import CanaryConfig
from nanochat.optim import OptimConfig
from nanochat.train import TrainConfig
from scripts import mid_train
from scripts.mid_train import MidTrain, fine_tune

SECTION = "Chat SFT"
MIXTURE = "arc_easy,arc_challenge,gsm8k,smoltalk=10000,aqua=20000,spelling=1000,identity=1000"
BUILTIN_MIXTURES = {
    "embedded": "world_chat=1000,identity=500,world_facts=4000,world_choice=400,"
    "world_problems=1500,world_spelling=1500"
}
RETIRED = {
    **mid_train.RETIRED,
    "target_examples_per_step": "use --total_batch_size, the number of tokens per step",
    "aqua_train_examples": "set the number in the mixture: --mixture=aqua=20000,...",
    "aqua_val_examples": "use --eval_tokens, split over the tasks of the mixture",
    "eval_steps": "use --eval_tokens",
    "eval_metrics_every": "use scripts.chat_eval on the finished model",
    "eval_metrics_max_problems": "use scripts.chat_eval --max_problems",
}


@dataclass(frozen=True)
class ChatSft(MidTrain):
    """The flags of midtraining, with other defaults."""

    source: str = "mid"
    # learning rates decay linearly from their peak to 0
    tuning: FinetuneConfig = FinetuneConfig(init_lr_frac=0.3, warmdown_ratio=1.0)
    canaries: CanaryConfig = CanaryConfig()
    train: TrainConfig = TrainConfig(eval_every=100, optim=OptimConfig(weight_decay=0.0))


def main(cfg: ChatSft) -> None:
    fine_tune(cfg, "sft", ("base", "mid"), SECTION, MIXTURE, BUILTIN_MIXTURES, summarize)


def summarize(tuning: FineTuning) -> dict[str, Any]:
    """First values of the report section; most are settings of the October 2025 script."""
    run, conversations = tuning.run, tuning.resolution.documents
    aqua = [bucket for bucket in tuning.chats.train_buckets if bucket.name == "aqua"]
    held_out = [bucket for bucket in tuning.chats.val_buckets if bucket.name == "aqua"]
    mean_tokens = tuning.resolution.tokens / max(1, conversations)  # of a conversation
    return {
        "target_examples_per_step": round(run.batch_tokens / mean_tokens),
        "aqua_train_examples": sum(len(bucket.train) for bucket in aqua),
        "aqua_val_examples": sum(len(bucket.val) for bucket in held_out),
        "eval_steps": math.ceil(run.settings["eval_tokens"] / run.batch_tokens),
        "eval_metrics_every": 0,  # tasks are evaluated by scripts.chat_eval instead
        "eval_metrics_max_problems": 0,
        "Training rows": conversations,
        "Training loss": run.progress.smooth_loss,
    }


if __name__ == "__main__":
    start(main, ChatSft(), __doc__, RETIRED)
