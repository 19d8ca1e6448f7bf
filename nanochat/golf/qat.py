"""
Training additions for parameter golf: late quantization-aware training and an EMA of the weights.

    quantized_weights(model) -> the forward and backward passes of a step see quantized weights
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
from nanochat.optim import MuonAdamW, gather


@contextmanager
@torch.no_grad()
def quantized_weights(model: nn.Module, cfg: QuantConfig) -> Iterator[None]:
    """
    Within this context, every weight has its `quantize_dequantize` values; gradients update the
    original ones. Only values change, not the graph: nothing is recompiled. Once per step.
    """
    params = dict(model.named_parameters())
    kept = {name: p.clone() for name, p in params.items()}
    for name, form in cfg.formats(params).items():
        params[name].copy_(quantize_dequantize(params[name], form, cfg))
    try:
        yield
    finally:
        for name, p in params.items():
            p.copy_(kept[name])


class AveragingMuonAdamW(MuonAdamW):
    """
    MuonAdamW with an exponential moving average of the weights (`ema_decay`, 0 = none), and
    optionally `decoupled` instead of cautious weight decay of the matrices: it neither depends on
    the update nor fades.
    """

    def __init__(self, *args: Any, ema_decay: float = 0.0, decoupled: bool = False):
        super().__init__(*args)
        self.ema_decay = ema_decay
        for group in self.param_groups:
            if decoupled and group["kind"] == "muon":
                group |= {"decoupled_decay": group["weight_decay"], "weight_decay": 0.0}
            if ema_decay:
                weight = self.local_shard(group, group["params"])
                self.state[group["params"][0]]["average"] = weight.clone()

    def update(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        if decay := group.get("decoupled_decay"):
            weight.mul_(1 - group["lr"] * decay)
        super().update(group, weight, grad)
        if self.ema_decay:
            step = self.steps_taken  # lower decay at first, to forget the initial weights
            decay = min(self.ema_decay, (1 + step) / (10 + step))
            self.state[group["params"][0]]["average"].lerp_(weight, 1 - decay)

    @torch.no_grad()
    def take_average(self) -> None:
        """Replace the weights with their average, if any."""
        for group in self.param_groups if self.ema_decay else ():
            average = self.state[group["params"][0]]["average"]
            whole = gather(average, self.dist) if group["sharded"] else average
            self.assign(group, whole)
