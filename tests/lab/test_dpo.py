"""DPO: loss and gradients match their definition, pairs are encoded right, training works."""

import json
import math

import numpy as np
import pytest
import torch

from nanochat.checkpoint import Progress, build_model, find_checkpoint
from nanochat.common import read_json
from nanochat.engine import Completion, Engine, Sampling
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.lab.dpo import (
    DPOObjective,
    Pair,
    PairEvaluator,
    PairLoader,
    collate,
    encode_completion,
    encode_conversation,
    encode_pairs,
    keep_pairs,
    sample_pairs,
)
from nanochat.logger import read_metrics
from nanochat.loss import IGNORE
from nanochat.optim import MuonAdamW, OptimConfig, ScheduleConfig
from nanochat.rl import RolloutConfig
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import TrainConfig, TrainingRun, run_loop
from scripts.chat_dpo import ChatDPO
from tasks.base import assistant, text, tool_call, user
from tasks.preferences import Preference
from tests.conftest import lively

CPU = torch.device("cpu")
TOKENIZER = Tokenizer.train(["what is it"], 265)
FILLER = TOKENIZER.bos_id
CFG = RolloutConfig(examples_per_step=4, num_samples=4, max_new_tokens=6, top_k=None)


def model_of(seed=0):
    return lively(build_model(GPTConfig(265, 2, 32, 4, 2, 8, 48), CPU, torch.float32, seed))


def preference(i, good="yes", bad="no no"):
    asked = user("?" * i + "what")
    return Preference([asked, assistant(good)], [asked, assistant(bad)])


def pairs_of(count, **answers):
    every, num_long = encode_pairs((preference(i, **answers) for i in range(count)), TOKENIZER, 48)
    assert not num_long
    return every


def learned(signed):
    """Decoded tokens with loss."""
    return TOKENIZER.decode([i for i in signed.tolist() if i >= 0])


# ---- Pairs as tokens -----------------------------------------------------------------------------


def test_only_the_last_answer_is_trained_on_with_its_end():
    answer = assistant([text("So "), *tool_call("2*3", "6"), text("6")])
    signed = encode_conversation(TOKENIZER, [user("?"), assistant("first"), user("2*3?"), answer])
    assert learned(signed) == "So <|python_start|>2*3<|python_end|>6<|assistant_end|>"
    assert signed[0] == ~TOKENIZER.bos_id


def test_only_sampled_tokens_of_an_answer_are_trained_on():
    ids, sampled = [10, 11, 12], [True, False, True]
    ended = Completion([5, 6], Sampling(), 0, ids, sampled, "stop", 264)
    assert encode_completion(ended).tolist() == [~5, ~6, 10, ~11, 12, 264]
    cut = Completion([5, 6], Sampling(), 0, ids, sampled, "length")
    assert encode_completion(cut).tolist() == [~5, ~6, 10, ~11, 12]


def test_pairs_longer_than_the_context_are_counted_and_dropped():
    preferences = [preference(1), preference(1, bad="n" * 60), preference(1, good="y" * 60)]
    kept, num_long = encode_pairs(preferences, TOKENIZER, 48)
    assert (len(kept), num_long) == (1, 2)
    longest = kept[0].length - 1  # inputs exclude the last token
    assert encode_pairs(preferences[:1], TOKENIZER, longest)[1] == 0
    assert encode_pairs(preferences[:1], TOKENIZER, longest - 1)[1] == 1


class LowTokens:
    """Answers are right if their first character is below 128."""

    name = split = "low"

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return [user(f"q{i}"), assistant("a")]

    def locate(self, i):
        return self, i

    def score(self, conversation, answer):
        return float(bool(answer) and ord(answer[0]) < 128)


def first_answer(signed):
    return TOKENIZER.decode([i for i in signed.tolist() if i >= 0][:1])


def test_right_answers_are_paired_with_wrong_ones(machine, monkeypatch):
    engine, task = Engine(inference_copy(model_of()), TOKENIZER, slots=16), LowTokens()
    pairs = sample_pairs(engine, task, CFG, 0, machine)
    assert 3 < len(pairs) < 12
    for pair in pairs:
        assert task.score([], first_answer(pair.chosen)) == 1
        assert task.score([], first_answer(pair.rejected)) == 0
        prompts = [[i for i in each.tolist() if i < 0] for each in pair]
        assert prompts[0] == prompts[1]
    parts = []
    monkeypatch.setattr(type(machine), "gather", lambda self, value: [parts.append(value) or {}])
    for rank in (0, 1):
        sample_pairs(engine, task, CFG, 0, type(machine)(rank, rank, 2, CPU, machine.dtype))
    merged = parts[0] | parts[1]
    assert not parts[0].keys() & parts[1].keys()
    for i, pair in zip(sorted(merged), pairs, strict=True):
        assert all((a == b).all() for a, b in zip(merged[i], pair, strict=True))


def test_sampled_pairs_are_kept_for_a_run_that_resumes(machine, tmp_path):
    path, calls = tmp_path / "pairs_1.json", []

    def sample():
        calls.append(1)
        return [Pair(np.array([~1, 2, 3], np.int32), np.array([~1, len(calls)], np.int32))]

    kept = [keep_pairs(path, sample, machine) for _ in range(2)]
    assert [pairs[0].rejected.tolist() for pairs in kept] == [[~1, 1], [~1, 1]] and calls == [1]
    assert all(ids.dtype == np.int32 for pairs in kept for ids in pairs[0])
    assert kept[1][0].chosen.tolist() == [~1, 2, 3]


# ---- Loss and gradients --------------------------------------------------------------------------


def plain_loss(model, reference, pairs, beta):
    """The definition, on full logits, one answer at a time."""
    total = torch.zeros(())
    for pair in pairs:
        ratios = []
        for signed in map(torch.tensor, pair):
            ids = torch.where(signed < 0, ~signed, signed).long()
            with torch.no_grad():
                theirs = reference(ids[None, :-1])[0].log_softmax(-1)
            logp = model(ids[None, :-1])[0].log_softmax(-1)
            steps = [t for t in range(len(ids) - 1) if signed[t + 1] >= 0]
            ratios.append(sum(logp[t, ids[t + 1]] - theirs[t, ids[t + 1]] for t in steps))
        total = total - torch.nn.functional.logsigmoid(beta * (ratios[0] - ratios[1]))
    return total


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_loss_and_gradients_match_autograd_on_full_logits(beta):
    model, reference = model_of(0), model_of(1)
    pairs = pairs_of(5)
    want = plain_loss(model, reference, pairs, beta)
    wanted = torch.autograd.grad(want, list(model.parameters()), allow_unused=True)
    objective = DPOObjective(model, reference, beta)
    for device_rows in (1, 5, 16):
        model.zero_grad()
        batches = collate(pairs, device_rows, FILLER, CPU)
        losses = [objective.loss(each.tokens, each.targets) for each in batches]
        for loss in losses:
            (loss / 7).backward()  # the loop divides by a constant
        assert sum(losses).item() == pytest.approx(want.item(), rel=1e-5)
        for p, w in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad * 7, w, rtol=1e-3, atol=1e-5)


def test_untrained_policy_has_a_loss_of_exactly_log_2_per_pair():
    objective, count = DPOObjective(model_of(), model_of(), 0.1), 3
    (batch,) = collate(pairs_of(count), 2 * count, FILLER, CPU)
    loss = objective.loss(batch.tokens, batch.targets)
    assert loss.item() == torch.full((count,), math.log(2)).sum().item()


# ---- Batches -------------------------------------------------------------------------------------


def test_rows_alternate_chosen_and_rejected():
    pairs, _ = encode_pairs(map(preference, (7, 1, 4)), TOKENIZER, 48)
    first, second = collate(pairs, 5, FILLER, CPU)  # two pairs, one pair
    assert [len(first.tokens), first.num_targets] == [4, 2]
    assert [len(second.tokens), second.num_targets] == [2, 1]
    answers = []
    for batch in (first, second):
        for ids, targets in zip(batch.tokens, batch.targets, strict=True):
            own = targets != IGNORE
            answers.append(TOKENIZER.decode(targets[own].tolist()))
            assert (ids[1:][own[:-1]] == targets[:-1][own[:-1]]).all()  # shifted by one
    assert answers == ["yes<|assistant_end|>", "no no<|assistant_end|>"] * 3
    lengths = [pair.length - 1 for pair in pairs]
    assert first.tokens.shape[1] == sorted(lengths)[1] and second.tokens.shape[1] == max(lengths)
    assert all(len(each.tokens) == 2 for each in collate(pairs, 1, FILLER, CPU))


def loader_of(machine, pairs, seed=0, **changed):
    cfg = RolloutConfig(**{"examples_per_step": 4, **changed})
    return PairLoader(pairs, cfg, seed, machine, FILLER, 48)


def prompts_of(batches):
    """Question number of each pair, from the length of its prompt."""
    starts = [(batch.targets[0::2] != IGNORE).int().argmax(1) for batch in batches]
    return [int(n) for each in starts for n in each]


def test_each_epoch_has_every_pair_once_in_new_order(machine):
    loader = loader_of(machine, pairs_of(8))
    steps = [prompts_of(loader.micro_batches(n, 2, lambda: False)) for n in range(4)]
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3])
    assert len(set(steps[0] + steps[1])) == 8 and sorted(steps[0]) != sorted(steps[2])
    assert all(step == sorted(step) for step in steps)  # by length
    again = loader_of(machine, pairs_of(8)).micro_batches(2, 8, lambda: False)
    assert prompts_of(again) == steps[2]
    other = loader_of(machine, pairs_of(8), seed=1)
    assert [prompts_of(other.micro_batches(n, 2, lambda: False)) for n in range(4)] != steps


def test_pairs_of_a_step_are_split_among_ranks_or_rejected(machine, monkeypatch):
    monkeypatch.setattr(type(machine), "any", lambda self, value: value)
    pairs, ranks = pairs_of(8), [type(machine)(r, r, 2, CPU, machine.dtype) for r in (0, 1)]
    parts = [
        prompts_of(loader_of(rank, pairs).micro_batches(1, 8, lambda: False)) for rank in ranks
    ]
    whole = prompts_of(loader_of(machine, pairs).micro_batches(1, 8, lambda: False))
    assert len(parts[0]) == len(parts[1]) == 2 and sorted(parts[0] + parts[1]) == whole
    with pytest.raises(ValueError, match="5 is not a multiple of the world size 2"):
        loader_of(ranks[0], pairs, examples_per_step=5)


def test_error_names_invalid_beta():
    with pytest.raises(ValueError, match="beta must be positive, got 0.0"):
        ChatDPO(beta=0.0)


# ---- Training and evaluation ---------------------------------------------------------------------


def test_training_prefers_chosen_answers_to_unseen_questions(machine):
    model, pairs = model_of(), pairs_of(20)
    objective = DPOObjective(model, model_of(), 0.1)
    loader = loader_of(machine, pairs[4:])
    evaluator = PairEvaluator(objective, loader, pairs[:4], device_rows=4)
    before = evaluator.before
    assert [before["accuracy"].value, before["margin"].value, before["margin"].n] == [0.5, 0.0, 4]
    assert before["loss"].value == pytest.approx(math.log(2), rel=1e-6)
    entries = []
    table = make_rules(OptimConfig(weight_decay=0.0), 32, 0.3)
    run = TrainingRun(
        kind="dpo",
        model=model,
        tokenizer=TOKENIZER,
        objective=objective,
        optimizer=MuonAdamW(model, table, machine),
        loader=loader,
        machine=machine,
        cfg=TrainConfig(eval_every=5),
        tag="tiny",
        num_steps=12,
        schedule=ScheduleConfig(0, warmdown_ratio=1.0, final_lr_frac=0.0),
        device_rows=3,
        callbacks=[evaluator],
        log=lambda step, values: entries.append(values),
    )
    assert run_loop(run, Progress())
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)  # the mean per pair
    assert losses[-1] < 0.5
    assert sum("held_out_loss" in entry for entry in entries) == 4  # before, 5, 10, after
    values = evaluator.values()
    assert values["Held-out loss after"]["value"] < 0.5 < values["Held-out loss before"]["value"]
    assert values["Held-out accuracy after"]["value"] == 1.0
    assert values["Held-out margin after"]["se"] > 0


@pytest.fixture
def pair_file(trained):
    """Pairs for questions and a small base model."""
    lines = [
        {"prompt": f"What is {i}?", "chosen": "A number.", "rejected": "No idea."}
        for i in range(100)
    ]
    lines.append({"prompt": "What?", "chosen": "A number. " * 40, "rejected": "No."})
    path = trained / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


RUN = "chat_dpo --source=base:one --dtype=float32 --canaries=off".split()


def test_script_trains_on_a_file_and_the_stage_is_known(pair_file, base, command):
    words = f"--pairs={pair_file} --init_lr_frac=0.3 --num_epochs=2 --model_tag=tuned".split()
    out = command.works(*RUN, *words)
    assert "1 of more than 32 tokens, 0 invalid" in out
    assert "chat_cli --source=dpo --model_tag=tuned" in out and "next:" not in out
    record = read_json(base / "report" / "chat-dpo.json")
    values, trained = record["values"], record["values"]["Training pairs"]
    assert values["Number of iterations"] == round(2 * trained / 16)
    assert values["Held-out accuracy before"]["value"] == 0.5
    assert values["Held-out accuracy after"]["value"] > 0.9
    assert values["Held-out loss after"]["value"] < values["Held-out loss before"]["value"]
    assert values["Held-out loss after"]["n"] + trained == 100
    saved = find_checkpoint("dpo", "tuned")
    assert saved.state["stage"] == "dpo" and not saved.has_optimizer
    assert list(record["provenance"]["inputs"])[0] == "base"
    first = next(e for e in read_metrics(saved.folder.parent / "metrics.jsonl") if "loss" in e)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert "finished already" in command.works(*RUN, *words, "--skip_if_done")
    again = command.rejects(*RUN, "--source=dpo:tuned", f"--pairs={pair_file}")
    assert "would replace its parent dpo:tuned; use --source=dpo:tuned and another" in again
    pair_file.write_text(pair_file.read_text().replace("No idea", "None"))
    assert "finished already" not in command.works(*RUN, *words, "--skip_if_done")
    answers = command.works("chat_eval", *"-i dpo -a World-Choice -x 8 --max_new_tokens=4".split())
    assert "World-Choice" in answers


def test_script_rejects_two_sources_and_sources_without_pairs(pair_file, base, command):
    assert "use one of them" in command.rejects(*RUN, f"--pairs={pair_file}", "--task=world_facts")
    task = "--task=world_problems=4 --eval_examples=4 --num_samples=2 --max_new_tokens=4".split()
    assert "raise --num_samples" in command.rejects(*RUN, *task)
    long = [{"prompt": f"{i} {'x' * 99}", "chosen": "a", "rejected": "b"} for i in range(4)]
    pair_file.write_text("".join(json.dumps(line) + "\n" for line in long))
    text = command.rejects(*RUN, f"--pairs={pair_file}")
    assert "no pairs in Preferences (train)" in text and "use shorter pairs" in text
