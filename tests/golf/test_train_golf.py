"""scripts/train_golf.sh with the smoke profile: timed training, export, evaluation of the file."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json
from scripts.golf import base_train as golf
from scripts.golf.base_train import GolfTrain

SECTION = "report/parameter-golf.json"


def run(words: list[str], base: Path, **extra: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PROFILE": "smoke", **extra}
    return subprocess.run(
        words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280
    )


def test_weights_stay_float32_for_averaging_and_quantization(monkeypatch):
    """Even if the architecture is the plain one."""
    given = {}
    monkeypatch.setattr(golf, "pretrain", lambda cfg, **more: given.update(more))
    golf.main(GolfTrain(ema_decay=0.9, qat_start=0.5))
    assert given["float32_weights"]


@pytest.mark.timeout(400)
def test_train_golf_artifact_alone_reproduces_reported_bpb(tmp_path):
    base = tmp_path / "base"
    done = run(["bash", "scripts/train_golf.sh"], base, SEEDS="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    values = read_json(base / SECTION)["values"]
    assert values["Seeds"] == 1 and values["Within the limit"] is True
    assert abs(values["Quantization gap bpb"]) < 0.05
    assert "## Parameter golf" in (base / "report.md").read_text()
    record = read_json(base / "seeds" / "1" / "base-model-training.json")
    assert 3 < record["values"]["Calculated number of iterations"] < 2000

    alone = tmp_path / "empty" / "model.golf"
    alone.parent.mkdir()
    shutil.copy(base / "export" / "golf-1.golf", alone)
    words = "-m scripts.golf.evaluate --dataset=embedded --num_shards=1 --max_documents=6"
    again = run(
        [sys.executable, *words.split(), f"--artifacts={alone}", "--eval_stride=16"], alone.parent
    )
    assert again.returncode == 0, again.stderr[-3000:]
    found = read_json(alone.parent / SECTION)["values"]
    for name in ("Roundtrip bpb", "Roundtrip sliding bpb"):
        assert found[name] == pytest.approx(values[name], abs=1e-4)
    assert "Pre-quantization bpb" not in found

    failed = run(["bash", "scripts/train_golf.sh", "--qat_start=2"], base)
    assert failed.returncode != 0 and "qat_start" in failed.stdout + failed.stderr


def test_unknown_golf_profile_is_rejected(tmp_path):
    done = run(["bash", "scripts/train_golf.sh"], tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr
