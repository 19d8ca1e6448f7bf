"""
Train with an injected hardware fault: python -m tests.faulty <fault> <rank> <step> <flags>

Runs scripts.base_train; the fault occurs before one step on one rank. Faults: `nan` (a gradient),
`flip` (a bit of a weight).
"""

import math
import sys

import torch

from nanochat import train
from nanochat.distributed import DistContext
from nanochat.train import TrainingRun

FAULT, RANK, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plain_step = train.train_step


def inject(run: TrainingRun) -> None:
    """Inject the fault."""
    # a replicated weight: sharded ones are re-gathered at every step
    weight = next(g["params"][0] for g in run.optimizer.param_groups if not g["sharded"])
    if FAULT == "nan":
        weight.register_hook(lambda grad: grad * math.nan)
    else:
        weight.data.view(torch.int32).view(-1)[0] ^= 1 << 20


def faulty_step(run: TrainingRun, step: int, *rest):
    machine: DistContext = run.machine
    if machine.rank == RANK and step == STEP:
        inject(run)
    return plain_step(run, step, *rest)


if __name__ == "__main__":
    train.train_step = faulty_step
    train.CHECK_RANKS_EVERY = 5
    from nanochat.config import start
    from scripts.base_train import BaseTrain, pretrain

    sys.argv[1:4] = []
    start(pretrain, BaseTrain(), __doc__)
