"""The embedded world's tasks: held out by construction, right answers right, wrong ones wrong."""

import re
from collections import Counter

import pytest

from nanochat import world
from nanochat.tools import calculate
from nanochat.world_suite import suite
from nanochat.world_talk import conversation
from nanochat.world_tasks import fact_questions, letter_count
from tasks.base import answer_text
from tasks.embedded import WorldChat, WorldChoice, WorldFacts, WorldProblems, WorldSpelling

SCORED = (WorldFacts, WorldChoice, WorldProblems, WorldSpelling)
MARKS = {"python": "python", "python_output": "output"}


def written(message) -> str:
    """What an assistant that answers like this writes, special tokens by their names."""
    if isinstance(message["content"], str):
        return message["content"]
    return "".join(
        part["text"]
        if part["type"] == "text"
        else f"<|{MARKS[part['type']]}_start|>{part['text']}<|{MARKS[part['type']]}_end|>"
        for part in message["content"]
    )


@pytest.fixture(scope="module")
def asked_in_training() -> set[str]:
    """The questions in three shards of training documents and 2,000 training conversations."""
    texts = [text for shard in range(3) for text in world.documents(0, shard, "train")]
    texts += [text for i in range(2000) for turn in conversation("train", i) for text in turn]
    return {question for text in texts for question in re.findall(r"[A-Z][^?.!\n:\"]*\?", text)}


@pytest.mark.parametrize("task", [*SCORED, WorldChat])
def test_a_task_is_the_same_every_time(task):
    split = task.splits[-1]
    assert [task(split)[i] for i in range(50)] == [task(split)[i] for i in range(50)]
    assert task(split).identity == task(split).identity != task("train").identity
    assert len({str(c) for c in task("train")}) > (200 if task is WorldFacts else 2000)


@pytest.mark.parametrize("task", SCORED)
def test_the_right_answer_scores_and_that_of_another_question_does_not(task):
    asked = task("test")
    others = 0
    for i in range(150):
        right, wrong = asked[i], asked[i + 150]
        assert asked.score(right, written(right[-1])) == 1.0
        assert asked.score(right, "") == 0.0
        if answer_text(right[-1]) != answer_text(wrong[-1]):
            others += asked.score(right, written(wrong[-1]))
    assert others < 60  # another question may have the same number or name for an answer


@pytest.mark.parametrize("split", ["val", "test"])
def test_no_held_out_question_is_asked_in_training(split, asked_in_training):
    assert sum(a.question.text in asked_in_training for a in fact_questions("train")) > 500
    for asked in fact_questions(split):
        assert asked.question.text not in asked_in_training
    held = {str(c[0]) for task in SCORED for c in task(split)}
    trained = {str(c[0]) for task in SCORED for c in task("train")}
    assert not held & trained


def test_every_call_of_the_calculator_has_its_answer():
    calls = 0
    for i in range(300):
        parts = WorldProblems("train")[i][-1]["content"]
        for call, output in zip(parts, parts[1:], strict=False):
            if call["type"] == "python":
                calls += 1
                assert calculate(call["text"]) == output["text"]
    assert calls > 300


def test_letters_are_counted_as_they_are_found():
    for i in range(300):
        asked = letter_count("train", i)
        worked = asked.worked.replace("-", "").split()
        assert [re.sub(r"\d", "", word) for word in worked] == list(asked.words)
        assert asked.count == sum(word.count(asked.letter) for word in asked.words)
    counts = Counter(letter_count("test", i).count for i in range(400))
    assert max(counts.values()) < 2 * min(counts.values())


def test_no_letter_of_the_choices_is_likelier_than_another():
    letters = Counter(answer_text(c[-1]) for c in WorldChoice("test"))
    assert set(letters) == set("ABCD")
    assert max(letters.values()) < 1.4 * min(letters.values())


def test_the_suite_has_the_shapes_it_promises_and_no_item_twice():
    for task in suite():
        shapes = {
            "multiple_choice": {"query", "choices", "gold"},
            "schema": {"context_options", "continuation", "gold"},
            "language_modeling": {"context", "continuation"},
        }
        assert len(task["items"]) >= 40, task["name"]
        assert all(set(item) == shapes[task["kind"]] for item in task["items"])
        assert len({str(item) for item in task["items"]}) == len(task["items"])
        options = [item.get("choices") or item.get("context_options") for item in task["items"]]
        if task["kind"] != "language_modeling":
            assert all(len(o) == round(1 / task["random_baseline"]) for o in options)


def test_the_longest_or_shortest_option_is_right_no_more_often_than_chance():
    for task in suite():
        if task["kind"] != "multiple_choice":
            continue
        for pick in (min, max):
            hits = [
                pick(range(len(i["choices"])), key=lambda n, i=i: len(i["choices"][n])) == i["gold"]
                for i in task["items"]
            ]
            chance, n = task["random_baseline"], len(hits)
            assert sum(hits) / n < chance + 4 * (chance * (1 - chance) / n) ** 0.5, task["name"]


def test_what_is_held_out_for_tests_is_never_talked_about():
    with pytest.raises(ValueError, match="test"):
        conversation("test", 0)  # type: ignore
