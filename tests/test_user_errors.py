"""User errors print the bad value and a fix, without a traceback."""

import errno
import json
import os

import numpy as np
import pytest

from nanochat.common import read_json
from nanochat.tokenizer import Tokenizer

TEXT = ("--dataset=embedded", "--num_shards=1")
RUN = "--depth=1 --max_seq_len=32 --num_iterations=1 --total_batch_size=64 --no-compile".split()


BAD_FLAGS = [
    (
        "tok_train --dataset=embedded --vocab_size=10",
        "vocab_size is 10",
        "--vocab_size=265 or more",
    ),
    ("tok_train --vocab_size=many", "many", "--help"),
    ("tok_train --max_chars=0", "max_chars must be at least 1, got 0", "at least 1"),
    ("tok_train --dataset=", "--dataset=: a Hub repository", "a local folder"),
    ("tok_train --tokenizer_tag=../x", "--tokenizer_tag=../x", "use letters"),
    ("tok_train --tokenizer_tag=/x", "--tokenizer_tag=/x", "use letters"),
    (
        "tok_train --dataset=embedded --vocab_size=300 --max_chars=5000 --report_dir={file}",
        "{file}",
        "use another path",
    ),
    ("tok_train --mixture=a=?", "'a=?' in the mixture", "name[:source]"),
    ("tok_train --mixture={file}", "{file} is not valid JSON", "correct or delete it"),
    ("tok_train --mixture={types}", "a has invalid {'dataset': 5}", "with string values"),
    ("tok_eval --tokenizer_tag=none", "no tokenizer 'none'", "python -m scripts.tok_train"),
    ("data --tokenizer_tag=none", "no tokenizer 'none'", "python -m scripts.tok_train"),
    ("base_train --detph=2", "--detph", "did you mean --depth?"),
    ("base_train --dtype=int8", "int8", "bfloat16"),
    ("base_train --model_tag=../x", "--model_tag=../x", "use letters"),
    ("base_train --model_tag=exp:1", "--model_tag=exp:1", "use letters"),
    ("base_train --model_tag=exp/d4", "--model_tag=exp/d4", "use letters"),
    ("base_train --model_tag=.", "--model_tag=.", "use letters"),
    (
        "base_train --device_batch_size=0",
        "device_batch_size must be at least 1, got 0",
        "at least 1",
    ),
    ("base_train --eval_every=-1", "eval_every must be at least 0, got -1", "at least 0"),
    ("base_train --depth=0", "depth must be at least 1, got 0", "at least 1"),
    (
        "base_train --arch=classic --window_pattern=LS",
        "--arch=classic has the pattern L",
        "remove it, or --window_pattern=LS",
    ),
    ("base_train --eval_half=3", "invalid choice '3'", "--eval-half"),
    ("base_train --depth=two", "two", "--help"),
    ("chat_cli -k 0 -p hi", "top_k must be at least 1, got 0", "at least 1"),
    ("chat_web -t -1", "temperature must be at least 0, got -1.0", "at least 0"),
    ("chat_web -t 2.5", "temperature must be at most 2, got 2.5", "at most 2"),
    ("chat_web -p 99999", "port must", "65536"),
    ("chat_web --top_p 3", "top_p must be in (0, 1], got 3.0", "(0, 1]"),
    ("base_train --target_flops=0", "target_flops must be positive, got 0", "positive"),
    ("base_train --total_batch_size=0", "total_batch_size must be at least 1, got 0", "at least 1"),
    ("base_train --seed=-7", "seed must be at least 0, got -7", "at least 0"),
    ("golf.base_train --max_seq_len=0", "max_seq_len must be at least 1, got 0", "at least 1"),
    (
        "golf.base_train --arch=classic --window_pattern=LS",
        "--arch=classic has the pattern L",
        "remove it, or --window_pattern=LS",
    ),
    ("golf.base_train --ema_decay=2", "ema_decay must be in [0, 1), got 2.0", "[0, 1)"),
    ("base_train --tokenizer_tag=none", "no tokenizer 'none'", "--tokenizer_tag=none"),
    ("base_loss --model_tag=none", "no checkpoint in", "base_train --depth=4 --model_tag=none"),
    ("base_eval --model_tag=none", "no checkpoint in", "base_train --depth=4 --model_tag=none"),
    ("base_eval --max_per_task=0", "max_per_task must be at least 1, got 0", "at least 1"),
    ("base_eval --suite=dclm --eval_bundle=/none --only_fetch", "/none", "--eval_bundle=<folder"),
    ("mid_train --model_tag=none", "no checkpoint in", "base_train --depth=4 --model_tag=none"),
    ("mid_train --model_tag=none", "parent has another tag", "--source=base:<tag>"),
    ("mid_train --max_seq_len=0", "max_seq_len must be positive, got 0", "positive"),
    ("mid_train --seed=-1", "seed must be at least 0, got -1", "at least 0"),
    ("chat_sft --model_tag=none", "no checkpoint in", "scripts.mid_train --model_tag=none"),
    ("chat_rl --model_tag=none", "no checkpoint in", "scripts.chat_sft --model_tag=none"),
    ("chat_rl --num_iterations=0", "num_iterations must be positive, got 0", "positive"),
    ("chat_rl --init_lr_frac=-0.1", "init_lr_frac must be positive, got -0.1", "positive"),
    ("chat_dpo --num_epochs=0", "num_epochs must be positive, got 0", "positive"),
    ("chat_rl --model_tag=../x", "--model_tag=../x", "use letters"),
    ("chat_eval --source=sft --model_tag=none", "no checkpoint in", "scripts.chat_sft"),
    ("chat_cli --source=rl -p hi", "no checkpoint in", "scripts.chat_rl"),
    ("chat_eval --max_problems=0", "max_problems must be at least 1, got 0", "at least 1"),
    ("lab.eval_variance --batch_size=0", "batch_size must be at least 1, got 0", "at least 1"),
    ("export --source=mid", "no checkpoint in", "scripts.mid_train"),
    ("lab.merge --models=nothing|else", "'nothing'", "stage[:tag[:step]]"),
    ("lab.merge --eval_tokens=0", "eval_tokens must be at least 1, got 0", "at least 1"),
    ("recursion.evaluate --eval_tokens=0", "eval_tokens must be at least 1, got 0", "at least 1"),
    ("report --hourly_rate=-5", "hourly_rate must be at least 0, got -5.0", "at least 0"),
    ("report --hourly_rate=nan", "hourly_rate must be at least 0, got nan", "at least 0"),
    ("base_train --weight_decay=nan", "weight_decay must be finite", "at least 0"),
    ("report --report_dir={none}", "no records in", "bash speedrun.sh"),
]


@pytest.mark.parametrize("line, value, fix", BAD_FLAGS, ids=[line for line, _, _ in BAD_FLAGS])
def test_bad_flag_is_rejected_without_a_traceback(command, tmp_path, line, value, fix):
    file, types = tmp_path / "words.json", tmp_path / "types.json"
    file.write_text("just words")
    types.write_text(json.dumps({"mixture": "a", "buckets": {"a": {"dataset": 5}}}))
    paths = {"{file}": file, "{types}": types, "{none}": tmp_path / "none"}
    for name, path in paths.items():
        line, value = line.replace(name, str(path)), value.replace(name, str(path))
    text = command.rejects(*line.split())
    assert value in text and fix in text


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"role": "user"}', "line 1: expected a list of messages"),
        ("words", "line 1: not JSON"),
        ("", "contains no conversations"),
    ],
)
def test_error_names_bad_conversation_file_and_problem(trained, command, tmp_path, line, problem):
    own = tmp_path / "own.jsonl"
    own.write_text(line)
    text = command.rejects("mid_train", f"--mixture=jsonl:{own}", "--model_tag=one")
    assert str(own) in text and problem in text
    text = command.rejects("mid_train", f"--mixture=jsonl:{own}x", "--model_tag=one")
    assert f"{own}x: No such file or directory" in text
    assert "check the path" in command.rejects("lab.filter", f"--rows={own}x", "--out=x")


def test_mixture_of_less_than_half_a_conversation_is_rejected(trained, command, tmp_path):
    own = tmp_path / "own.jsonl"
    answers = [{"role": "assistant", "content": 500 * word} for word in ("b ", "c ")]
    talks = [[{"role": "user", "content": "a"}, answer] for answer in answers]
    own.write_text("".join(f"{json.dumps(talk)}\n" for talk in talks))
    text = command.rejects("mid_train", f"--mixture=jsonl:{own}=10t", "--model_tag=one")
    assert f"--mixture=jsonl:{own}=10t has less than one conversation; use more of it" in text


@pytest.mark.parametrize("content", ["", "{}", "[]", "words", '{"format": 1}'])
def test_damaged_tokenizer_gives_error_without_traceback(base, command, content):
    path = base / "tokenizer" / "main" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    for script in ("data", "tok_eval", "base_train"):
        text = command.rejects(script, *TEXT)
        assert str(path) in text and "python -m scripts.tok_train" in text


def test_full_disk_is_reported_without_a_traceback(command, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    text = command.rejects("tok_train", *TEXT, "--vocab_size=300", "--max_chars=5000")
    assert "No space left on device" in text and "NANOCHAT_BASE_DIR to a larger disk" in text


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none"])
def test_error_names_unusable_base_directory(command, monkeypatch, tmp_path, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / folder))
    text = command.rejects("tok_train", *TEXT)
    assert str(tmp_path / folder) in text
    fixes = ("use another path", "NANOCHAT_BASE_DIR", "check the path")
    assert any(fix in text for fix in fixes)


def test_interrupt_exits_without_a_traceback(command, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "train", interrupted)
    done = command("tok_train", *TEXT)
    assert done.status == 130 and "interrupted" in done.text and "Traceback" not in done.text


@pytest.mark.parametrize(
    "fault, kind",
    [
        (lambda *_, **__: np.zeros(3).reshape(2, 2), ValueError),
        (lambda *_, **__: int("x"), ValueError),
        (lambda *_, **__: {}["x"], KeyError),
    ],
)
def test_internal_error_keeps_its_traceback(command, monkeypatch, fault, kind):
    monkeypatch.setattr(Tokenizer, "train", fault)
    with pytest.raises(kind):
        command("tok_train", *TEXT)


def test_pretraining_prints_its_checkpoint_and_the_next_command(base, command):
    text = command.works("tok_train", *TEXT, "--vocab_size=2000", "--tokenizer_tag=own")
    assert "next: python -m scripts.base_train --depth=4 --tokenizer_tag=own --max_seq_len=" in text
    evaluation = "--eval_tokens=64 --sample_every=0 --core_metric_every=0".split()
    text = command.works("base_train", *RUN, *evaluation, "--tokenizer_tag=own")
    folder = base / "base_checkpoints/d1/step_000001"
    assert text.rstrip().endswith(
        f"checkpoint: {folder}\nnext: python -m scripts.mid_train --model_tag=d1"
    )
    # one time estimate, and a count of embedding parameters if they dominate
    assert text.count(" of training") == 1 and "M in embeddings and head)" in text
    values = read_json(base / "report/base-model-training.json")["values"]
    assert values["Number of training tokens"] == 64
    per_token = float(values["Number of FLOPs per token"])
    assert float(values["Total training flops"]) == pytest.approx(64 * per_token, rel=1e-5)
    params = values["Number of parameters"]
    assert values["Tokens : Params ratio"] == pytest.approx(64 / params, rel=0.01)


@pytest.mark.slow
def test_every_stage_prints_the_next_command(base, command):
    command.works("tok_train", *TEXT, "--vocab_size=512")
    command.works("base_train", *RUN, *"--eval_tokens=64 --sample_every=0".split())
    talk = "--mixture=world_chat=20 --num_iterations=1 --eval_tokens=64 --no-compile".split()
    text = command.works("mid_train", *talk)
    assert text.rstrip().endswith("next: python -m scripts.chat_sft --model_tag=d1")
    text = command.works("chat_sft", *talk)
    assert (
        "next: python -m scripts.chat_rl --model_tag=d1\nchat: python -m scripts.chat_cli" in text
    )
