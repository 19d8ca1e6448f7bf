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


def test_momentum_rises_stays_and_falls_over_the_warmdown():
    momenta = [muon_momentum(s, 2000, CFG) for s in range(2001)]
    assert momenta[0] == 0.85 and momenta[200] == pytest.approx(0.91)
    assert momenta[400:1001] == [0.97] * 601
    assert momenta[1500] == pytest.approx(0.935) and momenta[2000] == pytest.approx(0.90)
    short = [muon_momentum(s, 30, CFG) for s in range(30)]
    assert max(short) == 0.97 and short[9] < 0.97


def test_weight_decay_follows_a_cosine():
    factors = [decay_factor(s, 1000) for s in range(1001)]
    assert factors[0] == 1 and factors[500] == pytest.approx(0.5)
    assert factors[250] == pytest.approx(0.854, abs=1e-3) and factors[1000] == 0


def test_fraction_out_of_range_is_rejected():
    with pytest.raises(ValueError, match="1.5"):
        ScheduleConfig(warmdown_ratio=1.5)
