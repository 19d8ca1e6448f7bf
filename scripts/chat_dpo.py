"""
Preference tuning of a chat model by DPO, on pairs of a chosen and a rejected answer.

    python -m scripts.chat_dpo                          # right and wrong answers of the SFT model
    python -m scripts.chat_dpo --pairs=HuggingFaceH4/ultrafeedback_binarized
    torchrun --nproc_per_node=8 -m scripts.chat_dpo -- --task=gsm8k

Reads   chatsft_checkpoints/<tag>/ and preference pairs, or the questions of the tasks
Writes  chatdpo_checkpoints/<tag>/ with metrics.jsonl, chatdpo_checkpoints/pairs_<hash>.json if the
        pairs are sampled, and the section "Chat DPO"
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, stage_folder
from nanochat.common import fingerprint
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.distributed import DistContext, init_distributed
from nanochat.engine import Engine, choose_engine_compile
from nanochat.finetune import choose_tag, open_parent, parent_inputs
from nanochat.gpt import GPT, inference_copy
from nanochat.lab.dpo import (
    Pair,
    dpo_loss,
    encode_pairs,
    evaluate_pairs,
    held_out_metrics,
    held_out_values,
    keep_pairs,
    pair_batches,
    pair_digest,
    pairs_of_step,
    sample_pairs,
)
from nanochat.optim import MuonAdamW, decay_factor, lr_factor
from nanochat.rl import RolloutConfig, require_divisible
from nanochat.sandbox import calculate
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import Run, skip_if_finished
from scripts.chat_rl import BUILTIN_TASKS, MOMENTUM, SCHEDULE, TASK, AnswerTuning, open_questions
from tasks.base import Task
from tasks.preferences import Preferences

SECTION = "Chat DPO"


@dataclass(frozen=True)
class ChatDPO(AnswerTuning):
    pairs: str | None = None
    """Preference pairs: a JSON Lines file, or <owner>/<name> on the Hub. Default: the parent's own
    answers to the questions of task."""
    task: str | None = None
    """Task or mixture of tasks whose right and wrong answers are paired, as in gsm8k or
    gsm8k,aqua=2000. Default: as in scripts.chat_rl."""
    init_lr_frac: float = 0.03
    eval_examples: int = 400
    """Number of held-out pairs to evaluate, or of held-out questions to answer for them."""
    beta: float = 0.1
    """Weight of the log-probability ratio to the parent; lower values allow larger changes."""
    rollouts: RolloutConfig = RolloutConfig(num_samples=8)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, eval_examples=1)
        require_positive(self, "beta")
        if self.pairs and self.task:
            raise ValueError("--pairs and --task are both set; use one of them")


def main(cfg: ChatDPO) -> None:
    seed, per_step = cfg.train.seed, cfg.rollouts.examples_per_step
    dist = init_distributed(cfg.train.machine, seed)
    parent = open_parent(cfg.source, tuple(FOLDERS), cfg.train, dist)
    default = BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
    spec = None if cfg.pairs else cfg.task or default

    # Training and held-out data
    tag = choose_tag("dpo", parent, cfg.train)
    data = open_data(cfg, spec)
    found = {"pairs": fingerprint(data[0].identity)} if spec is None else {}
    resolved, inputs = {**settings(cfg), "task": spec}, {**parent_inputs(parent), **found}
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, dist):
        return dist.close()

    # Models, pairs, optimizer
    require_divisible(per_step, dist)
    model, tokenizer = load_model(parent, dist), parent.tokenizer()
    pairs, held_out = make_pairs(cfg, data, parent, model, tokenizer, dist)
    reference = load_model(parent, dist).to(dist.dtype).requires_grad_(False)
    num_steps = cfg.num_iterations or max(1, round(cfg.num_epochs * len(pairs) / per_step))
    rules = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    optimizer = MuonAdamW(model, rules, dist)

    run = Run(
        *("dpo", tag, cfg.train, model, optimizer, tokenizer, dist),
        num_steps=num_steps,
        batch_tokens=per_step * 2 * model.cfg.max_seq_len,
        kernels=None,
        settings=resolved,
        inputs=inputs,
        identity={
            "dpo": asdict(cfg.rollouts),
            "pair_digest": pair_digest(pairs),
            "schedule": asdict(SCHEDULE),
            "task": spec,
            "beta": cfg.beta,
            "init_lr_frac": cfg.init_lr_frac,
            **inputs,
        },
        state={"source": parent.state["source"]},
        keep_optimizer=cfg.save_optimizer,
    )
    n = min(len(held_out), cfg.eval_examples)
    some = [held_out[i * len(held_out) // n] for i in range(n)]
    shape = cfg.train.device_batch_size or 8, tokenizer.bos_id, dist.device

    def measure(when):
        result = evaluate_pairs(model, reference, cfg.beta, some, shape, dist)
        shown = (f"{name} {x.value:.4f} +- {x.se:.4f}" for name, x in result.items())
        dist.print0(f"{when}: held-out {', '.join(shown)} ({n} pairs)")
        return result

    before = after = measure("before")
    with run:
        for step in run.steps():  # from the last checkpoint on
            if step == 0:
                run.log(held_out_metrics(before))
            if run.due(cfg.train.eval_every):
                after = measure("after" if run.finished else f"step {step}")
                run.log(held_out_metrics(after))
            if run.finished:
                break
            mine = pairs_of_step(pairs, step, per_step, seed, dist)
            for batch in pair_batches(mine, *shape):
                loss = dpo_loss(model, reference, cfg.beta, batch.tokens, batch.targets)
                run.accumulate(loss, len(batch.counts) // 2, batch.tokens.numel())  # per pair
            decay = decay_factor(step, num_steps)
            run.update(lr_factor(step, num_steps, SCHEDULE), MOMENTUM, decay)
    values = {"Training pairs": len(pairs), "Number of iterations": num_steps}
    run.finish(SECTION, {**values, **held_out_values(before=before, after=after)})


def open_data(cfg: ChatDPO, spec: str | None) -> tuple[Task, Task]:
    """Training and held-out pairs of --pairs or, with `spec`, questions of its tasks."""
    if spec is None:
        assert cfg.pairs is not None
        return Preferences("train", cfg.pairs), Preferences("val", cfg.pairs)
    return open_questions(spec, spec, cfg.eval_examples, cfg.train.seed)


def make_pairs(
    cfg: ChatDPO,
    data: Sequence[Task],
    parent: Checkpoint,
    model: GPT,
    tokenizer: Tokenizer,
    dist: DistContext,
) -> list[list[Pair]]:
    """
    Encoded pairs of each task; sampled ones are saved in the folder of DPO checkpoints. Raises
    ValueError if a task has none.
    """
    T, engine, found = model.cfg.max_seq_len, None, []
    if not cfg.pairs:
        tokens = sum(map(len, data)) * cfg.rollouts.num_samples * cfg.rollouts.max_new_tokens
        compiled = choose_engine_compile(None, dist.device, tokens)
        twin = inference_copy(model)
        engine = Engine(twin, tokenizer, tool=calculate, compiled=compiled)
    for seed, task in enumerate(data, cfg.train.seed):
        if isinstance(task, Preferences):
            pairs, num_long = encode_pairs(task.pairs, tokenizer, T)
            about = f"without {num_long:,} of more than {T:,} tokens, {task.num_skipped:,} invalid"
            fix = "use shorter pairs, or a model with a larger max_seq_len"
        else:
            assert engine is not None
            sampling = asdict(replace(cfg.rollouts, examples_per_step=1))  # has no influence
            origin = fingerprint([parent.fingerprint, task.identity, sampling, seed])
            sample = partial(sample_pairs, engine, task, cfg.rollouts, seed, dist)
            path = stage_folder("dpo") / f"pairs_{origin}.json"
            pairs = keep_pairs(path, sample, dist)
            about = f"from {cfg.rollouts.num_samples} answers to each of {len(task):,} questions"
            dist.print0(f"{task.split}: pairs are kept in {path}")
            fix = "raise --num_samples, or use tasks that the model solves sometimes"
        dist.print0(f"{task.split}: {len(pairs):,} pairs, {about}")
        if not pairs:
            raise ValueError(f"no pairs in {task.name} ({task.split}), {about}; {fix}")
        found.append(pairs)
    return found


if __name__ == "__main__":
    start(main, ChatDPO(), __doc__)
