"""
Supervised fine-tuning (SFT) on high-quality conversations.

    python -m scripts.chat_sft                                     # newest mid checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_sft -- --source=base --mixture="smoltalk,gsm8k*4"

Reads   mid_checkpoints/<tag>/ or base_checkpoints/<tag>/, and the training splits of the tasks
Writes  chatsft_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Chat SFT"
"""

from dataclasses import dataclass, field

from nanochat.common import fingerprint
from nanochat.config import settings, start
from nanochat.dist import init_dist
from nanochat.finetune import (
    FinetuneConfig,
    finetuning_values,
    open_finetuning,
    open_parent,
    parent_inputs,
)
from nanochat.optim import OptimConfig, decay_factor, lr_factor, muon_momentum
from nanochat.train import TrainConfig, document_segments, skip_if_finished
from tasks.buckets import MixConfig, chat_mixture

SECTION = "Chat SFT"
MIXTURE = "arc_easy,arc_challenge,gsm8k,smoltalk=10000,aqua=20000,spelling=1000,identity=1000"
BUILTIN_MIXTURES = {
    "embedded": "world_chat=1000,identity=500,world_facts=4000,world_choice=400,"
    "world_problems=1500,world_spelling=1500"
}


@dataclass(frozen=True)
class ChatSft:
    source: str = "mid"
    """Checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    mix: MixConfig = field(default_factory=MixConfig)
    tuning: FinetuneConfig = FinetuneConfig(init_lr_frac=0.3, warmdown_ratio=1.0)
    train: TrainConfig = TrainConfig(eval_every=100, optim=OptimConfig(weight_decay=0.0))


def main(cfg: ChatSft) -> None:
    dist = init_dist(cfg.train.dist, cfg.train.seed)
    parent = open_parent(cfg.source, ("base", "mid"), cfg.train, dist)
    default = BUILTIN_MIXTURES.get(parent.state["source"].get("dataset"), MIXTURE)
    chats = chat_mixture(cfg.mix.mixture or default, cfg.tuning.val_mixture)
    eval_tokens = cfg.tuning.validation.tokens(dist)
    resolved = {**settings(cfg), "mixture": chats.spec, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": fingerprint(chats.description)}
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, dist):
        return dist.close()

    run, rows, validation, counts, schedule = open_finetuning(
        *("sft", parent, chats.train_parts(), chats.val_parts(), cfg.tuning, cfg.train),
        *(resolved, inputs, chats.declared, dist),
    )
    model, num_steps, bos_id, metrics = run.model, run.num_steps, run.tokenizer.bos_id, {}

    def score(x, y):  # attention stays within each chat of a row
        return model.token_losses(x, y, document_segments(x, bos_id))

    with run:
        for step in run.steps():  # from the last checkpoint on
            if run.due(cfg.train.eval_every):
                metrics = validation.score(score, run.device_rows, run.stop)
                run.log(metrics)
            if run.finished:
                break
            run.backward(run.load(rows, mask_documents=True))
            run.update(
                lr_factor(step, num_steps, schedule),
                muon_momentum(step, num_steps, schedule),
                decay_factor(step, num_steps),
            )
    values = {
        "Training rows": sum(count["used"] for count in counts.values()),
        "Training loss": run.progress.smooth_loss,
        **finetuning_values(run, metrics),
    }
    run.finish(SECTION, values, chats.tables(counts))


if __name__ == "__main__":
    start(main, ChatSft(), __doc__)
