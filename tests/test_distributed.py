"""Training with several processes on one machine matches training with one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from nanochat import records
from nanochat.common import REPOSITORY, base_dir, read_json
from nanochat.distributed import DistConfig, as_picklable, init_distributed
from tests.commands import Command
from tests.training_runs import (
    SMALL,
    TRAIN,
    begin,
    curve,
    environment,
    folder,
    free_port,
    losses,
    node,
    python,
    torchrun,
    weights,
)


@pytest.fixture(scope="module")
def base(trained_base, tmp_path_factory) -> Path:
    return shutil.copytree(trained_base, tmp_path_factory.mktemp("runs") / "base")


def test_R19_one_and_two_processes_have_same_first_20_losses(base):
    one, two = losses(base, "one"), losses(base, "two")
    assert len(one) == len(two) == 20 and one[-1] < one[0] - 1
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_R19_first_losses_match_golden_losses(base):
    """Tolerance: rounding depends on the CPU; without AVX, losses differed by 4e-7."""
    golden = json.loads((REPOSITORY / "tests" / "golden_losses.json").read_text())
    np.testing.assert_allclose(losses(base, "one"), golden, rtol=1e-5)


def test_more_processes_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ValueError, match="--nproc_per_node is above the 4 GPUs"):
        init_distributed(DistConfig("cuda"))


def test_launch_id_differs_for_torchruns_with_one_process_id(monkeypatch, tmp_path):
    """Containers with a fixed host name often start torchrun with the same process ID."""

    def launch_id(logs: DefaultLogsSpecs, restarts: int) -> str:
        env = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        logs.reify({0: env})  # sets TORCHELASTIC_ERROR_FILE
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return init_distributed(DistConfig("cpu")).launch

    first, second = DefaultLogsSpecs(str(tmp_path)), DefaultLogsSpecs(str(tmp_path))
    assert launch_id(first, 0) == launch_id(first, 1) != launch_id(second, 0)


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match="collective_timeout_minutes must be positive, got 0"):
        DistConfig(collective_timeout_minutes=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_R3_gpu_resume_is_bit_identical_to_uninterrupted_run(base):
    words = [*TRAIN, *SMALL, "--device_type=cuda", "--dtype=bfloat16", "--deterministic"]
    for tag in ("gpu", "gpu-again", "gpu-resumed"):
        python(base, *words, f"--model_tag={tag}")
    for step in (12, 16, 20):
        shutil.rmtree(folder(base, "gpu-resumed") / f"step_{step:06d}")
    python(base, *words, "--model_tag=gpu-resumed", "--resume=auto")
    assert losses(base, "gpu") == losses(base, "gpu-again") == losses(base, "gpu-resumed")
    words.remove("--deterministic")  # now run-to-run noise is allowed
    for tag in ("loose", "loose-again"):
        python(base, *words, f"--model_tag={tag}")
    band = np.abs(np.subtract(losses(base, "loose"), losses(base, "loose-again"))).max()
    shutil.rmtree(folder(base, "loose-again") / "step_000020")
    python(base, *words, "--model_tag=loose-again", "--resume=auto")
    difference = np.abs(np.subtract(losses(base, "loose"), losses(base, "loose-again"))).max()
    assert difference <= max(2 * band, 1e-4)


def test_sharded_optimizer_matches_single_process(base):
    one, two = weights(base, "one"), weights(base, "two")
    assert one.keys() == two.keys()
    for name in one:
        most = 1e-3 if one[name].ndim > 1 else 1e-2  # gradients of scalars are mostly noise
        assert (two[name] - one[name]).norm() < most * one[name].norm(), name


@pytest.mark.parametrize(
    ("saved_by", "resumed_with"),
    [("one", 2), ("two", 1), pytest.param("two", 4, marks=pytest.mark.slow)],
)
def test_R4_elastic_resume_has_same_losses(base, saved_by, resumed_with):
    tag = f"{saved_by}-{resumed_with}"
    shutil.copytree(folder(base, saved_by), folder(base, tag))
    for step in (12, 16, 20):  # as if the run had been killed after step 8
        shutil.rmtree(folder(base, tag) / f"step_{step:06d}")
    words = [*torchrun(resumed_with), *TRAIN, *SMALL, f"--model_tag={tag}", "--resume=auto"]
    assert "resumed" in python(base, *words)
    np.testing.assert_allclose(losses(base, tag), losses(base, "one"), rtol=1e-5)


def test_resume_with_different_learning_rate_is_rejected(base):
    """Otherwise, the run would mix two recipes and be recorded as the second one."""
    words = [sys.executable, *TRAIN, *SMALL, "--model_tag=one", "--resume=auto", "--matrix_lr=0.03"]
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment(base), capture_output=True, text=True, timeout=280
    )
    assert done.returncode and "optim.matrix_lr: was 0.02, now 0.03" in done.stderr


def test_B4_B5_B6_ranks_agree_on_uneven_masks(base):
    def results(processes: int) -> list[dict]:
        out = python(base, *torchrun(processes), "-m", "tests.ranks")
        return json.loads(out[out.index("RESULT ") + 7 :].splitlines()[0])

    (alone,), together = results(1), results(2)
    assert together[0]["rates"] == together[1]["rates"] == alone["rates"]  # B5
    assert together[0]["digest"] == together[1]["digest"]  # B6
    np.testing.assert_allclose(together[0]["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(together[0]["norms"], alone["norms"], rtol=1e-4)  # B4


def test_two_torchrun_agents_match_one_with_two_processes(base):
    port = free_port()
    agents = [begin(base, *node(port, n), *TRAIN, *SMALL, "--model_tag=nodes") for n in (0, 1)]
    outputs = [agent.communicate(timeout=280)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)[-4000:]
    assert "cpu x 2" in outputs[0] + outputs[1]
    assert losses(base, "nodes") == losses(base, "two")


@pytest.fixture
def here(base: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run scripts in this process, on the shared base directory."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    return command


def by_one_and_two(here: Command, words: str, stage: str) -> tuple[Path, Path]:
    """Run a stage with one process and with two; returns both checkpoint folders."""
    script, *flags = words.split()
    here.works(script, *flags, "--model_tag=1")
    runs = base_dir() / f"{stage}_checkpoints"
    python(base_dir(), *torchrun(2), "-m", f"scripts.{script}", *flags, "--model_tag=2")
    return runs / "1", runs / "2"


def test_finetuning_matches_on_one_and_two_processes(here):
    words = (
        "mid_train --source=base:one --mixture=world_chat=300,world_facts=100 "
        "--max_seq_len=64 --num_iterations=6 --total_batch_size=512 --eval_tokens=1024 "
        "--dtype=float32"
    )
    one, two = by_one_and_two(here, words, "mid")
    for name in ("loss", "val_bpb"):
        assert len(curve(one, name)) in (1, 6)
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=1e-5)


def test_finished_finetuning_saves_no_optimizer_state(base, here):
    words = (
        "mid_train --source=base:one --mixture=world_facts=100 --max_seq_len=64 "
        "--total_batch_size=512 --eval_tokens=1024 --dtype=float32 --model_tag=small "
        "--skip_if_done --resume=auto --num_iterations="
    )
    here.works(*(words + "2").split())
    (saved,) = (base / "mid_checkpoints" / "small").glob("step_*")
    assert {p.name for p in saved.iterdir()} == {
        "model.safetensors", "state.json", "tokenizer.json"
    }  # fmt: skip
    assert "finished already, skipped" in here.works(*(words + "2").split())
    longer = here.rejects(*(words + "3").split())
    assert "with no optimizer state" in longer and "--save_optimizer" in longer


def test_golf_training_matches_on_one_and_two_processes(base, here):
    words = (
        "golf.base_train --depth=2 --max_seq_len=32 --total_batch_size=512 "
        "--num_iterations=20 --eval_tokens=1024 --dtype=float32 --tie_embeddings=1 --ema_decay=0.8 "
        "--decay_rule=decoupled --weight_decay=0.3 --qat_start=0.5 --qk_gain_init=1.5"
    )
    by_one_and_two(here, words, "base")
    one, two = losses(base, "1"), losses(base, "2")
    np.testing.assert_allclose(two[:10], one[:10], rtol=1e-5)
    np.testing.assert_allclose(two, one, rtol=1e-3)  # an ulp can change the quantization level
    one, two = weights(base, "1"), weights(base, "2")
    for name in one:
        assert (two[name] - one[name]).norm() < 1e-2 * one[name].norm(), name


def test_recursive_training_matches_on_one_and_two_processes(here):
    words = (
        "recursion.base_train --depth=3 --d_model=64 --max_seq_len=32 "
        "--total_batch_size=512 --num_iterations=12 --eval_tokens=1024 --dtype=float32 "
        "--recursion_preset=moderate --supervise=sampled --bptt_loops=3"
    )
    one, two = by_one_and_two(here, words, "base")
    norms = [f"grad_norm_{part}" for part in ("prelude", "core", "coda", "inject", "outside")]
    for name in ("loss", "total_loss", "loss_loop_4", *norms, "val_bpb", "bpb_loop_1"):
        assert len(curve(one, name)) in (1, 12)
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=2e-4, err_msg=name)
    drawn = [len(curve(one, f"loss_loop_{k}")) for k in (1, 2, 3)]
    assert sum(drawn) == 12 and min(drawn) > 0, "expected one sampled loop per step"


def test_time_limit_stops_two_processes_at_same_step(base):
    """Their clocks differ, but they agree on the last step."""
    words = (
        "-m scripts.golf.base_train --depth=2 --max_seq_len=32 --total_batch_size=512 "
        "--max_wallclock_seconds=1.5 --num_iterations=5000 --eval_tokens=1024 --dtype=float32 "
        "--model_tag=clock"
    ).split()
    python(base, *torchrun(2), *words)
    assert 3 < len(losses(base, "clock"))
    state = read_json(next(folder(base, "clock").glob("step_*/state.json")))
    assert state["progress"]["clock_seconds"] >= 1.5
    assert state["step"] == len(losses(base, "clock"))


def test_rl_matches_on_one_and_two_processes(base, here):
    """The only signal is the length penalty: a base model answers incorrectly."""
    words = (
        "chat_rl --source=base:one --num_iterations=3 "
        "--task=world_spelling=50,world_facts=50 "
        "--examples_per_step=4 --num_samples=4 --max_new_tokens=8 --length_penalty=0.5 --log_kl "
        "--resample_zero_signal=1 --pass_rates=0,1 "
        "--eval_examples=6 --eval_samples=2 --dtype=float32"
    )
    one, two = by_one_and_two(here, words, "chatrl")
    for name in ("reward", "loss", "grad_norm", "kl", "answer_tokens", "pass_at_1"):
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=1e-4, atol=1e-7)
    assert len(curve(one, "loss")) == 3 and any(curve(one, "grad_norm"))
    (saved,) = one.glob("step_*")  # one checkpoint, without optimizer state
    assert not (saved / "optim.safetensors").exists()
    assert read_json(saved / "state.json")["identity"]["pass_rates"] == [0.0, 1.0]
    record = read_json(base / "report" / "chat-rl.json")
    values, scores = record["values"], records.read_scores(record["items"]["pass@1 after"])
    assert sum(scores) / 6 == pytest.approx(values["pass@1 after"]["value"])
    assert values["pass@1 after"]["k"] == 2 and "pass@2 after" in record["items"]
    tasks = [f"pass@1 {of}change" for of in ("", "World-Facts ", "World-Spelling ")]
    assert [values[name]["n"] for name in tasks] == [6, 3, 3]
    assert values["Mean reward change"]["n"] == 8


def test_dpo_matches_on_one_and_two_processes(base, here):
    path = base / "pairs.jsonl"
    lines = [{"prompt": f"Is {i}?", "chosen": "Yes.", "rejected": "No, no."} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        f"chat_dpo --source=base:one --pairs={path} --num_iterations=3 "
        "--examples_per_step=4 --init_lr_frac=0.3 --dtype=float32"
    )
    one, two = by_one_and_two(here, words, "chatdpo")
    for name in ("loss", "grad_norm", "held_out_loss", "held_out_margin"):
        np.testing.assert_allclose(curve(two, name), curve(one, name), rtol=1e-4, atol=1e-7)
    assert len(curve(one, "loss")) == 3 and curve(one, "held_out_margin")[-1] > 0


def test_suite_is_scored_alike_by_one_and_two_processes(base, here):
    here.works("lab.compare", "--all=base:one")
    record = read_json(base / "report" / "suite.json")
    assert len(record["values"]) == 5 and record["tables"][0]["rows"]
    out = python(base, *torchrun(2), "-m", "scripts.lab.compare", "--all=base:one")
    assert out.count("Difference") == 1, "one rank prints the table"
    assert read_json(base / "report" / "suite.json")["values"] == record["values"]


def test_flags_accept_dashes_and_underscores(base):
    words = (
        "-- --depth=2 --max-seq-len=64 --total_batch_size=128 --num-iterations=2 --eval-tokens=256"
    ).split()
    out = python(base, *torchrun(2), *TRAIN, *words)
    assert "about" in out  # the estimated time
    record = read_json(base / "report" / "base-model-training.json")
    assert record["values"]["DDP world size"] == 2 and len(losses(base, "d2")) == 2


class Renamed(ValueError):
    """An error whose pickled copy has a different message."""

    def __init__(self, name: str):
        super().__init__(f"bad {name}")


def test_error_reaches_other_ranks_with_same_message():
    assert isinstance(as_picklable(ValueError("x")), ValueError)
    found = as_picklable(Renamed("name"))
    assert type(found) is RuntimeError and str(found) == "Renamed: bad name"
