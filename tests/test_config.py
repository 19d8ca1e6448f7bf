"""The one vocabulary of flags: its forms, its refusals, and the report's view of it."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest

from nanochat.common import REPOSITORY
from nanochat.config import (
    field_docs,
    parse,
    settings,
    short,
    user_message,
)
from nanochat.lab.ablation import read_floor
from scripts.base_train import RETIRED, BaseTrain


@dataclass(frozen=True)
class Rates:
    matrix_lr: float | None = None
    """How fast
    matrices move."""
    cautious: bool = True


@dataclass(frozen=True)
class MoreRates(Rates):
    bias_lr: float = 0.0
    """How fast biases move."""


@dataclass(frozen=True)
class Script:
    depth: int = 20
    """The dial."""
    device_batch_size: int | None = None
    target_flops: float | None = None
    device_type: Literal["cpu", "cuda"] | None = None
    tag: str = ""
    once: bool = False
    compile: bool | None = None
    top_k: int | None = short("k", 50)
    rates: Rates = field(default_factory=Rates)


def read(*args, **kwargs):
    return parse(Script(), "A script.", args, **kwargs)


def test_without_flags_the_defaults_come_back():
    assert read() == Script()


@pytest.mark.parametrize(
    "args",
    [
        ["--device_batch_size=8", "--matrix_lr=0.5"],
        ["--device-batch-size", "8", "--matrix-lr", "0.5"],
        ["--", "--device-batch-size=8", "--matrix_lr", "5e-1"],
    ],
)
def test_dashes_underscores_spaces_and_a_bare_double_dash_are_the_same(args):
    cfg = read(*args)
    assert (cfg.device_batch_size, cfg.rates.matrix_lr) == (8, 0.5)


@pytest.mark.parametrize(
    ("flag", "want"),
    [("--cautious", True), ("--no-cautious", False), ("--cautious=0", False),
     ("--cautious=1", True), ("--cautious=false", False), ("--no_cautious", False)],
)  # fmt: skip
def test_booleans_have_every_usual_form(flag, want):
    assert read(flag).rates.cautious is want
    assert read(flag.replace("cautious", "once")).once is want


@pytest.mark.parametrize("form", [["--device_batch_size=-1"], ["--device_batch_size", "-1"], []])
def test_minus_one_and_nothing_both_leave_the_choice_to_us(form):
    assert read(*form, "--target_flops=-1").device_batch_size is None
    assert read("--target_flops=-1.0").target_flops is None


@pytest.mark.parametrize(
    ("args", "want"),
    [([], None), (["--compile=-1"], None), (["--compile", "-1"], None), (["--compile"], True),
     (["--no-compile"], False), (["--compile=0"], False), (["--compile=1"], True)],
)  # fmt: skip
def test_a_boolean_may_be_left_open(args, want):
    assert read(*args).compile is want


@pytest.mark.parametrize(
    ("args", "want"), [([], 50), (["-k", "7"], 7), (["-k=7"], 7), (["-k", "-1"], None)]
)
def test_a_setting_may_have_a_letter_too(args, want):
    assert read(*args).top_k == want


def test_minus_one_stays_a_number_where_none_is_no_choice():
    assert read("--depth=-1").depth == -1


def refused(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as stopped:
        read(*args, **kwargs)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_an_unknown_flag_is_refused_with_the_nearest_one(capsys):
    message = refused(capsys, "--detph=3")
    assert "--detph" in message and "--depth" in message


def test_a_retired_flag_is_refused_with_what_replaced_it(capsys):
    message = refused(capsys, "--dry-run=1", retired={"dry_run": "use --num_iterations=1"})
    assert "--num_iterations=1" in message


def test_a_flag_removed_from_every_script_is_refused_with_the_fix(capsys):
    assert "WANDB_MODE=offline" in refused(capsys, "--wandb-mode=offline")


@pytest.mark.parametrize("flag,ours", [
    ("--n_embd=64", "follow from --depth"), ("--sequence-length=8", "--max_seq_len"),
    ("--d_model=64", "scripts.golf.base_train"), ("--buckets=own.json", "--mixture=own.json"),
    ("--gradient_accumulation_steps=2", "--total_batch_size"), ("--n_layer=3", "--depth"),
    ("--revision=dev", "scripts.data"), ("--val-shard=a.jsonl", "scripts.data"),
    ("--mixture_tokens=9", "--mixture=a,b@500000t"), ("--mixture_alpha=.5", "--mixture=a,b@^0.5"),
])  # fmt: skip
def test_base_train_names_its_own_flag_where_others_have_another(capsys, flag, ours):
    with pytest.raises(SystemExit) as exit:
        parse(BaseTrain(), None, [flag], retired=RETIRED)
    assert exit.value.code == 2 and ours in capsys.readouterr().err
    cfg = parse(BaseTrain(), None, ["--dtype=bfloat16", "--compile=False", "--value_every=2"])
    assert cfg.kernels.compile is False and cfg.shape.value_every == 2


def test_a_value_of_the_wrong_type_is_named(capsys):
    message = refused(capsys, "--once=maybe")
    assert "maybe" in message and "--once" in message
    assert "depth" in refused(capsys, "--depth=deep")


def test_help_joins_the_lines_below_a_setting(capsys):
    assert field_docs(Rates)["matrix_lr"] == "How fast matrices move."
    assert list(field_docs(MoreRates)) == ["matrix_lr", "bias_lr"]
    with pytest.raises(SystemExit):
        read("--help")
    out = capsys.readouterr().out
    assert "A script." in out and "The dial." in out and "How fast matrices move." in out


def test_settings_print_open_choices_as_the_seed_report_does():
    assert settings(Script()) == {
        "depth": 20,
        "device_batch_size": -1,
        "target_flops": -1.0,
        "device_type": "",
        "tag": "",
        "once": False,
        "compile": "",
        "top_k": 50,
        "matrix_lr": -1.0,
        "cautious": True,
    }


@pytest.mark.parametrize(
    "script",
    "data tok_train tok_eval base_train base_loss base_eval bench export report lab.compare "
    "golf.base_train recursion.base_train".split(),
)
def test_help_names_two_commands_and_what_is_written(script):
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", "--help"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and f"python -m scripts.{script}" in done.stdout
    assert "Writes " in done.stdout


@dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = ()
    """Names."""
    sizes: tuple[int, ...] | None = None
    """Sizes."""


@pytest.mark.parametrize("flags", ["--x=a,b --x c", "--x a b c", "--x=a --x=b,c", "--x a,b,c"])
def test_lists_take_commas_spaces_and_repeats(flags):
    found = parse(Lists(), args=flags.replace("--x", "--names").split())
    assert found == Lists(names=("a", "b", "c"))


def test_a_list_that_may_be_none_takes_commas_and_none():
    assert parse(Lists(), args=["--sizes=1,2"]).sizes == (1, 2)
    assert parse(Lists((), (1,)), args=["--sizes=-1"]).sizes is None


def test_an_error_of_a_track_is_printed_without_a_traceback():
    with pytest.raises(ValueError) as caught:
        read_floor("arc=5")
    assert user_message(caught.value) == str(caught.value)
    with pytest.raises(ValueError) as caught:
        int("x")
    assert user_message(caught.value) is None
