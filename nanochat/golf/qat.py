"""
Training additions for parameter golf: late quantization-aware training and an EMA of the weights.

    fraction of the run -> LateQuantization.forward_context -> quantized weights in the forward pass
    weights after each step -> AveragingMuonAdamW -> their EMA at the end of the run

Late quantization runs the forward pass on the weights as the artifact stores them; gradients update
the original weights (straight-through estimator, arXiv:1308.3432).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanochat.golf.quantize import QuantConfig, quantize_dequantize
from nanochat.optim import Guard, MuonAdamW, ParamGroup, gather
from nanochat.train import Callback


class LateQuantization(Callback):
    """
    Quantization-aware training after a fraction `start` of the run.

    `forward_context` wraps the forward and backward passes of a step: it replaces every weight with
    its `quantize_dequantize` values and restores it afterward. Only values change, not the graph:
    nothing is recompiled or constant-folded. Runs once per step, not per micro-batch.
    """

    def __init__(self, model: nn.Module, cfg: QuantConfig, start: float):
        self.params, self.cfg, self.start_share = dict(model.named_parameters()), cfg, start
        self.formats = cfg.formats(self.params)

    @contextmanager
    def forward_context(self, share: float) -> Iterator[None]:
        if share < self.start_share:
            yield
            return
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self.params.items()}
            for name, p in self.params.items():
                p.copy_(quantize_dequantize(p, self.formats[name], self.cfg))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(kept[name])


class AveragingMuonAdamW(MuonAdamW):
    """MuonAdamW with an exponential moving average of the weights."""

    def __init__(self, *args: Any, ema_decay: float):
        super().__init__(*args)
        self.ema_decay = ema_decay
        for group in self.groups:
            group.state["average"] = group.weight().clone()

    def update(self, group: ParamGroup, weight: Tensor, guard: Guard, *settings: float) -> None:
        super().update(group, weight, guard, *settings)
        step = self.steps_taken  # lower decay at first, to forget the initial weights
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        group.state["average"].lerp_(weight, (1 - decay) * guard.good)

    @torch.no_grad()
    def take_average(self) -> bool:
        for group in self.groups:
            average = group.state["average"]
            if group.sharded:
                with self.machine.waiting("all-gather of averaged weights"):
                    average = gather(average, self.machine)
                    self.machine.synchronize()
            group.assign(average)
        return True
