"""
Detect broken fine-tuning runs with a small fixed suite, from their checkpoints and logs.

    model, pretraining text, questions -> measure -> metrics by name
    metrics of the parent and of a checkpoint -> rises -> CanaryMonitor: fine, warn or broken
    packed sequences ("rows") -> mask_errors

Post-training may raise bits per byte on the pretraining text slightly; the rise is measured as a
fraction of the gap to a uniform distribution over tokens. Generated answers to items of the static
suite are compared with the parent's: length, termination, parsability, repetition, and preference
for one letter. So is the accuracy on its multiple-choice items. Rows must have targets exactly on
the answers, and the first logged loss must be the parent's on the same rows: a bug in the chat
template, the loss mask or the loading of the model shows in the first step. Later, a run is broken
only if a canary triggers at two checkpoints in a row. The threshold of `forgotten` was tuned on
healthy runs and injected failures; the others are estimates, tried on twelve runs (dev/LOG.md).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from nanochat.chat_format import render
from nanochat.checkpoint import Checkpoint, load_model
from nanochat.common import UsageError
from nanochat.dataset import DataConfig
from nanochat.dist import DistContext
from nanochat.engine import Engine, Sampling
from nanochat.eval_bpb import Batch, bits_per_byte
from nanochat.eval_chat import longest_prompt, render_prompts, score_by_generation, score_by_logits
from nanochat.finetune import chat_losses
from nanochat.gpt import GPT
from nanochat.lab.filters import repeated_share
from nanochat.rows import Rows, inputs_and_targets, open_rows, pack_text, reopen_chat_rows
from nanochat.sandbox import Tools
from nanochat.tokenizer import Tokenizer
from tasks.base import Mixture, Task, visible
from tasks.held_out import is_final
from tasks.registry import TASKS
from tasks.world import write as builtin

# ---- Metrics of a model --------------------------------------------------------------------------

TEXT_TOKENS = 4096  # of pretraining text
NUM_ANSWERS = 16  # whose format is checked
MAX_ANSWER_TOKENS = 128


def open_pretraining_rows(checkpoint: Checkpoint, dist: DistContext) -> Rows:
    """
    Packed validation rows of the text that a model was pretrained on. Raises OSError, ValueError or
    UsageError if the text cannot be opened.
    """
    source, tokenizer = checkpoint.state["source"], checkpoint.tokenizer()
    text = builtin.open_text(DataConfig(), source)
    rows = open_rows(text, tokenizer, checkpoint.state["model"]["max_seq_len"])
    return dist.on_main(lambda: pack_text(rows, text, tokenizer, [0]))


def pretraining_batches(checkpoint: Checkpoint, dist: DistContext) -> list[Batch]:
    """Some of these rows; none, with a message, if the text cannot be opened."""
    try:
        rows = open_pretraining_rows(checkpoint, dist)
    except (OSError, ValueError, UsageError) as error:
        print(f"canaries skip the pretraining text, which cannot be opened: {error}", flush=True)
        return []
    count = max(1, TEXT_TOKENS // rows.max_seq_len)
    return [inputs_and_targets(batch) for batch in rows.val_batches(8, count)]


def measure(
    model: GPT,
    tokenizer: Tokenizer,
    text: Sequence[Batch],
    suite: Sequence[Task],
    dist: DistContext,
) -> dict[str, float]:
    """
    Metrics of a model by name: format of greedy answers to the suite; accuracy on its
    multiple-choice tasks; bits per byte on `text`, as a fraction of those of a uniform
    distribution over tokens.
    """
    found = measure_answers(model, tokenizer, suite)
    choice = [task for task in suite if task.kind == "choice"]
    if scores := sum(score_suite(model, tokenizer, choice, dist).values(), []):
        found["accuracy"] = sum(scores) / len(scores)
    if text:
        sizes = tokenizer.token_bytes()
        bpb = bits_per_byte(model.token_losses, text, sizes, dist)
        found["text"] = bpb.nats / bpb.tokens / math.log(len(sizes))
    return found


def measure_answers(model: GPT, tokenizer: Tokenizer, suite: Sequence[Task]) -> dict[str, float]:
    """Format metrics of greedy answers to the first items of each task."""
    questions = [task.locate(i) for task in suite for i in range(NUM_ANSWERS // len(suite))]
    chats = [task[i] for task, i in questions]
    expected = sum(sum(render(tokenizer, chat)[1]) for chat in chats)  # tokens
    engine = Engine(model, tokenizer, len(chats))
    longest = min(MAX_ANSWER_TOKENS, model.cfg.max_seq_len // 2)
    prompts, _ = render_prompts(tokenizer, chats, longest_prompt(engine, longest))
    answers = [a for (a,) in engine.generate(prompts, Sampling(longest, 0.0, None))]
    texts = [tokenizer.decode(answer.ids).strip() for answer in answers]
    pairs = list(zip(questions, texts, strict=True))
    ratio = max(1, sum(len(answer.ids) for answer in answers)) / max(1, expected)
    choices = Counter(text for (task, i), text in pairs if task.kind == "choice") or Counter("?")
    return {
        "length": max(ratio, 1 / ratio),
        "no_end": fmean(answer.finish == "length" for answer in answers),
        "unparsable": fmean(task.extract(visible(text)) is None for (task, _), text in pairs),
        "repeated": fmean(repeated_share(answer.ids) for answer in answers),
        "one_letter": max(choices.values()) / choices.total(),
    }


# ---- The first step ------------------------------------------------------------------------------

MAX_ROWS = 32


def check_rows(
    state: Mapping[str, Any], first_loss: float, parent: Checkpoint, dist: DistContext
) -> dict[str, float]:
    """
    Canaries of the packed conversations of a run's first step: the share of wrong targets, and the
    relative difference of the first loss from the parent's.
    """
    every, tokenizer = reopen_chat_rows(state["rows"]), parent.tokenizer()
    count = min(MAX_ROWS, state["batch_tokens"] // every.max_seq_len)
    rows = every.batch(0, count, state["provenance"]["seed"])
    score = chat_losses(load_model(parent, dist, every.max_seq_len), tokenizer.bos_id)
    found = bits_per_byte(score, [inputs_and_targets(rows)], tokenizer.token_bytes(), dist)
    gap = first_loss / found.loss - 1
    return {"loss_mask": mask_errors(rows, tokenizer), "first_loss": abs(gap)}


def mask_errors(rows: np.ndarray, tokenizer: Tokenizer) -> float:
    """
    Share of wrong targets in packed rows (n, T + 1), in which ~id is no target. Targets are the
    tokens after <|assistant_start|> up to <|assistant_end|>, except for results of tools. 1 if
    there are none.
    """
    own, ids = rows >= 0, np.where(rows < 0, ~rows, rows)

    def span(name: str) -> np.ndarray:  # after the start token, up to the end token
        starts, ends = (ids == tokenizer.special(f"<|{name}_{x}|>") for x in ("start", "end"))
        return starts.cumsum(1) - starts > ends.cumsum(1) - ends

    expected = span("assistant") & ~span("output") & (ids != tokenizer.special("<|output_start|>"))
    counted = (own | expected).sum()
    return float((own != expected).sum() / counted) if counted else 1.0


# ---- The static suite: about 200 questions -------------------------------------------------------
# scripts.lab.compare asks them too. They are the first items, in the fixed
# order of the tasks, of splits that no stage trains on: the validation split, or the test split of
# GSM8K, which has no other, and of the built-in tasks, whose validation split is for RL. The
# published ones are downloaded at first use. Final benchmarks are left out.

PUBLISHED = {"arc_easy": 60, "arc_challenge": 50, "mmlu": 70, "gsm8k": 20}  # task -> items
BUILTIN = {"world_choice": 110, "world_facts": 40, "world_problems": 25, "world_spelling": 25}
GREEDY = Sampling(max_new_tokens=256, temperature=0.0)


def open_suite(dataset: str | None) -> list[Task]:
    """Tasks of the suite for models pretrained on `dataset`. Raises ValueError if all are final."""
    counts, found = BUILTIN if dataset == builtin.EMBEDDED else PUBLISHED, []
    for key in (key for key in counts if not is_final(key)):
        kind = TASKS[key]
        split = next(s for s in ("val", "test") if s in kind.splits and s != kind.rl_split)
        found.append(Mixture([kind(split)], count=counts[key]))
    if not found:
        raise ValueError("all tasks of the suite are final benchmarks: there is nothing to score")
    return found


def score_suite(
    model: GPT, tokenizer: Tokenizer, suite: Sequence[Task], dist: DistContext
) -> dict[str, list[float]]:
    """
    Score of each item by task, of a model (ideally `gpt.inference_copy(model)`): by logits, or by
    greedy answers with a calculator. Every rank of `dist` must call it.
    """
    found = {}
    for task in suite:
        if task.kind == "choice":
            graded = score_by_logits(model, tokenizer, task, len(task), dist)
        else:
            engine = Engine(model, tokenizer, tool=Tools())
            graded = score_by_generation(engine, task, len(task), GREEDY, 1, dist)
        found[task.name] = [score for (score,) in graded.outcomes]
    return found


# ---- Monitoring: thresholds, levels, findings ----------------------------------------------------

BROKEN = 78  # exit status of scripts.lab.watch for a broken run
LEVELS = ("fine", "warn", "broken")
MAX_LENGTH_RATIO = 2.0  # above this, the parent cannot answer: skip format checks
MAX_PARENT_TEXT = 0.9  # of a uniform model's bits per byte; above this, nothing to forget


class Canary(NamedTuple):
    """Thresholds of a canary for the levels warn and broken."""

    warn: float
    broken: float
    meaning: str


CANARIES = {
    "forgotten": Canary(0.5, 0.75, "pretraining is forgotten: bits per byte rose"),
    "first_loss": Canary(0.2, 0.4, "the first training loss is not the parent's"),
    "loss_mask": Canary(1e-4, 1e-3, "targets of the rows are not the answers"),
    "no_end": Canary(0.3, 0.6, "more answers hit the token limit"),
    "unparsable": Canary(0.3, 0.6, "more answers cannot be parsed"),
    "repeated": Canary(0.3, 0.5, "answers are more repetitive"),
    "one_letter": Canary(0.5, 0.7, "one letter dominates multiple choice"),
    "accuracy": Canary(0.15, 0.2, "accuracy on multiple choice fell"),
    "length": Canary(3.0, 6.0, "answer length moved away from the reference"),
    "no_signal": Canary(0.97, math.inf, "too many groups have equal rewards"),
}


def rises(parent: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Values of the canaries, given the metrics of the parent and of a checkpoint."""
    found = {}
    if parent.get("length", math.inf) <= MAX_LENGTH_RATIO:
        names = ("no_end", "unparsable", "repeated", "one_letter")
        found = {name: now[name] - parent[name] for name in names}
        found["length"] = now["length"] / parent["length"]
    before = parent.get("text", 1.0)
    if before < MAX_PARENT_TEXT:
        found["forgotten"] = (now["text"] - before) / (1 - before)
    if "accuracy" in parent:
        found["accuracy"] = parent["accuracy"] - now["accuracy"]
    return found


class CanaryMonitor:
    """The worst finding of each canary."""

    def __init__(self) -> None:
        self.worst: dict[str, tuple[int, float, int]] = {}  # index into LEVELS, value, step
        self.triggered = {"first_loss", "loss_mask"}  # once is enough for these

    @property
    def level(self) -> str:
        """Worst level of all canaries."""
        return LEVELS[max((severity for severity, *_ in self.worst.values()), default=0)]

    def record(self, step: int, found: Mapping[str, float]) -> None:
        """
        Classify the values of canaries at a step, and print those that are not fine. A canary that
        did not trigger at the step before is at most "warn", as a spike may recover.
        """
        for name, value in found.items():
            severity = sum(value >= bound for bound in CANARIES[name][:2])
            if name not in self.triggered:
                severity = min(severity, LEVELS.index("warn"))
            finding = (severity, value, step)
            self.worst[name] = max(self.worst.get(name, finding), finding)
            if severity:
                meaning = f"{CANARIES[name].meaning} ({name} {value:+.4g})"
                print(f"canary {LEVELS[severity]} at step {step}: {meaning}", flush=True)
        self.triggered = {name for name, value in found.items() if value >= CANARIES[name].broken}

    def table(self) -> dict[str, Any]:
        """Table of the worst finding of every canary, for the record."""
        rows = [
            [name, CANARIES[name].meaning, f"{value:+.4f}", step, LEVELS[severity]]
            for name, (severity, value, step) in self.worst.items()
        ]
        columns = ["Canary", "Triggers when", "Worst", "At step", "Level"]
        return {"title": "Canaries", "columns": columns, "rows": rows}
