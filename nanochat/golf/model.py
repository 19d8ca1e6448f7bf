"""
Architecture options for parameter golf, as a subclass of GPT.

    checkpoint values -> read_config -> GolfConfig -> new_model -> GolfGPT

Both functions also handle plain models, so that they can be exported too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import CacheView, Rope, attend, rotary, rotate
from nanochat.gpt import GPT, Attention, GPTConfig, linear, norm

TIED_STD = 0.005  # of an embedding tied to the LM head


@dataclass(frozen=True)
class GolfOptions:
    """Options that GolfConfig adds to GPTConfig; also flags of scripts.golf.base_train."""

    tie_embeddings: bool = False
    """Share one matrix between the token embedding and the LM head."""
    rope_dims: int | None = None
    """Rotary dimensions per head (partial RoPE). Default: all."""
    xsa_last_n: int = 0
    """Number of last layers with exclusive self-attention."""
    qk_gain_init: float | None = None
    """Initial value of a learned gain per query head. Default: the fixed gain of GPTConfig."""
    init: Literal["uniform", "orthogonal"] = "uniform"
    """Initialization of block matrices; entries have standard deviation fan_in^-0.5."""


@dataclass(frozen=True)
class GolfConfig(GolfOptions, GPTConfig):
    """GPTConfig with parameter golf options. Raises ValueError for invalid values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = self.head_dim if self.rope_dims is None else self.rope_dims
        if not 2 <= dims <= self.head_dim or dims % 2 or self.head_dim % 2:
            raise ValueError(f"rope_dims {dims}, 2 to head_dim {self.head_dim}: both must be even")
        if not 0 <= self.xsa_last_n <= self.n_layer:
            raise ValueError(f"xsa_last_n must be 0 to {self.n_layer}, got {self.xsa_last_n}")
        if self.qk_gain_init is not None and not 0 < self.qk_gain_init < math.inf:
            raise ValueError(f"qk_gain_init must be positive, got {self.qk_gain_init}")


def exclude_self(y: Tensor, v: Tensor) -> Tensor:
    """
    Remove from y (B, T, H, D) the component along v (B, T, G, D), the value of the same token.

    Source: exclusive self-attention, arXiv:2603.09078.
    """
    grouped = y.unflatten(2, (v.size(2), -1))  # (B, T, G, H/G, D)
    n = F.normalize(v.float(), dim=-1).to(v.dtype)[:, :, :, None]
    return (grouped - (grouped * n).sum(-1, keepdim=True) * n).flatten(2, 3)


class GolfAttention(Attention):
    """Attention with a learned gain per query head, and exclusive self-attention."""

    def __init__(self, cfg: GolfConfig, layer: int):
        super().__init__(cfg, layer)
        self.exclusive = layer >= cfg.n_layer - cfg.xsa_last_n
        if cfg.qk_gain_init is not None:  # instead of the fixed gain
            self.scale = cfg.head_dim**-0.5

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        value_embed: Tensor | None,
        gain: Tensor | None,
        mask: Any,
        cache: Any = None,
    ) -> Tensor:
        """As in Attention; the queries are multiplied by `gain` (H,)."""
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
        q, k = rotate(norm(q), *rope), rotate(norm(k), *rope)
        if gain is not None:
            q = q * gain.to(q.dtype)[:, None]
        y = attend(q, k, v, mask, self.scale, cache)  # (B, T, H, D)
        return self.out((exclude_self(y, v) if self.exclusive else y).flatten(2))  # (B, T, C)


class TiedHead(nn.Module):
    """LM head with the weights of the token embedding, which it does not own."""

    fp8 = False

    def __init__(self, embed: nn.Module):
        super().__init__()
        self.tied = [embed]  # in a list, the embedding is no submodule, and so is saved only once

    @property
    def weight(self) -> Any:
        """The weights of the token embedding, (V, C)."""
        return self.tied[0].weight


class GolfGPT(GPT):
    """GPT with golf options."""

    cfg: GolfConfig

    def __init__(self, cfg: GolfConfig, dtype: torch.dtype = torch.float32):
        super().__init__(cfg, dtype)
        for layer, block in enumerate(self.blocks):
            block.attention = GolfAttention(cfg, layer)
        if cfg.tie_embeddings:
            head: Any = TiedHead(self.embed)
            self.head = head
        if cfg.qk_gain_init is not None:  # of all layers and heads; a vector is not quantized
            self.gains = nn.Parameter(torch.ones(cfg.n_layer * cfg.n_head))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """As in GPT, but a tied embedding starts small, for nearly uniform predictions."""
        super().init_weights(generator)
        cfg = self.cfg
        if cfg.tie_embeddings:
            nn.init.normal_(self.embed.weight, std=TIED_STD, generator=generator)
        if cfg.qk_gain_init is not None:
            self.gains.fill_(cfg.qk_gain_init)
        for attention, mlp in ((block.attention, block.mlp) for block in self.blocks):
            scales = dict.fromkeys((attention.q, attention.k, attention.v), 1.0)
            scales[mlp.up] = 0.4 if cfg.residual_scalars else 1.0
            for layer, scale in scales.items() if cfg.init == "orthogonal" else ():
                M, N = layer.weight.shape  # orthonormal entries have a std of max(M, N)^-0.5
                gain = scale * math.sqrt(max(1.0, M / N))
                nn.init.orthogonal_(layer.weight, gain=gain, generator=generator)

    def hidden(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """As in GPT, with the gains of each layer."""
        cfg, scalars, gain = self.cfg, None, None
        x0 = self.smear_embeddings(norm(self.embed(tokens).to(self.dtype)), cache, segments)
        values, rope, masks = self.layer_inputs(tokens, cache, segments)
        x = middle = x0
        for layer, block in enumerate(self.blocks):
            if cfg.residual_scalars:
                scalars = torch.stack((self.residual[layer], self.skip[layer]))
            if cfg.qk_gain_init is not None:
                gain = self.gains.view(cfg.n_layer, -1)[layer]  # (H,)
            args = (x, x0, scalars, rope, values.get(layer), gain, masks[cfg.window(layer)])
            x = block(*args) if cache is None else block.forward(*args, (cache, layer))
            if layer == cfg.n_layer // 2:
                middle = x
        return norm(self.back_out(x, middle))

    def layer_inputs(
        self, tokens: Tensor, cache: CacheView | None = None, segments: Tensor | None = None
    ) -> tuple[dict[int, Tensor], Rope, dict[int | None, Any]]:
        """As in GPT; with partial RoPE, the remaining channel pairs are rotated by 0."""
        cfg, (values, rope, masks) = self.cfg, super().layer_inputs(tokens, cache, segments)
        if cfg.rope_dims is not None:
            T, device = tokens.size(1), tokens.device
            positions = torch.arange(T, device=device) if cache is None else cache.positions
            cos, sin = rotary(positions, cfg.rope_dims, cfg.rope_theta, self.dtype)
            rest = (0, (cfg.head_dim - cfg.rope_dims) // 2)
            rope = F.pad(cos, rest, value=1.0), F.pad(sin, rest)
        return values, rope, masks


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """Rebuild the configuration of a plain or golf model from its `asdict`."""
    is_golf = any(option.name in values for option in fields(GolfOptions))
    return (GolfConfig if is_golf else GPTConfig)(**values)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model with uninitialized weights."""
    return GolfGPT(cfg, dtype) if isinstance(cfg, GolfConfig) else GPT(cfg, dtype)
