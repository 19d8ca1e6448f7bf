"""Canaries: broken runs are found from their checkpoints and logs, healthy runs pass."""

import numpy as np
import pytest

from nanochat.chat_format import render
from nanochat.common import read_json
from nanochat.lab.canaries import BROKEN, CANARIES, CanaryMonitor, mask_errors, open_suite, rises
from nanochat.lab.filters import material
from nanochat.rows import signed_ids
from nanochat.tokenizer import Tokenizer
from tasks.base import assistant, text, tool_call, user
from tasks.held_out import declare
from tasks.registry import TASKS

TOKENIZER = Tokenizer.train(["what is it"], 265)


USUAL = {
    "text": 0.3, "no_end": 0.0, "unparsable": 0.1, "repeated": 0.0,
    "one_letter": 0.3, "length": 1.1, "accuracy": 0.5,
}  # fmt: skip


def check_twice(parent, changes):
    """Levels after each of two checkpoints in a row with the same metrics."""
    monitor, levels = CanaryMonitor(), []
    for step in (9, 10):
        monitor.record(step, rises(parent, {**parent, **changes}))
        levels.append(monitor.level)
    return levels


@pytest.mark.parametrize(
    "name, value",
    [
        ("text", 0.9),
        ("no_end", 0.7),
        ("unparsable", 0.8),
        ("repeated", 0.6),
        ("one_letter", 1.0),
        ("length", 9.0),
        ("accuracy", 0.2),
    ],
)
def test_seven_broken_runs_are_found_at_the_second_checkpoint(capsys, name, value):
    assert check_twice(USUAL, {name: value}) == ["warn", "broken"]
    canary = CANARIES[name.replace("text", "forgotten")]
    assert f"canary broken at step 10: {canary.meaning}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "parent, changes",
    [
        ({}, {"text": 0.37, "length": 1.3, "no_end": 0.1, "accuracy": 0.45}),
        ({"length": 20.0}, {"length": 200.0, "no_end": 1.0, "repeated": 1.0}),  # cannot answer
        ({"text": 0.95}, {"text": 1.5}),  # untrained: nothing to forget
    ],
)
def test_healthy_runs_are_fine(capsys, parent, changes):
    assert check_twice({**USUAL, **parent}, changes) == ["fine", "fine"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "change, right",
    [
        (lambda own: own, True),
        (lambda own: ~own, False),  # inverted
        (lambda own: np.roll(own, -1), False),  # shifted by one
        (np.ones_like, False),
    ],
)
def test_wrong_loss_mask_shows_in_the_rows(change, right):
    chats = [TASKS["world_facts"]("train")[i] for i in range(64)]
    chats.append([user("2*3?"), assistant([text("So "), *tool_call("2*3", "6"), text("6")])])
    packed = np.full((65, 257), ~TOKENIZER.bos_id)
    for row, chat in zip(packed, chats, strict=True):
        ids, mask = render(TOKENIZER, [*chat, user("?"), assistant("x")], 257)
        row[: len(ids)] = signed_ids(ids, change(np.array(mask) == 1).tolist())
    found = mask_errors(packed, TOKENIZER)
    assert found == 0 if right else found >= CANARIES["loss_mask"].broken


def test_static_suite_asks_unseen_questions_that_are_not_final(base):
    suite = open_suite("embedded")
    assert [len(task) for task in suite] == [110, 40, 25, 25]
    for task in suite:
        [key] = [key for key, kind in TASKS.items() if kind.name == task.name]
        for split in ("train", TASKS[key].rl_split):
            other = TASKS[key](split)
            seen = {material(other, i) for i in range(min(len(other), 2000))}
            assert not seen & {material(task, i) for i in range(len(task))}
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
    worst = {row[0]: row[2] for row in record["tables"][0]["rows"]}
    assert {"forgotten", "accuracy"} < worst.keys() and worst["loss_mask"] == "+0.0000"
    assert record["values"]["Canaries"] != "broken" and record["values"]["Last step"] == 20
    out = command("lab.watch", "--run=sft:tuned", "--parent=sft:tuned", "--dtype=float32").text
    assert "canary broken at step 1: the first training loss is not the parent's" in out
    command.works(*TUNE, "--init_lr_frac=21")
    status, text = command(*WATCH, "--follow")
    assert status == BROKEN and "pretraining is forgotten" in text
