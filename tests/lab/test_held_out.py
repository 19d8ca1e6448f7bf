"""Access to final benchmarks is denied by default and always logged."""

import random
from dataclasses import replace

import pytest

from nanochat.common import UsageError
from nanochat.lab import held_out
from nanochat.mixture import MixConfig, Tags
from scripts.lab import hold_out
from scripts.lab.hold_out import HoldOut
from tasks.base import ChoiceTask, MCQuestion, QuestionTask, assistant, user
from tasks.buckets import TAGS
from tasks.overlap import overlaps
from tasks.registry import TASKS


def test_final_benchmark_needs_permission_and_is_logged():
    held_out.require_access(["ARC-Easy"], False, {})  # dev benchmark
    held_out.declare({"ARC-Easy": "arc", "HumanEval": "humaneval"})
    held_out.require_access(["MMLU"], False, {})
    for name in ("ARC-Easy", "arc_easy"):  # in any spelling
        with pytest.raises(UsageError, match=f"{name} is final(.|\n)*or pass --final"):
            held_out.require_access(["MMLU", name], False, {})
    assert held_out.read_access_log() == []
    held_out.require_access(["MMLU", "ARC-Easy"], True, {"checkpoint": "x", "section": "y"})
    [entry] = held_out.read_access_log()
    assert (entry["benchmark"], entry["checkpoint"]) == ("ARC-Easy", "x")
    assert held_out.access_table()["rows"][0][1:] == ["ARC-Easy", "x", "y"]


def test_declaring_final_is_permanent():
    held_out.declare({"KMMLU": "kmmlu"})
    held_out.declare({"GSM8K": "gsm8k"})
    assert held_out.final_benchmarks() == {"KMMLU": "kmmlu", "GSM8K": "gsm8k"}


def test_bucket_related_to_a_final_benchmark_is_rejected():
    held_out.declare({"ARC-Challenge": "arc", "HRM8K": "gsm8k+math"})
    held_out.reject_contaminated({"aqua": Tags(parent="aqua"), "mine": Tags()})
    with pytest.raises(UsageError, match="is made from arc, as is final benchmark ARC-Challenge"):
        held_out.reject_contaminated({"arc_easy": Tags(parent="arc")})
    with pytest.raises(UsageError, match="is made from chat\\+GSM8K, as is final benchmark HRM8K"):
        held_out.reject_contaminated({"mix": Tags(parent="chat+GSM8K")})
    held_out.reject_contaminated({"mix": Tags(parent="gsm8k", waived="hrm8k")})
    with pytest.raises(UsageError, match='declare the bucket with "waived": "HRM8K"'):
        held_out.reject_contaminated({"mix": Tags(parent="gsm8k", waived="ARC-Challenge")})


def test_ledger_knows_aliases_and_other_forms_of_a_benchmark(command):
    command.works("lab.hold_out", "--final=gpqa|kmmlu|KMMLU-Pro|LCB")
    assert all(map(held_out.is_final, ["GPQA Diamond", "gpqa", "LiveCodeBench", "lcb", "KMMLU"]))
    assert held_out.is_final("KMMLU-Redux") and held_out.is_final("kmmlu_redux_10")
    assert not held_out.is_final("HAE-RAE Bench")
    waived = Tags(parent="gpqa", waived="GPQA Diamond")
    held_out.reject_contaminated({"mine": waived})
    with pytest.raises(UsageError, match="is made from kmmlu.kmmlu-pro, as is final .* KMMLU-Pro"):
        others = "KMMLU+KMMLU-Redux+KMMLU-Redux-10"
        held_out.reject_contaminated({"styles": replace(TAGS["kmmlu"], waived=others)})


def flips(path, count):
    """Flip a random bit of a file before each of `count` yields; then restore the file."""
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(count):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        yield
    path.write_bytes(whole)


def test_R29_every_bit_flip_in_the_access_log_is_detected(base):
    held_out.declare({"ARC-Easy": "arc"})
    for name in "abc":
        held_out.require_access(["ARC-Easy"], True, {"checkpoint": name})
    ledger = base / held_out.ACCESS_LOG
    for _ in flips(ledger, 100):
        damaged = []
        left = held_out.read_access_log(damaged)
        assert len(left) < 3 and f"{ledger}, line " in damaged[0]
    assert [entry["checkpoint"] for entry in held_out.read_access_log()] == ["a", "b", "c"]


def test_R29_damaged_final_list_blocks_evaluation(base):
    held_out.declare({"ARC-Easy": "arc"})
    for _ in flips(base / held_out.FILE, 100):
        with pytest.raises(
            UsageError, match="held_out.json.* is damaged(.|\n)*scripts.lab.hold_out"
        ):
            held_out.require_access(["ARC-Easy"], False, {})
    assert held_out.is_final("arc_easy")


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


def test_short_questions_are_matched_whole():
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


def test_derived_final_benchmarks_are_not_scanned_twice(monkeypatch):
    hold_out.main(HoldOut(final="arc_easy|AQUA-Letter"))
    scanned = []
    monkeypatch.setattr(hold_out, "eval_task", lambda name: scanned.append(name) or name)
    monkeypatch.setattr(hold_out, "buckets", lambda *spec: [])
    monkeypatch.setattr(hold_out, "overlaps", lambda train, tests: [])
    hold_out.scan(HoldOut(mix=MixConfig(mixture="identity")))
    assert len(set(scanned)) == len(scanned) and {"arc_easy", "aqua"} <= set(scanned)
    assert not {"arc_easy_10", "aqua_letter"} & set(scanned)


def test_script_declares_and_lists_final_benchmarks(capsys):
    hold_out.main(HoldOut(final="kmmlu|HumanEval"))
    out = capsys.readouterr().out
    assert "final: KMMLU, made from kmmlu" in out and "final: HumanEval, made from humaneval" in out
    assert "Access to final benchmarks" in out


def test_evaluation_skips_final_tasks_without_the_flag():
    every, said = {key: TASKS[key].name for key in ("arc_easy", "gsm8k", "spelling")}, []
    assert held_out.select_tasks(None, every, False, said.append) == list(every)
    hold_out.main(HoldOut(final="arc_easy|spelling"))
    assert held_out.select_tasks(None, every, False, said.append) == ["gsm8k"]
    assert said == ["skipping final benchmarks: arc_easy, spelling; --final evaluates them"]
    assert held_out.select_tasks(None, every, True, said.append) == list(every)
    # a named task is rejected instead of skipped, before any evaluation
    named = held_out.select_tasks("ARC-Easy|GSM8K", every, False, said.append)
    with pytest.raises(UsageError, match="ARC-Easy is final"):
        held_out.require_access(named, False, {})


def test_other_formats_of_a_final_benchmark_are_final_too(capsys):
    hold_out.main(HoldOut(final="arc_easy|AQUA-Letter"))
    for name in ("ARC-Easy-10", "arc_easy", "AQUA", "aqua_letter"):
        assert held_out.is_final(name), name
    assert not held_out.is_final("ARC-Challenge-10")


@pytest.mark.parametrize("name", ["smoltalk", "jsonl"])
def test_unscored_task_cannot_be_final(name):
    with pytest.raises(ValueError, match=f"'{name}' is not scored"):
        hold_out.main(HoldOut(final=name))


def test_question_is_found_with_and_without_its_options():
    class Choice(QuestionTask):
        name, splits, baseline = "Choice", ("test",), 0.25
        texts = ("Which sort of tree is it that grows?", "Which tree is it now?")

        def __init__(self):
            super().__init__("test")

        def __len__(self):
            return len(self.texts)

        def question(self, i):
            return MCQuestion(self.texts[i], ("oak", "elm", "ash", "fir"), 0)

    held = Choice()
    rendered = Asked(*(message["content"] for message in (held[0][0], held[1][0])))
    [found] = overlaps([rendered], [held])
    assert found.shared == () and set(found.whole) == {0, 1}
    alone = Asked(*Choice.texts)
    [found] = overlaps([alone], [held])
    assert found.whole == (0,)  # the other one is too short to match reliably


@pytest.mark.parametrize(("num_options", "shared", "whole"), [(2, (), (0,)), (6, (0,), ())])
def test_item_is_counted_once(num_options, shared, whole):
    class Choice(QuestionTask):
        name, splits, baseline = "Choice", ("test",), 0.25

        def __init__(self):
            super().__init__("test")

        def __len__(self):
            return 1

        def question(self, i):
            options = ("oak", "elm", "ash", "fir", "yew", "bay")[:num_options]
            return MCQuestion("Which sort of tree is it that grows?", options, 0)

    [found] = overlaps([Choice()], [Choice()])
    assert (found.shared, found.whole) == (shared, whole)
