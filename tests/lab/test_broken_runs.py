"""Canaries stop training runs with injected bugs and let healthy runs finish."""

import pytest

from dev.plant import PLANTS
from nanochat import chat_packing
from nanochat.checkpoint import stage_folder
from nanochat.common import UsageError, read_json
from nanochat.distributed import DistConfig
from nanochat.evaluators import ValidationConfig
from nanochat.finetune import FinetuneConfig
from nanochat.lab import canaries as canary_module
from nanochat.lab.canaries import Broken, CanaryConfig
from nanochat.mixture import MixConfig
from nanochat.train import TrainConfig
from scripts import chat_sft
from scripts.chat_sft import ChatSft

STEPS = 20


@pytest.fixture
def tune(trained, monkeypatch):
    """Fine-tune a small base model on facts; injected bugs are undone afterwards."""
    for module, name in (
        (chat_packing, "render"),
        (chat_packing, "CHAT_RULE"),
        (chat_packing, "signed_ids"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))

    def run_tuning(init_lr_frac=0.7, canaries="stop"):
        tuning = FinetuneConfig(
            num_iterations=STEPS,
            total_batch_size=512,
            max_seq_len=128,
            init_lr_frac=init_lr_frac,
            warmdown_ratio=0.65,
            validation=ValidationConfig(eval_tokens=1024),
        )
        cfg = TrainConfig(model_tag="tuned", machine=DistConfig("cpu", "float32"))
        mix = MixConfig("world_facts=300,world_chat=100")
        checks = CanaryConfig(canaries)
        chat_sft.main(ChatSft("base:one", mix, tuning, canaries=checks, train=cfg))

    return run_tuning


def test_healthy_run_finishes_and_records_canaries(tune, base):
    tune()
    record = read_json(base / "report" / "chat-sft.json")
    assert record["values"]["Canaries"] != "broken"
    table = next(t for t in record["tables"] if t["title"] == "Canaries")
    assert {"forgotten", "first_loss", "loss_mask", "template", "train_loss"} <= {
        row[0] for row in table["rows"]
    }


def test_R35_sft_trains_without_the_pretraining_text(tune, base, monkeypatch, capsys):
    def unreachable(*args, **kwargs):
        raise UsageError("the hub is unreachable", "check the network")

    monkeypatch.setattr(canary_module, "open_texts", unreachable)
    tune()
    assert (
        "canaries skip the pretraining text, which cannot be opened: the hub is"
        in capsys.readouterr().out
    )
    assert read_json(base / "report" / "chat-sft.json")["values"]["Number of iterations"] == STEPS


@pytest.mark.parametrize("plant", ["mask", "template"])
def test_bug_in_packed_rows_stops_the_run_at_the_first_step(tune, capsys, plant):
    PLANTS[plant]()
    with pytest.raises(Broken, match="the run is broken: (.|\n)*or use --canaries=warn"):
        tune()
    assert "canary broken at step 1:" in capsys.readouterr().out
    assert not list((stage_folder("sft") / "tuned").glob("step_*"))


def test_30x_learning_rate_is_stopped_within_10_percent(tune, capsys):
    with pytest.raises(Broken, match="pretraining is forgotten"):
        tune(init_lr_frac=21)
    assert f"step {STEPS // 10}/" not in capsys.readouterr().out


def test_broken_run_continues_if_canaries_warn(tune, base):
    PLANTS["mask"]()
    tune(canaries="warn")
    values = read_json(base / "report" / "chat-sft.json")["values"]
    assert values["Canaries"] == "broken" and values["Number of iterations"] == STEPS
