"""
Pretrain a base model.

    python -m scripts.base_train --depth=4 --num_iterations=20     # laptop, a minute
    torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=24   # one node of 8 GPUs

Reads   tokenizer/ (scripts.tok_train); rows/, packed in the background where scripts.data has not
Writes  base_checkpoints/<tag>/ with metrics.jsonl, and the section "Base model training"
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from nanochat import records, report
from nanochat.checkpoint import build_model, closing_lines, new_model
from nanochat.common import PREEMPTED, write_json
from nanochat.config import settings, start
from nanochat.dataloader import inputs_and_targets
from nanochat.dataset import DataConfig, load_last_source
from nanochat.distributed import Machine, init_machine
from nanochat.evaluators import FewShotScore, PretrainEvalConfig, Samples, ValidationLoss
from nanochat.gpt import GPT, GPTConfig
from nanochat.hardware import peak_memory_bytes, used_memory_bytes
from nanochat.lab.held_out import require_other_families
from nanochat.logger import METRICS_FILE
from nanochat.loss import IGNORE
from nanochat.mixture import (
    MIXTURE_FILE,
    MOVED_FLAGS,
    Corpus,
    MixConfig,
    Resolution,
    open_corpus,
    open_texts,
)
from nanochat.optim import MuonAdamW, rules
from nanochat.preflight import estimate_seconds, require_memory
from nanochat.scaling import (
    Horizon,
    ShapeConfig,
    plan_horizon,
    scaled_optim,
    shape_for_depth,
)
from nanochat.stage import (
    Outcome,
    Stage,
    StageConfig,
    carry_out,
)
from nanochat.tokenizer import Tokenizer
from nanochat.train import Callback
from tasks.builtin import choose_bundle, ensure_written

SECTION = "Base model training"
# Flags that other trainers of this kind have.
ELSEWHERE = {
    "n_embd": "the width is --d_model; by default it follows from --depth",
    "n_layer": "the number of layers is --depth",
    "n_head": "heads follow from the width and --head_dim",
    "sequence_length": "the length of a row is --max_seq_len",
    "block_size": "the length of a row is --max_seq_len",
    "gradient_accumulation_steps": "it follows from --total_batch_size, in tokens, and "
    "--device_batch_size, in rows",
    "learning_rate": "each kind of weight has its own: --matrix_lr, --embedding_lr, "
    "--unembedding_lr, --scalar_lr",
    "warmup_ratio": "--warmup_steps counts steps",
    **dict.fromkeys(
        ("qat_start", "quantize", "quant_clip"), "it is a flag of scripts.golf.base_train"
    ),
    **dict.fromkeys(
        ("recursion_preset", "n_loops", "n_prelude", "n_core", "n_coda", "supervise")
        + ("supervision_base", "improvement_bonus", "bptt_loops"),
        "it is a flag of scripts.recursion.base_train",
    ),
    **dict.fromkeys(
        ("repeat_layers", "repeat_from"), "it was deleted; the last commit that has it is 27c376f"
    ),
    **MOVED_FLAGS,
    **dict.fromkeys(("revision", "val_shard"), "open the text with scripts.data and this flag"),
    "arm": "scripts.lab.sweep --arms=... trains the arms of a data ablation",
    "arm_floor": "it is a flag of scripts.lab.sweep",
}


@dataclass(frozen=True)
class BaseTrain:
    depth: int = 20
    """The one dial: width, heads, batch, horizon and rates follow from it."""
    max_seq_len: int = 2048
    """Tokens in a row: how far back the model sees."""
    num_iterations: int | None = None
    """Optimizer steps. Default: from target_flops or target_param_data_ratio."""
    target_flops: float | None = None
    """Train until about this many FLOPs are spent."""
    target_param_data_ratio: float = 12.0
    """Training tokens per matmul parameter, each counted as often as a token meets it, where
    nothing else says how long to train."""
    max_wallclock_seconds: float | None = None
    """End after so many seconds of steps, the rates following the clock; packing, compiling,
    evaluations and saving are not counted. num_iterations are then the most there can be; batch and
    decay follow from the horizon, as without a clock."""
    total_batch_size: int | None = None
    """Tokens per optimizer step over all devices. Default: from the horizon."""
    arch: Literal["default", "classic"] = "default"
    """classic: the plain architecture of October 2025, which Hugging Face loads natively."""
    window_pattern: str = "L"
    """Attention windows by layer: L sees everything, S a quarter of the row."""
    ema_decay: float = 0.0
    """Share that an average of all weights keeps at each step, as 0.997; the run ends with the
    average in place of the weights. 0 = off."""
    tokenizer_tag: str = "main"
    """Which tokenizer under tokenizer/ to use."""
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    evaluation: PretrainEvalConfig = field(default_factory=PretrainEvalConfig)
    stage: StageConfig = field(default_factory=StageConfig)

    def __post_init__(self) -> None:
        if self.max_wallclock_seconds is not None and not self.max_wallclock_seconds > 0:
            raise ValueError(
                f"max_wallclock_seconds must be positive, got {self.max_wallclock_seconds}"
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")


class Text(NamedTuple):
    """What a base model is trained on."""

    corpus: Corpus
    run_id: str

    @property
    def tokenizer(self) -> Tokenizer:
        return self.corpus.tokenizer

    @property
    def inputs(self) -> dict[str, str]:
        """The fingerprints that a record and a checkpoint carry."""
        return {
            "rows": self.corpus.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "data": self.corpus.texts.fingerprint,
        }


def main(cfg: BaseTrain) -> None:
    pretrain(cfg)


def pretrain(
    cfg: BaseTrain,
    adapt: Callable[[GPTConfig], GPTConfig] = lambda shape: shape,
    callbacks: Callable[[GPT], Sequence[Callback]] = lambda model: (),
    validation: type[ValidationLoss] = ValidationLoss,
    choices: Mapping[str, Any] = {},
) -> None:
    """
    Train a base model and record it; tracks extend it.

    adapt: the configuration of a depth -> that of another model. callbacks: further ones.
    choices: further settings that decide the result; a run with others is not resumed.
    """
    started, at_start = time.perf_counter(), used_memory_bytes(torch.device("cpu"))
    machine, report_dir = init_machine(cfg.stage.machine, cfg.stage.seed), cfg.stage.report_dir
    text = open_text(cfg, machine)
    key = records.stage_key(asked(cfg, machine), text.inputs)
    if cfg.stage.once and machine.on_main(
        "verifying files", lambda: records.finished(SECTION, key, report_dir) is not None
    ):
        machine.print0(f"{SECTION}: finished already, skipped")
        return machine.close()

    # What to train: everything follows from depth
    vocab_size, T, seed = text.tokenizer.vocab_size, cfg.max_seq_len, cfg.stage.seed
    shape = shape_for_depth(cfg.depth, vocab_size, T, cfg.arch, cfg.window_pattern, cfg.shape)
    shape = adapt(shape)
    with torch.device("meta"):
        require_memory(new_model(shape), machine)
    model = build_model(shape, machine.device, machine.dtype, seed)
    horizon = plan(cfg, model, machine)
    steps = most_steps(cfg, model, horizon, machine)
    tokenizer, rows, evaluation = text.tokenizer, text.corpus.rows, cfg.evaluation
    loss = validation(evaluation, model, tokenizer, rows, cfg.stage.loop.eval_every, machine)
    evaluators: list[Callback] = [loss]
    if evaluation.sample_every:
        evaluators.insert(0, Samples(evaluation, model, tokenizer, machine))
    if evaluation.core_metric_every:
        suite, dataset = evaluation.suite, text.corpus.texts.describe().get("dataset")
        bundle = machine.on_main(
            "writing the suite", lambda: choose_bundle(suite.suite, suite.eval_bundle, dataset)
        )
        evaluators.append(FewShotScore(evaluation, model, tokenizer, bundle, machine))
    corpus = text.corpus
    mixed, needed = corpus.resolve_amounts(steps * horizon.batch_tokens // T, machine)
    table = rules(scaled_optim(cfg.stage.optim, horizon), shape.d_model)
    named = dict(model.named_parameters())
    optimizer = MuonAdamW(named, model.param_roles(), table, machine, cfg.ema_decay)
    stage = Stage(
        kind="base",
        model=model,
        optimizer=optimizer,
        tokenizer=text.tokenizer,
        rows=corpus.mixed(needed),
        num_steps=steps,
        batch_tokens=horizon.batch_tokens,
        split=lambda batch: inputs_and_targets(batch, IGNORE),
        callbacks=[*evaluators, *callbacks(model)],
        identity={**identity(cfg), **choices},
        state={
            "horizon": asdict(horizon),
            "source": text.corpus.texts.describe(),
            **({"mixture": mixed.state()} if mixed else {}),
            "provenance": {"run_id": text.run_id, "seed": seed, "inputs": text.inputs},
        },
        run_id=text.run_id,
        background=lambda: pack_in_background(corpus, needed, loss, machine),
        bytes_to_pack=corpus.bytes_to_pack(needed, machine),
        max_seconds=cfg.max_wallclock_seconds,
    )
    if cfg.max_wallclock_seconds is not None:  # the clock is not to run while text is packed
        corpus.pack(needed, machine)
    outcome = carry_out(cfg.stage, stage, machine, asked(cfg, machine))
    if machine.is_main and outcome:
        with machine.working("writing the report"):
            write_section(cfg, text, mixed, outcome, stage.callbacks, started, at_start)
    machine.close()
    if outcome is None:
        raise SystemExit(PREEMPTED)


def pack_in_background(
    corpus: Corpus, needed: Mapping[str, int], loss: ValidationLoss, machine: Machine
) -> ExitStack:
    """Pack during training; returns when the validation rows are packed and can be scored."""
    with corpus.packing(needed, machine) as packing:
        loss.require_rows()
        return packing.pop_all()


def plan(cfg: BaseTrain, model: GPT, machine: Machine) -> Horizon:
    """Steps and batch, as if there were no clock."""
    return plan_horizon(
        model.num_used_params(),
        model.flops_per_token(),
        cfg.max_seq_len,
        cfg.num_iterations,
        cfg.target_flops,
        cfg.target_param_data_ratio,
        cfg.total_batch_size,
        machine.world_size,
    )


def most_steps(cfg: BaseTrain, model: GPT, horizon: Horizon, machine: Machine) -> int:
    """
    Where the run ends at the latest: after the horizon's steps. Where a clock ends it and nobody
    said how many: after twice as many as it is estimated to allow, for which text is packed.
    """
    if cfg.max_wallclock_seconds is None or cfg.num_iterations is not None:
        return horizon.num_steps
    step_seconds = estimate_seconds(model, horizon.batch_tokens, machine)
    return machine.broadcast(math.ceil(2 * cfg.max_wallclock_seconds / step_seconds))


def identity(cfg: BaseTrain) -> dict[str, Any]:
    """Settings that decide the result of a run by the clock or with an average; else empty."""
    chosen = {
        "max_wallclock_seconds": cfg.max_wallclock_seconds,
        "ema_decay": cfg.ema_decay or None,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def open_text(cfg: BaseTrain, machine: Machine) -> Text:
    """Open tokenizer, source and rows; the main rank first, so that one process writes."""
    tokenizer = Tokenizer.load(cfg.tokenizer_tag)
    used = load_last_source(cfg.tokenizer_tag)
    texts = machine.on_main(
        "opening the text", lambda: open_texts(cfg.data, cfg.mix, used, ensure_written)
    )
    require_other_families({name: tags.parent for name, tags in texts.tags.items()})
    inputs = {"tokenizer": tokenizer.fingerprint, "data": texts.fingerprint}
    run_id = machine.broadcast(records.inherited_run_id(inputs, cfg.stage.report_dir))
    if machine.is_main:
        open_corpus(texts, tokenizer, cfg.max_seq_len)
    machine.barrier()
    verifies = machine.local_rank == 0
    return Text(open_corpus(texts, tokenizer, cfg.max_seq_len, verifies=verifies), run_id)


def asked(cfg: BaseTrain, machine: Machine) -> dict[str, Any]:
    """The settings as the record has them."""
    return {**settings(cfg), "eval_tokens": cfg.evaluation.tokens(machine)}


def write_section(
    cfg: BaseTrain,
    text: Text,
    mixed: Resolution | None,
    outcome: Outcome,
    callbacks: Sequence[Callback],
    started: float,
    memory_at_start: int,
) -> None:
    """The record and the report."""
    run, progress, checkpoint = outcome.run, outcome.progress, outcome.checkpoint
    model, machine = outcome.model, run.machine
    assert checkpoint is not None, "only the rank that writes checkpoints writes the record"
    if mixed:
        write_json(checkpoint.folder.parent / MIXTURE_FILE, mixed.state())
    mfu = outcome.utilization
    tokens = progress.step * run.batch_tokens
    values: dict[str, Any] = {
        "Number of parameters": model.num_params(),
        "Number of FLOPs per token": f"{progress.flops / tokens:e}",
        "Calculated number of iterations": progress.step,
        "Number of training tokens": tokens,
        "Tokens : Params ratio": tokens / model.num_params(),
        "DDP world size": machine.world_size,
        "Minimum validation bpb": progress.min_val,
        "Final validation bpb": progress.last_val,
        **{name: value for each in callbacks for name, value in each.values().items()},
        "MFU %": "-" if mfu is None else f"{100 * mfu:.2f}%",
        "Total training flops": f"{progress.flops:e}",
        "Total training time": f"{progress.train_seconds / 60:.2f}m",
        "Peak memory usage": f"{peak_memory_bytes(machine.device) / 2**20:.2f}MiB",
        "Final training loss": progress.smooth_loss,
        **outcome.figures(memory_at_start),
    }
    records.write_record(
        SECTION,
        asked(cfg, machine),
        values,
        records.Provenance(
            text.run_id, cfg.stage.seed, text.inputs, {"base": checkpoint.fingerprint}
        ),
        records.Cost.since(started, machine),
        cfg.stage.report_dir,
        tables=[*(mixed.tables() if mixed else ()), *(t for c in callbacks for t in c.tables())],
        metrics=checkpoint.folder.parent / METRICS_FILE,
        files=[checkpoint.folder],
    )
    report.update(cfg.stage.report_dir)
    machine.print0(closing_lines(checkpoint.folder, machine))


if __name__ == "__main__":
    start(main, BaseTrain(), __doc__, retired=ELSEWHERE)
