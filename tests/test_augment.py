"""Augmented questions: correct answers survive new formats, orders and extra options."""

import pytest

from tasks.augment import BM25, STYLES, MoreOptions, Reordered, Styled, read_letter
from tasks.base import LETTERS, MCQuestion, QuestionTask
from tasks.buckets import buckets
from tasks.gsm8k import GSM8K

ANIMALS = "cat dog horse mouse whale eagle salmon frog spider beetle".split()


class Animals(QuestionTask):
    """Three kinds of questions about ten animals."""

    name, splits, baseline = "Animals", ("train", "test"), 0.25

    def __len__(self):
        return 30

    def question(self, i):
        right = ANIMALS[i % 10]
        others = [ANIMALS[(i + n) % 10] for n in (1, 2, 3)]
        about = ("eats grass", "lives in water", "has many legs")[i // 10]
        options = [*others[: i % 4], right, *others[i % 4 :]]
        return MCQuestion(f"Which animal number {i} {about}?", tuple(options), i % 4)


TASK = Animals("train")


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        (Reordered(TASK), {4}),
        (MoreOptions(TASK, most=8, exactly=True), {8}),
        (MoreOptions(TASK), {4, 5, 6, 7, 8, 9, 10}),
    ],
)
def test_right_option_survives_new_orders_and_options(task, sizes):
    questions = [task.question(i) for i in range(30)]
    for i, now in enumerate(questions):
        was = TASK.question(i)
        assert now.options[now.right] == was.options[was.right] and task.question(i) == now
        assert set(was.options) <= set(now.options) and len(set(now.options)) == len(now.options)
    assert {len(question.options) for question in questions} == sizes
    assert len({question.right for question in questions}) >= 4
    assert task.identity != TASK.identity


def test_every_style_is_parsed_and_scored():
    found = Styled(TASK)
    for i in range(30):
        asked, answer = (message["content"] for message in found[i])
        letter = LETTERS[TASK.question(i).right]
        assert asked.endswith(found.style(i).instruction) and read_letter(answer) == letter
        assert sum(style.instruction in asked for style in STYLES) == 1  # no second instruction
        for style in STYLES:  # any format is accepted
            assert found.score(found[i], style.form.format(letter)) == 1
            assert found.score(found[i], style.form.format("Z")) == 0
    assert {found.style(i) for i in range(30)} == set(STYLES)
    assert read_letter("A, or maybe (B) or Option C is correct") is read_letter("no idea") is None


def test_extra_options_come_only_from_training_questions():
    questions, _ = MoreOptions(Animals("test"), exactly=True).corpus
    assert questions == [TASK.question(i) for i in range(30)]


def test_bm25_ranks_by_shared_rare_words():
    index = BM25(["the cat sat", "the dog sat", "the whale sang a long long song", "cat and dog"])
    assert index.search("a whale song", 1) == [2]
    assert index.search("the cat", 2)[0] == 0
    assert index.search("nothing here", 3) == []
    assert BM25(["same words"] * 5).search("same", 3) == [0, 1, 2]
    assert BM25([]).search("a", 3) == []


def test_augmented_bucket_has_its_tag_and_needs_letters():
    declared = {"arc-styles": {"task": "arc_easy", "augment": "styles"}}
    [bucket] = buckets("arc-styles=20", declared)
    assert bucket.name == "arc-styles" and bucket.tags.augmented == "styles"
    with pytest.raises(ValueError, match="augment 'x' is not one of styles, order, options"):
        buckets("y", {"y": {"task": "arc_easy", "augment": "x"}})
    with pytest.raises(ValueError, match="GSM8K is not answered with a letter"):
        Reordered(GSM8K("train"))
