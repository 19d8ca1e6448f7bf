"""
Show how a training loss can inflate the refinement metric: four losses of a toy recursive model.

    python -m dev.refinement_toy

Tokens follow a random first-order Markov chain, so the best possible loss is known. In "not
detached", the gradient of the improvement bonus also reaches the previous loop, as with
supervise="undetached" of nanochat/recursion/model.py. Prints a table; takes minutes on one core.
"""

import math
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.checkpoint import build_model
from nanochat.recursion.metrics import refinement
from nanochat.recursion.model import RecursiveConfig

V, T, ROWS, STEPS, LOOPS = 32, 32, 16, 400, 4
SHAPE = RecursiveConfig(
    V,
    n_layer=4,
    d_model=64,
    n_head=2,
    n_kv_head=2,
    head_dim=32,
    max_seq_len=T,
    n_prelude=1,
    n_core=2,
    n_coda=1,
    n_loops=LOOPS,
    supervise="full",
)
LOSSES = (
    "last loop only",
    "uniform mean",
    "extreme, detached and clamped",
    "extreme, not detached",
)


def chain(generator: torch.Generator) -> Tensor:
    """Transition probabilities (V, V), concentrated on a few tokens per row."""
    return torch.softmax(2.0 * torch.randn(V, V, generator=generator), dim=1)


def draw(transitions: Tensor, generator: torch.Generator) -> Tensor:
    """Sample sequences (ROWS, T + 1) from the chain."""
    ids = [torch.randint(V, (ROWS,), generator=generator)]
    for _ in range(T):
        ids.append(torch.multinomial(transitions[ids[-1]], 1, generator=generator)[:, 0])
    return torch.stack(ids, dim=1)


def floor(transitions: Tensor, ids: Tensor) -> float:
    """Cross-entropy of `ids` under the true chain, in nats per token; the expected optimum."""
    return float(-transitions.log()[ids[:, :-1], ids[:, 1:]].mean())


def losses_of(model, ids: Tensor) -> list[Tensor]:
    """Cross-entropy of each loop, in nats per token."""
    ctx = model.prepare(ids[:, :-1])
    states = enumerate(model.states(ctx, LOOPS), start=1)
    logits = [model.logits(model.read_out(ctx, state, k)) for k, state in states]
    return [F.cross_entropy(x.mT, ids[:, 1:]) for x in logits]


def objective(name: str, found: list[Tensor]) -> Tensor:
    """Training loss `name`, given each loop's loss."""
    if name == "last loop only":
        return found[-1]
    if name == "uniform mean":
        return torch.stack(found).mean()
    shares = [10.0**k for k in range(LOOPS)]
    total = sum(s / sum(shares) * loss for s, loss in zip(shares, found, strict=True))
    for k, (before, after) in enumerate(zip(found, found[1:], strict=False), start=1):
        if name == "extreme, not detached":
            total = total - 2.0 * (before - after) / before
        else:
            extra = (2.0 / before.detach()).clamp(max=4 * shares[k] / sum(shares))
            total = total + extra * after
    return torch.as_tensor(total)


def learn(name: str, seed: int) -> tuple[list[float], float]:
    """Train a model; return the held-out loss of each loop and that of the true chain."""
    generator = torch.Generator().manual_seed(seed)
    transitions = chain(generator)
    model = build_model(SHAPE, torch.device("cpu"), torch.float32, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        objective(name, losses_of(model, draw(transitions, generator))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held = [draw(transitions, generator) for _ in range(16)]
    with torch.no_grad():
        by_loop = [[float(x) for x in losses_of(model, ids)] for ids in held]
    best = statistics.mean(floor(transitions, ids) for ids in held)
    return [statistics.mean(column) for column in zip(*by_loop, strict=True)], best


def main() -> None:
    torch.set_num_threads(1)
    print(f"uniform distribution: {math.log(V):.3f} nats")
    print("| loss | first loop | last loop above optimum | refinement % |")
    print("|---|---|---|---|")
    for name in LOSSES:
        runs = [learn(name, seed) for seed in range(3)]
        first = ", ".join(f"{loops[0]:.3f}" for loops, _ in runs)
        last = ", ".join(f"{loops[-1] - best:.4f}" for loops, best in runs)
        percent = ", ".join(f"{refinement(loops):.1f}" for loops, _ in runs)
        print(f"| {name} | {first} | {last} | {percent} |", flush=True)


if __name__ == "__main__":
    main()
