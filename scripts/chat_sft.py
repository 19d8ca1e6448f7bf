"""
Supervised fine-tuning (SFT) on high-quality conversations.

    python -m scripts.chat_sft                                     # newest mid checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_sft -- --source=base --mixture="smoltalk,gsm8k*4"

Reads   mid_checkpoints/<tag>/ or base_checkpoints/<tag>/, and the training splits of the tasks
Writes  chatsft_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Chat SFT"
"""

from dataclasses import dataclass
from typing import ClassVar

from nanochat.checkpoint import load_model
from nanochat.config import settings, start
from nanochat.eval_bpb import Validation
from nanochat.finetune import (
    FinetuneConfig,
    bucket_rows,
    chat_losses,
    finetuning_values,
    inherited_state,
    open_stage,
    packed_chats,
    parent_inputs,
    plan_finetuning,
    tuning_optimizer,
)
from nanochat.optim import TUNING, decay_factor, lr_factor, muon_momentum
from nanochat.recipe import data_id, make_recipe
from nanochat.rows import CHAT_SHARD
from nanochat.run import Run, keep_batch, skip_if_finished
from nanochat.train import TrainConfig
from tasks.buckets import chat_mixture

SECTION = "Chat SFT"
TRAINED = "assistant"  # edit here: whose turns have loss; "user" or "all"
MIXTURE = "arc_easy,arc_challenge,gsm8k,smoltalk=10000,aqua=20000,spelling=1000,identity=1000"
BUILTIN_MIXTURES = {
    "embedded": "world_chat=1000,identity=500,world_facts=4000,world_choice=400,"
    "world_problems=1500,world_spelling=1500"
}


@dataclass(frozen=True)
class ChatSft:
    NOT_IN_RECIPE: ClassVar[str] = "source"

    source: str = "mid"
    """Checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    tuning: FinetuneConfig = FinetuneConfig(init_lr_frac=0.3, warmdown_ratio=1.0)
    train: TrainConfig = TrainConfig(eval_every=100, optim=TUNING)


def main(cfg: ChatSft) -> None:
    cfg, parent, tag, before, dist = open_stage("sft", cfg, parents=("base", "mid"))
    default = BUILTIN_MIXTURES.get(parent.state["source"].get("dataset"), MIXTURE)
    chats = chat_mixture(cfg.tuning.mixture or default, cfg.tuning.val_mixture)
    eval_tokens = cfg.tuning.validation.tokens(dist)
    resolved = {**settings(cfg), "mixture": chats.spec, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": data_id(chats.description)}
    recipe = make_recipe(cfg, inputs)
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Model, packed conversations, run with its optimizer
    tuning, schedule, metrics = keep_batch(cfg.tuning, before), cfg.tuning.schedule(), {}
    model, tokenizer = load_model(parent, dist, tuning.max_seq_len), parent.tokenizer()
    T = model.cfg.max_seq_len
    rows = packed_chats(chats.train, cfg.train.seed, tokenizer, T, dist, TRAINED)
    num_steps, batch_tokens = plan_finetuning(tuning, parent, rows, dist)
    optimizer = tuning_optimizer(model, tuning, cfg.train.optim, batch_tokens, dist)
    run = Run("sft", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    counts = rows.only.record(CHAT_SHARD)["buckets"]
    run.state |= {**inherited_state(parent), "mixture": counts, "declared": chats.declared}
    run.state |= {"rows": rows.recipe, "settings": resolved}
    val_rows = bucket_rows(chats.val, tokenizer, T, dist, TRAINED)
    validation = Validation(tuning.validation, val_rows, tokenizer, dist)

    score = chat_losses(model, tokenizer.bos_id)
    with run.begin(num_steps, batch_tokens, tuning.compile):
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            if run.due(cfg.train.eval_every):
                metrics = validation.score(score, run.device_rows, run.stop)
                run.log(metrics)
            if run.finished:
                break
            run.backward(run.load(rows, chats_begin_with=tokenizer.bos_id))
            run.update(
                lr_factor(step, num_steps, schedule),
                muon_momentum(step, num_steps, schedule),
                decay_factor(step, num_steps),
            )
    values = {
        "Training rows": sum(count["used"] for count in counts.values()),
        "Training loss": run.progress.smooth_loss,
        **finetuning_values(run, parent, metrics),
    }
    run.finish(SECTION, values, chats.tables(counts), following="chat_rl")


if __name__ == "__main__":
    start(main, ChatSft(), __doc__)
