"""
Pretrain a base model for a 16 MB artifact.

    python -m scripts.golf.base_train --depth=4 --qat_start=0.85 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.golf.base_train -- --depth=12 --max_wallclock_seconds=600

Reads   the inputs of scripts.base_train; accepts its flags and more
Writes  the outputs of scripts.base_train; scripts.export turns them into an artifact
"""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from nanochat.checkpoint import build_model
from nanochat.common import UsageError
from nanochat.config import require_at_least, require_positive, settings, start
from nanochat.dist import init_dist
from nanochat.eval_bpb import validate_text
from nanochat.golf.model import GolfConfig, GolfGPT, GolfOptions
from nanochat.golf.qat import AveragingMuonAdamW, quantized_weights
from nanochat.golf.quantize import QuantConfig
from nanochat.gpt import GPTConfig
from nanochat.optim import OptimConfig, Rule, decay_factor, lr_factor, muon_momentum
from nanochat.recipe import make_recipe
from nanochat.rows import pack_rows
from nanochat.run import Run, keep_batch, resumed_state, skip_if_finished
from nanochat.scaling import Horizon, batch_lr_factor, default_head_dim, plan_horizon, scaled_rules
from scripts.base_train import (
    SECTION,
    BaseTrain,
    choose_windows,
    open_few_shot,
    open_inputs,
    sample_and_score,
    summarize,
    text_tables,
)


@dataclass(frozen=True)
class GolfShape(GolfOptions):
    d_model: int | None = None
    """Width of the residual stream. Default: 64 per layer."""
    head_dim: int | None = None
    """Head dimension. Default: 128 if it divides a width of at least 512, else 64."""
    n_kv_head: int | None = None
    """Number of key/value heads (GQA). Default: n_head (no GQA)."""
    mlp_ratio: float | None = None
    """MLP width relative to the model width. Default: 4."""
    value_every: int | None = None
    """Add a gated value embedding to every N-th layer, counting back from the last; 0 = none.
    Default: 2; with --arch=classic, 0."""

    def __post_init__(self) -> None:
        require_at_least(self, d_model=1, head_dim=1, n_kv_head=1, value_every=0)

    def apply(self, plain: GPTConfig) -> GolfConfig:
        """Return `plain` with these options. Raises ValueError if head_dim does not fit."""
        width = self.d_model or plain.d_model
        head_dim = self.head_dim or default_head_dim(width)
        heads = width // head_dim
        if width % head_dim:
            raise ValueError(f"head_dim {head_dim} must divide the width {width}; set --head_dim")
        sizes = {"d_model": width, "head_dim": head_dim, "n_head": heads, "n_kv_head": heads}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return GolfConfig(**{**asdict(plain), **sizes, **given})


@dataclass(frozen=True)
class GolfTrain(BaseTrain):
    max_wallclock_seconds: float | None = None
    """Train for this many seconds, with learning rates scheduled by time; packing, compilation,
    evaluation and saving do not count. The horizon, which batch size and weight decay follow from,
    is then the maximum; set --num_iterations for a longer one. Default: no time limit."""
    ema_decay: float = 0.0
    """EMA decay of the weights, e.g. 0.997; the final checkpoint holds the average. 0 = off."""
    qat_start: float = 1.0
    """Fraction of the run after which the forward pass uses weights quantized as in --quantize; 1 =
    never."""
    tied_lr: float = 0.05
    """Peak AdamW learning rate of tied embeddings (--tie_embeddings) at width 768; scaled by
    width^-0.5."""
    decay_rule: Literal["cautious", "decoupled"] = "cautious"
    """cautious: fades over the run; decays only weights that the update also shrinks. decoupled:
    decays every matrix weight by learning rate times decay, without fading; the default decay is
    then a quarter of the cautious one, for about the same total decay."""
    golf_shape: GolfShape = field(default_factory=GolfShape)
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, tied_lr=0)
        require_positive(self, "max_wallclock_seconds")
        if not 0 <= self.qat_start <= 1:
            raise ValueError(f"qat_start must be in [0, 1], got {self.qat_start}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), got {self.ema_decay}")

    def rules(self, optim: OptimConfig, horizon: Horizon, d_model: int) -> dict[str, Rule]:
        """Return `scaled_rules` with the golf settings applied."""
        found = scaled_rules(optim, horizon, d_model)
        found["gains"] = Rule("adamw", found["skip"].lr / 25)
        if self.golf_shape.tie_embeddings:
            lr = self.tied_lr * (d_model / 768) ** -0.5 * batch_lr_factor(horizon.batch_tokens)
            found["embed"] = Rule("adamw", lr, weight_decay=0.01)
        if self.decay_rule == "decoupled" and optim.weight_decay is None:
            # Cautious decay affects about half of the weights and fades to zero
            blocks = found["blocks"]
            found["blocks"] = replace(blocks, weight_decay=blocks.weight_decay / 4)
        return found


def main(cfg: GolfTrain) -> None:
    seed, schedule = cfg.train.seed, cfg.schedule
    max_seconds, late = cfg.max_wallclock_seconds, cfg.qat_start < 1
    tag = cfg.train.model_tag or f"d{cfg.depth}"
    dist = init_dist(cfg.train.dist, seed)
    before = resumed_state("base", tag, cfg.train, dist)
    dist = dist.keep_dtype(cfg.train.dist, before.get("compute"))

    # Tokenizer, text and rows; exit if this run has already finished
    tokenizer, text, rows = open_inputs(cfg, dist)
    inputs = {"rows": rows.recipe, "tokenizer": tokenizer.fingerprint, "data": text.fingerprint}
    recipe = make_recipe(cfg, inputs)
    resolved = {**settings(cfg), "eval_tokens": cfg.validation.tokens(dist)}
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Model, horizon, optimizer, rows
    plain = cfg.model_config(tokenizer.vocab_size, choose_windows(before, dist))
    shape = cfg.golf_shape.apply(plain)
    model = build_model(shape, dist.device, dist.dtype, seed, GolfGPT)
    cfg.quant.formats(dict(model.named_parameters()))  # a pattern without a match is an error now
    horizon = plan_horizon(model, keep_batch(cfg.horizon, before), dist.world_size)
    num_steps, batch_tokens = horizon.num_steps, horizon.batch_tokens
    rules = cfg.rules(cfg.train.optim, horizon, shape.d_model)
    decoupled = cfg.decay_rule == "decoupled"
    optimizer = AveragingMuonAdamW(model, rules, dist, ema_decay=cfg.ema_decay, decoupled=decoupled)
    suite = open_few_shot(cfg, text, dist)

    run = Run("base", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    num_rows = num_steps * batch_tokens // cfg.max_seq_len
    lengths = [*dict.fromkeys((*before.get("lengths", ()), num_rows))]  # if it was made longer
    run.state |= {"source": text.describe(), "settings": resolved, "lengths": lengths}
    rows = dist.on_main(lambda: pack_rows(rows, text, tokenizer, lengths))
    few_shot: dict[str, Any] = {}
    with run.begin(num_steps, batch_tokens, cfg.compile):
        validation = validate_text(cfg.validation, rows, tokenizer, dist)
        spent = run.progress.train_seconds  # of training, without evaluations and saves
        if max_seconds is not None and spent >= max_seconds:  # finished by time
            run.num_steps = run.progress.step
        if cfg.ema_decay and run.progress.finished and not run.finished:
            fix = "train all steps with --resume=never, or use --ema_decay=0"
            raise UsageError("the run has averaged weights and cannot be extended", fix)
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            if run.due(cfg.train.eval_every):
                run.log(validation.score(model.token_losses, run.device_rows, run.stop))
            few_shot |= sample_and_score(run, cfg, suite)
            if run.finished:
                break

            # Under a time limit, the schedules follow the elapsed time
            total = num_steps
            if max_seconds is not None and spent:
                total = min(num_steps, step * max_seconds / spent)
                if run.logger:
                    run.logger.total_steps = math.ceil(total)  # for the time left
            quantize = late and step >= cfg.qat_start * total
            with quantized_weights(model, cfg.quant) if quantize else nullcontext():
                run.backward(run.load(rows))
            left = {} if max_seconds is None else {"seconds_left": max(0.0, max_seconds - spent)}
            run.update(
                lr_factor(step, total, schedule),
                muon_momentum(step, total, schedule),
                decay_factor(step, total),
                **left,
            )
            if max_seconds is not None:  # all ranks end at the same step
                spent = dist.sum(run.progress.train_seconds)[0] / dist.world_size
                if spent >= max_seconds:
                    run.num_steps = step + 1
            if step + 1 == run.num_steps:
                optimizer.take_average()
    values = {**summarize(run, schedule, rules), **run.measurements(), **few_shot}
    run.finish(SECTION, values, text_tables(run, rows))


if __name__ == "__main__":
    start(main, GolfTrain(), __doc__)
