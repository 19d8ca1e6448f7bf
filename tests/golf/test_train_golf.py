"""scripts/train_golf.sh with the smoke profile: timed training, export, evaluation of the file."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json
from nanochat.dataset import DataConfig, open_source
from tests.hub_server import hub_served

SECTION = "report/parameter-golf.json"


def run(words: list[str], base: Path, **extra: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PROFILE": "smoke", **extra}
    return subprocess.run(
        words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280
    )


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


def test_leaderboard_text_is_downloaded_and_split(hub, tmp_path, monkeypatch):
    """On a few documents in the published layout, with smaller numbers of documents per file."""
    texts = [f"Document {i}.\nIt is short." for i in range(13)]
    path = tmp_path / "hub/datasets/willdepueoai/parameter-golf/datasets/docs_selected.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    script = (REPOSITORY / "scripts/train_golf.sh").read_text()
    found = re.search(r'^if \[ "\$text" = fineweb.*?^fi$', script, re.DOTALL | re.MULTILINE)
    assert found is not None
    commands = f'text=fineweb\n{found[0]}\necho "$text"'
    for before, after in (("-l 100000", "-l 4"), ("+50001", "+6"), ("-n 50000", "-n 5")):
        assert before in commands
        commands = commands.replace(before, after)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with hub_served(hub, monkeypatch) as serve:
        serve(tmp_path / "hub")
        for _ in range(2):  # the second time, nothing is downloaded
            printed = subprocess.check_output(
                ["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path, text=True
            )
            shutil.rmtree(tmp_path / "hub", ignore_errors=True)
    source = open_source(DataConfig(dataset=printed.splitlines()[-1]))
    assert source.val_shard == "val.jsonl" and len(source.train_shards) == 2
    assert list(source.texts(source.val_shard)) == texts[:5]
    assert [t for shard in source.train_shards for t in source.texts(shard)] == texts[5:]


def test_unknown_golf_profile_is_rejected(tmp_path):
    done = run(["bash", "scripts/train_golf.sh"], tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr
