"""Scores of tasks: the same alone and in company, by letters and by writing."""

import pytest
import torch

from nanochat.chat_format import render_prompt
from nanochat.engine import Engine
from nanochat.eval_chat import by_letters, by_writing, fit, gathered
from nanochat.gpt import GPTConfig, build_model
from nanochat.machine import Machine
from nanochat.sampling import Sampling
from nanochat.tokenizer import Tokenizer
from tests.conftest import lively

TOKENIZER = Tokenizer.train(["what is it"], 265)


class Letters:
    """Questions of different lengths with two to four options; every answer is right for A."""

    def __len__(self):
        return 11

    def __getitem__(self, i):
        return [
            {"role": "user", "content": "q" * (1 + 3 * i)},
            {"role": "assistant", "content": "A"},
        ]

    def letters(self, i):
        return tuple("ABCD"[: 2 + i % 3])

    def locate(self, i):
        return self, i

    def score(self, conversation, answer):
        return float(answer == "A")


class Echo(Letters):
    """Right when the answer begins with a letter."""

    def score(self, conversation, answer):
        return float(answer[:1].isalpha())


@pytest.fixture
def model():
    cfg = GPTConfig(265, 2, 32, 4, 2, 8, 64)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, 0))


def test_the_likeliest_letter_is_that_of_a_plain_forward_pass(model, machine):
    task = Letters()
    got, cropped = by_letters(model, TOKENIZER, task, len(task), machine)
    long = [i for i in range(len(task)) if len(render_prompt(TOKENIZER, task[i])) > 63]
    assert cropped == len(long)
    for i, scores in enumerate(got):
        ids = fit(render_prompt(TOKENIZER, task[i]), 63)
        logits = model(torch.tensor([ids]))[0, -1]
        letters = task.letters(i)
        best = max(letters, key=lambda letter: logits[TOKENIZER.encode(letter)[0]])
        assert scores == [float(best == "A")]
    assert {s for scores in got for s in scores} == {0.0, 1.0}


def test_what_is_written_scores_the_same_for_any_number_of_slots(model, machine):
    task, settings = Echo(), Sampling(8, temperature=1.0, top_k=None, seed=5)
    few = by_writing(Engine(model, TOKENIZER, slots=2), task, 11, settings, 4, machine)
    many = by_writing(Engine(model, TOKENIZER, slots=64), task, 11, settings, 4, machine)
    assert few == many and all(len(scores) == 4 for scores in few.outcomes)
    assert 0 < sum(map(sum, few.outcomes)) < 44


def test_ranks_share_the_items_and_put_them_in_order():
    class Rank(Machine):
        def gather(self, value):
            return [{i: [float(i)] for i in range(r, 10, 3)} for r in range(3)]

        def sum(self, *values):
            return [3 * value for value in values]

    for rank in range(3):
        machine = Rank(rank, rank, 3, torch.device("cpu"), torch.float32)
        got = gathered(
            Echo(), 10, TOKENIZER, 2, lambda items, prompts: [[float(i)] for i in items], machine
        )
        assert got.outcomes == [[float(i)] for i in range(10)]
        assert got.num_cropped == 3 * len(range(rank, 10, 3))  # each is longer


def test_a_prompt_that_is_too_long_keeps_its_bos_and_its_end():
    assert fit([9, 1, 2, 3], 8) == [9, 1, 2, 3]
    assert fit([9, 1, 2, 3, 4, 5], 4) == [9, 3, 4, 5]


def test_a_letter_of_several_tokens_is_refused(model, machine):
    class Greek(Letters):
        def letters(self, i):
            return ("A", "\u03b2")

    with pytest.raises(ValueError, match="2 tokens"):
        by_letters(model, TOKENIZER, Greek(), 1, machine)
