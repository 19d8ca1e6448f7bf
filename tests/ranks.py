"""
Run by test_distributed.py under torchrun: checks that the ranks of a run agree.

Trains a tiny model with sharded embeddings, uneven masks and different allocator states.
Prints a JSON list of each rank's learning rates, losses, gradient norms and parameter digest.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanochat import attention, mixture
from nanochat.checkpoint import CheckpointManager, Progress, SavingConfig, build_model
from nanochat.common import MissingInput
from nanochat.distributed import DistConfig, DistContext, init_distributed
from nanochat.loss import IGNORE
from nanochat.mixture import Corpus
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.preflight import KernelConfig, rehearse_update, set_kernels
from nanochat.scaling import make_rules
from nanochat.train import TrainConfig, TrainingRun, run_loop
from tests.conftest import TINY
from tests.test_train import TOKENIZER, Given

ROWS, T, STEPS = 8, TINY.max_seq_len, 6


def all_rows(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with varying numbers of targets: row i keeps its last 2 * i."""
    ids = np.random.default_rng(step).integers(0, 64, (ROWS, T + 1))
    tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    for i in range(ROWS):
        targets[i, : T - 2 * i] = IGNORE
    return tokens, targets


def check_work_for_others(machine: DistContext) -> None:
    """One rank runs the work; all ranks get its result or error."""
    for share in (machine.on_main, machine.on_node):
        done: list[int] = []
        assert share("counting", lambda done=done: done.append(1) or machine.rank) == 0
        assert done == [1] * (machine.rank == 0)

        def fail() -> None:
            raise MissingInput(f"nothing on rank {machine.rank}", "make it")

        try:
            share("failing", fail)
            raise AssertionError("no error raised")
        except MissingInput as error:
            assert str(error) == "nothing on rank 0\n  run:  make it"


def check_errors_of_one_rank(machine: DistContext) -> None:
    """Errors while packing text or moving earlier checkpoints aside are raised on all ranks."""

    def fail(*args: object) -> None:
        raise MissingInput(f"no disk on rank {machine.rank}", "buy one")

    mixture.ensure_packed = fail  # type: ignore
    texts: Any = SimpleNamespace(sources={"text": None})
    corpus: Any = Corpus(texts, TOKENIZER, {"text": None})  # type: ignore
    checkpoints: Any = CheckpointManager(Path("earlier"), machine, SavingConfig())
    checkpoints.move_aside = fail
    for work in (
        lambda: corpus.pack({"text": 1}, machine),
        lambda: checkpoints.begin({}, None, None, num_steps=1),
    ):
        try:
            work()
            raise AssertionError("no error raised")
        except MissingInput as error:
            assert str(error) == "no disk on rank 0\n  run:  buy one"


def main() -> None:
    machine = init_distributed(DistConfig("cpu", "float32"))
    check_work_for_others(machine)
    check_errors_of_one_rank(machine)
    share = ROWS // machine.world_size
    mine = slice(machine.rank * share, (machine.rank + 1) * share)
    shape = replace(TINY, vocab_size=1027)  # large enough to be sharded, and not divisible
    model = build_model(shape, machine.device, machine.dtype, seed=0)
    if machine.rank == 1:  # a kernel that fails on one rank is used on none
        attention.attend_sdpa = lambda *_: 1 / 0  # type: ignore
    # estimates differ by rank: if each rank decided alone, only some would compile
    assert not set_kernels(KernelConfig(), model, machine, seconds=1e9 * machine.rank)
    backend = "sdpa" if machine.world_size == 1 else "plain"
    assert {block.attention.backend for block in model.blocks} == {backend}
    named = dict(model.named_parameters())
    table = make_rules(OptimConfig(weight_decay=0.1), TINY.d_model)
    optimizer = MuonAdamW(model, table, machine)
    rates, losses, norms = [], [], []

    def rows(step: int) -> tuple[np.ndarray, np.ndarray]:
        churn = [torch.empty(int(n)) for n in np.random.default_rng(step).integers(1, 1 << 20, 50)]
        del churn[:: 1 + machine.rank]  # different allocator state on each rank
        return tuple(x[mine] for x in all_rows(step))  # type: ignore

    def log(step: int, values: dict) -> None:
        if "loss" in values:
            rates.append(values["lr"])
            losses.append(values["loss"])
            norms.append(values["grad_norm"])

    model.loss(*map(torch.from_numpy, rows(0))).backward()
    moments = [x for state in optimizer.state.values() for x in state.values()]
    kept = [x.clone() for x in (*named.values(), *moments)]
    rehearse_update(optimizer, machine)
    now = (*named.values(), *moments)
    assert all(torch.equal(x, before) for x, before in zip(now, kept, strict=True))
    schedule = ScheduleConfig(warmup_steps=2)
    run = TrainingRun(
        "base", model, TOKENIZER, optimizer, Given(rows), machine, TrainConfig(), "ranks", STEPS,
        schedule, device_rows=2, log=log,
    )  # fmt: skip
    run_loop(run, Progress())
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    result = {
        "rank": machine.rank,
        "rates": rates,
        "losses": losses,
        "norms": norms,
        "digest": digest.hexdigest(),
    }
    results = machine.gather(result)
    if machine.is_main:
        print("RESULT " + json.dumps(results))
    machine.close()


if __name__ == "__main__":
    sys.exit(main())
