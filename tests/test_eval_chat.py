"""Chat evaluation: scores equal a plain computation, at any batch size and number of ranks."""

from statistics import mean

import pytest
import torch

from nanochat import sandbox
from nanochat.chat_format import render_prompt
from nanochat.common import UsageError, read_json
from nanochat.dist import DistConfig
from nanochat.engine import Sampling
from scripts import chat_eval
from tasks.base import LaterTurns
from tasks.registry import eval_task
from tasks.world.task import WorldFacts, WorldProblems
from tests.hub_server import hub_served
from tests.test_eval_core import save_model
from tests.training_runs import all_ranks

NAMES = ("World-Choice", "World-Facts", "World-Problems", "World-Spelling")


@pytest.fixture
def evaluate(base):
    """Function that evaluates a random SFT model; returns the record."""

    def run(**settings) -> dict:
        dist = DistConfig("cpu", "float32")
        cfg = {"max_problems": 4, "sampling": Sampling(4, 0.0), **settings}
        chat_eval.main(chat_eval.ChatEval(dist=dist, **cfg))
        written = (base / "report").glob("chat-evaluation-sft*.json")
        return read_json(max(written, key=lambda path: path.stat().st_mtime_ns))

    return run


def test_scored_letter_matches_a_plain_forward_pass(evaluate):
    model, tokenizer = save_model("sft", "embedded", context=100)
    record = evaluate(task_name="World-Choice", max_problems=24)
    task, scores, truncated = eval_task("World-Choice"), [], 0
    letters = [tokenizer.encode(letter)[0] for letter in "ABCD"]
    for i in range(24):
        ids = render_prompt(tokenizer, task[i])
        truncated += len(ids) > 99
        logits = model(torch.tensor([ids[:1] + ids[1:][-98:]]))[0, -1, letters]
        scores.append("01"["ABCD"[int(logits.argmax())] == task[i][-1]["content"]])
    assert record["items"]["World-Choice"]["scores"] == " ".join(scores) and "1" in scores
    assert record["values"]["World-Choice truncated prompts"] == truncated > 0


def test_R24_scores_do_not_depend_on_the_number_of_ranks(evaluate, base):
    save_model("sft", "embedded")
    flags = "--max_problems=5 --max_new_tokens=4 --device_type=cpu --dtype=float32".split()
    all_ranks(base, "-m", "scripts.chat_eval", *flags)
    two = read_json(base / "report" / "chat-evaluation-sft.json")
    one = evaluate(max_problems=5)
    assert [(one["items"][n]["scores"], one["values"][n]) for n in NAMES] == [
        (two["items"][n]["scores"], two["values"][n]) for n in NAMES
    ]


def test_generation_scores_and_pass_rates_at_any_batch_size(evaluate, monkeypatch):
    save_model("sft", "embedded")
    monkeypatch.setattr(WorldFacts, "score", lambda task, asked, answer: answer[:1].isalpha())
    flags = {"task_name": "World-Facts", "sampling": Sampling(4, 1.0, top_k=None, seed=5)}
    few, many = (evaluate(**flags, max_problems=11, num_samples=4, batch_size=n) for n in (2, 64))
    items, values = few["items"]["World-Facts"], few["values"]
    assert items["scores"] == many["items"]["World-Facts"]["scores"]
    rates = [float(x) for x in items["scores"].split()]
    assert set(rates) > {0.25} and set(rates) <= {0, 0.25, 0.5, 0.75, 1}
    assert values["World-Facts pass@4"]["value"] == pytest.approx(mean(map(bool, rates)))
    found = values["World-Facts"]
    assert (found["value"], found["n"], found["k"]) == (pytest.approx(mean(rates)), 11, 4)
    again = evaluate(**flags, num_samples=4)  # of other questions, so it replaces the scores
    assert again["values"]["World-Facts"]["n"] == 4
    greedy = evaluate(task_name="World-Facts")
    assert (again["section"], greedy["section"]) == (
        "Chat evaluation sft, 4 answers at temperature 1",
        "Chat evaluation sft",
    )


def test_chatcore_is_the_mean_of_centered_scores_of_one_run(evaluate, word_list):
    save_model("sft", "embedded")
    values = evaluate()["values"]
    chance = dict(zip(NAMES, (0.25, 0, 0, 0.25), strict=True))
    for when in ("", " after 3 turns"):
        scores = {n: values[n + when]["value"] for n in NAMES}
        centered = [(scores[n] - chance[n]) / (1 - chance[n]) for n in NAMES]
        assert values[f"World chat{when}"]["value"] == pytest.approx(mean(centered))
    assert values["World chat"]["n"] == 16
    more = evaluate(task_name="|".join([*NAMES, "world_choice", "SimpleSpelling"]))["values"]
    assert more["World chat"] == values["World chat"] and "SimpleSpelling" in more
    assert "World chat" not in evaluate(task_name="World-Choice", max_problems=3)["values"]


def test_a_complete_evaluation_is_skipped_and_a_part_of_it_completed(evaluate, capsys):
    save_model("sft", "embedded")
    straight = evaluate()
    other = evaluate(task_name="World-Facts", max_problems=3)  # not mixed with other settings
    assert other["values"].keys() == {"World-Facts"}
    evaluate(task_name="World-Facts", batch_size=3)
    capsys.readouterr()
    again = evaluate(skip_if_done=True)
    assert "skipped" not in capsys.readouterr().out
    assert again["values"] == straight["values"] and again["items"] == straight["items"]
    evaluate(skip_if_done=True, unsafe_exec=True, final=True)
    assert "finished already, skipped" in capsys.readouterr().out


def test_later_in_a_chat_the_same_questions_follow_others():
    facts = WorldFacts("test")
    later = LaterTurns(facts, WorldProblems("test"), [3], 9)
    assert len(later) == 9 and later.locate(4) == (facts, 4)
    for i in range(9):
        assert len(later[i]) == 8 and later[i][-2:] == facts[i] and later[i] == later[i]
        assert all("####" in message["content"][-1]["text"] for message in later[i][1:6:2])


def test_S10_humaneval_without_a_sandbox_is_skipped_and_recorded(
    evaluate, base, hub, capsys, monkeypatch, word_list
):
    save_model("sft", "owner/text")
    monkeypatch.setattr(sandbox, "find_problem", lambda: "the kernel has no Landlock")
    with hub_served(hub, monkeypatch) as serve:
        serve()
        for expected in ("humaneval: the sandbox does not work", "finished already, skipped"):
            values = evaluate(skip_if_done=True, max_problems=1)["values"]
            assert expected in capsys.readouterr().out
    assert "HumanEval" not in values and values["ChatCORE"]["n"] == 6
    assert values["ChatCORE without"].startswith("HumanEval: the sandbox does not work")
    assert "ChatCORE without" in (base / "report.md").read_text()
    with pytest.raises(UsageError, match="humaneval cannot be scored here"):
        evaluate(task_name="gsm8k|humaneval")
