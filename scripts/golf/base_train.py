"""
Pretrain a base model for a 16 MB artifact.

    python -m scripts.golf.base_train --depth=4 --qat_start=0.85 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.golf.base_train -- --depth=12 --max_wallclock_seconds=600

Reads   the inputs of scripts.base_train; accepts its flags and more
Writes  the outputs of scripts.base_train; scripts.export turns them into an artifact
"""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

from nanochat.config import require_at_least, require_positive, start
from nanochat.golf.model import GolfConfig, GolfOptions
from nanochat.golf.qat import AveragingMuonAdamW, LateQuantization
from nanochat.golf.quantize import QuantConfig
from nanochat.gpt import GPTConfig
from nanochat.optim import OptimConfig, Rule
from nanochat.recursion.presets import WidthConfig
from nanochat.scaling import Horizon, batch_lr_factor, scaled_rules
from scripts.base_train import BaseTrain, pretrain


@dataclass(frozen=True)
class GolfShape(GolfOptions):
    n_kv_head: int | None = None
    """Number of key/value heads (GQA). Default: n_head (no GQA)."""
    mlp_ratio: float | None = None
    """MLP width relative to the model width. Default: 4."""
    value_every: int | None = None
    """Add a gated value embedding to every N-th layer, counting back from the last; 0 = none.
    Default: 2; with --arch=classic, 0."""

    def apply(self, plain: GPTConfig) -> GolfConfig:
        """Return `plain` with these options."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return GolfConfig(**{**asdict(plain), **given})


@dataclass(frozen=True)
class GolfTrain(BaseTrain):
    max_wallclock_seconds: float | None = None
    """Train for this many seconds, with learning rates scheduled by time; packing, compilation,
    evaluation and saving do not count. num_iterations is then the maximum; batch size and weight
    decay still follow from the horizon. Default: no time limit."""
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
    adam_wd: float | None = None
    """AdamW weight decay of all other parameters: embeddings, LM head and scalars. Default: 0.001
    to 0.01 for embeddings and LM head, 0 for scalars."""
    width: WidthConfig = field(default_factory=WidthConfig)
    golf_shape: GolfShape = field(default_factory=GolfShape)
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, tied_lr=0, adam_wd=0)
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
        for name, rule in found.items():
            if self.adam_wd is not None and rule.kind == "adamw":
                found[name] = replace(rule, weight_decay=self.adam_wd)
        return found


def main(cfg: GolfTrain) -> None:
    late = cfg.qat_start < 1
    identity = {
        "tied_lr": cfg.tied_lr,
        "decay_rule": cfg.decay_rule,
        "adam_wd": cfg.adam_wd,
        "max_wallclock_seconds": cfg.max_wallclock_seconds,
        "ema_decay": cfg.ema_decay or None,
        "late_quantization": {"start": cfg.qat_start, **asdict(cfg.quant)} if late else None,
    }
    decoupled = cfg.decay_rule == "decoupled"
    pretrain(
        cfg,
        adapt=lambda plain: cfg.golf_shape.apply(cfg.width.apply(plain)),
        callbacks=lambda m: [LateQuantization(m, cfg.quant, cfg.qat_start)] if late else [],
        max_seconds=cfg.max_wallclock_seconds,
        make_optimizer=partial(AveragingMuonAdamW, ema_decay=cfg.ema_decay, decoupled=decoupled),
        identity={name: value for name, value in identity.items() if value is not None},
        rules=cfg.rules,
    )


if __name__ == "__main__":
    start(main, GolfTrain(), __doc__)
