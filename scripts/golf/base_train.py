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
from scripts.base_train import BaseTrain, pretrain


@dataclass(frozen=True)
class GolfTrain(BaseTrain):
    qat_start: float = 1.0
    """Share of the run from which the forward pass sees the weights as --quantize would store them;
    1 = never."""
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.qat_start <= 1:
            raise ValueError(f"qat_start is a share of the run, 0 to 1, got {self.qat_start}")


def main(cfg: GolfTrain) -> None:
    if cfg.qat_start == 1:
        return pretrain(cfg)
    pretrain(
        cfg,
        callbacks=lambda model: [
            LateQuantization(dict(model.named_parameters()), cfg.quant, cfg.qat_start)
        ],
        choices={"late_quantization": {"start": cfg.qat_start, **asdict(cfg.quant)}},
    )


if __name__ == "__main__":
    start(main, GolfTrain(), __doc__)
