"""
Fine-tuning on conversations, shared by midtraining and SFT.

    parent checkpoint + chat mixture -> packed rows -> TrainingRun, bits per byte of the answers

Attention stays within each conversation of a row, so packing changes neither loss nor gradients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from nanochat import chat_packing
from nanochat.checkpoint import FOLDERS, Checkpoint, load_model, parse_checkpoint_ref, stage_folder
from nanochat.common import MissingInput, UsageError
from nanochat.config import require_positive
from nanochat.dataloader import Rows
from nanochat.distributed import DistContext
from nanochat.evaluators import ValidationConfig, ValidationLoss
from nanochat.gpt import GPT
from nanochat.mixture import Bucket, Resolution, Resolved, parse_budget, parse_mixture, resolve
from nanochat.optim import MuonAdamW, ScheduleConfig
from nanochat.preflight import KernelConfig
from nanochat.scaling import batch_lr_factor, divisible_batch, make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import RowLoader, TrainConfig, TrainingRun

MIN_STEPS = 200  # a short stage uses smaller batches to reach this many steps
FEW_STEPS = 15  # with fewer, a stage warns; measured: 15 teach depth 4 what 40 conversations say
MIN_ROWS = 8  # rows (packed sequences) of the smallest automatic batch


class DocumentMaskedModel:
    """Model with attention masked to each conversation of a row; BOS starts a conversation."""

    def __init__(self, model: GPT, bos_id: int):
        self.model, self.bos_id = model, bos_id

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy (nats) over non-ignored targets."""
        return self.model.loss(tokens, targets, self.segments(tokens))

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (nats) of each target, (B, T)."""
        return self.model.token_losses(tokens, targets, self.segments(tokens))

    def segments(self, tokens: Tensor) -> Tensor:
        """Index of each token's conversation within its row, (B, T)."""
        return (tokens == self.bos_id).cumsum(dim=1)


@dataclass(frozen=True)
class ChatMixture:
    """Buckets of conversations for training and validation; `spec` sets the amount of each."""

    spec: str
    declared: Mapping[str, Any]
    """User-defined buckets, as returned by `read_mixture`."""
    train_buckets: Sequence[Bucket]
    """Training buckets, one per part of the mixture."""
    val_buckets: Sequence[Bucket]

    @property
    def description(self) -> dict[str, Any]:
        """JSON-ready; identical for the same conversations in the same proportions."""
        return {
            "learned": {bucket.name: bucket.train.identity for bucket in self.train_buckets},
            "measured": {bucket.name: bucket.val.identity for bucket in self.val_buckets},
            "parts": [part._asdict() for part in parse_mixture(self.spec)],
            **parse_budget(self.spec),
        }


@dataclass(frozen=True)
class FinetuneConfig:
    num_iterations: int | None = None
    """Optimizer steps. Default: derived from num_epochs."""
    num_epochs: float = 1.0
    """Epochs over the mixture."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: that of the parent checkpoint, reduced
    for small mixtures so that the run has enough steps."""
    max_seq_len: int | None = None
    """Tokens per row; sliding windows (S) scale with it. Default: that of the parent checkpoint."""
    init_lr_frac: float = 1.0
    """Peak learning rates as a fraction of the pretraining ones."""
    warmdown_ratio: float = 0.5
    """Fraction of the run, at its end, over which the learning rates decay linearly to 0."""
    val_mixture: str | None = None
    """Buckets whose held-out conversations are used for validation. Default: the training ones."""
    save_optimizer: bool = False
    """Keep the optimizer state in the final checkpoint, so that the run can be extended."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self) -> None:
        names = ("num_iterations", "num_epochs", "total_batch_size", "max_seq_len", "init_lr_frac")
        require_positive(self, *names)
        ScheduleConfig(0, self.warmdown_ratio, final_lr_frac=0.0)  # validates it


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning run that is ready to start."""

    run: TrainingRun
    loss: ValidationLoss
    resolution: Resolution
    """Amount of each bucket in the mixture."""
    rows: Rows
    parent: Checkpoint
    chats: ChatMixture


def open_parent(
    source: str, stages: Sequence[str], cfg: TrainConfig, machine: DistContext
) -> Checkpoint:
    """
    Return the checkpoint to start from. `source` is stage[:tag[:step]]; the tag defaults to
    --model_tag or the latest one, and the step to the last good one.

    Raises ValueError if the stage is not one of `stages`, and MissingInput naming the script
    that creates the checkpoint.
    """
    if source.split(":")[0] not in stages:
        raise ValueError(f"--source={source} is not one of {', '.join(stages)}; use e.g. base:d4")
    own_tag = cfg.model_tag if source in FOLDERS else None
    name = f"{source}:{own_tag}" if own_tag else source
    try:
        found = machine.on_node("verifying the checkpoint", lambda: parse_checkpoint_ref(name))
    except MissingInput as error:
        if not own_tag:
            raise
        missing, command = error.args
        fix = f"{command}; if the parent has another tag: --source={source}:<tag>"
        raise MissingInput(missing, fix) from None
    if "tie_embeddings" in found.state["model"]:  # learning rates of a tied head differ
        raise UsageError(
            f"{name} is a golf model, which later stages cannot train",
            "start from a model of scripts.base_train",
        )
    return found


def choose_tag(kind: str, parent: Checkpoint, cfg: TrainConfig) -> str:
    """
    Tag of a stage's checkpoints: --model_tag or the parent's. Raises ValueError if they would
    replace the parent.
    """
    tag = cfg.model_tag or parent.folder.parent.name
    if parent.folder.parent == stage_folder(kind) / tag:
        raise ValueError(
            f"this run would replace its parent {kind}:{tag}; use --source={kind}:{tag} and "
            "another --model_tag"
        )
    return tag


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
    """Pack the conversations and build the run that fine-tunes `parent` on them."""
    model = load_model(parent, machine, tuning.max_seq_len)
    tokenizer = parent.tokenizer()
    T, seed = model.cfg.max_seq_len, cfg.seed
    measured = val_rows(chats.val_buckets, tokenizer, T, machine)
    resolution, rows = train_rows(chats, seed, tokenizer, T, machine)
    machine.print0(resolution)
    if not rows.packed_train_rows:
        raise ValueError(f"--mixture={chats.spec} has less than one conversation; use more of it")
    epoch_tokens = rows.packed_train_rows * T
    tokens = tuning.num_epochs * epoch_tokens
    default = fit_batch(parent.state["identity"]["batch_tokens"], tuning.num_iterations, tokens, T)
    batch_tokens = divisible_batch(tuning.total_batch_size, default, T, machine.world_size)
    num_steps = max(1, tuning.num_iterations or round(tokens / batch_tokens))
    if tuning.num_iterations is None and num_steps < FEW_STEPS:
        machine.print0(few_steps_warning(num_steps, batch_tokens, epoch_tokens))
    lr_frac = tuning.init_lr_frac * batch_lr_factor(batch_tokens)
    table = make_rules(cfg.optim, model.cfg.d_model, lr_frac)
    optimizer = MuonAdamW(model, table, machine)
    loss = ValidationLoss(tuning.validation, measured)
    run = TrainingRun(
        kind=kind,
        model=model,
        tokenizer=tokenizer,
        objective=DocumentMaskedModel(model, tokenizer.bos_id),
        optimizer=optimizer,
        loader=RowLoader(rows, batch_tokens, seed, machine),
        machine=machine,
        cfg=cfg,
        tag=choose_tag(kind, parent, cfg),
        num_steps=num_steps,
        schedule=ScheduleConfig(0, tuning.warmdown_ratio, final_lr_frac=0.0),
        kernels=tuning.kernels,
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


def val_rows(
    buckets: Sequence[Bucket], tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> dict[str, Rows]:
    """Packed validation rows by bucket name; one process per node packs them."""
    found = {}
    for bucket in buckets:
        about = {"rows": "val", **bucket.val.identity}
        found[bucket.name] = chat_packing.open_chat_rows(about, tokenizer, max_seq_len)

    def pack() -> None:
        for bucket in buckets:
            rows = found[bucket.name]
            if not rows.is_packed("val"):
                val = chat_packing.encode(bucket.val.identity, bucket.val, tokenizer, max_seq_len)
                chat_packing.pack_encoded(rows, "val", val, tokenizer)

    machine.on_node("packing validation rows", pack)
    return found


def train_rows(
    chats: ChatMixture, seed: int, tokenizer: Tokenizer, max_seq_len: int, machine: DistContext
) -> tuple[Resolution, Rows]:
    """The resolved mixture and the packed rows of one epoch; one process per node packs them."""
    shape = tokenizer, max_seq_len

    def pack() -> tuple[Resolution, Any]:
        encoded = {
            bucket.name: chat_packing.encode(bucket.train.identity, bucket.train, *shape)
            for bucket in chats.train_buckets
        }
        available = [int(each.lengths.sum()) for each in encoded.values()]
        amounts = parse_budget(chats.spec).values()
        counts = resolve(parse_mixture(chats.spec), available, 1, *amounts)
        found = [
            Resolved(bucket.name, bucket.tags, size, count, len(each), each.trained)
            for bucket, each, size, count in zip(
                chats.train_buckets, encoded.values(), available, counts, strict=True
            )
        ]
        rows = chat_packing.mixed_chat_rows(encoded, counts, seed, *shape)
        return Resolution(chats.spec, found), rows.recipe["conversations"]

    resolution, about = machine.on_node("packing conversations", pack)
    return resolution, chat_packing.open_chat_rows(about, *shape)


def fit_batch(parent_batch: int, num_iterations: int | None, tokens: float, T: int) -> int:
    """
    Return the tokens per step, starting from the parent's. Without `num_iterations`, halve them
    until the run's `tokens` take at least MIN_STEPS steps, but keep at least MIN_ROWS rows.
    """
    batch = parent_batch
    if num_iterations is not None:
        return batch
    while tokens / batch < MIN_STEPS and batch >= 2 * MIN_ROWS * T:
        batch = batch // (2 * T) * T  # whole rows
    return batch


def few_steps_warning(num_steps: int, batch_tokens: int, epoch_tokens: int) -> str:
    """Message for a stage that is too short to learn from, with the epochs for FEW_STEPS steps."""
    epochs = math.ceil(FEW_STEPS * batch_tokens / epoch_tokens)
    plural = "" if num_steps == 1 else "s"
    return (
        f"WARNING: only {num_steps} step{plural} of {batch_tokens:,} tokens, too few to learn much;"
        f" --num_epochs={epochs} trains {FEW_STEPS} steps"
    )


def parent_inputs(parent: Checkpoint) -> dict[str, str]:
    """Recorded inputs of a stage that starts from `parent`: name -> fingerprint."""
    inputs = parent.state["provenance"]["inputs"]
    return {parent.state["stage"]: parent.fingerprint, "tokenizer": inputs["tokenizer"]}
