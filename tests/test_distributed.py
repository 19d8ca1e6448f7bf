"""Training with several processes on one machine matches training with one."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.checkpoint import stage_folder
from nanochat.common import REPOSITORY
from tests.conftest import Command
from tests.faulty import grade
from tests.training_runs import (
    SMALL,
    STEPS,
    TRAIN,
    all_ranks,
    begin,
    begin_ranks,
    copy_until,
    curve,
    folder,
    free_port,
    losses,
    node,
    place,
    python,
    read_until_step,
    rest_of,
    saved_steps,
)


@pytest.fixture(scope="module")
def base(trained_base, tmp_path_factory) -> Path:
    return shutil.copytree(trained_base, tmp_path_factory.mktemp("runs") / "base")


@pytest.fixture
def here(base: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run scripts in this process, on the shared base directory."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    return command


# ---- The same numbers ----------------------------------------------------------------------------


def test_R19_first_losses_are_golden_on_one_and_two_processes(base):
    """Tolerance: rounding depends on the CPU; without AVX, losses differed by 4e-7."""
    golden = json.loads((REPOSITORY / "tests" / "golden_losses.json").read_text())
    assert len(golden) == STEPS and golden[-1] < golden[0] - 1
    for tag in ("one", "two"):
        np.testing.assert_allclose(losses(base, tag), golden, rtol=1e-5)


@pytest.mark.parametrize(
    ("saved_by", "resumed_with"),
    [("one", 2), ("two", 1), pytest.param("two", 4, marks=pytest.mark.slow)],
)
def test_R4_elastic_resume_has_same_losses(base, here, saved_by, resumed_with):
    tag = f"{saved_by}-{resumed_with}"
    copy_until(8, folder(base, saved_by), folder(base, tag))
    words = [*SMALL, f"--model_tag={tag}", "--resume=auto"]
    if resumed_with == 1:
        assert "resumed" in here.works("base_train", *words)
    else:
        assert "resumed" in all_ranks(base, *TRAIN, *words, world_size=resumed_with)
    np.testing.assert_allclose(losses(base, tag), losses(base, "one"), rtol=1e-5)


def test_B5_B6_ranks_have_equal_weights_after_each_step(base, here):
    """
    Also those of embeddings that are sharded unevenly; the ranks allocate differently. Each save
    compares them.
    """
    text = "--dataset=embedded --num_shards=1 --tokenizer_tag=odd".split()
    here.works("tok_train", *text, "--vocab_size=1027")
    words = ["base_train", *SMALL, *text, "--num_iterations=8", "--save_every=1"]
    here.works(*words, "--model_tag=odd-1")
    all_ranks(base, "-m", "tests.faulty", "churn", "all", *words, "--model_tag=odd-2")
    for name in ("loss", "lr", "grad_norm"):
        found, want = (curve(folder(base, tag), name) for tag in ("odd-2", "odd-1"))
        np.testing.assert_allclose(found, want, rtol=1e-4)


def test_all_ranks_take_the_dtype_of_the_main_rank(base):
    """Rank 1 measures faster matmuls in bfloat16, rank 0 in float32."""
    code = (
        "import os, torch; from nanochat import dist; half = os.environ['RANK'] == '1';"
        "dist.matmul_rate = lambda dtype: 1 + ((dtype == torch.bfloat16) == half);"
        "here = dist.init_dist(); print(here.gather(here.dtype)); here.close()"
    )
    assert "[torch.float32, torch.float32]" in all_ranks(base, "-c", code)


RUN = "--num_iterations={} --total_batch_size=512 --eval_tokens=1024 --dtype=float32"
RECURSION = (
    f"recursion.base_train --depth=3 --max_seq_len=32 {RUN.format(12)} "
    "--recursion_preset=moderate --supervise=sampled --bptt_loops=3"
)
MID = (
    "mid_train --source=base:one --mixture=world_chat=300,world_facts=100 --max_seq_len=64 "
    f"{RUN.format(6)}"
)
RL = (
    "chat_rl --source=base:one --num_iterations=3 --task=world_spelling=50,world_facts=50 "
    "--examples_per_step=4 --num_samples=4 --max_new_tokens=8 --length_penalty=0.5 --log_kl "
    "--resample_zero_signal=1 --pass_rates 0 1 --eval_examples=6 --eval_samples=2 --dtype=float32"
)
DPO = (
    "chat_dpo --source=base:one --pairs={pairs} --num_iterations=3 --examples_per_step=4 "
    "--init_lr_frac=0.3 --dtype=float32"
)
STAGES = {  # -> command, relative tolerance, curves
    "base (recursion)": (RECURSION, 2e-4, "loss loss_loop_1 total_loss val_bpb bpb_loop_1"),
    "mid": (MID, 1e-5, "loss val_bpb"),
    "rl": (RL, 1e-4, "reward loss grad_norm kl answer_tokens pass_at_1"),
    "dpo": (DPO, 1e-4, "loss grad_norm held_out_loss held_out_margin"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_training_matches_on_one_and_two_processes(base, here, stage, monkeypatch):
    monkeypatch.setattr("nanochat.rl.score_answer", grade)
    command, tolerance, names = STAGES[stage]
    pairs = base / "pairs.jsonl"
    lines = [{"prompt": f"Is {i}?", "chosen": "Yes.", "rejected": "No, no."} for i in range(60)]
    pairs.write_text("\n".join(map(json.dumps, lines)))
    script, *flags = command.format(pairs=pairs).split()
    here.works(script, *flags, "--model_tag=1")
    all_ranks(base, "-m", "tests.faulty", "grade", "all", script, *flags, "--model_tag=2")
    one, two = (stage_folder(stage.split()[0]) / tag for tag in "12")
    assert len(curve(one, "loss")) >= 3 and any(curve(one, "grad_norm"))
    for name in names.split():
        assert curve(one, name)
        np.testing.assert_allclose(
            curve(two, name), curve(one, name), rtol=tolerance, atol=1e-7, err_msg=name
        )


def test_update_rule_of_ones_own_is_sharded_and_saved_for_any_ranks(base):
    """And the gradients of the parameters are whole on any rank."""
    words = ["-m", "tests.faulty", "lion", "all", "base_train", *SMALL]
    python(base, *words, "--model_tag=lion1")
    all_ranks(base, *words, "--model_tag=lion2")
    copy_until(8, folder(base, "lion2"), folder(base, "lion21"))
    python(base, *words, "--model_tag=lion21", "--resume=auto")
    names = ["loss", "norm blocks.0.mlp.up.weight", "norm blocks.1.attention.k.weight"]
    for name in [*names, "norm embed.weight", "norm head.weight", "norm smear"]:
        one = curve(folder(base, "lion1"), name)
        assert len(one) == STEPS and one[-1] > 0
        for tag in ("lion2", "lion21"):
            np.testing.assert_allclose(curve(folder(base, tag), name), one, rtol=2e-3, err_msg=name)


# ---- Launching -----------------------------------------------------------------------------------


def test_two_torchrun_agents_match_one_with_two_processes(base):
    port = free_port()
    agents = [begin(base, *node(port, n), *TRAIN, *SMALL, "--model-tag=nodes") for n in (0, 1)]
    outputs = [rest_of(agent) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)[-4000:]
    assert losses(base, "nodes") == losses(base, "two")


def test_time_limit_stops_two_processes_at_same_step(base):
    """Their clocks differ, but they agree on the last step; the learning rate follows them."""
    words = (
        "-m scripts.golf.base_train --depth=2 --max_seq_len=32 --total_batch_size=512 "
        "--max_wallclock_seconds=1.5 --num_iterations=5000 --eval_tokens=1024 --dtype=float32 "
        "--warmup_steps=0 --final_lr_frac=0 --model_tag=clock"
    ).split()
    all_ranks(base, *words)
    run = folder(base, "clock")
    left = curve(run, "seconds_left")
    assert saved_steps(run) == [len(left)] and left == sorted(left, reverse=True)
    done = 1 - left[-1] / 1.5  # before the last step
    assert curve(run, "lr")[-1] == pytest.approx(min(1, (1 - done) / 0.65), rel=0.01)


# ---- Ranks that do not answer --------------------------------------------------------------------


def test_R16_other_ranks_end_if_one_is_frozen(base):
    words = [*TRAIN, *SMALL, "--num_iterations=100000", "--compile=off", "--model_tag=frozen"]
    other, frozen = begin_ranks(base, *words, "--collective_timeout_minutes=0.1")
    read_until_step(other, 5)
    frozen.send_signal(signal.SIGSTOP)
    text = rest_of(other)
    frozen.kill()  # as torchrun would, after a grace period of 30 s
    assert other.returncode and "RuntimeError" in text, text[-3000:]  # gloo's words vary


def test_R16_rank_missing_at_the_start_is_named(base):
    words = [*TRAIN, *SMALL, "--model_tag=alone", "--collective_timeout_minutes=0.05"]
    process = begin(base, *words, **place(0, free_port()))
    text = rest_of(process)
    assert process.returncode and re.search(r"(?i)rank 1\b", text), text[-3000:]


def test_R16_long_work_of_the_main_rank_is_waited_for(base):
    words = ["-m", "tests.faulty", "dawdle", "0", "base_train", *SMALL]
    flags = ["--sample_every=8", "--collective_timeout_minutes=0.1", "--model_tag=slow"]
    assert "decoding slowly" in all_ranks(base, *words, *flags)
    assert losses(base, "slow") == losses(base, "two")


def test_R15_nodes_without_a_shared_disk_are_rejected(base, trained_base, tmp_path):
    """Each finds another newest checkpoint of the run."""
    copy_until(8, folder(base, "one"), folder(base, "apart"))
    other = shutil.copytree(trained_base, tmp_path / "other")
    copy_until(4, folder(base, "one"), folder(other, "apart"))
    words = [*TRAIN, *SMALL, "--model_tag=apart", "--resume=auto"]
    alone, port = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, free_port()
    nodes = [begin(at, *words, **place(n, port, **alone)) for n, at in enumerate((base, other))]
    for process, text in [(each, rest_of(each)) for each in nodes]:
        assert process.returncode == 2 and "disk that all nodes share" in text


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_R3_gpu_resume_is_bit_identical_to_uninterrupted_run(base):
    words = [*TRAIN, *SMALL, "--device_type=cuda", "--dtype=bfloat16"]

    def train(tag: str, *flags: str) -> list[float]:
        python(base, *words, f"--model_tag={tag}", *flags)
        return losses(base, tag)

    exact, again = (train(tag, "--deterministic") for tag in ("gpu", "gpu-again"))
    copy_until(8, folder(base, "gpu"), folder(base, "gpu-cut"))
    assert exact == again == train("gpu-cut", "--deterministic", "--resume=auto")
    loose, noisy = train("loose"), train("noisy")  # now run-to-run noise is allowed
    band = np.abs(np.subtract(loose, noisy)).max()
    copy_until(16, folder(base, "loose"), folder(base, "cut"))
    np.testing.assert_allclose(train("cut", "--resume=auto"), loose, 0, max(2 * band, 1e-4))
