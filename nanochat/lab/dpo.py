"""
Direct preference optimization (DPO): train on pairs of a chosen and a rejected answer.

    pairs -> rows that alternate chosen, rejected -> log-probabilities of the model and its parent
    -> reward = beta * (their difference), margin = reward of chosen - of rejected
    -> loss = -log sigmoid(margin)

Pairs come from a data set, or from the parent's own answers to questions that can be scored.
Source: Rafailov et al., arXiv:2305.18290.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import stats
from nanochat.chat_format import Message, render, render_prompt
from nanochat.dist import DistContext
from nanochat.engine import Engine
from nanochat.eval_chat import Questions
from nanochat.gpt import GPT
from nanochat.loss import chunked_cross_entropy, token_losses
from nanochat.rl import (
    RLConfig,
    RolloutConfig,
    Rollouts,
    encode_completion,
    pad_signed,
    shuffle_indices,
)
from nanochat.rows import signed_ids
from nanochat.tokenizer import Tokenizer

Pair = list[list[int]]
"""The chosen and the rejected conversation: the id of each trained token, ~id of the others."""


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Encode a conversation; only its last answer is trained on."""
    ids, mask = render(tokenizer, messages)
    start = len(render_prompt(tokenizer, messages))
    return signed_ids(ids, [0] * start + mask[start:]).tolist()


def sample_pairs(
    engine: Engine, task: Questions, cfg: RolloutConfig, seed: int, dist: DistContext
) -> list[Pair]:
    """
    Answer each question of `task` `num_samples` times and pair the first of the best answers with
    the first of the worst. Questions whose answers all have the same score give no pair. The result
    is the same on every rank.
    """
    questions, own, found = range(len(task)), RLConfig(**asdict(cfg)), {}
    rollouts = Rollouts(task, questions, own, seed, dist, engine.model, engine)
    mine = questions[dist.rank :: dist.world_size]
    for i, group in zip(mine, rollouts.answer(mine), strict=True):
        if group.has_signal:
            ends = [group.rewards.index(extreme(group.rewards)) for extreme in (max, min)]
            found[i] = [encode_completion(group.answers[n]) for n in ends]
    every = {i: pair for part in dist.gather(found) for i, pair in part.items()}
    return [every[i] for i in sorted(every)]


def pairs_of_step(
    pairs: Sequence[Pair], step: int, per_step: int, seed: int, dist: DistContext
) -> list[Pair]:
    """This rank's pairs of a step; each epoch has its own random order."""
    found = []
    for draw in range(step * per_step + dist.rank, (step + 1) * per_step, dist.world_size):
        epoch, position = divmod(draw, len(pairs))
        found.append(pairs[shuffle_indices(len(pairs), f"{seed}-{epoch}")[position]])
    return found


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
        yield pad_signed(rows, filler, device)


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
    surrogate, _ = chunked_cross_entropy(hidden, head, targets, weights, compiled)
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
