"""
Evaluate a chat model on tasks, by the logits of option letters or by generation.

    task, model -> outcomes: the score of each answer to each item -> accuracy, pass@k

Items are split among ranks and outcomes gathered, so results depend neither on the number of ranks
nor on the batch size, except for rounding.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from nanochat import stats
from nanochat.attention import fill_batches, pad_right
from nanochat.chat_format import Message, render_fitting, render_prompt
from nanochat.dist import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer

PASS_TOKENS = 16_384  # tokens in a forward pass, with padding

ChatTask = Any  # a `tasks.base.Task`; the core does not import tasks
Outcomes = list[list[float]]  # for each item, the scores of its answers


class TaskResult(NamedTuple):
    """Result of scoring a task."""

    outcomes: Outcomes
    num_truncated: int
    """Items whose prompt lacks a part of the conversation, to fit the context."""


def score_answer(questions: ChatTask, i: int, answer: str) -> float:
    """Score an answer to item i with the task that the item belongs to."""
    task, number = questions.locate(i)
    return task.score(number, answer)


def clusters_of(questions: ChatTask, count: int) -> list[str]:
    """The clusters of the first `count` items, for standard errors (`stats.mean`)."""
    located = map(questions.locate, range(count))
    return [f"{task.name} {task.cluster(number)}" for task, number in located]


# ---- Prompts -------------------------------------------------------------------------------------


def longest_prompt(engine: Engine, max_new_tokens: int) -> int:
    """Maximum prompt length that leaves room for an answer, but at least half the cache."""
    return engine.cache.capacity - min(max_new_tokens, engine.cache.capacity // 2)


def trim(prompt: list[int], most: int) -> list[int]:
    """Truncate a prompt to `most` tokens (at least 2) on the left, keeping its BOS."""
    return prompt if len(prompt) <= most else prompt[:1] + prompt[1 - most :]


def render_prompts(
    tokenizer: Tokenizer, conversations: Iterable[Sequence[Message]], most: int
) -> tuple[list[list[int]], int]:
    """
    Prompts of at most `most` tokens, and how many of them lack a part of the conversation. The
    oldest turns are dropped first, then the beginning of the question.
    """
    prompts, num_truncated = [], 0
    for messages in conversations:
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        num_truncated += len(render_prompt(tokenizer, asked)) > most
        prompts.append(trim(render_fitting(tokenizer, asked, most), most))
    return prompts, num_truncated


# ---- Scores --------------------------------------------------------------------------------------


@torch.no_grad()
def score_by_logits(
    model: GPT, tokenizer: Tokenizer, task: ChatTask, count: int, dist: DistContext
) -> TaskResult:
    """
    Answer the first `count` items with the option letter that has the highest logit at the start of
    the assistant's turn, and score the answers. Raises ValueError if a letter is more than one
    token.
    """
    mine, most = range(dist.rank, count, dist.world_size), model.cfg.max_seq_len - 1
    prompts, num_truncated = render_prompts(tokenizer, (task[i] for i in mine), most)
    by_length = sorted(zip(mine, prompts, strict=True), key=lambda item: len(item[1]))
    scores = {}
    for batch in fill_batches(by_length, lambda item: (1, len(item[1])), PASS_TOKENS):
        items, ids = zip(*batch, strict=True)
        last = [len(prompt) - 1 for prompt in ids]
        hidden = model.hidden(pad_right(ids, tokenizer.bos_id, model.device))  # (B, T, C)
        logits = model.logits(hidden[list(range(len(ids))), last])  # (B, V)
        for i, row in zip(items, logits, strict=True):
            owner, number = task.locate(i)
            letters = owner.letters(number)
            [options] = zip(*map(tokenizer.encode, letters), strict=True)  # one token each
            scores[i] = [score_answer(task, i, letters[int(row[list(options)].argmax())])]
    return gather_result(scores, num_truncated, dist)


def score_by_generation(
    engine: Engine, task: ChatTask, count: int, settings: Sampling, n: int, dist: DistContext
) -> TaskResult:
    """
    Generate `n` answers to each of the first `count` items and score the text.

    Item i uses seed `settings.seed` + i.
    """
    mine = range(dist.rank, count, dist.world_size)
    most = longest_prompt(engine, settings.max_new_tokens)
    prompts, num_truncated = render_prompts(engine.tokenizer, (task[i] for i in mine), most)
    groups = engine.generate(prompts, settings, n, [settings.seed + i for i in mine])
    scores = {
        i: [score_answer(task, i, engine.tokenizer.decode(answer.ids)) for answer in group]
        for i, group in zip(mine, groups, strict=True)
    }
    return gather_result(scores, num_truncated, dist)


def gather_result(
    scores: dict[int, list[float]], num_truncated: int, dist: DistContext
) -> TaskResult:
    """Join the scores of all ranks, by item; the result is the same on every rank."""
    for other in dist.gather(scores):
        scores |= other
    return TaskResult([scores[i] for i in sorted(scores)], round(dist.sum(num_truncated)[0]))


def item_means(outcomes: Outcomes) -> list[float]:
    """Score of each item: the mean over its answers."""
    return [sum(scores) / len(scores) for scores in outcomes]


def rates_by_k(outcomes: Outcomes) -> dict[int, list[float]]:
    """For k = 1, 2, 4 to 64, up to the number of answers, the pass@k of each item."""
    n, found = len(outcomes[0]), {1: item_means(outcomes)}
    for k in (k for k in (2, 4, 8, 16, 32, 64) if k <= n):
        found[k] = [stats.pass_at_k(n, scores.count(1), k) for scores in outcomes]
    return found
