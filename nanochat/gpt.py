"""
The GPT model: a decoder-only transformer, its forward pass and initialization.

    tokens (B, T) -> embed, smear -> n_layer x [attention, MLP] -> backout, norm -> logits

On top of `GPTConfig.classic`, the default has value embeddings, residual scalars, smear, backout
and sharper attention; none of them costs a noticeable number of FLOPs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import Backend, CacheView, KVCache, Rope, attend, make_mask, rotary, rotate
from nanochat.fp8 import fp8_linear
from nanochat.loss import Loss, cap, chunked_loss, cross_entropy, token_losses

VALUE_CHANNELS = 12  # input channels of the gates of the value embeddings
SMEAR_CHANNELS = 24  # input channels of the smear gate

# ---- Configuration -------------------------------------------------------------------------------


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
    max_seq_len, rounded up to a multiple of 128. The last layer always has full context."""
    qk_gain: float = 1.2
    """Factor on normalized queries and keys; above 1 it sharpens attention."""
    value_every: int = 2
    """Add a gated value embedding to every N-th layer, counting back from the last; 0 = none."""
    residual_scalars: bool = True
    """The input of each layer is a * x + b * x0: x0 is the embedded token, a and b are learned."""
    smear: bool = True
    """Add a gated share of the previous token's embedding to each embedded token."""
    backout: bool = True
    """Subtract a learned multiple of the middle layer's output before the LM head."""

    def __post_init__(self) -> None:
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")
        if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
            raise ValueError(f"window_pattern must consist of S and L, got {self.window_pattern!r}")

    def classic(self) -> Self:
        """The same shape in the plain architecture of October 2025."""
        plain = replace(self, value_every=0, residual_scalars=False, smear=False, backout=False)
        return replace(plain, rope_theta=10_000.0, window_pattern="L", qk_gain=1.0)

    def window(self, layer: int) -> int | None:
        """Number of earlier tokens visible to `layer`; None = all."""
        letter = self.window_pattern[layer % len(self.window_pattern)]
        full = letter == "L" or layer == self.n_layer - 1
        return None if full else math.ceil(self.max_seq_len / 4 / 128) * 128

    @property
    def value_layers(self) -> list[int]:
        """Indices of the layers with a value embedding."""
        first = (self.n_layer - 1) % self.value_every if self.value_every else self.n_layer
        return list(range(first, self.n_layer, self.value_every or 1))


# ---- Layers --------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """RMS normalization of the last dimension, without a learned scale."""
    return F.rms_norm(x, (x.size(-1),))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """
    x (..., C) @ weight (N, C) transposed -> (..., N), for x of the dtype of the weight.

    A decode step on a CPU in float32, x (B, 1, C), computes the transpose: with 64 rows 1.3 to 1.8
    times as fast, with one row equal (EPYC with AVX2, 2026-12).
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.ndim == 3 and x.size(1) == 1:
        return (weight @ x[:, 0].mT).mT[:, None]
    return F.linear(x, weight)


class Linear(nn.Linear):
    """
    Bias-free linear layer with float32 weights: matmul in the dtype of the input. With `fp8`,
    matmuls are in fp8 while gradients are enabled.
    """

    fp8 = False

    def __init__(self, fan_in: int, fan_out: int):
        super().__init__(fan_in, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 and torch.is_grad_enabled():
            return fp8_linear(x, self.weight)
        return linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """Embedding initialized by `init_weights` or a checkpoint."""

    def reset_parameters(self) -> None:
        """Skip torch's initialization, which on the meta device imports torch.compile."""


class Attention(nn.Module):
    """
    Causal grouped-query attention with normalized queries and keys.

    Sources: grouped queries arXiv:2305.13245, query-key norm arXiv:2010.04245, value embeddings
    arXiv:2410.17897 as in modded-nanogpt (looked up by token).
    """

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.shape = (cfg.n_head, cfg.n_kv_head, cfg.head_dim)
        # Normalized queries and keys have bounded dot products, so the softmax could never become
        # sharp; a gain on both widens the bound
        self.scale = cfg.qk_gain**2 * cfg.head_dim**-0.5
        C, (H, G, D) = cfg.d_model, self.shape
        self.q, self.k, self.v = Linear(C, H * D), Linear(C, G * D), Linear(C, G * D)
        self.out = Linear(H * D, C)
        self.gate = Linear(min(VALUE_CHANNELS, C), G) if layer in cfg.value_layers else None
        self.qkv_weight: Tensor | None = None

    def forward(
        self, x: Tensor, rope: Rope, value_embed: Tensor | None, mask: Any, cache: Any = None
    ) -> Tensor:
        """x (B, T, C), `value_embed` (B, T, G * D) -> (B, T, C). Others: see `attend`."""
        B, T, _ = x.shape
        H, G, D = self.shape
        if self.qkv_weight is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = linear(x, self.qkv_weight).split((H * D, G * D, G * D), dim=-1)
        q, k, v = q.view(B, T, H, D), k.view(B, T, G, D), v.view(B, T, G, D)
        if self.gate is not None and value_embed is not None:
            gate = 3 * torch.sigmoid(self.gate(x[..., : self.gate.in_features]))  # (B, T, G)
            v = v + gate[..., None] * value_embed.view(B, T, G, D)
        # Rotating last lets the compiler keep two versions of q and k for the backward pass
        q, k = rotate(norm(q), *rope), rotate(norm(k), *rope)
        y = attend(q, k, v, mask, self.scale, cache)  # (B, T, H, D)
        return self.out(y.flatten(2))  # (B, T, C)

    def fuse_qkv(self) -> None:
        """
        Use one matmul for queries, keys and values; with few tokens, this takes as long as one
        of the three. Their weights become views of the fused matrix.
        """
        layers = (self.q, self.k, self.v)
        self.qkv_weight = torch.cat([layer.weight.detach() for layer in layers])
        sizes = [layer.out_features for layer in layers]
        for layer, rows in zip(layers, self.qkv_weight.split(sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)


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

    def __init__(self, cfg: GPTConfig, layer: int):
        super().__init__()
        self.attention, self.mlp = Attention(cfg, layer), MLP(cfg)

    def forward(self, x: Tensor, x0: Tensor, scalars: Tensor | None, *args: Any) -> Tensor:
        """x, x0 (B, T, C), scalars (2,) float32 or None -> (B, T, C). `args` go to Attention."""
        if scalars is not None:  # in float32: bfloat16 would round them to steps of 0.008
            x = (scalars[0] * x.float() + scalars[1] * x0.float()).to(x.dtype)
        x = x + self.attention(norm(x), *args)
        return x + self.mlp(norm(x))


# ---- The model -----------------------------------------------------------------------------------


class GPT(nn.Module):
    """
    The model. `dtype` is the dtype of activations and matmuls; weights are float32, except in an
    `inference_copy`.
    """

    cfg: GPTConfig

    def __init__(self, cfg: GPTConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.cfg, self.dtype, self.compiled = cfg, dtype, False
        self.backend: Backend = "sdpa"
        """Attention kernel (`attention.choose_backend`)."""
        self.embed = Embedding(cfg.vocab_size, cfg.d_model)
        # One wide table for all layers: its gradient sorts the token ids once
        width = len(cfg.value_layers) * cfg.n_kv_head * cfg.head_dim
        self.value_embeds = Embedding(cfg.vocab_size, width) if width else None
        blocks: Any = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.blocks: Sequence[Block] = blocks
        self.head = Linear(cfg.d_model, cfg.vocab_size)
        if cfg.residual_scalars:
            # arithmetic on the meta device (see `inference_copy`) would import torch.compile
            depth = torch.linspace(0, 1, cfg.n_layer, device="cpu")
            self.residual = nn.Parameter(torch.tensor((1.15 - 0.10 * depth).tolist()))
            self.skip = nn.Parameter(torch.tensor((0.20 - 0.15 * depth).tolist()))
        if cfg.smear:
            self.smear_gate = Linear(min(SMEAR_CHANNELS, cfg.d_model), 1)
            self.smear = nn.Parameter(torch.zeros(1))
        if cfg.backout:
            self.backout = nn.Parameter(torch.full((1,), 0.2))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.weight.device

    # ---- weights -----------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """
        Initialize all weights but the scalars, which the constructor sets. Uniform: matrices
        (standard deviation fan_in^-0.5, 0.4 of that for up projections), value embeddings and
        gates; normal: token embedding and head; zero: output projections, so that each layer starts
        as the identity. Source: karpathy/nanochat's log, 2026-03.
        """
        cfg, modern = self.cfg, self.cfg.residual_scalars

        def uniform(weight: Tensor, scale: float) -> None:
            bound = 3**0.5 * scale * weight.size(-1) ** -0.5  # of a variable with that deviation
            nn.init.uniform_(weight, -bound, bound, generator=generator)

        nn.init.normal_(self.embed.weight, std=0.8 if modern else 1.0, generator=generator)
        nn.init.normal_(self.head.weight, std=0.001 if modern else 0.0, generator=generator)
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            for layer in (attention.q, attention.k, attention.v):
                uniform(layer.weight, 1.0)
            uniform(mlp.up.weight, 0.4 if modern else 1.0)
            for layer in (attention.out, mlp.down):
                nn.init.zeros_(layer.weight)
            if attention.gate is not None:
                nn.init.uniform_(attention.gate.weight, 0.0, 0.02, generator=generator)
        if self.value_embeds is not None:
            bound = 3**0.5 * cfg.d_model**-0.5
            nn.init.uniform_(self.value_embeds.weight, -bound, bound, generator=generator)
        if cfg.smear:
            nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02, generator=generator)

    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        return sum(p.numel() for p in self.parameters())

    def num_matmul_params(self) -> int:
        """Number of parameters of the layers and the LM head: those that cost FLOPs."""
        layers = sum(p.numel() for block in self.blocks for p in block.parameters())
        return layers + self.head.weight.numel()

    def flops_per_token(self) -> float:
        """
        Training FLOPs per token, forward and backward: 6 per matmul parameter, and in each layer
        12 H D per token in the window for attention, ignoring causality.
        """
        cfg, T = self.cfg, self.cfg.max_seq_len
        seen = sum(min(T, cfg.window(layer) or T) for layer in range(cfg.n_layer))
        return 6 * self.num_matmul_params() + 12 * cfg.n_head * cfg.head_dim * seen

    # ---- computation -------------------------------------------------------------------------

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """
        tokens (B, T) -> normalized hidden states, the input of the head (B, T, C).

        With `cache`, the tokens continue the cached sequences and are stored; with `segments`
        (B, T), a token sees only tokens of its own segment.
        """
        cfg, scalars = self.cfg, None
        x0 = self.smear_embeddings(norm(self.embed(tokens).to(self.dtype)), cache, segments)
        values, rope, masks = self.layer_inputs(tokens, cache, segments)
        x = middle = x0
        for layer, block in enumerate(self.blocks):
            if cfg.residual_scalars:
                scalars = torch.stack((self.residual[layer], self.skip[layer]))
            args = (x, x0, scalars, rope, values.get(layer), masks[cfg.window(layer)])
            # with a cache not compiled: shapes vary
            x = block(*args) if cache is None else block.forward(*args, (cache, layer))
            if layer == cfg.n_layer // 2:
                middle = x
        return norm(self.back_out(x, middle))

    def layer_inputs(
        self, tokens: Tensor, cache: CacheView | None, segments: Tensor | None
    ) -> tuple[dict[int, Tensor], Rope, dict[int | None, Any]]:
        """
        What the layers of one forward pass share: layer -> value embedding (B, T, G * D), rotary
        embedding, window -> attention mask. Arguments as in `hidden`.
        """
        cfg, values = self.cfg, {}
        if self.value_embeds is not None:
            wide = self.value_embeds(tokens).to(self.dtype)  # (B, T, value layers * G * D)
            parts = wide.chunk(len(cfg.value_layers), -1)
            values = dict(zip(cfg.value_layers, parts, strict=True))
        T, device = tokens.size(1), tokens.device
        positions = torch.arange(T, device=device) if cache is None else cache.positions
        rope = rotary(positions, cfg.head_dim, cfg.rope_theta, self.dtype)
        windows = set(map(cfg.window, range(cfg.n_layer)))
        masks = {w: make_mask(self.backend, tokens, w, segments, cache) for w in windows}
        return values, rope, masks

    def smear_embeddings(self, x: Tensor, cache: Any, segments: Any) -> Tensor:
        """
        Add to each normalized embedding x (B, T, C) a share of the previous token's, so that the
        first layer already sees pairs of tokens: x_t + amount * sigmoid(w . x_t[:24]) * x_(t-1).

        The first token of a sequence or segment has no previous one. Source: karpathy/nanochat,
        2026-03.
        """
        if not self.cfg.smear:
            return x
        if cache is None:
            previous = F.pad(x[:, :-1], (0, 0, 1, 0))
            if segments is not None:
                starts = segments != F.pad(segments[:, :-1], (1, 0), value=-1)
                previous = previous.masked_fill(starts[..., None], 0.0)
        else:
            previous = cache.previous(x)
        gate = torch.sigmoid(self.smear_gate(x[..., : self.smear_gate.in_features]))  # (B, T, 1)
        return (x + self.smear * gate.float() * previous).to(x.dtype)

    def back_out(self, x: Tensor, middle: Tensor) -> Tensor:
        """
        Subtract a share of the middle layer's output from that of the last, (B, T, C): layers write
        to the residual stream what later layers need, and the head would see all of it.
        """
        return (x - self.backout * middle.float()).to(x.dtype) if self.cfg.backout else x

    def uncapped_logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> logits (..., V) in float32, without the soft cap."""
        return linear(hidden, self.head.weight.to(hidden.dtype)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> soft-capped logits (..., V) in float32."""
        return cap(self.uncapped_logits(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) -> soft-capped logits (B, T, V) in float32. Training uses `loss`."""
        return self.logits(self.hidden(tokens))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        loss: Loss = cross_entropy,
        tensors: Sequence[Tensor] = (),
    ) -> Tensor:
        """
        Sum of a loss over targets other than IGNORE, as a scalar with gradients. Its logits and
        targets are those of all tokens, flat; `tensors` are its further arguments. All are (B, T).
        """
        hidden, head = self.hidden(tokens, segments=segments), self.head
        args = (hidden, head.weight, targets, loss, tensors, self.compiled, head.fp8)
        return chunked_loss(*args)

    @torch.no_grad()
    def token_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        loss: Loss = cross_entropy,
    ) -> Tensor:
        """
        A loss of each target (B, T) in float32, 0 for IGNORE: the nats, or a measure such as the
        entropy.
        """
        hidden = self.hidden(tokens, segments=segments)
        return token_losses(hidden, self.head.weight, targets, self.compiled, loss)

    def new_cache(self, slots: int, capacity: int | None = None) -> KVCache:
        """KV cache for `slots` sequences of up to `capacity` tokens (default: max_seq_len)."""
        cfg, capacity = self.cfg, capacity or self.cfg.max_seq_len
        shape = (cfg.n_layer, slots, cfg.n_kv_head, cfg.head_dim)
        smeared = cfg.d_model if cfg.smear else 0
        return KVCache(shape, capacity, self.device, self.dtype, smeared)

    def compile(self, **options: Any) -> None:
        """Compile the blocks and the loss; equal blocks share one compilation."""
        torch._dynamo.config.recompile_limit = 64  # block variants x (training, scoring)
        for block in self.blocks:
            block.compile(dynamic=False, **options)
        self.compiled = True


def inference_copy(model: GPT) -> GPT:
    """
    Copy of the model with weights in the compute dtype: equal results, less memory traffic per
    token. Weights already in that dtype are shared, except the fused queries, keys and values.
    The few scalars stay in float32.
    """
    with torch.device("meta"):
        twin = type(model)(model.cfg, model.dtype)
    weights = {
        name: p.detach() if p.ndim < 2 else p.detach().to(model.dtype)
        for name, p in model.state_dict().items()
    }
    twin.load_state_dict(weights, assign=True)
    for name, buffer in model.named_buffers():  # also those that are not in the state
        owner, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(owner), leaf, buffer.clone())
    # prefill is not compiled: its lengths vary
    twin.backend = "sdpa" if model.backend == "flex" else model.backend
    for block in twin.blocks:
        block.attention.fuse_qkv()
    return twin.requires_grad_(False)


@torch.no_grad()
def copy_weights(twin: GPT, model: GPT) -> None:
    """Copy weights into an `inference_copy` model in place; its compiled code stays valid."""
    for name, weight in twin.named_parameters():
        weight.copy_(model.get_parameter(name))
    for name, buffer in twin.named_buffers():
        buffer.copy_(model.get_buffer(name))
