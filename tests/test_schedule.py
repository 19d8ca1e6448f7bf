"""Learning rate, momentum and decay schedules."""

import pytest

from nanochat.optim import ScheduleConfig, decay_factor, lr_factor, muon_momentum

CFG = ScheduleConfig(warmup_steps=40, warmdown_ratio=0.5, final_lr_frac=0.1)


def test_lr_warms_up_stays_constant_and_decays():
    factors = [lr_factor(s, 1000, CFG) for s in range(1000)]
    assert factors[0] == 1 / 40 and factors[39] == 1.0
    assert factors[40:500] == [1.0] * 460
    assert all(a > b for a, b in zip(factors[501:], factors[502:], strict=False))
    assert factors[-1] == pytest.approx(0.1, abs=0.002)


def test_short_run_never_reaches_peak_learning_rate():
    assert max(lr_factor(s, 20, CFG) for s in range(20)) < 0.5
    assert 0 < lr_factor(0, 1, CFG) <= 1


def test_momentum_and_decay_stay_in_range():
    momenta = [muon_momentum(s, 900) for s in range(900)]
    assert momenta[0] == 0.85 and momenta[300] == 0.95 and max(momenta) == 0.95
    assert decay_factor(0, 10) == 1 and decay_factor(9, 10) == pytest.approx(0.1)


def test_fraction_out_of_range_is_rejected():
    with pytest.raises(ValueError, match="1.5"):
        ScheduleConfig(warmdown_ratio=1.5)
