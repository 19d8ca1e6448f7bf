"""
Reinforcement learning from right and wrong answers: roll out, score, update.

    questions -> engine: n answers each -> reward - mean of the group -> weighted loss -> gradient

REINFORCE on policy: every batch of answers is used for one update and forgotten, so there is no
ratio to clip. The loss of a step is divided by all tokens that its answers sampled, on all ranks,
so long answers weigh more than short ones, and no question more than another (Dr. GRPO,
arXiv:2503.20783; the group's mean as baseline: arXiv:2402.03300). Knows no tasks, only rewards.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from nanochat import records, stats
from nanochat.chat_format import render_prompt
from nanochat.common import StopRequest
from nanochat.distributed import Machine
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
from nanochat.optim import MuonAdamW
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    Guard,
    LoopConfig,
    Progress,
    Save,
    give_up,
    require_resumable,
)

# ---- Evaluation before and after RL --------------------------------------------------------------


class Standing(NamedTuple):
    """How well a model does."""

    rewards: list[float]
    """Mean reward of each of the first questions that are practised."""
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


def figures(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str], before: Standing, after: Standing
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
    items = [[sum(o) / len(o) for o in standing.held_out] for standing in (before, after)]
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
    """Of the answers that are learned from."""
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
    resample: int = 0
    """How often a question whose answers all earned the same, which teaches nothing, is replaced by
    another one."""
    log_kl: bool = False
    """Log how far the model has moved from the one it began with, in nats a token of its answers;
    costs two more forward passes."""

    def __post_init__(self) -> None:
        for name in ("examples_per_step", "num_samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.resample < 0:
            raise ValueError(f"resample must be zero or positive, got {self.resample}")
        if self.num_samples == 1:
            raise ValueError("num_samples=1: an answer is compared with others of its group")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")


class Rewarding(Questions, Protocol):
    """What is practised; `tasks.base.Task` has it."""

    def locate(self, i: int) -> "tuple[Rewarding, int]": ...
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


def accumulate(
    model: GPT, learned: Sequence[Example], rows_per_pass: int, pad: int, machine: Machine
) -> float:
    """
    Leave the gradient of the policy loss in the model; returns the loss, the same on all ranks.

    loss = sum of advantage * nats of the sampled tokens / their number, over the whole step.
    """
    total = machine.sum(float(num_sampled(learned)))[0]
    loss = 0.0
    for tokens, targets, weights in batches(learned, rows_per_pass, pad, machine.device):
        part = model.loss(tokens, targets, weights=weights / total)
        part.backward()
        loss += part.item()
    return machine.sum(loss)[0]


def num_sampled(learned: Sequence[Example]) -> int:
    """How many tokens there are to learn from."""
    return sum(sum(t != IGNORE for t in e.targets) for e in learned)


def batches(
    learned: Sequence[Example], rows: int, pad: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, targets and advantages, (B, T) each, B at most `rows`; like lengths together."""
    by_length = sorted(learned, key=lambda e: len(e.ids))
    for i in range(0, len(by_length), rows):
        batch = by_length[i : i + rows]
        T = len(batch[-1].ids)
        tokens = torch.tensor([e.ids + [pad] * (T - len(e.ids)) for e in batch], device=device)
        targets = [e.targets + [IGNORE] * (T - len(e.targets)) for e in batch]
        weights = torch.tensor([e.advantage for e in batch], device=device)[:, None].expand(-1, T)
        yield tokens, torch.tensor(targets, device=device), weights


def divergence(
    model: GPT,
    start: GPT,
    learned: Sequence[Example],
    rows_per_pass: int,
    pad: int,
    machine: Machine,
) -> float:
    """
    KL divergence of `model` from `start` in nats a sampled token, the same on all ranks.

    Estimated by exp(d) - 1 - d of d = log p_start - log p_model at the sampled tokens: never
    negative, and of little variance. Source: Schulman, "Approximating KL Divergence", 2020.
    """
    total = 0.0
    for tokens, targets, _ in batches(learned, rows_per_pass, pad, machine.device):
        d = model.token_losses(tokens, targets) - start.token_losses(tokens, targets)  # 0 elsewhere
        total += float((torch.expm1(d) - d).double().sum())
    nats, count = machine.sum(total, float(num_sampled(learned)))
    return nats / count if count else 0.0


class Practice:
    """What is practised: which questions a step asks, and what the answers to them earn."""

    def __init__(
        self,
        task: Rewarding,
        tokenizer: Tokenizer,
        cfg: RLConfig,
        seed: int,
        machine: Machine,
        questions: Sequence[int] | None = None,
    ):
        """
        questions: which of the task's, by number; by default all.

        Raises ValueError where there are none, or those of a step do not divide among the ranks.
        """
        if cfg.examples_per_step % machine.world_size:
            raise ValueError(
                f"examples_per_step {cfg.examples_per_step} does not divide among "
                f"{machine.world_size} devices"
            )
        self.questions = range(len(task)) if questions is None else questions
        if not self.questions:
            raise ValueError("there is no question to practise")
        self.task, self.tokenizer, self.cfg, self.seed = task, tokenizer, cfg, seed
        self.machine, self.per_step = machine, cfg.examples_per_step

    def num_steps(self, epochs: float) -> int:
        """Steps in which the questions are gone through `epochs` times."""
        return max(1, round(epochs * len(self.questions) / self.per_step))

    def asked(self, step: int) -> range:
        """This rank's questions of a step, counted over the whole run."""
        first = step * self.per_step
        return range(first + self.machine.rank, first + self.per_step, self.machine.world_size)

    def number(self, asked: int, attempt: int = 0) -> int:
        """Which question of the task is asked: every epoch and attempt has an order of its own."""
        count = len(self.questions)
        epoch, place = divmod(asked, count)
        return self.questions[shuffled(count, f"{self.seed}-{epoch}-{attempt}")[place]]

    def roll_out(self, engine: Engine, step: int) -> list[Group]:
        """Answer this rank's questions of a step and score the answers."""
        return self.ask(engine, self.asked(step))

    def resampled(self, engine: Engine, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups of `roll_out`; those without signal replaced where the settings say so."""
        groups = list(groups)
        for attempt in range(1, self.cfg.resample + 1):
            silent = [n for n, group in enumerate(groups) if not group.has_signal]
            others = self.ask(engine, [self.asked(step)[n] for n in silent], attempt)
            for n, group in zip(silent, others, strict=True):
                groups[n] = group
        return groups

    def ask(self, engine: Engine, asked: Sequence[int], attempt: int = 0) -> list[Group]:
        """
        Answer questions `num_samples` times each, and score the answers.

        Of a prompt that leaves no room for an answer, only the end is read. What is answered
        depends on the question and when it is asked, not on ranks or company.
        """
        cfg, numbers = self.cfg, [self.number(count, attempt) for count in asked]
        most = longest_prompt(engine, cfg.max_new_tokens)
        waiting = []
        with self.machine.working(f"generating answers to {len(asked)} questions"):
            for count, i in zip(asked, numbers, strict=True):
                seed = self.seed * 1_000_003 + count + attempt * 1_000_000_007
                settings = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, seed=seed)
                prompt = fit(render_prompt(self.tokenizer, self.task[i]), most)
                waiting.append(engine.submit(prompt, settings, cfg.num_samples))
            while engine.busy:
                engine.step()
            return [
                Group(group, [self.reward(i, answer) for answer in group])
                for i, group in zip(numbers, waiting, strict=True)
            ]

    def reward(self, i: int, answer: Completion) -> float:
        """What an answer to question i of the task earns."""
        task, number = self.task.locate(i)
        said = self.tokenizer.decode(answer.ids)
        return (
            task.score(task[number], said)
            + self.cfg.format_reward * task.answered(said)
            - self.cfg.length_penalty * len(answer.ids) / self.cfg.max_new_tokens
        )

    def mean_rewards(self, engine: Engine, num_steps: int) -> list[float]:
        """The mean reward of each question of the first steps, answered by the model as it is."""
        mine = {}
        for step in range(num_steps):
            groups = self.roll_out(engine, step)
            for asked, group in zip(self.asked(step), groups, strict=True):
                mine[asked] = sum(group.rewards) / len(group.rewards)
        every = {k: v for other in self.machine.gather(mine) for k, v in other.items()}
        return [every[asked] for asked in sorted(every)]


@dataclass(frozen=True)
class Exam:
    """Held-out questions, answered as training answers its own."""

    task: Questions
    num_samples: int
    """Answers to each."""
    sampling: Sampling
    engine: Callable[[GPT], Engine]
    machine: Machine

    def take(self, model: GPT) -> Outcomes:
        """The scores of a model as it is now."""
        engine, count = self.engine(model), len(self.task)
        return score_by_generation(
            engine, self.task, count, self.sampling, self.num_samples, self.machine
        ).outcomes


@lru_cache(maxsize=8)
def shuffled(n: int, seed: str) -> list[int]:
    """The numbers 0 to n - 1 in random order."""
    return random.Random(seed).sample(range(n), n)


@dataclass(frozen=True)
class PolicyRun:
    """What the loop works on; `save`, `log` and `evaluate` are called as those of `train.Run`."""

    model: GPT
    optimizer: MuonAdamW
    engine: Callable[[GPT], Engine]
    """An engine with the weights that a model has now."""
    machine: Machine
    num_steps: int
    rows_per_pass: int
    practice: Practice
    evaluate: Callable[[int], dict[str, float]]
    save: Save
    log: Callable[[int, dict[str, Any]], None]
    loop: LoopConfig
    start: GPT | None = None
    """The model it began with, where the distance from it is to be logged."""
    after_step: Callable[[int, dict[str, float]], None] = lambda done, figures: None
    """Called on every rank after each step, when it is logged, told how many are done and what the
    step gave: may raise to end the run."""


def train_policy(run: PolicyRun, progress: Progress) -> bool:
    """
    Learn from `progress.step` to the end, rates falling linearly to 0. Returns False when asked to
    stop early. The last thing is a checkpoint. Raises NotFinite, RanksDiffer and Refused as `train`
    does.
    """
    if progress.step < run.num_steps:
        require_resumable(progress)
    guard = Guard(run.loop.guard, progress.health, run.machine, watch_spikes=False)
    with StopRequest() as stop:
        while progress.step < run.num_steps:
            step = progress.step
            if run.machine.any(stop.asked):
                run.save(progress, final=True)
                run.machine.print0(f"asked to stop: saved step {progress.step}")
                return False
            if step and run.loop.eval_every and step % run.loop.eval_every == 0:
                run.log(step, run.evaluate(step))
            guard.check_ranks(step, run.optimizer.named_params())
            started = time.perf_counter()
            figures = policy_step(run, step)
            guard.note(step, figures["loss"], figures["grad_norm"], lambda at=step: f"of step {at}")
            progress.step += 1
            seconds = time.perf_counter() - started
            progress.train_seconds += seconds
            run.log(step, {**figures, "step_seconds": seconds})
            run.after_step(progress.step, figures)
            if guard.lost:
                give_up(run.save, progress, guard)
            every = run.loop.save_every
            if every and progress.step % every == 0 and progress.step < run.num_steps:
                run.save(progress)
        progress.finished = True
        run.save(progress, final=True)
    return True


def policy_step(run: PolicyRun, step: int) -> dict[str, float]:
    """Roll out, score, update once; what is worth knowing of it, the same on all ranks."""
    started = time.perf_counter()
    engine = run.engine(run.model)
    groups = run.practice.roll_out(engine, step)
    answering = time.perf_counter() - started
    answers = [answer for group in groups for answer in group.answers]
    dead = sum(not group.has_signal for group in groups)
    totals = run.machine.sum(
        float(len(groups)),
        float(dead),
        sum(sum(group.rewards) for group in groups),
        float(len(answers)),
        float(sum(len(answer.ids) for answer in answers)),
        float(sum(answer.finish == "length" for answer in answers)),
        sum(statistics.pstdev(group.rewards) for group in groups),
    )
    started = time.perf_counter()
    groups = run.practice.resampled(engine, step, groups)
    answering += time.perf_counter() - started
    learned = examples(groups, run.practice.cfg)
    pad = engine.tokenizer.bos_id
    moved = {}
    if run.start is not None:
        ready = engine.model  # as it answered: rounding is not taken for learning
        moved["kl"] = divergence(ready, run.start, learned, run.rows_per_pass, pad, run.machine)
    loss = accumulate(run.model, learned, run.rows_per_pass, pad, run.machine)
    norm = run.optimizer.reduce_gradients()
    factor = 1 - step / run.num_steps
    if math.isfinite(loss + norm) and norm:
        run.optimizer.step(factor, decay_factor=factor)
    else:
        run.optimizer.drop_gradients()
    return {
        "reward": totals[2] / totals[3],
        "loss": loss,
        "grad_norm": norm,
        "lr": factor,
        "answer_tokens": totals[4] / totals[3],
        "cut_off": totals[5] / totals[3],
        "without_signal": totals[1] / totals[0],
        "reward_std": totals[6] / totals[0],
        "rollout_seconds": answering,
        **moved,
    }
