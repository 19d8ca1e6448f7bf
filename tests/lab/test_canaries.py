"""Canaries: each triggers on its failure, and none on a healthy run."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanochat.chat_format import render
from nanochat.checkpoint import Progress, build_model
from nanochat.common import BROKEN
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.lab import canaries
from nanochat.lab.canaries import (
    CANARIES,
    Broken,
    CanaryConfig,
    CanaryMonitor,
    CanarySuite,
    Finding,
    due,
    pretraining_text,
    score_suite,
    stop_if_broken,
)
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from nanochat.train import inputs_and_targets
from tasks.base import ChoiceTask, assistant, user
from tests.conftest import lively

TOKENIZER = Tokenizer.train(["what is it"], 265)


class Letters(ChoiceTask):
    name, splits, baseline = "Letters", ("test",), 0.25

    def __init__(self):
        super().__init__("test")

    def __len__(self):
        return 40

    def conversation(self, i):
        return [user(f"question {i}"), assistant("ABCD"[i % 4])]

    def letters(self, i):
        return tuple("ABCD")


@pytest.fixture
def model():
    return lively(
        build_model(GPTConfig(265, 2, 32, 4, 2, 8, 64), torch.device("cpu"), torch.float32, 0)
    )


def suite_of():
    ids = torch.arange(65).repeat(4, 1).numpy()
    text = [inputs_and_targets(ids)]
    return CanarySuite(TOKENIZER, text, {"x": Letters()}, {"x": Letters()}, {"x": 1.0})


def monitor_of(machine):
    usual = {"text_bpb": 1.0, "uniform_bpb": 3.0, "train_chat_loss": 1.0}
    answers = {"no_end": 0.0, "unparsable": 0.1, "repeated": 0.0, "one_letter": 0.3, "length": 1.1}
    return CanaryMonitor(CanaryConfig(), suite_of(), {**usual, **answers}, None, 100, machine, 50.0)


def checked(monkeypatch, monitor, step=10, smooth_loss=1.0, **changes):
    """Run the same check twice; return {canary: level} of the second, without "fine" levels."""
    now = {**monitor.parent, **changes}
    monkeypatch.setattr(CanarySuite, "measure", lambda self, model: now)
    monitor.check(step - 1, None, smooth_loss)
    return {f.name: f.level for f in monitor.check(step, None, smooth_loss) if f.level != "fine"}


def test_suite_measures_text_conversations_and_answers(model):
    suite = suite_of()
    found = suite.measure(model)
    assert found["uniform_bpb"] == pytest.approx(math.log2(265), rel=0.02)  # one byte per token
    assert 0 < found["text_bpb"] < 2 * found["uniform_bpb"]
    assert found["train_chat_loss"] == pytest.approx(math.log(265), rel=0.3)
    assert found["no_end"] > 0.25 and found["unparsable"] > 0.5 and found["length"] > 3
    assert suite.measure(model) == suite.measure(model)


def test_R31_opening_the_pretraining_text_is_reported_as_work(machine, monkeypatch, active_work):
    opened = []

    def open_texts(*args, **kwargs):
        opened.extend(active_work)
        raise FileNotFoundError("no text")

    monkeypatch.setattr(canaries, "open_texts", open_texts)
    parent = SimpleNamespace(state={"source": {"dataset": "embedded"}})
    assert pretraining_text(parent, TOKENIZER, 64, machine) == []
    assert opened == ["opening the pretraining text"]


def test_healthy_run_does_not_print_canaries(monkeypatch, machine, capsys):
    monitor = monitor_of(machine)
    assert not checked(
        monkeypatch, monitor, text_bpb=1.2, train_chat_loss=0.9, length=1.3, no_end=0.1
    )
    assert [f.level for f in monitor.check_first_step(1.2)] == ["fine"]
    assert capsys.readouterr().out == "" and monitor.values()["Canaries"] == "fine"


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"text_bpb": 2.6}, "forgotten"),
        ({"no_end": 0.7}, "no_end"),
        ({"unparsable": 0.8}, "unparsable"),
        ({"repeated": 0.6}, "repeated"),
        ({"one_letter": 1.0}, "one_letter"),
        ({"length": 9.0}, "length"),
    ],
)
def test_each_canary_detects_a_broken_run(monkeypatch, machine, capsys, changes, name):
    monitor = monitor_of(machine)
    assert checked(monkeypatch, monitor, **changes)[name] == "broken"
    assert f"canary broken at step 10: {CANARIES[name].meaning}" in capsys.readouterr().out
    [table] = monitor.tables()
    assert table["rows"][0][0] in CANARIES and monitor.values()["Canaries"] == "broken"


def test_broken_needs_two_consecutive_checks(monkeypatch, machine):
    monitor = monitor_of(machine)
    for value, level in ((2.7, "warn"), (1.1, "fine"), (2.7, "warn"), (2.7, "broken")):
        now = {**monitor.parent, "text_bpb": value}
        monkeypatch.setattr(CanarySuite, "measure", lambda self, model, now=now: now)
        [found] = [f for f in monitor.check(5, None, 1.0) if f.name == "forgotten"]
        assert found.level == level


def rows_of(count):
    """Packed rows as in training; `count` selects the tokens that have targets."""
    pairs = [render(TOKENIZER, Letters()[i], 64) for i in range(10, 18)]  # all the same length
    ids, masks = [np.array(ids) for ids, _ in pairs], [np.array(mask, bool) for _, mask in pairs]
    targets = [np.where(count(t, m), t, IGNORE) for t, m in zip(ids, masks, strict=True)]
    return np.stack(ids)[:, :-1], np.stack(targets)[:, 1:]


def test_correct_rows_pass_regardless_of_padding():
    tokens, targets = rows_of(lambda ids, mask: mask)
    found = suite_of().compare_rows(tokens, targets)
    assert found["template"] == 0 and found["loss_mask"] < CANARIES["loss_mask"].note
    half = [np.pad(tokens, [(0, 0), (0, 16)], constant_values=TOKENIZER.bos_id)]
    half.append(np.pad(targets, [(0, 0), (0, 16)], constant_values=IGNORE))
    assert suite_of().compare_rows(*half)["loss_mask"] == pytest.approx(found["loss_mask"], rel=0.1)


@pytest.mark.parametrize(
    "count",
    [
        lambda ids, mask: ~mask & (ids != TOKENIZER.bos_id),  # inverted
        lambda ids, mask: np.roll(mask, -1),  # shifted by one
        lambda ids, mask: np.zeros_like(mask),  # nothing
        lambda ids, mask: np.ones_like(mask),  # everything
    ],
)
def test_wrong_loss_mask_is_found_at_the_first_step(machine, count):
    monitor = monitor_of(machine)
    monitor.rows = monitor.suite.compare_rows(*rows_of(count))
    assert {f.name: f.level for f in monitor.check_first_step(1.0)}["template"] == "broken"


def test_first_loss_that_differs_from_the_parent_is_broken(machine):
    assert {f.name: f.level for f in monitor_of(machine).check_first_step(4.0)} == {
        "first_loss": "broken"
    }


def test_suite_without_conversations_does_not_compare_rows():
    suite = CanarySuite(TOKENIZER, [], {})
    assert suite.compare_rows(*rows_of(lambda ids, mask: mask)) == {}


def test_loss_gap_is_ignored_after_the_first_epoch(monkeypatch, machine):
    monitor = monitor_of(machine)
    assert "train_loss" in checked(
        monkeypatch, monitor, step=40, smooth_loss=0.1, train_chat_loss=3.0
    )
    assert not checked(monkeypatch, monitor, step=60, smooth_loss=0.1, train_chat_loss=3.0)


def test_answer_canaries_are_off_if_the_parent_cannot_answer(monkeypatch, machine):
    monitor = monitor_of(machine)
    monitor.parent = {**monitor.parent, "no_end": 0.0, "length": 20.0}
    assert not checked(monkeypatch, monitor, length=200.0, no_end=1.0, repeated=1.0, unparsable=1.0)


def test_forgetting_canary_is_off_for_an_untrained_parent(monkeypatch, machine):
    monitor = monitor_of(machine)
    monitor.parent = {**monitor.parent, "text_bpb": 2.9}
    assert "forgotten" not in checked(monkeypatch, monitor, text_bpb=5.0)


def test_long_expected_answers_are_not_generated():
    class Long(Letters):
        def conversation(self, i):
            return [user("tell me"), assistant("a long story " * 10)]

    suite = CanarySuite(TOKENIZER, [], {"x": Long()}, {"x": Long()}, {"x": 1.0})
    model = build_model(GPTConfig(265, 2, 32, 4, 2, 8, 64), torch.device("cpu"), torch.float32, 0)
    assert set(suite.measure(model)) == {"train_chat_loss"}


def test_broken_run_stops_unless_canaries_warn():
    findings = [Finding(5, "forgotten", 0.9, "broken")]
    with pytest.raises(Broken, match="the run is broken: pretraining is forgotten") as error:
        stop_if_broken(findings, CanaryConfig("stop"))
    assert error.value.status == BROKEN
    stop_if_broken(findings, CanaryConfig("warn"))
    stop_if_broken([Finding(5, "first_loss", 0.8, "warn")], CanaryConfig("stop"))


class Answers(Letters):
    """Questions whose right answers are those of a model, except to the first `num_wrong`."""

    def __init__(self, model, machine, num_wrong=0):
        super().__init__()
        self.right = ["A"] * len(self)
        for letter in "ABCD":
            self.right = [
                letter if s else r
                for s, r in zip(self.scores(model, machine, letter), self.right, strict=True)
            ]
        self.right[:num_wrong] = ["E"] * num_wrong

    def scores(self, model, machine, letter):
        """1 for the questions that the model answers with this letter."""
        right, self.right = self.right, [letter] * len(self)
        [[*found]] = score_suite(inference_copy(model), TOKENIZER, [self], machine).values()
        self.right = right
        return found

    def conversation(self, i):
        return [user(f"question {i}"), assistant(self.right[i])]


def monitor_answers(model, machine):
    suite = CanarySuite(TOKENIZER, [], {}, questions=[Answers(model, machine)])
    parent = suite.measure(model)
    assert parent == {"accuracy": 1.0, "accuracy_drop": 0.0}
    return CanaryMonitor(CanaryConfig(), suite, parent, model, 100, machine)


def test_model_that_confuses_the_letters_is_broken(model, machine, capsys):
    monitor = monitor_answers(model, machine)
    letters = [TOKENIZER.encode(letter)[0] for letter in "ABCD"]
    with torch.no_grad():
        model.head.weight[letters] = model.head.weight[letters[1:] + letters[:1]]
    levels = [[f.level for f in monitor.check(step, model, 1.0)] for step in (10, 20)]
    assert levels == [["warn"], ["broken"]]
    assert "accuracy on multiple choice fell (accuracy +" in capsys.readouterr().out


def test_equally_accurate_model_is_fine(model, machine):
    monitor = monitor_answers(model, machine)
    with torch.no_grad():
        model.head.weight.mul_(1.01)
    [found] = monitor.check(10, model, 1.0)
    assert (found.name, found.value, found.level) == ("accuracy", 0.0, "fine")
    monitor.suite.questions = [Answers(model, machine, num_wrong=2)]  # within two standard errors
    [found] = monitor.check(20, model, 1.0)
    assert found.value == 0.0 and monitor.measured["accuracy"] == 0.95


def test_findings_survive_a_restart(monkeypatch, machine):
    progress, done = Progress(step=10), SimpleNamespace(loss=1.0, metrics={})
    levels = []
    for step, no_end in ((10, 0.9), (20, 0.9), (30, 0.0)):
        monitor = monitor_of(machine)
        monitor.cfg = CanaryConfig("warn")
        now = {**monitor.parent, "no_end": no_end}
        monkeypatch.setattr(CanarySuite, "measure", lambda self, model, now=now: now)
        monitor.start(SimpleNamespace(log=lambda step, values: None, progress=progress))
        progress.step = step
        monitor.after_step(done, progress)
        saved = json.loads(json.dumps(progress.state_dict()))
        progress = Progress()
        progress.load_state_dict(saved)
        levels.append(monitor.values()["Canaries"])
    assert levels == ["warn", "broken", "broken"]


def test_checks_are_due_at_2_then_5_then_10_percent():
    assert [step for step in range(1, 201) if due(step, 200)][:4] == [4, 10, 20, 40]
    assert due(1, 5) and due(5, 5)
