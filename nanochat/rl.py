"""
Reinforcement learning on questions with scorable answers.

    questions -> Rollouts: n answers each, rewards -> advantages -> micro_batches -> scripts.chat_rl

On-policy REINFORCE: each batch of rollouts is used for one update, so there is no ratio to clip.
The loss of a step is the mean over all trained tokens of all ranks, so every token has the same
weight whatever the length of its answer (as in Dr. GRPO, arXiv:2503.20783, except for its constant
divisor). The baseline is the group's mean reward (arXiv:2402.03300). Gradients are those of the
plain softmax; they ignore top_k and temperature.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanochat.attention import pad_right
from nanochat.config import require_at_least, require_positive
from nanochat.dist import DistContext
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_chat import ChatTask, longest_prompt, render_prompts, score_answer
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.rows import permutation, signed_ids
from nanochat.train import Batch

# ---- Rollouts and the policy gradient ------------------------------------------------------------


@dataclass(frozen=True)
class RolloutConfig:
    examples_per_step: int = 16
    """Questions per step over all ranks, or pairs in DPO."""
    num_samples: int = 16
    """Answers per question; in RL, their mean reward is the baseline."""
    max_new_tokens: int = 256
    """Maximum number of tokens per answer."""
    temperature: float = 1.0
    """Sampling temperature of the answers."""
    top_k: int | None = 50
    """Sample from the k most likely tokens; None = all tokens."""
    length_penalty: float = 0.0
    """Share of the reward that a right answer of maximum length loses; shorter ones lose less."""

    def __post_init__(self) -> None:
        require_at_least(self, examples_per_step=1, num_samples=2, max_new_tokens=1)
        require_positive(self, "temperature")
        if not 0 <= self.length_penalty <= 1:
            raise ValueError(f"length_penalty must be in [0, 1], got {self.length_penalty}")

    def sampling(self, seed: int) -> Sampling:
        """Sampling settings of both rollouts and evaluations."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, seed=seed)


class Group(NamedTuple):
    """The answers to one question and their rewards."""

    answers: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """False if all rewards are equal, which yields no gradient."""
        return max(self.rewards) > min(self.rewards)


class Asked(NamedTuple):
    """A question whose answers are being generated."""

    question: int
    """Its index in the task."""
    attempt: int
    """Number of questions of the same draw before it."""
    answers: list[Completion]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Advantage of each answer to a question: its reward minus the mean of all."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def encode_completion(answer: Completion) -> list[int]:
    """Encode a generated answer with its prompt: sampled tokens as their id, others as ~id."""
    end = [] if answer.end is None else [answer.end]
    mask = [False] * len(answer.prompt) + answer.sampled + [True] * len(end)
    return signed_ids(answer.prompt + answer.ids + end, mask).tolist()


def pad_signed(
    rows: Sequence[list[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, (B, T) each, of `signed_ids`, right-padded with `pad`."""
    signed = pad_right(rows, ~pad, device)  # (B, T + 1)
    tokens = torch.where(signed < 0, ~signed, signed)
    return tokens[:, :-1], signed[:, 1:].clamp(min=IGNORE)  # any ~id becomes IGNORE


def micro_batches(
    groups: Sequence[Group], rows: int, pad: int, device: torch.device
) -> Iterator[Batch]:
    """
    Collate the answers of groups, sorted by length, into batches of at most `rows` rows,
    right-padded with `pad`. Targets are the sampled tokens; `tensors` has the advantages.
    """
    learned = [
        (encode_completion(answer), advantage)
        for group in groups
        for answer, advantage in zip(group.answers, advantages(group.rewards), strict=True)
    ]
    learned.sort(key=lambda each: len(each[0]))
    for i in range(0, len(learned), rows):
        signed, advantage = zip(*learned[i : i + rows], strict=True)
        x, y = pad_signed(signed, pad, device)  # (B, T)
        counts = [sum(number >= 0 for number in row) for row in signed]
        weights = torch.tensor(advantage, device=device)[:, None].expand_as(x)
        yield Batch(x, y, counts, tensors=(weights,))


def kl_to_reference(
    model: GPT, reference: GPT, batches: Iterator[Batch], dist: DistContext
) -> float:
    """
    KL(model || reference) in nats per sampled token, identical on all ranks.

    Estimated as exp(d) - 1 - d with d = log p_reference - log p_model at the sampled tokens:
    nonnegative, low variance. Source: Schulman, "Approximating KL Divergence", 2020. Unbiased for
    tokens drawn from the model; those of a step are drawn with temperature and top_k, and may be
    answers to questions with a signal only.
    """
    total = count = 0.0
    for each in batches:
        losses, others = (m.token_losses(each.tokens, each.targets) for m in (model, reference))
        d = losses - others  # 0 for ignored targets
        total += float((torch.expm1(d) - d).cpu().double().sum())  # MPS has no float64
        count += sum(each.counts)
    nats, count = dist.sum(total, count)
    return nats / count if count else 0.0


def require_divisible(examples_per_step: int, dist: DistContext) -> None:
    """Raise ValueError unless the ranks can share the examples of a step equally."""
    if examples_per_step % dist.world_size:
        raise ValueError(
            f"examples_per_step {examples_per_step} is not a multiple of "
            f"the world size {dist.world_size}"
        )


def draws_of_step(step: int, count: int, dist: DistContext) -> range:
    """This rank's share of the `count` draws of a step, numbered over the run."""
    return range(step * count + dist.rank, (step + 1) * count, dist.world_size)


def drawn_index(draw: int, n: int, seed: int, attempt: int = 0) -> int:
    """Which of `n` elements a draw has; each epoch and attempt has its own random order."""
    epoch, position = divmod(draw, n)
    return int(permutation(seed, epoch, attempt, n)[position])


@dataclass(eq=False)
class Rollouts:
    """
    The model's answers to the questions of a step, and their rewards.

    Raises ValueError if there are no questions or examples_per_step is not a multiple of the world
    size.
    """

    task: ChatTask
    questions: Sequence[int]
    """Indices of the task's questions to train on."""
    cfg: RolloutConfig
    seed: int
    dist: DistContext
    engine: Engine
    """Runs a copy of the model, which the caller keeps up to date."""

    def __post_init__(self) -> None:
        require_divisible(self.cfg.examples_per_step, self.dist)
        if not self.questions:
            raise ValueError("no questions to train on")

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return means over the groups and answers of all ranks."""
        num_groups = self.cfg.examples_per_step
        num_answers = num_groups * self.cfg.num_samples
        answers = [answer for group in groups for answer in group.answers]
        mine = {
            "reward": sum(sum(group.rewards) for group in groups) / num_answers,
            "answer_tokens": sum(len(answer.ids) for answer in answers) / num_answers,
            "cut_off": sum(answer.finish == "length" for answer in answers) / num_answers,
            "without_signal": sum(not group.has_signal for group in groups) / num_groups,
            "reward_std": sum(statistics.pstdev(group.rewards) for group in groups) / num_groups,
        }
        return dict(zip(mine, self.dist.sum(*mine.values()), strict=True))

    def answer(self, draws: Sequence[int], resample: int = 0) -> tuple[list[Group], list[Group]]:
        """
        Generate and score `num_samples` answers to the question of each draw.

        A group without signal is replaced by the answers to another question, up to `resample`
        times, as soon as it is complete: its slots need not wait for the longest answer. Returns
        the groups of the first questions and those of the last. Answers depend on the question and
        its draw, not on the rank or, except for rounding, other prompts in the batch.
        """
        first: dict[int, Group] = {}
        last: dict[int, Group] = {}
        running = {draw: self.ask(draw, 0) for draw in draws}
        while running:
            self.engine.step()
            stopped = self.engine.stop is not None and self.engine.stop.asked
            for draw, (question, attempt, answers) in list(running.items()):
                for answer in answers if stopped else ():
                    self.engine.cancel(answer)
                if not all(answer.finish for answer in answers):
                    continue
                group = Group(answers, [self.reward(question, answer) for answer in answers])
                last[draw] = group
                first.setdefault(draw, group)
                del running[draw]
                if not (group.has_signal or attempt == resample or stopped):
                    running[draw] = self.ask(draw, attempt + 1)
        return [first[draw] for draw in draws], [last[draw] for draw in draws]

    def ask(self, draw: int, attempt: int) -> Asked:
        """
        Queue the answers to the question of a draw.

        A prompt longer than `longest_prompt` loses its oldest turns, then its beginning.
        """
        cfg, engine = self.cfg, self.engine
        question = self.questions[drawn_index(draw, len(self.questions), self.seed, attempt)]
        most = longest_prompt(engine, cfg.max_new_tokens)
        [prompt], _ = render_prompts(engine.tokenizer, [self.task[question]], most)
        seed = self.seed * 1_000_003 + attempt * 1_000_000_007 + draw
        return Asked(question, attempt, engine.submit(prompt, cfg.sampling(seed), cfg.num_samples))

    def reward(self, i: int, answer: Completion) -> float:
        """Reward of an answer to question i of the task; that of a right one falls with length."""
        score = score_answer(self.task, i, self.engine.tokenizer.decode(answer.ids))
        return score * (1 - self.cfg.length_penalty * len(answer.ids) / self.cfg.max_new_tokens)
