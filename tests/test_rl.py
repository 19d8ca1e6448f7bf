"""Reinforcement learning: gradients match their definition, and the reward increases."""

import math
from dataclasses import replace

import pytest
import torch

from nanochat.engine import Completion, Engine, Sampling
from nanochat.gpt import copy_weights, inference_copy
from nanochat.loss import IGNORE
from nanochat.rl import Group, RolloutConfig, Rollouts, drawn_index, kl_to_reference, micro_batches
from nanochat.tokenizer import Tokenizer
from scripts.chat_rl import compare_results
from tests.conftest import byte_model

TOKENIZER = Tokenizer.train(["what is it"], 265)
CFG = RolloutConfig(examples_per_step=4, num_samples=6, max_new_tokens=6, top_k=None)


def batches_of(groups, rows):
    return list(micro_batches(groups, rows, TOKENIZER.bos_id, torch.device("cpu")))


def answer(prompt, ids, sampled=None, end=None):
    return Completion(prompt, Sampling(), 0, ids, sampled or [True] * len(ids), "stop", end)


GROUPS = [
    Group([answer([1, 2], [3, 4, 5], end=264), answer([1, 2], [9])], [1.0, 0.0]),
    Group([answer([7], [8, 8, 8, 8]), answer([7], [2, 3], [False, True])], [0.0, 1.0]),
]


def test_only_sampled_tokens_are_trained():
    mixed = answer([5, 6, 7], [10, 11, 12], [True, False, True], end=264)
    groups = [Group([mixed, answer([5, 6, 7], [20, 21])], [1.0, 0.0])]
    (both,) = batches_of(groups, 2)
    assert both.tokens.tolist() == [[5, 6, 7, 20, 21, 256], [5, 6, 7, 10, 11, 12]]
    targets = [[IGNORE, IGNORE, 20, 21, IGNORE, IGNORE], [IGNORE, IGNORE, 10, IGNORE, 12, 264]]
    assert both.targets.tolist() == targets
    assert (both.counts, both.tensors[0][:, 0].tolist()) == ([2, 3], [-0.5, 0.5])


def test_kl_to_reference_matches_its_definition(dist):
    model, reference = byte_model(0), byte_model(1)
    terms = []
    for each in batches_of(GROUPS, 1):
        ours, theirs = (m(each.tokens)[0].log_softmax(-1).tolist() for m in (model, reference))
        targets = each.targets[0].tolist()
        found = [theirs[i][t] - ours[i][t] for i, t in enumerate(targets) if t != IGNORE]
        terms += [math.exp(x) - 1 - x for x in found]
    for rows in (1, 4):
        found = kl_to_reference(model, reference, batches_of(GROUPS, rows), dist)
        assert found == pytest.approx(sum(terms) / len(terms), rel=1e-3)
    assert kl_to_reference(model, reference, [], dist) == 0.0


# ---- Rollouts ------------------------------------------------------------------------------------


class LowTokens:
    """Rewards answers whose first character is below 128 (half of a new model's answers)."""

    name = split = "low"

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]

    def locate(self, i):
        return self, i

    def cluster(self, i):
        return str(i)

    def score(self, i, answer):
        return float(bool(answer) and ord(answer[0]) < 128)


def loader_of(dist, questions=range(10), model=None, **changed):
    model = model or byte_model()
    engine = Engine(inference_copy(model), TOKENIZER, slots=16)
    return Rollouts(LowTokens(), questions, replace(CFG, **changed), 3, dist, engine)


def test_reward_increases(dist):
    model, rewards = byte_model(), []
    loader = loader_of(dist, model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        copy_weights(loader.engine.model, model)
        groups, _ = loader.answer(range(4 * step, 4 * step + 4))
        rewards.append(loader.metrics(groups)["reward"])
        for each in batches_of(groups, 8):
            model.loss(each.tokens, each.targets, tensors=each.tensors).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(rewards[:4]) / 4 < 0.85
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


def test_each_epoch_uses_every_selected_question_in_new_order(dist):
    first, second = ([drawn_index(draw, 8, 0) for draw in range(n, n + 8)] for n in (0, 8))
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    with pytest.raises(ValueError, match="no question"):
        loader_of(dist, questions=[])
    with pytest.raises(ValueError, match="5 is not a multiple of the world size 2"):
        loader_of(replace(dist, world_size=2), examples_per_step=5)


def test_length_penalty_lowers_reward_of_longer_right_answers(dist):
    answers = [answer([1], ids) for ids in ([65], [200, 65, 65, 65], [65, 65, 65])]
    brief = loader_of(dist, length_penalty=0.6)
    assert [brief.reward(1, a) for a in answers] == pytest.approx([0.9, 0.0, 0.7])


def test_questions_without_signal_are_resampled(dist):
    loader = loader_of(dist, num_samples=3, examples_per_step=10)
    groups, learned = loader.answer(range(10), 2)
    silent, still = ([n for n in range(10) if not g[n].has_signal] for g in (groups, learned))
    assert set(still) < set(silent) < set(range(10))
    assert all(n in silent or learned[n] is groups[n] for n in range(10))

    def answer_alone(draw, attempt):
        asked = loader.ask(draw, attempt)
        while loader.engine.busy:
            loader.engine.step()
        return [answer.ids for answer in asked.answers]

    for n in {*silent} - {*still}:
        found = [answer.ids for answer in learned[n].answers]
        assert found in [answer_alone(n, attempt) for attempt in (1, 2)]


def test_results_before_and_after_are_compared_by_question():
    before, after = [[0.0, 0.0, 0.0, 0.0]] * 10, [[1.0, 0.0, 1.0, 0.0]] * 9 + [[0.0] * 4]
    values, items = compare_results(before, after, LowTokens())
    found = {name: value["value"] for name, value in values.items() if "verdict" not in name}
    assert found == pytest.approx(
        {
            "pass@1 before": 0.0,
            "pass@1 after": 0.45,
            "pass@1 change": 0.45,
            "pass@2 after": 0.9 * 5 / 6,
            "pass@4 after": 0.9,
        }
    )
    assert values["pass@1 verdict"] == "better" and values["pass@1 after"]["n"] == 10
    assert items["pass@1 after"]["scores"] == " ".join(["0.5"] * 9 + ["0"])
