"""
What midtraining and SFT share: the parent, the mixture of conversations, packed rows, batch size.

    parent checkpoint, conversations -> packed rows -> steps, batch size -> the loop of the script

A chat is one conversation or several that are joined (`rows.join_chats`). Attention stays within
each chat of a row, so packing chats changes neither loss nor gradients.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from nanochat.chat_format import Trained
from nanochat.checkpoint import (
    ASIDE,
    CHANGED,
    FOLDERS,
    Checkpoint,
    Stage,
    changed_model_code,
    find_checkpoint,
    stage_folder,
)
from nanochat.config import require_positive
from nanochat.dist import DistContext, init_dist
from nanochat.eval_bpb import ValidationConfig
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.rows import ChatPart, Rows, Shards, open_chat_rows, pack_chats
from nanochat.run import Run, resumed_state
from nanochat.scaling import batch_lr_factor, divisible_batch, make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import Compile, TrainConfig, document_segments

MIN_TUNING_STEPS = 200  # a short stage uses smaller batches to reach this many steps
# with fewer, a stage warns; measured: 20 varied conversations need about 50 at depth 4 (one seed)
FEW_STEPS = 50
Script = TypeVar("Script", bound=Any)
MIN_ROWS = 8  # rows (packed sequences) of the smallest automatic batch


@dataclass(frozen=True)
class FinetuneConfig:
    NOT_IN_RECIPE: ClassVar[str] = "compile"

    mixture: str = ""
    """Buckets with amounts, such as smoltalk=10000,gsm8k*4,aqua, or a JSON file that defines
    buckets; see docs/data.md. Default: depends on the base model."""
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
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""

    def __post_init__(self) -> None:
        names = ("num_iterations", "num_epochs", "total_batch_size", "max_seq_len", "init_lr_frac")
        require_positive(self, *names)
        self.schedule()  # validates it

    def schedule(self) -> ScheduleConfig:
        """No warmup, and a decay to zero."""
        return ScheduleConfig(0, self.warmdown_ratio, final_lr_frac=0.0)


def open_stage(
    stage: Stage, cfg: Script, parents: Sequence[str] = tuple(FOLDERS)
) -> tuple[Script, Checkpoint, str, dict[str, Any], DistContext]:
    """
    Open a stage that starts from a checkpoint of one of `parents`, by default any stage.

    Returns the script's config with the peak learning rates of the base model where no flag sets
    them; the parent; the tag of the run; the state of the run that will be resumed, if any
    (`resumed_state`); and the ranks, with the dtype of that run, else of the parent. Raises as
    `open_parent` and `choose_tag`.
    """
    train = cfg.train
    dist = init_dist(train.dist, train.seed)
    parent = open_parent(cfg.source, parents, train, dist)
    tag = choose_tag(stage, parent, train)
    before = resumed_state(stage, tag, train, dist)
    dist = dist.keep_dtype(train.dist, (before or parent.state).get("compute"))
    optim = train.optim.with_learning_rates(base_learning_rates(parent))
    return replace(cfg, train=replace(train, optim=optim)), parent, tag, before, dist


def open_parent(
    source: str, stages: Sequence[str], cfg: TrainConfig, dist: DistContext
) -> Checkpoint:
    """
    Return the checkpoint to start from. `source` is stage[:tag[:step]]; the tag defaults to
    --model_tag or the latest one, and the step to the last good one.

    Raises ValueError if the stage is not one of `stages`, and MissingInput naming the script
    that creates the checkpoint.
    """
    if source.split(":")[0] not in stages:
        raise ValueError(f"--source={source} is not one of {', '.join(stages)}; use e.g. base:d4")
    return dist.on_main(lambda: find_checkpoint(source, cfg.model_tag or None))


def base_learning_rates(parent: Checkpoint) -> Mapping[str, float]:
    """The peak learning rates with which the base model of a checkpoint was trained, if known."""
    return parent.state.get("learning_rates") or OptimConfig().learning_rates()


def inherited_state(parent: Checkpoint) -> dict[str, Any]:
    """
    What the checkpoints of a stage keep of the parent's: the source of its text, and the learning
    rates of the base model.
    """
    return {"source": parent.state["source"], "learning_rates": base_learning_rates(parent)}


def choose_tag(stage: Stage, parent: Checkpoint, cfg: TrainConfig) -> str:
    """
    Tag of a stage's checkpoints: --model_tag or the parent's. Raises ValueError if they would
    replace the parent.
    """
    tag = cfg.model_tag or parent.folder.parent.name.partition(ASIDE)[0]
    if parent.folder.parent == stage_folder(stage) / tag:
        raise ValueError(
            f"this run would replace its parent {stage}:{tag}; use --source={stage}:{tag} and "
            "another --model_tag"
        )
    return tag


def packed_chats(
    parts: Mapping[str, ChatPart],
    seed: int,
    tokenizer: Tokenizer,
    T: int,
    dist: DistContext,
    trained: Trained = "assistant",
) -> Rows:
    """The rows of conversations; the main rank packs them. trained: whose turns have loss."""
    rows = open_chat_rows(parts, seed, tokenizer, T, trained)
    dist.on_main(lambda: pack_chats(rows, parts, seed, tokenizer))
    return rows


def bucket_rows(
    parts: Mapping[str, ChatPart],
    tokenizer: Tokenizer,
    T: int,
    dist: DistContext,
    trained: Trained = "assistant",
) -> dict[str, Shards]:
    """The rows of each bucket on its own, for validation."""

    def alone(name: str) -> Shards:
        return packed_chats({name: parts[name]}, 0, tokenizer, T, dist, trained).only

    return {name: alone(name) for name in parts}


def tuning_optimizer(
    model: GPT, cfg: FinetuneConfig, optim: OptimConfig, batch_tokens: int, dist: DistContext
) -> MuonAdamW:
    """The optimizer of a stage, for its batch size."""
    growth = batch_lr_factor(batch_tokens)
    return MuonAdamW(model, make_rules(optim, model.cfg.d_model, cfg.init_lr_frac, growth), dist)


def finetuning_values(run: Run, parent: Checkpoint, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Values that the records of both stages have. metrics: those of the last validation."""
    return {
        CHANGED: changed_model_code(parent),
        "Number of iterations": run.num_steps,
        "DDP world size": run.dist.world_size,
        "Minimum validation bpb": run.progress.min_val,
        "Final validation bpb": run.progress.last_val,
        "Validation loss": metrics["val_loss"],
        **{name: value for name, value in metrics.items() if ":" in name},
        **run.measurements(),
    }


def plan_finetuning(
    cfg: FinetuneConfig, parent: Checkpoint, rows: Rows, dist: DistContext
) -> tuple[int, int]:
    """Number of steps, and tokens per step. Warns if they are too few to learn from."""
    T = rows.max_seq_len
    if not rows.num_rows:
        raise ValueError("the mixture has less than one conversation; use more of it")
    epoch_tokens = rows.num_rows * T
    tokens = cfg.num_epochs * epoch_tokens
    default = fit_batch(parent.state["batch_tokens"], cfg.num_iterations, tokens, T)
    batch_tokens = divisible_batch(cfg.total_batch_size, default, T, dist.world_size)
    num_steps = max(1, cfg.num_iterations or round(tokens / batch_tokens))
    if cfg.num_iterations is None and num_steps < FEW_STEPS:
        epochs = math.ceil(FEW_STEPS * batch_tokens / epoch_tokens)
        few = f"only {num_steps} steps of {batch_tokens:,} tokens, too few to learn much"
        dist.print0(f"WARNING: {few}; --num_epochs={epochs} trains at least {FEW_STEPS}")
    return num_steps, batch_tokens


def fit_batch(batch: int, num_iterations: int | None, tokens: float, T: int) -> int:
    """
    Return the tokens per step, starting from the parent's. Without `num_iterations`, halve them
    until the run's `tokens` take at least MIN_TUNING_STEPS steps, but keep at least MIN_ROWS rows.
    """
    while (
        num_iterations is None and tokens / batch < MIN_TUNING_STEPS and batch >= 2 * MIN_ROWS * T
    ):
        batch = batch // (2 * T) * T  # whole rows
    return batch


def parent_inputs(parent: Checkpoint) -> dict[str, str]:
    """Recorded inputs of a stage that starts from `parent`: name -> fingerprint."""
    inputs = parent.state["provenance"]["inputs"]
    return {parent.state["stage"]: parent.fingerprint, "tokenizer": inputs["tokenizer"]}


def chat_losses(model: GPT, bos_id: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Tokens and targets (B, T) -> nats (B, T); attention stays within each chat of a row."""
    return lambda x, y: model.token_losses(x, y, document_segments(x, bos_id))
