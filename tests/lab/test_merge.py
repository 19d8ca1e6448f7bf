"""Merging: identities of each method, and the merge command on models with a common base."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanochat.common import read_json
from nanochat.lab.merge import (
    MergeConfig,
    RowBits,
    drop_entries,
    elect_signs,
    greedy,
    interpolate,
    keep_largest,
    loss_barrier,
    merge,
    slerp,
    warnings,
)

MATRIX = "blocks.0.q"


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    names = {MATRIX: (6, 8), "embed.weight": (5, 4), "scale": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


BASE, A, B, C = map(model, range(4))


@pytest.mark.parametrize(
    "cfg, models, formula",
    [
        *(
            (MergeConfig(method, density=1.0), [A, A], lambda name: A[name])
            for method in ("linear", "slerp", "task_arithmetic", "ties", "dare", "dare_ties")
        ),
        (MergeConfig(weights="1,0"), [A, B], lambda name: A[name]),
        (MergeConfig("slerp", t=0.0), [A, B], lambda name: A[name] if name == MATRIX else None),
        (MergeConfig("slerp", t=1.0), [A, B], lambda name: B[name]),
        (MergeConfig(weights="1,1,2"), [A, B, C], lambda n: (A[n] + B[n] + 2 * C[n]) / 4),
        (MergeConfig("task_arithmetic", scale=2.0), [A, B], lambda n: A[n] + B[n] - BASE[n]),
        (MergeConfig("task_arithmetic", scale=-1.0), [A], lambda n: 2 * BASE[n] - A[n]),
    ],
)
def test_merge_follows_its_formula(cfg, models, formula):
    found = merge(models, cfg, BASE, [MATRIX])
    assert found.keys() == A.keys()
    for name, weights in found.items():
        if (want := formula(name)) is not None:
            torch.testing.assert_close(weights, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["slerp", "ties", "dare"])
def test_only_matrices_are_merged_by_the_method(method):
    found, again, plain = (
        merge([A, B], MergeConfig(each, merge_seed=0), BASE, [MATRIX])
        for each in (method, method, "linear")
    )
    for name in A:
        assert torch.equal(found[name], again[name])
        assert torch.allclose(found[name], plain[name]) == (name != MATRIX)


def test_slerp_keeps_the_norm_and_splits_the_angle():
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    third = slerp(x, y, 1 / 3)[0]
    assert math.atan2(*reversed(third.tolist())) == pytest.approx(math.pi / 6)
    assert float(third.norm()) == pytest.approx(1)
    torch.testing.assert_close(slerp(x, 3 * x, 0.5), 2 * x)  # parallel: linear


def test_ties_keeps_largest_entries_and_elects_signs():
    assert keep_largest(torch.tensor([3.0, -4.0, 1.0, 2.0]), 0.5).tolist() == [3.0, -4.0, 0.0, 0.0]
    votes = [torch.tensor(v) for v in ([1.0, 2.0, 0.0], [-3.0, 4.0, 0.0], [1.0, 0.0, 5.0])]
    # the negative sum wins; 2 and 4 agree; 5 alone is not zero
    torch.testing.assert_close(elect_signs(votes, [1 / 3] * 3), torch.tensor([-3.0, 3.0, 5.0]))


def test_dare_drops_randomly_and_preserves_the_mean():
    x = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    found = drop_entries(x, 0.25, torch.Generator().manual_seed(5))
    assert (found != 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert found.abs().sum() == pytest.approx(float(x.abs().sum()), rel=0.02)


@pytest.mark.parametrize(
    "cfg, count, message",
    [
        ({"method": "slerp"}, 3, "slerp merges two models, weighted by --t; got 3"),
        ({"method": "ties"}, 2, "ties adds task vectors to a base model; set --base"),
        ({"weights": "1,2,3"}, 2, "2 models need 2 weights"),
        ({"weights": "1,-1"}, 2, "none negative"),
        ({"weights": "a,b"}, 2, "2 models need 2 weights"),
        ({"density": 0.0}, 2, r"density must be in \(0, 1\], got 0"),
        ({"t": 2.0}, 2, "t must be in .0, 1., got 2"),
    ],
)
def test_unusable_settings_are_rejected(cfg, count, message):
    with pytest.raises(ValueError, match=message):
        merge([A, B, C][:count], MergeConfig(**cfg), None, [MATRIX])


ROWS = np.random.default_rng(0).normal(3.0, 0.3, 200)


def valley(tensors):
    """Loss with its optimum at 1."""
    return RowBits(ROWS * (1 + 0.1 * float(tensors["x"] - 1) ** 2), np.ones(200))


def hill(tensors):
    return RowBits(ROWS * (2 - 0.5 * float(tensors["x"] - 1) ** 2), np.ones(200))


def points(*xs):
    return [{"x": torch.tensor(x)} for x in xs]


def test_greedy_soup_keeps_only_models_that_help():
    for models, shares in (
        (points(0.4, 1.5, 9.0, 1.52), [0.5, 0.5, 0.0, 0.0]),  # the optimum is between the first two
        (points(1.0, 1.0), [1.0, 0.0]),
    ):
        assert greedy(models, list(map(valley, models)), valley) == shares


def test_loss_barrier_between_models_triggers_a_warning():
    models = points(0.0, 2.0)
    flat, steep = (interpolate(["a", "b"], models, list(map(f, models)), f) for f in (valley, hill))
    assert loss_barrier(flat["a to b"]) < 0 and not warnings(flat)
    assert [t for t, _ in steep["a to b"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert loss_barrier(steep["a to b"]) > 0 and "different basins" in warnings(steep)[0]


# ---- The command ---------------------------------------------------------------------------------

MERGE = ["lab.merge", "--eval_tokens=2048", "--dtype=float32"]


def test_merge_is_a_checkpoint_that_records_its_parents(tuned, command):
    pair = "--models=sft:s0|sft:s1"
    command.works(*MERGE, pair, "--tag=soup", "--weights=3,1")
    folders = [tuned / f"chatsft_checkpoints/{tag}/step_000020" for tag in ("s0", "s1", "soup")]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    for name, merged in weights[2].items():
        torch.testing.assert_close(merged, 0.75 * weights[0][name] + 0.25 * weights[1][name])
    made = read_json(folders[2] / "state.json")["merge"]
    assert [(p["name"], p["weight"]) for p in made["parents"]] == [
        ("sft:s0", 0.75),
        ("sft:s1", 0.25),
    ]
    record = read_json(tuned / "report/merge.json")
    values = record["values"]
    assert record["provenance"]["outputs"].keys() == {"sft"} and values["Verdict"]
    assert values["Best parent's bpb"] <= values["Mean of the parents' bpb"]
    assert [len(line) for line in record["series"].values()] == [5]
    command.works("chat_eval", *"-i sft -g soup -a World-Choice -x 4 --dtype=float32".split())

    for flags in (
        ["--greedy=1"],
        ["--method=slerp", "--t=0.25"],
        ["--method=ties", "--base=base:one"],
    ):
        command.works(*MERGE, pair, *flags)
        assert len(list((tuned / "chatsft_checkpoints/merged").glob("step_*"))) == 1
    command.works(*MERGE, "--models=sft:soup|sft:s0")  # merges can be merged
    command.works(*MERGE, "--models=sft:s0|sft:s0")
    values = read_json(tuned / "report/merge.json")["values"]
    assert values["Merged bpb"] == values["Best parent's bpb"]
    assert values["Verdict"] == "within noise"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--models=base:one|base:two", "no record that these models come from one checkpoint"),
        ("--models=sft:s0 --method=ties --base=base:two", "no record that these models come from"),
        ("--models=sft:s0|sft:s1 --tag=s0", "has checkpoints of a training run"),
        ("--models=sft:s0|sft:s1 --greedy=1 --method=slerp", "--greedy uses plain means"),
        ("--models=base:one", "list two or more"),
        ("", "list two or more"),
    ],
)
def test_models_that_do_not_fit_together_are_rejected(tuned, command, flags, message):
    assert message in command.rejects(*MERGE, *flags.split())


def test_unrelated_models_can_be_merged_on_request(trained, command):
    command.works(*MERGE, "--models=base:one|base:two", "--unrelated=1")
    assert (trained / "base_checkpoints/merged").exists()
