"""Reinforcement learning: gradients match their definition, and the reward increases."""

import math
from dataclasses import replace

import pytest
import torch

from nanochat.checkpoint import build_model
from nanochat.engine import Completion, Engine, Sampling
from nanochat.gpt import GPTConfig, inference_copy
from nanochat.logger import METRICS_FILE, read_metrics
from nanochat.loss import IGNORE
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.rl import Group, RLConfig, Rollouts, kl_to_reference, micro_batches, shuffle_indices
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer
from nanochat.train import Run, TrainConfig
from tasks.base import Mixture
from tests.conftest import lively

TOKENIZER = Tokenizer.train(["what is it"], 265)
CFG = RLConfig(examples_per_step=4, num_samples=6, max_new_tokens=6, top_k=None)


def model_of(seed=0):
    cfg = GPTConfig(265, 2, 32, 4, 2, 8, 48)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, seed))


def batches_of(groups, rows):
    return list(micro_batches(groups, rows, TOKENIZER.bos_id, torch.device("cpu")))


def answer(prompt, ids, sampled=None, end=None, finish="stop"):
    found = Completion(prompt, Sampling(), 0, ids, sampled or [True] * len(ids), finish, end)
    return found


def test_only_sampled_tokens_are_trained():
    prompt = [5, 6, 7]
    mixed = answer(prompt, [10, 11, 12], [True, False, True], end=264)
    cut = answer(prompt, [20, 21], finish="length")
    groups = [Group([mixed, cut], [1.0, 0.0])]
    second, first = batches_of(groups, 1)
    assert first.tokens.tolist() == [[5, 6, 7, 10, 11, 12]]
    assert first.targets.tolist() == [[IGNORE, IGNORE, 10, IGNORE, 12, 264]]
    assert (set(first.weights.flatten().tolist()), sum(first.counts)) == ({0.5}, 3)
    assert second.targets.tolist() == [[IGNORE, IGNORE, 20, 21]]
    assert (set(second.weights.flatten().tolist()), sum(second.counts)) == ({-0.5}, 2)
    (both,) = batches_of(groups, 2)
    assert both.tokens.tolist() == [[5, 6, 7, 20, 21, 256], [5, 6, 7, 10, 11, 12]]


def test_gradient_matches_definition_for_any_micro_batch():
    model = model_of()
    groups = [
        Group([answer([1, 2], [3, 4, 5], end=264), answer([1, 2], [9])], [1.0, 0.0]),
        Group([answer([7], [8, 8, 8, 8]), answer([7], [2, 3], [False, True])], [0.0, 1.0]),
    ]
    alone = batches_of(groups, 1)
    count = sum(sum(each.counts) for each in alone)
    want = torch.zeros(())
    for each in alone:
        logp = model(each.tokens)[0].log_softmax(-1)
        for position, target in enumerate(each.targets[0].tolist()):
            if target != IGNORE:
                want = want - each.weights[0, position] * logp[position, target] / count
    wanted = torch.autograd.grad(want, list(model.parameters()), allow_unused=True)
    for rows in (1, 3, 8):
        model.zero_grad()
        total = 0.0
        for each in batches_of(groups, rows):
            loss = model.loss(each.tokens, each.targets, weights=each.weights) / count
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(want.item(), rel=1e-4)
        for p, w in zip(model.parameters(), wanted, strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, w, rtol=1e-3, atol=1e-6)


def test_kl_to_reference_matches_its_definition(machine):
    model, reference = model_of(0), model_of(1)
    groups = [
        Group([answer([1, 2], [3, 4, 5], end=264), answer([1, 2], [9])], [1.0, 0.0]),
        Group([answer([7], [8, 8, 8, 8]), answer([7], [2, 3], [False, True])], [0.0, 1.0]),
    ]
    terms = []
    for each in batches_of(groups, 1):
        ours, theirs = (m(each.tokens)[0].log_softmax(-1) for m in (model, reference))
        d = [
            float((theirs[i, t] - ours[i, t]).detach())
            for i, t in enumerate(each.targets[0].tolist())
            if t != IGNORE
        ]
        terms += [math.exp(x) - 1 - x for x in d]
    for rows in (1, 4):
        found = kl_to_reference(model, reference, batches_of(groups, rows), machine)
        assert found == pytest.approx(sum(terms) / len(terms), rel=1e-3) and found > 0
    assert kl_to_reference(model, model, batches_of(groups, 2), machine) == 0.0
    assert kl_to_reference(model, reference, [], machine) == 0.0


class LowTokens:
    """Rewards answers whose first character is below 128 (half of a new model's answers)."""

    name = split = "low"

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]

    def locate(self, i):
        return self, i

    def score(self, conversation, answer):
        return float(bool(answer) and ord(answer[0]) < 128)


def train(machine, model, steps, seed=0):
    """Train on the rewards of LowTokens as scripts.chat_rl does; return the logged steps."""
    rollouts = loader_of(machine, seed=seed, model=model)
    rules = make_rules(OptimConfig(weight_decay=0.0), 32, noise=0.0)
    run = Run(
        *("rl", "tiny", TrainConfig(seed=seed), model, MuonAdamW(model, rules, machine)),
        *(TOKENIZER, machine),
        num_steps=steps, batch_tokens=144, kernels=None,
        settings={}, inputs={}, identity={}, state={},
    )  # fmt: skip
    with run:
        for step in run.steps():
            if run.finished:
                break
            groups = rollouts.roll_out(step)
            for each in batches_of(groups, 8):
                loss = model.loss(each.tokens, each.targets, weights=each.weights)
                run.accumulate(loss, sum(each.counts), each.tokens.numel())
            run.update(1 - step / steps, 0.95, 1.0, **rollouts.metrics(groups))
    return run, read_metrics(run.checkpoints.folder / METRICS_FILE)


def test_reward_increases(machine):
    rewards = [entry["reward"] for entry in train(machine, model_of(), 25)[1]]
    assert sum(rewards[:4]) / 4 < 0.85
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


def test_same_seed_trains_identically(machine):
    (_, a), (_, b), (_, c) = (train(machine, model_of(), 3, seed) for seed in (0, 0, 1))
    names = ("reward", "loss", "grad_norm", "answer_tokens")
    assert [[x[n] for n in names] for x in a] == [[x[n] for n in names] for x in b]
    assert [x["reward"] for x in a] != [x["reward"] for x in c]


def test_R13_non_finite_step_keeps_all_weights(machine):
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    model.head.weight.register_hook(lambda g: g * math.inf)
    run, _ = train(machine, model, 1)
    assert run.progress.bad_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_B1_step_without_targets_changes_nothing(machine, monkeypatch):
    """All answers of a step can have the same reward."""
    monkeypatch.setitem(globals(), "batches_of", lambda groups, rows: [])
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    run, [entry] = train(machine, model, 1)
    assert entry["loss"] == entry["grad_norm"] == 0.0 and run.progress.bad_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def loader_of(machine, task=None, questions=None, seed=0, model=None, **changed):
    cfg = replace(CFG, **changed)
    task = task or LowTokens()
    model = model or model_of()
    engine = Engine(inference_copy(model), TOKENIZER, slots=16)
    questions = range(len(task)) if questions is None else questions
    return Rollouts(task, questions, cfg, seed, machine, model, engine)


def numbers(loader, step):
    return [loader.question(draw) for draw in loader.draws(step)]


def test_each_epoch_uses_every_question_once_in_new_order(machine):
    loader = loader_of(machine, seed=3, examples_per_step=5)
    epochs = [[i for step in (s, s + 1) for i in numbers(loader, step)] for s in (0, 2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1] == shuffle_indices(10, "3-1-0")


def test_questions_are_split_among_ranks_or_rejected(machine):
    first, second = (type(machine)(r, r, 2, machine.device, machine.dtype) for r in (0, 1))
    one, two = loader_of(first), loader_of(second)
    assert sorted([*one.draws(3), *two.draws(3)]) == list(loader_of(machine).draws(3))
    with pytest.raises(ValueError, match="5 is not a multiple of the world size 2"):
        loader_of(first, examples_per_step=5)


def test_length_penalty_lowers_reward_of_longer_answers(machine):
    answers = [answer([1], ids) for ids in ([65], [200, 65, 65, 65], [65, 65, 65])]
    brief = loader_of(machine, length_penalty=0.6)
    assert [loader_of(machine).reward(1, a) for a in answers] == [1.0, 0.0, 1.0]
    assert [brief.reward(1, a) for a in answers] == pytest.approx([0.9, -0.4, 0.7])


def test_only_selected_questions_are_used(machine):
    loader = loader_of(machine, questions=[3, 7, 8, 9], examples_per_step=2)
    assert sorted(i for step in (0, 1) for i in numbers(loader, step)) == [3, 7, 8, 9]
    with pytest.raises(ValueError, match="no question"):
        loader_of(machine, questions=[])


def test_questions_without_signal_are_resampled(machine):
    loader = loader_of(machine, num_samples=3, examples_per_step=10, resample_zero_signal=2)
    groups = loader.roll_out(0)
    learned = loader.resample(0, groups)
    silent = [n for n, group in enumerate(groups) if not group.has_signal]
    assert 1 < len(silent) < 10
    still = [n for n, group in enumerate(learned) if not group.has_signal]
    assert set(still) < set(silent)
    for n in range(10):
        assert n in silent or learned[n] is groups[n]
    again = loader.resample(0, groups)  # deterministic
    assert [g.rewards for g in again] == [g.rewards for g in learned]
    assert loader_of(machine, num_samples=3).resample(0, groups) == groups


def test_mean_rewards_are_those_of_the_first_rollouts(machine):
    loader = loader_of(machine)
    found = loader.mean_rewards(2)
    groups = [group for step in (0, 1) for group in loader.roll_out(step)]
    assert found == [sum(group.rewards) / 6 for group in groups]
    assert len(set(found)) > 1


class High(LowTokens):
    """Rewards the opposite of LowTokens."""

    def __getitem__(self, i):
        return [{"role": "user", "content": f"h{i}"}, {"role": "assistant", "content": "a"}]

    def score(self, conversation, answer):
        assert conversation[0]["content"].startswith("h")
        return 1 - super().score(conversation, answer)


def test_mixture_items_are_scored_by_their_own_task(machine):
    tasks = Mixture([LowTokens(), High()])
    loader = loader_of(machine, tasks)
    low = [type(tasks.locate(i)[0]) is LowTokens for i in range(20)]
    assert sorted(low) == [False] * 10 + [True] * 10
    assert [loader.reward(i, answer([1], [65])) for i in range(20)] == low


@pytest.mark.parametrize(
    "bad",
    [
        {"num_samples": 1},
        {"temperature": 0.0},
        {"examples_per_step": 0},
        {"resample_zero_signal": -1},
    ],
)
def test_error_names_invalid_setting(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RLConfig(**bad)
