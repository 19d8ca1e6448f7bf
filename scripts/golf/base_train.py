"""
Pretrain a base model for a 16 MB artifact.

    python -m scripts.golf.base_train --depth=4 --qat_start=0.85 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.golf.base_train -- --depth=12 --max_wallclock_seconds=600

Reads   what scripts.base_train reads; it has the same flags and more
Writes  what scripts.base_train writes; scripts.export makes the artifact of it
"""

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

from nanochat.config import start
from nanochat.golf.model import read_config
from nanochat.golf.qat import AveragingMuonAdamW, LateQuantization
from nanochat.golf.quantize import QuantConfig
from nanochat.gpt import GPTConfig
from nanochat.optim import TIED_LR, MuonAdamW, OptimConfig, Rule
from nanochat.recursion.presets import WidthConfig
from nanochat.scaling import Horizon, scaled_rules
from scripts.base_train import BaseTrain, pretrain


@dataclass(frozen=True)
class GolfShape:
    n_kv_head: int | None = None
    """Heads of keys and values, each shared by a group of query heads. Default: n_head (no GQA)."""
    mlp_ratio: float | None = None
    """Width of each MLP relative to the model's. Default: 4."""
    tie_embeddings: bool | None = None
    """Embed tokens and score them with one matrix. Default: no."""
    rope_dims: int | None = None
    """Rotary dimensions per head (partial RoPE). Default: all."""
    xsa_last_n: int | None = None
    """Layers, counted from the last, with exclusive self attention. Default: 0."""
    qk_gain_init: float | None = None
    """Learn a gain for each query head, from this value, instead of the fixed one."""
    init: Literal["uniform", "orthogonal"] | None = None
    """How block matrices are drawn. Default: uniform."""
    projection_init: Literal["zero", "scaled"] | None = None
    """What writes into the residual stream starts at zero, or drawn and divided by sqrt(2 layers).
    Default: zero."""

    def apply(self, plain: GPTConfig) -> GPTConfig:
        """The shape with what was given; a GolfConfig where an option of golf was."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return read_config({**asdict(plain), **given})


@dataclass(frozen=True)
class GolfTrain(BaseTrain):
    max_wallclock_seconds: float | None = None
    """End after this many seconds of steps, the learning rates following the clock; packing,
    compiling, evaluations and saving are not counted. num_iterations are then the most there can
    be; batch and decay follow from the horizon, as without a clock."""
    ema_decay: float = 0.0
    """EMA decay of the weights, as 0.997; the run ends with the average in place of the weights.
    0 = off."""
    qat_start: float = 1.0
    """Share of the run from which the forward pass sees the weights as --quantize would store them;
    1 = never."""
    tied_lr: float = TIED_LR
    """Peak AdamW learning rate of a matrix that is both embedding and LM head (--tie_embeddings) at
    width 768; falls with width^-0.5."""
    decay_rule: Literal["cautious", "decoupled"] = "cautious"
    """cautious: decay only where it agrees with the update, fading over the run. decoupled: every
    matrix weight shrinks by learning rate times decay before its update, to the end; its default is
    a quarter of the other's, which in sum is as much."""
    width: WidthConfig = field(default_factory=WidthConfig)
    golf_shape: GolfShape = field(default_factory=GolfShape)
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        seconds = self.max_wallclock_seconds
        for name, valid, range_ in (
            ("qat_start", 0 <= self.qat_start <= 1, "a share of the run, 0 to 1"),
            ("max_wallclock_seconds", seconds is None or seconds > 0, "positive"),
            ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
            ("tied_lr", 0 <= self.tied_lr < float("inf"), "zero or positive"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}")

    def rules(self, optim: OptimConfig, horizon: Horizon, d_model: int) -> dict[str, Rule]:
        """Those of `scaled_rules`, with the settings of golf."""
        found = scaled_rules(optim, horizon, d_model)
        found["tied"] = replace(found["tied"], lr=self.tied_lr * (d_model / 768) ** -0.5)
        if self.decay_rule == "decoupled":
            matrix = found["matrix"]
            # Cautious decay acts on about half of the weights, and fades to nothing
            decay = matrix.weight_decay / (4 if optim.weight_decay is None else 1)
            found["matrix"] = replace(matrix, weight_decay=decay, cautious=False)
        return found


def main(cfg: GolfTrain) -> None:
    late = cfg.qat_start < 1
    identity = {
        "tied_lr": cfg.tied_lr,
        "decay_rule": cfg.decay_rule,
        "max_wallclock_seconds": cfg.max_wallclock_seconds,
        "ema_decay": cfg.ema_decay or None,
        "late_quantization": {"start": cfg.qat_start, **asdict(cfg.quant)} if late else None,
    }
    make_optimizer = MuonAdamW
    if cfg.ema_decay:
        make_optimizer = partial(AveragingMuonAdamW, ema_decay=cfg.ema_decay)
    pretrain(
        cfg,
        adapt=lambda plain: cfg.golf_shape.apply(cfg.width.apply(plain)),
        callbacks=lambda m: [LateQuantization(m, cfg.quant, cfg.qat_start)] if late else [],
        max_seconds=cfg.max_wallclock_seconds,
        make_optimizer=make_optimizer,
        identity={name: value for name, value in identity.items() if value is not None},
        rules=cfg.rules,
    )


if __name__ == "__main__":
    start(main, GolfTrain(), __doc__)
