"""
Midtraining: teach a base model the formats of conversations, tool calls and multiple choice.

    python -m scripts.mid_train                                    # newest base checkpoint
    torchrun --nproc_per_node=8 -m scripts.mid_train -- --mixture="smoltalk,mmlu,gsm8k"

Reads   base_checkpoints/<tag>/ and the training splits of the tasks in the mixture
Writes  mid_checkpoints/<tag>/ with metrics.jsonl, rows/, and the section "Midtraining"
"""

from dataclasses import dataclass, field
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

SECTION = "Midtraining"
TRAINED = "assistant"  # edit here: whose turns have loss; "user" or "all"
MIXTURE = "smoltalk,mmlu,gsm8k,spelling=20000,simple_spelling=10000"
BUILTIN_MIXTURES = {  # dataset that the base model was trained on -> default mixture
    "embedded": "world_chat=3000,world_choice=3600,world_problems=1000,world_spelling=2500"
}


@dataclass(frozen=True)
class MidTrain:
    NOT_IN_RECIPE: ClassVar[str] = "source"

    source: str = "base"
    """Checkpoint to start from: stage[:tag[:step]], as in base:d4:400."""
    tuning: FinetuneConfig = field(default_factory=FinetuneConfig)
    train: TrainConfig = TrainConfig(eval_every=150, optim=TUNING)


def main(cfg: MidTrain) -> None:
    cfg, parent, tag, before, dist = open_stage("mid", cfg, parents=("base",))
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
    run = Run("mid", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
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
    values = finetuning_values(run, parent, metrics)
    run.finish(SECTION, values, chats.tables(counts), following="chat_sft")


if __name__ == "__main__":
    start(main, MidTrain(), __doc__)
