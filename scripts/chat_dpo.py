"""
Preference tuning of a chat model by DPO, on pairs of a chosen and a rejected answer.

    python -m scripts.chat_dpo                          # right and wrong answers of the SFT model
    python -m scripts.chat_dpo --pairs=HuggingFaceH4/ultrafeedback_binarized
    torchrun --nproc_per_node=8 -m scripts.chat_dpo -- --task=gsm8k

The reward of an answer is beta times its log-probability ratio to the parent, the margin of a pair
is the reward of the chosen answer minus that of the rejected one, and the loss is
-log sigmoid(margin). Source: Rafailov et al., arXiv:2305.18290.

Reads   chatsft_checkpoints/<tag>/ and preference pairs, or the questions of the tasks
Writes  chatdpo_checkpoints/<tag>/ with metrics.jsonl, chatdpo_checkpoints/pairs_<hash>.json if the
        pairs are sampled, and the section "Chat DPO"
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import rl, stats
from nanochat.chat_format import Message, render, render_prompt
from nanochat.checkpoint import CHANGED, Checkpoint, changed_model_code, load_model, stage_folder
from nanochat.common import fingerprint, read_json, write_json
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.dist import DistContext
from nanochat.engine import Engine, choose_engine_compile
from nanochat.finetune import inherited_state, open_stage, parent_inputs
from nanochat.gpt import GPT, inference_copy
from nanochat.loss import chunked_loss, cross_entropy, token_losses
from nanochat.optim import TUNING, MuonAdamW, decay_factor, lr_factor
from nanochat.recipe import code_digests, data_id, make_recipe
from nanochat.rows import signed_ids
from nanochat.run import Run, skip_if_finished
from nanochat.sandbox import Tools
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import TrainConfig
from scripts.chat_rl import BUILTIN_TASKS, MOMENTUM, SCHEDULE, TASK
from tasks.base import Conversation, Task
from tasks.buckets import held_out_questions, rl_questions
from tasks.chats import Chats
from tasks.layouts import read_pair

SECTION = "Chat DPO"
Pair = list[list[int]]
"""The chosen and the rejected conversation: the id of each trained token, ~id of the others."""


@dataclass(frozen=True)
class ChatDPO:
    NOT_IN_RECIPE: ClassVar[str] = "source pairs"

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
    rollouts: rl.RolloutConfig = rl.RolloutConfig(num_samples=8)
    train: TrainConfig = TrainConfig(
        device_batch_size=8, eval_every=60, save_every=60, keep=1, optim=TUNING
    )

    def __post_init__(self) -> None:
        require_at_least(self, eval_examples=1)
        require_positive(self, "num_iterations", "num_epochs", "init_lr_frac", "beta")
        if self.pairs and self.task:
            raise ValueError("--pairs and --task are both set; use one of them")
        if self.train.dist.dtype == "fp8":  # GPUs multiply multiples of 16 rows only
            raise ValueError("fp8 needs rows of one length, unlike DPO; omit --dtype=fp8")


def main(cfg: ChatDPO) -> None:
    cfg, parent, tag, _, dist = open_stage("dpo", cfg)
    seed, per_step = cfg.train.seed, cfg.rollouts.examples_per_step
    rl.require_divisible(per_step, dist)
    inputs, task = parent_inputs(parent), ""
    if cfg.pairs:
        data = Preferences("train", cfg.pairs), Preferences("val", cfg.pairs)
        inputs["pairs"] = data_id([each.identity for each in data])
    else:
        task = cfg.task or BUILTIN_TASKS.get(parent.state["source"].get("dataset"), TASK)
        data = rl_questions(task, seed), held_out_questions(task, cfg.eval_examples)
        inputs["questions"] = data_id([each.identity for each in data])
    resolved = {**settings(cfg), "task": task}
    recipe = make_recipe(cfg, inputs)
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Model, frozen reference, pairs, optimizer
    model, reference = load_model(parent, dist), inference_copy(load_model(parent, dist))
    pairs, held_out = (make_pairs(cfg, each, parent, dist) for each in data)
    held_out = held_out[: cfg.eval_examples]
    num_steps = cfg.num_iterations or max(1, round(cfg.num_epochs * len(pairs) / per_step))
    rules = make_rules(cfg.train.optim, model.cfg.d_model, cfg.init_lr_frac)
    tokenizer, optimizer = parent.tokenizer(), MuonAdamW(model, rules, dist)

    run = Run("dpo", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    run.state |= {**inherited_state(parent), "settings": resolved}
    found = {}
    batch_tokens = per_step * 2 * model.cfg.max_seq_len  # at most
    with run.begin(num_steps, batch_tokens, None):
        size, pad = run.device_rows, tokenizer.bos_id
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            if run.due(cfg.train.eval_every):
                own = held_out[dist.rank :: dist.world_size]
                batches = pair_batches(own, size, pad, dist.device)
                found = evaluate_pairs(model, reference, cfg.beta, batches, dist)
                run.log({f"held_out_{name}": each.value for name, each in found.items()})
            if run.finished:
                break
            draws = rl.draws_of_step(step, per_step, dist)
            mine = [pairs[rl.drawn_index(draw, len(pairs), seed)] for draw in draws]
            for tokens, targets in pair_batches(mine, size, pad, dist.device):
                loss = dpo_loss(model, reference, cfg.beta, tokens, targets)
                run.accumulate(loss, len(tokens) // 2, tokens.numel())  # per pair
            decay = decay_factor(step, num_steps)
            run.update(lr_factor(step, num_steps, SCHEDULE), MOMENTUM, decay)
    values = {f"Held-out {name.replace('_', ' ')} after": x._asdict() for name, x in found.items()}
    about = {"Training pairs": len(pairs), "Number of iterations": num_steps}
    run.finish(SECTION, {**about, CHANGED: changed_model_code(parent), **values})


# ---- Preference pairs ----------------------------------------------------------------------------
#
#   {"prompt": "...", "chosen": "...", "rejected": "..."}       one pair per line
#   {"chosen": [{"role": "user", ...}, ...], "rejected": [...]}    lists of messages
#
# A prompt is a string or a list of messages. An answer is a string, or a list of messages that may
# include the prompt.


class Preferences(Chats):
    """
    Preference pairs of a JSON Lines file or of <owner>/<name> on the Hub; the conversations are
    those with the chosen answer. Raises ValueError naming an invalid line of a file; invalid rows
    from the Hub are counted and skipped.
    """

    name = "Preferences"
    default = (
        "HuggingFaceH4/ultrafeedback_binarized{train: data/train_prefs-*, val: data/test_prefs-*}"
    )

    def __init__(self, split: str, source: str | None = None):
        super().__init__(split, source and source.removeprefix("jsonl:"))

    def read(self, row: Any) -> list[Conversation]:
        return read_pair(row, self.names)

    def messages(self, item: list[Conversation]) -> Conversation:
        return item[0]


# ---- Pairs ---------------------------------------------------------------------------------------


def make_pairs(cfg: ChatDPO, data: Task, parent: Checkpoint, dist: DistContext) -> list[Pair]:
    """
    Encoded pairs that fit into the model's context. Sampled ones are saved in the folder of DPO
    checkpoints, so that a resumed run trains on the same. Raises ValueError if there are none.
    """
    tokenizer, T = parent.tokenizer(), parent.state["model"]["max_seq_len"]
    if isinstance(data, Preferences):
        every = [[encode_conversation(tokenizer, each) for each in pair] for pair in data.items]
        pairs = [pair for pair in every if max(map(len, pair)) <= T + 1]  # the last is no input
        num_long = len(every) - len(pairs)
        about = f"without {num_long:,} of more than {T:,} tokens"
        fix = "use shorter pairs, or a model with a larger max_seq_len"
    else:
        rollouts, seed = cfg.rollouts, cfg.train.seed
        made_of = [parent.fingerprint, data.identity, asdict(rollouts), seed]
        scored_by = [x for name, x in code_digests().items() if name.startswith("tasks/")]
        key = fingerprint([*made_of, scored_by])
        path = stage_folder("dpo") / f"pairs_{key}.json"
        if not dist.on_main(path.exists):
            tokens = len(data) * rollouts.num_samples * rollouts.max_new_tokens
            compiled = choose_engine_compile(dist.device, tokens)
            model = inference_copy(load_model(parent, dist))
            engine = Engine(model, tokenizer, tool=Tools(), compiled=compiled)
            sampled = sample_pairs(engine, data, rollouts, seed, dist)
            dist.on_main(lambda: write_json(path, sampled))
        pairs = dist.on_main(lambda: read_json(path))
        about = f"from {rollouts.num_samples} answers to each of {len(data):,} questions, in {path}"
        fix = "raise --num_samples, or use tasks that the model solves sometimes"
    dist.print0(f"{data.split}: {len(pairs):,} pairs, {about}")
    if not pairs:
        raise ValueError(f"no pairs in {data.name} ({data.split}), {about}; {fix}")
    return pairs


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Encode a conversation; only its last answer is trained on."""
    ids, mask = render(tokenizer, messages)
    start = len(render_prompt(tokenizer, messages))
    return signed_ids(ids, [0] * start + mask[start:]).tolist()


def sample_pairs(
    engine: Engine, task: Task, cfg: rl.RolloutConfig, seed: int, dist: DistContext
) -> list[Pair]:
    """
    Answer each question of `task` `num_samples` times and pair the first of the best answers with
    the first of the worst. Questions whose answers all have the same score give no pair. The result
    is the same on every rank.
    """
    questions, found = range(len(task)), {}
    rollouts = rl.Rollouts(task, questions, cfg, seed, dist, engine)
    mine = questions[dist.rank :: dist.world_size]
    for i, group in zip(mine, rollouts.answer(mine)[0], strict=True):
        if group.has_signal:
            ends = [group.rewards.index(extreme(group.rewards)) for extreme in (max, min)]
            found[i] = [rl.encode_completion(group.answers[n]) for n in ends]
    every = {i: pair for part in dist.gather(found) for i, pair in part.items()}
    return [every[i] for i in sorted(every)]


def pair_batches(
    pairs: Sequence[Pair], device_rows: int, filler: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """
    Yield tokens and targets (B, T) of at most `device_rows` rows, but at least one pair, sorted by
    length; rows alternate chosen, rejected and are padded with `filler`.
    """
    ordered = sorted(pairs, key=lambda pair: max(map(len, pair)))
    each = max(1, device_rows // 2)
    for i in range(0, len(ordered), each):
        rows = [ids for pair in ordered[i : i + each] for ids in pair]
        yield rl.pad_signed(rows, filler, device)


# ---- The loss ------------------------------------------------------------------------------------


def dpo_loss(model: GPT, reference: GPT, beta: float, tokens: Tensor, targets: Tensor) -> Tensor:
    """
    Summed DPO loss of pairs; rows of tokens and targets (B, T) alternate chosen, rejected.

    Its gradient is that of the cross-entropy of each answer weighted by the derivative of the
    pair's loss, so the logits are never materialized and the body runs once.
    """
    hidden, head, compiled = model.hidden(tokens), model.head.weight, model.compiled
    nats = token_losses(hidden.detach(), head, targets, compiled)
    rewards = beta * (reference.token_losses(tokens, targets) - nats).sum(dim=1)
    margins = rewards[0::2] - rewards[1::2]
    slopes = beta * torch.sigmoid(-margins)
    weights = torch.stack((slopes, -slopes), dim=1).view(-1, 1).expand_as(targets)
    surrogate = chunked_loss(hidden, head, targets, cross_entropy, (weights,), compiled)
    return -F.logsigmoid(margins).sum() + (surrogate - surrogate.detach())


def evaluate_pairs(
    model: GPT,
    reference: GPT,
    beta: float,
    batches: Iterator[tuple[Tensor, Tensor]],
    dist: DistContext,
) -> dict[str, stats.Estimate]:
    """Loss, accuracy, margin and reward of the chosen answer over the pairs of all ranks."""
    mine = []
    for batch in batches:
        nats = reference.token_losses(*batch) - model.token_losses(*batch)
        mine += (beta * nats.sum(dim=1)).tolist()
    rewards = torch.tensor(sum(dist.gather(mine), [])).double()
    margins = rewards[0::2] - rewards[1::2]
    found = {
        "loss": -F.logsigmoid(margins),
        "accuracy": (margins.sign() + 1) / 2,  # a tie counts as half
        "margin": margins,
        "chosen_reward": rewards[0::2],
    }
    return {name: stats.mean(values.tolist()) for name, values in found.items()}


if __name__ == "__main__":
    start(main, ChatDPO(), __doc__)
