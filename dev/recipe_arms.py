"""
Leave-one-out study of the recipe: run a script without one group of the recipe's parts.

    python -m dev.recipe_arms no_smear base_train --depth=4 --max_seq_len=512 \
        --total_batch_size=4096 --num_iterations=960 --seed=0 --model_tag=no_smear-0
    python -m dev.recipe_arms no_smear base_loss --model_tag=no_smear-0     # its document bpb

The arms are no_smear, no_backout, no_muon_variants, no_schedules and no_gates. Train each with
several seeds, and the whole recipe with scripts.base_train; scripts.lab.compare compares them.
"""

import runpy
import sys
from dataclasses import replace
from typing import Any

import torch

from nanochat import gpt, optim, scaling


class OldGate(gpt.Linear):
    """A value gate of 2 sigmoid(x), about 1 at first, where the model applies 3 sigmoid."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logit(2 / 3 * torch.sigmoid(super().forward(x)))


def leave_out(arm: str) -> None:
    """Replace functions of the recipe. Raises ValueError for an unknown arm."""
    shape, rules, attention = scaling.shape_for_depth, scaling.make_rules, gpt.Attention.__init__

    def shape_without_part(*args: Any) -> gpt.GPTConfig:
        return replace(shape(*args), **{arm.removeprefix("no_"): False})

    def rules_without_decay(*args: Any, **factors: float) -> dict[str, optim.Rule]:
        found = rules(*args, **factors)
        return found | {"residual": replace(found["residual"], weight_decay=0.0)}

    def attention_with_old_gate(self: gpt.Attention, cfg: gpt.GPTConfig, layer: int) -> None:
        attention(self, cfg, layer)
        if self.gate is not None:
            self.gate.__class__ = OldGate

    if arm in ("no_smear", "no_backout"):
        scaling.shape_for_depth = shape_without_part
    elif arm == "no_muon_variants":
        optim.equalize_rows = optim.fix_norm = lambda g: g
        optim.equalize_variance = lambda g, second: g
    elif arm == "no_schedules":
        optim.muon_momentum = lambda step, n, cfg: 0.85 + 0.1 * min(1.0, step / min(300, n // 3))
        optim.decay_factor = lambda step, n: 1 - step / n
        scaling.make_rules = rules_without_decay
    elif arm == "no_gates":
        gpt.VALUE_CHANNELS, gpt.Attention.__init__ = 32, attention_with_old_gate
    else:
        raise ValueError(f"unknown arm {arm!r}")


if __name__ == "__main__":
    _, arm, script, *flags = sys.argv
    leave_out(arm)
    sys.argv = [script, *flags]
    runpy.run_module(f"scripts.{script}", run_name="__main__")  # imports what was replaced
