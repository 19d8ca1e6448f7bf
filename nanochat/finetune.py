"""
Training on conversations: what midtraining and supervised fine-tuning do alike.

    parent checkpoint + buckets -> mixed, packed rows -> Stage -> bits per byte of the answers

Every conversation in a row sees only itself, so packing changes no loss and no gradient. Knows no
tasks: scripts hand in buckets of conversations and the words of their mixture.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from nanochat import records, report
from nanochat.chat_packing import (
    Conversations,
    Encoded,
    encode,
    mixed_chat_rows,
    open_chat_rows,
    pack_encoded,
    signed_inputs_and_targets,
)
from nanochat.checkpoint import (
    Checkpoint,
    closing_lines,
    find_checkpoint,
    load_model,
)
from nanochat.common import PREEMPTED, Refused, fingerprint, write_json
from nanochat.dataloader import Rows, require_half
from nanochat.distributed import Machine, init_machine
from nanochat.eval_bpb import (
    bits_per_byte,
    bucket_figures,
    pooled,
)
from nanochat.gpt import GPT
from nanochat.hardware import used_memory_bytes
from nanochat.logger import METRICS_FILE
from nanochat.loss import IGNORE
from nanochat.mixture import (
    MIXTURE_FILE,
    MixConfig,
    Part,
    Resolution,
    Resolved,
    Tags,
    parse_budget,
    parse_mixture,
    resolve,
)
from nanochat.optim import MuonAdamW, rules
from nanochat.scaling import divisible_batch
from nanochat.stage import (
    Outcome,
    Stage,
    StageConfig,
    carry_out,
)
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback, Evaluator

MIN_STEPS = 200  # a short stage rather takes smaller batches than few steps
MIN_ROWS = 8  # in a batch, where nobody says how many


class Apart:
    """A model that keeps the conversations of a row apart: a BOS begins a new one."""

    def __init__(self, model: GPT, bos_id: int):
        self.model, self.bos_id = model, bos_id

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats summed over the counted targets."""
        return self.model.loss(tokens, targets, self.segments(tokens))

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target."""
        return self.model.token_losses(tokens, targets, self.segments(tokens))

    def segments(self, tokens: Tensor) -> Tensor:
        """The number of the conversation that each token of its row belongs to."""
        return (tokens == self.bos_id).cumsum(dim=1)


class Answers(Conversations, Protocol):
    """Conversations that say what they are; `tasks.base.Task` does."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-ready; decides which conversations there are, and in which order."""
        ...


class Bucket(Protocol):
    """Conversations that can be taken or left; `tasks.buckets.Bucket` is one."""

    @property
    def name(self) -> str: ...
    @property
    def tags(self) -> Tags: ...
    @property
    def measures(self) -> str:
        """The benchmark whose test questions `val` is; empty where it has rows of its own."""
        ...

    @property
    def train(self) -> Answers: ...
    @property
    def val(self) -> Answers: ...


@dataclass(frozen=True)
class Talk:
    """What is learned, and what measures how well: buckets, chosen by the words of `mix`."""

    mix: MixConfig
    learned: Sequence[Bucket]
    """One for each part of the mixture."""
    measured: Sequence[Bucket]

    @property
    def parts(self) -> list[Part]:
        """The parts of the mixture."""
        return parse_mixture(self.mix.mixture)

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; equal for equal conversations in equal proportions."""
        return {
            "learned": {bucket.name: bucket.train.identity for bucket in self.learned},
            "measured": {bucket.name: bucket.val.identity for bucket in self.measured},
            "parts": [part._asdict() for part in self.parts],
            **self.mix.chosen,
        }


@dataclass(frozen=True)
class Plan:
    from_tag: str | None = None
    """Folder of the checkpoint to start from. Default: --model_tag, else the one written last."""
    from_step: int | None = None
    """Step of that checkpoint. Default: the last good one."""
    num_iterations: int | None = None
    """Optimizer steps. Default: from num_epochs."""
    num_epochs: float = 1.0
    """How often the mixture is gone through."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: that of pretraining, or less where there
    are so few conversations that it would leave a handful of steps."""
    max_seq_len: int | None = None
    """Tokens in a row. Default: that of pretraining."""
    init_lr_frac: float = 1.0
    """Peak of all rates, as a fraction of those of pretraining."""
    warm_start: bool = False
    """Begin with the optimizer state of the checkpoint."""
    eval_tokens: int | None = None
    """Validation tokens per evaluation, shared among the buckets; at most all. Default: 10,485,760,
    on a CPU 131,072."""
    eval_half: int = 0
    """Of which half of the validation rows they are, 0 of both: 2 measures anew what 1 chose."""
    val_mixture: str | None = None
    """Buckets whose held-out conversations measure the loss. Default: those that are learned."""

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_epochs", "total_batch_size", "init_lr_frac"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        require_half(self.eval_half)

    def num_eval_tokens(self, machine: Machine) -> int:
        """Validation tokens, where nobody said how many."""
        return self.eval_tokens or (131_072 if machine.device.type == "cpu" else 10_485_760)


class AnswerLoss(Evaluator):
    """Bits per byte and loss of the answers in validation rows; keeps the last measurement."""

    def __init__(
        self,
        model: Apart,
        buckets: Mapping[str, Rows],
        tokenizer: Tokenizer,
        machine: Machine,
        num_rows: int,
        every: int,
        half: int = 0,
    ):
        """num_rows: in all, shared among the buckets; at least one of each. half: see Plan."""
        self.half, self.every = half, every
        self.model, self.buckets, self.machine = model, buckets, machine
        self.num_rows = max(1, num_rows // len(buckets))
        self.token_bytes = tokenizer.token_bytes()
        self.bos_id = tokenizer.bos_id
        self.loss = math.nan
        """Nats per counted token."""
        self.by_bucket: dict[str, float] = {}
        """Bits per byte of each bucket, where there are several."""
        for name, rows in buckets.items():
            self.require_scorable(name, rows)

    def require_scorable(self, name: str, rows: Rows) -> None:
        """Raise Refused unless a byte of an answer is scored in a bucket."""
        rows.require_val_rows(self.half)
        some = rows.val_batches(64, self.num_rows, half=self.half)
        if not any(self.token_bytes[batch[batch >= 0]].any() for batch in some):
            raise Refused(
                f"the validation conversations of {name} have no byte of an answer to score",
                "another --val_mixture, or conversations with answers",
            )

    def batches(self, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of this rank, each of exactly `rows_per_pass` rows."""
        machine, T, rows_per_pass = self.machine, rows.max_seq_len, self.rows_per_pass
        mine = rows.val_batches(
            rows_per_pass, self.num_rows, machine.rank, machine.world_size, self.half
        )
        for batch in mine:
            blank = np.full((rows_per_pass - len(batch), T + 1), ~self.bos_id, batch.dtype)
            yield signed_inputs_and_targets(np.concatenate([batch, blank]), IGNORE)

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        found = {
            name: bits_per_byte(
                self.model, self.batches(rows), self.token_bytes, self.machine, stopping
            )
            for name, rows in self.buckets.items()
        }
        every = pooled(found.values())
        self.loss = every.nats / every.tokens if every.tokens else math.nan
        self.by_bucket = bucket_figures(found)
        return {"val_bpb": every.value, "val_loss": self.loss, **self.by_bucket}


@dataclass(frozen=True)
class FineTuning:
    """A training on conversations, ready to begin: what callbacks are made for."""

    stage: Stage
    parent: Checkpoint
    talk: Talk
    mixed: Resolution
    rows: Rows
    machine: Machine


@dataclass(frozen=True)
class Lesson:
    """A stage that learns from conversations, as its script describes it."""

    section: str
    kind: Literal["mid", "sft"]
    source: Literal["base", "mid"]
    """Which stage's checkpoint to start from."""
    talk: Callable[[Checkpoint], Talk]
    """What is learned after that checkpoint."""
    figures: Callable[[Outcome, AnswerLoss, Resolution], dict[str, Any]]
    """What the section shows beside what all sections of training do."""
    check: Callable[[Talk], None] = lambda talk: None
    """Raises Refused for conversations that may not be trained on."""
    callbacks: Callable[[FineTuning], Sequence[Callback]] = lambda run: ()
    """Callbacks beside the evaluation."""


def fine_tune(lesson: Lesson, plan: Plan, cfg: StageConfig, settings: Mapping[str, Any]) -> None:
    """
    Train a checkpoint on conversations and record it: all that such a script does.

    settings: all of the script's. Raises MissingInput naming the script that makes the checkpoint,
    SystemExit when asked to stop before the end.
    """
    started, at_start = time.perf_counter(), used_memory_bytes(torch.device("cpu"))
    machine = init_machine(cfg.machine, cfg.seed)
    tag = plan.from_tag or cfg.model_tag or None
    parent = machine.on_node(
        "verifying the checkpoint",
        lambda: find_checkpoint(lesson.source, tag, plan.from_step, machine.print0),
    )
    with machine.working("loading conversations"):
        talk = lesson.talk(parent)
    lesson.check(talk)
    eval_tokens = plan.num_eval_tokens(machine)
    asked = {**settings, "mixture": talk.mix.mixture, "eval_tokens": eval_tokens}
    inputs = {**parent_inputs(parent), "mixture": fingerprint(talk.description)}
    key = records.stage_key(asked, inputs)
    if cfg.once and machine.on_main(
        "verifying files",
        lambda: records.finished(lesson.section, key, cfg.report_dir) is not None,
    ):
        machine.print0(f"{lesson.section}: finished already, skipped")
        return machine.close()
    stage, answers, mixed = build_stage(lesson, parent, talk, plan, cfg, inputs, machine)
    outcome = carry_out(cfg, stage, machine, asked)
    if machine.is_main and outcome:
        checkpoint = outcome.checkpoint
        assert checkpoint is not None, "the main rank writes checkpoints"
        with machine.working("writing the report"):
            write_json(checkpoint.folder.parent / MIXTURE_FILE, mixed.state())
            records.write_record(
                lesson.section,
                asked,
                {
                    **lesson.figures(outcome, answers, mixed),
                    **outcome.figures(at_start),
                    **{n: v for each in stage.callbacks for n, v in each.values().items()},
                },
                records.Provenance(
                    stage.run_id, cfg.seed, inputs, {lesson.kind: checkpoint.fingerprint}
                ),
                records.Cost.since(started, machine),
                cfg.report_dir,
                tables=[*mixed.tables(), *(t for c in stage.callbacks for t in c.tables())],
                metrics=checkpoint.folder.parent / METRICS_FILE,
                files=[checkpoint.folder],
            )
            report.update(cfg.report_dir)
        machine.print0(closing_lines(checkpoint.folder, machine))
    machine.close()
    if outcome is None:
        raise SystemExit(PREEMPTED)


def build_stage(
    lesson: Lesson,
    parent: Checkpoint,
    talk: Talk,
    plan: Plan,
    cfg: StageConfig,
    inputs: Mapping[str, str],
    machine: Machine,
) -> tuple[Stage, AnswerLoss, Resolution]:
    """The stage that continues `parent`, what measures it on the way, and what it learns."""
    model = load_model(parent, machine, plan.max_seq_len)
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    T = model.cfg.max_seq_len
    measured = val_rows(talk.measured, tokenizer, T, machine)
    mixed, rows = train_rows(talk, cfg.seed, tokenizer, T, machine)
    for line in mixed.lines():
        machine.print0(line)
    tokens = plan.num_epochs * rows.packed_train_rows * T
    default = auto_batch(parent.state["identity"]["batch_tokens"], plan.num_iterations, tokens, T)
    batch_tokens = divisible_batch(plan.total_batch_size, default, T, machine.world_size)
    steps = plan.num_iterations or round(tokens / batch_tokens)
    table = rules(cfg.optim, model.cfg.d_model, plan.init_lr_frac)
    optimizer = MuonAdamW(dict(model.named_parameters()), model.param_roles(), table, machine)
    if plan.warm_start:
        optimizer.load_state_dict(parent.optim_tensors())
    apart = Apart(model, tokenizer.bos_id)
    num_rows = plan.num_eval_tokens(machine) // T
    answers = AnswerLoss(
        apart, measured, tokenizer, machine, num_rows, cfg.loop.eval_every, plan.eval_half
    )
    run_id = machine.broadcast(records.inherited_run_id(inputs, cfg.report_dir))
    stage = Stage(
        kind=lesson.kind,
        model=model,
        trainable=apart,
        optimizer=optimizer,
        tokenizer=tokenizer,
        rows=rows,
        num_steps=max(1, steps),
        batch_tokens=batch_tokens,
        split=lambda batch: signed_inputs_and_targets(batch, IGNORE),
        identity={"parent": parent.fingerprint},
        state={
            "source": parent.state["source"],
            "mixture": {**talk.description, "resolved": mixed.state()},
            "provenance": {"run_id": run_id, "seed": cfg.seed, "inputs": dict(inputs)},
        },
        run_id=run_id,
    )
    more = lesson.callbacks(FineTuning(stage, parent, talk, mixed, rows, machine))
    return replace(stage, callbacks=[answers, *more]), answers, mixed


def val_rows(
    buckets: Sequence[Bucket], tokenizer: Tokenizer, max_seq_len: int, machine: Machine
) -> dict[str, Rows]:
    """Name -> packed validation rows of each bucket; one process of each node packs."""
    found, verifies = {}, machine.local_rank == 0
    for bucket in buckets:
        about = {"rows": "val", **bucket.val.identity}
        found[bucket.name] = open_chat_rows(
            about, tokenizer, max_seq_len, "val", machine.print0, verifies
        )

    def pack() -> None:
        for bucket in buckets:
            rows = found[bucket.name]
            if not rows.is_packed("val"):
                encoded = encode_bucket(bucket.name, bucket.val, tokenizer, max_seq_len, machine)
                pack_encoded(rows, "val", encoded, tokenizer)

    machine.on_node("packing validation rows", pack)
    return found


def encode_bucket(
    name: str,
    conversations: Answers,
    tokenizer: Tokenizer,
    max_seq_len: int,
    machine: Machine,
    verify: bool = True,
) -> Encoded:
    """The tokens of a bucket's conversations, from the disk where that was done before."""
    about = conversations.identity
    with machine.working(f"encoding {name}") as report:
        return encode(about, conversations, tokenizer, max_seq_len, verify, report)


def train_rows(
    talk: Talk, seed: int, tokenizer: Tokenizer, max_seq_len: int, machine: Machine
) -> tuple[Resolution, Rows]:
    """The mixture, resolved, and the rows of one pass through it."""

    def encode_all(verify: bool) -> dict[str, Encoded]:
        return {
            each.name: encode_bucket(each.name, each.train, tokenizer, max_seq_len, machine, verify)
            for each in talk.learned
        }

    machine.on_node("encoding conversations", lambda: bool(encode_all(verify=True)))
    mix, encoded = talk.mix, encode_all(verify=False)  # from the disk
    available = [int(each.lengths.sum()) for each in encoded.values()]
    counts = resolve(talk.parts, available, 1, *parse_budget(mix.mixture))
    tags = {bucket.name: bucket.tags for bucket in talk.learned}
    found = [
        Resolved(name, tags[name], size, count, len(each), each.trained)
        for (name, each), size, count in zip(encoded.items(), available, counts, strict=True)
    ]
    rows = mixed_chat_rows(encoded, counts, seed, tokenizer, max_seq_len, machine)
    return Resolution(mix.mixture, found), rows


def auto_batch(parent_batch: int, num_iterations: int | None, tokens: float, T: int) -> int:
    """
    The parent's tokens per step; where these leave fewer than MIN_STEPS steps over `tokens` tokens,
    halved until there are as many, down to MIN_ROWS rows.
    """
    batch = parent_batch
    while (
        num_iterations is None
        and tokens / batch < MIN_STEPS
        and batch % (2 * T) == 0
        and batch >= 2 * MIN_ROWS * T
    ):
        batch //= 2
    return batch


def parent_inputs(parent: Checkpoint) -> dict[str, str]:
    """What a stage that starts from `parent` has read, as its record names it."""
    inputs = parent.state["provenance"]["inputs"]
    return {parent.state["stage"]: parent.fingerprint, "tokenizer": inputs["tokenizer"]}
