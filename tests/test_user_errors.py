"""Flags; user errors print the bad value and a fix, without a traceback."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanochat import common
from nanochat.config import parse, settings
from nanochat.records import append_line
from nanochat.tokenizer import Tokenizer
from scripts.chat_rl import ChatRL
from tests.training_runs import begin_anew, rest_of

TEXT = ("--dataset=embedded", "--num_shards=1")
# command line -> what its error names, in order; FILE has no JSON, TYPES has a wrong type
BAD_FLAGS = {
    "tok_train --dataset=embedded --vocab_size=10": "vocab_size is 10; use --vocab_size=265",
    "tok_train --vocab_size=many": "many.*--help",
    "tok_train --dataset=": "--dataset=: .*local folder",
    "tok_train --tokenizer_tag=../x": "--tokenizer_tag=../x.*use letters",
    "lab.hold_out --mixture=FILE": "FILE is not valid JSON.*correct or delete it",
    "lab.hold_out --mixture=TYPES": "'language': 5.*string values",
    "base_train --detph=2": "--detph=2.*--help",
    "base_train --dtype=int8": "int8.*bfloat16",
    "base_train --model_tag=../x": "--model_tag=../x.*use letters",
    "base_train --eval_tokens=0": "eval_tokens must be at least 1, got 0",
    "base_train --device_batch_size=0": "device_batch_size must be at least 1, got 0",
    "base_train --arch=classic --window_pattern=LS": "pattern L.*remove it, or --window_pattern=LS",
    "base_train --target_flops=0": "target_flops must be positive, got 0",
    "base_train --collective_timeout_minutes=0": "collective_timeout_minutes must be positive",
    "base_train --weight_decay=nan": "weight_decay must be finite.*at least 0",
    "base_train --seed=10000000000000000000000": "seed .* is too large",
    "base_train --depth=0": "depth must be at least 1, got 0",
    "base_train --core-metric-every=-1": r"core_metric_every must be .* 0 \(0 = never\), got -1",
    "base_eval --suite=dclm --eval_bundle=README.md --only_fetch": "not a zip file.*--eval_bundle",
    "base_eval --suite=dclm --eval_bundle=docs --only_fetch": "no core.yaml.*--eval_bundle",
    "base_train --tokenizer_tag=none": "no tokenizer.*scripts.tok_train --tokenizer_tag=none",
    "base_loss --model_tag=none": "no checkpoint in.*base_train --depth=4 --model_tag=none",
    "base_eval --suite=dclm --eval_bundle=/none --only_fetch": "/none.*--eval_bundle=<folder",
    "mid_train --model_tag=none": "no checkpoint in.*there are: none.*base_train --depth=4",
    "chat_sft --model_tag=none": "no checkpoint in.*scripts.mid_train --model_tag=none",
    "chat_rl --model_tag=none": "no checkpoint in.*scripts.chat_sft --model_tag=none",
    "chat_rl --init_lr_frac=-0.1": "init_lr_frac must be positive, got -0.1",
    "chat_rl --num_samples=1": "num_samples must be at least 2, got 1",
    "chat_rl --temperature=0": "temperature must be positive, got 0",
    "chat_rl --dtype=fp8": "fp8 needs rows of one length",
    "base_train --warmdown_ratio=1.5": "warmdown_ratio must be .* got 1.5",
    "chat_dpo --num_epochs=0": "num_epochs must be positive, got 0",
    "chat_eval -n 8": "8 greedy answers to a question are equal; use --temperature=1",
    "chat_cli --source=rl -p hi": "no checkpoint in.*scripts.chat_rl",
    "chat_cli -k 0 -p hi": "top_k must be at least 1, got 0",
    "chat_cli -t nan -p hi": "temperature must be .* got nan",
    "chat_web -t 2.5": "temperature must be at most 2, got 2.5",
    "chat_web -p 99999": "port must.*65536",
    "chat_web --top_p 3": r"top_p must be in \(0, 1\], got 3.0",
    "bench --repeats=0": "repeats must be at least 1, got 0",
    "golf.base_train --ema_decay=2": r"ema_decay must be in \[0, 1\), got 2.0",
    "lab.merge --models=nothing|else": r"'nothing'.*stage\[:tag\[:step\]\]",
    "report --hourly_rate=nan": "hourly_rate must be at least 0, got nan",
    "report": "no records in .*bash speedrun.sh",
}
# a file of conversations -> the problem
BAD_CONVERSATIONS = {
    '{"role": "user"}': "line 1: no conversation in the fields role; read are",
    "words": "line 1: not JSON",
    "": "is empty; add conversations",
    None: "No such file or directory.*check the path",
}


@pytest.mark.parametrize("line", BAD_FLAGS)
def test_bad_flag_is_rejected_without_a_traceback(command, tmp_path, line):
    named = BAD_FLAGS[line]
    wrong = {"mixture": "a", "buckets": {"a": {"task": "smoltalk", "language": 5}}}
    for name, content in {"FILE": "words", "TYPES": json.dumps(wrong)}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        line, named = (text.replace(name, str(path)) for text in (line, named))
    assert re.search(named, command.rejects(*line.split()), re.DOTALL)


def test_full_disk_is_reported_with_a_fix(command, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    text = command.rejects("tok_train", *TEXT, "--vocab_size=300", "--max_chars=5000")
    assert "No space left on device" in text and "NANOCHAT_BASE_DIR to a larger disk" in text


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none"])
def test_unusable_base_directory_is_named_with_a_fix(command, monkeypatch, tmp_path, folder):
    (tmp_path / "file").write_text("")
    path = Path(tmp_path, folder)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(path))
    text = command.rejects("tok_train", *TEXT)
    assert str(path) in text and re.search("use another path|check the path|BASE_DIR", text)


READ_ONLY = Path("/sys/kernel")  # also for root


def test_outputs_are_checked_before_a_stage_works(trained, command, monkeypatch):
    monkeypatch.setenv("NANOCHAT_REPORT_DIR", str(READ_ONLY / "report"))
    for line in ("chat_eval -i base -a world_facts -x 2", "base_loss --split_tokens=1"):
        text = command.rejects(*line.split())
        assert f"records cannot be written to {READ_ONLY}" in text and "NANOCHAT_REPORT_DIR" in text
        assert "questions" not in text and "bpb" not in text


def test_folders_that_are_only_read_need_no_lock():
    with common.hold_lock(READ_ONLY / ".lock", "nothing"), common.try_lock(READ_ONLY / "x") as mine:
        assert mine
    others = READ_ONLY / "uevent_seqnum"  # may be read, not written
    with common.try_lock(others) as first, common.try_lock(others) as second:
        assert first and not second


def test_errors_of_writing_name_the_file():
    with pytest.raises(OSError, match="No space left.*/dev/full"):
        append_line(Path("/dev/full"), {})


def test_closed_standard_input_names_the_flag(trained, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed; pass the question with -p" in command.rejects("chat_cli")


@pytest.mark.parametrize("name", ["dataset", "report"])
def test_modules_that_are_commands_elsewhere_name_the_script(name):
    done = subprocess.run(
        [sys.executable, "-m", f"nanochat.{name}"], capture_output=True, text=True
    )
    assert done.returncode and "use python -m scripts." in done.stderr


def test_interrupt_has_status_130_and_no_traceback(command, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "train", interrupt)
    done = command("tok_train", *TEXT)
    assert done.status == 130 and "interrupted" in done.text and "Traceback" not in done.text


def test_interrupt_while_torch_is_imported_prints_nothing(base):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    process = begin_anew(base, "-m", "scripts.base_train")
    signal.signal(signal.SIGINT, before)
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert rest_of(process) == "" and process.returncode == -signal.SIGINT


def test_out_of_memory_at_the_start_is_one_sentence(command, monkeypatch):
    monkeypatch.setattr(Tokenizer, "train", lambda *_: torch.empty(1 << 50))
    assert "out of memory; use a smaller model" in command.rejects("tok_train", *TEXT)


def test_error_inside_a_library_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(Tokenizer, "train", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        command("tok_train", *TEXT)


@pytest.mark.parametrize("content", BAD_CONVERSATIONS)
def test_bad_conversations_are_named(trained, command, tmp_path, content):
    own = tmp_path / "own.jsonl"
    if content is not None:
        own.write_text(content)
    text = command.rejects("mid_train", "--model_tag=one", f"--mixture=jsonl:{own}")
    assert re.search(f"{own}.*{BAD_CONVERSATIONS[content]}", text, re.DOTALL)


# ---- Flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", {}),
        ("--num_iterations=8 --matrix_lr=0.5", {"num_iterations": 8, "matrix_lr": 0.5}),
        ("-- --num-iterations 8 --matrix-lr 5e-1", {"num_iterations": 8, "matrix_lr": 0.5}),
        ("--num_iterations=None --pass_rates None --top_k=None", {"top_k": None}),
        ("--log_kl --no-deterministic", {"log_kl": True}),
        ("--pass_rates 0 0.8 --model_tag x", {"pass_rates": (0.0, 0.8), "model_tag": "x"}),
        ("--task a=3,b*2 -d=float32", {"task": "a=3,b*2", "dtype": "float32"}),
    ],
)
def test_every_accepted_form_of_a_flag_gives_its_settings(line, changed):
    assert settings(parse(ChatRL(), "A script.", line.split())) == settings(ChatRL()) | changed


def test_help_shows_docstrings_and_defaults(command):
    shown = command.works("chat_rl", "--help")
    for text in ("Reinforcement learning on", "Answers per question", "(default: 400)"):
        assert text in shown
