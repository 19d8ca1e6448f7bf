"""Anomaly detection: non-finite values, loss spikes, ranks that differ."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from nanochat.anomaly import AnomalyDetector, AnomalyState, RankMismatchError, require_equal_ranks
from nanochat.checkpoint import Progress
from nanochat.train import run_loop
from tests.test_train import make_run, rows_of


def curve(seed, steps=1100, start=9.0, end=2.5, noise=0.03):
    """A noisy loss curve like that of pretraining: falls fast, then slowly."""
    rng = np.random.default_rng(seed)
    falling = end + (start - end) * (1 + np.arange(steps) / 8) ** -0.7
    return falling * np.exp(noise * rng.standard_normal(steps))


def alarms(machine, losses):
    """Steps that are classified as spikes."""
    detector = AnomalyDetector(AnomalyState(), machine)
    return [
        s for s, loss in enumerate(losses) if detector.record(s, loss, 1.0, lambda: "x") == "spike"
    ]


@pytest.mark.parametrize("step", [3, 70, 1000])
def test_R14_spike_is_detected_early_and_late_and_logged(machine, capsys, step):
    for seed in range(10):
        losses = curve(seed)
        losses[step] *= 5
        assert alarms(machine, losses) == [step]
    assert f"step {step}: loss " in capsys.readouterr().out


def test_R14_clean_curves_raise_no_false_alarm(machine):
    """Curves like those of pretraining and of short finetuning, which is noisier."""
    for seed in range(10):
        assert not alarms(machine, curve(seed))
        assert not alarms(machine, curve(seed, 300, start=1.2, end=0.2, noise=0.25))


@pytest.mark.parametrize(
    "steps", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_R14_clean_runs_raise_no_false_alarm(machine, steps, record_property):
    seeds = range(10 if steps > 60 else 5)
    for seed in seeds:
        run, *_ = make_run(machine, num_steps=steps, seed=seed)
        progress = Progress()
        run_loop(run, progress)
        assert (progress.health.spikes, progress.health.bad_steps) == (0, 0)
    record_property("clean steps without an alarm", len(seeds) * steps)


def test_R14_spike_step_is_trained_and_logged(machine, capsys):
    now = {"step": -1}

    def rows(step):
        now["step"] = step
        return rows_of(step)

    run, saved, logged = make_run(machine, num_steps=12, rows=rows)
    plain = run.model.loss
    run.model.loss = lambda x, y: plain(x, y) * (40 if now["step"] == 8 else 1)
    steps_taken = []
    update = run.optimizer.step
    run.optimizer.step = lambda *a: (steps_taken.append(now["step"]), update(*a))
    progress = Progress()
    run_loop(run, progress)
    assert (progress.health.spikes, progress.health.bad_steps) == (1, 0)
    assert 8 in steps_taken
    assert progress.smooth_loss < 2  # the average excludes the spike
    assert "rows rows of 8" in capsys.readouterr().out
    losses = {step: values["loss"] for step, values in logged if "loss" in values}
    assert losses[8] > 4 * losses[7]  # the logged loss includes it


def test_R14_new_loss_level_is_accepted_after_window(machine):
    found = alarms(machine, [1.0] * 20 + [9.0] * 60)
    assert found == list(range(20, 28))


def test_loss_near_zero_may_grow_manyfold(machine):
    assert not alarms(machine, [0.001, 0.001, 0.001, 0.01, 0.2, 0.4])


def test_anomaly_state_survives_resume():
    progress, again = Progress(step=3, health=AnomalyState(1, 2, [3.0, 2.9])), Progress()
    again.load_state_dict(progress.state_dict())
    assert again == progress


def test_R13_any_non_finite_value_is_bad(machine):
    detector = AnomalyDetector(AnomalyState(), machine)
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0)):
        assert detector.classify(loss, norm) == "bad"
    assert detector.classify(1.0, 0.0) == "good"


class Ranks:
    """Stub of a DistContext with three ranks."""

    world_size = 3

    def __init__(self, *others):
        self.others = others

    def waiting(self, what):
        return nullcontext()

    def gather(self, sums):
        kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
        return [sums, *(
            [int(x.view(kinds[x.dtype]).sum(dtype=torch.int64)) for x in weights.values()]
            for weights in self.others
        )]  # fmt: skip


def test_R15_flipped_bit_is_found_with_parameter_name(record_property):
    rng = np.random.default_rng(0)
    weights = {name: torch.randn(50, 30) for name in ("a", "b", "c")}
    for _ in range(100):
        other = {name: w.clone() for name, w in weights.items()}
        bits = other["b"].view(torch.int32).view(-1)
        bits[rng.integers(bits.numel())] ^= 1 << int(rng.integers(31))
        with pytest.raises(RankMismatchError, match=r"before step 7: b differs on rank 2 of 3"):
            require_equal_ranks(weights, Ranks(weights, other), 7)
    require_equal_ranks(weights, Ranks(weights, weights), 7)
    odd = {"a": torch.ones(2, 3, dtype=torch.bfloat16)}
    with pytest.raises(RankMismatchError, match="a differs on rank 1 of 3"):
        require_equal_ranks(odd, Ranks({"a": -odd["a"]}, odd), 7)
    record_property("bit flips found", 100)
