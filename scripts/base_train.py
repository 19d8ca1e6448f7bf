"""
Pretrain a base model.

    python -m scripts.base_train --depth=4 --num_iterations=20     # laptop, a minute
    torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=24   # one node of 8 GPUs

Reads   tokenizer/ (scripts.tok_train) and rows/; missing rows are packed in the background
Writes  base_checkpoints/<tag>/ with metrics.jsonl, and the section "Base model training"
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from nanochat.checkpoint import build_model, new_model
from nanochat.config import settings, start
from nanochat.dataset import DataConfig, load_last_source
from nanochat.distributed import DistContext, init_distributed
from nanochat.evaluators import (
    FewShotScore,
    PretrainEvalConfig,
    Samples,
    ValidationConfig,
    ValidationLoss,
    next_ids,
)
from nanochat.gpt import GPT, GPTConfig
from nanochat.hardware import peak_memory_bytes, utilization
from nanochat.mixture import Corpus, MixConfig, open_corpus, open_texts
from nanochat.optim import MuonAdamW, OptimConfig, Rule, ScheduleConfig
from nanochat.preflight import KernelConfig, estimate_seconds, require_memory
from nanochat.scaling import Horizon, ShapeConfig, plan_horizon, scaled_rules, shape_for_depth
from nanochat.tokenizer import Tokenizer
from nanochat.train import (
    Callback,
    RowLoader,
    Stopwatch,
    TrainConfig,
    TrainingRun,
    finished_before,
    train,
    write_section,
)
from tasks.builtin import choose_bundle, ensure_written

SECTION = "Base model training"
# Flags that other trainers of this kind have, or that moved.
RETIRED = {
    "n_layer": "the number of layers is --depth",
    **dict.fromkeys(
        ("n_embd", "n_head", "d_model", "head_dim"),
        "width and heads follow from --depth; scripts.golf.base_train takes other widths",
    ),
    "sequence_length": "the length of a row is --max_seq_len",
    "block_size": "the length of a row is --max_seq_len",
    "gradient_accumulation_steps": "it follows from --total_batch_size, in tokens, and "
    "--device_batch_size, in rows",
    "learning_rate": "each kind of weight has its own: --matrix_lr, --embedding_lr, "
    "--unembedding_lr",
    "warmup_ratio": "--warmup_steps counts steps",
    **dict.fromkeys(
        ("qat_start", "quantize", "quant_clip", "n_kv_head", "mlp_ratio", "tie_embeddings")
        + ("rope_dims", "xsa_last_n", "qk_gain_init", "init", "projection_init", "tied_lr")
        + ("decay_rule", "ema_decay", "max_wallclock_seconds"),
        "it is a flag of scripts.golf.base_train",
    ),
    "value_embeddings": "--value_every=0 leaves the value embeddings out",
    **dict.fromkeys(
        ("recursion_preset", "n_loops", "n_prelude", "n_core", "n_coda", "supervise")
        + ("supervision_base", "improvement_bonus", "bptt_loops"),
        "it is a flag of scripts.recursion.base_train",
    ),
    **dict.fromkeys(
        ("repeat_layers", "repeat_from"), "it was deleted; the last commit that has it is 27c376f"
    ),
    "suite": "the few-shot tasks follow from the data set, or are those of --eval_bundle",
    **dict.fromkeys(("arm", "arm_floor"), "scripts.lab.sweep --arms=... is a data ablation"),
}


@dataclass(frozen=True)
class BaseTrain:
    depth: int = 20
    """Number of layers; width, heads, batch, horizon and learning rates follow from it."""
    max_seq_len: int = 2048
    """Tokens in a row, the model's context."""
    num_iterations: int | None = None
    """Optimizer steps. Default: from target_flops or target_param_data_ratio."""
    target_flops: float | None = None
    """Train until about this many FLOPs are spent."""
    target_param_data_ratio: float = 12.0
    """Training tokens per matmul parameter, where nothing else says how long to train."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: from the horizon."""
    arch: Literal["default", "classic"] = "default"
    """classic: the plain architecture of October 2025, which Hugging Face loads natively."""
    window_pattern: str = "L"
    """Attention windows by layer: L sees everything, S a quarter of the row."""
    tokenizer_tag: str = "main"
    """Which tokenizer under tokenizer/ to use."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: PretrainEvalConfig = field(default_factory=PretrainEvalConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


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
    Train a base model and record it; tracks extend it.

    adapt: the configuration of a depth -> that of another model. callbacks: further ones.
    max_seconds: a budget of training time. make_optimizer: with the arguments of MuonAdamW.
    identity: further settings that decide the result; a run with others is not resumed.
    rules: optimizer settings, horizon and width -> the update rules.
    """
    began, seed = Stopwatch(), cfg.train.seed
    machine = init_distributed(cfg.train.machine, seed)

    # Data: tokenizer, rows, and whether this very training was done before
    corpus, inputs = open_text(cfg, machine)
    tokenizer, T = corpus.tokenizer, cfg.max_seq_len
    asked = {**settings(cfg), "eval_tokens": cfg.validation.tokens(machine)}
    if finished_before(SECTION, asked, inputs, cfg.train, machine):
        return machine.close()

    # Model: everything follows from depth
    vocab_size, windows = tokenizer.vocab_size, cfg.window_pattern
    plain_cfg = shape_for_depth(cfg.depth, vocab_size, T, cfg.arch, windows, cfg.shape)
    model_cfg = adapt(plain_cfg)
    with torch.device("meta"):
        require_memory(new_model(model_cfg), machine)
    model = build_model(model_cfg, machine.device, machine.dtype, seed)

    # Horizon and optimizer
    horizon, num_steps = plan(cfg, model, max_seconds, machine)
    table = rules(cfg.train.optim, horizon, model_cfg.d_model)
    optimizer = make_optimizer(model, table, machine)
    mixed, needed = corpus.resolve_amounts(num_steps * horizon.batch_tokens // T, machine)

    # Evaluators and the run
    loss = validation(cfg.validation, corpus.rows, next_ids)
    run = TrainingRun(
        kind="base",
        model=model,
        tokenizer=tokenizer,
        optimizer=optimizer,
        loader=RowLoader(corpus.mixed(needed), next_ids, horizon.batch_tokens, seed, machine),
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
        settings=asked,
        background=partial(corpus.packing, needed, machine),
        bytes_to_pack=corpus.bytes_to_pack(needed, machine),
    )
    if max_seconds is not None:  # the clock must not run while text is packed
        corpus.pack(needed, machine)
    train(run)
    write_section(SECTION, run, summarize(run), began, mixed.tables() if mixed else ())


def plan(
    cfg: BaseTrain, model: GPT, max_seconds: float | None, machine: DistContext
) -> tuple[Horizon, int]:
    """
    The horizon as if there were no clock, and the most steps that there can be: with a clock twice
    as many as it is estimated to allow, for which text is packed.
    """
    horizon = plan_horizon(
        model,
        cfg.num_iterations,
        cfg.target_flops,
        cfg.target_param_data_ratio,
        cfg.total_batch_size,
        machine.world_size,
    )
    if max_seconds is None or cfg.num_iterations is not None:
        return horizon, horizon.num_steps
    step_seconds = estimate_seconds(model, horizon.batch_tokens, machine)
    return horizon, machine.broadcast(math.ceil(2 * max_seconds / step_seconds))


def open_text(cfg: BaseTrain, machine: DistContext) -> tuple[Corpus, dict[str, str]]:
    """
    Open tokenizer, source and rows, the main rank first, so that one process writes. Returns the
    corpus and the fingerprints of what is read.
    """
    tokenizer = Tokenizer.load(cfg.tokenizer_tag)
    used = load_last_source(cfg.tokenizer_tag)
    texts = machine.on_main(
        "opening the text", lambda: open_texts(cfg.data, cfg.mix, used, ensure_written)
    )
    machine.on_main("opening rows", lambda: bool(open_corpus(texts, tokenizer, cfg.max_seq_len)))
    verifies = machine.local_rank == 0
    corpus = open_corpus(texts, tokenizer, cfg.max_seq_len, verifies=verifies)
    prints = {"rows": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}
    return corpus, {**prints, "data": texts.fingerprint}


def open_evaluators(cfg: BaseTrain, corpus: Corpus, machine: DistContext) -> list[Callback]:
    """What is measured besides the validation loss, as far as it was asked for."""
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
    """What the section shows first."""
    progress, machine, rate = run.progress, run.machine, run.tokens_per_second
    tokens = progress.step * run.batch_tokens
    flops = progress.flops / tokens  # of a token
    mfu = rate and utilization(rate * flops, machine.device, machine.world_size)
    return {
        "Number of parameters": run.model.num_params(),
        "Number of FLOPs per token": f"{flops:e}",
        "Calculated number of iterations": progress.step,
        "Number of training tokens": tokens,
        "Tokens : Params ratio": tokens / run.model.num_params(),
        "DDP world size": machine.world_size,
        "Minimum validation bpb": progress.min_val,
        "Final validation bpb": progress.last_val,
        **run.values(),
        "MFU %": "-" if mfu is None else f"{100 * mfu:.2f}%",
        "Total training flops": f"{progress.flops:e}",
        "Total training time": f"{progress.train_seconds / 60:.2f}m",
        "Peak memory usage": f"{peak_memory_bytes(machine.device) / 2**20:.2f}MiB",
        "Final training loss": progress.smooth_loss,
    }


if __name__ == "__main__":
    start(pretrain, BaseTrain(), __doc__, retired=RETIRED)
