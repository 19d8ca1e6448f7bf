"""
The GPT model: decoder-only transformer, forward pass and initialisation, nothing else.

    tokens (B, T) -> embed -> n_layer x [attention, MLP] -> norm -> logits (B, T, V)

Knows nothing of tokenizers, optimizers, checkpoints or ranks. Every weight has a role
(`param_roles`) from which optim.py picks its update rule. `GPTConfig.classic` is the plain
architecture; the default adds value embeddings, residual scalars and sharper attention. What only
some tracks need (partial rotation, exclusive attention, a tied head, ...) is off by default.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from nanochat.attention import (
    Backend,
    CacheView,
    KVCache,
    attend,
    attend_stored,
    segment_mask,
    shared_mask,
)
from nanochat.loss import (
    EAGER,
    MAX_SOFTCAP,
    LossKernels,
    cap,
    summed_loss,
    token_losses,
)

# ---- Hash-bigram embedding -----------------------------------------------------------------------
# There are more bigrams than embedding rows, so several share one. Two hashes look up half a vector
# each: of bigrams that share one half, few share the other. A missing previous token counts as -1.


HASHES = ((0x9E3779B1, 0x85EBCA77), (0x9E3979B3, 0x85EC18A1))
"""Odd factors of the token and of the one in front, for each half of the vector."""


class Bigrams(nn.Embedding):
    """
    `rows` rows of d_model / 2 numbers, from which every bigram takes two.

    Raises ValueError for a width that has no half. It is zero until trained or loaded.
    """

    def __init__(self, rows: int, d_model: int):
        if d_model % len(HASHES):
            raise ValueError(f"bigram_rows needs a d_model divisible by 2, got {d_model}")
        super().__init__(rows, d_model // len(HASHES))

    def use_sparse_gradient(self) -> None:
        """
        Let the gradient list only the rows that were looked up, which saves time where batches are
        small. Call it when the weight is where it will be trained: moving or loading a model may
        replace the parameter, and a hook does not follow.
        """
        self.sparse = True
        self.weight.register_post_accumulate_grad_hook(bound_gradient)

    def reset_parameters(self) -> None:
        """Nothing; torch's own draws, and on the meta device loads all of torch.compile for it."""

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """tokens and those in front (B, T) -> (B, T, C)."""
        index = bigram_index(tokens, before, self.num_embeddings)
        return F.embedding(index, self.weight, sparse=self.sparse).flatten(-2)


def bound_gradient(weight: Tensor) -> None:
    """
    Make a sparse gradient dense once it lists half as many rows as there are: until it is summed,
    every micro-batch appends all rows that it met.
    """
    if weight.grad is not None and weight.grad.is_sparse:
        if 2 * weight.grad._nnz() > weight.size(0):
            weight.grad = weight.grad.to_dense()


def bigram_index(tokens: Tensor, before: Tensor, rows: int) -> Tensor:
    """Tokens and those in front, -1 where there is none, (B, T) -> their rows (B, T, 2)."""
    mixed = [tokens * factor + (before + 1) * other for factor, other in HASHES]
    mixed = torch.stack(mixed, dim=-1)
    return (mixed ^ (mixed >> 15)) % rows


def preceding(tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """The token in front of each (B, T), -1 where a row or a segment begins."""
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    if segments is None:
        return before
    return before.masked_fill(segments != F.pad(segments[:, :-1], (1, 0), value=-1), -1)


# ---- The transformer -----------------------------------------------------------------------------


Role = Literal[
    "matrix", "embedding", "bigram", "value_embedding", "head", "tied", "residual", "skip", "gate",
    "gain"
]  # fmt: skip
GATE_CHANNELS = 32  # a value embedding's gate reads this many channels
TIED_STD = 0.005  # of a table that is also the head


Config = TypeVar("Config", bound="GPTConfig")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Raises ValueError where the numbers do not fit together."""

    vocab_size: int
    n_layer: int
    d_model: int
    n_head: int
    n_kv_head: int
    head_dim: int
    max_seq_len: int
    mlp_ratio: float = 4.0
    rope_theta: float = 100_000.0
    softcap: float = 15.0
    window_pattern: str = "L"
    """One letter per layer, repeated: L sees everything, S a quarter of max_seq_len, rounded up
    to 128. The last layer always sees everything."""
    qk_gain: float = 1.2
    """Queries and keys are multiplied by this after their norm: sharper attention."""
    value_embeddings: bool = True
    """Layers, the last included, add a gated embedding of the token to its values."""
    value_every: int = 2
    """Of so many layers one does, counted back from the last."""
    bigram_rows: int = 0
    """Rows of a table that adds a vector for each token and the one in front of it, found by hash
    (bigrams.py); 0 = none."""
    residual_scalars: bool = True
    """Every layer starts from a * x + b * x0, x0 the embedded token, a and b learned."""
    tie_embeddings: bool = False
    """One table embeds tokens and scores them: there is no head of its own."""
    rope_dims: int | None = None
    """Channels of each head that positions turn; the others pass as they are. None = all."""
    xsa_last_n: int = 0
    """In so many of the last layers, what attention gathers loses its part along the token's own
    value (exclusive self attention, arXiv:2603.09078)."""
    qk_gain_init: float | None = None
    """Where a gain per query head starts that is learned; it replaces the fixed qk_gain."""
    init: Literal["uniform", "orthogonal"] = "uniform"
    """How block matrices are drawn; both with entries of standard deviation fan_in^-0.5."""
    projection_init: Literal["zero", "scaled"] = "zero"
    """The matrices that write into the residual stream: zero, or drawn like the others and divided
    by sqrt(2 n_layer), as many as write there (GPT-2)."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_layer", "d_model", "n_head", "n_kv_head", "max_seq_len")
        for name in (*sizes, "value_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")
        if self.bigram_rows < 0:
            raise ValueError(f"bigram_rows must not be negative, got {self.bigram_rows}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not 0 < self.softcap <= MAX_SOFTCAP:
            raise ValueError(f"softcap must lie in (0, {MAX_SOFTCAP}], got {self.softcap}")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise ValueError(f"window_pattern is made of S and L, got {self.window_pattern!r}")
        if int(self.mlp_ratio * self.d_model) < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLP without a channel")
        if not (2 <= self.rotated <= self.head_dim and self.rotated % 2 == 0):
            raise ValueError(
                f"rope_dims must be even, from 2 to head_dim {self.head_dim}, got {self.rope_dims}"
            )
        if not 0 <= self.xsa_last_n <= self.n_layer:
            raise ValueError(f"xsa_last_n must be 0 to {self.n_layer}, got {self.xsa_last_n}")
        if self.qk_gain_init is not None and not 0 < self.qk_gain_init < math.inf:
            raise ValueError(f"qk_gain_init must be positive, got {self.qk_gain_init}")

    def classic(self) -> "GPTConfig":
        """The same shape in the plain architecture of October 2025."""
        return replace(
            self,
            rope_theta=10_000.0,
            window_pattern="L",
            qk_gain=1.0,
            value_embeddings=False,
            bigram_rows=0,
            residual_scalars=False,
            tie_embeddings=False,
            rope_dims=None,
            xsa_last_n=0,
            qk_gain_init=None,
        )

    @property
    def order(self) -> tuple[int, ...]:
        """The layers that a token passes, first to last."""
        return tuple(range(self.n_layer))

    @property
    def rotated(self) -> int:
        """Channels of each head that positions turn."""
        return self.head_dim if self.rope_dims is None else self.rope_dims

    def window(self, layer: int) -> int | None:
        """How many earlier tokens `layer` sees, None = all."""
        letter = self.window_pattern[layer % len(self.window_pattern)]
        if letter == "L" or layer == self.n_layer - 1:
            return None
        return math.ceil(self.max_seq_len / 4 / 128) * 128

    def has_value_embedding(self, layer: int) -> bool:
        """Whether it adds one to its values."""
        return self.value_embeddings and (self.n_layer - 1 - layer) % self.value_every == 0


def config_from(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """
    The configuration of a class that `asdict` made a dict of, now or by an earlier commit. Raises
    ValueError for a model with an option that was deleted.
    """
    values = dict(values)
    if values.pop("repeat_layers", None) is not None:
        raise ValueError(
            "this model repeats layers (repeat_layers), which was deleted; the last commit that "
            "has it is 27c376f"
        )
    return kind(**values)


def norm(x: Tensor) -> Tensor:
    """Root-mean-square normalisation of the last dimension, without learned scale."""
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """A bias-free linear layer: float32 weights, computed in the dtype of its input."""

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """A table of vectors, filled by `init_weights` or a checkpoint."""

    def reset_parameters(self) -> None:
        """Nothing; torch's own draws, and on the meta device loads all of torch.compile for it."""


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., 1, D/2) of positions (...), float32. RoFormer, arXiv:2104.09864."""
    step = torch.arange(0, head_dim, 2, device=positions.device).float()
    angle = positions.float()[..., None, None] * theta ** (-step / head_dim)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Turn channel pairs (i, i + R/2) of x (B, T, heads, D) by their position's angle, R being twice
    the angles there are; the D - R channels after them stay as they are.
    """
    R = 2 * cos.size(-1)
    a, b = x[..., :R].chunk(2, dim=-1)
    turned = (a * cos + b * sin, b * cos - a * sin)
    return torch.cat(turned if x.size(-1) == R else (*turned, x[..., R:]), dim=-1)


def exclude_self(y: Tensor, v: Tensor) -> Tensor:
    """
    y (B, T, H, D) without its part along v (B, T, G, D), the token's own value of a head's group.

    Source: exclusive self attention, arXiv:2603.09078.
    """
    grouped = y.unflatten(2, (v.size(2), -1))  # (B, T, G, H/G, D)
    n = F.normalize(v.float(), dim=-1).to(v.dtype)[:, :, :, None]
    return (grouped - (grouped * n).sum(-1, keepdim=True) * n).flatten(2, 3)


class Attention(nn.Module):
    """
    Causal grouped-query attention with normalised queries and keys.

    Sources: grouped queries arXiv:2305.13245, query-key norm arXiv:2010.04245, value embeddings
    arXiv:2410.17897 in the token-table form of modded-nanogpt.
    """

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.shape = (cfg.n_head, cfg.n_kv_head, cfg.head_dim)
        self.window = cfg.window(layer)
        self.exclusive = layer >= cfg.n_layer - cfg.xsa_last_n
        learned = cfg.qk_gain_init is not None
        self.gain = nn.Parameter(torch.ones(cfg.n_head)) if learned else None
        self.scale = (1.0 if learned else cfg.qk_gain**2) * cfg.head_dim**-0.5
        self.backend: Backend = "sdpa"
        self.q = Linear(cfg.d_model, cfg.n_head * cfg.head_dim)
        self.k = Linear(cfg.d_model, cfg.n_kv_head * cfg.head_dim)
        self.v = Linear(cfg.d_model, cfg.n_kv_head * cfg.head_dim)
        self.out = Linear(cfg.n_head * cfg.head_dim, cfg.d_model)
        self.together: Tensor | None = None
        self.gate = None
        if cfg.has_value_embedding(layer):
            self.gate = Linear(min(GATE_CHANNELS, cfg.d_model), cfg.n_kv_head)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        extra: Tensor | None,
        mask: Tensor | None = None,
        cache: CacheView | None = None,
        visit: int = 0,
    ) -> Tensor:
        """
        x (B, T, C), `extra` (B, T, G * D) value embedding or None -> (B, T, C).

        `mask`: what is seen, (B, 1, T, M) bool with a cache, else as in `attention.attend`; None is
        the row's past. `visit`: which of the cache's keys and values are those of this pass
        through the layer.
        """
        B, T, _ = x.shape
        H, G, D = self.shape
        if self.together is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = F.linear(x, self.together).split((H * D, G * D, G * D), dim=-1)
        q, k, v = q.view(B, T, H, D), k.view(B, T, G, D), v.view(B, T, G, D)
        if self.gate is not None and extra is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # (B, T, G)
            v = v + gate[..., None] * extra.view(B, T, G, D)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        if self.gain is not None:
            q = q * self.gain.to(q.dtype)[:, None]
        if cache is not None:
            cache.write(visit, k, v)
        if cache is not None and mask is not None:
            y = attend_stored(q, *cache.read(visit), mask, self.scale)
        else:
            y = attend(q, k, v, self.window, self.scale, self.backend, mask)  # (B, T, H, D)
        if self.exclusive:
            y = exclude_self(y, v)
        return self.out(y.flatten(2))

    def join(self) -> None:
        """
        Compute queries, keys and values by one product from now on: of few tokens it takes the time
        of one of the three. The weights stay where they are known, as parts of one matrix.
        """
        layers = (self.q, self.k, self.v)
        self.together = torch.cat([layer.weight.detach() for layer in layers])
        sizes = [layer.out_features for layer in layers]
        for layer, rows in zip(layers, self.together.split(sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)


class MLP(nn.Module):
    """Two matrices around a squared ReLU (Primer, arXiv:2109.08668)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        width = int(cfg.mlp_ratio * cfg.d_model)
        self.up = Linear(cfg.d_model, width)
        self.down = Linear(width, cfg.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One pre-norm layer; with residual scalars it first mixes the embedded token back in."""

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.attention = Attention(cfg, layer)
        self.mlp = MLP(cfg)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        mix: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        extra: Tensor | None,
        mask: Tensor | None = None,
        cache: CacheView | None = None,
        visit: int = 0,
    ) -> Tensor:
        """x, x0 (B, T, C); mix (2,) scalars of x and x0, or None -> (B, T, C)."""
        if mix is not None:
            x = mix[0] * x + mix[1] * x0
        x = x + self.attention(norm(x), cos, sin, extra, mask, cache, visit)
        return x + self.mlp(norm(x))


class Pass(NamedTuple):
    """What the layers of one forward pass share."""

    tokens: Tensor
    x0: Tensor
    """The embedded tokens (B, T, C), in the compute dtype."""
    cos: Tensor
    sin: Tensor
    masks: dict[int | None, Any]
    """What is seen, by window: see `attention.attend`."""
    cache: CacheView | None
    outputs: list[Tensor] | None = None
    """Where there is one, what each visited layer returns (B, T, C) is appended to it."""


class GPT(nn.Module):
    """
    The model. `dtype` is the compute dtype: activations and matrix products; weights are float32.

    checkpoint.py builds new ones and loads saved ones.
    """

    def __init__(self, cfg: GPTConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.cfg, self.dtype = cfg, dtype
        kv_width = cfg.n_kv_head * cfg.head_dim
        self.embed = Embedding(cfg.vocab_size, cfg.d_model)
        self.bigrams = Bigrams(cfg.bigram_rows, cfg.d_model) if cfg.bigram_rows else None
        tables = {
            str(i): Embedding(cfg.vocab_size, kv_width)
            for i in range(cfg.n_layer)
            if cfg.has_value_embedding(i)
        }
        self.value_embeds = nn.ModuleDict(tables)
        blocks: Any = nn.ModuleList(Block(cfg, i) for i in range(cfg.n_layer))
        self.blocks: Sequence[Block] = blocks
        self.head = None if cfg.tie_embeddings else Linear(cfg.d_model, cfg.vocab_size)
        if cfg.residual_scalars:
            self.residual = nn.Parameter(torch.ones(cfg.n_layer))
            self.skip = nn.Parameter(torch.zeros(cfg.n_layer))
        self.loss_kernels = EAGER
        self.checkpoint_activations = False

    # ---- weights -----------------------------------------------------------------------------

    @property
    def head_weight(self) -> Tensor:
        """What scores the next token, (V, C): the head's weights, or the embedding tied to it."""
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """
        Draw every weight. By default layers start as the identity: what they write is zero.

        Other matrices are uniform with standard deviation fan_in^-0.5 (the up projection 0.4 of
        that), embeddings normal; a tied table is as small as a head that scores all tokens alike.
        Source of the values: nanochat's tuning log, 2026-03; of the tied one: parameter golf.
        """
        cfg = self.cfg
        plain = not cfg.residual_scalars
        std = TIED_STD if cfg.tie_embeddings else 1.0 if plain else 0.8
        fill(self.embed.weight, nn.init.normal_, std=std, generator=generator)
        if self.head is not None:
            std = 0.0 if plain else 0.001
            fill(self.head.weight, nn.init.normal_, std=std, generator=generator)
        if self.bigrams is not None:
            nn.init.zeros_(self.bigrams.weight)
        bound = 3**0.5 * cfg.d_model**-0.5  # a uniform variable's bound is sqrt(3) sigma
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            for matrix in (attention.q, attention.k, attention.v):
                self.draw(matrix.weight, 1.0, generator)
            self.draw(mlp.up.weight, 1.0 if plain else 0.4, generator)
            for matrix in (attention.out, mlp.down):
                scale = (2 * cfg.n_layer) ** -0.5 if cfg.projection_init == "scaled" else 0.0
                self.draw(matrix.weight, scale, generator)
            if attention.gate is not None:
                nn.init.zeros_(attention.gate.weight)
            if attention.gain is not None and cfg.qk_gain_init is not None:
                nn.init.constant_(attention.gain, cfg.qk_gain_init)
        for weight in self.value_embeds.parameters():
            fill(weight, nn.init.uniform_, -bound, bound, generator=generator)
        if cfg.residual_scalars:
            depth = torch.linspace(0, 1, cfg.n_layer)
            self.residual.copy_(1.15 - 0.10 * depth)
            self.skip.copy_(0.20 - 0.15 * depth)

    def draw(self, weight: Tensor, scale: float, generator: torch.Generator | None) -> None:
        """Fill a block matrix (M, N) with entries of standard deviation `scale` * N^-0.5."""
        M, N = weight.shape
        if scale == 0.0:
            nn.init.zeros_(weight)
        elif self.cfg.init == "orthogonal":  # entries of an orthonormal one: max(M, N)^-0.5
            gain = scale * max(1.0, M / N) ** 0.5
            fill(weight, nn.init.orthogonal_, gain=gain, generator=generator)
        else:
            bound = 3**0.5 * N**-0.5 * scale  # a uniform variable's bound is sqrt(3) sigma
            fill(weight, nn.init.uniform_, -bound, bound, generator=generator)

    def param_roles(self) -> dict[str, Role]:
        """The role of every parameter, by name, in the model's order."""
        outside: dict[str, Role] = {
            "embed": "tied" if self.head is None else "embedding",
            "bigrams": "bigram",
            "value_embeds": "value_embedding",
            "head": "head",
            "residual": "residual",
            "skip": "skip",
        }
        roles: dict[str, Role] = {}
        for name, _ in self.named_parameters():
            first = name.split(".")[0]
            inside: Role = "gate" if ".gate." in name else "matrix"
            inside = "gain" if name.endswith(".gain") else inside
            roles[name] = outside.get(first, inside)
        return roles

    def num_params(self) -> int:
        """All parameters, embeddings included."""
        return sum(p.numel() for p in self.parameters())

    def num_used_params(self) -> int:
        """Those of the layers and the head, each as often as it multiplies a token."""
        return sum(map(self.layer_params, self.cfg.order)) + self.head_weight.numel()

    def layer_params(self, layer: int) -> int:
        """Parameters of a layer that multiply a token."""
        return sum(p.numel() for p in self.blocks[layer].parameters() if p.ndim == 2)

    def layer_flops(self, layer: int) -> int:
        """
        Training FLOPs of a token's visit to a layer: 6 per parameter, and 12 H D per visible token
        for the attention scores, counted as if not causal.
        """
        cfg = self.cfg
        seen = min(cfg.max_seq_len, cfg.window(layer) or cfg.max_seq_len)
        return 6 * self.layer_params(layer) + 12 * cfg.n_head * cfg.head_dim * seen

    def flops_per_token(self) -> float:
        """Training FLOPs per token, forward and backward, all visits and the head."""
        return sum(map(self.layer_flops, self.cfg.order)) + 6 * self.head_weight.numel()

    # ---- computation -------------------------------------------------------------------------

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """
        tokens (B, T) -> the normalised state in front of the head (B, T, C).

        With a `cache` the tokens continue what it holds, and are added to it; with `segments`
        (B, T), a token sees only those of its row that have the same number as itself.
        """
        return self.run_layers(self.begin(tokens, cache, segments))

    def run_layers(self, run: Pass) -> Tensor:
        """All layers -> the normalised state in front of the head (B, T, C)."""
        return norm(self.walk(run, run.x0, enumerate(self.cfg.order)))

    def begin(
        self,
        tokens: Tensor,
        cache: CacheView | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Pass:
        """
        Embed the tokens, and prepare what all layers need. `embeds` (B, T, C) take the place of the
        tokens' vectors, not of those of their bigrams or of their value embeddings.
        """
        cfg, T = self.cfg, tokens.size(1)
        places = torch.arange(T, device=tokens.device) if cache is None else cache.positions
        cos, sin = rotary(places, cfg.rotated, cfg.rope_theta)
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        masks: dict[int | None, Any] = {}
        for window in {cfg.window(i) for i in range(cfg.n_layer)}:
            if cache is not None:
                masks[window] = cache.mask(window)
            elif segments is not None:
                masks[window] = segment_mask(segments, window)
            else:
                backend = self.blocks[0].attention.backend
                masks[window] = shared_mask(backend, T, window, tokens.device)
        x0 = norm(self.embedded(tokens, cache, segments, embeds))
        return Pass(tokens, x0, cos, sin, masks, cache)

    def embedded(
        self,
        tokens: Tensor,
        cache: CacheView | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> Tensor:
        """
        tokens (B, T) -> their vectors and those of the bigrams that end there, (B, T, C) in the
        compute dtype; each is rounded to it first, as in a model that stores them so.
        """
        x = (self.embed(tokens) if embeds is None else embeds).to(self.dtype)
        if self.bigrams is None:
            return x
        before = preceding(tokens, segments) if cache is None else cache.preceding(tokens)
        return x + self.bigrams(tokens, before).to(self.dtype)

    def walk(self, run: Pass, x: Tensor, visits: Iterable[tuple[int, int]]) -> Tensor:
        """x (B, T, C) through layers, given as (number of the visit, layer) -> (B, T, C)."""
        cfg, (tokens, x0, cos, sin, masks, cache, outputs) = self.cfg, run
        for visit, i in visits:
            block, mix = self.blocks[i], None
            if cfg.residual_scalars:
                mix = torch.stack((self.residual[i], self.skip[i])).to(self.dtype)
            table = self.value_embeds[str(i)] if cfg.has_value_embedding(i) else None
            extra = None if table is None else table(tokens).to(self.dtype)
            mask = masks[cfg.window(i)]
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(
                    block, x, x0, mix, cos, sin, extra, mask, use_reentrant=False
                )
            elif cache is not None:  # never compiled: its shapes change from pass to pass
                x = block.forward(x, x0, mix, cos, sin, extra, mask, cache, visit)
            else:
                x = block(x, x0, mix, cos, sin, extra, mask)
            if outputs is not None:
                outputs.append(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> capped logits (..., V) in float32."""
        return cap(F.linear(hidden, self.head_weight.to(hidden.dtype)), self.cfg.softcap)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> capped logits (B, T, V) in float32. For sampling, not for training."""
        return self.logits(self.hidden(tokens))

    def new_cache(self, slots: int, capacity: int | None = None) -> KVCache:
        """Memory for `slots` sequences of up to `capacity` tokens, by default the context."""
        cfg = self.cfg
        return KVCache(
            len(cfg.order),
            slots,
            capacity or cfg.max_seq_len,
            cfg.n_kv_head,
            cfg.head_dim,
            self.device,
            self.dtype,
        )

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        Nats summed over the targets that are not IGNORE, each times its weight where there are
        `weights`; everything (B, T).
        """
        h = self.hidden(tokens, segments=segments).flatten(0, 1)
        flat = None if weights is None else weights.flatten()
        return summed_loss(
            h, self.head_weight, targets.flatten(), self.cfg.softcap, flat, self.loss_kernels
        )

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None
    ) -> Tensor:
        """Nats of each target (B, T) in float32, 0 where it is IGNORE."""
        h = self.hidden(tokens, segments=segments).flatten(0, 1)
        flat = token_losses(
            h, self.head_weight, targets.flatten(), self.cfg.softcap, self.loss_kernels
        )
        return flat.view_as(targets)

    def compile(self, **options: Any) -> None:
        """Compile each block and the loss kernels: equal blocks share one compilation."""
        torch._dynamo.config.recompile_limit = 64  # kinds of block, times training and scoring
        for block in self.blocks:
            block.compile(dynamic=False, **options)
        kernels: Any = (torch.compile(f, dynamic=False, **options) for f in EAGER)
        self.loss_kernels = LossKernels(*kernels)


def fill(weight: Tensor, init: Callable[..., Any], *args: float, **settings: Any) -> None:
    """Apply one of torch.nn.init's functions, on the CPU for a weight of any device."""
    drawn = weight if weight.device.type == "cpu" else torch.empty(weight.shape)
    init(drawn, *args, **settings)
    if drawn is not weight:
        weight.copy_(drawn)


def for_inference(model: GPT) -> GPT:
    """
    The same model with its weights stored in the compute dtype: equal results, fewer bytes to read
    for every token. Weights that have that dtype already are shared, but for those of attention.
    """
    with torch.device("meta"):
        twin = type(model)(model.cfg, model.dtype)
    weights = {name: p.detach().to(model.dtype) for name, p in model.state_dict().items()}
    twin.load_state_dict(weights, assign=True)
    for ours, theirs in zip(twin.blocks, model.blocks, strict=True):
        kernel = theirs.attention.backend  # the copy reads prompts of any length, not compiled
        ours.attention.backend = "sdpa" if kernel in ("blocks", "flex") else kernel
        ours.attention.join()
    return twin.requires_grad_(False)


@torch.no_grad()
def refresh(twin: GPT, model: GPT) -> None:
    """
    Give a model of `for_inference` the weights that its original has now. They stay where they are:
    what was compiled or recorded for the twin still holds.
    """
    for name, weight in twin.named_parameters():
        weight.copy_(model.get_parameter(name))
