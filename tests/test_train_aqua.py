"""scripts/train_aqua.sh: the original report's run, on small subsets of the real data."""

import os
import re
import subprocess

import pytest
import torch

from nanochat.common import REPOSITORY, read_json
from nanochat.gpt import GPT
from nanochat.scaling import shape_for_depth
from tests.hub_server import hub_served, small_hub


def test_aqua_model_has_the_original_report_parameter_count():
    script = (REPOSITORY / "scripts" / "train_aqua.sh").read_text()
    vocab_size = int(re.findall(r"--vocab_size=(\d+)", script)[0])
    depth = int(re.findall(r"depth=(\d+)", script)[0])
    assert "--arch=classic" in script
    with torch.device("meta"):
        model = GPT(shape_for_depth(depth, vocab_size, 2048, "classic"))
    assert model.num_params() == 92_274_688


@pytest.mark.parametrize("script", sorted(REPOSITORY.glob("scripts/*.sh"), key=str))
def test_training_scripts_are_executable(script):
    assert os.access(script, os.X_OK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_train_aqua_evaluates_core_and_all_254_questions(hub, tmp_path, monkeypatch):
    with hub_served(hub, monkeypatch) as serve:
        serve(small_hub(hub, tmp_path / "hub", whole=("deepmind/aqua_rat",)))
        env = {
            **os.environ,
            "NANOCHAT_BASE_DIR": str(tmp_path / "base"),
            "EVAL_BUNDLE": str(hub / "eval_bundle"),
            **{"PROFILE": "cpu", "DEPTH": "1", "ITERATIONS": "2"},
        }
        done = subprocess.run(
            ["scripts/train_aqua.sh"], cwd=REPOSITORY, env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = tmp_path / "base" / "report"
    trained = read_json(report / "base-model-training.json")
    assert "CORE metric estimate" in trained["values"] and trained["settings"]["arch"] == "classic"
    for stage in ("mid", "sft", "rl"):
        values = read_json(report / f"chat-evaluation-{stage}.json")["values"]
        assert values["AQUA"]["n"] == 254 and values["MMLU"]["n"] == 50
