"""
Training on conversations: what midtraining and supervised fine-tuning do alike.

    parent checkpoint + conversations -> packed chat rows -> Stage -> bits per byte of the answers

Every conversation in a row sees only itself, so packing changes no loss and no gradient. Knows no
tasks: scripts hand in conversations and a description of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from nanochat.chat_rows import (
    Conversations,
    open_chat_rows,
    pack_conversations,
    split_rows,
)
from nanochat.checkpoint import Checkpoint, load_model
from nanochat.eval_bpb import Interrupted, bits_per_byte
from nanochat.gpt import GPT
from nanochat.loss import IGNORE
from nanochat.machine import Machine
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.rows import Rows
from nanochat.stage import Evaluate, Stage
from nanochat.tokenizer import Tokenizer


class Apart:
    """A model that keeps the conversations of a row apart: a BOS begins a new one."""

    def __init__(self, model: GPT, bos_id: int):
        self.model, self.bos_id = model, bos_id

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats summed over the counted targets."""
        return self.model.loss(tokens, targets, self.segments(tokens))

    def token_losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target."""
        return self.model.token_losses(tokens, targets, self.segments(tokens))

    def segments(self, tokens: Tensor) -> Tensor:
        """The number of the conversation that each token of its row belongs to."""
        return (tokens == self.bos_id).cumsum(dim=1)


@dataclass(frozen=True)
class Talk:
    """What is learned: conversations for training and validation, and what describes them."""

    train: Conversations
    val: Conversations
    description: Mapping[str, Any]
    """JSON-ready; decides which conversations there are, and in which order."""


@dataclass(frozen=True)
class Plan:
    """How a parent goes on learning."""

    num_iterations: int | None
    num_epochs: float
    """How often the rows are gone through, where the number of steps is not given."""
    total_batch_size: int | None
    """Tokens per step; None as the parent."""
    max_seq_len: int | None
    """None as the parent."""
    init_lr_frac: float
    """All rates, as a fraction of those of pretraining."""
    warm_start: bool
    """Begin with the parent's optimizer state."""
    eval_tokens: int
    """Validation tokens per evaluation; at most all there are."""


class AnswerLoss:
    """Measures validation rows at the loop's cadence, and remembers the last measurement."""

    def __init__(self, model: Apart, rows: Rows, tokenizer: Tokenizer, machine: Machine, n: int):
        self.model, self.rows, self.machine, self.num_rows = model, rows, machine, n
        self.token_bytes = tokenizer.token_bytes()
        self.bos_id = tokenizer.bos_id
        self.loss = math.nan
        """Nats per counted token."""

    def batches(self, rows_per_pass: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of this rank, each of exactly `rows_per_pass` rows."""
        machine, T = self.machine, self.rows.max_seq_len
        mine = self.rows.val_batches(rows_per_pass, self.num_rows, machine.rank, machine.world_size)
        for rows in mine:
            blank = np.full((rows_per_pass - len(rows), T + 1), ~self.bos_id, rows.dtype)
            yield split_rows(np.concatenate([rows, blank]), IGNORE)

    def evaluation(self, rows_per_pass: int) -> Evaluate:
        """What `Stage` asks for."""

        def evaluate(step: int, stopping: Callable[[], bool]) -> dict[str, float] | None:
            batches = self.batches(rows_per_pass)
            try:
                found = bits_per_byte(self.model, batches, self.token_bytes, self.machine, stopping)
            except Interrupted:
                return None
            self.loss = found.nats / found.tokens if found.tokens else math.nan
            return {"val_bpb": found.value, "val_loss": self.loss}

        return evaluate


@dataclass(frozen=True)
class Tuning:
    """A stage that is ready to be carried out, and what its script reports of it."""

    stage: Stage
    answers: AnswerLoss
    num_rows: int
    """Training rows."""


def chat_rows(talk: Talk, tokenizer: Tokenizer, max_seq_len: int, machine: Machine) -> Rows:
    """The packed rows of what is learned; the main process of each machine packs."""
    rows = open_chat_rows(talk.description, tokenizer, max_seq_len, machine.print0)
    if machine.local_rank == 0:
        for shard, conversations in (("train", talk.train), ("val", talk.val)):
            pack_conversations(rows, shard, conversations, tokenizer)
    machine.barrier()
    return rows


def tuning(
    kind: Literal["mid", "sft"],
    parent: Checkpoint,
    talk: Talk,
    plan: Plan,
    optim: OptimConfig,
    machine: Machine,
    run_id: str,
    seed: int,
) -> Tuning:
    """
    Everything that continuing `parent` on conversations needs.

    Raises ValueError for a batch that is no whole number of rows on every device.
    """
    model = load_model(parent, machine, plan.max_seq_len)
    tokenizer = Tokenizer.read(parent.folder / "tokenizer.json")
    T = model.cfg.max_seq_len
    rows = chat_rows(talk, tokenizer, T, machine)
    num_rows = rows.packed_train_rows

    batch_tokens = plan.total_batch_size or parent.state["identity"]["batch_tokens"]
    unit = T * machine.world_size
    if batch_tokens % unit:
        raise ValueError(
            f"total_batch_size {batch_tokens} is not a whole number of rows of {T} tokens on each "
            f"of {machine.world_size} devices; use {max(1, round(batch_tokens / unit)) * unit}"
        )
    steps = plan.num_iterations or round(plan.num_epochs * num_rows * T / batch_tokens)
    table = {
        role: replace(rule, lr=rule.lr * plan.init_lr_frac)
        for role, rule in rules(optim, model.cfg.d_model).items()
    }
    optimizer = MuonAdamW(dict(model.named_parameters()), model.param_roles(), table, machine)
    if plan.warm_start:
        optimizer.load_state_dict(parent.optim_tensors())
    apart = Apart(model, tokenizer.bos_id)
    answers = AnswerLoss(apart, rows, tokenizer, machine, max(1, plan.eval_tokens // T))
    inputs = {**parent_inputs(parent), "rows": rows.fingerprint}
    stage = Stage(
        kind=kind,
        model=model,
        trainable=apart,
        optimizer=optimizer,
        tokenizer=tokenizer,
        rows=rows,
        num_steps=max(1, steps),
        batch_tokens=batch_tokens,
        split=lambda batch: split_rows(batch, IGNORE),
        evaluation=answers.evaluation,
        identity={"parent": parent.fingerprint},
        state={
            "source": parent.state["source"],
            "mixture": dict(talk.description),
            "provenance": {"run_id": run_id, "seed": seed, "inputs": inputs},
        },
        run_id=run_id,
    )
    return Tuning(stage, answers, num_rows)


def parent_inputs(parent: Checkpoint) -> dict[str, str]:
    """What a stage that starts from `parent` has read, as its record names it."""
    inputs = parent.state["provenance"]["inputs"]
    return {parent.state["stage"]: parent.fingerprint, "tokenizer": inputs["tokenizer"]}
