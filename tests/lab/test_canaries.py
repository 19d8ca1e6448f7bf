"""Canaries: broken runs are found from their checkpoints and logs, healthy runs pass."""

import shutil

import numpy as np
import pytest

from nanochat.chat_format import render
from nanochat.common import read_json
from nanochat.lab.canaries import BROKEN, CANARIES, CanaryMonitor, CanarySuite, open_suite
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from tasks.base import Subset
from tasks.held_out import declare
from tasks.registry import TASKS, make_task
from tests.training_runs import python

TOKENIZER = Tokenizer.train(["what is it"], 265)


USUAL = {
    "text_bpb": 1.0, "uniform_bpb": 3.0, "train_chat_loss": 1.0, "no_end": 0.0, "unparsable": 0.1,
    "repeated": 0.0, "one_letter": 0.3, "length": 1.1, "accuracy_drop": 0.0,
}  # fmt: skip


def check_twice(parent=USUAL, smooth_loss=1.0, step=10, **changes):
    """{canary: level} of two checkpoints in a row with the same metrics, without "fine"."""
    monitor = CanaryMonitor(parent, epoch_steps=50.0)
    for n in (step - 1, step):
        monitor.check(n, {**parent, **changes}, {"smooth_loss": smooth_loss})
    return [
        {f.name: f.level for f in monitor.history if f.step == n and f.level != "fine"}
        for n in (step - 1, step)
    ]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"text_bpb": 2.6}, "forgotten"),
        ({"no_end": 0.7}, "no_end"),
        ({"unparsable": 0.8}, "unparsable"),
        ({"repeated": 0.6}, "repeated"),
        ({"one_letter": 1.0}, "one_letter"),
        ({"length": 9.0}, "length"),
        ({"accuracy_drop": 0.3}, "accuracy"),
    ],
)
def test_seven_broken_runs_are_found_at_the_second_checkpoint(capsys, changes, name):
    assert check_twice(**changes) == [{name: "warn"}, {name: "broken"}]
    assert f"canary broken at step 10: {CANARIES[name].meaning}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "parent, changes",
    [
        ({}, {"text_bpb": 1.2, "train_chat_loss": 0.9, "length": 1.3, "no_end": 0.1}),
        ({"length": 20.0}, {"length": 200.0, "no_end": 1.0, "repeated": 1.0}),  # cannot answer
        ({"text_bpb": 2.9}, {"text_bpb": 5.0}),  # untrained: nothing to forget
        ({}, {"step": 60, "smooth_loss": 0.1, "train_chat_loss": 3.0}),  # memorized, second epoch
    ],
)
def test_healthy_runs_are_fine(capsys, parent, changes):
    assert check_twice({**USUAL, **parent}, **changes) == [{}, {}]
    assert capsys.readouterr().out == ""


def test_loss_gap_in_the_first_epoch_warns():
    found = check_twice(smooth_loss=0.1, train_chat_loss=3.0)
    assert found == [{"train_loss": "warn"}] * 2


@pytest.mark.parametrize(
    "count, right",
    [
        (lambda ids, mask: mask, True),
        (lambda ids, mask: ~mask & (ids != TOKENIZER.bos_id), False),  # inverted
        (lambda ids, mask: np.roll(mask, -1), False),  # shifted by one
        (lambda ids, mask: np.zeros_like(mask), False),
        (lambda ids, mask: np.ones_like(mask), False),
    ],
)
def test_wrong_loss_mask_shows_in_the_rows(count, right):
    chats = Subset(make_task("world_facts", "train"), 64)
    rows = np.full((2, 64, 257), [[[TOKENIZER.bos_id]], [[IGNORE]]])
    for i in range(64):
        ids, mask = map(np.array, render(TOKENIZER, chats[i], 257))
        rows[:, i, : len(ids)] = ids, np.where(count(ids, mask == 1), ids, IGNORE)
    suite = CanarySuite(TOKENIZER, [], {}, {"x": chats}, {"x": 1.0})
    found = suite.compare_rows(rows[0, :, :-1], rows[1, :, 1:])
    levels = {name: CANARIES[name].level(value) for name, value in found.items()}
    assert (levels["template"] == "broken") != right
    assert not right or levels == {"loss_mask": "fine", "template": "fine"}


def test_static_suite_asks_unseen_questions_that_are_not_final(base):
    suite = open_suite("embedded")
    assert [len(task) for task in suite] == [110, 40, 25, 25]
    for task in suite:
        [key] = [key for key, kind in TASKS.items() if kind.name == task.name]
        for split in ("train", TASKS[key].rl_split):
            other = make_task(key, split)
            seen = {other.material(i) for i in range(min(len(other), 2000))}
            assert not seen & {task.material(i) for i in range(len(task))}
    declare({"World-Facts": "world"})
    assert "World-Facts" not in [task.name for task in open_suite("embedded")]


# ---- Fine-tuning of a small base model -----------------------------------------------------------

TUNE = (
    "chat_sft --source=base:one --mixture=world_facts=300,world_chat=100 --num_iterations=20 "
    "--total_batch_size=512 --max_seq_len=128 --eval_tokens=1024 --warmdown_ratio=0.65 "
    "--save_every=10 --dtype=float32 --device_type=cpu --model_tag=tuned"
).split()


WATCH = ["lab.watch", "--run=sft:tuned", "--parent=base:one", "--dtype=float32"]


def test_healthy_run_passes_and_30x_learning_rate_does_not(trained, command):
    command.works(*TUNE, "--init_lr_frac=0.7")
    command.works(*WATCH)
    record = read_json(trained / "report" / "canaries-sft.json")
    [table] = record["tables"]
    found = {row[0] for row in table["rows"]}
    assert {"forgotten", "first_loss", "loss_mask", "template", "train_loss"} <= found
    assert record["values"]["Canaries"] != "broken" and record["values"]["Checkpoints"] == 2
    command.works(*TUNE, "--init_lr_frac=21")
    status, text = command(*WATCH, "--follow")
    assert status == BROKEN and "pretraining is forgotten" in text


@pytest.mark.parametrize("plant", ["template", "mask"])
def test_bug_in_the_rows_is_found_at_the_first_step(trained, command, plant):
    python(trained, "-m", "dev.plant", plant, f"scripts.{TUNE[0]}", *TUNE[1:])
    status, text = command(*WATCH)
    assert status == BROKEN and "canary broken at step 1:" in text
    assert read_json(trained / "report" / "canaries-sft.json")["values"]["Canaries"] == "broken"


def test_R35_run_is_watched_after_the_pretraining_text_is_gone(trained, command):
    text = trained / "text"
    text.mkdir()
    (text / "a.jsonl").write_text('{"text": "Tom is here."}\n' * 5000)
    (text / "b.jsonl").write_text('{"text": "Ann is there."}\n' * 500)
    base = "base_train --depth=1 --max_seq_len=32 --total_batch_size=512 --num_iterations=2".split()
    command.works(*base, f"--dataset={text}", "--eval_tokens=512", "--model_tag=own")
    shutil.rmtree(text)
    command.works(*TUNE, "--source=base:own", "--num_iterations=2")
    out = command("lab.watch", "--run=sft:tuned", "--parent=base:own", "--dtype=float32").text
    assert "canaries skip the pretraining text, which cannot be opened" in out
    assert "no checkpoint in" in command.rejects("lab.watch", "--run=rl:no", "--parent=base:own")
