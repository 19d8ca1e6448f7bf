"""scripts/train_h100_fast.sh with the smoke profile: training, comparison, verdict, log."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY, read_json
from nanochat.recursion.presets import WARNING


def run(script: str, base: Path, *flags: str, **extra: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PROFILE": "smoke", **extra}
    return subprocess.run(
        ["bash", f"scripts/{script}.sh", *flags],
        cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_recursion_phase_trains_and_reports_verdict(tmp_path):
    base, log = tmp_path / "base", REPOSITORY / "logs" / "train.log"
    written = log.stat().st_size if log.exists() else 0
    done = run("train_h100_fast", base, "--hourly_rate=3600", SEEDS="1")
    out = done.stdout + done.stderr
    record = read_json(base / "report" / "recursion.json")
    values, arms = record["values"], record["tables"][0]["rows"]
    unmet = [name for name, value in values.items() if str(value).startswith("NOT MET")]
    assert done.returncode == int(bool(unmet)), out[-3000:]
    assert values["Gradients finite"].startswith("met") and values["Seeds"] == 1
    assert "more seeds are needed" in values["Pays off at equal FLOPs"]
    assert values["First loop unharmed"].split()[0] in ("met", "NOT")
    assert [re.findall(r"equal ([\w, ]+)", row[-1] or "equal itself")[0] for row in arms] == [
        "itself", "params, tokens", "params, flops"
    ]  # fmt: skip
    assert [row[0] for row in record["tables"][1]["rows"]][3] == "4 (trained)"
    assert len(record["tables"][1]["rows"]) == 8
    report = (base / "report.md").read_text()
    assert "## Recursion" in report and "## Base model training" in report
    logged = log.read_bytes()[written:].decode()
    assert "fast: preset aggressive, profile smoke, seeds 1" in logged
    assert WARNING.format("aggressive") in logged
    assert re.search(r"\$[1-9]\d*\.\d\d at \$3600\.00 an hour", logged), "a second costs $1"


def test_second_h100_phase_has_half_the_batch_of_the_first(tmp_path):
    """With commands that only print their arguments."""
    for folder in ("scripts", "dev"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    (tmp_path / "dev/setup.sh").write_text('python() { echo "$@"; }; torchrun() { python "$@"; }')
    env = {**os.environ, "PROFILE": "h100x8", "DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": ""}
    batches = []
    for phase in ("fast", "extreme"):
        words = ["bash", f"scripts/train_h100_{phase}.sh"]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        batches.append(set(map(int, re.findall(r"--total_batch_size=(\d+)", done.stdout))))
    assert batches == [{512 * 2048}, {256 * 2048}]


def test_unknown_recursion_profile_is_rejected(tmp_path):
    done = run("train_h100_extreme", tmp_path, PROFILE="tpu")
    assert done.returncode == 2 and "'tpu'" in done.stderr
