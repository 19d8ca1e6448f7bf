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
from nanochat.optim import MuonAdamW, gather
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
    def take_average(self) -> bool:
        """Replace the weights with their average, if any. Returns whether there is one."""
        for group in self.param_groups if self.ema_decay else ():
            average = self.state[group["params"][0]]["average"]
            whole = gather(average, self.machine) if group["sharded"] else average
            for param, x in zip(group["params"], self.unstack(group, whole), strict=True):
                param.copy_(x)
        return self.ema_decay > 0
