"""
Reinforcement learning on questions with scorable answers.

    questions -> engine: n answers each -> advantages -> weighted micro-batches -> train

On-policy REINFORCE: each batch of rollouts is used for one update, so there is no ratio to clip.
The loss of a step is the mean over all trained tokens of all ranks, so every token has the same
weight whatever the length of its answer (as in Dr. GRPO, arXiv:2503.20783, except for its constant
divisor). The baseline is the group's mean reward (arXiv:2402.03300). Gradients are those of the
plain softmax; they ignore top_k and temperature.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from nanochat import records, stats
from nanochat.attention import pad_right
from nanochat.chat_format import render_prompt
from nanochat.checkpoint import stage_folder
from nanochat.common import WaitAborted
from nanochat.config import require_at_least, require_positive
from nanochat.distributed import DistContext
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_chat import (
    Questions,
    clusters_of,
    estimate_score,
    item_means,
    longest_prompt,
    score_answer,
    score_by_generation,
    trim,
)
from nanochat.gpt import GPT, copy_weights
from nanochat.logger import METRICS_FILE, read_metrics
from nanochat.loss import IGNORE
from nanochat.train import Callback, Loader, MicroBatch, ShouldStop, TrainingRun

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
    """Sample from the k most likely tokens; -1 = all tokens."""
    length_penalty: float = 0.0
    """Reward penalty for an answer of maximum length; shorter answers lose proportionally less."""

    def __post_init__(self) -> None:
        require_at_least(self, examples_per_step=1, num_samples=2, max_new_tokens=1)
        require_positive(self, "temperature")

    def sampling(self, seed: int) -> Sampling:
        """Sampling settings of both rollouts and evaluations."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, seed=seed)


@dataclass(frozen=True)
class RLConfig(RolloutConfig):
    resample_zero_signal: int = 0
    """Replace a question whose answers all have the same reward, and thus no gradient, up to N
    times."""
    log_kl: bool = False
    """Log the KL divergence from the initial model in nats per generated token; costs two extra
    forward passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, resample_zero_signal=0)


class Group(NamedTuple):
    """The answers to one question and their rewards."""

    answers: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """False if all rewards are equal, which yields no gradient."""
        return max(self.rewards) > min(self.rewards)


def weighted_batches(
    groups: Sequence[Group], rows: int, pad: int, device: torch.device
) -> list[MicroBatch]:
    """
    Collate the answers of groups, sorted by length, into micro-batches of at most `rows` rows,
    right-padded with `pad`. Targets are the sampled tokens, weighted by the advantage:
    the reward minus its group's mean.
    """
    learned = []
    for group in groups:
        mean = sum(group.rewards) / len(group.rewards)
        for answer, reward in zip(group.answers, group.rewards, strict=True):
            end = [] if answer.end is None else [answer.end]
            ids, sampled = answer.ids + end, answer.sampled + [True] * len(end)
            targets = [IGNORE] * (len(answer.prompt) - 1)
            targets += [i if own else IGNORE for i, own in zip(ids, sampled, strict=True)]
            learned.append(((answer.prompt + ids)[:-1], targets, reward - mean))
    learned.sort(key=lambda each: len(each[0]))
    found = []
    for i in range(0, len(learned), rows):
        ids, targets, advantages = zip(*learned[i : i + rows], strict=True)
        x, y = pad_right(ids, pad, device), pad_right(targets, IGNORE, device)  # (B, T)
        count = sum(target != IGNORE for row in targets for target in row)
        weights = torch.tensor(advantages, device=device)[:, None].expand_as(x)
        found.append(MicroBatch(x, y, count, weights))
    return found


def kl_to_reference(
    model: GPT, reference: GPT, batches: Sequence[MicroBatch], machine: DistContext
) -> float:
    """
    KL(model || reference) in nats per sampled token, identical on all ranks.

    Estimated as exp(d) - 1 - d with d = log p_reference - log p_model at the sampled tokens:
    nonnegative, low variance. Source: Schulman, "Approximating KL Divergence", 2020.
    """
    total = 0.0
    for each in batches:
        losses, others = (m.token_losses(each.tokens, each.targets) for m in (model, reference))
        d = losses - others  # 0 for ignored targets
        total += float((torch.expm1(d) - d).cpu().double().sum())  # MPS has no float64
    nats, count = machine.sum(total, float(sum(each.num_targets for each in batches)))
    return nats / count if count else 0.0


def require_divisible(examples_per_step: int, machine: DistContext) -> None:
    """Raise ValueError unless the ranks can share the examples of a step equally."""
    if examples_per_step % machine.world_size:
        raise ValueError(
            f"examples_per_step {examples_per_step} is not a multiple of "
            f"the world size {machine.world_size}"
        )


@lru_cache(maxsize=8)
def shuffle_indices(n: int, seed: str) -> list[int]:
    """The integers 0 to n - 1 in a random order."""
    return random.Random(seed).sample(range(n), n)


@dataclass(eq=False)
class RolloutLoader(Loader):
    """
    RL batches: the current model's answers to a step's questions, weighted by advantage.

    Raises ValueError if there are no questions or examples_per_step is not a multiple of the world
    size.
    """

    task: Questions
    questions: Sequence[int]
    """Indices of the task's questions to train on."""
    cfg: RLConfig
    seed: int
    machine: DistContext
    model: GPT
    engine: Engine
    """Runs a copy of the model, which is refreshed before each use."""
    reference: GPT | None = None
    """Reference model for the logged KL divergence."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Rollout metrics of the latest step."""

    def __post_init__(self) -> None:
        require_divisible(self.cfg.examples_per_step, self.machine)
        if not self.questions:
            raise ValueError("no questions to train on")
        cfg = self.cfg
        self.batch_tokens = cfg.examples_per_step * cfg.num_samples * cfg.max_new_tokens
        self.identity = {"rl": asdict(cfg)}

    def micro_batches(self, step: int, device_rows: int, stopping: ShouldStop) -> list[MicroBatch]:
        if self.machine.any(stopping()):
            raise WaitAborted(f"stop requested before step {step}")
        started = time.perf_counter()
        groups = self.roll_out(step)
        self.metrics = self.rollout_metrics(groups)
        groups = self.resample(step, groups)
        self.metrics["rollout_seconds"] = time.perf_counter() - started
        pad, device = self.engine.tokenizer.bos_id, self.machine.device
        if self.reference is not None:  # both are inference copies, rounded alike
            every = weighted_batches(groups, device_rows, pad, device)
            kl = kl_to_reference(self.engine.model, self.reference, every, self.machine)
            self.metrics["kl"] = kl
        learned = [group for group in groups if group.has_signal]
        return weighted_batches(learned, device_rows, pad, device)

    def describe(self, run: TrainingRun) -> dict[str, str]:
        cfg = self.cfg
        return {"rollouts": f"{cfg.examples_per_step} questions x {cfg.num_samples} samples"}

    def rollout_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return means over the groups and answers of all ranks."""
        answers = [answer for group in groups for answer in group.answers]
        num_groups = self.cfg.examples_per_step
        num_answers = num_groups * self.cfg.num_samples
        mine = {
            "reward": sum(sum(group.rewards) for group in groups) / num_answers,
            "answer_tokens": sum(len(answer.ids) for answer in answers) / num_answers,
            "cut_off": sum(answer.finish == "length" for answer in answers) / num_answers,
            "without_signal": sum(not group.has_signal for group in groups) / num_groups,
            "reward_std": sum(statistics.pstdev(group.rewards) for group in groups) / num_groups,
        }
        return dict(zip(mine, self.machine.sum(*mine.values()), strict=True))

    def draws(self, step: int) -> range:
        """This rank's question draws in a step, numbered over the run."""
        first, per_step = step * self.cfg.examples_per_step, self.cfg.examples_per_step
        return range(first + self.machine.rank, first + per_step, self.machine.world_size)

    def question(self, draw: int, attempt: int = 0) -> int:
        """Task index of a draw's question; each epoch and attempt has its own random order."""
        count = len(self.questions)
        epoch, position = divmod(draw, count)
        return self.questions[shuffle_indices(count, f"{self.seed}-{epoch}-{attempt}")[position]]

    def roll_out(self, step: int) -> list[Group]:
        """Generate and score answers to this rank's questions with the current weights."""
        copy_weights(self.engine.model, self.model)
        return self.answer(self.draws(step))

    def resample(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Replace groups without signal, up to `resample_zero_signal` times."""
        groups = list(groups)
        for attempt in range(1, self.cfg.resample_zero_signal + 1):
            silent = [n for n, group in enumerate(groups) if not group.has_signal]
            others = self.answer([self.draws(step)[n] for n in silent], attempt)
            for n, group in zip(silent, others, strict=True):
                groups[n] = group
        return groups

    def answer(self, draws: Sequence[int], attempt: int = 0) -> list[Group]:
        """
        Generate and score `num_samples` answers per question.

        A prompt that leaves no room for an answer is truncated on the left. Answers depend on the
        question and its draw, not on the rank or, except for rounding, other prompts in the batch.
        """
        cfg, engine = self.cfg, self.engine
        questions = [self.question(draw, attempt) for draw in draws]
        most = longest_prompt(engine, cfg.max_new_tokens)
        with self.machine.working(f"generating answers to {len(draws)} questions"):
            prompts = [trim(render_prompt(engine.tokenizer, self.task[i]), most) for i in questions]
            first = self.seed * 1_000_003 + attempt * 1_000_000_007
            seeds = [first + draw for draw in draws]
            groups = engine.generate(prompts, cfg.sampling(0), cfg.num_samples, seeds)
            return [
                Group(group, [self.reward(i, answer) for answer in group])
                for i, group in zip(questions, groups, strict=True)
            ]

    def reward(self, i: int, answer: Completion) -> float:
        """Reward of an answer to question i of the task, minus the length penalty."""
        score = score_answer(self.task, i, self.engine.tokenizer.decode(answer.ids))
        return score - self.cfg.length_penalty * len(answer.ids) / self.cfg.max_new_tokens

    def mean_rewards(self, num_steps: int) -> list[float]:
        """Mean reward of the current model on each question of the first `num_steps` steps."""
        mine = {
            draw: sum(group.rewards) / len(group.rewards)
            for step in range(num_steps)
            for draw, group in zip(self.draws(step), self.roll_out(step), strict=True)
        }
        found = {k: v for other in self.machine.gather(mine) for k, v in other.items()}
        return [found[draw] for draw in sorted(found)]


# ---- Evaluation before and after RL --------------------------------------------------------------


class EvalResult(NamedTuple):
    """Rewards and held-out scores of a model."""

    rewards: list[float]
    """Mean reward of each of the first training questions."""
    held_out: list[list[float]]
    """Scores of the answers to each held-out question."""


def pass_rates(outcomes: Sequence[list[float]], k: int) -> list[float]:
    """Estimated pass@k of each held-out question."""
    return [stats.pass_at_k(len(each), each.count(1), k) for each in outcomes]


class RLEvaluator(Callback):
    """
    Evaluates training rewards and held-out answers before and after RL, and held-out answers every
    `eval_every` steps. num_samples: answers per question of `task`. reward_steps: the
    training reward is measured on the questions of this many steps.
    """

    def __init__(
        self, rollouts: RolloutLoader, task: Questions, num_samples: int, reward_steps: int
    ):
        self.rollouts, self.task = rollouts, task
        self.num_samples, self.reward_steps = num_samples, reward_steps
        self.clusters = clusters_of(task, len(task))
        self.ks = [k for k in (1, 2, 4, 8, 16) if k <= num_samples]
        self.before = self.after = self.measure("before")

    def measure(self, when: str) -> EvalResult:
        """Evaluate the current model and print the result."""
        result = EvalResult(self.rollouts.mean_rewards(self.reward_steps), self.outcomes())
        reward, right = stats.mean(result.rewards), self.pass_at(1, result.held_out)
        self.rollouts.machine.print0(
            f"{when}: mean reward {reward.value:.4f} +- {reward.se:.4f} ({reward.n} questions), "
            f"held-out pass@1 {right.value:.4f} +- {right.se:.4f} ({right.n} questions)"
        )
        return result

    def outcomes(self) -> list[list[float]]:
        """Scores of the current model's answers to the held-out questions."""
        rollouts, task, n = self.rollouts, self.task, self.num_samples
        engine, sampling = rollouts.engine, rollouts.cfg.sampling(rollouts.seed + 1)
        copy_weights(engine.model, rollouts.model)
        return score_by_generation(engine, task, len(task), sampling, n, rollouts.machine).outcomes

    def pass_at(self, k: int, outcomes: Sequence[list[float]]) -> stats.Estimate:
        """Estimate pass@k over the held-out questions."""
        return stats.mean(pass_rates(outcomes, k), self.clusters)

    def metrics(self, outcomes: Sequence[list[float]]) -> dict[str, float]:
        """Metrics of an evaluation: pass@1 and its standard error."""
        found = self.pass_at(1, outcomes)
        return {"pass_at_1": found.value, "pass_at_1_se": found.se}

    def before_step(self, step: int, share: float) -> None:
        if step == 0:
            self.run.log(0, self.metrics(self.before.held_out))

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        if last:
            self.after = self.measure("after")
        return self.metrics(self.after.held_out if last else self.outcomes())

    def values(self) -> dict[str, Any]:
        """Rewards and pass@k before and after RL; the change per task if there are several."""
        metrics = read_metrics(stage_folder(self.run.kind) / self.run.tag / METRICS_FILE)
        steps = [entry for entry in metrics if "reward" in entry]
        before, after = self.before, self.after
        found: dict[str, Any] = {
            "Number of iterations": len(steps),
            "Mean reward before": records.estimate(*stats.mean(before.rewards)),
            "Mean reward after": records.estimate(*stats.mean(after.rewards)),
            **change("Mean reward", before.rewards, after.rewards),
        }
        if "kl" in steps[-1]:
            found["KL from the start, nats per token"] = steps[-1]["kl"]
        rollouts, whole, silent = (
            sum(entry.get(name, 0.0) for entry in steps)
            for name in ("rollout_seconds", "step_seconds", "without_signal")
        )
        found["Time in rollouts"] = f"{rollouts / whole:.0%}"
        found["Groups without signal"] = f"{silent / len(steps):.1%}"
        for k in self.ks:
            for when, outcomes in (("before", before.held_out), ("after", after.held_out)):
                found[f"pass@{k} {when}"] = (
                    estimate_score(outcomes, self.clusters, sampled=True)  # error of sampling too
                    if k == 1
                    else records.estimate(*self.pass_at(k, outcomes))
                )
        old, new = item_means(before.held_out), item_means(after.held_out)
        found |= change("pass@1", old, new, self.clusters)
        by_task: dict[str, list[int]] = {}
        for i in range(len(self.task)):
            by_task.setdefault(self.task.locate(i)[0].name, []).append(i)
        for name, own in sorted(by_task.items()) if len(by_task) > 1 else ():
            clusters = [self.clusters[i] for i in own]
            found |= change(
                f"pass@1 {name}", [old[i] for i in own], [new[i] for i in own], clusters
            )
        return found

    def items(self) -> dict[str, Any]:
        """Held-out pass@k after RL by question."""
        questions = [self.task[i] for i in range(len(self.task))]
        outcomes = self.after.held_out
        return {
            f"pass@{k} after": records.item_scores(
                questions, pass_rates(outcomes, k), self.clusters
            )
            for k in self.ks
        }


def change(
    name: str, before: Sequence[float], after: Sequence[float], clusters: Sequence | None = None
) -> dict[str, Any]:
    """Mean change of paired values and whether it exceeds the noise."""
    found = stats.compare(before, after, clusters)
    return {
        f"{name} change": records.estimate(found.difference, found.n, found.se),
        f"{name} verdict": found.verdict,
    }
