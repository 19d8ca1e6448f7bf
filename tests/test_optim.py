"""Update rules against reference implementations, gradient reduction and optimizer state."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from nanochat import optim
from nanochat.golf.qat import AveragingMuonAdamW
from nanochat.optim import MuonAdamW, OptimConfig, Rule, make_rules, orthogonalize


def make(named, roles, machine, **rule_overrides):
    table = make_rules(OptimConfig(weight_decay=0.1), d_model=768) | rule_overrides
    methods = {"named_parameters": named.items, "param_roles": lambda: roles}
    model = SimpleNamespace(bigrams=None, **methods)
    return MuonAdamW(model, table, machine)


def test_orthogonalize_moves_singular_values_toward_one():
    generator = torch.Generator().manual_seed(0)
    for shape in [(3, 8, 8), (2, 6, 20), (2, 20, 6)]:
        g = torch.randn(shape, generator=generator)
        result = orthogonalize(g)
        values = torch.linalg.svdvals(result)
        assert result.shape == g.shape
        assert values.min() > 0.5 and values.max() < 1.3
        u, _, v = torch.linalg.svd(g, full_matrices=False)
        rotated = u.mT @ result @ v.mT  # diagonal if the singular vectors are kept
        off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-3


def test_adamw_matches_pytorch(machine):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
    q = torch.nn.Parameter(p.detach().clone())
    rule = Rule("adamw", 0.01, (0.8, 0.95), 0.1)
    ours = make({"p": p}, {"p": "embedding"}, machine, embedding=rule)
    theirs = torch.optim.AdamW([q], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    for _ in range(5):
        p.grad = torch.randn(7, 5, generator=generator)
        q.grad = p.grad.clone()
        ours.reduce_gradients()
        ours.step(1.0)
        theirs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def drawn(rows, generator):
    """Two micro-batches of row indices below `rows`, and the gradients of the looked-up rows."""
    index = torch.randint(rows, (2, 5), generator=generator)
    return index, torch.randn(2, 5, 4, generator=generator)


def descend(p, optimizer, index, slope, sparse, lr_factor=1.0, scale=1.0):
    """Train an embedding for one step; returns the gradient norm."""
    for part, part_slope in zip(index, slope, strict=True):
        found = torch.nn.functional.embedding(part, p, sparse=sparse)
        (found * part_slope).sum().backward()
    assert p.grad.is_sparse == sparse
    norm = float(optimizer.reduce_gradients())
    optimizer.step(lr_factor, scale=scale)
    return norm


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_adam_with_decay_every_step_matches_pytorch(machine, monkeypatch, sparse):
    monkeypatch.setattr(optim, "ROWS_FADE_EVERY", 1)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(9, 4, generator=generator))
    q = torch.nn.Parameter(p.detach().clone())
    rule = Rule("rows", 0.01, (0.0, 0.9), weight_decay=0.1)
    ours = make({"p": p}, {"p": "bigram"}, machine, bigram=rule)
    theirs = torch.optim.AdamW([q], lr=0.01, betas=(0.0, 0.9), eps=1e-10, weight_decay=0.1)
    for _ in range(5):
        index, slope = drawn(6, generator)  # rows 6 to 8 are never touched
        descend(p, ours, index, slope, sparse)
        q.grad = torch.zeros(9, 4).index_add(0, index.flatten(), slope.flatten(0, 1))
        theirs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_sparse_and_dense_gradients_give_same_update(machine, monkeypatch):
    monkeypatch.setattr(optim, "ROWS_FADE_EVERY", 2)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(9, 4, generator=generator)
    tables = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    rule = Rule("rows", 0.01, (0.0, 0.9), weight_decay=0.5)
    both = [make({"p": p}, {"p": "bigram"}, machine, bigram=rule) for p in tables]
    moment = torch.zeros(9, 4)
    for step in range(1, 4):
        index, slope = drawn(6, generator)
        dense = torch.zeros(9, 4).index_add(0, index.flatten(), slope.flatten(0, 1))
        for p, optimizer, sparse in zip(tables, both, (False, True), strict=True):
            norm = descend(p, optimizer, index, slope, sparse, lr_factor=0.5, scale=2.0)
            assert norm == pytest.approx(float(dense.norm()))
        touched = index.unique()
        if step == 2:  # decay of all rows, for two steps
            start *= 1 - 2 * 0.005 * 0.5
            moment *= 0.9**2
        moment[touched] += 0.1 * (2 * dense[touched]) ** 2
        start[touched] -= 0.005 * 2 * dense[touched] / (moment[touched] / (1 - 0.9**step)).sqrt()
        for p in tables:
            torch.testing.assert_close(p.detach(), start, rtol=1e-5, atol=1e-6)
    for optimizer in both:
        state = optimizer.state_dict()
        torch.testing.assert_close(state["p.second"], moment)
        optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"state of p has shape \(9, 1\)"):
            optimizer.load_state_dict(state | {"p.second": moment[:, :1]})


def test_muon_update_is_orthogonalized_nesterov_momentum(machine):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(12, 4, generator=generator)
    p = torch.nn.Parameter(start.clone())
    optimizer = make({"p": p}, {"p": "matrix"}, machine, matrix=Rule("muon", 0.02))
    g = torch.randn(12, 4, generator=generator)
    p.grad = g.clone()
    optimizer.reduce_gradients()
    optimizer.step(0.5, momentum=0.9)
    nesterov = g.lerp(0.1 * g, 0.9)
    want = start - 0.5 * 0.02 * math.sqrt(3) * orthogonalize(nesterov)
    torch.testing.assert_close(p.detach(), want, rtol=1e-4, atol=1e-6)


def test_cautious_decay_shrinks_only_weights_the_update_shrinks(machine):
    start = torch.ones(2, 2)
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    g = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    moved = []
    for param, decay in ((p, 0.0), (q, 1.0)):
        param.grad = g.clone()
        rule = Rule("muon", 0.1, weight_decay=decay)
        optimizer = make({"p": param}, {"p": "matrix"}, machine, matrix=rule)
        optimizer.reduce_gradients()
        optimizer.step(1.0)
        moved.append(param.detach())
    extra = moved[0] - moved[1]
    shrinks = moved[0] < start  # all weights are positive
    torch.testing.assert_close(extra, 0.1 * shrinks.float())
    assert 0 < int(shrinks.sum()) < 4


def test_decoupled_decay_shrinks_all_weights_before_update(machine):
    generator = torch.Generator().manual_seed(0)
    start, g = torch.randn(2, 6, 4, generator=generator).unbind(0)
    p = torch.nn.Parameter(start.clone())
    rule = Rule("muon", 0.02, weight_decay=0.3, cautious=False)
    optimizer = make({"p": p}, {"p": "matrix"}, machine, matrix=rule)
    p.grad = g.clone()
    optimizer.reduce_gradients()
    optimizer.step(0.5, momentum=0.9, decay_factor=0.25)  # has no effect on decoupled decay
    lr = 0.5 * 0.02
    direction = math.sqrt(6 / 4) * orthogonalize(g.lerp(0.1 * g, 0.9))
    want = start * (1 - lr * 0.3) - lr * direction
    torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)


def test_weight_average_is_updated_saved_and_applied(machine, tiny_gpt):
    named, table = dict(tiny_gpt.named_parameters()), make_rules(OptimConfig(), 768)
    optimizer = AveragingMuonAdamW(tiny_gpt, table, machine, ema_decay=0.9)
    want = {n: p.detach().clone() for n, p in named.items()}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    for step in (1, 2, 3):
        tiny_gpt.loss(tokens, tokens).backward()
        optimizer.reduce_gradients()
        optimizer.step(1.0)
        keep = (1 + step) / (10 + step)  # below 0.9, to forget the initial weights
        want = {n: keep * w + (1 - keep) * named[n].detach() for n, w in want.items()}
    other = AveragingMuonAdamW(tiny_gpt, table, machine, ema_decay=0.9)
    other.load_state_dict(optimizer.state_dict())
    other.take_average()
    for name, p in named.items():
        torch.testing.assert_close(p.detach(), want[name], rtol=1e-5, atol=1e-6)


def test_rehearsal_leaves_weights_and_state_unchanged(machine, tiny_gpt):
    named = dict(tiny_gpt.named_parameters())
    table = make_rules(OptimConfig(weight_decay=0.1), 768)
    optimizer = AveragingMuonAdamW(tiny_gpt, table, machine, ema_decay=0.9)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    optimizer.reduce_gradients()
    optimizer.step(1.0)
    weights = {n: p.detach().clone() for n, p in named.items()}
    state = {n: v.clone() for n, v in optimizer.state_dict().items()}
    optimizer.rehearse()
    assert all(torch.equal(p, weights[n]) for n, p in named.items())
    assert all(torch.equal(v, state[n]) for n, v in optimizer.state_dict().items())


def test_stacked_matrices_get_same_update_as_separate_ones(machine):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 6, 4, generator=generator)
    grads = torch.randn(3, 6, 4, generator=generator)
    together = {str(i): torch.nn.Parameter(values[i].clone()) for i in range(3)}
    optimizer = make(together, dict.fromkeys(together, "matrix"), machine)
    for i, p in enumerate(together.values()):
        p.grad = grads[i].clone()
    optimizer.reduce_gradients()
    optimizer.step(1.0)
    for i, p in enumerate(together.values()):
        alone = torch.nn.Parameter(values[i].clone())
        alone.grad = grads[i].clone()
        single = make({"p": alone}, {"p": "matrix"}, machine)
        single.reduce_gradients()
        single.step(1.0)
        torch.testing.assert_close(p, alone, rtol=1e-5, atol=1e-6)


def test_reduce_gradients_returns_norm_and_frees_gradients(machine, tiny_gpt):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    want = math.sqrt(sum(float(p.grad.square().sum()) for p in tiny_gpt.parameters()))
    optimizer = make(dict(tiny_gpt.named_parameters()), tiny_gpt.param_roles(), machine)
    assert float(optimizer.reduce_gradients()) == pytest.approx(want, rel=1e-5)
    assert all(p.grad is None for p in tiny_gpt.parameters())


def test_dropped_gradients_leave_weights_and_state_unchanged(machine, tiny_gpt):
    optimizer = make(dict(tiny_gpt.named_parameters()), tiny_gpt.param_roles(), machine)
    before = {n: p.detach().clone() for n, p in tiny_gpt.named_parameters()}
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    (tiny_gpt.loss(tokens, tokens) * math.nan).backward()
    assert math.isnan(optimizer.reduce_gradients())
    optimizer.drop_gradients()
    assert all(torch.equal(p, before[n]) for n, p in tiny_gpt.named_parameters())
    assert all((x == 0).all() for n, x in optimizer.state_dict().items())


def test_state_round_trip_and_missing_tensor_error(machine, tiny_gpt):
    first = make(dict(tiny_gpt.named_parameters()), tiny_gpt.param_roles(), machine)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    tiny_gpt.loss(tokens, tokens).backward()
    first.reduce_gradients()
    first.step(1.0)
    saved = first.state_dict()
    second = make(dict(tiny_gpt.named_parameters()), tiny_gpt.param_roles(), machine)
    second.load_state_dict(saved)
    for name, value in second.state_dict().items():
        assert torch.equal(value, saved[name]), name
    del saved["head.weight.first"]
    with pytest.raises(KeyError, match="head.weight.first"):
        second.load_state_dict(saved)


@pytest.mark.parametrize("kind", [MuonAdamW, AveragingMuonAdamW])
def test_bad_step_changes_nothing(machine, tiny_gpt, kind):
    settings = {"ema_decay": 0.9} if kind is AveragingMuonAdamW else {}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    results = []
    for factors in ((1.0, 1.0), (1.0, math.nan, 1.0)):
        model, table = copy.deepcopy(tiny_gpt), make_rules(OptimConfig(weight_decay=0.1), 768)
        optimizer = kind(model, table, machine, **settings)
        for factor in factors:
            (model.loss(tokens, tokens) * factor).backward()
            norm = optimizer.reduce_gradients()
            optimizer.step(1.0, scale=torch.tensor(0.5), good=norm.isfinite())
            optimizer.steps_taken -= not math.isfinite(norm)
        results.append(dict(model.named_parameters()) | optimizer.state_dict())
    assert results[0]["steps_taken"] == 2
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_gradients_of_rounded_matrices_are_added_up_in_float32(machine, tiny_gpt):
    optimizer = MuonAdamW(tiny_gpt, make_rules(OptimConfig(), 768), machine)
    optimizer.round_weights(tiny_gpt, torch.bfloat16)
    tiny_gpt.dtype = torch.bfloat16
    batches = torch.randint(64, (3, 2, 16), generator=torch.Generator().manual_seed(0))

    def gradients(*indices: int) -> dict[str, torch.Tensor]:
        for i in indices:
            tiny_gpt.loss(batches[i], batches[i].roll(1)).backward()
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in tiny_gpt.parameters())
        optimizer.reduce_gradients()
        found = {
            name: grad.clone()
            for group in optimizer.groups
            for name, grad in zip(group.names, group.unstack(group.grad), strict=True)
            if group.sums
        }
        optimizer.drop_gradients()
        return found

    alone, together = [gradients(i) for i in range(3)], gradients(0, 1, 2)
    matrices = {name for name, role in tiny_gpt.param_roles().items() if role == "matrix"}
    assert together.keys() == matrices
    for name, total in together.items():
        assert tiny_gpt.get_parameter(name).dtype == torch.bfloat16
        assert total.dtype == torch.float32
        assert torch.equal(total, alone[0][name] + alone[1][name] + alone[2][name]), name
    assert any(not torch.equal(total, total.bfloat16().float()) for total in together.values())
    whole = {"head": 4, "residual": 4, "skip": 4, "gate": 4, "matrix": 4, "bigram": 4}
    roles = tiny_gpt.param_roles()
    assert optimizer.grad_bytes() == sum(
        p.numel() * whole.get(roles[name], 2) for name, p in tiny_gpt.named_parameters()
    )


def test_rounded_weights_train_like_float32_ones(machine, tiny_gpt):
    """The forward pass computes with the same numbers; masters accumulate updates unrounded."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    results, table = [], make_rules(OptimConfig(), 768)
    for rounded in (False, True):
        model = copy.deepcopy(tiny_gpt)
        model.dtype = torch.bfloat16
        optimizer = MuonAdamW(model, table, machine)
        if rounded:
            optimizer.round_weights(model, torch.bfloat16)
            assert model.embed.weight.dtype == torch.bfloat16
        losses = []
        for _ in range(8):
            loss = model.loss(tokens, tokens) / tokens.numel()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.reduce_gradients()
            optimizer.step(1e-3)
        masters = optimizer.state_dict(master=True)
        results.append((losses, {n: masters.get(n, x) for n, x in model.state_dict().items()}))
    (exact, weights), (losses, found) = results
    assert losses[0] == exact[0] and losses == pytest.approx(exact, rel=1e-3)
    assert "embed.weight" in masters
    assert not any("master" in name for name in optimizer.state_dict())
    for name, x in found.items():
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, weights[name], rtol=1e-3, atol=1e-3)
    moved = (found["embed.weight"] - tiny_gpt.embed.weight).abs()
    assert 0 < moved.max() < 0.01  # most steps are too small for bfloat16
