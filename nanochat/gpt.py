"""
The GPT model: a decoder-only transformer, its forward pass and initialization.

    tokens (B, T) -> embed -> n_layer x [attention, MLP] -> norm -> logits (B, T, V)

Each parameter has a role (`param_roles`); optim.py maps roles to update rules. On top of
`GPTConfig.classic`, the default has value embeddings, residual scalars and sharper attention; up to
depth 6 also a hash-bigram embedding and previous-token keys.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from nanochat.attention import Backend, CacheView, KVCache, Rope, attend, make_mask, rotary, rotate
from nanochat.loss import EAGER, SOFTCAP, LossKernels, cap, chunked_cross_entropy, token_losses

GATE_CHANNELS = 32  # input channels of the value-embedding gates

# ---- Configuration -------------------------------------------------------------------------------

REMOVED = {"repeat_layers": None, "softcap": SOFTCAP}  # removed options and their defaults


@dataclass(frozen=True)
class GPTConfig:
    """Model architecture. Raises ValueError for inconsistent values."""

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
    """Attention of each layer, repeated over layers: L = full context, S = a quarter of
    max_seq_len, rounded up to a multiple of 128, P = full context with previous-token keys. The
    last layer always has full context."""
    qk_gain: float = 1.2
    """Factor on normalized queries and keys; above 1 it sharpens attention."""
    value_every: int = 2
    """Add a gated value embedding to every N-th layer, counting back from the last; 0 = none."""
    bigram_rows: int = 0
    """Number of rows of the hash-bigram embedding; 0 = none."""
    residual_scalars: bool = True
    """The input of each layer is a * x + b * x0: x0 is the embedded token, a and b are learned."""

    def __post_init__(self) -> None:
        # Checked here because exported models include this file, but not config.py
        sizes = ("vocab_size", "n_layer", "d_model", "n_head", "n_kv_head", "max_seq_len")
        least = dict.fromkeys(sizes, 1) | {"value_every": 0, "bigram_rows": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and positive for RoPE, got {self.head_dim}")
        pattern = self.window_pattern
        if not pattern or set(pattern) - {"S", "L", "P"}:
            raise ValueError(f"window_pattern must consist of S, L and P, got {pattern!r}")
        if "P" in pattern and self.head_dim % 4:
            raise ValueError(f"P needs a head_dim divisible by 4, got {self.head_dim}")

    def classic(self) -> Self:
        """The same shape in the plain architecture of October 2025."""
        plain = replace(self, value_every=0, bigram_rows=0, residual_scalars=False)
        return replace(plain, rope_theta=10_000.0, window_pattern="L", qk_gain=1.0)

    @property
    def uses_previous_token(self) -> bool:
        """Whether the input of the layers depends on the id of the previous token."""
        return self.bigram_rows > 0 or any(map(self.has_previous_keys, range(self.n_layer)))

    @property
    def order(self) -> Sequence[int]:
        """Layer indices in execution order."""
        return range(self.n_layer)

    def window(self, layer: int) -> int | None:
        """Number of earlier tokens visible to `layer`; None = all."""
        full = self.letter(layer) != "S" or layer == self.n_layer - 1
        return None if full else math.ceil(self.max_seq_len / 4 / 128) * 128

    def has_value_embedding(self, layer: int) -> bool:
        """Whether `layer` has a value embedding."""
        return self.value_every > 0 and (self.n_layer - 1 - layer) % self.value_every == 0

    def has_previous_keys(self, layer: int) -> bool:
        """
        Whether half of each key of `layer` comes from the embeddings of the previous position.
        Then the layer can find what followed an earlier occurrence of a token.
        """
        return self.letter(layer) == "P"

    def letter(self, layer: int) -> str:
        """The letter of `layer` in the window pattern."""
        return self.window_pattern[layer % len(self.window_pattern)]


def config_from(kind: type[GPTConfig], values: Mapping[str, Any]) -> GPTConfig:
    """
    Rebuild a configuration from the `asdict` of this or an earlier commit. Raises ValueError if the
    model uses a deleted option.
    """
    values = dict(values)
    if used := [name for name, default in REMOVED.items() if values.pop(name, default) != default]:
        raise ValueError(f"model uses {used[0]}, which was deleted; commit 27c376f supports it")
    if not values.pop("value_embeddings", True):
        values["value_every"] = 0
    return kind(**values)


# ---- Training matmuls in fp8 ---------------------------------------------------------------------
# One scale per tensor, results in the compute dtype. Weights and activations are e4m3; gradients
# are e5m2, which trades precision for range. Source: Micikevicius et al., "FP8 Formats for Deep
# Learning", 2022, arXiv:2209.05433.


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Scaled = tuple[Tensor, Tensor]  # fp8 values, and the float32 factor that restores their scale


def quantize(x: Tensor, dtype: torch.dtype) -> Scaled:
    """
    Round `x` to fp8, scaled so that its largest magnitude becomes the largest of `dtype`.

    The result is row-major. If `x` is not finite, neither is a matmul with it.
    """
    factor = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / factor).to(dtype).contiguous(), factor


def transpose(x: Scaled) -> Scaled:
    """Copy of a matrix (N, K) as (K, N), row-major."""
    return x[0].t().contiguous(), x[1]


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """
    a (N, K) times the transpose of b (M, K) -> (N, M) in `dtype`. Both are row-major, as GPUs need
    it. `fast` adds up with fewer bits on Hopper GPUs.
    """
    factors = {"scale_a": a[1], "scale_b": b[1]}
    scaled_mm: Any = torch._scaled_mm  # type: ignore
    return scaled_mm(a[0], b[0].t(), **factors, out_dtype=dtype, use_fast_accum=fast)


class Fp8Matmul(torch.autograd.Function):
    """x (N, K), weight (M, K) -> (N, M) in the dtype of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        inputs, matrix = quantize(x, E4M3), quantize(weight, E4M3)
        ctx.save_for_backward(*inputs, *matrix)
        ctx.dtypes = x.dtype, weight.dtype
        return multiply(inputs, matrix, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Any:  # type: ignore[override]
        x, x_factor, weight, weight_factor = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        out = quantize(grad, E5M2)
        d_x = multiply(out, transpose((weight, weight_factor)), x_dtype)
        return d_x, multiply(transpose(out), transpose((x, x_factor)), weight_dtype)


# ---- Layers --------------------------------------------------------------------------------------


def norm(x: Tensor, eps: float | None = None) -> Tensor:
    """RMS normalization of the last dimension, without a learned scale. `eps`: default of torch."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


class Linear(nn.Linear):
    """
    Bias-free linear layer: matmul in the dtype of the input. With `fp8`, matmuls are in fp8 while
    gradients are enabled.
    """

    fp8 = False

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 and torch.is_grad_enabled():
            y: Any = Fp8Matmul.apply(x.flatten(0, -2), self.weight)
            return y.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Embedding initialized by `init_weights` or a checkpoint."""

    def reset_parameters(self) -> None:
        """Skip torch's initialization, which on the meta device imports torch.compile."""


# Bigrams outnumber rows, so they collide. Two hashes look up half a vector each, because bigrams
# that collide in one half rarely collide in the other. A missing previous token counts as -1.
HASHES = ((0x9E3779B1, 0x85EBCA77), (0x9E3979B3, 0x85EC18A1))
"""Odd multipliers of the token and the previous token, for each half of the vector."""


class Bigrams(Embedding):
    """Hash-bigram embedding: `rows` rows of C / 2 numbers; each bigram uses two rows."""

    def __init__(self, rows: int, d_model: int):
        super().__init__(rows, d_model // len(HASHES))

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """tokens and previous tokens (B, T) -> (B, T, C)."""
        grad = self.weight.grad  # if sparse, every micro-batch has appended the rows it touched
        if grad is not None and grad.is_sparse and 2 * grad._nnz() > self.num_embeddings:
            self.weight.grad = grad.to_dense()
        index = bigram_index(tokens, before, self.num_embeddings)
        return F.embedding(index, self.weight, sparse=self.sparse).flatten(-2)


def bigram_index(tokens: Tensor, before: Tensor, rows: int) -> Tensor:
    """Tokens and previous tokens (B, T), -1 = none -> row indices (B, T, 2)."""
    mixed = torch.stack([tokens * own + (before + 1) * other for own, other in HASHES], dim=-1)
    return (mixed ^ (mixed >> 15)) % rows


def previous_tokens(tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """Previous token of each position (B, T), -1 at the start of a sequence or segment."""
    before = F.pad(tokens[:, :-1], (1, 0), value=-1)
    if segments is None:
        return before
    return before.masked_fill(segments != F.pad(segments[:, :-1], (1, 0), value=-1), -1)


class Attention(nn.Module):
    """
    Causal grouped-query attention with normalized queries and keys.

    Sources: grouped queries arXiv:2305.13245, query-key norm arXiv:2010.04245, value embeddings
    arXiv:2410.17897 as in modded-nanogpt (looked up by token). Keys that know the previous token:
    modded-nanogpt shifts half of the channels of a key by one position; here these channels are a
    function of the embeddings of the previous position alone, so decoding needs only token ids.
    """

    norm_eps: float | None = None

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.shape = (cfg.n_head, cfg.n_kv_head, cfg.head_dim)
        self.window = cfg.window(layer)
        self.scale = cfg.qk_gain**2 * cfg.head_dim**-0.5
        self.backend: Backend = "sdpa"
        C, (H, G, D) = cfg.d_model, self.shape
        own = G * D // 2 if cfg.has_previous_keys(layer) else G * D
        self.q, self.k, self.v = Linear(C, H * D), Linear(C, own), Linear(C, G * D)
        self.shifted_k = Linear(C, G * D - own) if own < G * D else None
        self.out = Linear(H * D, C)
        self.qkv_weight: Tensor | None = None
        self.gate = Linear(min(GATE_CHANNELS, C), G) if cfg.has_value_embedding(layer) else None

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        previous: Tensor | None,
        value_embed: Tensor | None,
        mask: Any = None,
        cache: Any = None,
    ) -> Tensor:
        """
        x, `previous` (see ForwardContext) (B, T, C), `value_embed` (B, T, G * D) -> (B, T, C).
        Others: see `attend`.
        """
        B, T, _ = x.shape
        H, G, D = self.shape
        if self.qkv_weight is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            sizes = (H * D, self.k.out_features, G * D)
            q, k, v = F.linear(x, self.qkv_weight).split(sizes, dim=-1)
        if self.shifted_k is not None and previous is not None:
            k = join_keys(k, self.shifted_k(previous), G)
        q, k, v = q.view(B, T, H, D), k.view(B, T, G, D), v.view(B, T, G, D)
        if self.gate is not None and value_embed is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(B, T, G, D)
        q, k = self.normalize(q, k, rope)
        y = attend(q, k, v, self.window, self.scale, self.backend, mask, cache)  # (B, T, H, D)
        return self.project(y, v)

    def normalize(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """
        Normalize queries (B, T, H, D) and keys (B, T, G, D), then rotate them by position. Rotating
        last lets the compiler keep two versions of them for the backward pass instead of three.
        """
        return rotate(norm(q), *rope), rotate(norm(k), *rope)

    def project(self, y: Tensor, v: Tensor) -> Tensor:
        """Project head outputs y (B, T, H, D) to (B, T, C); subclasses use v (B, T, G, D)."""
        return self.out(y.flatten(2))

    def fuse_qkv(self) -> None:
        """
        Use one matmul for queries, keys and values; with few tokens, this takes as long as one
        of the three. Their weights become views of the fused matrix. Keys of previous tokens have
        another input and stay apart.
        """
        layers = (self.q, self.k, self.v)
        self.qkv_weight = torch.cat([layer.weight.detach() for layer in layers])
        sizes = [layer.out_features for layer in layers]
        for layer, rows in zip(layers, self.qkv_weight.split(sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)


def join_keys(own: Tensor, previous: Tensor, heads: int) -> Tensor:
    """
    Keys (B, T, G * D) from those of a token and of its predecessor, (B, T, G * D / 2) each.

    Quarters of a head alternate, because RoPE rotates channel pairs (i, i + D / 2): both are of the
    same token. This does not hold for partial RoPE, which only the golf track has.
    """
    B, T, _ = own.shape
    quarters = [keys.view(B, T, heads, 2, -1) for keys in (own, previous)]
    return torch.stack(quarters, dim=-2).flatten(2)


class MLP(nn.Module):
    """Two linear layers with a squared ReLU (Primer, arXiv:2109.08668)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        C, width = cfg.d_model, int(cfg.mlp_ratio * cfg.d_model)
        self.up, self.down = Linear(C, width), Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Pre-norm transformer layer; residual scalars first mix in the embedded token."""

    def __init__(self, attention: Attention, mlp: MLP):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, x0: Tensor, residual_scales: Tensor | None, *args: Any) -> Tensor:
        """x, x0 (B, T, C), residual_scales (2,) or None -> (B, T, C). `args` go to Attention."""
        if residual_scales is not None:
            x = residual_scales[0] * x + residual_scales[1] * x0
        eps = self.attention.norm_eps
        x = x + self.attention(norm(x, eps), *args)
        return x + self.mlp(norm(x, eps))


# ---- The model -----------------------------------------------------------------------------------


class ForwardContext(NamedTuple):
    """Inputs that all layers of one forward pass share."""

    tokens: Tensor
    x0: Tensor
    """Normalized token embeddings (B, T, C) in the compute dtype."""
    rope: Rope
    previous: Tensor | None
    """`x0` of the previous position, 0 without one (B, T, C)."""
    masks: dict[int | None, Any]
    """Attention mask of each window; see `attention.make_mask`."""
    cache: CacheView | None
    outputs: list[Tensor] | None = None
    """If a list, each layer appends its output (B, T, C)."""


class GPT(nn.Module):
    """
    The model. `dtype` is the dtype of activations and matmuls; weights are float32, except in an
    `inference_copy` and after `MuonAdamW.round_weights`.
    """

    attention_class = Attention
    output_scale = 0.0
    """Initial scale of matrices that write to the residual stream; 0: layers start as identity."""
    norm_eps: float | None = None
    """Epsilon of RMS norm; None = default of torch."""

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
    def looks_up_ids(self) -> bool:
        """Whether layers need token ids in addition to token embeddings."""
        return self.cfg.uses_previous_token or len(self.value_embeds) > 0

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.weight.device

    # ---- weights -----------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """
        Initialize all weights. Uniform: matrices (standard deviation fan_in^-0.5, 0.4 of that
        for up projections) and value embeddings; normal: token embedding and head; zero: output
        projections, hash-bigram embedding and gates. Source: nanochat's tuning log, 2026-03.
        """
        cfg = self.cfg
        self.init_embeddings(generator)
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            keys = filter(None, (attention.k, attention.shifted_k))
            for layer in (attention.q, *keys, attention.v):
                self.draw(layer.weight, 1.0, generator)
            self.draw(mlp.up.weight, 0.4 if cfg.residual_scalars else 1.0, generator)
            for layer in (attention.out, mlp.down):
                self.draw(layer.weight, self.output_scale, generator)
        for zero in filter(None, (self.bigrams, *(block.attention.gate for block in self.blocks))):
            nn.init.zeros_(zero.weight)
        bound = 3**0.5 * cfg.d_model**-0.5  # a uniform variable has bound sqrt(3) sigma
        for weight in self.value_embeds.parameters():
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        if cfg.residual_scalars:
            depth = torch.linspace(0, 1, cfg.n_layer)
            self.residual.copy_(1.15 - 0.10 * depth)
            self.skip.copy_(0.20 - 0.15 * depth)

    def init_embeddings(self, generator: torch.Generator | None) -> None:
        """Initialize the token embedding and the LM head."""
        std, head_std = (0.8, 0.001) if self.cfg.residual_scalars else (1.0, 0.0)
        nn.init.normal_(self.embed.weight, std=std, generator=generator)
        nn.init.normal_(self.head_weight, std=head_std, generator=generator)

    def draw(self, weight: Tensor, scale: float, generator: torch.Generator | None) -> None:
        """Initialize a block matrix (M, N) with standard deviation `scale` * N^-0.5."""
        bound = 3**0.5 * weight.size(1) ** -0.5 * scale
        if scale:
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        else:
            nn.init.zeros_(weight)

    def param_roles(self) -> dict[str, str]:
        """Role of each parameter by name, in the model's order."""
        outside = {"embed": "embedding", "bigrams": "bigram", "value_embeds": "value_embedding"}
        outside |= {name: name for name in ("head", "residual", "skip")}
        return {
            name: outside.get(name.split(".")[0], "gate" if ".gate." in name else "matrix")
            for name, _ in self.named_parameters()
        }

    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        return sum(p.numel() for p in self.parameters())

    def num_used_params(self) -> int:
        """Number of matmul parameters, each counted every time a token uses it."""
        return sum(map(self.layer_params, self.cfg.order)) + self.head_weight.numel()

    def layer_params(self, layer: int) -> int:
        """Number of matmul parameters of a layer."""
        return sum(p.numel() for p in self.blocks[layer].parameters() if p.ndim == 2)

    def layer_flops(self, layer: int) -> int:
        """
        Training FLOPs of a layer per token: 6 per matmul parameter, and 12 H D per token in the
        window for attention, ignoring causality.
        """
        cfg = self.cfg
        seen = min(cfg.max_seq_len, cfg.window(layer) or cfg.max_seq_len)
        return 6 * self.layer_params(layer) + 12 * cfg.n_head * cfg.head_dim * seen

    def flops_per_token(self) -> float:
        """Training FLOPs per token: forward and backward of all layers and the head."""
        return sum(map(self.layer_flops, self.cfg.order)) + 6 * self.head_weight.numel()

    # ---- computation -------------------------------------------------------------------------

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """
        tokens (B, T) -> normalized hidden states, the input of the head (B, T, C).

        With `cache`, the tokens continue the cached sequences and are stored; with `segments`
        (B, T), a token sees only tokens of its own segment.
        """
        return self.final_state(self.prepare(tokens, cache, segments))

    def final_state(self, ctx: ForwardContext) -> Tensor:
        """Run all layers; returns normalized hidden states (B, T, C)."""
        return norm(self.run_layers(ctx, ctx.x0, self.cfg.order), self.norm_eps)

    def prepare(
        self,
        tokens: Tensor,
        cache: CacheView | None = None,
        segments: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> ForwardContext:
        """
        Embed the tokens and compute the inputs shared by all layers. `embeds` (B, T, C) replaces
        the token embeddings, but not hash-bigrams, value embeddings and, with a cache, previous
        tokens.
        """
        cfg, T = self.cfg, tokens.size(1)
        positions = torch.arange(T, device=tokens.device) if cache is None else cache.positions
        windows, backend = map(cfg.window, range(cfg.n_layer)), self.blocks[0].attention.backend
        masks = {w: make_mask(backend, tokens, w, segments, cache) for w in set(windows)}
        before = earlier = previous = None
        if cfg.uses_previous_token and cache is not None:
            before, earlier = cache.preceding(tokens)
        elif cfg.uses_previous_token:
            before = previous_tokens(tokens, segments)
        x0 = self.embed_tokens(tokens, before, embeds)
        if before is not None and any(map(cfg.has_previous_keys, cfg.order)):
            if cache is None:
                previous = F.pad(x0[:, :-1], (0, 0, 1, 0))
            else:
                previous = self.embed_tokens(before.clamp(min=0), earlier)
            previous = previous.masked_fill(before[..., None] < 0, 0.0)
        rope = rotary(positions, self.rotary_dims, cfg.rope_theta, self.dtype)
        return ForwardContext(tokens, x0, rope, previous, masks, cache)

    def embed_tokens(
        self, tokens: Tensor, before: Tensor | None, embeds: Tensor | None = None
    ) -> Tensor:
        """
        Normalized token and hash-bigram embeddings (B, T, C) of tokens (B, T), given the previous
        token of each, -1 = none. `embeds` (B, T, C) replaces the token embeddings.
        """
        x = (self.embed(tokens) if embeds is None else embeds).to(self.dtype)
        if self.bigrams is not None and before is not None:
            x = x + self.bigrams(tokens, before).to(self.dtype)
        return norm(x, self.norm_eps)

    def run_layers(
        self, ctx: ForwardContext, x: Tensor, layers: Sequence[int], cache_layer: int = 0
    ) -> Tensor:
        """Run `layers` on x (B, T, C); the first one uses layer `cache_layer` of the cache."""
        cfg, (tokens, x0, rope, previous, masks, cache, outputs) = self.cfg, ctx
        for index, i in enumerate(layers, cache_layer):
            block, scales, value_embed = self.blocks[i], None, None
            if cfg.residual_scalars:
                scales = torch.stack((self.residual[i], self.skip[i])).to(self.dtype)
            if cfg.has_value_embedding(i):
                value_embed = self.value_embeds[str(i)](tokens).to(self.dtype)
            stored = None if cache is None else (cache, index)
            args = (x, x0, scales, rope, previous, value_embed, masks[cfg.window(i)], stored)
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)
            else:  # never compiled with a cache: shapes change between calls
                x = block(*args) if cache is None else block.forward(*args)
            if outputs is not None:
                outputs.append(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> soft-capped logits (..., V) in float32."""
        return cap(F.linear(hidden, self.head_weight.to(hidden.dtype)))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> soft-capped logits (B, T, V) in float32. Training uses `loss`."""
        return self.logits(self.hidden(tokens))

    def new_cache(self, slots: int, capacity: int | None = None) -> KVCache:
        """KV cache for `slots` sequences of up to `capacity` tokens (default: max_seq_len)."""
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
        Summed cross-entropy (nats) over targets other than IGNORE, each multiplied by its weight
        if `weights` is given. All arguments are (B, T).
        """
        hidden, kernels = self.hidden(tokens, segments=segments), self.loss_kernels
        return chunked_cross_entropy(hidden, self.head_weight, targets, weights, kernels)[0]

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy (nats) of each target (B, T) in float32, 0 for IGNORE."""
        hidden = self.hidden(tokens, segments=segments)
        return token_losses(hidden, self.head_weight, targets, self.loss_kernels)

    def compile(self, **options: Any) -> None:
        """Compile the blocks and the loss kernels; equal blocks share one compilation."""
        torch._dynamo.config.recompile_limit = 64  # block variants x (training, scoring)
        for block in self.blocks:
            block.compile(dynamic=False, **options)
        kernels: Any = (torch.compile(f, dynamic=False, **options) for f in EAGER)
        self.loss_kernels = LossKernels(*kernels)


def inference_copy(model: GPT) -> GPT:
    """
    Copy of the model with weights in the compute dtype: equal results, less memory traffic per
    token. Weights already in that dtype are shared, except the fused queries, keys and values.
    """
    with torch.device("meta"):
        twin = type(model)(model.cfg, model.dtype)
    weights = {name: p.detach().to(model.dtype) for name, p in model.state_dict().items()}
    twin.load_state_dict(weights, assign=True)
    for ours, theirs in zip(twin.blocks, model.blocks, strict=True):
        kernel = theirs.attention.backend  # prefill is not compiled: its lengths vary
        ours.attention.backend = "sdpa" if kernel in ("blocks", "flex") else kernel
        ours.attention.fuse_qkv()
    return twin.requires_grad_(False)


@torch.no_grad()
def copy_weights(twin: GPT, model: GPT) -> None:
    """Copy weights into an `inference_copy` model in place; its compiled code stays valid."""
    for name, weight in twin.named_parameters():
        weight.copy_(model.get_parameter(name))
