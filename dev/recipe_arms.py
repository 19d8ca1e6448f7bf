"""
Leave-one-out study of the recipe: train small models without one group of its parts.

    python -m dev.recipe_arms full 0 1 2              # arm, then seeds
    OMP_NUM_THREADS=1 python -m dev.recipe_arms no_smear 0 --depth=6

Trains on the packed rows of `scripts.data --max_seq_len=512` (the first shard) with a batch of
4,096 tokens and prints the document bpb of the validation text: one BOS, then windows of 512 tokens
without overlap. Prints one JSON line per run.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nanochat import gpt, optim
from nanochat.common import base_dir
from nanochat.dataset import DataConfig, load_last_source
from nanochat.distributed import DistContext, default_dtype
from nanochat.eval_bpb import document_bpb
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.rows import inputs_and_targets, open_rows
from nanochat.scaling import Horizon, scaled_rules, shape_for_depth
from nanochat.tokenizer import Tokenizer
from tasks.builtin import open_text

ROWS = 8  # per step


class OldGate(gpt.Linear):
    """A value gate of 2 sigmoid(x), 1 at first, where the model applies 3 sigmoid."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logit(2 / 3 * torch.sigmoid(super().forward(x)))


def leave_out(arm: str, cfg: gpt.GPTConfig) -> gpt.GPTConfig:
    """Apply an arm by replacing functions of the recipe; returns the configuration to train."""
    if arm in ("no_smear", "no_backout"):
        return replace(cfg, **{arm.removeprefix("no_"): False})
    if arm == "no_muon_variants":
        optim.equalize_rows = lambda g: g
        optim.equalize_variance = lambda g, second: g
        optim.fix_norm = lambda g: g
    elif arm == "no_schedules":
        optim.muon_momentum = lambda step, n, cfg: 0.85 + 0.1 * min(1.0, step / min(300, n // 3))
        optim.decay_factor = lambda step, n: 1 - step / n
    elif arm == "no_gates":
        gpt.VALUE_CHANNELS = 32
    elif arm != "full":
        raise ValueError(f"unknown arm {arm!r}")
    return cfg


def rules_of(arm: str, rules: dict[str, optim.Rule]) -> dict[str, optim.Rule]:
    """Rules of an arm that leaves out decays."""
    if arm == "no_schedules":
        rules["residual"] = replace(rules["residual"], weight_decay=0.0)
    return rules


def train(arm: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    """Train one model and score it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(device)
    dist = DistContext(0, 0, 1, device, dtype)
    tokenizer = Tokenizer.load("main")
    source = open_text(DataConfig(), load_last_source("main"))
    rows = open_rows(source, tokenizer, 512)
    cfg = leave_out(arm, shape_for_depth(args.depth, tokenizer.vocab_size, 512))
    torch.manual_seed(seed)
    model = GPT(cfg, dtype).to(device)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    for block in model.blocks if arm == "no_gates" else ():
        if block.attention.gate is not None:
            block.attention.gate.__class__ = OldGate
            torch.nn.init.zeros_(block.attention.gate.weight)
    horizon = Horizon(args.steps, ROWS * 512)
    rules = rules_of(arm, scaled_rules(OptimConfig(), horizon, cfg.d_model))
    optimizer, schedule = MuonAdamW(model, rules, dist), ScheduleConfig()
    for block in model.blocks:
        block.attention.backend = "flex" if device.type == "cuda" else "blocks"
    model.compile()
    optimizer.compiled = True
    started, losses = time.perf_counter(), []
    for step in range(args.steps):
        ids = rows.row_ids(step, ROWS, seed)
        x, y = (torch.from_numpy(z).to(device) for z in inputs_and_targets(rows.read(ids)))
        loss = model.loss(x, y) / (y >= 0).sum()
        loss.backward()
        norm = optimizer.reduce_gradients()
        factor = optim.lr_factor(step, args.steps, schedule)
        momentum = optim.muon_momentum(step, args.steps, schedule)
        decay = optim.decay_factor(step, args.steps)
        optim.set_schedule(optimizer, factor, momentum, decay)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 60 == 0 or step == args.steps - 1:
            seconds = time.perf_counter() - started
            print(f"{arm} {seed} step {step} loss {np.mean(losses[-60:]):.4f} norm {norm:.3f} "
                  f"{seconds:.0f} s", flush=True)  # fmt: skip
    train_seconds = time.perf_counter() - started
    documents = list(source.texts(source.val_shard, args.documents))
    found = document_bpb(model, documents, tokenizer, 512, 16, dist).value
    return {
        "arm": arm,
        "seed": seed,
        "depth": args.depth,
        "steps": args.steps,
        "parameters": model.num_params(),
        "dtype": str(dtype),
        "document_bpb": found,
        "documents": len(documents),
        "last_loss": float(np.mean(losses[-60:])),
        "train_seconds": train_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arm")
    parser.add_argument("seeds", nargs="+", type=int)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--documents", type=int, default=None)
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args()
    out = Path(base_dir()) / "recipe_arms.jsonl"
    for seed in args.seeds:
        line = json.dumps(train(args.arm, seed, args))
        print(line, flush=True)
        with out.open("a") as stream:
            stream.write(line + "\n")


if __name__ == "__main__":
    main()
