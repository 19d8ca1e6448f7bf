"""
Presets and flags of the recursive model.

    GPTConfig for a depth -> RecursionConfig.apply -> RecursiveConfig

By default, prelude and coda take a quarter of the layers each; the core takes the rest.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanochat.gpt import GPTConfig
from nanochat.recursion.model import RecursiveConfig, Supervise

Preset = Literal["none", "share2", "moderate", "aggressive", "extreme"]
FULL: dict[str, Any] = {"n_loops": 4, "supervise": "full"}
PRESETS: dict[Preset, dict[str, Any]] = {
    "share2": {"n_loops": 2, "supervise": "last"},
    "moderate": {**FULL, "supervision_base": 3.0, "improvement_bonus": 0.5},
    "aggressive": {**FULL, "supervision_base": 5.0, "improvement_bonus": 1.0},
    "extreme": {**FULL, "supervision_base": 10.0, "improvement_bonus": 2.0},
}

# measured: 3 seeds each, 2026-11 (dev/LOG.md)
WARNING = (
    "warning    recursion preset {}: after 3 minutes on one CPU core, aggressive and extreme were "
    "0.40 bits per byte worse than a plain model of equal FLOPs, and no better than the same "
    "layers applied once. The refinements of 80% or more reported for such presets come from a "
    "bonus that also raises the first loop's loss, to five times the loss of chance; "
    "here the bonus does that only with --supervise=undetached"
)


@dataclass(frozen=True)
class RecursionConfig:
    recursion_preset: Preset = "none"
    """Apply the middle layers several times. share2: twice; moderate, aggressive, extreme: four
    times with a loss at every loop, increasingly steep weights and an improvement bonus."""
    n_loops: int | None = None
    """Number of times the core is applied; makes the model recursive even without a preset.
    Default: the preset's."""
    n_prelude: int | None = None
    """Layers before the core. Default: a quarter of depth."""
    n_core: int | None = None
    """Layers of the core. Default: the remaining layers."""
    n_coda: int | None = None
    """Layers after the core. Default: a quarter of depth."""
    supervise: Supervise | None = None
    """Loops with a loss. last: the last; sampled: the last and one sampled per step; full: all;
    undetached: all, with a bonus that also raises the previous loop's loss, to reproduce high
    refinement. Default: the preset's, else last."""
    supervision_base: float | None = None
    """Loop k has a weight proportional to supervision_base^k. Default: the preset's, else 3."""
    improvement_bonus: float | None = None
    """Extra weight of each supervised loop after the first: this value divided by the previous
    loop's loss, at most four times the loop's own weight. Default: the preset's, else 0."""
    bptt_loops: int | None = None
    """Detach the state before the last N loops. Default: never."""

    def given(self) -> dict[str, Any]:
        """Return the preset's RecursiveConfig values, overridden by flags."""
        flags = {name: value for name, value in asdict(self).items() if value is not None}
        return {**PRESETS.get(flags.pop("recursion_preset"), {}), **flags}

    def apply(self, plain: GPTConfig) -> GPTConfig:
        """
        Return the recursive configuration with the same layers, or `plain` if recursion is off.

        Raises ValueError for inconsistent values, or if flags are set but n_loops is not.
        """
        values = self.given()
        if not values:
            return plain
        if "n_loops" not in values:
            raise ValueError(
                f"{', '.join(values)} require a recursive model; add --recursion_preset or "
                "--n_loops"
            )
        quarter = max(1, plain.n_layer // 4) if plain.n_layer >= 3 else 0
        values = {"n_prelude": quarter, "n_coda": quarter, **values}
        core = plain.n_layer - values["n_prelude"] - values["n_coda"]
        return RecursiveConfig(**asdict(plain), **{"n_core": core, **values})

    def warning(self) -> str | None:
        """Return a warning about the quality of the preset, or None."""
        preset = self.recursion_preset
        return None if preset in ("none", "share2") else WARNING.format(preset)
