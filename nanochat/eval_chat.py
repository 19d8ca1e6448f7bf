"""
Scoring a chat model on tasks: by the letters' logits, or by what it writes.

    task, model -> outcomes: for each item the score of each of its answers -> accuracy, pass@k

Items are dealt out to the ranks and the outcomes gathered, so a figure depends neither on their
number nor on the batch. Knows no particular task and no section of a report.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nanochat.attention import fill_batches, pad_right
from nanochat.chat_format import Message, render_prompt
from nanochat.distributed import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPT
from nanochat.tokenizer import Tokenizer

PASS_TOKENS = 16_384  # padded tokens of one forward pass


class Questions(Protocol):
    """What is asked of a task; `tasks.base.Task` has it."""

    name: str

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Sequence[Message]: ...
    def locate(self, i: int) -> "tuple[Questions, int]": ...
    def letters(self, i: int) -> tuple[str, ...]: ...
    def score(self, conversation: Any, answer: str) -> float: ...


def score_answer(questions: Questions, i: int, answer: str) -> float:
    """The score of an answer to item i, given by the task that the item is of."""
    task, number = questions.locate(i)
    return task.score(task[number], answer)


Outcomes = list[list[float]]  # per item, in order: the score of every answer to it


class Graded(NamedTuple):
    """What came of a task."""

    outcomes: Outcomes
    num_cropped: int
    """Items whose beginning did not fit the model's context."""


Score = Callable[[list[int], list[list[int]]], list[list[float]]]  # items, prompts -> their scores


def gathered(
    task: Questions, count: int, tokenizer: Tokenizer, most: int, score: Score, machine: DistContext
) -> Graded:
    """
    Score items 0 to count - 1, every rank its share, and put them together on all ranks.

    Prompts have at most `most` tokens.
    """
    mine = list(range(machine.rank, count, machine.world_size))
    with machine.working(f"scoring {len(mine):,} of {count:,} items"):  # others may finish earlier
        whole = [render_prompt(tokenizer, task[i]) for i in mine]
        prompts = [fit(prompt, most) for prompt in whole]
        cropped = sum(len(prompt) > len(rest) for prompt, rest in zip(whole, prompts, strict=True))
        scores = dict(zip(mine, score(mine, prompts), strict=True))
    for other in machine.gather(scores):
        scores |= other
    return Graded([scores[i] for i in range(count)], round(machine.sum(float(cropped))[0]))


def longest_prompt(engine: Engine, max_new_tokens: int) -> int:
    """What leaves room for an answer; where all cannot fit, prompts get at least half."""
    return engine.cache.capacity - min(max_new_tokens, engine.cache.capacity // 2)


def fit(prompt: list[int], most: int) -> list[int]:
    """The end of a prompt that has more than `most` tokens; its BOS stays in front."""
    most = max(2, most)
    return prompt if len(prompt) <= most else prompt[:1] + prompt[1 - most :]


@torch.no_grad()
def score_by_logits(
    model: GPT, tokenizer: Tokenizer, task: Questions, count: int, machine: DistContext
) -> Graded:
    """
    Ask for the likeliest of the options' letters right where the assistant begins to speak.

    Scores the first `count` items. Raises ValueError for a letter of several tokens.
    """

    def score(items: list[int], prompts: list[list[int]]) -> list[list[float]]:
        by_length = sorted(range(len(items)), key=lambda n: len(prompts[n]))
        found: list[list[float]] = [[] for _ in items]
        for batch in fill_batches(by_length, lambda n: (1, len(prompts[n])), PASS_TOKENS):
            tokens = pad_right([prompts[n] for n in batch], tokenizer.bos_id, model.device)
            last = [len(prompts[n]) - 1 for n in batch]
            hidden = model.hidden(tokens)[list(range(len(batch))), last]  # (B, C)
            for n, row in zip(batch, model.logits(hidden), strict=True):
                letters = task.letters(items[n])
                [ids] = zip(*map(tokenizer.encode, letters), strict=True)  # one token each
                best = letters[int(row[list(ids)].argmax())]
                found[n] = [score_answer(task, items[n], best)]
        return found

    return gathered(task, count, tokenizer, model.cfg.max_seq_len - 1, score, machine)


def score_by_generation(
    engine: Engine, task: Questions, count: int, settings: Sampling, n: int, machine: DistContext
) -> Graded:
    """
    Let the model answer the first `count` items, `n` times each, and score the text.

    Item i draws from seed `settings.seed` + i.
    """

    def score(items: list[int], prompts: list[list[int]]) -> list[list[float]]:
        groups = engine.generate(prompts, settings, n, [settings.seed + i for i in items])
        return [
            [score_answer(task, i, engine.tokenizer.decode(answer.ids)) for answer in group]
            for i, group in zip(items, groups, strict=True)
        ]

    most = longest_prompt(engine, settings.max_new_tokens)
    return gathered(task, count, engine.tokenizer, most, score, machine)
