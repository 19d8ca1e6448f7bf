"""Sentinels: what they see in a run, and that they say nothing of one that is well."""

import math

import pytest
import torch

from nanochat import sentinels
from nanochat.chat_format import render
from nanochat.gpt import GPTConfig, build_model
from nanochat.rows import tokens_and_targets
from nanochat.sentinels import (
    BOUNDS,
    Broken,
    Finding,
    SentinelConfig,
    Suite,
    Watch,
    stop_if_broken,
    worst,
)
from nanochat.stopping import BROKEN
from nanochat.tokenizer import Tokenizer
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


def suite_of(**cfg):
    ids = torch.arange(65).repeat(4, 1).numpy()
    text = [tokens_and_targets(ids)]
    return Suite(TOKENIZER, text, {"x": Letters()}, {"x": 1.0}, SentinelConfig(**cfg), 8)


def watch_of(machine, parent=None, counted=0.2, **cfg):
    usual = {"text_bpb": 1.0, "knowing_nothing": 3.0, "answer_loss": 1.0, "counted": 0.2}
    answers = {"no_end": 0.0, "unreadable": 0.1, "repeated": 0.0, "one_letter": 0.3, "length": 5.0}
    return Watch(suite_of(**cfg), parent or {**usual, **answers}, 100, 50.0, counted, machine)


def looked(monkeypatch, watch, step=10, smooth_loss=1.0, **changes):
    now = {**watch.parent, **changes}
    monkeypatch.setattr(Suite, "measure", lambda self, model: now)
    return {f.name: f.level for f in watch.look(step, None, smooth_loss) if f.level != "fine"}


def test_a_suite_measures_text_conversations_and_answers(model):
    suite = suite_of()
    found = suite.measure_parent(model)
    assert found["knowing_nothing"] == pytest.approx(math.log2(265), rel=0.02)  # a byte a token
    assert 0 < found["text_bpb"] < 2 * found["knowing_nothing"]
    ids, mask = render(TOKENIZER, Letters()[0])
    assert found["counted"] == pytest.approx(sum(mask) / len(ids), rel=0.2)
    assert found["answer_loss"] == pytest.approx(math.log(265), rel=0.3)
    assert found["no_end"] > 0.5 and found["unreadable"] > 0.5 and found["length"] <= 8
    assert suite.measure(model) == suite.measure(model)


def test_what_is_well_is_not_told_of(monkeypatch, machine, capsys):
    watch = watch_of(machine)
    assert not looked(monkeypatch, watch, text_bpb=1.2, answer_loss=0.9, length=6.0, no_end=0.1)
    assert [f.level for f in watch.first_step(1.2)] == ["fine", "fine"]
    assert capsys.readouterr().out == "" and worst(watch.history) == "fine"


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"text_bpb": 2.5}, "forgotten"),
        ({"answer_loss": 2.6}, "gap"),
        ({"no_end": 0.7}, "no_end"),
        ({"unreadable": 0.8}, "unreadable"),
        ({"repeated": 0.6}, "repeated"),
        ({"one_letter": 1.0}, "one_letter"),
        ({"length": 40.0}, "length"),
    ],
)
def test_each_sentinel_calls_a_run_broken(monkeypatch, machine, capsys, changes, name):
    watch = watch_of(machine)
    assert looked(monkeypatch, watch, **changes)[name] == "broken"
    assert f"sentinel broken at step 10: {sentinels.WORDS[name]}" in capsys.readouterr().out
    assert watch.table()["rows"][0][0] in BOUNDS and worst(watch.history) == "broken"


def test_the_first_step_shows_another_template_and_an_inverted_mask(machine):
    levels = {f.name: f.level for f in watch_of(machine).first_step(4.0)}
    assert levels == {"gap": "broken", "counted": "fine"}
    levels = {f.name: f.level for f in watch_of(machine, counted=0.8).first_step(1.1)}
    assert levels == {"gap": "fine", "counted": "broken"}


def test_a_gap_means_nothing_once_rows_come_again(monkeypatch, machine):
    watch = watch_of(machine)
    assert "gap" in looked(monkeypatch, watch, step=40, smooth_loss=0.1, answer_loss=3.0)
    assert not looked(monkeypatch, watch, step=60, smooth_loss=0.1, answer_loss=3.0)


def test_the_length_of_answers_is_not_held_against_a_parent_whose_answers_do_not_end(
    monkeypatch, machine
):
    watch = watch_of(machine)
    watch.parent = {**watch.parent, "no_end": 1.0, "length": 48.0}
    assert not looked(monkeypatch, watch, length=1.0, no_end=0.0)


def test_a_broken_run_stops_unless_it_is_only_to_be_told():
    findings = [Finding(5, "forgotten", 0.9, "broken")]
    with pytest.raises(Broken, match="the run is broken: what pretraining taught") as error:
        stop_if_broken(findings, SentinelConfig(on_broken="stop"))
    assert error.value.status == BROKEN
    stop_if_broken(findings, SentinelConfig(on_broken="warn"))
    stop_if_broken([Finding(5, "gap", 0.8, "warn")], SentinelConfig(on_broken="stop"))


def test_the_suite_is_asked_before_a_tenth_of_the_run_is_over():
    cfg = SentinelConfig()
    assert [step for step in range(1, 201) if cfg.due(step, 200)][:4] == [4, 10, 20, 40]
    assert cfg.due(1, 5) and cfg.due(5, 5)
    assert [step for step in range(1, 20) if SentinelConfig(sentinel_every=7).due(step, 50)] == [
        7,
        14,
    ]
    assert not any(SentinelConfig(sentinel_every=0).due(step, 50) for step in range(51))
