"""Command-line flags: accepted forms, rejected flags, help, and settings for the report."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from nanochat.config import parse, settings, short, user_message
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rates:
    matrix_lr: float | None = None
    """Learning rate of matrices."""
    cautious: bool = True


@dataclass(frozen=True)
class MoreRates(Rates):
    bias_lr: float = 0.5
    """Learning rate of biases. Default: a half."""


@dataclass(frozen=True)
class Script:
    depth: int = 20
    """Model depth."""
    device_batch_size: int | None = None
    target_flops: float | None = None
    device_type: Literal["cpu", "cuda"] | None = None
    tag: str = ""
    once: bool = False
    compile: bool | None = None
    top_k: Annotated[int | None, short("k")] = 50
    threads: tuple[int, ...] | None = (1, 2)
    rates: MoreRates = field(default_factory=MoreRates)


DEFAULTS = {**settings(Script()), "device_batch_size": -1, "target_flops": -1.0, "compile": ""}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--device_batch_size=8 --matrix_lr=0.5", {"device_batch_size": 8, "matrix_lr": 0.5}),
        ("-- --device-batch-size 8 --matrix-lr 5e-1", {"device_batch_size": 8, "matrix_lr": 0.5}),
        ("--device_batch_size=-1 --target_flops -1.0 --compile -1", {}),
        ("--depth=-1", {"depth": -1}),
        ("-k 7", {"top_k": 7}),
        ("--once --no-cautious", {"once": True, "cautious": False}),
        ("--no-once --cautious", {}),
        ("--once=0 --cautious=false", {"cautious": False}),
        ("--compile", {"compile": True}),
        ("--threads 4,8 --tag x", {"threads": [4, 8], "tag": "x"}),
        ("--threads 4 8", {"threads": [4, 8]}),
        ("--tag a=3,b*2 -k=7", {"tag": "a=3,b*2", "top_k": 7}),
        ("--threads=-1", {"threads": ""}),
    ],
)
def test_every_accepted_form_of_a_flag_gives_its_settings(line, changed):
    assert settings(parse(Script(), "A script.", line.split())) == {**DEFAULTS, **changed}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--detph=3", "--detph.*--depth"),
        ("--once=maybe", "maybe.*--once"),
        ("--depth=deep", "deep.*--depth"),
        ("--device_type=tpu", "tpu"),
        ("--tag=\udcff", "UTF-8"),
    ],
)
def test_rejected_flag_is_named_with_exit_status_2(capsys, line, named):
    with pytest.raises(SystemExit) as stopped:
        parse(Script(), "A script.", line.split())
    assert stopped.value.code == 2
    assert re.search(named, capsys.readouterr().err, re.DOTALL)


def test_help_shows_docstrings_and_defaults(capsys):
    with pytest.raises(SystemExit):
        parse(Script(), "A script.", ["--help"])
    shown = capsys.readouterr().out
    for text in ("A script.", "Model depth.", "Learning rate of matrices.", "rate of biases."):
        assert text in shown
    assert "(default: 20)" in shown


def test_only_errors_raised_by_our_code_are_user_errors():
    with pytest.raises(ValueError) as ours:
        Tokenizer.train([], 10)
    assert user_message(ours.value) == str(ours.value)
    with pytest.raises(ValueError) as theirs:
        int("x")
    assert user_message(theirs.value) is None
