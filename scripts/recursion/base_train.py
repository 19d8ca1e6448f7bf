"""
Pretrain a recursive base model, which applies its middle layers several times.

    python -m scripts.recursion.base_train --depth=4 --recursion_preset=share2 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.recursion.base_train -- --depth=24 --n_loops=2

Reads   the inputs of scripts.base_train; accepts its flags and more
Writes  the outputs of scripts.base_train
"""

from dataclasses import dataclass, field

from nanochat.common import is_main_process
from nanochat.config import start
from nanochat.recursion.metrics import LoopValidation
from nanochat.recursion.presets import RecursionConfig, WidthConfig
from scripts.base_train import BaseTrain, pretrain


@dataclass(frozen=True)
class RecursionTrain(BaseTrain):
    width: WidthConfig = field(default_factory=WidthConfig)
    recursion: RecursionConfig = field(default_factory=RecursionConfig)


def main(cfg: RecursionTrain) -> None:
    if not cfg.recursion.given():
        return pretrain(cfg, cfg.width.apply)
    if (warning := cfg.recursion.warning()) and is_main_process():
        print(warning, flush=True)
    pretrain(cfg, lambda plain: cfg.recursion.apply(cfg.width.apply(plain)), LoopValidation)


if __name__ == "__main__":
    start(main, RecursionTrain(), __doc__)
