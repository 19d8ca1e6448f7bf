"""
Evaluate a chat model on tasks, by the logits of option letters or by generation.

    task, model -> outcomes: the score of each answer to each item -> accuracy, pass@k

Items are split among ranks and outcomes gathered, so results depend neither on the number of ranks
nor on the batch size, except for rounding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nanochat import records, stats
from nanochat.attention import fill_batches, pad_right
from nanochat.chat_format import Message, render_prompt
from nanochat.distributed import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer

PASS_TOKENS = 16_384  # tokens in a forward pass, with padding


class Questions(Protocol):
    """Interface of an evaluated task, implemented by `tasks.base.Task`."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Sequence[Message]: ...
    def locate(self, i: int) -> "tuple[Questions, int]": ...
    def letters(self, i: int) -> tuple[str, ...]: ...
    def cluster(self, i: int) -> str: ...
    def score(self, conversation: Any, answer: str) -> float: ...


def score_answer(questions: Questions, i: int, answer: str) -> float:
    """Score an answer to item i with the task that the item belongs to."""
    task, number = questions.locate(i)
    return task.score(task[number], answer)


def clusters_of(questions: Questions, count: int) -> list[str]:
    """The clusters of the first `count` items, for standard errors (`stats.mean`)."""
    located = map(questions.locate, range(count))
    return [f"{task.name} {task.cluster(number)}" for task, number in located]


Outcomes = list[list[float]]  # for each item, the scores of its answers


class TaskResult(NamedTuple):
    """Result of scoring a task."""

    outcomes: Outcomes
    num_truncated: int
    """Items whose prompt was truncated to fit the context."""


Score = Callable[[list[int], list[list[int]]], list[list[float]]]  # items, prompts -> scores


def score_items(
    task: Questions, count: int, tokenizer: Tokenizer, most: int, score: Score, machine: DistContext
) -> TaskResult:
    """
    Score items 0 to count - 1, split among ranks; the result is the same on every rank.

    Prompts are truncated to `most` tokens.
    """
    mine = list(range(machine.rank, count, machine.world_size))
    whole = [render_prompt(tokenizer, task[i]) for i in mine]
    prompts = [trim(prompt, most) for prompt in whole]
    truncated = sum(len(full) > len(kept) for full, kept in zip(whole, prompts, strict=True))
    scores = dict(zip(mine, score(mine, prompts), strict=True))
    for other in machine.gather(scores):
        scores |= other
    return TaskResult([scores[i] for i in range(count)], round(machine.sum(float(truncated))[0]))


def longest_prompt(engine: Engine, max_new_tokens: int) -> int:
    """Maximum prompt length that leaves room for an answer, but at least half the cache."""
    return engine.cache.capacity - min(max_new_tokens, engine.cache.capacity // 2)


def trim(prompt: list[int], most: int) -> list[int]:
    """Truncate a prompt to `most` tokens on the left, keeping its BOS."""
    most = max(2, most)
    return prompt if len(prompt) <= most else prompt[:1] + prompt[1 - most :]


@torch.no_grad()
def score_by_logits(
    model: GPT, tokenizer: Tokenizer, task: Questions, count: int, machine: DistContext
) -> TaskResult:
    """
    Answer the first `count` items with the option letter that has the highest logit at the start of
    the assistant's turn, and score the answers. Raises ValueError if a letter is more than one
    token.
    """

    def score(items: list[int], prompts: list[list[int]]) -> list[list[float]]:
        by_length = sorted(range(len(items)), key=lambda n: len(prompts[n]))
        found: list[list[float]] = [[] for _ in items]
        for batch in fill_batches(by_length, lambda n: (1, len(prompts[n])), PASS_TOKENS):
            tokens = pad_right([prompts[n] for n in batch], tokenizer.bos_id, model.device)
            last = [len(prompts[n]) - 1 for n in batch]
            hidden = model.hidden(tokens)[list(range(len(batch))), last]  # (B, C)
            for n, row in zip(batch, model.logits(hidden), strict=True):
                owner, number = task.locate(items[n])
                letters = owner.letters(number)
                [ids] = zip(*map(tokenizer.encode, letters), strict=True)  # one token each
                best = letters[int(row[list(ids)].argmax())]
                found[n] = [score_answer(task, items[n], best)]
        return found

    return score_items(task, count, tokenizer, model.cfg.max_seq_len - 1, score, machine)


def score_by_generation(
    engine: Engine, task: Questions, count: int, settings: Sampling, n: int, machine: DistContext
) -> TaskResult:
    """
    Generate `n` answers to each of the first `count` items and score the text.

    Item i uses seed `settings.seed` + i.
    """

    def score(items: list[int], prompts: list[list[int]]) -> list[list[float]]:
        groups = engine.generate(prompts, settings, n, [settings.seed + i for i in items])
        return [
            [score_answer(task, i, engine.tokenizer.decode(answer.ids)) for answer in group]
            for i, group in zip(items, groups, strict=True)
        ]

    most = longest_prompt(engine, settings.max_new_tokens)
    return score_items(task, count, engine.tokenizer, most, score, machine)


def item_means(outcomes: Outcomes) -> list[float]:
    """Score of each item: the mean over its answers."""
    return [sum(scores) / len(scores) for scores in outcomes]


def estimate_score(outcomes: Outcomes, clusters: list[str], sampled: bool) -> dict[str, Any]:
    """
    A score for the record: mean, number of items n, answers per item k, and the standard error,
    split into the parts from items and from sampling. One sampled answer per item cannot separate
    the two.
    """
    value, n, se = stats.mean(item_means(outcomes), clusters)
    k = len(outcomes[0])
    if k > 1 and n > 1:
        repeat_se = stats.repeat_error(outcomes)
        item_se = math.sqrt(max(se**2 - repeat_se**2, 0.0))  # NaN stays NaN
        return records.estimate(value, n, math.hypot(item_se, repeat_se), k, item_se, repeat_se)
    return records.estimate(value, n, se, k, *((None, None) if sampled else (se, 0.0)))
