"""Chat evaluation: scores by logits and by generation are independent of batching."""

import math

import pytest
import torch

from nanochat import sandbox
from nanochat.chat_format import render_prompt
from nanochat.checkpoint import build_model, save_checkpoint, stage_folder
from nanochat.common import UsageError, read_json
from nanochat.distributed import DistConfig, DistContext
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import (
    estimate_score,
    score_by_generation,
    score_by_logits,
    score_items,
    trim,
)
from nanochat.gpt import GPTConfig
from nanochat.lab import held_out
from nanochat.tokenizer import Tokenizer
from scripts import chat_eval
from tasks.registry import eval_task
from tests.conftest import lively
from tests.hub_server import hub_served

TOKENIZER = Tokenizer.train(["what is it"], 265)


class Letters:
    """Questions of different lengths with two to four options; A is always correct."""

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
    """Correct if the answer starts with a letter."""

    def score(self, conversation, answer):
        return float(answer[:1].isalpha())


@pytest.fixture
def model():
    cfg = GPTConfig(265, 2, 32, 4, 2, 8, 64)
    return lively(build_model(cfg, torch.device("cpu"), torch.float32, 1))


def test_scored_letter_matches_a_plain_forward_pass(model, machine):
    task = Letters()
    got, truncated = score_by_logits(model, TOKENIZER, task, len(task), machine)
    long = [i for i in range(len(task)) if len(render_prompt(TOKENIZER, task[i])) > 63]
    assert truncated == len(long)
    for i, scores in enumerate(got):
        ids = trim(render_prompt(TOKENIZER, task[i]), 63)
        logits = model(torch.tensor([ids]))[0, -1]
        letters = task.letters(i)
        best = max(letters, key=lambda letter: logits[TOKENIZER.encode(letter)[0]])
        assert scores == [float(best == "A")]
    assert {s for scores in got for s in scores} == {0.0, 1.0}


def test_generation_scores_do_not_depend_on_slots(model, machine):
    task, settings = Echo(), Sampling(8, temperature=1.0, top_k=None, seed=5)
    few = score_by_generation(Engine(model, TOKENIZER, slots=2), task, 11, settings, 4, machine)
    many = score_by_generation(Engine(model, TOKENIZER, slots=64), task, 11, settings, 4, machine)
    assert few == many and all(len(scores) == 4 for scores in few.outcomes)
    assert 0 < sum(map(sum, few.outcomes)) < 44


def test_items_are_split_among_ranks_and_kept_in_order():
    class Rank(DistContext):
        def gather(self, value):
            return [{i: [float(i)] for i in range(r, 10, 3)} for r in range(3)]

        def sum(self, *values):
            return [3 * value for value in values]

    for rank in range(3):
        machine = Rank(rank, rank, 3, torch.device("cpu"), torch.float32)
        got = score_items(
            Echo(), 10, TOKENIZER, 2, lambda items, prompts: [[float(i)] for i in items], machine
        )
        assert got.outcomes == [[float(i)] for i in range(10)]
        assert got.num_truncated == 3 * len(range(rank, 10, 3))  # every prompt is too long


def test_R31_answer_scoring_is_reported_as_work(machine, active_work):
    names = []

    def score(items, prompts):
        names.extend(active_work)
        return [[1.0] for _ in items]

    score_items(Echo(), 10, TOKENIZER, 2, score, machine)
    assert names == ["scoring 10 of 10 items"]


def test_long_prompt_keeps_its_bos_and_its_end():
    assert trim([9, 1, 2, 3], 8) == [9, 1, 2, 3]
    assert trim([9, 1, 2, 3, 4, 5], 4) == [9, 3, 4, 5]


def test_multi_token_letter_is_rejected(model, machine):
    class Greek(Letters):
        def letters(self, i):
            return ("A", "\u03b2")

    with pytest.raises(ValueError):
        score_by_logits(model, TOKENIZER, Greek(), 1, machine)


# ------------------------------------------------------------------------------------------------
# The script


def save_model(dataset: str) -> None:
    """Save an untrained model as an SFT checkpoint whose base model was trained on `dataset`."""
    tokenizer = Tokenizer.train(["ABCDE what is the answer 1 2 3 4"], 280)
    cfg = GPTConfig(280, 2, 32, 4, 2, 8, 192)
    model = lively(build_model(cfg, torch.device("cpu"), torch.float32, 0))
    state = {
        "stage": "sft",
        "source": {"dataset": dataset},
        "provenance": {"run_id": "run-1", "seed": 0, "inputs": {"tokenizer": "t"}},
    }
    save_checkpoint(stage_folder("sft") / "d2", 5, model, None, tokenizer, state, keep=9)


def evaluate(**settings) -> None:
    machine = DistConfig(device_type="cpu", dtype="float32")
    cfg = {"max_problems": 4, "sampling": Sampling(4, 0.0), **settings}
    chat_eval.main(chat_eval.ChatEval(machine=machine, **cfg))


def test_aborted_evaluation_resumes_with_the_next_task(base, tmp_path, capsys, monkeypatch):
    save_model("embedded")
    path = base / "report" / "chat-evaluation-sft.json"
    evaluate(max_problems=3)  # other settings, so these scores are not reused

    def abort_at(engine, task, *rest):
        if task.name == "World-Problems":
            raise OSError("no space left on device")
        return score_by_generation(engine, task, *rest)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(chat_eval, "score_by_generation", abort_at)
        evaluate(skip_if_done=True)
    values = read_json(path)["values"]
    kept = {name: values[name] for name in ("World-Choice", "World-Facts")}
    assert all(value["n"] == 4 for value in kept.values()) and values["World-Problems"]["n"] == 3

    capsys.readouterr()
    evaluate(skip_if_done=True)
    logged = capsys.readouterr().out
    assert "World-Problems" in logged and "World-Spelling" in logged
    assert "World-Choice" not in logged and "World-Facts" not in logged
    evaluate(skip_if_done=True)
    assert "finished already, skipped" in capsys.readouterr().out
    evaluate(report_dir=str(tmp_path / "straight"))
    straight = read_json(tmp_path / "straight" / path.name)
    assert read_json(path)["values"] == straight["values"] and "ChatCORE" in straight["values"]
    assert read_json(path)["items"] == straight["items"]


def recorded(base) -> dict:
    return read_json(base / "report" / "chat-evaluation-sft.json")["values"]


def test_chatcore_is_deleted_when_a_task_is_scored_again(base, capsys):
    save_model("embedded")
    evaluate()
    values = recorded(base)
    assert values["ChatCORE"]["n"] == 16
    names = ("World-Choice", "World-Facts", "World-Problems", "World-Spelling")
    chance = {name: eval_task(name).baseline for name in names}
    assert chance["World-Choice"] == 0.25 and chance["World-Facts"] == 0
    centered = [(values[n]["value"] - chance[n]) / (1 - chance[n]) for n in names]
    assert values["ChatCORE"]["value"] == pytest.approx(sum(centered) / 4)
    assert "ChatCORE deleted" not in capsys.readouterr().out
    evaluate(task_name="World-Choice", max_problems=3)
    assert not any("ChatCORE" in name for name in recorded(base))
    assert "ChatCORE deleted" in capsys.readouterr().out
    evaluate(max_problems=3, skip_if_done=True)
    assert recorded(base)["ChatCORE"]["n"] == 12


def test_sampling_settings_are_recorded_with_generated_answers(base):
    save_model("embedded")
    hows = []
    for temperature in (0.0, 1.0):
        evaluate(task_name="World-Facts|World-Choice", sampling=Sampling(4, temperature))
        items = read_json(base / "report" / "chat-evaluation-sft.json")["items"]
        assert "how" not in items["World-Choice"]
        hows.append(items["World-Facts"]["how"])
    assert hows[0] != hows[1]


def test_pass_rates_of_more_answers_are_deleted_when_a_task_is_scored_again(base):
    save_model("embedded")
    task = {"task_name": "World-Facts|World-Problems", "max_problems": 3}
    evaluate(**task, num_samples=4, sampling=Sampling(4, 1.0))
    evaluate(task_name="World-Facts", max_problems=3, num_samples=2, sampling=Sampling(4, 1.0))
    names = [name for name in recorded(base) if " pass@" in name]
    assert names == ["World-Facts pass@2", "World-Problems pass@2", "World-Problems pass@4"]
    evaluate(**task)
    assert not [name for name in recorded(base) if " pass@" in name]


def test_chatcore_counts_each_default_task_once(base, word_list):
    save_model("embedded")
    evaluate()
    expected = recorded(base)["ChatCORE"]
    names = "World-Choice|World-Facts|World-Problems|World-Spelling"
    evaluate(task_name=f"{names}|world_choice|SimpleSpelling")
    assert recorded(base)["ChatCORE"] == expected and "SimpleSpelling" in recorded(base)


def test_chatcore_without_final_benchmarks_says_so(base, capsys):
    save_model("embedded")
    held_out.declare({"World-Facts": "world"})
    evaluate()
    values = recorded(base)
    assert "World-Facts" not in values and values["ChatCORE"]["n"] == 12
    assert values["ChatCORE without"] == "World-Facts: final benchmark"
    evaluate(skip_if_done=True)
    assert "finished already, skipped" in capsys.readouterr().out
    evaluate(task_name="World-Facts", final=True)  # is not in the recorded mean
    assert recorded(base)["ChatCORE"] == values["ChatCORE"]
    held_out.declare(dict.fromkeys(("World-Choice", "World-Problems", "World-Spelling"), "world"))
    evaluate(skip_if_done=True)
    assert "finished already, skipped" in capsys.readouterr().out


def test_without_a_sandbox_humaneval_is_skipped_and_recorded(
    base, hub, capsys, monkeypatch, word_list
):
    save_model("owner/text")
    monkeypatch.setattr(sandbox, "LAYERS", ())
    with hub_served(hub, monkeypatch) as serve:
        serve()
        for expected in ("skipping humaneval: no sandbox works", "skipped"):
            evaluate(skip_if_done=True, max_problems=1)
            assert expected in capsys.readouterr().out
    values = read_json(base / "report" / "chat-evaluation-sft.json")["values"]
    assert "HumanEval" not in values and values["ChatCORE"]
    assert values["ChatCORE without"].startswith("HumanEval: no sandbox works")
    assert "ChatCORE without" in (base / "report.md").read_text()
    with pytest.raises(UsageError, match="humaneval cannot be scored here"):
        evaluate(task_name="gsm8k|humaneval")


def test_standard_error_of_a_score_counts_clusters():
    answers = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    alone, pairs, one = (estimate_score(answers, list(x), True) for x in ("abcd", "aabb", "aaaa"))
    assert alone["se"] < pairs["se"] and math.isnan(one["se"]) and math.isnan(one["item_se"])
    assert alone["repeat_se"] == pairs["repeat_se"] == one["repeat_se"] > 0
