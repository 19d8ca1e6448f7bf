"""The code and the names in docs/ are those of the repository."""

import re

import pytest
import torch

from nanochat import train
from nanochat.checkpoint import build_model
from nanochat.common import REPOSITORY
from nanochat.gpt import GPT
from tests.conftest import TINY

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()


def test_files_named_in_the_architecture_exist():
    names = re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE)
    assert len(names) > 20
    for name in names:
        assert (REPOSITORY / name).exists() or (REPOSITORY / "nanochat" / name).exists(), name


def test_the_methods_of_a_callback_are_those_listed():
    listed = re.search(r"do nothing by default: (.*?)\. Figures", ARCHITECTURE, re.DOTALL)
    methods = [name for name in vars(train.Callback) if not name.startswith("_")]
    assert listed and re.findall(r"`(\w+)`", listed[1]) == methods


def test_the_example_of_a_metric_computes_it():
    code = re.search(r"```python\n(class LargestWeight.*?)\n\n\ndef main", ARCHITECTURE, re.DOTALL)
    assert code
    scope = {"Callback": train.Callback, "GPT": GPT}
    exec(code[1], scope)
    model = build_model(TINY, torch.device("cpu"), torch.float32, seed=0)
    torch.nn.init.constant_(model.embed.weight, -70.0)
    found = scope["LargestWeight"](model).after_backward(1.0)  # type: ignore[operator]
    assert found == {"largest_weight": pytest.approx(70.0)}
