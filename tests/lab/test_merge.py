"""Merging: identities of each method, and the merge command on models with a common base."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nanochat.common import read_json
from scripts.lab.merge import MergeScript, choose_greedily, elect_signs, keep_largest, merge, slerp
from tests.training_runs import SMALL

MATRIX = "blocks.0.q"


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    names = {MATRIX: (6, 8), "embed.weight": (5, 4), "scale": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


BASE, A, B = map(model, range(3))


def merged(method, models, shares, **settings):
    needs = ("task_arithmetic", "ties", "dare")
    cfg = MergeScript(method=method, base="x" if method in needs else "", **settings)
    return merge(models, shares, cfg, BASE if cfg.base else None)


@pytest.mark.parametrize("method", ["linear", "slerp", "task_arithmetic", "ties", "dare"])
def test_merge_with_itself_is_the_identity(method):
    found = merged(method, [A, A], [0.3, 0.7], density=1.0)
    assert found.keys() == A.keys()
    for name, weights in found.items():
        torch.testing.assert_close(weights, A[name], rtol=0, atol=1e-5)


def test_task_vectors_are_scaled_and_added():
    for name, found in merged("task_arithmetic", [A, B], [0.5, 0.5], scale=2.0).items():
        torch.testing.assert_close(found, A[name] + B[name] - BASE[name], rtol=0, atol=1e-5)


def test_slerp_keeps_the_norm_and_splits_the_angle():
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    third = slerp(x, y, 1 / 3)[0]
    assert math.atan2(*reversed(third.tolist())) == pytest.approx(math.pi / 6)
    assert float(third.norm()) == pytest.approx(1)
    torch.testing.assert_close(slerp(x, 3 * x, 0.5), 2 * x)  # parallel: linear
    torch.testing.assert_close(merged("slerp", [A, B], [0, 1])[MATRIX], B[MATRIX])


def test_ties_keeps_largest_entries_and_elects_signs():
    assert keep_largest(torch.tensor([3.0, -4.0, 1.0, 2.0]), 0.5).tolist() == [3.0, -4.0, 0.0, 0.0]
    votes = [torch.tensor(v) for v in ([1.0, 2.0, 0.0], [-3.0, 4.0, 0.0], [1.0, 0.0, 5.0])]
    # the negative sum wins; 2 and 4 agree; 5 alone is not zero
    torch.testing.assert_close(elect_signs(votes, [1 / 3] * 3), torch.tensor([-3.0, 3.0, 5.0]))


class Valley:
    """A scorer of models whose loss has its optimum at 1."""

    def score(self, tensors):
        loss = 1 + 0.1 * float(tensors["x"] - 1) ** 2
        return [loss * (3 + 0.3 * math.sin(i)) for i in range(200)]


def test_greedy_soup_keeps_only_models_that_help():
    scorer, models = Valley(), [{"x": torch.tensor(x)} for x in (0.4, 1.5, 9.0, 1.52)]
    found = choose_greedily(models, list(map(scorer.score, models)), scorer)  # type: ignore
    assert found == [0.5, 0.5, 0.0, 0.0]  # the optimum is between the first two


# ---- The command ---------------------------------------------------------------------------------

MERGE = ["lab.merge", "--eval_tokens=2048", "--dtype=float32"]


def test_merge_is_a_checkpoint_that_records_its_parents(tuned, command):
    pair = "--models=sft:s0|sft:s1"
    command.works(*MERGE, pair, "--tag=soup", "--weights", "3", "1")
    folders = [tuned / f"chatsft_checkpoints/{tag}/step_000020" for tag in ("s0", "s1", "soup")]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    for name, mixed in weights[2].items():
        torch.testing.assert_close(mixed, 0.75 * weights[0][name] + 0.25 * weights[1][name])
    made = read_json(folders[2] / "state.json")["merge"]["parents"]
    assert made == {"sft:s0": 0.75, "sft:s1": 0.25}
    record = read_json(tuned / "report/merge.json")
    assert record["provenance"]["outputs"].keys() == {"sft"} and record["values"]["Verdict"]
    command.works("chat_eval", *"-i sft -g soup -a World-Choice -x 4 --dtype=float32".split())
    for flags in (
        "--method=greedy",
        "--method=ties --base=base:one --models=sft:soup|sft:s0",  # merges can be merged
        "--models=sft:s0|sft:s0",
    ):
        shutil.rmtree(tuned / "chatsft_checkpoints/merged", ignore_errors=True)
        command.works(*MERGE, pair, *flags.split())
    values = read_json(tuned / "report/merge.json")["values"]
    assert values["Merged bpb"] == values["Best parent's bpb"]
    assert values["Verdict"] == "within noise"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--models=sft:s0|sft:s1 --tag=s0", "choose another --tag"),
        ("--models=sft:s0|sft:s1 --weights 1 2 3", "2 models need 2 weights"),
        ("--models=sft:s0|sft:s1 --method=ties", "ties adds task vectors to a base model"),
    ],
)
def test_models_that_do_not_fit_together_are_rejected(tuned, command, flags, message):
    assert message in command.rejects(*MERGE, *flags.split())


def test_unrelated_models_are_merged_with_a_warning(trained, command):
    command.works("base_train", *SMALL, "--seed=5", "--model_tag=other")
    out = command.works(*MERGE, "--models=base:one|base:other")
    assert (trained / "base_checkpoints/merged").exists() and "different basins" in out
