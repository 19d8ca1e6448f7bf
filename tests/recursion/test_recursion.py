"""The recursive model against its oracles, its scripts on a small run, the verdict."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanochat.common import read_json
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss import IGNORE
from nanochat.records import read_metrics
from nanochat.recursion.model import RecursiveConfig, RecursiveGPT
from nanochat.recursion.verdict import (
    LoopArm,
    check_equal_flops,
    check_first_loop,
    check_gradients_finite,
    check_loop_order,
    check_loss_falling,
)
from scripts.recursion.base_train import RecursionFlags
from tests.conftest import TINY, decode, lively

PLAIN = replace(TINY, n_layer=4)
TOKENS = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1)
TARGETS[:, -1] = TARGETS[0, 3:9] = IGNORE


def untrained(cfg: GPTConfig) -> Any:
    model: Any = RecursiveGPT(cfg) if isinstance(cfg, RecursiveConfig) else GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def config(**changes: Any) -> RecursiveConfig:
    parts = {"n_prelude": 1, "n_core": 2, "n_coda": 1, "n_loops": 3}
    return RecursiveConfig(**{**asdict(PLAIN), **parts, **changes})


def gradients(*models: Any) -> dict[str, Any]:
    """Sum over models with the same weights."""
    each = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in models]
    return {name: sum(g[name] for g in each if name in g) for name in each[-1]}


@pytest.mark.parametrize(
    "changes",
    [{"backout": False}, {"n_prelude": 3, "n_core": 1, "n_coda": 0}],  # ends at the middle layer
)
def test_one_untrained_loop_equals_the_plain_model(changes):
    plain = lively(untrained(replace(PLAIN, backout=changes.get("backout", True))))
    looped = untrained(config(n_loops=1, **changes))
    looped.load_state_dict(plain.state_dict(), strict=False)
    for model in (plain, looped):
        model.loss(TOKENS, TARGETS).backward()
    assert torch.equal(looped(TOKENS), plain(TOKENS))
    found = gradients(looped)
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_loops", [1, 2, 4])
def test_loops_are_causal_and_decode_as_in_the_forward_pass(n_loops):
    model, tokens = lively(untrained(config(n_loops=n_loops))), TOKENS[:2]
    whole, changed = model(tokens), tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    torch.testing.assert_close(model(changed)[:, :7], whole[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(model(changed)[:, 7], whole[:, 7])
    torch.testing.assert_close(decode(model, tokens), whole, rtol=1e-4, atol=1e-5)
    segments = (torch.arange(16) > 5).long().expand(2, -1)
    apart = model.logits(model.hidden(changed, segments=segments))
    alone = model.logits(model.hidden(tokens, segments=segments))
    torch.testing.assert_close(apart[:, :6], whole[:, :6], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone[:, 6:], whole[:, 6:], atol=1e-3)


@pytest.mark.parametrize(
    ("supervise", "bonus"), [("last", 0.0), ("full", 0.0), ("full", 1.0), ("full", 1e6)]
)
def test_gradient_is_that_of_the_weighted_losses_of_all_loops(supervise, bonus):
    """A model with k loops and the same weights computes the loss of loop k."""
    cfg = config(supervise=supervise, supervision_base=3.0, improvement_bonus=bonus)
    twins = [lively(untrained(config(n_loops=k))) for k in (1, 2, 3)]
    model: Any = lively(untrained(cfg))
    model.begin_step(0, 0)
    loss = model.loss(TOKENS, TARGETS)
    loss.backward()
    nats = [
        F.cross_entropy(t(TOKENS).mT, TARGETS, ignore_index=IGNORE, reduction="none").sum(1)
        for t in twins
    ]
    shares = [0, 0, 1] if supervise == "last" else [1 / 13, 3 / 13, 9 / 13]
    want = sum(share * each.sum() for share, each in zip(shares, nats, strict=True))
    for k in (1, 2):
        before = nats[k - 1].detach()  # neither rewarded for a bad loop before, nor beyond 4 times
        extra = (bonus / (before / (TARGETS != IGNORE).sum(1))).clamp(max=4 * shares[k])
        want = want - (extra * (before - nats[k])).sum()
    want.backward()
    torch.testing.assert_close(loss, nats[-1].sum())
    found = gradients(model)
    for name, grad in gradients(*twins).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4)


def test_another_loss_trains_all_supervised_loops():
    def smoothed(logits, targets):
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.2)

    twins = [lively(untrained(config(n_loops=k))) for k in (1, 2, 3)]
    model: Any = lively(untrained(config(supervise="full", supervision_base=3.0)))
    model.begin_step(0, 0)
    loss = model.loss(TOKENS, TARGETS, loss=smoothed)
    loss.backward()
    sums = [twin.loss(TOKENS, TARGETS, loss=smoothed) for twin in twins]
    sum(share / 13 * each for share, each in zip((1, 3, 9), sums, strict=True)).backward()
    torch.testing.assert_close(loss, sums[-1])
    found = gradients(model)
    for name, grad in gradients(*twins).items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"supervise": "full", "bptt_loops": 1, "improvement_bonus": 1.0},
        {"supervise": "full", "n_core": 3, "n_coda": 0},
    ],
)
def test_flops_and_parameters_are_counted(changes):
    model, plain = untrained(config(**changes)), untrained(PLAIN)
    model.begin_step(0, 0)
    # plain matmuls, which are counted
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(TOKENS, TOKENS).backward()
    gate = 6 * model.smear_gate.weight.numel()  # is not counted
    found = counter.get_total_flops() / TOKENS.numel()
    assert found == pytest.approx(model.flops_per_token() + gate, rel=1e-6)
    assert model.num_params() == plain.num_params() + 2 * 32 * 32
    assert model.num_matmul_params() > plain.num_matmul_params() + 3 * 2 * 32 * 32


def test_presets_and_flags_determine_the_shape():
    cfg: Any = RecursionFlags("extreme").apply(replace(PLAIN, n_layer=13))
    assert (cfg.n_prelude, cfg.n_core, cfg.n_coda, cfg.n_loops) == (3, 7, 3, 4)
    own: Any = RecursionFlags("share2", n_loops=3, n_core=1, n_prelude=2).apply(PLAIN)
    assert (own.n_prelude, own.n_core, own.n_coda, own.n_loops) == (2, 1, 1, 3)
    with pytest.raises(ValueError, match="bptt_loops require a recursive model"):
        RecursionFlags(bptt_loops=1).apply(PLAIN)


# ---- Scripts -------------------------------------------------------------------------------------

FLAGS = (
    "--depth=3 --max_seq_len=32 --total_batch_size=512 --dtype=float32 "
    "--device_type=cpu --num_iterations=8 --eval_every=4 --eval_tokens=1024 --save_every=4 --keep=9"
).split()


def test_loops_are_trained_scored_and_judged(trained, command):
    train = ("recursion.base_train", *FLAGS)
    command.works(*train, "--recursion_preset=none", "--model_tag=plain")
    looped = (*train, "--recursion_preset=aggressive", "--supervise=sampled", "--model_tag=looped")
    command.works(*looped)
    log = read_metrics(trained / "base_checkpoints/looped/metrics.jsonl")
    for step in (line for line in log if "loss" in line):
        assert step["loss_loop_4"] == pytest.approx(step["loss"], rel=1e-5)
    last = [line for line in log if "bpb_loop_1" in line][-1]
    assert last["val_bpb"] == last["bpb_loop_4"]

    judge = ("recursion.evaluate", "--eval_tokens=1024", "--dtype=float32")
    command.works(*judge, "--model_tags=looped", "--plain_tags", "plain", "one")
    record = read_json(trained / "report" / "recursion.json")
    values, (arms, loops) = record["values"], [table["rows"] for table in record["tables"]]
    assert values["Final bpb"] == pytest.approx(last["val_bpb"], rel=1e-6)
    assert float(loops[0][1]) == pytest.approx(last["bpb_loop_1"], rel=1e-6) and len(loops) == 8
    assert values["Gradients finite"].startswith("met")
    assert len(arms) == 3
    for tags, fix in (
        (("--model_tags=plain",), "pass it with --plain_tags"),
        (("--model_tags=looped", "--plain_tags=looped"), "evaluate it alone"),
        (("--model_tags", "looped", "looped"), "pass one tag per seed"),
    ):
        assert fix in command.rejects(*judge, *tags)


# ---- The verdict ---------------------------------------------------------------------------------

RECURSIVE = LoopArm("looped", [2.00, 2.01, 1.99], 4, 64, 100, 1000, 1e9)
LONGER = LoopArm("longer", [2.10, 2.11, 2.09], 4, 64, 98, 1500, 1e9)
DEEPER = LoopArm("deeper", [2.00, 2.02, 1.98], 6, 64, 150, 1000, 1.02e9)
TWIN = LoopArm("twin", [2.12, 2.12, 2.12], 4, 64, 97, 1000, 0.7e9)
ALL = [LONGER, DEEPER, TWIN]
AS_GOOD = LONGER._replace(bpb=[2.01, 2.02, 2.00])


@pytest.mark.parametrize("changes,plain,met", [
    ({}, ALL, True),  # as good as deeper, with two thirds of its parameters
    ({"params": 140}, ALL, False),  # as good, but without clearly fewer parameters
    ({"bpb": [1.90, 1.91, 1.89], "params": 140}, ALL, True),  # better by over two deviations
    ({"bpb": [2.10, 2.11, 2.09]}, ALL, False),  # worse, although smaller
    ({}, [DEEPER, AS_GOOD], False),  # an arm of the same size is as good as the larger one
    ({}, [TWIN], None),  # no arm of equal FLOPs
    ({"bpb": [1.0]}, ALL, None),  # one seed
])  # fmt: skip
def test_recursion_pays_off_if_better_or_as_good_and_smaller(changes, plain, met):
    assert check_equal_flops(RECURSIVE._replace(**changes), plain).met is met


FALLING = [5 - 0.1 * i for i in range(40)]


@pytest.mark.parametrize("criterion,met", [
    (check_first_loop(RECURSIVE, [2.13, 2.13, 2.14], ALL, trained=True), True),
    (check_first_loop(RECURSIVE, [2.15, 2.15, 2.15], ALL, trained=True), False),
    (check_loop_order([[3.0, 3.0], [2.0, 2.9], [2.1, 2.7]]), True),  # means over seeds
    (check_loop_order([[3.0], [2.0], [2.1]]), False),
    (check_gradients_finite([0.3, 0.2], 1), False),
    (check_loss_falling([FALLING, FALLING]), True),
    (check_loss_falling([FALLING, FALLING[::-1]]), False),
    (check_loss_falling([[9.0, math.nan, 8.0]]), True),  # a skipped step is left out
])  # fmt: skip
def test_health_criteria_are_met_missed_or_inconclusive(criterion, met):
    assert criterion.met is met
