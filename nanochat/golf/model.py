"""
Architecture options for parameter golf, as subclasses of GPT.

    checkpoint values -> read_config -> GolfConfig -> new_model -> GolfGPT

Both functions handle every model: plain, recursive, golf, or recursive golf.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import Rope, rotate
from nanochat.gpt import GPT, Attention, GPTConfig, config_from, norm
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT

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
    projection_init: Literal["zero", "scaled"] = "zero"
    """Initialization of output projections: zero, or that of --init divided by sqrt(2 n_layer)."""
    norm_eps: float | None = None
    """Epsilon of RMS norm. Default: that of torch, 1.2e-7."""


@dataclass(frozen=True)
class GolfConfig(GolfOptions, GPTConfig):
    """GPTConfig with parameter golf options. Raises ValueError for invalid values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = self.head_dim if self.rope_dims is None else self.rope_dims
        if not (2 <= dims <= self.head_dim and dims % 2 == 0):
            raise ValueError(f"rope_dims must be even, 2 to head_dim {self.head_dim}, got {dims}")
        if not 0 <= self.xsa_last_n <= self.n_layer:
            raise ValueError(f"xsa_last_n must be 0 to {self.n_layer}, got {self.xsa_last_n}")
        if self.qk_gain_init is not None and not 0 < self.qk_gain_init < math.inf:
            raise ValueError(f"qk_gain_init must be positive, got {self.qk_gain_init}")
        if self.norm_eps is not None and not 0 < self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}")


@dataclass(frozen=True)
class RecursiveGolfConfig(RecursiveConfig, GolfConfig):
    """A recursive shape with golf options."""


def exclude_self(y: Tensor, v: Tensor) -> Tensor:
    """
    Remove from y (B, T, H, D) the component along v (B, T, G, D), the value of the same token.

    Source: exclusive self-attention, arXiv:2603.09078.
    """
    grouped = y.unflatten(2, (v.size(2), -1))  # (B, T, G, H/G, D)
    n = F.normalize(v.float(), dim=-1).to(v.dtype)[:, :, :, None]
    return (grouped - (grouped * n).sum(-1, keepdim=True) * n).flatten(2, 3)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` the first R = 2 * num_angles channels of x (B, T, heads, D)."""
    R = 2 * cos.size(-1)
    return torch.cat((rotate(x[..., :R], cos, sin), x[..., R:]), dim=-1)


class GolfAttention(Attention):
    """Attention with golf options."""

    def __init__(self, cfg: GolfConfig, layer: int):
        super().__init__(cfg, layer)
        self.norm_eps = cfg.norm_eps
        self.exclusive = layer >= cfg.n_layer - cfg.xsa_last_n
        self.gain = None
        if cfg.qk_gain_init is not None:
            self.gain = nn.Parameter(torch.ones(cfg.n_head))
            self.scale = cfg.head_dim**-0.5

    def normalize(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        q, k = (rotate_first(norm(x, self.norm_eps), *rope) for x in (q, k))
        return q if self.gain is None else q * self.gain.to(q.dtype)[:, None], k

    def project(self, y: Tensor, v: Tensor) -> Tensor:
        return super().project(exclude_self(y, v) if self.exclusive else y, v)


class GolfGPT(GPT):
    """GPT with golf options."""

    cfg: GolfConfig
    attention_class = GolfAttention

    def __init__(self, cfg: GolfConfig, dtype: torch.dtype = torch.float32):
        super().__init__(cfg, dtype)
        self.rotary_dims, self.norm_eps = cfg.rope_dims or cfg.head_dim, cfg.norm_eps
        if cfg.tie_embeddings:
            self.head = None  # type: ignore[assignment]
        if cfg.projection_init == "scaled":
            self.output_scale = (2 * cfg.n_layer) ** -0.5

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        super().init_weights(generator)
        if self.cfg.qk_gain_init is not None:
            for block in self.blocks:
                nn.init.constant_(block.get_parameter("attention.gain"), self.cfg.qk_gain_init)

    def init_embeddings(self, generator: torch.Generator | None) -> None:
        """As in GPT, but a tied embedding starts small, for nearly uniform predictions."""
        if self.head is not None:
            return super().init_embeddings(generator)
        nn.init.normal_(self.embed.weight, std=TIED_STD, generator=generator)

    def draw(self, weight: Tensor, scale: float, generator: torch.Generator | None) -> None:
        if self.cfg.init == "uniform" or scale == 0:
            return super().draw(weight, scale, generator)
        M, N = weight.shape  # orthonormal entries have std max(M, N)^-0.5
        gain = scale * max(1.0, M / N) ** 0.5
        nn.init.orthogonal_(weight, gain=gain, generator=generator)

    def param_roles(self) -> dict[str, str]:
        roles = super().param_roles()
        if self.head is None:
            roles["embed.weight"] = "tied"
        return {name: "gain" if name.endswith(".gain") else r for name, r in roles.items()}


class RecursiveGolfGPT(RecursiveGPT, GolfGPT):
    """A recursive GPT with golf options."""

    cfg: RecursiveGolfConfig  # type: ignore[assignment]


MODELS = {
    GPTConfig: GPT,
    RecursiveConfig: RecursiveGPT,
    GolfConfig: GolfGPT,
    RecursiveGolfConfig: RecursiveGolfGPT,
}
OPTIONS = {f.name: f.default for f in fields(GolfOptions)}


def read_config(values: Mapping[str, Any]) -> GPTConfig:
    """
    Rebuild a configuration from its `asdict` values, even those of old commits. The result is a
    GolfConfig only if a golf option differs from its default.
    """
    chosen = {k: v for k, v in values.items() if k not in OPTIONS or v != OPTIONS[k]}
    if OPTIONS.keys() & chosen.keys():
        return config_from(RecursiveGolfConfig if "n_loops" in values else GolfConfig, chosen)
    return config_from(RecursiveConfig if "n_loops" in values else GPTConfig, chosen)


def new_model(cfg: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model with uninitialized weights."""
    return MODELS[type(cfg)](cfg, dtype)


def callbacks(*_: Any) -> list:
    """Callbacks that the golf options require: none."""
    return []
