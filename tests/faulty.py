"""
Faults during training: `during_step` in this process, or a script with one of FAULTS on one rank,
or with the rewards of `grade`, or the optimizer of `use_lion`, on all:

    python -m tests.faulty <fault> <rank or all> <script> <flags>
"""

import math
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from nanochat import optim, rl, scaling
from nanochat.common import REPOSITORY
from nanochat.gpt import GPT
from nanochat.run import Run
from nanochat.tokenizer import Tokenizer


def during_step(
    action: Callable[..., Any], patch: Callable[..., None] = setattr, method: str = "loss"
) -> None:
    """
    Call `action(now, model, tokens, loss)` after each forward pass of training, or of validation if
    the method is `token_losses`. A result replaces the loss. `now.step` is the number of completed
    steps. patch: setattr, or that of monkeypatch.
    """
    now = SimpleNamespace(step=0)
    plain_method, plain_update = getattr(GPT, method), Run.update

    def loss(model: GPT, tokens: torch.Tensor, *rest: Any, **options: Any) -> Any:
        result = plain_method(model, tokens, *rest, **options)
        changed = action(now, model, tokens, result)
        return result if changed is None else changed

    def update(run: Run, *rest: Any, **metrics: float) -> None:
        plain_update(run, *rest, **metrics)
        now.step = run.progress.step

    patch(GPT, method, loss)
    patch(Run, "update", update)


def corrupt(now: Any, model: GPT, tokens: torch.Tensor, loss: torch.Tensor) -> Any:
    """
    The loss of step 3 is not a number, and at step 6 a bit of a weight flips: of a small one, which
    no rank receives from another.
    """
    if now.step == 6:
        name, weight = next((n, p) for n, p in model.named_parameters() if p.ndim == 1 and p[0])
        weight.data.view(torch.int32)[0] ^= 1 << 20
        print(f"changed {name}", flush=True)
    return loss * math.nan if now.step == 3 else None


def crowd(now: Any, model: GPT, tokens: torch.Tensor, loss: torch.Tensor) -> None:
    """A micro-batch of more than two rows does not fit in memory."""
    if len(tokens) > 2:
        raise torch.OutOfMemoryError


def churn(now: Any, model: GPT, tokens: torch.Tensor, loss: torch.Tensor) -> None:
    """Allocate differently on each rank."""
    sizes = random.Random(now.step).choices(range(1 << 20), k=50)
    blocks = [torch.empty(size) for size in sizes]
    del blocks[:: 1 + int(os.environ["RANK"])]


def dawdle(now: Any, model: GPT, tokens: torch.Tensor, loss: torch.Tensor) -> None:
    """After step 3, the main rank takes 9 s longer to decode a sample."""
    plain = Tokenizer.decode

    def decode(*words: Any) -> str:
        print("decoding slowly", flush=True)
        time.sleep(9)
        Tokenizer.decode = plain
        return plain(*words)

    if now.step == 3:
        Tokenizer.decode = decode  # type: ignore


def edit(now: Any, model: GPT, tokens: torch.Tensor, loss: torch.Tensor) -> None:
    """At step 3, somebody edits a file of the running code and is not done yet."""
    if now.step == 3:
        (REPOSITORY / "nanochat" / "gpt.py").write_text("def (")


def grade(task: Any, i: int, answer: str) -> float:
    """A reward that untrained models get, too."""
    return float(len(answer) % 2)


def lion(weight, grad, first, second, scalars):  # type: ignore
    """An update rule of one's own. Source: Chen et al., 2023, arXiv:2302.06675."""
    lr, beta1, beta2, decay, _ = scalars
    step = grad.lerp(first, beta1).sign()
    first.lerp_(grad, 1 - beta2)
    weight.mul_(1 - lr * decay).sub_(lr * step)


def use_lion() -> None:
    """Update all but the layers by Lion, sharded, and log the norm of each gradient."""
    plain_rules, plain_update = scaling.make_rules, Run.update

    def make_rules(*args: Any, **options: Any) -> dict[str, optim.Rule]:
        rules = plain_rules(*args, **options)
        others = {n: replace(r, kind="lion", lr=r.lr / 100) for n, r in rules.items()}
        return {**others, "blocks": rules["blocks"]}

    def update(run: Run, *rest: Any, **metrics: float) -> None:
        norms = {f"norm {name}": x.norm().item() for name, x in run.gradients()}
        plain_update(run, *rest, **metrics, **norms)

    optim.UPDATES["lion"], optim.SHARDED_ROWS = lion, 64
    scaling.make_rules = make_rules
    Run.update = update  # type: ignore


FAULTS = {fault.__name__: fault for fault in (corrupt, crowd, churn, dawdle, edit)}

if __name__ == "__main__":
    fault, rank, script = sys.argv[1:4]
    sys.argv[1:4] = []
    if fault == "grade":
        rl.score_answer = grade
    elif fault == "lion":
        use_lion()
    elif rank in ("all", os.environ.get("RANK")):
        during_step(FAULTS[fault])
    runpy.run_module(f"scripts.{script}", run_name="__main__", alter_sys=True)
