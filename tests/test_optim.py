"""Update rules against reference implementations, schedules, gradient norm, optimizer state."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanochat import optim
from nanochat.optim import MuonAdamW, Rule, ScheduleConfig, lr_factor, muon_momentum

CFG = ScheduleConfig(warmup_steps=40, warmdown_ratio=0.5, final_lr_frac=0.1)
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
STEPS = [(0.5, 0.90, 0.25), (0.6, 0.91, 0.5), (1.0, 0.92, 1.0), (0.2, 0.93, 0.0)]  # set_schedule


def updated(dist, rule, weights, grads, compiled=False):
    """Copies of the weights after one step of our optimizer for each item of `grads`."""
    params = {f"p{i}": torch.nn.Parameter(w.clone()) for i, w in enumerate(weights)}
    optimizer = MuonAdamW(torch.nn.ParameterDict(params), dict.fromkeys(params, rule), dist)
    optimizer.compiled = compiled
    for own, factors in zip(grads, STEPS, strict=True):
        for p, grad in zip(params.values(), own, strict=True):
            p.grad = grad.clone()
        optim.set_schedule(optimizer, *factors)
        optimizer.step()
    return [p.detach() for p in params.values()]


def reference_muon(weight, grads, lr, decay):
    """One matrix, in float64 and by SVD: MuonEq, polynomial, Muon+, NorMuon, cautious decay."""
    M, N = weight.shape
    momentum = second = 0.0
    for grad, (lr_share, beta, decay_share) in zip(grads, STEPS, strict=True):
        momentum = beta * momentum + (1 - beta) * grad
        g = beta * momentum + (1 - beta) * grad
        norms = np.sqrt((g**2).sum(1, keepdims=True))
        g = g / norms * norms.mean()
        u, s, v = np.linalg.svd(g / np.sqrt((g**2).sum()) / 1.01, full_matrices=False)
        for a, b, c in optim.POLAR_EXPRESS:
            s = a * s + b * s**3 + c * s**5
        g = (u * s) @ v
        g *= math.sqrt(min(M, N)) / np.sqrt((g**2).sum())
        second = 0.9 * second + 0.1 * (g**2).mean(1 if M >= N else 0, keepdims=True)
        scaled = g / np.sqrt(second)
        g = scaled * np.sqrt((g**2).sum() / (scaled**2).sum())
        step = lr * lr_share * math.sqrt(max(1, M / N))
        weight = weight - step * g - step * decay * decay_share * weight * (g * weight > 0)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # float16 would underflow
@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (8, 8), (1, 12), (12, 1)])
def test_muon_update_matches_the_formulas(dist, shape, dtype):
    draws = torch.randn(5, 3, *shape, generator=torch.Generator().manual_seed(0))
    rule = Rule("muon", 0.02, weight_decay=0.3)
    found = updated(replace(dist, dtype=dtype), rule, draws[0], draws[1:])
    for i, weight in enumerate(found):
        first, *grads = draws[:, i].double().numpy()
        want = reference_muon(first, grads, 0.02, 0.3)
        assert np.abs(weight.numpy() - want).max() < 1e-5 * np.abs(want).max()
    still = updated(dist, rule, draws[0], 0 * draws[1:])
    assert torch.equal(torch.stack(still), draws[0])


@pytest.mark.parametrize("shape", [(20, 6), (1, 12)])
def test_compiled_muon_update_equals_the_eager_one(dist, shape):
    draws = torch.randn(5, 3, *shape, generator=torch.Generator().manual_seed(0))
    eager, compiled = (
        updated(dist, Rule("muon", 0.02), draws[0], draws[1:], is_compiled)
        for is_compiled in (False, True)
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_adamw_matches_pytorch(dist, compiled):
    draws = torch.randn(5, 7, 5, generator=torch.Generator().manual_seed(0))
    rule = Rule("adamw", 0.01, (0.8, 0.95), 0.1)
    (found,) = updated(dist, rule, draws[:1], draws[1:, None], compiled)
    q = torch.nn.Parameter(draws[0].clone())
    theirs = torch.optim.AdamW([q], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for grad, factors in zip(draws[1:], STEPS, strict=True):
        q.grad = grad
        optim.set_schedule(theirs, *factors)
        theirs.step()
    torch.testing.assert_close(found, q.detach(), rtol=1e-5, atol=1e-6)


def test_rules_are_chosen_by_name_and_shape(dist, capsys):
    """Experts in one tensor are updated as single matrices; what has no rule, as a scalar."""
    draws = torch.randn(5, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    muon, scalars = Rule("muon", 0.02), Rule("adamw", 0.01)
    want = updated(dist, muon, draws[0], draws[1:])
    model = torch.nn.Module()
    model.blocks = torch.nn.ParameterDict(
        {"experts": draws[0].clone(), "gain": draws[0, 0, 0].clone()}
    )
    model.extra = torch.nn.Parameter(draws[0, 0, 0].clone())
    optimizer = MuonAdamW(model, {"blocks": muon, "scalars": scalars}, dist)
    text = capsys.readouterr().out
    assert "extra has no rule of its own" in text and "blocks" not in text
    for grads, factors in zip(draws[1:], STEPS, strict=True):
        model.blocks["experts"].grad = grads.clone()
        model.blocks["gain"].grad = model.extra.grad = grads[0, 0].clone()
        optim.set_schedule(optimizer, *factors)
        optimizer.step()
    torch.testing.assert_close(model.blocks["experts"].detach(), torch.stack(want))
    (gain,) = updated(dist, scalars, draws[:1, 0, 0], draws[1:, :1, 0])
    assert torch.equal(model.blocks["gain"], gain) and torch.equal(model.extra, gain)


def test_lr_warms_up_stays_constant_and_decays():
    factors = [lr_factor(s, 1000, CFG) for s in range(1000)]
    assert factors[0] == 1 / 40 and factors[19] == 0.5 and factors[39:501] == [1.0] * 462
    assert [factors[s] for s in (501, 750, 999)] == pytest.approx([0.9982, 0.55, 0.1018])
    assert max(lr_factor(s, 20, CFG) for s in range(20)) < 0.5  # too short for the peak


def test_momentum_and_weight_decay_follow_their_schedules():
    found = [muon_momentum(s, 2000, CFG) for s in (0, 200, 400, 1000, 1500, 2000)]
    assert found == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.90])
    factors = [optim.decay_factor(s, 1000) for s in (0, 250, 500, 1000)]
    assert factors == pytest.approx([1, 0.854, 0.5, 0], abs=1e-3)


def test_R43_numbers_in_the_state_of_an_optimizer_are_saved(dist):
    rules = {"p": Rule("muon", 0.1), "q": Rule("adamw", 0.1)}
    params = {name: torch.nn.Parameter(torch.ones(3, 3)) for name in rules}
    optimizer, fresh = (MuonAdamW(torch.nn.ParameterDict(params), rules, dist) for _ in range(2))
    for each, count in ((optimizer, 3), (fresh, 0)):
        each.state[params["p"]]["count"], each.state[params["q"]]["rate"] = count, count / 2
    fresh.load_full_state(dict(optimizer.full_state()))
    assert fresh.state[params["p"]]["count"] == 3 and fresh.state[params["q"]]["rate"] == 1.5
