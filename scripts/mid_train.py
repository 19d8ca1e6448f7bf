"""
Midtraining: teach a base model the formats of conversations, tool calls and multiple choice.

    python -m scripts.mid_train                                    # newest base checkpoint
    torchrun --nproc_per_node=8 -m scripts.mid_train -- --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from dataclasses import dataclass, field

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

SECTION = "Midtraining"
MIXTURE = "smoltalk,mmlu,gsm8k,spelling=20000,simple_spelling=10000"
BUILTIN_MIXTURES = {  # dataset that the base model was trained on -> default mixture
    "embedded": "world_chat=3000,world_choice=3600,world_problems=1000,world_spelling=2500"
}


@dataclass(frozen=True)
class MidTrain:
    source: str = "base"
    """Checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    tuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    train: TrainConfig = TrainConfig(eval_every=150, optim=OptimConfig(weight_decay=0.0))


def main(cfg: MidTrain) -> None:
    dist = init_dist(cfg.train.dist, cfg.train.seed)
    parent = open_parent(cfg.source, ("base",), cfg.train, dist)
    tag = choose_tag("mid", parent, cfg.train)
    dist = keep_dtype(dist, cfg.train, "mid", tag, parent)
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
    run = make_run("mid", tag, parent, model, rows, cfg, dist, resolved, inputs, chats.declared)
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
    values = finetuning_values(run, metrics)
    run.finish(SECTION, values, chats.tables(run.state["mixture"]), following="chat_sft")


if __name__ == "__main__":
    start(main, MidTrain(), __doc__)
