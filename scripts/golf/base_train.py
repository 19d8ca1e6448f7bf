"""
Pretrain a base model for a 16 MB artifact.

    python -m scripts.golf.base_train --depth=4 --qat_start=0.85 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.golf.base_train -- --depth=12 --max_wallclock_seconds=600

Reads   what scripts.base_train reads; it has the same flags and more
Writes  what scripts.base_train writes; scripts.export makes the artifact of it
"""

from dataclasses import asdict, dataclass, field

from nanochat.config import start
from nanochat.golf.qat import LateQuantization
from nanochat.golf.quantize import QuantConfig
from nanochat.gpt import GPT
from nanochat.train import Callback
from scripts.base_train import BaseTrain, pretrain


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
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.qat_start <= 1:
            raise ValueError(f"qat_start is a share of the run, 0 to 1, got {self.qat_start}")
        if self.max_wallclock_seconds is not None and not self.max_wallclock_seconds > 0:
            raise ValueError(
                f"max_wallclock_seconds must be positive, got {self.max_wallclock_seconds}"
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")


def main(cfg: GolfTrain) -> None:
    late = cfg.qat_start < 1
    quantization = {"start": cfg.qat_start, **asdict(cfg.quant)}
    identity = {
        "max_wallclock_seconds": cfg.max_wallclock_seconds,
        "ema_decay": cfg.ema_decay or None,
        "late_quantization": quantization if late else None,
    }

    def callbacks(model: GPT) -> list[Callback]:
        named = dict(model.named_parameters())
        return [LateQuantization(named, cfg.quant, cfg.qat_start)] if late else []

    pretrain(
        cfg,
        callbacks=callbacks,
        max_seconds=cfg.max_wallclock_seconds,
        ema_decay=cfg.ema_decay,
        identity={name: value for name, value in identity.items() if value is not None},
    )


if __name__ == "__main__":
    start(main, GolfTrain(), __doc__)
