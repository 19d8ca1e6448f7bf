"""Checkpoints: whole or not at all, verified, found again, and refused when they do not fit."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from nanochat.checkpoint import (
    Checkpoints,
    CorruptCheckpoint,
    find_checkpoint,
    list_steps,
    load_model,
    open_checkpoint,
    save_checkpoint,
    stage_folder,
)
from nanochat.common import MissingInput
from nanochat.gpt import build_model
from nanochat.optim import MuonAdamW, OptimConfig, rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import Progress
from tests.conftest import TINY


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a small text"], 265)


@pytest.fixture
def optimizer(tiny_gpt, machine):
    table = rules(OptimConfig(), TINY.d_model)
    named = dict(tiny_gpt.named_parameters())
    return MuonAdamW(named, tiny_gpt.param_roles(), table, machine)


@pytest.fixture
def run(base, tiny_gpt, optimizer, tokenizer, machine):
    """Saves steps of one run into base_checkpoints/tiny."""
    checkpoints = Checkpoints(stage_folder("base") / "tiny", machine, keep=2)
    identity = {"model": {"n_layer": 2}, "rows": {"tokenizer": "abc"}, "seed": 0}

    def save(step):
        state = {"identity": identity}
        checkpoints.save(tiny_gpt, optimizer, tokenizer, state, Progress(step=step, bad_steps=1))

    return SimpleNamespace(save=save, checkpoints=checkpoints, identity=identity)


def flip_a_bit(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def test_what_is_saved_is_what_is_loaded(run, tiny_gpt, optimizer, machine):
    run.save(7)
    fresh = build_model(TINY, machine.device, machine.dtype, seed=9)
    table = rules(OptimConfig(), TINY.d_model)
    other = MuonAdamW(dict(fresh.named_parameters()), fresh.param_roles(), table, machine)
    progress = Progress()
    assert run.checkpoints.resume(run.identity, False, fresh, other, progress)
    assert (progress.step, progress.bad_steps) == (7, 1)
    for name, p in fresh.named_parameters():
        assert torch.equal(p, tiny_gpt.get_parameter(name)), name
    rebuilt = load_model(find_checkpoint("base"), machine)
    tokens = torch.arange(16)[None]
    assert torch.equal(rebuilt(tokens), tiny_gpt(tokens))


def test_B11_steps_are_ordered_as_numbers_and_only_the_newest_are_kept(run):
    for step in (999_999, 1_000_000, 1_000_001):
        run.save(step)
    folder = run.checkpoints.folder
    assert list_steps(folder) == [1_000_000, 1_000_001]
    assert open_checkpoint(folder).step == 1_000_001
    assert (folder / "latest").read_text() == "step_1000001\n"


def test_R10_every_flipped_bit_is_found_and_the_checkpoint_before_is_used(run, capsys):
    run.save(1)
    run.save(2)
    rng = random.Random(0)
    newest = run.checkpoints.folder / "step_000002"
    names = ["model.safetensors", "optim.safetensors", "tokenizer.json"]
    for i in range(30):
        path = newest / names[i % 3]
        original = path.read_bytes()
        flip_a_bit(path, rng)
        assert open_checkpoint(run.checkpoints.folder).step == 1
        assert path.name in capsys.readouterr().out
        path.write_bytes(original)
    assert open_checkpoint(run.checkpoints.folder).step == 2


def test_R10_when_no_checkpoint_is_good_the_run_does_not_start_anew(run):
    run.save(1)
    (run.checkpoints.folder / "step_000001" / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="no good checkpoint"):
        open_checkpoint(run.checkpoints.folder)


@pytest.mark.parametrize("moment", ["model.safetensors", "optim.safetensors", "state.json"])
def test_R1_a_save_that_dies_leaves_the_old_checkpoint_and_no_rest(run, monkeypatch, moment):
    run.save(1)
    from nanochat import checkpoint as module

    save_file, write_json = module.save_file, module.write_json

    def dying(real):
        def write(first, second, *rest):
            path = second if hasattr(second, "name") else first
            if path.name == moment:
                raise OSError(28, "No space left on device")
            return real(first, second, *rest)

        return write

    monkeypatch.setattr(module, "save_file", dying(save_file))
    monkeypatch.setattr(module, "write_json", dying(write_json))
    with pytest.raises(OSError, match="No space"):
        run.save(2)
    assert open_checkpoint(run.checkpoints.folder).step == 1
    assert not list(run.checkpoints.folder.glob(".saving*"))


def test_R1_a_process_killed_while_replacing_a_step_loses_nothing(run):
    run.save(1)
    folder = run.checkpoints.folder
    (folder / "step_000001").rename(folder / ".replaced_000001")  # killed right here
    (folder / ".saving_000001").mkdir()
    assert open_checkpoint(folder).step == 1
    assert not list(folder.glob(".*_000001"))


def test_R6_another_model_text_or_seed_is_refused_by_name(run, tiny_gpt, optimizer):
    run.save(1)
    other = {**run.identity, "rows": {"tokenizer": "xyz"}}
    with pytest.raises(ValueError, match="rows.tokenizer: was 'abc', now 'xyz'"):
        run.checkpoints.resume(other, False, tiny_gpt, optimizer, Progress())
    assert run.checkpoints.resume(other, True, tiny_gpt, optimizer, Progress())
    with pytest.raises(ValueError, match="seed: was 0, now 1"):
        run.checkpoints.resume({**other, "seed": 1}, True, tiny_gpt, optimizer, Progress())


def test_a_new_run_of_the_same_name_moves_the_old_one_aside(run):
    run.save(1)
    run.checkpoints.make_room()
    assert not run.checkpoints.folder.exists()
    (aside,) = run.checkpoints.folder.parent.glob("tiny.before-*")
    assert open_checkpoint(aside).step == 1


def test_the_tag_written_last_is_found_first(run, tiny_gpt, tokenizer):
    import os

    run.save(1)
    other = stage_folder("base") / "later"
    save_checkpoint(other, 5, tiny_gpt, None, tokenizer, {})
    os.utime(run.checkpoints.folder / "latest", (0, 0))
    assert find_checkpoint("base").folder.parent.name == "later"
    assert find_checkpoint("base", "tiny").step == 1


def test_a_missing_checkpoint_names_the_command_that_makes_one(base):
    with pytest.raises(MissingInput, match="python -m scripts.base_train"):
        find_checkpoint("base")
    with pytest.raises(ValueError, match="'best'"):
        find_checkpoint("best")


def test_state_is_readable_json_with_the_digest_of_every_file(run):
    run.save(3)
    folder = run.checkpoints.folder / "step_000003"
    state = json.loads((folder / "state.json").read_text())
    assert set(state["files"]) == {p.name for p in folder.iterdir()} - {"state.json"}
    assert state["step"] == 3 and state["model"]["d_model"] == 32
