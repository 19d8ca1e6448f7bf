"""
Direct preference optimization (DPO): train on pairs of a chosen and a rejected answer.

    pairs -> rows that alternate chosen, rejected -> log-probabilities of the model and its parent
    -> reward = beta * (their difference), margin = reward of chosen - of rejected
    -> loss = -log sigmoid(margin)

Pairs come from a data set, or from the parent's own answers to questions that can be scored.
Source: Rafailov et al., arXiv:2305.18290.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
from nanochat.rl import RLConfig, RolloutConfig, RolloutLoader, require_divisible, shuffle_indices
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, Loader, MicroBatch, ShouldStop, TrainingRun
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
    rollouts = RolloutLoader(task, questions, own, seed, machine, engine.model, engine)
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
    if not machine.on_main("looking for pairs", path.exists):
        saved = [[ids.tolist() for ids in pair] for pair in sample()]
        machine.on_main("saving pairs", partial(write_json, path, saved))
    found = machine.on_main("reading pairs", partial(read_json, path))
    return [Pair(*(np.array(ids, np.int32) for ids in pair)) for pair in found]


# ---- Batches and the loss ------------------------------------------------------------------------


def collate(
    pairs: Iterable[Pair], device_rows: int, filler: int, device: torch.device
) -> list[MicroBatch]:
    """
    Micro-batches of at most `device_rows` rows, but at least one pair, sorted by length; rows
    alternate chosen, rejected and are padded with `filler`.
    """
    ordered, each, found = sorted(pairs, key=lambda pair: pair.length), max(1, device_rows // 2), []
    for i in range(0, len(ordered), each):
        part = ordered[i : i + each]
        signed = pad_right([ids.tolist() for pair in part for ids in pair], ~filler, device)
        tokens, targets = torch.where(signed < 0, ~signed, signed), signed.clamp(min=IGNORE)
        found.append(MicroBatch(tokens[:, :-1], targets[:, 1:], len(part)))
    return found


class DPOObjective:
    """
    DPO loss of rows that alternate chosen, rejected. `reference`: the parent, frozen. Tokens and
    targets are (B, T).
    """

    def __init__(self, model: GPT, reference: GPT, beta: float):
        self.model, self.reference, self.beta = model, reference, beta

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """
        Summed loss of the pairs.

        Its gradient is that of the cross-entropy of each answer weighted by the derivative of the
        pair's loss, so the logits are never materialized and the body runs once.
        """
        hidden, head = self.model.hidden(tokens), self.model.head.weight
        compiled = self.model.compiled
        nats = token_losses(hidden.detach(), head, targets, compiled)
        margins = pair_margins(self.rewards(nats, tokens, targets))
        slopes = self.beta * torch.sigmoid(-margins)
        weights = torch.stack((slopes, -slopes), dim=1).view(-1, 1).expand_as(targets)
        surrogate, _ = chunked_cross_entropy(hidden, head, targets, weights, compiled)
        return -F.logsigmoid(margins).sum() + (surrogate - surrogate.detach())

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (nats) of each target, (B, T)."""
        return self.model.token_losses(tokens, targets)

    def rewards(self, nats: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Rewards of the answers, (B,), given the model's cross-entropy of each target (B, T)."""
        return self.beta * (self.reference.token_losses(tokens, targets) - nats).sum(dim=1)


def pair_margins(rewards: Tensor) -> Tensor:
    """Margins of pairs (B / 2,) from rewards (B,) that alternate chosen, rejected."""
    return rewards[0::2] - rewards[1::2]


@dataclass(eq=False)
class PairLoader(Loader):
    """
    Batches of pairs; each epoch has its own random order. Raises ValueError if examples_per_step is
    not a multiple of the world size.
    """

    pairs: Sequence[Pair]
    cfg: RolloutConfig
    seed: int
    machine: DistContext
    filler: int
    """Token id of the padding."""
    max_seq_len: int

    def __post_init__(self) -> None:
        require_divisible(self.cfg.examples_per_step, self.machine)
        self.batch_tokens = self.cfg.examples_per_step * 2 * self.max_seq_len
        ids = b"".join(ids.tobytes() for pair in self.pairs for ids in pair)
        digest = hashlib.sha256(ids).hexdigest()[:16]
        self.identity = {"dpo": asdict(self.cfg), "pair_digest": digest}
        self.metrics: dict[str, float] = {}

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        first, per_step = step * self.cfg.examples_per_step, self.cfg.examples_per_step
        mine = range(first + self.machine.rank, first + per_step, self.machine.world_size)
        return collate(map(self.pair, mine), device_rows, self.filler, self.machine.device)

    def pair(self, draw: int) -> Pair:
        """The pair of a draw, which are numbered over the run."""
        epoch, position = divmod(draw, len(self.pairs))
        return self.pairs[shuffle_indices(len(self.pairs), f"{self.seed}-{epoch}")[position]]

    def describe(self, run: TrainingRun) -> dict[str, str]:
        return {"pairs": f"{len(self.pairs):,}, {self.cfg.examples_per_step} per step"}


# ---- Evaluation on held-out pairs ----------------------------------------------------------------


class PairEvaluator(Callback):
    """
    Evaluates held-out pairs before and after training and every `eval_every` steps, in passes of
    `device_rows` rows.
    """

    def __init__(
        self, objective: DPOObjective, loader: PairLoader, pairs: Sequence[Pair], device_rows: int
    ):
        self.objective, self.loader = objective, loader
        self.pairs, self.device_rows = pairs, device_rows
        self.before = self.after = self.measure("before")

    def measure(self, when: str) -> dict[str, stats.Estimate]:
        """Evaluate the current model and print the result."""
        machine, objective, rewards = self.loader.machine, self.objective, []
        mine = self.pairs[machine.rank :: machine.world_size]
        with machine.working(f"evaluating {len(mine)} pairs"):
            for each in collate(mine, self.device_rows, self.loader.filler, machine.device):
                nats = objective.token_losses(each.tokens, each.targets)
                rewards += objective.rewards(nats, each.tokens, each.targets).tolist()
        every = torch.tensor([x for rank in machine.gather(rewards) for x in rank]).double()
        margins = pair_margins(every)
        found = {
            "loss": -F.logsigmoid(margins),
            "accuracy": (margins.sign() + 1) / 2,  # a tie counts as half
            "margin": margins,
            "chosen_reward": every[0::2],
        }
        result = {name: stats.mean(values.tolist()) for name, values in found.items()}
        shown = (f"{name} {x.value:.4f} +- {x.se:.4f}" for name, x in result.items())
        machine.print0(f"{when}: held-out {', '.join(shown)} ({len(margins)} pairs)")
        return result

    def before_step(self, step: int, share: float) -> None:
        if step == 0:
            self.run.log(0, held_out_metrics(self.before))

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        self.after = self.measure("after" if last else f"step {step}")
        return held_out_metrics(self.after)

    def values(self) -> dict[str, Any]:
        """Held-out loss, accuracy, margin and reward of the chosen answer before and after DPO."""
        return {
            f"Held-out {name.replace('_', ' ')} {when}": records.estimate(*x)
            for when, result in (("before", self.before), ("after", self.after))
            for name, x in result.items()
        }


def held_out_metrics(result: dict[str, stats.Estimate]) -> dict[str, float]:
    """Metrics of an evaluation."""
    return {f"held_out_{name}": x.value for name, x in result.items()}
