"""
The few-shot scorer of a base model: CORE, or any other suite of the same three kinds of task.

    task -> items behind solved examples -> tokens -> nats per option -> right or wrong -> score

    multiple_choice    the model takes the continuation with the lowest mean nats per token
    schema             it takes the context after which the same ending has the lowest mean nats
    language_modeling  it is right when every token of the continuation is its first choice

Items are dealt out to the ranks and read in batches; what the options of an item have in common
is read once. None of this changes a result. Knows neither where tasks come from nor the report.
Sources: the centred accuracy of DataComp-LM, arXiv:2406.11794; seeds and form of the prompts as
published with nanochat, so that scores can be compared.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import stats
from nanochat.eval_bpb import Interrupted
from nanochat.gpt import GPT
from nanochat.kv_cache import CacheView, KVCache
from nanochat.machine import Machine

EXAMPLE_DELIMITER = "\n\n"  # behind each solved example
ORDER_SEED = 1337  # of the items: the first ones are what remains of a task that is cut short
EXAMPLES_SEED = 1234  # plus an item's place in that order: decides which examples it gets
CPU_PASS_TOKENS, GPU_PASS_TOKENS = 4096, 32_768  # of one forward pass, padding included
HEAD_TOKENS = 512  # tokens whose logits exist at once
LEAST_SAVING = 0.3  # share of a batch's tokens: to read less of it, in two passes, takes longer

# ------------------------------------------------------------------------------------------------
# Tasks


@dataclass(frozen=True)
class FewShotTask:
    """
    A task of a suite. Its items have the fields of DCLM's: `query`, `choices`, `gold`;
    `context_options`, `continuation`, `gold`; or `context`, `continuation`.

    Raises ValueError naming the task where a setting is out of range.
    """

    name: str
    kind: Literal["multiple_choice", "schema", "language_modeling"]
    num_fewshot: int
    """Solved examples in front of an item; fewer where the task has not that many other items."""
    random_baseline: float
    """Accuracy of guessing, from 0 to below 1."""
    continuation_delimiter: str
    """Between a context and its continuation."""
    items: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        if self.kind not in ("multiple_choice", "schema", "language_modeling"):
            raise ValueError(f"task {self.name} is of the unknown kind {self.kind!r}")
        if not self.items:
            raise ValueError(f"task {self.name} has no items")
        if self.num_fewshot < 0 or not 0 <= self.random_baseline < 1:
            raise ValueError(
                f"task {self.name}: num_fewshot {self.num_fewshot} must be at least 0, "
                f"random_baseline {self.random_baseline} at least 0 and below 1"
            )

    def options(self, item: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What an item offers to choose from: (context with delimiter, continuation) pairs."""
        if self.kind == "multiple_choice":
            pairs = [(item["query"], choice) for choice in item["choices"]]
        elif self.kind == "schema":
            pairs = [(context, item["continuation"]) for context in item["context_options"]]
        else:
            pairs = [(item["context"].strip(), item["continuation"])]
        return [(context + self.continuation_delimiter, ending) for context, ending in pairs]

    def drawn(self, max_items: int | None = None) -> "FewShotTask":
        """
        The task as it is asked: its items in an order that is always the same, or the first
        `max_items` of them, which then are each other's examples too.
        """
        order = list(self.items)
        Random(ORDER_SEED).shuffle(order)
        return replace(self, items=order[:max_items])

    def examples(self, number: int) -> str:
        """The solved examples in front of an item: other items of the task, always the same."""
        num_others = len(self.items) - 1
        count = min(self.num_fewshot, num_others)
        text = ""
        for other in Random(EXAMPLES_SEED + number).sample(range(num_others), count):
            item = self.items[other + (other >= number)]  # passes over the item itself
            text += "".join(self.options(item)[item.get("gold", 0)]) + EXAMPLE_DELIMITER
        return text


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def bos_id(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Question:
    """An item as tokens: one sequence per option, scored from its index in `starts` on."""

    number: int
    options: Sequence[Sequence[int]]
    starts: Sequence[int]
    gold: int | None
    """Which option is right; None where the only one must be what the model says."""
    shared: int
    """How many first tokens can be read once for all options: none of them predicts a scored one.
    0 where there is but one option."""
    cropped: bool
    """Whether its beginning was cut off to fit the model's context."""

    @property
    def longest(self) -> int:
        """Tokens of the longest option."""
        return max(map(len, self.options))


def ask(task: FewShotTask, number: int, tokenizer: Encoder, context: int) -> Question:
    """An item as a model sees it that reads at most `context` tokens at once."""
    item, front = task.items[number], task.examples(number)
    pairs = task.options(item)
    options = [[tokenizer.bos_id, *tokenizer.encode(front + a + b)] for a, b in pairs]
    if task.kind == "schema":
        ending = max(1, common_prefix([ids[:0:-1] for ids in options]))
        starts = [len(ids) - ending for ids in options]
    else:  # the continuation begins where the options part, or where the context alone would go on
        alone = [tokenizer.bos_id, *tokenizer.encode(front + pairs[0][0])]
        same = common_prefix(options if len(options) > 1 else [*options, alone])
        starts = [min(same, *(len(ids) - 1 for ids in options))] * len(options)
    gold = None if task.kind == "language_modeling" else item["gold"]
    return fitted(number, options, starts, gold, context)


def fitted(
    number: int,
    options: Sequence[Sequence[int]],
    starts: Sequence[int],
    gold: int | None,
    context: int,
) -> Question:
    """
    A question whose options are cropped from the left, behind their BOS, where the longest does not
    fit: all lose the same, and what is scored is cut only where it alone is too long.
    """
    limit = context + 1  # the last token is only predicted
    over = max(map(len, options)) - limit
    if over > 0:
        cuts = [
            max(min(over, start - 1), len(ids) - limit)
            for ids, start in zip(options, starts, strict=True)
        ]
        options = [[*ids[:1], *ids[1 + cut :]] for ids, cut in zip(options, cuts, strict=True)]
        starts = [max(1, start - cut) for start, cut in zip(starts, cuts, strict=True)]
    shared = min(common_prefix(options), *starts) - 1 if len(options) > 1 else 0
    return Question(number, options, starts, gold, shared, over > 0)


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """How many first elements are the same in all sequences."""
    columns = zip(*sequences, strict=False)
    parted = (i for i, column in enumerate(columns) if len(set(column)) > 1)
    return next(parted, min(map(len, sequences)))


# ------------------------------------------------------------------------------------------------
# The model


class LanguageModel(Protocol):
    """A causal language model in two halves, so that logits are made only where they count."""

    def hidden(self, tokens: Tensor, cache: CacheView | None = None) -> Tensor:
        """tokens (B, T) -> states (B, T, C); with a cache, the tokens continue what it holds."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """states (N, C) -> logits (N, V)."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is examined: a model with its tokenizer."""

    model: LanguageModel
    tokenizer: Encoder
    context: int
    """The most tokens it reads at once."""
    new_cache: Callable[[int, int], KVCache] | None = None
    """(slots, capacity) -> a cache for `hidden`. None: every option is read from its beginning."""
    pass_tokens: int | None = None
    """The most tokens of one forward pass, padding included. None: what suits the device."""


def subject_of(model: GPT, tokenizer: Encoder) -> Subject:
    """One of our own models, best `gpt.for_inference` of it."""
    return Subject(model, tokenizer, model.cfg.max_seq_len, model.new_cache)


class Reading(NamedTuple):
    """How a model takes an option."""

    nats: float
    """Mean over the scored tokens."""
    foretold: bool
    """Whether each of them was the model's first choice."""


@torch.inference_mode()
def read(
    subject: Subject, questions: Sequence[Question], device: torch.device
) -> list[list[Reading]]:
    """The reading of every option of every question, all in one batch."""
    rows = [row for q in questions for row in zip(q.options, q.starts, strict=True)]
    saved = sum(q.shared * (len(q.options) - 1) for q in questions)
    twice = saved >= LEAST_SAVING * sum(len(ids) for ids, _ in rows)
    past = [q.shared if subject.new_cache and twice else 0 for q in questions for _ in q.options]
    tokens = padded([ids[n:-1] for (ids, _), n in zip(rows, past, strict=True)], device)  # (B, T)
    view = None
    if subject.new_cache and any(past):
        cache = subject.new_cache(len(rows), max(past) + tokens.size(1))
        read_shared(subject, questions, cache, device)
        view = cache.view(range(len(rows)), tokens.size(1))
    hidden = subject.model.hidden(tokens, view)  # (B, T, C)

    places = [(b, i) for b, (ids, start) in enumerate(rows) for i in range(start, len(ids))]
    at = [(b, i - 1 - past[b], rows[b][0][i]) for b, i in places]
    row, column, targets = torch.tensor(at, device=device).unbind(1)  # (N,) each
    judged = iter(judge(subject.model, hidden[row, column], targets))
    readings = []
    for ids, start in rows:
        nats, first = zip(*(next(judged) for _ in range(start, len(ids))), strict=True)
        readings.append(Reading(sum(nats) / len(nats), all(first)))
    options = iter(readings)
    return [[next(options) for _ in q.options] for q in questions]


def read_shared(
    subject: Subject, questions: Sequence[Question], cache: KVCache, device: torch.device
) -> None:
    """Fill the cache: a slot per option, each with what the options of its question share."""
    first_slots, slot = [], 0
    for q in questions:
        first_slots.append(slot)
        slot += len(q.options)
    tokens = padded([q.options[0][: q.shared] for q in questions], device)
    subject.model.hidden(tokens, cache.view(first_slots, tokens.size(1)))
    for slot, q in zip(first_slots, questions, strict=True):
        cache.lengths[slot] = q.shared
        for other in range(slot + 1, slot + len(q.options)):
            cache.copy(slot, other, q.shared)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Sequences as one tensor (B, T), filled up on the right, where no token sees the filling."""
    T = max(map(len, sequences))
    return torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in sequences], device=device)


def judge(model: LanguageModel, hidden: Tensor, targets: Tensor) -> list[tuple[float, bool]]:
    """Nats of every target (N,) after its state (N, C), and whether it is the first choice."""
    judged = []
    for h, y in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
        logits = model.logits(h).float()
        nats = F.cross_entropy(logits, y, reduction="none")
        judged += zip(nats.tolist(), (logits.argmax(dim=1) == y).tolist(), strict=True)
    return judged


# ------------------------------------------------------------------------------------------------
# Scores


@dataclass(frozen=True)
class TaskScore:
    """How a model did on a task."""

    task: FewShotTask
    """With the items that were asked, in their order."""
    outcomes: list[int]
    """1 for each of them that it got right, else 0."""
    num_cropped: int
    """Items whose beginning did not fit the model's context."""
    seconds: float = field(compare=False)

    @property
    def accuracy(self) -> stats.Estimate:
        return stats.proportion(sum(self.outcomes), len(self.outcomes))

    @property
    def centred(self) -> stats.Estimate:
        """0 for guessing, 1 for everything right."""
        return stats.centred(self.accuracy, self.task.random_baseline)


def examine(
    subject: Subject,
    task: FewShotTask,
    machine: Machine,
    max_items: int | None = None,
    pass_tokens: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> TaskScore:
    """
    Score a model on a task, on all ranks together; the result is on every rank.

    pass_tokens: padded tokens of one forward pass, by default the subject's. A batch that does not
    fit into memory is read in halves. Raises Interrupted on all ranks where `stopping()` is true
    on one of them, ValueError for a model that computes no numbers.
    """
    begun = time.perf_counter()
    default = CPU_PASS_TOKENS if machine.device.type == "cpu" else GPU_PASS_TOKENS
    pass_tokens = pass_tokens or subject.pass_tokens or default
    task = task.drawn(max_items)
    mine = range(machine.rank, len(task.items), machine.world_size)
    found: dict[int, tuple[int, bool]] = {}
    stopped, broken = False, None
    with machine.working(f"scoring {task.name}"):  # others may finish earlier
        questions = [ask(task, number, subject.tokenizer, subject.context) for number in mine]
        for batch in batches(questions, pass_tokens):
            if stopped := stopping():
                break
            for q, options in zip(batch, read_safely(subject, batch, machine.device), strict=True):
                if not all(math.isfinite(nats) for nats, _ in options):
                    broken = f"item {q.number} gets {[nats for nats, _ in options]} nats"
                found[q.number] = (outcome(q, options), q.cropped)
    for others, stopped_too, broken_too in machine.gather((found, stopped, broken)):
        found |= others
        stopped |= stopped_too
        broken = broken or broken_too
    if broken:
        raise ValueError(
            f"{task.name}: {broken}; the model's weights are broken, take an earlier checkpoint"
        )
    if stopped:
        raise Interrupted
    outcomes, cropped = zip(*(found[number] for number in range(len(task.items))), strict=True)
    return TaskScore(task, list(outcomes), sum(cropped), time.perf_counter() - begun)


def batches(questions: Sequence[Question], pass_tokens: int) -> Iterator[list[Question]]:
    """The longest first, together as long as their options fit `pass_tokens`; at least one."""
    batch: list[Question] = []
    rows = 0
    for q in sorted(questions, key=lambda q: q.longest, reverse=True):
        rows += len(q.options)
        if batch and rows * batch[0].longest > pass_tokens:
            yield batch
            batch, rows = [], len(q.options)
        batch.append(q)
    if batch:
        yield batch


def read_safely(
    subject: Subject, questions: Sequence[Question], device: torch.device
) -> list[list[Reading]]:
    """`read`, in halves where the memory does not suffice."""
    try:
        return read(subject, questions, device)
    except torch.OutOfMemoryError:
        if len(questions) == 1:
            raise
    torch.cuda.empty_cache()  # outside the handler, which keeps the tensors of the failed try
    half = len(questions) // 2
    return [
        reading
        for part in (questions[:half], questions[half:])
        for reading in read_safely(subject, part, device)
    ]


def outcome(question: Question, options: Sequence[Reading]) -> int:
    """1 where the model is right, else 0."""
    if question.gold is None:
        return int(options[0].foretold)
    best = min(range(len(options)), key=lambda n: options[n].nats)
    return int(best == question.gold)


def core(scores: Sequence[TaskScore]) -> stats.Estimate:
    """The mean of the tasks' centred accuracies, each counting the same."""
    return stats.average([score.centred for score in scores])
