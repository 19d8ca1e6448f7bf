"""
Evaluation during pretraining: bits per byte, few-shot scores, samples.

    step -> what is due -> {"val_bpb", "core_metric"}, samples on the screen

Each has a cadence of its own; all are measured at the end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nanochat.common import UsageError
from nanochat.config import require_at_least
from nanochat.dataloader import Rows, inputs_and_targets, require_half
from nanochat.distributed import DistContext
from nanochat.eval_bpb import Batch, bits_per_byte, bucket_figures, pooled
from nanochat.eval_core import core, eval_model_of, examine, open_suite
from nanochat.gpt import GPT, for_inference
from nanochat.loss import IGNORE
from nanochat.records import estimate
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, ShouldStop, TrainingRun

# ---- Samples from fixed prompts ------------------------------------------------------------------
# The prompts of the seed report, so that reports can be compared side by side.


PROMPTS = (
    "The capital of France is | The chemical symbol of gold is | If yesterday was Friday, then "
    "tomorrow will be | The opposite of hot is | The planets of the solar system are: | My "
    "favorite color is | If 5*x + 3 = 13, then x is"
).split(" | ")
NEW_TOKENS = 16


@torch.no_grad()
def samples(model: GPT, tokenizer: Tokenizer) -> dict[str, str]:
    """
    `sample 0` to `sample 6`, as the report names them: the prompts behind BOS with their likeliest
    continuations. The inference copy generates: a compiled model would be compiled for each length.
    """
    model, found = for_inference(model), {}
    for i, prompt in enumerate(PROMPTS):
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for _ in range(NEW_TOKENS):
            window = torch.tensor([ids[-model.cfg.max_seq_len :]], device=model.device)
            ids.append(int(model(window)[0, -1].argmax()))
        found[f"sample {i}"] = tokenizer.decode(ids)
    return found


# ---- Batches to evaluate on ----------------------------------------------------------------------


next_ids = partial(inputs_and_targets, ignore=IGNORE)  # of text: a target is the id that follows


def row_batches(
    batches: Iterable[np.ndarray], rows: int, split: Callable[[np.ndarray], Batch] = next_ids
) -> Iterator[Batch]:
    """
    Rows -> tokens and targets, by `split`, of exactly `rows` rows; the last batch is filled up
    with rows in which nothing counts, so that a compiled model sees one shape.
    """
    for batch in batches:
        tokens, targets = split(np.resize(batch, (rows, batch.shape[1])))
        targets[len(batch) :] = IGNORE
        yield tokens, targets


# ---- Evaluation while training -------------------------------------------------------------------


class Evaluator(Callback, ABC):
    """
    Measures every `every` steps (0 = only at the end) and at the end, `rows_per_pass` rows at a
    time. Out of memory, it goes on with half as many rows.
    """

    every = 0

    def start(self, run: TrainingRun) -> None:
        self.run, self.machine, self.rows_per_pass = run, run.machine, run.device_rows

    @abstractmethod
    def measure(self, stopping: ShouldStop) -> dict[str, float]:
        """The metrics. Raises Interrupted where `stopping()` became true."""

    def evaluate(self, step: int, stopping: ShouldStop, last: bool) -> dict[str, float]:
        if not last and not (self.every and step % self.every == 0):
            return {}
        while True:
            try:
                return self.measure(stopping)
            except torch.OutOfMemoryError:
                if self.rows_per_pass == 1:
                    raise
            torch.cuda.empty_cache()  # outside the handler, which keeps the failed try's tensors
            self.rows_per_pass //= 2
            fewer = f"{self.rows_per_pass} rows at a time"
            print(f"evaluation: out of memory, going on with {fewer}", flush=True)


@dataclass(frozen=True)
class ValidationConfig:
    eval_tokens: int | None = None
    """Validation tokens per evaluation, shared among the buckets of a mixture; at most all.
    Default: 10,485,760, on a CPU 131,072."""
    eval_half: int = 0
    """Which half of the validation rows to use, 0 for both: 2 measures anew what 1 chose."""

    def __post_init__(self) -> None:
        require_at_least(self, eval_tokens=1)
        require_half(self.eval_half)

    def tokens(self, machine: DistContext) -> int:
        """Validation tokens per evaluation, the default included."""
        return self.eval_tokens or (131_072 if machine.device.type == "cpu" else 10_485_760)


class ValidationLoss(Evaluator):
    """
    Bits per byte on validation rows, of a mixture the same number of rows of each bucket.

    rows: by bucket. split: rows as they are stored -> tokens and targets, (B, T) each.
    """

    loss = math.nan
    """Nats per counted token."""

    def __init__(
        self, cfg: ValidationConfig, rows: Mapping[str, Rows], split: Callable[[np.ndarray], Batch]
    ) -> None:
        self.cfg, self.rows, self.split = cfg, rows, split
        self.by_bucket: dict[str, float] = {}
        """Bits per byte of each bucket, where there are several."""

    def start(self, run: TrainingRun) -> None:
        """Wait for the validation rows. Raises UsageError for a bucket with nothing to score."""
        super().start(run)
        self.model, self.token_bytes = run.objective or run.model, run.tokenizer.token_bytes()
        self.every, half = run.cfg.eval_every, self.cfg.eval_half
        T = next(iter(self.rows.values())).max_seq_len
        self.num_rows = max(1, self.cfg.tokens(run.machine) // T // len(self.rows))
        for name, rows in self.rows.items():
            every = map(self.split, rows.val_batches(64, self.num_rows, half=half))
            if not any(self.token_bytes[y[y != IGNORE]].any() for _, y in every):
                raise UsageError(
                    f"the validation rows of {name} have no byte that counts",
                    "other validation text, or with --val_mixture conversations with answers",
                )

    def batches(self, rows: Rows) -> Iterator[Batch]:
        """This rank's validation batches of one bucket."""
        machine, size = self.machine, self.rows_per_pass
        share = (self.num_rows, machine.rank, machine.world_size, self.cfg.eval_half)
        return row_batches(rows.val_batches(size, *share), size, self.split)

    def measure(self, stopping: ShouldStop) -> dict[str, float]:
        score, sizes, found = self.model.token_losses, self.token_bytes, {}
        for name, rows in self.rows.items():
            [found[name]] = bits_per_byte(score, self.batches(rows), sizes, self.machine, stopping)
        every = pooled(found.values())
        self.loss = every.nats / every.tokens if every.tokens else math.nan
        self.by_bucket = bucket_figures(found)
        return {"val_bpb": every.value, "val_loss": self.loss, **self.by_bucket}


@dataclass(frozen=True)
class PretrainEvalConfig:
    core_metric_every: int = 0
    """Steps between few-shot scores (CORE, see scripts.base_eval), also at the end; 0 = never."""
    core_metric_max_per_task: int = 500
    """Items of each few-shot task that are scored during training."""
    sample_every: int = 0
    """Steps between printing continuations of seven fixed prompts; 0 = never."""
    eval_bundle: str | None = None
    """Folder, archive or URL of few-shot tasks. Default: those of the built-in data set where it is
    trained on, else the published ones."""

    def __post_init__(self) -> None:
        require_at_least(self, core_metric_every=0, core_metric_max_per_task=1, sample_every=0)


class FewShotScore(Evaluator):
    """
    CORE on some items of each task of a suite, by a copy of the model that is not compiled.

    bundle: where the tasks are, as for `open_suite`. It is opened here, so that a missing one ends
    the run before it has cost anything.
    """

    def __init__(self, cfg: PretrainEvalConfig, bundle: str | None, machine: DistContext) -> None:
        self.every, self.most = cfg.core_metric_every, cfg.core_metric_max_per_task
        self.score: Estimate | None = None
        self.suite = machine.on_main("opening the suite", lambda: open_suite(bundle))

    def measure(self, stopping: ShouldStop) -> dict[str, float]:
        subject = eval_model_of(for_inference(self.run.model), self.run.tokenizer)
        limits = {"machine": self.machine, "max_items": self.most, "stopping": stopping}
        self.score = core([examine(subject, task, **limits) for task in self.suite.tasks])
        return {"core_metric": self.score.value}

    def values(self) -> dict[str, Any]:
        return {"CORE metric estimate": estimate(*self.score)} if self.score else {}


class Samples(Evaluator):
    """Prints continuations of seven fixed prompts."""

    def __init__(self, every: int) -> None:
        self.every = every

    def measure(self, stopping: ShouldStop) -> dict[str, float]:
        if self.machine.is_main:
            with self.machine.working("sampling"):
                for text in samples(self.run.model, self.run.tokenizer).values():
                    print(f"    {text!r}")
        return {}
