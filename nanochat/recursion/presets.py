"""
Presets of the recursive model, and its flags.

    GPTConfig of a depth -> RecursionConfig.apply -> RecursiveConfig

By default a quarter of the layers is prelude, a quarter coda, the rest the core.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nanochat.gpt import GPTConfig
from nanochat.recursion.model import Supervise, recursive_config
from nanochat.scaling import default_head_dim

Preset = Literal["none", "share2", "moderate", "aggressive", "extreme"]
FULL: dict[str, Any] = {"n_loops": 4, "supervise": "full"}
PRESETS: dict[Preset, dict[str, Any]] = {
    "share2": {"n_loops": 2, "supervise": "last"},
    "moderate": {**FULL, "supervision_base": 3.0, "improvement_bonus": 0.5},
    "aggressive": {**FULL, "supervision_base": 5.0, "improvement_bonus": 1.0},
    "extreme": {**FULL, "supervision_base": 10.0, "improvement_bonus": 2.0},
}

# measured: dev/recursion_arms.py, dev/refinement_toy.py, 3 seeds each, 2026-11 (dev/LOG.md)
WARNING = (
    "warning    recursion preset {}: after 3 minutes of a CPU core, aggressive and extreme ended "
    "0.40 bits per byte above a plain model of equal FLOPs, and no better than the same layers "
    "passed once. Such presets are known for refinements of 80% and more: that comes from a bonus "
    "which also drives the first loop up, to five times the loss of guessing; here it cannot"
)


@dataclass(frozen=True)
class WidthConfig:
    """Another width than that of the depth; parameter golf has it too."""

    d_model: int | None = None
    """Width: channels of the residual stream. Default: 64 per layer."""
    head_dim: int | None = None
    """Channels of each head. Default: 128 where they divide a width of at least 512, else 64."""

    def apply(self, cfg: GPTConfig) -> GPTConfig:
        """The configuration in this width. Raises ValueError where heads do not divide it."""
        width = self.d_model or cfg.d_model
        head_dim = self.head_dim or default_head_dim(width)
        heads = width // head_dim
        if width % head_dim:
            raise ValueError(f"head_dim {head_dim} must divide the width {width}: give --head_dim")
        return replace(cfg, d_model=width, head_dim=head_dim, n_head=heads, n_kv_head=heads)


@dataclass(frozen=True)
class RecursionConfig:
    recursion_preset: Preset = "none"
    """Let tokens pass the middle layers several times: share2 twice; moderate, aggressive, extreme
    four times, all loops trained to predict with ever steeper weights and a bonus for improving."""
    n_loops: int | None = None
    """How often tokens pass the core. Default: as the preset has it; without one, given alone, it
    makes the model recursive."""
    n_prelude: int | None = None
    """Layers before the core. Default: a quarter of the depth."""
    n_core: int | None = None
    """Layers of the core. Default: what prelude and coda leave."""
    n_coda: int | None = None
    """Layers after the core. Default: a quarter of the depth."""
    supervise: Supervise | None = None
    """Loops trained to predict besides the last: last, none; sampled, one drawn at each step; full,
    all. Default: the preset's, else last."""
    supervision_base: float | None = None
    """Loop k has a weight proportional to this to the power k. Default: the preset's, else 3."""
    improvement_bonus: float | None = None
    """Weight added to each loop that follows a supervised one, divided by the loss of that; at most
    four times the loop's own weight. Default: the preset's, else 0."""
    bptt_loops: int | None = None
    """Gradients reach back through the last N loops. Default: all."""

    def given(self) -> dict[str, Any]:
        """The preset's values, those of the flags over them; names of RecursiveConfig."""
        flags = {name: value for name, value in asdict(self).items() if value is not None}
        return {**PRESETS.get(flags.pop("recursion_preset"), {}), **flags}

    def apply(self, plain: GPTConfig) -> GPTConfig:
        """
        The recursive shape of the same layers; `plain` itself where none is asked for.

        Raises ValueError for numbers that do not fit together, or flags without a number of loops.
        """
        values = self.given()
        if not values:
            return plain
        if "n_loops" not in values:
            raise ValueError(
                f"{', '.join(values)} belong to a recursive model: give --recursion_preset or "
                "--n_loops too"
            )
        quarter = max(1, plain.n_layer // 4) if plain.n_layer >= 3 else 0
        values = {"n_prelude": quarter, "n_coda": quarter, **values}
        core = plain.n_layer - values["n_prelude"] - values["n_coda"]
        return recursive_config(plain, **{"n_core": core, **values})

    def warning(self) -> str | None:
        """What to expect of a preset that others have recommended."""
        preset = self.recursion_preset
        return None if preset in ("none", "share2") else WARNING.format(preset)
