"""Greedy soups, linear interpolation between models, and the merge script."""

import numpy as np
import pytest
import torch

from nanochat.checkpoint import find_checkpoint, lineage, load_model, save_checkpoint, stage_folder
from nanochat.common import UsageError, read_json
from nanochat.lab.merge import MergeConfig, RowBits, greedy, interpolate, loss_barrier, warnings
from nanochat.tokenizer import Tokenizer
from scripts.lab import merge as merge_script
from scripts.lab.merge import MergeScript

ROWS = np.random.default_rng(0).normal(3.0, 0.3, 200)


def score(tensors):
    """Loss with its optimum at 1; rows differ in loss."""
    distance = float((tensors["x"] - 1).abs())
    return RowBits(ROWS * (1 + 0.1 * distance**2), np.ones(200))


def at(x):
    return {"x": torch.tensor(float(x))}


def test_greedy_soup_keeps_only_models_that_help():
    models = [at(0.4), at(1.5), at(9.0), at(1.52)]
    shares = greedy(models, [score(m) for m in models], score)
    assert shares == [0.5, 0.5, 0.0, 0.0]  # 1.5 is best; 0.4 is on the other side of 1
    assert greedy([at(1.0), at(1.0)], [score(at(1.0))] * 2, score) == [1.0, 0.0]


def test_loss_barrier_between_models_triggers_a_warning():
    models = [at(0.0), at(2.0)]
    flat = interpolate(["a", "b"], models, [score(m) for m in models], score)
    assert loss_barrier(flat["a to b"]) < 0 and not warnings(flat)  # the optimum lies between them

    def hill(tensors):
        return RowBits(ROWS * (2 - 0.5 * float((tensors["x"] - 1) ** 2)), np.ones(200))

    steep = interpolate(["a", "b"], models, [hill(m) for m in models], hill)
    assert [t for t, _ in steep["a to b"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert loss_barrier(steep["a to b"]) > 0 and "different basins" in warnings(steep)[0]


def test_merge_saves_a_checkpoint_that_records_its_parents(trained):
    words = dict(models="base:one|base:two", tag="soup", eval_tokens=2048)
    with pytest.raises(UsageError, match="no record that these models come from one checkpoint"):
        merge_script.main(MergeScript(**words))
    with pytest.raises(UsageError, match="base_checkpoints/two has checkpoints of a training run"):
        merge_script.main(MergeScript(**{**words, "tag": "two"}, unrelated=True))
    merge_script.main(MergeScript(**words, unrelated=True, merging=MergeConfig(weights="3,1")))
    merged = find_checkpoint("base", "soup")
    parents = [find_checkpoint("base", tag) for tag in ("one", "two")]
    recorded = merged.state["merge"]["parents"]
    assert [p["fingerprint"] for p in recorded] == [p.fingerprint for p in parents]
    assert [p["weight"] for p in recorded] == [0.75, 0.25]
    tensors = [c.model_tensors() for c in (*parents, merged)]
    for name in tensors[0]:
        torch.testing.assert_close(
            tensors[2][name], 0.75 * tensors[0][name] + 0.25 * tensors[1][name]
        )
    assert merged.state["settings"] == parents[0].state["settings"]
    record = read_json(trained / "report" / "merge.json")
    assert record["provenance"]["outputs"] == {"base": merged.fingerprint}
    assert record["values"]["Verdict"] in ("better", "worse", "within noise")
    assert [len(line) for line in record["series"].values()] == [5]


def test_shared_text_or_preference_pairs_do_not_make_models_related(base):
    inputs = [{"base": own, "pairs": "p", "data": "d", "tokenizer": "t"} for own in ("b1", "b2")]
    one, two = (merge_script.ancestors(own["base"], own, None) for own in inputs)
    assert (one, two) == ({"b1"}, {"b2"})


def test_merging_a_model_with_itself_keeps_its_score(trained):
    merge_script.main(MergeScript(models="base:one|base:one", eval_tokens=2048))
    values = read_json(trained / "report" / "merge.json")["values"]
    assert values["Merged bpb"] == values["Best parent's bpb"]
    assert values["Verdict"] == "within noise"
    one, merged = find_checkpoint("base", "one"), find_checkpoint("base", "merged")
    assert all(torch.equal(merged.model_tensors()[n], t) for n, t in one.model_tensors().items())


def test_merges_can_be_merged_and_base_must_be_an_ancestor(trained):
    words = dict(eval_tokens=2048, unrelated=True)
    merge_script.main(MergeScript(models="base:one|base:two", tag="first", **words))
    merge_script.main(MergeScript(models="base:first|base:one", tag="again", eval_tokens=2048))
    assert find_checkpoint("base", "again").state["merge"]["parents"][0]["weight"] == 0.5
    towards = MergeConfig(method="task_arithmetic")
    merge_script.main(
        MergeScript(models="base:first", base="base:two", merging=towards, eval_tokens=2048)
    )
    with pytest.raises(UsageError, match="no record that these models come from .*first"):
        merge_script.main(MergeScript(models="base:one", base="base:first", merging=towards))


def test_imported_models_can_be_merged_and_declared_buckets_are_kept(trained, machine):
    for tag, more in (("bare", {}), ("declared", {"declared": {"mine": {"path": "mine.jsonl"}}})):
        one = find_checkpoint("base", "one")
        state = {**lineage(one.state), "stage": "base", **more}
        tokenizer = Tokenizer.read(one.folder / "tokenizer.json")
        save_checkpoint(
            stage_folder("base") / tag, 3, load_model(one, machine), None, tokenizer, state
        )
        merge_script.main(
            MergeScript(models=f"base:{tag}|base:two", eval_tokens=2048, unrelated=True)
        )
        merged = find_checkpoint("base", "merged").state
        assert "settings" not in merged and merged.get("declared") == more.get("declared")


def test_slerp_records_t_and_greedy_rejects_a_method(trained):
    arc = MergeConfig(method="slerp", t=0.25)
    merge_script.main(
        MergeScript(models="base:one|base:two", merging=arc, unrelated=True, eval_tokens=2048)
    )
    state = find_checkpoint("base", "merged").state["merge"]
    assert [p["weight"] for p in state["parents"]] == [0.75, 0.25] and state["t"] == 0.25
    with pytest.raises(ValueError, match="slerp merges two models, weighted by --t; got 3"):
        arc.shares(3)
    with pytest.raises(ValueError, match="--greedy uses plain means"):
        MergeScript(models="base:one|base:two", greedy=True, merging=arc)


def test_merging_again_replaces_a_merge_of_a_later_step(trained):
    words = dict(models="base:one|base:one", eval_tokens=2048)
    merge_script.main(MergeScript(**words))
    first = find_checkpoint("base", "merged").folder
    first.rename(first.with_name("step_000999"))
    merge_script.main(MergeScript(**words))
    assert find_checkpoint("base", "merged").folder == first
    assert not first.with_name("step_000999").exists()


def test_too_few_models_are_rejected():
    for models, message in (("", "list two or more"), ("base:one", "list two or more")):
        with pytest.raises(ValueError, match=message):
            merge_script.main(MergeScript(models=models))
