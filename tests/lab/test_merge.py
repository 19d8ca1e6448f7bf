"""Weight merging: identities and the effect of each method."""

import math

import pytest
import torch

from nanochat.lab import merge as merging
from nanochat.lab.merge import MergeConfig, drop_entries, elect_signs, keep_largest, slerp

METHODS = ["linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties"]


def model(seed, size=(6, 8)):
    generator = torch.Generator().manual_seed(seed)
    names = {"blocks.0.q": size, "embed.weight": (5, 4), "head.weight": (4, 5), "scale": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def merge(models, cfg, base=None):
    return merging.merge(models, cfg, base, ["blocks.0.q"])


A, B, C, BASE = model(1), model(2), model(3), model(0)


def same(one, other, **close):
    return (
        all(torch.allclose(one[n], other[n], **close) for n in one) and one.keys() == other.keys()
    )


@pytest.mark.parametrize("method", METHODS)
def test_merging_a_model_with_itself_is_the_identity(method):
    # density 1: dropping entries would change the result
    found = merge([A, A], MergeConfig(method, density=1.0), BASE)
    assert same(found, A, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
def test_weights_1_and_0_return_the_first_model(method):
    found = merge([A, B], MergeConfig(method, weights="1,0"), BASE)
    assert same(found, A, rtol=0, atol=1e-6)
    assert method != "linear" or same(found, A, rtol=0, atol=0)


def test_slerp_endpoints_are_the_models():
    assert same(merge([A, B], MergeConfig("slerp", t=0.0)), A, rtol=0, atol=0)
    assert same(merge([A, B], MergeConfig("slerp", t=1.0)), B, rtol=0, atol=0)


def test_soup_is_the_weighted_mean():
    found = merge([A, B, C], MergeConfig(weights="1,1,2"))
    for name in A:
        torch.testing.assert_close(found[name], (A[name] + B[name] + 2 * C[name]) / 4)
    assert found["blocks.0.q"].dtype == torch.float32


def test_slerp_keeps_the_norm_and_splits_the_angle():
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    middle = slerp(x, y, 0.5)
    torch.testing.assert_close(middle, torch.full((1, 2), math.sqrt(0.5)))
    third = slerp(x, y, 1 / 3)
    assert math.atan2(*reversed(third[0].tolist())) == pytest.approx(math.pi / 6)
    torch.testing.assert_close(slerp(x, 3 * x, 0.5), 2 * x)  # parallel: linear


def test_method_applies_to_matrices_only():
    found, plain = (merge([A, B], MergeConfig(method)) for method in ("slerp", "linear"))
    for name in A:
        assert torch.equal(found[name], plain[name]) == (name != "blocks.0.q")


def test_task_arithmetic_scales_the_mean_task_vector():
    found = merge([A, B], MergeConfig("task_arithmetic", scale=2.0), BASE)
    for name in A:
        moved = (A[name] + B[name]) / 2 - BASE[name]
        torch.testing.assert_close(found[name], BASE[name] + 2 * moved)
    alone = merge([A], MergeConfig("task_arithmetic", scale=-1.0), BASE)  # negation: unlearn A
    torch.testing.assert_close(alone["scale"], 2 * BASE["scale"] - A["scale"])


def test_ties_keeps_largest_entries_and_elects_signs():
    assert keep_largest(torch.tensor([3.0, -4.0, 1.0, 2.0]), 0.5).tolist() == [3.0, -4.0, 0.0, 0.0]
    votes = [
        torch.tensor([1.0, 2.0, 0.0]),
        torch.tensor([-3.0, 4.0, 0.0]),
        torch.tensor([1.0, 0, 5]),
    ]
    found = elect_signs(votes, [1 / 3] * 3)
    # index 0: negative sum wins; index 1: 2 and 4 agree; index 2: 5 alone is nonzero
    torch.testing.assert_close(found, torch.tensor([-3.0, 3.0, 5.0]))


def test_dare_drops_randomly_and_preserves_the_mean():
    x = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    found = drop_entries(x, 0.25, torch.Generator().manual_seed(5))
    assert (found != 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert found.abs().sum() == pytest.approx(float(x.abs().sum()), rel=0.02)
    again = [merge([A, B], MergeConfig("dare", merge_seed=s), BASE) for s in (0, 0, 1)]
    assert same(again[0], again[1], rtol=0, atol=0)
    assert not torch.equal(again[0]["blocks.0.q"], again[2]["blocks.0.q"])


@pytest.mark.parametrize(
    "models, cfg, base, message",
    [
        ([A, B, C], MergeConfig("slerp"), None, "slerp merges two models, weighted by --t; got 3"),
        ([A, B], MergeConfig("ties"), None, "ties adds task vectors to a base model; set --base"),
        ([A, B], MergeConfig(weights="1,2,3"), None, "2 models need 2 weights"),
        ([A, B], MergeConfig(weights="1,-1"), None, "none negative"),
        ([A, B], MergeConfig(weights="a,b"), None, "2 models need 2 weights"),
    ],
)
def test_incompatible_models_are_rejected(models, cfg, base, message):
    with pytest.raises(ValueError, match=message):
        merge(models, cfg, base)


def test_out_of_range_settings_are_rejected():
    for wrong in ({"density": 0.0}, {"density": 1.5}, {"t": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MergeConfig(**wrong)
