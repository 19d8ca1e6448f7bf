"""Command-line flags: accepted forms, rejected flags, and settings for the report."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from nanochat.config import field_docs, parse, settings, short, user_message
from nanochat.lab.ablation import read_floor
from scripts.base_train import RETIRED, BaseTrain


@dataclass(frozen=True)
class Rates:
    matrix_lr: float | None = None
    """Learning rate
    of matrices."""
    cautious: bool = True


@dataclass(frozen=True)
class MoreRates(Rates):
    bias_lr: float = 0.0
    """Learning rate of biases."""


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
    top_k: int | None = short("k", 50)
    rates: Rates = field(default_factory=Rates)


def read(*args, **kwargs):
    return parse(Script(), "A script.", args, **kwargs)


def test_no_flags_returns_the_defaults():
    assert read() == Script()


@pytest.mark.parametrize(
    "args",
    [
        ["--device_batch_size=8", "--matrix_lr=0.5"],
        ["--device-batch-size", "8", "--matrix-lr", "0.5"],
        ["--", "--device-batch-size=8", "--matrix_lr", "5e-1"],
    ],
)
def test_dashes_underscores_spaces_and_leading_double_dash_work(args):
    cfg = read(*args)
    assert (cfg.device_batch_size, cfg.rates.matrix_lr) == (8, 0.5)


@pytest.mark.parametrize(
    ("flag", "want"),
    [("--cautious", True), ("--no-cautious", False), ("--cautious=0", False),
     ("--cautious=1", True), ("--cautious=false", False), ("--no_cautious", False)],
)  # fmt: skip
def test_booleans_accept_all_usual_forms(flag, want):
    assert read(flag).rates.cautious is want
    assert read(flag.replace("cautious", "once")).once is want


@pytest.mark.parametrize("form", [["--device_batch_size=-1"], ["--device_batch_size", "-1"], []])
def test_minus_one_and_missing_flag_mean_none(form):
    assert read(*form, "--target_flops=-1").device_batch_size is None
    assert read("--target_flops=-1.0").target_flops is None


@pytest.mark.parametrize(
    ("args", "want"),
    [([], None), (["--compile=-1"], None), (["--compile", "-1"], None), (["--compile"], True),
     (["--no-compile"], False), (["--compile=0"], False), (["--compile=1"], True)],
)  # fmt: skip
def test_optional_boolean_accepts_minus_one(args, want):
    assert read(*args).compile is want


@pytest.mark.parametrize(
    ("args", "want"), [([], 50), (["-k", "7"], 7), (["-k=7"], 7), (["-k", "-1"], None)]
)
def test_one_letter_flag_is_accepted(args, want):
    assert read(*args).top_k == want


def test_minus_one_is_a_number_for_required_settings():
    assert read("--depth=-1").depth == -1


def rejected(capsys, *args, **kwargs):
    with pytest.raises(SystemExit) as stopped:
        read(*args, **kwargs)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_unknown_flag_suggests_the_closest_one(capsys):
    message = rejected(capsys, "--detph=3")
    assert "--detph" in message and "--depth" in message


def test_retired_flag_names_its_replacement(capsys):
    message = rejected(capsys, "--dry-run=1", retired={"dry_run": "use --num_iterations=1"})
    assert "--num_iterations=1" in message


@pytest.mark.parametrize("flag,ours", [
    ("--n_embd=64", "follow from --depth"), ("--sequence-length=8", "--max_seq_len"),
    ("--d_model=64", "scripts.golf.base_train"), ("--warmup-ratio=0.1", "--warmup_steps"),
    ("--gradient_accumulation_steps=2", "--total_batch_size"), ("--n_layer=3", "--depth"),
])  # fmt: skip
def test_base_train_names_the_equivalent_of_a_rejected_flag(capsys, flag, ours):
    with pytest.raises(SystemExit) as exit:
        parse(BaseTrain(), None, [flag], retired=RETIRED)
    assert exit.value.code == 2 and ours in capsys.readouterr().err
    cfg = parse(BaseTrain(), None, ["--dtype=bfloat16", "--compile=False", "--seed=2"])
    assert cfg.kernels.compile is False and cfg.train.seed == 2


def test_value_of_wrong_type_is_reported(capsys):
    message = rejected(capsys, "--once=maybe")
    assert "maybe" in message and "--once" in message
    assert "depth" in rejected(capsys, "--depth=deep")


def test_help_joins_docstring_lines(capsys):
    assert field_docs(Rates)["matrix_lr"] == "Learning rate of matrices."
    assert list(field_docs(MoreRates)) == ["matrix_lr", "bias_lr"]
    with pytest.raises(SystemExit):
        read("--help")
    out = capsys.readouterr().out
    assert "A script." in out and "Model depth." in out and "Learning rate of matrices." in out


def test_settings_replace_none_with_minus_one_or_empty():
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
def test_help_shows_example_commands_and_outputs(script, command):
    text = command.works(script, "--help")
    assert f"python -m scripts.{script}" in text and "Writes " in text


@dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = ()
    """Names."""
    sizes: tuple[int, ...] | None = None
    """Sizes."""


@pytest.mark.parametrize("flags", ["--x=a,b --x c", "--x a b c", "--x=a --x=b,c", "--x a,b,c"])
def test_lists_accept_commas_spaces_and_repeats(flags):
    found = parse(Lists(), args=flags.replace("--x", "--names").split())
    assert found == Lists(names=("a", "b", "c"))


def test_optional_list_accepts_commas_and_minus_one():
    assert parse(Lists(), args=["--sizes=1,2"]).sizes == (1, 2)
    assert parse(Lists((), (1,)), args=["--sizes=-1"]).sizes is None


def test_value_error_from_our_code_has_a_user_message():
    with pytest.raises(ValueError) as caught:
        read_floor("arc=5")
    assert user_message(caught.value) == str(caught.value)
    with pytest.raises(ValueError) as caught:
        int("x")
    assert user_message(caught.value) is None
