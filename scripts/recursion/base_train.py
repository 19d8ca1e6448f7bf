"""
Pretrain a recursive base model, which applies its middle layers several times.

    python -m scripts.recursion.base_train --depth=4 --recursion_preset=share2 --num_iterations=20
    torchrun --nproc_per_node=8 -m scripts.recursion.base_train -- --depth=24 --n_loops=2

Reads   the inputs of scripts.base_train; accepts its flags and more
Writes  the outputs of scripts.base_train
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nanochat.checkpoint import build_model
from nanochat.config import settings, start
from nanochat.eval_bpb import validate_text
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import MuonAdamW, decay_factor, lr_factor, muon_momentum
from nanochat.recipe import make_recipe
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT, Supervise
from nanochat.recursion.verdict import step_metrics, validation_metrics
from nanochat.rows import pack_rows
from nanochat.run import Run, keep_batch, skip_if_finished
from nanochat.scaling import plan_horizon, scaled_rules
from scripts.base_train import (
    SECTION,
    BaseTrain,
    choose_windows,
    open_device,
    open_few_shot,
    open_inputs,
    sample_and_score,
    summarize,
    text_tables,
)

Preset = Literal["none", "share2", "moderate", "aggressive", "extreme"]
FULL: dict[str, Any] = {"n_loops": 4, "supervise": "full"}
PRESETS: dict[Preset, dict[str, Any]] = {
    "share2": {"n_loops": 2, "supervise": "last"},
    "moderate": {**FULL, "supervision_base": 3.0, "improvement_bonus": 0.5},
    "aggressive": {**FULL, "supervision_base": 5.0, "improvement_bonus": 1.0},
    "extreme": {**FULL, "supervision_base": 10.0, "improvement_bonus": 2.0},
}
WEAK_PRESETS = ("moderate", "aggressive", "extreme")
WARNING = (  # measured: 3 seeds each, 2026-11 (dev/LOG.md)
    "warning    recursion preset {}: aggressive and extreme were worse than a plain model of equal "
    "FLOPs by 0.40 bits per byte, and no better than their layers applied once"
)


@dataclass(frozen=True)
class RecursionFlags:
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
    """Loops with a loss. last: the last; sampled: the last and one sampled per step; full: all.
    Default: the preset's, else last."""
    supervision_base: float | None = None
    """Loop k has a weight proportional to supervision_base^k. Default: the preset's, else 3."""
    improvement_bonus: float | None = None
    """Extra weight of each supervised loop after the first: this value divided by the previous
    loop's loss, at most four times the loop's own weight. Default: the preset's, else 0."""
    bptt_loops: int | None = None
    """Detach the state before the last N loops. Default: never."""

    def apply(self, plain: GPTConfig) -> GPTConfig:
        """
        Return the recursive configuration with the same layers, or `plain` if recursion is off. By
        default, prelude and coda take a quarter of the layers each; the core takes the rest.

        Raises ValueError for inconsistent values, or if flags are set but n_loops is not.
        """
        flags = {name: value for name, value in asdict(self).items() if value is not None}
        values = {**PRESETS.get(flags.pop("recursion_preset"), {}), **flags}
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


@dataclass(frozen=True)
class RecursionTrain(BaseTrain):
    recursion: RecursionFlags = field(default_factory=RecursionFlags)


def main(cfg: RecursionTrain) -> None:
    seed, schedule = cfg.train.seed, cfg.schedule
    tag = cfg.train.model_tag or f"d{cfg.depth}"
    dist, before = open_device(cfg, tag)
    if cfg.recursion.recursion_preset in WEAK_PRESETS:
        dist.print0(WARNING.format(cfg.recursion.recursion_preset))

    # Tokenizer, text and rows; exit if this run has already finished
    tokenizer, text, rows = open_inputs(cfg, dist)
    inputs = {"rows": rows.recipe, "tokenizer": tokenizer.fingerprint, "data": text.fingerprint}
    recipe = make_recipe(cfg, inputs)
    resolved = {**settings(cfg), "eval_tokens": cfg.validation.tokens(dist)}
    if skip_if_finished(SECTION, recipe, cfg.train.skip_if_done, dist, tag):
        return dist.close()

    # Model (without flags of recursion, a plain one to compare with), horizon, optimizer, rows
    plain = cfg.model_config(tokenizer.vocab_size, choose_windows(before, dist))
    shape = cfg.recursion.apply(plain)
    kind = GPT if shape is plain else RecursiveGPT
    model = build_model(shape, dist.device, dist.dtype, seed, kind)
    horizon = plan_horizon(model, keep_batch(cfg.horizon, before), dist.world_size)
    num_steps, batch_tokens = horizon.num_steps, horizon.batch_tokens
    rules = scaled_rules(cfg.train.optim, horizon, shape.d_model)
    optimizer = MuonAdamW(model, rules, dist)
    suite = open_few_shot(cfg, text, dist)

    run = Run("base", tag, recipe, model, optimizer, tokenizer, cfg.train, dist)
    num_rows = num_steps * batch_tokens // cfg.max_seq_len
    lengths = [*dict.fromkeys((*before.get("lengths", ()), num_rows))]  # if it was made longer
    run.state |= {"source": text.describe(), "settings": resolved, "lengths": lengths}
    rows = dist.on_main(lambda: pack_rows(rows, text, tokenizer, lengths))
    few_shot: dict[str, Any] = {}
    with run.begin(num_steps, batch_tokens, cfg.compile):
        validation = validate_text(cfg.validation, rows, tokenizer, dist)
        for step in run.steps():  # from the last checkpoint on; the last pass saves and evaluates
            if run.due(cfg.train.save_every):
                run.save()  # the trained model before its evaluation, which may fail
            if run.due(cfg.train.eval_every):
                if isinstance(model, RecursiveGPT):
                    metrics = validation_metrics(model, validation, run.device_rows, run.stop)
                else:
                    metrics = validation.score(model.token_losses, run.device_rows, run.stop)
                run.log(metrics)
            few_shot |= sample_and_score(run, cfg, suite)
            if run.finished:
                break
            metrics = {}
            if isinstance(model, RecursiveGPT):
                model.begin_step(step, seed)  # chooses the loops with a loss
                run.backward(run.load(rows))
                run.reduce()  # ends at a stop request, on all ranks
                metrics = step_metrics(model, dist)
            else:
                run.backward(run.load(rows))
            run.update(
                lr_factor(step, num_steps, schedule),
                muon_momentum(step, num_steps, schedule),
                decay_factor(step, num_steps),
                **metrics,
            )
    values = {**summarize(run, schedule, rules), **run.measurements(), **few_shot}
    run.finish(SECTION, values, text_tables(run, rows))


if __name__ == "__main__":
    start(main, RecursionTrain(), __doc__)
