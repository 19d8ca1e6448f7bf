"""
Pretrain a base model.

    python -m scripts.base_train --depth=4 --max_seq_len=256 --num_iterations=20   # a laptop
    torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=24   # one node with 8 GPUs

Reads   tokenizer/ (scripts.tok_train) and rows/; packs rows that are missing
Writes  base_checkpoints/<tag>/ with metrics.jsonl, and the section "Base model training"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from nanochat.checkpoint import build_model
from nanochat.config import require_at_least, settings, start
from nanochat.dataset import DataConfig, Text, load_last_source
from nanochat.dist import DistContext, init_dist, is_hopper
from nanochat.eval_bpb import ValidationConfig, generate_samples, validate_text
from nanochat.eval_core import Suite, core, evaluate_task, open_suite
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.optim import MuonAdamW, Rule, ScheduleConfig, decay_factor, lr_factor, muon_momentum
from nanochat.recipe import make_recipe
from nanochat.records import mean_name
from nanochat.rows import Rows, open_rows, pack_rows
from nanochat.run import Run, keep_batch, resumed_state, skip_if_finished
from nanochat.scaling import (
    HorizonConfig,
    default_windows,
    plan_horizon,
    scaled_rules,
    shape_for_depth,
)
from nanochat.tokenizer import Tokenizer
from nanochat.train import Compile, TrainConfig
from tasks.world import write as builtin

SECTION = "Base model training"
FP8_DEPTH = 20  # shallowest model with fp8 matmuls by default: +17% tokens/s (upstream, 2026-02)


@dataclass(frozen=True)
class BaseTrain:
    NOT_IN_RECIPE: ClassVar[str] = "tokenizer_tag core_metric_every sample_every compile"

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
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    core_metric_every: int = 0
    """Evaluate CORE (few-shot, see scripts.base_eval) every N steps and at the end; 0 = never."""
    core_metric_max_per_task: int = 500
    """Maximum number of items per few-shot task during training."""
    sample_every: int = 0
    """Print continuations of seven fixed prompts every N steps and at the end; 0 = never."""
    eval_bundle: str | None = None
    """Folder, archive or URL of few-shot tasks. Default: those of the built-in dataset if training
    on it, else the published ones."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compile: Compile = "auto"
    """torch.compile. auto: on GPUs and in long runs on a CPU. autotune: times several kernels."""
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        require_at_least(self, depth=1, max_seq_len=1, sample_every=0)
        require_at_least(self, core_metric_every=0, core_metric_max_per_task=1)
        if self.arch == "classic" and self.window_pattern not in (None, "L"):
            pattern = f"--window_pattern={self.window_pattern}"
            raise ValueError(f"--arch=classic has the pattern L; remove it, or {pattern}")

    def model_config(self, vocab_size: int, windows: str) -> GPTConfig:
        """Configuration of the model that these settings describe. windows: the default pattern."""
        windows = self.window_pattern or windows
        return shape_for_depth(self.depth, vocab_size, self.max_seq_len, self.arch, windows)


def main(cfg: BaseTrain) -> None:
    seed, schedule = cfg.train.seed, cfg.schedule
    tag = cfg.train.model_tag or f"d{cfg.depth}"
    dist, before = open_device(cfg, tag)

    # Tokenizer, text and rows; exit if this run has already finished
    tokenizer, text, rows = open_inputs(cfg, dist)
    inputs = {"rows": rows.recipe, "tokenizer": tokenizer.fingerprint, "data": text.fingerprint}
    recipe = make_recipe(cfg, inputs)
    shards = sum(len(source.train_shards) for source in text.sources)
    dist.print0(f"text      {text.name}, {shards:,} training shards")
    resolved = {**settings(cfg), "eval_tokens": cfg.validation.tokens(dist)}
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Everything follows from depth
    shape = cfg.model_config(tokenizer.vocab_size, choose_windows(before, dist))
    model = build_model(shape, dist.device, dist.dtype, seed)
    horizon = plan_horizon(model, keep_batch(cfg.horizon, before), dist.world_size)
    num_steps, batch_tokens = horizon.num_steps, horizon.batch_tokens
    rules = scaled_rules(cfg.train.optim, horizon, shape.d_model)
    optimizer = MuonAdamW(model, rules, dist)
    suite = open_few_shot(cfg, text, dist)

    run = Run("base", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    num_rows = num_steps * batch_tokens // cfg.max_seq_len
    lengths = [*dict.fromkeys((*before.get("lengths", ()), num_rows))]  # if it was made longer
    run.state |= {"source": text.describe(), "settings": resolved, "lengths": lengths}
    rows = dist.on_main(lambda: pack_rows(rows, text, tokenizer, lengths))
    few_shot: dict[str, Any] = {}
    with run.begin(num_steps, batch_tokens, cfg.compile):
        validation = validate_text(cfg.validation, rows, tokenizer, dist)
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            if run.due(cfg.train.eval_every):
                run.log(validation.score(model.token_losses, run.device_rows, run.stop))
            few_shot |= sample_and_score(run, cfg, suite)
            if run.finished:
                break
            run.backward(run.load(rows))
            run.update(
                lr_factor(step, num_steps, schedule),
                muon_momentum(step, num_steps, schedule),
                decay_factor(step, num_steps),
            )
    values = {**summarize(run, schedule, rules), **run.measurements(), **few_shot}
    run.finish(SECTION, values, text_tables(run, rows), following="mid_train")


def open_device(cfg: BaseTrain, tag: str) -> tuple[DistContext, dict[str, Any]]:
    """
    The ranks, and the state of the run that will be resumed, whose dtype they keep; a new run
    trains in fp8 where that is the default.
    """
    dist = init_dist(cfg.train.dist, cfg.train.seed)
    before = resumed_state("base", tag, cfg.train, dist)
    fp8 = cfg.depth >= FP8_DEPTH and is_hopper(dist.device)
    if compute := before.get("compute"):
        dist, fp8 = dist.keep_dtype(cfg.train.dist, compute), compute.get("fp8", False)
    return replace(dist, fp8=dist.fp8 or (fp8 and cfg.train.dist.dtype is None)), before


def choose_windows(before: Mapping[str, Any], dist: DistContext) -> str:
    """The default window pattern: that of the run that will be resumed, else of the device."""
    return before["model"]["window_pattern"] if before else default_windows(dist.device.type)


def open_inputs(cfg: BaseTrain, dist: DistContext) -> tuple[Tokenizer, Text, Rows]:
    """Open the tokenizer, the text and its rows, packed or not yet packed."""
    tokenizer = Tokenizer.load(cfg.tokenizer_tag)
    used = load_last_source(cfg.tokenizer_tag)
    text = dist.on_main(lambda: builtin.open_text(cfg.data, used))
    return tokenizer, text, open_rows(text, tokenizer, cfg.max_seq_len)


def open_few_shot(cfg: BaseTrain, text: Text, dist: DistContext) -> Suite | None:
    """Few-shot tasks to evaluate during training; None if they are off."""
    if not cfg.core_metric_every:
        return None
    return dist.on_main(lambda: open_suite(cfg.eval_bundle or builtin.builtin_suite(text.name)))


def sample_and_score(run: Run, cfg: BaseTrain, suite: Suite | None) -> dict[str, Any]:
    """
    If they are due, print samples, generated by the main rank, and score the few-shot tasks with an
    uncompiled copy of the model. Returns values for the record.
    """
    dist, found = run.dist, {}
    if cfg.sample_every and run.due(cfg.sample_every):
        texts = dist.on_main(lambda: generate_samples(run.model, run.tokenizer))
        run.print("\n".join(f"    {text!r}" for text in texts.values()))
    if suite and run.due(cfg.core_metric_every):
        model, scores = inference_copy(run.model), []
        for task in suite.tasks:
            most = cfg.core_metric_max_per_task
            scores.append(evaluate_task(model, run.tokenizer, task, dist, most))
            run.raise_if_stopped()
        score = core(scores)
        run.log({"core_metric": score.value})
        metric = mean_name("CORE metric", (task.name for task in suite.tasks))
        found = {f"{metric} estimate": score._asdict()}
    return found


def text_tables(run: Run, rows: Rows) -> list[dict[str, Any]]:
    """Table of the sources of a mixture of text; none for a single source."""
    is_mixed = len(rows.parts) > 1
    return [rows.table(run.progress.rows, run.cfg.seed)] if is_mixed else []


def summarize(run: Run, schedule: ScheduleConfig, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """First values of the report section."""
    progress, dist, throughput = run.progress, run.dist, run.measure_throughput()
    tokens = progress.rows * run.model.cfg.max_seq_len
    flops = progress.flops / tokens  # per token
    mfu = throughput and dist.utilization(throughput * flops)
    return {
        "Number of parameters": run.model.num_params(),
        "Number of FLOPs per token": f"{flops:e}",
        "Calculated number of iterations": progress.step,
        "Number of training tokens": tokens,
        "Tokens : Params ratio": tokens / run.model.num_params(),
        "DDP world size": dist.world_size,
        "warmup_ratio": min(1.0, schedule.warmup_steps / progress.step),
        "Minimum validation bpb": progress.min_val,
        "Final validation bpb": progress.last_val,
        "MFU %": "-" if mfu is None else f"{100 * mfu:.2f}%",
        "Total training flops": f"{progress.flops:e}",
        "Total training time": f"{progress.train_seconds / 60:.2f}m",
        "Peak memory usage": f"{dist.peak_memory_bytes() / 2**20:.2f}MiB",
        "Final training loss": progress.smooth_loss,
        "weight_decay": rules["blocks"].weight_decay,  # Muon's
    }


if __name__ == "__main__":
    start(main, BaseTrain(), __doc__)
