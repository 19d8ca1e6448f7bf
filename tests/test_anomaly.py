"""Values that are not finite, and ranks that differ: never in the weights or in a checkpoint."""

import math
import re

import pytest

from tests.faulty import during_step
from tests.training_runs import (
    SMALL,
    begin,
    curve,
    equal,
    folder,
    rest_of,
    saved_steps,
    torchrun,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def train(command, monkeypatch, tag, action, *flags):
    with monkeypatch.context() as patch:
        during_step(action, patch.setattr)
        return command("base_train", *SMALL, f"--model_tag={tag}", *flags)


def spoil_gradient(now, model, tokens, loss):
    """An infinite gradient with a finite loss."""
    if now.step in (3, 7):
        loss.register_hook(lambda gradient: gradient * math.inf)


def test_R13_steps_that_are_not_finite_are_skipped(trained, command, monkeypatch):
    status, text = train(command, monkeypatch, "bad", spoil_gradient, "--save_every=1", "--keep=99")
    assert status == 0
    assert re.search(r"step 3: loss \d.*skipped on all ranks.*rows \S*\d", text)
    for step in (3, 7):
        assert equal(weights(trained, "bad", step), weights(trained, "bad", step + 1))
    assert not equal(weights(trained, "bad", 4), weights(trained, "bad", 5))
    assert weights(trained, "bad")["head.weight"].isfinite().all()
    smooth = curve(folder(trained, "bad"), "smooth_loss")
    assert all(map(math.isfinite, smooth)) and smooth[-1] < smooth[0]


def test_R13_repeated_bad_steps_end_a_run(trained, trained_base, command, monkeypatch):
    def lose(now, model, tokens, loss):
        return loss * math.nan if now.step >= 8 else None

    status, text = train(command, monkeypatch, "lost", lose, "--save_every=0")
    assert status == 2 and "step 12" in text
    [newest] = saved_steps(folder(trained, "lost"))
    assert equal(weights(trained, "lost", newest), weights(trained_base, "one", 8))  # last good


@pytest.mark.parametrize("name", ["head.weight", "blocks.1.mlp.up.weight"])
def test_R13_weights_that_are_not_finite_are_not_saved(trained, command, monkeypatch, name):
    def spoil(now, model, *_):
        if now.step == 6:
            model.get_parameter(name).data[0, 0] = math.inf

    status, text = train(command, monkeypatch, "spoiled", spoil)
    assert status == 2 and re.search(rf"{name} has non-finite.*last good step: 4", text)
    assert saved_steps(folder(trained, "spoiled")) == [4]


def test_R13_R15_faults_of_one_rank_are_found_on_all(trained):
    words = [*torchrun(2), "-m", "tests.faulty", "corrupt", "1", "base_train", *SMALL]
    process = begin(trained, *words, "--num_iterations=200", "--model_tag=corrupt", "--no-compile")
    text = rest_of(process)
    assert process.returncode
    assert re.search(r"step 3: loss nan.*skipped on all ranks", text)
    changed = re.search(r"changed (\S+)", text)
    assert changed and f": {changed[1]} differs on rank 1 of 2" in text, text[-3000:]
    assert saved_steps(folder(trained, "corrupt"))[0] == 4  # the weights were equal then
