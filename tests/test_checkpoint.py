"""Checkpoints on disk: atomic writes, verification, lookup."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from nanochat.checkpoint import (
    CorruptCheckpoint,
    find_checkpoint,
    load_model,
    open_checkpoint,
    save_checkpoint,
    save_tensors,
    stage_folder,
    step_folders,
)
from nanochat.common import MissingInput, json_text, seal, sha256_file
from nanochat.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a small text"], 265)


@pytest.fixture
def folder(base):
    return stage_folder("base") / "tiny"


@pytest.fixture
def save(folder, tiny_gpt, tokenizer):
    """Function that saves a step to base_checkpoints/tiny."""

    def save(step, **changed):
        optim = {"steps_taken": torch.tensor(step), "m": torch.ones(7)}
        state = {"identity": {"seed": 0}, "source": {"of": 1.5}}
        return save_checkpoint(folder, step, tiny_gpt, optim, tokenizer, state, **changed)

    return save


def test_loaded_model_equals_the_saved_one(save, tiny_gpt, machine):
    save(7)
    found = find_checkpoint("base")
    assert found.step == 7 and found.optim_tensors()["steps_taken"] == 7
    tokens = torch.arange(16)[None]
    assert torch.equal(load_model(found, machine)(tokens), tiny_gpt(tokens))


def test_B11_steps_sort_numerically_and_only_newest_are_kept(save, folder):
    for step in (999_999, 1_000_000, 1_000_001):
        save(step)
    assert list(step_folders(folder)) == [1_000_000, 1_000_001]
    assert open_checkpoint(folder).step == 1_000_001
    assert (folder / "latest").read_text() == "step_1000001\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optim.safetensors", "tokenizer.json", "state.json"]
)
def test_R10_bit_flips_are_detected_and_previous_step_is_used(
    save, folder, capsys, record_property, name
):
    save(1)
    save(2)
    path, rng = folder / "step_000002" / name, random.Random(0)
    original = path.read_bytes()
    for _ in range(100):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert open_checkpoint(folder).step == 1
        assert name in capsys.readouterr().out
        with pytest.raises(ValueError, match=name):
            open_checkpoint(folder, 2)
    path.write_bytes(original)
    assert open_checkpoint(folder).step == 2
    record_property("bit flips found", 100)


def test_files_and_digests_equal_those_of_safetensors(tmp_path):
    tensors = {
        "b": torch.randn(3, 5),
        "a.name": torch.randn(7),
        "steps": torch.tensor(3),
        "none": torch.ones(0, 2),
        "view": torch.arange(12.0).view(3, 4)[1:],
    }
    written = save_tensors(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert written == {"bytes": len(data), "sha256": sha256_file(tmp_path / "ours")}


def test_R10_content_of_latest_is_ignored(save, folder):
    save(1)
    for text in ("step_000009\n", "", "\0\xff"):
        (folder / "latest").write_text(text)
        assert find_checkpoint("base").step == 1


def test_R10_run_does_not_start_over_if_all_are_corrupt(save, folder):
    save(1)
    (folder / "step_000001" / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="all checkpoints in"):
        open_checkpoint(folder)


@pytest.mark.parametrize("moment", ["tokenizer", "model.safetensors", "optim.safetensors", "state"])
def test_R1_failed_save_keeps_old_checkpoint_and_cleans_up(save, folder, monkeypatch, moment):
    save(1)
    from nanochat import checkpoint as module

    save_tensors = module.save_tensors

    def fail(*args):
        raise OSError(28, "No space left on device")

    def fail_at(tensors, path):
        return fail() if path.name == moment else save_tensors(tensors, path)

    monkeypatch.setattr(module, "save_tensors", fail_at)
    if moment == "tokenizer":
        monkeypatch.setattr(module.Tokenizer, "save", fail)
    if moment == "state":
        monkeypatch.setattr(module.common, "write_json", fail)
    with pytest.raises(OSError, match="No space"):
        save(2)
    assert open_checkpoint(folder).step == 1
    assert not list(folder.glob(".saving*"))


def test_R1_kill_while_replacing_a_step_loses_nothing(save, folder):
    save(1)
    (folder / "step_000001").rename(folder / ".replaced_000001")  # killed right here
    (folder / ".saving_000001").mkdir()
    assert open_checkpoint(folder).step == 1
    save(1)
    assert open_checkpoint(folder).step == 1
    assert not list(folder.glob(".*_000001"))


def test_reading_leaves_a_save_in_progress_untouched(save, folder):
    save(1)
    (folder / ".saving_000002").mkdir()
    (folder / ".replaced_000001").mkdir()
    (folder / ".replaced_000001" / "x").touch()
    assert open_checkpoint(folder).step == 1
    assert sorted(p.name for p in folder.glob(".*")) == [".replaced_000001", ".saving_000002"]


def test_checkpoint_of_another_format_is_rejected(save, folder):
    save(1)
    path = folder / "step_000001" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(CorruptCheckpoint, match="format 1, not 2"):
        open_checkpoint(folder, 1)


def test_R30_renamed_step_folder_is_rejected(save, folder, capsys):
    save(5)
    save(7)
    (folder / "step_000007").rename(folder / "step_000009")
    assert open_checkpoint(folder).step == 5
    assert "state.json is from step 7; rename the folder to step_000007" in (
        capsys.readouterr().out
    )
    with pytest.raises(CorruptCheckpoint, match="renamed"):
        open_checkpoint(folder, 9)
    (folder / "step_000009").rename(folder / "step_000007")
    assert open_checkpoint(folder).step == 7


def reseal(path, change):
    """Edit a state.json and renew its seal."""
    state = json.loads(path.read_text())
    del state["seal"]
    change(state)
    path.write_text(json_text(seal(state)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda s: s["files"].pop("model.safetensors"),
            "does not list files (KeyError('model.safetensors'))",
        ),
        (
            lambda s: s["files"].pop("tokenizer.json"),
            "does not list files (KeyError('tokenizer.json'))",
        ),
        (lambda s: s["files"].clear(), "does not list files (KeyError('model.safetensors'))"),
        (lambda s: s.pop("files"), "state.json does not list files"),
        (lambda s: s.update(files=["model.safetensors"]), "state.json does not list files"),
        (lambda s: s["files"].update({"model.safetensors": 7}), "state.json does not list files"),
        (lambda s: s.pop("step"), "state.json does not list files"),
        (lambda s: s.update(step=3), "state.json is from step 3"),
        (lambda s: s["files"]["model.safetensors"].update(sha256="0" * 64), "SHA-256"),
        (lambda s: s["files"]["model.safetensors"].update(bytes=1), "SHA-256"),
    ],
)
def test_R30_edited_and_resealed_state_is_rejected(save, folder, capsys, change, complaint):
    save(1)
    save(2)
    reseal(folder / "step_000002" / "state.json", change)
    assert open_checkpoint(folder).step == 1
    assert complaint in capsys.readouterr().out


def test_R30_unlisted_files_are_not_read(save, folder):
    save(1)
    reseal(folder / "step_000001" / "state.json", lambda s: s["files"].pop("optim.safetensors"))
    assert not open_checkpoint(folder).has_optimizer


def test_most_recently_saved_tag_is_the_default(save, folder, tiny_gpt, tokenizer):
    save(1)
    save_checkpoint(stage_folder("base") / "later", 5, tiny_gpt, None, tokenizer, {})
    os.utime(folder / "latest", (0, 0))
    assert find_checkpoint("base").folder.parent.name == "later"
    assert find_checkpoint("base", "tiny").step == 1


def test_missing_checkpoint_error_names_the_command(base):
    with pytest.raises(MissingInput, match="python -m scripts.base_train"):
        find_checkpoint("base")
    with pytest.raises(ValueError, match="'best'"):
        find_checkpoint("best")


def test_state_is_json_with_the_digest_of_every_file(save, folder):
    save(3)
    state = json.loads((folder / "step_000003" / "state.json").read_text())
    names = {p.name for p in (folder / "step_000003").iterdir()}
    assert set(state["files"]) == names - {"state.json"}
    assert state["step"] == 3 and state["model"]["d_model"] == 32
