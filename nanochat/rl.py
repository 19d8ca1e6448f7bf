"""
Reinforcement learning on questions whose answers can be scored.

    questions -> engine: n answers each -> advantages -> weighted micro-batches -> train

REINFORCE on policy: every batch of answers is used for one update, so there is no ratio to clip.
The loss of a step is the mean over all sampled tokens that are learned from, on all ranks, so every
token weighs alike whatever the length of its answer (as in Dr. GRPO, arXiv:2503.20783, but for its
constant divisor; the group's mean as baseline: arXiv:2402.03300). Gradients are those of the plain
softmax: they ignore top_k and temperature.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch

from nanochat import records, stats
from nanochat.chat_format import render_prompt
from nanochat.common import StoppedWaiting
from nanochat.distributed import DistContext
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_chat import (
    Outcomes,
    Questions,
    fit,
    longest_prompt,
    score_by_generation,
)
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, MicroBatch, ShouldStop, TrainingRun

# ---- Evaluation before and after RL --------------------------------------------------------------


class EvalResult(NamedTuple):
    """Rewards and held-out scores of a model."""

    rewards: list[float]
    """Mean reward of each of the first training questions."""
    held_out: Outcomes

    @property
    def logged(self) -> dict[str, float]:
        """As the loop logs what it evaluates."""
        return {"pass_at_1": pass_at(self.held_out, 1).value}

    def __str__(self) -> str:
        reward, right = stats.mean(self.rewards), pass_at(self.held_out, 1)
        return (
            f"mean reward {reward.value:.4f} +- {reward.se:.4f} ({reward.n} questions), held-out "
            f"pass@1 {right.value:.4f} +- {right.se:.4f} ({right.n} questions)"
        )


def pass_at(outcomes: Outcomes, k: int) -> stats.Estimate:
    """pass@k over the held-out questions."""
    correct = [sum(score == 1 for score in scores) for scores in outcomes]
    return stats.mean_pass_at_k(len(outcomes[0]), correct, k)


def summarize(
    metrics: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    before: EvalResult,
    after: EvalResult,
) -> dict[str, Any]:
    """
    Rewards and pass@k on both sides; of several tasks, the change of each. `names` are the tasks of
    the held-out questions, one by one.
    """
    steps = [entry for entry in metrics if "reward" in entry]
    values: dict[str, Any] = {"Number of iterations": len(steps)}
    values["Mean reward before"] = records.estimate(*stats.mean(before.rewards))
    values["Mean reward after"] = records.estimate(*stats.mean(after.rewards))
    values |= changed("Mean reward", before.rewards, after.rewards)
    if "kl" in steps[-1]:
        values["KL from the start, nats a token"] = steps[-1]["kl"]
    if all("rollout_seconds" in entry for entry in steps):
        share = sum(e["rollout_seconds"] for e in steps) / sum(e["step_seconds"] for e in steps)
        values["Time in rollouts"] = f"{share:.0%}"
    silent = [entry["without_signal"] for entry in steps]
    values["Groups without signal"] = f"{sum(silent) / len(silent):.1%}"
    for k in (1, 2, 4, 8, 16):
        if k <= len(before.held_out[0]):
            values[f"pass@{k} before"] = records.estimate(*pass_at(before.held_out, k))
            values[f"pass@{k} after"] = records.estimate(*pass_at(after.held_out, k))
    items = [[sum(o) / len(o) for o in result.held_out] for result in (before, after)]
    values |= changed("pass@1", *items)
    for name in sorted(set(names)) if len(set(names)) > 1 else ():
        of = [i for i, other in enumerate(names) if other == name]
        values |= changed(f"pass@1 {name}", *([scores[i] for i in of] for scores in items))
    return values


def changed(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """By how much the same items moved, and whether that is more than noise."""
    found = stats.compare(before, after)
    return {
        f"{name} change": records.estimate(found.difference, found.n, found.se),
        f"{name} verdict": found.verdict,
    }


# ---- Rollouts and the policy gradient ------------------------------------------------------------


@dataclass(frozen=True)
class RLConfig:
    examples_per_step: int = 16
    """Questions per step, all ranks together."""
    num_samples: int = 16
    """Answers to each question."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts."""
    top_k: int | None = 50
    """Among how many likeliest tokens answers are sampled. Default: all of them."""
    advantage: Literal["mean", "std", "leave_one_out"] = "mean"
    """What a reward is compared with: the group's mean; the same, divided by the group's standard
    deviation (GRPO); the mean of the group's other answers (RLOO)."""
    overlong: Literal["keep", "drop"] = "keep"
    """drop: answers cut off at max_new_tokens are not learned from."""
    length_penalty: float = 0.0
    """Taken from the reward of an answer of full length, in proportion from shorter ones."""
    format_reward: float = 0.0
    """Added to the reward of an answer in the form that a right one must have, such as a number
    after ####."""
    resample_zero_signal: int = 0
    """How many times a question whose answers all earned the same, which gives no gradient, is
    replaced by another one."""
    log_kl: bool = False
    """Log how far the model has moved from the one it began with, in nats a token of its answers;
    costs two more forward passes."""

    def __post_init__(self) -> None:
        for name in ("examples_per_step", "num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if (resample := self.resample_zero_signal) < 0:
            raise ValueError(f"resample_zero_signal must be zero or positive, got {resample}")
        if self.num_samples == 1:
            raise ValueError("num_samples=1: an answer is compared with others of its group")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


class RewardTask(Questions, Protocol):
    """A task whose answers can be scored; `tasks.base.Task` is one."""

    def locate(self, i: int) -> "tuple[RewardTask, int]": ...
    def answered(self, answer: str) -> bool: ...


@dataclass(frozen=True)
class Group:
    """The answers to one question, and what they earned."""

    answers: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """False when all answers earned the same: nothing can be learned from them."""
        return max(self.rewards) > min(self.rewards)


def advantages(
    rewards: Sequence[float], kind: Literal["mean", "std", "leave_one_out"]
) -> list[float]:
    """How much better than its group each answer was."""
    n = len(rewards)
    mean = sum(rewards) / n
    centred = [r - mean for r in rewards]
    if kind == "std":
        spread = math.sqrt(sum(c * c for c in centred) / n)
        return [c / (spread + 1e-6) for c in centred]
    if kind == "leave_one_out":
        return [c * n / (n - 1) for c in centred]
    return centred


@dataclass(frozen=True)
class Example:
    """One answer to learn from: its ids behind the prompt, which of them were sampled."""

    ids: list[int]
    targets: list[int]
    """The next id where it was sampled, IGNORE elsewhere; as long as `ids`."""
    advantage: float


def examples(groups: Sequence[Group], cfg: RLConfig) -> list[Example]:
    """What there is to learn: nothing from groups without signal, one example per answer else."""
    found = []
    for group in groups:
        if not group.has_signal:
            continue
        for answer, advantage in zip(
            group.answers, advantages(group.rewards, cfg.advantage), strict=True
        ):
            if cfg.overlong == "drop" and answer.finish == "length":
                continue
            said = answer.ids + ([answer.end] if answer.end is not None else [])
            sampled = answer.sampled + [True] * (answer.end is not None)
            whole = answer.prompt + said
            unseen = [IGNORE] * (len(answer.prompt) - 1)
            targets = unseen + [
                token if own else IGNORE for token, own in zip(said, sampled, strict=True)
            ]
            found.append(Example(whole[:-1], targets, advantage))
    return found


def pad_batches(
    learned: Sequence[Example], rows: int, pad: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Micro-batches of at most `rows` examples, like lengths together; weights are advantages."""
    by_length = sorted(learned, key=lambda e: len(e.ids))
    for i in range(0, len(by_length), rows):
        batch = by_length[i : i + rows]
        T = len(batch[-1].ids)
        tokens = torch.tensor([e.ids + [pad] * (T - len(e.ids)) for e in batch], device=device)
        targets = [e.targets + [IGNORE] * (T - len(e.targets)) for e in batch]
        count = sum(target != IGNORE for row in targets for target in row)
        weights = torch.tensor([e.advantage for e in batch], device=device)[:, None].expand(-1, T)
        yield MicroBatch(tokens, torch.tensor(targets, device=device), count, weights)


def kl_to_reference(
    model: GPT, reference: GPT, batches: Sequence[MicroBatch], machine: DistContext
) -> float:
    """
    KL divergence of `model` from `reference` in nats per sampled token, the same on all ranks.

    Estimated by exp(d) - 1 - d of d = log p_reference - log p_model at the sampled tokens: never
    negative, and of little variance. Source: Schulman, "Approximating KL Divergence", 2020.
    """
    total = 0.0
    for each in batches:
        losses, others = (m.token_losses(each.tokens, each.targets) for m in (model, reference))
        d = losses - others  # 0 where a target does not count
        total += float((torch.expm1(d) - d).double().sum())
    nats, count = machine.sum(total, float(sum(each.num_targets for each in batches)))
    return nats / count if count else 0.0


@lru_cache(maxsize=8)
def shuffled(n: int, seed: str) -> list[int]:
    """The numbers 0 to n - 1 in random order."""
    return random.Random(seed).sample(range(n), n)


class RolloutLoader(Callback):
    """
    The batches of RL: answers of the current model to the questions of a step, with advantages as
    weights. Also a callback that logs the rewards of the step.

    engine: model -> an engine with the weights it has now. questions: which of the task's, by
    number; by default all. reference: the model from which the KL divergence is logged, if any.

    Raises ValueError where there are no questions, or those of a step do not divide among ranks.
    """

    def __init__(
        self,
        task: RewardTask,
        tokenizer: Tokenizer,
        cfg: RLConfig,
        seed: int,
        machine: DistContext,
        model: GPT,
        engine: Callable[[GPT], Engine],
        questions: Sequence[int] | None = None,
        reference: GPT | None = None,
    ):
        if cfg.examples_per_step % machine.world_size:
            raise ValueError(
                f"examples_per_step {cfg.examples_per_step} does not divide among "
                f"{machine.world_size} devices"
            )
        self.questions = range(len(task)) if questions is None else questions
        if not self.questions:
            raise ValueError("there is no question to train on")
        self.task, self.tokenizer, self.cfg, self.seed = task, tokenizer, cfg, seed
        self.machine, self.model, self.engine, self.reference = machine, model, engine, reference
        self.batch_tokens = cfg.examples_per_step * cfg.num_samples * cfg.max_new_tokens
        self.identity = {"rl": asdict(cfg)}
        self.metrics: dict[str, float] = {}
        """Of the latest step."""

    def num_steps(self, epochs: float) -> int:
        """Steps in `epochs` passes over the questions."""
        return max(1, round(epochs * len(self.questions) / self.cfg.examples_per_step))

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        if self.machine.any(stopping()):
            raise StoppedWaiting(f"asked to stop before step {step}")
        started = time.perf_counter()
        engine = self.engine(self.model)
        groups = self.roll_out(engine, step)
        self.metrics = self.rollout_metrics(groups)
        groups = self.resampled(engine, step, groups)
        self.metrics["rollout_seconds"] = time.perf_counter() - started
        learned = examples(groups, self.cfg)
        pad = self.tokenizer.bos_id
        batches = list(pad_batches(learned, device_rows, pad, self.machine.device))
        if self.reference is not None:  # of the copy that answered: rounding is not learning
            kl = kl_to_reference(engine.model, self.reference, batches, self.machine)
            self.metrics["kl"] = kl
        return batches

    def after_backward(self, scale: float) -> dict[str, float]:
        return self.metrics

    def row_names(self, step: int) -> str:
        return f"of step {step}"

    def describe(self, run: TrainingRun) -> dict[str, str]:
        cfg = self.cfg
        return {"rollouts": f"{cfg.examples_per_step} questions, {cfg.num_samples} answers to each"}

    def rollout_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Means over the groups and answers of all ranks."""
        answers = [answer for group in groups for answer in group.answers]
        num_groups, silent, reward, count, tokens, cut_off, spread = self.machine.sum(
            float(len(groups)),
            float(sum(not group.has_signal for group in groups)),
            sum(sum(group.rewards) for group in groups),
            float(len(answers)),
            float(sum(len(answer.ids) for answer in answers)),
            float(sum(answer.finish == "length" for answer in answers)),
            sum(statistics.pstdev(group.rewards) for group in groups),
        )
        return {
            "reward": reward / count,
            "answer_tokens": tokens / count,
            "cut_off": cut_off / count,
            "without_signal": silent / num_groups,
            "reward_std": spread / num_groups,
        }

    def draws(self, step: int) -> range:
        """This rank's questions of a step, counted over the whole run."""
        first, per_step = step * self.cfg.examples_per_step, self.cfg.examples_per_step
        return range(first + self.machine.rank, first + per_step, self.machine.world_size)

    def question(self, draw: int, attempt: int = 0) -> int:
        """Which question of the task it is: every epoch and attempt has an order of its own."""
        count = len(self.questions)
        epoch, position = divmod(draw, count)
        return self.questions[shuffled(count, f"{self.seed}-{epoch}-{attempt}")[position]]

    def roll_out(self, engine: Engine, step: int) -> list[Group]:
        """Answer this rank's questions of a step and score the answers."""
        return self.answer(engine, self.draws(step))

    def resampled(self, engine: Engine, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups of `roll_out`; those without signal replaced where the settings say so."""
        groups = list(groups)
        for attempt in range(1, self.cfg.resample_zero_signal + 1):
            silent = [n for n, group in enumerate(groups) if not group.has_signal]
            others = self.answer(engine, [self.draws(step)[n] for n in silent], attempt)
            for n, group in zip(silent, others, strict=True):
                groups[n] = group
        return groups

    def answer(self, engine: Engine, draws: Sequence[int], attempt: int = 0) -> list[Group]:
        """
        Answer questions `num_samples` times each, and score the answers.

        A prompt that leaves no room for an answer is truncated to its end. Answers depend on the
        question and its draw, not on ranks or on other prompts in the batch.
        """
        cfg, questions = self.cfg, [self.question(draw, attempt) for draw in draws]
        most = longest_prompt(engine, cfg.max_new_tokens)
        waiting = []
        with self.machine.working(f"generating answers to {len(draws)} questions"):
            for draw, i in zip(draws, questions, strict=True):
                seed = self.seed * 1_000_003 + draw + attempt * 1_000_000_007
                settings = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, seed=seed)
                prompt = fit(render_prompt(self.tokenizer, self.task[i]), most)
                waiting.append(engine.submit(prompt, settings, cfg.num_samples))
            while engine.busy:
                engine.step()
            return [
                Group(group, [self.reward(i, answer) for answer in group])
                for i, group in zip(questions, waiting, strict=True)
            ]

    def reward(self, i: int, answer: Completion) -> float:
        """The reward of an answer to question i of the task."""
        task, number = self.task.locate(i)
        text = self.tokenizer.decode(answer.ids)
        return (
            task.score(task[number], text)
            + self.cfg.format_reward * task.answered(text)
            - self.cfg.length_penalty * len(answer.ids) / self.cfg.max_new_tokens
        )

    def mean_rewards(self, num_steps: int) -> list[float]:
        """The mean reward of each question of the first steps, answered by the current model."""
        engine, mine = self.engine(self.model), {}
        for step in range(num_steps):
            groups = self.roll_out(engine, step)
            for draw, group in zip(self.draws(step), groups, strict=True):
                mine[draw] = sum(group.rewards) / len(group.rewards)
        found = {k: v for other in self.machine.gather(mine) for k, v in other.items()}
        return [found[draw] for draw in sorted(found)]


class HeldOut(Callback):
    """
    Evaluates rewards and held-out answers before and after RL, and the latter every `every` steps.

    num_rewards: training questions whose rewards are measured, rounded up to whole steps.
    """

    def __init__(
        self,
        rollouts: RolloutLoader,
        task: Questions,
        num_samples: int,
        sampling: Sampling,
        every: int,
        num_rewards: int,
        num_steps: int,
    ):
        self.rollouts, self.task, self.every = rollouts, task, every
        self.num_samples, self.sampling = num_samples, sampling
        self.review = min(num_steps, math.ceil(num_rewards / rollouts.cfg.examples_per_step))
        started = time.perf_counter()
        self.before = self.after = self.measure()
        self.seconds_per_answer = (time.perf_counter() - started) / (
            len(self.before.rewards) * rollouts.cfg.num_samples + len(task) * num_samples
        )
        rollouts.machine.print0(f"before: {self.before}")

    def measure(self) -> EvalResult:
        """Evaluate the current model."""
        return EvalResult(self.rollouts.mean_rewards(self.review), self.outcomes())

    def outcomes(self) -> Outcomes:
        """The scores of the answers to the held-out questions."""
        rollouts, count = self.rollouts, len(self.task)
        engine = rollouts.engine(rollouts.model)
        return score_by_generation(
            engine, self.task, count, self.sampling, self.num_samples, rollouts.machine
        ).outcomes

    def start(self, run: TrainingRun) -> None:
        self.log = run.log

    def before_step(self, step: int, share: float) -> None:
        if step == 0:
            self.log(0, self.before.logged)

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        if last:
            self.after = self.measure()
            self.rollouts.machine.print0(f"after: {self.after}")
            return self.after.logged
        if self.every and step % self.every == 0:
            return {"pass_at_1": pass_at(self.outcomes(), 1).value}
        return {}
