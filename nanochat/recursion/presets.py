"""
Layers that are passed more than once, from the command line.

    GPTConfig of a depth -> RecursionConfig.apply -> RecursiveConfig, or the same GPTConfig
    GPTConfig of a depth -> RepeatConfig.apply -> GPTConfig with repeated layers

Recursion: a quarter of the layers is prelude, a quarter coda, the rest the core. Repetition: a few
layers twice, with nothing added, from a share of the run on. Pure arithmetic.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nanochat.gpt import GPT, GPTConfig
from nanochat.recursion.model import Supervise, recursive_config

Preset = Literal["none", "share2", "moderate", "aggressive", "extreme"]
FULL: dict[str, Any] = {"n_loops": 4, "supervise": "full"}
PRESETS: dict[Preset, dict[str, Any]] = {
    "share2": {"n_loops": 2, "supervise": "last"},
    "moderate": {**FULL, "supervision_base": 3.0, "improvement_bonus": 0.5},
    "aggressive": {**FULL, "supervision_base": 5.0, "improvement_bonus": 1.0},
    "extreme": {**FULL, "supervision_base": 10.0, "improvement_bonus": 2.0},
}

WARNED = ("moderate", "aggressive", "extreme")
# measured: dev/recursion_arms.py, dev/refinement_toy.py, 3 seeds each, 2026-11 (dev/LOG.md)
WARNING = (
    "warning    recursion preset {}: after 3 minutes of a CPU core, aggressive and extreme ended "
    "0.40 bits per byte above a plain model of equal FLOPs, and no better than the same layers "
    "passed once. Such presets are known for refinements of 80% and more: that comes from a bonus "
    "which also drives the first loop up, to five times the loss of guessing; here it cannot"
)


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
    """Loops trained to predict beside the last: last, none; sampled, one drawn at each step; full,
    all. Default: the preset's, else last."""
    supervision_base: float | None = None
    """Loop k has a weight proportional to this to the power k. Default: the preset's, else 3."""
    improvement_bonus: float | None = None
    """Weight added to each loop that follows a supervised one, divided by the loss of that; at most
    four times the loop's own weight. Default: the preset's, else 0."""
    bptt_loops: int | None = None
    """Gradients reach back through so many last loops. Default: all."""

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
        return recursive_config(plain, **parts(plain.n_layer, values), **values)

    def warning(self) -> str | None:
        """What to expect of a preset that others have recommended."""
        return WARNING.format(self.recursion_preset) if self.recursion_preset in WARNED else None


def parts(depth: int, values: dict[str, Any]) -> dict[str, int]:
    """Layers of prelude, core and coda, taken out of `values` where they are given there."""
    quarter = max(1, depth // 4) if depth >= 3 else 0
    prelude = values.pop("n_prelude", quarter)
    coda = values.pop("n_coda", quarter)
    core = values.pop("n_core", depth - prelude - coda)
    return {"n_prelude": prelude, "n_core": core, "n_coda": coda}


@dataclass(frozen=True)
class RepeatConfig:
    repeat_layers: str | None = None
    """Layers first-last, counted from 0, that tokens pass twice, as in 4-5."""
    repeat_from: float = 0.0
    """Share of the run from which they do; before, every layer is passed once."""

    def __post_init__(self) -> None:
        if not 0 <= self.repeat_from < 1:
            raise ValueError(f"repeat_from is a share of the run below 1, got {self.repeat_from}")
        if self.repeat_from and self.repeat_layers is None:
            raise ValueError("repeat_from needs --repeat_layers, as 4-5")

    def apply(self, plain: GPTConfig) -> GPTConfig:
        """The shape with its repeated layers. Raises ValueError for layers that are not there."""
        if self.repeat_layers is None:
            return plain
        return replace(plain, repeat_layers=self.repeat_layers)

    def flops_per_token(self, model: GPT) -> float:
        """Training FLOPs per token, the mean over a run of `model`, which repeats already."""
        twice = range(*model.cfg.repeated())
        return model.flops_per_token() - self.repeat_from * sum(map(model.layer_flops, twice))


class LateRepetition:
    """Lets a model with repeated layers pass each once until a share of the run is done."""

    def __init__(self, model: GPT, start: float):
        self.model, self.start, self.whole = model, start, model.cfg

    def __call__(self, done: float) -> None:
        """`done` is the share of the run behind us. A checkpoint saves the shape of its moment."""
        if self.start:
            late = done >= self.start
            self.model.cfg = self.whole if late else replace(self.whole, repeat_layers=None)
