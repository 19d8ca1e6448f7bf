"""
Supervised fine-tuning (SFT) on high-quality conversations.

    python -m scripts.chat_sft                                     # newest mid checkpoint
    torchrun --nproc_per_node=8 -m scripts.chat_sft -- --source=base --mixture="smoltalk,gsm8k*4"

Reads   mid_checkpoints/<tag>/ or base_checkpoints/<tag>/, and the training splits of the tasks
Writes  chatsft_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Chat SFT"
"""

from dataclasses import dataclass

from nanochat.checkpoint import load_model
from nanochat.common import fingerprint
from nanochat.config import settings, start
from nanochat.dist import init_dist
from nanochat.eval_bpb import Validation
from nanochat.finetune import (
    FinetuneConfig,
    bucket_rows,
    chat_losses,
    choose_tag,
    finetuning_values,
    make_run,
    open_parent,
    packed_chats,
    parent_inputs,
)
from nanochat.optim import OptimConfig, decay_factor, lr_factor, muon_momentum
from nanochat.train import TrainConfig, keep_dtype, skip_if_finished
from tasks.buckets import chat_mixture

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
    tuning: FinetuneConfig = FinetuneConfig(init_lr_frac=0.3, warmdown_ratio=1.0)
    train: TrainConfig = TrainConfig(eval_every=100, optim=OptimConfig(weight_decay=0.0))


def main(cfg: ChatSft) -> None:
    dist = init_dist(cfg.train.dist, cfg.train.seed)
    parent = open_parent(cfg.source, ("base", "mid"), cfg.train, dist)
    tag = choose_tag("sft", parent, cfg.train)
    dist = keep_dtype(dist, cfg.train, "sft", tag, parent)
    default = BUILTIN_MIXTURES.get(parent.state["source"].get("dataset"), MIXTURE)
    chats = chat_mixture(cfg.tuning.mixture or default, cfg.tuning.val_mixture)
    eval_tokens = cfg.tuning.validation.tokens(dist)
    resolved = {**settings(cfg), "mixture": chats.spec, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": fingerprint(chats.description)}
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, dist):
        return dist.close()

    # Model, packed conversations, run with its optimizer
    tuning, schedule, metrics = cfg.tuning, cfg.tuning.schedule(), {}
    model, tokenizer = load_model(parent, dist, tuning.max_seq_len), parent.tokenizer()
    T = model.cfg.max_seq_len
    rows = packed_chats(chats.train, cfg.train.seed, tokenizer, T, dist)
    run = make_run("sft", tag, parent, model, rows, cfg, dist, resolved, inputs, chats.declared)
    val_rows = bucket_rows(chats.val, tokenizer, T, dist)
    validation, num_steps = Validation(tuning.validation, val_rows, tokenizer, dist), run.num_steps

    score = chat_losses(model, tokenizer.bos_id)
    with run:
        for step in run.steps():  # from the last checkpoint on; the last turn only evaluates
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
    counts = run.state["mixture"]
    values = {
        "Training rows": sum(count["used"] for count in counts.values()),
        "Training loss": run.progress.smooth_loss,
        **finetuning_values(run, metrics),
    }
    run.finish(SECTION, values, chats.tables(counts), following="chat_rl")


if __name__ == "__main__":
    start(main, ChatSft(), __doc__)
