"""Held-out discipline: final benchmarks are refused, looked at by name only, and written down."""

import pytest

from nanochat import held_out
from nanochat.common import Refused
from scripts import hold_out
from scripts.chat_eval import ChatEval, chosen
from scripts.hold_out import HoldOut
from tasks.base import ChoiceTask, assistant, user
from tasks.overlap import overlaps


def test_a_final_benchmark_is_refused_unless_it_is_allowed_and_every_access_is_written_down():
    held_out.require_access(["ARC-Easy"], False, {})  # dev: nobody minds
    held_out.declare({"ARC-Easy": "arc", "HumanEval": "humaneval"})
    held_out.require_access(["MMLU"], False, {})
    for name in ("ARC-Easy", "arc_easy"):  # under any spelling
        with pytest.raises(Refused, match=f"{name} is final(.|\n)*--final looks at it"):
            held_out.require_access(["MMLU", name], False, {})
    assert held_out.accesses() == []
    held_out.require_access(["MMLU", "ARC-Easy"], True, {"checkpoint": "x", "section": "y"})
    [entry] = held_out.accesses()
    assert (entry["benchmark"], entry["checkpoint"]) == ("ARC-Easy", "x")
    assert held_out.access_table()["rows"][0][1:] == ["ARC-Easy", "x", "y"]


def test_what_is_final_stays_final_and_keeps_its_date():
    held_out.declare({"KMMLU": "kmmlu"})
    first = held_out.read_json(held_out.base_dir() / held_out.FILE)["since"]["KMMLU"]
    held_out.declare({"GSM8K": "gsm8k"})
    found = held_out.read_json(held_out.base_dir() / held_out.FILE)
    assert set(found["final"]) == {"KMMLU", "GSM8K"} and found["since"]["KMMLU"] == first


def test_a_bucket_of_the_family_of_a_final_benchmark_is_refused_unless_waived():
    held_out.declare({"ARC-Challenge": "arc"})
    held_out.require_other_families({"gsm8k": "gsm8k", "mine": ""})
    with pytest.raises(Refused, match="is made of arc, as is ARC-Challenge, which is final"):
        held_out.require_other_families({"arc_easy": "arc"})
    held_out.require_other_families({"arc_easy": "arc"}, ["arc"])


class Asked(ChoiceTask):
    name = "Asked"
    splits = ("test", "train")

    def __init__(self, *questions):
        super().__init__("test")
        self.questions = questions

    def __len__(self):
        return len(self.questions)

    def conversation(self, i):
        return [user(self.questions[i]), assistant("A")]

    def material(self, i):
        return self.questions[i]


def test_short_questions_are_looked_for_as_a_whole():
    long = " ".join(f"w{i}" for i in range(20))
    held = Asked("what is the capital of France", long, "too short", "a b c d e f g h i j k l")
    train = Asked(
        "Tell me: WHAT is the capital of France?",
        "x " + " ".join(f"w{i}" for i in range(3, 17)) + " y",
        "too short",
        "a b c d e f g h i j k x l",
    )
    [found] = overlaps([train], [held])
    assert (found.items, found.checked) == (4, 3)
    assert found.shared == (1,) and found.whole == (0,)


def test_the_script_declares_shows_and_scans(capsys):
    hold_out.main(HoldOut(final="kmmlu|HumanEval"))
    out = capsys.readouterr().out
    assert "final: KMMLU, made of kmmlu" in out and "final: HumanEval, made of humaneval" in out
    assert "Access to final benchmarks" in out


def test_the_chat_evaluation_leaves_final_tasks_out_unless_they_are_asked_for(machine, capsys):
    every = ["arc_easy", "gsm8k"]
    assert chosen(ChatEval(), every, machine) == every
    held_out.declare({"ARC-Easy": "arc"})
    assert chosen(ChatEval(), every, machine) == ["gsm8k"]
    assert "left out, being final: arc_easy; --final looks at them" in capsys.readouterr().out
    assert chosen(ChatEval(final=True), every, machine) == every
    # by name it is not left out but refused, before anything is asked
    named = chosen(ChatEval(task_name="ARC-Easy|GSM8K"), every, machine)
    with pytest.raises(Refused, match="ARC-Easy is final"):
        held_out.require_access(named, False, {})
