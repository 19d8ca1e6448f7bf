"""Tasks of the embedded world: conversations, scores and lengths."""

import re
from collections import Counter
from functools import cache
from itertools import islice

import pytest

from nanochat.chat_format import render
from nanochat.sandbox import calculate
from nanochat.tokenizer import Tokenizer
from tasks.base import Conversation, answer_text, final_number
from tasks.world.corpus import documents
from tasks.world.questions import fact_questions, sentences, strip_article
from tasks.world.suite import suite
from tasks.world.task import WorldChat, WorldChoice, WorldFacts, WorldProblems, WorldSpelling

SCORED = (WorldFacts, WorldChoice, WorldProblems, WorldSpelling)
ROW = 256  # max_seq_len of the CPU profile
MARKS = {"python": "python", "python_output": "output"}


def written(conversation: Conversation) -> str:
    """The last message's content as a completion, with special tokens as text."""
    content = conversation[-1]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    marks = [MARKS.get(part["type"]) for part in parts]
    return "".join(
        f"<|{mark}_start|>{part['text']}<|{mark}_end|>" if mark else part["text"]
        for part, mark in zip(parts, marks, strict=True)
    )


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of the CPU profile, trained on less text."""
    return Tokenizer.train(islice(documents(0, 0, "train"), 2500), 4096)


@pytest.mark.parametrize("task", [*SCORED, WorldChat])
def test_tasks_are_deterministic_and_reject_unknown_splits(task):
    for split in task.splits:
        first, second = task(split), task(split)
        assert list(islice(first, 50)) == list(islice(second, 50))
        assert first.identity == second.identity
        assert first.identity["world"] and first.identity["split"] == split
        with pytest.raises(IndexError):
            first[len(first)]
    with pytest.raises(ValueError, match="no split"):
        task("dev")


@pytest.mark.parametrize("task", SCORED)
def test_splits_share_no_questions(task):
    asked = {s: {str(c[0]) for c in islice(task(s), 2000)} for s in task.splits}
    assert not asked["train"] & (asked["val"] | asked["test"]) and not asked["val"] & asked["test"]
    held_out = [str(c[0]) for c in task("test")]
    assert len(set(held_out)) > 0.9 * len(held_out) and len(held_out) >= 167


@pytest.mark.parametrize("task", SCORED)
def test_reference_scores_1_and_empty_answer_scores_0(task):
    for split in task.splits:
        for conversation in islice(task(split), 300):
            assert task(split).score(conversation, written(conversation)) == 1.0
            assert task(split).score(conversation, "") == 0.0


@pytest.mark.parametrize("split", ["train", "test"])
def test_fact_sentences_score_1_and_rivals_score_0(split):
    task = WorldFacts(split)
    for i, asked in enumerate(fact_questions(split)):
        right, question = asked.question.answer, asked.question.text.lower()
        for sentence in [*sentences(asked.fact, asked.question), right, f"It is {right}!"]:
            assert task.score(task[i], sentence) == 1.0, sentence
        for rival in {r for r in asked.rivals if strip_article(r).lower() not in question}:
            assert task.score(task[i], f"It is {rival}.") == 0.0
            assert task.score(task[i], f"It is {right} or {rival}.") == 0.0
        assert task.score(task[i], f"It is un{strip_article(right)}ish.") == 0.0


@pytest.mark.parametrize("task", [WorldProblems, WorldSpelling])
def test_wrong_or_unmarked_numbers_score_0(task):
    for conversation in islice(task("test"), 100):
        right = final_number(answer_text(conversation[-1]))
        assert right is not None
        for wrong in (f"#### {right + 1}", f"#### {right}1", str(right), f"#### {right} #### 0"):
            assert task("test").score(conversation, wrong) == 0.0
        assert task("test").score(conversation, f"So it is\n#### {right}") == 1.0


def test_questions_that_share_what_they_ask_are_a_cluster():
    problems, letters, facts = WorldProblems("test"), WorldSpelling("test"), WorldFacts("test")
    for task in (problems, letters, facts):
        names = [task.cluster(i) for i in range(len(task))]
        assert 5 < len(set(names)) < 0.6 * len(task)
    for i in range(50):
        call = next(p for p in problems[i][1]["content"] if p["type"] == "python")["text"]
        assert problems.cluster(i) == " ".join(sorted(call.split()))
        assert f"letter {letters.cluster(i)} " in letters[i][0]["content"]


def test_exactly_one_letter_is_right():
    task = WorldChoice("test")
    for i, conversation in enumerate(task):
        question, right = conversation[0]["content"], conversation[-1]["content"]
        assert all(f"={letter}\n" in question for letter in task.letters(i))
        assert sum(task.score(conversation, letter) for letter in task.letters(i)) == 1.0
        assert task.score(conversation, f"{right}<|assistant_end|>") == 1.0
    letters = Counter(conversation[-1]["content"] for conversation in WorldChoice("train"))
    assert set(letters) == set("ABCD") and max(letters.values()) < 1.05 * min(letters.values())


@pytest.mark.parametrize("split", ["train", "test"])
def test_calculator_calls_have_correct_outputs(split):
    calls = 0
    for conversation in islice(WorldProblems(split), 300):
        answer = written(conversation)
        used = re.findall(r"(\S+ . \S+) = <\|python_start\|>(.*?)<\|python_end\|>"
                          r"<\|output_start\|>(\d+)<\|output_end\|>(\d+)", answer)  # fmt: skip
        calls += len(used)
        assert len(used) == answer.count("python_start") > 0
        for shown, call, output, repeated in used:
            assert shown == call and calculate(call) == output == repeated
        assert str(final_number(answer)) == used[-1][2]
    assert calls > 330  # some need two calls


def test_conversations_and_suite_prompts_fit_a_row():
    longest = {}
    for task in (*SCORED, WorldChat):
        lengths = [len(render(tokenizer(), c)[0]) for c in islice(task("train"), 1500)]
        longest[task.name] = (max(lengths), round(sum(lengths) / len(lengths)))
    for task in suite():
        between, items = task["continuation_delimiter"], task["items"]
        texts = [
            f"{item.get('query') or item.get('context') or context}{between}{ending}\n\n"
            for item in items
            for context in item.get("context_options", [""])
            for ending in item.get("choices", [item.get("continuation")])
        ]
        lengths = sorted(len(tokenizer().encode(text)) for text in set(texts))
        most = sum(lengths[-1 - task["num_fewshot"] :])  # the longest examples in one prompt
        longest[task["name"]] = (most, round(sum(lengths) / len(lengths)))
    print(longest)
    assert max(most for most, _ in longest.values()) < ROW, longest
