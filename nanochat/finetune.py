"""
Training on conversations: what midtraining and supervised fine-tuning share.

    parent checkpoint + chat mixture -> packed rows -> TrainingRun, bits per byte of the answers

Every conversation in a row attends only to itself, so packing changes no loss and no gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from nanochat import records
from nanochat.chat_packing import (
    Conversations,
    Encoded,
    encode,
    mixed_chat_rows,
    open_chat_rows,
    pack_encoded,
    signed_inputs_and_targets,
)
from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, parse_checkpoint_ref
from nanochat.common import UsageError
from nanochat.dataloader import Rows, require_half
from nanochat.distributed import DistContext
from nanochat.evaluators import ValidationLoss
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.mixture import (
    MixConfig,
    Part,
    Resolution,
    Resolved,
    Tags,
    parse_budget,
    parse_mixture,
    resolve,
)
from nanochat.optim import MuonAdamW, ScheduleConfig, rules
from nanochat.preflight import KernelConfig
from nanochat.scaling import divisible_batch
from nanochat.tokenizer import Tokenizer
from nanochat.train import RowLoader, TrainConfig, TrainingRun

MIN_STEPS = 200  # a short stage rather takes smaller batches than few steps
MIN_ROWS = 8  # in a batch, where its size is not given


class DocumentMaskedModel:
    """A model that attends within each conversation of a row only: a BOS begins a new one."""

    def __init__(self, model: GPT, bos_id: int):
        self.model, self.bos_id = model, bos_id

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (nats) summed over the counted targets."""
        return self.model.loss(tokens, targets, self.segments(tokens))

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (nats) of each target, (B, T)."""
        return self.model.token_losses(tokens, targets, self.segments(tokens))

    def segments(self, tokens: Tensor) -> Tensor:
        """The number of the conversation that each token of its row belongs to, (B, T)."""
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
class ChatMixture:
    """Buckets of conversations to train and to validate on, as `mix` says."""

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
class FinetuneConfig:
    num_iterations: int | None = None
    """Optimizer steps. Default: from num_epochs."""
    num_epochs: float = 1.0
    """Passes over the mixture."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: that of pretraining, or less where there
    are so few conversations that it would leave a handful of steps."""
    max_seq_len: int | None = None
    """Tokens in a row. Default: that of pretraining."""
    init_lr_frac: float = 1.0
    """Peak of all learning rates, as a fraction of those of pretraining."""
    eval_tokens: int | None = None
    """Validation tokens per evaluation, shared among the buckets; at most all. Default: 10,485,760,
    on a CPU 131,072."""
    eval_half: int = 0
    """Which half of the validation rows to use, 0 for both: 2 measures anew what 1 chose."""
    val_mixture: str | None = None
    """Buckets whose held-out conversations measure the loss. Default: those trained on."""
    save_optimizer: bool = False
    """Keep the optimizer state in the last checkpoint, so that the run can be made longer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_epochs", "total_batch_size", "init_lr_frac"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        require_half(self.eval_half)

    def num_eval_tokens(self, machine: DistContext) -> int:
        """Validation tokens per evaluation, the default included."""
        return self.eval_tokens or (131_072 if machine.device.type == "cpu" else 10_485_760)


class AnswerLoss(ValidationLoss):
    """Bits per byte and loss of the answers in validation rows."""

    def require_rows(self) -> None:
        """Raise UsageError unless a byte of an answer is scored in every bucket."""
        super().require_rows()
        for name, rows in self.rows.items():
            some = rows.val_batches(64, self.num_rows, half=self.half)
            if not any(self.token_bytes[batch[batch >= 0]].any() for batch in some):
                raise UsageError(
                    f"the validation conversations of {name} have no byte of an answer to score",
                    "another --val_mixture, or conversations with answers",
                )

    def batches(self, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of this rank, each of exactly `rows_per_pass` rows."""
        for batch in self.stored_batches(rows):
            missing = (self.rows_per_pass - len(batch), rows.max_seq_len + 1)
            blank = np.full(missing, ~self.bos_id, batch.dtype)
            yield signed_inputs_and_targets(np.concatenate([batch, blank]), IGNORE)

    def measure(self, stopping: Callable[[], bool]) -> dict[str, float]:
        return {**super().measure(stopping), "val_loss": self.loss}


@dataclass(frozen=True)
class FineTuning:
    """A training on conversations, ready to begin."""

    run: TrainingRun
    answers: AnswerLoss
    resolution: Resolution
    """How much of each bucket is in the mixture."""
    rows: Rows
    parent: Checkpoint
    chats: ChatMixture


def open_parent(
    source: str, stages: Sequence[str], cfg: TrainConfig, machine: DistContext
) -> Checkpoint:
    """
    The checkpoint to start from: `source` is stage[:tag[:step]]; by default the tag is --model_tag,
    else the one written last, and the step the last good one.

    Raises ValueError for a stage that is none of `stages`, MissingInput naming the script that
    makes the checkpoint.
    """
    if source.split(":")[0] not in stages:
        raise ValueError(f"--source={source}: it is one of {', '.join(stages)}, as in base:d4:400")
    name = f"{source}:{cfg.model_tag}" if source in FOLDERS and cfg.model_tag else source
    return machine.on_node(
        "verifying the checkpoint", lambda: parse_checkpoint_ref(name, machine.print0)
    )


def open_fine_tuning(
    kind: Literal["mid", "sft"],
    parent: Checkpoint,
    chats: ChatMixture,
    tuning: FinetuneConfig,
    cfg: TrainConfig,
    settings: Mapping[str, Any],
    inputs: Mapping[str, str],
    machine: DistContext,
) -> FineTuning:
    """Pack the conversations and describe the run that trains `parent` on them."""
    model = load_model(parent, machine, tuning.max_seq_len)
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    T, seed = model.cfg.max_seq_len, cfg.seed
    measured = val_rows(chats.measured, tokenizer, T, machine)
    resolution, rows = train_rows(chats, seed, tokenizer, T, machine)
    for line in resolution.lines():
        machine.print0(line)
    tokens = tuning.num_epochs * rows.packed_train_rows * T
    default = auto_batch(parent.state["identity"]["batch_tokens"], tuning.num_iterations, tokens, T)
    batch_tokens = divisible_batch(tuning.total_batch_size, default, T, machine.world_size)
    table = rules(cfg.optim, model.cfg.d_model, tuning.init_lr_frac)
    optimizer = MuonAdamW(model, table, machine)
    masked = DocumentMaskedModel(model, tokenizer.bos_id)
    eval_tokens, half = tuning.num_eval_tokens(machine), tuning.eval_half
    answers = AnswerLoss(masked, tokenizer, measured, machine, eval_tokens, cfg.eval_every, half)
    answers.require_rows()
    run_id = machine.broadcast(records.inherited_run_id(inputs, cfg.report_dir))
    run = TrainingRun(
        kind=kind,
        model=model,
        objective=masked,
        optimizer=optimizer,
        loader=RowLoader(rows, split, batch_tokens, seed, machine),
        machine=machine,
        cfg=cfg,
        tag=cfg.model_tag or parent.folder.parent.name,
        num_steps=max(1, tuning.num_iterations or round(tokens / batch_tokens)),
        batch_tokens=batch_tokens,
        schedule=tuning.schedule,
        kernels=tuning.kernels,
        callbacks=[answers],
        tokenizer=tokenizer,
        identity={"parent": parent.fingerprint, "init_lr_frac": tuning.init_lr_frac},
        provenance={"run_id": run_id, "seed": seed, "inputs": dict(inputs)},
        state={
            "source": parent.state["source"],
            "mixture": {**chats.description, "resolved": resolution.state()},
        },
        settings=settings,
        keep_optimizer=tuning.save_optimizer,
    )
    return FineTuning(run, answers, resolution, rows, parent, chats)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as they are stored -> tokens and targets, both (B, T)."""
    return signed_inputs_and_targets(rows, IGNORE)


def val_rows(
    buckets: Sequence[Bucket], tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
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
    machine: DistContext,
    verify: bool = True,
) -> Encoded:
    """The tokens of a bucket's conversations, from the disk where that was done before."""
    about = conversations.identity
    with machine.working(f"encoding {name}") as report:
        return encode(about, conversations, tokenizer, max_seq_len, verify, report)


def train_rows(
    chats: ChatMixture, seed: int, tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> tuple[Resolution, Rows]:
    """The mixture, resolved, and the rows of one pass through it."""

    def encode_all(verify: bool) -> dict[str, Encoded]:
        return {
            each.name: encode_bucket(each.name, each.train, tokenizer, max_seq_len, machine, verify)
            for each in chats.learned
        }

    machine.on_node("encoding conversations", lambda: bool(encode_all(verify=True)))
    mix, encoded = chats.mix, encode_all(verify=False)  # from the disk
    available = [int(each.lengths.sum()) for each in encoded.values()]
    counts = resolve(chats.parts, available, 1, *parse_budget(mix.mixture))
    tags = {bucket.name: bucket.tags for bucket in chats.learned}
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
