"""
What golf adds to training: late quantization, and an average of the weights.

    share of the run done -> LateQuantization.forward_context -> weights on their grid, then back
    weights after each step -> AveragingMuonAdamW -> their average at the end of the run

In late quantization the forward pass sees the weights as the artifact stores them; gradients move
the weights themselves (a straight-through estimator, arXiv:1308.3432).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanochat.golf.quantize import QuantConfig, as_stored
from nanochat.optim import MuonAdamW, ParamGroup
from nanochat.train import Callback


class LateQuantization(Callback):
    """
    Quantization-aware training from `start`, a share of the run, on.

    Entered around the gradients of a step, it puts `as_stored` in place of every weight, and the
    weights back afterwards: what the forward pass sees is on the grid, its gradients move the
    weights off it. It changes values, not the program, so nothing is compiled anew and nothing can
    be folded away. The work is once per step, not once per micro-batch.
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
                p.copy_(as_stored(p, self.formats[name], self.cfg))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(kept[name])


class AveragingMuonAdamW(MuonAdamW):
    """A MuonAdamW that keeps an exponential moving average of the weights, of decay `ema_decay`."""

    def __init__(self, *args: Any, ema_decay: float):
        super().__init__(*args)
        self.ema_decay = ema_decay
        for group in self.groups:
            group.state["average"] = group.weight().clone()

    def update(self, group: ParamGroup, weight: Tensor, *settings: float) -> None:
        super().update(group, weight, *settings)
        step = self.steps_taken  # less at first, to forget the start
        kept = min(self.ema_decay, (1 + step) / (10 + step))
        group.state["average"].lerp_(weight, 1 - kept)

    @torch.no_grad()
    def take_average(self) -> bool:
        for group in self.groups:
            group.unstack_into(group.params, self.gather_state(group, "average"))
        return True
