"""DPO: loss and gradients as defined, pairs from a file and from a model's own answers."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nanochat.common import read_json
from nanochat.tokenizer import Tokenizer
from scripts.chat_dpo import dpo_loss, encode_conversation, pair_batches
from tasks.base import assistant, text, tool_call, user
from tests.conftest import byte_model
from tests.training_runs import curve, equal

CPU = torch.device("cpu")
TOKENIZER = Tokenizer.train(["what is it"], 265)


def test_only_the_last_answer_is_trained_on():
    answer = assistant([text("So "), *tool_call("2*3", "6"), text("6")])
    signed = encode_conversation(TOKENIZER, [user("?"), assistant("first"), user("2*3?"), answer])
    learned = TOKENIZER.decode([i for i in signed if i >= 0])
    assert learned == "So <|python_start|>2*3<|python_end|>6<|assistant_end|>"
    assert signed[0] == ~TOKENIZER.bos_id


def log_ratio(model, reference, signed):
    """Log-probability of an answer under the model minus that under the reference."""
    signed = torch.tensor(signed)
    ids = torch.where(signed < 0, ~signed, signed)
    ours, theirs = (each(ids[None, :-1])[0].log_softmax(-1) for each in (model, reference))
    learned = signed[1:] >= 0
    return (ours - theirs)[learned, ids[1:][learned]].sum()


def test_loss_and_gradients_match_autograd_on_full_logits():
    beta = 2.0
    pairs = [
        [encode_conversation(TOKENIZER, [user("?" * n), assistant(a)]) for a in ("yes", "no no")]
        for n in range(1, 6)
    ]
    model, reference = byte_model(0), byte_model(1)
    margins = [log_ratio(model, reference, a) - log_ratio(model, reference, b) for a, b in pairs]
    want = -torch.nn.functional.logsigmoid(beta * torch.stack(margins)).sum()
    wanted = torch.autograd.grad(want, list(model.parameters()), allow_unused=True)
    for device_rows in (1, 5, 16):
        model.zero_grad()
        total = 0.0
        for batch in pair_batches(pairs, device_rows, TOKENIZER.bos_id, CPU):
            loss = dpo_loss(model, reference, beta, *batch)
            (loss / 7).backward()  # the loop divides by a constant
            total += loss.item()
        assert total == pytest.approx(want.item(), rel=1e-5)
        for p, w in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(7 * p.grad, w, rtol=1e-3, atol=1e-5)


# ---- The command ---------------------------------------------------------------------------------

DPO = "chat_dpo --dtype=float32 --model_tag=tuned".split()


@pytest.fixture
def pair_file(trained):
    path = trained / "pairs.jsonl"
    answers = {"chosen": "A number.", "rejected": "No idea."}
    rows = [{"prompt": f"What is {i}?", **answers} for i in range(100)]
    rows.append({"prompt": "What?", "chosen": "A number. " * 40, "rejected": "No."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_on_pairs_prefers_the_chosen_answers(pair_file, base, command):
    words = [*DPO, "--source=base:one", f"--pairs={pair_file}", "--num_epochs=2"]
    words.append("--init_lr_frac=0.3")
    out = command.works(*words)
    assert "1 of more than 32 tokens" in out
    assert "chat_cli --source=dpo --model_tag=tuned" in out
    values = read_json(base / "report" / "chat-dpo.json")["values"]
    loss, accuracy = (values[f"Held-out {name} after"] for name in ("loss", "accuracy"))
    assert accuracy["value"] > 0.9 and loss["value"] < math.log(2)
    assert loss["n"] + values["Training pairs"] == 100
    losses = curve(base / "chatdpo_checkpoints/tuned", "loss")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)  # the mean per pair; no margin yet
    assert "finished already" in command.works(*words, "--skip_if_done")
    again = command.rejects(*DPO, "--source=dpo:tuned", f"--pairs={pair_file}")
    assert "would replace its parent dpo:tuned; use --source=dpo:tuned and another" in again
    pair_file.write_text(pair_file.read_text().replace("No idea", "None"))
    assert "finished already" not in command.works(*words, "--skip_if_done")


def test_right_answers_of_the_model_are_paired_with_wrong_ones(tuned, command):
    words = [*DPO, "--source=sft:s0", "--task=world_choice=40", "--eval_examples=20", "--keep=9"]
    words += "--num_samples=4 --max_new_tokens=3 --examples_per_step=4".split()
    words += "--num_iterations=4 --save_every=2".split()
    command.works(*words)
    folder = tuned / "chatdpo_checkpoints"
    files = sorted(folder.glob("pairs_*.json"))
    tokenizer = Tokenizer.load()
    pairs = [pair for path in files for pair in read_json(path)]
    for chosen, rejected in pairs:
        assert [i for i in chosen if i < 0] == [i for i in rejected if i < 0]  # one prompt
        assert tokenizer.decode([i for i in chosen if i >= 0])[0] in "ABCD"
    assert len(files) == 2 and len(pairs) > 10
    before, stamps = folder / "tuned/step_000004", [path.stat().st_mtime_ns for path in files]
    weights = load_file(before / "model.safetensors")
    shutil.rmtree(before)
    command.works(*words, "--resume=auto")
    assert equal(load_file(before / "model.safetensors"), weights)
    assert [path.stat().st_mtime_ns for path in files] == stamps  # the same pairs


def test_sources_without_pairs_are_rejected(pair_file, command):
    run = [*DPO, "--source=base:one"]
    few = "--task=world_problems=4 --eval_examples=4 --num_samples=2 --max_new_tokens=4".split()
    assert "raise --num_samples" in command.rejects(*run, *few)
    assert "use one of them" in command.rejects(*run, f"--pairs={pair_file}", "--task=gsm8k")
