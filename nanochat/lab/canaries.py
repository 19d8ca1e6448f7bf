"""
Detect broken fine-tuning runs with a small fixed suite, from their checkpoints and logs.

    checkpoint -> pretraining_text; text, conversations -> CanarySuite.measure -> metrics by name
    metrics of parent and of a checkpoint -> CanaryMonitor: fine, note, warn or broken

Post-training may raise bits per byte on the pretraining text slightly; the rise is measured as a
fraction of the gap to a uniform distribution over tokens. The loss on the training conversations
must match the logged loss, and packed sequences ("rows") must have targets exactly on the answers:
the suite renders the conversations itself, so a bug in the chat template, loss mask or data loader
shows in the first row of the log. Generated answers are compared with the parent's: length,
termination, parsability, repetition, and preference for one letter. So is the accuracy on the
multiple-choice items of the static suite. After the first step, a run is broken only if a canary
triggers at two checkpoints in a row. Thresholds were tuned on healthy runs and injected failures
(dev/LOG.md), except for the accuracy.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from nanochat import stats
from nanochat.attention import pad_right
from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import Checkpoint
from nanochat.common import UsageError
from nanochat.dataloader import inputs_and_targets
from nanochat.dataset import DataConfig
from nanochat.distributed import DistContext
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_bpb import Batch, bits_per_byte
from nanochat.eval_chat import score_by_generation, score_by_logits, trim
from nanochat.gpt import GPT, inference_copy
from nanochat.loss import IGNORE
from nanochat.mixture import open_corpus, open_texts
from nanochat.packing import ensure_packed
from nanochat.sandbox import calculate
from nanochat.tokenizer import Tokenizer
from tasks.base import Subset, Task
from tasks.builtin import WRITERS, ensure_written
from tasks.held_out import is_final
from tasks.hub import HubTask
from tasks.registry import TASKS, make_task

# ---- The suite: pretraining text, training conversations, answers to held-out ones ---------------
# The suite renders conversations as they appear at inference, so training on any other format
# shows in the comparison.

PRETRAINING_TOKENS = 4096  # of pretraining text
NUM_ANSWERS = 16  # to held-out conversations, over all buckets
MAX_ANSWER_TOKENS = 128
NGRAM = 4  # tokens per n-gram when counting repetition
NUM_LOSSES = 64  # training conversations to measure the loss on, over all buckets
ROWS_PER_PASS = 8
NUM_COMPARED = 64  # conversations per bucket to compare with packed rows


@dataclass
class CanarySuite:
    """A fixed set of texts and conversations; mappings are keyed by bucket."""

    tokenizer: Tokenizer
    text: Sequence[Batch]
    chats: Mapping[str, Task]
    """Held-out conversations to generate answers for."""
    train_chats: Mapping[str, Task] = field(default_factory=dict)
    """Training conversations."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of each bucket in the training tokens."""
    questions: Sequence[Task] = ()
    """Multiple-choice tasks of the static suite."""
    parent_scores: list[float] = field(default_factory=list)
    """Scores of the first model that was measured on `questions`."""

    def measure(self, model: GPT) -> dict[str, float]:
        """
        Return all metrics by name. Uses the inference copy of `model`: a compiled model would be
        recompiled for each conversation length.
        """
        model = inference_copy(model)
        found = {**self.measure_text(model), **self.measure_losses(model)}
        return {**found, **self.measure_answers(model), **self.measure_accuracy(model)}

    @torch.no_grad()
    def measure_text(self, model: GPT) -> dict[str, float]:
        """Bits per byte on `text`, and those of a uniform distribution over tokens."""
        if not self.text:
            return {}
        alone = DistContext(0, 0, 1, model.device, model.dtype)  # only rank 0 measures
        sizes = self.tokenizer.token_bytes()
        [bpb] = bits_per_byte(model.token_losses, self.text, sizes, alone)
        uniform = math.log2(len(sizes)) * bpb.tokens / bpb.bytes
        return {"text_bpb": bpb.value, "uniform_bpb": uniform}

    @torch.no_grad()
    def measure_losses(self, model: GPT) -> dict[str, float]:
        """Cross-entropy (nats per target) on training conversations, weighted as in the mixture."""
        nats, counted, tokens = Counter(), Counter(), Counter()
        T = model.cfg.max_seq_len
        some = [(name, self.render(name, i, T)) for name, i in select(self.train_chats, NUM_LOSSES)]
        for first in range(0, len(some), ROWS_PER_PASS):
            group = some[first : first + ROWS_PER_PASS]
            x = pad_right([ids for _, (ids, _) in group], self.tokenizer.bos_id, model.device)
            y = pad_right([targets for _, (_, targets) in group], IGNORE, model.device)
            sums = model.token_losses(x, y).cpu().double().sum(1).tolist()
            for (name, (ids, targets)), loss in zip(group, sums, strict=True):
                nats[name] += loss
                counted[name] += sum(target != IGNORE for target in targets)
                tokens[name] += len(ids)
        weights = {n: self.shares[n] * counted[n] / tokens[n] for n in nats if counted[n]}
        total = math.fsum(weights.values())
        loss = math.fsum(w * nats[n] / counted[n] for n, w in weights.items())
        return {"train_chat_loss": loss / total} if total else {}

    def compare_rows(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """
        Compare packed rows, both (n, T), with the training conversations: ratio of their shares of
        target tokens (>= 1), and total variation distance (0 to 1) between the distributions of
        the token before an answer. Empty without training conversations.
        """
        size = counted = 0.0
        leads = defaultdict[int, float](float)
        for name, bucket in self.train_chats.items():
            some = select({name: bucket}, NUM_COMPARED)
            pairs = [self.render(name, i, tokens.shape[1]) for name, i in some]
            length = sum(len(ids) - 1 for ids, _ in pairs)  # without BOS, which also pads rows
            weight = self.shares[name] / length
            for ids, row in pairs:
                counted += weight * sum(target != IGNORE for target in row)
                for lead in before_answers(np.array(ids), np.array(row)).tolist():
                    leads[lead] += weight
            size += self.shares[name]
        if not (size and counted):
            return {}
        share = (targets != IGNORE).sum() / (tokens != self.tokenizer.bos_id).sum()
        ratio = float(share) * size / counted
        return {
            "loss_mask": max(ratio, 1 / ratio) if ratio else math.inf,
            "template": total_variation(leads, Counter(before_answers(tokens, targets).tolist())),
        }

    def measure_accuracy(self, model: GPT) -> dict[str, float]:
        """
        Accuracy on `questions` and its drop below the first measured model, the parent: 0 within
        two standard errors of the paired difference. Empty without questions.
        """
        if not self.questions:
            return {}
        alone = DistContext(0, 0, 1, model.device, model.dtype)  # only rank 0 measures
        scores = sum(score_suite(model, self.tokenizer, self.questions, alone).values(), [])
        self.parent_scores = self.parent_scores or scores
        change = stats.compare(self.parent_scores, scores)
        drop = -change.difference if change.verdict == "worse" else 0.0
        return {"accuracy": stats.mean(scores).value, "accuracy_drop": drop}

    def render(self, name: str, i: int, max_seq_len: int) -> tuple[list[int], list[int]]:
        """Tokens and targets of a training conversation; IGNORE outside the answers."""
        ids, mask = render(self.tokenizer, self.train_chats[name][i], max_seq_len + 1)
        targets = [token if own else IGNORE for token, own in zip(ids, mask, strict=True)]
        return ids[:-1], targets[1:]

    def measure_answers(self, model: GPT) -> dict[str, float]:
        """Format metrics of greedy answers to held-out prompts; empty if there are none."""
        T = model.cfg.max_seq_len
        longest = min(MAX_ANSWER_TOKENS, T // 2)
        questions, prompts, expected = [], [], 0
        for name, i in select(self.chats, NUM_ANSWERS):
            whole, _ = render(self.tokenizer, self.chats[name][i])
            prompt = render_prompt(self.tokenizer, self.chats[name][i])
            if len(whole) - len(prompt) <= longest / 2:  # so that a good answer fits
                questions.append(self.chats[name].locate(i))
                prompts.append(trim(prompt, T - longest))
                expected += len(whole) - len(prompt)
        if not questions:
            return {}
        engine = Engine(model, self.tokenizer, len(questions))
        answers = [a for (a,) in engine.generate(prompts, Sampling(longest, 0.0, None))]
        texts = [self.tokenizer.decode(answer.ids) for answer in answers]
        pairs = list(zip(questions, texts, strict=True))
        choices = [text.strip() for (task, i), text in pairs if task.letters(i)]
        most = max(Counter(choices).values()) / len(choices) if len(choices) >= 4 else math.nan
        ratio = max(1, sum(len(answer.ids) for answer in answers)) / expected
        return {
            "length": max(ratio, 1 / ratio),
            "no_end": sum(answer.finish == "length" for answer in answers) / len(answers),
            "unparsable": 1 - sum(task.answered(text) for (task, _), text in pairs) / len(pairs),
            "repeated": sum(map(repeated_share, answers)) / len(answers),
            "one_letter": most,
        }


def select(buckets: Mapping[str, Task], num: int) -> list[tuple[str, int]]:
    """Pick about `num` (bucket, index) pairs, evenly spaced, at least two per bucket."""
    found = []
    for name, bucket in buckets.items():
        each = min(len(bucket), max(2, num // len(buckets)))
        found += [(name, i * len(bucket) // each) for i in range(each)]
    return found


def before_answers(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the token before each answer in `tokens` (T) or (n, T), as one flat array."""
    counted = targets != IGNORE
    begins = counted.copy()
    begins[..., 1:] &= ~counted[..., :-1]
    return tokens[begins]


def total_variation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Total variation distance between two weighted sets: 0 = equal, 1 = disjoint."""
    first, second = math.fsum(one.values()), math.fsum(other.values())
    if not (first and second):
        return float(first != second)
    return sum(abs(one[x] / first - other[x] / second) for x in one.keys() | other.keys()) / 2


def repeated_share(answer: Completion) -> float:
    """Share of an answer's n-grams (n = NGRAM) that repeat an earlier one."""
    runs = [tuple(answer.ids[i : i + NGRAM]) for i in range(len(answer.ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def pretraining_text(
    parent: Checkpoint, tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> list[Batch]:
    """
    Return validation rows of the base model's pretraining text on rank 0, which runs the suite;
    empty on other ranks, or if the text cannot be opened (prints a note).
    """
    if not (parent.state["source"] and machine.is_main):
        return []
    found = []
    try:
        texts = open_texts(DataConfig(), None, parent.state["source"], ensure_written)
        corpus = open_corpus(texts, tokenizer, max_seq_len)
        for name, rows in corpus.rows.items():
            ensure_packed(rows, texts.sources[name], tokenizer, 0)
        each = max(1, PRETRAINING_TOKENS // max_seq_len // len(corpus.rows))
        for rows in corpus.rows.values():
            found += map(inputs_and_targets, rows.val_batches(8, each))
    except (OSError, ValueError, UsageError) as error:
        machine.print0(f"canaries skip the pretraining text, which cannot be opened: {error}")
        return []
    return found


# ---- The static suite: about 200 questions ------------------------------------------------------
# scripts.lab.compare asks them of every checkpoint of a run. They are the first items, in the fixed
# order of the tasks, of splits that no stage trains on: the validation split, or the test split of
# GSM8K, which has no other, and of the built-in tasks, whose validation split is for RL. Nothing is
# downloaded: if the benchmarks are not on this machine, the built-in tasks are asked. Final
# benchmarks are left out.

PUBLISHED = {"arc_easy": 60, "arc_challenge": 50, "mmlu": 70, "gsm8k": 20}  # task -> items
BUILTIN = {"world_choice": 110, "world_facts": 40, "world_problems": 25, "world_spelling": 25}
GREEDY = Sampling(max_new_tokens=256, temperature=0.0)

ItemScores = dict[str, list[float]]
"""Score of each item by task."""


def open_suite(dataset: str | None) -> list[Task]:
    """Tasks of the suite for models that were pretrained on `dataset`."""
    published = [] if dataset in WRITERS else first_items(PUBLISHED)
    has_choice = any(task.kind == "choice" for task in published)
    return published if has_choice else first_items(BUILTIN)


def first_items(counts: Mapping[str, int]) -> list[Task]:
    """The first items of each task that is on this machine and not final."""
    found: list[Task] = []
    for key in (key for key in counts if not is_final(key)):
        kind = TASKS[key]
        split = next(s for s in ("val", "test") if s in kind.splits and s != kind.rl_split)
        task = make_task(key, split)
        if not isinstance(task, HubTask) or task.is_local():
            found.append(Subset(task, counts[key]))
    return found


def score_suite(
    model: GPT, tokenizer: Tokenizer, suite: Sequence[Task], machine: DistContext
) -> ItemScores:
    """
    Score a model (ideally `gpt.inference_copy(model)`): by logits, or by greedy answers with a
    calculator. Every rank of `machine` must call it.
    """
    found = {}
    for task in suite:
        if task.kind == "choice":
            graded = score_by_logits(model, tokenizer, task, len(task), machine)
        else:
            engine = Engine(model, tokenizer, tool=calculate)
            graded = score_by_generation(engine, task, len(task), GREEDY, 1, machine)
        found[task.name] = [score for (score,) in graded.outcomes]
    return found


# ---- Monitoring: thresholds, levels, findings ----------------------------------------------------

BROKEN = 78  # exit status of scripts.lab.watch for a broken run
Level = Literal["fine", "note", "warn", "broken"]
LEVELS: tuple[Level, ...] = ("fine", "note", "warn", "broken")
MAX_LENGTH_RATIO = 2.0  # above this, the parent cannot answer: skip format checks
NUM_ROWS = 256  # packed rows to compare with the conversations
MAX_PARENT_SHARE = 0.9  # of a uniform model's bits per byte; above this, nothing to forget


class Canary(NamedTuple):
    """Thresholds of a canary for the levels note, warn and broken."""

    note: float
    warn: float
    broken: float
    meaning: str

    def level(self, value: float) -> Level:
        """Return the level of a value; NaN is not allowed."""
        return LEVELS[sum(value >= bound for bound in self[:3])]


# Thresholds on the value. For "forgotten" and for the entries "no_end" to "one_letter", they apply
# to the increase of the value over the parent's, for "accuracy" to its significant decrease.
CANARIES = {
    "forgotten": Canary(0.25, 0.5, 0.75, "pretraining is forgotten: bits per byte rose"),
    "first_loss": Canary(0.75, 1.5, 2.5, "the first training loss is above the parent's"),
    # never "broken": the smoothed loss averages over several steps
    "train_loss": Canary(1.0, 1.5, math.inf, "rendered for chat, conversations have a higher loss"),
    "loss_mask": Canary(1.25, 1.4, 1.6, "rows and conversations differ in the share of targets"),
    "template": Canary(0.2, 0.35, 0.5, "rows and conversations differ before answers"),
    "no_end": Canary(0.15, 0.3, 0.6, "more answers hit the token limit"),
    "unparsable": Canary(0.15, 0.3, 0.6, "more answers cannot be parsed"),
    "repeated": Canary(0.15, 0.3, 0.5, "answers are more repetitive"),
    "one_letter": Canary(0.3, 0.5, 0.7, "one letter dominates multiple choice"),
    "accuracy": Canary(0.05, 0.1, 0.2, "accuracy on multiple choice fell"),
    "length": Canary(2.0, 3.0, 6.0, "answer length moved away from the reference"),
    "no_signal": Canary(0.9, 0.97, math.inf, "too many groups have equal rewards"),
}


class Finding(NamedTuple):
    """Result of one canary at one step."""

    step: int
    name: str
    value: float
    """Increase over the parent, gap, or ratio."""
    level: Level

    @property
    def severity(self) -> tuple[int, float]:
        """Sort key: from fine to broken, then by value."""
        return LEVELS.index(self.level), self.value


@dataclass
class CanaryMonitor:
    """Findings about a run. `parent`: metrics of the checkpoint that it started from."""

    parent: Mapping[str, float]
    epoch_steps: float = math.inf
    """Steps per epoch; after the first epoch, memorization may lower training loss."""
    history: list[Finding] = field(default_factory=list)
    triggered: set[str] = field(default_factory=set)
    """Canaries above their `broken` threshold at the latest check."""

    @property
    def worst(self) -> Level:
        """Worst level of all findings."""
        return LEVELS[max((finding.severity[0] for finding in self.history), default=0)]

    def check_start(self, loss: float, rows: Mapping[str, float]) -> None:
        """
        Check that the first logged loss matches the parent's and that row targets are correct.
        rows: result of `CanarySuite.compare_rows` on the packed rows of the run, or empty.
        """
        found = dict(rows)
        if "train_chat_loss" in self.parent:
            found["first_loss"] = relative_gap(loss, self.parent["train_chat_loss"])
        self.classify(1, found)

    def check(self, step: int, now: Mapping[str, float], logged: Mapping[str, float]) -> None:
        """Classify the metrics `now` of a checkpoint, and what its run `logged` at that step."""
        parent, found = self.parent, {}
        if parent.get("length", math.inf) <= MAX_LENGTH_RATIO:
            rises = ("no_end", "unparsable", "repeated", "one_letter")
            found = {name: now[name] - parent[name] for name in rises}
            found["length"] = now["length"] / parent["length"]
        before, uniform = (parent.get(name, math.nan) for name in ("text_bpb", "uniform_bpb"))
        if before < MAX_PARENT_SHARE * uniform:
            found["forgotten"] = (now["text_bpb"] - before) / (uniform - before)
        if "accuracy_drop" in now:
            found["accuracy"] = now["accuracy_drop"]
        if "train_chat_loss" in now and "smooth_loss" in logged and step < self.epoch_steps:
            found["train_loss"] = relative_gap(now["train_chat_loss"], logged["smooth_loss"])
        if "without_signal" in logged:  # in RL
            self.classify(step, {"no_signal": logged["without_signal"]})
        self.classify(step, found, self.triggered)
        self.triggered = {name for name, x in found.items() if x >= CANARIES[name].broken}

    def classify(
        self, step: int, found: Mapping[str, float], before: Collection[str] | None = None
    ) -> None:
        """
        Turn each canary's value into a finding, and print every finding that is not fine.
        `before`: canaries triggered at the previous check; all others get at most "warn", as a
        spike may recover.
        """
        for name, value in found.items():
            if math.isnan(value):  # not measurable
                continue
            level = CANARIES[name].level(value)
            if level == "broken" and before is not None and name not in before:
                level = "warn"
            self.history.append(Finding(step, name, value, level))
            if level != "fine":
                was = f", parent {self.parent[name]:.4g}" if name in self.parent else ""
                print(
                    f"canary {level} at step {step}: {CANARIES[name].meaning} "
                    f"({name} {value:+.4g}{was})",
                    flush=True,
                )

    def table(self) -> dict[str, Any]:
        """Table of the worst finding of every canary, for the record."""
        rows = []
        for name in dict.fromkeys(finding.name for finding in self.history):
            mine = [finding for finding in self.history if finding.name == name]
            worst = max(mine, key=lambda finding: finding.severity)
            was = f"{self.parent[name]:.4f}" if name in self.parent else "-"
            found = (f"{worst.value:+.4f}", str(worst.step), str(len(mine)), worst.level)
            rows.append([name, CANARIES[name].meaning, was, *found])
        columns = ["Canary", "Triggers when", "Parent", "Worst", "At step", "Checks", "Level"]
        return {"title": "Canaries", "columns": columns, "rows": rows}


def relative_gap(one: float, other: float) -> float:
    """Difference of two losses in units of the typical noise between small samples."""
    return (one - other) / max(0.5, 0.35 * other)
