"""
Pretrain a base model.

    python -m scripts.base_train --depth=4 --max_seq_len=256 --num_iterations=20   # a laptop
    torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=24   # one node with 8 GPUs

Reads   tokenizer/ (scripts.tok_train) and rows/; missing rows are packed in the background
Writes  base_checkpoints/<tag>/ with metrics.jsonl, and the section "Base model training"
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from nanochat.checkpoint import build_model, new_model
from nanochat.config import require_at_least, settings, start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.distributed import DistContext, init_distributed
from nanochat.evaluators import (
    FewShotScore,
    PretrainEvalConfig,
    Samples,
    ValidationConfig,
    ValidationLoss,
)
from nanochat.gpt import GPT, GPTConfig
from nanochat.hardware import is_hopper, peak_memory_bytes
from nanochat.mixture import Corpus, MixConfig, open_corpus, open_texts
from nanochat.optim import MuonAdamW, OptimConfig, Rule, ScheduleConfig
from nanochat.preflight import KernelConfig, estimate_seconds, require_memory
from nanochat.scaling import (
    Horizon,
    HorizonConfig,
    default_windows,
    plan_horizon,
    scaled_rules,
    shape_for_depth,
)
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    Callback,
    RowLoader,
    TrainConfig,
    TrainingRun,
    skip_if_finished,
    train,
    write_section,
)
from tasks.builtin import choose_bundle, ensure_written

SECTION = "Base model training"
FP8_DEPTH = 20  # shallowest model with fp8 matmuls by default: +17% tokens/s (nanochat, 2026-02)
# Flags of other training programs
RETIRED = {
    "n_layer": "use --depth",
    **dict.fromkeys(
        ("n_embd", "n_head", "d_model", "head_dim"),
        "width and heads follow from --depth; scripts.golf.base_train and "
        "scripts.recursion.base_train set them",
    ),
    "sequence_length": "use --max_seq_len",
    "block_size": "use --max_seq_len",
    "gradient_accumulation_steps": "it follows from --total_batch_size (tokens) and "
    "--device_batch_size (rows)",
    "learning_rate": "use --matrix_lr, --embedding_lr and --unembedding_lr",
    "warmup_ratio": "use --warmup_steps, a number of steps",
}


@dataclass(frozen=True)
class BaseTrain:
    depth: int = 20
    """Number of layers; width, batch size, training length and learning rates follow from it."""
    max_seq_len: int = 2048
    """Tokens per packed sequence ("row"); the context length of the model."""
    horizon: HorizonConfig = field(default_factory=HorizonConfig)
    arch: Literal["default", "classic"] = "default"
    """classic: the plain October 2025 architecture, which transformers supports natively."""
    window_pattern: str | None = None
    """Attention of each layer, repeated: L = full context, S = a quarter. Default: SSSL on GPUs,
    else L."""
    tokenizer_tag: str = "main"
    """Tokenizer folder under tokenizer/."""
    data: DataConfig = field(default_factory=DataConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: PretrainEvalConfig = field(default_factory=PretrainEvalConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        require_at_least(self, depth=1, max_seq_len=1)
        if self.arch == "classic" and self.window_pattern not in (None, "L"):
            pattern = f"--window_pattern={self.window_pattern}"
            raise ValueError(f"--arch=classic has the pattern L; remove it, or {pattern}")

    def model_config(self, vocab_size: int, device_type: str) -> GPTConfig:
        """Configuration of the model that these settings describe."""
        windows = self.window_pattern or default_windows(device_type)
        return shape_for_depth(self.depth, vocab_size, self.max_seq_len, self.arch, windows)


def pretrain(
    cfg: BaseTrain,
    adapt: Callable[[GPTConfig], GPTConfig] = lambda shape: shape,
    validation: type[ValidationLoss] = ValidationLoss,
    callbacks: Callable[[GPT], Sequence[Callback]] = lambda model: (),
    max_seconds: float | None = None,
    make_optimizer: Callable[..., MuonAdamW] = MuonAdamW,
    identity: Mapping[str, Any] = {},
    rules: Callable[[OptimConfig, Horizon, int], dict[str, Rule]] = scaled_rules,
) -> None:
    """
    Train a base model and write its record. The golf and recursion scripts pass more arguments.

    adapt: modifies the model configuration that follows from depth. callbacks: extra callbacks.
    max_seconds: training time budget. make_optimizer: takes the arguments of MuonAdamW.
    identity: further settings that must match for a checkpoint to be resumed.
    rules: (optimizer config, horizon, width) -> update rules.
    """
    seed = cfg.train.seed
    machine = init_distributed(cfg.train.machine, seed)
    if cfg.train.machine.dtype is None and cfg.depth >= FP8_DEPTH and is_hopper(machine.device):
        machine = replace(machine, fp8=True)

    # Data: tokenizer and rows; exit if this run has already finished
    corpus, inputs = open_text(cfg, machine)
    tokenizer, T = corpus.tokenizer, cfg.max_seq_len
    resolved = {**settings(cfg), "eval_tokens": cfg.validation.tokens(machine)}
    if skip_if_finished(SECTION, resolved, inputs, cfg.train, machine):
        return machine.close()

    # Model: everything follows from depth
    model_cfg = adapt(cfg.model_config(tokenizer.vocab_size, machine.device.type))
    with torch.device("meta"):
        require_memory(new_model(model_cfg), machine)
    model = build_model(model_cfg, machine.device, machine.dtype, seed)

    # Horizon and optimizer
    horizon, num_steps = plan(cfg, model, max_seconds, machine)
    table = rules(cfg.train.optim, horizon, model_cfg.d_model)
    optimizer = make_optimizer(model, table, machine)
    mixed, needed = corpus.resolve_amounts(num_steps * horizon.batch_tokens // T, machine)
    if max_seconds is not None:  # packing must not count against the time budget
        corpus.pack(needed, machine)

    # Evaluators and the run
    loss = validation(cfg.validation, corpus.rows)
    run = TrainingRun(
        kind="base",
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        loader=RowLoader(corpus.mixed(needed), horizon.batch_tokens, seed, machine),
        machine=machine,
        cfg=cfg.train,
        tag=cfg.train.model_tag or f"d{cfg.depth}",
        num_steps=num_steps,
        schedule=cfg.schedule,
        kernels=cfg.kernels,
        callbacks=[loss, *open_evaluators(cfg, corpus, machine), *callbacks(model)],
        max_seconds=max_seconds,
        inputs=inputs,
        identity=identity,
        state={
            "horizon": asdict(horizon),
            "source": corpus.texts.describe(),
            **({"mixture": mixed.state()} if mixed else {}),
        },
        settings=resolved,
        background=partial(corpus.packing, needed, machine),
        bytes_to_pack=machine.on_main("estimating disk use", lambda: corpus.bytes_to_pack(needed)),
    )
    train(run)
    write_section(SECTION, run, summarize(run), mixed.tables() if mixed else ())


def plan(
    cfg: BaseTrain, model: GPT, max_seconds: float | None, machine: DistContext
) -> tuple[Horizon, int]:
    """
    Return the horizon, which ignores the time budget, and the maximum number of steps. With a
    budget and no num_iterations, the maximum is twice the estimate, so that enough text is packed.
    """
    horizon = plan_horizon(model, cfg.horizon, machine.world_size)
    if max_seconds is None or cfg.horizon.num_iterations is not None:
        return horizon, horizon.num_steps
    step_seconds = estimate_seconds(model, horizon.batch_tokens, machine)
    return horizon, machine.broadcast(math.ceil(2 * max_seconds / step_seconds))


def open_text(cfg: BaseTrain, machine: DistContext) -> tuple[Corpus, dict[str, str]]:
    """Open tokenizer, text and rows. Returns the corpus and the fingerprints of all three."""
    tokenizer = Tokenizer.load(cfg.tokenizer_tag)
    used = load_last_source(cfg.tokenizer_tag)
    texts = machine.on_main(
        "opening the text", lambda: open_texts(cfg.data, cfg.mix, used, ensure_written)
    )
    corpus = open_corpus(texts, tokenizer, cfg.max_seq_len)
    prints = {"rows": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}
    return corpus, {**prints, "data": texts.fingerprint}


def open_evaluators(cfg: BaseTrain, corpus: Corpus, machine: DistContext) -> list[Callback]:
    """Enabled evaluators, besides the validation loss."""
    evaluation, evaluators = cfg.evaluation, []
    if evaluation.sample_every:
        evaluators.append(Samples(evaluation.sample_every))
    if evaluation.core_metric_every:
        dataset = corpus.texts.describe().get("dataset")
        bundle = machine.on_main(
            "writing the suite", lambda: choose_bundle(None, evaluation.eval_bundle, dataset)
        )
        evaluators.append(FewShotScore(evaluation, bundle, machine))
    return evaluators


def summarize(run: TrainingRun) -> dict[str, Any]:
    """First values of the report section."""
    progress, machine, throughput = run.progress, run.machine, run.tokens_per_second
    tokens = progress.step * run.batch_tokens
    flops = progress.flops / tokens  # per token
    mfu = throughput and machine.utilization(throughput * flops)
    return {
        "Number of parameters": run.model.num_params(),
        "Number of FLOPs per token": f"{flops:e}",
        "Calculated number of iterations": progress.step,
        "Number of training tokens": tokens,
        "Tokens : Params ratio": tokens / run.model.num_params(),
        "DDP world size": machine.world_size,
        "warmup_ratio": min(1.0, run.schedule.warmup_steps / progress.step),
        "Minimum validation bpb": progress.min_val,
        "Final validation bpb": progress.last_val,
        "MFU %": "-" if mfu is None else f"{100 * mfu:.2f}%",
        "Total training flops": f"{progress.flops:e}",
        "Total training time": f"{progress.train_seconds / 60:.2f}m",
        "Peak memory usage": f"{peak_memory_bytes(machine.device) / 2**20:.2f}MiB",
        "Final training loss": progress.smooth_loss,
    }


if __name__ == "__main__":
    start(pretrain, BaseTrain(), __doc__, retired=RETIRED)
