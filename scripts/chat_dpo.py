"""
Preference tuning of a chat model by DPO, on pairs of a chosen and a rejected answer.

    python -m scripts.chat_dpo                          # right and wrong answers of the SFT model
    python -m scripts.chat_dpo --pairs=HuggingFaceH4/ultrafeedback_binarized
    torchrun --nproc_per_node=8 -m scripts.chat_dpo -- --task=gsm8k

Reads   chatsft_checkpoints/<tag>/ and preference pairs, or the questions of the tasks
Writes  chatdpo_checkpoints/<tag>/ with metrics.jsonl, chatdpo_checkpoints/pairs_<hash>.json if the
        pairs are sampled, and the section "Chat DPO"
"""

from dataclasses import asdict, dataclass, replace

from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, stage_folder
from nanochat.common import fingerprint, read_json, write_json
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.dist import DistContext, init_dist
from nanochat.engine import Engine, choose_engine_compile
from nanochat.finetune import choose_tag, open_parent, parent_inputs
from nanochat.gpt import inference_copy
from nanochat.lab.dpo import (
    Pair,
    dpo_loss,
    encode_conversation,
    evaluate_pairs,
    pair_batches,
    pairs_of_step,
    sample_pairs,
)
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig, decay_factor, lr_factor
from nanochat.records import estimate
from nanochat.rl import RolloutConfig, require_divisible
from nanochat.sandbox import calculate
from nanochat.scaling import make_rules
from nanochat.train import Run, TrainConfig, skip_if_finished
from tasks.base import Task
from tasks.buckets import held_out_questions, rl_questions
from tasks.held_out import reject_contaminated, require_access
from tasks.preferences import Preferences

SECTION = "Chat DPO"
MOMENTUM = 0.95  # of Muon, constant
SCHEDULE = ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0)  # linear decay to 0
TASK = "gsm8k"
BUILTIN_TASKS = {  # dataset of the base model -> default task
    "embedded": "world_facts*2,world_choice*4,world_problems=800,world_spelling=800"
}


@dataclass(frozen=True)
class ChatDPO:
    source: str = "sft"
    """Checkpoint to start from, also the frozen reference: stage[:tag[:step]], as in sft:d4:400."""
    pairs: str = ""
    """Preference pairs: a JSON Lines file, or <owner>/<name> on the Hub. Default: the parent's own
    answers to the questions of task."""
    task: str = ""
    """Task or mixture of tasks whose right and wrong answers are paired, as in gsm8k or
    gsm8k,aqua=2000. Default: gsm8k, or those of the built-in dataset if the model was trained on
    it."""
    num_iterations: int | None = None
    """Optimizer steps. Default: derived from num_epochs."""
    num_epochs: float = 1.0
    """Epochs over the pairs."""
    init_lr_frac: float = 0.03
    """Peak learning rates as a fraction of the pretraining ones; they decay linearly to 0."""
    eval_examples: int = 400
    """Number of held-out pairs to evaluate, or of held-out questions to answer for them."""
    beta: float = 0.1
    """Weight of the log-probability ratio to the parent; lower values allow larger changes."""
    save_optimizer: bool = False
    """Keep the optimizer state in the final checkpoint, so that the run can be extended."""
    rollouts: RolloutConfig = RolloutConfig(num_samples=8)
    train: TrainConfig = TrainConfig(
        device_batch_size=8,
        eval_every=60,
        save_every=60,
        keep=1,
        optim=OptimConfig(weight_decay=0.0),
    )

    def __post_init__(self) -> None:
        require_at_least(self, eval_examples=1)
        require_positive(self, "num_iterations", "num_epochs", "init_lr_frac", "beta")
        if self.pairs and self.task:
            raise ValueError("--pairs and --task are both set; use one of them")
        if self.train.dist.dtype == "fp8":  # GPUs multiply multiples of 16 rows only
            raise ValueError("fp8 needs rows of one length, unlike DPO; omit --dtype=fp8")


def main(cfg: ChatDPO) -> None:
    seed, per_step = cfg.train.seed, cfg.rollouts.examples_per_step
    dist = init_dist(cfg.train.dist, seed)
    require_divisible(per_step, dist)
    parent = open_parent(cfg.source, tuple(FOLDERS), cfg.train, dist)
    tag, dataset = choose_tag("dpo", parent, cfg.train), parent.state["source"].get("dataset")
    if not cfg.pairs:
        cfg = replace(cfg, task=cfg.task or BUILTIN_TASKS.get(dataset, TASK))
    data, inputs = open_data(cfg), parent_inputs(parent)
    if cfg.pairs:
        inputs["pairs"] = fingerprint(data[0].identity)
    if skip_if_finished(SECTION, settings(cfg), inputs, cfg.train, dist):
        return dist.close()

    # Model, frozen reference, pairs, optimizer
    model, reference = load_model(parent, dist), load_model(parent, dist)
    reference.to(dist.dtype).requires_grad_(False)
    pairs, held_out = (make_pairs(cfg, each, parent, dist) for each in data)
    n = min(len(held_out), cfg.eval_examples)
    held_out = [held_out[i * len(held_out) // n] for i in range(n)]
    num_steps = cfg.num_iterations or max(1, round(cfg.num_epochs * len(pairs) / per_step))
    rules = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    tokenizer, optimizer = parent.tokenizer(), MuonAdamW(model, rules, dist)

    run = Run(
        *("dpo", tag, cfg.train, model, optimizer, tokenizer, dist),
        num_steps=num_steps,
        batch_tokens=per_step * 2 * model.cfg.max_seq_len,
        kernels=None,
        settings=settings(cfg),
        inputs=inputs,
        identity={
            "dpo": asdict(cfg.rollouts),
            "pair_digest": fingerprint(pairs),
            "schedule": asdict(SCHEDULE),
            "beta": cfg.beta,
            "init_lr_frac": cfg.init_lr_frac,
            **inputs,
        },
        state={"source": parent.state["source"]},
        keep_optimizer=cfg.save_optimizer,
    )
    shape = cfg.train.device_batch_size or 8, tokenizer.bos_id, dist.device
    found = {}
    with run:
        for step in run.steps():  # from the last checkpoint on
            if run.due(cfg.train.eval_every):
                batches = pair_batches(held_out[dist.rank :: dist.world_size], *shape)
                found = evaluate_pairs(model, reference, cfg.beta, batches, dist)
                run.log({f"held_out_{name}": each.value for name, each in found.items()})
            if run.finished:
                break
            mine = pairs_of_step(pairs, step, per_step, seed, dist)
            for tokens, targets in pair_batches(mine, *shape):
                loss = dpo_loss(model, reference, cfg.beta, tokens, targets)
                run.accumulate(loss, len(tokens) // 2, tokens.numel())  # per pair
            decay = decay_factor(step, num_steps)
            run.update(lr_factor(step, num_steps, SCHEDULE), MOMENTUM, decay)
    values = {f"Held-out {name.replace('_', ' ')} after": estimate(*x) for name, x in found.items()}
    run.finish(SECTION, {"Training pairs": len(pairs), "Number of iterations": num_steps, **values})


def open_data(cfg: ChatDPO) -> tuple[Task, Task]:
    """
    Training and held-out pairs of --pairs, or questions of --task. Raises UsageError if a held-out
    task is final, or if training tasks contaminate a final benchmark.
    """
    if cfg.pairs:
        return Preferences("train", cfg.pairs), Preferences("val", cfg.pairs)
    train = rl_questions(cfg.task, cfg.train.seed)
    held_out = held_out_questions(cfg.task, cfg.eval_examples)
    require_access({task.name for task in held_out.tasks}, False, {})
    reject_contaminated({task.name: task.tags for task in train.tasks})
    return train, held_out


def make_pairs(cfg: ChatDPO, data: Task, parent: Checkpoint, dist: DistContext) -> list[Pair]:
    """
    Encoded pairs that fit into the model's context. Sampled ones are saved in the folder of DPO
    checkpoints, so that a resumed run trains on the same. Raises ValueError if there are none.
    """
    tokenizer, T, seed = parent.tokenizer(), parent.state["model"]["max_seq_len"], cfg.train.seed
    if isinstance(data, Preferences):
        every = [[encode_conversation(tokenizer, each) for each in pair] for pair in data.items]
        pairs = [pair for pair in every if max(map(len, pair)) <= T + 1]  # the last is no input
        num_long = len(every) - len(pairs)
        about = f"without {num_long:,} of more than {T:,} tokens, {data.num_skipped:,} invalid"
        fix = "use shorter pairs, or a model with a larger max_seq_len"
    else:
        rollouts = replace(cfg.rollouts, examples_per_step=1)  # has no influence
        key = fingerprint([parent.fingerprint, data.identity, asdict(rollouts), seed])
        path = stage_folder("dpo") / f"pairs_{key}.json"
        if not dist.on_main(path.exists):
            tokens = len(data) * rollouts.num_samples * rollouts.max_new_tokens
            compiled = choose_engine_compile(None, dist.device, tokens)
            model = inference_copy(load_model(parent, dist))
            engine = Engine(model, tokenizer, tool=calculate, compiled=compiled)
            sampled = sample_pairs(engine, data, cfg.rollouts, seed, dist)
            dist.on_main(lambda: write_json(path, sampled))
        pairs = dist.on_main(lambda: read_json(path))
        about = f"from {rollouts.num_samples} answers to each of {len(data):,} questions, in {path}"
        fix = "raise --num_samples, or use tasks that the model solves sometimes"
    dist.print0(f"{data.split}: {len(pairs):,} pairs, {about}")
    if not pairs:
        raise ValueError(f"no pairs in {data.name} ({data.split}), {about}; {fix}")
    return pairs


if __name__ == "__main__":
    start(main, ChatDPO(), __doc__)
