"""
The GPT model: a decoder-only transformer, its forward pass and initialization.

    tokens (B, T) -> embed -> n_layer x [attention, MLP] -> norm -> logits (B, T, V)

Each parameter has a role (`param_roles`); optim.py maps roles to update rules. The default
architecture adds value embeddings, residual scalars and sharper attention to `GPTConfig.classic`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from nanochat.attention import Backend, CacheView, KVCache, Rope, attend, make_mask, rotary, rotate
from nanochat.loss import EAGER, SOFTCAP, LossKernels, cap, chunked_cross_entropy, token_losses

GATE_CHANNELS = 32  # channels of its input that the gate of a value embedding reads

# ---- Configuration -------------------------------------------------------------------------------

DELETED = {"repeat_layers": None, "softcap": SOFTCAP}  # options of earlier models, their defaults


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
    window_pattern: str = "L"
    """One letter per layer, repeated: L sees everything, S a quarter of max_seq_len, rounded up
    to 128. The last layer always sees everything."""
    qk_gain: float = 1.2
    """Queries and keys are multiplied by this after their norm: sharper attention."""
    value_every: int = 2
    """Every N-th layer, counted back from the last, adds a gated embedding of the token to its
    values; 0 = none."""
    bigram_rows: int = 0
    """Rows of the hash-bigram embedding; 0 = none."""
    residual_scalars: bool = True
    """Every layer starts from a * x + b * x0, x0 the embedded token, a and b learned."""

    def __post_init__(self) -> None:
        # By itself: an exported model has this file, but not config.py
        sizes = ("vocab_size", "n_layer", "d_model", "n_head", "n_kv_head", "max_seq_len")
        least = dict.fromkeys(sizes, 1) | {"value_every": 0, "bigram_rows": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise ValueError(f"window_pattern is made of S and L, got {self.window_pattern!r}")

    def classic(self) -> Self:
        """The same shape in the plain architecture of October 2025."""
        plain = replace(self, value_every=0, bigram_rows=0, residual_scalars=False)
        return replace(plain, rope_theta=10_000.0, window_pattern="L", qk_gain=1.0)

    @property
    def order(self) -> Sequence[int]:
        """The layers that a token passes, first to last."""
        return range(self.n_layer)

    def window(self, layer: int) -> int | None:
        """How many earlier tokens `layer` sees, None = all."""
        letter = self.window_pattern[layer % len(self.window_pattern)]
        whole = letter == "L" or layer == self.n_layer - 1
        return None if whole else math.ceil(self.max_seq_len / 4 / 128) * 128

    def has_value_embedding(self, layer: int) -> bool:
        """Whether `layer` adds one to its values."""
        return self.value_every > 0 and (self.n_layer - 1 - layer) % self.value_every == 0


def config_from(kind: type[GPTConfig], values: Mapping[str, Any]) -> GPTConfig:
    """
    The configuration that `asdict` made a dict of, in this commit or an earlier one. Raises
    ValueError for a model with an option that was deleted.
    """
    values = dict(values)
    if odd := [name for name, usual in DELETED.items() if values.pop(name, usual) != usual]:
        raise ValueError(f"this model has {odd[0]}, which was deleted; commit 27c376f has it")
    if not values.pop("value_embeddings", True):
        values["value_every"] = 0
    return kind(**values)


# ---- Layers --------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """Root-mean-square normalization of the last dimension, without learned scale."""
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """A bias-free linear layer: float32 weights, computed in the dtype of its input."""

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """An embedding filled by `init_weights` or a checkpoint."""

    def reset_parameters(self) -> None:
        """Nothing; torch's own draws, and on the meta device loads all of torch.compile for it."""


# There are more bigrams than rows, so several share one. Two hashes look up half a vector each: of
# bigrams that share one half, few share the other. A missing previous token counts as -1.
HASHES = ((0x9E3779B1, 0x85EBCA77), (0x9E3979B3, 0x85EC18A1))
"""Odd factors of the token and of the one in front, for each half of the vector."""


class Bigrams(Embedding):
    """A hash-bigram embedding: `rows` rows of C / 2 numbers, of which every bigram takes two."""

    def __init__(self, rows: int, d_model: int):
        super().__init__(rows, d_model // len(HASHES))

    def use_sparse_gradient(self) -> None:
        """
        Let the gradient list only the rows that were looked up: faster for small batches. Call it
        last: moving or loading a model may replace the parameter, and a hook does not follow.
        """
        self.sparse = True
        self.weight.register_post_accumulate_grad_hook(bound_gradient)

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """tokens and those in front (B, T) -> (B, T, C)."""
        index = bigram_index(tokens, before, self.num_embeddings)
        return F.embedding(index, self.weight, sparse=self.sparse).flatten(-2)


def bound_gradient(weight: Tensor) -> None:
    """
    Make a sparse gradient dense once it lists half as many rows as there are: until it is summed,
    every micro-batch appends all rows that it touched.
    """
    grad = weight.grad
    if grad is not None and grad.is_sparse and 2 * grad._nnz() > weight.size(0):
        weight.grad = grad.to_dense()


def bigram_index(tokens: Tensor, before: Tensor, rows: int) -> Tensor:
    """Tokens and those in front, -1 where there is none, (B, T) -> their rows (B, T, 2)."""
    mixed = torch.stack([tokens * own + (before + 1) * other for own, other in HASHES], dim=-1)
    return (mixed ^ (mixed >> 15)) % rows


def preceding(tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """The token in front of each (B, T), -1 where a row or a segment begins."""
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    if segments is None:
        return before
    return before.masked_fill(segments != F.pad(segments[:, :-1], (1, 0), value=-1), -1)


class Attention(nn.Module):
    """
    Causal grouped-query attention with normalized queries and keys.

    Sources: grouped queries arXiv:2305.13245, query-key norm arXiv:2010.04245, value embeddings
    arXiv:2410.17897 in the form of modded-nanogpt, looked up by token.
    """

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.shape = (cfg.n_head, cfg.n_kv_head, cfg.head_dim)
        self.window = cfg.window(layer)
        self.scale = cfg.qk_gain**2 * cfg.head_dim**-0.5
        self.backend: Backend = "sdpa"
        C, (H, G, D) = cfg.d_model, self.shape
        self.q, self.k, self.v = Linear(C, H * D), Linear(C, G * D), Linear(C, G * D)
        self.out = Linear(H * D, C)
        self.qkv_weight: Tensor | None = None
        self.gate = Linear(min(GATE_CHANNELS, C), G) if cfg.has_value_embedding(layer) else None

    def forward(
        self, x: Tensor, rope: Rope, value_embed: Tensor | None, mask: Any = None, cache: Any = None
    ) -> Tensor:
        """x (B, T, C), `value_embed` (B, T, G * D) -> (B, T, C). The rest as in `attend`."""
        B, T, _ = x.shape
        H, G, D = self.shape
        if self.qkv_weight is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = F.linear(x, self.qkv_weight).split((H * D, G * D, G * D), dim=-1)
        q, k, v = q.view(B, T, H, D), k.view(B, T, G, D), v.view(B, T, G, D)
        if self.gate is not None and value_embed is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(B, T, G, D)
        q, k = self.normalize(q, k, rope)
        y = attend(q, k, v, self.window, self.scale, self.backend, mask, cache)  # (B, T, H, D)
        return self.project(y, v)

    def normalize(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Queries (B, T, H, D) and keys (B, T, G, D), rotated by position and normalized."""
        return norm(rotate(q, *rope)), norm(rotate(k, *rope))

    def project(self, y: Tensor, v: Tensor) -> Tensor:
        """What the heads gathered, y (B, T, H, D), of values v (B, T, G, D) -> (B, T, C)."""
        return self.out(y.flatten(2))

    def fuse_qkv(self) -> None:
        """
        Compute queries, keys and values by one matmul from now on: for few tokens it takes the time
        of one of the three. The weights become views of the fused matrix.
        """
        layers = (self.q, self.k, self.v)
        self.qkv_weight = torch.cat([layer.weight.detach() for layer in layers])
        sizes = [layer.out_features for layer in layers]
        for layer, rows in zip(layers, self.qkv_weight.split(sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)


class MLP(nn.Module):
    """Two matrices around a squared ReLU (Primer, arXiv:2109.08668)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        C, width = cfg.d_model, int(cfg.mlp_ratio * cfg.d_model)
        self.up, self.down = Linear(C, width), Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One pre-norm layer; with residual scalars it first mixes the embedded token back in."""

    def __init__(self, attention: Attention, mlp: MLP):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, x0: Tensor, residual_scales: Tensor | None, *args: Any) -> Tensor:
        """x, x0 (B, T, C), residual_scales (2,) or None -> (B, T, C). `args` are Attention's."""
        if residual_scales is not None:
            x = residual_scales[0] * x + residual_scales[1] * x0
        x = x + self.attention(norm(x), *args)
        return x + self.mlp(norm(x))


# ---- The model -----------------------------------------------------------------------------------


class ForwardContext(NamedTuple):
    """What the layers of one forward pass share."""

    tokens: Tensor
    x0: Tensor
    """The embedded tokens (B, T, C), in the compute dtype."""
    rope: Rope
    masks: dict[int | None, Any]
    """What is seen, by window: see `attention.attend`."""
    cache: CacheView | None
    outputs: list[Tensor] | None = None
    """Where it is a list, each layer's output (B, T, C) is appended to it."""


class GPT(nn.Module):
    """The model. `dtype` is the compute dtype: activations and matmuls; weights are float32."""

    attention_class = Attention
    output_scale = 0.0
    """Of new matrices that write into the residual stream: layers start as the identity."""

    def __init__(self, cfg: GPTConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.cfg, self.dtype = cfg, dtype
        self.embed = Embedding(cfg.vocab_size, cfg.d_model)
        self.bigrams = Bigrams(cfg.bigram_rows, cfg.d_model) if cfg.bigram_rows else None
        layers, kv_width = range(cfg.n_layer), cfg.n_kv_head * cfg.head_dim
        with_values = filter(cfg.has_value_embedding, layers)
        self.value_embeds = nn.ModuleDict(
            {str(i): Embedding(cfg.vocab_size, kv_width) for i in with_values}
        )
        blocks: Any = nn.ModuleList(Block(self.attention_class(cfg, i), MLP(cfg)) for i in layers)
        self.blocks: Sequence[Block] = blocks
        self.head = Linear(cfg.d_model, cfg.vocab_size)
        if cfg.residual_scalars:
            self.residual = nn.Parameter(torch.ones(cfg.n_layer))
            self.skip = nn.Parameter(torch.zeros(cfg.n_layer))
        self.rotary_dims = cfg.head_dim
        self.loss_kernels = EAGER
        self.checkpoint_activations = False

    @property
    def head_weight(self) -> Tensor:
        """The weights of the LM head, (V, C)."""
        return self.head.weight

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    # ---- weights -----------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """
        Draw every weight. Matrices are uniform with standard deviation fan_in^-0.5 (the up
        projection 0.4 of that), embeddings normal, hash-bigram embeddings and gates zero. Source of
        the values: nanochat's tuning log, 2026-03.
        """
        cfg = self.cfg
        self.init_embeddings(generator)
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            for layer in (attention.q, attention.k, attention.v):
                self.draw(layer.weight, 1.0, generator)
            self.draw(mlp.up.weight, 0.4 if cfg.residual_scalars else 1.0, generator)
            for layer in (attention.out, mlp.down):
                self.draw(layer.weight, self.output_scale, generator)
        for zero in filter(None, (self.bigrams, *(block.attention.gate for block in self.blocks))):
            nn.init.zeros_(zero.weight)
        bound = 3**0.5 * cfg.d_model**-0.5  # a uniform variable's bound is sqrt(3) sigma
        for weight in self.value_embeds.parameters():
            fill(weight, nn.init.uniform_, -bound, bound, generator=generator)
        if cfg.residual_scalars:
            depth = torch.linspace(0, 1, cfg.n_layer)
            self.residual.copy_(1.15 - 0.10 * depth)
            self.skip.copy_(0.20 - 0.15 * depth)

    def init_embeddings(self, generator: torch.Generator | None) -> None:
        """Draw the token embedding and the head."""
        std, head_std = (0.8, 0.001) if self.cfg.residual_scalars else (1.0, 0.0)
        fill(self.embed.weight, nn.init.normal_, std=std, generator=generator)
        fill(self.head_weight, nn.init.normal_, std=head_std, generator=generator)

    def draw(self, weight: Tensor, scale: float, generator: torch.Generator | None) -> None:
        """Fill a block matrix (M, N) with entries of standard deviation `scale` * N^-0.5."""
        bound = 3**0.5 * weight.size(1) ** -0.5 * scale
        if scale:
            fill(weight, nn.init.uniform_, -bound, bound, generator=generator)
        else:
            nn.init.zeros_(weight)

    def param_roles(self) -> dict[str, str]:
        """The role of every parameter, by name, in the model's order."""
        outside = {"embed": "embedding", "bigrams": "bigram", "value_embeds": "value_embedding"}
        outside |= {name: name for name in ("head", "residual", "skip")}
        return {
            name: outside.get(name.split(".")[0], "gate" if ".gate." in name else "matrix")
            for name, _ in self.named_parameters()
        }

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
        Training FLOPs of a layer per token: 6 per parameter, and 12 H D per visible token for the
        attention scores, counted as if not causal.
        """
        cfg = self.cfg
        seen = min(cfg.max_seq_len, cfg.window(layer) or cfg.max_seq_len)
        return 6 * self.layer_params(layer) + 12 * cfg.n_head * cfg.head_dim * seen

    def flops_per_token(self) -> float:
        """Training FLOPs per token, forward and backward, all layers and the head."""
        return sum(map(self.layer_flops, self.cfg.order)) + 6 * self.head_weight.numel()

    # ---- computation -------------------------------------------------------------------------

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """
        tokens (B, T) -> the normalized state in front of the head (B, T, C).

        With a `cache` the tokens continue what it holds, and are added to it; with `segments`
        (B, T), a token sees only those of its row that have the same number as itself.
        """
        return self.final_state(self.prepare(tokens, cache, segments))

    def final_state(self, ctx: ForwardContext) -> Tensor:
        """All layers -> the normalized state in front of the head (B, T, C)."""
        return norm(self.run_layers(ctx, ctx.x0, self.cfg.order))

    def prepare(
        self,
        tokens: Tensor,
        cache: CacheView | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> ForwardContext:
        """
        Embed the tokens, and prepare what all layers need. `embeds` (B, T, C) replace the tokens'
        embeddings, not those of their bigrams or their value embeddings.
        """
        cfg, T = self.cfg, tokens.size(1)
        positions = torch.arange(T, device=tokens.device) if cache is None else cache.positions
        windows, backend = map(cfg.window, range(cfg.n_layer)), self.blocks[0].attention.backend
        masks = {w: make_mask(backend, tokens, w, segments, cache) for w in set(windows)}
        x = (self.embed(tokens) if embeds is None else embeds).to(self.dtype)
        if self.bigrams is not None:
            before = preceding(tokens, segments) if cache is None else cache.preceding(tokens)
            x = x + self.bigrams(tokens, before).to(self.dtype)
        rope = rotary(positions, self.rotary_dims, cfg.rope_theta, self.dtype)
        return ForwardContext(tokens, norm(x), rope, masks, cache)

    def run_layers(
        self, ctx: ForwardContext, x: Tensor, layers: Sequence[int], cache_layer: int = 0
    ) -> Tensor:
        """x (B, T, C) through `layers`, the first of which is the cache's `cache_layer`-th."""
        cfg, (tokens, x0, rope, masks, cache, outputs) = self.cfg, ctx
        for index, i in enumerate(layers, cache_layer):
            block, scales, value_embed = self.blocks[i], None, None
            if cfg.residual_scalars:
                scales = torch.stack((self.residual[i], self.skip[i])).to(self.dtype)
            if cfg.has_value_embedding(i):
                value_embed = self.value_embeds[str(i)](tokens).to(self.dtype)
            stored = None if cache is None else (cache, index)
            args = (x, x0, scales, rope, value_embed, masks[cfg.window(i)], stored)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)
            else:  # with a cache never compiled: shapes change from pass to pass
                x = block(*args) if cache is None else block.forward(*args)
            if outputs is not None:
                outputs.append(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> capped logits (..., V) in float32."""
        return cap(F.linear(hidden, self.head_weight.to(hidden.dtype)))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> capped logits (B, T, V) in float32. For sampling, not for training."""
        return self.logits(self.hidden(tokens))

    def new_cache(self, slots: int, capacity: int | None = None) -> KVCache:
        """A KV cache for `slots` sequences of up to `capacity` tokens, by default the context."""
        cfg, capacity = self.cfg, capacity or self.cfg.max_seq_len
        shape = (len(cfg.order), slots, cfg.n_kv_head, cfg.head_dim)
        return KVCache(shape, capacity, self.device, self.dtype)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        Summed cross-entropy (nats) over targets that are not IGNORE, each times its weight where
        there are `weights`; everything (B, T).
        """
        hidden, kernels = self.hidden(tokens, segments=segments), self.loss_kernels
        return chunked_cross_entropy(hidden, self.head_weight, targets, weights, kernels)[0]

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None
    ) -> Tensor:
        """Nats of each target (B, T) in float32, 0 where it is IGNORE."""
        hidden = self.hidden(tokens, segments=segments)
        return token_losses(hidden, self.head_weight, targets, self.loss_kernels)

    def compile(self, **options: Any) -> None:
        """Compile each block and the loss kernels: equal blocks share one compilation."""
        torch._dynamo.config.recompile_limit = 64  # kinds of block, times training and scoring
        for block in self.blocks:
            block.compile(dynamic=False, **options)
        kernels: Any = (torch.compile(f, dynamic=False, **options) for f in EAGER)
        self.loss_kernels = LossKernels(*kernels)


def fill(weight: Tensor, init: Callable[..., Tensor], *args: float, **settings: Any) -> None:
    """Apply one of torch.nn.init's functions, on the CPU for a weight of any device."""
    weight.copy_(init(torch.empty(weight.shape), *args, **settings))


def for_inference(model: GPT) -> GPT:
    """
    The same model with its weights stored in the compute dtype: equal results, fewer bytes to read
    per token. Weights of that dtype are shared, except those of attention.
    """
    with torch.device("meta"):
        twin = type(model)(model.cfg, model.dtype)
    weights = {name: p.detach().to(model.dtype) for name, p in model.state_dict().items()}
    twin.load_state_dict(weights, assign=True)
    for ours, theirs in zip(twin.blocks, model.blocks, strict=True):
        kernel = theirs.attention.backend  # the copy prefills any length, not compiled
        ours.attention.backend = "sdpa" if kernel in ("blocks", "flex") else kernel
        ours.attention.fuse_qkv()
    return twin.requires_grad_(False)


@torch.no_grad()
def refresh(twin: GPT, model: GPT) -> None:
    """Copy weights into a model of `for_inference`, in place: what is compiled for it holds."""
    for name, weight in twin.named_parameters():
        weight.copy_(model.get_parameter(name))
