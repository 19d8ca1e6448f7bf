"""
Evaluation during pretraining: bits per byte, few-shot scores, samples.

    step -> what is due -> {"val_bpb", "core_metric"}, samples on the screen

Each has a cadence of its own; all are measured at the end.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanochat.dataloader import Rows, require_half
from nanochat.distributed import DistContext
from nanochat.eval_bpb import (
    Batch,
    bits_per_byte,
    bucket_figures,
    pooled,
    row_batches,
)
from nanochat.eval_core import core, eval_model_of, examine, open_suite
from nanochat.gpt import GPT, for_inference
from nanochat.loss import Trainable
from nanochat.records import estimate
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer
from nanochat.train import Evaluator

# ---- Samples from fixed prompts ------------------------------------------------------------------
# The prompts of the seed report, so that reports can be compared side by side.


PROMPTS = (
    "The capital of France is | The chemical symbol of gold is | If yesterday was Friday, then "
    "tomorrow will be | The opposite of hot is | The planets of the solar system are: | My "
    "favorite color is | If 5*x + 3 = 13, then x is"
).split(" | ")
NEW_TOKENS = 16


@torch.no_grad()
def continue_greedily(model: GPT, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """`prompt` behind BOS and its most likely continuation, decoded; reads the whole each time."""
    device = model.device
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    for _ in range(new_tokens):
        window = torch.tensor([ids[-model.cfg.max_seq_len :]], device=device)
        ids.append(int(model(window)[0, -1].argmax()))
    return tokenizer.decode(ids)


def samples(model: GPT, tokenizer: Tokenizer) -> dict[str, str]:
    """
    `sample 0` to `sample 6`, as the report names them. The inference copy generates: a compiled
    model would be compiled for each of their lengths.
    """
    model = for_inference(model)
    return {
        f"sample {i}": continue_greedily(model, tokenizer, prompt, NEW_TOKENS)
        for i, prompt in enumerate(PROMPTS)
    }


# ---- Evaluation during pretraining ---------------------------------------------------------------


@dataclass(frozen=True)
class PretrainEvalConfig:
    eval_tokens: int | None = None
    """Validation tokens per evaluation; at most the validation shard. Default: 10,485,760, on a
    CPU 131,072."""
    eval_half: int = 0
    """Which half of the validation rows to use, 0 for both: 2 measures anew what 1 chose."""
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
        least = {"eval_tokens": 1, "core_metric_every": 0, "core_metric_max_per_task": 1}
        for name, bound in {**least, "sample_every": 0}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")
        require_half(self.eval_half)

    def tokens(self, machine: DistContext) -> int:
        """Validation tokens per evaluation, the default included."""
        return self.eval_tokens or (131_072 if machine.device.type == "cpu" else 20 * 524_288)


class ValidationLoss(Evaluator):
    """
    Bits per byte on validation rows, of a mixture the same number of rows of each bucket.

    rows: by bucket. eval_tokens: in all, at least a row of each bucket. every: steps between
    measurements, 0 = only at the end. half: of the rows, see PretrainEvalConfig.
    """

    def __init__(
        self,
        model: Trainable,
        tokenizer: Tokenizer,
        rows: Mapping[str, Rows],
        machine: DistContext,
        eval_tokens: int,
        every: int,
        half: int = 0,
    ) -> None:
        self.model, self.rows, self.machine = model, rows, machine
        self.token_bytes, self.bos_id = tokenizer.token_bytes(), tokenizer.bos_id
        self.every, self.half = every, half
        T = next(iter(rows.values())).max_seq_len
        self.num_rows = max(1, eval_tokens // T // len(rows))
        self.loss = math.nan
        """Nats per counted token."""
        self.by_bucket: dict[str, float] = {}
        """Bits per byte of each bucket, where there are several."""

    def require_rows(self) -> None:
        """Wait for the validation rows of each bucket. Raises UsageError where there is none."""
        for rows in self.rows.values():
            rows.require_val_rows(self.half)

    def stored_batches(self, rows: Rows) -> Iterator[np.ndarray]:
        """This rank's validation rows of one bucket, as they are stored."""
        machine = self.machine
        return rows.val_batches(
            self.rows_per_pass, self.num_rows, machine.rank, machine.world_size, self.half
        )

    def batches(self, rows: Rows) -> Iterator[Batch]:
        """This rank's validation batches of one bucket: tokens and targets."""
        return row_batches(self.stored_batches(rows), self.rows_per_pass)

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        score, sizes = self.model.token_losses, self.token_bytes
        found = {
            name: bits_per_byte(score, self.batches(rows), sizes, self.machine, stopping)[0]
            for name, rows in self.rows.items()
        }
        every = pooled(found.values())
        self.loss = every.nats / every.tokens if every.tokens else math.nan
        self.by_bucket = bucket_figures(found)
        return {"val_bpb": every.value, **self.by_bucket}


class FewShotScore(Evaluator):
    """
    CORE on some items of each task of a suite, by a copy of the model that is not compiled.

    bundle: where the tasks are, as for `open_suite`. It is opened here, so that a missing one ends
    the run before it has cost anything.
    """

    def __init__(
        self,
        cfg: PretrainEvalConfig,
        model: GPT,
        tokenizer: Tokenizer,
        bundle: str | None,
        machine: DistContext,
    ) -> None:
        self.cfg, self.model, self.tokenizer, self.machine = cfg, model, tokenizer, machine
        self.every = cfg.core_metric_every
        self.score: Estimate | None = None
        self.suite = machine.on_main("opening the suite", lambda: open_suite(bundle))

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        subject = eval_model_of(for_inference(self.model), self.tokenizer)
        most = self.cfg.core_metric_max_per_task
        scores = [
            examine(subject, task, self.machine, most, stopping=stopping)
            for task in self.suite.tasks
        ]
        self.score = core(scores)
        return {"core_metric": self.score.value}

    def values(self) -> dict[str, Any]:
        return {"CORE metric estimate": estimate(*self.score)} if self.score else {}


class Samples(Evaluator):
    """Prints continuations of seven fixed prompts."""

    def __init__(
        self, cfg: PretrainEvalConfig, model: GPT, tokenizer: Tokenizer, machine: DistContext
    ) -> None:
        self.model, self.tokenizer, self.machine = model, tokenizer, machine
        self.every = cfg.sample_every

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        if self.machine.is_main:
            with self.machine.working("sampling"):
                for text in samples(self.model, self.tokenizer).values():
                    print(f"    {text!r}")
        return {}
