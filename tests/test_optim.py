"""Update rules against reference implementations, gradient reduction and optimizer state."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanochat import optim
from nanochat.optim import MuonAdamW, OptimConfig, Rule, orthogonalize
from nanochat.scaling import make_rules
from nanochat.train import train_step
from tests.test_train import make_run


def optimizer_of(machine, rule, **named):
    """An optimizer of single parameters, all with the same rule."""
    model = torch.nn.ParameterDict(named)
    return MuonAdamW(model, dict.fromkeys(named, rule), machine)


def default_optimizer(model, machine):
    return MuonAdamW(model, make_rules(OptimConfig(weight_decay=0.1), 768), machine)


def test_orthogonalize_moves_singular_values_toward_one():
    generator = torch.Generator().manual_seed(0)
    for shape in [(3, 8, 8), (2, 6, 20), (2, 20, 6)]:
        g = torch.randn(shape, generator=generator)
        result = orthogonalize(g)
        values = torch.linalg.svdvals(result)
        assert result.shape == g.shape
        assert values.min() > 0.7 and values.max() < 1.2
        u, _, v = torch.linalg.svd(g, full_matrices=False)
        rotated = u.mT @ result @ v.mT  # diagonal if the singular vectors are kept
        off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-3


def reference_muon(weight, grad, momentum, second, lr, beta, decay):
    """One matrix, in float64 and by SVD: MuonEq, polynomial, Muon+, NorMuon, cautious decay."""
    momentum = beta * momentum + (1 - beta) * grad
    g = beta * momentum + (1 - beta) * grad
    norms = np.sqrt((g**2).sum(1, keepdims=True))
    g = g / norms * norms.mean()
    u, s, v = np.linalg.svd(g / np.sqrt((g**2).sum()) / 1.01, full_matrices=False)
    for a, b, c in optim.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    g = (u * s) @ v
    g *= math.sqrt(min(g.shape)) / np.sqrt((g**2).sum())
    axis = 1 if g.shape[0] >= g.shape[1] else 0
    second = 0.9 * second + 0.1 * (g**2).mean(axis, keepdims=True)
    scaled = g / np.sqrt(second)
    g = scaled * np.sqrt((g**2).sum() / (scaled**2).sum())
    lr *= math.sqrt(max(1, g.shape[0] / g.shape[1]))
    weight = weight - lr * g - lr * decay * weight * (g * weight > 0)
    return weight, momentum, second


@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (8, 8), (1, 12), (12, 1)])
def test_muon_update_matches_the_formulas(machine, shape):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, *shape, generator=generator)
    params = {f"m{i}": torch.nn.Parameter(w.clone()) for i, w in enumerate(weights)}
    optimizer = optimizer_of(machine, Rule("muon", 0.02, weight_decay=0.3), **params)
    want = [(w.double().numpy(), 0.0, 0.0) for w in weights]
    for step in range(4):
        grads = torch.randn(3, *shape, generator=generator)
        for p, grad in zip(params.values(), grads, strict=True):
            p.grad = grad.clone()
        optim.set_schedule(optimizer, 0.5, 0.9 + 0.01 * step, 0.25)
        optimizer.step()
        want = [
            reference_muon(w, g.double().numpy(), m, s, 0.01, 0.9 + 0.01 * step, 0.075)
            for (w, m, s), g in zip(want, grads, strict=True)
        ]
    for p, (weight, *_) in zip(params.values(), want, strict=True):
        error = np.abs(p.detach().double().numpy() - weight).max()
        assert error < 1e-5 * np.abs(weight).max()


def test_adamw_matches_pytorch(machine):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
    q = torch.nn.Parameter(p.detach().clone())
    ours = optimizer_of(machine, Rule("adamw", 0.01, (0.8, 0.95), 0.1), p=p)
    theirs = torch.optim.AdamW([q], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for _ in range(5):
        p.grad = torch.randn(7, 5, generator=generator)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_matrices_without_gradient_keep_finite_weights(machine):
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = optimizer_of(machine, Rule("muon", 0.02, weight_decay=0.1), p=p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4, 6))


def test_reduce_gradients_returns_norm_and_frees_gradients(machine, tiny_gpt):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    want = math.sqrt(sum(float(p.grad.square().sum()) for p in tiny_gpt.parameters()))
    optimizer = default_optimizer(tiny_gpt, machine)
    assert float(optimizer.reduce_gradients()) == pytest.approx(want, rel=1e-5)
    assert all(p.grad is None for p in tiny_gpt.parameters())


def test_discarded_gradients_never_reach_the_weights(machine, tiny_gpt):
    optimizer = default_optimizer(tiny_gpt, machine)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    twin = copy.deepcopy(tiny_gpt)
    other = default_optimizer(twin, machine)
    (tiny_gpt.loss(tokens, tokens) * math.nan).backward()
    assert math.isnan(optimizer.reduce_gradients())
    optimizer.zero_grad()
    for model, each in ((tiny_gpt, optimizer), (twin, other)):
        model.loss(tokens, tokens).backward()
        each.step()
    for (name, p), q in zip(tiny_gpt.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_state_round_trip_and_errors(machine, tiny_gpt):
    first = default_optimizer(tiny_gpt, machine)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    first.step()
    saved = {name: x.clone() for name, x in first.full_state()}
    second = default_optimizer(tiny_gpt, machine)
    second.load_full_state(saved)
    for name, value in second.full_state():
        assert torch.equal(value, saved[name]), name
    with pytest.raises(ValueError, match=r"head.weight.first has a wrong shape, \(64, 1\)"):
        second.load_full_state(saved | {"head.weight.first": torch.zeros(64, 1)})
    del saved["head.weight.first"]
    with pytest.raises(KeyError, match="head.weight.first"):
        second.load_full_state(saved)


def test_a_step_with_torchs_adamw_in_its_place_trains_and_resumes(machine):
    run, *_ = make_run(machine, num_steps=20)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.02)
    losses = [train_step(run, step).loss for step in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    twin = replace(run, model=copy.deepcopy(run.model))
    twin.optimizer = torch.optim.AdamW(twin.model.parameters(), lr=0.02)
    saved = {name: x.clone() for name, x in optim.full_state(run.optimizer)}
    optim.load_full_state(twin.optimizer, saved)
    assert train_step(twin, 19).loss == train_step(run, 19).loss
    for p, q in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q)
