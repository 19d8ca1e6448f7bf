"""Recursive model: equivalence to the plain model, causality, losses, counts and metrics."""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from nanochat import checkpoint
from nanochat.checkpoint import build_model
from nanochat.distributed import DistContext
from nanochat.eval_bpb import bits_per_byte
from nanochat.evaluators import ValidationConfig
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss import IGNORE
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.recursion.metrics import (
    LoopValidation,
    is_monotonic,
    loop_metrics,
    part_of,
    step_metrics,
)
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT
from nanochat.recursion.presets import RecursionConfig
from nanochat.scaling import make_rules
from tests.conftest import TINY, lively

CPU = torch.device("cpu")
PLAIN = replace(TINY, n_layer=4)
PARTS = {"n_prelude": 1, "n_core": 2, "n_coda": 1}
GIVEN = ("moderate", "aggressive", "extreme")


def recursive(**values: Any) -> RecursiveConfig:
    return RecursiveConfig(**{**asdict(PLAIN), **PARTS, "n_loops": 3, **values})


def model_of(cfg: GPTConfig, seed: int = 0) -> Any:
    return lively(build_model(cfg, CPU, torch.float32, seed))


def rows(n: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (n, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    targets[0, 3:9] = IGNORE
    return tokens, targets


def logits_by_loop(model: RecursiveGPT, tokens: torch.Tensor, loops: int) -> list[torch.Tensor]:
    inputs = model.begin(tokens)
    states = enumerate(model.states(inputs, loops), start=1)
    return [model.logits(model.read_out(inputs, state, k)) for k, state in states]


# ---- equivalence to the plain model --------------------------------------------------------------


def test_preset_none_is_the_plain_model():
    assert RecursionConfig().apply(PLAIN) is PLAIN
    assert RecursionConfig(recursion_preset="none").warning() is None
    assert type(build_model(PLAIN, CPU, torch.float32, 0)) is GPT


@pytest.mark.parametrize(
    "changes",
    [{"backout": False}, {"n_prelude": 3, "n_core": 1, "n_coda": 0}],  # ends at the middle layer
)
def test_untrained_recursive_model_with_one_loop_equals_plain_model(changes):
    plain = model_of(replace(PLAIN, backout=changes.get("backout", True)))
    looped = build_model(recursive(n_loops=1, **changes), CPU, torch.float32, 0)
    missing = looped.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing.missing_keys) == 1 and not missing.unexpected_keys
    tokens, targets = rows()
    assert torch.equal(looped(tokens), plain(tokens))
    torch.testing.assert_close(looped.loss(tokens, targets), plain.loss(tokens, targets))
    looped.loss(tokens, targets).backward()
    plain.loss(tokens, targets).backward()
    ours = dict(looped.named_parameters())
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[name].grad, p.grad, rtol=1e-5, atol=1e-5)


def test_recursive_and_plain_models_start_from_equal_weights():
    plain = build_model(PLAIN, CPU, torch.float32, seed=3).state_dict()
    ours = build_model(recursive(), CPU, torch.float32, seed=3).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in plain.items())


# ---- causality and the cache ---------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 7, 15])
def test_every_loop_is_causal(position):
    model, (tokens, _) = model_of(recursive()), rows(1)
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % 64
    before, after = (logits_by_loop(model, x, 6) for x in (tokens, changed))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[:, :position], other[:, :position], rtol=0, atol=1e-6)
        assert not torch.allclose(one[:, position], other[:, position])


@pytest.mark.parametrize("n_loops", [1, 2, 4])
def test_cached_logits_match_full_forward_pass(n_loops):
    model, (tokens, _) = model_of(recursive(n_loops=n_loops)), rows(2)
    whole = model(tokens)
    cache = model.new_cache(2)
    assert len(cache.keys) == 2 + 2 * n_loops
    found = []
    for first, last in ((0, 5), (5, 6), (6, 11), (11, 16)):
        view = cache.view([0, 1], last - first)
        found.append(model.logits(model.hidden(tokens[:, first:last], view)))
        cache.lengths = [last, last]
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-5)


# ---- losses and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("base,want", [
    (3, (0.025, 0.075, 0.225, 0.675)),
    (5, (0.0064, 0.0321, 0.1603, 0.8013)),
    (10, (0.0009, 0.0090, 0.0900, 0.9001)),
])  # fmt: skip
def test_loop_weights_are_powers_that_sum_to_one(base, want):
    shares = recursive(n_loops=4, supervision_base=base).shares((1, 2, 3, 4))
    assert list(shares.values()) == pytest.approx(want, abs=6e-5)
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("supervise", "bonus"), [("full", 0.0), ("full", 1.0), ("undetached", 0.0), ("undetached", 1.0)]
)
def test_loss_is_from_last_loop_and_gradient_is_weighted_sum(supervise, bonus):
    cfg = recursive(supervise=supervise, supervision_base=3.0, improvement_bonus=bonus)
    model, twin, (tokens, targets) = model_of(cfg), model_of(cfg), rows()
    loss = model.loss(tokens, targets)
    loss.backward()
    losses = [
        F.cross_entropy(x.mT, targets, ignore_index=IGNORE, reduction="none").sum(1)
        for x in logits_by_loop(twin, tokens, 3)
    ]  # nats per row, by loop
    shares, counted = cfg.shares((1, 2, 3)), (targets != IGNORE).sum(1)
    want = shares[1] * losses[0].sum()
    for k in (2, 3):
        before = losses[k - 2]
        extra = bonus / (before / counted)
        if supervise == "full":
            before, extra = before.detach(), extra.detach().clamp(max=4 * shares[k])
        want = want + shares[k] * losses[k - 1].sum() - (extra * (before - losses[k - 1])).sum()
    want.backward()
    torch.testing.assert_close(loss, losses[-1].sum())
    torch.testing.assert_close(model.noted["total_loss"], want.detach(), rtol=1e-4, atol=1e-3)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(
            dict(model.named_parameters())[name].grad, p.grad, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("bonus", [0.0, 2.0, 1e6])
@pytest.mark.parametrize("preset", GIVEN)
def test_no_loop_is_trained_to_get_worse(preset, bonus, monkeypatch):
    given = RecursionConfig(recursion_preset=preset, improvement_bonus=bonus)
    cfg = given.apply(PLAIN)
    assert isinstance(cfg, RecursiveConfig)
    model, (tokens, targets) = model_of(cfg), rows()
    read_out, outputs = model.read_out, {}

    def record(inputs, state, loops):
        outputs[loops] = read_out(inputs, state, loops)
        outputs[loops].retain_grad()
        return outputs[loops]

    monkeypatch.setattr(model, "read_out", record)
    model.loss(tokens, targets).backward()
    shares = cfg.shares((1, 2, 3, 4))
    for k, hidden in outputs.items():
        free = hidden.detach().requires_grad_()
        logits = model.logits(free)
        logits.retain_grad()
        nats = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="sum")
        nats.backward()
        # a readout only affects its own loss: its gradient is a weight times the loss gradient
        weight = (hidden.grad * free.grad).sum((1, 2)) / free.grad.square().sum((1, 2))
        torch.testing.assert_close(
            hidden.grad, weight[:, None, None] * free.grad, rtol=1e-3, atol=1e-5
        )
        most = shares[k] * (1 if k == 1 or not bonus else 5)
        assert (weight >= shares[k] * (1 - 1e-4)).all() and (weight <= most * (1 + 1e-4)).all()
        right = targets.clamp(min=0)[..., None]
        at_target = (weight[:, None] * logits.grad.gather(2, right)[..., 0])[targets != IGNORE]
        assert (at_target < 0).all(), f"loop {k} is trained to lower the target's probability"
    if bonus == 1e6:
        assert weight.tolist() == pytest.approx([5 * shares[4]] * 3, rel=1e-3), "not clamped"


def test_undetached_bonus_makes_first_loop_worse_than_chance():
    found, (tokens, targets) = {}, rows()
    for supervise in ("full", "undetached"):
        given = RecursionConfig(recursion_preset="extreme", supervise=supervise)
        model = model_of(given.apply(PLAIN))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            model.loss(tokens, targets).backward()
            optimizer.step()
        losses = model.losses_by_loop(tokens, targets, 4)
        found[supervise] = (losses.sum((1, 2)) / (targets != IGNORE).sum()).tolist()
    (sound, *_, sound_last), (bad, *_, bad_last) = found.values()
    assert sound < math.log(64) < bad
    assert (bad - bad_last) / bad > 0.8 > 0.2 > (sound - sound_last) / sound


@pytest.mark.parametrize("supervise", ["full", "undetached"])
def test_bonus_is_independent_of_other_rows_in_batch(supervise):
    cfg = recursive(supervise=supervise, improvement_bonus=2.0)
    whole, split, (tokens, targets) = model_of(cfg), model_of(cfg), rows(4)
    whole.loss(tokens, targets).backward()
    for i in range(0, 4, 2):
        split.loss(tokens[i : i + 2], targets[i : i + 2]).backward()
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    for name, value in whole.noted.items():
        torch.testing.assert_close(split.noted[name], value)


def test_sampled_loop_depends_on_seed_and_step():
    model, other = model_of(recursive(n_loops=4, supervise="sampled")), model_of(recursive())
    drawn = []
    for step in range(60):
        model.begin_step(step, seed=1)
        drawn.append(model.supervised)
    assert all(len(loops) == 2 and loops[1] == 4 for loops in drawn)
    assert {loops[0] for loops in drawn} == {1, 2, 3}
    model.begin_step(17, seed=1)
    assert model.supervised == drawn[17]
    changed = []
    for step in range(60):
        model.begin_step(step, seed=2)
        changed.append(model.supervised)
    assert changed != drawn
    other.begin_step(5, seed=1)
    assert other.supervised == (3,)


def test_weighted_targets_train_only_the_last_loop():
    model, (tokens, targets) = model_of(recursive(supervise="full", improvement_bonus=1.0)), rows()
    weights = torch.linspace(-1, 1, tokens.numel()).view_as(tokens)
    got = model.loss(tokens, targets, weights=weights)
    logits = model(tokens)
    nats = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(got, (weights * nats).sum(), rtol=1e-4, atol=1e-4)


def test_bptt_loops_limits_gradient_flow():
    tokens, targets = rows()
    grads = {}
    for bptt in (None, 3, 2, 1):
        model = model_of(recursive(bptt_loops=bptt))
        inputs = model.begin(tokens)
        states = list(model.states(inputs, 3))
        for state in states:
            state.retain_grad()
        model.read_out(inputs, states[-1], 3).square().sum().backward()
        grads[bptt] = [state.grad is not None for state in states]
        grads[bptt].append(float(model.blocks[0].mlp.up.weight.grad.norm()))
    reach = {bptt: found[:3] for bptt, found in grads.items()}
    everywhere = [True] * 3
    assert reach == {
        None: everywhere,
        3: everywhere,
        2: [False, True, True],
        1: [False] * 2 + [True],
    }
    prelude = [found[3] for found in grads.values()]
    assert prelude[0] == prelude[1] != prelude[2] > 0 and prelude[3] > 0


def test_document_mask_applies_to_every_loop():
    model, (tokens, _) = model_of(recursive()), rows(1)
    segments = torch.tensor([[0] * 6 + [1] * 10])
    apart = model.hidden(tokens, segments=segments)
    torch.testing.assert_close(apart[:, :6], model.hidden(tokens[:, :6]), rtol=1e-4, atol=1e-5)


# ---- counts --------------------------------------------------------------------------------------

COUNTED: dict[str, dict[str, Any]] = {
    "last": {},
    "full": {"supervise": "full", "improvement_bonus": 1.0},
    "undetached": {"supervise": "undetached", "improvement_bonus": 1.0},
    "two loops back": {"bptt_loops": 2},
    "full, one loop back": {"supervise": "full", "bptt_loops": 1},
    "sampled": {"supervise": "sampled"},
    "sampled, two loops back": {"supervise": "sampled", "bptt_loops": 2, "n_loops": 4},
    "no coda": {"n_core": 3, "n_coda": 0},
}


@pytest.mark.parametrize("name", [*COUNTED, "plain"])
def test_flops_per_token_match_torch_flop_counter(name):
    model = model_of(PLAIN if name == "plain" else recursive(**COUNTED[name]))
    for block in model.blocks:
        block.attention.backend = "plain"
    tokens = torch.randint(64, (2, 16))
    draws = [{1: 1}]
    if "sampled" in name:  # every draw once; all are equally likely
        draws = [{k: 1} for k in range(1, model.cfg.n_loops)]
    total = 0
    for draw in draws:
        if "sampled" in name:
            model.supervised = (*draw, model.cfg.n_loops)
        with FlopCounterMode(display=False) as counter:
            model.loss(tokens, tokens).backward()
        total += counter.get_total_flops()
    want = model.flops_per_token() + 6 * model.smear_gate.weight.numel()  # the gate is not counted
    assert total / len(draws) / tokens.numel() == pytest.approx(want, rel=1e-6)


def test_parameter_counts_with_and_without_reuse():
    plain, model = model_of(PLAIN), model_of(recursive())
    inject = 2 * 32 * 32
    assert model.num_params() == plain.num_params() + inject
    core = plain.layer_params(1) + plain.layer_params(2)
    assert model.num_matmul_params() == plain.num_matmul_params() + 2 * core + 3 * inject


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {"n_core": 3}, {"n_core": 0, "n_coda": 3}, {"n_prelude": -1, "n_core": 4}, {"n_loops": 0},
    {"supervision_base": 0.5}, {"improvement_bonus": -1.0}, {"bptt_loops": 0},
])  # fmt: skip
def test_invalid_recursive_shape_is_rejected(change):
    with pytest.raises(ValueError, match=list(change)[0]):
        recursive(**change)


def test_recursive_config_roundtrips_through_dict():
    for cfg in (PLAIN, recursive(bptt_loops=2)):
        assert checkpoint.read_config(asdict(cfg)) == cfg


@pytest.mark.parametrize(
    "preset,loops,supervise", [("share2", 2, "last"), *((preset, 4, "full") for preset in GIVEN)]
)
def test_preset_values(preset, loops, supervise):
    cfg = RecursionConfig(recursion_preset=preset).apply(replace(PLAIN, n_layer=8))
    assert isinstance(cfg, RecursiveConfig)
    assert (cfg.n_prelude, cfg.n_core, cfg.n_coda) == (2, 4, 2)
    assert (cfg.n_loops, cfg.supervise) == (loops, supervise)
    bases = {"moderate": (3, 0.5), "aggressive": (5, 1.0), "extreme": (10, 2.0), "share2": (3, 0)}
    assert (cfg.supervision_base, cfg.improvement_bonus) == bases[preset]
    assert (RecursionConfig(recursion_preset=preset).warning() is None) == (preset == "share2")


@pytest.mark.parametrize("depth,want", [
    (1, (0, 1, 0)), (2, (0, 2, 0)), (3, (1, 1, 1)), (4, (1, 2, 1)), (12, (3, 6, 3)), (13, (3, 7, 3))
])  # fmt: skip
def test_default_prelude_and_coda_are_a_quarter_of_depth(depth, want):
    cfg = RecursionConfig(n_loops=2).apply(replace(PLAIN, n_layer=depth))
    assert isinstance(cfg, RecursiveConfig)
    assert (cfg.n_prelude, cfg.n_core, cfg.n_coda) == want


def test_flags_override_preset_and_require_loops():
    given = RecursionConfig(recursion_preset="extreme", n_loops=3, n_core=1, n_prelude=2)
    cfg = given.apply(PLAIN)
    assert isinstance(cfg, RecursiveConfig)
    assert (cfg.n_prelude, cfg.n_core, cfg.n_coda, cfg.n_loops) == (2, 1, 1, 3)
    with pytest.raises(ValueError, match="bptt_loops require a recursive model"):
        RecursionConfig(bptt_loops=1).apply(PLAIN)


# ---- metrics -------------------------------------------------------------------------------------


def test_loop_metrics_report_bpb_and_loop_order():
    figures = loop_metrics([3.0, 2.0, 1.5])
    assert figures["bpb_loop_2"] == 2.0 and figures["loops_in_order"] == 1.0
    assert figures["refinement_percent"] == pytest.approx(50)
    assert not is_monotonic([3.0, 2.0, 2.1]) and is_monotonic([2.0, 2.0])


def test_step_metrics_report_losses_and_norms_by_part(machine: DistContext):
    model = model_of(recursive(supervise="full"))
    table = make_rules(OptimConfig(weight_decay=0.1), 32)
    optimizer = MuonAdamW(model, table, machine)
    tokens, targets = rows()
    model.begin_step(0, 0)
    model.loss(tokens, targets).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = float(optimizer.reduce_gradients())
    figures = step_metrics(model, optimizer, scale=2.0)
    counted = int((targets != IGNORE).sum())
    for k, logits in enumerate(logits_by_loop(model, tokens, 3), start=1):
        want = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="sum") / counted
        assert figures[f"loss_loop_{k}"] == pytest.approx(want.item(), rel=1e-4)
    norms = {n.removeprefix("grad_norm_"): v for n, v in figures.items() if "grad_norm" in n}
    assert set(norms) == {"prelude", "core", "coda", "inject", "outside"}
    assert math.hypot(*norms.values()) == pytest.approx(2 * norm, rel=1e-5)
    core = [g for name, g in grads.items() if part_of(name, model.cfg) == "core"]
    assert norms["core"] == pytest.approx(
        2 * math.hypot(*(float(g.norm()) for g in core)), rel=1e-5
    )
    fresh = model_of(recursive())
    assert step_metrics(fresh, optimizer, 1.0) == {}  # no loss recorded yet


def test_config_selects_model_class_and_callbacks():
    for cfg, kind, count in ((PLAIN, GPT, 0), (recursive(), RecursiveGPT, 1)):
        model = checkpoint.new_model(cfg)
        assert type(model) is kind
        modules = checkpoint.architectures_of(cfg)
        assert sum(len(module.callbacks(model, None, 0)) for module in modules) == count


def test_validation_reports_each_bucket_and_loop(machine: DistContext):
    class Given(LoopValidation):
        def batches(self, rows: Any):
            yield from rows

    model = model_of(recursive())
    x, y = rows()
    buckets: Any = {"a": [(x[:1].numpy(), y[:1].numpy())], "b": [(x[1:].numpy(), y[1:].numpy())]}
    validation = Given(ValidationConfig(), buckets)
    validation.model, validation.machine = model, machine
    validation.token_bytes = np.full(64, 2)
    figures = validation.evaluate(1, lambda: False, False)
    score, sizes = partial(model.losses_by_loop, loops=3), validation.token_bytes
    whole = bits_per_byte(score, [(x.numpy(), y.numpy())], sizes, machine, n=3)
    assert [figures[f"bpb_loop_{k}"] for k in (1, 2, 3)] == pytest.approx([b.value for b in whole])
    assert figures["val_bpb"] == figures["bpb_loop_3"]
    *_, alone = bits_per_byte(score, buckets["b"], sizes, machine, n=3)
    assert figures["val_bpb:b"] == pytest.approx(alone.value)
