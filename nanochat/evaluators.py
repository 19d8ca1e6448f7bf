"""
Evaluation during pretraining: bits per byte, few-shot scores, samples.

    step -> what is due -> {"val_bpb", "core_metric"}, samples on the screen

Each has a cadence of its own; all are measured at the end.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from nanochat.dataloader import Rows, require_half
from nanochat.distributed import Machine
from nanochat.eval_bpb import (
    Batch,
    Interrupted,
    bits_per_byte,
    bucket_figures,
    pooled,
    row_batches,
)
from nanochat.eval_core import Suite, SuiteConfig, core, examine, open_suite, subject_of
from nanochat.gpt import GPT, for_inference
from nanochat.recursion.metrics import bpb_by_loop, loop_figures, state_figures
from nanochat.recursion.model import RecursiveGPT
from nanochat.stage import Evaluate
from nanochat.stats import Estimate
from nanochat.tokenizer import Tokenizer

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
class ExamConfig:
    eval_tokens: int | None = None
    """Validation tokens per evaluation; at most the validation shard. Default: 10,485,760, on a
    CPU 131,072."""
    eval_half: int = 0
    """Of which half of the validation rows they are, 0 of both: 2 measures anew what 1 chose."""
    core_metric_every: int = 0
    """Steps between few-shot scores (CORE, see scripts.base_eval), also at the end; 0 = never."""
    core_metric_max_per_task: int = 500
    """Items of each few-shot task that are scored on the way."""
    sample_every: int = 0
    """Steps between printing what the model makes of seven fixed prompts; 0 = never."""
    suite: SuiteConfig = field(default_factory=SuiteConfig)

    def __post_init__(self) -> None:
        least = {"eval_tokens": 1, "core_metric_every": 0, "core_metric_max_per_task": 1}
        for name, bound in {**least, "sample_every": 0}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, got {value}")
        require_half(self.eval_half)

    def tokens(self, machine: Machine) -> int:
        """Validation tokens per evaluation, where nobody said how many."""
        return self.eval_tokens or (131_072 if machine.device.type == "cpu" else 20 * 524_288)


class Exam:
    """
    The measurements of one training; `core` is the latest few-shot score.

    rows: of each text it is trained on. eval_every: the loop's own cadence, that of bits per byte.
    dataset: what the text is, which decides the suite where the configuration does not. The suite
    is opened here, so that one that cannot be had stops the run before it has cost anything.
    """

    def __init__(
        self,
        cfg: ExamConfig,
        model: GPT,
        tokenizer: Tokenizer,
        rows: Mapping[str, Rows],
        dataset: str | None,
        eval_every: int,
        machine: Machine,
    ) -> None:
        self.cfg, self.model, self.tokenizer, self.rows = cfg, model, tokenizer, rows
        self.eval_every, self.machine = eval_every, machine
        self.core: Estimate | None = None
        self.suite: Suite | None = None
        if cfg.core_metric_every:
            self.suite = machine.on_main(
                "opening the suite", lambda: open_suite(cfg.suite, dataset)
            )

    def require_rows(self) -> None:
        """Wait for the validation rows of each text. Raises Refused where there is none."""
        for rows in self.rows.values():
            rows.require_val_rows(self.cfg.eval_half)

    def evaluation(self, device_rows: int) -> Evaluate:
        """What the loop calls at all cadences, `device_rows` at a time."""

        def evaluate(
            step: int, stopping: Callable[[], bool], last: bool
        ) -> dict[str, float] | None:
            def due(every: int) -> bool:
                return bool(every) and (last or step % every == 0)

            figures: dict[str, float] = {}
            if due(self.cfg.sample_every) and self.machine.is_main:
                with self.machine.working("sampling"):
                    for said in samples(self.model, self.tokenizer).values():
                        print(f"    {said!r}")
            try:
                if last or due(self.eval_every):
                    figures |= self.validation(device_rows, stopping)
                if self.suite and due(self.cfg.core_metric_every):
                    self.core = self.few_shot(self.suite, stopping)
                    figures["core_metric"] = self.core.value
            except Interrupted:
                return None
            return figures

        return evaluate

    def validation(self, device_rows: int, stopping: Callable[[], bool]) -> dict[str, float]:
        """
        Bits per byte on validation rows, of a mixture as many of each text; of a recursive model
        after each of its loops.
        """
        machine, model = self.machine, self.model
        num_rows = max(1, self.cfg.tokens(machine) // model.cfg.max_seq_len // len(self.rows))
        token_bytes = self.tokenizer.token_bytes()

        def batches(rows: Rows) -> Iterator[Batch]:
            mine = rows.val_batches(
                device_rows, num_rows, machine.rank, machine.world_size, self.cfg.eval_half
            )
            return row_batches(mine, device_rows)

        if not isinstance(model, RecursiveGPT):
            found = {
                name: bits_per_byte(model, batches(rows), token_bytes, machine, stopping)
                for name, rows in self.rows.items()
            }
            return {"val_bpb": pooled(found.values()).value, **bucket_figures(found)}
        every = itertools.chain.from_iterable
        loops = range(1, model.cfg.n_loops + 1)
        batch_lists = map(batches, self.rows.values())
        by_loop = bpb_by_loop(model, loops, every(batch_lists), token_bytes, machine, stopping)
        return {
            "val_bpb": by_loop[-1].value,
            **loop_figures(model.cfg, [bpb.value for bpb in by_loop]),
            **state_figures(model, every(map(batches, self.rows.values()))),
        }

    def few_shot(self, suite: Suite, stopping: Callable[[], bool]) -> Estimate:
        """CORE, on some items of each task; of a copy that nothing has compiled."""
        subject = subject_of(for_inference(self.model), self.tokenizer)
        most = self.cfg.core_metric_max_per_task
        return core(
            [examine(subject, t, self.machine, most, stopping=stopping) for t in suite.tasks]
        )
