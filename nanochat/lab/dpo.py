"""
Direct preference optimization (DPO): train on pairs of a chosen and a rejected answer.

    pairs -> rows that alternate chosen, rejected -> log-probabilities of the model and its parent
    -> reward = beta * (their difference), margin = reward of chosen - of rejected
    -> loss = -log sigmoid(margin)

Pairs come from a data set, or from the parent's own answers to questions that can be scored.
Source: Rafailov et al., arXiv:2305.18290.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import records, stats
from nanochat.attention import pad_right
from nanochat.chat_format import Message, render, render_prompt
from nanochat.chat_packing import signed_ids
from nanochat.common import read_json, write_json
from nanochat.distributed import DistContext
from nanochat.engine import Completion, Engine
from nanochat.eval_chat import Questions
from nanochat.gpt import GPT
from nanochat.loss import IGNORE, chunked_cross_entropy, token_losses
from nanochat.rl import RLConfig, RolloutConfig, Rollouts, shuffle_indices
from nanochat.tokenizer import Tokenizer
from nanochat.train import Batch
from tasks.preferences import Preference

# ---- Pairs as tokens -----------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two conversations, int32: the id of each token that is trained on, ~id of the others."""

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def length(self) -> int:
        """Number of tokens of the longer conversation."""
        return max(map(len, self))


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> np.ndarray:
    """Encode a conversation; only its last answer is trained on."""
    ids, mask = render(tokenizer, messages)
    start = len(render_prompt(tokenizer, messages))
    return signed_ids(ids, [0] * start + mask[start:])


def encode_completion(answer: Completion) -> np.ndarray:
    """Encode a sampled answer with its prompt; the sampled tokens are trained on."""
    end = [] if answer.end is None else [answer.end]
    mask = [False] * len(answer.prompt) + answer.sampled + [True] * len(end)
    return signed_ids(answer.prompt + answer.ids + end, mask)


def encode_pairs(
    preferences: Iterable[Preference], tokenizer: Tokenizer, max_seq_len: int
) -> tuple[list[Pair], int]:
    """Encode pairs. Returns those that fit in `max_seq_len`, and the number of longer ones."""
    every = [
        Pair(*(encode_conversation(tokenizer, messages) for messages in preference))
        for preference in preferences
    ]
    kept = [pair for pair in every if pair.length <= max_seq_len + 1]  # the last token is no input
    return kept, len(every) - len(kept)


def sample_pairs(
    engine: Engine, task: Questions, cfg: RolloutConfig, seed: int, machine: DistContext
) -> list[Pair]:
    """
    Answer each question of `task` `num_samples` times and pair the first of the best answers with
    the first of the worst. Questions whose answers all have the same score give no pair. The result
    is the same on every rank.
    """
    questions, found = range(len(task)), {}
    own = RLConfig(**asdict(cfg))
    rollouts = Rollouts(task, questions, own, seed, machine, engine.model, engine)
    mine = questions[machine.rank :: machine.world_size]
    for draw, group in zip(mine, rollouts.answer(mine), strict=True):
        if group.has_signal:
            which = [group.rewards.index(extreme(group.rewards)) for extreme in (max, min)]
            found[draw] = Pair(*(encode_completion(group.answers[i]) for i in which))
    for other in machine.gather(found):
        found |= other
    return [found[draw] for draw in sorted(found)]


def keep_pairs(path: Path, sample: Callable[[], list[Pair]], machine: DistContext) -> list[Pair]:
    """
    Return the pairs in the file `path`. At first use, `sample` makes them and they are saved, so
    that a resumed run trains on the same pairs.
    """
    if not machine.on_main(path.exists):
        saved = [[ids.tolist() for ids in pair] for pair in sample()]
        machine.on_main(partial(write_json, path, saved))
    found = machine.on_main(partial(read_json, path))
    return [Pair(*(np.array(ids, np.int32) for ids in pair)) for pair in found]


# ---- Batches and the loss ------------------------------------------------------------------------


def pair_batches(
    pairs: Iterable[Pair], device_rows: int, filler: int, device: torch.device
) -> Iterator[Batch]:
    """
    Batches of at most `device_rows` rows, but at least one pair, sorted by length; rows alternate
    chosen, rejected and are padded with `filler`.
    """
    ordered, each = sorted(pairs, key=lambda pair: pair.length), max(1, device_rows // 2)
    for i in range(0, len(ordered), each):
        part = ordered[i : i + each]
        signed = pad_right([ids.tolist() for pair in part for ids in pair], ~filler, device)
        tokens, targets = torch.where(signed < 0, ~signed, signed), signed.clamp(min=IGNORE)
        yield Batch(tokens[:, :-1], targets[:, 1:], [1] * len(signed))


def dpo_loss(model: GPT, reference: GPT, beta: float, tokens: Tensor, targets: Tensor) -> Tensor:
    """
    Summed DPO loss of pairs; rows of tokens and targets (B, T) alternate chosen, rejected.

    Its gradient is that of the cross-entropy of each answer weighted by the derivative of the
    pair's loss, so the logits are never materialized and the body runs once.
    """
    hidden, head, compiled = model.hidden(tokens), model.head.weight, model.compiled
    nats = token_losses(hidden.detach(), head, targets, compiled)
    margins = pair_margins(answer_rewards(reference, beta, nats, tokens, targets))
    slopes = beta * torch.sigmoid(-margins)
    weights = torch.stack((slopes, -slopes), dim=1).view(-1, 1).expand_as(targets)
    surrogate, _ = chunked_cross_entropy(hidden, head, targets, weights, compiled)
    return -F.logsigmoid(margins).sum() + (surrogate - surrogate.detach())


def answer_rewards(
    reference: GPT, beta: float, nats: Tensor, tokens: Tensor, targets: Tensor
) -> Tensor:
    """Rewards of the answers, (B,), given the model's cross-entropy of each target (B, T)."""
    return beta * (reference.token_losses(tokens, targets) - nats).sum(dim=1)


def pair_margins(rewards: Tensor) -> Tensor:
    """Margins of pairs (B / 2,) from rewards (B,) that alternate chosen, rejected."""
    return rewards[0::2] - rewards[1::2]


def pairs_of_step(
    pairs: Sequence[Pair], step: int, per_step: int, seed: int, dist: DistContext
) -> list[Pair]:
    """This rank's pairs of a step; each epoch has its own random order."""
    found = []
    for draw in range(step * per_step + dist.rank, (step + 1) * per_step, dist.world_size):
        epoch, position = divmod(draw, len(pairs))
        found.append(pairs[shuffle_indices(len(pairs), f"{seed}-{epoch}")[position]])
    return found


def pair_digest(pairs: Sequence[Pair]) -> str:
    """Hash of the tokens of all pairs."""
    ids = b"".join(ids.tobytes() for pair in pairs for ids in pair)
    return hashlib.sha256(ids).hexdigest()[:16]


# ---- Evaluation on held-out pairs ----------------------------------------------------------------


def evaluate_pairs(
    model: GPT,
    reference: GPT,
    beta: float,
    pairs: Sequence[Pair],
    shape: tuple[int, int, torch.device],
    dist: DistContext,
) -> dict[str, stats.Estimate]:
    """
    Loss, accuracy, margin and reward of the chosen answer over pairs, by name. shape: rows per
    pass, filler and device, as for `pair_batches`.
    """
    rewards, mine = [], pairs[dist.rank :: dist.world_size]
    for each in pair_batches(mine, *shape):
        nats = model.token_losses(each.tokens, each.targets)
        rewards += answer_rewards(reference, beta, nats, each.tokens, each.targets).tolist()
    every = torch.tensor([x for rank in dist.gather(rewards) for x in rank]).double()
    margins = pair_margins(every)
    found = {
        "loss": -F.logsigmoid(margins),
        "accuracy": (margins.sign() + 1) / 2,  # a tie counts as half
        "margin": margins,
        "chosen_reward": every[0::2],
    }
    return {name: stats.mean(values.tolist()) for name, values in found.items()}


def held_out_metrics(result: dict[str, stats.Estimate]) -> dict[str, float]:
    """Metrics of an evaluation."""
    return {f"held_out_{name}": x.value for name, x in result.items()}


def held_out_values(**results: dict[str, stats.Estimate]) -> dict[str, Any]:
    """Values for the record, by name and time (before, after)."""
    return {
        f"Held-out {name.replace('_', ' ')} {when}": records.estimate(*x)
        for when, result in results.items()
        for name, x in result.items()
    }
