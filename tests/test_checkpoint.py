"""Checkpoints on disk: complete or absent, verified, found by stage, tag and step."""

import json
import os
import random
import re
import time

import pytest
import torch
from safetensors.torch import load_file

import nanochat
from nanochat.checkpoint import (
    CorruptCheckpoint,
    find_checkpoint,
    load_model,
    newest_checkpoint,
    read_checkpoint,
    save_checkpoint,
    stage_folder,
    step_folders,
)
from nanochat.common import UsageError
from nanochat.gpt import GPT, copy_weights, inference_copy
from nanochat.tokenizer import Tokenizer
from tests.conftest import TINY, lively

FILES = ("model.safetensors", "optim.safetensors", "tokenizer.json", "state.json")


def newest(folder):
    found = newest_checkpoint(folder, optimizer=True)
    assert found is not None
    return found.step


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a small text"], 265)


@pytest.fixture
def folder(base):
    return stage_folder("base") / "tiny"


@pytest.fixture
def save(folder, tiny_gpt, tokenizer):
    """Save a step to base_checkpoints/tiny, or to another tag."""

    def save(step, tag="tiny"):
        optim = {"steps_taken": torch.tensor(step), "m": torch.randn(300, 400).T}
        state = {"source": {"of": 1.5}}
        folder_of_tag = folder.with_name(tag)
        return optim, save_checkpoint(folder_of_tag, step, tiny_gpt, optim, tokenizer, state)

    return save


def test_loaded_model_equals_the_saved_one(save, folder, tiny_gpt, tokenizer, dist):
    optim, saved = save(7)
    found = find_checkpoint("base")
    assert (found.step, found.fingerprint) == (7, saved.fingerprint)
    tokens = torch.arange(16)[None]
    assert torch.equal(load_model(found, dist)(tokens), tiny_gpt(tokens))
    assert load_model(found, dist, max_seq_len=8).cfg.max_seq_len == 8
    assert found.tokenizer().encode("a small") == tokenizer.encode("a small")
    tensors = load_file(folder / "step_000007" / "optim.safetensors")
    assert tensors.keys() == optim.keys() and torch.equal(tensors["m"], optim["m"])
    state = json.loads((folder / "step_000007" / "state.json").read_text())
    assert state["step"] == 7 and state["model"]["d_model"] == 32 and state["source"] == {"of": 1.5}


def test_B11_steps_sort_numerically_and_only_newest_are_kept(save, folder):
    for step in (999_999, 1_000_000, 1_000_001):
        save(step)
    assert list(step_folders(folder)) == [1_000_000, 1_000_001]
    assert newest(folder) == 1_000_001
    with pytest.raises(FileNotFoundError, match="999999"):
        find_checkpoint("base:tiny:999999")
    save(5)  # an earlier step: not deleted at once
    assert find_checkpoint("base:tiny:5").step == 5


@pytest.mark.parametrize("name", FILES)
def test_R10_bit_flips_are_detected_and_previous_step_is_used(save, folder, capsys, name):
    save(1)
    save(2)
    path, rng = folder / "step_000002" / name, random.Random(0)
    original = path.read_bytes()
    for _ in range(100):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert newest(folder) == 1
        assert name in capsys.readouterr().out
    with pytest.raises(ValueError, match=name):
        read_checkpoint(folder / "step_000002", optimizer=True)
    path.write_bytes(original)
    assert newest(folder) == 2
    path.unlink()
    assert newest(folder) == 1
    (folder / "step_000001" / name).unlink()
    with pytest.raises(CorruptCheckpoint, match="all checkpoints in"):  # does not start over
        newest(folder)


def test_R1_interrupted_saves_are_left_alone_until_the_next_save(save, folder):
    save(1)
    (folder / ".saving_000003").mkdir()
    assert newest(folder) == 1
    assert (folder / ".saving_000003").exists()  # perhaps a save in progress
    save(1)  # the same step again
    assert newest(folder) == 1 and not list(folder.glob(".*"))


def test_newest_tag_is_the_default_also_in_a_copy(save, folder):
    save(5)
    save(1, "later")
    os.utime(folder / "step_000005" / "state.json")  # copied last
    assert find_checkpoint("base").folder.parent.name == "later"
    assert find_checkpoint("base", "tiny").step == 5


def test_newest_tag_does_not_depend_on_the_time_zone(save, monkeypatch):
    for zone, tag in (("UTC-9", "earlier"), ("UTC+9", "later")):  # 18 hours between their clocks
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        save(1, tag)
    assert find_checkpoint("base").folder.parent.name == "later"


# ---- Classes, buffers and ties -------------------------------------------------------------------


class Edited(GPT):
    """A head tied to the embedding, and a table that is not saved."""

    def __init__(self, cfg, dtype=torch.float32):
        super().__init__(cfg, dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("slopes", torch.linspace(1, 2, cfg.d_model), persistent=False)
        self.register_buffer("shift", torch.zeros(cfg.d_model))

    def hidden(self, *args, **options):
        return super().hidden(*args, **options) * self.slopes + self.shift


def test_R43_buffers_and_ties_survive_loading_and_copies(folder, tokenizer, dist, monkeypatch):
    monkeypatch.setattr(Edited, "__module__", "nanochat.gpt")
    monkeypatch.setattr("nanochat.gpt.Edited", Edited, raising=False)
    model, tokens = lively(Edited(TINY)), torch.arange(16)[None]
    model.shift.fill_(0.5)
    loaded = load_model(save_checkpoint(folder, 1, model, None, tokenizer, {}), dist)
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.head.weight is loaded.embed.weight and loaded.num_params() == model.num_params()
    twin = inference_copy(loaded)
    assert torch.equal(twin(tokens), model(tokens))
    with torch.no_grad():
        loaded.shift.add_(1.0)
        loaded.slopes.mul_(2.0)
        loaded.embed.weight.mul_(1.5)
    assert not torch.equal(twin(tokens), loaded(tokens))
    copy_weights(twin, loaded)
    assert torch.equal(twin(tokens), loaded(tokens))


@pytest.mark.parametrize("path", ["os.path", "tests.test_checkpoint.Edited", "nanochat.gpt.MLP"])
def test_class_of_other_code_is_refused_by_name(save, folder, dist, path):
    _, saved = save(1)
    saved.state["class"] = path
    with pytest.raises(UsageError, match=rf"the class {re.escape(path)}, which nanochat/ does not"):
        load_model(saved, dist)


def test_package_that_the_class_of_a_model_needs_is_named(save, dist, tmp_path, monkeypatch):
    _, saved = save(1)
    (tmp_path / "edited.py").write_text("import missing_package\n")
    monkeypatch.setattr("nanochat.__path__", [*nanochat.__path__, str(tmp_path)])
    saved.state["class"] = "nanochat.edited.Edited"
    with pytest.raises(ModuleNotFoundError, match="missing_package"):
        load_model(saved, dist)
