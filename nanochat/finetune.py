"""
Training on conversations: what midtraining and supervised fine-tuning share.

    parent checkpoint + chat mixture -> packed rows -> TrainingRun, bits per byte of the answers

Every conversation in a row attends only to itself, so packing changes no loss and no gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from nanochat.chat_packing import (
    Encoded,
    encode,
    mixed_chat_rows,
    open_chat_rows,
    pack_encoded,
    signed_inputs_and_targets,
)
from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, parse_checkpoint_ref
from nanochat.dataloader import Rows
from nanochat.distributed import DistContext
from nanochat.evaluators import ValidationConfig, ValidationLoss
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.mixture import Bucket, Resolution, Resolved, parse_budget, parse_mixture, resolve
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


@dataclass(frozen=True)
class ChatMixture:
    """Buckets of conversations to train and to validate on; `spec` decides how much of each."""

    spec: str
    declared: Mapping[str, Any]
    """Own buckets, as `read_mixture` returns them."""
    learned: Sequence[Bucket]
    """One for each part of the mixture."""
    measured: Sequence[Bucket]

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; equal for equal conversations in equal proportions."""
        return {
            "learned": {bucket.name: bucket.train.identity for bucket in self.learned},
            "measured": {bucket.name: bucket.val.identity for bucket in self.measured},
            "parts": [part._asdict() for part in parse_mixture(self.spec)],
            **parse_budget(self.spec),
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
    warmdown_ratio: float = 0.5
    """Share of the run, at its end, in which the learning rates fall linearly to 0."""
    val_mixture: str | None = None
    """Buckets whose held-out conversations measure the loss. Default: those trained on."""
    save_optimizer: bool = False
    """Keep the optimizer state in the last checkpoint, so that the run can be made longer."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_epochs", "total_batch_size", "init_lr_frac"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        ScheduleConfig(0, self.warmdown_ratio, final_lr_frac=0.0)  # which checks it


@dataclass(frozen=True)
class FineTuning:
    """A training on conversations, ready to begin."""

    run: TrainingRun
    loss: ValidationLoss
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
    return machine.on_node("verifying the checkpoint", lambda: parse_checkpoint_ref(name))


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
    machine.print0(resolution)
    tokens = tuning.num_epochs * rows.packed_train_rows * T
    default = auto_batch(parent.state["identity"]["batch_tokens"], tuning.num_iterations, tokens, T)
    batch_tokens = divisible_batch(tuning.total_batch_size, default, T, machine.world_size)
    table = rules(cfg.optim, model.cfg.d_model, tuning.init_lr_frac)
    optimizer = MuonAdamW(model, table, machine)
    loss = ValidationLoss(tuning.validation, measured, split)
    run = TrainingRun(
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        objective=DocumentMaskedModel(model, tokenizer.bos_id),
        optimizer=optimizer,
        loader=RowLoader(rows, split, batch_tokens, seed, machine),
        machine=machine,
        cfg=cfg,
        tag=cfg.model_tag or parent.folder.parent.name,
        num_steps=max(1, tuning.num_iterations or round(tokens / batch_tokens)),
        schedule=ScheduleConfig(0, tuning.warmdown_ratio, final_lr_frac=0.0),
        kernels=tuning.kernels,
        callbacks=[loss],
        inputs=inputs,
        identity={"parent": parent.fingerprint, "init_lr_frac": tuning.init_lr_frac},
        state={
            "source": parent.state["source"],
            "mixture": {**chats.description, "resolved": resolution.state()},
            "declared": chats.declared,
        },
        settings=settings,
        keep_optimizer=tuning.save_optimizer,
    )
    return FineTuning(run, loss, resolution, rows, parent, chats)


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
        found[bucket.name] = open_chat_rows(about, tokenizer, max_seq_len, verifies)

    def pack() -> None:
        for bucket in buckets:
            rows = found[bucket.name]
            if not rows.is_packed("val"):
                encoded = encode_all({bucket.name: bucket.val}, tokenizer, max_seq_len, machine)
                pack_encoded(rows, "val", encoded[bucket.name], tokenizer)

    machine.on_node("packing validation rows", pack)
    return found


def encode_all(
    tasks: Mapping[str, Any],
    tokenizer: Tokenizer,
    max_seq_len: int,
    machine: DistContext,
    verify: bool = True,
) -> dict[str, Encoded]:
    """The tokens of conversations by bucket, from the disk where that was done before."""
    found = {}
    for name, task in tasks.items():
        with machine.working(f"encoding {name}") as report:
            found[name] = encode(task.identity, task, tokenizer, max_seq_len, verify, report)
    return found


def train_rows(
    chats: ChatMixture, seed: int, tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> tuple[Resolution, Rows]:
    """The mixture, resolved, and the rows of one pass through it."""
    asked = ({bucket.name: bucket.train for bucket in chats.learned}, tokenizer, max_seq_len)
    machine.on_node("encoding conversations", lambda: bool(encode_all(*asked, machine)))
    encoded = encode_all(*asked, machine, verify=False)  # from the disk
    available = [int(each.lengths.sum()) for each in encoded.values()]
    amounts = parse_budget(chats.spec).values()
    counts = resolve(parse_mixture(chats.spec), available, 1, *amounts)
    found = [
        Resolved(bucket.name, bucket.tags, size, count, len(each), each.trained)
        for bucket, each, size, count in zip(
            chats.learned, encoded.values(), available, counts, strict=True
        )
    ]
    rows = mixed_chat_rows(encoded, counts, seed, tokenizer, max_seq_len, machine)
    return Resolution(chats.spec, found), rows


def auto_batch(parent_batch: int, num_iterations: int | None, tokens: float, T: int) -> int:
    """
    The parent's tokens per step; where these leave fewer than MIN_STEPS steps over `tokens` tokens,
    halved until there are as many, down to MIN_ROWS rows.
    """
    batch = parent_batch
    if num_iterations is not None:
        return batch
    while tokens / batch < MIN_STEPS and batch % (2 * T) == 0 and batch >= 2 * MIN_ROWS * T:
        batch //= 2
    return batch


def parent_inputs(parent: Checkpoint) -> dict[str, str]:
    """What a stage that starts from `parent` has read, as its record names it."""
    inputs = parent.state["provenance"]["inputs"]
    return {parent.state["stage"]: parent.fingerprint, "tokenizer": inputs["tokenizer"]}
