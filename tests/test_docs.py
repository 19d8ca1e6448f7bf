"""File names in docs/architecture.md exist; examples there and in docs/data.md work."""

import inspect
import math
import re
import sys
from dataclasses import asdict, dataclass
from types import ModuleType

import pytest
import torch

from nanochat import checkpoint, gpt, optim, train
from nanochat.checkpoint import build_model
from nanochat.common import REPOSITORY
from nanochat.eval_chat import score_answer
from nanochat.gpt import GPT
from nanochat.mixture import parse_budget, parse_mixture, read_mixture
from nanochat.optim import ScheduleConfig
from scripts import chat_sft, mid_train
from tasks import base, registry
from tasks.buckets import buckets, held_out_questions
from tests.conftest import TINY

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()
DATA = (REPOSITORY / "docs" / "data.md").read_text()


def test_files_named_in_the_architecture_exist():
    names = re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE)
    assert len(names) > 20
    for name in names:
        assert (REPOSITORY / name).exists() or (REPOSITORY / "nanochat" / name).exists(), name


def test_architecture_lists_all_callback_methods():
    listed = re.search(r"do nothing by default: (.*?)\. Metrics", ARCHITECTURE, re.DOTALL)
    methods = [name for name, each in vars(train.Callback).items() if inspect.isfunction(each)]
    assert listed and re.findall(r"`(\w+)`", listed[1]) == methods


def example(first_line, scope):
    """Run the example that starts with `first_line`; return its namespace."""
    [code] = re.findall(rf"```python\n({re.escape(first_line)}.*?)```", ARCHITECTURE, re.DOTALL)
    scope = {**scope, "__name__": "example"}
    exec(code, scope)
    return scope


def test_metric_example_computes_the_metric():
    scope = example("class LargestWeight", {"Callback": train.Callback, "GPT": GPT, "BaseTrain": 0})
    model = build_model(TINY, torch.device("cpu"), torch.float32, seed=0)
    torch.nn.init.constant_(model.embed.weight, -70.0)
    found = scope["LargestWeight"](model).after_backward(1.0)
    assert found == {"largest_weight": pytest.approx(70.0)}


def test_architecture_example_is_built_from_its_config(monkeypatch):
    names = {"Any": object, "Mapping": dict, "Tensor": torch.Tensor, "dataclass": dataclass}
    scope = example("@dataclass(frozen=True)\nclass GeluConfig", {**vars(gpt), **names})
    module = ModuleType("nanochat.gelu")
    vars(module).update(scope)
    monkeypatch.setitem(sys.modules, "nanochat.gelu", module)
    monkeypatch.setitem(checkpoint.MODEL_MODULES, "gelu", "nanochat.gelu")
    cfg = checkpoint.read_config({**asdict(TINY), "gelu": True})
    model, plain = (build_model(c, torch.device("cpu"), torch.float32, 0) for c in (cfg, TINY))
    x = torch.tensor([[-1.0] * TINY.d_model])
    assert type(model).__name__ == "GeluGPT" and model.blocks[0].mlp.up(x).min() < 0
    torch.nn.init.ones_(model.blocks[0].mlp.down.weight)
    torch.nn.init.ones_(plain.blocks[0].mlp.down.weight)
    assert not torch.allclose(model.blocks[0].mlp(x), plain.blocks[0].mlp(x))


def test_task_example_works_for_training_and_scoring(monkeypatch):
    scope = example("PAIRS = {", vars(base))
    monkeypatch.setitem(registry.TASKS, "capitals", scope["Capitals"])
    [bucket] = buckets("capitals*4")
    assert len(bucket.train) == 3 and len(bucket.val) == 2 and bucket.tags.parent == ""
    task = held_out_questions("capitals", 2)
    scores = [score_answer(task, 0, answer) for answer in ("Lima", "Oslo", "Perhaps Lima")]
    assert sorted(scores) == [0.0, 0.0, 1.0]


def test_schedule_example_is_a_cosine():
    scope = example("def lr_factor", {"math": math, "ScheduleConfig": ScheduleConfig})
    cfg = ScheduleConfig(warmup_steps=10, warmdown_ratio=0.5, final_lr_frac=0.1)
    factors = [scope["lr_factor"](step, 100, cfg) for step in range(100)]
    assert factors[0] == 0.1 and factors[9:50] == [1.0] * 41
    assert factors[75] == pytest.approx(0.55) and factors[99] == pytest.approx(0.1, abs=1e-3)
    same = inspect.signature(scope["lr_factor"]) == inspect.signature(optim.lr_factor)
    assert same, "the example must be a drop-in replacement"


def test_stage_example_calls_fine_tune_with_valid_arguments():
    calls = []
    names = {"fine_tune": lambda *args: calls.append(args), "start": None}
    scope = example("def main(cfg: ChatSft)", {**vars(chat_sft), **names})
    scope["main"](chat_sft.ChatSft())
    bound = inspect.signature(mid_train.fine_tune).bind(*calls[0]).arguments
    assert bound["kind"] == "polish" and bound["summarize"] is chat_sft.summarize


def test_mixture_forms_in_the_docs_parse():
    section = DATA.split("## Mixtures")[1].split("### Budget")[0]
    forms = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    assert len(forms) == 8 and all(len(parse_mixture(form)) == 1 for form in forms)
    assert parse_mixture("aqua=10000*500000t")[0][2:5] == (10_000, None, 500_000)
    assert parse_budget("smoltalk,gsm8k@500000t^0.5") == {
        "mixture_tokens": 500_000,
        "mixture_alpha": 0.5,
    }


def test_mixture_file_in_the_docs_is_valid(tmp_path):
    [text] = re.findall(r"```json\n(.*?)```", DATA, re.DOTALL)
    (tmp_path / "own.json").write_text(text)
    spec, own = read_mixture(str(tmp_path / "own.json"))
    assert [part.name for part in parse_mixture(spec)] == list(own) == ["wiki", "web"]
