"""
Recursive GPT: some of the layers form a core that is applied several times.

    tokens -> prelude -> e;  n_loops x [inject(e, state) -> core -> state];  state -> coda -> logits

Training can supervise every loop through coda and LM head (deep supervision); generation and the
value of `loss` use the last loop. Backout subtracts the output of the prelude. Sources: Tiny
Recursive Model arXiv:2510.04871, which refines answers to grid puzzles; depth recurrence in
language models arXiv:2502.05171.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nanochat.attention import CacheView, KVCache
from nanochat.golf.model import new_model as new_golf_model
from nanochat.golf.model import read_config as read_golf_config
from nanochat.gpt import GPT, GPTConfig, Linear, norm
from nanochat.loss import IGNORE, Loss, chunked_loss, cross_entropy, token_losses

Supervise = Literal["last", "sampled", "full"]
MAX_BONUS = 4.0  # upper bound on a bonus, relative to its loop's weight


@dataclass(frozen=True)
class RecursiveConfig(GPTConfig):
    """GPTConfig split into prelude, core and coda. Raises ValueError for invalid values."""

    n_prelude: int = 1
    n_core: int = 1
    n_coda: int = 1
    n_loops: int = 2
    """Number of times the core is applied."""
    supervise: Supervise = "last"
    """Loops with a loss. last: the last; sampled: the last and one drawn per step; full: all."""
    supervision_base: float = 3.0
    """Loop k has a weight proportional to supervision_base^k; the weights sum to one."""
    improvement_bonus: float = 0.0
    """A supervised loop's extra weight is this value divided by the detached loss of the previous
    supervised loop on the same row (nats per token), at most MAX_BONUS times its own weight."""
    bptt_loops: int | None = None
    """Detach the state before the last N loops; None = never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = (self.n_prelude, self.n_core, self.n_coda)
        if min(self.n_prelude, self.n_coda) < 0 or self.n_core < 1 or sum(parts) != self.n_layer:
            raise ValueError(
                f"n_prelude, n_core, n_coda {parts} must sum to n_layer ({self.n_layer}), with "
                "n_core >= 1 and none negative"
            )
        if self.n_loops < 1:
            raise ValueError(f"n_loops must be at least 1, got {self.n_loops}")
        if not 1 <= self.supervision_base <= 100:
            raise ValueError(f"supervision_base must be in [1, 100], got {self.supervision_base}")
        if not 0 <= self.improvement_bonus < float("inf"):
            raise ValueError(f"improvement_bonus must be >= 0, got {self.improvement_bonus}")
        if self.bptt_loops is not None and self.bptt_loops < 1:
            raise ValueError(f"bptt_loops must be at least 1, got {self.bptt_loops}")

    @property
    def prelude(self) -> range:
        """Layer indices of the prelude."""
        return range(self.n_prelude)

    @property
    def core(self) -> range:
        """Layer indices of the core."""
        return range(self.n_prelude, self.n_prelude + self.n_core)

    @property
    def coda(self) -> range:
        """Layer indices of the coda."""
        return range(self.n_prelude + self.n_core, self.n_layer)

    @property
    def n_passes(self) -> int:
        """Number of layers applied to a token, repeats included."""
        return self.n_layer + (self.n_loops - 1) * self.n_core

    def shares(self, loops: Sequence[int]) -> dict[int, float]:
        """Weights of the supervised loops, numbered from 1."""
        powers = {k: self.supervision_base ** (k - self.n_loops) for k in loops}
        return {k: power / sum(powers.values()) for k, power in powers.items()}

    def sampled_chance(self, loop: int) -> float:
        """Probability that a loop is supervised in a training step."""
        if loop == self.n_loops or self.supervise == "full":
            return 1.0
        return 1 / (self.n_loops - 1) if self.supervise == "sampled" else 0.0

    def learning_chance(self, loop: int) -> float:
        """Probability that a gradient flows through a loop's core pass."""
        cut = self.n_loops - (self.bptt_loops or self.n_loops)  # last loop before the detach
        if loop > cut or self.supervise == "full":
            return 1.0
        return sum(map(self.sampled_chance, range(loop, cut + 1)))


class Inputs(NamedTuple):
    """What the loops and the coda of one forward pass share."""

    x0: Tensor
    """Embedded tokens (B, T, C)."""
    e: Tensor
    """Output of the prelude (B, T, C)."""
    cache: CacheView | None
    layers: tuple[dict[int, Tensor], Any, dict[int | None, Any]]
    """Value embeddings, rotary embedding and masks of `GPT.layer_inputs`."""


class RecursiveGPT(GPT):
    """
    GPT whose core is applied `n_loops` times.

    Each loop combines the normalized state with the prelude output, which keeps the scale of core
    inputs constant. At initialization the state is ignored, and one loop equals the plain model.
    """

    cfg: RecursiveConfig

    def __init__(self, cfg: RecursiveConfig, dtype: torch.dtype = torch.float32):
        super().__init__(cfg, dtype)
        first: Any = self.blocks[cfg.n_prelude]  # so it is trained and counted like its matrices
        first.inject = Linear(2 * cfg.d_model, cfg.d_model)
        self.supervised: tuple[int, ...] = (cfg.n_loops,)
        self.noted: dict[str, Tensor] = {}
        """Sums over the micro-batches of a step: nats by loop, total loss, target count."""

    @property
    def inject(self) -> Linear:
        """The layer that combines prelude output and state, part of the first core layer."""
        first: Any = self.blocks[self.cfg.n_prelude]
        return first.inject

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        super().init_weights(generator)
        self.inject.weight.zero_()
        self.inject.weight[:, : self.cfg.d_model].fill_diagonal_(1.0)

    def begin_step(self, step: int, seed: int) -> None:
        """Choose the supervised loops of this step and reset the sums recorded by `loss`."""
        cfg = self.cfg
        self.supervised = (cfg.n_loops,)
        if cfg.supervise == "full":
            self.supervised = tuple(range(1, cfg.n_loops + 1))
        elif cfg.supervise == "sampled" and cfg.n_loops > 1:
            drawn = random.Random(f"loop-{seed}-{step}").randint(1, cfg.n_loops - 1)
            self.supervised = (drawn, cfg.n_loops)
        self.noted = {}

    # ---- counts ------------------------------------------------------------------------------

    def num_matmul_params(self) -> int:
        """As in GPT; the core counts once per loop."""
        core = sum(p.numel() for layer in self.cfg.core for p in self.blocks[layer].parameters())
        return super().num_matmul_params() + (self.cfg.n_loops - 1) * core

    def layer_flops(self, layer: int) -> int:
        """Training FLOPs of a layer per token, as `GPT.flops_per_token` counts them."""
        cfg, params = self.cfg, sum(p.numel() for p in self.blocks[layer].parameters())
        seen = min(cfg.max_seq_len, cfg.window(layer) or cfg.max_seq_len)
        return 6 * params + 12 * cfg.n_head * cfg.head_dim * seen

    def flops_per_token(self) -> float:
        """
        Expected training FLOPs per token over the sampled loops. A core pass without backward
        costs a third.
        """
        cfg = self.cfg
        head = (8 if cfg.improvement_bonus else 6) * self.head.weight.numel()  # 2: `token_losses`
        loops = range(1, cfg.n_loops + 1)
        once = sum(map(self.layer_flops, cfg.core))
        readout = sum(map(self.layer_flops, cfg.coda)) + head
        looped = once * sum((1 + 2 * cfg.learning_chance(k)) / 3 for k in loops)
        read = readout * sum(map(cfg.sampled_chance, loops))
        return sum(map(self.layer_flops, cfg.prelude)) + looped + read

    # ---- computation -------------------------------------------------------------------------

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        inputs = self.begin(tokens, cache, segments)
        *_, last = self.states(inputs, self.cfg.n_loops)
        return self.read_out(inputs, last, self.cfg.n_loops)

    def begin(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Inputs:
        """Embed the tokens and run the prelude. Arguments as in `hidden`."""
        x0 = self.smear_embeddings(norm(self.embed(tokens).to(self.dtype)), cache, segments)
        inputs = Inputs(x0, x0, cache, self.layer_inputs(tokens, cache, segments))
        return inputs._replace(e=self.run_layers(self.cfg.prelude, x0, inputs, 0))

    def states(self, inputs: Inputs, loops: int) -> Iterator[Tensor]:
        """Yield the state (B, T, C) after each loop; `loops` may differ from n_loops."""
        cfg, e = self.cfg, inputs.e
        state = e
        for k in range(loops):
            if cfg.bptt_loops and 0 < k == cfg.n_loops - cfg.bptt_loops:
                state = state.detach()
            x = self.inject(torch.cat((e, norm(state)), dim=-1))
            state = self.run_layers(cfg.core, x, inputs, cfg.n_prelude + k * cfg.n_core)
            yield state

    def read_out(self, inputs: Inputs, state: Tensor, loops: int) -> Tensor:
        """Apply the coda to a state after `loops` loops; returns normalized (B, T, C)."""
        cfg = self.cfg
        x = self.run_layers(cfg.coda, state, inputs, cfg.n_prelude + loops * cfg.n_core)
        return norm(self.back_out(x, inputs.e))

    def run_layers(self, layers: range, x: Tensor, inputs: Inputs, cache_layer: int) -> Tensor:
        """Apply layers to x (B, T, C); the first of them uses layer `cache_layer` of the cache."""
        cfg, scalars, (values, rope, masks) = self.cfg, None, inputs.layers
        for stored, layer in enumerate(layers, cache_layer):
            block = self.blocks[layer]
            if cfg.residual_scalars:
                scalars = torch.stack((self.residual[layer], self.skip[layer]))
            args = (x, inputs.x0, scalars, rope, values.get(layer), masks[cfg.window(layer)])
            cached = (inputs.cache, stored)
            x = block(*args) if inputs.cache is None else block.forward(*args, cached)
        return x

    def new_cache(self, slots: int, capacity: int | None = None) -> KVCache:
        """As in GPT, with one cache layer for each loop of a core layer."""
        cache, more = super().new_cache(slots, capacity), self.cfg.n_passes - self.cfg.n_layer
        for stored in (cache.keys, cache.values):
            stored += [torch.zeros_like(stored[0]) for _ in range(more)]
        return cache

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        loss: Loss = cross_entropy,
        tensors: Sequence[Tensor] = (),
    ) -> Tensor:
        """
        Return the summed loss of the last loop. Gradients come from the weighted sum over
        supervised loops; with further tensors (as in RL), from the last loop only.
        """
        if tensors:
            return super().loss(tokens, targets, segments, loss, tensors)
        cfg, inputs = self.cfg, self.begin(tokens, None, segments)
        counted = (targets != IGNORE).sum(1)  # (B,)
        objective = last = torch.zeros((), device=tokens.device)
        nats = paid = torch.zeros(len(tokens), device=tokens.device)
        shares = cfg.shares(self.supervised)
        for k, state in enumerate(self.states(inputs, cfg.n_loops), start=1):
            if k not in shares:
                continue
            hidden, extra = self.read_out(inputs, state, k), torch.ones_like(nats)
            if cfg.improvement_bonus and k > self.supervised[0]:
                before = (nats / counted.clamp(min=1)).clamp(min=1e-6)
                bonus = cfg.improvement_bonus / before / shares[k]  # (B,), relative to shares[k]
                extra = 1 + bonus.clamp(max=MAX_BONUS)
                paid = paid + shares[k] * (extra - 1) * nats
            spread, head = extra[:, None].expand_as(targets), self.head
            args = (hidden, head.weight, targets)
            summed = chunked_loss(*args, weighted(loss), (spread,), self.compiled, head.fp8)
            objective = objective + shares[k] * summed
            last = summed.detach()
            if cfg.improvement_bonus:  # of each row, for the next loop
                nats = token_losses(*args, self.compiled, loss).sum(1)
                last = nats.sum()
            self.note(f"loss_loop_{k}", last)
        # shown as -shares[k] * (extra - 1) * improvement over the previous supervised loop
        self.note("total_loss", objective.detach() - paid.sum())
        self.note("counted", counted.sum())
        return last + (objective - objective.detach())

    def note(self, name: str, value: Tensor) -> None:
        """Add to one of this step's sums, without a device sync."""
        self.noted[name] = self.noted.get(name, 0) + value

    @torch.no_grad()
    def losses_after(self, loops: int, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return `token_losses` (B, T) after `loops` loops."""
        inputs = self.begin(tokens)
        *_, state = self.states(inputs, loops)
        hidden = self.read_out(inputs, state, loops)
        return token_losses(hidden, self.head.weight, targets, self.compiled)


@lru_cache
def weighted(loss: Loss) -> Loss:
    """A loss of logits and targets, times a weight of each token."""
    if loss is cross_entropy:  # has weights of its own
        return loss
    return lambda logits, targets, weights: weights * loss(logits, targets)


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """Rebuild the configuration of a model from its `asdict`."""
    return RecursiveConfig(**values) if "n_loops" in values else read_golf_config(values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model with uninitialized weights."""
    is_recursive = isinstance(cfg, RecursiveConfig)
    return RecursiveGPT(cfg, dtype) if is_recursive else new_golf_model(cfg, dtype)
