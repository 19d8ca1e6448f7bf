"""Recipes: what counts as a difference, and which code determines a result."""

import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar

import pytest

from nanochat import recipe
from nanochat.common import REPOSITORY
from nanochat.recipe import list_changes, make_recipe
from scripts.base_eval import BaseEval
from scripts.base_loss import BaseLoss
from scripts.base_train import BaseTrain
from scripts.chat_dpo import ChatDPO
from scripts.chat_eval import ChatEval
from scripts.chat_rl import ChatRL
from scripts.chat_sft import ChatSft
from scripts.golf.base_train import GolfTrain
from scripts.mid_train import MidTrain
from scripts.recursion.base_train import RecursionTrain
from scripts.tok_eval import TokEval
from scripts.tok_train import TokTrain

SCRIPTS = (
    *(TokTrain, TokEval, BaseTrain, BaseLoss, BaseEval, MidTrain, ChatSft, ChatRL, ChatDPO),
    *(ChatEval, GolfTrain, RecursionTrain),
)


# ---- Flags and inputs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    NOT_IN_RECIPE: ClassVar[str] = "show"

    n_expert: int = 1
    show: bool = False


@dataclass(frozen=True)
class Edited(BaseTrain):
    """base_train with new flags, of a nested class, too."""

    label_smoothing: float = 0.0
    shares: tuple[int, ...] = (1, 2)
    experts: Experts = field(default_factory=Experts)


def changes(was, now, inputs=({}, {})):
    saved = json.loads(json.dumps(make_recipe(was, inputs[0]).to_json()))
    return list_changes(saved, make_recipe(now, inputs[1]))


def test_R42_new_flags_belong_to_the_recipe_and_are_no_difference_at_their_defaults():
    assert changes(BaseTrain(), Edited()) == []
    new = "the earlier code had no such flag, now"
    lines = [f"--label_smoothing: {new} 0.1", f"--shares: {new} [1]"]
    assert changes(BaseTrain(), Edited(label_smoothing=0.1, shares=(1,))) == lines
    assert changes(Edited(label_smoothing=0.1), Edited()) == ["--label_smoothing: was 0.1, now 0.0"]
    found = changes(Edited(), Edited(experts=Experts(n_expert=4, show=True)))
    assert found == ["--n_expert: was 1, now 4"]


def test_every_flag_counts_but_those_that_cannot_change_the_result():
    train = BaseTrain().train
    for same in ({"save_every": 7}, {"keep": 9}, {"device_batch_size": 2}, {"model_tag": "x"}):
        assert changes(BaseTrain(), BaseTrain(train=replace(train, **same))) == []
    other = replace(train, seed=1, optim=replace(train.optim, matrix_lr=0.5))
    found = changes(BaseTrain(), BaseTrain(train=other, depth=3))
    assert found == [
        "--depth: was 20, now 3",
        "--seed: was 0, now 1",
        "--matrix_lr: was 0.02, now 0.5",
    ]


def test_inputs_are_compared_by_id_and_named_within():
    rows = {"fingerprint": "a", "source": {"name": "here", "files": 3}}
    moved = {"fingerprint": "a", "source": {"name": "there", "files": 3}}
    other = {"fingerprint": "b", "source": {"name": "here", "files": 4}}
    cfg = BaseTrain()
    assert changes(cfg, cfg, ({"rows": rows}, {"rows": moved})) == []
    assert "rows.source.files: was 3, now 4" in changes(cfg, cfg, ({"rows": rows}, {"rows": other}))
    assert changes(cfg, cfg, ({"base": "x"}, {"base": "y"})) == ["base: was 'x', now 'y'"]
    assert make_recipe(cfg, {"rows": rows, "base": "x"}).ids == {"rows": "a", "base": "x"}


def test_id_of_data_leaves_out_its_code():
    made_of = {"task": "a", "of": [{"code": ["x"], "sha256": "1"}], "code": ["y"]}
    edited = {"task": "a", "of": ({"code": ["z"], "sha256": "1"},)}
    other = {"task": "a", "of": [{"code": ["x"], "sha256": "2"}], "code": ["y"]}
    assert recipe.data_id(made_of) == recipe.data_id(edited) != recipe.data_id(other)


@pytest.mark.parametrize("script", SCRIPTS)
def test_lists_of_flags_that_do_not_count_name_flags(script):
    def check(cfg):
        names = {each.name for each in fields(cfg)}
        # DataConfig lists those of its subclass, too
        known = names | {"revision", "val_shard"}
        assert set(getattr(cfg, "NOT_IN_RECIPE", "").split()) <= known
        for name in names:
            if is_dataclass(value := getattr(cfg, name)):
                check(value)

    check(script())


# ---- Code ----------------------------------------------------------------------------------------


def test_R38_imported_code_counts_but_not_that_of_the_report():
    names = recipe.imported_files(REPOSITORY / "scripts" / "base_train.py").keys()
    counted = "scripts/base_train.py nanochat/gpt.py nanochat/attention.py nanochat/rows.py"
    assert {*counted.split(), "tasks/world/write.py", "rustbpe/src/bpe.rs"} <= names
    assert not {"nanochat/hub.py", "nanochat/report.py", "nanochat/rl.py"} & names
    lazily = recipe.imported_files(REPOSITORY / "tasks" / "registry.py").keys()
    assert "tasks/code.py" in lazily


def test_R38_digests_are_those_of_the_start_and_changes_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.common.REPOSITORY", tmp_path)
    (tmp_path / "nanochat").mkdir()
    script, used = tmp_path / "nanochat" / "script.py", tmp_path / "nanochat" / "used.py"
    script.write_text("def main():\n    from nanochat import used\n")
    used.write_text("x = 1\n")
    recipe.read_code(script)
    before = recipe.code_digests()
    assert before.keys() == {"nanochat/script.py", "nanochat/used.py"}
    for text, named in (("x = 1  # one\n", []), ("x = 2\n", ["nanochat/used.py"])):
        used.write_text("x = 1\n")
        recipe.read_code(script)
        used.write_text(text)
        assert recipe.code_digests() == before  # this process runs the old code
        recipe.read_code(script)  # as the next one does
        assert recipe.changed_code(before) == named
        recipe.code_of_process.update(before)
    used.write_text("x = (")  # half-written, of another script
    assert recipe.changed_code({**before, "nanochat/gone.py": ""}) == ["nanochat/gone.py"]
    used.unlink()
    recipe.read_code(script)
    assert recipe.changed_code(before) == ["nanochat/used.py"]
