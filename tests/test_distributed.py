"""Several processes on one machine: the same training as one process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanochat.common import REPOSITORY, read_json
from nanochat.runlog import read_metrics

SMALL = (
    "--depth=2 --max_seq_len=32 --total_batch_size=512 --eval_tokens=1024 --dtype=float32 "
    "--num_iterations=20 --save_every=4 --keep=9"
).split()
TRAIN = ["-m", "scripts.base_train"]


def torchrun(processes: int) -> list[str]:
    """The words in front of `-m module`: none for one process."""
    if processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def environment(base: Path) -> dict[str, str]:
    """One thread per process: results then do not depend on how busy the machine is."""
    return {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}


def python(base: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY, env=environment(base), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def folder(base: Path, tag: str) -> Path:
    return base / "base_checkpoints" / tag


def losses(base: Path, tag: str) -> list[float]:
    return curve(folder(base, tag), "loss")


def curve(run: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(run / "metrics.jsonl") if name in entry]


def weights(base: Path, tag: str) -> dict[str, torch.Tensor]:
    return load_file(folder(base, tag) / "step_000020" / "model.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Rows of the embedded world, and the same run by one process (one) and by two (two)."""
    base = tmp_path_factory.mktemp("shared")
    text = ["--dataset=embedded", "--num_shards=1"]
    python(base, "-m", "scripts.tok_train", *text, "--vocab_size=512")
    python(base, "-m", "scripts.data", *text, "--max_seq_len=32")
    python(base, *TRAIN, *SMALL, "--model_tag=one")
    python(base, *torchrun(2), *TRAIN, *SMALL, "--model_tag=two")
    return base


def test_R19_one_and_two_processes_give_the_same_first_20_losses(base):
    one, two = losses(base, "one"), losses(base, "two")
    assert len(one) == len(two) == 20 and one[-1] < one[0] - 1
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_sharded_and_single_optimizers_agree(base):
    one, two = weights(base, "one"), weights(base, "two")
    assert one.keys() == two.keys()
    for name in one:
        assert (two[name] - one[name]).norm() < 1e-3 * one[name].norm(), name


@pytest.mark.parametrize(
    ("saved_by", "resumed_with"),
    [("one", 2), ("two", 1), pytest.param("two", 4, marks=pytest.mark.slow)],
)
def test_R4_elastic_resume_sees_the_same_rows_and_losses(base, saved_by, resumed_with):
    tag = f"{saved_by}-{resumed_with}"
    shutil.copytree(folder(base, saved_by), folder(base, tag))
    for step in (12, 16, 20):  # as if the run had been killed after step 8
        shutil.rmtree(folder(base, tag) / f"step_{step:06d}")
    words = [*torchrun(resumed_with), *TRAIN, *SMALL, f"--model_tag={tag}", "--resume=auto"]
    assert "resumed" in python(base, *words)
    np.testing.assert_allclose(losses(base, tag), losses(base, "one"), rtol=1e-5)


def test_R1_R2_killed_at_random_and_resumed_gives_the_same_weights_bit_for_bit(base):
    rng = np.random.default_rng(0)
    words = [*TRAIN, *SMALL, "--model_tag=broken", "--resume=auto"]
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, *words], cwd=REPOSITORY, env=environment(base), text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        stop_at = int(rng.integers(5, 18))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step") and int(line.split()[1].split("/")[0]) >= stop_at:
                break
        process.kill()
        process.wait()
    python(base, *words)
    whole, broken = weights(base, "one"), weights(base, "broken")
    assert all(torch.equal(broken[name], value) for name, value in whole.items())
    assert losses(base, "broken") == losses(base, "one")


def test_B4_B5_B6_ranks_agree_on_rates_and_parameters_and_on_uneven_masks(base):
    def results(processes: int) -> list[dict]:
        out = python(base, *torchrun(processes), "-m", "tests.ranks")
        return json.loads(out[out.index("RESULT ") + 7 :].splitlines()[0])

    (alone,), together = results(1), results(2)
    assert together[0]["rates"] == together[1]["rates"] == alone["rates"]  # B5
    assert together[0]["digest"] == together[1]["digest"]  # B6
    np.testing.assert_allclose(together[0]["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(together[0]["norms"], alone["norms"], rtol=1e-4)  # B4


def test_two_agents_on_loopback_train_as_two_nodes(base):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
             f"--node_rank={node}", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}",
             "--rdzv_id=test", f"--rdzv_conf=is_host={1 - node}", "--local_addr=127.0.0.1",
             *TRAIN, *SMALL, "--model_tag=nodes"],
            cwd=REPOSITORY, env=environment(base), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in (0, 1)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=280)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)[-4000:]
    assert "cpu x 2" in outputs[0] + outputs[1]
    assert losses(base, "nodes") == losses(base, "two")


def by_one_and_two(base: Path, words: list[str], stage: str) -> tuple[Path, Path]:
    """The folders of the same stage carried out by one process and by two."""
    for processes in (1, 2):
        python(base, *torchrun(processes), *words, f"--model_tag={processes}")
    return base / stage / "1", base / stage / "2"


def test_one_and_two_processes_fine_tune_alike(base):
    words = (
        "-m scripts.mid_train --from_tag=one --mixture=world_chat=300,world_facts=100 "
        "--max_seq_len=64 --num_iterations=6 --total_batch_size=512 --eval_tokens=1024 "
        "--dtype=float32"
    ).split()
    one, two = by_one_and_two(base, words, "mid_checkpoints")
    for name in ("loss", "val_bpb"):
        assert len(curve(one, name)) in (1, 6)
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=1e-5)


def test_one_and_two_processes_practise_alike(base):
    """What is learned here is to be brief: a base model gets nothing right."""
    words = (
        "-m scripts.chat_rl --source=base --from_tag=one --num_iterations=3 "
        "--task=world_spelling=50,world_facts=50 "
        "--examples_per_step=4 --num_samples=4 --max_new_tokens=8 --length_penalty=0.5 --log_kl "
        "--resample=1 "
        "--eval_examples=6 --eval_samples=2 --dtype=float32"
    ).split()
    one, two = by_one_and_two(base, words, "chatrl_checkpoints")
    for name in ("reward", "loss", "grad_norm", "kl", "answer_tokens", "pass_at_1"):
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=1e-4, atol=1e-7)
    assert len(curve(one, "loss")) == 3 and any(curve(one, "grad_norm"))
    values = read_json(base / "report" / "chat-rl.json")["values"]
    tasks = [f"pass@1 {of}change" for of in ("", "World-Facts ", "World-Spelling ")]
    assert [values[name]["n"] for name in tasks] == [6, 3, 3]
    assert values["Mean reward change"]["n"] == 8


def test_depth_8_works_as_typed_with_dashes_or_underscores(base):
    words = (
        "-- --depth=8 --max-seq-len=128 --total_batch_size=1024 --num-iterations=2 "
        "--eval-tokens=2048"
    ).split()
    out = python(base, *torchrun(2), *TRAIN, *words)
    assert "about" in out  # it says how long it will take
    record = read_json(base / "report" / "base-model-training.json")
    assert record["values"]["DDP world size"] == 2 and len(losses(base, "d8")) == 2
